"""Machines of different kinds: who measures, what nodes are told, who is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.heads import runs
from helpers.joined_machines import Cluster, cluster
from helpers.tasks import wait_until
from planaria.core.job import DataConfig, JobConfig, ResilienceConfig
from planaria.core.machine_messages import MachineFacts
from planaria.core.plan import LayerProfile, Link, ModelProfile
from planaria.core.specs import NodeSpec, Prepared, PrepareRequest
from planaria.errors import ConfigError, InsufficientError
from planaria.nodes import machine as machine_module
from planaria.nodes.head.remote.kind_speeds import kind_of
from planaria.nodes.machine import EXIT_AGAIN

JOB = JobConfig(data=DataConfig(kind="python", target="module:function"))
REQUEST = PrepareRequest(job=JOB, cache_directory="")
GIB = 1 << 30
LINK = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
FACTS = {
    "fast": MachineFacts(name="fast", host="h", processors=8, memory_bytes=16 * GIB, processor="A"),
    "slow": MachineFacts(
        name="slow",
        host="h",
        processors=2,
        memory_bytes=16 * GIB,
        processor="B",
        devices=("H100", "H100"),
    ),
    "small": MachineFacts(name="small", host="h", processors=8, memory_bytes=GIB, processor="A"),
}


@pytest.fixture(autouse=True)
def _facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is what its domain is called."""
    monkeypatch.setattr(machine_module, "facts_of_this_machine", lambda _, domain: FACTS[domain])


def profile(seconds: float) -> Prepared:
    """Two layers that take so long together."""
    times = {1: seconds / 6.0}
    layer = LayerProfile(
        name="layer",
        forward_s=times,
        backward_input_s=times,
        backward_weight_s=times,
        parameter_bytes=4,
        optimizer_bytes=8,
        activation_bytes=4,
        output_bytes=4,
    )
    return Prepared(
        profile=ModelProfile(
            model="m",
            microbatch_size=1,
            dtype="float32",
            device="cpu",
            device_memory_bytes=0,
            layers=(layer, layer),
            links={"inter_node": LINK, "intra_node": LINK},
        )
    )


def holding(prepared: Prepared, device_memory_bytes: int) -> Prepared:
    """The same facts from devices that hold so much."""
    assert prepared.profile is not None
    return Prepared(profile=replace(prepared.profile, device_memory_bytes=device_memory_bytes))


async def join(made: Cluster, *kinds: tuple[str, float]) -> None:
    """Machines of these kinds come, which take these seconds."""
    for name, seconds in kinds:
        made.join(domain=name, prepared=profile(seconds))
        await made.wait_ready(len(made.ends))


@runs
async def test_the_first_machine_of_each_kind_measures_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("slow", 4.0), ("fast", 1.0), ("slow", 9.0))

        measured = await made.machines.prepare(REQUEST)

    assert measured == {kind_of(FACTS["slow"]): profile(4.0), kind_of(FACTS["fast"]): profile(1.0)}


@runs
async def test_a_head_says_which_machine_measures(tmp_path: Path) -> None:
    """Under load that took 35 s, in which a user saw nothing."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("slow", 4.0))
        await made.machines.prepare(REQUEST)

        assert any("builds the model and measures its layers" in note for note in made.notes)


@runs
async def test_a_head_without_machines_says_what_to_start(tmp_path: Path) -> None:
    async with cluster(tmp_path, JOB) as made:
        with pytest.raises(InsufficientError, match="start planaria agent --join on each"):
            await made.machines.wait_ready(1, timeout_s=0.01)


@runs
async def test_nobody_else_measures_where_a_profile_is_given(tmp_path: Path) -> None:
    """There are no seconds to compare."""
    given = profile(1.0).profile
    request = PrepareRequest(job=JOB, cache_directory="", profile=given)
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("slow", 4.0), ("fast", 1.0))

        measured = await made.machines.prepare(request)
        made.machines.kinds.begin(request, profile(1.0), measured)
        await join(made, ("small", 1.0))

    assert list(measured) == [kind_of(FACTS["slow"])]
    assert made.machines.kinds.speed(FACTS["slow"]) == 1.0


@runs
async def test_nodes_are_told_the_speed_of_their_machine(tmp_path: Path) -> None:
    """Also on a machine of a kind that comes later, which measures before it gets a node."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("fast", 1.0))
        measured = await made.machines.prepare(REQUEST)
        made.machines.kinds.begin(REQUEST, profile(1.0), measured)
        await join(made, ("slow", 4.0))

        for node in range(2):
            spec = NodeSpec(
                job=JOB, node=node, token=b"", coordinator=("", 0), worker="", cache_directory=""
            )
            made.machines.start(spec, is_granted=False)
        await wait_until(lambda: len(made.specs) == 2)

    assert sorted((spec.machine, spec.speed) for spec in made.specs) == [
        ("fast", 1.0),
        ("slow", 0.25),
    ]
    assert "machines with 2 devices 'H100' take 4.00 times as long" in made.notes


