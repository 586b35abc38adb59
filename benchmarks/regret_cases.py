"""Draws clusters, and the failures and returns of their nodes, from seeds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from planaria.core.job import PolicyName
from planaria.core.plan import Link, one_device_profile
from planaria.errors import InfeasibleError
from planaria.job.config import job_from_dict
from planaria.job.planning import read_profile
from planaria.planner.plans import PlanCatalog, plan_catalog
from planaria.planner.problem import Problem
from planaria.planner.reroute.shadows import first_plan_with_shadows
from planaria.planner.templates import pipeline_templates, smallest_num_nodes
from planaria.policies.traits import TRAITS
from planaria.simulator.failures.occurrences import Occurrence, OccurrenceKind
from planaria.systems.system import RecoveryCosts, Setting

MODELS: Final = ("gpt2", "gpt3-2.7b", "gpt3-6.7b", "llama2-7b")
ITERATIONS_MIN: Final = 10  # Mean from failure to failure; with fewer nobody trains.
COSTS: Final = RecoveryCosts(startup_s=0.0, node_start_s=0.0, look_ahead_s=1.0)
_ITERATIONS_MAX: Final = 1 << 53
_DRAWS_MAX: Final = 10  # Draws per case; of 200 cases 2 % are drawn twice.


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster and how it fails.

    Attributes:
        each: microbatches per node.
        slower: divisor of the profile's bandwidth between nodes.
        gap_s: mean time between failures of the job, in seconds.
        burst: upper bound on nodes that fail at once.
        repair_s: mean time until a lost node is back, in seconds.
        save_every_s: time between saves at the iteration time of the initial plan, in seconds.
        failures_tolerated: setting of the job; each layer is to be on one more node than this.
    """

    model: str
    num_nodes: int
    each: int
    slower: int
    gap_s: float
    burst: int
    repair_s: float
    save_every_s: float
    failures_tolerated: int = 1

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.num_nodes} nodes, {self.each} microbatches a node, links "
            f"1/{self.slower}, a failure in {self.gap_s:.0f} s of up to {self.burst}, back after "
            f"{self.repair_s:.0f} s, saved every {self.save_every_s:.0f} s, failures tolerated "
            f"{self.failures_tolerated}"
        )


class _Cluster(NamedTuple):
    """The fields of `Case` on which plans depend."""

    model: str
    num_nodes: int
    each: int
    slower: int
    failures_tolerated: int


def drawn_cases(num_cases: int, *, most_nodes: int) -> tuple[Case, ...]:
    """Draws num_cases different cases that can be planned."""
    found: dict[Case, None] = {}
    for seed in range(_DRAWS_MAX * num_cases):
        if len(found) == num_cases:
            break
        found[_drawn_case(seed, most_nodes=most_nodes)] = None
    assert len(found) == num_cases, f"there are hardly more than {len(found)} cases"
    return tuple(found)


def _drawn_case(seed: int, *, most_nodes: int) -> Case:
    rng = Random(seed)
    while True:
        case = Case(
            model=rng.choice(MODELS),
            num_nodes=rng.randint(4, most_nodes),
            each=rng.choice((2, 4)),
            slower=rng.choice((1, 10, 100)),
            gap_s=rng.choice((60.0, 300.0, 1800.0, 7200.0)),
            burst=rng.choice((1, 1, 2)),
            repair_s=rng.choice((60.0, 600.0, 3600.0)),
            save_every_s=rng.choice((300.0, 1800.0)),
        )
        if case.num_nodes >= 2 * n0(case) and case.gap_s >= ITERATIONS_MIN * _iteration_s(case):
            return case


def n0(case: Case) -> int:
    """Smallest number of nodes that can hold the model."""
    return smallest_num_nodes(_problem(_cluster(case)))


def catalog_of(case: Case) -> PlanCatalog:
    """All plans to which the job can be re-formed."""
    return _catalog(_cluster(case))


@cache
def _catalog(cluster: _Cluster) -> PlanCatalog:
    problem = _problem(cluster)
    templates = pipeline_templates(problem, cluster.num_nodes)
    return plan_catalog(problem, cluster.num_nodes, templates)


def iterations_between_saves(case: Case) -> int:
    """Iterations from one save to the next, the same for all policies."""
    return max(1, round(case.save_every_s / _iteration_s(case)))


