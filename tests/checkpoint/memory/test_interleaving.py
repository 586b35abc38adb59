"""When chunks of copies go: in their spans, in this iteration or a later one, and as measured.

Moments are those of the work (timekeeping.py), which no machine makes late.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from helpers.linked_ranks import TIMEOUT_S, wait_until
from planaria.checkpoint.memory.chunk_list import ChunkList
from planaria.checkpoint.memory.interleaving import (
    CopyPeers,
    Interleaving,
    SpanUse,
    _AverageIteration,
)
from planaria.core.copies import IdleSpan
from planaria.core.plan import Link
from planaria.errors import AbortedError
from planaria.transport.links import Channel, Tag
from planaria.transport.timekeeping import Timekeeper
from planaria.transport.traffic import Traffic, Use

LINK = Link(0.01, 1000.0)  # A chunk of 90 bytes takes 0.1 s.
CHUNK = 90
CHUNK_S = 0.1


@dataclass
class Wires:
    """What there is of a rank's links: the time, the traffic, and letters to and from others."""

    rank: int = 0
    timekeeper: Timekeeper = field(default_factory=lambda: Timekeeper(60.0))
    traffic: Traffic = field(default_factory=Traffic)
    told: list[tuple[int, Tag, bytes]] = field(default_factory=list)
    letters: dict[tuple[int, Tag], bytes] = field(default_factory=dict)

    def send(self, peer: int, tag: Tag, content: np.ndarray) -> None:
        self.told.append((peer, tag, content.tobytes()))

    def has_any(self, wanted: dict[int, Tag]) -> bool:
        return any(one in self.letters for one in wanted.items())

    def receive(self, peer: int, tag: Tag, *, timeout_s: float) -> np.ndarray:
        assert timeout_s > 0
        return np.frombuffer(self.letters.pop((peer, tag)), dtype=np.uint8)


class Sender:
    """A thread that waits for its chunks' turns, and when they came, since a moment.

    The time of its work stands still from the beginning, so a busy machine makes no chunk late.
    """

    def __init__(self, turns: Interleaving, wires: Wires) -> None:
        self._turns, self._wires = turns, wires
        self._pool = ThreadPoolExecutor(1)
        self._pool.submit(wires.timekeeper.now_s).result(TIMEOUT_S)

    def chunk(self, num_bytes: int = CHUNK) -> "Future[float]":
        return self._pool.submit(self._wait, num_bytes)

    def reach(self, moment_s: float) -> None:
        """The thread's work is at this moment once the chunks before are sent."""
        self._pool.submit(self._wires.timekeeper.reach, moment_s)

    def close(self) -> None:
        self._turns.close()
        self._pool.shutdown()

    def _wait(self, num_bytes: int) -> float:
        self._turns.wait(1, num_bytes)
        return self._wires.timekeeper.now_s()


@pytest.fixture
def wires() -> Wires:
    return Wires()


def interleaving(
    wires: Wires,
    spans: Sequence[IdleSpan],
    *,
    gamma: float | None = 1.0,
    iterations: int = 1000,
    chunks: ChunkList | None = None,
) -> Interleaving:
    return Interleaving(
        wires,  # type: ignore[arg-type]
        CopyPeers([1], [2], is_far=lambda peer: peer != wires.rank),
        link=LINK,
        idle={1: spans} if spans else {},
        use=SpanUse(num_iterations=iterations, gamma=gamma, chunks=chunks),
    )


SPANS = (IdleSpan(0, 0.05, 0.22), IdleSpan(2, 0.0, 0.15), IdleSpan(2, 0.4, 0.05))


@pytest.fixture
def turns(wires: Wires) -> Interleaving:
    """Two chunks fit the first span, one the second, none the third."""
    return interleaving(wires, SPANS)


@pytest.fixture
def sender(turns: Interleaving, wires: Wires) -> Iterator[Sender]:
    found = Sender(turns, wires)
    yield found
    found.close()


def begin(
    turns: Interleaving, wires: Wires, *, iteration: int = 0, must_end: bool = False
) -> float:
    """Begins an iteration; when that was."""
    turns.on_iteration_begin(iteration, must_end=must_end)
    return wires.timekeeper.now_s()


def act(turns: Interleaving, wires: Wires, moment_s: float) -> None:
    """A forward or backward is done then."""
    wires.timekeeper.reach(moment_s)
    turns.on_action_done()


