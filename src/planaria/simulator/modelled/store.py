"""The disk of the coordinator's records under the virtual clock, below the real embedded store.

Changes that come during a write share the next one, as in nodes/head/journal.py. The time of a
write grows with its bytes. A crash loses all changes that are not on the disk. A full disk writes
nothing any more: the process that has it open hears of that with the first write that fails, and
goes on in memory. A disk that hangs does not answer for some seconds and then goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from planaria.errors import StoreError
from planaria.simulator.loop import Future, Loop, Process
from planaria.store.embedded import EmbeddedStore
from planaria.store.store import (
    HISTORY_MAX,
    Change,
    Entry,
    Event,
    Gone,
    StoreState,
    state_after,
)

_FULL: Final = "the disk is full"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskModel:
    """The properties of a disk.

    Attributes:
        write_s: lower bound on the time of a write without its bytes; the upper bound is twice
            that.
        bytes_per_s: bandwidth for values.
        slow_s: upper bound on the time of a slow write without its bytes.
        piece_bytes: size above which the coordinator cuts records into pieces.
        value_bytes_max: upper bound on the size of a value of an epoch's record.
        history_max: upper bound on the number of past changes at which a watch can begin.
    """

    write_s: float = 0.0005
    bytes_per_s: float = 1e6
    slow_s: float = 0.3
    piece_bytes: int = 1 << 19
    value_bytes_max: int = 1 << 20
    history_max: int = HISTORY_MAX


def draw_disk(rng: Random) -> DiskModel:
    """The disk of a run.

    On half of the disks records have pieces of at most 500 bytes; half of the stores keep so few
    changes that a loss of several nodes at once is more than a watch can begin at.
    """
    piece_bytes = rng.choice((1 << 19, 1 << 19, 500, 200))
    return DiskModel(
        write_s=rng.choice((0.0005, 0.0005, 0.0005, 0.01, 0.45, 0.9)),
        bytes_per_s=rng.choice((1e8, 1e6, 1e5)),
        slow_s=rng.choice((0.3, 1.0, 2.0)),
        piece_bytes=piece_bytes,
        value_bytes_max=2 * piece_bytes,
        history_max=rng.choice((HISTORY_MAX, HISTORY_MAX, 4, 1)),
    )


class SimulatedDisk:
    """A Keeper; `open` gives its store to the next coordinator, `crash` ends the one before.

    Args:
        on_write: callback for each key that is written, or gone with its lease, once that is on the
            disk.
        model: properties of the disk.
        is_memory: whether it stands for memory: writes take no time, and it is never full.

    Attributes:
        model: properties of the disk.
        slow_share: share of writes that take up to `model.slow_s`, 0 to 1.
        is_full: whether the disk writes nothing any more.
    """

    def __init__(
        self,
        loop: Loop,
        rng: Random,
        on_write: Callable[[Event], None],
        *,
        model: DiskModel,
        is_memory: bool = False,
    ) -> None:
        self.model = model
        self.slow_share = 0.0
        self.is_full = False
        self._is_memory = is_memory
        self._hangs_until_s = 0.0
        self._process: Process
        self._on_refusal: Callable[[StoreError], None]
        self._loop = loop
        self._rng = rng
        self._on_write = on_write
        self._durable = StoreState(history_max=model.history_max)
        self._store = EmbeddedStore(self, now_s=lambda: 0.0)
        self._clocks: list[tuple[Process, Callable[[], float]]] = []  # Of processes that opened it.
        self._writing: list[Change] = []
        self._unwritten: list[Change] = []
        self._waiting: list[tuple[int, Future[None]]] = []
        self._generation = 0

    def open(
        self,
        process: Process,
        on_refusal: Callable[[StoreError], None],
        *,
        lease_now_s: Callable[[], float],
    ) -> EmbeddedStore:
        """The store for the next coordinator's process; an earlier process may still use it.

        Args:
            on_refusal: callback in that process for the first write that fails because the disk is
                full; later changes are kept in memory.
            lease_now_s: clock of the leases in that process.
        """
        self._process, self._on_refusal = process, on_refusal
        self._clocks.append((process, lease_now_s))
        self._store.set_clock(lease_now_s)
        return self._store

    @property
    def is_writing(self) -> bool:
        """Whether a write is in progress."""
        return bool(self._writing)

    def crash(self) -> None:
        """Drops what is not on the disk; the write in progress may have reached it or not."""
        if self._writing and self._rng.random() < 0.5 and not self.is_full:
            self._write(self._writing)
        self._generation += 1
        self._writing, self._unwritten = [], []
        self._waiting.clear()
        self._store.recover()
        # An earlier process that stood still, and was to be replaced, may still go on.
        self._clocks = [(process, now_s) for process, now_s in self._clocks if process.is_alive]
        if self._clocks:
            self._store.set_clock(self._clocks[-1][1])

    def fill(self) -> None:
        """Fills the disk: no write, the current one included, succeeds any more."""
        self.is_full = True

    def hang(self, duration_s: float) -> None:
        """Delays the current write and later ones until a time is over."""
        self._hangs_until_s = max(self._hangs_until_s, self._loop.now_s + duration_s)

    @property
    def durable(self) -> StoreState:
        """See Keeper."""
        return self._durable

    def keep(self, changes: Sequence[Change]) -> None:
        """See Keeper."""
        for change in changes:
            self._check_size(change)
        self._unwritten += changes
        if self._unwritten and not self._writing:
            self._flush()

    async def wait_durable(self, num_changes: int) -> None:
        """See Keeper."""
        if self._durable.num_changes >= num_changes:
            return
        waiting: Future[None] = Future()
        self._waiting.append((num_changes, waiting))
        await waiting

    def _check_size(self, change: Change) -> None:
        if isinstance(change, Entry) and change.key.rsplit("/", 2)[1] != "simulated":
            assert len(change.value) <= self.model.value_bytes_max, change.key

    def _flush(self) -> None:
        self._writing, self._unwritten = self._unwritten, []
        generation = self._generation
        self._loop.after(self._write_s(), lambda: self._on_flush(generation))

    def _write_s(self) -> float:
        """The time of the current write."""
        if self._is_memory:
            return 0.0
        model = self.model
        delay_s = model.write_s * (1.0 + self._rng.random())
        if self.slow_share and self._rng.random() < self.slow_share:
            delay_s = max(delay_s, self._rng.random() * model.slow_s)
        num_bytes = sum(len(change.value) for change in self._writing if isinstance(change, Entry))
        return delay_s + num_bytes / model.bytes_per_s

    def _on_flush(self, generation: int) -> None:
        if generation != self._generation:
            return
        left_s = self._hangs_until_s - self._loop.now_s
        if left_s > 0.0 and not self._is_memory:
            self._loop.after(left_s, lambda: self._on_flush(generation))
        elif self.is_full and not self._is_memory:
            self._process.call(lambda: self._refuse(generation))
        else:
            self._finish_write()

    def _refuse(self, generation: int) -> None:
        """Tells the process that has the disk open, then goes on in memory."""
        if generation == self._generation:
            self._on_refusal(StoreError(_FULL))
            self._is_memory = True
            self._finish_write()

    def _finish_write(self) -> None:
        changes, self._writing = self._writing, []
        self._write(changes)
        if self._unwritten:
            self._flush()
        finished = [wait for wait in self._waiting if wait[0] <= self._durable.num_changes]
        self._waiting = [wait for wait in self._waiting if wait[0] > self._durable.num_changes]
        for _, future in finished:
            future.resolve(None)

    def _write(self, changes: Sequence[Change]) -> None:
        self._durable = state_after(self._durable, changes, now_s=0.0)
        for change in changes:
            if isinstance(change, Entry | Gone):
                self._on_write(change)
