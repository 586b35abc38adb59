"""Where a job saves, and where its coordinator keeps its journal: both are claimed for the run."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from planaria.checkpoint.disk.claim import claim
from planaria.checkpoint.disk.storage import Storage, is_url
from planaria.checkpoint.disk.tiers import Start, tier_of
from planaria.checkpoint.disk.time_limits import (
    LOOK_TIMEOUT_S,
    answer_in_time,
    context_with_time_limit,
    with_time_limit,
)
from planaria.core.job import JobConfig
from planaria.errors import CheckpointError, ConfigError, LateError
from planaria.job.lost_heads import assemble_parts
from planaria.job.planning import skipped_texts, starting_point
from planaria.nodes.head.journal_place import journal_place, other_journal_place

logger = logging.getLogger(__name__)

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
    """Makes a disk or store that does not answer the user's mistake, to repair before training."""
    try:
        yield
    except LateError as error:
        remedy = f"{error} (checkpoint.timeout_s); check that disk or store; nothing was trained"
        raise ConfigError("checkpoint.directory", config.checkpoint.directory, remedy) from error


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
