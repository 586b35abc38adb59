"""What a machine has no room for is refused before anything starts."""

import re

import pytest

from helpers.command import PACED
from helpers.strategies import equal_problem
from planaria.core.copies import BUFFER_BYTES_MIN
from planaria.core.specs import Prepared
from planaria.errors import ConfigError
from planaria.job.config import load_job
from planaria.job.planning import Planned, plan_job
from planaria.job.resources import check_memory, copies_bytes

STATE = 6 * 12 * (1 << 20)  # Six layers of 4 MiB of parameters and twice that for the optimizer.


def planned(copies: int, nodes: int = 4, buffer_bytes: int = BUFFER_BYTES_MIN) -> Planned:
    """A job of six equal layers, each node with room for two: two pipelines on four nodes."""
    overrides = [
        f"checkpoint.copies={copies}",
        f"cluster.nodes={nodes}",
        f"checkpoint.buffer_bytes={buffer_bytes}",
        "training.global_batch_size=16",
        "training.microbatch_size=1",
    ]
    profile = equal_problem(device_memory_bytes=200 << 20).profile
    return plan_job(
        load_job(PACED.with_name("small.toml"), overrides=overrides), Prepared(profile=profile)
    )


def test_copies_take_twice_what_is_held_and_twice_the_state_for_each_further_one() -> None:
    """A complete version and one on its way; and buffers."""
    one, three = planned(1), planned(3)
    num_held = sum(len(held) for held in one.plan.held_by_rank.values())

    assert copies_bytes(planned(0)) == 0
    assert copies_bytes(one) == 2 * num_held * STATE // 6
    assert copies_bytes(three) == copies_bytes(one) + 4 * STATE + 2 * 4 * BUFFER_BYTES_MIN
    assert copies_bytes(planned(9)) == copies_bytes(planned(4))


def test_a_machine_without_room_for_copies_refuses_them() -> None:
    """With the figure."""
    job = planned(2)
    needed_bytes = copies_bytes(job)
    check_memory(job, free_bytes=needed_bytes)

    with pytest.raises(ConfigError, match=rf"{needed_bytes:_} bytes of memory") as caught:
        check_memory(job, free_bytes=needed_bytes - 1)
    assert caught.value.field == "checkpoint.copies"
    large = planned(2, buffer_bytes=1 << 40)
    with pytest.raises(ConfigError, match=f"the buffers take {4 << 40:_} of these") as caught:
        check_memory(large, free_bytes=1 << 40)
    assert caught.value.field == "checkpoint.buffer_bytes"


def over_devices(buffer_bytes: int, memory_bytes: int, mode: str = "interleaved") -> Planned:
    """A job of layers whose copies go from device to device."""
    overrides = [
        "checkpoint.copies=2",
        f"checkpoint.buffer_bytes={buffer_bytes}",
        "checkpoint.path=device",
        f"checkpoint.mode={mode}",
        "cluster.nodes=4",
        "training.global_batch_size=16",
        "training.microbatch_size=1",
    ]
    job = load_job(PACED.with_name("small.toml"), overrides=overrides)
    profile = equal_problem(device_memory_bytes=memory_bytes).profile
    return plan_job(job, Prepared(profile=profile))


def test_sub_buffers_take_memory_from_the_plan() -> None:
    """Those that leave and those that arrive; what would do counts them, too."""
    alone = planned(2).templates
    beside = over_devices(50 << 20, (200 << 20) + 2 * (50 << 20))
    assert [template.stages for template in beside.templates.values()] == [
        template.stages for template in alone.values()
    ]
    with pytest.raises(ConfigError, match="values that work") as caught:
        over_devices(90 << 20, 240 << 20)
    (needed,) = re.findall(r"cluster.device_memory_bytes = (\d+) or more", str(caught.value))
    over_devices(90 << 20, int(needed))
    with pytest.raises(ConfigError, match="values that work"):
        over_devices(90 << 20, int(needed) - 1)


def test_sub_buffers_that_leave_nothing_are_refused() -> None:
    """Also those that layers do not fit into."""
    with pytest.raises(ConfigError) as caught:
        over_devices(100 << 20, 200 << 20)
    assert caught.value.field == "checkpoint.buffer_bytes"
    with pytest.raises(ConfigError) as caught:
        over_devices(BUFFER_BYTES_MIN, 200 << 20, mode="naive")
    assert caught.value.field == "checkpoint.mode"
