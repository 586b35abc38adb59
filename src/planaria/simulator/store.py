"""The store of coordination under the virtual clock: the real function, with a disk that is slow.

As the embedded store (nodes/journal.py) it decides at once and tells when the disk has it. A crash
loses what the disk does not have, from some operation on.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random

from planaria.coordinator.store import (
    EMPTY,
    NO_LEASE,
    Change,
    Entry,
    Event,
    Expire,
    Grant,
    Guard,
    KeepAlive,
    Operation,
    Put,
    Range,
    Revoke,
    StoreState,
    applied,
    entries_under,
    events_since,
    reopened,
    step,
)
from planaria.errors import ConflictError, LeaseLostError
from planaria.simulator.loop import Loop, Waiting


class SimulatedStore:
    """A Store; `open` gives it to the next coordinator, `crash` ends the one before.

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
        self._now_s: Callable[[], float] = lambda: 0.0
        self._decided = self._durable = EMPTY
        self._unwritten: deque[tuple[Change, ...]] = deque()
        self._waiting: list[tuple[int, Waiting[None]]] = []
        self._generation = 0

    @property
    def state(self) -> StoreState:
        """What a crash cannot take any more."""
        return self._durable

    def open(self, now_s: Callable[[], float]) -> None:
        """The next coordinator uses it, whose clock this is."""
        self._now_s = now_s
        self._decided = reopened(self._decided, now_s=now_s())
        self._durable = reopened(self._durable, now_s=now_s())

    def crash(self) -> None:
        """Ends the process that has it open; the write under way may have reached the disk."""
        if self._unwritten and self._rng.random() < 0.5:
            self._write(self._unwritten.popleft())
        self._generation += 1
        self._unwritten.clear()
        self._waiting.clear()
        self._decided = self._durable

    async def get(self, key: str) -> Entry | None:
        """See Store."""
        return self._durable.entries.get(key)

    async def range(self, prefix: str) -> Range:
        """See Store."""
        return entries_under(self._durable, prefix)

    async def put(
        self, key: str, value: bytes, *, guards: Sequence[Guard] = (), lease: int = NO_LEASE
    ) -> int:
        """See Store."""
        return await self._do(Put(key, value, tuple(guards), lease))

    async def grant(self, ttl_s: float) -> int:
        """See Store."""
        return await self._do(Grant(ttl_s))

    async def keep_alive(self, lease: int) -> None:
        """See Store."""
        self._decided, _, _ = step(self._decided, KeepAlive(lease), self._now_s())

    async def revoke(self, lease: int) -> None:
        """See Store."""
        await self._do(Revoke(lease))

    async def expire(self) -> None:
        """Ends the leases that are due."""
        await self._do(Expire())

    async def watch(self, prefix: str, *, first_revision: int) -> AsyncIterator[Event]:
        """See Store."""
        while True:
            state = self._durable
            for event in events_since(state, prefix, first_revision=first_revision):
                yield event
            first_revision = max(first_revision, state.revision + 1)
            await self._wait_durable(state.num_changes + 1)

    async def _do(self, operation: Operation) -> int:
        try:
            self._decided, result, changes = step(self._decided, operation, self._now_s())
        except (ConflictError, LeaseLostError):
            await self._wait_durable(self._decided.num_changes)
            raise
        if changes:
            self._unwritten.append(changes)
            if len(self._unwritten) == 1:
                self._flush()
        await self._wait_durable(self._decided.num_changes)
        return result

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
        self._durable = applied(self._durable, changes, now_s=self._now_s())
        for change in changes:
            if isinstance(change, Event):
                self._written(change)

    async def _wait_durable(self, num_changes: int) -> None:
        if self._durable.num_changes < num_changes:
            waiting: Waiting[None] = Waiting()
            self._waiting.append((num_changes, waiting))
            await waiting
