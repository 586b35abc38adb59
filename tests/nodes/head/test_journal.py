"""What anybody was told is there after a crash at any byte; damage and a full disk are said."""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import RawIOBase
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from helpers.tasks import TIMEOUT_S, first_events, settle, wait_until
from planaria.errors import StoreError
from planaria.nodes.head.journal import open_store, superseded_entries
from planaria.store.embedded import EmbeddedStore
from planaria.store.store import Guard, KeyRange


async def contents(directory: Path) -> KeyRange:
    """What a process that starts on this directory finds."""
    async with open_store(directory, now_s=lambda: 0.0) as store:
        return await store.range("")


async def fill(store: EmbeddedStore, journal: Path) -> list[tuple[int, KeyRange]]:
    """Every kind of change; for each, the size of the journal and what the store holds then."""
    found = [(journal.stat().st_size, await store.range(""))]
    lease = 0

    async def grant() -> None:
        nonlocal lease
        (lease,) = await store.grant_each(("node/1",), 3.0)

    for operation in (
        lambda: store.put("a", b"1"),
        grant,
        lambda: store.put("node/1", b"\x00\xffPLJ", lease=lease),
        lambda: store.put("node/2", b"", lease=lease),
        lambda: store.put("a", b"2" * 50, guards=[Guard("a", 1)]),
        lambda: store.revoke(lease),
        lambda: store.put("\u00e9", b"3"),
    ):
        await operation()
        found.append((journal.stat().st_size, await store.range("")))
    return found


def test_a_journal_cut_at_any_byte_holds_what_was_acknowledged_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never half of a write, and the lease's keys together; then it goes on from there."""
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, lambda _fd: None)  # A thousand of them take ten seconds.

    async def run() -> None:
        async with open_store(tmp_path / "whole", now_s=lambda: 0.0) as store:
            history = await fill(store, tmp_path / "whole" / "journal")
        content = (tmp_path / "whole" / "journal").read_bytes()
        assert history[-1][0] == len(content)
        journal = tmp_path / "cut" / "journal"
        journal.parent.mkdir()

        for num_bytes in range(history[0][0], len(content) + 1):
            journal.write_bytes(content[:num_bytes])
            expected = next(found for size, found in reversed(history) if size <= num_bytes)
            async with open_store(journal.parent, now_s=lambda: 0.0) as store:
                assert expected == await store.range(""), num_bytes
                assert expected.revision + 1 == await store.put("later", b"")
            assert expected.revision + 1 == (await contents(journal.parent)).revision

    asyncio.run(run())


def test_damage_that_no_crash_can_do_is_refused(tmp_path: Path) -> None:
    """A changed byte anywhere but in the last record: opening would lose what was acknowledged."""

    async def run() -> None:
        journal = tmp_path / "journal"
        async with open_store(tmp_path, now_s=lambda: 0.0) as store:
            history = await fill(store, journal)
        content = journal.read_bytes()

        for position in range(history[-2][0]):
            journal.write_bytes(
                content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]
            )
            with pytest.raises(StoreError, match=r"journal is damaged at byte \d+"):
                await contents(tmp_path)
        for num_bytes in range(history[0][0]):
            journal.write_bytes(content[:num_bytes])
            with pytest.raises(StoreError, match="journal is damaged at byte 0"):
                await contents(tmp_path)

    asyncio.run(run())


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    """A later planaria may write what this one would misread; the way out is its own business."""

    async def run(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("planaria.nodes.head.journal_records._FORMAT", 3)
        await contents(tmp_path)
        monkeypatch.undo()

        with pytest.raises(StoreError, match="format 3, this planaria reads 2"):
            await contents(tmp_path)

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(run(monkeypatch))


def test_the_journal_stays_small_and_loses_nothing_by_it(tmp_path: Path) -> None:
    """A job writes its commit for weeks; the watch history and lease numbers survive, too."""

    async def run() -> None:
        sizes = []
        async with open_store(tmp_path, now_s=lambda: 0.0, rewrite_bytes=1000) as store:
            lease, ended = await store.grant_each(("node", "other"), 3.0)
            await store.revoke(ended)
            for index in range(300):
                await store.put("commit", b"%d" % index)
                sizes.append((tmp_path / "journal").stat().st_size)
            seen = await first_events(store, first_revision=1, num=303)
            expected = await store.range("")
        num_rewrites = sum(after < before for before, after in pairwise(sizes))
        assert num_rewrites >= 2

        async with open_store(tmp_path, now_s=lambda: 0.0) as store:
            assert expected == await store.range("")
            assert seen == await first_events(store, first_revision=1, num=303)
            await store.keep_alive(lease)
            assert [ended + 1] == [*await store.grant_each(("other",), 3.0)]

    asyncio.run(run())


def test_what_was_superseded_is_on_disk_and_no_burden(tmp_path: Path) -> None:
    """The journal forgets it, the archive does not: not what a crash has torn behind it, and each
    entry once, also where a crash had it written twice."""
    archive = tmp_path / "archive"

    async def run(first: int, end: int) -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0, rewrite_bytes=2000) as store:
            for index in range(first, end):
                old = (f"plan/{index - 1}",)
                await store.put(f"plan/{index}", b"%d" % index * 50, supersedes=old)
                assert len((await store.range("")).entries) == 1

    asyncio.run(run(0, 100))
    content = archive.read_bytes()
    with archive.open("ab") as file:
        file.write(content + content[:50])
    asyncio.run(run(100, 200))

    keys = [entry.key for entry in superseded_entries(tmp_path)]
    assert [f"plan/{index}" for index in range(199)] == keys
    assert archive.stat().st_size > 2 * len(content)


