"""Routes around empty places: who computes what nodes that are gone would have computed.

A microbatch begins in some pipeline, its home, and keeps to its stages where their nodes live.
The layers of empty places it visits at other holders, each as far as its stage goes: one hop where
a peer's stage has the same boundaries, several where they differ. No parameter moves.

1. Microbatches are dealt one by one. Each takes the home and the detours after which the rank that
   ends last ends earliest: what it has to do until then, behind what a microbatch needs to get to
   its stage and back. So detours go to who has time, and pipelines with empty places get fewer.
2. A few more or fewer of them begin in pipelines with empty places. What results is run in virtual
   time, and the fastest is taken: a schedule has gaps that loads do not show.

Source: ReCycle (SOSP '24), adaptive pipelining.
Differs: there a microbatch stays in its pipeline, peers of the lost stage take equal parts, and
all pipelines are cut alike. Odyssey's equation 13 sums over stages what in truth overlaps; here
it is the most loaded rank that counts, and then the schedule itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from itertools import accumulate, groupby
from math import inf
from typing import Final, NamedTuple

from planaria.core.plan import Hop, Plan, Route
from planaria.estimator.memory import bytes_by_rank, kept_bytes
from planaria.estimator.time import predicted_timeline
from planaria.planner.problem import Problem
from planaria.schedule.action import Schedule
from planaria.schedule.lower import unchecked

_HOPS_MAX: Final = 1 << 10  # Of all tries together; they take some 50 ms.


class Priced(NamedTuple):
    """A plan, and what an iteration of it takes."""

    plan: Plan
    iteration_s: float


def rerouted(problem: Problem, plan: Plan) -> Priced | None:
    """The fastest plan with routes that avoid its empty places.

    Where a device has no memory for as many microbatches in flight as its schedule would keep, it
    keeps fewer.

    Args:
        plan: its routes are not looked at.

    Returns:
        None if a layer is in empty places only, or some device has no memory for one microbatch.
    """
    detours = _Detours(problem, plan)
    if not detours.covers_model():
        return None
    first = detours.routes(problem.num_microbatches, None)
    around = detours.num_around(first)
    num_tries = _HOPS_MAX // sum(map(len, first))
    nearest = [around + sign * step for step in range(1, num_tries) for sign in (-1, 1)]
    can = [number for number in nearest if detours.can_deal(problem.num_microbatches, number)]
    others = (
        detours.routes(problem.num_microbatches, number) for number in can[: max(0, num_tries - 1)]
    )
    return _fastest(priced(problem, replace(plan, routes=routes)) for routes in (first, *others))


def dealt(problem: Problem, plan: Plan) -> Priced | None:
    """As `rerouted`, without step 2."""
    detours = _Detours(problem, plan)
    if not detours.covers_model():
        return None
    routes = detours.routes(problem.num_microbatches, None)
    return priced(problem, replace(plan, routes=routes))


def even_s(problem: Problem, plan: Plan) -> float:
    """When the rank that ends last would end, if all holders of each layer shared its work evenly.

    Infinite if a layer has none. It is what `dealt` aims at, in O(layers + ranks).
    """
    stages = [
        (stage, kind.speed, ranks[0])
        for pipeline in plan.pipelines
        for stage, kind, ranks in zip(
            pipeline.template.stages,
            pipeline.template.stage_kinds(),
            pipeline.ranks_by_stage(),
            strict=True,
        )
    ]
    # By layer, how many times a holder's own speed all of them are, and what each has to do.
    speeds = [0.0] * plan.num_layers
    seconds = [0.0] * plan.num_layers
    for stage, speed, rank in stages:
        if rank in plan.layers_by_rank:
            for layer in range(stage.first_layer, stage.end_layer):
                speeds[layer] += speed
                profile = problem.profile.layers[layer]
                count = stage.num_devices
                seconds[layer] = profile.forward_s[count] + profile.backward_s(count)
    if not all(speeds):
        return inf
    shares_s = [s * problem.num_microbatches / v for s, v in zip(seconds, speeds, strict=True)]
    until_s = list(accumulate(shares_s, initial=0.0))
    lead_s = list(accumulate(seconds, initial=0.0))
    return max(
        lead_s[stage.first_layer] + until_s[stage.end_layer] - until_s[stage.first_layer]
        for stage, _, rank in stages
        if rank in plan.layers_by_rank
    )


def priced(problem: Problem, plan: Plan) -> Priced | None:
    """The plan with its routes, run in virtual time, with whole or with split backwards and as many
    microbatches in flight as there is memory for; None if some device has none for one."""
    return _fastest((_whole(problem, plan), _split(problem, plan)))


def simulated_s(problem: Problem, plan: Plan) -> float:
    """The iteration of a plan as it is, run in virtual time; memory is not looked at."""
    return _iteration_s(problem, plan, _schedule(problem, plan))


def _fastest(found: Iterable[Priced | None]) -> Priced | None:
    """Of equals the first; None if there is none."""
    return min(filter(None, found), key=lambda one: one.iteration_s, default=None)


def _whole(problem: Problem, plan: Plan) -> Priced | None:
    """With whole backwards, and what 1F1B keeps in flight where there is memory for that."""
    plan = replace(plan, splits_backward=False, in_flight={})
    schedule = _schedule(problem, plan)
    if short := _short_of_memory(problem, plan, schedule):
        plan = replace(plan, in_flight=_room(problem, plan, short))
        return _if_it_fits(problem, plan)
    return Priced(plan, _iteration_s(problem, plan, schedule))


def _split(problem: Problem, plan: Plan) -> Priced | None:
    """With split backwards, and as many microbatches in flight as there is memory for."""
    if not problem.splits_backward:
        return None
    plan = replace(plan, splits_backward=True)
    firsts = plan.layers_by_rank.keys() & _limits_bytes(problem, plan).keys()
    return _if_it_fits(problem, replace(plan, in_flight=_room(problem, plan, sorted(firsts))))


def _if_it_fits(problem: Problem, plan: Plan) -> Priced | None:
    schedule = _schedule(problem, plan)
    # Routes that visit ranks in both orders may have been let in over the limit.
    if min(plan.in_flight.values()) < 1 or _short_of_memory(problem, plan, schedule):
        return None
    return Priced(plan, _iteration_s(problem, plan, schedule))


def _schedule(problem: Problem, plan: Plan) -> Schedule:
    return unchecked(plan, tied=problem.profile.tied, order=problem.reduction_order)


def _iteration_s(problem: Problem, plan: Plan, schedule: Schedule) -> float:
    factor = problem.reduce_bytes_factor
    timeline = predicted_timeline(schedule, problem.profile, plan=plan, reduce_bytes_factor=factor)
    return timeline.iteration_s


def _short_of_memory(problem: Problem, plan: Plan, schedule: Schedule) -> list[int]:
    """The ranks to which the schedule gives more than they can hold."""
    limits_bytes = _limits_bytes(problem, plan)
    if not any(limits_bytes.values()):
        return []
    profile, copies = problem.profile, problem.gradient_copies
    held = bytes_by_rank(profile, plan, gradient_copies=copies)
    return [
        rank
        for rank, of_rank in held.items()
        if 0 < limits_bytes[rank] < of_rank.state_bytes + kept_bytes(profile, schedule, rank)
    ]


def _room(problem: Problem, plan: Plan, ranks: Iterable[int]) -> dict[int, int]:
    """For how many microbatches each of these ranks has memory, at most all.

    Of equal bytes, that is: as if each had all layers of the rank's stage.
    """
    limits_bytes = _limits_bytes(problem, plan)
    held = bytes_by_rank(problem.profile, plan, gradient_copies=problem.gradient_copies)
    room = {}
    for rank in ranks:
        free_bytes = limits_bytes[rank] - held[rank].state_bytes
        fit = free_bytes // max(1, held[rank].microbatch_bytes)
        room[rank] = min(problem.num_microbatches, fit) if limits_bytes[rank] else len(plan.routes)
    return room


def _limits_bytes(problem: Problem, plan: Plan) -> dict[int, int]:
    """What the devices of each stage may hold, by its first rank; 0 where there is no limit."""
    return {
        ranks[0]: kind.device_memory_bytes or problem.profile.device_memory_bytes
        for pipeline in plan.pipelines
        for kind, ranks in zip(
            pipeline.template.stage_kinds(), pipeline.ranks_by_stage(), strict=True
        )
    }


class _Step(NamedTuple):
    """A hop that a detour may take, and how long its rank computes."""

    hop: Hop
    seconds: float


class _Leg(NamedTuple):
    """Layers [first_layer, end_layer) of a pipeline: a place that lives, or empty ones.

    Attributes:
        steps: by layer at which a hop of this leg may begin, from the last to the first.
    """

    first_layer: int
    end_layer: int
    steps: tuple[tuple[int, tuple[_Step, ...]], ...]


class _Way(NamedTuple):
    """What one more microbatch would visit; of two ways the lesser one is the better.

    Attributes:
        latest_s: when the last of the ranks there is through with all that it has to do.
        sum_s: of when each of them is.
    """

    latest_s: float
    num_hops: int
    sum_s: float
    hops: tuple[Hop, ...]


_NOTHING: Final = _Way(0.0, 0, 0.0, ())


class _Detours:
    """Deals microbatches over the live places of a plan.

    A rank's load is the seconds that it computes, and its lead those that a microbatch needs from
    the begin of the rank's own pipeline to its stage, forward and backward.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._held = plan.layers_by_rank
        self._lead_s: dict[int, float] = {}
        self._until_s: dict[int, list[float]] = {}
        for pipeline in plan.pipelines:
            lead_s = 0.0
            stages = pipeline.template.stages
            kinds = pipeline.template.stage_kinds()
            for stage, kind, ranks in zip(stages, kinds, pipeline.ranks_by_stage(), strict=True):
                count = stage.num_devices
                layers = problem.profile.layers[stage.first_layer : stage.end_layer]
                seconds = [(x.forward_s[count] + x.backward_s(count)) / kind.speed for x in layers]
                until_s = list(accumulate(seconds, initial=0.0))
                if ranks[0] in self._held:
                    self._lead_s[ranks[0]], self._until_s[ranks[0]] = lead_s, until_s
                lead_s += until_s[-1]
        self._holders = [
            [rank for rank in self._until_s if layer in self._held[rank]]
            for layer in range(plan.num_layers)
        ]
        self._routes: list[Route] = []
        self._legs: list[tuple[_Leg, ...]] = []
        whole, broken = [], []
        for index, pipeline in enumerate(plan.pipelines if self.covers_model() else ()):
            route = pipeline.route()
            lives = [hop.rank in self._held for hop in route]
            self._routes.append(route)
            self._legs.append(self._legs_of(route))
            if all(lives):
                whole.append(index)
            elif any(lives):
                broken.append(index)
        self._whole, self._broken = tuple(whole), tuple(broken)

    def _legs_of(self, route: Route) -> tuple[_Leg, ...]:
        """A pipeline's places from the last to the first, empty ones next to each other as one."""
        legs = []
        for is_live, hops in groupby(route, key=lambda hop: hop.rank in self._held):
            if is_live:
                for hop in hops:
                    step = _Step(hop, self._seconds(hop))
                    legs.append(_Leg(hop.first_layer, hop.end_layer, ((hop.first_layer, (step,)),)))
            else:
                empty = list(hops)
                legs.append(self._empty_leg(empty[0].first_layer, empty[-1].end_layer))
        return tuple(reversed(legs))

    def _empty_leg(self, first_layer: int, end_layer: int) -> _Leg:
        steps: dict[int, tuple[_Step, ...]] = {}
        open_layers = {first_layer}
        while open_layers:
            first = open_layers.pop()
            hops = [
                Hop(rank, first, min(self._held[rank].stop, end_layer))
                for rank in self._holders[first]
            ]
            steps[first] = tuple(_Step(hop, self._seconds(hop)) for hop in hops)
            ends = {hop.end_layer for hop in hops}
            open_layers |= ends.difference(steps, [end_layer])
        return _Leg(first_layer, end_layer, tuple(sorted(steps.items(), reverse=True)))

    def covers_model(self) -> bool:
        """Whether every layer is in a live place."""
        return all(self._holders)

    def num_around(self, routes: Sequence[Route]) -> int:
        """How many of the routes begin in pipelines with empty places."""
        whole = {self._routes[index] for index in self._whole}
        return sum(route not in whole for route in routes)

    def can_deal(self, num_microbatches: int, num_around: int) -> bool:
        """Whether so many of the microbatches can begin in pipelines with empty places."""
        if not 0 <= num_around <= num_microbatches:
            return False
        return bool(self._whole or num_around == num_microbatches) and bool(
            self._broken or not num_around
        )

    def routes(self, num_microbatches: int, num_around: int | None) -> tuple[Route, ...]:
        """The routes of all microbatches, those of one home together.

        Args:
            num_around: begin in pipelines with empty places; None: as many as is best.
        """
        load_s = dict.fromkeys(self._until_s, 0.0)
        homes: list[tuple[int, Route]] = []
        if num_around is None:
            groups = [(num_microbatches, self._whole + self._broken)]
        else:
            groups = [
                (num_around, self._broken),
                (num_microbatches - num_around, self._whole),
            ]
        for count, pipelines in groups:
            if count:
                homes += self._dealt(count, pipelines, load_s)
        return tuple(route for _, route in sorted(homes, key=lambda home: home[0]))

    def _dealt(
        self, count: int, pipelines: Sequence[int], load_s: dict[int, float]
    ) -> Iterator[tuple[int, Route]]:
        """So many microbatches with their homes; adds to the loads.

        Loads only grow, so a home that was better than the others and still is needs no look at
        the others.
        """
        ways = [(_NOTHING, index) for index in pipelines]
        heapify(ways)
        while count:
            index = ways[0][1]
            way = self._best(index, load_s)
            heapreplace(ways, (way, index))
            if ways[0] == (way, index):
                for hop in way.hops:
                    load_s[hop.rank] += self._seconds(hop)
                yield index, way.hops
                count -= 1

    def _best(self, index: int, load_s: dict[int, float]) -> _Way:
        """The way of one more microbatch of a home.

        From the last layer to the first: what follows a hop depends on where it ends alone.
        """
        best = _NOTHING
        for leg in self._legs[index]:
            after = {leg.end_layer: best}
            for first, steps in leg.steps:
                after[first] = min(
                    self._onward(step, after[step.hop.end_layer], load_s) for step in steps
                )
            best = after[leg.first_layer]
        return best

    def _onward(self, step: _Step, after: _Way, load_s: dict[int, float]) -> _Way:
        """A hop, and then as given."""
        hop, seconds = step
        end_s = self._lead_s[hop.rank] + load_s[hop.rank] + seconds
        return _Way(
            max(end_s, after.latest_s), after.num_hops + 1, after.sum_s + end_s, (hop, *after.hops)
        )

    def _seconds(self, hop: Hop) -> float:
        start, until_s = self._held[hop.rank].start, self._until_s[hop.rank]
        return until_s[hop.end_layer - start] - until_s[hop.first_layer - start]
