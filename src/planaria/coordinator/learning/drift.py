"""A profile that is corrected while the job trains, from the seconds that its ranks compute.

What a rank takes has two factors: its node's, found by comparing those who hold the same layers
(slowness.py), and its layers', which is what is left for all of them alike. The second is found
here. A rank's ratio is what it computed, less the node's factor, over what is predicted for its
layers now. Where the medians of WINDOW iterations are off by DRIFT_MIN the layers' factors are
multiplied by them (estimator/drift.py), and from then on policies propose and price by the
corrected profile: iterations, and so the microbatches of each pipeline. The cuts of templates,
which were made at the start, stay. Results do not depend on any of this.

What an iteration takes beside forwards and backwards, in optimizer, sums and commit, is in no
profile. It is what is left of its seconds when predicted ones, times the median ratio of its ranks,
are taken off; the median of WINDOW iterations is added to what policies predict.

Where ranks share processors, predicted are the seconds that their actions take beside those of the
others (estimator/sharing.py), so that what is left is the layers' own; and what policies propose is
priced so, too. They look for plans of ranks that have a processor each: those do well on shared
ones, where all plans that compute the same take nearly the same.

The noise of a rank's seconds is some percent, and what is predicted comes true within 3% where the
profile is right (benchmarks/prediction.py), so less than DRIFT_MIN is not followed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Final

import msgspec

from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.learning.slowness import (
    BACK_FACTOR,
    COMPUTING_S_MIN,
    WINDOW,
    work_s_by_rank,
)
from planaria.coordinator.state import JobState, Notify, Rules, Step
from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.findings import Findings
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.core.records import ProfileCorrected
from planaria.estimator.drift import corrected_profile, layer_ratios
from planaria.planner.plans import EveryPlan, every_plan_of
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import Expected, expected
from planaria.policies.policy import Policy, Prices
from planaria.policies.unequal import of_kinds

DRIFT_MIN: Final = 0.05
DRIFT_WARNED: Final = 1.25
BESIDE_MIN: Final = 0.02  # Of an iteration.
_HOPS_MAX: Final = 1 << 9  # Of a plan that is run in virtual time where ranks share processors.


def policy_of(rules: Rules, state: JobState) -> Policy:
    """The policy, which prices by what is known of the layers and of what there is beside them, and
    by the processors that ranks share."""
    policy, beside_s = state.learning.policy or rules.policy, state.learning.findings.beside_s
    problem = _problem(rules, state.learning.findings.layer_factors)
    if problem is None or not problem.processors:
        return _Repriced(policy, beside_s, None) if beside_s else policy
    return _Repriced(policy, beside_s, problem)


@dataclass(frozen=True, slots=True)
class _Repriced:
    """A policy whose iterations take so many seconds longer than it knows, and are run by ranks
    that share processors if there is a problem that says so."""

    policy: Policy
    beside_s: float
    problem: Problem | None

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        proposed = self.policy.propose(plan, cluster, event, prices)
        return tuple(map(self._repriced, proposed))

    def _repriced(self, transition: Transition) -> Transition:
        iteration_s = transition.iteration_s
        if self.problem is not None:
            iteration_s = self._shared_s(transition)
        return replace(
            transition,
            iteration_s=iteration_s + self.beside_s,
            then=self._repriced(transition.then) if transition.then else None,
        )

    def _shared_s(self, transition: Transition) -> float:
        """By ranks that share processors; of a large plan as if nothing waited for anything, for
        the coordinator has other things to do."""
        problem, plan = self.problem, transition.after
        assert problem is not None
        if sum(map(len, plan.routes)) > _HOPS_MAX:
            return transition.iteration_s * max(1.0, len(plan.ranks) / problem.processors)
        return expected(problem, plan).iteration_s


def _problem(rules: Rules, layer_factors: Sequence[float]) -> Problem | None:
    """What a plan has to satisfy, with the times of the profile as it is corrected."""
    if rules.every is None:
        return None
    problem = rules.every.problem
    return replace(problem, profile=corrected_profile(problem.profile, layer_factors))


def restored_learning(rules: Rules, findings: Findings, plan: Plan) -> Learning:
    """What a coordinator knows that finds this on record, and by which plan all train."""
    problem = _problem(rules, findings.layer_factors)
    is_known = bool(findings.layer_factors or findings.beside_s)
    if problem is None or not (is_known or problem.processors):
        return Learning(findings=findings)
    policy = None
    if findings.layer_factors:
        assert rules.every is not None
        policy = _policy(rules, corrected_plans(rules.every, findings.layer_factors))
    plan_s, computing_s = _expected(problem, plan, findings.speeds)
    return Learning(findings=findings, policy=policy, plan_s=plan_s, computing_s=computing_s)


def _expected(problem: Problem, plan: Plan, speeds: Mapping[int, float]) -> Expected:
    """As `expected`. A slow node that no plan betters has its speed in no plan, and policies price
    by it."""
    return expected(problem, of_kinds(plan, {n: NodeKind(speed) for n, speed in speeds.items()}))


def corrected(rules: Rules, state: JobState, *, before: JobState) -> Step:
    """The state with what the reports of the iteration that is about to be committed tell.

    Args:
        before: the state before they told which nodes are slow.
    """
    outcome, learning = state.outcome, state.learning
    assert outcome is not None
    if rules.every is None or not rules.layer_s:
        return state, ()
    # As in slowness.py the first iteration tells nothing: its caches are cold. And a node's factor
    # that is new was still in the ratios of its ranks, which would count it twice.
    if state.next_iteration <= outcome.iteration or state.speeds != before.speeds:
        return replace(state, learning=_anew(rules, state)), ()
    found = _ratios(rules, state)
    ratios = {rank: (*learning.ratios.get(rank, ()), r)[-WINDOW:] for rank, r in found.items()}
    rests = (*learning.rests, _rest_s(state, found))[-WINDOW:] if found else ()
    state = replace(state, learning=replace(learning, ratios=ratios, rests=rests))
    if not ratios or min(map(len, ratios.values())) < WINDOW:
        return state, ()
    medians = {rank: median(window) for rank, window in ratios.items()}
    unclear = _seeming_slow(state)
    layers = layer_ratios(state.plan, medians, excluded=unclear)
    if all(1.0 - DRIFT_MIN < ratio < 1.0 + DRIFT_MIN for ratio in layers.values()):
        layers = {}
    beside_s = max(0.0, median(rests))
    if unclear or abs(beside_s - learning.findings.beside_s) <= BESIDE_MIN * _plan_s(state):
        beside_s = learning.findings.beside_s
    if not layers and beside_s == learning.findings.beside_s:
        return state, ()
    return _with_findings(rules, state, layers, beside_s)


def _anew(rules: Rules, state: JobState) -> Learning:
    """What is known where the plan, or the speeds of its nodes, are others than were measured."""
    problem = _problem(rules, state.learning.findings.layer_factors)
    assert problem is not None
    plan_s, computing_s = _expected(problem, state.plan, state.speeds)
    return replace(state.learning, ratios={}, rests=(), plan_s=plan_s, computing_s=computing_s)


def iteration_s(state: JobState) -> float:
    """What is predicted now for an iteration by the plan as it is."""
    return _plan_s(state) + state.learning.findings.beside_s


def _plan_s(state: JobState) -> float:
    """What is predicted for an iteration without what there is beside the layers."""
    assert state.decision is not None
    return state.learning.plan_s or state.decision.predicted_s - state.learning.findings.beside_s


def _rest_s(state: JobState, ratios: Mapping[int, float]) -> float:
    """Of this iteration what no forward or backward explains."""
    reports = state.reports_of(state.next_iteration)
    seconds = median(reports[rank].seconds - reports[rank].stall_s for rank in ratios)
    return seconds - _plan_s(state) * median(ratios.values())


def _ratios(rules: Rules, state: JobState) -> dict[int, float]:
    """Of the ranks that have work, in this iteration; empty if that was too short to tell."""
    factors = state.learning.findings.layer_factors or (1.0,) * rules.num_layers
    layer_s = [s * factor for s, factor in zip(rules.layer_s, factors, strict=True)]
    work_s = {rank: s for rank, s in work_s_by_rank(state.plan, layer_s).items() if s > 0.0}
    reports = state.reports_of(state.next_iteration)
    seconds = {rank: reports[rank].computing_s for rank in work_s if rank in reports}
    if not seconds or median_low(seconds.values()) < COMPUTING_S_MIN:
        return {}
    shared_s = state.learning.computing_s  # In which a slow node is slow already.
    if shared_s:
        return {r: computing_s / shared_s[r] for r, computing_s in seconds.items() if r in shared_s}
    per_node = state.devices_per_node
    return {
        rank: computing_s * state.speeds.get(rank // per_node, 1.0) / work_s[rank]
        for rank, computing_s in seconds.items()
    }


def _seeming_slow(state: JobState) -> set[int]:
    """The ranks of nodes that may be found slow soon, or are not any more."""
    unclear = []
    for node, window in state.ratios.items():
        speed = state.speeds.get(node, 1.0)
        ratio = median(window) * speed
        if ratio > BACK_FACTOR or (speed < 1.0 and ratio < 1.0 / BACK_FACTOR):
            unclear.append(node)
    return set(state.ranks_of(unclear))


def _with_findings(
    rules: Rules, state: JobState, ratios: Mapping[int, float], beside_s: float
) -> Step:
    """The state in which each layer takes so many times what was predicted before.

    Args:
        ratios: by layer; none: as it was.
        beside_s: of an iteration, beside the layers.
    """
    before = state.learning.findings.layer_factors or (1.0,) * rules.num_layers
    factors = tuple(factor * ratios.get(layer, 1.0) for layer, factor in enumerate(before))
    findings = msgspec.structs.replace(state.learning.findings, beside_s=beside_s)
    learning = replace(state.learning, findings=findings, plan_s=_plan_s(state))
    if ratios:
        assert rules.every is not None
        findings = msgspec.structs.replace(findings, layer_factors=factors)
        policy = _policy(rules, corrected_plans(rules.every, factors))
        learning = replace(learning, findings=findings, policy=policy)
        learning = _anew(rules, replace(state, learning=learning))
    far = tuple(layer for layer, factor in enumerate(factors) if _is_far(factor))
    is_new = any(not _is_far(before[layer]) for layer in far)
    notice = ProfileCorrected(
        epoch=state.epoch,
        iteration=state.next_iteration + 1,
        layer_factors=factors,
        predicted_s=learning.plan_s + beside_s,
        warning=_warning(factors) if is_new else "",
    )
    return replace(state, learning=learning), (Notify(notice),)


def _is_far(factor: float) -> bool:
    return not 1.0 / DRIFT_WARNED <= factor <= DRIFT_WARNED


def _warning(factors: tuple[float, ...]) -> str:
    least, most = f"{min(factors):.2f}", f"{max(factors):.2f}"
    times = least if least == most else f"{least} to {most}"
    return (
        f"layers take {times} times as long as the profile says; "
        "what is predicted from now on is corrected"
    )


def corrected_plans(every: EveryPlan, layer_factors: Sequence[float]) -> EveryPlan:
    """What a job can be re-formed to, with the times of the corrected profile."""
    profile = corrected_profile(every.problem.profile, layer_factors)
    return every_plan_of(replace(every.problem, profile=profile), every.templates, every.plans)


def _policy(rules: Rules, every: EveryPlan) -> Policy:
    assert rules.policy_of is not None
    return rules.policy_of(every)
