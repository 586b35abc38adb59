"""Bytes on the host of tensors on a device that copies as late as it may."""

import numpy as np
import pytest
import torch

from planaria.engine.devices import LateDevice, device_at
from planaria.torchrun.host_bytes import HostBytes
from planaria.torchrun.shards import HEAD


def test_bytes_are_those_of_the_moment_whatever_is_stepped_afterwards() -> None:
    """The step is ordered after the copies; nobody has read them before."""
    host_bytes = HostBytes(LateDevice())
    tensor = torch.arange(4.0)

    state = host_bytes.read({"weight": tensor})
    host_bytes.order()
    tensor.zero_()

    assert not host_bytes.has_views
    assert state["weight"].view("float32").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_without_an_order_the_late_device_would_copy_what_came_later() -> None:
    """Or the test above could not fail."""
    host_bytes = HostBytes(LateDevice())
    tensor = torch.arange(4.0)

    state = host_bytes.read({"weight": tensor})
    tensor.zero_()

    assert state["weight"].view("float32").tolist() == [0.0] * 4


def test_the_next_state_is_another_one_in_the_same_buffers() -> None:
    """Also of tensors whose memory is not in order."""
    host_bytes = HostBytes(LateDevice())
    tensor = torch.arange(6.0).reshape(2, 3).t()
    first = host_bytes.read({"weight": tensor})["weight"]
    before = first.view("float32").tolist()

    host_bytes.order()
    tensor.add_(1.0)
    second = host_bytes.read({"weight": tensor})["weight"]

    assert before == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert second.view("float32").tolist() == [value + 1.0 for value in before]
    assert np.shares_memory(second, first)


def test_tensors_of_another_device_are_copied_at_once() -> None:
    """No stream of this device waits for what another one computes."""
    device = LateDevice()
    device.place = torch.device("cpu", 0)  # That of a tensor is "cpu", as a second one.
    host_bytes = HostBytes(device)
    tensor = torch.arange(4.0)

    state = host_bytes.read({"weight": tensor})
    tensor.zero_()

    assert state["weight"].view("float32").tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("name", "has_views"), [(HEAD, False), ("weight", True)])
def test_a_step_does_not_wait_for_what_nobody_changes(name: str, has_views: bool) -> None:
    """The description of a shard is made for each version, and large where there are many layers;
    a tensor of the host as large might be stepped."""
    device = LateDevice()
    device.place = torch.device("cpu", 0)
    host_bytes = HostBytes(device)

    state = host_bytes.read({name: torch.zeros(1 << 17, dtype=torch.uint8)})

    assert host_bytes.has_views == has_views
    assert len(state[name]) == 1 << 17


@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_tensor_of_another_size_gets_another_buffer(size: int) -> None:
    """A value alone would fill the whole of the old one."""
    host_bytes = HostBytes(LateDevice())
    host_bytes.read({"weight": torch.zeros(4, dtype=torch.uint8)})
    host_bytes.order()

    state = host_bytes.read({"weight": torch.arange(size, dtype=torch.uint8)})

    assert state["weight"].tolist() == list(range(size))


def test_tensors_of_the_host_are_views_for_which_a_step_waits() -> None:
    host_bytes = HostBytes(device_at(torch.device("cpu")))
    tensor = torch.zeros(3)

    state = host_bytes.read({"weight": tensor})
    tensor.fill_(7.0)

    assert host_bytes.has_views
    assert state["weight"].view("float32").tolist() == [7.0] * 3
