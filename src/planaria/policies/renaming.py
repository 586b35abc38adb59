"""Renames the nodes of a transition, so that one answer serves for all losses that are alike."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from planaria.core.plan import Hop, Pipeline, Plan, Route, Transfer, Transition
from planaria.policies.building import downtime_s
from planaria.policies.policy import Prices

_LAST: Final = (1 << 62, 0)  # Pipelines of new nodes come after all others.


class Renaming:
    """A renaming of nodes.

    Args:
        plan: plan that the renamed transitions leave.
        node_of: new number of each node.
        epoch: epoch of the plans that they lead to.
    """

    def __init__(self, plan: Plan, node_of: Mapping[int, int], *, epoch: int) -> None:
        self._before = plan
        self._epoch = epoch
        self._devices = plan.pipelines[0].template.devices_per_node
        self._node_of = node_of
        self._before_at = {pipeline.nodes: pipeline for pipeline in plan.pipelines}
        # The renamed objects, keyed by the id of the original, because hashing these would be slow.
        self._pipelines: dict[int, Pipeline] = {}
        self._routes: dict[int, Route] = {}
        self._plans: dict[int, Plan] = {}

    def transition(
        self,
        transition: Transition,
        *,
        redone_samples: int,
        prices: Prices,
        regroup_s: float = 0.0,
    ) -> Transition:
        """The renamed transition, priced anew, since the job learns prices from its recoveries.

        Args:
            regroup_s: seconds of regrouping in the price of a transition that goes back;
                its loading is not priced anew.
        """
        then = transition.then
        if then is not None:
            then = self.transition(then, redone_samples=redone_samples, prices=prices)
        transfers = [transfer for transfers in transition.rounds for transfer in transfers]
        priced_s = downtime_s(transfers, prices, devices_per_node=self._devices)
        if transition.goes_back:
            priced_s = transition.downtime_s + prices.regroup_s - regroup_s
        return replace(
            transition,
            before=self._before,
            after=self._plan(transition.after),
            rounds=tuple(
                tuple(self._transfer(t) for t in transfers) for transfers in transition.rounds
            ),
            downtime_s=0.0 if transition.keeps_plan else priced_s,
            redone_samples=redone_samples,
            then=then,
        )

    def _transfer(self, of: Transfer) -> Transfer:
        """The renamed transfer; the constructor is faster than `replace`."""
        source, target = self._rank(of.source), self._rank(of.target)
        return Transfer(of.layer, source, target, of.num_bytes, of.first_chunk, of.end_chunk)

    def _rank(self, rank: int) -> int:
        node, device = divmod(rank, self._devices)
        return self._node_of[node] * self._devices + device

    def _plan(self, plan: Plan) -> Plan:
        """The renamed plan, with its pipelines in the order of those before."""
        if id(plan) not in self._plans:
            place = self._places()
            pipelines = [self._pipeline(pipeline) for pipeline in plan.pipelines]
            self._plans[id(plan)] = replace(
                plan,
                epoch=self._epoch,
                pipelines=tuple(sorted(pipelines, key=lambda p: place.get(p.nodes[0], _LAST))),
                routes=tuple(self._route(route) for route in plan.routes),
                gone=tuple(sorted(self._node_of[node] for node in plan.gone)),
                in_flight={self._rank(rank): most for rank, most in plan.in_flight.items()},
                shadows={self._rank(rank): layers for rank, layers in plan.shadows.items()},
                ticks={self._rank(rank): ticks for rank, ticks in plan.ticks.items()},
            )
        return self._plans[id(plan)]

    def _places(self) -> Mapping[int, tuple[int, int]]:
        """The pipeline of each node in the plan before, and the node's position in it."""
        return {
            node: (index, position)
            for index, pipeline in enumerate(self._before.pipelines)
            for position, node in enumerate(pipeline.nodes)
        }

    def _pipeline(self, pipeline: Pipeline) -> Pipeline:
        """The renamed pipeline; cached, since most answers have most pipelines in common."""
        if id(pipeline) not in self._pipelines:
            nodes = tuple(self._node_of[node] for node in pipeline.nodes)
            self._pipelines[id(pipeline)] = replace(pipeline, nodes=nodes)
            before = self._before_at.get(nodes)
            if before is not None and before.template == pipeline.template:
                self._pipelines[id(pipeline)] = before
        return self._pipelines[id(pipeline)]

    def _route(self, route: Route) -> Route:
        """The renamed route; cached, since a plan has the same few routes thousands of times."""
        if id(route) not in self._routes:
            self._routes[id(route)] = tuple(
                Hop(self._rank(hop.rank), hop.first_layer, hop.end_layer) for hop in route
            )
        return self._routes[id(route)]
