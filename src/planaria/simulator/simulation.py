"""Simulated runs: a seed determines the job, its faults and every delay, so runs replay exactly."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from planaria.core.job import POLICIES, PolicyName
from planaria.policies.traits import TRAITS
from planaria.simulator.checkers.checkers import PATIENCE_S, Checkers, vain_s
from planaria.simulator.fault_draws import (
    FAULTS_S_MAX,
    Fault,
    FaultKind,
    draw_blind_node,
    draw_disk_faults,
    draw_faults,
    draw_head_faults,
    draw_more_faults,
    draw_rare_code_errors,
    draw_spot_faults,
    draw_store_trouble,
)
from planaria.simulator.fault_injection import FaultInjection
from planaria.simulator.modelled.store import draw_disk
from planaria.simulator.scenario import PLAINEST, SCENARIOS, Scenario, StoreTrouble, planned_job
from planaria.simulator.simulated_cluster import LAUNCHER, SimulatedCluster

_CLOCK_MOST = 0.05
_DELAYS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01)
# Pairs of failures per hour and link bytes per second for which a quick answer to a loss pays off
# and a better plan follows at a later commit. That takes some more iterations.
_HURRIED = ((1000.0, 1e7), (100.0, 1e6))
_ITERATIONS_MORE = 8
MACHINES_SHARE = 0.2  # Share of jobs whose nodes are on other machines than the head.
_PATIENCE_S = (15.0, 20.0)  # Longer than any outage of the head.
_HEAD_ALONE_SHARE = 0.4  # Share of these in which nothing but faults of the head is drawn.
_SPOT_SHARE = 0.3  # Share of these in which many nodes are lost at once, and others come later.
LEARNING_SHARE = 0.3  # Share of jobs whose coordinator corrects the profile by measurements.
_LOG_TAIL = 40
# Share of jobs with saves in which a node cannot read them for a while; thrice as many of those
# that often go back to one.
_BLIND_SHARE = 0.2
_NEXT_S = 30.0  # Longest time from a commit to the next one, where messages are slow.
_LONGEST_S = 600.0  # Longest time from the last fault to the end of a job that keeps committing.


DrawFaults = Callable[[Random, int], tuple[Fault, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The result of a run.

    Attributes:
        num_struck: number of faults that struck.
        ending: kind of the job's end; "none" if it did not end.
        violations: the violations that checkers found, in words.
        epochs: the job's last epoch; -1 if it did not end.
        log: events in order, (seconds, what, details); empty if it was not kept.
    """

    seed: int
    scenario: Scenario
    faults: tuple[Fault, ...]
    store_trouble: StoreTrouble
    num_struck: int
    ending: str
    violations: tuple[str, ...]
    num_events: int
    epochs: int
    log: tuple[tuple[float, str, tuple[object, ...]], ...]


def run(
    seed: int,
    *,
    keeps_log: bool = True,
    draw: DrawFaults = draw_faults,
    policies: Sequence[PolicyName] = POLICIES,
) -> SimulatedRun:
    """The run of a seed.

    With `draw_head_faults` and `draw_spot_faults` the nodes are on other machines than the head;
    they also are in a share of MACHINES_SHARE of the runs with `draw_faults` and all policies.

    Args:
        keeps_log: whether the result has a log even if there are no violations.
        draw: function that draws the faults for a number of nodes.
        policies: policies of which the job gets one; the choice changes nothing else that is drawn,
            except that a job with another policy than PLAINEST may be hurried.
    """
    rng = Random(seed)
    scenario, faults = _drawn_job(seed, rng, draw, policies)
    store_rng = Random(f"store {seed}")
    store_trouble = draw_store_trouble(store_rng)
    cluster = SimulatedCluster(
        planned_job(scenario),
        rng,
        disk_model=draw_disk(Random(f"disk {seed}")),
        store_trouble=store_trouble,
        store_rng=store_rng,
    )
    cluster.network.delay_s = rng.choice(_DELAYS_S)
    cluster.network.is_uneven = rng.random() < 0.5
    checkers = cluster.observer = Checkers(cluster)
    checkers.faults = injected = FaultInjection(cluster, faults)
    injected.extend_until(store_trouble.end_s if math.isfinite(store_trouble.end_s) else 0.0)
    cluster.begin(_clock_rates(rng, faults))
    _run_to_end(cluster, checkers, injected)
    ended = cluster.ended
    return SimulatedRun(
        seed=seed,
        scenario=scenario,
        faults=faults,
        store_trouble=store_trouble,
        num_struck=len(injected.injected),
        ending=ended.ending if ended else "none",
        violations=tuple(checkers.violations),
        num_events=cluster.loop.num_events,
        epochs=ended.epoch if ended else -1,
        log=tuple(cluster.log) if keeps_log or checkers.violations else (),
    )


