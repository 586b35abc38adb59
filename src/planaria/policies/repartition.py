"""Odyssey's answer to a loss: whatever pipelines suit the nodes that are left, made of no templates
that were there before.

The layouts that a search finds (planner/layout/search.py) are bound to nodes such that the fewest
bytes move. Several are proposed: the fastest, and slower ones that keep more of the pipelines that
there are, for which less has to move. Searched are as many steps as are worth a pause; what was
found before, while training went on, is there at once, and the search goes on from there.

Nodes that differ in speed or memory are left to another policy, and so is what has no layout within
the ranges. So is the question whether there is a better plan for the nodes that there are, as far
as the plan as it is has to be priced.

Source: Odyssey, section IV-A.
Differs: Odyssey proposes the one layout with the lowest estimated iteration; what its transition
costs has no part in the search.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged
from planaria.core.plan import NodeKind, Pipeline, PipelineTemplate, Plan, Transition, plain_plan
from planaria.planner.layout.search import Layout, Searched
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import with_split_backwards
from planaria.policies.policy import Policy, Prices, least_exposed, moving, num_exposed
from planaria.policies.reinstantiate import openings_of
from planaria.policies.unequal import STAY
from planaria.restorer.strategies import LEAST_BYTES, Restoring

POLICY: Final = "repartition"
REPARTITION: Final = "repartition"
STEPS_MAX: Final = 64  # 0.4 s at 32 nodes and at 1,000; there is a good layout after 20.


@dataclass(frozen=True, slots=True)
class Repartition:
    """The policy.

    Attributes:
        otherwise: answers what this one cannot.
        searched: what is known of layouts; it is searched on in `propose`.
    """

    problem: Problem
    otherwise: Policy
    searched: Searched
    restoring: Restoring = LEAST_BYTES

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The best layouts known, the fastest first; the other policy's answers if there are none,
        or if all leave layers to distrusted nodes alone.

        There is none if `ClusterState.lost_layers` names a layer: then only a checkpoint helps.
        """
        if cluster.lost_layers(plan.num_layers):
            return ()
        if not is_usual(plan, cluster):
            return self.otherwise.propose(plan, cluster, event, prices)
        present = templates_of(plan)
        for _ in islice(self.searched.steps(len(cluster.nodes), present), STEPS_MAX):
            pass
        front = self.searched.front(len(cluster.nodes), present)
        found = tuple(
            self._transition(layout, answer, plan, cluster, event, prices)
            for layout, answer in zip(front, answers(front), strict=True)
        )
        is_for_better = isinstance(event, NodesChanged) and not (event.joined or event.leaving)
        if not found or is_for_better or all(num_exposed(one.after, cluster) for one in found):
            others = self.otherwise.propose(plan, cluster, event, prices)
            if found and is_for_better:
                others = tuple(one for one in others if one.answer == STAY)
            found = (*others, *found)
        stay = tuple(one for one in found if one.answer == STAY)
        return (*stay, *least_exposed([one for one in found if one.answer != STAY], cluster))

    def _transition(
        self,
        layout: Layout,
        answer: str,
        plan: Plan,
        cluster: ClusterState,
        event: ClusterEvent,
        prices: Prices,
    ) -> Transition:
        """The way to a layout on the nodes that have most of it."""
        alive = frozenset(node.node for node in cluster.nodes)
        pipelines = self.restoring.assignment(
            openings_of(layout.templates, plan, alive),
            cluster.nodes,
            before=plan,
            layer_bytes=prices.layer_bytes,
        )
        after = plain_plan(cluster.epoch, pipelines, _dealt(layout, pipelines))
        if layout.splits_backward:
            after = with_split_backwards(self.problem, after)
        return moving(
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


def is_usual(plan: Plan, cluster: ClusterState) -> bool:
    """Whether all nodes are, and were taken for, such as the profile was measured on."""
    nodes = (*cluster.nodes, *cluster.leaving)
    return all(node.kind == NodeKind() for node in nodes) and not any(
        pipeline.template.kinds for pipeline in plan.pipelines
    )


def templates_of(plan: Plan) -> tuple[PipelineTemplate, ...]:
    """Of its pipelines, those with empty places included."""
    return tuple(pipeline.template for pipeline in plan.pipelines)


def answers(front: Sequence[Layout]) -> list[str]:
    """What each is called, by what it has that faster ones lack."""
    names = []
    for index, layout in enumerate(front):
        is_like_fastest = layout.is_doubled is front[0].is_doubled
        holding = "" if is_like_fastest else "-doubled" if layout.is_doubled else "-once"
        is_first = all(one.is_doubled is not layout.is_doubled for one in front[:index])
        keeping = "" if is_first else f"-keeping-{layout.num_kept}"
        names.append(f"{REPARTITION}{holding}{keeping}")
    return names


def _dealt(layout: Layout, pipelines: Sequence[Pipeline]) -> tuple[int, ...]:
    """The layout's microbatches, by pipeline; equal templates may have different numbers."""
    counts: dict[PipelineTemplate, list[int]] = {}
    for template, count in zip(layout.templates, layout.microbatches, strict=True):
        counts.setdefault(template, []).append(count)
    return tuple(counts[pipeline.template].pop() for pipeline in pipelines)