def test_chunks_fill_one_span_after_the_other(
    turns: Interleaving, wires: Wires, sender: Sender
) -> None:
    """One behind the other, and in a later span only what the first has no place for."""
    chunks = [sender.chunk() for _ in range(3)]
    start_s = begin(turns, wires)

    moments_s = [chunk.result(TIMEOUT_S) - start_s for chunk in chunks[:2]]
    assert moments_s == pytest.approx([0.05, 0.05 + CHUNK_S])
    act(turns, wires, start_s + 0.3)
    assert not chunks[2].done()
    act(turns, wires, start_s + 0.4)
    assert chunks[2].result(TIMEOUT_S) == pytest.approx(start_s + 0.4)


def test_what_has_no_place_waits_for_the_next_iteration(
    turns: Interleaving, wires: Wires, sender: Sender
) -> None:
    """And one that must end takes all of it, however long that takes."""
    start_s = begin(turns, wires)
    assert sender.chunk().result(TIMEOUT_S)
    late = [sender.chunk(1000) for _ in range(2)]
    for _ in range(2):
        act(turns, wires, start_s + 0.5)
    assert not late[0].done()

    begin(turns, wires, iteration=1, must_end=True)
    for _ in range(2):
        act(turns, wires, start_s + 1.0)

    first_s = late[0].result(TIMEOUT_S)
    assert first_s == pytest.approx(start_s + 1.4)
    assert late[1].result(TIMEOUT_S) == pytest.approx(first_s + LINK.seconds(1000))


def test_an_iteration_with_place_for_nothing_takes_one_chunk(
    turns: Interleaving, wires: Wires, sender: Sender
) -> None:
    """Else a version would never end."""
    large = [sender.chunk(1000) for _ in range(2)]
    for iteration in range(2):
        start_s = begin(turns, wires, iteration=iteration)
        for _ in range(2):
            act(turns, wires, start_s + 2.0)
        assert large[iteration].result(TIMEOUT_S) == pytest.approx(start_s + 2.4)
    assert large[1].result(TIMEOUT_S) - large[0].result(TIMEOUT_S) >= 2.0


def test_a_version_waits_for_the_next_iteration(
    turns: Interleaving, wires: Wires, sender: Sender
) -> None:
    """What an iteration has left of its last span is not for it."""
    start_s = begin(turns, wires, must_end=True)
    for _ in range(2):
        act(turns, wires, start_s + 0.1)
    turns.hold()
    assert turns._moment_s(1, start_s + 0.1, CHUNK_S) is None
    chunk = sender.chunk()
    wires.timekeeper.reach(start_s + 1.0)
    begin(turns, wires, iteration=1)

    assert chunk.result(TIMEOUT_S) == pytest.approx(start_s + 1.05)


def test_what_all_wait_for_goes_at_once(turns: Interleaving, wires: Wires, sender: Sender) -> None:
    """Even if its spans are behind work that is never done."""
    start_s = begin(turns, wires, must_end=True)
    chunks = [sender.chunk(1000) for _ in range(2)]
    turns.rush()

    assert all(chunk.result(TIMEOUT_S) for chunk in chunks)
    turns.hold()
    assert turns._moment_s(1, start_s + 0.1, CHUNK_S) is None


def test_who_waits_is_freed_at_the_end(turns: Interleaving, sender: Sender) -> None:
    """No iteration begins any more."""
    chunk = sender.chunk()
    turns.close()

    with pytest.raises(AbortedError):
        chunk.result(TIMEOUT_S)


def test_only_a_share_of_a_span_is_used(wires: Wires) -> None:
    """Two chunks fit, and one its half."""
    turns = interleaving(wires, [IdleSpan(0, 0.0, 0.21), IdleSpan(1, 0.0, 9.0)], gamma=0.5)
    sender = Sender(turns, wires)
    chunks = [sender.chunk() for _ in range(2)]
    start_s = begin(turns, wires)

    assert chunks[0].result(TIMEOUT_S) == pytest.approx(start_s)
    act(turns, wires, start_s + 0.3)
    assert chunks[1].result(TIMEOUT_S) == pytest.approx(start_s + 0.3)
    sender.close()


