"""Which of the answers is taken: what is to be expected of the next failure, and all prices."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Final

from planaria.coordinator.learning.history import learned_failures_per_s, learned_nodes_per_failure
from planaria.coordinator.learning.overhead import prices_of, switch_s
from planaria.coordinator.state import JobState, Rules
from planaria.coordinator.switching import followed_as
from planaria.core.plan import Plan, Transition
from planaria.core.records import Candidate
from planaria.policies.policy import (
    Outlook,
    Prices,
    best_transition,
    expected_samples_per_s,
    samples_at_risk,
    scheduling_s,
)

GAIN_MIN: Final = 0.03  # What is predicted comes true within 3% (benchmarks/prediction.py).
_S_PER_HOUR: Final = 3600.0
_BACK_MAX: Final = 2  # Versions of copies: one is on its way when the nodes are lost.


def candidates_of(
    rules: Rules,
    state: JobState,
    transitions: tuple[Transition, ...],
    now_s: float,
    *,
    weighed: tuple[Transition, ...] = (),
) -> tuple[Transition | None, tuple[Candidate, ...]]:
    """The best of the transitions, None if there are none, and the prices of all.

    Args:
        weighed: what each change is weighed as, its downtime being what is paid; empty for answers
            to a loss, see `weighed_answers`.
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
    """Answers to a loss, with what schedules take, and each with what it is weighed as; without
    those that another plan is to follow for which nobody would change at a commit."""
    answers = tuple(
        replace(one, downtime_s=one.downtime_s + scheduling_s(one.after, prices.hop_s))
        for one in answers
    )
    weighed = followed_as(answers, prices=prices, switch_s=switch_s)
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
        expected_samples_per_s(one, global_batch_size=global_batch_size, outlook=outlook)
        for one in (weighed, replace(answer, then=None))
    )
    return gains(with_it, alone, samples_per_s=global_batch_size / answer.iteration_s)


def gains(score: float, other: float, *, samples_per_s: float) -> bool:
    """Whether one is enough better than what there is, which makes so many samples a second; a
    needless change is a pause for nothing."""
    return score - other > GAIN_MIN * samples_per_s


def time_to_failure_s(rules: Rules, state: JobState, now_s: float) -> float:
    """The mean time to the next failure: as the job says, else learned from its failures."""
    per_hour = rules.job.resilience.failure_rate
    if per_hour:
        return _S_PER_HOUR / per_hour
    return 1.0 / learned_failures_per_s(state.history, now_s)


def outlook(rules: Rules, state: JobState, now_s: float) -> Outlook:
    """How often and how large failures are, what the job has still to train, and what is not saved.

    That is what was trained since the newest save of this run; no more than all go back to copies
    in other nodes' memory, which are taken to survive, is ever lost.
    """
    training, job = rules.job.training, rules.job.checkpoint
    saved = max(rules.first_iteration, state.published)
    back_max = _BACK_MAX * rules.version_iterations if job.copies > 1 else inf
    return Outlook(
        failures_per_s=1.0 / time_to_failure_s(rules, state, now_s),
        # A save may be published before the last report of its iteration is in.
        unsaved_samples=max(0, state.next_iteration - saved) * training.global_batch_size,
        between_saves=(job.persist_every or inf) * training.global_batch_size,
        lost_max=back_max * training.global_batch_size,
        remaining_samples=max(1, training.iterations - state.next_iteration)
        * training.global_batch_size,
        nodes_per_failure=learned_nodes_per_failure(state.history, now_s),
    )
