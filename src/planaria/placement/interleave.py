"""When chunks of copies are sent: in the spans of an iteration in which the network is idle.

The bytes that a node sends to its copy holders are cut into chunks that fill one idle span after
the other. A chunk is as large as one buffer of the receiver, or smaller if the rest of its span has
no time for that. Only a share `gamma` of each span is used, because spans differ from iteration to
iteration. The last span has no end: it takes what fits nowhere else, and so makes the iteration
longer.

Source: Gemini (SOSP '23), sections 5.2 to 5.4. Our copy of the paper lacks the listing of algorithm
2; it is reconstructed from the paper's text, which describes it.
Differs: no chunk of a few bytes is cut to fill up a span; it would cost a latency for nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from planaria.core.copies import IdleSpan
from planaria.core.plan import Link

Interval = tuple[float, float]

PREDICTED_GAMMA: Final = 0.9  # The share that is used of spans that are not measured yet.

_HALVINGS: Final = 6
_LEAST_SHARE: Final = 1 / 16  # No chunk but a copy's last is a smaller share of a buffer.


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a copy.

    Attributes:
        span: index of the idle span in which it is sent.
        copy: index of the copy holder to which it is sent.
        first_byte: its first byte in the state, counted in the order of sending.
        end_byte: the byte after its last one, counted likewise.
        after_s: seconds from the start of the span until it is sent.
    """

    span: int
    copy: int
    first_byte: int
    end_byte: int
    after_s: float


def checkpoint_chunks(
    spans_s: Sequence[float],
    *,
    num_bytes: int,
    num_copies: int,
    chunk_bytes: int,
    link: Link,
    gamma: float,
) -> tuple[Chunk, ...]:
    """All chunks of a checkpoint, in the order in which they are sent. O(spans + chunks).

    Args:
        spans_s: duration of each idle span; the last one is taken to be endless.
        num_bytes: bytes that each copy holder receives.
        num_copies: number of copies on other nodes, k - 1.
        chunk_bytes: bytes of a buffer, S / b in the paper.
        link: link between two nodes.
        gamma: share of a span that is used, above 0 and at most 1.
    """
    assert spans_s
    assert chunk_bytes > 0
    chunks: list[Chunk] = []
    copy, begin = 0, 0
    for span, duration_s in enumerate(spans_s):
        is_last = span == len(spans_s) - 1
        usable_s, used_s = gamma * duration_s, 0.0
        while copy < num_copies and num_bytes:
            size = min(chunk_bytes, num_bytes - begin)
            if not is_last:
                bytes_that_fit = int(
                    (usable_s - used_s - link.latency_s) * link.bandwidth_bytes_per_s
                )
                if bytes_that_fit < min(size, _LEAST_SHARE * chunk_bytes):
                    break
                size = min(size, bytes_that_fit)
            chunks.append(Chunk(span, copy, begin, begin + size, used_s))
            used_s += link.latency_s + size / link.bandwidth_bytes_per_s
            begin += size
            if begin == num_bytes:
                copy, begin = copy + 1, 0
    return tuple(chunks)


def spans_of_chunks(chunks_s: Sequence[float], usable_s: Sequence[float]) -> tuple[int, ...]:
    """The index of the span in which each of these chunks is sent, ascending. O(spans + chunks).

    Args:
        chunks_s: seconds that each chunk takes, in the order of sending: one copy after the other.
        usable_s: seconds of each idle span in which chunks may be sent; the last one is taken to be
            endless.

    Source: Gemini (SOSP '23), section 5.3, algorithm 2.
    Differs: the chunks are cut already, so none is made smaller to fill up a span.
    """
    assert usable_s
    dealt = []
    span, used_s = 0, 0.0
    for chunk_s in chunks_s:
        while span < len(usable_s) - 1 and used_s + chunk_s > usable_s[span]:
            span, used_s = span + 1, 0.0
        dealt.append(span)
        used_s += chunk_s
    return tuple(dealt)


def idle_spans(busy: Sequence[Interval], *, end_s: float) -> tuple[Interval, ...]:
    """The parts of an iteration outside the busy intervals, which may overlap, in order of time.

    The last part, which may be empty, begins after the last busy interval, at end_s at the latest.
    """
    spans: list[Interval] = []
    free_s = 0.0
    for start_s, until_s in sorted(busy):
        if start_s > free_s:
            spans.append((free_s, start_s))
        free_s = max(free_s, until_s)
    return (*spans, (min(free_s, end_s), end_s))


def spans_after_computations(
    idle: Sequence[Interval], ends_s: Sequence[float]
) -> tuple[IdleSpan, ...]:
    """The idle intervals, with starts counted from the source's last completed computation.

    Args:
        ends_s: times at which the source's own forwards and backwards end, ascending.
    """
    spans = []
    for start_s, end_s in idle:
        after = bisect_right(ends_s, start_s)
        offset_s = start_s - (ends_s[after - 1] if after else 0.0)
        spans.append(IdleSpan(after, offset_s, end_s - start_s))
    return tuple(spans)


def best_chunk_bytes(lasts_s: Sequence[float], *, most_bytes: int, link: Link, gamma: float) -> int:
    """The chunk size with which most bytes fit into spans of `lasts_s`; the largest of equals.

    All chunks have one size, because a chunk is hashed where it is copied, before it is known in
    which span it is sent. Small chunks fill spans better, large chunks pay fewer latencies.
    """

    def sent_bytes(size: int) -> int:
        return sum(size * int(gamma * span_s / link.seconds(size)) for span_s in lasts_s)

    sizes = [max(1, most_bytes >> halvings) for halvings in range(_HALVINGS)]
    return max(sizes, key=lambda size: (sent_bytes(size), size))
