"""Answers for nodes that differ in speed, besides those for equal nodes.

If some node is slow, or was, the answers for equal nodes are kept, but microbatches are distributed
and the iteration is priced by the true speeds. While training goes on there is time for more
answers. These are given also if all nodes are equal and the question is only whether there is a
better plan:

- stay: nothing changes; the other answers are compared to it.
- recut: the best of these answers, with new stages for the speeds in pipelines with a slow node.
- unequal: the planner's plan for nodes of these kinds, if planning is not too much work.
- without: all nodes up to some low speed have no work, if the others tolerate f failures without
  them and are faster by 3% then. They stay members, with the speed that they had: a loss gives them
  work again, because then every node counts.

A loss is answered at once, by the answers for equal nodes only; the others are considered when
training goes on.

Source: none; none of the papers has slow nodes.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged
from planaria.core.plan import NodeKind, Pipeline, PipelineTemplate, Plan, Transition
from planaria.errors import InfeasibleError
from planaria.planner.layout.unequal import EFFORT_MAX, UnequalPlanner, planning_effort
from planaria.planner.plans import PlanCatalog, pipeline_microbatches, plan_iteration_s
from planaria.planner.problem import stage_costs
from planaria.planner.reroute.reroutes import simulated_s
from planaria.planner.templates import fastest_templates
from planaria.policies.building import least_exposed
from planaria.policies.policy import Prices
from planaria.policies.reinstantiate import POLICY, Reinstantiate, unbound_pipelines
from planaria.restorer.assignment import UnboundPipeline, assign_nodes
from planaria.restorer.cover import trusted_layers

STAY: Final = "stay"
RECUT: Final = "recut"
UNEQUAL: Final = "unequal"
WITHOUT: Final = "without"

_IDLE_GAIN_MIN: Final = 0.03
_SPEED_LIMITS_MAX: Final = 8  # Limits that are tried; one takes as long as the answer to a loss.

Kinds = Mapping[int, NodeKind]


@dataclass(frozen=True, slots=True)
class UnequalNodes:
    """The policy for nodes that differ in speed.

    Attributes:
        reinstantiate: policy for equal nodes, whose answers it extends.
    """

    reinstantiate: Reinstantiate

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The answers for equal nodes, with microbatches for these nodes, and the further answers
        listed in the module's docstring, `stay` first."""
        kinds = {node.node: node.kind for node in (*cluster.nodes, *cluster.leaving)}
        before = with_kinds(plan, {})
        # If no node joins or leaves, the question is whether there is a better plan.
        asks_for_better = isinstance(event, NodesChanged) and (
            bool(event.slow) or not (event.joined or event.leaving)
        )
        is_equal = before == plan and all(kind == NodeKind() for kind in kinds.values())
        if is_equal:
            answers = self.reinstantiate.propose(plan, cluster, event, prices)
            if not asks_for_better:
                return answers
        else:
            answers = self._answers_for_kinds(plan, cluster, event, prices, kinds=kinds)
        if not isinstance(event, NodesChanged) or not answers:
            return answers
        stay: tuple[Transition, ...] = ()
        if not event.joined and not event.leaving:
            stay = (stay_answer(self.reinstantiate.catalog, plan, cluster, kinds),)
        further: list[tuple[tuple[Pipeline, ...], str]] = []
        complete = [x for x in (*stay, *answers) if not x.after.gone]
        best = min(complete, key=lambda transition: transition.iteration_s)
        if recut := self._recut_pipelines(best.after, cluster, prices):
            further.append((recut, RECUT))
        if unequal := self._planned_pipelines(before, cluster, prices):
            further.append((unequal, UNEQUAL))
        answers += tuple(
            self.reinstantiate.transition(pipelines, answer, plan, cluster, event, prices)
            for pipelines, answer in further
        )
        answers = least_exposed(answers, cluster)
        without = self._answer_without_slowest(plan, cluster, event, prices)
        best_s = min(transition.iteration_s for transition in (*stay, *answers))
        pays = [x for x in without if x.iteration_s < (1.0 - _IDLE_GAIN_MIN) * best_s]
        # `stay` is always kept for comparison: it moves no layer to other nodes.
        return (*stay, *least_exposed((*answers, *pays), cluster))

    def _answers_for_kinds(
        self,
        plan: Plan,
        cluster: ClusterState,
        event: ClusterEvent,
        prices: Prices,
        *,
        kinds: Kinds,
    ) -> tuple[Transition, ...]:
        """The answers for equal nodes, with microbatches and prices for nodes of these kinds."""
        return tuple(
            self.reinstantiate.transition(
                with_kinds(transition.after, kinds).pipelines,
                transition.answer,
                plan,
                cluster,
                event,
                prices,
            )
            for transition in self.reinstantiate.propose(
                with_kinds(plan, {}), cluster, event, prices
            )
        )

    def _recut_pipelines(
        self, best: Plan, cluster: ClusterState, prices: Prices
    ) -> tuple[Pipeline, ...] | None:
        """The pipelines of the answer `best`, with new stages in those that have slow nodes; None
        if no pipeline changes."""
        nodes = {node.node: node for node in cluster.nodes}
        pipelines: list[Pipeline] = []
        for pipeline, count in zip(best.pipelines, pipeline_microbatches(best), strict=True):
            template = pipeline.template
            if template.kinds:
                template = self._fastest_template(pipeline, count)
                members = [nodes[node] for node in pipeline.nodes]
                others = (*pipelines, *best.pipelines[len(pipelines) + 1 :])
                (pipeline,) = assign_nodes(
                    [UnboundPipeline(template, -1)],
                    members,
                    before=best,
                    layer_bytes=prices.layer_bytes,
                    covered=trusted_layers(others, cluster.distrusted_nodes),
                )
            pipelines.append(pipeline)
        return tuple(pipelines) if tuple(pipelines) != best.pipelines else None

    def _fastest_template(self, pipeline: Pipeline, num_microbatches: int) -> PipelineTemplate:
        """The fastest template for nodes of the pipeline's kinds, in any order."""
        counts = Counter(pipeline.template.node_kinds)
        costs = stage_costs(self.reinstantiate.catalog.problem, sorted(counts))
        num_of_kind = tuple(counts[kind] for kind in costs.kinds)
        templates = fastest_templates(costs, {num_of_kind: num_microbatches})
        return templates[num_of_kind].template if num_of_kind in templates else pipeline.template

    def _planned_pipelines(
        self, before: Plan, cluster: ClusterState, prices: Prices
    ) -> tuple[Pipeline, ...] | None:
        """The pipelines of the planner's plan for nodes of these kinds; None if there is none, if
        all nodes are equal, or if planning is too much work."""
        problem = self.reinstantiate.catalog.problem
        kinds = {node.node: node.kind for node in cluster.nodes}
        is_equal = all(kind == NodeKind() for kind in kinds.values())
        if is_equal or planning_effort(problem, kinds) > EFFORT_MAX:
            return None
        try:
            planner = UnequalPlanner(problem, kinds)
        except InfeasibleError:  # They train already, though by what is estimated they could not.
            return None
        most = planner.most_pipelines(kinds, at_most=problem.failures_tolerated + 1)
        templates = planner.templates(kinds, min_pipelines=most) if most else ()
        if not templates:
            return None
        unbound = unbound_pipelines(templates, before, frozenset(kinds))
        return assign_nodes(unbound, cluster.nodes, before=before, layer_bytes=prices.layer_bytes)

    def _answer_without_slowest(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The fastest answer in which the slowest nodes have no work and only send what they hold;
        none if they are needed or no node is slow."""
        answers: list[Transition] = []
        for limit in self._speed_limits(cluster):
            slowest = tuple(node for node in cluster.nodes if node.kind.speed <= limit)
            others = tuple(node for node in cluster.nodes if node.kind.speed > limit)
            without_slowest = ClusterState(cluster.epoch, others, (*cluster.leaving, *slowest))
            kinds = {node.node: node.kind for node in others}
            answers += self._answers_for_kinds(plan, without_slowest, event, prices, kinds=kinds)
        best = min(answers, key=lambda transition: transition.iteration_s, default=None)
        return (replace(best, answer=WITHOUT),) if best else ()

    def _speed_limits(self, cluster: ClusterState) -> tuple[float, ...]:
        """Low speeds, ascending, such that the nodes above each suffice to tolerate f failures; of
        many, the lowest, the highest and some evenly between."""
        catalog = self.reinstantiate.catalog
        needed = (catalog.problem.failures_tolerated + 1) * min(catalog.templates)
        speeds = sorted(node.kind.speed for node in cluster.nodes)
        limits = [
            limit
            for limit in sorted({speed for speed in speeds if speed < 1.0})
            if len(speeds) - bisect_right(speeds, limit) >= needed
        ]
        if len(limits) <= _SPEED_LIMITS_MAX:
            return tuple(limits)
        last = len(limits) - 1
        chosen = [limits[last * i // (_SPEED_LIMITS_MAX - 1)] for i in range(_SPEED_LIMITS_MAX)]
        return tuple(chosen)


def stay_answer(
    catalog: PlanCatalog, plan: Plan, cluster: ClusterState, kinds: Kinds
) -> Transition:
    """The transition that keeps the plan, priced for nodes of these kinds."""
    after = replace(with_kinds(plan, kinds), epoch=cluster.epoch)
    is_plain = not (after.splits_backward or after.gone or after.ticks) and (
        sum(pipeline_microbatches(after)) == len(after.routes)
    )
    iteration_s = (
        plan_iteration_s(after, catalog.times) if is_plain else simulated_s(catalog.problem, after)
    )
    return Transition(
        before=plan,
        after=after,
        rounds=(),
        downtime_s=0.0,
        iteration_s=iteration_s,
        redone_samples=0,
        policy=POLICY,
        answer=STAY,
        keeps_plan=True,
    )


def with_kinds(plan: Plan, kinds: Kinds) -> Plan:
    """The plan on nodes of these kinds; a node without one is of the kind that was profiled."""

    def pipeline_of_kinds(pipeline: Pipeline) -> Pipeline:
        of_nodes = tuple(kinds.get(node, NodeKind()) for node in pipeline.nodes)
        is_plain = all(kind == NodeKind() for kind in of_nodes)
        template = replace(pipeline.template, kinds=() if is_plain else of_nodes)
        return replace(pipeline, template=template)

    pipelines = tuple(pipeline_of_kinds(pipeline) for pipeline in plan.pipelines)
    return replace(plan, pipelines=pipelines)
