"""Corrects the profile while the job trains, by the seconds that its ranks compute.

The seconds of a rank deviate from the profile by two factors. The factor of its node is found by
comparing holders of the same layers (slowness.py). The factor of its layers is what remains for all
their holders alike, and is found here. A rank's ratio is the seconds that it computed, corrected by
its node's factor, divided by the seconds now predicted for its layers. If the medians of WINDOW
iterations are off by DRIFT_MIN, the factors of layers are multiplied by them
(estimator/correction.py).
From then on policies propose and price by the corrected profile. This changes predicted iterations,
and so the microbatches of each pipeline. The stages of templates stay as they were cut at the
start. The results of training do not depend on any of this.

Besides forwards and backwards an iteration has an optimizer step, reductions and a commit, which
are in no profile. Their time is the measured seconds of the iteration, less the predicted ones
times the median ratio of its ranks. Its median over WINDOW iterations is added to the predictions
of policies.

If ranks share processors, the seconds of their actions are predicted with the actions of the others
running at the same time (estimator/sharing.py), so that the remaining factor is the layers' own.
Proposals of policies are priced in the same manner. Policies still search for plans as if each rank
had its own processor. Such plans do well on shared ones, where all plans that compute the same take
nearly the same time.

The noise of a rank's seconds is some percent, and predictions come true within 3% if the profile is
right (benchmarks/prediction.py), so deviations below DRIFT_MIN are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Final

import msgspec

from planaria.coordinator.commands import Notify
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.learning.slowness import (
    BACK_FACTOR,
    COMPUTING_S_MIN,
    WINDOW,
    work_s_by_rank,
)
from planaria.coordinator.state import JobState, Step
from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.findings import Findings
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.core.records import ProfileCorrected
from planaria.estimator.correction import corrected_profile, layer_ratios
from planaria.estimator.time import RANK_ITERATION_S
from planaria.planner.plans import PlanCatalog, rebuilt_catalog
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import ExpectedTimes, expected_times
from planaria.policies.policy import Policy, Prices
from planaria.policies.unequal_nodes import with_kinds

DRIFT_MIN: Final = 0.05
DRIFT_WARNED: Final = 1.25
BESIDE_MIN: Final = 0.02  # Share of an iteration.
# Number of hops in the largest plan that is simulated for ranks that share processors. Where a
# decision has a larger one, the bounds of all its plans are compared.
_HOPS_MAX: Final = 1 << 9


def policy_of(rules: Rules, state: JobState) -> Policy:
    """The policy that prices by the findings on layers and on the rest of an iteration.

    It also prices by the processors that ranks share.
    """
    policy, beside_s = state.learning.policy or rules.policy, state.learning.findings.beside_s
    problem = _problem(rules, state.learning.findings.layer_factors)
    if problem is None or not problem.processors:
        return _RepricedPolicy(policy, beside_s, None) if beside_s else policy
    return _RepricedPolicy(policy, beside_s, problem)


@dataclass(frozen=True, slots=True)
class _RepricedPolicy:
    """A policy whose proposals are given other iteration times.

    Attributes:
        beside_s: seconds of an iteration that `policy` does not know of.
        problem: problem whose ranks share processors; None: they share none.
    """

    policy: Policy
    beside_s: float
    problem: Problem | None

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        proposed = self.policy.propose(plan, cluster, event, prices)
        # Bounds are compared with bounds: beside a simulated plan they would look too fast.
        is_simulated = all(_largest_num_hops(transition) <= _HOPS_MAX for transition in proposed)
        return tuple(
            self._with_other_time(transition, is_simulated=is_simulated) for transition in proposed
        )

    def _with_other_time(self, transition: Transition, *, is_simulated: bool) -> Transition:
        then, iteration_s = transition.then, transition.iteration_s
        if self.problem is not None and is_simulated:
            iteration_s = expected_times(self.problem, transition.after).iteration_s
        elif self.problem is not None:
            iteration_s = max(iteration_s, _least_shared_s(self.problem, transition.after))
        return replace(
            transition,
            iteration_s=iteration_s + self.beside_s,
            then=self._with_other_time(then, is_simulated=is_simulated) if then else None,
        )


def _largest_num_hops(transition: Transition) -> int:
    """The number of hops of the transition's plan, or of a later plan that has more."""
    num_hops = sum(map(len, transition.after.routes))
    return max(num_hops, _largest_num_hops(transition.then)) if transition.then else num_hops


