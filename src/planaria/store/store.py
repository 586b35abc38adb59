"""The coordination store: a few keys that outlive the processes that wrote them.

`Store` is the interface for the coordinator and its callers. The embedded store is a function,
`step`, from (state, operation, now) to (state, result, changes). It uses no clock, thread or file,
so a simulator can run it under a virtual clock. A change is a fact, not a request: applying all
changes in order (`state_after`) gives the state, so a journal of them (nodes/head/journal.py) is
the whole store.

    put        writes a value at a key if every guard holds: both compare-and-set and fencing
    lease      a key bound to a lease is deleted if its holder is silent for the lease's TTL
    watch      yields every change under a prefix from a revision on, in order, once

Each change of a key has a revision of its own, one above that of the change before. A key is
deleted when its lease ends, or by a write that supersedes it, in the same step. So a store holds
only the newest records, however old the job is, and it never loses the last record of a kind.

A lease lives at least for its TTL. It ends when the operation `Expire` says so, not at an exact
time: while the store does not run, no lease ends.

Source: docs/protocol.md, "The coordinator" and "Epochs fence"; the operations are those of etcd.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

import msgspec

from planaria.errors import CompactedError, ConflictError, LeaseLostError

ABSENT: Final = 0  # The revision of a key that does not exist.
NO_LEASE: Final = 0
VALUE_BYTES_MAX: Final = 1 << 20  # etcd refuses requests above 1.5 MiB.
HISTORY_MAX: Final = 1000  # Maximum number of past changes at which a watch can begin,
HISTORY_BYTES_MAX: Final = 1 << 20  # and maximum size of their values together.


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition of a write: the key must be at this revision; ABSENT: must not exist.

    A guard on the written key makes the write a compare-and-set. A guard on another key is a fence:
    a leader guards its writes with the key `leader`, a node with its own leased key, each at the
    revision of its own put.
    """

    key: str
    revision: int


class Entry(msgspec.Struct, frozen=True, tag="put"):
    """A key has this value since this revision, until its lease ends; NO_LEASE: no end."""

    key: str
    value: bytes
    revision: int
    lease: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """A key was deleted because its lease ended."""

    key: str
    revision: int


class Superseded(msgspec.Struct, frozen=True, tag="superseded"):
    """A key was deleted by a write that supersedes it."""

    key: str
    revision: int


class LeaseGranted(msgspec.Struct, frozen=True, tag="granted"):
    """A lease was granted."""

    lease: int
    ttl_s: float


class LeaseEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A lease ran out, was revoked or was replaced; its keys are deleted in the same step."""

    lease: int


Event = Entry | Gone | Superseded
Change = Event | LeaseGranted | LeaseEnded


class KeyRange(NamedTuple):
    """Entries under a prefix, oldest write first; watch from `revision` + 1 for later changes."""

    entries: tuple[Entry, ...]
    revision: int


class Store(Protocol):
    """The operations that coordination needs; each happens completely or not at all.

    An operation that is cancelled, or fails with a StoreError other than ConflictError and
    LeaseLostError, may or may not have happened: read before you write again. Whatever a reader has
    seen survives every crash.
    """

    async def get(self, key: str) -> Entry | None:
        """The entry of a key."""

    async def range(self, prefix: str) -> KeyRange:
        """All entries whose keys begin with the prefix, in one consistent state."""

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        guards: Sequence[Guard] = (),
        lease: int = NO_LEASE,
        supersedes: Sequence[str] = (),
    ) -> int:
        """Writes a value if every guard holds; returns its revision.

        Args:
            value: the value, of at most VALUE_BYTES_MAX bytes.
            lease: lease to which the key is bound from now on, and to no other; NO_LEASE: none.
            supersedes: other keys, which are deleted in the same step; their old values may stay
                in the history of the store for a while.

        Raises:
            ConflictError: a guard does not hold.
            LeaseLostError: there is no such lease.
        """

    async def grant_each(
        self, keys: Sequence[str], ttl_s: float, *, guards: Sequence[Guard] = ()
    ) -> Sequence[int]:
        """New leases, one for each of the keys, which are written empty and bound to them.

        The leases to which the keys were bound before end. The call waits for the disk once,
        whatever the number of keys.

        A lease ends if it is not kept alive for ttl_s or a little longer. A holder must count ttl_s
        from before its request, and stop when that time is over. Then it has stopped before anyone
        learns that its lease has ended.

        Raises:
            ConflictError: a guard does not hold.
        """

    async def keep_alive(self, lease: int) -> None:
        """Renews a lease for its full TTL.

        Raises:
            LeaseLostError: the lease has ended.
        """

    async def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys; does nothing if the lease has ended."""

    def watch(self, prefix: str, *, first_revision: int) -> AsyncIterator[Event]:
        """Yields every change under a prefix from a revision on, in order, once; never ends.

        Raises:
            CompactedError: while iterating: the next change is no longer kept.
            StoreError: while iterating: the store was closed or cannot go on.
        """


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a job's keys; there is one `members`, `outcome` and `plan` per epoch."""

    job: str

    def __post_init__(self) -> None:
        assert self.job
        assert "/" not in self.job, self.job

    @property
    def prefix(self) -> str:
        return f"/planaria/{self.job}/"

    @property
    def leader(self) -> str:
        return self.prefix + "leader"

    @property
    def commit(self) -> str:
        return self.prefix + "commit"

    def node(self, node: int) -> str:
        return f"{self.prefix}node/{node}"

    def members(self, epoch: int) -> str:
        return f"{self.prefix}members/{epoch}"

    def outcome(self, epoch: int) -> str:
        return f"{self.prefix}outcome/{epoch}"

    def plan(self, epoch: int) -> str:
        return f"{self.prefix}plan/{epoch}"

    def event(self, sequence: int) -> str:
        return f"{self.prefix}event/{sequence}"

    def piece(self, kind: str, epoch: int, *, term: int, index: int) -> str:
        """Key of a piece of a record too large for one value, written by the leader of a term."""
        return f"{self.prefix}piece/{kind}-{epoch}-{term}-{index}"


