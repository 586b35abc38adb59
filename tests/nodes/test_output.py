"""Output that nobody reads, or cannot be written: nobody waits for it, and nothing fails."""

import fcntl
import os
import subprocess
import sys
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from helpers.command import TIMEOUT_S, wait_for
from planaria.nodes.output import (
    ForwardedOutput,
    Outlet,
    _pass_bytes,
    _pipe_data,
    _write_note,
    write_all,
)


class Reader:
    """Takes lines once it is told to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.reads = threading.Event()

    def take(self, line: str) -> None:
        assert self.reads.wait(TIMEOUT_S)
        self.lines.append(line)


def full_outlet(reader: Reader, *, num_lines: int) -> Outlet:
    """An outlet with room for 10 lines whose reader does not read."""
    outlet = Outlet(reader.take, queued_bytes_max=10 * 1000)
    outlet.post(partial(reader.take, "first"))
    wait_for(lambda: not outlet._queue, what="the thread waits for the reader")
    for number in range(num_lines):
        outlet.post(partial(reader.take, str(number)), num_bytes=600)
    return outlet


def test_what_is_posted_is_printed_in_order_before_it_closes() -> None:
    """From whatever thread; nothing is left out where somebody reads."""
    reader = Reader()
    reader.reads.set()
    outlet = Outlet(reader.take)
    for number in range(100):
        outlet.post(partial(reader.take, str(number)))

    outlet.close(partial(reader.take, "last"), timeout_s=TIMEOUT_S)

    assert reader.lines == [*map(str, range(100)), "last"]


def test_who_posts_waits_for_nobody_and_what_was_dropped_is_told_in_its_place() -> None:
    """How many lines, between those that came before and those that came after."""
    reader = Reader()
    outlet = full_outlet(reader, num_lines=50)

    reader.reads.set()
    wait_for(lambda: len(reader.lines) == 12, what="all that was queued is printed")
    outlet.post(partial(reader.take, "after"))
    outlet.close(timeout_s=TIMEOUT_S)

    told = "(40 lines are left out here: nobody read them in time)"
    assert reader.lines == ["first", *map(str, range(10)), told, "after"]


def test_once_it_is_full_it_takes_nothing_until_half_of_it_is_printed() -> None:
    """Else each line that a slow reader takes would be followed by a note."""
    lines: list[str] = []
    turns = threading.Semaphore(0)

    def take(line: str) -> None:
        assert turns.acquire(timeout=TIMEOUT_S)
        lines.append(line)

    outlet = Outlet(take, queued_bytes_max=10 * 1000)
    for number in range(100):
        outlet.post(partial(take, str(number)), num_bytes=600)
        if number % 2:  # The reader is half as fast.
            turns.release()
            wait_for(lambda: len(lines) > number // 2, what="a line is printed")  # noqa: B023
    turns.release(1000)
    outlet.close(timeout_s=TIMEOUT_S)

    notes = [index for index, line in enumerate(lines) if "left out" in line]
    assert len(notes) > 1
    assert all(after - before > 4 for before, after in pairwise(notes))


def test_who_closes_waits_for_nobody_who_does_not_read() -> None:
    """What it was to say last is printed all the same where somebody reads on."""
    reader = Reader()
    outlet = full_outlet(reader, num_lines=50)

    outlet.close(partial(reader.take, "last"), timeout_s=0.01)
    assert not reader.lines
    outlet.post(partial(reader.take, "too late"))
    reader.reads.set()

    wait_for(lambda: "last" in reader.lines, what="all that was queued is printed")
    assert "40 lines" in reader.lines[-2]


def test_what_fails_to_print_is_logged_and_the_rest_is_printed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mistake in a display is no reason to end a job."""
    reader = Reader()
    reader.reads.set()
    outlet = Outlet(reader.take)

    outlet.post(lambda: 1 / 0)
    outlet.close(partial(reader.take, "last"), timeout_s=TIMEOUT_S)

    assert reader.lines == ["last"]
    assert "ZeroDivisionError" in caplog.text


def test_what_nobody_will_take_is_dropped() -> None:
    """A pipe without a reader, a descriptor that is closed, a full disk."""
    source_fd, target_fd = os.pipe()
    os.close(source_fd)
    full_fd = os.open("/dev/full", os.O_WRONLY)

    for descriptor in (target_fd, full_fd, -1):
        with pytest.raises(OSError, match=r"Errno"):
            os.write(descriptor, b"text")
        write_all(descriptor, b"text")

    os.close(target_fd)
    os.close(full_fd)


