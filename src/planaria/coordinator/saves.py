"""Saves to disk: complete when every layer is there, given up when one cannot be written."""

from dataclasses import replace

from planaria.coordinator.state import (
    Discard,
    JobState,
    Pruned,
    Publish,
    Published,
    Rules,
    Step,
)
from planaria.core.copies import version_name
from planaria.core.messages import BY_PUBLISHER, LayersSaved, SaveFailed

Kept = Published | Pruned


def layers_saved(state: JobState, event: LayersSaved) -> Step:
    """A save is complete when every layer of it is on disk."""
    key = (event.iteration, event.epoch)
    is_settled = event.iteration <= state.published or key in state.unsaved
    if event.epoch < state.saves_since or is_settled:
        return state, ()
    files = {**state.saves.get(key, {}), **{file.layer: file for file in event.files}}
    assert all(0 <= layer < state.plan.num_layers for layer in files), event
    if len(files) < state.plan.num_layers:
        return replace(state, saves={**state.saves, key: files}), ()
    # An older save that is not complete by now would be of no use any more.
    newer = {k: v for k, v in state.saves.items() if k > key}
    publish = Publish(event.iteration, event.epoch, tuple(files[layer] for layer in sorted(files)))
    return replace(state, saves=newer, num_publishing=state.num_publishing + 1), (publish,)


def kept(rules: Rules, state: JobState, event: Kept) -> JobState:
    """A save is there, of this coordinator's time or of before, or is there no more."""
    if isinstance(event, Pruned):
        return _pruned(rules, state, event)
    state = _told(state)
    if event.source in state.spoilt:
        return state
    versions = {*state.versions, (event.iteration, event.epoch)}
    return replace(state, versions=tuple(sorted(versions, reverse=True)))


def _pruned(rules: Rules, state: JobState, event: Pruned) -> JobState:
    """Nobody goes back to it, nor to what the run or the epoch began with, if it was that."""
    versions = tuple(one for one in state.versions if version_name(*one) != event.source)
    is_origin = event.source in (rules.source, state.origin.source)
    spoilt = state.spoilt | {event.source} if is_origin else state.spoilt
    return replace(state, versions=versions, spoilt=spoilt)


def without_spoilt(state: JobState, source: str) -> JobState:
    """A version that is not what was saved: nobody goes back to it any more."""
    versions = tuple(one for one in state.versions if version_name(*one) != source)
    return replace(state, versions=versions, spoilt=state.spoilt | {source})


def newest_save(rules: Rules, state: JobState) -> tuple[int, str] | None:
    """Iterations and version of the newest sound save on disk, (0, "") for the job's start; None if
    this run began with a save, and none is sound."""
    is_spoilt = rules.source in state.spoilt
    if state.versions and (is_spoilt or state.published > rules.first_iteration):
        return state.published, version_name(*state.versions[0])
    return None if is_spoilt else (rules.first_iteration, rules.source)


def save_failed(state: JobState, event: SaveFailed) -> Step:
    """A save that cannot be complete any more is removed."""
    if event.rank == BY_PUBLISHER:
        state = _told(state)
    iteration, reason = event.iteration, event.reason
    key = (iteration, event.epoch)
    is_of_now = state.saves_since <= event.epoch <= state.epoch
    if not is_of_now or iteration <= state.published or key in state.unsaved:
        return state, ()
    discard = Discard(*key, reason)
    rest = {k: v for k, v in state.saves.items() if k != key}
    return replace(state, saves=rest, unsaved={key: reason, **state.unsaved}), (discard,)


def _told(state: JobState) -> JobState:
    """One save less is being published."""
    return replace(state, num_publishing=max(0, state.num_publishing - 1))
