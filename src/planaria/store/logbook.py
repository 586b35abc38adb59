"""The coordinator's records in the store: written before anyone is told, read when it restarts.

Each write is guarded by the leadership, so that a coordinator whose place another has taken can
write nothing any more, and records are written once. A record supersedes those of its kind that
nobody needs after it, so what there is to read does not grow with the age of the job.

A record that is too large for one value of the store is cut into pieces. They are written first,
and what stands for the record (`Pieces`) last: who finds that finds all of them. A leader names its
pieces by its term, so it never meets those of one that was killed while it wrote; they go with the
next record of their kind.

Source: DESIGN 4.5 and 6 (Coordination).
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from planaria.core.messages import StartEpoch
from planaria.core.plan import Plan
from planaria.core.records import (
    Decision,
    Members,
    Outcome,
    Pieces,
    Progress,
    decode_pieces,
    decode_record,
    encode_pieces,
    encode_record,
)
from planaria.errors import CompactedError, ConflictError, LeaseLostError
from planaria.store.store import ABSENT, NO_LEASE, Entry, Gone, Guard, Keys, Store

PIECE_BYTES: Final = 1 << 19  # A message that carries a whole value has room for more.
_MEMBERS: Final = "members"
_OUTCOME: Final = "outcome"
_PLAN: Final = "plan"
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
    store: Store, job: str, *, lease_s: float, first_term: int = 0, piece_bytes: int = PIECE_BYTES
) -> "Logbook":
    """The records of a job, for a new leader; the one before can write no more.

    Of two that open them at the same time the second to write is the leader.

    Args:
        first_term: of a leader who finds no other's.
        piece_bytes: a larger record is cut into pieces.
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
        fence = Guard(keys.leader, revision)
        return Logbook(
            store, keys, term=term, fence=fence, lease_s=lease_s, piece_bytes=piece_bytes
        )


