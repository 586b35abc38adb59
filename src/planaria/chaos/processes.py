"""The processes of a job, seen from outside: which are left over, and the stacks of workers."""

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

_LEAVE_TIMEOUT_S: Final = 5.0
_STACKS_TIMEOUT_S: Final = 1.0


@contextmanager
def mark_processes(mark: str) -> Iterator[None]:
    """Puts `mark`, which is NAME=VALUE, into the environment of all processes started meanwhile."""
    name, _, value = mark.partition("=")
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def kill_left_over(mark: str, *, except_pids: Collection[int]) -> tuple[str, ...]:
    """Kills marked processes that are still there after they had time to leave.

    Returns a line of text for each of them.

    Args:
        except_pids: ids of processes that may stay.
    """
    deadline_s = time.monotonic() + _LEAVE_TIMEOUT_S
    while (processes := _marked_processes(mark, except_pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return tuple(f"process {process.pid} is left over" for process in processes)


def worker_stacks(server_pid: int) -> list[str]:
    """The Python stacks of all workers that the agents of a fork server have forked.

    Processes that are gone are left out.
    """
    stacks = []
    for agent in _children(server_pid):
        for worker in _children(agent.pid):
            with suppress(OSError, psutil.Error):
                stacks.append(_stacks(worker))
    return stacks


def _children(pid: int) -> list[psutil.Process]:
    """The children of a process; empty if it is gone."""
    try:
        return psutil.Process(pid).children()
    except psutil.Error:
        return []


def _marked_processes(mark: str, except_pids: Collection[int]) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in except_pids and _has_mark(process, mark)
    ]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        return mark.encode() in environment and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.NoSuchProcess):
        return False


def _stacks(worker: psutil.Process) -> str:
    """The stacks of a worker; on SIGUSR1 it writes them to a file in memory (engine/process.py)."""
    for descriptor in Path(f"/proc/{worker.pid}/fd").iterdir():
        with suppress(OSError):
            if descriptor.readlink().name.startswith("memfd:stack"):
                worker.send_signal(signal.SIGUSR1)
                time.sleep(_STACKS_TIMEOUT_S / 10)
                return f"worker {worker.pid}: {descriptor.read_text(errors='replace')}"
    return f"worker {worker.pid} has no stacks"