@pytest.mark.parametrize("content", [b"", b"\xffPLJ half of one"])
def test_a_journal_without_a_whole_record_is_told_to_be_damaged(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "journal").write_bytes(content)

    with pytest.raises(StoreError, match=f"{tmp_path}/journal is damaged at byte 0"):
        superseded_entries(tmp_path)


def test_what_a_crash_leaves_of_a_snapshot_is_ignored(tmp_path: Path) -> None:
    """It is not the journal until it is renamed."""

    async def run() -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0) as store:
            await store.put("a", b"")
        (tmp_path / "journal.partial").write_bytes(b"\xffPLJ half of one")

        assert (await contents(tmp_path)).revision == 1
        assert not (tmp_path / "journal.partial").exists()

    asyncio.run(run())


def test_a_write_is_acknowledged_after_the_sync_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk is syncing, the event loop goes on and the writer waits."""
    begun, may_end = threading.Event(), threading.Event()
    sync = os.fdatasync

    def slow_sync(fd: int) -> None:
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        sync(fd)

    async def run() -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0) as store:
            monkeypatch.setattr(os, "fdatasync", slow_sync)
            write = asyncio.create_task(store.put("a", b""))
            await wait_until(begun.is_set)
            await settle()
            assert not write.done()

            may_end.set()

            assert await write == 1

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_what_is_read_at_the_start_is_synced_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed before its sync leaves what only the page cache has: file and name."""
    synced = []
    sync = os.fsync

    def recorded_sync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        sync(fd)

    asyncio.run(contents(tmp_path))
    monkeypatch.setattr(os, "fsync", recorded_sync)
    asyncio.run(contents(tmp_path))

    assert [tmp_path / "journal", tmp_path] == synced


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_full_disk_ends_the_store_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """After a failed sync nobody knows what the disk has, so nothing is written behind it."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0, rewrite_bytes=800) as store:
            await store.put("a", b"")
            monkeypatch.setattr(os, call, fail)
            with pytest.raises(
                StoreError, match="No space left on device; free some space on the disk"
            ):
                await store.put("b", b"x" * 600)
            monkeypatch.undo()
            with pytest.raises(StoreError, match="No space left on device"):
                await store.put("c", b"")

        keys = [entry.key for entry in (await contents(tmp_path)).entries]
        assert keys in (["a"], ["a", "b"])

    asyncio.run(run())


@pytest.mark.parametrize("rewrite_bytes", [1 << 20, 50_000])
def test_a_journal_goes_on_where_saves_have_filled_its_disk(
    rewrite_bytes: int, tmp_path: Path
) -> None:
    """Until it has used up what it took in advance, which it gives up for no shorter file."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    num_records = 0

    async def write_until_refused(saves: RawIOBase) -> None:
        nonlocal num_records
        async with open_store(disk, now_s=lambda: 0.0, rewrite_bytes=rewrite_bytes) as store:
            space = os.statvfs(disk)
            saves.write(bytes(space.f_bavail * space.f_frsize - (64 << 10)))
            with suppress(StoreError):
                while True:
                    await store.put("a", bytes(1000))
                    num_records += 1
                    if num_records == 100:
                        with suppress(OSError):
                            while True:
                                saves.write(bytes(4096))

    try:
        with (disk / "saves").open("wb", buffering=0) as saves:
            asyncio.run(write_until_refused(saves))
        (entry,) = asyncio.run(contents(disk)).entries
    finally:
        subprocess.run(["umount", str(disk)], check=True)

    assert 200 < num_records < 500  # A sixteenth of 8 MiB, in base64.
    assert entry.revision in (num_records, num_records + 1)


