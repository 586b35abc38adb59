"""Where a run keeps the coordinator's journal, for as long as it lasts.

    {checkpoint.directory}/.journal/    beside its saves, where that is a directory with locks
    {state}/{job}-{random}/             elsewhere: `--state`, or the user's state directory

A run begins with an empty one, so no record of a run before is ever taken for its own, and removes
it in the end. What a launcher that was killed has left there goes with the next run.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from planaria.checkpoint.patience import in_time
from planaria.checkpoint.storage import is_url
from planaria.core.job import JobConfig
from planaria.errors import ConfigError

_BESIDE: Final = ".journal"  # No save has such a name: that would begin with a letter or digit.
_FILES: Final = ("journal*", "lock")
_PROBE: Final = "journal.probe"
_PROBE_BYTES: Final = 1 << 16  # More than the records of a small job.
_NAME_LENGTH_MAX: Final = 40


@contextmanager
def journal_place(config: JobConfig, state: str, *, note: Callable[[str], None]) -> Iterator[str]:
    """The directory of the journal of a run; its place among saves is claimed (claim.py).

    Args:
        state: where the user wants it, "" for the usual places.
        note: is told if it is not beside the saves though these are in a directory.

    Raises:
        ConfigError: it cannot be written to.
    """
    saves = config.checkpoint.directory
    with ExitStack() as held:
        if not state and not is_url(saves):
            try:
                directory = held.enter_context(_beside(Path(saves)))
            except _UnfitError as error:
                note(f"the coordinator's journal is not kept in {saves}: {error}")
            else:
                yield str(directory)
                return
        parent = Path(state).absolute() if state else _user_state()
        try:
            directory = held.enter_context(_own(parent, config.name))
        except _UnfitError as error:
            remedy = f"{error}; name a directory for the coordinator's journal that can be"
            raise ConfigError("--state", str(parent), remedy) from error
        yield str(directory)


class _UnfitError(Exception):
    """When a directory cannot hold a journal; says why."""


@contextmanager
def _beside(saves: Path) -> Iterator[Path]:
    directory = saves / _BESIDE
    try:
        _empty(directory)
        _prove(directory)
    except OSError as error:
        _remove(directory)
        raise _UnfitError(_told(error)) from error
    try:
        yield directory
    finally:
        in_time(lambda: _remove(directory))


@contextmanager
def _own(parent: Path, job: str) -> Iterator[Path]:
    """A new directory, locked while it is in use; others of the job that nobody uses go."""
    name = "".join(letter if letter.isalnum() else "_" for letter in job)[:_NAME_LENGTH_MAX]
    directory = parent / f"{name}-{secrets.token_hex(4)}"
    fd = -1
    try:
        _prove(directory)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        _remove(directory)
        raise _UnfitError(_told(error)) from error
    try:
        for other in parent.glob(f"{name}-{'[0-9a-f]' * 8}/journal"):
            _remove_unused(other.parent)
        yield directory
    finally:
        in_time(lambda: _release(directory, fd))


def _release(directory: Path, fd: int) -> None:
    _remove(directory)
    os.close(fd)


def _prove(directory: Path) -> None:
    """Raises an OSError if nothing can be kept there, or nothing be locked."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = directory / _PROBE
    try:
        with probe.open("wb") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _empty(directory: Path) -> None:
    for pattern in _FILES:
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def _remove(directory: Path) -> None:
    """What else somebody has put there stays."""
    with contextlib.suppress(OSError):
        _empty(directory)
        directory.rmdir()


def _remove_unused(directory: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(directory)
        finally:
            os.close(fd)


def _user_state() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base).absolute() / "planaria"


def _told(error: OSError) -> str:
    return f"{error.filename or 'it'} cannot be written to ({error.strerror})"