def test_a_pipe_that_does_not_block_gets_all() -> None:
    """It is not ours alone: whoever shares it may have made it so."""
    source_fd, target_fd = os.pipe()
    os.set_blocking(target_fd, False)
    writing = threading.Thread(target=write_all, args=(target_fd, bytes(1 << 20)))
    writing.start()

    num_bytes = 0
    while num_bytes < 1 << 20:
        num_bytes += len(os.read(source_fd, 1 << 16))
    writing.join(TIMEOUT_S)

    assert not writing.is_alive()
    os.close(source_fd)
    os.close(target_fd)


def test_lines_are_passed_on_whole_and_the_last_one_too() -> None:
    """Letters of several bytes come apart between two reads; a line without end is cut."""
    lines: list[str] = []
    passed_on = ForwardedOutput(lines.append)
    write_fd = os.dup(passed_on.stdout_fd)
    passed_on.begin()
    for data in ("one\n\u00e9".encode()[:-1], "\u00e9".encode()[1:] + b"\n", b"x" * 100_000):
        os.write(write_fd, data)
    os.close(write_fd)

    passed_on.close(timeout_s=TIMEOUT_S)

    assert lines[:2] == ["one", "\u00e9"]
    assert "".join(lines[2:]) == "x" * 100_000


def test_what_has_no_end_of_a_line_is_told_of_when_it_is_dropped() -> None:
    """As of a progress bar, which writes over itself."""
    source_fd, target_fd = os.pipe()
    bars_fd, bar_fd = os.pipe()
    fcntl.fcntl(target_fd, fcntl.F_SETPIPE_SZ, 4096)
    outlet = Outlet(partial(_write_note, target_fd), queued_bytes_max=10_000)
    passing = threading.Thread(target=_pass_bytes, args=(_pipe_data(bars_fd), outlet, target_fd))
    passing.start()
    for _ in range(1000):
        os.write(bar_fd, b"\r" + b"=" * 999)
    os.close(bar_fd)
    passing.join(TIMEOUT_S)

    read = bytearray()
    reading = threading.Thread(target=lambda: read.extend(_all(source_fd)))
    reading.start()
    assert outlet.close(timeout_s=TIMEOUT_S)
    os.close(target_fd)
    reading.join(TIMEOUT_S)

    assert b"left out here: nobody read them in time" in read


def _all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_what_is_printed_is_passed_on_if_the_process_between_is_killed() -> None:
    """Nobody who prints fails with it."""
    lines: list[str] = []
    passed_on = ForwardedOutput(lines.append)
    write_fd = os.dup(passed_on.stdout_fd)
    passed_on.begin()
    os.write(write_fd, b"one\n")
    wait_for(lambda: lines == ["one"], what="a line is passed on")
    passed_on._relay.kill()
    passed_on._relay.wait(TIMEOUT_S)
    os.write(write_fd, b"two\n")
    wait_for(lambda: lines == ["one", "two"], what="another one is passed on")
    os.close(write_fd)

    passed_on.close(timeout_s=TIMEOUT_S)
    assert not any(reader.is_alive() for reader in passed_on._readers)


@pytest.mark.parametrize("num_started", [0, 1])
def test_no_process_stays_where_a_thread_that_passes_on_cannot_be_started(
    num_started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine is short of threads it is tried again and again."""
    before = set(psutil.Process().children())
    passed_on = ForwardedOutput(None)
    refused = passed_on._readers[num_started]
    error = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(refused, "start", error)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        passed_on.begin()

    assert before.issuperset(psutil.Process().children())  # Zombies are children, too.
    for reader in passed_on._readers[:num_started]:
        reader.join(TIMEOUT_S)
        assert not reader.is_alive()


TALKER = """
import sys
from planaria.nodes.forkserver import ForkServer
server = ForkServer(["talking"], path=[sys.argv[1]])
server.call("talking:talk", b"")
open(sys.argv[2], "w").close()
server.close()
"""
TALKING = """
import os, sys
def talk(_, fd):
    for _ in range(100):
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr)
    os.write(fd, b"done")
"""


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_is_printed_into_a_pipe_that_nobody_reads_holds_up_no_process(
    is_closed: bool, tmp_path: Path
) -> None:
    """20 MB, which are more than any pipe takes; nor does it change how the launcher ends."""
    (tmp_path / "talking.py").write_text(TALKING)
    source_fd, target_fd = os.pipe()
    fcntl.fcntl(target_fd, fcntl.F_SETPIPE_SZ, 4096)
    done = tmp_path / "done"
    arguments = [sys.executable, "-c", TALKER, str(tmp_path), str(done)]
    with subprocess.Popen(arguments, stdout=target_fd, stderr=target_fd) as process:
        os.close(target_fd)
        if is_closed:
            os.close(source_fd)

        assert process.wait(timeout=TIMEOUT_S) == 0

    assert done.exists()
    if not is_closed:
        os.close(source_fd)
