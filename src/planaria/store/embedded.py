"""The embedded store: runs `step` of store.py for asynchronous callers, and has a keeper store it.

Each operation is decided at once, in order of arrival. Its result is returned, and its changes are
visible to readers and watchers, only once the changes are durable. So whatever a caller has seen
survives a crash at any instant. This module uses no event loop: only the keeper waits. The keeper
is a journal (nodes/head/journal.py) or a modelled disk (simulator/modelled/store.py).
"""

import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Protocol

from planaria.errors import ConflictError, LeaseLostError
from planaria.store.store import (
    NO_LEASE,
    Change,
    Entry,
    Event,
    Expire,
    GrantEach,
    Guard,
    KeepAlive,
    KeyRange,
    Operation,
    Put,
    Revoke,
    StoreState,
    entries_under,
    events_since,
    step,
    with_full_leases,
    with_renewed_leases,
)


class Keeper(Protocol):
    """Makes changes durable in the order in which they were decided."""

    @property
    def durable(self) -> StoreState:
        """The state that survives a crash; ignore the deadlines of its leases."""

    def keep(self, changes: Sequence[Change]) -> None:
        """Makes changes durable after all earlier ones, without waiting for it.

        Raises:
            StoreError: no more changes can be made durable.
        """

    async def wait_durable(self, num_changes: int) -> None:
        """Waits until the first num_changes changes of the store's whole life are durable.

        Raises:
            StoreError: no more changes can be made durable; these may or may not be.
        """


class EmbeddedStore:
    """A Store that goes on from a keeper's durable state, with each lease due a full TTL from now.

    Its owner must call `expire` regularly.

    Args:
        now_s: clock of the leases, in seconds.
    """

    def __init__(self, keeper: Keeper, *, now_s: Callable[[], float]) -> None:
        self._keeper = keeper
        self.recover()
        self.set_clock(now_s)

    def recover(self) -> None:
        """Goes back to the durable state; decisions that are not durable are lost."""
        self._decided_state = self._keeper.durable
        self._unreturned_leases: set[int] = set()  # New leases that no holder knows yet.

    def set_clock(self, now_s: Callable[[], float]) -> None:
        """Replaces the clock of the leases, and makes each lease due a full TTL from now."""
        self._now_s = now_s
        self._decided_state = with_full_leases(self._decided_state, now_s=now_s())

    async def get(self, key: str) -> Entry | None:
        """See Store."""
        return self._keeper.durable.entries.get(key)

    async def range(self, prefix: str) -> KeyRange:
        """See Store."""
        return entries_under(self._keeper.durable, prefix)

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        guards: Sequence[Guard] = (),
        lease: int = NO_LEASE,
        supersedes: Sequence[str] = (),
    ) -> int:
        """See Store."""
        return await self._carry_out(Put(key, value, tuple(guards), lease, tuple(supersedes)))

    async def grant_each(
        self, keys: Sequence[str], ttl_s: float, *, guards: Sequence[Guard] = ()
    ) -> Sequence[int]:
        """See Store. TTLs count from the moment of the return: the disk may be slow."""
        end = self._decided_state.newest_lease + 1 + len(keys)
        leases = range(end - len(keys), end)
        unreturned_leases = self._unreturned_leases
        unreturned_leases.update(leases)
        try:
            newest = await self._carry_out(GrantEach(tuple(keys), ttl_s, tuple(guards)))
            assert newest == end - 1
            self._renew(leases)
        finally:
            unreturned_leases.difference_update(leases)
        return leases

    async def keep_alive(self, lease: int) -> None:
        """See Store. Never waits, so that a slow disk does not make a live holder give up."""
        self._decided_state, _, _ = step(self._decided_state, KeepAlive(lease), self._now_s())

    async def revoke(self, lease: int) -> None:
        """See Store."""
        await self._carry_out(Revoke(lease))

    async def watch(self, prefix: str, *, first_revision: int) -> AsyncIterator[Event]:
        """See Store."""
        while True:
            state = self._keeper.durable
            for event in events_since(state, prefix, first_revision=first_revision):
                yield event
            first_revision = max(first_revision, state.revision + 1)
            await self._keeper.wait_durable(state.num_changes + 1)

    async def expire(self) -> None:
        """Ends the leases that are due.

        Call it after the messages that have arrived were handled: a keep-alive that arrived while
        this process was stalled is then in time.
        """
        self._renew(self._unreturned_leases)
        await self._carry_out(Expire())

    @property
    def next_deadline_s(self) -> float:
        """Time at which the next lease is due, by the store's clock; infinity without leases."""
        return min(self._decided_state.deadlines.values(), default=math.inf)

    def _renew(self, leases: Collection[int]) -> None:
        if leases:
            self._decided_state = with_renewed_leases(
                self._decided_state, leases, now_s=self._now_s()
            )

    async def _carry_out(self, operation: Operation) -> int:
        try:
            decided_state, result, changes = step(self._decided_state, operation, self._now_s())
        except (ConflictError, LeaseLostError):
            # The change that caused the refusal may not be durable yet: a crash could undo it.
            await self._keeper.wait_durable(self._decided_state.num_changes)
            raise
        self._keeper.keep(changes)
        self._decided_state = decided_state
        await self._keeper.wait_durable(decided_state.num_changes)
        return result
