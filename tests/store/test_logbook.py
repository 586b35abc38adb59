"""What a leader writes down: in pieces where it is large, and no more than the next one needs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest

from helpers.jobs import template
from helpers.tasks import TIMEOUT_S, settle
from planaria.core.messages import SaveLayers, StartEpoch
from planaria.core.plan import Pipeline, Plan, plain_plan
from planaria.core.records import Decision, Members, Outcome, Progress
from planaria.errors import StoreError
from planaria.nodes.head.journal import Flusher
from planaria.store.embedded import EmbeddedStore
from planaria.store.logbook import Logbook, open_logbook
from planaria.store.store import HISTORY_MAX, Change, Entry, StoreState

LEASE_S = 3.0
PIECE_BYTES = 500


def plan_of(epoch: int, num_nodes: int = 1) -> Plan:
    pipelines = tuple(Pipeline(template(1), (node,)) for node in range(num_nodes))
    return plain_plan(epoch, pipelines, (1,) * num_nodes)


def start_of(epoch: int, num_bytes: int = 0) -> Decision:
    """An order to start an epoch, whose record has about so many bytes."""
    source = Random(epoch).randbytes(num_bytes * 3 // 4).hex()
    order = StartEpoch(epoch=epoch, plan=plan_of(epoch), addresses={}, iteration=0, source=source)
    return Decision(order=order)


def save_of(epoch: int) -> Decision:
    return Decision(order=SaveLayers(epoch=epoch, iteration=1, layers={}))


async def opened(store: EmbeddedStore, *, piece_bytes: int = PIECE_BYTES) -> Logbook:
    return await open_logbook(store, "job", lease_s=LEASE_S, piece_bytes=piece_bytes)


async def record(logbook: Logbook, decision: Decision) -> None:
    """The members, the outcome and the decision of an epoch."""
    epoch = decision.order.epoch
    await logbook.record_members(Members(epoch=epoch, term=logbook.term, nodes=(0,)))
    await logbook.record_decision(Outcome(epoch=epoch, iteration=0), decision)


def stored(run: Callable[[EmbeddedStore], Awaitable[None]], flusher: Flusher | None = None) -> None:
    async def main() -> None:
        store = EmbeddedStore(flusher or Flusher(), now_s=lambda: 0.0)
        await asyncio.wait_for(run(store), TIMEOUT_S)

    asyncio.run(main())


def names(entries: Sequence[Entry]) -> list[str]:
    return [entry.key.removeprefix("/planaria/job/") for entry in entries]


# -- size -----------------------------------------------------------------------------------------


def test_a_record_that_is_too_large_is_read_as_it_was_written() -> None:
    """Its pieces are no larger than a piece, and what stands for them is the last to be written.

    A plan of 2,500 nodes has 877 KB, and the store refuses more than 1 MiB.
    """

    async def run(store: EmbeddedStore) -> None:
        logbook = await opened(store)
        decision = start_of(0, num_bytes=20 * PIECE_BYTES)
        await record(logbook, decision)
        entries = (await store.range("")).entries
        found = await (await opened(store)).read()

        assert found is not None
        assert decision == found.decision
        pieces = [entry for entry in entries if "/piece/" in entry.key]
        assert len(pieces) > 5
        assert max(len(entry.value) for entry in entries) <= PIECE_BYTES
        assert names(entries)[-1] == "plan/0"

    stored(run)


class DyingStore(EmbeddedStore):
    """Its caller is killed in its put number `num_left`, before or after that is done."""

    num_left = 10**6
    is_done = False

    async def put(self, key: str, value: bytes, **others: Any) -> int:
        self.num_left -= 1
        if self.num_left == 0 and not self.is_done:
            raise StoreError("killed")
        revision = await super().put(key, value, **others)
        if self.num_left == 0:
            raise StoreError("killed")
        return revision


@pytest.mark.parametrize("is_done", [False, True])
def test_a_leader_may_be_killed_at_any_write_of_a_record(is_done: bool) -> None:
    """The next one finds the record before, or the new one whole; it writes its own, and nothing is
    left of the dead one's pieces after the next record."""

    async def run(num_puts: int) -> bool:
        store = DyingStore(Flusher(), now_s=lambda: 0.0)
        first = await opened(store)
        await record(first, start_of(0, num_bytes=10 * PIECE_BYTES))
        store.num_left, store.is_done = num_puts, is_done
        is_killed = False
        try:
            await record(first, start_of(1, num_bytes=10 * PIECE_BYTES))
        except StoreError:
            is_killed = True
        if not is_killed:
            return False
        store.num_left = 10**6
        await complete(store)
        third = await opened(store)
        found = await third.read()
        assert found is not None
        assert (found.members.epoch, found.plan) == (1, plan_of(1))
        await record(third, start_of(2))

        assert sorted(names((await store.range("")).entries)) == [
            *("leader", "members/2", "outcome/2", "plan/2"),
        ]
        return True

    num_puts = 1
    while asyncio.run(asyncio.wait_for(run(num_puts), TIMEOUT_S)):
        num_puts += 1
    assert num_puts > 10