@runs
async def test_a_machine_that_is_ready_before_the_job_is_planned_measures_too(
    tmp_path: Path,
) -> None:
    """A machine that came after the others had measured, or came to a head that took a run up,
    counted as one of the fastest kind. Its node got work as if it were."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("fast", 1.0))
        measured = await made.machines.prepare(REQUEST)
        await join(made, ("slow", 4.0))
        made.machines.kinds.begin(REQUEST, profile(1.0), measured)
        made.machines.compare_again()
        assert made.machines.num_ready == 1
        await made.wait_ready(2)

    assert made.machines.kinds.speed(FACTS["slow"]) == 0.25


@runs
async def test_a_machine_that_came_back_with_a_node_measures_once_it_is_free(
    tmp_path: Path,
) -> None:
    """A head that takes a run up knows of no kind. Its next node counted as one of the fastest."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("slow", 4.0))
        spec = NodeSpec(
            job=JOB, node=0, token=b"", coordinator=("", 0), worker="", cache_directory=""
        )
        made.machines.start(spec, is_granted=False)
        kinds = made.machines.kinds
        kinds.begin(REQUEST, profile(1.0), {kind_of(FACTS["fast"]): profile(1.0)})
        made.machines.compare_again()
        assert not made.specs  # The node has not even begun.
        await wait_until(lambda: kinds.is_known(FACTS["slow"]))

    assert kinds.speed(FACTS["slow"]) == 0.25


@runs
async def test_a_machine_that_is_ready_before_the_job_is_planned_needs_as_much_memory(
    tmp_path: Path,
) -> None:
    """Its node ran out of memory."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("fast", 1.0))
        small = made.join(domain="small")
        await made.wait_ready(2)
        made.machines.checks.memory_bytes_min = 8 * GIB
        made.machines.compare_again()

        with pytest.raises(ConfigError, match=r"1_073_741_824 bytes.*8_589_934_592 or more"):
            await small
        assert made.machines.num_ready == 1


@runs
async def test_kinds_that_have_measured_are_not_asked_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("fast", 1.0))
        known = await made.machines.prepare(REQUEST)
        await join(made, ("fast", 9.0), ("slow", 4.0))
        measured = await made.machines.prepare(REQUEST, known)

    assert measured == {**known, kind_of(FACTS["slow"]): profile(4.0)}


@runs
async def test_a_later_machine_that_cannot_measure_is_told_why(tmp_path: Path) -> None:
    mistake = Prepared(mistake=("data.target", '"module:function"', "no such module"))
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("fast", 1.0))
        made.machines.kinds.begin(REQUEST, profile(1.0), await made.machines.prepare(REQUEST))

        with pytest.raises(ConfigError, match=r"could not measure.*data\.target.*no such module"):
            await made.join(domain="slow", prepared=mistake)


@pytest.mark.parametrize("found", [None, Prepared(traceback="CUDA error: an illegal address")])
@runs
async def test_a_later_machine_that_fails_to_measure_may_come_again(
    tmp_path: Path, found: Prepared | None
) -> None:
    """It was refused for good, though memory may be had again, or another device work."""
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("fast", 1.0))
        made.machines.kinds.begin(REQUEST, profile(1.0), await made.machines.prepare(REQUEST))

        assert await made.join(domain="slow", prepared=found) == EXIT_AGAIN
        reason = "the process .* was killed" if found is None else "CUDA error"
        told = f"cannot take part: it could not measure the job's layers: {reason}"
        assert any(re.search(told, note) for note in made.notes)
        made.join(domain="slow", prepared=profile(4.0))
        await made.wait_ready(2)


@runs
async def test_a_machine_with_less_memory_than_planned_is_told_so(tmp_path: Path) -> None:
    async with cluster(tmp_path, JOB) as made:
        made.machines.checks.memory_bytes_min = 8 * GIB
        await join(made, ("fast", 1.0))

        with pytest.raises(ConfigError, match=r"1_073_741_824 bytes.*8_589_934_592 or more"):
            await made.join(domain="small")


@pytest.mark.parametrize(
    ("held", "limit", "is_refused"), [(40, 0, True), (79, 0, False), (0, 0, False), (40, 30, False)]
)
@runs
async def test_a_later_machine_whose_devices_hold_less_than_planned_is_told_so(
    tmp_path: Path, held: int, limit: int, is_refused: bool
) -> None:
    """Its nodes would run out of memory. Devices of one size differ by a little; a limit that the
    job itself has is one for all."""
    limits = replace(JOB.cluster, device_memory_bytes=limit * GIB)
    request = PrepareRequest(job=replace(JOB, cluster=limits), cache_directory="")
    planned, later = (holding(profile(1.0), number * GIB) for number in (80, held))
    async with cluster(tmp_path, JOB) as made:
        await join(made, ("fast", 1.0))
        made.machines.kinds.begin(request, planned, await made.machines.prepare(request))
        if not is_refused:
            made.join(domain="slow", prepared=later)
            await made.wait_ready(2)
            return

        with pytest.raises(ConfigError, match=r"devices hold 40\.0 GiB .* planned for 80\.0 GiB"):
            await made.join(domain="slow", prepared=later)


@pytest.mark.parametrize("guards", [True, False])
@runs
async def test_machines_that_round_in_other_ways_are_warned_of_once(
    tmp_path: Path, guards: bool
) -> None:
    job = replace(JOB, resilience=ResilienceConfig(corruption_guard=guards))
    async with cluster(tmp_path, job) as made:
        await join(made, ("fast", 1.0), ("fast", 1.0))
        assert not any("round" in note for note in made.notes)
        await join(made, ("slow", 1.0), ("slow", 1.0))

    warnings = [note for note in made.notes if "round" in note]
    assert len(warnings) == 2
    assert "slow has device 'H100' and fast has ''" in warnings[1]
    warning = warnings[0]
    assert "slow has processor 'B' and fast has 'A'" in warning
    assert ("corruption_guard = false" in warning) == guards
