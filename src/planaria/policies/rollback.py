"""Gemini's answer to a loss: standby nodes take the places of lost ones, and the plan stays.

They get the layers of these places in the newest state in which every layer exists. The layers come
from live holders or, if all nodes have gone back to an older state, from copies in memory
(coordinator/outcomes.py) or from a save. All other nodes compute the same layers as before, so only
these layers move. Empty places that microbatches went around are taken, too.

If there are fewer standby nodes than empty places, another policy answers, because the job does not
wait for a node; one that is granted later joins at a commit, like any other node. If there are more
standby nodes, another policy answers, too, because all nodes are to have work.

Source: Gemini (SOSP '23), section 6.2.
Differs: in Gemini each state has one owner, so all machines go back to their copies whenever one is
lost, and they wait for a machine if there is no standby.
"""

from dataclasses import dataclass, replace
from typing import Final

from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost
from planaria.core.plan import Plan, Transition, plain_plan
from planaria.planner.plans import PlanCatalog
from planaria.policies.building import least_exposed, num_exposed, transition_between
from planaria.policies.policy import Policy, Prices
from planaria.policies.reinstantiate import unbound_pipelines
from planaria.policies.unequal_nodes import with_kinds
from planaria.restorer.strategies import LEAST_BYTES, RestoreStrategy

POLICY: Final = "rollback"
STANDBY: Final = "standby"


@dataclass(frozen=True, slots=True)
class Rollback:
    """The policy that fills empty places with standby nodes.

    Attributes:
        catalog: plans and templates of the job.
        fallback: policy that answers what standby nodes cannot.
        restoring: strategy that assigns nodes and finds sources of layers.
    """

    catalog: PlanCatalog
    fallback: Policy
    restoring: RestoreStrategy = LEAST_BYTES

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The transition that fills all empty places after a loss, if that is possible; else those
        of the other policy.

        If it would leave a layer to distrusted nodes alone, the answers of both policies that leave
        the fewest such layers are returned.
        """
        with_standby: tuple[Transition, ...] = ()
        if isinstance(event, NodesLost) and not cluster.lost_layers(plan.num_layers):
            with_standby = self._standby_transitions(plan, cluster, event, prices)
            if with_standby and not num_exposed(with_standby[0].after, cluster):
                return with_standby
        others = self.fallback.propose(plan, cluster, event, prices)
        return least_exposed((*with_standby, *others), cluster) if with_standby else others

    def _standby_transitions(
        self, plan: Plan, cluster: ClusterState, event: NodesLost, prices: Prices
    ) -> tuple[Transition, ...]:
        """The transition to the same pipelines with a standby node in each empty place; none if the
        numbers of standby nodes and empty places differ, or no place is empty."""
        alive = frozenset(node.node for node in cluster.nodes)
        places = {node for pipeline in plan.pipelines for node in pipeline.nodes}
        num_empty = len(places - alive)
        at_work = [node for node in cluster.nodes if node.node in places]
        standby = [node for node in cluster.nodes if node.node not in places]
        if not num_empty or num_empty != len(standby):
            return ()
        chosen = [*at_work, *standby]
        templates = [replace(pipeline.template, kinds=()) for pipeline in plan.pipelines]
        bound = self.restoring.assignment(
            unbound_pipelines(templates, plan, alive),
            chosen,
            before=plan,
            layer_bytes=prices.layer_bytes,
        )
        kinds = {node.node: node.kind for node in chosen}
        pipelines = with_kinds(Plan(cluster.epoch, bound, ()), kinds).pipelines
        iteration_s, microbatches = self.catalog.distribution([p.template for p in pipelines])
        transition = transition_between(
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
        return (transition,)