def _drawn_job(
    seed: int, rng: Random, draw: DrawFaults, policies: Sequence[PolicyName]
) -> tuple[Scenario, tuple[Fault, ...]]:
    """The job of a seed and its faults; see `run`.

    Args:
        rng: generator of the seed, which goes on with the rest of the run.
    """
    scenario = _with_policy(rng.choice(SCENARIOS), Random(f"policy {seed}"), policies)
    faults = draw(rng, scenario.num_nodes)
    more_rng = Random(f"more {seed}")
    scenario = _with_learning(_with_copies(scenario, more_rng), Random(f"learns {seed}"))
    if scenario.copies or scenario.persist_every or scenario.num_standby:
        faults += draw_more_faults(more_rng, scenario.num_nodes + scenario.num_standby)
    if draw is draw_faults:
        faults += draw_rare_code_errors(Random(f"raising {seed}"), scenario.num_nodes)
    blind_rng = Random(f"blind {seed}")
    reads_often = TRAITS[scenario.policy].goes_back or scenario.policy == "rollback"
    share = _BLIND_SHARE if scenario.persist_every and draw is draw_faults else 0.0
    if blind_rng.random() < (3.0 * share if reads_often else share):
        faults += draw_blind_node(blind_rng, scenario.num_nodes)
    faults += draw_disk_faults(Random(f"full {seed}"))
    machines_rng = Random(f"machines {seed}")
    may_have_machines = draw is draw_faults and policies is POLICIES
    if draw in (draw_head_faults, draw_spot_faults):
        scenario = _on_machines(scenario, machines_rng)
    elif machines_rng.random() < MACHINES_SHARE and may_have_machines:
        if machines_rng.random() < _HEAD_ALONE_SHARE:
            faults = ()
        faults += draw_head_faults(machines_rng, scenario.num_nodes)
        scenario = _on_machines(scenario, machines_rng)
        if machines_rng.random() < _SPOT_SHARE:
            faults += draw_spot_faults(machines_rng, scenario.num_nodes)
    return scenario, faults


def _with_policy(scenario: Scenario, rng: Random, policies: Sequence[PolicyName]) -> Scenario:
    """The job with a drawn policy; for a policy that chooses among answers, half of the jobs get
    failure rates and links of _HURRIED."""
    scenario = replace(scenario, policy=rng.choice(policies))
    if scenario.policy == PLAINEST or rng.random() < 0.5:
        return scenario
    failures_per_hour, link_bytes_per_s = rng.choice(_HURRIED)
    return replace(
        scenario,
        failures_per_hour=failures_per_hour,
        link_bytes_per_s=link_bytes_per_s,
        iterations=scenario.iterations + _ITERATIONS_MORE,
    )


def _with_copies(scenario: Scenario, rng: Random) -> Scenario:
    """The job with or without copies in memory, standby nodes and granted machines, as drawn."""
    copies = rng.choice((0, 0, 2, 2, 3))
    return replace(
        scenario,
        copies=copies,
        copies_every=rng.choice((0, 0, 1, 3)) if copies else 0,
        num_standby=rng.choice((0, 0, 0, 1, 2)),
        grant_s=rng.choice((0.0, 0.0, 0.0, 0.5, 3.0)),
    )


def _with_learning(scenario: Scenario, rng: Random) -> Scenario:
    """The job; in a share of LEARNING_SHARE its coordinator learns how long layers take and how
    much memory they need."""
    if rng.random() >= LEARNING_SHARE:
        return scenario
    memory_factor = rng.choice((0.0, 1.2, 1.5))
    return replace(
        scenario,
        learns=True,
        drift=rng.choice((1.0, 1.5, 2.0)),
        processors=rng.choice((0, 0, 2, 4)),
        # Shadow layers need more memory.
        memory_factor=0.0 if TRAITS[scenario.policy].has_shadows else memory_factor,
        iterations=scenario.iterations + _ITERATIONS_MORE,
    )


def _on_machines(scenario: Scenario, rng: Random) -> Scenario:
    """The job with its nodes on other machines than the head."""
    return replace(
        scenario, patience_s=rng.choice(_PATIENCE_S), wait_s=rng.choice((0.0, 5.0, 15.0))
    )


def _run_to_end(cluster: SimulatedCluster, checkers: Checkers, faults: FaultInjection) -> None:
    """Runs the loop until the job ends, a checker finds a violation, or the job takes too long."""

    def is_over() -> bool:
        return cluster.ended is not None or bool(checkers.violations)

    patience_s = PATIENCE_S + vain_s(cluster.job.scenario)
    until_s = FAULTS_S_MAX + patience_s
    while True:
        cluster.loop.run(until_s=until_s, is_over=is_over)
        next_s = min(checkers.moved_s + _NEXT_S, faults.end_s + _LONGEST_S)
        later_s = max(faults.end_s + patience_s, next_s)
        if is_over() or later_s <= until_s:
            break
        until_s = later_s
    if not checkers.violations:
        checkers.check_over(until_s=until_s)


def _clock_rates(rng: Random, faults: Iterable[Fault]) -> dict[int, float]:
    rates = {}
    for fault in faults:
        if fault.kind is FaultKind.CLOCK:
            place = fault.node if fault.node >= 0 else LAUNCHER
            rates[place] = 1.0 + _CLOCK_MOST * (2.0 * rng.random() - 1.0)
    return rates


def run_text(run: SimulatedRun) -> str:
    """A run in words: its seed, job and faults, the end of its log, and its violations."""
    lines = [f"seed {run.seed}: {run.ending}, {run.scenario}"]
    lines += [f"  fault: {fault}" for fault in run.faults]
    lines += [f"  the store of saves: {run.store_trouble}"] if run.store_trouble.duration_s else []
    for moment_s, what, facts in run.log[-_LOG_TAIL:]:
        lines.append(f"  {moment_s:9.4f} {what} {' '.join(map(str, facts))}")
    lines += [f"  VIOLATED at {text}" for text in run.violations]
    return "\n".join(lines)
