"""Bugs to plant in what a coordinator reads and writes: saves, records, and the watch of leases."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from planaria.coordinator.commands import LeaseExpired
from planaria.coordinator.leadership import Leadership
from planaria.errors import CompactedError
from planaria.simulator.modelled import leader
from planaria.simulator.modelled.leader import SimulatedCoordinator, _AgentEndpoint
from planaria.store import logbook
from planaria.store.logbook import Logbook
from planaria.store.store import Gone


def saves_hold_up_the_coordinator(patch: pytest.MonkeyPatch) -> None:
    """It does nothing else while a slow store answers."""
    real = SimulatedCoordinator._request

    async def request(self: SimulatedCoordinator, act: Callable[[], None]) -> bool:
        late_s = self._launcher.saves._store_trouble.late_s
        if late_s:
            self.process.stop()
            self._launcher.loop.after(late_s, self.process.resume)
        return await real(self, act)

    patch.setattr(SimulatedCoordinator, "_request", request)


def records_are_not_cut(patch: pytest.MonkeyPatch) -> None:
    """A record is one value, however long."""
    real = logbook.open_logbook

    async def open_logbook(*arguments: Any, piece_bytes: int, **options: Any) -> Logbook:
        return await real(*arguments, piece_bytes=1000 * piece_bytes, **options)

    patch.setattr(leader, "open_logbook", open_logbook)


def a_short_history_ends_the_job(patch: pytest.MonkeyPatch) -> None:
    """More leases change at once than the store keeps changes."""
    patch.setattr(logbook, "CompactedError", ZeroDivisionError)


def leases_that_ended_unseen_are_missed(patch: pytest.MonkeyPatch) -> None:
    """A watch that begins anew does not ask which keys are gone."""

    async def ended_leases(self: Logbook) -> AsyncIterator[int]:
        prefix = self._keys.prefix + "node/"
        while True:
            _, revision = await self._store.range(prefix)
            try:
                async for event in self._store.watch(prefix, first_revision=revision + 1):
                    if isinstance(event, Gone):
                        yield int(event.key.removeprefix(prefix))
            except CompactedError:
                continue

    patch.setattr(Logbook, "ended_leases", ended_leases)


def leases_begin_before_anybody_is_served(patch: pytest.MonkeyPatch) -> None:
    """On a slow disk they run out while the coordinator reads its records."""

    async def begin_leases(self: Leadership[_AgentEndpoint]) -> None:
        store: Any = self._logbook._store
        await store.expire()
        for node in self.state.nodes if self._is_restored else ():
            if not await self._logbook.is_leased(node):
                self._effects.queue(LeaseExpired(node))

    patch.setattr(Leadership, "begin_leases", begin_leases)