# The operations on a state. Store describes all but the last, which has no method there.
@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    guards: tuple[Guard, ...] = ()
    lease: int = NO_LEASE
    supersedes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GrantEach:
    keys: tuple[str, ...]
    ttl_s: float
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class KeepAlive:
    lease: int


@dataclass(frozen=True, slots=True)
class Revoke:
    lease: int


@dataclass(frozen=True, slots=True)
class Expire:
    """Ends the leases that are due."""


Operation = Put | GrantEach | KeepAlive | Revoke | Expire


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """Everything in a store.

    Attributes:
        revision: revision of the newest change of a key; the first change has revision 1.
        num_changes: number of all changes so far, those of leases included.
        newest_lease: id of the newest lease; ids are never used again.
        leases: TTL by lease, in seconds.
        deadlines: time at which each lease is due, by the caller's clock; the only part that is
            not durable.
        history: the newest changes of keys, without a gap: at most `history_max`, with at most
            HISTORY_BYTES_MAX of values, but always the newest one.
        history_bytes: size of the values in `history`.
    """

    revision: int = ABSENT
    num_changes: int = 0
    newest_lease: int = NO_LEASE
    entries: Mapping[str, Entry] = field(default_factory=dict)
    leases: Mapping[int, float] = field(default_factory=dict)
    deadlines: Mapping[int, float] = field(default_factory=dict)
    history: tuple[Event, ...] = ()
    history_bytes: int = 0
    history_max: int = HISTORY_MAX


EMPTY: Final = StoreState()


class StoreStep(NamedTuple):
    """Effect of an operation; make all `changes` durable at once before you tell anyone."""

    state: StoreState
    result: int  # The newest lease after a GrantEach, else the store's revision.
    changes: tuple[Change, ...]


def step(state: StoreState, operation: Operation, now_s: float) -> StoreStep:
    """The state after an operation, the result of the operation, and its changes.

    Takes O(keys + history_max) time, because states are never altered in place.

    Raises:
        ConflictError: a guard does not hold; nothing has changed.
        LeaseLostError: there is no such lease; nothing has changed.
    """
    changes: tuple[Change, ...] = ()
    match operation:
        case Put():
            changes = _put_changes(state, operation)
        case GrantEach():
            changes = _grant_each_changes(state, operation)
        case KeepAlive(lease):
            # Deadlines need not be durable: see `with_full_leases`.
            _ttl_s(state, lease)
            return StoreStep(with_renewed_leases(state, (lease,), now_s=now_s), state.revision, ())
        case Revoke(lease):
            changes = _end_changes(state, {lease} & set(state.leases))
        case Expire():
            due_leases = {lease for lease, due_s in state.deadlines.items() if due_s <= now_s}
            changes = _end_changes(state, due_leases)
    state = state_after(state, changes, now_s=now_s)
    is_grant = isinstance(operation, GrantEach)
    result = state.newest_lease if is_grant else state.revision
    return StoreStep(state, result, changes)