async def complete(store: EmbeddedStore) -> None:
    """As a restored leader does: an epoch that has members gets a decision, unless it has one."""
    logbook = await opened(store)
    found = await logbook.read()
    assert found is not None
    assert found.decision is not None
    epoch = found.decision.order.epoch
    assert found.decision == start_of(epoch, num_bytes=10 * PIECE_BYTES)
    assert found.members.epoch >= epoch
    if found.members.epoch == 0:
        await logbook.record_members(Members(epoch=1, term=logbook.term, nodes=(0,)))
    if epoch == 0:
        decision = start_of(1, num_bytes=5 * PIECE_BYTES)
        await logbook.record_decision(Outcome(epoch=1, iteration=0), decision)


# -- age ------------------------------------------------------------------------------------------


def test_a_store_has_the_newest_record_of_each_kind_alone() -> None:
    """Else each epoch makes a job's restart slower, its journal larger, and a leader's memory."""

    async def run(store: EmbeddedStore) -> None:
        logbook = await opened(store)
        for epoch in range(20):
            await record(logbook, start_of(epoch, num_bytes=epoch * PIECE_BYTES // 10))
            await logbook.record_progress(Progress(num_committed=epoch, ends=False))
            if epoch % 7 == 3:
                logbook = await opened(store)
                await logbook.read()

        found = names((await store.range("")).entries)
        heads = [name for name in found if not name.startswith("piece/")]
        assert sorted(heads) == ["commit", "leader", "members/19", "outcome/19", "plan/19"]
        assert all(name.startswith("piece/plan-19-") for name in set(found) - set(heads))

    stored(run)


def test_the_newest_plan_stays_while_the_layers_are_saved() -> None:
    """A decision to save has none, and the next leader needs one: that of the epoch before."""

    async def run(store: EmbeddedStore) -> None:
        logbook = await opened(store)
        for decision in (start_of(0), start_of(1, num_bytes=5 * PIECE_BYTES), save_of(2)):
            await record(logbook, decision)
        logbook = await opened(store)
        found = await logbook.read()
        assert found is not None
        assert (found.decision, found.plan) == (save_of(2), plan_of(1))

        await record(logbook, save_of(3))
        found = await (await opened(store)).read()
        assert found is not None
        assert (found.decision, found.plan) == (save_of(3), plan_of(1))
        assert "plan/2" not in names((await store.range("")).entries)

    stored(run)


# -- leases ---------------------------------------------------------------------------------------


def test_a_lease_that_ends_is_told_where_the_watch_has_lost_its_place() -> None:
    """With more than 1,000 nodes that come back at once the store had forgotten what it was to
    tell next, and the job ended."""
    num_nodes = HISTORY_MAX + 500
    gate = asyncio.Event()
    gate.set()

    async def make_durable(_changes: Sequence[Change], _state: StoreState) -> None:
        await gate.wait()

    async def run(store: EmbeddedStore) -> None:
        logbook = await opened(store)
        await logbook.grant(range(num_nodes))
        lost: list[int] = []

        async def watch() -> None:
            async for node in logbook.ended_leases():
                lost.append(node)  # noqa: PERF401

        watching = asyncio.create_task(watch())
        await settle()
        gate.clear()
        # What comes while the disk writes is on it at once.
        writes: list[asyncio.Task[Any]] = [asyncio.create_task(store.put("before", b""))]
        await settle()
        writes.append(asyncio.create_task(logbook.revoke(7)))
        writes += [asyncio.create_task(logbook.grant((node,))) for node in range(10, num_nodes)]
        await settle()
        gate.set()
        await asyncio.gather(*writes)
        await settle()
        assert lost == [7]
        await logbook.revoke(8)
        await settle()
        watching.cancel()

        assert lost == [7, 8]

    stored(run, Flusher(make_durable=make_durable))


def test_leases_of_many_nodes_cost_one_wait_for_the_disk_and_count_from_then() -> None:
    """With a slow disk the first had ended before the last was written: live nodes were lost."""
    now_s = 0.0
    num_waits = 0

    async def make_durable(_changes: Sequence[Change], _state: StoreState) -> None:
        nonlocal now_s, num_waits
        num_waits += 1
        now_s += 2 * LEASE_S
        await store.expire_soon()

    class Ticking(EmbeddedStore):
        """Leases may end while the disk writes."""

        async def expire_soon(self) -> None:
            ending.append(asyncio.create_task(self.expire()))
            await settle()

    ending: list[asyncio.Task[None]] = []

    async def run() -> None:
        nonlocal num_waits
        logbook = await opened(store)
        num_waits = 0
        await logbook.grant(range(100))
        assert num_waits == 1
        assert all([await logbook.renew(node) for node in range(100)])

        assert store.next_deadline_s == now_s + LEASE_S

    store = Ticking(Flusher(make_durable=make_durable), now_s=lambda: now_s)
    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_node_that_gets_another_lease_loses_the_one_before() -> None:
    """It does not go with that, nor is that left for nobody to end."""

    async def run(store: EmbeddedStore) -> None:
        await (await opened(store)).grant(range(3))
        logbook = await opened(store)
        await logbook.grant((1, 2))
        await logbook.grant((2,))
        assert await logbook.renew(1)
        assert await logbook.renew(2)
        entries = (await store.range("/planaria/job/node/")).entries

        assert [entry.lease for entry in entries] == [1, 4, 6]
        assert sorted(store._decided_state.leases) == [1, 4, 6]

    stored(run)
