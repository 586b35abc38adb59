"""The files that a job needs on a machine: the user's modules, and what the head compares."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from planaria.core.machine_messages import SOURCES_BYTES_MAX, JobOffered, MachineReady, SourceFile
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.head.user_files import plain_name
from planaria.nodes.input_files import input_digests
from planaria.nodes.shared_saves import answer_mark, remove_answer

_REMOVE_TIMEOUT_S: Final = 2.0
_UNLOCKED_S: Final = 60.0  # An agent locks its directory right after it has made it.


class MachineFiles:
    """The files of this machine that the head compares with those of others.

    Args:
        cache: directory in which digests are kept between jobs.
        note: shows the user a text.
    """

    def __init__(self, cache: Path, note: Callable[[str], None]) -> None:
        self._cache = cache
        self._note = note
        self._run = ""
        self._digests: asyncio.Task[dict[str, str]] | None = None
        self._remove: Callable[[], None] | None = None

    async def ready(self, offer: JobOffered) -> MachineReady:
        """What the head is told of them.

        Raises:
            ConfigError: the job cannot run here.
            CheckpointError: the place of saves does not answer, or refuses.
            MemoryError: no thread could be started to ask it.
            OSError: no thread can be started.
        """
        place = offer.job.checkpoint.directory
        await self.close()
        answer = await answer_of_thread(partial(answer_mark, place, offer.mark), name="saves")
        self._remove = partial(remove_answer, place, offer.mark, answer)
        if self._run != offer.run or self._digests is None:
            self._run = offer.run
            read = partial(input_digests, offer.job, cache_directory=self._cache, note=self._note)
            self._digests = asyncio.create_task(answer_of_thread(read, name="digests"))
        # Reading goes on if the head is lost meanwhile.
        digests = await asyncio.shield(self._digests)
        return MachineReady(run=offer.run, digests=digests, answer=answer)

    async def close(self) -> None:
        """Removes what the head may not have removed."""
        if self._remove is None:
            return
        remove, self._remove = self._remove, None
        with contextlib.suppress(MemoryError, OSError):  # TimeoutError is an OSError.
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await answer_of_thread(remove, name="saves")


@contextlib.contextmanager
def modules_directory() -> Iterator[Path]:
    """A context with a private directory for the user's modules.

    An agent that is killed cannot remove its directory, so the next one on the machine does. Each
    is locked by its agent, and the kernel releases the lock when the agent ends, however that ends.
    Machines may share a temporary directory without its locks, so each has names of its own.

    Raises:
        OSError: there is no room for it.
    """
    prefix = f"planaria-modules-{plain_name(socket.gethostname())}-"
    _remove_left_directories(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # Not all file systems have locks.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(fd)


def _remove_left_directories(prefix: str) -> None:
    """Removes the directories that agents of this user have left, as far as that can be done."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if not is_own or time.time() - status.st_mtime < _UNLOCKED_S:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


def unpack_sources(sources: Sequence[SourceFile], directory: Path, *, has_code: bool) -> str:
    """Writes the user's modules into a private directory, or compares them with those here.

    Args:
        has_code: whether they are to be found here, on the path of this process.

    Returns:
        Why they cannot be used, and what to do; "": they can.
    """
    if sum(len(source.data) for source in sources) > SOURCES_BYTES_MAX:
        return f"the head sent modules of more than {SOURCES_BYTES_MAX >> 20} MiB"
    for source in sources:
        path = Path(source.path)
        if path.is_absolute() or ".." in path.parts or "\0" in source.path:
            return f"the head sent a module with the path {source.path!r}"
        if not has_code:
            target = directory / path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.write_bytes(source.data)
        elif not (here := _local_file(path)):
            return f"there is no {path} in the current directory or on PYTHONPATH (--no-code)"
        elif _sha256(here) != source.sha256:
            return f"{here} differs from the head's {path}: copy it here, or leave out --no-code"
    return ""


def _local_file(path: Path) -> Path | None:
    candidates = (Path(directory or os.getcwd()) / path for directory in ("", *sys.path))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
