"""The directory in which a run keeps the coordinator's journal, for as long as the run lasts.

    {checkpoint.directory}/.journal/    beside the saves, if they are in a directory with locks
    {state}/{job}-{machine}-{random}/   otherwise: in `--state`, or the user's state directory

A run begins with an empty journal, so that it never takes a record of an earlier run for its own,
and removes the journal at its end, unless another run has taken the directory meanwhile
(`JournalHold`). What a killed launcher has left there is removed by the next run of the job; if it
is not beside the saves, only by a run on the same machine, because machines may share a home
directory without sharing its locks. Nor is it removed by a run with other saves while nodes may
look for the head that is to take up their run by it.
"""

import contextlib
import fcntl
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from planaria.checkpoint.disk.claim import is_claimed
from planaria.checkpoint.disk.storage import absolute_path, is_same_place, is_url
from planaria.core.job import JobConfig
from planaria.errors import ConfigError
from planaria.nodes.head.remote.run_record import (
    HOLDER_FILE,
    JournalHold,
    has_nodes,
    may_have_nodes,
    read_run,
    replace_file,
)
from planaria.nodes.head.user_files import plain_name, state_directory

_DIRECTORY_NAME: Final = (
    ".journal"  # No save can have this name: saves' names begin alphanumerically.
)
_FILES: Final = ("journal*", "archive", "lock")
_PROBE: Final = "journal.probe"
_PROBE_BYTES: Final = 1 << 16  # More than the records of a small job.


@contextmanager
def journal_place(
    config: JobConfig,
    state: str,
    *,
    note: Callable[[str], None],
    holder: str = "",
    taken_up: str = "",
    keeps: Callable[[], bool] = bool,
) -> Iterator[str]:
    """The directory for the journal of a run; the caller has claimed the saves' directory.

    For the claim see checkpoint/disk/claim.py.

    Args:
        holder: random name of the head, by which it knows whether the directory is still its own;
            "": any.
        taken_up: directory with the journal of a run that is to go on; "": a new run begins.
        keeps: says, at the end, whether that journal is to stay, because its run does not go on.
        state: parent directory that the user wants; "": the usual places.
        note: shows the user a text if the saves' directory cannot hold the journal.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    saves, holder = config.checkpoint.directory, holder or secrets.token_hex(8)
    with ExitStack() as stack:
        if taken_up:
            hold = JournalHold(Path(taken_up), holder)
            yield str(stack.enter_context(_left_directory(hold, keeps)))
            return
        if not state and not is_url(saves):
            try:
                hold = JournalHold(Path(saves) / _DIRECTORY_NAME, holder)
                directory = stack.enter_context(_journal_directory(hold))
            except OSError as error:
                note(f"the coordinator's journal is not kept in {saves}: {_error_text(error)}")
            else:
                yield str(directory)
                return
        yield stack.enter_context(other_journal_place(config, state, holder=holder))


@contextmanager
def other_journal_place(config: JobConfig, state: str, *, holder: str) -> Iterator[str]:
    """A directory, not beside the saves, for the journal of a run.

    Args:
        state, holder: see `journal_place`.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    parent = _user_state(state)
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(_new_directory(parent, config, holder))
        except OSError as error:
            remedy = (
                f"{_error_text(error)}; name a writable directory for the coordinator's journal"
            )
            raise ConfigError("--state", str(parent), remedy) from error
        yield str(directory)


def _user_state(state: str) -> Path:
    """The parent directory that the user wants, or else the user's state directory."""
    parent = absolute_path(Path(state)) if state else state_directory()
    if parent is None:
        remedy = (
            "name a directory for the coordinator's journal, because you have no home directory"
        )
        raise ConfigError("--state", state, remedy)
    return parent


@contextmanager
def _new_directory(parent: Path, config: JobConfig, holder: str) -> Iterator[Path]:
    """A new directory, locked while in use; removes unused directories of the same job."""
    name = f"{plain_name(config.name)}-{plain_name(socket.gethostname())}"
    directory = parent / f"{name}-{secrets.token_hex(4)}"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        # Without this lock another launcher could remove the directory before it is locked.
        with _directory_lock(parent):
            for other in parent.glob(f"{name}-{'[0-9a-f]' * 8}"):
                _remove_unused(other, saves=config.checkpoint.directory)
            stack.enter_context(_journal_directory(JournalHold(directory, holder)))
            stack.enter_context(_directory_lock(directory))
        yield directory


