"""Nobody is told of what is not durable, and nobody waits for the disk who need not."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import pytest

from helpers.tasks import TIMEOUT_S, first_events, settle, wait_until
from planaria.errors import ConflictError, LeaseLostError, StoreError
from planaria.nodes.head.journal import Flusher
from planaria.store.embedded import EmbeddedStore
from planaria.store.store import ABSENT, Change, Entry, Guard, StoreState


class GatedDisk:
    """Makes changes durable only while its gate is open; counts flushes."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_begun = 0

    async def __call__(self, _changes: Sequence[Change], _state: StoreState) -> None:
        self.num_begun += 1
        await self.gate.wait()


def gated(run: Callable[[EmbeddedStore, GatedDisk], Awaitable[None]]) -> None:
    async def main() -> None:
        disk = GatedDisk()
        clock = count()  # A second passes with each look at it.
        store = EmbeddedStore(Flusher(make_durable=disk), now_s=lambda: float(next(clock)))
        await asyncio.wait_for(run(store, disk), TIMEOUT_S)

    asyncio.run(main())


def test_nobody_sees_a_write_before_it_is_durable() -> None:
    """Neither its writer nor a reader nor a watch: it could still vanish."""

    async def run(store: EmbeddedStore, disk: GatedDisk) -> None:
        watch = asyncio.create_task(first_events(store, first_revision=1, num=1))
        write = asyncio.create_task(store.put("a", b""))
        await settle()
        assert disk.num_begun == 1
        late_watch = asyncio.create_task(first_events(store, first_revision=1, num=1))
        await settle()
        assert await store.get("a") is None
        assert await store.range("") == ((), 0)
        assert not any(task.done() for task in (write, watch, late_watch))

        disk.gate.set()

        assert await write == 1
        assert await watch == await late_watch == [Entry("a", b"", 1, 0)]

    gated(run)


def test_a_refusal_waits_for_what_it_rests_on() -> None:
    """Told at once, the loser would believe in a record that a crash can still take back."""

    async def run(store: EmbeddedStore, disk: GatedDisk) -> None:
        first = asyncio.create_task(store.put("a", b"", guards=[Guard("a", ABSENT)]))
        second = asyncio.create_task(store.put("a", b"", guards=[Guard("a", ABSENT)]))
        await settle()
        assert not second.done()

        disk.gate.set()

        assert await first == 1
        with pytest.raises(ConflictError):
            await second

    gated(run)


def test_writes_that_wait_share_one_flush() -> None:
    """A hundred nodes that join at once cost two waits for the disk, not a hundred."""

    async def run(store: EmbeddedStore, disk: GatedDisk) -> None:
        writes = [asyncio.create_task(store.put(str(index), b"")) for index in range(100)]
        await settle()
        disk.gate.set()

        assert list(range(1, 101)) == await asyncio.gather(*writes)
        assert disk.num_begun <= 2

    gated(run)


def test_a_writer_that_gives_up_takes_nothing_back() -> None:
    """Its write may be on the disk already; whoever reads later sees one truth."""

    async def run(store: EmbeddedStore, disk: GatedDisk) -> None:
        write = asyncio.create_task(store.put("a", b""))
        await wait_until(lambda: disk.num_begun == 1)
        write.cancel()
        await settle()
        disk.gate.set()

        assert await store.put("b", b"") == 2
        entry = await store.get("a")
        assert entry is not None
        assert entry.revision == 1

    gated(run)


def test_closing_waits_for_the_writes_under_way() -> None:
    """An orderly end is no crash: what was asked for before it is done and told."""

    async def run() -> None:
        disk = GatedDisk()
        flusher = Flusher(make_durable=disk)
        store = EmbeddedStore(flusher, now_s=lambda: 0.0)
        write = asyncio.create_task(store.put("a", b""))
        await wait_until(lambda: disk.num_begun == 1)
        closing = asyncio.create_task(flusher.close())
        await settle()
        assert not closing.done()
        disk.gate.set()
        await closing

        assert await write == 1
        with pytest.raises(StoreError, match="the store is closed"):
            await store.put("b", b"")

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_keep_alives_are_answered_while_the_disk_hangs() -> None:
    """Otherwise a full write queue makes every node of the job stop itself."""

    async def run(store: EmbeddedStore, disk: GatedDisk) -> None:
        disk.gate.set()
        (lease,) = await store.grant_each(("a",), 30.0)
        (other,) = await store.grant_each(("b",), 1.0)
        disk.gate.clear()
        write = asyncio.create_task(store.put("a", b"", lease=lease))
        await settle()
        deadline_s = store.next_deadline_s
        expiry = asyncio.create_task(store.expire())
        await settle()

        await store.keep_alive(lease)
        # The end of this one is decided, though not durable: no holder is told that it lives.
        with pytest.raises(LeaseLostError):
            await store.keep_alive(other)

        assert not write.done()
        assert not expiry.done()
        assert store.next_deadline_s > deadline_s
        disk.gate.set()
        await asyncio.gather(write, expiry)
        await store.keep_alive(lease)

    gated(run)


def test_a_store_that_cannot_write_says_so_to_everyone() -> None:
    """Writers, later ones too, and watches; what was durable can still be read."""

    async def run() -> None:
        broken = False

        async def make_durable(_changes: Sequence[Change], _state: StoreState) -> None:
            if broken:
                raise StoreError("the disk is full")

        store = EmbeddedStore(Flusher(make_durable=make_durable), now_s=lambda: 0.0)
        await store.put("a", b"1")
        watch = asyncio.create_task(first_events(store, first_revision=2, num=1))
        await settle()
        broken = True

        for failing in (store.put("a", b"2"), store.grant_each(("b",), 1.0), watch):
            with pytest.raises(StoreError, match="the disk is full"):
                await failing
        assert await store.get("a") == Entry("a", b"1", 1, 0)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
