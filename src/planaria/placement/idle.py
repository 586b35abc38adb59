"""In which spans of an iteration copies may go, and what they take of them, as the plan's timeline
predicts it."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planaria.core.copies import IdleSpans, LayerCopy
from planaria.core.plan import Link, Plan
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.placement.interleave import Chunk, Interval, anchored, idle_spans, partitioned
from planaria.planner.problem import Problem
from planaria.schedule.action import SEND_BACKWARD, SEND_FORWARD, SHADOW, Schedule
from planaria.schedule.lower import lowered


def predicted_idle(
    problem: Problem, plan: Plan, copies: Collection[LayerCopy]
) -> tuple[IdleSpans, ...]:
    """For each node that sends copies to another: when both ways are idle. O(actions).

    Source: Gemini (SOSP '23), section 5.4, which measures them.
    Differs: known before the first iteration of a plan; and the receiver's way in counts.
    """
    ways = _Ways(problem, plan)
    pairs = sorted({(copy.source, target) for copy in copies for target in copy.targets})
    return tuple(
        IdleSpans(source, target, anchored(idle, ways.ends_s(source)))
        for source, target in pairs
        for idle in [ways.idle(ways.node_of(source), [ways.node_of(target)])]
    )


@dataclass(frozen=True, slots=True)
class Sending:
    """What the ranks of a node send of a version of the copies, over the way that they share.

    Attributes:
        num_bytes: to all of their copy holders.
        sends_s: for how long its chunks take its way.
        idle_s: of an iteration, in which that way and those of the copy holders are free.
        iterations: in which a version is sent that need not be there with a commit.
        longer_s: by so much longer is an iteration whose commit waits for a version.
    """

    num_bytes: int
    sends_s: float
    idle_s: float
    iterations: int
    longer_s: float


def predicted_sending(
    problem: Problem,
    plan: Plan,
    copies: Collection[LayerCopy],
    *,
    layer_bytes: Sequence[int],
    chunk_bytes: int,
    gamma: float,
) -> dict[int, Sending]:
    """By node that sends copies what it sends in each version. O(actions + chunks).

    Args:
        layer_bytes: of each layer's state.
        chunk_bytes: of a buffer.
        gamma: the share of an idle span that is used.

    Source: Gemini (SOSP '23), section 5.3, algorithm 2.
    """
    ways = _Ways(problem, plan)
    link = problem.profile.links["inter_node"]
    targets: defaultdict[int, set[int]] = defaultdict(set)
    num_bytes: defaultdict[int, int] = defaultdict(int)
    for copy in (copy for copy in copies if copy.targets):
        node = ways.node_of(copy.source)
        targets[node].update(map(ways.node_of, copy.targets))
        num_bytes[node] += layer_bytes[copy.layer] * len(copy.targets)

    found = {}
    for node, size in num_bytes.items():
        spans_s = [end_s - start_s for start_s, end_s in ways.idle(node, targets[node])]
        sent = partial(
            partitioned,
            num_bytes=size,
            num_copies=1,
            chunk_bytes=chunk_bytes,
            link=link,
            gamma=gamma,
        )
        due = sent(spans_s)
        found[node] = Sending(
            num_bytes=size,
            sends_s=sum(map(link.seconds, map(_size, due))),
            idle_s=sum(spans_s),
            iterations=_num_iterations(sent, spans_s),
            longer_s=max(0.0, _last_s(due, len(spans_s) - 1, link) - spans_s[-1]),
        )
    return found


def _num_iterations(
    sent: Callable[[Sequence[float]], Sequence[Chunk]], spans_s: list[float]
) -> int:
    """How many iterations of such spans all chunks fit into."""
    number = 1
    while True:
        chunks = sent([*spans_s * number, 0.0])  # The last one takes what does not fit.
        left = [chunk for chunk in chunks if chunk.span == len(spans_s) * number]
        if len(left) == len(chunks):  # One goes in each all the same.
            return max(1, len(chunks))
        if not left:
            return 1 + chunks[-1].span // len(spans_s)
        number *= 2


def _last_s(chunks: Sequence[Chunk], span: int, link: Link) -> float:
    """When the last chunk of a span has arrived, since that began."""
    return max((c.after_s + link.seconds(_size(c)) for c in chunks if c.span == span), default=0.0)


def _size(chunk: Chunk) -> int:
    return chunk.end_byte - chunk.first_byte


class _Ways:
    """When training takes the ways between nodes, in an iteration of a plan: each node has one out
    and one in, whatever devices it has."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        # Who is silent waits for nothing that copies could be late for.
        plan = replace(plan, silent={})
        self._devices_per_node = plan.pipelines[0].template.devices_per_node
        schedule = lowered(plan, tied=problem.profile.tied, order=problem.reduction_order)
        timeline = predicted_timeline(
            schedule,
            problem.profile,
            plan=plan,
            reduce_bytes_factor=problem.reduce_bytes_factor,
        )
        self._end_s = timeline.iteration_s
        self._out: defaultdict[int, list[Interval]] = defaultdict(list)
        self._into: defaultdict[int, list[Interval]] = defaultdict(list)
        self._ends_s: defaultdict[int, list[float]] = defaultdict(list)
        self._take(schedule, timeline)

    def node_of(self, rank: int) -> int:
        """Where it is."""
        return rank // self._devices_per_node

    def idle(self, source: int, targets: Iterable[int]) -> tuple[Interval, ...]:
        """When a node's way out and the ways into all of these are free."""
        into = (taken for target in targets for taken in self._into[target])
        return idle_spans([*self._out[source], *into], end_s=self._end_s)

    def ends_s(self, rank: int) -> list[float]:
        """When what a rank computes ends, ascending."""
        return sorted(self._ends_s[rank])

    def _take(self, schedule: Schedule, timeline: Timeline) -> None:
        for rank, lane, action, start_s, end_s in timeline.spans:
            node = self.node_of(rank)
            if lane == "compute":
                if action.kind is not SHADOW:
                    self._ends_s[rank].append(end_s)
            elif lane == "send" and action.kind in (SEND_FORWARD, SEND_BACKWARD):
                onward = 1 if action.kind is SEND_FORWARD else -1
                target = schedule.routes[action.microbatch][action.hop + onward].rank
                if self.node_of(target) != node:
                    self._out[node].append((start_s, end_s))
                    self._into[self.node_of(target)].append((start_s, end_s))
            elif lane == "reduce" and self._is_far(schedule.buckets[action.bucket].ranks):
                self._out[node].append((start_s, end_s))
                self._into[node].append((start_s, end_s))

    def _is_far(self, ranks: Sequence[int]) -> bool:
        return len(set(map(self.node_of, ranks))) > 1
