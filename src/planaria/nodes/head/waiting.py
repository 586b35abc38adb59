"""Events for which a launcher waits: its coordinator's messages, signals, and ends of processes."""

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

from planaria.coordinator.membership.standstill import stands_still
from planaria.core.records import Ended
from planaria.nodes.forkserver import told
from planaria.protocol.agent_lease import TICKS_PER_LEASE

_READ_BYTES: Final = 1 << 20
# Signals besides SIGINT (Ctrl-C) that tell a process to leave. Those in the second line come from
# schedulers (Slurm's --signal), limits and Ctrl-\, and end a process that does not handle them.
LEAVING: Final = (
    *(signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)


async def heard_while_running(
    reader: asyncio.StreamReader, pid: int, *, lease_s: float, stopped: Callable[[float], None]
) -> AsyncIterator[bytes]:
    """Yields what a coordinator says until it is gone.

    A coordinator that works on a long decision is silent too, but is not killed: the next one would
    have to begin the same decision again.

    Args:
        pid: pid of the coordinator.
        stopped: callback, called with the time of the last message of a coordinator that stands
            still; is to kill it.
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
    """Whether the last process that has a read end of the lifeline ends in time.

    Args:
        lifeline_fd: write end of the lifeline.
    """
    loop = asyncio.get_running_loop()
    broken = asyncio.Event()
    loop.add_reader(lifeline_fd, broken.set)  # A write end reports an error when the pipe breaks.
    try:
        await asyncio.wait_for(broken.wait(), timeout_s)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(lifeline_fd)
    return True


async def wait_until(is_so: Callable[[], bool], *, timeout_s: float) -> None:
    """Waits until something is so, for a bounded time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline_s:
        await asyncio.sleep(0.002)


@contextlib.contextmanager
def interrupts(
    loop: asyncio.AbstractEventLoop,
    handler: Callable[[], None],
    *,
    told_to_leave: Callable[[], None],
) -> Iterator[None]:
    """Handles SIGINT and the signals in `LEAVING` while the body of the `with` runs.

    It does nothing outside the main thread. After the body, the handled signals of `LEAVING` are
    ignored, until `handlers_restored` ends: the process is leaving, and the same signal may be sent
    again, as a shell and the kernel both do when a terminal closes.

    Args:
        handler: callback, called at SIGINT (Ctrl-C).
        told_to_leave: callback, called at signals in `LEAVING`. Not handled are a signal that this
            process ignores (SIGHUP under nohup), and a signal other than SIGTERM and SIGHUP for
            which this process already has a handler.
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
    """Restores the handlers of the signals in `LEAVING` after the body of the `with`."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in LEAVING if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: the handler was not set from Python.
                signal.signal(number, handler)


def computed_s(pid: int) -> float:
    """Processor seconds that a process has used; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def kill_group(pid: int) -> None:
    """Kills a process of the job and its process group.

    The process is killed by its pid too, because it may not have made its group yet.
    """
    assert pid > 0, pid  # 0 means the caller's own group, and -1 every process it may kill.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def explained(ended: Ended, statuses: Collection[int]) -> Ended:
    """The end of a job; if no node is left, its reason also says how the agents ended.

    Args:
        statuses: exit statuses of the agents that ended by themselves.
    """
    if ended.nodes or ended.ending != "lost" or not statuses:
        return ended
    hows = ", ".join(sorted({told(status).removeprefix("was ") for status in statuses}))
    return msgspec.structs.replace(ended, reason=f"{ended.reason}: their agents ended: {hows}")
