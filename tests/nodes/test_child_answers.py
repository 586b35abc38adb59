"""Child processes that are forked for one question are reaped, whoever still waits for them."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

import pytest

from helpers.heads import runs
from helpers.tasks import settle, wait_until
from planaria.nodes import child_answers
from planaria.nodes.child_answers import (
    answer_of_child,
    fork_answer,
    program_result,
    wait_exit,
)


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


def _wait() -> bytes:
    signal.pause()
    return b""


def _is_reaped(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True
