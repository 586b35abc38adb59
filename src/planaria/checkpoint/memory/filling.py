"""Copies a layer's bytes to its host's memory, and within that memory.

Within memory, as many threads copy as the memory's speed can use.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.version import Bytes

_PIECE_BYTES: Final = 4 << 20  # A thread copies so many bytes at a time.


class Fill(Protocol):
    """Copies the second array of each pair to the first."""

    def __call__(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Returns when all pairs are copied."""


def fill_alone(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    """Copies the second array of each pair to the first, on the calling thread."""
    for target, source in pairs:
        np.copyto(target, source)


class Filler:
    """Copies with the calling thread and a pool of others, which are idle otherwise.

    Torch could copy with several threads, too, but slower: called from a thread other than the one
    that computes, it starts a second set of OpenMP threads (benchmarks/checkpoint.py).

    Args:
        num_threads: number of threads that copy, the calling one included.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._num_others), thread_name_prefix="fill")

    def __call__(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copies the second array of each pair to the first."""
        pieces = iter(
            [
                (target[begin : begin + _PIECE_BYTES], source[begin : begin + _PIECE_BYTES])
                for target, source in pairs
                for begin in range(0, len(source), _PIECE_BYTES)
            ]
        )

        def work() -> None:
            for target, source in pieces:  # All threads take from the same iterator.
                np.copyto(target, source)

        others = [self._pool.submit(work) for _ in range(self._num_others)]
        work()
        for other in others:
            other.result()

    def close(self) -> None:
        """Ends the other threads."""
        self._pool.shutdown()


class DeviceToHost(Protocol):
    """Takes the time in which bytes are copied from a device to its host's memory."""

    def __call__(self, num_bytes: int, *, is_own: bool) -> None:
        """Blocks for the time that so many bytes take.

        Args:
            is_own: whether they are of this rank's own layers, or came from another rank.
        """


def no_virtual_bytes(layer: int) -> int:
    """The virtual size of a layer that stands for itself: none."""
    del layer
    return 0


def no_device(num_bytes: int, *, is_own: bool) -> None:
    """Takes no time, for bytes that are in their host's memory already."""
    del num_bytes, is_own


def is_never_void() -> bool:
    """No, for bytes that nothing but their own process changes."""
    return False


@dataclass(frozen=True, slots=True)
class HostCopy:
    """How the bytes of a layer get into an arena, and how long that takes.

    Attributes:
        arena: memory of this node in which copies are kept.
        fill: copies the bytes of this rank's own layers.
        virtual_bytes: returns the bytes that a layer's state stands for on paced links; 0: its real
            size.
        device_to_host: takes the time in which the virtual bytes would be copied from a device to
            its host's memory.
        is_void: tells whether the bytes that were copied by now may be anything.
    """

    arena: Arena
    fill: Fill
    virtual_bytes: Callable[[int], int]
    device_to_host: DeviceToHost
    is_void: Callable[[], bool] = is_never_void
