"""Planaria as one of the systems that are compared: its rules and plans, made from a setting."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from planaria.coordinator.job_rules import Rules
from planaria.coordinator.placing import version_iterations
from planaria.core.commit import vector_layout
from planaria.errors import InfeasibleError
from planaria.planner.reroute.reroutes import PricedPlan
from planaria.planner.reroute.shadows import first_plan_with_shadows
from planaria.policies.named import looks_ahead, named_policy
from planaria.policies.policy import profile_prices
from planaria.policies.traits import TRAITS
from planaria.simulator.economics.compare import PLANARIA
from planaria.simulator.economics.planaria_run import PlanariaRun, PlanOf
from planaria.simulator.economics.remembered import Remembered
from planaria.simulator.economics.virtual_foresight import VirtualForesight
from planaria.systems.system import Setting

_WAIT_S = 1e18  # A simulated job waits for machines for as long as it takes.


@dataclass(frozen=True, slots=True)
class PlanariaSystem:
    """Planaria with the policy that the job names; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return PLANARIA

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> PlanariaRun:
        """A job that begins; see `System`."""
        problem = setting.catalog.problem
        rules, plan_of = rules_of_setting(setting), plans_of(setting)
        return PlanariaRun(rules, plan_of, setting.costs, problem, absent=absent)


def rules_of_setting(setting: Setting) -> Rules:
    """The rules of the coordinator of such a job."""
    job, catalog, costs = setting.job, setting.catalog, setting.costs
    is_ahead = looks_ahead(job)
    policy = VirtualForesight(job, catalog) if is_ahead else Remembered(named_policy(job, catalog))
    num_layers = len(catalog.problem.profile.layers)
    rules = Rules(
        job=job,
        policy=policy,
        looks_ahead=is_ahead,
        prices=profile_prices(catalog.problem.profile, regroup_s=costs.regroup_s),
        n0=min(catalog.templates),
        max_nodes=max(job.cluster.nodes, job.cluster.max_nodes),
        num_layers=num_layers,
        layout=vector_layout(job, num_layers),
        first_iteration=0,
        catalog=catalog,
        wait_s=_WAIT_S,
    )
    plan = catalog.plans[setting.num_nodes]
    piece_bytes = job.checkpoint.buffer_bytes // job.checkpoint.num_buffers
    number = version_iterations(rules, plan, chunk_bytes=piece_bytes)
    # Without catalog the coordinator looks for no drift; for slow nodes once it gets a profile.
    return replace(rules, version_iterations=number, catalog=None)


def plans_of(setting: Setting) -> PlanOf:
    """The plans with which a job of the setting can begin, by the number of nodes."""
    job, catalog = setting.job, setting.catalog

    def plan_of(num_nodes: int) -> PricedPlan | None:
        plan = catalog.plans.get(min(num_nodes, setting.num_nodes))
        if plan is None:
            return None
        if TRAITS[job.resilience.policy].has_shadows:
            with suppress(InfeasibleError):  # More nodes have room for the shadows.
                return first_plan_with_shadows(catalog.problem, plan, templates=catalog.templates)
            return None
        templates = [pipeline.template for pipeline in plan.pipelines]
        return PricedPlan(plan, catalog.distribution(templates)[0])

    return plan_of
