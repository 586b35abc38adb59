"""The journal of the embedded store: makes the store's changes durable, for asyncio callers.

    {directory}/journal     a snapshot, then records, each with the changes of one flush
    {directory}/archive     records of superseded entries that are not in the journal any more
    {directory}/lock        locked by the process that has the store open

Writers wait until a flush has written their changes to the disk; changes that arrive in the
meantime share the next flush. The form of a record is in journal_records.py.

A torn record at the end of the file, left by a crash, was never acknowledged and is cut off. A bad
record with a good one after it is damage, and the store refuses to open. (Damage to the very last
record cannot be told from a torn write.) A journal that has grown is replaced by a snapshot, which
is written beside it, synced, and renamed over it. Entries superseded since the snapshot before are
appended to the archive first. The archive is not read when the store opens, so the store opens as
fast on the last day of a job as on the first. A crash between the two steps leaves some entries
twice in the archive. The archive is never synced: its readers run on this machine before the
machine restarts.

Blocks behind the journal's end are allocated in advance, so that saves which fill its disk do not
stop it. They are given up for no shorter file: without room for as many behind a snapshot, the
journal grows.

A disk that does not answer in time is treated like one that refuses; a write that still hangs then
is left behind in its thread. A journal that cannot be replaced by a snapshot just goes on growing.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from planaria.coordinator.saves import SLOW_S
from planaria.errors import StoreError
from planaria.nodes.head.journal_records import (
    archived_entries,
    decode_bodies,
    has_record,
    record_bodies,
    record_of,
    snapshot_record,
)
from planaria.store.embedded import EmbeddedStore
from planaria.store.store import EMPTY, Change, Entry, StoreState, Superseded, state_after

logger = logging.getLogger(__name__)

REWRITE_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 600.0
_CLOSE_TIMEOUT_S: Final = 1.0
_RESERVED_BYTES_MAX: Final = 1 << 24
_RESERVED_SHARE: Final = 16  # At most one part in so many of what is free.
_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE
_STATUS_BLOCK_BYTES: Final = 512  # Unit of st_blocks, whatever blocks the file system has.
_REWRITE_FACTOR: Final = 4  # Journal size per snapshot size; rewriting costs 1/4 of appending.


# A function that returns once the changes are durable; it also gets the state after them. If it
# raises a StoreError they may or may not be durable, and no later change may be written.
MakeDurable = Callable[[Sequence[Change], StoreState], Awaitable[None]]


async def _keep_nothing(changes: Sequence[Change], state: StoreState) -> None:
    """The `MakeDurable` of a store in memory, which ends with its process."""


# A function that is called when the disk refuses. If it returns, the store goes on in memory only.
OnRefusal = Callable[[StoreError], Awaitable[None]]


def _wait_for_nothing() -> None:
    """The default for `before_write`, without an injected fault."""


async def _give_up(error: StoreError) -> None:
    """The `OnRefusal` of a store that fails once the disk refuses."""
    raise error


class Flusher:
    """A Keeper in this process's memory; `make_durable` may also write the changes to a disk.

    It runs on the event loop of the store's callers.

    Args:
        state: state to go on from, as recovered from the journal.
        make_durable: makes changes durable; by default they end with this process.
        on_refusal: called when `make_durable` raises a StoreError; by default the store fails then.
    """

    def __init__(
        self,
        *,
        state: StoreState = EMPTY,
        make_durable: MakeDurable = _keep_nothing,
        on_refusal: OnRefusal = _give_up,
    ) -> None:
        self._durable = state
        self._make_durable = make_durable
        self._on_refusal = on_refusal
        self._undurable: list[Change] = []
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._failure: StoreError | None = None

    @property
    def durable(self) -> StoreState:
        """See Keeper."""
        return self._durable

    def keep(self, changes: Sequence[Change]) -> None:
        """See Keeper."""
        if self._failure is not None:
            raise StoreError(str(self._failure)) from self._failure
        self._undurable += changes
        if self._undurable and self._task is None:
            # A separate task, so that a caller that is cancelled does not cancel the write.
            self._task = asyncio.create_task(self._flush())

    async def wait_durable(self, num_changes: int) -> None:
        """See Keeper."""

        def is_over() -> bool:
            return self._failure is not None or self._durable.num_changes >= num_changes

        async with self._changed:
            await self._changed.wait_for(is_over)
        if self._durable.num_changes < num_changes:
            raise StoreError(str(self._failure)) from self._failure

    async def close(self) -> None:
        """Waits for the flush in progress, but only briefly, because the disk may hang.

        From then on `keep` and `wait_durable` raise a StoreError.
        """
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=_CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
                await asyncio.wait(late)
        self._failure = self._failure or StoreError("the store is closed")
        async with self._changed:
            self._changed.notify_all()

    async def _flush(self) -> None:
        """Makes changes durable until none is left or the journal fails."""
        try:
            while self._undurable:
                changes, self._undurable = self._undurable, []
                state = state_after(self._durable, changes, now_s=0.0)
                try:
                    await self._make_durable(changes, state)
                except StoreError as error:
                    await self._on_refusal(error)
                    self._make_durable = _keep_nothing
                self._durable = state
                async with self._changed:
                    self._changed.notify_all()
        except StoreError as error:
            self._failure = error
        except BaseException as error:
            self._failure = StoreError(f"writing was broken off: {error!r}")
            raise
        finally:
            self._task = None
            async with self._changed:
                self._changed.notify_all()


@contextlib.asynccontextmanager
async def open_store(
    directory: Path,
    *,
    now_s: Callable[[], float],
    rewrite_bytes: int = REWRITE_BYTES,
    timeout_s: float = TIMEOUT_S,
    on_refusal: OnRefusal = _give_up,
    note: Callable[[str], None] = logger.warning,
    before_write: Callable[[], None] = _wait_for_nothing,
) -> AsyncIterator[EmbeddedStore]:
    """The store that is journaled in `directory`, as its last process left it; made if missing.

    Args:
        now_s: clock of leases; each lease of an earlier process expires a whole TTL from now.
        rewrite_bytes: size up to which a journal is never replaced by a snapshot.
        timeout_s: maximum time for the disk to write the changes of one flush.
        on_refusal: called when the disk refuses later; if it returns, the store goes on in memory.
            By default it raises, and the store fails.
        note: shows the user a text: that the disk is slow, or that the journal only grows.
        before_write: called before each write in the thread that writes; an injected fault may
            block there.

    Raises:
        StoreError: another process has the store open, it is damaged, or the disk refused at once.
    """
    opened_journal = _FileJournal(
        directory, rewrite_bytes, timeout_s=timeout_s, note=note, before_write=before_write
    )
    with contextlib.closing(opened_journal) as journal:
        flusher = Flusher(
            state=journal.recover(), make_durable=journal.append, on_refusal=on_refusal
        )
        try:
            yield EmbeddedStore(flusher, now_s=now_s)
        finally:
            await flusher.close()


def superseded_entries(directory: Path) -> list[Entry]:
    """All superseded entries of a store that are on its disk, the oldest write first.

    Raises:
        StoreError: the archive or the journal cannot be read, or the journal is damaged.
    """
    archive, journal = directory / "archive", directory / "journal"
    try:
        archive_bytes = archive.read_bytes() if archive.exists() else b""
        bodies, num_bytes = record_bodies(journal.read_bytes())
    except OSError as error:
        raise _disk_error(directory, error) from error
    if not bodies:
        raise _damaged_error(journal, num_bytes)
    entries = _newly_superseded(*decode_bodies(journal, bodies)) + archived_entries(archive_bytes)
    by_revision = {entry.revision: entry for entry in entries}
    return [by_revision[revision] for revision in sorted(by_revision)]


class _FileJournal:
    """The open journal; only one task at a time may call `append`."""

    def __init__(
        self,
        directory: Path,
        rewrite_bytes: int,
        *,
        timeout_s: float,
        note: Callable[[str], None],
        before_write: Callable[[], None],
    ) -> None:
        self._before_write = before_write
        self._path = directory / "journal"
        self._partial = directory / "journal.partial"
        self._least_bytes = self._rewrite_bytes = rewrite_bytes
        self._timeout_s = timeout_s
        self._note = note
        self._num_bytes = 0
        self._state = EMPTY  # The state after all changes in the file.
        self._superseded: list[Entry] = []  # Superseded since the snapshot in the file.
        self._is_named = False  # Whether the directory with the file's name is synced.
        self._is_growing = False  # Whether the user knows that no snapshot can be written.
        self._fd = self._lock_fd = -1
        # The file must not be closed during a write, and a write may go on after its caller has
        # given up.
        self._lock = threading.Lock()
        self._is_closed = False
        self._close_timeout_s = _CLOSE_TIMEOUT_S
        self._told_s = SLOW_S / 2.0  # Duration of a slow write when the user was last told.
        self._writer = _Writer()

    def recover(self) -> StoreState:
        """Locks the journal and reads or makes it; returns its state.

        The deadlines of leases in the state are meaningless.

        Raises:
            StoreError: another process has locked it, it is damaged, or the disk refused.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock_file(self._path.with_name("lock"))
            self._partial.unlink(missing_ok=True)
            if self._path.exists():
                self._read()
            else:
                self._rewrite(EMPTY)
                self._sync_name()
        except OSError as error:
            raise _disk_error(self._path, error) from error
        return self._state

    def _read(self) -> None:
        """Reads the file, cuts off a torn record, and opens the file for appending."""
        content = self._path.read_bytes()
        bodies, self._num_bytes = record_bodies(content)
        if not bodies or has_record(content, after=self._num_bytes):
            raise _damaged_error(self._path, self._num_bytes)
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        held = _reserved_bytes(self._fd)  # Cutting the file off gives them up.
        if self._num_bytes < len(content):
            logger.warning("%s: cut at byte %d, in a torn write", self._path, self._num_bytes)
            os.ftruncate(self._fd, self._num_bytes)
        # The last process may have been killed before it synced changes that count from now on.
        os.fsync(self._fd)
        self._sync_name()
        self._set_rewrite_bytes(len(bodies[0]))
        with contextlib.suppress(OSError):
            _reserve(self._fd, behind=self._num_bytes, least_bytes=held)
        state, changes = decode_bodies(self._path, bodies)
        self._superseded = _newly_superseded(state, changes)
        self._state = state_after(state, changes, now_s=0.0)

    async def append(self, changes: Sequence[Change], state: StoreState) -> None:
        """Writes changes durably, see MakeDurable; the disk does not block the event loop."""
        write = self._writer.result(partial(self._append, changes, state))
        wait_s = 0.0
        try:
            while not write.done():
                if wait_s >= self._timeout_s:
                    self._close_timeout_s = 0.0
                    raise StoreError(
                        f"{self._path.parent} has not answered for {wait_s:.0f} s; check the "
                        "disk, or name another place with --state"
                    )
                if wait_s >= 2.0 * self._told_s:  # Later notes need ever longer waits.
                    self._told_s = wait_s
                    self._note(
                        f"{self._path.parent} is slow: writing a record of the coordinator has "
                        f"taken {wait_s:.0f} s so far, and an answer to a loss would wait for it. "
                        "Check the disk, or name another place with --state"
                    )
                more_s = min(wait_s or SLOW_S, self._timeout_s - wait_s)
                await asyncio.wait({write}, timeout=more_s)
                wait_s += more_s
        finally:
            write.cancel()  # The write goes on, but its result is ignored.
        if text := write.result():
            self._note(text)

    def close(self) -> None:
        """Closes the file; a write that hangs closes it when it ends."""
        self._is_closed = True
        self._writer.end()
        if not self._lock.acquire(timeout=self._close_timeout_s):
            return
        try:
            for fd in (self._fd, self._lock_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._lock_fd = -1
        finally:
            self._lock.release()

    def _append(self, changes: Sequence[Change], state: StoreState) -> str:
        """Writes changes; returns a text for the user, or ""."""
        self._before_write()
        try:
            with self._lock:
                if self._fd < 0:
                    raise StoreError(f"{self._path} is closed")
                self._num_bytes += _write_synced(self._fd, record_of(changes))
                self._sync_name()
                self._superseded += _newly_superseded(self._state, changes)
                self._state = state
                return self._compact()
        except OSError as error:
            raise _disk_error(self._path, error) from error
        finally:
            if self._is_closed:
                self.close()

    def _compact(self) -> str:
        """Replaces the file by a snapshot once it has grown; returns a text for the user, or "".

        If it cannot, nothing is lost, and it tries again when the size of the file has doubled.
        """
        if self._num_bytes <= self._rewrite_bytes:
            return ""
        try:
            self._archive()
            self._rewrite(self._state)
        except OSError as error:
            self._rewrite_bytes = 2 * self._num_bytes
            is_known, self._is_growing = self._is_growing, True
            return (
                ""
                if is_known
                else (
                    f"{self._path} cannot be made smaller and grows ({error.strerror}), "
                    "while training goes on; free some space on the disk, or repair it"
                )
            )
        self._is_growing = False
        return ""

    def _archive(self) -> None:
        """Appends the entries superseded since the snapshot to the archive."""
        if not self._superseded:
            return
        path = self._path.with_name("archive")
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_CREAT, 0o600)
        try:
            _write(fd, b"".join(record_of((entry,)) for entry in self._superseded))
        finally:
            os.close(fd)
        self._superseded = []

    def _rewrite(self, state: StoreState) -> None:
        """Replaces the file, if any, by one that contains only a snapshot.

        It needs as many blocks in advance as the file still has: on a full disk these are worth
        more than a short file.
        """
        record = snapshot_record(state)
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_CREAT | os.O_TRUNC
        fd = os.open(self._partial, flags, 0o600)
        try:
            _write_synced(fd, record)
            held = _reserved_bytes(self._fd) if self._fd >= 0 else 0
            _reserve(fd, behind=len(record), least_bytes=held)
            os.replace(self._partial, self._path)
        except OSError:
            os.close(fd)
            self._partial.unlink(missing_ok=True)  # The disk may be full, so free the space.
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._is_named = False
        self._num_bytes = len(record)
        self._set_rewrite_bytes(len(record))

    def _set_rewrite_bytes(self, snapshot_bytes: int) -> None:
        self._rewrite_bytes = max(self._least_bytes, _REWRITE_FACTOR * snapshot_bytes)

    def _sync_name(self) -> None:
        """Makes the file's name durable, unless it is.

        This must happen before a change is acknowledged that is in this file only. Until then the
        name may still refer to the file before, which has the same state.
        """
        if not self._is_named:
            _sync_directory(self._path.parent)
            self._is_named = True