def _least_shared_s(problem: Problem, plan: Plan) -> float:
    """The seconds of an iteration if processors that ranks share never waited.

    A large plan is not simulated, because that would take the coordinator too long.
    """
    work_s = sum(work_s_by_rank(plan, problem.profile).values())
    return (work_s + len(plan.ranks) * RANK_ITERATION_S) / problem.processors


def _problem(rules: Rules, layer_factors: Sequence[float]) -> Problem | None:
    """The planning problem with the corrected profile; None if the profile is not corrected."""
    if rules.catalog is None:
        return None
    problem = rules.catalog.problem
    return replace(problem, profile=corrected_profile(problem.profile, layer_factors))


def restored_learning(rules: Rules, findings: Findings, plan: Plan) -> Learning:
    """The learning of a coordinator that finds these findings, and this plan, on record."""
    problem = _problem(rules, findings.layer_factors)
    is_known = bool(findings.layer_factors or findings.beside_s)
    if problem is None or not (is_known or problem.processors):
        return Learning(findings=findings)
    policy = None
    if findings.layer_factors:
        assert rules.catalog is not None
        policy = _policy(rules, corrected_plans(rules.catalog, findings.layer_factors))
    plan_s, computing_s = _expected_iteration(problem, plan, findings.speeds)
    return Learning(findings=findings, policy=policy, plan_s=plan_s, computing_s=computing_s)


def _expected_iteration(problem: Problem, plan: Plan, speeds: Mapping[int, float]) -> ExpectedTimes:
    """The expected iteration of the plan, with slow nodes at their speeds.

    Policies price by these speeds too. The plan may lack them: it stays as it is if no other plan
    is better for a slow node.
    """
    return expected_times(
        problem, with_kinds(plan, {n: NodeKind(speed) for n, speed in speeds.items()})
    )


def with_corrections(rules: Rules, state: JobState, *, before: JobState) -> Step:
    """The state with the corrections that follow from the reports of the iteration to be committed.

    Args:
        before: state before the speeds of nodes were updated by these reports.
    """
    outcome, learning = state.commits.outcome, state.learning
    assert outcome is not None
    if rules.catalog is None or rules.profile is None:
        return state, ()
    # As in slowness.py, the first iteration of an epoch does not count: its caches are cold. After
    # a speed has changed, measuring starts over: older ratios contain the change, and would count
    # it twice.
    if state.commits.next_iteration <= outcome.iteration or state.speeds != before.speeds:
        return replace(state, learning=_new_measurement(rules, state)), ()
    newest = _ratios(rules, state)
    ratios = {rank: (*learning.ratios.get(rank, ()), r)[-WINDOW:] for rank, r in newest.items()}
    rests = (*learning.rests, _rest_s(state, newest))[-WINDOW:] if newest else ()
    state = replace(state, learning=replace(learning, ratios=ratios, rests=rests))
    if not ratios or min(map(len, ratios.values())) < WINDOW:
        return state, ()
    medians = {rank: median(window) for rank, window in ratios.items()}
    unclear = _unclear_ranks(state)
    layers = layer_ratios(state.plan, medians, excluded=unclear)
    if all(1.0 - DRIFT_MIN < ratio < 1.0 + DRIFT_MIN for ratio in layers.values()):
        layers = {}
    beside_s = max(0.0, median(rests))
    if unclear or abs(beside_s - learning.findings.beside_s) <= BESIDE_MIN * _plan_s(state):
        beside_s = learning.findings.beside_s
    if not layers and beside_s == learning.findings.beside_s:
        return state, ()
    return _with_findings(rules, state, layers, beside_s)


def _new_measurement(rules: Rules, state: JobState) -> Learning:
    """The learning that starts to measure anew, for the current plan and speeds of nodes."""
    problem = _problem(rules, state.learning.findings.layer_factors)
    assert problem is not None
    plan_s, computing_s = _expected_iteration(problem, state.plan, state.speeds)
    return replace(state.learning, ratios={}, rests=(), plan_s=plan_s, computing_s=computing_s)


