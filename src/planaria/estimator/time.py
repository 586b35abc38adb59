"""The predicted timeline of a schedule, found by running the schedule in virtual time.

Each rank has three lanes: compute, send and reduce. On the compute lane forwards and backwards
follow each other; a receive waits until its message has arrived. A message occupies its link
(source, target) for bytes / bandwidth, first come, first served, and arrives one latency later; the
sender goes on at once. On the reduce lane reductions run in the order of buckets. The iteration
ends with the commit vector (reductions.py).

If ranks share processors, actions last longer while other ranks are busy (sharing.py). If the
number of processors is given, optimizer steps follow at the end; their times come from a measured
profile. If there are fewer processors than ranks, RANK_ITERATION_S is added to them: the work of a
rank per iteration that belongs to no action.

Source: Oobleck (SOSP '23), section 4.1.2, for the parts of an iteration.
Differs: Oobleck sums three closed terms, which is exact only for equal stages without
communication. Odyssey's equation 13 adds up stages that in reality overlap. This module runs the
schedule itself.
Not modelled: links that share a wire.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple, overload

from planaria.core.plan import ModelProfile, Plan
from planaria.estimator.hop_times import ClusterTimes, HopTimes
from planaria.estimator.reductions import Reductions, reduction_starts_s
from planaria.estimator.sharing import Costs, Times, last_end_s, shared_times
from planaria.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    SHADOW,
    Action,
    Kind,
    Schedule,
    slots_of,
)
from planaria.schedule.lower import execution_order

# Processor seconds of a rank per iteration, besides its actions and steps: waking threads, the
# commit vector and reports take 15 to 25 ms; its part of the search ahead takes some 10 ms.
# Measured with two to six ranks on two processors, with little work and with much. If each rank has
# a processor of its own, this work fits into the time in which the rank waits for others.
RANK_ITERATION_S: Final = 0.025

_ROUNDING: Final = 1e-9  # Bound on the relative error of sums of seconds.

LANES: Mapping[Kind, str] = {
    FORWARD: "compute",
    BACKWARD: "compute",
    BACKWARD_INPUT: "compute",
    BACKWARD_WEIGHT: "compute",
    SHADOW: "compute",
    SEND_FORWARD: "send",
    SEND_BACKWARD: "send",
    REDUCE: "reduce",
}


class Span(NamedTuple):
    """One action on one lane of a rank, predicted or measured.

    A send lasts as long as it occupies its link. A receive has no span, because it only waits.

    Attributes:
        lane: "compute", "send" or "reduce".
        start_s, end_s: seconds since the iteration began.
    """

    rank: int
    lane: str
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration, predicted or measured.

    Attributes:
        spans: all spans, rank by rank; those of one lane of a rank are in order of time.
        iteration_s: time of the iteration, from its first action to its end.
    """

    spans: Sequence[Span]
    iteration_s: float

    def busy_s(self, rank: int, lane: str = "compute") -> float:
        """Seconds in which a lane of a rank is busy."""
        return sum(s.end_s - s.start_s for s in self.spans if s.rank == rank and s.lane == lane)

    @property
    def bubble_share(self) -> float:
        """The share of the iteration in which computing ranks are not busy computing, 0 to 1."""
        busy_s = {span.rank: 0.0 for span in self.spans if span.lane == "compute"}
        for span in self.spans:
            if span.lane == "compute":
                busy_s[span.rank] += span.end_s - span.start_s
        all_s = len(busy_s) * self.iteration_s
        return 1.0 - sum(busy_s.values()) / all_s if all_s else 0.0


