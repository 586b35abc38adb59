"""Renames the nodes of a transition, so that one answer serves for all losses that are alike.

What transfers take does not depend on the numbers of nodes if all links between nodes are alike. So
it is computed once for an answer, and again if the links' speeds change. If nodes are in failure
domains, it is computed for each renamed answer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from planaria.core.plan import Hop, Link, Pipeline, Plan, Route, Transfer, Transition
from planaria.policies.building import transfer_s
from planaria.policies.policy import Prices

_LAST: Final = (1 << 62, 0)  # Pipelines of new nodes come after all others.


class TransferTimes:
    """The seconds that the transfers of transitions take, each computed once for the same links."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Transition, Mapping[str, Link], float]] = {}  # By id.

    def seconds(self, transition: Transition, prices: Prices) -> float:
        """Seconds of a transition's transfers."""
        known = self._known.get(id(transition))
        if known is not None and known[1] == prices.links:
            return known[2]
        seconds = _transfer_s(transition, transition.rounds, prices)
        self._known[id(transition)] = transition, prices.links, seconds
        return seconds


def _transfer_s(
    transition: Transition, rounds: Iterable[Sequence[Transfer]], prices: Prices
) -> float:
    """Seconds of the transfers of these rounds."""
    transfers = [transfer for transfers in rounds for transfer in transfers]
    per_node = transition.after.devices_per_node
    return transfer_s(transfers, prices, devices_per_node=per_node)


class Renaming:
    """A renaming of nodes.

    Args:
        plan: plan that the renamed transitions leave.
        node_of: new number of each node.
        epoch: epoch of the plans that they lead to.
        times: times of transfers that are known.
    """

    def __init__(
        self,
        plan: Plan,
        node_of: Mapping[int, int],
        *,
        epoch: int,
        times: TransferTimes | None = None,
    ) -> None:
        self._before = plan
        self._epoch = epoch
        self._times = times or TransferTimes()
        devices = plan.devices_per_node
        self._node_of = node_of
        self._rank_of = {
            node * devices + device: renamed * devices + device
            for node, renamed in node_of.items()
            for device in range(devices)
        }
        self._before_at = {pipeline.nodes: pipeline for pipeline in plan.pipelines}
        # The pipeline of each node in the plan before, and the node's position in it.
        self._place = {
            node: (index, position)
            for index, pipeline in enumerate(plan.pipelines)
            for position, node in enumerate(pipeline.nodes)
        }
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
        rounds = tuple([self._round(transfers) for transfers in transition.rounds])
        if transition.goes_back:
            priced_s = transition.downtime_s + prices.regroup_s - regroup_s
        elif prices.domains:
            priced_s = prices.regroup_s + _transfer_s(transition, rounds, prices)
        else:
            priced_s = prices.regroup_s + self._times.seconds(transition, prices)
        return replace(
            transition,
            before=self._before,
            after=self._plan(transition.after),
            rounds=rounds,
            downtime_s=0.0 if transition.keeps_plan else priced_s,
            redone_samples=redone_samples,
            then=then,
        )

    def _round(self, transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
        """The renamed transfers; the constructor is faster than `replace`."""
        rank = self._rank_of
        return tuple(
            [
                Transfer(
                    x.layer,
                    rank[x.source],
                    rank[x.target],
                    x.num_bytes,
                    x.first_chunk,
                    x.end_chunk,
                )
                for x in transfers
            ]
        )

    def _plan(self, plan: Plan) -> Plan:
        """The renamed plan, with its pipelines in the order of those before."""
        if id(plan) not in self._plans:
            place, rank = self._place, self._rank_of
            pipelines = [self._pipeline(pipeline) for pipeline in plan.pipelines]
            # A plan has the same few routes thousands of times.
            routes = {key: self._route(x) for key, x in {id(x): x for x in plan.routes}.items()}
            self._plans[id(plan)] = replace(
                plan,
                epoch=self._epoch,
                pipelines=tuple(sorted(pipelines, key=lambda p: place.get(p.nodes[0], _LAST))),
                routes=tuple([routes[id(route)] for route in plan.routes]),
                gone=tuple(sorted(self._node_of[node] for node in plan.gone)),
                in_flight={rank[old]: most for old, most in plan.in_flight.items()},
                shadows={rank[old]: layers for old, layers in plan.shadows.items()},
                ticks={rank[old]: ticks for old, ticks in plan.ticks.items()},
            )
        return self._plans[id(plan)]

    def _pipeline(self, pipeline: Pipeline) -> Pipeline:
        """The renamed pipeline; cached, since most answers have most pipelines in common."""
        if id(pipeline) not in self._pipelines:
            nodes = tuple(self._node_of[node] for node in pipeline.nodes)
            self._pipelines[id(pipeline)] = Pipeline(pipeline.template, nodes)
            before = self._before_at.get(nodes)
            if before is not None and before.template == pipeline.template:
                self._pipelines[id(pipeline)] = before
        return self._pipelines[id(pipeline)]

    def _route(self, route: Route) -> Route:
        """The renamed route; cached, since most answers have most routes in common."""
        if id(route) not in self._routes:
            rank = self._rank_of
            self._routes[id(route)] = tuple(
                Hop(rank[hop.rank], hop.first_layer, hop.end_layer) for hop in route
            )
        return self._routes[id(route)]
