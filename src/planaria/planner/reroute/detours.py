"""Microbatches dealt over the live places of a plan, around its empty ones; see reroutes.py."""

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from planaria.core.plan import Hop, Plan, Route
from planaria.planner.problem import Problem


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


class Detours:
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
