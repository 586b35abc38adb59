"""A policy of one's own: pipelines that lost a node are given up, the others take their work.

    python examples/policy.py

prints its answer beside planaria's own, for GPT-3 6.7B on twelve nodes of which one is lost. It is
what data-parallel training does on most clusters: nothing moves, and survivors of a broken pipeline
wait. To train with a policy, give it a name in policies/named.py, its traits in policies/traits.py,
and add the name to the values of `resilience.policy` in core/job.py (all below src/planaria).
"""

from dataclasses import dataclass

from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost, survivors
from planaria.core.plan import Plan, Transition, plain_plan
from planaria.planner.plans import PlanCatalog, best_plan, plan_catalog
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_templates
from planaria.policies.building import transition_between
from planaria.policies.policy import Prices, profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.profiles.shipped import shipped_profiles
from planaria.restorer.strategies import LEAST_BYTES


@dataclass(frozen=True, slots=True)
class DropPipelines:
    """The policy. `every` knows how fast any set of pipelines is."""

    catalog: PlanCatalog

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The pipelines that are whole, with all microbatches; no answer if none is."""
        alive = {node.node for node in cluster.nodes}
        whole = tuple(p for p in plan.pipelines if alive.issuperset(p.nodes))
        if not whole:
            return ()
        iteration_s, microbatches = self.catalog.distribution([p.template for p in whole])
        found = transition_between(
            plan,
            plain_plan(cluster.epoch, whole, microbatches),
            cluster,
            prices,
            LEAST_BYTES,
            iteration_s=iteration_s,
            redone_samples=event.redone_samples,
            policy="drop",
            answer="drop",
        )
        return (found,)


def main(num_nodes: int = 12, lost: int = 5) -> list[Transition]:
    """Prints what each policy proposes when a node is lost, and returns it."""
    profile = next(p for p in shipped_profiles() if p.model == "gpt3-6.7b")
    problem = Problem(
        profile=profile, devices_per_node=1, num_microbatches=96, failures_tolerated=1
    )
    templates = pipeline_templates(problem, num_nodes)
    catalog = plan_catalog(problem, num_nodes, templates)
    plan = best_plan(problem, range(num_nodes), templates, epoch=0)
    cluster, event = survivors(plan, (lost,), epoch=1), NodesLost((lost,), redone_samples=0)
    prices = profile_prices(profile, regroup_s=0.2)
    found = [
        answer
        for policy in (DropPipelines(catalog), Reinstantiate(catalog))
        for answer in policy.propose(plan, cluster, event, prices)
    ]
    for answer in found:
        print(
            f"{answer.answer:>12}: {len(answer.after.nodes)} of {num_nodes - 1} nodes work, "
            f"{answer.iteration_s:.2f} s an iteration, after {answer.downtime_s:.2f} s"
        )
    return found


if __name__ == "__main__":
    main()