def _iteration_s(case: Case) -> float:
    """Seconds of an iteration of the initial plan, from its templates."""
    catalog = catalog_of(case)
    templates = [pipeline.template for pipeline in catalog.plans[case.num_nodes].pipelines]
    return catalog.distribution(templates)[0]


def _cluster(case: Case) -> _Cluster:
    return _Cluster(case.model, case.num_nodes, case.each, case.slower, case.failures_tolerated)


@cache
def _problem(cluster: _Cluster) -> Problem:
    profile = one_device_profile(read_profile(Path(cluster.model)))
    link = profile.links["inter_node"]
    slow = Link(link.latency_s, link.bandwidth_bytes_per_s / cluster.slower)
    return Problem(
        profile=replace(profile, links={**profile.links, "inter_node": slow}),
        devices_per_node=1,
        num_microbatches=cluster.each * cluster.num_nodes,
        failures_tolerated=cluster.failures_tolerated,
    )


def setting_of(case: Case, policy: PolicyName) -> Setting | None:
    """The job of a case with a policy; None if nodes lack the memory that the policy needs."""
    catalog, link = catalog_of(case), _problem(_cluster(case)).profile.links["inter_node"]
    batch = case.each * case.num_nodes * catalog.problem.profile.microbatch_size
    job = job_from_dict(
        {
            "name": "regret",
            "model": {"kind": "paced", "profile": case.model},
            "training": {
                "iterations": _ITERATIONS_MAX,
                "global_batch_size": batch,
                "microbatch_size": catalog.problem.profile.microbatch_size,
            },
            "resilience": {"policy": policy, "failures_tolerated": case.failures_tolerated},
            "checkpoint": {"persist_every": iterations_between_saves(case)},
            "cluster": {"nodes": case.num_nodes},
        }
    )
    if TRAITS[policy].has_shadows:
        try:
            first_plan_with_shadows(catalog.problem, catalog.plans[case.num_nodes])
        except InfeasibleError:
            return None
    costs = replace(COSTS, save_bytes_per_s=link.bandwidth_bytes_per_s)
    return Setting(job=job, catalog=catalog, costs=costs, model=case.model)


@dataclass(frozen=True, slots=True)
class CaseFailures:
    """The failures of a case, and the returns of nodes between them; implements `FailureSource`.

    Attributes:
        seed: seed from which they are drawn, whatever random numbers the caller has.
        num_failures: number of failures.
    """

    case: Case
    seed: int
    num_failures: int

    def occurrences(self, num_nodes: int, *, horizon_s: float, rng: Random) -> Iterator[Occurrence]:
        """See `FailureSource`."""
        assert num_nodes == self.case.num_nodes
        del rng
        drawn = drawn_occurrences(self.case, self.seed, num_failures=self.num_failures)
        yield from (one for one in drawn if one.at_s <= horizon_s)


def drawn_occurrences(case: Case, seed: int, *, num_failures: int) -> tuple[Occurrence, ...]:
    """Draws failures, and the returns of nodes between them, in order of time.

    They do not depend on the failures that the job tolerates. At least one node is always left:
    while only one is left no node fails, and the next failure waits until another node is back.
    """
    rng = Random(f"{replace(case, failures_tolerated=1)} {seed}")
    alive = set(range(case.num_nodes))
    back: list[tuple[float, int]] = []
    found: list[Occurrence] = []
    now_s = 0.0
    num_lost = 0
    while num_lost < num_failures:
        now_s += rng.expovariate(1.0 / case.gap_s)
        for at_s, node in sorted(one for one in back if one[0] <= now_s):
            found.append(Occurrence(at_s, OccurrenceKind.BACK, (node,)))
            alive.add(node)
        back = [one for one in back if one[0] > now_s]
        count = min(rng.randint(1, case.burst), len(alive) - 1)
        if not count:  # Ends, because some node comes back.
            continue
        lost = tuple(sorted(rng.sample(sorted(alive), count)))
        alive -= set(lost)
        back += [(now_s + rng.expovariate(1.0 / case.repair_s), node) for node in lost]
        found.append(Occurrence(now_s, OccurrenceKind.LOST, lost))
        num_lost += 1
    return tuple(found)
