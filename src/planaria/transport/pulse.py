"""Memory that an agent shares with one of its workers: who lives, who moves, who may write.

The agent makes it before it forks the worker, so it needs no name and goes with the last of the
two. Each field has one writer, and a field is one aligned word.

    lease_end_s   agent    until when, by the machine's monotonic clock, the node is a member
    beat_s        worker   when its control thread last ran, or by when it should have begun to
    deadline_s    worker   when the action under way is late; infinite while it waits for others
    layers        worker   first and end of those that it is computing, both 0 if it is not
"""

import math
import mmap
import os
import struct
import time
from typing import Final

LEASE_TIMEOUT_S: Final = 60.0  # For a coordinator that was lost to be there again.
FIRST_BEAT_S: Final = 60.0  # A fork takes milliseconds, on a machine that many share seconds.
_WORD: Final = struct.Struct("=d")
_LOOK_S: Final = 0.01
_LAYERS: Final = struct.Struct("=II")
_LEASE_END, _BEAT, _DEADLINE, _COMPUTING = 0, 8, 16, 24


class Pulse:
    """One worker's shared memory.

    Attributes:
        stack_fd: a file in memory to which the worker's Python stacks are written on SIGUSR1.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.stack_fd = os.memfd_create("stack")
        self.lease_end_s = math.inf
        self._write(_BEAT, time.monotonic() + FIRST_BEAT_S)
        self.wait()

    @property
    def lease_end_s(self) -> float:
        return self._read(_LEASE_END)

    @lease_end_s.setter
    def lease_end_s(self, value: float) -> None:
        self._write(_LEASE_END, value)

    @property
    def is_member(self) -> bool:
        """Whether the node may still write where others read."""
        return time.monotonic() < self.lease_end_s

    def wait_member(self, *, timeout_s: float = LEASE_TIMEOUT_S) -> bool:
        """Whether the node is a member, or gets its lease back in time.

        One that is evicted does not, and ends; one whose coordinator was lost does.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.is_member and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return self.is_member

    def beat(self) -> None:
        """The worker's control thread runs."""
        self._write(_BEAT, time.monotonic())

    def act(self, limit_s: float) -> None:
        """An action begins that should end within limit_s."""
        self._write(_DEADLINE, time.monotonic() + limit_s)

    def wait(self) -> None:
        """What follows takes as long as others take."""
        self._write(_DEADLINE, math.inf)

    def rest(self) -> None:
        """Nothing is being computed, and what follows takes as long as it takes."""
        self.layers = (0, 0)
        self.wait()

    @property
    def layers(self) -> tuple[int, int]:
        """First and end of the layers that are being computed, both 0 if none are."""
        first_layer, end_layer = _LAYERS.unpack_from(self._memory, _COMPUTING)
        return int(first_layer), int(end_layer)

    @layers.setter
    def layers(self, value: tuple[int, int]) -> None:
        _LAYERS.pack_into(self._memory, _COMPUTING, *value)

    def silent_s(self, now_s: float) -> float:
        """For how long the control thread has not run; negative while its first beat has time."""
        return now_s - self._read(_BEAT)

    @property
    def deadline_s(self) -> float:
        """When the action under way takes too long; infinite while it waits for others."""
        return self._read(_DEADLINE)

    def read_stack(self) -> str:
        """The stacks that the worker has written so far."""
        num_bytes = os.fstat(self.stack_fd).st_size
        return os.pread(self.stack_fd, num_bytes, 0).decode(errors="replace")

    def close(self) -> None:
        """Gives the memory back; the other process keeps its own view."""
        self._memory.close()
        os.close(self.stack_fd)

    def _read(self, offset: int) -> float:
        value: float = _WORD.unpack_from(self._memory, offset)[0]
        return value

    def _write(self, offset: int, value: float) -> None:
        _WORD.pack_into(self._memory, offset, value)
