"""Answers to losses that have not happened yet, so that a decision is a lookup.

Nodes at equal positions of equal pipelines are alike: the answer to the loss of one is, with nodes
renamed, the answer to the loss of another. So the losses of one, two, .. nodes are grouped into
classes, and one loss of each class is answered, the likeliest class first. 1,000 nodes in pipelines
of eight have 8 classes of losses of one node, and 64 of two. An answer is kept as the policy gave
it, with its transfers and its price; renamed, it costs the same if all links between nodes are
alike. If nodes are in domains, it is priced anew, and layers come from near holders where that is
faster.

A kept answer is valid if the survivors hold exactly what the plan gave them, are as fast as the
plan assumes, and are trusted. Everything else is answered by a quick policy while nodes wait, and
by the policy itself while they train, unless the plan is too large for that. The first question
that is answered ahead is whether there is a better plan for the present nodes, because the plan may
have been chosen in a hurry, after a loss or when nodes joined or left.

Source: Odyssey, section IV-C: the search for a plan can be performed in advance.
Differs: Odyssey's algorithm 1 keeps one plan for all losses, regardless of which and how many nodes
are lost.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged, NodesLost, survivors
from planaria.core.garbage import no_collection
from planaria.core.plan import Pipeline, PipelineTemplate, Plan, Transition
from planaria.planner.layout.search import LayoutSearches
from planaria.policies.building import with_near_sources
from planaria.policies.policy import Policy, Prices
from planaria.policies.renaming import Renaming
from planaria.policies.repartition import has_equal_nodes, templates_of

SEARCH_STEPS_MAX: Final = 4000  # Steps for one number of nodes; at 32 nodes they take 0.7 s.
LOSSES_MAX: Final = 256  # Classes of losses that are answered for one number of lost nodes.
# Hops of the largest plan for which the policy itself answers while nodes train, in up to 1 s.
_HOPS_MAX: Final = 1 << 10

# A pipeline's template, its empty positions, and the positions of its lost nodes.
_PipelineClass = tuple[PipelineTemplate, tuple[int, ...], tuple[int, ...]]
_Key = tuple[frozenset[tuple[_PipelineClass, int]], int]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The answers to the loss of some nodes of a plan; they stand for all losses of its class.

    Attributes:
        plan: plan before the loss.
        lost: lost nodes; empty for the question whether there is a better plan.
        transitions: answers as a policy proposed them.
    """

    plan: Plan
    lost: tuple[int, ...]
    transitions: tuple[Transition, ...]


Answers = Callable[[], tuple[Transition, ...]]


class ForeseenAnswers:
    """The answers found so far, to losses and to whether there is a better plan without one."""

    def __init__(self) -> None:
        self._answers: dict[_Key, tuple[Plan, tuple[int, ...], Answers]] = {}

    def add(self, plan: Plan, lost: tuple[int, ...], answers: Answers) -> None:
        """Keeps the answers to a loss, in place of older ones to a loss of the same class.

        Args:
            plan: plan before the loss.
            lost: lost nodes.
            answers: function that returns the answers; it is called on demand, since most answers
                are never needed.
        """
        self._answers[_key(plan, lost)] = plan, lost, answers

    def clear(self) -> None:
        """Forgets all answers."""
        self._answers.clear()

    def answers(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...] | None:
        """The answers to a loss or, if no node is lost, the plans that might be better; None if
        they were not foreseen. O(nodes + hops of different routes)."""
        if isinstance(event, NodesChanged) and (event.joined or event.leaving or event.slow):
            return None
        alive = {node.node for node in cluster.nodes}
        lost = tuple(node for node in plan.nodes if node not in alive)
        if bool(lost) != isinstance(event, NodesLost) or not _is_foreseeable(plan, cluster):
            return None
        entry = self._answers.get(_key(plan, lost))
        if entry is None:
            return None
        foreseen_plan, foreseen_lost, answers = entry
        renaming = _renaming(foreseen_plan, foreseen_lost, plan, lost, epoch=cluster.epoch)
        renamed = (
            renaming.transition(transition, redone_samples=event.redone_samples, prices=prices)
            for transition in answers()
        )
        if prices.domains and "inter_domain" in prices.links:
            renamed = (with_near_sources(answer, cluster, prices) for answer in renamed)
        return tuple(replace(transition, is_foreseen=True) for transition in renamed)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The policy that looks up another policy's answers where they were foreseen.

    Attributes:
        policy: policy whose answers are looked up.
        foreseen: answers found so far.
        hurried: quick policy that answers what was not foreseen, after losses and for large plans.
    """

    policy: Policy
    foreseen: ForeseenAnswers
    hurried: Policy

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The foreseen answers, else those of the quick policy or of the other policy."""
        with no_collection():
            foreseen = self.foreseen.answers(plan, cluster, event, prices)
        if foreseen is not None:
            return foreseen
        hurried: tuple[Transition, ...] = ()
        if isinstance(event, NodesLost) or sum(map(len, plan.routes)) > _HOPS_MAX:
            hurried = self.hurried.propose(plan, cluster, event, prices)
        return hurried or self.policy.propose(plan, cluster, event, prices)


