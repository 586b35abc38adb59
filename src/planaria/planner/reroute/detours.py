"""Distribution of microbatches over the live places of a plan, around its empty ones; see
reroutes.py.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from planaria.core.plan import Hop, Plan, Route, stage_layers
from planaria.planner.problem import Problem


class _Step(NamedTuple):
    """A hop that a route may take, and the seconds that its rank computes for it."""

    hop: Hop
    seconds: float


class _Leg(NamedTuple):
    """Layers [first_layer, end_layer) of a pipeline: one live place, or consecutive empty ones.

    Attributes:
        steps: pairs of a layer at which a hop of this leg may begin, and the steps that begin
            there; from the last layer to the first.
    """

    first_layer: int
    end_layer: int
    steps: tuple[tuple[int, tuple[_Step, ...]], ...]


class _RouteTail(NamedTuple):
    """The rest of a route that one more microbatch may take; the lesser of two is the better one.

    Attributes:
        latest_s: latest time at which a rank of these hops has done all its work.
        num_hops: number of hops.
        sum_s: sum of the times at which the ranks of the hops have done all their work.
        hops: hops in order.
    """

    latest_s: float
    num_hops: int
    sum_s: float
    hops: tuple[Hop, ...]


_NO_HOPS: Final = _RouteTail(0.0, 0, 0.0, ())


class Detours:
    """Distributes microbatches over the live places of a plan.

    The load of a rank is the seconds that it computes. The lead of a rank is the seconds that a
    microbatch spends, forward and backward, in the stages before the rank's own in its pipeline.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._layers_by_rank = plan.layers_by_rank
        self._lead_s: dict[int, float] = {}
        self._until_s: dict[int, list[float]] = {}
        for pipeline in plan.pipelines:
            lead_s = 0.0
            stages = pipeline.template.stages
            kinds = pipeline.template.stage_kinds()
            for stage, kind, ranks in zip(stages, kinds, pipeline.ranks_by_stage(), strict=True):
                count = stage.num_devices
                layers = stage_layers(problem.profile, stage)
                seconds = [(x.forward_s[count] + x.backward_s(count)) / kind.speed for x in layers]
                until_s = list(accumulate(seconds, initial=0.0))
                if ranks[0] in self._layers_by_rank:
                    self._lead_s[ranks[0]], self._until_s[ranks[0]] = lead_s, until_s
                lead_s += until_s[-1]
        self._holders = [
            [rank for rank in self._until_s if layer in self._layers_by_rank[rank]]
            for layer in range(plan.num_layers)
        ]
        self._routes: list[Route] = []
        self._legs: list[tuple[_Leg, ...]] = []
        without_gaps, with_gaps = [], []
        for index, pipeline in enumerate(plan.pipelines if self.covers_model() else ()):
            route = pipeline.route()
            is_live_by_hop = [hop.rank in self._layers_by_rank for hop in route]
            self._routes.append(route)
            self._legs.append(self._legs_of(route))
            if all(is_live_by_hop):
                without_gaps.append(index)
            elif any(is_live_by_hop):
                with_gaps.append(index)
        self._whole_pipelines, self._pipelines_with_gaps = tuple(without_gaps), tuple(with_gaps)

    def _legs_of(self, route: Route) -> tuple[_Leg, ...]:
        """The legs of a pipeline from the last to the first; neighbouring empty places are one."""
        legs = []
        for is_live, hops in groupby(route, key=lambda hop: hop.rank in self._layers_by_rank):
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
                Hop(rank, first, min(self._layers_by_rank[rank].stop, end_layer))
                for rank in self._holders[first]
            ]
            steps[first] = tuple(_Step(hop, self._seconds(hop)) for hop in hops)
            ends = {hop.end_layer for hop in hops}
            open_layers |= ends.difference(steps, [end_layer])
        return _Leg(first_layer, end_layer, tuple(sorted(steps.items(), reverse=True)))

    def covers_model(self) -> bool:
        """Whether every layer is held in some live place."""
        return all(self._holders)

    def num_around(self, routes: Sequence[Route]) -> int:
        """How many of the routes begin in pipelines with empty places."""
        whole_routes = {self._routes[index] for index in self._whole_pipelines}
        return sum(route not in whole_routes for route in routes)

    def can_begin_around(self, num_microbatches: int, num_around: int) -> bool:
        """Whether exactly num_around of the microbatches can begin in pipelines with empty
        places."""
        if not 0 <= num_around <= num_microbatches:
            return False
        return bool(self._whole_pipelines or num_around == num_microbatches) and bool(
            self._pipelines_with_gaps or not num_around
        )

    def routes(self, num_microbatches: int, num_around: int | None) -> tuple[Route, ...]:
        """The routes of all microbatches, grouped by their homes.

        Args:
            num_around: number of microbatches that begin in pipelines with empty places; None: the
                loads decide.
        """
        load_s = dict.fromkeys(self._until_s, 0.0)
        homes: list[tuple[int, Route]] = []
        if num_around is None:
            groups = [(num_microbatches, self._whole_pipelines + self._pipelines_with_gaps)]
        else:
            groups = [
                (num_around, self._pipelines_with_gaps),
                (num_microbatches - num_around, self._whole_pipelines),
            ]
        for count, pipelines in groups:
            if count:
                homes += self._distribute(count, pipelines, load_s)
        # Equal routes are one object, which is faster to look up than equal ones.
        known: dict[Route, Route] = {}
        in_order = sorted(homes, key=lambda home: home[0])
        return tuple(known.setdefault(route, route) for _, route in in_order)

    def _distribute(
        self, count: int, pipelines: Sequence[int], load_s: dict[int, float]
    ) -> Iterator[tuple[int, Route]]:
        """Yields the home and the route of each of `count` microbatches, and adds to the loads.

        Loads only grow, so the best route of a home only gets worse. So if a home is best after its
        route was computed again, the old routes of the others need not be computed again.
        """
        route_tails = [(_NO_HOPS, index) for index in pipelines]
        heapify(route_tails)
        while count:
            index = route_tails[0][1]
            route_tail = self._best(index, load_s)
            heapreplace(route_tails, (route_tail, index))
            if route_tails[0] == (route_tail, index):
                for hop in route_tail.hops:
                    load_s[hop.rank] += self._seconds(hop)
                yield index, route_tail.hops
                count -= 1

    def _best(self, index: int, load_s: dict[int, float]) -> _RouteTail:
        """The best route of one more microbatch of a home.

        A dynamic program from the last layer to the first finds it: the best hops that follow a hop
        depend only on the layer at which that one ends.
        """
        best_tail = _NO_HOPS
        for leg in self._legs[index]:
            after = {leg.end_layer: best_tail}
            for first, steps in leg.steps:
                after[first] = min(
                    self._with_step(step, after[step.hop.end_layer], load_s) for step in steps
                )
            best_tail = after[leg.first_layer]
        return best_tail

    def _with_step(self, step: _Step, after: _RouteTail, load_s: dict[int, float]) -> _RouteTail:
        """The hop of a step, followed by given hops."""
        hop, seconds = step
        end_s = self._lead_s[hop.rank] + load_s[hop.rank] + seconds
        return _RouteTail(
            max(end_s, after.latest_s), after.num_hops + 1, after.sum_s + end_s, (hop, *after.hops)
        )

    def _seconds(self, hop: Hop) -> float:
        start, until_s = self._layers_by_rank[hop.rank].start, self._until_s[hop.rank]
        return until_s[hop.end_layer - start] - until_s[hop.first_layer - start]
