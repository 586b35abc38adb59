"""Copies that go from device to device, held against each comm and device.

On the device whose copies come late, a copy is wrong wherever a wait is missing.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import pytest
import torch

from helpers.copying_ranks import (
    COPIES,
    OWN,
    CopyingRank,
    assert_kept,
    copying_rank,
    damage_pieces,
    layer_state,
)
from helpers.fake_groups import Fabric, GlooMaker
from helpers.linked_ranks import TIMEOUT_S, in_threads, is_blocked, link_ranks, wait_until
from planaria.checkpoint.memory.landing import DevicePath, announced_index, announcement
from planaria.checkpoint.memory.stream import TRIES
from planaria.checkpoint.memory.turns import Buffers
from planaria.checkpoint.memory.version import Version
from planaria.core.copies import LayerCopy
from planaria.engine.comm.chunks import ArrivingChunks, LeavingChunks
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.comm.host import HostComm
from planaria.engine.comm.nccl import GroupMaker, NcclComm
from planaria.engine.devices import CopyLane, Device, LateDevice, Mark, Pairs, find_device
from planaria.errors import AbortedError, PeerLostError
from planaria.transport.links import Channel

KINDS = ["host cpu", "host late", "fake late", "gloo cpu"]
if torch.cuda.is_available():
    KINDS.append("host cuda")
KEYS = [(-2, 0, 1), (-2, 0, 2), (-2, 1, 0), (-2, 1, 2)]
SIZE = 60_000
BUFFERS = Buffers(32_000, 4)
ONE_BUFFER = Buffers(5_000, 1)


class GatedDevice(LateDevice):
    """A device whose copies of chunks to the host are under way until its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.num_landing = 0

    def copy(self, pairs: Pairs, lane: CopyLane) -> Mark:
        mark = super().copy(pairs, lane)
        if lane is not CopyLane.CHUNKS_ARRIVING:
            return mark
        self.num_landing += 1
        return GatedMark(mark, self.gate)


@dataclass
class GatedMark:
    """A mark that is passed once a gate is open."""

    mark: Mark
    gate: threading.Event

    def wait(self) -> None:
        assert self.gate.wait(TIMEOUT_S)
        self.mark.wait()

    def order(self) -> None:
        self.mark.order()


@contextmanager
def copying(
    kind: str,
    buffers: Buffers = BUFFERS,
    device_of: Callable[[int], Device] | None = None,
    copies: Sequence[LayerCopy] = COPIES,
) -> Iterator[list[CopyingRank]]:
    """Three ranks that copy from device to device.

    Args:
        device_of: returns the device of a rank; None: that of the kind.
    """
    implementation, place = kind.split()
    makers: dict[str, Callable[[], GroupMaker]] = {"fake": Fabric, "gloo": GlooMaker}
    maker = makers[implementation]() if implementation in makers else None
    with link_ranks(3) as all_links, ExitStack() as stack:
        devices = [
            device_of(links.rank) if device_of else find_device(place, rank=links.rank)
            for links in all_links
        ]
        comms: list[DeviceComm] = []
        for links, device in zip(all_links, devices, strict=True):
            one = HostComm(links, device) if not maker else NcclComm(links, device, KEYS, maker)
            comms.append(one)
        formed = [comm.form for comm in comms if isinstance(comm, NcclComm)] or [lambda: None]
        with in_threads(*formed) as running:
            for each in running:
                each.result(timeout=TIMEOUT_S)
        ranks = []
        for links, comm, device in zip(all_links, comms, devices, strict=True):
            stack.callback(comm.close)
            sender = LeavingChunks(comm, device, buffers)
            rank = copying_rank(
                links,
                abort=comm.abort,
                copies=copies,
                buffers=buffers,
                layer_bytes=SIZE,
                device_path=DevicePath(sender, ArrivingChunks(comm, device, buffers)),
            )
            ranks.append(stack.enter_context(rank))
        stack.callback(abort, ranks, "the test is over")
        yield ranks


def abort(ranks: list[CopyingRank], reason: str) -> None:
    for rank in ranks:
        rank.abort(reason)


