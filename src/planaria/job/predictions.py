"""The estimator's prediction of a plan: the timeline of an iteration, and the memory of devices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planaria.core.plan import Plan, profile_on
from planaria.estimator.correction import corrected_profile
from planaria.estimator.peak_memory import WorkBytes, bytes_by_rank, kept_bytes
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.planner.problem import Problem
from planaria.schedule.lower import plan_schedule
from planaria.schedule.routed import routed_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of an iteration of a plan.

    Attributes:
        timeline: predicted timeline of the iteration.
        peak_bytes: peak memory of a device, by the first rank of each stage.
    """

    timeline: Timeline
    peak_bytes: Mapping[int, int]


def prediction(
    problem: Problem, plan: Plan, *, layer_factors: tuple[float, ...] = ()
) -> Prediction:
    """The prediction of a plan with any routes; silent members are left out. O(actions).

    Args:
        layer_factors: seconds of each layer as a multiple of the profile's; empty: as in the
            profile.
    """
    profile = corrected_profile(problem.profile, layer_factors)
    plan = replace(plan, silent={})
    schedule = plan_schedule(plan, tied=profile.tied, order=problem.reduction_order)
    timeline = predicted_timeline(
        schedule,
        profile,
        plan=plan,
        reduce_bytes_factor=problem.reduce_bytes_factor,
        processors=problem.processors,
    )
    held = bytes_by_rank(profile, plan, gradient_copies=problem.gradient_copies)
    return Prediction(
        timeline=timeline,
        peak_bytes={
            rank: fixed.state_bytes + kept_bytes(profile_on(profile, plan, rank), schedule, rank)
            for rank, fixed in held.items()
        },
    )


def predicted_peak_bytes(problem: Problem, plan: Plan) -> int:
    """The largest peak memory of any device, as in `prediction`, from the work alone: the schedule
    and its timeline would keep the launcher of a large job for longer than a lease."""
    plan, profile = replace(plan, silent={}), problem.profile
    kept_bytes_of = WorkBytes(profile, plan).most_kept(plan.routes, routed_work(plan))
    held = bytes_by_rank(profile, plan, gradient_copies=problem.gradient_copies)
    return max(fixed.state_bytes + kept_bytes_of[rank] for rank, fixed in held.items())
