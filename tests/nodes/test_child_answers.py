"""Child processes that are forked for one question are reaped, whoever still waits for them."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

import psutil
import pytest

from helpers.command import wait_for
from helpers.heads import runs
from helpers.tasks import settle, wait_until
from planaria.nodes import child_answers
from planaria.nodes.child_answers import (
    answer_of_child,
    fork_answer,
    kill_holders,
    program_result,
    wait_exit,
)
from planaria.nodes.forkserver import close_others


def test_the_status_of_a_child_is_told() -> None:
    pid, sock = fork_answer(lambda: b"")
    with sock:
        assert asyncio.run(wait_exit(pid)) == 0


@runs
async def test_a_child_whose_end_nobody_waits_for_any_more_is_reaped_once() -> None:
    """The event loop was told of its end again and again, and each time found nobody waiting."""
    pid, sock = fork_answer(_wait)
    with sock:
        waiting = asyncio.create_task(wait_exit(pid))
        await settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: _is_reaped(pid))
        await settle()  # What goes wrong on the event loop now fails the test.


@runs
async def test_a_child_whose_answer_nobody_waits_for_any_more_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent that looks up its head's name again and again would leave one at each try."""
    pids = list[int]()

    def fork_and_note(answer: Callable[[], bytes]) -> tuple[int, socket.socket]:
        pid, sock = fork_answer(answer)
        pids.append(pid)
        return pid, sock

    monkeypatch.setattr(child_answers, "fork_answer", fork_and_note)
    waiting = asyncio.create_task(answer_of_child(_wait, timeout_s=1e6))
    await wait_until(lambda: bool(pids))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    await wait_until(lambda: _is_reaped(pids[0]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@runs
async def test_a_notice_ends_no_child_but_programs_that_it_starts(number: signal.Signals) -> None:
    """A check of the user's may end what it has started, and wait for it."""

    def answer() -> bytes:
        os.kill(os.getpid(), number)
        words = "/bin/sh", "-c", f"kill -{number:d} $$; exit 0"
        return b"%d" % program_result(words, timeout_s=10.0)[0]

    assert await answer_of_child(answer, timeout_s=20.0) == b"%d" % -number


def test_what_an_ended_child_has_forked_is_killed_and_nothing_else() -> None:
    """It lived on until the end of the node, and kept its memory: one more with each crash."""
    files = [os.memfd_create("stack") for _ in range(2)]
    lefts = [_leave_process(file) for file in files]
    child = _leave_child(files[0])
    kill_holders(files[0])
    try:
        wait_for(lambda: _is_dead(lefts[0]), what="the end of what was forked")
        assert not any(map(_is_dead, (lefts[1], child)))
    finally:
        for process in (*lefts, child):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.waitpid(child.pid, 0)
        for file in files:
            os.close(file)


def _is_dead(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def _leave_process(file: int) -> psutil.Process:
    """A process whose parent, which has that file alone, has ended."""
    own, other = os.pipe()
    parent = os.fork()
    if parent == 0:
        close_others({file, other})
        left = os.fork()
        if left == 0:
            _wait()
        os.write(other, b"%d" % left)
        os._exit(0)
    os.waitpid(parent, 0)
    left = int(os.read(own, 100))
    os.close(own)
    os.close(other)
    return psutil.Process(left)


def _leave_child(file: int) -> psutil.Process:
    """A child that is about to close that file."""
    pid = os.fork()
    if pid == 0:
        close_others({file})
        _wait()
    return psutil.Process(pid)


def _wait() -> bytes:
    signal.pause()
    return b""


def _is_reaped(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True