@pytest.mark.parametrize("buffers", [BUFFERS, ONE_BUFFER, Buffers(1 << 20, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_kept_where_it_is_to_be(kind: str, buffers: Buffers) -> None:
    """In whatever chunks it comes, version after version, and none of it over the links."""
    with copying(kind, buffers) as ranks:
        for age in (3, 4, 5):
            for rank in ranks:
                rank.begin(age)
            for rank in ranks:
                rank.copier.wait_ended()
                assert not rank.copier.has_failed
                rank.copier.complete()
            assert_kept(ranks, age)

        assert not any(rank.failures for rank in ranks)
        sent_bytes = sum(rank.links.sent_bytes[Channel.COPY] for rank in ranks)
        assert sent_bytes < 3 * 4 * SIZE / 4  # Openings alone.


@pytest.mark.parametrize("kind", ["host late", "fake late"])
def test_a_chunk_that_is_damaged_is_sent_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try of every third one, be it that others follow it or not."""
    damaged = damage_pieces(monkeypatch)
    for buffers in (Buffers(20_000, 4), ONE_BUFFER):
        damaged.clear()
        with copying(kind, buffers) as ranks:
            for rank in ranks:
                rank.begin(2)
            for rank in ranks:
                rank.copier.wait_ended()

            assert len(damaged) > 10
            assert_kept(ranks, 2)


def test_a_device_that_spoils_everything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some tries, as a lost one is."""
    monkeypatch.setattr(Version, "store_piece", lambda *_: False)
    with copying("host late") as ranks:
        for rank in ranks:
            rank.begin(2)
        with pytest.raises(PeerLostError, match=f"layer 2 .* {TRIES} times"):
            ranks[1].copier.wait_ended()

        assert 2 not in ranks[0].arena.versions()


def test_an_error_of_a_chunk_that_lands_ends_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receiver may wait for the next message of the source meanwhile, which never comes."""

    def fail(*_: object) -> bool:
        raise OSError("the memory is gone")

    monkeypatch.setattr(Version, "store_piece", fail)
    with copying("host late", ONE_BUFFER, copies=(LayerCopy(0, 0, (2,)),)) as ranks:
        for rank in ranks:
            rank.begin(2)
        with pytest.raises(OSError, match="is gone"):
            ranks[2].copier.wait_ended()

        assert not ranks[2].kept(2)


def test_a_copy_counts_once_it_is_on_the_host() -> None:
    """Chunks fill all sub-buffers of a device meanwhile, one arrives while another one lands."""
    slow = GatedDevice()
    with copying("fake late", device_of=lambda rank: slow if rank == 2 else LateDevice()) as ranks:
        for rank in ranks:
            rank.begin(3)
        wait_until(lambda: slow.num_landing == BUFFERS.count)
        wait_until(is_blocked(ranks[0].copier._threads[0]))
        ranks[1].copier.wait_ended()  # It has what it is to keep, and what it sends is kept.
        assert not ranks[2].copier.has_ended
        assert not ranks[0].copier.has_ended
        assert not ranks[2].kept(3)
        assert slow.num_landing == BUFFERS.count

        slow.gate.set()
        for rank in ranks:
            rank.copier.wait_ended()
        assert_kept(ranks, 3)


def test_a_layer_may_change_while_its_chunks_wait() -> None:
    """Training waits for the own copy only."""
    slow = GatedDevice()
    with copying("host late", device_of=lambda rank: slow if rank == 2 else LateDevice()) as ranks:
        states = {layer: layer_state(layer, 7, SIZE) for layer in OWN[0]}
        for rank in ranks[1:]:
            rank.begin(7)
        ranks[0].copier.begin(7, states)
        for layer, arrays in states.items():
            ranks[0].copier.wait_copied(layer)
            arrays["parameter/weight"][:] = 0
        assert not ranks[0].copier.has_ended
        slow.gate.set()
        for rank in ranks:
            rank.copier.wait_ended()

        assert_kept(ranks, 7)


@pytest.mark.parametrize("kind", ["host late", "fake late"])
def test_the_end_of_the_epoch_ends_chunks_under_way(kind: str) -> None:
    """A device gives one up late; what comes then is not written, and nobody waits for it."""
    slow = GatedDevice()
    stored: list[int] = []
    with copying(kind, device_of=lambda rank: slow if rank == 2 else LateDevice()) as ranks:
        for rank in ranks:
            rank.begin(1)
        wait_until(lambda: slow.num_landing >= BUFFERS.count)
        landings = ranks[2].copier._receiver._landings
        assert landings is not None
        abort(ranks, "a member is lost")
        for rank in (ranks[0], ranks[2]):
            with pytest.raises(AbortedError):
                rank.copier.wait_ended()
        for rank in ranks:
            rank.copier.close()
        assert landings._thread.is_alive()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Version, "store_piece", lambda _, index, *__: stored.append(index))
            slow.gate.set()
            landings._thread.join(TIMEOUT_S)

        assert not landings._thread.is_alive()
        assert not stored
        assert not ranks[2].kept(1)


@pytest.mark.parametrize(("buffers", "num_announced"), [(Buffers(1 << 20, 2), 1), (ONE_BUFFER, 2)])
@pytest.mark.parametrize("kind", ["host late", "fake late"])
def test_the_end_of_the_epoch_frees_who_waits_for_a_device(
    kind: str, buffers: Buffers, num_announced: int
) -> None:
    """Rank 2 waits for no message: all of a layer lands, or another chunk takes the only buffer."""
    slow = GatedDevice()
    copies = (LayerCopy(0, 0, (2,)), LayerCopy(2, 1, (2,)))
    with copying(
        kind,
        buffers,
        device_of=lambda rank: slow if rank == 2 else LateDevice(),
        copies=copies,
    ) as ranks:
        for rank in ranks:
            rank.begin(1)
        receiver = ranks[2].copier._receiver
        landings = receiver._landings
        assert landings is not None
        wait_until(
            lambda: (
                landings._num_in_flight.total() == 1
                and receiver._num_announced.total() == num_announced
            )
        )
        abort(ranks, "a member is lost")
        with pytest.raises(AbortedError):
            ranks[2].copier.wait_ended()

        assert not slow.gate.is_set()
        slow.gate.set()


@pytest.mark.parametrize("kind", ["host late", "fake late"])
def test_a_receiver_that_dies_in_mid_chunk_ends_the_epoch_of_its_source(kind: str) -> None:
    """And nothing else: what its source has kept before is whole."""
    slow = GatedDevice()
    with copying(kind, device_of=lambda rank: slow if rank == 2 else LateDevice()) as ranks:
        slow.gate.set()
        for rank in ranks:
            rank.begin(1)
        for rank in ranks:
            rank.copier.wait_ended()
            rank.copier.complete()
        slow.gate.clear()
        num_landed = slow.num_landing
        for rank in ranks:
            rank.begin(2)
        wait_until(lambda: slow.num_landing > num_landed)
        ranks[2].links.close()
        with pytest.raises(PeerLostError) as lost:
            ranks[0].copier.wait_ended()
        slow.gate.set()

        assert lost.value.rank == 2
        assert_kept(ranks, 1)


def test_a_chunk_is_received_while_the_one_before_lands() -> None:
    """On a GPU that takes two streams: what is on one stream comes one after the other."""
    purposes: set[str] = set()
    lanes: set[str] = set()

    class Recording(LateDevice):
        def beside(self, purpose: str) -> AbstractContextManager[object]:
            purposes.add(purpose)
            return super().beside(purpose)

        def copy(self, pairs: Pairs, lane: CopyLane) -> Mark:
            lanes.add(lane.value)
            return super().copy(pairs, lane)

    with copying("host late", device_of=lambda _: Recording()) as ranks:
        for rank in ranks:
            rank.begin(1)
        for rank in ranks:
            rank.copier.wait_ended()

    assert len(purposes) == len(lanes) == 2
    assert not purposes & {lane.value for lane in CopyLane}


def test_an_announcement_that_is_damaged_is_no_other_one() -> None:
    """The chunk that it announces has a size that nobody knows."""
    message = announcement(5)
    assert announced_index(0, message, num_pieces=6) == 5
    with pytest.raises(PeerLostError):
        announced_index(0, message, num_pieces=5)
    for position in range(len(message)):
        damaged = message.copy()
        damaged[position] ^= 1
        with pytest.raises(PeerLostError):
            announced_index(0, damaged, num_pieces=6)
    with pytest.raises(PeerLostError):
        announced_index(0, message[:3], num_pieces=6)
