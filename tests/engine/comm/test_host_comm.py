"""Tensors over links: what the processor is spared, and the thread that sends for a device."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.linked_ranks import TIMEOUT_S, in_threads, link_ranks, tag, wait_until
from planaria.engine.comm.device_comm import HEAD_BYTES
from planaria.engine.comm.host import HostComm
from planaria.engine.comm.pieces import (
    ArrivingPieces,
    LeavingSums,
    piece_tag,
    pieces_on_host,
    send_pieces,
)
from planaria.engine.devices import CopyLane, Device, LateDevice, Mark, Pairs
from planaria.errors import AbortedError
from planaria.transport.links import Buffer, Channel, Links, Tag

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


def slow_device(gate: threading.Event) -> LateDevice:
    """A device whose copies are made once the gate is open."""
    device = LateDevice()
    copy = device.copy
    device.copy = lambda pairs, lane: Gated(copy(pairs, lane), gate)  # type: ignore[method-assign]
    return device


def test_a_send_does_not_wait_until_the_bytes_are_on_the_host() -> None:
    """The thread that computes goes on while the device still copies."""
    gate = threading.Event()
    with two_comms(slow_device(gate)) as (comm, peer):
        comm.send(1, tag(0), NUMBERS, virtual_bytes=0)
        assert comm._links.sent_bytes.total() == HEAD_BYTES
        gate.set()

        assert torch.equal(peer.receive(0, tag(0)), NUMBERS)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (40, 3)])
def test_a_device_and_a_processor_exchange_tensors(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sends in pieces, the other at once; each takes what comes."""
    monkeypatch.setattr("planaria.engine.comm.pieces.PIECE_BYTES", 96)
    with two_comms(LateDevice()) as comms:
        for rank, comm in enumerate(comms):
            comm.send(1 - rank, tag(rank), torch.full(shape, rank + 0.5), virtual_bytes=0)
        for rank, comm in enumerate(comms):
            arrived = comm.receive(1 - rank, tag(1 - rank))
            assert torch.equal(arrived, torch.full(shape, 1 - rank + 0.5))

        sums = [torch.full((300,), 0.25 + rank, dtype=torch.float64) for rank in range(2)]
        totals = [torch.empty(300) for _ in range(2)]
        with in_threads(
            *(partial(sum_of_two, *each) for each in zip(comms, sums, totals, strict=True))
        ) as running:
            for one in running:
                one.result(timeout=TIMEOUT_S)
        assert all(torch.equal(total, torch.full((300,), 1.5)) for total in totals)


def sum_of_two(comm: HostComm, sums: Tensor, total: Tensor) -> None:
    comm.sum_over((0, 1), [sums], [total], iteration=0, bucket=0, virtual_bytes=0)


def test_what_is_awaited_arrives_where_the_device_copies_it_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing copies the pieces on the host once their memory was offered."""
    monkeypatch.setattr("planaria.engine.comm.pieces.PIECE_BYTES", 8)
    device, is_offered, offered = LateDevice(), threading.Event(), list[int]()
    copied: list[int] = []
    copy, offer_memory = device.copy, Links.offer_memory

    def note_offer(links: Links, peer: int, tag: Tag, memory: Buffer) -> None:
        offer_memory(links, peer, tag, memory)
        offered.append(memory.__array_interface__["data"][0])
        if len(offered) == NUMBERS.nbytes // 8:
            is_offered.set()

    def note_copy(pairs: Pairs, lane: CopyLane) -> Mark:
        copied.extend(source.data_ptr() for _, source in pairs)
        return copy(pairs, lane)

    monkeypatch.setattr(Links, "offer_memory", note_offer)
    with link_ranks(2) as (left, right):
        sender, receiver = HostComm(left, slow_device(is_offered)), HostComm(right, device)
        monkeypatch.setattr(device, "copy", note_copy)
        sender.send(1, tag(0), NUMBERS, virtual_bytes=0)
        assert torch.equal(receiver.receive(0, tag(0)), NUMBERS)
        sender.close()
        receiver.close()

    assert copied == offered


class CountingDevice(LateDevice):
    """A device that counts the tensors that would be pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_pinned = 0

    def host_like(self, tensor: Tensor) -> Tensor:
        self.num_pinned += 1
        return super().host_like(tensor)


