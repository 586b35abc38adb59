"""A process that examines a job and hangs; its payload is the file to which it writes its pid."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from planaria.nodes.machine_node import prepare


def main(payload: bytes, result_fd: int, lifeline_fd: int) -> None:
    """See machine_node.prepare."""
    sys.modules["planaria.engine.prepare"] = SimpleNamespace(main=_hang)  # type: ignore[assignment]
    prepare(payload, result_fd, lifeline_fd)


def _hang(payload: bytes, _: int) -> None:
    Path(payload.decode()).write_text(str(os.getpid()))
    while True:
        signal.pause()
