"""Saves to disk: complete when every layer is there, given up when one cannot be written.

What is asked of the disk is answered later, or never. Training does not wait for it; a recovery
does where what it decides depends on the answer, and the end of the job does, but neither for
longer than `checkpoint.timeout_s`.
"""

from dataclasses import replace
from typing import Final

from planaria.coordinator.state import (
    Command,
    Discard,
    JobState,
    Loss,
    Notify,
    Pruned,
    Publish,
    Published,
    Rules,
    SavesListed,
    Step,
)
from planaria.core.copies import version_name
from planaria.core.messages import BY_PUBLISHER, LayersSaved, SaveFailed
from planaria.core.records import AwaitingSaves, Unsaved, Warned

Kept = Published | Pruned | SavesListed
SLOW_S: Final = 10.0  # From when on it is said that a save takes long.
_WAITING_MAX: Final = 4  # Saves that are whole but for their manifests.
_FAILED_MAX: Final = 64  # Saves of which it is known why they failed; ranks are not so far apart.


def layers_saved(state: JobState, event: LayersSaved) -> Step:
    """A save is complete when every layer of it is on disk."""
    key = (event.iteration, event.epoch)
    is_settled = event.iteration <= state.published or key in state.unsaved
    is_settled = is_settled or key in state.publishing
    if event.epoch < state.saves_since or is_settled:
        return state, ()
    files = {**state.saves.get(key, {}), **{file.layer: file for file in event.files}}
    assert all(0 <= layer < state.plan.num_layers for layer in files), event
    return publish_next(replace(state, saves={**state.saves, key: files}))


def publish_next(state: JobState) -> Step:
    """Has the first save published of which every layer is on disk, one after the other.

    What is older and not whole by then would be of no use any more, nor what has waited for too
    many others.
    """
    whole = sorted(k for k, files in state.saves.items() if len(files) == state.plan.num_layers)
    commands: list[Command] = []
    for older in whole[:-_WAITING_MAX]:
        reason = f"{_WAITING_MAX} newer ones wait to be made complete by the coordinator, too"
        skipped = SaveFailed(
            rank=BY_PUBLISHER, iteration=older[0], epoch=older[1], reason=reason, is_skipped=True
        )
        state, more = _failed(state, skipped)
        commands += more
    if state.publishing or not whole:
        return state, tuple(commands)
    key = whole[-_WAITING_MAX:][0]
    files = state.saves[key]
    newer = {k: v for k, v in state.saves.items() if k > key}
    publish = Publish(*key, tuple(files[layer] for layer in sorted(files)), unused=state.spoilt)
    state = replace(state, saves=newer, publishing=state.publishing | {key})
    return state, (*commands, publish)


def kept(rules: Rules, state: JobState, event: Kept) -> JobState:
    """A save is there, of this coordinator's time or of before, or is there no more."""
    if isinstance(event, SavesListed):
        return replace(state, is_listing=False)
    if isinstance(event, Pruned):
        return _pruned(rules, state, event)
    key = (event.iteration, event.epoch)
    state = _answered(state, key)
    if event.source in state.spoilt:
        return state
    versions = {*state.versions, key}
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
    """A save that cannot be complete any more is removed; another one has its turn."""
    state, commands = _failed(state, event)
    state, publishes = publish_next(state)
    return state, (*commands, *publishes)


def _failed(state: JobState, event: SaveFailed) -> Step:
    iteration, reason = event.iteration, event.reason
    key = (iteration, event.epoch)
    is_whole = key in state.publishing or len(state.saves.get(key, ())) == state.plan.num_layers
    is_there = key in state.saves or event.rank == BY_PUBLISHER
    if event.rank == BY_PUBLISHER:
        state = _answered(state, key)
    is_awaited = is_whole or state.saves_since <= event.epoch <= state.epoch
    if not is_awaited or iteration <= state.published or key in state.unsaved:
        return state, ()
    failed = {key: reason, **state.unsaved}
    rest = {k: v for k, v in state.saves.items() if k != key}
    state = replace(state, saves=rest, unsaved=dict(list(failed.items())[:_FAILED_MAX]))
    if not event.is_skipped:
        return state, (Discard(*key, reason),)
    state = replace(state, num_skipped=state.num_skipped + 1)
    # Others may have written a part of it.
    discards: tuple[Command, ...] = (Discard(*key, ""),) if is_there else ()
    return state, (*_skipped(state, event), *discards)


def _skipped(state: JobState, event: SaveFailed) -> tuple[Notify, ...]:
    """Tells the user of the first, second, fourth ... save that was skipped."""
    number = state.num_skipped
    if number & (number - 1):
        return ()
    reason = f"{event.reason}; see to checkpoint.directory, or save less often"
    if number > 1:
        reason = (
            f"{reason} ({number} saves were skipped so far; the next word of it is at {2 * number})"
        )
    unsaved = Unsaved(iteration=event.iteration, epoch=event.epoch, reason=reason)
    return (Notify(unsaved),)


def has_late_answer(rules: Rules, state: JobState, now_s: float) -> bool:
    """Whether a recovery may wait to hear of saves: some may be there of which it knows nothing."""
    since_s = max(state.wrote_s, state.loss.lost_s if state.loss else 0.0)
    is_late = now_s >= since_s + rules.job.checkpoint.timeout_s
    return not is_late and (state.is_listing or bool(state.publishing))


def awaiting_saves(rules: Rules, state: JobState, now_s: float) -> Step:
    """The recovery waits until the disk has answered; that is said once."""
    # In its first epoch a job has lost nothing yet, and holders may differ all the same.
    loss = state.loss or Loss("lost", (), "holders of a layer differ", now_s)
    checkpoint = rules.job.checkpoint
    if loss.awaits_saves:
        return state, ()
    text = (
        f"how the job goes on depends on what is saved, and {checkpoint.directory} has not "
        f"answered yet: it is waited for, {checkpoint.timeout_s:g} s at most (checkpoint.timeout_s)"
    )
    notice = Notify(AwaitingSaves(text=text, now_s=now_s))
    return replace(state, loss=replace(loss, awaits_saves=True)), (notice,)


def last_save_awaited(rules: Rules, state: JobState, now_s: float) -> Step:
    """The last save is not complete: it is waited for as long as it gets on."""
    checkpoint, silent_s = rules.job.checkpoint, now_s - state.wrote_s
    where, timeout_s = checkpoint.directory, checkpoint.timeout_s
    if silent_s >= timeout_s:
        reason = (
            f"nothing was written to {where} for {silent_s:.0f} s (checkpoint.timeout_s = "
            f"{timeout_s:g})"
        )
        failed = SaveFailed(
            rank=BY_PUBLISHER, epoch=state.epoch, iteration=state.next_iteration, reason=reason
        )
        return _failed(state, failed)
    if silent_s < SLOW_S or state.is_slow_told:
        return state, ()
    text = (
        f"the last save is slow: nothing was written to {where} for {silent_s:.0f} s; after "
        f"{timeout_s:g} s the job ends without it (checkpoint.timeout_s)"
    )
    return replace(state, is_slow_told=True), (Notify(Warned(text=text)),)


def _answered(state: JobState, key: tuple[int, int]) -> JobState:
    """That save is not being published any more."""
    return replace(state, publishing=state.publishing - {key})
