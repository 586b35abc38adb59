"""What a launcher hears of its coordinator, and when it has it killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec import structs

from helpers.tasks import TIMEOUT_S
from planaria.core.kinds import Ending
from planaria.core.records import Ended
from planaria.nodes.head.process_events import (
    LEAVE_SIGNALS,
    computed_s,
    coordinator_data,
    handle_signals,
    kill_group,
    restore_handlers,
    with_agent_exits,
)

Handler = Callable[[int, Any], object] | int | None

LEASE_S = 0.3
BEAT_S = LEASE_S / 10


def hear_coordinator(
    speak: Callable[[socket.socket], Coroutine[Any, Any, None]],
    *,
    pid: int = 0,
) -> tuple[bytes, list[float]]:
    """What was heard of a coordinator that says this, and for how long it had been silent when it
    was taken for one that stands still, which closes its connection. 0 is no process's pid."""
    silences_s: list[float] = []

    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)

        def stopped(since_s: float) -> None:
            silences_s.append(time.monotonic() - since_s)
            theirs.close()

        speaking = asyncio.create_task(speak(theirs))
        heard = [
            data
            async for data in coordinator_data(reader, pid, lease_s=LEASE_S, on_standstill=stopped)
        ]
        await speaking
        writer.close()
        return b"".join(heard)

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S)), silences_s


def test_a_coordinator_that_falls_silent_is_killed_once() -> None:
    """It is told since when: training may have waited for it as long."""

    async def speak(line: socket.socket) -> None:
        line.send(b"I lead")

    heard, silences_s = hear_coordinator(speak)

    assert heard == b"I lead"
    (silent_s,) = silences_s
    assert silent_s > LEASE_S / 2


def test_a_coordinator_that_is_silent_because_it_computes_is_left_alone() -> None:
    """It was killed in the middle of a long decision; the next one would have been, too."""

    async def speak(line: socket.socket) -> None:
        line.send(b"I lead")
        await asyncio.sleep(3 * LEASE_S)
        line.send(b", and have decided")
        line.close()

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        assert hear_coordinator(speak, pid=busy.pid) == (b"I lead, and have decided", [])
        busy.kill()


def test_what_a_process_has_computed_is_told_also_where_it_is_gone() -> None:
    begin_s = computed_s(os.getpid())
    while time.process_time() < begin_s + 0.05:
        pass

    assert computed_s(os.getpid()) > begin_s
    child = subprocess.Popen(["true"])
    child.wait()
    assert computed_s(child.pid) == 0.0


def test_a_coordinator_that_beats_is_left_alone() -> None:
    """For as many leases as it likes; its end is its own."""

    async def speak(line: socket.socket) -> None:
        for _ in range(40):
            line.send(b".")
            await asyncio.sleep(BEAT_S)
        line.close()

    assert hear_coordinator(speak) == (b"." * 40, [])


def test_time_in_which_the_launcher_was_stopped_is_not_held_against_the_coordinator() -> None:
    """A laptop that was closed; when it is opened again both go on."""

    async def speak(line: socket.socket) -> None:
        line.send(b"I lead")
        await asyncio.sleep(BEAT_S)
        time.sleep(5 * LEASE_S)  # Nothing of this process runs meanwhile.
        line.send(b", still")
        line.close()

    assert hear_coordinator(speak) == (b"I lead, still", [])


def told_to_leave(number: signal.Signals, *, times: int, before: Handler) -> tuple[int, Handler]:
    """How often a launcher is told of a signal, and what handles the next one.

    Args:
        before: handles it before the launcher does.
    """
    told: list[None] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with handle_signals(loop, lambda: None, on_leave_signal=lambda: told.append(None)):
            for _ in range(times):
                os.kill(os.getpid(), number)
                for _ in range(10):  # The handler has its turn in one of the next.
                    await asyncio.sleep(0)

    with restore_handlers():
        signal.signal(number, before)
        asyncio.run(run())
        return len(told), signal.getsignal(number)


@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_what_tells_a_process_to_leave_is_told_and_interrupts_nothing_after_it(
    number: signal.Signals,
) -> None:
    """What follows the job, its report say, takes long, and a shell tells late of a terminal that
    is gone."""
    before = signal.getsignal(number)

    assert told_to_leave(number, times=2, before=signal.SIG_DFL) == (2, signal.SIG_IGN)
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_is_left_at_that() -> None:
    """Who ignores SIGHUP, as nohup does, wants the job to go on."""
    for number in LEAVE_SIGNALS:
        assert told_to_leave(number, times=1, before=signal.SIG_IGN) == (0, signal.SIG_IGN)


def test_a_signal_that_the_user_has_given_a_meaning_keeps_it() -> None:
    """As SIGUSR1 has in many programs."""
    had: list[int] = []

    def handler(number: int, _: object) -> None:
        had.append(number)

    told = told_to_leave(signal.SIGUSR1, times=1, before=handler)

    assert told == (0, handler)
    assert had == [signal.SIGUSR1]


def test_no_group_of_the_caller_is_killed() -> None:
    """0 and -1 are no process."""
    for pid in (0, -1):
        with pytest.raises(AssertionError):
            kill_group(pid)


def test_a_job_without_any_node_left_says_how_they_ended_by_themselves() -> None:
    """Those that planaria had to kill had not."""
    lost = Ended(ending=Ending.LOST, reason="no node is left", failure=None, nodes=(), epoch=3)

    reason = with_agent_exits(lost, {-9, 1}).reason
    assert reason == "no node is left: their agents ended: ended with status 1, killed by signal 9"
    assert with_agent_exits(lost, ()) == lost
    assert with_agent_exits(structs.replace(lost, nodes=(2,)), {-9}).reason == lost.reason
