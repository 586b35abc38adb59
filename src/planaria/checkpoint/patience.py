"""A storage that is waited for a bounded time: what a disk or store does not answer is an error.

Each request is made in a thread of its own, which is left behind if it is not answered in time; it
ends with the process. While one is left behind all others fail at once, so that nobody waits for
the same disk again and again.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

from planaria.checkpoint.storage import Entry, Storage
from planaria.checkpoint.tiers import Tier
from planaria.core.job import CheckpointConfig
from planaria.errors import UnreadableError

LOOK_TIMEOUT_S: Final = 10.0
_READ_BYTES_PER_S_MIN: Final = 20e6  # A layer may have gigabytes, and its disk be busy.

Answer = TypeVar("Answer")


class Patient:
    """A storage whose requests end in time, with an UnreadableError if they have to.

    Args:
        timeout_s: for each request, without what it takes to read the bytes that were listed.
    """

    def __init__(self, storage: Storage, *, timeout_s: float) -> None:
        self._storage = storage
        self._timeout_s = timeout_s
        self._late: threading.Thread | None = None
        self._read_s: dict[str, float] = {}  # At most.

    def where(self, name: str) -> str:
        return self._storage.where(name)

    def entries(self, version: str) -> dict[str, Entry]:
        found = self._answer(lambda: self._storage.entries(version))
        for name, entry in found.items():
            self._read_s[name] = entry.num_bytes / _READ_BYTES_PER_S_MIN
        return found

    def read(self, name: str) -> bytes:
        more_s = self._read_s.get(name, 0.0)
        return self._answer(lambda: self._storage.read(name), more_s=more_s)

    def write(self, name: str, content: bytes, *, may_write: Callable[[], bool]) -> None:
        self._answer(lambda: self._storage.write(name, content, may_write=may_write))

    def create(self, name: str, content: bytes) -> bool:
        return self._answer(lambda: self._storage.create(name, content))

    def remove(self, version: str, names: Sequence[str]) -> None:
        self._answer(lambda: self._storage.remove(version, names))

    def _answer(self, request: Callable[[], Answer], *, more_s: float = 0.0) -> Answer:
        timeout_s = self._timeout_s + more_s
        late = UnreadableError(f"{self.where('')} did not answer within {timeout_s:.3g} s")
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
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            self._late = thread
            raise late from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def in_time(act: Callable[[], None]) -> None:
    """Has a disk tidied up where a job ends, and waits for that no longer than is worth it.

    What the disk refuses, or does not do by then, is left to whoever comes next.
    """

    def try_to() -> None:
        with suppress(OSError):
            act()

    thread = threading.Thread(target=try_to, name="tidying", daemon=True)
    thread.start()
    thread.join(timeout=LOOK_TIMEOUT_S)


def patient(tier: Tier, *, timeout_s: float) -> Tier:
    """The same tier; nobody waits for one of its requests for longer than this."""
    return replace(tier, storage=Patient(tier.storage, timeout_s=timeout_s))


def looked_at(tier: Tier, checkpoint: CheckpointConfig) -> Tier:
    """The same tier, for whoever asks what there is when the job has ended."""
    return patient(tier, timeout_s=min(LOOK_TIMEOUT_S, checkpoint.timeout_s))
