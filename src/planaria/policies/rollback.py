"""Gemini's answer to a loss: standby nodes take the places of lost ones, and the plan stays.

They get the layers of these places in the newest state in which every layer exists: from nodes that
hold them live, else, all having gone back to those, from copies in memory (coordinator/outcomes.py)
or from what is saved. Nobody else computes other layers than before, so only these move. Empty
places that microbatches went around are taken, too.

Where there are fewer nodes without a place than empty places another policy answers, for nobody
waits for a machine; one that is granted later joins at a commit, like any node that comes. Where
there are more it does, too, for all are to have work.

Source: Gemini (SOSP '23), section 6.2.
Differs: Gemini has no replicas, so all its machines go back to their copies whenever one is lost,
and they wait for a machine where none stands by.
"""

from dataclasses import dataclass, replace
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost
from planaria.core.plan import Plan, Transition, plain_plan
from planaria.planner.plans import EveryPlan
from planaria.policies.policy import Policy, Prices, least_exposed, moving, num_exposed
from planaria.policies.reinstantiate import openings_of
from planaria.policies.unequal import of_kinds
from planaria.restorer.strategies import LEAST_BYTES, Restoring

POLICY: Final = "rollback"
STANDBY: Final = "standby"


@dataclass(frozen=True, slots=True)
class Rollback:
    """The policy.

    Attributes:
        otherwise: answers what standby nodes cannot.
    """

    every: EveryPlan
    otherwise: Policy
    restoring: Restoring = LEAST_BYTES

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The plan with its empty places filled, after a loss and where it can be; else what the
        other policy knows.

        It cannot be where distrusted nodes alone would hold a layer then, if the other policy has
        an answer without that.
        """
        filled: tuple[Transition, ...] = ()
        if isinstance(event, NodesLost) and not cluster.lost_layers(plan.num_layers):
            filled = self._filled(plan, cluster, event, prices)
            if filled and not num_exposed(filled[0].after, cluster):
                return filled
        others = self.otherwise.propose(plan, cluster, event, prices)
        return least_exposed((*filled, *others), cluster) if filled else others

    def _filled(
        self, plan: Plan, cluster: ClusterState, event: NodesLost, prices: Prices
    ) -> tuple[Transition, ...]:
        """The plan's pipelines with the nodes that have no place in all that are empty; none if
        they are not as many, or no place is empty."""
        alive = frozenset(node.node for node in cluster.nodes)
        places = [node for pipeline in plan.pipelines for node in pipeline.nodes]
        num_empty = len(set(places).difference(alive))
        at_work = [node for node in cluster.nodes if node.node in places]
        standby = [node for node in cluster.nodes if node.node not in places]
        if not num_empty or num_empty != len(standby):
            return ()
        chosen = [*at_work, *standby]
        templates = [replace(pipeline.template, kinds=()) for pipeline in plan.pipelines]
        bound = self.restoring.assignment(
            openings_of(templates, plan, alive),
            chosen,
            before=plan,
            layer_bytes=prices.layer_bytes,
        )
        kinds = {node.node: node.kind for node in chosen}
        pipelines = of_kinds(Plan(cluster.epoch, bound, ()), kinds).pipelines
        iteration_s, microbatches = self.every.distribution([p.template for p in pipelines])
        found = moving(
            plan,
            plain_plan(cluster.epoch, pipelines, microbatches),
            cluster,
            prices,
            self.restoring,
            iteration_s=iteration_s,
            redone_samples=event.redone_samples,
            policy=POLICY,
            answer=STANDBY,
        )
        return (found,)
