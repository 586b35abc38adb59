"""A storage that is waited for a bounded time: what a disk or store does not answer is an error.

Each request is made in a thread of its own, which is left behind if it is not answered in time; it
ends with the process. While one is left behind all others fail at once, so that nobody waits for
the same disk again and again.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from planaria.checkpoint.storage import Entry, Storage
from planaria.checkpoint.tiers import Tier
from planaria.core.job import CheckpointConfig
from planaria.errors import CheckpointError, UnreadableError

LOOK_TIMEOUT_S: Final = 10.0

Answer = TypeVar("Answer")


class Patient:
    """A storage whose requests end in time, with an UnreadableError if they have to.

    Args:
        timeout_s: for each request.
    """

    def __init__(self, storage: Storage, *, timeout_s: float) -> None:
        self._storage = storage
        self._timeout_s = timeout_s
        self._late: threading.Thread | None = None

    def where(self, name: str) -> str:
        return self._storage.where(name)

    def entries(self, version: str) -> dict[str, Entry]:
        return self._answer(lambda: self._storage.entries(version))

    def read(self, name: str) -> bytes:
        return self._answer(lambda: self._storage.read(name))

    def write(self, name: str, content: bytes, *, may_write: Callable[[], bool]) -> None:
        self._answer(lambda: self._storage.write(name, content, may_write=may_write))

    def create(self, name: str, content: bytes) -> bool:
        return self._answer(lambda: self._storage.create(name, content))

    def remove(self, version: str, names: Sequence[str]) -> None:
        self._answer(lambda: self._storage.remove(version, names))

    def _answer(self, request: Callable[[], Answer]) -> Answer:
        late = UnreadableError(f"{self.where('')} did not answer within {self._timeout_s:g} s")
        if self._late is not None and self._late.is_alive():
            raise late
        answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(request())
            except Exception as error:
                answers.put(error)

        thread = threading.Thread(target=ask, name="patience", daemon=True)
        thread.start()
        try:
            answer = answers.get(timeout=self._timeout_s)
        except queue.Empty:
            self._late = thread
            raise late from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def is_done_in_time(act: Callable[[], None], *, timeout_s: float) -> bool:
    """Does it in a thread, and whether that ended in time; it goes on behind."""
    thread = threading.Thread(target=act, name="patience", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def patient(tier: Tier, *, timeout_s: float) -> Tier:
    """The same tier; nobody waits for one of its requests for longer than this."""
    return replace(tier, storage=Patient(tier.storage, timeout_s=timeout_s))


def looked_at(tier: Tier, checkpoint: CheckpointConfig) -> Tier:
    """The same tier, for whoever asks what there is when the job has ended."""
    return patient(tier, timeout_s=min(LOOK_TIMEOUT_S, checkpoint.timeout_s))


def discard(tier: Tier, versions: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Removes what a rank wrote after another had failed to, which is no checkpoint, as long as
    the storage is quick; tells why some of it stays.

    Args:
        versions: iteration and epoch of each.
    """
    end_s = time.monotonic() + LOOK_TIMEOUT_S
    for iteration, epoch in versions:
        if time.monotonic() > end_s:
            where = tier.storage.where("")
            yield f"{where} is slow, so parts of failed saves stay: planaria checkpoint prune"
            return
        try:
            tier.discard(iteration, epoch)
        except CheckpointError as error:
            yield str(error)
