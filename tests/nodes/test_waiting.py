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

from msgspec import structs

from planaria.core.records import Ended
from planaria.nodes.waiting import computed_s, explained, heard_while_running, interrupts
from tasks import TIMEOUT_S

LEASE_S = 0.3
BEAT_S = LEASE_S / 10


def listened(
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
            async for data in heard_while_running(reader, pid, lease_s=LEASE_S, stopped=stopped)
        ]
        await speaking
        writer.close()
        return b"".join(heard)

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S)), silences_s


def test_a_coordinator_that_falls_silent_is_killed_once() -> None:
    """It is told since when: training may have waited for it as long."""

    async def speak(line: socket.socket) -> None:
        line.send(b"I lead")

    heard, silences_s = listened(speak)

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
        assert listened(speak, pid=busy.pid) == (b"I lead, and have decided", [])
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

    assert listened(speak) == (b"." * 40, [])


def test_time_in_which_the_launcher_was_stopped_is_not_held_against_the_coordinator() -> None:
    """A laptop that was closed; when it is opened again both go on."""

    async def speak(line: socket.socket) -> None:
        line.send(b"I lead")
        await asyncio.sleep(BEAT_S)
        time.sleep(5 * LEASE_S)  # Nothing of this process runs meanwhile.
        line.send(b", still")
        line.close()

    assert listened(speak) == (b"I lead, still", [])


def hangups(num_signals: int, handler: signal.Handlers) -> tuple[int, object]:
    """How many of so many SIGHUPs a launcher is told of, and what handles the next one.

    Args:
        handler: before the launcher has one.
    """
    told: list[None] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with interrupts(loop, lambda: None, hung_up=lambda: told.append(None)):
            for _ in range(num_signals):
                os.kill(os.getpid(), signal.SIGHUP)
                for _ in range(10):  # The handler has its turn in one of the next.
                    await asyncio.sleep(0)

    before = signal.signal(signal.SIGHUP, handler)
    try:
        asyncio.run(run())
        return len(told), signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_gone_is_told_of_and_cannot_go_again() -> None:
    """What follows the job, its report say, is not interrupted by a shell that tells of it late;
    without any the signal does afterwards what it did before."""
    assert hangups(0, signal.SIG_DFL) == (0, signal.SIG_DFL)
    assert hangups(2, signal.SIG_DFL) == (2, signal.SIG_IGN)


def test_under_nohup_nobody_is_told_that_a_terminal_is_gone() -> None:
    """Who ignores SIGHUP wants the job to go on."""
    assert hangups(1, signal.SIG_IGN) == (0, signal.SIG_IGN)


def test_a_job_without_any_node_left_says_how_they_ended_by_themselves() -> None:
    """Those that planaria had to kill had not."""
    lost = Ended(ending="lost", reason="no node is left", failure=None, nodes=(), epoch=3)

    reason = explained(lost, {-9, 1}).reason
    assert reason == "no node is left: their agents ended: killed by signal 9, left with status 1"
    assert explained(lost, ()) == lost
    assert explained(structs.replace(lost, nodes=(2,)), {-9}).reason == lost.reason
