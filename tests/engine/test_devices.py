"""The table of devices, and what each entry promises about copies."""

from types import SimpleNamespace

import pytest
import torch

from planaria.engine.devices import AUTO, LATE, LateDevice, find_device, usable_bytes
from planaria.errors import ConfigError


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    """The message is all that a user sees who forgot a driver."""
    for kind in ("cudda", "xpu"):
        with pytest.raises(ConfigError, match="the choices are auto, cpu") as refused:
            find_device(kind, rank=0)
        assert refused.value.field == "cluster.device"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_ranks_compute_on_the_processor() -> None:
    """Nothing is copied, and no limit on its memory is known."""
    device = find_device(AUTO, rank=3)

    assert device.is_host
    assert usable_bytes(device, num_ranks=4) == 0


def test_ranks_share_the_memory_of_a_device() -> None:
    """Each gets less than its part, for what no tensor shows."""
    device = find_device(LATE, rank=0)
    device.memory_bytes, device.count = 80 << 30, 2

    for num_ranks, num_sharing in ((1, 1), (2, 1), (3, 2), (6, 3)):
        share = (80 << 30) // num_sharing
        assert 0.8 * share < usable_bytes(device, num_ranks=num_ranks) < share - (1 << 30)
    assert usable_bytes(device, num_ranks=1000) == 0


def test_a_late_copy_is_made_when_it_is_waited_for_and_no_sooner() -> None:
    """A wait makes the copies before it, too, and none after it; each is made once."""
    device = LateDevice()
    targets, sources = torch.zeros(3), torch.ones(3)
    marks = [device.copy([(targets[n], sources[n])]) for n in range(3)]
    assert targets.tolist() == [0, 0, 0]

    marks[1].wait()
    assert targets.tolist() == [1, 1, 0]
    sources.fill_(2.0)
    marks[0].wait()
    assert targets.tolist() == [1, 1, 0]
    marks[2].order()
    assert targets.tolist() == [1, 1, 2]


def test_a_device_that_was_used_before_the_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own error names neither the cause nor what to do."""
    module = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, _is_in_bad_fork=lambda: True
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    with pytest.raises(ConfigError, match="forked from has used a device"):
        find_device("cuda", rank=0)
