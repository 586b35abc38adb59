"""The coordinator's records in the store: written before they are sent, read when it restarts.

The key `leader` guards each write, so a coordinator that another one has replaced cannot write any
more. Each record is written once. A record supersedes those of its kind that nobody needs after it,
so the number of records does not grow with the age of the job.

A record that is too large for one value of the store is cut into pieces. The pieces are written
first, and the entry that stands for the record (`Pieces`) last: a reader that finds this entry
finds all pieces. The names of pieces contain the leader's term, so they never collide with those of
a leader that was killed while it wrote; the next record of the kind deletes those.

Source: docs/protocol.md, "The coordinator" and "Epochs fence".
"""

from collections.abc import AsyncIterator, Collection, Sequence
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

PIECE_BYTES: Final = 1 << 19  # Below VALUE_BYTES_MAX: a message with a value needs room for more.
_MEMBERS: Final = "members"
_OUTCOME: Final = "outcome"
_PLAN: Final = "plan"
_Kind = TypeVar("_Kind", Members, Outcome, Decision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The newest record of each kind, as a new coordinator finds them.

    Attributes:
        plan: plan of the newest decision to start an epoch; None if there was none.
    """

    members: Members
    outcome: Outcome | None
    decision: Decision | None
    progress: Progress | None
    plan: Plan | None


async def open_logbook(
    store: Store, job: str, *, lease_s: float, first_term: int = 0, piece_bytes: int = PIECE_BYTES
) -> "Logbook":
    """The logbook of a job, for a new leader; the leader before it cannot write any more.

    If two callers open it at the same time, the last one to write the key `leader` is the leader.

    Args:
        first_term: term of the leader if the store has none yet.
        piece_bytes: maximum size of a record that is not cut, and of a piece.
    """
    keys = Keys(job)
    while True:
        entry = await store.get(keys.leader)
        term = int(entry.value) + 1 if entry else first_term
        guard = Guard(keys.leader, entry.revision if entry else ABSENT)
        try:
            revision = await store.put(keys.leader, str(term).encode(), guards=(guard,))
        except ConflictError:  # Another became the leader meanwhile: succeed that one.
            continue
        fence = Guard(keys.leader, revision)
        return Logbook(
            store, keys, term=term, fence=fence, lease_s=lease_s, piece_bytes=piece_bytes
        )


class Logbook:
    """The records and leases of a job, as one leader reads and writes them."""

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
        # Keys of existing records and of their pieces, by kind and epoch.
        self._record_keys: dict[str, dict[int, list[str]]] = {_MEMBERS: {}, _OUTCOME: {}, _PLAN: {}}
        self._started = -1  # Epoch of the newest decision to start one.

    # -- records ----------------------------------------------------------------------------------

    async def has_members(self) -> bool:
        """Whether the members of any epoch are on record."""
        return bool((await self._store.range(f"{self._keys.prefix}{_MEMBERS}/")).entries)

    async def read(self) -> Records | None:
        """The newest records; None if the job has not begun."""
        await self._read_piece_keys()
        members = await self._entries(_MEMBERS)
        outcomes = await self._entries(_OUTCOME)
        decisions = await self._entries(_PLAN)
        if not members:
            return None
        progress = await self._store.get(self._keys.commit)
        decision = await self._record(decisions[-1], Decision) if decisions else None
        start = await self._newest_start(decisions, decision)
        return Records(
            members=await self._record(members[-1], Members),
            outcome=await self._record(outcomes[-1], Outcome) if outcomes else None,
            decision=decision,
            progress=decode_record(progress.value, Progress) if progress else None,
            plan=start.plan if start else None,
        )

    async def adopt(
        self, members: Members, outcome: Outcome | None, progress: Progress | None
    ) -> None:
        """Writes records that are known from another store, so that a coordinator can go on."""
        await self.record_members(members)
        if outcome is not None:
            await self._put(_OUTCOME, outcome.epoch, encode_record(outcome))
        if progress is not None:
            await self.record_progress(progress)

    async def record_members(self, members: Members) -> None:
        """Writes the members of an epoch."""
        await self._put(_MEMBERS, members.epoch, encode_record(members))

    async def record_decision(self, outcome: Outcome, decision: Decision) -> None:
        """Writes the decision, and the outcome unless an earlier leader has written it."""
        epoch = outcome.epoch
        if await self._store.get(self._keys.outcome(epoch)) is None:
            await self._put(_OUTCOME, epoch, encode_record(outcome))
        is_start = isinstance(decision.order, StartEpoch)
        await self._put(
            _PLAN, epoch, encode_record(decision), kept_epoch=-1 if is_start else self._started
        )
        if is_start:
            self._started = epoch

    async def record_progress(self, progress: Progress) -> None:
        """Writes how far the job has come."""
        data = encode_record(progress)
        await self._store.put(self._keys.commit, data, guards=(self._fence,))

    async def _put(self, kind: str, epoch: int, data: bytes, *, kept_epoch: int = -1) -> None:
        """Writes a record once; it supersedes those of its kind but that of epoch `kept_epoch`."""
        existing = self._record_keys[kind]
        key = f"{self._keys.prefix}{kind}/{epoch}"
        kept = {kept_epoch: existing[kept_epoch]} if kept_epoch in existing else {}
        old_keys = [
            name for other, names in existing.items() if other not in kept for name in names
        ]
        pieces = self._pieces_of(data)
        names = [
            self._keys.piece(kind, epoch, term=self.term, index=index)
            for index in range(len(pieces))
        ]
        for name, piece in zip(names, pieces, strict=True):
            await self._store.put(name, piece, guards=(self._fence,))
        if pieces:
            data = encode_pieces(Pieces(term=self.term, num=len(pieces)))
        guards = (self._fence, Guard(key, ABSENT))
        await self._store.put(
            key, data, guards=guards, supersedes=[n for n in old_keys if n != key]
        )
        self._record_keys[kind] = {**kept, epoch: [key, *names]}

    def _pieces_of(self, data: bytes) -> list[bytes]:
        """The pieces of a record; empty if it fits into one value."""
        size = self._piece_bytes
        if len(data) <= size:
            return []
        return [data[first : first + size] for first in range(0, len(data), size)]

    async def _read_piece_keys(self) -> None:
        """Notes all pieces, also those of records that a killed leader left unfinished."""
        prefix = self._keys.prefix + "piece/"
        for entry in (await self._store.range(prefix)).entries:
            kind, epoch, *_ = entry.key.removeprefix(prefix).split("-")
            self._record_keys[kind].setdefault(int(epoch), []).append(entry.key)

    async def _entries(self, kind: str) -> Sequence[Entry]:
        """The entries of the records of one kind, oldest first; notes their keys."""
        prefix = f"{self._keys.prefix}{kind}/"
        entries = (await self._store.range(prefix)).entries
        for entry in entries:
            epoch = int(entry.key.removeprefix(prefix))
            self._record_keys[kind].setdefault(epoch, []).append(entry.key)
        return entries

    async def _newest_start(
        self, entries: Sequence[Entry], newest: Decision | None
    ) -> StartEpoch | None:
        """The newest order to start an epoch; notes its epoch."""
        for entry in reversed(entries):
            decision = newest if entry is entries[-1] else await self._record(entry, Decision)
            if decision is not None and isinstance(decision.order, StartEpoch):
                self._started = decision.order.epoch
                return decision.order
        return None

    async def _record(self, entry: Entry, kind: type[_Kind]) -> _Kind:
        """The record of an entry, put together if it was cut into pieces."""
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
        """Grants each of these nodes a new lease, which replaces its old one."""
        keys = [self._keys.node(node) for node in nodes]
        leases = await self._store.grant_each(keys, self._lease_s, guards=(self._fence,))
        self._leases.update(zip(nodes, leases, strict=True))

    @property
    def leased_nodes(self) -> Collection[int]:
        """The nodes to which a lease was granted that was not revoked."""
        return self._leases.keys()

    async def is_leased(self, node: int) -> bool:
        """Whether a node has a lease that has not ended."""
        return await self._store.get(self._keys.node(node)) is not None

    async def renew(self, node: int) -> bool:
        """Renews a node's lease for its full time; returns False if the lease has ended."""
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
        """Yields each node whose lease ends from now on.

        If so many changes come at once that the store does not keep all of them, the leases whose
        keys are gone count as ended. A lease that ended and was granted again in between is missed.
        """
        prefix = self._keys.prefix + "node/"
        nodes: set[int] = set()
        while True:
            entries, revision = await self._store.range(prefix)
            before, nodes = nodes, {int(entry.key.removeprefix(prefix)) for entry in entries}
            for node in sorted(before - nodes):
                yield node
            try:
                async for event in self._store.watch(prefix, first_revision=revision + 1):
                    node = int(event.key.removeprefix(prefix))
                    if isinstance(event, Gone):
                        nodes.discard(node)
                        yield node
                    else:
                        nodes.add(node)
            except CompactedError:
                continue
