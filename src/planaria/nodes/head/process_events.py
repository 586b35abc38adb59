"""Events for which a launcher waits: its coordinator's messages, signals, and ends of processes."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, wait
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar

import msgspec
import psutil

from planaria.coordinator.membership.standstill import is_standing_still
from planaria.core.kinds import Ending
from planaria.core.records import Ended
from planaria.nodes.forkserver import exit_text
from planaria.protocol.agent_lease import TICKS_PER_LEASE

Result = TypeVar("Result")

_READ_BYTES: Final = 1 << 20
_LOOK_S: Final = 0.2  # Interval at which a thread that waits looks for signals.
# Signals besides SIGINT (Ctrl-C) that tell a process to leave. Those in the second line come from
# schedulers (Slurm's --signal), limits and Ctrl-\, and end a process that does not handle them.
LEAVE_SIGNALS: Final = (
    *(signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)


async def coordinator_data(
    reader: asyncio.StreamReader,
    pid: int,
    *,
    lease_s: float,
    on_standstill: Callable[[float], None],
) -> AsyncIterator[bytes]:
    """Yields what a coordinator says until it is gone.

    A coordinator that works on a long decision is silent too, but is not killed: the next one would
    have to begin the same decision again.

    Args:
        pid: pid of the coordinator.
        on_standstill: callback, called with the time of the last message of a coordinator that
            stands still; is to kill it.
    """
    has_begun, silent_ticks, message_s = False, 0, time.monotonic()
    now_computed_s = computed_s(pid)
    while True:
        try:
            async with asyncio.timeout(lease_s / TICKS_PER_LEASE):
                data = await reader.read(_READ_BYTES)
        except TimeoutError:
            before_s, now_computed_s = now_computed_s, computed_s(pid)
            silent_ticks = 0 if now_computed_s > before_s else silent_ticks + 1
            if is_standing_still(silent_ticks, has_begun=has_begun, lease_s=lease_s):
                on_standstill(message_s)
            continue
        if not data:
            return
        has_begun, silent_ticks, message_s = True, 0, time.monotonic()
        yield data


async def wait_last_exit(lifeline_fd: int, *, timeout_s: float) -> bool:
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


async def wait_until(is_true: Callable[[], bool], *, timeout_s: float) -> None:
    """Waits until a condition is true, for a bounded time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline_s:
        await asyncio.sleep(0.002)


@contextlib.contextmanager
def handle_signals(
    loop: asyncio.AbstractEventLoop,
    on_interrupt: Callable[[], None],
    *,
    on_leave_signal: Callable[[], None],
) -> Iterator[None]:
    """Handles SIGINT and the signals in `LEAVE_SIGNALS` while the body of the `with` runs.

    It does nothing outside the main thread. The loop may run in another thread than this one. After
    the body, the handled signals of `LEAVE_SIGNALS` are ignored, until `restore_handlers` ends: the
    process is leaving, and the same signal may be sent again, as a shell and the kernel both do
    when a terminal closes.

    Args:
        on_interrupt: callback, called at SIGINT (Ctrl-C).
        on_leave_signal: callback, called at signals in `LEAVE_SIGNALS`. Not handled are a signal
            that this process ignores (SIGHUP under nohup), and a signal other than SIGTERM and
            SIGHUP for which this process already has a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in LEAVE_SIGNALS if _is_handled_here(number)]
    sigint_handler = signal.getsignal(signal.SIGINT)
    is_here = running_loop() is loop
    for number, act in ((signal.SIGINT, on_interrupt), *((n, on_leave_signal) for n in handled)):
        if is_here:
            loop.add_signal_handler(number, act)
        else:
            signal.signal(number, partial(_pass_to_loop, loop, act))
    try:
        yield
    finally:
        for number in (*handled, signal.SIGINT) if is_here else ():
            loop.remove_signal_handler(number)
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, sigint_handler)


def _pass_to_loop(
    loop: asyncio.AbstractEventLoop, act: Callable[[], None], *_: int | FrameType | None
) -> None:
    with contextlib.suppress(RuntimeError):  # The loop is closed, as its work is done.
        loop.call_soon_threadsafe(act)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread; None: none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run_in_thread(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine to its end, as asyncio.run does, in a thread of its own.

    This thread, which alone runs handlers of signals, is not woken by one that the system has given
    to another thread; so it looks for them from time to time.

    Args:
        loop: a new loop; what other threads give it is done after the first step of the coroutine.
    """
    task, answer = loop.create_task(work), Future[Result]()

    async def result() -> Result:
        return await task

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                done = runner.run(result())
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result(done)

    threading.Thread(target=run, name="launcher", daemon=True).start()
    while not wait((answer,), timeout=_LOOK_S).done:
        pass
    return answer.result()


def _is_handled_here(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    if number in (signal.SIGTERM, signal.SIGHUP):
        return handler is not signal.SIG_IGN
    return handler is signal.SIG_DFL


@contextlib.contextmanager
def interrupt_at_leave_signals() -> Iterator[None]:
    """Has the signals in `LEAVE_SIGNALS` act like Ctrl-C while the body of the `with` runs.

    It does nothing outside the main thread. After the first of them all are ignored, until
    `restore_handlers` ends: the process is leaving.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in LEAVE_SIGNALS if _is_handled_here(number)]
    has_come = False

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        handler = signal.getsignal(signal.SIGINT)  # That of an event loop, if one runs.
        act = handler if callable(handler) else signal.default_int_handler
        act(signal.SIGINT, frame)

    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, former in before.items() if not has_come else ():
            signal.signal(number, former)


@contextlib.contextmanager
def restore_handlers() -> Iterator[None]:
    """Restores the handlers of the signals in `LEAVE_SIGNALS` after the body of the `with`."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in LEAVE_SIGNALS if is_main}
    try:
        yield
    finally:
        for number, handler in handlers.items():
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


def with_agent_exits(ended: Ended, statuses: Collection[int]) -> Ended:
    """The end of a job; if no node is left, its reason also says how the agents ended.

    Args:
        statuses: exit statuses of the agents that ended by themselves.
    """
    if ended.nodes or ended.ending is not Ending.LOST or not statuses:
        return ended
    exit_texts = ", ".join(sorted({exit_text(status).removeprefix("was ") for status in statuses}))
    return msgspec.structs.replace(
        ended, reason=f"{ended.reason}: their agents ended: {exit_texts}"
    )
