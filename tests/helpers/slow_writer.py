"""A worker whose writes take long: there is always one under way when its node hangs."""

import time
from pathlib import Path

from planaria.checkpoint.disk import storage
from planaria.core.specs import NodeSpec
from planaria.engine import process
from planaria.transport.pulse import Pulse

WRITE_S = 0.4

_write_synced = storage._write_synced


def main(spec: NodeSpec, agent_fd: int, lifeline_fd: int, pulse: Pulse) -> None:
    """Is called in the worker's process, as the real main function would be."""
    storage._write_synced = _slowly
    process.main(spec, agent_fd, lifeline_fd, pulse)


def _slowly(path: Path, content: bytes) -> None:
    _write_synced(path, content)
    time.sleep(WRITE_S)
