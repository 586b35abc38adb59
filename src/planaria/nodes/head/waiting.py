"""What a launcher waits for: its coordinator, signals, and the end of its processes."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Final

import msgspec
import psutil

from planaria.coordinator.standstill import stands_still
from planaria.core.records import Ended
from planaria.nodes.forkserver import told
from planaria.protocol.agent_lease import TICKS_PER_LEASE

_READ_BYTES: Final = 1 << 20
# What tells a process to leave, beside Ctrl-C. The later ones come from schedulers (Slurm's
# --signal), limits and Ctrl-\, and end a process that does not handle them.
LEAVING: Final = (
    *(signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)


async def heard_while_running(
    reader: asyncio.StreamReader, pid: int, *, lease_s: float, stopped: Callable[[float], None]
) -> AsyncIterator[bytes]:
    """What a coordinator says until it is gone.

    One that works on a long decision is silent, too, and left alone: killed, it would have to begin
    again, and the next one as well.

    Args:
        pid: of the coordinator.
        stopped: is told since when one stands still, and kills it.
    """
    has_begun, silent_ticks, heard_s = False, 0, time.monotonic()
    now_computed_s = computed_s(pid)
    while True:
        try:
            async with asyncio.timeout(lease_s / TICKS_PER_LEASE):
                data = await reader.read(_READ_BYTES)
        except TimeoutError:
            before_s, now_computed_s = now_computed_s, computed_s(pid)
            silent_ticks = 0 if now_computed_s > before_s else silent_ticks + 1
            if stands_still(silent_ticks, has_begun=has_begun, lease_s=lease_s):
                stopped(heard_s)
            continue
        if not data:
            return
        has_begun, silent_ticks, heard_s = True, 0, time.monotonic()
        yield data


async def is_left_alone(lifeline_fd: int, *, timeout_s: float) -> bool:
    """Whether the last reader of the lifeline leaves in time; this is its write end."""
    loop = asyncio.get_running_loop()
    broken = asyncio.Event()
    loop.add_reader(lifeline_fd, broken.set)  # Nothing to read, but an error when it breaks.
    try:
        await asyncio.wait_for(broken.wait(), timeout_s)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(lifeline_fd)
    return True


@contextlib.contextmanager
def interrupts(
    loop: asyncio.AbstractEventLoop,
    handler: Callable[[], None],
    *,
    told_to_leave: Callable[[], None],
) -> Iterator[None]:
    """Ctrl-C calls the handler while inside; only a main thread can be interrupted.

    Afterwards signals that tell a process to leave are ignored, until `handlers_restored`: it is
    leaving, and whoever told it may tell it again, as a shell and the kernel do of a terminal.

    Args:
        told_to_leave: is called at those, unless they are ignored (SIGHUP under nohup) or the
            caller's process has a handler for one that is no request to leave everywhere (SIGUSR1).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    leaving = [number for number in LEAVING if _is_taken(number)]
    interrupted = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, handler)
    for number in leaving:
        loop.add_signal_handler(number, told_to_leave)
    try:
        yield
    finally:
        for number in leaving:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, interrupted)


def _is_taken(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    if number in (signal.SIGTERM, signal.SIGHUP):
        return handler is not signal.SIG_IGN
    return handler is signal.SIG_DFL


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Signals that tell a process to leave do afterwards what they did before."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in LEAVING if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None that was not set from Python, and cannot be.
                signal.signal(number, handler)


def computed_s(pid: int) -> float:
    """The seconds that a process has computed, 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def kill_group(pid: int) -> None:
    """Kills a process of the job and its group, which it has not made yet if it hung at once."""
    assert pid > 0, pid  # 0 is the caller's own group, -1 all that it may kill.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def explained(ended: Ended, statuses: Collection[int]) -> Ended:
    """The end; a job without any node left names how they ended.

    Args:
        statuses: of agents that ended by themselves.
    """
    if ended.nodes or ended.ending != "lost" or not statuses:
        return ended
    hows = ", ".join(sorted({told(status).removeprefix("was ") for status in statuses}))
    return msgspec.structs.replace(ended, reason=f"{ended.reason}: their agents ended: {hows}")
