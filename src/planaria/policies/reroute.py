"""ReCycle's answer to a loss: pipelines stay, and microbatches go around the places of lost nodes.

Two transitions are proposed:
1. reroute: peers compute what the lost nodes would have computed. No parameter moves, so the job
   goes on at once.
2. reroute-normalised: a node without work takes an empty place, and gets its layers. If no such
   node is left, survivors change places with lost nodes as long as iterations get shorter: it is
   best if each stage lacks one node, and worst if one stage lacks them all.

Each loss of a holder leaves one place less that has its layers, whereas pipelines made anew would
hold each layer f + 1 times again. Another policy answers what rerouting cannot: nodes for which
there is no place, and nodes that are slow.

Source: ReCycle (SOSP '24), adaptive pipelining and failure normalization.
Differs: ReCycle needs pipelines with equal stages, and solves an integer program for each number of
failures beforehand; here a greedy search finds routes after the loss
(planner/reroute/reroutes.py), and each move is the one that helps most.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import (
    TRIES_HOPS_MAX,
    PricedPlan,
    best_reroute,
    even_work_s,
    num_without_work,
    simulated_s,
    simulates_more,
)
from planaria.policies.building import least_exposed, num_exposed, transition_between
from planaria.policies.policy import Policy, Prices
from planaria.policies.unequal_nodes import with_kinds
from planaria.restorer.strategies import LEAST_BYTES, RestoreStrategy

POLICY: Final = "reroute"
REROUTE: Final = "reroute"
NORMALISED: Final = "reroute-normalised"

_MOVES_RUN: Final = 3  # Upper bound on the moves that are simulated, of all possible ones.
_HOPS_MAX: Final = 1 << 11  # Approximate bound on their hops; one move is simulated in any case.
# Approximate bound on the hops of all moves in turn; at 1,000 nodes they take some 10 s.
_ALL_HOPS_MAX: Final = 1 << 16
# Hops of the largest plan that is answered in a hurry, which takes some 20 ms.
_HURRIED_HOPS_MAX: Final = 1 << 8

_Answers = tuple[tuple[str, PricedPlan], ...]


class KnownReroutes:
    """Answers that policies of one problem have found, so that each is searched only once.

    Those of thousands of simulated runs are mostly the same. The oldest of more than KNOWN_MAX are
    forgotten, and those for plans of more than HOPS_MAX hops are not kept, which bounds the memory.

    Attributes:
        problem: the problem of the policies.
    """

    KNOWN_MAX: Final = 1024
    HOPS_MAX: Final = 1 << 11

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._answers: OrderedDict[object, _Answers] = OrderedDict()

    def get(self, question: object) -> _Answers | None:
        """The answers to a question; None if they are not known."""
        return self._answers.get(question)

    def add(self, question: object, answers: _Answers) -> None:
        """Keeps the answers to a question."""
        self._answers[question] = answers
        if len(self._answers) > self.KNOWN_MAX:
            self._answers.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Reroute:
    """The policy that reroutes microbatches.

    Attributes:
        problem: model, profile and limits to plan for.
        fallback: policy that answers what rerouting cannot.
        restoring: strategy that assigns nodes and finds sources of layers.
        is_hurried: whether it simulates only one set of routes for each answer, if that gives work
            to all nodes, and does not answer for large plans.
        hops_max: bound on the hops that are simulated for an answer otherwise, as in
            `best_reroute`.
        known: answers that other policies of the problem have found; None: none are kept.
    """

    problem: Problem
    fallback: Policy
    restoring: RestoreStrategy = LEAST_BYTES
    is_hurried: bool = False
    hops_max: int = TRIES_HOPS_MAX
    known: KnownReroutes | None = field(default=None, compare=False, repr=False)

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The rerouted and the normalised transition, as far as they exist, and what the other
        policy adds.

        Of the two, those that give work to all nodes in the plan count, and of these the ones with
        the most nodes. The other policy is asked, too, if they leave out a member, or if they leave
        a layer to distrusted nodes alone though no place is empty; its answers replace them if they
        have more nodes. If all this gives none, those that leave nodes without work are returned.

        There is no answer if `ClusterState.lost_layers` names a layer: then only a checkpoint
        helps.
        """
        if cluster.lost_layers(plan.num_layers):
            return ()
        rerouting: tuple[Transition, ...] = ()
        if not isinstance(event, NodesChanged) or event.joined or event.leaving:
            rerouting = tuple(
                self._transition(after, answer, plan, cluster, event, prices)
                for answer, after in self._answers(plan, cluster)
            )
        # A member without work would have to wait until the next loss to get some.
        working = tuple(x for x in rerouting if not num_without_work(x.after))
        most = max((len(x.after.nodes) for x in working), default=0)
        working = tuple(x for x in working if len(x.after.nodes) == most)
        # If no place is empty any more, pipelines made anew may be as good.
        is_exposed = any(not x.after.gone and num_exposed(x.after, cluster) for x in working)
        if most < len(cluster.nodes) or is_exposed:
            others = self.fallback.propose(plan, cluster, event, prices)
            most_of_others = max((len(x.after.nodes) for x in others), default=0)
            working = (*(working if most >= most_of_others else ()), *others)
        return least_exposed(working or rerouting, cluster)

    def _answers(self, plan: Plan, cluster: ClusterState) -> _Answers:
        if self.is_hurried and sum(map(len, plan.routes)) > _HURRIED_HOPS_MAX:
            return ()
        kinds = {node.node: node.kind for node in (*cluster.nodes, *cluster.leaving)}
        alive = frozenset(node.node for node in cluster.nodes)
        emptied = _with_empty_places(with_kinds(plan, kinds), alive, epoch=cluster.epoch)
        is_lost = emptied.gone != plan.gone
        is_large = sum(map(len, plan.routes)) > KnownReroutes.HOPS_MAX
        # If no node is lost, the routes count, too; eager forwards are rare.
        if self.known is None or is_large or not is_lost or plan.shadows:
            return tuple(self._searched_answers(emptied, alive, kinds, is_lost=is_lost))
        assert self.known.problem is self.problem
        places = (emptied.pipelines, emptied.gone, len(emptied.routes), emptied.epoch)
        question = (places, frozenset(kinds.items()), alive, self.is_hurried, self.hops_max)
        answers = self.known.get(question)
        if answers is None:
            answers = tuple(self._searched_answers(emptied, alive, kinds, is_lost=True))
            self.known.add(question, answers)
        return answers

    def _searched_answers(
        self,
        emptied: Plan,
        alive: Collection[int],
        kinds: Mapping[int, NodeKind],
        *,
        is_lost: bool,
    ) -> Iterator[tuple[str, PricedPlan]]:
        """The answers that a search finds.

        Args:
            emptied: plan with the places of lost nodes empty.
            is_lost: whether a node of the plan is lost; else a worker is new, its node is not.
        """
        now = best_reroute(self.problem, emptied, hops_max=0) if emptied.gone else None
        if is_lost:
            as_is = self._rerouted_plan(emptied, now)
        else:
            as_is = PricedPlan(emptied, simulated_s(self.problem, emptied))
        if as_is is not None:
            yield REROUTE, as_is
        normalised = self._normalised_plan(emptied, now, alive, kinds)
        if normalised is not None and (
            as_is is None
            or len(normalised.plan.nodes) > len(as_is.plan.nodes)
            or normalised.iteration_s < as_is.iteration_s
        ):
            yield NORMALISED, normalised

    def _normalised_plan(
        self,
        plan: Plan,
        now: PricedPlan | None,
        alive: Collection[int],
        kinds: Mapping[int, NodeKind],
    ) -> PricedPlan | None:
        """The plan once nodes have moved to empty places; None if no move helps.

        With many microbatches and empty places some may stay empty, although a move would help.

        Args:
            now: plan as it is, with the first routes that `best_reroute` finds.
        """
        num_hops = len(plan.routes) * max(len(p.template.stages) for p in plan.pipelines)
        num_run = min(_MOVES_RUN, 1 + _HOPS_MAX // num_hops)
        num_moves = min(len(plan.gone), max(1, _ALL_HOPS_MAX // (num_run * num_hops)))
        normalised = plan
        for _ in range(num_moves):
            idle = set(alive).difference(normalised.nodes)
            # Idle nodes count as one class: the first of them takes the place, so the fastest.
            fastest = sorted(idle, key=lambda node: (-kinds[node].speed, node))
            options = [
                with_kinds(after, kinds)
                for after in _moves(normalised, fastest or normalised.nodes)
            ]
            options.sort(key=lambda option: even_work_s(self.problem, option))
            best: PricedPlan | None = None
            limit_s = inf if idle or now is None else now.iteration_s
            for option in options[:num_run]:
                result = best_reroute(self.problem, option, hops_max=0, below_s=limit_s)
                if result is not None and result.iteration_s < limit_s:
                    best, limit_s = result, result.iteration_s
            if best is None:
                break
            now, normalised = best, best.plan
        if normalised == plan:
            return None
        return self._rerouted_plan(normalised, now)

    def _rerouted_plan(self, plan: Plan, first: PricedPlan | None) -> PricedPlan | None:
        """The best plan with the places of a given one.

        Args:
            first: plan with these places and the first routes that `best_reroute` finds; None if
                they do not fit.
        """
        if first is not None and not (
            num_without_work(first.plan)
            if self.is_hurried
            else simulates_more(first.plan, hops_max=self.hops_max)
        ):
            return first
        return best_reroute(self.problem, plan, hops_max=self.hops_max, known=first)

    def _transition(
        self,
        after: PricedPlan,
        answer: str,
        plan: Plan,
        cluster: ClusterState,
        event: ClusterEvent,
        prices: Prices,
    ) -> Transition:
        return transition_between(
            plan,
            after.plan,
            cluster,
            prices,
            self.restoring,
            iteration_s=after.iteration_s,
            redone_samples=event.redone_samples,
            policy=POLICY,
            answer=answer,
        )


def _with_empty_places(plan: Plan, alive: Collection[int], *, epoch: int) -> Plan:
    """The plan in which the places of all nodes but `alive` are empty; its routes may still go
    through these places."""
    nodes = sorted(node for pipeline in plan.pipelines for node in pipeline.nodes)
    gone = tuple(node for node in nodes if node not in alive)
    return replace(plan, epoch=epoch, silent={}, gone=gone)


def _moves(plan: Plan, movers: Collection[int]) -> Iterator[Plan]:
    """Yields the plans in which one of the movers has taken an empty place, one of equivalent ones.

    A mover that had a place leaves that one empty. Of movers without a place the first one moves.
    """
    place_class = {
        node: (pipeline.template, position, _gone_positions(plan, pipeline.nodes))
        for pipeline in plan.pipelines
        for position, node in enumerate(pipeline.nodes)
    }
    layers_at = _layers_by_node(plan)
    seen_moves = set()
    for mover in movers:
        for empty in plan.gone:
            move = (place_class.get(mover), place_class[empty])
            if move in seen_moves or layers_at.get(mover) == layers_at[empty]:
                continue
            seen_moves.add(move)
            swapped = {mover: empty, empty: mover}
            pipelines = tuple(
                replace(p, nodes=tuple(swapped.get(node, node) for node in p.nodes))
                for p in plan.pipelines
            )
            gone = plan.gone
            if mover not in place_class:
                gone = tuple(node for node in gone if node != empty)
            yield replace(plan, pipelines=pipelines, gone=gone)


def _gone_positions(plan: Plan, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(position for position, node in enumerate(nodes) if node in plan.gone)


def _layers_by_node(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """The layers of each device of every place, as (first, end), keyed by the node of the place."""
    layers_by_node: dict[int, list[tuple[int, int]]] = {}
    for pipeline in plan.pipelines:
        stages, per_node = pipeline.template.stages, pipeline.template.devices_per_node
        for stage, ranks in zip(stages, pipeline.ranks_by_stage(), strict=True):
            for rank in ranks:
                layers = (stage.first_layer, stage.end_layer)
                layers_by_node.setdefault(rank // per_node, []).append(layers)
    return layers_by_node
