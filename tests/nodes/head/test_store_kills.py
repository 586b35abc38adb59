"""What a process with a store open has acknowledged is there after SIGKILL, wherever it hits."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from helpers import store_writer
from helpers.forked_ranks import wait_exit
from planaria.errors import StoreError
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.journal import open_store
from planaria.store.store import KeyRange


def store_content(directory: Path) -> KeyRange:
    """What a process that starts on this directory finds."""

    async def run() -> KeyRange:
        async with open_store(directory, now_s=lambda: 0.0) as store:
            return await store.range("")

    return asyncio.run(run())


class Writer:
    """A process of store_writer.py."""

    def __init__(self, server: ForkServer, directory: Path, mode: str, number: int) -> None:
        self._server = server
        with ExitStack() as theirs:
            their_input_fd, input_fd = os.pipe()
            theirs.callback(os.close, their_input_fd)
            output_fd, their_output_fd = os.pipe()
            theirs.callback(os.close, their_output_fd)
            self.stdin, self.stdout = os.fdopen(input_fd, "w"), os.fdopen(output_fd)
            payload = json.dumps([str(directory), mode, number]).encode()
            target = f"{store_writer.__name__}:main"
            self._pid = server.spawn(target, payload, (their_input_fd, their_output_fd))
        self._status: int | None = None

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        if self._status is None:
            self._status = wait_exit(self._server, self._pid)
        return self._status

    def kill(self) -> None:
        """Kills it if it is not gone by then."""
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            self.wait()


@contextmanager
def writer(server: ForkServer, directory: Path, mode: str, number: int = 0) -> Iterator[Writer]:
    """A process of store_writer.py, killed at the end if it is not gone by then."""
    process = Writer(server, directory, mode, number)
    with process.stdin, process.stdout:
        try:
            yield process
        finally:
            process.kill()


def revisions_told(process: Writer) -> list[int]:
    return [int(line) for line in process.stdout.read().splitlines() if line]


def check_written(directory: Path, *, acknowledged: int) -> None:
    """Everything acknowledged is there, and the keys tell of one moment."""
    entries, revision = store_content(directory)
    assert revision >= acknowledged
    assert all(int(entry.value) == entry.revision for entry in entries)
    newest = list(range(max(revision - 3, 1), revision + 1))
    assert newest == [entry.revision for entry in entries]


@pytest.mark.parametrize(
    ("call", "number"),
    [
        *(("write", number) for number in (1, 2, 7, 8, 9)),
        *(("fdatasync", number) for number in (1, 7, 8, 9)),
        *(("replace", number) for number in (1, 2)),
        *(("fsync", number) for number in (1, 2)),
    ],
)
def test_a_process_killed_inside_any_call_loses_nothing(
    server: ForkServer, tmp_path: Path, call: str, number: int
) -> None:
    """In the middle of a record, of a snapshot, and around its rename; the next goes on from it."""
    with writer(server, tmp_path, call, number) as process:
        told = revisions_told(process)
        assert process.wait() == -signal.SIGKILL
    check_written(tmp_path, acknowledged=max(told, default=0))

    with writer(server, tmp_path, call, 2) as process:
        told += revisions_told(process)
        assert process.wait() == -signal.SIGKILL
    check_written(tmp_path, acknowledged=max(told, default=0))


def test_a_process_killed_at_any_moment_loses_nothing(server: ForkServer, tmp_path: Path) -> None:
    """Six times in a row, after as many acknowledgements as a seed says."""
    rng = random.Random(5)
    acknowledged = 0

    for _ in range(6):
        with writer(server, tmp_path, "endless") as process:
            for _ in range(rng.randrange(1, 40)):
                acknowledged = int(process.stdout.readline())
            process.kill()
            # A line that was cut off acknowledged nothing.
            rest = process.stdout.read().rpartition("\n")[0].splitlines()
            acknowledged = int(rest[-1]) if rest else acknowledged
        check_written(tmp_path, acknowledged=acknowledged)


def test_only_one_process_has_a_store_open(server: ForkServer, tmp_path: Path) -> None:
    """A second launcher in the same directory is refused; after a kill the next is let in."""
    with writer(server, tmp_path, "ready", 1) as process:
        assert process.stdout.readline() == "1\n"
        with pytest.raises(StoreError, match=r"another process has .*lock locked"):
            store_content(tmp_path)
        process.kill()

        assert store_content(tmp_path).revision == 1


def test_a_child_that_outlives_the_store_does_not_lock_it(
    server: ForkServer, tmp_path: Path
) -> None:
    """Forked children inherit every descriptor, and a restart must not wait for their end."""
    with writer(server, tmp_path, "forking", 1) as process:
        assert process.stdout.readline() == "1\n"
        process.kill()

        assert store_content(tmp_path).revision == 1
        process.stdin.close()
