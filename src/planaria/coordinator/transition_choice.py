"""Chooses among transitions by the expected throughput, and says when the next failure is expected.

Transitions are either answers to a loss or changes of a plan while training goes on.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.history import learned_failures_per_s, learned_nodes_per_failure
from planaria.coordinator.learning.link_speeds import domains_of
from planaria.coordinator.learning.overhead import prices_of, switch_s
from planaria.coordinator.learning.profile_correction import iteration_s
from planaria.coordinator.state import JobState
from planaria.coordinator.switching import followed_answers
from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost
from planaria.core.plan import Plan, Transition
from planaria.core.records import Candidate, DecisionInputs
from planaria.policies.building import scheduling_s
from planaria.policies.policy import Prices
from planaria.policies.value import (
    Outlook,
    best_transition,
    expected_samples_per_s,
    samples_at_risk,
)

GAIN_MIN: Final = 0.03  # Predictions come true within 3% (benchmarks/prediction.py).
_S_PER_HOUR: Final = 3600.0
_BACK_MAX: Final = 2  # Versions of copies; the newest is still on its way when nodes are lost.


def choice_among(
    rules: Rules,
    state: JobState,
    transitions: tuple[Transition, ...],
    now_s: float,
    *,
    weighed: tuple[Transition, ...] = (),
) -> tuple[Transition | None, tuple[Candidate, ...]]:
    """The best of the transitions, None if there are none, and the prices of all transitions.

    Args:
        weighed: the transition that each change is weighed as; its downtime is the time in which
            nobody trains. Empty: the transitions are answers to a loss, see `weighed_answers`.
    """
    if not transitions:
        return None, ()
    batch = rules.job.training.global_batch_size
    expected = outlook(rules, state, now_s)
    is_change = bool(weighed)
    pairs = (
        list(zip(transitions, weighed, strict=True))
        if is_change
        else weighed_answers(
            transitions,
            prices=prices_of(rules, state),
            switch_s=partial(switch_s, rules, state),
            global_batch_size=batch,
            outlook=expected,
        )
    )
    best = best_transition(
        [as_that for _, as_that in pairs], global_batch_size=batch, outlook=expected
    )
    candidates = []
    for transition, as_that in pairs:
        then = None if is_change else transition.then
        candidates.append(
            Candidate(
                policy=transition.policy,
                answer=transition.answer,
                iteration_s=transition.iteration_s,
                downtime_s=as_that.downtime_s if is_change else transition.downtime_s,
                moving_s=as_that.then.downtime_s if as_that.then else 0.0,
                pause_s=0.0 if is_change else as_that.downtime_s - transition.downtime_s,
                then_s=then.iteration_s if then else 0.0,
                samples_at_risk=samples_at_risk(as_that, global_batch_size=batch, outlook=expected),
                score=expected_samples_per_s(as_that, global_batch_size=batch, outlook=expected),
            )
        )
    chosen = next(transition for transition, as_that in pairs if as_that is best)
    return replace(chosen, downtime_s=best.downtime_s) if is_change else chosen, tuple(candidates)


def weighed_answers(
    answers: tuple[Transition, ...],
    *,
    prices: Prices,
    switch_s: Callable[[Plan], float],
    global_batch_size: int,
    outlook: Outlook,
) -> list[tuple[Transition, Transition]]:
    """The answers to a loss that are worth taking, each with the transition that it is weighed as.

    The downtime of each answer includes the time to compute its schedules. An answer that is to be
    followed by another plan is left out if changing to that plan would not pay.
    """
    answers = tuple(
        replace(answer, downtime_s=answer.downtime_s + scheduling_s(answer.after, prices.hop_s))
        for answer in answers
    )
    weighed = followed_answers(answers, prices=prices, switch_s=switch_s)
    return [
        (answer, as_that)
        for answer, as_that in zip(answers, weighed, strict=True)
        if not answer.then
        or _is_followed(answer, as_that, global_batch_size=global_batch_size, outlook=outlook)
    ]


def _is_followed(
    answer: Transition, weighed: Transition, *, global_batch_size: int, outlook: Outlook
) -> bool:
    with_it, alone = (
        expected_samples_per_s(transition, global_batch_size=global_batch_size, outlook=outlook)
        for transition in (weighed, replace(answer, then=None))
    )
    return is_better(with_it, alone, samples_per_s=global_batch_size / answer.iteration_s)


def is_better(score: float, other: float, *, samples_per_s: float) -> bool:
    """Whether a score is enough better than the other to be worth the pause of a change.

    Args:
        samples_per_s: throughput of the plan as it is, of which the gain must be a share.
    """
    return score - other > GAIN_MIN * samples_per_s


def time_to_failure_s(rules: Rules, state: JobState, now_s: float) -> float:
    """The mean time to the next failure, from the job file, or else learned from its failures."""
    per_hour = rules.job.resilience.failure_rate
    if per_hour:
        return _S_PER_HOUR / per_hour
    return 1.0 / learned_failures_per_s(state.membership.history, now_s)


def outlook(rules: Rules, state: JobState, now_s: float) -> Outlook:
    """How often failures come, how large they are, what remains to be trained, and what is unsaved.

    Unsaved samples are those trained since the newest save of this run. With copies in other nodes'
    memory a failure costs at most `_BACK_MAX` versions of them: copies are assumed to survive.
    """
    training, job = rules.job.training, rules.job.checkpoint
    saved = max(rules.first_iteration, state.saves.newest_iteration)
    back_max = _BACK_MAX * rules.version_iterations if job.copies > 1 else inf
    return Outlook(
        failures_per_s=1.0 / time_to_failure_s(rules, state, now_s),
        # A save may be published before the last report of its iteration is in.
        unsaved_samples=max(0, state.commits.next_iteration - saved) * training.global_batch_size,
        between_saves=(job.persist_every or inf) * training.global_batch_size,
        lost_max=back_max * training.global_batch_size,
        remaining_samples=max(1, training.iterations - state.commits.next_iteration)
        * training.global_batch_size,
        nodes_per_failure=learned_nodes_per_failure(state.membership.history, now_s),
    )


def decision_inputs(
    rules: Rules,
    state: JobState,
    cluster: ClusterState,
    event: ClusterEvent,
    priced_s: float,
    *,
    is_foreseen: bool,
) -> DecisionInputs:
    """What a decision is made from, for the report; nothing is decided by it.

    Args:
        state: state in which the transitions were proposed and priced.
        priced_s: time for which they were priced.
        is_foreseen: whether the answer had been found ahead of need.
    """
    lost, changed = (event, None) if isinstance(event, NodesLost) else (None, event)
    return DecisionInputs(
        plan_epoch=state.plan.epoch,
        members=state.nodes,
        cluster=cluster,
        lost=lost,
        changed=changed,
        findings=state.learning.findings,
        history=state.membership.history,
        priced_s=priced_s,
        next_iteration=state.commits.next_iteration,
        saved_iteration=state.saves.newest_iteration,
        iteration_s=iteration_s(state) if changed else 0.0,
        version_iterations=rules.version_iterations,
        processors=rules.processors,
        is_foreseen=is_foreseen,
        plan=state.plan,
        domains=domains_of(rules, state),
    )