def test_spans_are_found_anew_from_what_is_measured(wires: Wires) -> None:
    """From this rank's way out and the receiver's way in, which it tells; this one tells, too."""
    turns = interleaving(wires, [], gamma=None, iterations=2)
    into = (0.5, 0.7)
    wires.letters[1, Tag(Channel.COPY_USE, 0, 0)] = msgspec.json.encode([into])
    for iteration in range(4):
        start_s = begin(turns, wires, iteration=iteration)
        for peer, is_out, first_s in ((1, True, 0.1), (2, False, 0.3), (0, True, 0.0)):
            tag = Tag(Channel.FORWARD, iteration, 0)
            first_s += start_s + 0.02 * (iteration % 2)
            wires.traffic.note(Use(is_out, peer, tag, first_s, first_s + 0.1))
        wires.timekeeper.reach(start_s + 0.25)
        turns.on_action_done()
        wires.timekeeper.reach(start_s + 1.0)

    ((source, tag, content),) = wires.told
    assert (source, tag) == (2, Tag(Channel.COPY_USE, 0, 0))
    assert msgspec.json.decode(content) == [pytest.approx([0.31, 0.41])]
    lasts_s = [span.lasts_s for span in turns.spans(1)]
    assert [span.after for span in turns.spans(1)] == [0, 0, 1]
    assert lasts_s == pytest.approx([0.11, 0.29, 0.3])
    assert turns.gamma == pytest.approx(1.0 - 2.0 * 0.01 * 3 / 0.7)


def test_a_message_of_the_next_iteration_is_not_of_this_one(wires: Wires) -> None:
    """A peer that is ahead sends it before this rank begins."""
    turns = interleaving(wires, [], iterations=2)
    for iteration in range(4):
        start_s = begin(turns, wires, iteration=iteration)
        tag = Tag(Channel.FORWARD, iteration + 1, 0)
        wires.timekeeper.reach(start_s + 1.0)
        wires.traffic.note(Use(False, 2, tag, start_s + 0.9, start_s + 0.95))

    ((_, _, content),) = wires.told
    assert msgspec.json.decode(content) == [pytest.approx([-0.1, -0.05])]


def test_nothing_is_measured_of_the_first_iteration(wires: Wires) -> None:
    """Its caches are cold."""
    turns = interleaving(wires, [], iterations=1)
    begin(turns, wires)
    begin(turns, wires, iteration=1)
    assert not wires.told

    begin(turns, wires, iteration=2)
    assert len(wires.told) == 1


def test_a_thread_that_waits_is_told_of_what_is_done(
    turns: Interleaving, wires: Wires, sender: Sender
) -> None:
    """It does not look again and again."""
    chunk = sender.chunk()
    wait_until(lambda: bool(getattr(turns._changed, "_waiters")))  # noqa: B009
    begin(turns, wires)

    assert chunk.result(TIMEOUT_S)


def test_chunks_go_when_nothing_is_done_for_some_iterations(
    turns: Interleaving, wires: Wires, sender: Sender
) -> None:
    """A loop evaluates, or saves to disk: what waits for the next collective would wait in vain."""
    begin(turns, wires)
    for _ in range(2):
        assert sender.chunk().result(TIMEOUT_S) >= 0.0
    late = sender.chunk()
    assert not late.done()
    turns._average = _AverageIteration(out=(), into=(), ends_s=(), iteration_s=0.01, jitter_s=0.0)
    turns.on_action_done()

    assert late.result(TIMEOUT_S) >= 0.0


# -- chunks that are dealt beforehand -------------------------------------------------------------


@pytest.fixture
def dealt(wires: Wires) -> Interleaving:
    """The same spans, of which the third is the last and so takes all the rest."""
    turns = interleaving(wires, SPANS, chunks=ChunkList(LINK))
    turns.hold()
    return turns


@pytest.fixture
def dealt_sender(dealt: Interleaving, wires: Wires) -> Iterator[Sender]:
    found = Sender(dealt, wires)
    yield found
    found.close()


def test_a_list_is_sent_in_the_spans_that_it_names(
    dealt: Interleaving, wires: Wires, dealt_sender: Sender
) -> None:
    """Two chunks in the first, one in the second; two in the last, which has time for none, all in
    one iteration that must not even end with them."""
    dealt.deal([CHUNK] * 5)
    chunks = [dealt_sender.chunk() for _ in range(5)]
    start_s = begin(dealt, wires)

    moments_s = [chunk.result(TIMEOUT_S) - start_s for chunk in chunks[:2]]
    assert moments_s == pytest.approx([0.05, 0.15])
    act(dealt, wires, start_s + 0.3)
    assert not chunks[2].done()
    act(dealt, wires, start_s + 0.4)
    moments_s = [chunk.result(TIMEOUT_S) - start_s for chunk in chunks[2:]]
    assert moments_s == pytest.approx([0.4, 0.8, 0.9])


