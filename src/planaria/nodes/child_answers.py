"""Child processes: the answers of those that are forked for one question, and how they end.

They are forked by processes without threads.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from planaria.nodes.forkserver import close_others, die_with_parent, leave_removed_directory
from planaria.nodes.output import flush_own

_PROGRAM_BYTES_MAX: Final = 1 << 16


def fork_answer(answer: Callable[[], bytes]) -> tuple[int, socket.socket]:
    """Forks a process that ends once it has written an answer to a socket.

    It dies with its parent, and does nothing on the signals that are notices.

    Args:
        answer: function that the process calls; it may block.

    Returns:
        Pid of the process, and the socket from which the answer can be read. A socket that ends
        without one means that the function raised, or that the process was killed.
    """
    sock, child_socket = socket.socketpair()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            # SIG_IGN would also hold for programs that the answer starts, whatever they kill.
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, lambda *_: None)
            die_with_parent(parent_pid)
            close_others({0, 1, 2, child_socket.fileno()})
            leave_removed_directory()
            child_socket.sendall(answer())
        except BaseException:
            traceback.print_exc()
        finally:
            flush_own()
            os._exit(0)
    child_socket.close()
    return pid, sock


async def answer_of_child(answer: Callable[[], bytes], *, timeout_s: float) -> bytes:
    """What a function returns in a child process; b"": it raised, or there was no answer in time.

    A child whose disk hangs may outlive its kill; this waits until it has ended, unless this is
    cancelled.

    Raises:
        OSError: no process can be forked.
    """
    pid, sock = fork_answer(answer)
    reader, writer = await asyncio.open_connection(sock=sock)
    data = b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                data = await reader.read(-1)
    finally:
        writer.close()
        os.kill(pid, signal.SIGKILL)
        status = _exit_status(pid)  # So that it is reaped also if this is cancelled.
    await status
    return data


async def wait_exit(pid: int) -> int:
    """The exit status of a child process once it has ended; negative: it was killed by a signal.

    The process is reaped by the event loop also if this is cancelled.
    """
    return await _exit_status(pid)


def _exit_status(pid: int) -> asyncio.Future[int]:
    loop = asyncio.get_running_loop()
    status: asyncio.Future[int] = loop.create_future()
    pidfd = os.pidfd_open(pid)

    def reap() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not status.done():  # Else it was cancelled.
            status.set_result(ended)

    loop.add_reader(pidfd, reap)
    return status


def kill_holders(fd: int) -> None:
    """Kills the processes of this group that have a file open, but for this one and its children.

    So nothing that an ended child has forked lives on and keeps memory, and what other children
    have forked does. Programs that it has started are not killed: they have closed the file.

    Args:
        fd: file in memory of this process and of that child alone.
    """
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # It may end meanwhile.
            if os.getpgid(pid) == os.getpgrp():
                process = psutil.Process(pid)
                is_kept = os.getpid() in (pid, process.ppid())
                if not is_kept and _has_open(pid, fd):
                    process.kill()


def _has_open(pid: int, fd: int) -> bool:
    """Whether a process has the file open that this process has at a descriptor."""
    name, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
    for other in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            # A file of another name is not asked what it is: its disk may hang.
            if os.readlink(other) == name and os.path.samestat(other.stat(), status):
                return True
    return False


def program_result(
    words: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit status, output and errors of a program; processes that it leaves behind may live on.

    Blocks. Whatever it has started is killed if it takes too long.

    Raises:
        TimeoutError: it has not ended in time.
        OSError: it cannot be started.
    """
    # In memory: a full disk says nothing of what the program has to say.
    with (
        os.fdopen(os.memfd_create("output"), "rb") as output,
        os.fdopen(os.memfd_create("errors"), "rb") as errors,
    ):
        process = subprocess.Popen(
            words,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"{words[0]} has not ended in {timeout_s:g} s") from error
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(_PROGRAM_BYTES_MAX).decode(errors="replace"))
    return status, texts[0], texts[1]
