"""The store's promises to its callers: guards, leases and watches."""

import asyncio
from dataclasses import replace

import pytest

from planaria.errors import CompactedError, ConflictError, LeaseLostError
from planaria.nodes.head.journal import Flusher
from planaria.store.embedded import EmbeddedStore
from planaria.store.store import (
    ABSENT,
    EMPTY,
    HISTORY_BYTES_MAX,
    HISTORY_MAX,
    VALUE_BYTES_MAX,
    Entry,
    Event,
    Expire,
    Gone,
    GrantEach,
    Guard,
    KeepAlive,
    Keys,
    Operation,
    Put,
    Revoke,
    Store,
    StoreState,
    Superseded,
    events_since,
    state_after,
    step,
    with_full_leases,
)

TIMEOUT_S = 20.0
KEYS = Keys("demo")


def after(*operations: Operation, state: StoreState = EMPTY, now_s: float = 0.0) -> StoreState:
    for operation in operations:
        state = step(state, operation, now_s).state
    return state


async def settle() -> None:
    """Lets every task go on until it waits for something that is not ready."""
    for _ in range(20):
        await asyncio.sleep(0)


async def taken(store: Store, prefix: str, *, first_revision: int, num: int) -> list[Event]:
    found: list[Event] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for event in store.watch(prefix, first_revision=first_revision):
            found.append(event)
            if len(found) == num:
                return found
    raise AssertionError("a watch ended")


# -- guards ---------------------------------------------------------------------------------------


def test_of_two_creators_one_wins_and_the_other_learns_it() -> None:
    """Two leaders that both decide an epoch's outcome: the first record stands."""
    key = KEYS.outcome(3)
    state = after(Put(key, b"COMMIT 7", (Guard(key, ABSENT),)))

    with pytest.raises(ConflictError) as caught:
        step(state, Put(key, b"REDO 7", (Guard(key, ABSENT),)), 0.0)

    assert caught.value.actual_revision == 1
    assert state.entries[key].value == b"COMMIT 7"


def test_a_write_by_an_older_revision_is_refused() -> None:
    """Compare-and-set by revision: what was read must still hold, and then it does."""
    state = after(Put("a", b"1"), Put("b", b"1"), Put("a", b"2"))

    with pytest.raises(ConflictError):
        step(state, Put("a", b"3", (Guard("a", 1),)), 0.0)
    with pytest.raises(ConflictError):
        step(state, Put("a", b"3", (Guard("a", ABSENT),)), 0.0)
    assert step(state, Put("a", b"3", (Guard("a", 3),)), 0.0).result == 4


def test_every_guard_of_a_write_must_hold() -> None:
    """A write under two fences is refused when either has moved, whichever comes first."""
    state = after(Put("a", b""), Put("b", b""))
    good, bad = Guard("a", 1), Guard("b", 1)

    for guards in ((good, bad), (bad, good)):
        with pytest.raises(ConflictError, match="b is at revision 2, not 1"):
            step(state, Put("c", b"", guards), 0.0)
    assert step(state, Put("c", b"", (good, Guard("b", 2))), 0.0).result == 3


def test_an_evicted_node_writes_nothing_late() -> None:
    """Also after it has joined anew: its old guard names the revision of its old membership."""
    state = after(GrantEach((KEYS.node(4),), 3.0))
    late = Put(KEYS.commit, b"late", (Guard(KEYS.node(4), 1),))
    assert step(state, late, 2.0).result == 2

    evicted = after(Expire(), state=state, now_s=3.0)
    joined_again = after(GrantEach((KEYS.node(4),), 3.0), state=evicted)

    for state in (evicted, joined_again):
        with pytest.raises(ConflictError):
            step(state, late, 4.0)


def test_an_older_leader_is_fenced_by_the_next_one() -> None:
    """The leader's key has another revision in every term, also with the same value."""
    state = after(Put(KEYS.leader, b"me"))
    old = Guard(KEYS.leader, state.revision)
    state = after(Put(KEYS.leader, b"me", (old,)), state=state)

    with pytest.raises(ConflictError):
        step(state, Put(KEYS.members(2), b"", (old,)), 0.0)


