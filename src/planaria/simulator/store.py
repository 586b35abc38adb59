"""The disk of coordination under the virtual clock: the embedded store is the real one, it is slow.

A crash loses what it does not have, from some change on.
"""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from planaria.coordinator.embedded import EmbeddedStore
from planaria.coordinator.store import EMPTY, Change, Event, StoreState, applied
from planaria.simulator.loop import Loop, Waiting


class SimulatedDisk:
    """A Keeper; `open` gives its store to the next coordinator, `crash` ends the one before.

    Args:
        written: is given each change of a key when it is on the disk.

    Attributes:
        write_s: that the disk takes, at least; up to twice that.
        slow_share: of writes that take up to slow_s.
    """

    def __init__(self, loop: Loop, rng: Random, written: Callable[[Event], None]) -> None:
        self.write_s = 0.0005
        self.slow_share = 0.0
        self.slow_s = 0.3
        self._loop = loop
        self._rng = rng
        self._written = written
        self._durable = EMPTY
        self._store = EmbeddedStore(self, now_s=lambda: 0.0)
        self._unwritten: deque[tuple[Change, ...]] = deque()
        self._waiting: list[tuple[int, Waiting[None]]] = []
        self._generation = 0

    def open(self, now_s: Callable[[], float]) -> EmbeddedStore:
        """The store for the next coordinator, whose clock this is; one before may still use it."""
        self._store.set_clock(now_s)
        return self._store

    def crash(self) -> None:
        """Ends the process that has it open; the write under way may have reached the disk."""
        if self._unwritten and self._rng.random() < 0.5:
            self._write(self._unwritten.popleft())
        self._generation += 1
        self._unwritten.clear()
        self._waiting.clear()
        self._store.recover()

    @property
    def durable(self) -> StoreState:
        """See Keeper."""
        return self._durable

    def keep(self, changes: Sequence[Change]) -> None:
        """See Keeper."""
        if changes:
            self._unwritten.append(tuple(changes))
            if len(self._unwritten) == 1:
                self._flush()

    async def wait_durable(self, num_changes: int) -> None:
        """See Keeper."""
        if self._durable.num_changes < num_changes:
            waiting: Waiting[None] = Waiting()
            self._waiting.append((num_changes, waiting))
            await waiting

    def _flush(self) -> None:
        delay_s = self.write_s * (1.0 + self._rng.random())
        if self.slow_share and self._rng.random() < self.slow_share:
            delay_s = self._rng.random() * self.slow_s
        generation = self._generation
        self._loop.after(delay_s, lambda: self._flushed(generation))

    def _flushed(self, generation: int) -> None:
        if generation != self._generation:
            return
        self._write(self._unwritten.popleft())
        if self._unwritten:
            self._flush()
        done = [one for one in self._waiting if one[0] <= self._durable.num_changes]
        self._waiting = [one for one in self._waiting if one[0] > self._durable.num_changes]
        for _, waiting in done:
            waiting.resolve(None)

    def _write(self, changes: tuple[Change, ...]) -> None:
        self._durable = applied(self._durable, changes, now_s=0.0)
        for change in changes:
            if isinstance(change, Event):
                self._written(change)
