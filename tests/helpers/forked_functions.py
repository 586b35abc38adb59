"""Functions that children of a fork server run; they import nothing that takes long."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WAS_COLLECTING = gc.isenabled()


def echo(payload: bytes, result_fd: int) -> None:
    """Writes back what it got."""
    with os.fdopen(result_fd, "wb") as file:
        file.write(payload[::-1])


def say_nothing(_: bytes, __: int) -> None:
    """Leaves without a result."""
    sys.exit(7)


def die(_: bytes, __: int) -> None:
    """Is killed without a result."""
    os.kill(os.getpid(), signal.SIGKILL)


def talk(_: bytes, result_fd: int) -> None:
    """Prints, then is done."""
    print("first line\nsecond line")
    print("third line", file=sys.stderr, flush=True)
    os.write(result_fd, b"done")


def talk_and_die(_: bytes, __: int) -> None:
    """Prints, and is killed."""
    print("its last line")
    os.kill(os.getpid(), signal.SIGKILL)


def count_frozen(_: bytes, result_fd: int) -> None:
    """Writes how many objects its garbage collector never looks at."""
    os.write(result_fd, str(gc.get_freeze_count()).encode())


def tell_collections(_: bytes, result_fd: int) -> None:
    """Writes whether garbage was collected when this module was imported, and whether it is now."""
    text = f"imported: {WAS_COLLECTING}, forked: {gc.isenabled()}"
    os.write(result_fd, text.encode())


def tell_variable(payload: bytes, result_fd: int) -> None:
    """Writes a variable of its environment."""
    os.write(result_fd, os.environ[payload.decode()].encode())


def end_another(_: bytes, result_fd: int) -> None:
    """Has a process of its own end, and writes how it did."""
    with subprocess.Popen(["sleep", "20"]) as other:
        other.terminate()
        os.write(result_fd, str(other.wait()).encode())


def leave_another(_: bytes, result_fd: int) -> None:
    """Forks a process that lives on for 20 s, and writes its pid."""
    pid = os.fork()
    if pid == 0:
        time.sleep(20.0)
        os._exit(0)
    os.write(result_fd, str(pid).encode())


def leave_another_and_wait(payload: bytes, _: int) -> None:
    """Forks a process that lives on, tells its pid like `wait_for_end`, and waits to be killed."""
    if os.fork() == 0:
        wait_for_end(payload)
    signal.pause()


def wait_for_end(payload: bytes) -> None:
    """Tells its pid in a file, which is whole once it is there, and waits to be killed."""
    path = Path(payload.decode())
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(path)
    while True:
        signal.pause()
