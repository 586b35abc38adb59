"""A version's chunks as Gemini's Algorithm 2 deals them: each has its idle span beforehand.

The chunks of the first remote copy, then those of the second, and so on, fill one idle span of an
iteration after the other. A chunk is sent in its span, and goes at once if that has passed because
chunks or messages before it were late. The last span has no end and takes all that is left. What an
iteration has not sent when it ends goes at once in the next one, so a version is never spread over
the spans of several iterations.

Source: Gemini (SOSP '23), section 5.3, algorithm 2. Our copy of the paper lacks its listing.
Differs: a layer is cut into chunks of one size before they are dealt, because each is hashed where
it is copied (`best_chunk_bytes` chooses the size); the paper cuts a smaller chunk to fill up a
span. Chunks are sent from the copy in the own node's memory, so what begins before that is made is
lost: spans that have passed by then get nothing. The paper's optimizer step waits for the last
chunk; here a commit waits for it only if `checkpoint.every` has it wait. A chunk that arrived
damaged takes the turn of the next one, and so on; the last one then goes at once.
"""

from collections.abc import Sequence

from planaria.core.copies import IdleSpan
from planaria.core.plan import Link
from planaria.placement.interleave import spans_of_chunks


class ChunkList:
    """The chunks of a version that are not sent yet, and the span of each.

    Args:
        link: latency and bandwidth between nodes.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sizes: tuple[int, ...] = ()
        self._spans: tuple[IdleSpan, ...] = ()
        self._num_sent = 0

    def deal(self, sizes: Sequence[int], spans: Sequence[IdleSpan]) -> None:
        """Deals the chunks of a version, whatever the list held before.

        Args:
            sizes: bytes of each chunk, in the order of sending.
            spans: idle spans, each as long as chunks may use it; empty: the chunks go at once.
        """
        self._sizes, self._num_sent = tuple(sizes), 0
        self._spans = ()
        if spans:
            chunks_s = [self._link.seconds(size) for size in sizes]
            dealt = spans_of_chunks(chunks_s, [span.lasts_s for span in spans])
            self._spans = tuple(spans[index] for index in dealt)

    def deal_again(self, spans: Sequence[IdleSpan]) -> None:
        """Deals the chunks that are left to other spans, as `deal` does."""
        self.deal(self._sizes[self._num_sent :], spans)

    @property
    def next_span(self) -> IdleSpan | None:
        """The span of the next chunk; None: it goes at once."""
        return self._spans[self._num_sent] if self._num_sent < len(self._spans) else None

    def take(self) -> None:
        """Notes that the next chunk is sent."""
        self._num_sent += 1
