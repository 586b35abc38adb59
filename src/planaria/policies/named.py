"""The policy that a job names in `resilience.policy`."""

from typing import Final

from planaria.core.job import JobConfig
from planaria.planner.layout.depths import Ranges
from planaria.planner.layout.search import LayoutSearches, SearchResults
from planaria.planner.plans import PlanCatalog
from planaria.planner.reroute.reroutes import HOPS_MAX, TRIES_HOPS_MAX
from planaria.policies.absorb import Absorb
from planaria.policies.adaptive import Adaptive
from planaria.policies.ahead import ForeseenAnswers, Lookup
from planaria.policies.morph import Morph
from planaria.policies.policy import Policy
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.repartition import Repartition
from planaria.policies.reroute import KnownReroutes, Reroute
from planaria.policies.rollback import Rollback
from planaria.policies.traits import TRAITS
from planaria.policies.unequal_nodes import UnequalNodes
from planaria.restorer.strategies import LEAST_BYTES, NAIVE

_RESTORING: Final = {"least_bytes": LEAST_BYTES, "naive": NAIVE}  # resilience.assignment


def layout_search(
    job: JobConfig, catalog: PlanCatalog, results: SearchResults | None = None
) -> LayoutSearches:
    """A new search for layouts within the ranges of a job.

    Args:
        results: results of other searches of the catalog's problem, see `LayoutSearches`; by
            default it begins with none.
    """
    ranges = Ranges(dp=job.resilience.dp_range, pp=job.resilience.pp_range)
    return LayoutSearches(ranges, results or SearchResults(catalog.problem, catalog.templates))


def named_policy(
    job: JobConfig,
    catalog: PlanCatalog,
    searched: LayoutSearches | None = None,
    known: KnownReroutes | None = None,
) -> Policy:
    """The policy that a job names; it also answers changes in the speeds of nodes.

    Args:
        job: configuration of the job.
        catalog: plans and templates of the job.
        searched: layouts that are known; None if none are and nodes wait for the answer, so that
            the policy searches less.
        known: routes that are known; see `Reroute`.
    """
    hops_max = TRIES_HOPS_MAX if searched is None else HOPS_MAX
    restoring = _RESTORING[job.resilience.assignment]
    reinstantiate = UnequalNodes(Reinstantiate(catalog, restoring))
    searched = searched or layout_search(job, catalog)
    match job.resilience.policy:
        case "reinstantiate":
            return reinstantiate
        case "reroute":
            return Reroute(
                catalog.problem, reinstantiate, restoring, hops_max=hops_max, known=known
            )
        case "repartition":
            return Repartition(catalog.problem, reinstantiate, searched, restoring)
        case "absorb":
            return Absorb(catalog, reinstantiate, restoring)
        case "morph":
            return Morph(catalog, restoring)
        case "rollback":
            return Rollback(catalog, reinstantiate, restoring)
        case "adaptive":
            reroute = Reroute(
                catalog.problem, Adaptive(()), restoring, hops_max=hops_max, known=known
            )
            rollback = Rollback(catalog, Adaptive(()), restoring)
            repartition = Repartition(catalog.problem, Adaptive(()), searched, restoring)
            return Adaptive((reinstantiate, rollback, reroute, repartition))


def hurried_policy(
    job: JobConfig, catalog: PlanCatalog, known: KnownReroutes | None = None
) -> Policy:
    """The policy for quick answers of a job that lets its coordinator choose among policies.

    An answer takes some 30 ms at tens of nodes and a second at thousands.

    Args:
        known: routes that are known; see `Reroute`.
    """
    restoring = _RESTORING[job.resilience.assignment]
    reroute = Reroute(catalog.problem, Adaptive(()), restoring, is_hurried=True, known=known)
    rollback = Rollback(catalog, Adaptive(()), restoring)
    return Adaptive((UnequalNodes(Reinstantiate(catalog, restoring)), rollback, reroute))


def lookup_policy(job: JobConfig, catalog: PlanCatalog, foreseen: ForeseenAnswers) -> Policy:
    """The policy that a job names; if the job looks ahead, it looks up answers in `foreseen`."""
    named = named_policy(job, catalog)
    if not looks_ahead(job):
        return named
    is_choice = TRAITS[job.resilience.policy].is_choice
    return Lookup(named, foreseen, hurried_policy(job, catalog) if is_choice else named)


def looks_ahead(job: JobConfig) -> bool:
    """Whether the job is to search for answers to losses before they happen."""
    resilience = job.resilience
    return resilience.failures_ahead > 0 and TRAITS[resilience.policy].can_look_ahead
