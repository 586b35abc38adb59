"""Decides when a rank sends copies: in spans in which training leaves the links idle.

In an idle span neither the source's link direction out nor the receiver's direction in carries
messages of training. The spans of the first iterations of an epoch are those that the plan's
timeline predicts; without a prediction no copy is sent yet. Meanwhile each rank records when
training occupies its link directions. After a number of iterations it tells the ranks that send
copies to it when its direction in is busy, and computes its own spans from its direction out and
from what its receivers have told it. It repeats that for the whole epoch.

The begin of a span is expressed as a delay after the source's n-th forward or backward of the
iteration, so a late iteration has late spans. A chunk is sent if it ends within the usable share of
its span (gamma); a chunk that fits nowhere waits for the next iteration. If a version has to be
complete with its iteration's commit, the last span has no end. If an iteration had room for no
chunk, its last span takes one all the same, so that every version ends eventually.

Source: Gemini (SOSP '23), sections 5.2 to 5.4.
Differs: chunks are assigned to spans as time passes and not before. The result is the same if
iterations repeat exactly, and training is disturbed less if they do not. The receiver's direction
in counts, too.

A rank that is given a `ChunkList` does as the paper does (`checkpoint.schedule = "paper"`). A span
is idle if the source's own links are, both directions, whatever its receivers do. A version's
chunks are dealt to the spans of one iteration before the first of them is sent.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final

import msgspec
import numpy as np

from planaria.checkpoint.memory.chunk_list import ChunkList
from planaria.core.copies import IdleSpan
from planaria.core.plan import Link
from planaria.errors import AbortedError
from planaria.placement.interleave import (
    PREDICTED_GAMMA,
    Interval,
    best_chunk_bytes,
    idle_spans,
    spans_after_computations,
)
from planaria.transport.links import Channel, Links, Tag
from planaria.transport.traffic import Use

_PATIENCE: Final = 3.0  # In iterations.
_GAMMAS: Final = (0.5, 0.95)  # Lower and upper bound on a measured gamma.

_Key = tuple[bool, int, Channel, int, int]


@dataclass(frozen=True, slots=True)
class CopyPeers:
    """The ranks that a rank sends copies to or receives them from, in one epoch.

    Attributes:
        targets: ranks that this rank sends copies to.
        sources: ranks that send copies to this rank.
        is_far: whether a peer is on another node.
    """

    targets: Collection[int]
    sources: Collection[int]
    is_far: Callable[[int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanUse:
    """How idle spans are measured and used.

    Attributes:
        num_iterations: number of iterations over which measurements are averaged.
        gamma: share of a span that is used; None: it is measured.
        chunks: list of the chunks of a version, dealt beforehand; None: each chunk goes in the
            first span that has room for it.
    """

    num_iterations: int
    gamma: float | None = None
    chunks: ChunkList | None = None


class Interleaving:
    """The moments at which a rank's chunks may be sent, in one epoch.

    Args:
        link: latency and bandwidth between nodes.
        idle: predicted idle spans by target; empty: no chunk is sent before spans are measured.
        use: settings by which spans are measured and used.
    """

    def __init__(
        self,
        links: Links,
        peers: CopyPeers,
        *,
        link: Link,
        idle: Mapping[int, Sequence[IdleSpan]],
        use: SpanUse,
    ) -> None:
        self._links = links
        self._link = link
        self._spans = dict(idle)
        self._given_gamma = use.gamma
        self.gamma = use.gamma or PREDICTED_GAMMA
        self._targets = sorted(peers.targets)
        self._sources = sorted(peers.sources)
        self._measurement = _Measurement(use.num_iterations)
        self._round = 0  # The number of finished measurements.
        self._early_uses: list[Use] = []  # Messages that came before their iteration began here.
        self._average: _AverageIteration | None = None
        # The busy intervals of targets' directions in, in the newest measurement.
        self._busy_into: dict[int, tuple[Interval, ...]] = {}
        self._changed = threading.Condition()  # Guards all that follows.
        self._chunks = use.chunks
        # The iteration's start, then the ends of its forwards and backwards.
        self._done_s: list[float] = []
        self._free_s = 0.0  # The end of the time that the last chunk takes on the direction out.
        self._has_sent = False
        self._used_s = 0.0
        self._must_end = False
        self._is_held = False
        self._is_rushed = False
        self._is_closed = False
        links.traffic.listen(bytes_per_s=link.bandwidth_bytes_per_s, is_far=peers.is_far)
        links.traffic.take()

    # -- what the compute thread calls ------------------------------------------------------------

    def on_iteration_begin(self, iteration: int, *, must_end: bool) -> None:
        """Notes that an iteration begins.

        Args:
            must_end: whether all chunks of the version have to be sent in this iteration.
        """
        now_s = self._links.timekeeper.now_s()
        uses = [*self._early_uses, *self._links.traffic.take()]
        self._early_uses = [use for use in uses if use.tag.iteration >= iteration]
        own = [use for use in uses if use.tag.iteration == iteration - 1]
        with self._changed:
            done_s = tuple(self._done_s)
        if done_s and self._measurement.add(own, done_s, end_s=now_s):
            self._evaluate_measurement()
        self._update_spans()
        with self._changed:
            self._done_s = [now_s]
            if self._chunks is not None:
                # Spans may have been measured anew. Chunks of the last iteration have none here.
                self._chunks.deal_again(self._usable_spans(now_s) if self._is_held else ())
            self._has_sent, self._must_end, self._is_held = False, must_end, False
            self._changed.notify_all()

    def on_pause(self) -> None:
        """Notes that training pauses: the time until the next iteration tells nothing about one."""
        with self._changed:
            self._done_s = []
            self._changed.notify_all()

    def take_idle_s(self) -> tuple[float, float]:
        """The idle seconds of an iteration, and the seconds that chunks took since the last call.

        The idle seconds are averaged over targets; the seconds of chunks are summed over them.
        """
        with self._changed:
            used_s, self._used_s = self._used_s, 0.0
            idle_s = sum(span.lasts_s for spans in self._spans.values() for span in spans)
            return idle_s / max(1, len(self._spans)), used_s

    def on_action_done(self) -> None:
        """Notes that a forward or backward is done."""
        with self._changed:
            self._done_s.append(self._links.timekeeper.now_s())
            self._changed.notify_all()

    def hold(self) -> None:
        """Notes that a version begins; its chunks may be sent from the next iteration on."""
        with self._changed:
            self._is_held, self._is_rushed = True, False

    def rush(self) -> None:
        """Lets the rest of the version be sent at once, since all ranks wait for it."""
        with self._changed:
            self._is_rushed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all calls of `wait` with an AbortedError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def spans(self, target: int) -> tuple[IdleSpan, ...]:
        """The spans of an iteration in which chunks are sent to a target."""
        return self.all_spans.get(target, ())

    @property
    def all_spans(self) -> dict[int, tuple[IdleSpan, ...]]:
        """The spans in which chunks are sent, by target; empty before any are known."""
        with self._changed:
            return {target: tuple(spans) for target, spans in self._spans.items()}

    # -- what the thread that sends calls ---------------------------------------------------------

    def chunk_bytes(self, most_bytes: int) -> int:
        """The size of the chunks of a version that begins now; at most `most_bytes`."""
        with self._changed:
            lasts_s = [span.lasts_s for spans in self._spans.values() for span in spans]
            gamma = self.gamma
        return best_chunk_bytes(lasts_s, most_bytes=most_bytes, link=self._link, gamma=gamma)

    def deal(self, sizes: Sequence[int]) -> None:
        """Deals the chunks of a version to spans, if that is done beforehand.

        Args:
            sizes: bytes of each chunk, in the order of sending.
        """
        with self._changed:
            if self._chunks is not None:
                self._chunks.deal(sizes, self._usable_spans(self._links.timekeeper.now_s()))

    def wait(self, target: int, num_bytes: int) -> None:
        """Blocks until a chunk of so many bytes may be sent.

        Raises:
            AbortedError: the epoch is over.
        """
        lasts_s = self._link.seconds(num_bytes)
        with self._changed:
            while True:
                if self._is_closed:
                    raise AbortedError("the epoch is over")
                now_s = max(self._free_s, self._links.timekeeper.now_s())
                moment_s = self._moment_s(target, now_s, lasts_s)
                if moment_s is None:
                    if not self._changed.wait(self._patience_s) and not self._is_held:
                        self._is_rushed = True  # Training has stopped, so the network is idle.
                    continue
                left_s = moment_s - time.monotonic()
                if left_s > 0.0:
                    self._changed.wait(left_s)
                    continue
                self._links.timekeeper.reach(moment_s)
                self._free_s, self._has_sent = moment_s + lasts_s, True
                self._used_s += lasts_s
                if self._chunks is not None:
                    self._chunks.take()
                return

    @property
    def _patience_s(self) -> float | None:
        """Seconds without a forward or backward after which none is expected; None: unknown."""
        return _PATIENCE * self._average.iteration_s if self._average else None

    def _moment_s(self, target: int, now_s: float, lasts_s: float) -> float | None:
        """The moment at which a chunk may be sent; None: it depends on events still to come."""
        if self._is_held:
            return None
        if self._is_rushed:
            return now_s
        if self._chunks is not None:
            return self._dealt_moment_s(self._chunks.next_span, now_s)
        spans = self._spans.get(target, ())
        for index, span in enumerate(spans):
            if span.after >= len(self._done_s):
                return None
            start_s = self._done_s[span.after] + span.offset_s
            moment_s = max(now_s, start_s)
            is_last = index == len(spans) - 1
            is_open = is_last and (self._must_end or not self._has_sent)
            if is_open or moment_s + lasts_s <= start_s + self.gamma * span.lasts_s:
                return moment_s
        if not spans and self._done_s and (self._must_end or not self._has_sent):
            return now_s
        return None

    def _dealt_moment_s(self, span: IdleSpan | None, now_s: float) -> float | None:
        """The moment at which a chunk that is dealt to a span may be sent; None: as `_moment_s`.

        Args:
            span: the chunk's span; None: it goes at once.
        """
        if not self._done_s:
            return None
        if span is None:
            return now_s
        if span.after >= len(self._done_s):
            return None
        return max(now_s, self._done_s[span.after] + span.offset_s)

    def _usable_spans(self, now_s: float) -> list[IdleSpan]:
        """The spans, each as long as chunks may use it from now on."""
        usable = []
        for span in next(iter(self._spans.values()), ()):  # Those to all targets are the same.
            usable_s = self.gamma * span.lasts_s
            if not self._is_held and span.after < len(self._done_s):
                start_s = self._done_s[span.after] + span.offset_s
                usable_s -= max(0.0, now_s - start_s)
            usable.append(span._replace(lasts_s=usable_s))
        return usable

    # -- what is measured -------------------------------------------------------------------------

    def _evaluate_measurement(self) -> None:
        """Evaluates a finished measurement, and tells `sources` when the direction in is busy.

        Where chunks are dealt beforehand, no source asks, and this rank's spans are known at once.
        """
        self._average = self._measurement.average()
        if self._chunks is not None:
            for target in self._targets:
                self._set_spans(target, self._average.into)
            return
        into = np.frombuffer(msgspec.json.encode(self._average.into), dtype=np.uint8)
        for source in self._sources:
            self._links.send(source, _use_tag(self._round), into)
        self._round += 1
        self._busy_into = {}

    def _update_spans(self) -> None:
        """Reads the targets' busy intervals that have come, and recomputes the spans to them."""
        if self._average is None or self._chunks is not None:
            return
        tag = _use_tag(self._round - 1)
        for target in self._targets:
            if target not in self._busy_into and self._links.has_any({target: tag}):
                message = self._links.receive(target, tag, timeout_s=1.0)
                self._busy_into[target] = msgspec.json.decode(
                    message.tobytes(), type=tuple[Interval, ...]
                )
                self._set_spans(target, self._busy_into[target])

    def _set_spans(self, target: int, into: Sequence[Interval]) -> None:
        """Finds the spans to a target between the messages out and those `into` some rank."""
        assert self._average is not None
        idle = idle_spans([*self._average.out, *into], end_s=self._average.iteration_s)
        with self._changed:
            self._spans[target] = spans_after_computations(idle, self._average.ends_s)
            self.gamma = self._given_gamma or self._average.gamma(idle)


