"""The spans of an iteration in which copies may be sent, and how much of them the copies use, as
the plan's timeline predicts."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf

from planaria.core.copies import IdleSpans, LayerCopy
from planaria.core.plan import Link, Plan, link_between_pipelines
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.placement.interleave import (
    Chunk,
    Interval,
    checkpoint_chunks,
    idle_spans,
    spans_after_computations,
)
from planaria.planner.problem import Problem
from planaria.schedule.action import SEND_BACKWARD, SEND_FORWARD, SHADOW, Schedule
from planaria.schedule.lower import plan_schedule


def predicted_idle(
    problem: Problem, plan: Plan, copies: Collection[LayerCopy]
) -> tuple[IdleSpans, ...]:
    """The idle spans of each pair of a sending rank and its copy holder. O(actions).

    A span is idle if both the sender's outgoing and the receiver's incoming link direction are.

    Source: Gemini (SOSP '23), section 5.4, which measures the spans.
    Differs: they are known before the first iteration of a plan, and the receiver's incoming
    direction counts, too.
    """
    occupation = _LinkOccupation(problem, plan)
    pairs = sorted({(copy.source, target) for copy in copies for target in copy.targets})
    return tuple(
        IdleSpans(source, target, spans_after_computations(idle, occupation.ends_s(source)))
        for source, target in pairs
        for idle in [occupation.idle(occupation.node_of(source), [occupation.node_of(target)])]
    )


def predicted_idle_of_sources(
    problem: Problem, plan: Plan, copies: Collection[LayerCopy]
) -> tuple[IdleSpans, ...]:
    """The idle spans of each rank that sends copies, the same for all its copy holders. O(actions).

    A span is idle if both link directions of the sender are.

    Source: Gemini (SOSP '23), section 5.4, which measures the spans.
    Differs: they are known before the first iteration of a plan.
    """
    occupation = _LinkOccupation(problem, plan)
    spans = {
        source: spans_after_computations(
            occupation.idle(occupation.node_of(source), [occupation.node_of(source)]),
            occupation.ends_s(source),
        )
        for source in {copy.source for copy in copies}
    }
    pairs = sorted({(copy.source, target) for copy in copies for target in copy.targets})
    return tuple(IdleSpans(source, target, spans[source]) for source, target in pairs)


@dataclass(frozen=True, slots=True)
class Sending:
    """What the ranks of a node together send of one version of the copies.

    The ranks of a node share its outgoing link direction.

    Attributes:
        num_bytes: bytes sent to all of their copy holders.
        sends_s: seconds for which the chunks occupy the outgoing direction.
        idle_s: seconds of an iteration in which that direction and the incoming directions of all
            copy holders are idle.
        iterations: number of iterations over which a version is sent for which no commit waits.
        longer_s: seconds by which an iteration is longer if its commit waits for a version.
        endless_iterations: number of iterations from one version to the next if all chunks of a
            version are sent from the spans of one iteration on, of which the last one has no end,
            and no commit waits.
    """

    num_bytes: int
    sends_s: float
    idle_s: float
    iterations: int
    longer_s: float
    endless_iterations: int


def predicted_sending(
    problem: Problem,
    plan: Plan,
    copies: Collection[LayerCopy],
    *,
    layer_bytes: Sequence[int],
    chunk_bytes: int,
    gamma: float,
) -> dict[int, Sending]:
    """What each node that sends copies sends of one version, keyed by node. O(actions + chunks).

    Args:
        layer_bytes: bytes of each layer's state.
        chunk_bytes: bytes of a buffer.
        gamma: share of an idle span that is used.

    Source: Gemini (SOSP '23), section 5.3, algorithm 2.
    """
    occupation = _LinkOccupation(problem, plan)
    link = link_between_pipelines(problem.profile.links)
    targets: defaultdict[int, set[int]] = defaultdict(set)
    num_bytes: defaultdict[int, int] = defaultdict(int)
    for copy in (copy for copy in copies if copy.targets):
        node = occupation.node_of(copy.source)
        targets[node].update(map(occupation.node_of, copy.targets))
        num_bytes[node] += layer_bytes[copy.layer] * len(copy.targets)

    sending_by_node = {}
    for node, node_bytes in num_bytes.items():
        spans_s = [end_s - start_s for start_s, end_s in occupation.idle(node, targets[node])]
        chunks_in = partial(
            checkpoint_chunks,
            num_bytes=node_bytes,
            num_copies=1,
            chunk_bytes=chunk_bytes,
            link=link,
            gamma=gamma,
        )
        chunks = chunks_in(spans_s)
        longer_s = max(0.0, _last_s(chunks, len(spans_s) - 1, link) - spans_s[-1])
        sending_by_node[node] = Sending(
            num_bytes=node_bytes,
            sends_s=sum(map(link.seconds, map(_size, chunks))),
            idle_s=sum(spans_s),
            iterations=_num_iterations(chunks_in, spans_s),
            longer_s=longer_s,
            # All layers of a profile may take no time.
            endless_iterations=1 + ceil(longer_s / (occupation.iteration_s or inf)),
        )
    return sending_by_node


def _num_iterations(
    chunks_in: Callable[[Sequence[float]], Sequence[Chunk]], spans_s: list[float]
) -> int:
    """The number of iterations with these idle spans that it takes to send all chunks."""
    number = 1
    while True:
        chunks = chunks_in([*spans_s * number, 0.0])  # The last span takes what does not fit.
        unsent = [chunk for chunk in chunks if chunk.span == len(spans_s) * number]
        if len(unsent) == len(chunks):  # Nothing fits; still one chunk is sent in each iteration.
            return max(1, len(chunks))
        if not unsent:
            return 1 + chunks[-1].span // len(spans_s)
        number *= 2


def _last_s(chunks: Sequence[Chunk], span: int, link: Link) -> float:
    """Seconds from the start of a span until its last chunk has arrived; 0 if it has none."""
    return max((c.after_s + link.seconds(_size(c)) for c in chunks if c.span == span), default=0.0)


def _size(chunk: Chunk) -> int:
    return chunk.end_byte - chunk.first_byte


class _LinkOccupation:
    """When training occupies the link directions of nodes, in an iteration of a plan.

    Each node has one outgoing and one incoming direction, however many devices it has.

    Attributes:
        iteration_s: duration of the iteration.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        # A silent rank waits for nothing that copies could delay.
        plan = replace(plan, silent={})
        self._devices_per_node = plan.devices_per_node
        schedule = plan_schedule(plan, tied=problem.profile.tied, order=problem.reduction_order)
        timeline = predicted_timeline(
            schedule,
            problem.profile,
            plan=plan,
            reduce_bytes_factor=problem.reduce_bytes_factor,
        )
        self.iteration_s = timeline.iteration_s
        self._out: defaultdict[int, list[Interval]] = defaultdict(list)
        self._into: defaultdict[int, list[Interval]] = defaultdict(list)
        self._ends_s: defaultdict[int, list[float]] = defaultdict(list)
        self._record_busy_intervals(schedule, timeline)

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self._devices_per_node

    def idle(self, source: int, targets: Iterable[int]) -> tuple[Interval, ...]:
        """The intervals in which the outgoing direction of `source` and the incoming directions of
        all `targets` are idle."""
        incoming = (interval for target in targets for interval in self._into[target])
        return idle_spans([*self._out[source], *incoming], end_s=self.iteration_s)

    def ends_s(self, rank: int) -> list[float]:
        """The times at which the computations of a rank end, ascending."""
        return sorted(self._ends_s[rank])

    def _record_busy_intervals(self, schedule: Schedule, timeline: Timeline) -> None:
        for rank, lane, action, start_s, end_s in timeline.spans:
            node = self.node_of(rank)
            if lane == "compute":
                if action.kind is not SHADOW:
                    self._ends_s[rank].append(end_s)
            elif lane == "send" and action.kind in (SEND_FORWARD, SEND_BACKWARD):
                step = 1 if action.kind is SEND_FORWARD else -1
                target = schedule.routes[action.microbatch][action.hop + step].rank
                if self.node_of(target) != node:
                    self._out[node].append((start_s, end_s))
                    self._into[self.node_of(target)].append((start_s, end_s))
            elif lane == "reduce" and self._spans_nodes(schedule.buckets[action.bucket].ranks):
                self._out[node].append((start_s, end_s))
                self._into[node].append((start_s, end_s))

    def _spans_nodes(self, ranks: Sequence[int]) -> bool:
        return len(set(map(self.node_of, ranks))) > 1