def test_a_chunk_waits_for_its_span_though_another_has_room(
    dealt: Interleaving, wires: Wires, dealt_sender: Sender
) -> None:
    """It was to be a large one, which only the last span has room for."""
    dealt.deal([1000])
    chunk = dealt_sender.chunk()
    start_s = begin(dealt, wires)
    for _ in range(2):
        act(dealt, wires, start_s + 0.1)

    assert chunk.result(TIMEOUT_S) == pytest.approx(start_s + 0.5)


def test_a_chunk_whose_span_has_passed_goes_at_once(
    dealt: Interleaving, wires: Wires, dealt_sender: Sender
) -> None:
    """Training is in the way now, which the list does not know."""
    dealt.deal([CHUNK] * 2)
    start_s = begin(dealt, wires)
    assert dealt_sender.chunk().result(TIMEOUT_S)
    dealt_sender.reach(start_s + 0.28)

    assert dealt_sender.chunk().result(TIMEOUT_S) == pytest.approx(start_s + 0.28)


def test_what_a_list_has_left_at_the_end_goes_in_the_next_iteration_at_once(
    dealt: Interleaving, wires: Wires, dealt_sender: Sender
) -> None:
    """Its last span has no end."""
    dealt.deal([CHUNK] * 9)
    start_s = begin(dealt, wires)
    for _ in range(2):
        assert dealt_sender.chunk().result(TIMEOUT_S)
    late = [dealt_sender.chunk() for _ in range(2)]
    wires.timekeeper.reach(start_s + 1.0)
    begin(dealt, wires, iteration=1)
    dealt_sender.reach(start_s + 1.0)

    moments_s = [chunk.result(TIMEOUT_S) - start_s for chunk in late]
    assert moments_s[1] - moments_s[0] == pytest.approx(CHUNK_S)
    assert moments_s[1] <= 1.1 + 1e-9


def test_spans_that_have_passed_when_a_list_is_dealt_get_nothing(
    dealt: Interleaving, wires: Wires, dealt_sender: Sender
) -> None:
    """The own copy was not made before; of a span that has begun, its rest is used."""
    start_s = begin(dealt, wires)
    act(dealt, wires, start_s + 0.05)
    wires.timekeeper.reach(start_s + 0.16)
    dealt.deal([CHUNK] * 3)
    dealt_sender.reach(start_s + 0.16)
    chunks = [dealt_sender.chunk() for _ in range(3)]
    act(dealt, wires, start_s + 0.4)

    moments_s = [chunk.result(TIMEOUT_S) - start_s for chunk in chunks]
    assert moments_s == pytest.approx([0.16, 0.4, 0.8])


def test_a_list_keeps_its_spans_until_it_is_dealt_anew(
    dealt: Interleaving, wires: Wires, dealt_sender: Sender
) -> None:
    """Others, and fewer, may be measured while its last chunks are on their way."""
    dealt.deal([1000])
    chunk = dealt_sender.chunk(1000)
    start_s = begin(dealt, wires)
    dealt._average = _AverageIteration(out=(), into=(), ends_s=(), iteration_s=9.0, jitter_s=0.0)
    dealt._set_spans(1, ())
    for _ in range(2):
        act(dealt, wires, start_s + 0.1)

    assert len(dealt.spans(1)) == 1
    assert chunk.result(TIMEOUT_S) == pytest.approx(start_s + 0.5)


def test_a_list_is_dealt_anew_when_spans_are_measured_anew(wires: Wires) -> None:
    """From this rank's own messages, both ways; nobody is told of them."""
    turns = interleaving(wires, [], iterations=2, chunks=ChunkList(LINK))
    sender = Sender(turns, wires)
    for iteration in range(4):
        if iteration == 3:
            turns.hold()
            turns.deal([CHUNK] * 3)
        start_s = begin(turns, wires, iteration=iteration)
        for peer, is_out, first_s in ((1, True, 0.15), (2, False, 0.4)):
            tag = Tag(Channel.FORWARD, iteration, 0)
            wires.traffic.note(Use(is_out, peer, tag, start_s + first_s, start_s + first_s + 0.1))
        if iteration < 3:
            act(turns, wires, start_s + 0.2)
            wires.timekeeper.reach(start_s + 1.0)
    sender.reach(start_s)
    chunks = [sender.chunk() for _ in range(3)]
    act(turns, wires, start_s + 0.2)

    assert not wires.told
    lasts_s = [span.lasts_s for span in turns.spans(1)]
    assert lasts_s == pytest.approx([0.15, 0.15, 0.5])
    moments_s = [chunk.result(TIMEOUT_S) - start_s for chunk in chunks]
    assert moments_s == pytest.approx([0.0, 0.25, 0.5])
    sender.close()