def test_refused_operations_change_nothing() -> None:
    """The error is all there is: no revision, no change to make durable."""
    state = after(Put("a", b""))
    refused = (Put("a", b"", (Guard("a", 9),)), Put("a", b"", lease=5), KeepAlive(5))

    for operation in refused:
        with pytest.raises((ConflictError, LeaseLostError)):
            step(state, operation, 0.0)
    assert step(state, Revoke(5), 0.0).changes == ()
    assert state == after(Put("a", b""))


def test_what_a_write_supersedes_goes_with_it_in_one_step() -> None:
    """So there is always a newest record; what is not there is nobody's fault, and a refused write
    takes nothing away."""
    state = after(Put("plan/1", b"1"), Put("plan/2", b"2"), Put("members/1", b""))
    write = Put("plan/3", b"3", supersedes=("plan/2", "plan/1", "plan/0", "plan/1"))
    found = step(state, write, 0.0)

    assert found.changes == (
        Entry("plan/3", b"3", 4, 0),
        Superseded("plan/2", 5),
        Superseded("plan/1", 6),
    )
    assert set(found.state.entries) == {"plan/3", "members/1"}
    assert found.result == 6
    with pytest.raises(ConflictError):
        step(state, replace(write, guards=(Guard("plan/1", 9),)), 0.0)


def test_a_value_that_etcd_would_refuse_is_refused_here() -> None:
    """What works with the embedded store must not fail on a cluster."""
    step(EMPTY, Put("a", b"x" * VALUE_BYTES_MAX), 0.0)

    with pytest.raises(AssertionError):
        step(EMPTY, Put("a", b"x" * (VALUE_BYTES_MAX + 1)), 0.0)


# -- leases ---------------------------------------------------------------------------------------


def test_keys_go_with_their_lease_in_one_step_and_others_stay() -> None:
    """Not before its time; each key's end is a change with a revision of its own."""
    state = after(GrantEach(("a",), 3.0), GrantEach(("b",), 5.0))
    state = after(Put("c", b"", lease=1), Put("d", b""), state=state)

    assert step(state, Expire(), 2.999).changes == ()
    _, revision, changes = step(state, Expire(), 3.0)

    assert changes[1:] == (Gone("a", 5), Gone("c", 6))
    assert revision == 6
    assert set(state_after(state, changes, now_s=3.0).entries) == {"b", "d"}


def test_a_lease_kept_alive_has_its_whole_time_again() -> None:
    """And one that is over stays over: its holder is told."""
    state = after(GrantEach(("a",), 3.0))
    state = after(KeepAlive(1), state=state, now_s=2.0)
    assert "a" in after(Expire(), state=state, now_s=4.9).entries

    state = after(Expire(), state=state, now_s=5.0)

    assert not state.entries
    with pytest.raises(LeaseLostError):
        step(state, KeepAlive(1), 5.0)
    with pytest.raises(LeaseLostError):
        step(state, Put("a", b"", lease=1), 5.0)


def test_a_keep_alive_that_was_read_late_still_counts() -> None:
    """A stall of the store's process ends no lease whose holder has spoken in the meantime."""
    state = after(GrantEach(("a",), 3.0))

    state = after(KeepAlive(1), Expire(), state=state, now_s=60.0)

    assert "a" in state.entries


def test_a_key_belongs_to_the_lease_of_its_last_write() -> None:
    """A node that joins anew is not swept away by the end of its old lease."""
    state = after(GrantEach(("a",), 1.0), GrantEach(("c",), 9.0), Put("b", b"", lease=1))

    state = after(Put("a", b"", lease=2), Put("b", b""), Revoke(1), state=state)

    assert set(state.entries) == {"a", "b", "c"}
    assert set(after(Revoke(2), state=state).entries) == {"b"}


def test_many_keys_get_a_lease_each_in_one_step() -> None:
    """In place of those that they had before, which end; another key of such a lease goes."""
    state = after(GrantEach(("a",), 3.0), Put("b", b"", lease=1))
    found = step(state, GrantEach(("a", "c"), 5.0), 10.0)

    assert found.result == 3
    assert {key: entry.lease for key, entry in found.state.entries.items()} == {"a": 2, "c": 3}
    assert found.changes[-1] == Gone("b", 5)
    assert found.state.deadlines == {2: 15.0, 3: 15.0}
    with pytest.raises(ConflictError):
        step(state, GrantEach(("a", "c"), 5.0, (Guard("a", ABSENT),)), 10.0)


