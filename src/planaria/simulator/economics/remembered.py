"""Remembers the answers of a policy, for questions that are alike but for the numbers of nodes.

The nodes of a question are numbered anew: by their places in the plan, with pipelines that are
alike next to each other. So the loss of a node is the same question as that of another node at the
same place of an equal pipeline. The answer is renamed to the nodes of the question and priced anew.

A policy may break ties by the numbers of nodes, so a remembered answer can be another one of equal
value. The policy is asked with the prices that the job has when the question first comes.

Source: policies/ahead.py, which renames answers to losses that have not happened yet.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from planaria.core.cluster import PROFILED_KIND, ClusterEvent, ClusterState, Node, NodesLost
from planaria.core.garbage import no_collection
from planaria.core.plan import (
    Hop,
    Pipeline,
    PipelineTemplate,
    Plan,
    Transition,
    plain_plan,
)
from planaria.policies.policy import Policy, Prices
from planaria.policies.renaming import Renaming, TransferTimes

Value = TypeVar("Value")

ANSWERS_MAX: Final = 512  # A plan for 1,000 nodes takes some 100 kB.


class _KnownAnswer(NamedTuple):
    """Transitions between plans whose nodes are labels, and the `regroup_s` of their prices."""

    transitions: tuple[Transition, ...]
    regroup_s: float
    times: TransferTimes


class Remembered:
    """A policy whose answers are kept; implements `Policy`.

    Attributes:
        num_asked, num_known: numbers of questions, and of those whose answer was known.
    """

    def __init__(self, policy: Policy) -> None:
        self.num_asked = self.num_known = 0
        self._policy = policy
        self._answers: OrderedDict[object, _KnownAnswer] = OrderedDict()
        self._templates: dict[PipelineTemplate, int] = {}
        self._numbers: dict[int, tuple[PipelineTemplate, int]] = {}  # By id, with the object.

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The transitions of the policy; see `Policy`."""
        with no_collection():
            return self._propose(plan, cluster, event, prices)

    def _propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        question = self._question(plan, cluster)
        labels = question.labels
        key = (question.key, self._event_key(event, labels))
        self.num_asked += 1
        answer = self._answers.get(key)
        if answer is None:
            asked = question.plan(plan)
            transitions = self._policy.propose(
                asked, _labelled_cluster(cluster, labels), _event_with_labels(event, labels), prices
            )
            answer = _KnownAnswer(transitions, prices.regroup_s, TransferTimes())
            self._answers[key] = answer
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
        else:
            self.num_known += 1
            self._answers.move_to_end(key)
        node_of = {label: node for node, label in labels.items()}
        renaming = Renaming(plan, node_of, epoch=cluster.epoch, times=answer.times)
        saved = event.saved if isinstance(event, NodesLost) else None
        return tuple(
            renaming.transition(
                transition,
                redone_samples=saved.redone_samples
                if transition.goes_back and saved
                else event.redone_samples,
                prices=prices,
                regroup_s=answer.regroup_s,
            )
            for transition in answer.transitions
        )

    def _question(self, plan: Plan, cluster: ClusterState) -> "_Question":
        """The nodes with labels, and what tells the question apart from others."""
        live = {node.node: (node, "") for node in cluster.nodes}
        live |= {node.node: (node, "leaving") for node in cluster.leaving}
        held = plan.held_by_rank
        microbatches = _own_microbatches(plan)
        classes = []
        for index, pipeline in enumerate(plan.pipelines):
            states = tuple(_state(live.get(node), node, held) for node in pipeline.nodes)
            shown = () if not any(states) else states
            count = microbatches[index] if microbatches else 0
            limits = _limits(plan, pipeline) if microbatches else ()
            classes.append((self._number(pipeline.template), count, shown, limits))
        order = list(range(len(classes)))
        if microbatches:
            order.sort(key=lambda index: (classes[index][:2], str(classes[index][2:])))
        labels: dict[int, int] = {}
        for index in order:
            for node in plan.pipelines[index].nodes:
                labels[node] = len(labels)
        others = sorted(set(live).difference(labels))
        for node in others:
            labels[node] = len(labels)
        outside = tuple(_state(live[node], node, held) for node in others)
        key: tuple[object, ...] = (tuple(classes[index] for index in order), outside)
        key = (*key, plan.splits_backward)
        if not microbatches:
            key = (*key, _detours(plan, labels))
        return _Question(labels, tuple(order), microbatches, key)

    def _number(self, template: PipelineTemplate) -> int:
        """A number for each different template; hashing a template takes longer than all else."""
        known = self._numbers.get(id(template))
        if known is None:
            number = self._templates.setdefault(template, len(self._templates))
            known = self._numbers[id(template)] = (template, number)
        return known[1]

    def _event_key(self, event: ClusterEvent, labels: Mapping[int, int]) -> object:
        if isinstance(event, NodesLost):
            saved = event.saved
            back = saved and (bool(saved.source), saved.copied is not None)
            return "lost", bool(event.redone_samples), back
        return tuple(
            tuple(sorted(labels[node] for node in nodes))
            for nodes in (event.joined, event.leaving, event.slow)
        )


