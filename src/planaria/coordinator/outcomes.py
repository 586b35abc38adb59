"""Where all go on after a loss: at what the newest vector proves, or back at a save.

Back at a save is a new origin, on which all iterations are built from then on. What ranks hold or
answer from before counts no more, however late they hear of it, and what was committed since the
save is committed again. Nobody goes back in an epoch whose outcome is on record, so that a
coordinator that finds one decides as the one before it did.

Source: DESIGN 4.5 and 5; Varuna (EuroSys '22) for going back.
"""

from dataclasses import replace

from planaria.coordinator.state import JobState, Rules
from planaria.core.cluster import SavePoint
from planaria.core.messages import Stopped
from planaria.core.records import Origin, Outcome


def counting(state: JobState, answer: Stopped) -> Stopped:
    """The answer, without what the rank has from before all went back to a save."""
    if answer.since == state.origin.epoch:
        return answer
    return Stopped(rank=answer.rank, epoch=answer.epoch, ages={}, complete=())


def outcome_of(state: JobState) -> Outcome:
    """The newest vector of all that members hold or that is on record."""
    assert state.answers
    newest = max(state.answers.values(), key=lambda answer: answer.vector_iteration)
    iteration, vector = newest.vector_iteration + 1, newest.vector
    if not vector:
        iteration = state.origin.iteration
    recorded = state.outcome
    if recorded is not None and recorded.iteration > iteration:
        iteration, vector = recorded.iteration, recorded.vector
    if iteration < state.next_iteration:  # All who were at work are new, and hold nothing.
        iteration, vector = state.next_iteration, b""
    ages = {age for answer in state.answers.values() for age in answer.ages.values()}
    is_redo = iteration - 1 not in ages
    return Outcome(
        epoch=state.epoch,
        iteration=iteration,
        vector=vector,
        is_redo=is_redo,
        origin=state.origin,
    )


def held_layers(rules: Rules, state: JobState, outcome: Outcome) -> dict[int, frozenset[int]]:
    """For every rank the layers that it has, or will have, at the age at which all go on."""
    if outcome.iteration == state.origin.iteration:
        # Nothing has been trained since: whoever needs a layer makes or loads it, as at the start.
        return dict.fromkeys(state.ranks, frozenset(range(rules.num_layers)))
    return {rank: _held_by(state.answers[rank], outcome.iteration) for rank in state.ranks}


def _held_by(answer: Stopped, iteration: int) -> frozenset[int]:
    return frozenset(
        layer
        for layer, age in answer.ages.items()
        if age == iteration or (age == iteration - 1 and layer in answer.complete)
    )


def save_point(rules: Rules, state: JobState, outcome: Outcome, redone: int) -> SavePoint | None:
    """What all could go back to; None where it is on record that they go on in this epoch."""
    iteration, source = state.origin.iteration, state.origin.source
    if outcome.iteration > iteration:
        if state.outcome is not None and state.outcome.epoch == state.epoch:
            return None
        if state.published > iteration:
            iteration, source = state.published, state.source
    num_undone = max(0, outcome.iteration - iteration)
    redone += num_undone * rules.job.training.global_batch_size
    return SavePoint(iteration, source, redone)


def gone_back(state: JobState, saved: SavePoint) -> tuple[JobState, Outcome]:
    """The job as the save has it: what came after is to be trained and committed again."""
    origin = Origin(iteration=saved.iteration, source=saved.source, epoch=state.epoch)
    reports = {i: told for i, told in state.reports.items() if i < origin.iteration}
    state = replace(
        state,
        origin=origin,
        reports=reports,
        next_iteration=min(state.next_iteration, origin.iteration),
        ends=False,
    )
    return state, Outcome(epoch=state.epoch, iteration=origin.iteration, origin=origin)
