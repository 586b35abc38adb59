"""Processes that examine a job: one that hangs, and one that leaves a process behind.

The payload is a file. The first one writes its own pid to it, and the second one that of the
process that it leaves behind.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from planaria.nodes.machine_node import prepare


def main(payload: bytes, result_fd: int, lifeline_fd: int) -> None:
    """See machine_node.prepare."""
    _prepare(_hang, payload, result_fd, lifeline_fd)


def leave_another(payload: bytes, result_fd: int, lifeline_fd: int) -> None:
    """See machine_node.prepare; answers, and the process that it forks lives on for 20 s."""
    _prepare(_fork, payload, result_fd, lifeline_fd)


def _prepare(
    examine: Callable[[bytes, int], None], payload: bytes, result_fd: int, lifeline_fd: int
) -> None:
    module = SimpleNamespace(main=examine)
    sys.modules["planaria.engine.prepare"] = module  # type: ignore[assignment]
    prepare(payload, result_fd, lifeline_fd)


def _fork(payload: bytes, result_fd: int) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(20.0)
        os._exit(0)
    Path(payload.decode()).write_text(str(pid))
    os.write(result_fd, b"found")


def _hang(payload: bytes, _: int) -> None:
    Path(payload.decode()).write_text(str(os.getpid()))
    while True:
        signal.pause()
