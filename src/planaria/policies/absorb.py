"""Bamboo's answer to a loss: the neighbour computes the lost node's layers, which it kept in step.

Every node keeps its successor's layers besides its own (planner/reroute/shadows.py): it takes part
in their reductions, takes their optimizer steps, and computes their forwards ahead, in bubbles
(schedule/redundant.py). When a node is lost, the neighbour that keeps its layers computes both: the
pipeline goes on with a stage less, and nothing is sent.

What cannot be answered so is left to another policy: neighbours that are lost together, or one
after the other; nodes that come, leave or are slow. Its plans get shadows anew, with what that has
to send, where there is memory for them.

Source: Bamboo (NSDI '23), redundant computation.
Differs: in Bamboo the neighbour goes on with the iteration in which a node is lost, from what it
has computed eagerly; here the outcome of that iteration is on record first, so it is committed or
done again as a whole. Microbatches are dealt anew, for the pipeline is slower now.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost
from planaria.core.plan import Pipeline, PipelineTemplate, Plan, Stage, Transition, plain_plan
from planaria.planner.plans import EveryPlan
from planaria.planner.reroute.reroutes import Priced, priced, simulated_s
from planaria.planner.reroute.shadows import shadowed
from planaria.policies.policy import Policy, Prices, downtime_s, least_exposed, num_exposed
from planaria.policies.unequal import STAY
from planaria.restorer.sources import transfer_rounds
from planaria.restorer.strategies import LEAST_BYTES, Restoring

POLICY: Final = "absorb"
ABSORB: Final = "absorb"


@dataclass(frozen=True, slots=True)
class Absorb:
    """The policy; where nodes have several devices it is `otherwise`.

    Attributes:
        otherwise: answers what cannot be absorbed.
    """

    every: EveryPlan
    otherwise: Policy
    restoring: Restoring = LEAST_BYTES

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """Absorbing alone, after a loss and where it can be; else what the other policy knows.

        It cannot be where distrusted nodes alone would hold a layer then, if the other policy has
        an answer without that.
        """
        if self.every.problem.devices_per_node > 1:
            return self.otherwise.propose(plan, cluster, event, prices)
        absorbing: tuple[Transition, ...] = ()
        if isinstance(event, NodesLost) and not cluster.leaving:
            absorbing = self._absorbing(plan, cluster, event, prices)
            if absorbing and not num_exposed(absorbing[0].after, cluster):
                return absorbing
        others = tuple(
            replace(one, iteration_s=simulated_s(self.every.problem, one.after))
            if one.answer == STAY
            else self._protected(one, cluster, prices)
            for one in self.otherwise.propose(plan, cluster, event, prices)
        )
        return least_exposed((*absorbing, *others), cluster) if absorbing else others

    def _absorbing(
        self, plan: Plan, cluster: ClusterState, event: NodesLost, prices: Prices
    ) -> tuple[Transition, ...]:
        found = self._absorbed(plan, cluster)
        if found is None:
            return ()
        absorbing = Transition(
            before=plan,
            after=found.plan,
            rounds=(),
            downtime_s=downtime_s((), prices, devices_per_node=1),
            iteration_s=found.iteration_s,
            redone_samples=event.redone_samples,
            policy=POLICY,
            answer=ABSORB,
        )
        return (absorbing,)

    def _protected(
        self, transition: Transition, cluster: ClusterState, prices: Prices
    ) -> Transition:
        """With shadows, if there is memory for them."""
        found = priced(self.every.problem, shadowed(transition.after))
        if found is None:
            return transition
        moved = self.restoring.sources(found.plan, cluster, layer_bytes=prices.layer_bytes)
        return replace(
            transition,
            after=found.plan,
            rounds=transfer_rounds(moved),
            downtime_s=downtime_s(moved, prices, devices_per_node=1),
            iteration_s=found.iteration_s,
        )

    def _absorbed(self, plan: Plan, cluster: ClusterState) -> Priced | None:
        """The plan with neighbours in the stead of lost nodes; None if some are not replaced.

        A node that is there must have a place already, and nobody a layer that is not whole.
        """
        held = {node.node: node.held[0] for node in cluster.nodes}
        if not held.keys() <= set(plan.nodes):
            return None
        pipelines = []
        for pipeline in plan.pipelines:
            merged = _merged(pipeline, frozenset(held))
            if merged is None:
                return None
            pipelines.append(merged)
        templates = [pipeline.template for pipeline in pipelines]
        _, microbatches = self.every.distribution(templates)
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
        return priced(self.every.problem, replace(after, shadows=shadows))


def _merged(pipeline: Pipeline, alive: frozenset[int]) -> Pipeline | None:
    """The pipeline without lost nodes, whose layers their neighbours have; None if two of them are
    next to each other."""
    lives = [node in alive for node in pipeline.nodes]
    if all(lives):
        return pipeline
    if len(lives) == 1 or not all(a or b for a, b in pairwise(lives)):
        return None
    template = pipeline.template
    stages: list[Stage] = []
    first_layer = 0
    for index, (stage, is_live) in enumerate(zip(template.stages, lives, strict=True)):
        if is_live:
            stages.append(replace(stage, first_layer=first_layer))
        elif index:
            stages[-1] = replace(stages[-1], end_layer=stage.end_layer)
        if is_live or index:
            first_layer = stage.end_layer
    kinds = tuple(k for k, is_live in zip(template.node_kinds, lives, strict=True) if is_live)
    nodes = tuple(n for n, is_live in zip(pipeline.nodes, lives, strict=True) if is_live)
    made = PipelineTemplate(tuple(stages), len(nodes), kinds if template.kinds else ())
    return Pipeline(made, nodes)
