"""What a process with a store open has acknowledged is there after SIGKILL, wherever it hits."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers import store_writer
from planaria.errors import StoreError
from planaria.nodes.head.journal import open_store
from planaria.store.store import KeyRange

TIMEOUT_S = 20.0


def store_content(directory: Path) -> KeyRange:
    """What a process that starts on this directory finds."""

    async def run() -> KeyRange:
        async with open_store(directory, now_s=lambda: 0.0) as store:
            return await store.range("")

    return asyncio.run(run())


@contextmanager
def writer(directory: Path, mode: str, number: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process of store_writer.py, killed at the end if it is not gone by then."""
    script = Path(store_writer.__file__)
    process = subprocess.Popen(
        [sys.executable, str(script), str(directory), mode, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def revisions_told(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout
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
    tmp_path: Path, call: str, number: int
) -> None:
    """In the middle of a record, of a snapshot, and around its rename; the next goes on from it."""
    with writer(tmp_path, call, number) as process:
        told = revisions_told(process)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    check_written(tmp_path, acknowledged=max(told, default=0))

    with writer(tmp_path, call, 2) as process:
        told += revisions_told(process)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    check_written(tmp_path, acknowledged=max(told, default=0))


def test_a_process_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """Six times in a row, after as many acknowledgements as a seed says."""
    rng = random.Random(5)
    acknowledged = 0

    for _ in range(6):
        with writer(tmp_path, "endless") as process:
            assert process.stdout
            for _ in range(rng.randrange(1, 40)):
                acknowledged = int(process.stdout.readline())
            process.kill()
            # A line that was cut off acknowledged nothing.
            rest = process.stdout.read().rpartition("\n")[0].splitlines()
            acknowledged = int(rest[-1]) if rest else acknowledged
        check_written(tmp_path, acknowledged=acknowledged)


def test_only_one_process_has_a_store_open(tmp_path: Path) -> None:
    """A second launcher in the same directory is refused; after a kill the next is let in."""
    with writer(tmp_path, "ready", 1) as process:
        assert process.stdout
        assert process.stdout.readline() == "1\n"
        with pytest.raises(StoreError, match=r"another process has .*lock locked"):
            store_content(tmp_path)
        process.kill()
        process.wait(TIMEOUT_S)

        assert store_content(tmp_path).revision == 1


def test_a_child_that_outlives_the_store_does_not_lock_it(tmp_path: Path) -> None:
    """Forked children inherit every descriptor, and a restart must not wait for their end."""
    with writer(tmp_path, "forking", 1) as process:
        assert process.stdout
        assert process.stdout.readline() == "1\n"
        process.kill()
        process.wait(TIMEOUT_S)

        assert store_content(tmp_path).revision == 1
        assert process.stdin
        process.stdin.close()