class _Question(NamedTuple):
    """A question with nodes as labels.

    Attributes:
        labels: label of each node.
        order: indices of the plan's pipelines in the order of the labels.
        microbatches: microbatches of each pipeline in the plan's order; empty: some go around.
        key: difference from all other questions.
    """

    labels: dict[int, int]
    order: tuple[int, ...]
    microbatches: tuple[int, ...]
    key: object

    def plan(self, plan: Plan) -> Plan:
        """The plan with labels, in epoch 0."""
        labels = self.labels
        pipelines = tuple(
            replace(
                plan.pipelines[index],
                nodes=tuple(labels[node] for node in plan.pipelines[index].nodes),
            )
            for index in self.order
        )
        if not self.microbatches:
            return _labelled_plan(plan, pipelines, labels)
        per_node = pipelines[0].template.devices_per_node
        own = plain_plan(0, pipelines, tuple(self.microbatches[i] for i in self.order))
        return replace(
            own,
            splits_backward=plan.splits_backward,
            in_flight=_by_labelled_rank(plan.in_flight, labels, per_node),
            ticks=_by_labelled_rank(plan.ticks, labels, per_node),
        )


def _own_microbatches(plan: Plan) -> tuple[int, ...]:
    """The microbatches of each pipeline; empty if some leave their pipeline, or a node holds more
    than its pipeline gives it."""
    if plan.silent or plan.gone or plan.shadows:
        return ()
    counts = Counter(route[0].rank for route in plan.routes)
    own = {
        ranks[0]: ranks
        for pipeline in plan.pipelines
        if (ranks := [ranks[0] for ranks in pipeline.ranks_by_stage()])
    }
    # A plan has the same few routes many times; comparing all of them would be slow.
    for route in {id(route): route for route in plan.routes}.values():
        if [hop.rank for hop in route] != own.get(route[0].rank):
            return ()
    return tuple(counts[first] for first in own)


def _state(live: tuple[Node, str] | None, node: int, held: Mapping[int, frozenset[int]]) -> object:
    """What is special of a node; empty: it lives and holds what its plan says."""
    if live is None:
        return "lost"
    member, leaving = live
    first = node * len(member.held)
    none: frozenset[int] = frozenset()
    if len(member.held) == 1:  # So it is faster.
        is_usual = member.held[0] == held.get(first, none)
    else:
        is_usual = all(
            layers == held.get(first + device, none) for device, layers in enumerate(member.held)
        )
    if is_usual and member.is_trusted and not leaving and member.kind == PROFILED_KIND:
        return ""
    layers = () if is_usual else tuple(tuple(sorted(layers)) for layers in member.held)
    return layers, member.kind, member.is_trusted, leaving


def _limits(plan: Plan, pipeline: Pipeline) -> object:
    """The limits in flight and the ticks of a pipeline's ranks, by stage; empty: there are none."""
    if not plan.in_flight and not plan.ticks:
        return ()
    return tuple(
        (plan.in_flight.get(rank), plan.ticks.get(rank))
        for ranks in pipeline.ranks_by_stage()
        for rank in ranks
    )


def _labelled_rank(labels: Mapping[int, int], rank: int, per_node: int) -> int:
    node, device = divmod(rank, per_node)
    return labels[node] * per_node + device


def _labelled_plan(plan: Plan, pipelines: tuple[Pipeline, ...], labels: Mapping[int, int]) -> Plan:
    per_node = plan.devices_per_node
    routes = {
        route: tuple(
            Hop(_labelled_rank(labels, hop.rank, per_node), hop.first_layer, hop.end_layer)
            for hop in route
        )
        for route in dict.fromkeys(plan.routes)
    }

    return replace(
        plan,
        epoch=0,
        pipelines=pipelines,
        routes=tuple(routes[route] for route in plan.routes),
        silent=_by_labelled_rank(plan.silent, labels, per_node),
        gone=tuple(sorted(labels[node] for node in plan.gone)),
        in_flight=_by_labelled_rank(plan.in_flight, labels, per_node),
        ticks=_by_labelled_rank(plan.ticks, labels, per_node),
        shadows=_by_labelled_rank(plan.shadows, labels, per_node),
    )


def _by_labelled_rank(
    of: Mapping[int, Value], labels: Mapping[int, int], per_node: int
) -> dict[int, Value]:
    return {
        _labelled_rank(labels, rank, per_node): value
        for rank, value in of.items()
        if rank // per_node in labels
    }


def _detours(plan: Plan, labels: Mapping[int, int]) -> object:
    """What is special of a plan that is no plain one."""
    labelled = _labelled_plan(plan, (), labels)
    maps = (labelled.silent, labelled.in_flight, labelled.ticks, labelled.shadows)
    by_rank = tuple(tuple(sorted(of.items())) for of in maps)
    return labelled.routes, labelled.gone, labelled.splits_backward, by_rank


def _labelled_cluster(cluster: ClusterState, labels: Mapping[int, int]) -> ClusterState:
    def nodes(of: tuple[Node, ...]) -> tuple[Node, ...]:
        renamed = [replace(node, node=labels[node.node]) for node in of]
        return tuple(sorted(renamed, key=lambda node: node.node))

    return ClusterState(1, nodes(cluster.nodes), nodes(cluster.leaving))


def _event_with_labels(event: ClusterEvent, labels: Mapping[int, int]) -> ClusterEvent:
    """The event with labels; a lost node that had no place in the plan is left out."""
    if isinstance(event, NodesLost):
        lost = tuple(sorted(labels[node] for node in event.nodes if node in labels))
        return replace(event, nodes=lost)
    return replace(
        event,
        **{
            name: tuple(sorted(labels[node] for node in getattr(event, name)))
            for name in ("joined", "leaving", "slow")
        },
    )
