"""A policy without the answers that a device has no memory for, as the job has found out.

A stage that ran out of memory needs more than was estimated. Once its estimate is raised
(coordinator/learning/memory.py) the templates are cut anew, but policies keep pipelines that are
whole. What does not fit any more is refused here, and where nothing else is left all is formed
anew.
"""

from dataclasses import dataclass

from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.plan import Plan, Transition
from planaria.estimator.memory import peak_bytes
from planaria.planner.plans import EveryPlan, pipeline_microbatches
from planaria.planner.problem import Problem
from planaria.policies.policy import Policy, Prices
from planaria.policies.reinstantiate import Reinstantiate


@dataclass(frozen=True, slots=True)
class Roomy:
    """The policy.

    Attributes:
        every: what the job can be re-formed to, with estimates that were raised.
    """

    policy: Policy
    every: EveryPlan

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """What fits of the other policy's answers, else of those that form all anew; if nothing
        fits, what the other policy proposed: the node may have more memory than is known."""
        proposed = self.policy.propose(plan, cluster, event, prices)
        if fitting := self._fitting(proposed):
            return fitting
        anew = Reinstantiate(self.every).propose(plan, cluster, event, prices)
        return self._fitting(anew) or proposed

    def _fitting(self, transitions: tuple[Transition, ...]) -> tuple[Transition, ...]:
        problem = self.every.problem
        return tuple(one for one in transitions if has_room(problem, one.after))


def has_room(problem: Problem, plan: Plan) -> bool:
    """Whether every stage of a plan fits, as far as is known."""
    limits = (
        node.device_memory_bytes or problem.profile.device_memory_bytes
        for pipeline in plan.pipelines
        for node in pipeline.template.node_kinds
    )
    limit_bytes = min(limits)
    return not limit_bytes or all(max(peaks) <= limit_bytes for peaks in stage_peaks(problem, plan))


def stage_peaks(problem: Problem, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Of each pipeline, what a device of each stage is estimated to hold at most."""
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
