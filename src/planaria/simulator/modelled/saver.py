"""A modelled rank's saves, and the disk or store that they go to.

A rank writes during training, one save at a time. A store that behaves badly for a while is slow,
refuses some requests, or leaves some unanswered until it behaves well again, if ever. A request
that was refused or not answered may have been carried out all the same.

Source: engine/saver.py; the steps come in the same order.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Final, Protocol

from planaria.core.messages import Fact, LayerFile, LayersSaved, SaveFailed
from planaria.errors import CheckpointError
from planaria.simulator.loop import Future, Loop, Process
from planaria.simulator.scenario import TIMEOUT_S, StoreTrouble

_WRITE_S: Final = 0.02  # Time to write a layer to disk.
_ANSWER_S: Final = 0.001  # Longest answer time of a store that behaves well.
_WAIT_S: Final = 1.0
_POLL_S: Final = 0.02
_LEASE_TIMEOUT_S: Final = 60.0  # Time in which a lost coordinator is replaced.


class SimulatedSaves:
    """The disk or store that keeps saves.

    Attributes:
        num_bad: number of requests that were refused, left unanswered, or answered after the
            timeout.
    """

    def __init__(self, loop: Loop, store_trouble: StoreTrouble, rng: Random) -> None:
        self.num_bad = 0
        self._loop = loop
        self._store_trouble = store_trouble
        self._rng = rng

    async def request(self, process: Process, act: Callable[[], None]) -> None:
        """Carries out a request of a process.

        Args:
            act: function that does what the request asks for.

        Raises:
            CheckpointError: the store refuses; `act` may have been called all the same.
        """
        store_trouble, rng = self._store_trouble, self._rng
        left_s = (
            store_trouble.end_s - self._loop.now_s
            if self._loop.now_s >= store_trouble.at_s
            else 0.0
        )
        kind, answer_s, share = rng.random(), rng.random(), rng.random()
        is_done = share < 0.5
        if left_s <= 0.0:
            await process.sleep(_ANSWER_S * answer_s)
            act()
            return
        answer_s *= store_trouble.late_s
        self.num_bad += answer_s >= TIMEOUT_S
        await process.sleep(answer_s * share)
        if kind < store_trouble.refuses + store_trouble.hangs:
            self.num_bad += 1
            if is_done:
                act()
            if kind < store_trouble.refuses:
                raise CheckpointError("the store refuses")
            await (process.sleep(left_s) if math.isfinite(left_s) else Future())
            if is_done:
                return
        act()
        await process.sleep(answer_s * (1.0 - share))


class SaveTarget(Protocol):
    """What a rank saves to.

    Attributes:
        saves: disk or store, which carries out requests to write.
    """

    saves: SimulatedSaves

    def write(self, iteration: int, epoch: int, layers: dict[int, int]) -> None:
        """Writes the states of layers, by number."""


class SimulatedSaver:
    """The saves of one rank.

    Args:
        report: function that sends a fact to the coordinator.
        is_member: function that tells whether its node is a member, as far as it knows.
        is_over: function that tells whether saves of an epoch are not wanted any more.

    Attributes:
        is_writing: whether a save is being written, so that no other can begin.
    """

    def __init__(
        self,
        process: Process,
        rank: int,
        target: SaveTarget,
        *,
        report: Callable[[Fact], None],
        is_member: Callable[[], bool],
        is_over: Callable[[int], bool],
    ) -> None:
        self._process = process
        self._rank = rank
        self._target = target
        self._report = report
        self._is_member = is_member
        self._is_over = is_over
        self.is_writing = False
        self._begin_s = 0.0

    async def save(self, contents: Mapping[int, int], age: int, epoch: int) -> bool:
        """Begins a save; returns False if the one before is not written yet."""
        if await self.wait_written(epoch, timeout_s=self._begin_s + _WAIT_S - self._process.now_s):
            self._begin(contents, age, epoch)
            return True
        self.report_failure(age, epoch, "the one before is not written", is_skipped=True)
        return False

    async def save_last(self, contents: Mapping[int, int], age: int, epoch: int) -> None:
        """Saves once the previous save is written, and waits until it ends or the epoch is over."""
        if await self.wait_written(epoch):
            self._begin(contents, age, epoch)
            await self.wait_written(epoch)

    async def wait_end(self, *, timeout_s: float) -> None:
        """Waits until a save that is being written ends, at most for `timeout_s`."""
        deadline_s = self._process.now_s + timeout_s
        while self.is_writing and self._process.now_s < deadline_s:
            await self._process.sleep(_POLL_S)

    async def wait_written(self, epoch: int, *, timeout_s: float = math.inf) -> bool:
        """Waits for the save that is being written.

        Returns:
            False if that takes too long or the epoch is over.
        """
        deadline_s = self._process.now_s + timeout_s
        while self.is_writing:
            if self._is_over(epoch) or self._process.now_s >= deadline_s:
                return False
            await self._process.sleep(_POLL_S)
        return True

    def report_failure(
        self, age: int, epoch: int, reason: str, *, is_skipped: bool = False
    ) -> None:
        """Reports that a save cannot be made."""
        self._report(
            SaveFailed(
                rank=self._rank, epoch=epoch, iteration=age, reason=reason, is_skipped=is_skipped
            )
        )

    def _begin(self, contents: Mapping[int, int], age: int, epoch: int) -> None:
        self.is_writing, self._begin_s = True, self._process.now_s
        self._process.spawn(self._write_out(dict(contents), age, epoch))

    async def _write_out(self, contents: dict[int, int], age: int, epoch: int) -> None:
        try:
            await self._write_layers(contents, age, epoch)
        except CheckpointError as error:
            self.report_failure(age, epoch, str(error))
        self.is_writing = False

    async def _wait_member(self) -> bool:
        """Waits until the node is a member, as Pulse.wait_member does: a node whose coordinator was
        lost gets its lease back."""
        deadline_s = self._process.now_s + _LEASE_TIMEOUT_S
        while not self._is_member() and self._process.now_s < deadline_s:
            await self._process.sleep(_POLL_S)
        return self._is_member()

    async def _write_layers(self, contents: dict[int, int], age: int, epoch: int) -> None:
        files: tuple[LayerFile, ...] = ()
        for layer, content in contents.items():
            if self._is_over(epoch):
                return
            await self._process.sleep(_WRITE_S)
            if not await self._wait_member():
                raise CheckpointError("its node's lease has run out")
            write = partial(self._target.write, age, epoch, {layer: content})
            await self._target.saves.request(self._process, write)
            files = (*files, LayerFile(layer, f"{layer}", 1, f"{content}"))
            self._report(LayersSaved(rank=self._rank, epoch=epoch, iteration=age, files=files))
