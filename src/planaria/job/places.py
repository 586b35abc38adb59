"""Where a job saves, and where its coordinator keeps its journal: both are claimed for the run."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from planaria.checkpoint.disk.claim import claim, distant_holder
from planaria.checkpoint.disk.storage import Storage, is_url, may_pass
from planaria.checkpoint.disk.tiers import (
    UNPUBLISHED,
    Manifest,
    Start,
    Tier,
    newest_complete,
    tier_of,
)
from planaria.checkpoint.disk.time_limits import (
    LOOK_TIMEOUT_S,
    answer_in_time,
    context_with_time_limit,
    with_time_limit,
)
from planaria.core.job import JobConfig
from planaria.errors import CheckpointError, ConfigError, DoneError, LateError
from planaria.job.lost_heads import assemble_parts
from planaria.job.save_facts import differences, fingerprint
from planaria.nodes.head.journal_place import journal_place, other_journal_place

logger = logging.getLogger(__name__)

_RELEASE_S: Final = 120.0  # NFS keeps the locks of a machine that has died for 90 s.
_RELEASE_PAUSE_S: Final = 1.0

Answer = TypeVar("Answer")


def open_journal(
    held: ExitStack,
    config: JobConfig,
    *,
    state: str,
    note: Callable[[str], None],
    holder: str = "",
    taken_up: str = "",
    keeps: Callable[[], bool] = bool,
) -> str:
    """The directory of the coordinator's journal, which is held until `held` is closed.

    Args:
        holder, taken_up, keeps: see `journal_place`.

    Raises:
        ConfigError: it cannot be used, or the disk does not answer.
    """
    opened = context_with_time_limit(
        places(config, state, note, holder=holder, taken_up=taken_up, keeps=keeps),
        where=_where(config, state),
        timeout_s=config.checkpoint.timeout_s,
    )
    with _answering_in_time(config):
        return held.enter_context(opened)


def look_in_time(config: JobConfig, look: Callable[[], Answer], *, state: str) -> Answer:
    """What a look at the directories of journals finds.

    Raises:
        ConfigError: the disk does not answer.
    """
    with _answering_in_time(config):
        where, timeout_s = _where(config, state), config.checkpoint.timeout_s
        return answer_in_time(look, where=where, timeout_s=timeout_s)


def wait_released(config: JobConfig, *, note: Callable[[str], None]) -> None:
    """Waits while a job on another machine has the lock of the saves, for two minutes at most.

    That machine may have died with the head: a file server keeps its lock for a while then.

    Args:
        note: shows the user a text if there is such a job.

    Raises:
        ConfigError: it still has the lock, but may have lost it by the next try; or the disk does
            not answer.
    """
    directory = config.checkpoint.directory
    if is_url(directory):
        return
    look = partial(distant_holder, Path(directory))
    end_s, shown = time.monotonic() + _RELEASE_S, ""
    while True:
        with _answering_in_time(config):
            timeout_s = config.checkpoint.timeout_s
            holder = answer_in_time(look, where=directory, timeout_s=timeout_s)
        if not holder:
            return
        if time.monotonic() >= end_s:
            remedy = f"{holder} saves there; wait until it has ended, or name another directory"
            late = LateError(f"the lock was not released within {_RELEASE_S:.0f} s")
            raise ConfigError("checkpoint.directory", directory, remedy) from late
        if holder != shown:
            note(
                f"{holder} saves in {directory}; waiting up to {_RELEASE_S:.0f} s for its lock, "
                "which a file server keeps for a while where a machine has died"
            )
            shown = holder
        time.sleep(_RELEASE_PAUSE_S)


def _where(config: JobConfig, state: str) -> str:
    directory = config.checkpoint.directory
    return f"{directory} or {state}" if state else directory


def find_start(
    config: JobConfig,
    *,
    resume: bool,
    may_begin: bool = False,
    note: Callable[[str], None],
    runner: asyncio.Runner | None = None,
) -> Start:
    """The checkpoint to go on from, and the first epoch.

    An object store is tried first. What nodes of a lost head have saved by themselves is made a
    save.

    Args:
        may_begin: whether the job begins anew where there is nothing to resume from.
        note: shows the user a text, such as which newer versions are skipped.
        runner: runs what serves machines, which may bring nodes that are still saving.

    Raises:
        ConfigError: see `starting_point`; or the disk or store does not answer, or no save could be
            completed in the store.
        DoneError: see `starting_point`.
    """
    checkpoint = config.checkpoint
    tier = with_time_limit(tier_of(checkpoint.directory), timeout_s=checkpoint.timeout_s)
    with _answering_in_time(config):
        if is_url(checkpoint.directory):
            _check_store(tier.storage, note)
        assemble_parts(config, tier, resume=resume, note=note, runner=runner)
        manifest = starting_point(config, tier, resume=resume, may_begin=may_begin)
        for text in skipped_texts(tier, manifest) if manifest else ():
            note(text)
        return Start(manifest, tier.next_epoch())


def check_not_done(config: JobConfig) -> None:
    """Looks whether a job that is started again has anything left to train.

    What nodes of a lost head have saved by themselves can be no newer than a save of all
    iterations, so no machine need be waited for.

    Raises:
        DoneError: it has not.
        ConfigError: the save is of another job, or the disk or store does not answer.
    """
    checkpoint = config.checkpoint
    tier = with_time_limit(tier_of(checkpoint.directory), timeout_s=checkpoint.timeout_s)
    with _answering_in_time(config):
        try:
            manifest = tier.newest()
        except LateError:
            raise
        except CheckpointError:  # It is told once machines are there.
            return
        if manifest is not None:
            _check_same_job(config, manifest)
            _check_iterations_left(config, manifest, may_begin=True)


def starting_point(
    config: JobConfig, tier: Tier, *, resume: bool, may_begin: bool = False
) -> Manifest | None:
    """The checkpoint to go on from; None for a fresh start.

    Args:
        may_begin: whether a job that is to resume begins anew if no checkpoint was ever finished.

    Raises:
        ConfigError: there is no checkpoint to resume from, it belongs to another job, or a fresh
            start would mix with it. Or a version cannot be read now, and might later be taken for
            the newest.
        DoneError: the job may begin anew, and has all its iterations there.
        LateError: the disk or store does not answer.
    """
    directory = config.checkpoint.directory
    try:
        versions = tier.versions()
        manifest = newest_complete(versions)
    except LateError:
        raise
    except CheckpointError as error:
        remedy = f"{error}; start again when it can be read"
        raise ConfigError("checkpoint.directory", directory, remedy) from error
    if not resume:
        if manifest is not None:
            raise ConfigError(
                "checkpoint.directory",
                directory,
                f"it holds a checkpoint of iteration {manifest.iteration}; go on from it "
                "with --resume (resume=True in Python), or name another directory",
            )
        return None
    if manifest is None:
        unusable = [each for each in versions if each.reason != UNPUBLISHED]
        if may_begin and not unusable:
            return None
        option = "--resume-if-saved" if may_begin else "--resume"
        first = next(iter((*unusable, *versions)), None)
        why = f" ({first.name}: {first.reason})" if first else ""
        remedy = (
            f"it holds no complete checkpoint to resume from{why}; leave {option} out to begin anew"
        )
        raise ConfigError("checkpoint.directory", directory, remedy)
    _check_same_job(config, manifest)
    _check_iterations_left(config, manifest, may_begin=may_begin)
    return manifest


def _check_same_job(config: JobConfig, manifest: Manifest) -> None:
    directory = config.checkpoint.directory
    settings = msgspec.to_builtins(fingerprint(config))
    older = {"decay": "all"}  # What saves mean that do not say it.
    saved = {key: manifest.job.get(key, older.get(key)) for key in settings}
    tables = ("model", "data")  # Further keys are those of [training].
    changed = [
        (key if key.partition(".")[0] in tables else f"training.{key}", value, old)
        for key, value, old in differences(settings, saved)
        if key != "name"
    ]
    if changed:
        (name, value, before), *others = changed
        more = "".join(f", {key} = {old!r}" for key, _, old in others)
        remedy = (
            f"the checkpoint in {directory} was saved with {before!r}{more}; set it as it was, or "
            "name another checkpoint.directory to begin anew"
        )
        raise ConfigError(name, value, remedy)


def _check_iterations_left(config: JobConfig, manifest: Manifest, *, may_begin: bool) -> None:
    """Refuses a job that has all its iterations, unless somebody starts it again and again."""
    iterations = config.training.iterations
    if manifest.iteration < iterations:
        return
    if may_begin:
        text = (
            f"the save in {config.checkpoint.directory} has all {manifest.iteration} iterations; "
            "set a larger training.iterations to train on"
        )
        raise DoneError(text)
    remedy = (
        f"the checkpoint already has {manifest.iteration} iterations; set a larger number to train "
        "on"
    )
    raise ConfigError("training.iterations", iterations, remedy)


def skipped_texts(tier: Tier, manifest: Manifest) -> tuple[str, ...]:
    """Notices of the versions that are newer than the checkpoint to go on from, but incomplete."""
    newest = (manifest.iteration, manifest.epoch)
    return tuple(
        f"{tier.storage.where(version.name)} is not complete ({version.reason}), so the "
        f"job goes on from {tier.where(*newest)}"
        for version in tier.versions()
        if (version.iteration, version.epoch) > newest
    )


def _check_store(storage: Storage, note: Callable[[str], None]) -> None:
    """Writes an object to a store as manifests are written, once and no second time; removes it."""
    name, place = f".planaria-probe-{secrets.token_hex(8)}", storage.where("")
    try:
        storage.create(name, b"")
        is_overwritten = storage.create(name, b"again")
    except LateError:
        raise
    except CheckpointError as error:
        remedy = (
            f"no save could be completed there: {error}; the credentials must allow to read, write "
            "and remove objects, and the store must heed If-None-Match"
        )
        raise ConfigError("checkpoint.directory", place, remedy) from error
    try:
        storage.remove("", [name])
    except CheckpointError as error:
        note(f"{error}; older saves will stay there, too")
    if is_overwritten:
        remedy = (
            "no save could be completed there: the store writes an object again that is to be "
            "written once (it ignores If-None-Match); name another store"
        )
        raise ConfigError("checkpoint.directory", place, remedy)


@contextmanager
def _answering_in_time(config: JobConfig) -> Iterator[None]:
    """Makes a disk or store that does not answer the user's mistake, to repair before training.

    Also a disk that fails where nothing else expects it, as a file server does that begins anew.
    """
    directory = config.checkpoint.directory
    try:
        yield
    except LateError as error:
        remedy = f"{error} (checkpoint.timeout_s); check that disk or store; nothing was trained"
        raise ConfigError("checkpoint.directory", directory, remedy) from error
    except OSError as error:
        if not may_pass(error):
            raise
        remedy = f"{error}; check that disk; nothing was trained"
        raise ConfigError("checkpoint.directory", directory, remedy) from error


@contextmanager
def places(
    config: JobConfig,
    state: str,
    note: Callable[[str], None],
    *,
    holder: str = "",
    taken_up: str = "",
    keeps: Callable[[], bool] = bool,
) -> Iterator[str]:
    """The directory of the coordinator's journal, for the length of the context.

    The directory of saves is claimed until the journal is removed, so that no other job has its
    journal there before that.
    """
    with (
        claim(config.checkpoint.directory, config.name, note=note),
        journal_place(
            config, state, note=note, holder=holder, taken_up=taken_up, keeps=keeps
        ) as journal,
    ):
        yield journal


def other_journal(
    held: ExitStack, config: JobConfig, journal: str, *, state: str, holder: str = ""
) -> str:
    """Another directory for the coordinator's journal, which is held as long as the first.

    "" if the user named the first, if the first is not beside the saves, or if there is no other.
    """
    if state or Path(journal).parent != Path(config.checkpoint.directory):
        return ""
    # The launcher's loop waits meanwhile, so the timeout is short.
    timeout_s = min(LOOK_TIMEOUT_S, config.checkpoint.timeout_s)
    place = other_journal_place(config, state, holder=holder or secrets.token_hex(8))
    other = context_with_time_limit(place, where="the user's state directory", timeout_s=timeout_s)
    try:
        return held.enter_context(other)
    except (ConfigError, LateError, MemoryError) as error:
        logger.warning("%s", error)
        return ""
