"""Chunks of copies in the idle spans of an iteration."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from planaria.core.plan import Link
from planaria.placement.interleave import (
    Chunk,
    checkpoint_chunks,
    idle_spans,
    spans_of_chunks,
)

LINK = Link(0.5, 10.0)  # Half a second a chunk, and ten bytes a second.


def sent(
    spans_s: Sequence[float], *, num_bytes: int = 100, num_copies: int = 1, gamma: float = 1.0
) -> tuple[Chunk, ...]:
    return checkpoint_chunks(
        spans_s,
        num_bytes=num_bytes,
        num_copies=num_copies,
        chunk_bytes=20,
        link=LINK,
        gamma=gamma,
    )


def test_spans_are_filled_one_after_the_other() -> None:
    """A chunk of 20 bytes takes 2.5 s: two of them fit the first span, and 5 of 10 bytes more."""
    chunks = sent((6.0, 3.0, 0.0))

    sizes = [(c.span, c.end_byte - c.first_byte, c.after_s) for c in chunks]
    assert sizes == [
        *((0, 20, 0.0), (0, 20, 2.5), (0, 5, 5.0)),
        (1, 20, 0.0),
        *((2, 20, 0.0), (2, 15, 2.5)),
    ]


def test_only_a_share_of_a_span_is_used() -> None:
    """Spans differ from iteration to iteration."""
    assert [c.span for c in sent((6.0, 0.0), gamma=0.5)] == [0, *(1,) * 4]


def test_each_copy_is_sent_whole_before_the_next_one() -> None:
    """One that ends within a span leaves the rest of it to the next."""
    chunks = sent((10.0, 0.0), num_bytes=30, num_copies=2)

    assert [(c.copy, c.first_byte, c.end_byte) for c in chunks] == [
        *((0, 0, 20), (0, 20, 30)),
        *((1, 0, 20), (1, 20, 30)),
    ]


spans = st.lists(st.floats(0.0, 20.0), min_size=1, max_size=12)


@given(spans, st.integers(0, 500), st.integers(0, 3), st.floats(0.1, 1.0))
def test_all_bytes_are_sent_once_in_order_and_in_their_spans(
    spans_s: list[float], num_bytes: int, num_copies: int, gamma: float
) -> None:
    """Of no span but the last more is used than the share; no chunk is larger than a buffer."""
    chunks = sent(spans_s, num_bytes=num_bytes, num_copies=num_copies, gamma=gamma)

    for copy in range(num_copies):
        parts = [(c.first_byte, c.end_byte) for c in chunks if c.copy == copy]
        assert [first for first, _ in parts] == [0, *(end for _, end in parts)][: len(parts)]
        assert sum(end - first for first, end in parts) == num_bytes
    assert [c.span for c in chunks] == sorted(c.span for c in chunks)
    for chunk in chunks:
        size = chunk.end_byte - chunk.first_byte
        assert 0 < size <= 20
        is_last = chunk.span == len(spans_s) - 1
        end_s = chunk.after_s + LINK.seconds(size)
        assert end_s <= (inf if is_last else gamma * spans_s[chunk.span] + 1e-9)


def test_chunks_that_are_cut_already_are_dealt_as_they_are() -> None:
    """None is made smaller to fill up a span, and no later one is dealt to a span before it."""
    assert spans_of_chunks((2.0, 2.0, 2.0, 1.0, 9.0, 9.0), (5.0, 2.5, 1.5, 0.0)) == (
        *(0, 0),
        1,
        2,
        *(3, 3),
    )


@given(st.lists(st.floats(0.1, 5.0), max_size=20), spans)
def test_each_chunk_is_dealt_to_the_first_span_behind_the_others_with_room_for_it(
    chunks_s: list[float], usable_s: list[float]
) -> None:
    """Of each span but the last, the next chunk of the list would not have fitted."""
    dealt = spans_of_chunks(chunks_s, usable_s)

    assert len(dealt) == len(chunks_s)
    assert list(dealt) == sorted(dealt)
    for span, lasts_s in enumerate(usable_s[:-1]):
        inside = [n for n, where in enumerate(dealt) if where == span]
        used_s = sum(chunks_s[n] for n in inside)
        assert used_s <= lasts_s + 1e-9
        beyond = [n for n, where in enumerate(dealt) if where > span]
        assert not beyond or used_s + chunks_s[beyond[0]] > lasts_s - 1e-9


times = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=8)


@given(times)
def test_idle_is_what_nothing_covers(drawn: list[tuple[int, int]]) -> None:
    """By moments between all ends."""
    busy = [(float(start), min(10.0, start + length)) for start, length in drawn]
    found = idle_spans(busy, end_s=10.0)

    edges = sorted({0.0, 10.0, *(end for one in busy for end in one)})
    for low, high in pairwise(edges):
        middle = (low + high) / 2
        is_busy = any(start < middle < end for start, end in busy)
        assert is_busy != any(start < middle < end for start, end in found)