def test_lease_numbers_are_never_used_again() -> None:
    """A late keep-alive must not keep another node's lease alive."""
    state = after(GrantEach(("a", "b"), 1.0), Revoke(2))

    assert step(state, GrantEach(("a",), 1.0), 0.0).result == 3


def test_leases_have_their_whole_time_after_a_restart() -> None:
    """On a clock that began anew, and however long the store was down."""
    state = after(GrantEach(("a",), 3.0), now_s=5000.0)

    state = with_full_leases(state, now_s=10.0)

    assert "a" in after(Expire(), state=state, now_s=12.9).entries
    assert "a" not in after(Expire(), state=state, now_s=13.0).entries


# -- watches --------------------------------------------------------------------------------------


def test_a_watch_sees_every_change_once_and_in_order() -> None:
    """From any revision on, what is past and what comes, of its prefix only."""

    async def run() -> None:
        store: Store = EmbeddedStore(Flusher(), now_s=lambda: 0.0)
        (lease,) = await store.grant_each((KEYS.event(0),), 3.0)
        await store.put(KEYS.commit, b"")
        for index in (1, 2):
            await store.put(KEYS.event(index), b"", lease=lease)
            await store.put(KEYS.commit, b"")
        watches = [
            asyncio.create_task(taken(store, KEYS.event(0)[:-1], first_revision=first, num=num))
            for first, num in ((1, 7), (2, 6), (5, 5), (6, 4), (7, 4), (8, 3))
        ]
        await settle()
        await store.put(KEYS.event(3), b"3")
        await store.revoke(lease)

        everything = [
            *(Entry(KEYS.event(index), b"", 2 * index + 1, lease) for index in range(3)),
            Entry(KEYS.event(3), b"3", 7, 0),
            *(Gone(KEYS.event(index), 8 + index) for index in range(3)),
        ]
        for seen in await asyncio.gather(*watches):
            assert everything[-len(seen) :] == seen

    asyncio.run(run())


def test_a_range_and_a_watch_from_behind_it_miss_nothing() -> None:
    """Oldest write first, all of one moment, with the revision to go on from."""

    async def run() -> None:
        store = EmbeddedStore(Flusher(), now_s=lambda: 0.0)
        for key in ("n/10", "n/9", "m", "n/10", "n"):
            await store.put(key, b"")
        entries, revision = await store.range("n/")
        await store.put("n/11", b"")

        revisions = [(entry.key, entry.revision) for entry in entries]
        assert revisions == [("n/9", 2), ("n/10", 4)]
        assert await taken(store, "n/", first_revision=revision + 1, num=1) == [
            Entry("n/11", b"", 6, 0)
        ]

    asyncio.run(run())


def test_a_watch_that_would_miss_a_change_fails_instead() -> None:
    """The error says from where on there is no gap."""
    state = after(*(Put("a", b"") for _ in range(HISTORY_MAX + 2)))

    with pytest.raises(CompactedError) as caught:
        events_since(state, "a", first_revision=2)

    assert caught.value.first_revision == 3
    assert len(events_since(state, "a", first_revision=3)) == HISTORY_MAX


def test_large_values_leave_the_history_first() -> None:
    """A thousand plans of thousands of nodes would be some hundred MB, in each snapshot too; the
    newest change is kept, however large it is."""
    half = b"x" * (HISTORY_BYTES_MAX // 2)
    state = after(Put("a", b""), Put("b", half), Put("c", half), Put("d", b""), Put("e", b""))
    assert [event.key for event in state.history] == ["a", "b", "c", "d", "e"]

    state = after(Put("f", b"x"), state=state)
    assert [event.key for event in state.history] == ["c", "d", "e", "f"]
    with pytest.raises(CompactedError):
        events_since(state, "", first_revision=2)

    state = after(Put("g", half + half), state=state)
    assert [event.key for event in state.history] == ["g"]
    assert state.history_bytes == HISTORY_BYTES_MAX


def test_a_slow_watcher_gets_the_error_too() -> None:
    """Who does not read for longer than the history lasts must not go on as if nothing were."""

    async def run() -> None:
        store = EmbeddedStore(Flusher(), now_s=lambda: 0.0)
        await store.put("a", b"")
        watch = aiter(store.watch("a", first_revision=1))
        await anext(watch)
        for _ in range(HISTORY_MAX + 1):
            await store.put("a", b"")

        with pytest.raises(CompactedError):
            await anext(watch)

    asyncio.run(run())
