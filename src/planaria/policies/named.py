"""The policy that a job names in `resilience.policy`."""

from typing import Final

from planaria.core.job import JobConfig
from planaria.planner.layout.depths import Ranges
from planaria.planner.layout.search import Searched
from planaria.planner.plans import EveryPlan
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import HOPS_MAX, TRIES_HOPS_MAX
from planaria.policies.absorb import Absorb
from planaria.policies.adaptive import Adaptive
from planaria.policies.ahead import Ahead, Known
from planaria.policies.morph import Morph
from planaria.policies.policy import Policy
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.repartition import Repartition
from planaria.policies.reroute import Reroute
from planaria.policies.rollback import Rollback
from planaria.policies.unequal import Unequal
from planaria.restorer.strategies import LEAST_BYTES, NAIVE

_RESTORING: Final = {"least_bytes": LEAST_BYTES, "naive": NAIVE}  # resilience.assignment


def searched_by(job: JobConfig, problem: Problem) -> Searched:
    """What a job's policies will know of layouts."""
    ranges = Ranges(dp=job.resilience.dp_range, pp=job.resilience.pp_range)
    return Searched(problem, ranges)


def policy_of(job: JobConfig, every: EveryPlan, searched: Searched | None = None) -> Policy:
    """The policy that a job names, and that its nodes' speeds are answered with.

    Args:
        searched: what is known of layouts; None if nothing is yet, and somebody waits: then less is
            looked for.
    """
    hops_max = TRIES_HOPS_MAX if searched is None else HOPS_MAX
    restoring = _RESTORING[job.resilience.assignment]
    anew = Unequal(Reinstantiate(every, restoring))
    searched = searched or searched_by(job, every.problem)
    anew_of_any_depth = Repartition(every.problem, anew, searched, restoring)
    match job.resilience.policy:
        case "reinstantiate":
            return anew
        case "reroute":
            return Reroute(every.problem, anew, restoring, hops_max=hops_max)
        case "repartition":
            return anew_of_any_depth
        case "absorb":
            return Absorb(every, anew, restoring)
        case "morph":
            return Morph(every, restoring)
        case "rollback":
            return Rollback(every, anew, restoring)
        case "adaptive":
            around = Reroute(every.problem, Adaptive(()), restoring, hops_max=hops_max)
            in_place = Rollback(every, Adaptive(()), restoring)
            return Adaptive((anew, in_place, around, anew_of_any_depth))


def hurried_policy_of(job: JobConfig, every: EveryPlan) -> Policy:
    """What takes some 30 ms at tens of nodes and a second at thousands, where the job lets its
    coordinator choose."""
    restoring = _RESTORING[job.resilience.assignment]
    around = Reroute(every.problem, Adaptive(()), restoring, is_hurried=True)
    in_place = Rollback(every, Adaptive(()), restoring)
    return Adaptive((Unequal(Reinstantiate(every, restoring)), in_place, around))


def aware_policy_of(job: JobConfig, every: EveryPlan, known: Known) -> Policy:
    """As `policy_of`, with what is known of losses if the job looks ahead."""
    named = policy_of(job, every)
    if not looks_ahead(job):
        return named
    is_choice = job.resilience.policy == "adaptive"
    return Ahead(named, known, hurried_policy_of(job, every) if is_choice else named)


def looks_ahead(job: JobConfig) -> bool:
    """Whether its policy has answers that are worth a search before they are needed."""
    resilience = job.resilience
    is_search = resilience.policy in ("adaptive", "repartition", "reroute")
    return resilience.failures_ahead > 0 and is_search
