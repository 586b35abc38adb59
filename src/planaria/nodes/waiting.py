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

from planaria.coordinator.agent_lease import TICKS_PER_LEASE
from planaria.coordinator.standstill import stands_still
from planaria.core.records import Ended
from planaria.nodes.forkserver import told

_READ_BYTES: Final = 1 << 20


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
    hung_up: Callable[[], None],
) -> Iterator[None]:
    """Ctrl-C and SIGTERM call the handler while inside; only a main thread can be interrupted.

    Args:
        hung_up: is called when the terminal is gone (SIGHUP), unless that is ignored (nohup).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hang_up() -> None:
        before[signal.SIGHUP] = signal.SIG_IGN  # It comes from the kernel and from a shell.
        hung_up()

    handlers = {signal.SIGINT: handler, signal.SIGTERM: handler, signal.SIGHUP: hang_up}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handle in handlers.items():
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, old)


def computed_s(pid: int) -> float:
    """The seconds that a process has computed, 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def kill_group(pid: int) -> None:
    """Kills a process of the job and its group, which it has not made yet if it hung at once."""
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
