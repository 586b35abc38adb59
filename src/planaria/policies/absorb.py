"""Bamboo's answer to a loss: a neighbour takes over the lost node's layers, which it held already.

Every node holds the layers of its successor besides its own (planner/reroute/shadows.py): it takes
part in their reductions, takes their optimizer steps, and computes their forwards ahead, in bubbles
(schedule/redundant.py). When a node is lost, the neighbour that holds its layers computes both
stages: the pipeline goes on with one stage less, and nothing is sent.

Another policy answers what cannot be absorbed: neighbours that are lost together, or one after the
other, and nodes that join, leave or are slow. The plans of that policy get new shadows if there is
memory for them; the transfers that the shadows need are part of the transition.

Source: Bamboo (NSDI '23), redundant computation.
Differs: in Bamboo the neighbour goes on with the iteration in which a node is lost, from what it
has computed eagerly; here the outcome of that iteration is recorded first, so it is committed or
redone as a whole. Microbatches are distributed anew, because the pipeline is slower now.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost
from planaria.core.plan import (
    Pipeline,
    PipelineTemplate,
    Plan,
    Recomputation,
    Stage,
    Transition,
    plain_plan,
)
from planaria.planner.plans import PlanCatalog
from planaria.planner.reroute.reroutes import PricedPlan, price_plan, simulated_s
from planaria.planner.reroute.shadows import with_shadows
from planaria.policies.building import (
    downtime_s,
    fastest_transfers,
    least_exposed,
    num_exposed,
)
from planaria.policies.policy import Policy, Prices
from planaria.restorer.sources import transfer_rounds
from planaria.restorer.strategies import LEAST_BYTES, RestoreStrategy

POLICY: Final = "absorb"
ABSORB: Final = "absorb"


@dataclass(frozen=True, slots=True)
class Absorb:
    """The policy that absorbs lost nodes; if nodes have several devices, it acts as `fallback`.

    Attributes:
        catalog: plans and templates of the job.
        fallback: policy that answers what cannot be absorbed.
        restoring: strategy that assigns nodes and finds sources of layers.
    """

    catalog: PlanCatalog
    fallback: Policy
    restoring: RestoreStrategy = LEAST_BYTES

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The transition that absorbs a loss, if that is possible; else those of the other policy.

        If absorbing would leave a layer to distrusted nodes alone, the answers of both policies
        that leave the fewest such layers are returned.
        """
        if self.catalog.problem.devices_per_node > 1:
            return self.fallback.propose(plan, cluster, event, prices)
        absorbing: tuple[Transition, ...] = ()
        if isinstance(event, NodesLost) and not cluster.leaving:
            absorbing = self._absorbing_transitions(plan, cluster, event, prices)
            if absorbing and not num_exposed(absorbing[0].after, cluster):
                return absorbing
        others = tuple(
            replace(transition, iteration_s=simulated_s(self.catalog.problem, transition.after))
            if transition.keeps_plan
            else self._with_shadows(transition, cluster, prices)
            for transition in self.fallback.propose(plan, cluster, event, prices)
        )
        return least_exposed((*absorbing, *others), cluster) if absorbing else others

    def _absorbing_transitions(
        self, plan: Plan, cluster: ClusterState, event: NodesLost, prices: Prices
    ) -> tuple[Transition, ...]:
        plan_without_lost = self._plan_without_lost(plan, cluster)
        if plan_without_lost is None:
            return ()
        transition = Transition(
            before=plan,
            after=plan_without_lost.plan,
            rounds=(),
            downtime_s=downtime_s((), prices, devices_per_node=1),
            iteration_s=plan_without_lost.iteration_s,
            redone_samples=event.redone_samples,
            policy=POLICY,
            answer=ABSORB,
        )
        return (transition,)

    def _with_shadows(
        self, transition: Transition, cluster: ClusterState, prices: Prices
    ) -> Transition:
        """The transition with shadows in its plan; unchanged if there is no memory for them."""
        priced_plan = price_plan(self.catalog.problem, with_shadows(transition.after))
        if priced_plan is None:
            return transition
        transfers = fastest_transfers(priced_plan.plan, cluster, prices, self.restoring)
        return replace(
            transition,
            after=priced_plan.plan,
            rounds=transfer_rounds(transfers),
            downtime_s=downtime_s(transfers, prices, devices_per_node=1),
            iteration_s=priced_plan.iteration_s,
        )

    def _plan_without_lost(self, plan: Plan, cluster: ClusterState) -> PricedPlan | None:
        """The plan in which neighbours replace the lost nodes; None if there is none.

        There is none if a lost node has no live neighbour that can take over its layers, if a live
        node has no place in the plan, or if a rank would compute a layer that it does not hold.
        """
        held = {node.node: node.held[0] for node in cluster.nodes}
        if not held.keys() <= set(plan.nodes):
            return None
        pipelines = []
        for pipeline in plan.pipelines:
            merged = _pipeline_without_lost(pipeline, frozenset(held))
            if merged is None:
                return None
            pipelines.append(merged)
        templates = [pipeline.template for pipeline in pipelines]
        _, microbatches = self.catalog.distribution(templates)
        after = plain_plan(cluster.epoch, tuple(pipelines), microbatches)
        computed = after.layers_by_rank
        if any(not held[rank].issuperset(layers) for rank, layers in computed.items()):
            return None
        shadows = {
            rank: kept
            for rank, layers in plan.shadows.items()
            if rank in computed
            and (kept := tuple(x for x in layers if x not in computed[rank] and x in held[rank]))
        }
        return price_plan(self.catalog.problem, replace(after, shadows=shadows))


def _pipeline_without_lost(pipeline: Pipeline, alive: frozenset[int]) -> Pipeline | None:
    """The pipeline without its lost nodes, whose layers their neighbours take over; None if two
    adjacent nodes or all nodes are lost."""
    lives = [node in alive for node in pipeline.nodes]
    if all(lives):
        return pipeline
    if len(lives) == 1 or not all(a or b for a, b in pairwise(lives)):
        return None
    template = pipeline.template
    stages: list[Stage] = []
    for index, (stage, is_live) in enumerate(zip(template.stages, lives, strict=True)):
        if index == 1 and not lives[0]:
            stages.append(_joined_stage(template.stages[0], stage))
        elif is_live:
            stages.append(stage)
        elif index:
            stages[-1] = _joined_stage(stages[-1], stage)
    kinds = tuple(k for k, is_live in zip(template.node_kinds, lives, strict=True) if is_live)
    nodes = tuple(n for n, is_live in zip(pipeline.nodes, lives, strict=True) if is_live)
    merged_template = PipelineTemplate(tuple(stages), len(nodes), kinds if template.kinds else ())
    return Pipeline(merged_template, nodes)


def _joined_stage(first: Stage, second: Stage) -> Stage:
    """The stage on one device with the layers of two neighbouring stages, which compute the same
    again as before."""
    modes: list[Recomputation] = []
    if first.recomputation or second.recomputation:
        for stage in (first, second):
            modes += stage.recomputation or ["none"] * (stage.end_layer - stage.first_layer)
    return Stage(first.first_layer, second.end_layer, 1, tuple(modes))
