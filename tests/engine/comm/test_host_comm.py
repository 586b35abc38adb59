"""Tensors over links: what the processor is spared, and the thread that sends for a device."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from helpers.linked_ranks import TIMEOUT_S, in_threads, link_ranks, tag
from planaria.engine.comm.host import HostComm
from planaria.engine.devices import Device, LateDevice, Mark, Pairs
from planaria.transport.links import Buffer, Links, Tag

NUMBERS = torch.arange(6.0)


@contextmanager
def two_comms(device: Device) -> Iterator[tuple[HostComm, HostComm]]:
    """The comm of a rank on the device, and of its peer on a processor."""
    with link_ranks(2) as (left, right):
        comms = HostComm(left, device), HostComm(right, Device())
        yield comms
        for comm in comms:
            comm.abort("the test is over")
            comm.close()


def test_a_processor_sends_from_its_tensors_and_needs_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is copied before the kernel takes it."""
    sent: list[Buffer] = []
    send = Links.send

    def note_send(links: Links, peer: int, tag: Tag, *arrays: Buffer, virtual_bytes: int) -> None:
        sent.extend(arrays)
        send(links, peer, tag, *arrays, virtual_bytes=virtual_bytes)

    monkeypatch.setattr(Links, "send", note_send)
    with two_comms(Device()) as (comm, _):
        comm.send(1, tag(0), NUMBERS, virtual_bytes=0)

        assert NUMBERS.data_ptr() in [array.__array_interface__["data"][0] for array in sent]
        assert "send" not in {thread.name[:4] for thread in threading.enumerate()}


class Gated:
    """A mark that is passed once the gate is open."""

    def __init__(self, mark: Mark, gate: threading.Event) -> None:
        self._mark = mark
        self._gate = gate

    def wait(self) -> None:
        assert self._gate.wait(TIMEOUT_S)
        self._mark.wait()

    def order(self) -> None:
        self._mark.order()


def test_a_send_does_not_wait_until_the_bytes_are_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that computes goes on while the device still copies."""
    device, gate = LateDevice(), threading.Event()
    copy = device.copy

    def copy_slowly(pairs: Pairs) -> Mark:
        return Gated(copy(pairs), gate)

    monkeypatch.setattr(device, "copy", copy_slowly)
    with two_comms(device) as (comm, peer):
        comm.send(1, tag(0), NUMBERS, virtual_bytes=0)
        assert comm._links.sent_bytes.total() == 0
        gate.set()

        assert torch.equal(peer.receive(0, tag(0)), NUMBERS)


def break_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_nothing(*_: object, **__: object) -> None:
        raise RuntimeError("the bus burns")

    monkeypatch.setattr("planaria.engine.comm.host.send_tensor", send_nothing)


def receive_from(comm: HostComm, source: int) -> Tensor:
    return comm.receive(source, tag(7))


def test_an_error_of_the_thread_that_sends_ends_whoever_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer waits for what was not sent, and sends nothing either: both would wait for ever."""
    with two_comms(LateDevice()) as (comm, _), in_threads(lambda: receive_from(comm, 1)) as (one,):
        break_sends(monkeypatch)
        comm.send(1, tag(0), NUMBERS, virtual_bytes=0)
        with pytest.raises(RuntimeError, match="the bus burns"):
            one.result(timeout=TIMEOUT_S)
        with pytest.raises(RuntimeError, match="the bus burns"):
            comm.check()


def test_an_error_that_nobody_has_seen_is_raised_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be a mistake of planaria, for which no peer and no order ends an epoch."""
    with two_comms(LateDevice()) as (comm, _):
        break_sends(monkeypatch)
        comm.send(1, tag(0), NUMBERS, virtual_bytes=0)

        with pytest.raises(RuntimeError, match="the bus burns"):
            comm.close()
        comm._error = None


def test_nothing_is_sent_once_the_comm_is_closed() -> None:
    """By then the links may be in the next epoch, whose peers must not take it for their own."""
    device = LateDevice()
    with two_comms(device) as (comm, _):
        gate = threading.Event()
        assert comm._sender is not None
        comm._sender.submit(gate.wait, TIMEOUT_S)
        comm.send(1, tag(0), NUMBERS, virtual_bytes=0)
        comm.abort("a member is lost")
        with in_threads(comm.close) as (closing,):
            gate.set()
            closing.result(timeout=TIMEOUT_S)

        assert comm._links.sent_bytes.total() == 0
