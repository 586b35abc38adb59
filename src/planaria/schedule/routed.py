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

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import lcm

import msgspec

from planaria.core.plan import Hop, Plan, Route, Ticks
from planaria.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
)

# A piece of work is 4 * the index of its visit + one of these, so older work has a lower number.
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)
_KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
_Times = tuple[int, int, int, int]  # The virtual time of each of the four.


def routed_1f1b(plan: Plan) -> Schedule:
    """The forwards and backwards of all routes of a plan, in the order of each rank.

    Every rank of the plan has an entry, even if no microbatch visits it.
    """
    visits = _visits(plan)
    ranks = {rank: _VirtualRank(limit) for rank, limit in _limits(plan).items()}
    for index, visit in enumerate(visits):
        if visit.action.hop == 0:
            ranks[visit.rank].admit(index, visit)
    _run(visits, ranks)
    return Schedule(plan.routes, {rank: tuple(ranks[rank].order) for rank in sorted(ranks)})


class _HopVisit(msgspec.Struct, frozen=True):
    """One hop of one microbatch.

    Attributes:
        action: forward of the hop.
        rank: rank of the hop.
        costs: virtual time of its forward, its whole backward and both parts of it.
        transfer_time: virtual time that the activations take from the hop before, and the gradient
            back to it; 0 if that hop is on the same rank.
        is_first_on_rank: whether the microbatch comes to this rank for the first time.
        is_last: whether it is the last hop of the route.
        backward: _BACKWARD, or _INPUT if the backward has two parts.
        is_deferred: whether no other rank waits for its backward.
    """

    action: Action
    rank: int
    costs: _Times
    transfer_time: int
    is_first_on_rank: bool
    is_last: bool
    backward: int
    is_deferred: bool


@dataclass(slots=True)
class _VirtualRank:
    """A rank in virtual time; the heaps hold work that could start now, oldest first.

    Attributes:
        limit: upper bound on the microbatches in flight.
        order: actions that were started so far.
        in_flight_work: heap of work on microbatches that are in flight on the rank.
        new_visits: heap of visits by microbatches that are new to the rank.
        deferred: heap of work for which no other rank waits.
        in_flight: number of microbatches in flight.
        is_busy: whether an action is running.
    """

    limit: int
    order: list[Action] = field(default_factory=list)
    in_flight_work: list[int] = field(default_factory=list)
    new_visits: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    in_flight: int = 0
    is_busy: bool = False

    def admit(self, index: int, visit: _HopVisit) -> None:
        if visit.is_first_on_rank:
            heappush(self.new_visits, index)
        else:
            heappush(self.in_flight_work, 4 * index + _FORWARD)

    def next_work(self) -> int:
        """The work to start now; -1 if there is none."""
        if self.in_flight_work:
            return heappop(self.in_flight_work)
        if self.new_visits and self.in_flight < self.limit:
            self.in_flight += 1
            return 4 * heappop(self.new_visits) + _FORWARD
        return heappop(self.deferred) if self.deferred else -1


def _visits(plan: Plan) -> list[_HopVisit]:
    """All hops of all microbatches, sorted by turn of the microbatch: a smaller index is older."""
    costs = _Costs(plan)
    # By id: hashing a route takes longer than the rest.
    by_route: dict[int, list[tuple[int, _Times, int, bool, bool, int, bool]]] = {}
    visits: list[_HopVisit] = []
    for microbatch in _turns(plan):
        route = plan.routes[microbatch]
        if id(route) not in by_route:
            by_route[id(route)] = [
                (
                    hop.rank,
                    costs.of(hop),
                    costs.arrival(route[index - 1], hop) if index else 0,
                    is_first_on_rank,
                    hop.end_layer == plan.num_layers,
                    _INPUT if plan.splits_backward and index else _BACKWARD,
                    plan.splits_backward and not index,
                )
                for index, (hop, is_first_on_rank) in enumerate(
                    zip(route, _entries(route), strict=True)
                )
            ]
        visits += [
            _HopVisit(Action(FORWARD, microbatch, index), *fields)
            for index, fields in enumerate(by_route[id(route)])
        ]
    return visits


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


def _run(visits: list[_HopVisit], ranks: dict[int, _VirtualRank]) -> None:
    """Runs all visits forward and backward in virtual time and records each rank's order."""
    due: dict[int, list[int]] = {}
    times: list[int] = []

    def put(at: int, work: int) -> None:
        if at not in due:
            due[at] = []
            heappush(times, at)
        due[at].append(work)

    def start(now: int, rank: _VirtualRank, work: int) -> None:
        visit, kind = visits[work >> 2], work & 3
        action = visit.action
        if kind != _FORWARD:
            action = Action(_KINDS[kind], action.microbatch, action.hop)
        rank.order.append(action)
        rank.is_busy = True
        put(now + visit.costs[kind], work)

    now = 0
    touched = set(ranks)
    while True:
        for number in touched:
            rank = ranks[number]
            if not rank.is_busy and (work := rank.next_work()) >= 0:
                start(now, rank, work)
        if not times:
            blocked = [rank for rank in ranks.values() if rank.new_visits]
            if not blocked:
                return
            rank = min(blocked, key=lambda rank: rank.new_visits[0])
            rank.in_flight += 1
            start(now, rank, 4 * heappop(rank.new_visits) + _FORWARD)
        # All work that ends at this instant ends before any rank chooses its next work: in steady
        # 1F1B a forward starts exactly when a backward ends and makes room for it.
        now = heappop(times)
        touched = set()
        for work in due.pop(now):
            if work < 0:
                touched.add(_arrive(~work, visits, ranks))
                continue
            touched.add(visits[work >> 2].rank)
            for message, transfer_time in _finish(work, visits, ranks):
                if transfer_time:
                    put(now + transfer_time, ~message)
                else:
                    touched.add(_arrive(message, visits, ranks))


def _finish(
    work: int, visits: list[_HopVisit], ranks: dict[int, _VirtualRank]
) -> list[tuple[int, int]]:
    """Ends a piece of work; returns the work that it enables and the virtual time until that can
    start.

    The enabled work is the forward, or the backward, of a neighbouring visit, or the backward of
    the last visit of a route.
    """
    index, kind = work >> 2, work & 3
    visit = visits[index]
    rank = ranks[visit.rank]
    rank.is_busy = False
    if kind == _FORWARD:
        if visit.is_last:
            return [(4 * index + visit.backward, 0)]
        return [(4 * (index + 1) + _FORWARD, visits[index + 1].transfer_time)]
    if kind == _INPUT:
        heappush(rank.deferred, 4 * index + _WEIGHT)
    elif visit.is_first_on_rank:
        rank.in_flight -= 1
    if kind == _WEIGHT or visit.action.hop == 0:
        return []
    return [(4 * (index - 1) + visits[index - 1].backward, visit.transfer_time)]


def _arrive(work: int, visits: list[_HopVisit], ranks: dict[int, _VirtualRank]) -> int:
    """Makes a piece of work ready to start; returns its rank."""
    index, kind = work >> 2, work & 3
    visit = visits[index]
    rank = ranks[visit.rank]
    if kind == _FORWARD:
        rank.admit(index, visit)
    else:
        heappush(rank.deferred if visit.is_deferred else rank.in_flight_work, work)
    return visit.rank
