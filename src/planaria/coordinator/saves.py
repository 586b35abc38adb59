"""Saves to disk: complete when every layer is there, given up when one cannot be written."""

from dataclasses import replace

from planaria.coordinator.state import Discard, JobState, Publish, Published, Step
from planaria.core.messages import BY_PUBLISHER, LayersSaved, SaveFailed


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


def published(state: JobState, event: Published) -> JobState:
    """A save is there, of this coordinator's time or of before."""
    state = _told(state)
    if event.iteration <= state.published:
        return state
    return replace(state, published=event.iteration, source=event.source)


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
