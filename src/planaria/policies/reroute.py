"""ReCycle's answer to a loss: pipelines stay, and microbatches go around the places of lost nodes.

Two transitions are priced:
1. reroute: peers compute what the lost nodes would have. No parameter moves, so the job goes on at
   once.
2. reroute-normalised: a node without work takes an empty place, and gets its layers. When there is
   none left, survivors change places with the lost as long as iterations get shorter: it is best to
   lack one node of each stage, and worst to lack all from one.

A layer lives in one place less with each loss of a holder, where pipelines made anew would hold it
f + 1 times again. What cannot be answered so is left to another policy: nodes for which there is no
place, nodes that are slow.

Source: ReCycle (SOSP '24), adaptive pipelining and failure normalization.
Differs: ReCycle needs pipelines that are cut alike, and solves an integer program for each number
of failures beforehand; here a greedy search finds routes after the loss
(planner/reroute/reroutes.py), and each move is the one that helps most.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import (
    TRIES_HOPS_MAX,
    Priced,
    even_s,
    num_without_work,
    rerouted,
    simulated_s,
)
from planaria.policies.policy import Policy, Prices, least_exposed, moving, num_exposed
from planaria.policies.unequal import of_kinds
from planaria.restorer.strategies import LEAST_BYTES, Restoring

POLICY: Final = "reroute"
REROUTE: Final = "reroute"
NORMALISED: Final = "reroute-normalised"

_MOVES_RUN: Final = 3  # Of all possible ones, those that are run in virtual time.
_HOPS_MAX: Final = 1 << 11  # Of all that are run; one is always.
_HURRIED_HOPS_MAX: Final = 1 << 8  # Of a plan; an answer in a hurry takes some 20 ms then.


@dataclass(frozen=True, slots=True)
class Reroute:
    """The policy.

    Attributes:
        otherwise: answers what rerouting cannot.
        is_hurried: runs one try for each answer, if everybody has work then, and nothing of large
            plans.
        hops_max: of all that is run for an answer otherwise, see `rerouted`.
    """

    problem: Problem
    otherwise: Policy
    restoring: Restoring = LEAST_BYTES
    is_hurried: bool = False
    hops_max: int = TRIES_HOPS_MAX

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The two above, where there are, and of these none that leaves more nodes without work
        than the other; the other policy's too if some have none, and only those if fewer have none
        then; and if distrusted nodes alone would hold a layer though all places are taken.

        There is none if `ClusterState.lost_layers` names a layer: then only a checkpoint helps.
        """
        if cluster.lost_layers(plan.num_layers):
            return ()
        found: tuple[Transition, ...] = ()
        if not isinstance(event, NodesChanged) or event.joined or event.leaving:
            found = tuple(
                self._transition(one, answer, plan, cluster, event, prices)
                for answer, one in self._answers(plan, cluster)
            )
        # A node that stays a member without work would wait for it until the next loss.
        working = tuple(one for one in found if not num_without_work(one.after))
        most = max((len(one.after.nodes) for one in working), default=0)
        working = tuple(one for one in working if len(one.after.nodes) == most)
        # Where no place is empty any more, pipelines made anew may be as good.
        is_exposed = any(not one.after.gone and num_exposed(one.after, cluster) for one in working)
        if most < len(cluster.nodes) or is_exposed:
            others = self.otherwise.propose(plan, cluster, event, prices)
            most_of_others = max((len(one.after.nodes) for one in others), default=0)
            working = (*(working if most >= most_of_others else ()), *others)
        found = working or found
        return least_exposed(found, cluster)

    def _answers(self, plan: Plan, cluster: ClusterState) -> Iterator[tuple[str, Priced]]:
        if self.is_hurried and sum(map(len, plan.routes)) > _HURRIED_HOPS_MAX:
            return
        kinds = {node.node: node.kind for node in (*cluster.nodes, *cluster.leaving)}
        alive = frozenset(node.node for node in cluster.nodes)
        around = _emptied(of_kinds(plan, kinds), alive, epoch=cluster.epoch)
        if around.gone == plan.gone:  # A worker is new, its node is not.
            as_is: Priced | None = Priced(around, simulated_s(self.problem, around))
        else:
            as_is = self._rerouted(around)
        if as_is is not None:
            yield REROUTE, as_is
        moved = self._normalised(around, alive, kinds)
        if moved is not None and (
            as_is is None
            or len(moved.plan.nodes) > len(as_is.plan.nodes)
            or moved.iteration_s < as_is.iteration_s
        ):
            yield NORMALISED, moved

    def _normalised(
        self, plan: Plan, alive: Collection[int], kinds: Mapping[int, NodeKind]
    ) -> Priced | None:
        """The plan once nodes have moved to empty places; None if no move helps."""
        num_hops = len(plan.routes) * max(len(p.template.stages) for p in plan.pipelines)
        num_run = min(_MOVES_RUN, 1 + _HOPS_MAX // max(1, num_hops))
        now = rerouted(self.problem, plan, hops_max=0)
        moved = plan
        for _ in range(len(plan.gone)):
            idle = tuple(sorted(set(alive).difference(moved.nodes)))
            options = [of_kinds(one, kinds) for one in _moves(moved, idle or moved.nodes)]
            options.sort(key=lambda one: even_s(self.problem, one))
            found = [rerouted(self.problem, one, hops_max=0) for one in options[:num_run]]
            best = min(filter(None, found), key=lambda one: one.iteration_s, default=None)
            if best is None or (not idle and now and best.iteration_s >= now.iteration_s):
                break
            now, moved = best, best.plan
        if moved == plan:
            return None
        return self._rerouted(moved)

    def _rerouted(self, plan: Plan) -> Priced | None:
        found = rerouted(self.problem, plan, hops_max=0) if self.is_hurried else None
        if found is None or num_without_work(found.plan):
            return rerouted(self.problem, plan, hops_max=self.hops_max)
        return found

    def _transition(
        self,
        found: Priced,
        answer: str,
        plan: Plan,
        cluster: ClusterState,
        event: ClusterEvent,
        prices: Prices,
    ) -> Transition:
        return moving(
            plan,
            found.plan,
            cluster,
            prices,
            self.restoring,
            iteration_s=found.iteration_s,
            redone_samples=event.redone_samples,
            policy=POLICY,
            answer=answer,
        )


def _emptied(plan: Plan, alive: Collection[int], *, epoch: int) -> Plan:
    """The plan with the places of all other nodes empty; its routes may go through them."""
    nodes = sorted(node for pipeline in plan.pipelines for node in pipeline.nodes)
    gone = tuple(node for node in nodes if node not in alive)
    return replace(plan, epoch=epoch, silent={}, gone=gone)


def _moves(plan: Plan, movers: Collection[int]) -> Iterator[Plan]:
    """The plans in which one of the movers has an empty place, one of each sort.

    Whoever has a place leaves it empty: the two nodes change places.
    """
    sort_of = {
        node: (pipeline.template, position, _gone_positions(plan, pipeline.nodes))
        for pipeline in plan.pipelines
        for position, node in enumerate(pipeline.nodes)
    }
    layers_at = _layers_by_node(plan)
    seen = set()
    for mover in movers:
        for empty in plan.gone:
            sort = (sort_of.get(mover), sort_of[empty])
            if sort in seen or layers_at.get(mover) == layers_at[empty]:
                continue
            seen.add(sort)
            swapped = {mover: empty, empty: mover}
            pipelines = tuple(
                replace(p, nodes=tuple(swapped.get(node, node) for node in p.nodes))
                for p in plan.pipelines
            )
            gone = plan.gone
            if mover not in sort_of:
                gone = tuple(node for node in gone if node != empty)
            yield replace(plan, pipelines=pipelines, gone=gone)


def _gone_positions(plan: Plan, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(position for position, node in enumerate(nodes) if node in plan.gone)


def _layers_by_node(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Of every place by its node, the layers of each of its devices."""
    found: dict[int, list[tuple[int, int]]] = {}
    for pipeline in plan.pipelines:
        stages, per_node = pipeline.template.stages, pipeline.template.devices_per_node
        for stage, ranks in zip(stages, pipeline.ranks_by_stage(), strict=True):
            for rank in ranks:
                found.setdefault(rank // per_node, []).append((stage.first_layer, stage.end_layer))
    return found