class _Writer:
    """The thread that writes; if it hangs, the process can end all the same.

    It is started early, because a machine that is short of threads may refuse one later.
    """

    def __init__(self) -> None:
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="journal", daemon=True).start()

    def result(self, act: Callable[[], str]) -> asyncio.Future[str]:
        """The result of `act`, which the thread calls after all earlier ones."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[str] = loop.create_future()

        def settle(text: str, error: Exception | None) -> None:
            if result.cancelled():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(text)

        def run() -> None:
            text, failure = "", None
            try:
                text = act()
            except Exception as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # The event loop is closed.
                loop.call_soon_threadsafe(settle, text, failure)

        self._acts.put(run)
        return result

    def end(self) -> None:
        """Makes the thread end after the acts that it was given."""
        self._acts.put(None)

    def _run(self) -> None:
        while (act := self._acts.get()) is not None:
            act()


def _lock_file(path: Path) -> int:
    """A descriptor of a lock file, locked until it is closed or this process ends.

    Raises:
        StoreError: another process has it locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A forked child that outlives this process would go on holding a lock of flock.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.close(fd)
        raise StoreError(f"another process has {path} locked; stop it first") from error
    return fd


def _newly_superseded(state: StoreState, changes: Sequence[Change]) -> list[Entry]:
    """The entries that are superseded when these changes are applied to the state."""
    if not any(isinstance(change, Superseded) for change in changes):
        return []
    entries, superseded = dict(state.entries), []
    for change in changes:
        if isinstance(change, Entry):
            entries[change.key] = change
        elif isinstance(change, Superseded):
            superseded.append(entries[change.key])
    return superseded