class Logbook:
    """The records and leases of one leader's time."""

    def __init__(
        self, store: Store, keys: Keys, *, term: int, fence: Guard, lease_s: float, piece_bytes: int
    ) -> None:
        self.term = term
        self._store = store
        self._keys = keys
        self._fence = fence
        self._lease_s = lease_s
        self._piece_bytes = piece_bytes
        self._leases: dict[int, int] = {}
        # The keys of the records that are there, and of pieces, by kind and epoch.
        self._there: dict[str, dict[int, list[str]]] = {_MEMBERS: {}, _OUTCOME: {}, _PLAN: {}}
        self._started = -1  # The epoch of the newest decision to start one.

    # -- records ----------------------------------------------------------------------------------

    async def read(self) -> Found | None:
        """What there is; None if the job has not begun."""
        await self._note_pieces()
        members = await self._entries(_MEMBERS)
        outcomes = await self._entries(_OUTCOME)
        decisions = await self._entries(_PLAN)
        if not members:
            return None
        progress = await self._store.get(self._keys.commit)
        decision = await self._record(decisions[-1], Decision) if decisions else None
        start = await self._newest_start(decisions, decision)
        return Found(
            members=await self._record(members[-1], Members),
            outcome=await self._record(outcomes[-1], Outcome) if outcomes else None,
            decision=decision,
            progress=decode_record(progress.value, Progress) if progress else None,
            plan=start.plan if start else None,
        )

    async def adopt(
        self, members: Members, outcome: Outcome | None, progress: Progress | None
    ) -> None:
        """Writes what is known of another store's records, for a coordinator to go on from."""
        await self.record_members(members)
        if outcome is not None:
            await self._put(_OUTCOME, outcome.epoch, encode_record(outcome))
        if progress is not None:
            await self.record_progress(progress)

    async def record_members(self, members: Members) -> None:
        """Writes who belongs to an epoch."""
        await self._put(_MEMBERS, members.epoch, encode_record(members))

    async def record_decision(self, outcome: Outcome, decision: Decision) -> None:
        """Writes both; a leader before this one may have written the outcome already."""
        epoch = outcome.epoch
        if await self._store.get(self._keys.outcome(epoch)) is None:
            await self._put(_OUTCOME, epoch, encode_record(outcome))
        is_start = isinstance(decision.order, StartEpoch)
        await self._put(
            _PLAN, epoch, encode_record(decision), spared=-1 if is_start else self._started
        )
        if is_start:
            self._started = epoch

    async def record_progress(self, progress: Progress) -> None:
        """Writes how far the job has come."""
        data = encode_record(progress)
        await self._store.put(self._keys.commit, data, guards=(self._fence,))

    async def _put(self, kind: str, epoch: int, data: bytes, *, spared: int = -1) -> None:
        """Writes a record, once, in place of those of its kind, but for one that is spared."""
        there = self._there[kind]
        key = f"{self._keys.prefix}{kind}/{epoch}"
        kept = {spared: there[spared]} if spared in there else {}
        old = [name for other, names in there.items() if other not in kept for name in names]
        pieces = self._cut(data)
        names = [
            self._keys.piece(kind, epoch, term=self.term, index=index)
            for index in range(len(pieces))
        ]
        for name, piece in zip(names, pieces, strict=True):
            await self._store.put(name, piece, guards=(self._fence,))
        if pieces:
            data = encode_pieces(Pieces(term=self.term, num=len(pieces)))
        guards = (self._fence, Guard(key, ABSENT))
        await self._store.put(key, data, guards=guards, supersedes=[n for n in old if n != key])
        self._there[kind] = {**kept, epoch: [key, *names]}

    def _cut(self, data: bytes) -> list[bytes]:
        """The pieces of a record; none if it is small enough."""
        size = self._piece_bytes
        if len(data) <= size:
            return []
        return [data[first : first + size] for first in range(0, len(data), size)]

    async def _note_pieces(self) -> None:
        """Notes all pieces, also of records that a leader was killed with."""
        prefix = self._keys.prefix + "piece/"
        for entry in (await self._store.range(prefix)).entries:
            kind, epoch, *_ = entry.key.removeprefix(prefix).split("-")
            self._there[kind].setdefault(int(epoch), []).append(entry.key)

    async def _entries(self, kind: str) -> Sequence[Entry]:
        """What stands for the records of one kind, in the order in which they were written."""
        prefix = f"{self._keys.prefix}{kind}/"
        entries = (await self._store.range(prefix)).entries
        for entry in entries:
            epoch = int(entry.key.removeprefix(prefix))
            self._there[kind].setdefault(epoch, []).append(entry.key)
        return entries

    async def _newest_start(
        self, entries: Sequence[Entry], newest: Decision | None
    ) -> StartEpoch | None:
        """The newest order to start an epoch, and notes which it is."""
        for entry in reversed(entries):
            decision = newest if entry is entries[-1] else await self._record(entry, Decision)
            if decision is not None and isinstance(decision.order, StartEpoch):
                self._started = decision.order.epoch
                return decision.order
        return None

    async def _record(self, entry: Entry, kind: type[_Kind]) -> _Kind:
        """The record that an entry is, or stands for."""
        pieces = decode_pieces(entry.value)
        if pieces is None:
            return decode_record(entry.value, kind)
        name, epoch = entry.key.rsplit("/", 2)[-2:]
        data = b""
        for index in range(pieces.num):
            key = self._keys.piece(name, int(epoch), term=pieces.term, index=index)
            piece = await self._store.get(key)
            assert piece is not None, key
            data += piece.value
        return decode_record(data, kind)

    # -- leases -----------------------------------------------------------------------------------

    async def grant(self, nodes: Sequence[int]) -> None:
        """Gives each of these nodes a lease of its own, in place of any before."""
        keys = [self._keys.node(node) for node in nodes]
        leases = await self._store.grant_each(keys, self._lease_s, guards=(self._fence,))
        self._leases.update(zip(nodes, leases, strict=True))

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
        """The nodes whose leases end, from now on.

        Where so much changes at once that the store does not keep all of it, those are taken for
        ended whose keys are not there any more. That a node was away in between is not seen then.
        """
        prefix = self._keys.prefix + "node/"
        there: set[int] = set()
        while True:
            entries, revision = await self._store.range(prefix)
            before, there = there, {int(entry.key.removeprefix(prefix)) for entry in entries}
            for node in sorted(before - there):
                yield node
            try:
                async for event in self._store.watch(prefix, first_revision=revision + 1):
                    node = int(event.key.removeprefix(prefix))
                    if isinstance(event, Gone):
                        there.discard(node)
                        yield node
                    else:
                        there.add(node)
            except CompactedError:
                continue
