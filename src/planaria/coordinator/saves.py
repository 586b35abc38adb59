"""Saves to disk: each is complete when every layer is written, and dropped if one cannot be.

Only a last save that lacks nothing but its manifest stays where it is.

The disk answers late, or never. Training does not wait for it. A recovery waits if its decision
depends on the answer, and the end of the job waits for the last save, but neither waits for longer
than `checkpoint.timeout_s` without an answer.
"""

from collections.abc import Iterable
from typing import Final

from planaria.coordinator.commands import (
    Command,
    Discard,
    Notify,
    Pruned,
    Publish,
    Published,
    SavesListed,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import JobState, Loss, Phase, Step
from planaria.core.copies import version_name
from planaria.core.kinds import LossKind
from planaria.core.messages import BY_PUBLISHER, LayersSaved, SaveFailed
from planaria.core.records import AwaitingSaves, Unsaved, Warned

VersionEvent = Published | Pruned | SavesListed
SLOW_S: Final = 10.0  # Time without a write after which the launcher is told of a slow save.
_WAITING_MAX: Final = 4  # Number of saves that lack only their manifests.
_FAILED_MAX: Final = 64  # Number of failed saves that are remembered; ranks are not so far apart.


def on_saving(
    rules: Rules, state: JobState, event: LayersSaved | VersionEvent | SaveFailed, now_s: float
) -> Step:
    """Notes how a save goes on, and publishes the next one that has all its layers."""
    if isinstance(event, LayersSaved | Published):
        state = replace(state, saves=replace(state.saves, wrote_s=now_s))
    match event:
        case LayersSaved():
            return _layers_saved(state, event)
        case SaveFailed():
            return _save_failed(rules, state, event)
        case Published() | Pruned() | SavesListed():
            return publish_next(on_version_event(rules, state, event))


def _layers_saved(state: JobState, event: LayersSaved) -> Step:
    """Notes layers that are on disk, and publishes the save if it has all its layers."""
    key = (event.iteration, event.epoch)
    saves = state.saves
    if key in saves.unsaved and key not in saves.versions:
        late = Discard(*key, "")  # It was perhaps written after a removal.
        return state, () if key in saves.kept else (late,)
    is_settled = event.iteration <= saves.newest_iteration or key in saves.publishing
    if event.epoch < saves.since_epoch or is_settled:
        return state, ()
    files = {**saves.files.get(key, {}), **{file.layer: file for file in event.files}}
    assert all(0 <= layer < state.plan.num_layers for layer in files), event
    saves = replace(saves, files={**saves.files, key: files})
    return publish_next(replace(state, saves=saves))


def publish_next(state: JobState) -> Step:
    """Has the oldest save with all layers on disk published, unless another one is being published.

    Older saves without all layers are dropped as useless: nodes have left while they wrote them. If
    more than `_WAITING_MAX` saves wait, the oldest of them are skipped.
    """
    num_layers = state.plan.num_layers
    complete = sorted(k for k, files in state.saves.files.items() if len(files) == num_layers)
    commands: list[Command] = []
    for older in complete[:-_WAITING_MAX]:
        reason = f"{_WAITING_MAX} newer saves also wait until the coordinator makes them complete"
        skipped = SaveFailed(
            rank=BY_PUBLISHER, iteration=older[0], epoch=older[1], reason=reason, is_skipped=True
        )
        state, new_commands = _drop_save(state, skipped)
        commands += new_commands
    saves = state.saves
    if saves.publishing or not complete:
        return state, tuple(commands)
    key = complete[-_WAITING_MAX:][0]
    files = saves.files[key]
    newer = {k: v for k, v in saves.files.items() if k > key}
    commands += _partial_notices(state, [k for k in saves.files if k < key], "nodes that left")
    publish = Publish(*key, tuple(files[layer] for layer in sorted(files)), unused=saves.spoilt)
    saves = replace(saves, files=newer, publishing={**saves.publishing, key: files})
    return replace(state, saves=saves), (*commands, publish)


def drop_partial(state: JobState) -> Step:
    """Drops the saves without all layers on disk after a loss, and tells of these, but not of the
    last save, which is made again.

    A save with all layers lacks only its manifest; the job may go back to it. It is published if
    nobody does that yet, because its manifest was refused while ranks evaluated.
    """
    saves, num_layers = state.saves, state.plan.num_layers
    files = {key: known for key, known in saves.files.items() if len(known) == num_layers}
    partial = [key for key in saves.files if key not in files and state.phase is not Phase.SAVING]
    notices = _partial_notices(state, partial, "a recovery")
    state, commands = publish_next(replace(state, saves=replace(saves, files=files)))
    return state, (*notices, *commands)


def _partial_notices(
    state: JobState, keys: Iterable[tuple[int, int]], why: str
) -> tuple[Notify, ...]:
    """The notices that saves are dropped of which only some layers were written."""
    texts = (
        f"the save of iteration {key[0]} was broken off by {why}, with "
        f"{len(state.saves.files[key])} of {state.plan.num_layers} layers written"
        for key in sorted(keys)
    )
    return tuple(Notify(Warned(text=text)) for text in texts)


def on_version_event(rules: Rules, state: JobState, event: VersionEvent) -> JobState:
    """Notes that a save exists, from before this coordinator or since, or exists no more."""
    if isinstance(event, SavesListed):
        return replace(state, saves=replace(state.saves, is_listing=False))
    if isinstance(event, Pruned):
        return _without_pruned(rules, state, event)
    key = (event.iteration, event.epoch)
    state = _without_publishing(state, key)
    if event.source in state.saves.spoilt:
        return state
    versions = tuple(sorted({*state.saves.versions, key}, reverse=True))
    owed_since = state.saves.owed_since if event.epoch < state.saves.owed_since else -1
    return replace(state, saves=replace(state.saves, versions=versions, owed_since=owed_since))


def _without_pruned(rules: Rules, state: JobState, event: Pruned) -> JobState:
    """The state in which nobody goes back to a removed version.

    If the run or the origin began with that version, it counts as spoilt.
    """
    versions = tuple(key for key in state.saves.versions if version_name(*key) != event.source)
    is_origin = event.source in (rules.source, state.commits.origin.source)
    spoilt = state.saves.spoilt | {event.source} if is_origin else state.saves.spoilt
    return replace(state, saves=replace(state.saves, versions=versions, spoilt=spoilt))


def without_spoilt(state: JobState, source: str) -> JobState:
    """The state in which nobody goes back to a version that is not what was saved."""
    saves = state.saves
    versions = tuple(key for key in saves.versions if version_name(*key) != source)
    saves = replace(saves, versions=versions, spoilt=saves.spoilt | {source})
    return replace(state, saves=saves)


def with_sound(rules: Rules, state: JobState, source: str) -> JobState:
    """The state in which a version counts again that a node could not read."""
    saves, versions = state.saves, {*state.saves.versions}
    if source in saves.spoilt and source != rules.source:
        iteration, _, epoch = source.partition("-")
        versions.add((int(iteration), int(epoch)))
    saves = replace(
        saves, versions=tuple(sorted(versions, reverse=True)), spoilt=saves.spoilt - {source}
    )
    return replace(state, saves=saves)


def newest_save(rules: Rules, state: JobState) -> tuple[int, str] | None:
    """The newest sound save on disk, as (iterations, version).

    It is (0, "") for the job's start if there is no save yet; None if this run began with a save
    and no save is sound.
    """
    saves, is_spoilt = state.saves, rules.source in state.saves.spoilt
    if saves.versions and (is_spoilt or saves.newest_iteration > rules.first_iteration):
        return saves.newest_iteration, version_name(*saves.versions[0])
    return None if is_spoilt else (rules.first_iteration, rules.source)


def _save_failed(rules: Rules, state: JobState, event: SaveFailed) -> Step:
    """Gives up a save that cannot become complete, and publishes the next one."""
    key = (event.iteration, event.epoch)
    if _may_be_last(state, key):
        files = {**state.saves.files, key: state.saves.publishing[key]}
        state = _without_publishing(state, key)
        return replace(state, saves=replace(state.saves, files=files)), ()
    state, commands = _give_up(rules, state, event)
    state, publishes = publish_next(state)
    return state, (*commands, *publishes)


def _may_be_last(state: JobState, key: tuple[int, int]) -> bool:
    """Whether a save whose manifest is refused may turn out to be the last one.

    Ranks begin the last save before the evaluation after which they report their last iteration.
    """
    is_uncommitted = key[0] > state.commits.next_iteration and key[1] == state.epoch
    return is_uncommitted and state.phase is Phase.TRAINING and key in state.saves.publishing


def _give_up(rules: Rules, state: JobState, event: SaveFailed) -> Step:
    """Drops a failed save; the layers of the last one stay if they are all there."""
    key = (event.iteration, event.epoch)
    # Before an evaluation it begins while the coordinator does not know that training has ended.
    is_known = state.phase is Phase.SAVING
    number = state.commits.next_iteration if is_known else rules.job.training.iterations
    is_last = key == (number, state.epoch)
    if not is_last or key in state.saves.unsaved or not _has_all_layers(state, key):
        return _drop_save(state, event)
    where = f"{rules.job.checkpoint.directory.rstrip('/')}/{version_name(*key)}"
    reason = f"{event.reason}; all its layers stay in {where}; only its manifest is missing"
    state, _ = _drop_save(state, replace(event, reason=reason))
    state = replace(state, saves=replace(state.saves, kept=state.saves.kept | {key}))
    text = f"iteration {event.iteration} was not saved: {reason}"
    return state, (Notify(Warned(text=text, event="save_failed")),)


def _has_all_layers(state: JobState, key: tuple[int, int]) -> bool:
    files = state.saves.files.get(key, ())
    return key in state.saves.publishing or len(files) == state.plan.num_layers


def _drop_save(state: JobState, event: SaveFailed) -> Step:
    iteration, reason = event.iteration, event.reason
    key = (iteration, event.epoch)
    files = state.saves.files
    is_whole = _has_all_layers(state, key)
    is_there = key in files or event.rank == BY_PUBLISHER
    if event.rank == BY_PUBLISHER:
        state = _without_publishing(state, key)
    saves = state.saves
    is_awaited = is_whole or saves.since_epoch <= event.epoch <= max(state.epochs)
    if not is_awaited or iteration <= saves.newest_iteration or key in saves.unsaved:
        return state, ()
    failed = {key: reason, **saves.unsaved}
    rest = {k: v for k, v in files.items() if k != key}
    saves = replace(saves, files=rest, unsaved=dict(list(failed.items())[:_FAILED_MAX]))
    state = replace(state, saves=saves)
    if not event.is_skipped:
        return state, (Discard(*key, reason),)
    state = replace(state, saves=replace(state.saves, num_skipped=state.saves.num_skipped + 1))
    # Other ranks may have written a part of it.
    discards: tuple[Command, ...] = (Discard(*key, ""),) if is_there else ()
    return state, (*_skip_notice(state, event), *discards)


def _skip_notice(state: JobState, event: SaveFailed) -> tuple[Notify, ...]:
    """The notice of a skipped save; only of the first, second, fourth, eighth ... one."""
    number = state.saves.num_skipped
    if number & (number - 1):
        return ()
    reason = f"{event.reason}; check checkpoint.directory, or save less often"
    if number > 1:
        reason = (
            f"{reason} ({number} saves were skipped so far; the next message comes at {2 * number})"
        )
    unsaved = Unsaved(iteration=event.iteration, epoch=event.epoch, reason=reason)
    return (Notify(unsaved),)


def has_late_answer(rules: Rules, state: JobState, now_s: float) -> bool:
    """Whether the disk may still tell a recovery of saves that it does not know of yet."""
    since_s = max(state.saves.wrote_s, state.facts.loss.lost_s if state.facts.loss else 0.0)
    is_late = now_s >= since_s + rules.job.checkpoint.timeout_s
    saves = state.saves
    return not is_late and (saves.is_listing or bool(saves.publishing or saves.checking))


def await_saves(rules: Rules, state: JobState, now_s: float) -> Step:
    """Has the recovery wait until the disk has answered; the launcher is told once."""
    # In its first epoch a job has lost nothing yet, but holders of a layer may differ even then.
    loss = state.facts.loss or Loss(LossKind.LOST, (), "holders of a layer differ", now_s)
    checkpoint = rules.job.checkpoint
    if loss.awaits_saves:
        return state, ()
    text = (
        f"how the job goes on depends on what is saved, and {checkpoint.directory} has not "
        f"answered yet; the job waits for it, {checkpoint.timeout_s:g} s at most "
        "(checkpoint.timeout_s)"
    )
    notice = Notify(AwaitingSaves(text=text, now_s=now_s))
    facts = replace(state.facts, loss=replace(loss, awaits_saves=True))
    return replace(state, facts=facts), (notice,)


def await_last_save(rules: Rules, state: JobState, now_s: float) -> Step:
    """Waits for the last save as long as the disk writes; gives it up after the timeout.

    If its manifest was refused while ranks evaluated, it is published again.
    """
    state, publishes = publish_next(state)
    if publishes:
        return state, publishes
    checkpoint, silent_s = rules.job.checkpoint, now_s - state.saves.wrote_s
    where, timeout_s = checkpoint.directory, checkpoint.timeout_s
    if silent_s >= timeout_s:
        number = state.commits.next_iteration
        reason = (
            f"nothing was written to {where} for {silent_s:.0f} s (checkpoint.timeout_s = "
            f"{timeout_s:g})"
        )
        failed = SaveFailed(rank=BY_PUBLISHER, epoch=state.epoch, iteration=number, reason=reason)
        return _give_up(rules, state, failed)
    if silent_s < SLOW_S or state.saves.is_slow_told:
        return state, ()
    text = (
        f"the last save is slow: nothing was written to {where} for {silent_s:.0f} s; after "
        f"{timeout_s:g} s the job ends without it (checkpoint.timeout_s)"
    )
    state = replace(state, saves=replace(state.saves, is_slow_told=True))
    return state, (Notify(Warned(text=text)),)


def _without_publishing(state: JobState, key: tuple[int, int]) -> JobState:
    """The state in which that save is no longer being published."""
    publishing = {k: files for k, files in state.saves.publishing.items() if k != key}
    return replace(state, saves=replace(state.saves, publishing=publishing))
