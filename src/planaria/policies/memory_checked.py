"""A policy that drops another policy's answers for which devices have too little memory.

A stage that ran out of memory needs more than was estimated. When its estimate is raised
(coordinator/learning/memory_estimates.py), the templates are made anew, but policies keep pipelines
that lost no node. Answers that no longer fit are dropped here. If none of those that were found
ahead is left, the policy is asked itself; if none of these is left, all pipelines are made anew, on
distrusted nodes, too, if need be.
"""

from dataclasses import dataclass, replace

from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.plan import Plan, Transition, profile_on
from planaria.estimator.peak_memory import bytes_by_rank, kept_bytes, peak_bytes
from planaria.planner.plans import PlanCatalog, pipeline_microbatches
from planaria.planner.problem import Problem
from planaria.policies.ahead import ForeseenAnswers, Lookup
from planaria.policies.policy import Policy, Prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.schedule.lower import unchecked_schedule


@dataclass(frozen=True, slots=True)
class MemoryChecked:
    """The policy that checks the memory that another policy's answers need.

    Attributes:
        policy: policy whose answers are checked.
        catalog: plans and templates of the job, made with the raised estimates.
    """

    policy: Policy
    catalog: PlanCatalog

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The other policy's answers that fit, else those of `Reinstantiate` that fit.

        Answers that were found ahead may be older than the raised estimates. If none of them fits,
        the policy answers without them.

        If nothing fits, all answers of the other policy are returned: the node may have more memory
        than is known.
        """
        anew = Reinstantiate(self.catalog)
        proposed = self.policy.propose(plan, cluster, event, prices)
        fitting = self._fitting_answers(proposed)
        if not fitting and isinstance(self.policy, Lookup) and proposed and proposed[0].is_foreseen:
            unforeseen = replace(self.policy, foreseen=ForeseenAnswers())
            fitting = self._fitting_answers(unforeseen.propose(plan, cluster, event, prices))
        if not fitting:
            fitting = self._fitting_answers(anew.propose(plan, cluster, event, prices))
        if not fitting:
            # Machines that lacked memory are distrusted. Answers that rely on them are dropped
            # where there are others, also if none but these fit.
            trusting = _trusting(cluster)
            fitting = self._fitting_answers(anew.propose(plan, trusting, event, prices))
        return fitting or proposed

    def _fitting_answers(self, transitions: tuple[Transition, ...]) -> tuple[Transition, ...]:
        """The answers that fit, as do the plans that are to follow them."""
        problem = self.catalog.problem
        return tuple(
            transition
            for transition in transitions
            if has_room(problem, transition.after)
            and (transition.then is None or has_room(problem, transition.then.after))
        )


def _trusting(cluster: ClusterState) -> ClusterState:
    """The members, all of which are trusted."""
    nodes, leaving = (
        tuple(replace(node, is_trusted=True) for node in nodes)
        for nodes in (cluster.nodes, cluster.leaving)
    )
    return replace(cluster, nodes=nodes, leaving=leaving)


def has_room(problem: Problem, plan: Plan) -> bool:
    """Whether every stage of a plan fits into the memory of its own node's devices, as far as that
    is known."""
    return all(
        not (limit := kind.device_memory_bytes or problem.profile.device_memory_bytes)
        or peak <= limit
        for pipeline, peaks in zip(plan.pipelines, stage_peaks(problem, plan), strict=True)
        for kind, peak in zip(pipeline.template.stage_kinds(), peaks, strict=True)
    )


def stage_peaks(problem: Problem, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The estimated peak bytes on a device of each stage, for each pipeline; 0 in empty places.

    What ranks keep under schedules other than plain 1F1B, and for others, counts. Takes O(actions)
    time then, otherwise O(stages).
    """
    if plan.gone or plan.shadows or plan.splits_backward or plan.in_flight:
        return _scheduled_peaks(problem, replace(plan, silent={}))
    counts = zip(plan.pipelines, pipeline_microbatches(plan), strict=True)
    return tuple(
        peak_bytes(
            problem.profile,
            pipeline.template,
            num_microbatches=count,
            gradient_copies=problem.gradient_copies,
        )
        for pipeline, count in counts
    )


def _scheduled_peaks(problem: Problem, plan: Plan) -> tuple[tuple[int, ...], ...]:
    profile = problem.profile
    schedule = unchecked_schedule(plan, tied=profile.tied, order=problem.reduction_order)
    rank_bytes = bytes_by_rank(profile, plan, gradient_copies=problem.gradient_copies)
    peaks = {
        rank: parts.state_bytes + kept_bytes(profile_on(profile, plan, rank), schedule, rank)
        for rank, parts in rank_bytes.items()
    }
    return tuple(
        tuple(peaks.get(ranks[0], 0) for ranks in pipeline.ranks_by_stage())
        for pipeline in plan.pipelines
    )