@contextmanager
def _journal_directory(hold: JournalHold) -> Iterator[Path]:
    """The directory of a hold, made and emptied for a journal; removed at the end if still held.

    Raises:
        OSError: no journal can be kept there.
    """
    try:
        hold.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        hold.take()
        _empty(hold.directory)
        _check_writable(hold.directory)
        yield hold.directory
    finally:
        _remove_held(hold)


@contextmanager
def _left_directory(hold: JournalHold, keeps: Callable[[], bool]) -> Iterator[Path]:
    """The directory of a hold, with the journal that a head before this one has left there.

    Args:
        keeps: says, at the end, whether the journal is to stay.

    Raises:
        ConfigError: it is in use, or no journal can be kept there any more.
    """
    directory = hold.directory
    with ExitStack() as stack:
        try:
            stack.enter_context(_directory_lock(directory, fcntl.LOCK_NB))
            _check_writable(directory)
            hold.take()
            _renew_journal(directory)
        except BlockingIOError as error:
            raise ConfigError("--state", str(directory), "another head uses it") from error
        except OSError as error:
            raise ConfigError("--state", str(directory), _error_text(error)) from error
        try:
            yield directory
        finally:
            if not keeps():
                _remove_held(hold)


def _renew_journal(directory: Path) -> None:
    """Makes the journal a new file: the head before may live, and have the old one open."""
    journal = directory / "journal"
    if journal.exists():
        replace_file(journal, journal.read_bytes())


def left_directories(config: JobConfig, state: str) -> tuple[Path, ...]:
    """The directories in which killed launchers of a job have left journals, by any machine.

    Args:
        state: see `journal_place`.
    """
    saves = config.checkpoint.directory
    paths = [] if state or is_url(saves) else [Path(saves) / _DIRECTORY_NAME]
    parent = absolute_path(Path(state)) if state else state_directory()
    if parent is not None:
        paths += sorted(parent.glob(f"{plain_name(config.name)}-*-{'[0-9a-f]' * 8}"))
    return tuple(path for path in paths if path.is_dir())


def is_in_use(directory: Path) -> bool:
    """Whether a launcher that lives has its journal in a directory that `left_directories` names.

    The lock of the directory tells, or that of the saves that it is beside. False where there are
    no locks.
    """
    if directory.name == _DIRECTORY_NAME:
        return is_claimed(directory.parent)
    try:
        with _directory_lock(directory, fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _check_writable(directory: Path) -> None:
    """Raises an OSError if no file can be written, synced and locked in the directory."""
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
    """Removes the journal, and the directory if nothing else is in it."""
    with contextlib.suppress(OSError):
        _empty(directory)
        for path in directory.glob(f"{HOLDER_FILE}*"):
            path.unlink(missing_ok=True)
        directory.rmdir()


def _remove_held(hold: JournalHold) -> None:
    """Removes the journal as `_remove` does, unless another head has taken the directory."""
    with contextlib.suppress(OSError):
        if not hold.is_lost():
            _remove(hold.directory)


def _remove_unused(directory: Path, *, saves: str) -> None:
    with contextlib.suppress(OSError), _directory_lock(directory, fcntl.LOCK_NB):
        if not _is_anothers(directory, saves):
            _remove(directory)


def _is_anothers(directory: Path, saves: str) -> bool:
    """Whether a head with other saves has left a journal by which its run may be taken up."""
    try:
        record = read_run(directory)
    except ConfigError:  # A person has to look at it.
        return True
    if record is None or is_same_place(record.job.checkpoint.directory, saves):
        return False
    return has_nodes(directory) and may_have_nodes(record, directory)


@contextmanager
def _directory_lock(directory: Path, options: int = 0) -> Iterator[None]:
    """Holds the lock of a directory; the lock ends with this process at the latest.

    Args:
        options: further options of flock, such as LOCK_NB.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | options)
        yield
    finally:
        os.close(fd)


def _error_text(error: OSError) -> str:
    return f"{error.filename or 'it'} cannot be written to ({error.strerror})"