def iteration_s(state: JobState) -> float:
    """The predicted seconds of an iteration with the current plan."""
    return _plan_s(state) + state.learning.findings.beside_s


def _plan_s(state: JobState) -> float:
    """The predicted seconds of an iteration, without `beside_s`."""
    decision, learning = state.facts.decision, state.learning
    assert decision is not None
    return learning.plan_s or decision.predicted_s - learning.findings.beside_s


def _rest_s(state: JobState, ratios: Mapping[int, float]) -> float:
    """The seconds of this iteration that no forward or backward explains."""
    reports = state.commits.reports_of(state.commits.next_iteration)
    seconds = median(reports[rank].seconds - reports[rank].stall_s for rank in ratios)
    return seconds - _plan_s(state) * median(ratios.values())


def _ratios(rules: Rules, state: JobState) -> dict[int, float]:
    """The ratio of each rank with work in this iteration; empty if they computed too shortly."""
    assert rules.profile is not None
    profile = corrected_profile(rules.profile, state.learning.findings.layer_factors)
    work_s = {rank: s for rank, s in work_s_by_rank(state.plan, profile).items() if s > 0.0}
    reports = state.commits.reports_of(state.commits.next_iteration)
    seconds = {rank: reports[rank].computing_s for rank in work_s if rank in reports}
    if not seconds or median_low(seconds.values()) < COMPUTING_S_MIN:
        return {}
    shared_s = state.learning.computing_s  # These predictions include the speeds of slow nodes.
    if shared_s:
        return {r: computing_s / shared_s[r] for r, computing_s in seconds.items() if r in shared_s}
    per_node = state.devices_per_node
    return {
        rank: computing_s * state.speeds.get(rank // per_node, 1.0) / work_s[rank]
        for rank, computing_s in seconds.items()
    }


def _unclear_ranks(state: JobState) -> set[int]:
    """The ranks of nodes that may soon be found slow, or fast again."""
    unclear = []
    for node, window in state.facts.ratios.items():
        speed = state.speeds.get(node, 1.0)
        ratio = median(window) * speed
        if ratio > BACK_FACTOR or (speed < 1.0 and ratio < 1.0 / BACK_FACTOR):
            unclear.append(node)
    return set(state.ranks_of(unclear))


def _with_findings(
    rules: Rules, state: JobState, ratios: Mapping[int, float], beside_s: float
) -> Step:
    """The state with corrected layers and a new `beside_s`; the launcher is told.

    Args:
        ratios: correction of each layer, as a multiple of what was predicted before; a layer
            without an entry stays as it was.
        beside_s: seconds of an iteration besides the forwards and backwards of layers.
    """
    before = state.learning.findings.layer_factors or (1.0,) * rules.num_layers
    factors = tuple(factor * ratios.get(layer, 1.0) for layer, factor in enumerate(before))
    findings = msgspec.structs.replace(state.learning.findings, beside_s=beside_s)
    learning = replace(state.learning, findings=findings, plan_s=_plan_s(state))
    if ratios:
        assert rules.catalog is not None
        findings = msgspec.structs.replace(findings, layer_factors=factors)
        policy = _policy(rules, corrected_plans(rules.catalog, factors))
        learning = replace(learning, findings=findings, policy=policy)
        learning = _new_measurement(rules, replace(state, learning=learning))
    far = tuple(layer for layer, factor in enumerate(factors) if _is_far(factor))
    is_new = any(not _is_far(before[layer]) for layer in far)
    notice = ProfileCorrected(
        epoch=state.epoch,
        iteration=state.commits.next_iteration + 1,
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
        f"layers take {times} times as long as the profile says; planaria corrects its "
        "predictions from now on"
    )


def corrected_plans(catalog: PlanCatalog, layer_factors: Sequence[float]) -> PlanCatalog:
    """The plans that the job can be re-formed to, with the times of the corrected profile."""
    profile = corrected_profile(catalog.problem.profile, layer_factors)
    return rebuilt_catalog(
        replace(catalog.problem, profile=profile), catalog.templates, catalog.plans
    )


def _policy(rules: Rules, catalog: PlanCatalog) -> Policy:
    assert rules.policy_of is not None
    return rules.policy_of(catalog)
