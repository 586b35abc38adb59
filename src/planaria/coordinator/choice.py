"""Which of the answers is taken: what is to be expected of the next failure, and all prices."""

from dataclasses import replace
from typing import Final

from planaria.coordinator.history import learned_failures_per_s, learned_nodes_per_failure
from planaria.coordinator.state import JobState, Rules
from planaria.core.plan import Transition
from planaria.core.records import Candidate
from planaria.policies.policy import Outlook, best_transition, expected_samples_per_s

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
        weighed: what each of them is weighed as, if not as itself; its downtime is what is paid.
    """
    if not transitions:
        return None, ()
    batch = rules.job.training.global_batch_size
    expected = outlook(rules, state, transitions, now_s)
    weighed = weighed or transitions
    best = best_transition(weighed, global_batch_size=batch, outlook=expected)
    candidates = tuple(
        Candidate(
            policy=transition.policy,
            answer=transition.answer,
            iteration_s=transition.iteration_s,
            downtime_s=as_that.downtime_s,
            moving_s=as_that.then.downtime_s if as_that.then else 0.0,
            score=expected_samples_per_s(as_that, global_batch_size=batch, outlook=expected),
        )
        for transition, as_that in zip(transitions, weighed, strict=True)
    )
    chosen = transitions[weighed.index(best)]
    return replace(chosen, downtime_s=best.downtime_s), candidates


def time_to_failure_s(rules: Rules, state: JobState, now_s: float) -> float:
    """The mean time to the next failure: as the job says, else learned from its failures."""
    per_hour = rules.job.resilience.failure_rate
    if per_hour:
        return _S_PER_HOUR / per_hour
    return 1.0 / learned_failures_per_s(state.history, now_s)


def outlook(
    rules: Rules, state: JobState, transitions: tuple[Transition, ...], now_s: float
) -> Outlook:
    """The rate and the size of failures, and what is not saved when the next one is to be expected.

    The last is what there is since the newest save of this run, and what the fastest of the answers
    makes until then; no more than is trained between two saves, where the job saves as it goes, and
    no more than all go back to copies in other nodes' memory, which are taken to survive.
    """
    training, job = rules.job.training, rules.job.checkpoint
    to_failure_s = time_to_failure_s(rules, state, now_s)
    saved = max(rules.first_iteration, state.published)
    fastest_s = min(transition.iteration_s for transition in transitions)
    # A save may be published before the last report of its iteration is in.
    num_unsaved = max(0.0, state.next_iteration - saved + to_failure_s / fastest_s)
    if job.persist_every:
        num_unsaved = min(num_unsaved, job.persist_every)
    if job.copies > 1:
        num_unsaved = min(num_unsaved, _BACK_MAX * (1 if job.every == "auto" else job.every))
    return Outlook(
        failures_per_s=1.0 / to_failure_s,
        unsaved_samples=num_unsaved * training.global_batch_size,
        nodes_per_failure=learned_nodes_per_failure(state.history, now_s),
    )
