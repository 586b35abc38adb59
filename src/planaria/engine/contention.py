"""Processes that compute the same as the measuring process, to compete with it for processors.

They compete for processors, caches and memory as the ranks of a training job do. The measurement
does not depend on them: it never waits for them, their output is thrown away, and if one cannot
start or ends early, fewer compete.
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
    """Runs the body of the `with` in `num_others` forked processes too; they end with the body.

    Args:
        num_others: number of processes besides this one.
    """

    def __init__(self, num_others: int) -> None:
        self._num_others = num_others
        self._others: list[int] = []
        self._is_other = False
        self._num_done = 0
        # The number of `repeat` calls that the measuring process has completed.
        self._shared = mmap.mmap(-1, _COUNT.size)

    def __enter__(self) -> Self:
        own = os.getpid()
        for _ in range(self._num_others):
            try:
                pid = os.fork()
            except OSError as error:
                logger.info("layers are measured while fewer other processes compute: %s", error)
                break
            if pid == 0:
                try:
                    self._begin_other(own)
                except BaseException:  # Only one process may go on as the measuring one.
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
            os.kill(pid, signal.SIGKILL)  # Not reaped yet, so the pid cannot have been reused.
            os.waitpid(pid, 0)
        self._shared.close()

    def repeat(self, run: Callable[[], _T], *, times: int) -> list[_T]:
        """The results of `times` runs after a warm-up run; the other processes run it meanwhile."""
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