class _AverageIteration(msgspec.Struct, frozen=True):
    """A rank's average iteration, in seconds from its begin.

    Attributes:
        out, into: intervals in which training occupies its link direction out, and in.
        ends_s: ends of its forwards and backwards, in order.
        iteration_s: length of the iteration.
        jitter_s: mean standard deviation of the begin of a message.
    """

    out: tuple[Interval, ...]
    into: tuple[Interval, ...]
    ends_s: tuple[float, ...]
    iteration_s: float
    jitter_s: float

    def gamma(self, idle: Sequence[Interval]) -> float:
        """The share of the idle spans that is idle in spite of jitter, within fixed bounds."""
        idle_s = sum(end_s - start_s for start_s, end_s in idle)
        share = 1.0 - 2.0 * self.jitter_s * len(idle) / idle_s if idle_s else 0.0
        gamma_min, gamma_max = _GAMMAS
        return min(max(share, gamma_min), gamma_max)


class _Measurement:
    """The measurements of iterations, without the first one of an epoch, whose caches are cold."""

    def __init__(self, num_iterations: int) -> None:
        self._num_iterations = max(1, num_iterations)
        self._num_added = -1
        self._forget()

    def add(self, uses: Sequence[Use], done_s: Sequence[float], *, end_s: float) -> bool:
        """Adds an iteration; returns whether there are enough of them for a mean.

        Args:
            uses: messages of training in the iteration.
            done_s: start of the iteration, then the ends of its forwards and backwards.
            end_s: end of the iteration.
        """
        self._num_added += 1
        if self._num_added == 0:
            return False
        if self._ends_s and len(self._ends_s[0]) != len(done_s) - 1:
            self._forget()  # The schedule has changed, so older iterations have other actions.
        begin_s = done_s[0]
        for is_out, peer, tag, start_s, until_s in uses:
            key = (is_out, peer, tag.channel, *tag[2:])
            self._uses[key].append((start_s - begin_s, until_s - begin_s))
        self._ends_s.append([moment_s - begin_s for moment_s in done_s[1:]])
        self._iterations_s.append(end_s - begin_s)
        return len(self._ends_s) == self._num_iterations

    def average(self) -> _AverageIteration:
        """The means over the iterations, which are forgotten then."""
        means = {
            key: (fmean(start_s for start_s, _ in times), fmean(end_s for _, end_s in times))
            for key, times in self._uses.items()
        }
        jitters_s = [pstdev(start_s for start_s, _ in times) for times in self._uses.values()]
        average = _AverageIteration(
            out=tuple(sorted(span for key, span in means.items() if key[0])),
            into=tuple(sorted(span for key, span in means.items() if not key[0])),
            ends_s=tuple(map(fmean, zip(*self._ends_s, strict=True))),
            iteration_s=fmean(self._iterations_s),
            jitter_s=fmean(jitters_s) if jitters_s else 0.0,
        )
        self._forget()
        return average

    def _forget(self) -> None:
        self._uses: defaultdict[_Key, list[Interval]] = defaultdict(list)
        self._ends_s: list[list[float]] = []
        self._iterations_s: list[float] = []


def _use_tag(number: int) -> Tag:
    return Tag(Channel.COPY_USE, number, 0)
