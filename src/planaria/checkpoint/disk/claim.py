"""Keeps a directory of saves to one job at a time: a job's launcher claims it while the job runs.

    {directory}/.job.lock       locked by the launcher; its text names the job, the claim, and the
                                clock of the launcher's machine

The kernel releases the lock (flock) when the process ends, however that ends, so a job that was
killed can be resumed at once. If its machine has died, a file server keeps the lock for a while: 90
s with NFS. Nodes and the coordinator of a job claim nothing: they start after their launcher,
wherever they run, and end with it. When the job ends, the file is removed, and so are directories
that were made for it if nothing was saved there. Where locks do not keep other machines out, a job
whose machine was cut off may end after another one has claimed the directory: the file stays then.
A save is complete only by a hard link (storage.py), so a file system without them is refused.

An object store has no lock that is released when its holder dies, so a URL is not claimed;
docs/ASSUMPTIONS.md says what two jobs do to each other there.
"""

import fcntl
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from planaria.checkpoint.disk.storage import NO_LINKS, is_url, make_directory
from planaria.errors import ConfigError
from planaria.transport.timekeeping import clock_name

_FILE: Final = ".job.lock"  # No save has such a name: theirs begin with a letter or digit.
_PROBE: Final = ".job.probe"
# Each try can fail because a job ends and removes the file while it is being opened.
_TRIES_MAX: Final = 100
_TEXT_BYTES_MAX: Final = 1000
_CLOCK: Final = 2  # The line that names the clock.


@contextmanager
def claim(place: str, job: str, *, note: Callable[[str], None]) -> Iterator[None]:
    """A context in which no other job saves at a place; a URL is not protected.

    Args:
        job: name of the job, for the message to another job that is refused.
        note: takes a warning if the file system has no locks, so that another job is not kept out.

    Raises:
        ConfigError: another job saves there, or the place cannot be written to, or it has no hard
            links, without which no save is ever complete.
    """
    if is_url(place):
        yield
        return
    directory = Path(place)
    _check_writable(directory)
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    with ExitStack() as cleanup:
        cleanup.callback(_remove_empty, missing)
        descriptor = _lock_file(directory, note)
        cleanup.callback(os.close, descriptor)
        holder = f"job {job!r} (process {os.getpid()} on {socket.gethostname()})"
        text = f"{holder}\n{secrets.token_hex(8)}\n{clock_name()}\n".encode()
        cleanup.callback(_remove_file, directory, text)
        _write_text(descriptor, text)
        _check_links(directory)
        yield


def is_claimed(directory: Path) -> bool:
    """Whether a job that runs saves in a directory; False where there are no locks."""
    return _locked_text(directory) is not None


def distant_holder(directory: Path) -> str:
    """The job that has claimed a directory from another machine, in words; "": none has.

    That machine may have died, or have been started anew, and the file server not have noticed.
    """
    lines = (_locked_text(directory) or "").split("\n")
    return lines[0] if len(lines) > _CLOCK and lines[_CLOCK] not in ("", clock_name()) else ""


def _locked_text(directory: Path) -> str | None:
    """The text of the lock file of a job that runs; None: no job does, or there are no locks."""
    try:
        descriptor = os.open(directory / _FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _text_of(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _text_of(descriptor: int) -> str:
    return os.pread(descriptor, _TEXT_BYTES_MAX, 0).decode(errors="replace")


def _check_writable(directory: Path) -> None:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        raise _mistake(directory, f"{existing} is not a directory; name a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _mistake(directory, f"{existing} cannot be written to")


def _lock_file(directory: Path, note: Callable[[str], None]) -> int:
    """A descriptor of the lock file, which stays locked until it is closed or this process ends."""
    for _ in range(_TRIES_MAX):
        try:
            descriptor = _open_file(directory)
        except FileNotFoundError:  # A job that ended removed the directory meanwhile.
            continue
        except OSError as error:
            remedy = f"{error.filename or directory} cannot be written to: {error.strerror}"
            raise _mistake(directory, remedy) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _text_of(descriptor).partition("\n")[0].strip()
            os.close(descriptor)
            remedy = f"{holder or 'another job'} saves there; wait until it has ended, or name "
            raise _mistake(directory, remedy + "another directory") from error
        except OSError as error:  # Not all shared file systems have locks.
            note(
                f"{directory} cannot be locked ({error.strerror}); make sure that no other job "
                "saves there"
            )
            return descriptor
        if _has_name(descriptor, directory / _FILE):
            return descriptor
        os.close(descriptor)
    raise _mistake(directory, f"{directory} cannot be written to")


def _open_file(directory: Path) -> int:
    make_directory(directory)
    # O_CLOEXEC, since a program that this process starts may outlive it and would keep the lock.
    return os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _has_name(descriptor: int, path: Path) -> bool:
    """Whether the open file still has that name; a job that ends removes its lock file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _write_text(descriptor: int, text: bytes) -> None:
    with suppress(OSError):  # A save on a full disk fails later, with a message of its own.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)


def _check_links(directory: Path) -> None:
    """Raises a ConfigError if files cannot have hard links; other failures may pass."""
    probe = directory / _PROBE
    try:
        probe.unlink(missing_ok=True)  # A killed job may have left it.
        os.link(directory / _FILE, probe)
    except OSError as error:
        if error.errno in NO_LINKS:
            remedy = (
                "no save could be completed there: its file system has no hard links "
                f"({error.strerror}); name a directory of another one or, if it is a mounted "
                "object store, the URL of that, such as s3://bucket/prefix"
            )
            raise _mistake(directory, remedy) from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def _remove_file(directory: Path, text: bytes) -> None:
    """Removes the lock file if it has the text of this claim, or none since the disk was full."""
    with suppress(OSError):
        if (directory / _FILE).read_bytes() in (text, b""):
            (directory / _FILE).unlink(missing_ok=True)


def _remove_empty(directories: Sequence[Path]) -> None:
    with suppress(OSError):  # Something was saved there.
        for path in directories:
            path.rmdir()


def _mistake(directory: Path, remedy: str) -> ConfigError:
    return ConfigError("checkpoint.directory", str(directory), remedy)