def predicted_timeline(
    schedule: Schedule,
    profile: ModelProfile,
    *,
    plan: Plan,
    reduce_bytes_factor: float = 1.0,
    processors: int = 0,
) -> Timeline:
    """The predicted timeline of a complete schedule; takes O(actions) time.

    770,000 actions (1,000 stages with 128 microbatches) take about a second.

    Args:
        plan: the plan of the schedule: devices of each rank's stage, and ranks of each node.
        reduce_bytes_factor: bytes that a reduction moves per byte of parameters, see `Reductions`.
        processors: number of processors that all ranks share; 0: each device has its own.

    Raises:
        DeadlockError: the schedule cannot finish.
    """
    cluster = ClusterTimes(profile, plan)
    reductions = Reductions(profile, plan, bytes_factor=reduce_bytes_factor)
    reduce_s = [reductions.seconds(bucket) for bucket in schedule.buckets]
    by_id = {id(route): route for route in schedule.routes}
    times_by_id = {key: cluster.hop_times(route) for key, route in by_id.items()}
    hop_times = [times for route in schedule.routes for times in times_by_id[id(route)]]
    costs = _costs(schedule, cluster, hop_times, reduce_s)
    has_shared_processors = 0 < processors < len(schedule.actions)
    if has_shared_processors:
        times = shared_times(schedule, costs, processors=processors)
    else:
        times = _unshared_times(schedule, costs, hop_times, cluster.num_links)
    end_s = times.end_s + reductions.commit_s()
    if processors:
        rank_s = RANK_ITERATION_S if has_shared_processors else 0.0
        works_s = [rank_s + update_s for update_s in cluster.updates_s(plan)]
        end_s += last_end_s(works_s, processors=processors)
    return Timeline(_LazySpans(lambda: _spans(schedule, times)), end_s)


class LeastTimes(NamedTuple):
    """Lower bounds on the iteration time of a plan's routes under any schedule.

    Attributes:
        whole_s: bound with whole backwards.
        split_s: bound with split backwards; it holds with whole ones, too.
    """

    whole_s: float
    split_s: float


def least_times(profile: ModelProfile, plan: Plan) -> LeastTimes:
    """Lower bounds on an iteration of a plan, from the work of its ranks.

    A rank begins when a microbatch has gone through the hops before it, and then computes all its
    work. Its last action is a backward if backwards are whole; the gradient of that goes back
    through the hops before it. O(microbatches + hops of different routes).
    """
    cluster = ClusterTimes(profile, plan)
    works_s: dict[int, float] = {}
    forth_s: dict[int, float] = {}
    back_s: dict[int, float] = {}
    counts = Counter(map(id, plan.routes))
    for key, route in {id(route): route for route in plan.routes}.items():
        count, hop_times, before_s, behind_s = counts[key], cluster.hop_times(route), 0.0, 0.0
        for index, (hop, times) in enumerate(zip(route, hop_times, strict=True)):
            rank, work_s = hop.rank, count * (times.forward_s + times.backward_s)
            works_s[rank] = works_s.get(rank, 0.0) + work_s
            forth_s[rank] = min(forth_s.get(rank, inf), before_s)
            # The first microbatch of a rank and its last one may come by different routes.
            back_s[rank] = min(back_s.get(rank, inf), behind_s)
            before_s += times.forward_s
            behind_s += times.backward_s
            if index + 1 < len(route) and route[index + 1].rank != rank:
                onward, back = times.onward, hop_times[index + 1].back
                before_s += onward.transfer_s + onward.latency_s
                behind_s += back.transfer_s + back.latency_s
    whole_s = max(work_s + forth_s[rank] + back_s[rank] for rank, work_s in works_s.items())
    split_s = max(work_s + forth_s[rank] for rank, work_s in works_s.items())
    return LeastTimes((1.0 - _ROUNDING) * whole_s, (1.0 - _ROUNDING) * split_s)


def _costs(
    schedule: Schedule,
    cluster: ClusterTimes,
    hop_times: Sequence[HopTimes],
    reduce_s: Sequence[float],
) -> Costs:
    durations_s = {
        FORWARD: [times.forward_s for times in hop_times],
        BACKWARD: [times.backward_s for times in hop_times],
        BACKWARD_INPUT: [times.input_s for times in hop_times],
        BACKWARD_WEIGHT: [times.backward_s - times.input_s for times in hop_times],
        SEND_FORWARD: [times.onward.transfer_s for times in hop_times],
        SEND_BACKWARD: [times.back.transfer_s for times in hop_times],
        SHADOW: cluster.all_shadows_s(schedule.routes),
        REDUCE: reduce_s,
    }
    link_uses = {
        SEND_FORWARD: [times.onward for times in hop_times],
        SEND_BACKWARD: [times.back for times in hop_times],
    }
    return Costs(durations_s=durations_s, link_uses=link_uses, speeds=cluster.speeds)


