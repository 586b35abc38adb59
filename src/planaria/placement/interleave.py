"""When chunks of copies go over the network: in the spans of an iteration in which it is idle.

What a node sends to its copy holders is cut into chunks that fill one idle span after the other. A
chunk is as large as one of the buffers that the receiver keeps for it, or as what is left of its
span has time for. Of each span only a share `gamma` is used, because spans differ from iteration to
iteration. The last span has no end: what fits nowhere else goes there, and makes the iteration
longer.

Source: Gemini (SOSP '23), sections 5.2 to 5.4. Algorithm 2 itself is not in our copy of the paper,
which tells in prose what it does; it is reconstructed from that.
Differs: no chunk of a few bytes is cut to fill up a span; it would take a latency for nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from planaria.core.copies import IdleSpan
from planaria.core.plan import Link

Interval = tuple[float, float]

PREDICTED_GAMMA: Final = 0.9  # Of spans that nobody has measured yet.

_HALVINGS: Final = 6
_LEAST_SHARE: Final = 1 / 16  # Of a buffer: no chunk is smaller, but the last one of a copy.


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a copy.

    Attributes:
        span: the index of the idle span that it goes in.
        copy: the index of the copy holder that it goes to.
        first_byte: of the state, in the order in which it is sent; so is end_byte.
        after_s: since the span began.
    """

    span: int
    copy: int
    first_byte: int
    end_byte: int
    after_s: float


def partitioned(
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
        spans_s: how long each idle span lasts; the last one is taken for endless.
        num_bytes: that each copy holder gets.
        num_copies: that others hold, k - 1.
        chunk_bytes: of a buffer, S / b.
        gamma: the share of a span that is used, above 0 and at most 1.
    """
    assert spans_s
    assert chunk_bytes > 0
    chunks: list[Chunk] = []
    copy, begin = 0, 0
    for span, lasts_s in enumerate(spans_s):
        is_last = span == len(spans_s) - 1
        usable_s, used_s = gamma * lasts_s, 0.0
        while copy < num_copies and num_bytes:
            size = min(chunk_bytes, num_bytes - begin)
            if not is_last:
                fits = int((usable_s - used_s - link.latency_s) * link.bandwidth_bytes_per_s)
                if fits < min(size, _LEAST_SHARE * chunk_bytes):
                    break
                size = min(size, fits)
            chunks.append(Chunk(span, copy, begin, begin + size, used_s))
            used_s += link.latency_s + size / link.bandwidth_bytes_per_s
            begin += size
            if begin == num_bytes:
                copy, begin = copy + 1, 0
    return tuple(chunks)


def idle_spans(busy: Sequence[Interval], *, end_s: float) -> tuple[Interval, ...]:
    """What is left of an iteration between intervals, which may overlap, in order of time; the last
    one begins when nothing follows, at end_s at the latest."""
    spans: list[Interval] = []
    free_s = 0.0
    for start_s, until_s in sorted(busy):
        if start_s > free_s:
            spans.append((free_s, start_s))
        free_s = max(free_s, until_s)
    return (*spans, (min(free_s, end_s), end_s))


def anchored(idle: Sequence[Interval], ends_s: Sequence[float]) -> tuple[IdleSpan, ...]:
    """Idle intervals by what their source has done when they begin.

    Args:
        ends_s: of the source's own forwards and backwards, in order.
    """
    spans = []
    for start_s, end_s in idle:
        after = bisect_right(ends_s, start_s)
        offset_s = start_s - (ends_s[after - 1] if after else 0.0)
        spans.append(IdleSpan(after, offset_s, end_s - start_s))
    return tuple(spans)


def best_chunk_bytes(lasts_s: Sequence[float], *, most_bytes: int, link: Link, gamma: float) -> int:
    """Of which chunks most go into spans that last so long; the largest of the best.

    Chunks are of one size, for each is hashed where it is copied, before anybody knows in which
    span it goes. Small ones fill spans up, large ones pay fewer latencies.
    """

    def sent(size: int) -> int:
        return sum(size * int(gamma * span_s / link.seconds(size)) for span_s in lasts_s)

    sizes = [max(1, most_bytes >> halvings) for halvings in range(_HALVINGS)]
    return max(sizes, key=lambda size: (sent(size), size))