@pytest.mark.parametrize("name", ["archive", "journal.partial"])
def test_a_journal_that_cannot_be_made_smaller_grows_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every record is on the disk as it is. It is told once, tried again when the journal has
    doubled, and nothing is left behind of what failed."""
    opened, notes, num_tries = os.open, list[str](), 0

    def fail(path: Path, *rest: int, **_: object) -> int:
        nonlocal num_tries
        if Path(path).name == name:
            num_tries += 1
            raise OSError(28, "No space left on device")
        return opened(path, *rest)

    async def run() -> int:
        opening = open_store(tmp_path, now_s=lambda: 0.0, rewrite_bytes=1000, note=notes.append)
        async with opening as store:
            await store.put("plan/0", b"")
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", fail)
                for index in range(100):
                    await store.put(f"plan/{index + 1}", b"", supersedes=(f"plan/{index}",))
            num_plans, grown_bytes = 100, 0
            while (num_bytes := (tmp_path / "journal").stat().st_size) > grown_bytes:
                assert num_plans < 1000
                num_plans, grown_bytes = num_plans + 1, num_bytes
                old = (f"plan/{num_plans - 1}",)
                await store.put(f"plan/{num_plans}", b"", supersedes=old)
        return num_plans

    num_plans = asyncio.run(run())

    assert 2 <= num_tries <= 10
    assert len(notes) == 1
    assert "grows (No space left on device), while training goes on" in notes[0]
    assert len(asyncio.run(contents(tmp_path)).entries) == 1
    keys = [entry.key for entry in superseded_entries(tmp_path)]
    assert [f"plan/{index}" for index in range(num_plans)] == keys
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "journal", "lock"}


def test_a_snapshot_whose_name_cannot_be_synced_takes_no_record_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows is in the new file alone: it is told once the new name is on the disk."""

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    async def run() -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0, rewrite_bytes=800) as store:
            monkeypatch.setattr(os, "fsync", fail)
            await store.put("a", b"x" * 800)
            with pytest.raises(StoreError, match="Input/output error"):
                await store.put("b", b"")
            monkeypatch.undo()

    asyncio.run(run())


def test_to_make_a_journal_smaller_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of a large job has several MB, and writers wait meanwhile."""

    def fail(_: Path) -> bytes:
        raise AssertionError("it is read")

    async def run() -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0, rewrite_bytes=1000) as store:
            with monkeypatch.context() as patch:
                patch.setattr(Path, "read_bytes", fail)
                for index in range(100):
                    await store.put(f"plan/{index}", b"", supersedes=(f"plan/{index - 1}",))

    asyncio.run(run())

    assert len(superseded_entries(tmp_path)) == 99


@contextmanager
def hanging(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that does not answer; in the end it does, and who waited for it goes on."""
    may_end, sync = threading.Event(), os.fdatasync

    def hang(fd: int) -> None:
        assert may_end.wait(TIMEOUT_S)
        sync(fd)

    patch.setattr(os, "fdatasync", hang)
    yield
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "journal":
            thread.join(TIMEOUT_S)


def test_a_disk_that_hangs_is_told_of_and_counts_as_one_that_refuses_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits goes on then, in memory; to close the store does not wait for it either, and the
    file is closed when the disk lets go of it."""
    monkeypatch.setattr("planaria.nodes.head.journal.SLOW_S", 0.01)
    monkeypatch.setattr("planaria.nodes.head.journal._CLOSE_TIMEOUT_S", 0.01)
    notes, reasons = list[str](), list[str]()

    async def refused(error: StoreError) -> None:
        reasons.append(str(error))

    async def run() -> None:
        opening = open_store(
            tmp_path, now_s=lambda: 0.0, timeout_s=0.08, on_refusal=refused, note=notes.append
        )
        async with opening as store:
            stack.enter_context(hanging(monkeypatch))
            await store.put("a", b"")
            await store.put("b", b"")
            assert len((await store.range("")).entries) == 2

    with ExitStack() as stack:
        asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))

    assert len(reasons) == 1
    assert f"{tmp_path} has not answered for 0 s" in reasons[0]
    assert len(notes) == 3  # After 1, 2 and 4 hundredths of a second.
    assert f"{tmp_path} is slow: writing a record of the coordinator has taken" in notes[0]
    descriptors = Path("/proc/self/fd").iterdir()
    assert not [one for one in descriptors if tmp_path in one.resolve().parents]


def test_a_store_is_closed_while_its_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the journal after the end of its job. Who still waits is told that."""
    monkeypatch.setattr("planaria.nodes.head.journal._CLOSE_TIMEOUT_S", 0.01)

    async def run() -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0) as store:
            stack.enter_context(hanging(monkeypatch))
            write = asyncio.create_task(store.put("a", b""))
            await settle()
        with pytest.raises(StoreError, match="broken off"):
            await write

    with ExitStack() as stack:
        asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_records_are_kept_where_no_thread_can_be_started_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has nothing to do with that, and a job that trains needs none."""

    async def run() -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0) as store:
            refuse = Mock(side_effect=RuntimeError("can't start new thread"))
            monkeypatch.setattr(threading.Thread, "start", refuse)
            await store.put("a", b"1")
            await store.put("b", b"2")

    asyncio.run(run())
    monkeypatch.undo()

    found = asyncio.run(contents(tmp_path))
    assert [entry.value for entry in found.entries] == [b"1", b"2"]


def test_that_a_disk_is_slow_is_told_less_and_less_often_over_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record of a disk that is always as slow was told of."""
    monkeypatch.setattr("planaria.nodes.head.journal.SLOW_S", 0.01)
    sync, notes = os.fdatasync, list[str]()

    def late(fd: int) -> None:
        time.sleep(0.012)
        sync(fd)

    async def run() -> None:
        async with open_store(tmp_path, now_s=lambda: 0.0, note=notes.append) as store:
            monkeypatch.setattr(os, "fdatasync", late)
            for _ in range(50):
                await store.put("a", b"")

    asyncio.run(run())

    # A machine that is busy may make some slower: each is told if it takes twice as long.
    assert 1 <= len(notes) < 10
