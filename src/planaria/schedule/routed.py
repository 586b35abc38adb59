"""One-forward-one-backward over routes: plain, heterogeneous or rerouted, by one rule.

Every rank runs in virtual time. Whenever it is free, it takes the first of these, for the oldest
microbatch:

1. work on a microbatch that is in flight on it: a backward whose gradient has arrived, or a
   forward if the rank already holds activations of the microbatch;
2. the forward of a new microbatch, if fewer microbatches than its limit are in flight on it;
3. if backwards are split, work for which no other rank waits: the gradient of a microbatch's
   weights, or the backward at the first hop of its route;
4. nothing: it waits.

A split backward sends the gradient of its input at once. It keeps the activations and the gradients
between layers until the gradient of its weights is done; its microbatch is in flight until then.

The limit is the number of hops from the rank to the end of the route, S - i for stage i of S. So a
plain pipeline runs textbook 1F1B, in three parts: *warmup*, min(S - i, N_b) forwards; *steady*, one
backward and one forward in turn; *cooldown*, the remaining backwards. The limit is twice as high on
routes that share ranks with other routes: microbatches from several sides arrive unevenly, and a
rank that waits for one should have another to work on. (16 nodes in pipelines of four equal stages,
a loss in each of two of them: 40 units of time with the doubled limit, 51 without.) A plan may set
other limits, where devices have too little memory.

In virtual time a whole stage takes one unit of its pipeline, 1 / S of the model, whatever its
number of layers: the planner balances stages in seconds, which layer counts do not show. A backward
takes as long as two forwards. If losses have made ranks unequal, the plan has the ticks of each
stage, and virtual time counts these. A hop over part of a stage takes its share of the layers.

A rank that microbatches of several pipelines visit serves them evenly. For each microbatch, take
the rank of its route that the fewest microbatches visit; the turn of the microbatch is its place
among those that share this rank, as a fraction of their number. So microbatches that go around a
lost rank by several routes count together, because they have the rest of their routes in common.

Limits cannot block each other if the ranks can be sorted so that every route visits them in that
order: the last rank that is at its limit can always finish what it holds. Routes that visit two
ranks in both orders can block; then the oldest waiting microbatch is admitted over the limit.

Source: Narayanan et al. (SC '21), section 2.2.1 for 1F1B; ReCycle (SOSP '24), adaptive pipelining,
for rerouted microbatches.
Differs: ReCycle solves an integer program offline for every number of failures; this is a greedy
list schedule, O(actions * log(microbatches)): 1,000 stages with 128 microbatches take 2 seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from math import lcm
from typing import Final, NamedTuple, TypeVar

from planaria.core.plan import Hop, Plan, Route, Ticks
from planaria.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
)

# The kinds of work; the index of each in the order of `RoutedWork`.
WORK_KINDS: Final = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)
_Entry = TypeVar("_Entry")
_Times = tuple[int, int, int, int]  # The virtual time of each of the four.


@dataclass(frozen=True, slots=True)
class RoutedWork:
    """What each rank computes, in its order, as numbers: a search prices many plans, and half of
    the time would go into making actions.

    A visit is one hop of one microbatch. Work is 4 * the index of its visit + the index of its
    kind in WORK_KINDS, so older work has a lower number.

    Attributes:
        turns: microbatches by turn; the visits of each follow each other in the order of its route.
        by_rank: work of each rank of the plan, by rank.
    """

    turns: tuple[int, ...]
    by_rank: dict[int, list[int]]

    def by_visit(
        self,
        routes: Sequence[Route],
        of_route: Callable[[Route], Sequence[_Entry]],
        known: dict[int, tuple[Route, Sequence[_Entry]]],
    ) -> list[_Entry]:
        """Entries of all visits, in their order.

        Args:
            of_route: the entries of one microbatch's visits.
            known: results of `of_route` by the id of the route, which has what is found added.
        """
        entries: list[_Entry] = []
        for microbatch in self.turns:
            route = routes[microbatch]
            key = id(route)
            if key not in known:  # The entry holds the route, so that no other one gets this id.
                known[key] = route, of_route(route)
            entries.extend(known[key][1])
        return entries


def routed_1f1b(plan: Plan) -> Schedule:
    """The forwards and backwards of all routes of a plan, in the order of each rank.

    Every rank of the plan has an entry, even if no microbatch visits it.
    """
    work = routed_work(plan)
    hops = [(m, hop) for m in work.turns for hop in range(len(plan.routes[m]))]
    return Schedule(
        plan.routes,
        {
            rank: tuple([Action(WORK_KINDS[number & 3], *hops[number >> 2]) for number in numbers])
            for rank, numbers in work.by_rank.items()
        },
    )


def routed_work(plan: Plan) -> RoutedWork:
    """The work of `routed_1f1b`, in the same order, as numbers."""
    ranks = {rank: _VirtualRank(limit) for rank, limit in sorted(_limits(plan).items())}
    turns = _turns(plan)
    _run(_visits(plan, turns, ranks), list(ranks.values()))
    return RoutedWork(tuple(turns), {rank: virtual.order for rank, virtual in ranks.items()})


@dataclass(slots=True, eq=False)
class _VirtualRank:
    """A rank in virtual time; the heaps hold work that could start now, oldest first.

    Attributes:
        limit: upper bound on the microbatches in flight.
        order: work that was started so far.
        in_flight_work: heap of work on microbatches that are in flight on the rank.
        new_forwards: heap of the forwards of microbatches that are new to the rank.
        deferred: heap of work for which no other rank waits.
        in_flight: number of microbatches in flight.
        is_busy: whether some work is running.
    """

    limit: int
    order: list[int] = field(default_factory=list)
    in_flight_work: list[int] = field(default_factory=list)
    new_forwards: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    in_flight: int = 0
    is_busy: bool = False

    def next_work(self) -> int:
        """The work to start now; -1 if there is none."""
        if self.in_flight_work:
            return heappop(self.in_flight_work)
        if self.new_forwards and self.in_flight < self.limit:
            return self.admit()
        return heappop(self.deferred) if self.deferred else -1

    def admit(self) -> int:
        """The forward of the oldest new microbatch, which is in flight from now on."""
        self.in_flight += 1
        return heappop(self.new_forwards)


class _Visits(NamedTuple):
    """All hops of all microbatches by turn.

    Attributes:
        ranks: rank of each visit.
        is_entry: whether the microbatch of a visit comes to the rank for the first time.
        onward: work that the forward of a visit makes possible: the next forward, or the backward.
        onward_time: virtual time from that forward until then, while its output is on the way.
        back: work that the backward of a visit makes possible at the hop before; -1: there is none.
        back_time: virtual time from that backward until then.
        costs: virtual time of each piece of work.
        queues: heap of the rank in which each piece of work waits when it could start.
        first_forwards: forwards at which the routes begin.
    """

    ranks: list[_VirtualRank]
    is_entry: list[bool]
    onward: list[int]
    onward_time: list[int]
    back: list[int]
    back_time: list[int]
    costs: list[int]
    queues: list[list[int]]
    first_forwards: list[int]


def _visits(plan: Plan, turns: list[int], ranks: dict[int, _VirtualRank]) -> _Visits:
    """The visits of all microbatches."""
    costs = _Costs(plan)
    by_route: dict[int, _Visits] = {}  # By id: hashing a route takes longer than the rest.
    visits = _Visits([], [], [], [], [], [], [], [], [])
    for microbatch in turns:
        route = plan.routes[microbatch]
        own = by_route.get(id(route))
        if own is None:
            own = by_route[id(route)] = _route_visits(plan, route, costs, ranks)
        first = 4 * len(visits.ranks)
        visits.first_forwards.append(first)
        visits.onward.extend([first + work for work in own.onward])
        visits.back.extend([first + work if work >= 0 else -1 for work in own.back])
        visits.ranks.extend(own.ranks)
        visits.is_entry.extend(own.is_entry)
        visits.onward_time.extend(own.onward_time)
        visits.back_time.extend(own.back_time)
        visits.costs.extend(own.costs)
        visits.queues.extend(own.queues)
    return visits


def _route_visits(
    plan: Plan, route: Route, costs: "_Costs", ranks: dict[int, _VirtualRank]
) -> _Visits:
    """The visits of one microbatch, as if it were the only one."""
    virtual_ranks, entries, count = [ranks[hop.rank] for hop in route], _entries(route), len(route)
    arrivals = [costs.arrival(before, hop) for before, hop in pairwise(route)]
    # The first hop sends no gradient, so no other rank waits for any part of its backward.
    is_split = [plan.splits_backward and index > 0 for index in range(count)]
    backward = [4 * index + (_INPUT if is_split[index] else _BACKWARD) for index in range(count)]
    queues: list[list[int]] = []
    for index, (rank, is_entry) in enumerate(zip(virtual_ranks, entries, strict=True)):
        is_deferred = plan.splits_backward and not index
        queues.append(rank.new_forwards if is_entry else rank.in_flight_work)
        queues += [rank.deferred if is_deferred else rank.in_flight_work] * 2
        queues.append(rank.deferred)
    return _Visits(
        ranks=virtual_ranks,
        is_entry=entries,
        onward=[*(4 * index + _FORWARD for index in range(1, count)), backward[-1]],
        onward_time=[*arrivals, 0],
        back=[-1, *backward[:-1]],
        back_time=[0, *arrivals],
        costs=[cost for hop in route for cost in costs.of(hop)],
        queues=queues,
        first_forwards=[0],
    )


def _turns(plan: Plan) -> list[int]:
    """The microbatches sorted by turn: those with the same least visited rank keep their order, and
    such groups are interleaved evenly."""
    routes = plan.routes
    visits = Counter(hop.rank for route in routes for hop in route)
    # Ranks are numbered by first visit: renaming nodes (policies/ahead.py) changes no order.
    number_of = {rank: number for number, rank in enumerate(visits)}
    least_of = {
        key: min((visits[hop.rank], number_of[hop.rank]) for hop in route)[1]
        for key, route in {id(route): route for route in routes}.items()
    }
    counts = Counter(least_of[id(route)] for route in routes)
    numbers: Counter[int] = Counter()
    turns = []
    for route in routes:
        least = least_of[id(route)]
        turns.append((2 * numbers[least] + 1) / counts[least])
        numbers[least] += 1
    return sorted(range(len(turns)), key=lambda microbatch: (turns[microbatch], microbatch))


def _entries(route: Route) -> list[bool]:
    """Whether each hop of a route is the first one on its rank."""
    visited: set[int] = set()
    entries = []
    for hop in route:
        entries.append(hop.rank not in visited)
        visited.add(hop.rank)
    return entries


class _Costs:
    """The virtual times of hops.

    They are integers, so that simultaneous events have exactly equal times, and what a rank does
    does not depend on pipelines with which it shares no route.
    """

    def __init__(self, plan: Plan) -> None:
        self._layers = plan.layers_by_rank
        self._ticks = plan.ticks or dict.fromkeys(plan.ranks, Ticks(1, 1, 1, 0))
        # A layer of a rank is one of this many equal parts of its stage or, without ticks, of the
        # time of its pipeline.
        parts = {
            rank: (1 if plan.ticks else len(pipeline.template.stages))
            * (stage.end_layer - stage.first_layer)
            for pipeline in plan.pipelines
            for stage, ranks in zip(
                pipeline.template.stages, pipeline.ranks_by_stage(), strict=True
            )
            for rank in ranks
        }
        self._scale = lcm(*parts.values())
        self._layer_cost = {rank: self._scale // number for rank, number in parts.items()}

    def of(self, hop: Hop) -> _Times:
        layers = self._layers[hop.rank]
        assert layers.start <= hop.first_layer < hop.end_layer <= layers.stop
        cost = self._layer_cost[hop.rank] * (hop.end_layer - hop.first_layer)
        ticks = self._ticks[hop.rank]
        first, second = cost * ticks.backward_input, cost * ticks.backward_weight
        return cost * ticks.forward, first + second, first, second

    def arrival(self, before: Hop, hop: Hop) -> int:
        return 0 if before.rank == hop.rank else self._scale * self._ticks[hop.rank].arrival


def _limits(plan: Plan) -> dict[int, int]:
    """The limit of microbatches in flight of every rank: the number of hops to the end of a route,
    or twice that, if the plan does not set it."""
    limits = dict.fromkeys(plan.ranks, 1)
    num_routes: Counter[int] = Counter()
    uneven: set[int] = set()
    for route in plan.different_routes:
        num_routes.update({hop.rank for hop in route})
        for index, hop in enumerate(route):
            limits[hop.rank] = max(limits[hop.rank], len(route) - index)
    for route in plan.different_routes:
        if any(num_routes[hop.rank] > 1 for hop in route):
            uneven.update(hop.rank for hop in route)
    for rank in uneven:
        limits[rank] *= 2
    return limits | {rank: plan.in_flight[rank] for rank in limits if rank in plan.in_flight}


def _run(visits: _Visits, ranks: list[_VirtualRank]) -> None:
    """Runs all visits forward and backward in virtual time and records each rank's order."""
    rank_of, is_entry, onward, onward_time, back, back_time, costs, queues, firsts = visits
    for work in firsts:
        heappush(queues[work], work)
    due = defaultdict[int, list[int]](list)  # By time: work that ends, and ~work that could start.
    times: list[int] = []  # Heap of the keys of due.
    now, touched = 0, ranks
    while True:
        for rank in touched:
            if rank.is_busy or (work := rank.next_work()) < 0:
                continue
            rank.is_busy = True
            rank.order.append(work)
            end = now + costs[work]
            if end not in due:
                heappush(times, end)
            due[end].append(work)
        if not times:
            blocked = [rank for rank in ranks if rank.new_forwards]
            if not blocked:
                return
            oldest = min(blocked, key=lambda rank: rank.new_forwards[0])
            oldest.in_flight_work.append(oldest.admit())
            touched = [oldest]
            continue
        # All work that ends at this instant ends before any rank chooses its next work: in steady
        # 1F1B a forward starts exactly when a backward ends and makes room for it.
        now, touched = heappop(times), []
        for work in due.pop(now):
            if work < 0:
                heappush(queues[~work], ~work)
                touched.append(rank_of[~work >> 2])
                continue
            index, kind = work >> 2, work & 3
            rank = rank_of[index]
            rank.is_busy = False
            touched.append(rank)
            if kind == _FORWARD:
                message, arrival = onward[index], now + onward_time[index]
            else:
                if kind == _INPUT:
                    heappush(rank.deferred, work - _INPUT + _WEIGHT)
                elif is_entry[index]:
                    rank.in_flight -= 1
                message, arrival = back[index], now + back_time[index]
                if kind == _WEIGHT or message < 0:
                    continue
            if arrival == now:
                heappush(queues[message], message)
                touched.append(rank_of[message >> 2])
            else:
                if arrival not in due:
                    heappush(times, arrival)
                due[arrival].append(~message)