def test_few_pieces_of_a_sum_are_pinned_while_links_have_not_sent_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them are as much as the gradients, beside cluster.pinned_memory_bytes."""
    monkeypatch.setattr("planaria.engine.comm.pieces.PIECE_BYTES", 8)
    device, sums = CountingDevice(), torch.arange(200.0)
    leaving = LeavingSums(device)
    pieces = leaving.pieces([sums[:50], sums[50:]])
    unsent = [next(pieces).wait()]
    num_begun = device.num_pinned
    unsent += [piece.wait() for piece in pieces]
    num_pinned = device.num_pinned
    arrived = np.concatenate([array.view(np.float32) for arrays in unsent for array in arrays])
    unsent.clear()
    num_pieces = sum(len(piece.wait()) for piece in leaving.pieces([sums]))

    assert num_begun < num_pinned < num_pieces == 100
    assert np.array_equal(arrived, sums.numpy())
    assert device.num_pinned == num_pinned + num_pieces


def test_memory_is_pinned_for_few_pieces_that_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """More is offered while they come; what came too early for that is copied."""
    monkeypatch.setattr("planaria.engine.comm.pieces.PIECE_BYTES", 8)
    device, sent, target = CountingDevice(), torch.arange(200.0), torch.empty(200)
    with link_ranks(2) as (left, right):
        arriving = ArrivingPieces(left, 1, tag(0), [target], device=device)
        num_offered = device.num_pinned
        send_pieces(right, 0, tag(0), pieces_on_host(device, sent))
        for mark in arriving.begin_fill(timeout_s=TIMEOUT_S):
            mark.wait()

    assert 0 < num_offered < 50
    assert torch.equal(target, sent)


def break_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_nothing(*_: object, **__: object) -> None:
        raise RuntimeError("the bus burns")

    monkeypatch.setattr("planaria.engine.comm.host.send_pieces", send_nothing)


def receive_from(comm: HostComm, source: int) -> None:
    comm.receive(source, tag(7))


def test_an_error_of_the_thread_that_sends_ends_whoever_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer waits for what was not sent, and sends nothing either: both would wait for ever."""
    with (
        two_comms(LateDevice()) as (comm, _),
        in_threads(
            lambda: receive_from(comm, 1),
            lambda: sum_of_two(comm, NUMBERS.clone(), NUMBERS.clone()),
        ) as running,
    ):
        wait_until(lambda: comm._links.sent_bytes[Channel.SCATTER] > 0)
        break_sends(monkeypatch)
        comm.send(1, tag(0), NUMBERS, virtual_bytes=0)
        for one in running:
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

        assert comm._links.sent_bytes.total() == HEAD_BYTES


def test_a_sum_that_fails_leaves_nothing_that_is_written_to_the_sums_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next epoch clears them and adds to them; what comes after that is in no gradient."""
    monkeypatch.setattr("planaria.engine.comm.pieces.PIECE_BYTES", 8)
    device = LateDevice()
    sums = NUMBERS.clone()
    with link_ranks(2) as (left, right):
        comm = HostComm(left, device)
        with in_threads(lambda: sum_of_two(comm, sums, sums)) as (one,):
            scatter, gather = Tag(Channel.SCATTER, 0, 0), Tag(Channel.GATHER, 0, 0)
            right.send(0, scatter, NUMBERS[:3].numpy())
            right.send(0, gather, NUMBERS[3:5].numpy())  # The last of its sums never comes.
            right.receive(0, piece_tag(gather, 1), timeout_s=TIMEOUT_S)
            comm.abort("a member is lost")
            with pytest.raises(AbortedError):
                one.result(timeout=TIMEOUT_S)
        sums.zero_()
        device.copy([], CopyLane.ARRIVING).wait()
        comm.close()

    assert torch.equal(sums, torch.zeros(6))


def test_what_arrives_waits_for_nothing_that_is_computed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is of the stream that it arrives on; the stream that computes takes it over."""
    device, stream = LateDevice(), [""]
    seen: list[tuple[str, str]] = []

    @contextmanager
    def beside(purpose: str) -> Iterator[None]:
        stream[:] = [purpose]
        yield
        stream[:] = [""]

    def note(what: str) -> Callable[..., object]:
        real = getattr(device, what)

        def call(*arguments: Any, **others: Any) -> object:
            seen.append((what, stream[0]))
            return real(*arguments, **others)

        return call

    with link_ranks(2) as (left, right):
        own, peer = HostComm(left, device), HostComm(right, LateDevice())
        peer.send(0, tag(0), NUMBERS, virtual_bytes=0)
        monkeypatch.setattr(device, "beside", beside)
        monkeypatch.setattr(device, "copy", note("copy"))
        monkeypatch.setattr(device, "adopt", note("adopt"))
        assert torch.equal(own.receive(1, tag(0)), NUMBERS)
        own.close()
        peer.close()

    assert seen == [("copy", "arrive"), ("adopt", "")]
