"""A storage with a time limit: a request that the disk or store does not answer raises an error.

Each request is made in a thread of its own. A thread whose request is not answered in time is left
behind; it ends with the process at the latest. While one is left behind, all other requests fail at
once, so that nobody waits for the same disk again and again.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from planaria.checkpoint.disk.parts import newer_run
from planaria.checkpoint.disk.storage import Content, ContentInfo, Storage
from planaria.checkpoint.disk.tiers import Tier
from planaria.core.job import CheckpointConfig
from planaria.errors import CheckpointError, LateError

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S: Final = 10.0
_READ_BYTES_PER_S_MIN: Final = 20e6  # A layer may have gigabytes, and its disk be busy.

Answer = TypeVar("Answer")


class TimeLimitedStorage:
    """A storage whose requests raise a LateError if they are not answered in time.

    Args:
        timeout_s: time limit of a request. A read of a content that was listed gets more, by the
            content's size.
    """

    def __init__(self, storage: Storage, *, timeout_s: float) -> None:
        self._storage = storage
        self._timeout_s = timeout_s
        self._late: _TimedRequest[Any] | None = None
        self._read_s: dict[str, float] = {}  # Extra time to read each content that was listed.

    def where(self, name: str) -> str:
        return self._storage.where(name)

    def entries(self, version: str) -> dict[str, ContentInfo]:
        contents = self._answer(version, lambda: self._storage.entries(version))
        for name, entry in contents.items():
            self._read_s[name] = entry.num_bytes / _READ_BYTES_PER_S_MIN
        return contents

    def versions(self) -> list[str]:
        return self._answer("", self._storage.versions)

    def read(self, name: str) -> bytes:
        extra_s = self._read_s.get(name, 0.0)
        return self._answer(name, lambda: self._storage.read(name), extra_s=extra_s)

    def write(self, name: str, content: Content, *, may_write: Callable[[], bool]) -> None:
        self._answer(name, lambda: self._storage.write(name, content, may_write=may_write))

    def create(self, name: str, content: bytes) -> bool:
        return self._answer(name, lambda: self._storage.create(name, content))

    def remove(self, version: str, names: Sequence[str]) -> None:
        self._answer(version, lambda: self._storage.remove(version, names))

    def _answer(self, name: str, request: Callable[[], Answer], *, extra_s: float = 0.0) -> Answer:
        if self._late is not None and self._late.is_under_way:
            raise self._late.error()
        timeout_s = self._timeout_s + extra_s
        timed = _TimedRequest(request, where=self.where(name), timeout_s=timeout_s)
        try:
            return timed.answer()
        except LateError:
            self._late = timed
            raise


class _TimedRequest(Generic[Answer]):
    """A request to a disk or store, made in a thread of its own."""

    def __init__(self, request: Callable[[], Answer], *, where: str, timeout_s: float) -> None:
        self._request = request
        self._where = where
        self._timeout_s = timeout_s
        self._answers: queue.SimpleQueue[tuple[Answer] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._ask, name="time limit", daemon=True)

    def answer(self) -> Answer:
        """Makes the request and returns its answer.

        Raises:
            LateError: there is no answer in time.
            MemoryError: no thread could be started.
            BaseException: whatever the request raised.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            # The machine lacks memory for a thread, or allows no more threads.
            raise MemoryError(f"{self._where}: {error}") from error
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self.error() from None
        if isinstance(answer, BaseException):
            raise answer
        return answer[0]

    def error(self) -> LateError:
        """The error to raise as long as there is no answer."""
        return LateError(f"{self._where} did not answer within {self._timeout_s:.3g} s")

    @property
    def is_under_way(self) -> bool:
        """Whether the request is not answered yet."""
        return self._thread.is_alive()

    def _ask(self) -> None:
        try:
            self._answers.put((self._request(),))
        except BaseException as error:
            self._answers.put(error)


def answer_in_time(request: Callable[[], Answer], *, where: str, timeout_s: float) -> Answer:
    """The answer to a request to a disk, which may never answer.

    Raises:
        LateError: there is no answer in time.
        MemoryError: no thread could be started.
    """
    return _TimedRequest(request, where=where, timeout_s=timeout_s).answer()


@contextlib.contextmanager
def context_with_time_limit(
    manager: AbstractContextManager[Answer], *, where: str, timeout_s: float
) -> Iterator[Answer]:
    """The context of a manager that uses a disk, with time limits.

    Args:
        timeout_s: time limit to enter it. To leave it there is the same, or LOOK_TIMEOUT_S if that
            is shorter; a failure to leave it is only logged.

    Raises:
        LateError: it could not be entered in time.
    """
    value = answer_in_time(manager.__enter__, where=where, timeout_s=timeout_s)
    try:
        yield value
    finally:
        timeout_s = min(LOOK_TIMEOUT_S, timeout_s)
        try:
            answer_in_time(
                lambda: manager.__exit__(None, None, None), where=where, timeout_s=timeout_s
            )
        except (LateError, MemoryError, OSError) as error:
            logger.warning("%s, so files of the ended job may stay there", error)


def with_time_limit(tier: Tier, *, timeout_s: float) -> Tier:
    """The tier with a time limit for each of its requests."""
    return replace(tier, storage=TimeLimitedStorage(tier.storage, timeout_s=timeout_s))


def with_short_limit(tier: Tier, checkpoint: CheckpointConfig) -> Tier:
    """The tier with a short time limit, for a look at its versions after the job has ended."""
    return with_time_limit(tier, timeout_s=min(LOOK_TIMEOUT_S, checkpoint.timeout_s))


def discard(tier: Tier, versions: Sequence[tuple[int, int]], *, run: str = "") -> Iterator[str]:
    """Removes versions that were never published because a rank failed to write its part.

    It stops after LOOK_TIMEOUT_S. Yields a message for each reason why some of them stay.

    Args:
        versions: iteration and epoch of each version.
        run: name of the run that failed to write them: a newer one may have saves of these names,
            and then all stay.
    """
    end_s = time.monotonic() + LOOK_TIMEOUT_S
    for iteration, epoch in versions:
        if time.monotonic() > end_s:
            where = tier.storage.where("")
            yield (
                f"{where} is slow, so parts of failed saves stay there; planaria checkpoint "
                "prune removes or names them"
            )
            return
        try:
            if newer_run(tier.storage, run):
                return
            tier.discard(iteration, epoch)
        except CheckpointError as error:
            yield str(error)
