"""Bytes that are copied within a node's memory, by as many threads as its memory is fast for."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np

from planaria.checkpoint.memory.version import Bytes

_PIECE_BYTES: Final = 4 << 20  # That a thread takes at a time.


class Fill(Protocol):
    """Copies bytes."""

    def __call__(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Of each pair the second array to the first."""


def fill_alone(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    """With the thread that calls."""
    for target, source in pairs:
        np.copyto(target, source)


class Filler:
    """Copies with that thread and others, which are idle but then.

    Torch would do so, too, but slower: of a thread that is not the one that computes it starts
    OpenMP's threads anew, beside those of the other (benchmarks/checkpoint.py).
    """

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._num_others), thread_name_prefix="fill")

    def __call__(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """See Fill."""
        pieces = iter(
            [
                (target[begin : begin + _PIECE_BYTES], source[begin : begin + _PIECE_BYTES])
                for target, source in pairs
                for begin in range(0, len(source), _PIECE_BYTES)
            ]
        )

        def work() -> None:
            for target, source in pieces:  # All threads take from the same.
                np.copyto(target, source)

        others = [self._pool.submit(work) for _ in range(self._num_others)]
        work()
        for other in others:
            other.result()

    def close(self) -> None:
        """Ends the other threads."""
        self._pool.shutdown()