def _unshared_times(
    schedule: Schedule, costs: Costs, hop_times: Sequence[HopTimes], num_links: int
) -> Times:
    """The times of a schedule without shared processors, up to the commit vector."""
    slots, durations_s = slots_of(schedule.routes), costs.durations_s
    reduce_s = durations_s[REDUCE]
    starts_s = {kind: [0.0] * len(each_s) for kind, each_s in durations_s.items()}
    handed_over_s = [0.0] * len(schedule.buckets)
    clocks_s = dict.fromkeys(schedule.actions, 0.0)
    links_s = [0.0] * num_links
    forward_arrivals_s = [0.0] * (len(hop_times) + 1)
    backward_arrivals_s = [0.0] * (len(hop_times) + 1)
    forward_starts_s, forward_durations_s = starts_s[FORWARD], durations_s[FORWARD]
    backward_starts_s, backward_durations_s = starts_s[BACKWARD], durations_s[BACKWARD]
    for rank, (kind, microbatch, hop, bucket) in execution_order(schedule):
        slot = slots[microbatch] + hop
        if kind is FORWARD:
            forward_starts_s[slot] = now_s = clocks_s[rank]
            clocks_s[rank] = now_s + forward_durations_s[slot]
        elif kind is BACKWARD:
            backward_starts_s[slot] = now_s = clocks_s[rank]
            clocks_s[rank] = now_s + backward_durations_s[slot]
        elif kind is RECEIVE_FORWARD:
            clocks_s[rank] = max(clocks_s[rank], forward_arrivals_s[slot])
        elif kind is RECEIVE_BACKWARD:
            clocks_s[rank] = max(clocks_s[rank], backward_arrivals_s[slot])
        elif kind is BACKWARD_INPUT or kind is BACKWARD_WEIGHT or kind is SHADOW:
            starts_s[kind][slot] = now_s = clocks_s[rank]
            clocks_s[rank] = now_s + durations_s[kind][slot]
        elif kind is REDUCE:
            handed_over_s[bucket] = max(handed_over_s[bucket], clocks_s[rank])
        else:
            use = hop_times[slot].onward if kind is SEND_FORWARD else hop_times[slot].back
            starts_s[kind][slot] = start_s = max(clocks_s[rank], links_s[use.link])
            links_s[use.link] = end_s = start_s + use.transfer_s
            if kind is SEND_FORWARD:
                forward_arrivals_s[slot + 1] = end_s + use.latency_s
            else:
                backward_arrivals_s[slot - 1] = end_s + use.latency_s
    starts_s[REDUCE] = reduction_starts_s(schedule.buckets, handed_over_s, reduce_s)
    ends_s = map(sum, zip(starts_s[REDUCE], reduce_s, strict=True))
    return Times(starts_s, durations_s, max((*clocks_s.values(), *ends_s)))


def _spans(schedule: Schedule, times: Times) -> Iterator[Span]:
    slots = slots_of(schedule.routes)
    for rank in sorted(schedule.actions):
        for action in schedule.actions[rank]:
            kind, microbatch, hop, bucket = action
            lane = LANES.get(kind)
            if lane:
                index = bucket if kind is REDUCE else slots[microbatch] + hop
                start_s = times.starts_s[kind][index]
                yield Span(rank, lane, action, start_s, start_s + times.durations_s[kind][index])


class _LazySpans(Sequence[Span]):
    """Spans that are built on first use.

    Who asks for the seconds of an iteration reads no spans; building half a million takes as long
    as timing the schedule.
    """

    def __init__(self, make: Callable[[], Iterator[Span]]) -> None:
        self._make = make
        self._spans: tuple[Span, ...] = ()

    def _build(self) -> tuple[Span, ...]:
        self._spans = self._spans or tuple(self._make())
        return self._spans

    def __len__(self) -> int:
        return len(self._build())

    def __iter__(self) -> Iterator[Span]:
        return iter(self._build())

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        return self._build()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._build() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._build())