def look_ahead(
    policy: Policy,
    searched: LayoutSearches,
    plan: Plan,
    *,
    prices: Prices,
    failures_ahead: int,
) -> Iterator[Foreseen | None]:
    """Yields the policy's answers to the losses that a plan may meet, the likeliest first.

    The plans that might be better if no node is lost come first. For each number of lost nodes it
    first searches layouts and lists losses, in short steps that yield None; then it yields an
    answer per step, which takes as long as the policy takes.

    Args:
        policy: policy that answers.
        searched: search from which the policy takes layouts.
        plan: plan before the losses.
        prices: costs of recovery.
        failures_ahead: upper bound on nodes that are lost at once.
    """
    if plan.silent:
        return
    for number in range(min(failures_ahead, len(plan.nodes) - 1) + 1):
        cluster = survivors(plan, plan.nodes[:number], epoch=plan.epoch + 1)
        if has_equal_nodes(plan, cluster):
            steps = searched.steps(len(cluster.nodes), templates_of(plan))
            for _ in islice(steps, SEARCH_STEPS_MAX):
                yield None
        for lost in losses(plan, number):
            if lost is None:
                yield None
                continue
            cluster = survivors(plan, lost, epoch=plan.epoch + 1)
            event = NodesLost(lost, 0) if lost else NodesChanged((), ())
            transitions = policy.propose(plan, cluster, event, prices)
            yield Foreseen(plan, lost, _with_shared_objects(transitions, plan))


def _with_shared_objects(transitions: tuple[Transition, ...], plan: Plan) -> tuple[Transition, ...]:
    """The same transitions, in which equal pipelines and routes are one object, which a pickle
    contains once."""
    pipelines = {pipeline: pipeline for pipeline in plan.pipelines}
    routes = {route: route for route in plan.routes}
    plans: dict[int, Plan] = {}

    def plan_with_shared_objects(after: Plan) -> Plan:
        if id(after) not in plans:
            plans[id(after)] = replace(
                after,
                pipelines=tuple(pipelines.setdefault(x, x) for x in after.pipelines),
                routes=tuple(routes.setdefault(x, x) for x in after.routes),
            )
        return plans[id(after)]

    def with_shared_objects(transition: Transition) -> Transition:
        return replace(
            transition,
            before=plan,
            after=plan_with_shared_objects(transition.after),
            then=with_shared_objects(transition.then) if transition.then else None,
        )

    return tuple(map(with_shared_objects, transitions))


