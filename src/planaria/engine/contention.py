"""Other processes that compute what this one measures, so that they compete for processors, caches
and memory as the ranks of a job do that trains.

Nothing depends on them: they are never waited for, what they print is thrown away, and if one of
them cannot start or ends, fewer compete.
"""

import ctypes
import logging
import mmap
import os
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, NoReturn, Self, TypeVar

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_COUNT: Final = struct.Struct("@q")

_T = TypeVar("_T")


class Contention:
    """The body of the `with` is run by so many other processes, too; they end where it does."""

    def __init__(self, num_others: int) -> None:
        self._num_others = num_others
        self._others: list[int] = []
        self._is_other = False
        self._num_done = 0
        # How many `repeat`s the process that measures is through with.
        self._shared = mmap.mmap(-1, _COUNT.size)

    def __enter__(self) -> Self:
        own = os.getpid()
        for _ in range(self._num_others):
            try:
                pid = os.fork()
            except OSError as error:
                logger.info("layers are measured beside fewer others: %s", error)
                break
            if pid == 0:
                try:
                    self._begin_other(own)
                except BaseException:  # Two must not go on as the one that measures.
                    self._end_other()
                break
            self._others.append(pid)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_other:
            self._end_other()
        for pid in self._others:
            os.kill(pid, signal.SIGKILL)  # Not waited for yet, so the number is its own.
            os.waitpid(pid, 0)
        self._shared.close()

    def repeat(self, run: Callable[[], _T], *, times: int) -> list[_T]:
        """What the runs return, after a first one that warms up; the others run it meanwhile."""
        first = run()
        self._num_done += 1
        if self._is_other:
            while _COUNT.unpack_from(self._shared)[0] < self._num_done:
                run()
            return [first]
        results = [run() for _ in range(times)]
        _COUNT.pack_into(self._shared, 0, self._num_done)
        return results

    def _begin_other(self, parent: int) -> None:
        self._is_other, self._others = True, []
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            self._end_other()
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in (1, 2):
                os.dup2(nowhere, descriptor)

    def _end_other(self) -> NoReturn:
        os._exit(0)
