"""Keeps a directory of saves to one job at a time: its launcher claims it while the job runs.

    {directory}/.job.lock       locked by the launcher; says in words whose it is

The lock (flock) is the kernel's and ends with the process, however that ends, so a job that was
killed can be resumed at once. Nodes and the coordinator of a job claim nothing: they start after
their launcher has, wherever they run, and leave with it. In the end the file is removed, and so are
directories that were made for it if nothing was saved there.

An object store has no lock that ends with who holds it, so a URL is not claimed; what two jobs do
to each other there is in docs/ASSUMPTIONS.md.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from planaria.checkpoint.disk.storage import is_url, make_directory
from planaria.errors import ConfigError

_FILE: Final = ".job.lock"  # No save has such a name: that would begin with a letter or digit.
_TRIES_MAX: Final = 100  # Jobs that end, one after the other, while their file is opened.
_TOLD_BYTES_MAX: Final = 300


@contextmanager
def claimed(place: str, job: str, *, note: Callable[[str], None]) -> Iterator[None]:
    """No other job saves at a place meanwhile.

    Args:
        job: its name, for whoever is refused.
        note: is told where nothing keeps another job out.

    Raises:
        ConfigError: another job saves there, or the place cannot be written to.
    """
    if is_url(place):
        yield
        return
    directory = Path(place)
    _check_writable(directory)
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    with ExitStack() as held:
        held.callback(_remove_empty, made)
        descriptor = _locked(directory, note)
        held.callback(os.close, descriptor)
        held.callback(_remove_file, directory)
        _say(descriptor, job)
        yield


def _check_writable(directory: Path) -> None:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        raise _mistake(directory, f"{existing} is no directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _mistake(directory, f"{existing} cannot be written to")


def _locked(directory: Path, note: Callable[[str], None]) -> int:
    """A descriptor of the file, locked until it is closed or this process is gone."""
    for _ in range(_TRIES_MAX):
        try:
            descriptor = _opened(directory)
        except FileNotFoundError:  # A job that ended removed the directory meanwhile.
            continue
        except OSError as error:
            remedy = f"{error.filename or directory} cannot be written to: {error.strerror}"
            raise _mistake(directory, remedy) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, _TOLD_BYTES_MAX, 0).decode(errors="replace").strip()
            os.close(descriptor)
            remedy = f"{holder or 'another job'} saves there: wait until it has ended, or name "
            raise _mistake(directory, remedy + "another directory") from error
        except OSError as error:  # Not all shared file systems have locks.
            note(f"see that no other job saves in {directory}: no lock there, {error.strerror}")
            return descriptor
        if _is_there(descriptor, directory / _FILE):
            return descriptor
        os.close(descriptor)
    raise _mistake(directory, f"{directory} cannot be written to")


def _opened(directory: Path) -> int:
    make_directory(directory)
    # Not inherited: a program that this process starts may outlive it.
    return os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _is_there(descriptor: int, path: Path) -> bool:
    """Whether it is still the file of that name; a job that ends removes its own."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _say(descriptor: int, job: str) -> None:
    text = f"job {job!r} (process {os.getpid()} on {socket.gethostname()})\n"
    with suppress(OSError):  # A disk that is full is told later, with what a save takes.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _remove_file(directory: Path) -> None:
    with suppress(OSError):
        (directory / _FILE).unlink(missing_ok=True)


def _remove_empty(directories: Sequence[Path]) -> None:
    with suppress(OSError):  # Something was saved there.
        for path in directories:
            path.rmdir()


def _mistake(directory: Path, remedy: str) -> ConfigError:
    return ConfigError("checkpoint.directory", str(directory), remedy)