def losses(plan: Plan, number: int) -> Iterator[tuple[int, ...] | None]:
    """Yields losses of `number` nodes that have a place, one of each class, the likeliest first.

    All sets of nodes are equally likely, so the likeliest class is the one with the most sets. At
    most LOSSES_MAX losses are yielded, and of losses of fewer nodes only so many are extended by
    another node, because 20 slow nodes among 1,000 make tens of thousands of classes. Before the
    first loss it yields None after each few ms.
    """
    # The number of losses in each class, and one of them.
    likeliest: list[tuple[int, tuple[int, ...]]] = [(1, ())]
    pipeline_of = {node: pipeline for pipeline in plan.pipelines for node in pipeline.nodes}
    gone = frozenset(plan.gone)
    numbers: dict[_PipelineClass, int] = {}  # Numbers of classes of pipelines make short keys.
    for _ in range(number):
        larger: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for weight, lost in likeliest:
            yield None
            for node, num_alike in _class_representatives(plan, lost):
                with_node = tuple(sorted((*lost, node)))
                # The pipelines without a lost node follow from the plan and from those with one.
                short = {pipeline_of[lost_node].nodes: lost_node for lost_node in with_node}
                classes = [
                    _pipeline_class(pipeline_of[lost_node], gone, with_node)
                    for lost_node in short.values()
                ]
                key = tuple(sorted([numbers.setdefault(x, len(numbers)) for x in classes]))
                so_far, example = larger.get(key, (0, with_node))
                larger[key] = so_far + weight * num_alike, example
        by_weight = sorted(larger.values(), key=lambda entry: (-entry[0], entry[1]))
        likeliest = by_weight[:LOSSES_MAX]
    yield from (lost for _, lost in likeliest)


def _class_representatives(plan: Plan, lost: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yields one node of each class that is not lost, and how many nodes of the class there are."""
    gone = frozenset(plan.gone)
    alike: dict[_PipelineClass, list[Pipeline]] = {}
    for pipeline in plan.pipelines:
        alike.setdefault(_pipeline_class(pipeline, gone, lost), []).append(pipeline)
    for pipelines in alike.values():
        for node in pipelines[0].nodes:
            if node not in gone and node not in lost:
                yield node, len(pipelines)


def _pipeline_class(
    pipeline: Pipeline, gone: Collection[int], lost: Collection[int]
) -> _PipelineClass:
    places = list(enumerate(pipeline.nodes))
    empty = tuple(position for position, node in places if node in gone)
    return pipeline.template, empty, tuple(position for position, node in places if node in lost)


def _key(plan: Plan, lost: Collection[int]) -> _Key:
    """The key of a loss; it is equal for losses of the same class, also of different plans."""
    gone = frozenset(plan.gone)
    classes = Counter(_pipeline_class(pipeline, gone, lost) for pipeline in plan.pipelines)
    return frozenset(classes.items()), len(plan.routes)


def _is_foreseeable(plan: Plan, cluster: ClusterState) -> bool:
    """Whether the survivors hold what the plan gave them and are of the kinds that it assumes, and
    none is silent, leaving or distrusted."""
    if plan.silent or cluster.leaving or cluster.distrusted_nodes:
        return False
    held, kinds, gone = plan.layers_by_rank, plan.kinds_by_node, frozenset(plan.gone)
    return all(
        node.node in kinds
        and node.node not in gone
        and node.kind == kinds[node.node]
        and all(
            layers == frozenset(held.get(node.node * len(node.held) + device, ()))
            for device, layers in enumerate(node.held)
        )
        for node in cluster.nodes
    )


def _renaming(
    foreseen: Plan, foreseen_lost: Sequence[int], plan: Plan, lost: Sequence[int], *, epoch: int
) -> Renaming:
    """The renaming of nodes from the plan of foreseen answers to another plan that is alike."""
    node_of: dict[int, int] = {}
    targets: dict[_PipelineClass, list[Pipeline]] = {}
    for pipeline in reversed(plan.pipelines):
        targets.setdefault(_pipeline_class(pipeline, plan.gone, lost), []).append(pipeline)
    for pipeline in foreseen.pipelines:
        target = targets[_pipeline_class(pipeline, foreseen.gone, foreseen_lost)].pop()
        node_of.update(zip(pipeline.nodes, target.nodes, strict=True))
    return Renaming(plan, node_of, epoch=epoch)
