"""The coordinator's records in the store: written before anyone is told, read when it restarts.

Each write is guarded by the leadership, so that a coordinator whose place another has taken can
write nothing any more, and records are written once.

Source: DESIGN 4.5 and 6 (Coordination).
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from planaria.coordinator.store import ABSENT, NO_LEASE, Gone, Guard, Keys, Store
from planaria.core.messages import StartEpoch
from planaria.core.plan import Plan
from planaria.core.records import (
    Decision,
    Members,
    Outcome,
    Progress,
    Record,
    decode_record,
    encode_record,
)
from planaria.errors import ConflictError, LeaseLostError

_Kind = TypeVar("_Kind", Members, Outcome, Decision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a coordinator finds, the newest record of each kind; `plan` is that of the newest
    decision to start an epoch."""

    members: Members
    outcome: Outcome | None
    decision: Decision | None
    progress: Progress | None
    plan: Plan | None


async def opened_logbook(
    store: Store, job: str, *, lease_s: float, first_term: int = 0
) -> "Logbook":
    """The records of a job, for a new leader; the one before can write no more.

    Of two that open them at the same time the second to write is the leader.

    Args:
        first_term: of a leader who finds no other's.
    """
    keys = Keys(job)
    while True:
        entry = await store.get(keys.leader)
        term = int(entry.value) + 1 if entry else first_term
        guard = Guard(keys.leader, entry.revision if entry else ABSENT)
        try:
            revision = await store.put(keys.leader, str(term).encode(), guards=(guard,))
        except ConflictError:  # Another became the leader meanwhile, so this one comes after it.
            continue
        return Logbook(store, keys, term=term, fence=Guard(keys.leader, revision), lease_s=lease_s)


class Logbook:
    """The records and leases of one leader's time."""

    def __init__(
        self, store: Store, keys: Keys, *, term: int, fence: Guard, lease_s: float
    ) -> None:
        self.term = term
        self._store = store
        self._keys = keys
        self._fence = fence
        self._lease_s = lease_s
        self._leases: dict[int, int] = {}

    # -- records ----------------------------------------------------------------------------------

    async def read(self) -> Found | None:
        """What there is; None if the job has not begun."""
        members = await self._all("members/", Members)
        if not members:
            return None
        outcomes = await self._all("outcome/", Outcome)
        decisions = await self._all("plan/", Decision)
        progress = await self._store.get(self._keys.commit)
        starts = [d.order for d in decisions if isinstance(d.order, StartEpoch)]
        return Found(
            members=members[-1],
            outcome=outcomes[-1] if outcomes else None,
            decision=decisions[-1] if decisions else None,
            progress=decode_record(progress.value, Progress) if progress else None,
            plan=starts[-1].plan if starts else None,
        )

    async def adopt(
        self, members: Members, outcome: Outcome | None, progress: Progress | None
    ) -> None:
        """Writes what is known of another store's records, for a coordinator to go on from."""
        await self.record_members(members)
        if outcome is not None:
            await self._put(self._keys.outcome(outcome.epoch), outcome, is_new=True)
        if progress is not None:
            await self.record_progress(progress)

    async def record_members(self, members: Members) -> None:
        """Writes who belongs to an epoch."""
        await self._put(self._keys.members(members.epoch), members, is_new=True)

    async def record_decision(self, outcome: Outcome, decision: Decision) -> None:
        """Writes both; a leader before this one may have written the outcome already."""
        key = self._keys.outcome(outcome.epoch)
        if await self._store.get(key) is None:
            await self._put(key, outcome, is_new=True)
        await self._put(self._keys.plan(outcome.epoch), decision, is_new=True)

    async def record_progress(self, progress: Progress) -> None:
        """Writes how far the job has come."""
        await self._put(self._keys.commit, progress, is_new=False)

    async def _put(self, key: str, record: Record, *, is_new: bool) -> None:
        guards = (self._fence, Guard(key, ABSENT)) if is_new else (self._fence,)
        await self._store.put(key, encode_record(record), guards=guards)

    async def _all(self, kind: str, record: type[_Kind]) -> list[_Kind]:
        """The records of one kind, in the order of their epochs, as they were written."""
        found = await self._store.range(self._keys.prefix + kind)
        return [decode_record(entry.value, record) for entry in found.entries]

    # -- leases -----------------------------------------------------------------------------------

    async def grant(self, node: int) -> None:
        """Gives a node a lease of its own, in place of any before."""
        before = self._leases.get(node)
        self._leases[node] = lease = await self._store.grant(self._lease_s)
        await self._store.put(self._keys.node(node), b"", guards=(self._fence,), lease=lease)
        if before is not None:
            await self._store.revoke(before)

    async def renew(self, node: int) -> bool:
        """Gives a node's lease its whole time again; False if it has ended."""
        try:
            await self._store.keep_alive(self._leases.get(node, NO_LEASE))
        except LeaseLostError:
            return False
        return True

    async def revoke(self, node: int) -> None:
        """Ends a node's lease, if it has one."""
        lease = self._leases.pop(node, NO_LEASE)
        if lease != NO_LEASE:
            await self._store.revoke(lease)

    async def ended_leases(self) -> AsyncIterator[int]:
        """The nodes whose leases end, from now on."""
        prefix = self._keys.prefix + "node/"
        first = (await self._store.range(prefix)).revision + 1
        async for event in self._store.watch(prefix, first_revision=first):
            if isinstance(event, Gone):
                yield int(event.key.removeprefix(prefix))
