"""Odyssey's answer to a loss: the pipelines that suit the remaining nodes best, without regard to
the templates that were planned at the start.

The layouts that a search finds (planner/layout/search.py) are bound to nodes such that the fewest
bytes move. Several are proposed: the fastest, and slower ones that keep more of the present
pipelines, so that less has to move. The search takes as many steps as are worth a pause; it goes on
from the layouts that were found earlier, while nodes trained.

Another policy answers if nodes differ in speed or memory, or if no layout is within the ranges. If
the question is only whether there is a better plan for the present nodes, that policy also prices
the present plan.

Source: Odyssey, section IV-A.
Differs: Odyssey proposes the one layout with the shortest estimated iteration, and its search does
not consider the cost of the transition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged
from planaria.core.plan import NodeKind, Pipeline, PipelineTemplate, Plan, Transition, plain_plan
from planaria.planner.layout.search import Layout, LayoutSearches
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import with_split_backwards
from planaria.policies.building import least_exposed, num_exposed, transition_between
from planaria.policies.policy import Policy, Prices
from planaria.policies.reinstantiate import unbound_pipelines
from planaria.restorer.strategies import LEAST_BYTES, RestoreStrategy

POLICY: Final = "repartition"
REPARTITION: Final = "repartition"
STEPS_MAX: Final = 64  # 0.4 s at 32 nodes and at 1,000; there is a good layout after 20.
# Bound on the hops that they simulate; where pipelines have many microbatches, it takes fewer steps
# once it has a layout.
_STEPS_HOPS_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Repartition:
    """The policy that searches for new layouts.

    Attributes:
        problem: model, profile and limits to plan for.
        fallback: policy that answers what this one cannot.
        searched: search for layouts with what it has found; `propose` continues it.
        restoring: strategy that assigns nodes and finds sources of layers.
    """

    problem: Problem
    fallback: Policy
    searched: LayoutSearches
    restoring: RestoreStrategy = LEAST_BYTES

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The best layouts known, the fastest first; with the other policy's answers if there are
        none, or if all leave layers to distrusted nodes alone.

        There is no answer if `ClusterState.lost_layers` names a layer: then only a checkpoint
        helps.
        """
        if cluster.lost_layers(plan.num_layers):
            return ()
        if not has_equal_nodes(plan, cluster):
            return self.fallback.propose(plan, cluster, event, prices)
        present = templates_of(plan)
        front = self.searched.front(len(cluster.nodes), present)
        steps = islice(self.searched.steps(len(cluster.nodes), present), STEPS_MAX)
        for num_steps, _ in enumerate(steps, start=1):
            front = self.searched.front(len(cluster.nodes), present)
            if front and num_steps >= _num_steps(plan):
                break
        transitions = tuple(
            self._transition(layout, answer, plan, cluster, event, prices)
            for layout, answer in zip(front, layout_names(front), strict=True)
        )
        is_for_better = isinstance(event, NodesChanged) and not (event.joined or event.leaving)
        is_exposed = all(num_exposed(x.after, cluster) for x in transitions)
        if is_for_better or is_exposed:
            others = self.fallback.propose(plan, cluster, event, prices)
            if transitions and is_for_better:
                others = tuple(x for x in others if x.keeps_plan)
            transitions = (*others, *transitions)
        stay = tuple(x for x in transitions if x.keeps_plan)
        return (*stay, *least_exposed([x for x in transitions if not x.keeps_plan], cluster))

    def _transition(
        self,
        layout: Layout,
        answer: str,
        plan: Plan,
        cluster: ClusterState,
        event: ClusterEvent,
        prices: Prices,
    ) -> Transition:
        """The transition to a layout, on the nodes that the assignment of `restoring` chooses."""
        alive = frozenset(node.node for node in cluster.nodes)
        pipelines = self.restoring.assignment(
            unbound_pipelines(layout.templates, plan, alive),
            cluster.nodes,
            before=plan,
            layer_bytes=prices.layer_bytes,
        )
        after = plain_plan(cluster.epoch, pipelines, _num_microbatches(layout, pipelines))
        if layout.splits_backward:
            after = with_split_backwards(self.problem, after)
        return transition_between(
            plan,
            after,
            cluster,
            prices,
            self.restoring,
            iteration_s=layout.iteration_s,
            redone_samples=event.redone_samples,
            policy=POLICY,
            answer=answer,
        )


def _num_steps(plan: Plan) -> int:
    """How many steps are worth a pause if a step simulates a pipeline, hop by hop."""
    num_hops = sum(map(len, plan.routes)) // len(plan.pipelines)
    return max(1, min(STEPS_MAX, _STEPS_HOPS_MAX // max(1, num_hops)))


def has_equal_nodes(plan: Plan, cluster: ClusterState) -> bool:
    """Whether all nodes are of the kind on which the profile was measured, also in the plan."""
    nodes = (*cluster.nodes, *cluster.leaving)
    return all(node.kind == NodeKind() for node in nodes) and not any(
        pipeline.template.kinds for pipeline in plan.pipelines
    )


def templates_of(plan: Plan) -> tuple[PipelineTemplate, ...]:
    """The templates of a plan's pipelines, those with empty places included."""
    return tuple(pipeline.template for pipeline in plan.pipelines)


def layout_names(front: Sequence[Layout]) -> list[str]:
    """The name of each layout, which tells what it has that faster ones lack."""
    names = []
    for index, layout in enumerate(front):
        is_like_fastest = layout.is_doubled is front[0].is_doubled
        holding = "" if is_like_fastest else "-doubled" if layout.is_doubled else "-once"
        is_first = all(faster.is_doubled is not layout.is_doubled for faster in front[:index])
        keeping = "" if is_first else f"-keeping-{layout.num_kept}"
        names.append(f"{REPARTITION}{holding}{keeping}")
    return names


def _num_microbatches(layout: Layout, pipelines: Sequence[Pipeline]) -> tuple[int, ...]:
    """The number of microbatches of each pipeline; equal templates may have different numbers."""
    counts: dict[PipelineTemplate, list[int]] = {}
    for template, count in zip(layout.templates, layout.microbatches, strict=True):
        counts.setdefault(template, []).append(count)
    return tuple(counts[pipeline.template].pop() for pipeline in pipelines)
