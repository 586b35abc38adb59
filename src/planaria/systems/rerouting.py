"""Iterations of equal pipelines that go around the places of lost nodes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from planaria.core.plan import Hop, Plan, Route
from planaria.estimator.makespan import stage_seconds
from planaria.estimator.time import predicted_timeline
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import PricedPlan, price_plan
from planaria.schedule.lower import unchecked_schedule
from planaria.systems.equal_pipelines import EqualPipelines
from planaria.systems.system import Setting

HOPS_MAX: Final = 1 << 14  # Number of hops of the largest plan that is simulated, in half a second.


class ReroutedTimes:
    """The seconds of an iteration while nodes of equal pipelines are lost.

    The microbatches of a pipeline that lacks a node go to the nodes at the same position of the
    other pipelines, in turn, and stay in their pipeline otherwise. The schedule of that is
    simulated, also while no node is lost, and its time kept by the numbers of lost nodes. Plans of
    more than `HOPS_MAX` hops are not simulated: without losses they take what 1F1B takes.

    Args:
        decouples: whether the gradients of weights may be computed later, where that is faster and
            memory allows.
        staggers: whether each stage takes its optimizer step as soon as its own gradients are
            summed, and goes on with the next iteration then.
    """

    def __init__(
        self, setting: Setting, pipelines: EqualPipelines, *, decouples: bool, staggers: bool
    ) -> None:
        problem = setting.catalog.problem
        self._problem = replace(problem, splits_backward=decouples and problem.splits_backward)
        self._pipelines, self._staggers = pipelines, staggers
        self._plan = pipelines.plan(setting)
        self._known: dict[tuple[int, ...], float] = {}
        seconds = stage_seconds(problem.profile, pipelines.template)
        # Seconds of a microbatch on the busiest stage of each node of a pipeline.
        self.node_s = [0.0] * pipelines.depth
        devices = 0
        for stage, forward_s, backward_s in zip(
            pipelines.template.stages, seconds.forward_s, seconds.backward_s, strict=True
        ):
            node = devices // pipelines.template.devices_per_node
            self.node_s[node] = max(self.node_s[node], forward_s + backward_s)
            devices += stage.num_devices

    def iteration_s(self, num_lost: Sequence[int]) -> float:
        """Seconds of an iteration; infinite if it cannot go around the lost nodes.

        Args:
            num_lost: number of lost nodes at each position of a pipeline.
        """
        key = tuple(num_lost)
        if key not in self._known:
            self._known[key] = self._measure(key)
        return self._known[key]

    @property
    def without_losses_s(self) -> float:
        """Seconds of an iteration while no node is lost."""
        return self.iteration_s((0,) * self._pipelines.depth)

    def _measure(self, num_lost: tuple[int, ...]) -> float:
        pipelines = self._pipelines
        if max(num_lost) >= pipelines.num_pipelines:
            return inf
        if len(self._plan.routes) * len(pipelines.template.stages) > HOPS_MAX:
            return pipelines.iteration_s + self._more_s(num_lost)
        plan = self._rerouted_plan(num_lost) if any(num_lost) else self._plan
        priced = price_plan(self._problem, plan)
        if priced is None:  # Templates have memory for the 1F1B of their own microbatches.
            return inf if any(num_lost) else pipelines.iteration_s
        return self._period_s(priced) if self._staggers else priced.iteration_s

    def _more_s(self, num_lost: tuple[int, ...]) -> float:
        """Seconds of the microbatches that the nodes of the busiest position get in addition."""
        number = self._pipelines.num_pipelines
        most = max(self._pipelines.microbatches)
        return max(
            most * lost / (number - lost) * seconds
            for lost, seconds in zip(num_lost, self.node_s, strict=True)
        )

    def _rerouted_plan(self, num_lost: tuple[int, ...]) -> Plan:
        """The plan around places of lost nodes, which are spread over the pipelines."""
        number, depth = self._pipelines.num_pipelines, self._pipelines.depth
        gone: set[int] = set()
        num_before = 0
        for position, lost in enumerate(num_lost):
            holes = ((num_before + index) % number for index in range(lost))
            gone.update(pipeline * depth + position for pipeline in holes)
            num_before += lost
        turns = [0] * depth
        # Equal routes are one object, which is faster to look up than equal ones.
        known: dict[Route, Route] = {}
        around = [self._around(route, gone, turns) for route in self._in_turn()]
        routes = tuple(known.setdefault(route, route) for route in around)
        return replace(self._plan, routes=routes, gone=tuple(sorted(gone)))

    def _in_turn(self) -> Iterator[Route]:
        """The pipelines' own routes, of each pipeline one in turn: so nodes get the microbatches of
        others among their own ones, not before."""
        counts = self._pipelines.microbatches
        routes = [pipeline.route() for pipeline in self._plan.pipelines]
        for index in range(max(counts)):
            yield from (route for route, count in zip(routes, counts, strict=True) if index < count)

    def _around(self, route: Route, gone: set[int], turns: list[int]) -> Route:
        """The route with the hops of lost nodes on their peers, in turn by position."""
        per_node = self._pipelines.template.devices_per_node
        number, depth = self._pipelines.num_pipelines, self._pipelines.depth
        moved: dict[int, int] = {}
        hops = []
        for hop in route:
            node, device = divmod(hop.rank, per_node)
            if node in gone and node not in moved:
                position = node % depth
                peers = [p * depth + position for p in range(number)]
                live = [peer for peer in peers if peer not in gone]
                moved[node] = live[turns[position] % len(live)]
                turns[position] += 1
            rank = moved.get(node, node) * per_node + device
            hops.append(Hop(rank, hop.first_layer, hop.end_layer))
        return tuple(hops)

    def _period_s(self, priced: PricedPlan) -> float:
        """Seconds from one iteration to the next if no stage waits for the others in between: as
        long as the rank that takes longest from its first action to its last sum."""
        problem: Problem = self._problem
        schedule = unchecked_schedule(
            priced.plan, tied=problem.profile.tied, order=problem.reduction_order
        )
        factor = problem.reduce_bytes_factor
        timeline = predicted_timeline(
            schedule, problem.profile, plan=priced.plan, reduce_bytes_factor=factor
        )
        starts: dict[int, float] = {}
        ends: dict[int, float] = {}
        for span in timeline.spans:
            if span.lane != "send":
                starts[span.rank] = min(starts.get(span.rank, inf), span.start_s)
                ends[span.rank] = max(ends.get(span.rank, 0.0), span.end_s)
        return min(priced.iteration_s, max(ends[rank] - starts[rank] for rank in ends))