def _write_synced(fd: int, content: bytes) -> int:
    """Appends content and syncs it to the disk; returns the number of bytes."""
    _write(fd, content)
    os.fdatasync(fd)
    return len(content)


def _write(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _reserved_bytes(fd: int) -> int:
    """Bytes of the blocks that a file has behind its end."""
    status = os.fstat(fd)
    return max(0, status.st_blocks * _STATUS_BLOCK_BYTES - status.st_size)


def _reserve(fd: int, *, behind: int, least_bytes: int) -> None:
    """Allocates blocks behind a file's end, if the file system can, and leaves its size as it is.

    A call that fails for want of space may keep what it got, so few of the free blocks are taken.

    Args:
        behind: size of the file, in bytes.
        least_bytes: number of bytes that are allocated whatever is free.

    Raises:
        OSError: there is no room for these.
    """
    space = os.fstatvfs(fd)
    free_bytes = space.f_bavail * space.f_frsize
    num_bytes = min(_RESERVED_BYTES_MAX, max(least_bytes, free_bytes // _RESERVED_SHARE))
    libc, sizes = ctypes.CDLL(None, use_errno=True), map(ctypes.c_long, (behind, num_bytes))
    if num_bytes and libc.fallocate(fd, _KEEP_SIZE, *sizes):
        code = ctypes.get_errno()
        if least_bytes and code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))


def _sync_directory(directory: Path) -> None:
    """Syncs a directory, which makes new names in it durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _damaged_error(path: Path, num_bytes: int) -> StoreError:
    return StoreError(
        f"{path} is damaged at byte {num_bytes}, which a crash cannot cause; restore the "
        f"file, or remove {path.parent} and go on from what is saved with --resume"
    )


def _disk_error(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot use {path}: {error.strerror}; free some space on the disk, repair it, or "
        "name another place with --state"
    )