def state_after(state: StoreState, changes: Sequence[Change], *, now_s: float) -> StoreState:
    """The state after more changes; leases granted by them are due a full TTL from now_s."""
    revision, newest_lease = state.revision, state.newest_lease
    entries, leases = dict(state.entries), dict(state.leases)
    deadlines, history = dict(state.deadlines), list(state.history)
    history_bytes = state.history_bytes
    for change in changes:
        match change:
            case Entry() | Gone() | Superseded():
                assert change.revision == revision + 1
                revision = change.revision
                history.append(change)
                history_bytes += _value_bytes(change)
                if isinstance(change, Entry):
                    entries[change.key] = change
                else:
                    del entries[change.key]
            case LeaseGranted(lease, ttl_s):
                assert lease == newest_lease + 1
                newest_lease = lease
                leases[lease] = ttl_s
                deadlines[lease] = now_s + ttl_s
            case LeaseEnded(lease):
                del leases[lease], deadlines[lease]
    first = max(0, len(history) - state.history_max)
    history_bytes -= sum(map(_value_bytes, history[:first]))
    while history_bytes > HISTORY_BYTES_MAX and first < len(history) - 1:
        history_bytes -= _value_bytes(history[first])
        first += 1
    return StoreState(
        revision=revision,
        num_changes=state.num_changes + len(changes),
        newest_lease=newest_lease,
        entries=entries,
        leases=leases,
        deadlines=deadlines,
        history=tuple(history[first:]),
        history_bytes=history_bytes,
        history_max=state.history_max,
    )


def with_renewed_leases(state: StoreState, leases: Collection[int], *, now_s: float) -> StoreState:
    """The state with those of these leases that exist due a full TTL from now_s."""
    ttls = {lease: state.leases[lease] for lease in leases if lease in state.leases}
    deadlines = {lease: now_s + ttl_s for lease, ttl_s in ttls.items()}
    return replace(state, deadlines={**state.deadlines, **deadlines})


def with_full_leases(state: StoreState, *, now_s: float) -> StoreState:
    """The state with every lease due a full TTL from now_s.

    While the store was down it could not hear lease holders, and its clock may be another one now:
    if that time counted, live nodes would be declared dead. A node that did die meanwhile is
    noticed up to a TTL late.
    """
    return with_renewed_leases(state, state.leases, now_s=now_s)


def entries_under(state: StoreState, prefix: str) -> KeyRange:
    """See Store.range."""
    entries = [entry for key, entry in state.entries.items() if key.startswith(prefix)]
    return KeyRange(tuple(sorted(entries, key=lambda entry: entry.revision)), state.revision)


def events_since(state: StoreState, prefix: str, *, first_revision: int) -> tuple[Event, ...]:
    """The changes under a prefix from a revision on, oldest first.

    Raises:
        CompactedError: the first of them may not be kept any more.
    """
    assert first_revision > ABSENT
    oldest_revision = state.revision - len(state.history) + 1
    if first_revision < oldest_revision:
        raise CompactedError(first_revision, oldest_revision)
    events = state.history[first_revision - oldest_revision :]
    return tuple(event for event in events if event.key.startswith(prefix))


def _put_changes(state: StoreState, put: Put) -> tuple[Change, ...]:
    """The changes of a Put: the new value, and the deletion of the keys that it supersedes."""
    assert put.key
    assert put.key not in put.supersedes
    assert len(put.value) <= VALUE_BYTES_MAX
    _check(state, put.guards)
    if put.lease != NO_LEASE:
        _ttl_s(state, put.lease)
    revision = state.revision + 1
    superseded_keys = [key for key in dict.fromkeys(put.supersedes) if key in state.entries]
    return (
        Entry(put.key, put.value, revision, put.lease),
        *(Superseded(key, revision + index) for index, key in enumerate(superseded_keys, 1)),
    )


def _grant_each_changes(state: StoreState, grant: GrantEach) -> tuple[Change, ...]:
    """The changes of a GrantEach: new leases, their keys, and the end of the old leases."""
    assert grant.ttl_s > 0
    _check(state, grant.guards)
    keys = tuple(dict.fromkeys(grant.keys))
    assert keys == grant.keys
    first = state.newest_lease + 1
    changes: list[Change] = [LeaseGranted(first + n, grant.ttl_s) for n in range(len(keys))]
    changes += [Entry(key, b"", state.revision + 1 + n, first + n) for n, key in enumerate(keys)]
    old_leases = {state.entries[key].lease for key in keys if key in state.entries}
    return (
        *changes,
        *_end_changes(state_after(state, changes, now_s=0.0), old_leases & set(state.leases)),
    )


def _check(state: StoreState, guards: Sequence[Guard]) -> None:
    """Raises a ConflictError if one of the guards does not hold."""
    for guard in guards:
        entry = state.entries.get(guard.key)
        actual_revision = entry.revision if entry else ABSENT
        if actual_revision != guard.revision:
            raise ConflictError(guard.key, guard.revision, actual_revision)


def _value_bytes(event: Event) -> int:
    return len(event.value) if isinstance(event, Entry) else 0


def _ttl_s(state: StoreState, lease: int) -> float:
    if lease not in state.leases:
        raise LeaseLostError(lease)
    return state.leases[lease]


def _end_changes(state: StoreState, leases: Collection[int]) -> tuple[Change, ...]:
    """The changes that end leases and delete their keys, oldest key first."""
    keys = [entry.key for entry in entries_under(state, "").entries if entry.lease in leases]
    gone = [Gone(key, state.revision + 1 + index) for index, key in enumerate(keys)]
    return (*(LeaseEnded(lease) for lease in sorted(leases)), *gone)
