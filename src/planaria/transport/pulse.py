"""Memory that an agent shares with a worker: the node's lease, and the worker's signs of life.

How late a worker is, is told from it and from the time that the machine's host took (`CpuSteal`).

The agent makes the memory before it forks the worker, so it needs no name and vanishes with the
last of the two. Each field is one aligned word, has one writer, and is read and written as a whole:
a worker may lose its processor in the middle of a field that is written byte by byte, and the agent
would see a deadline that nobody set.

    lease_end_s   agent    end of the node's membership, by the machine's monotonic clock
    beat_s        worker   when its control thread last ran, or by when it should first run
    deadline_s    worker   when the current action is late; infinite while it waits for others
    layers        worker   first and end of the layers that it is computing, both 0 if none
"""

import math
import mmap
import os
import time
from collections import deque
from typing import Final

import psutil

LEASE_TIMEOUT_S: Final = 60.0  # Long enough for a lost coordinator to be replaced.
FIRST_BEAT_S: Final = 60.0  # A fork takes milliseconds, but seconds on a machine that many share.
_LOOK_S: Final = 0.01
_LEASE_END, _BEAT, _DEADLINE, _COMPUTING = range(4)  # Places of the words.
_LAYER_BITS: Final = 32


class Pulse:
    """The memory that one worker shares with its agent.

    Attributes:
        stack_fd: a file in memory to which the worker's Python stacks are written on SIGUSR1.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        # A view copies a word of its own size at once; `struct` would pack it byte by byte.
        self._times_s = memoryview(self._memory).cast("d")
        self._numbers = memoryview(self._memory).cast("Q")
        self.stack_fd = os.memfd_create("stack")
        self.lease_end_s = math.inf
        self._times_s[_BEAT] = time.monotonic() + FIRST_BEAT_S
        self.begin_wait()

    @property
    def lease_end_s(self) -> float:
        return self._times_s[_LEASE_END]

    @lease_end_s.setter
    def lease_end_s(self, value: float) -> None:
        self._times_s[_LEASE_END] = value

    @property
    def is_member(self) -> bool:
        """Whether the node's lease lasts, so that it may write where others read."""
        return time.monotonic() < self.lease_end_s

    def wait_member(self, *, timeout_s: float = LEASE_TIMEOUT_S) -> bool:
        """Blocks until the node has a lease, or timeout_s have passed; returns whether it has one.

        A node that was evicted gets no lease again, and ends. A node that only lost its coordinator
        gets one from the next coordinator.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.is_member and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return self.is_member

    def beat(self) -> None:
        """Notes that the worker's control thread runs."""
        self._times_s[_BEAT] = time.monotonic()

    def begin_action(self, limit_s: float) -> None:
        """Notes that an action begins that should end within limit_s."""
        self._times_s[_DEADLINE] = time.monotonic() + limit_s

    def begin_wait(self) -> None:
        """Notes that the worker now waits for others, so it has no deadline."""
        self._times_s[_DEADLINE] = math.inf

    def become_idle(self) -> None:
        """Notes that the worker computes no layer and has no deadline."""
        self.layers = (0, 0)
        self.begin_wait()

    @property
    def layers(self) -> tuple[int, int]:
        """First and end of the layers that are being computed; both 0: none are."""
        return divmod(self._numbers[_COMPUTING], 1 << _LAYER_BITS)

    @layers.setter
    def layers(self, value: tuple[int, int]) -> None:
        first_layer, end_layer = value
        self._numbers[_COMPUTING] = first_layer << _LAYER_BITS | end_layer

    def silent_s(self, now_s: float) -> float:
        """Seconds since the control thread last ran; negative before its first beat is due."""
        return now_s - self._times_s[_BEAT]

    @property
    def deadline_s(self) -> float:
        """The moment from which the current action is late; infinite while it waits for others."""
        return self._times_s[_DEADLINE]

    def read_stack(self) -> str:
        """The stacks that the worker has written so far."""
        num_bytes = os.fstat(self.stack_fd).st_size
        return os.pread(self.stack_fd, num_bytes, 0).decode(errors="replace")

    def close(self) -> None:
        """Closes the memory and the stack file in this process; the other one keeps its own."""
        self._times_s.release()
        self._numbers.release()
        self._memory.close()
        os.close(self.stack_fd)


# -- CPU steal: processor time that the host of a virtual machine gives to other machines ----------


class CpuSteal:
    """CPU steal in seconds, measured by repeated calls of `measure`.

    Each measurement counts the steal of the processor that lost most since the one before.

    Args:
        num_recent: number of the newest measurements in `recent_s`.

    Attributes:
        total_s: CPU steal since this object was made, in seconds.
    """

    def __init__(self, num_recent: int) -> None:
        self.total_s = 0.0
        self._last = _steal_by_processor()
        self._recent: deque[float] = deque(maxlen=num_recent)

    def measure(self) -> None:
        """Adds the CPU steal since the last measurement."""
        now = _steal_by_processor()
        lost_s = max((b - a for a, b in zip(self._last, now, strict=False)), default=0.0)
        self._last = now
        self._recent.append(max(0.0, lost_s))
        self.total_s += self._recent[-1]

    @property
    def recent_s(self) -> float:
        """CPU steal in the newest `num_recent` measurements, in seconds."""
        return sum(self._recent)


def _steal_by_processor() -> list[float]:
    return [times.steal for times in psutil.cpu_times(percpu=True)]
