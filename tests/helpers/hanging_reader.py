"""A worker whose disk never gives a layer that it is asked for."""

import threading

from planaria.checkpoint.disk.storage import Directory
from planaria.core.specs import NodeSpec
from planaria.engine import process
from planaria.transport.pulse import Pulse

_read = Directory.read


def main(spec: NodeSpec, agent_fd: int, lifeline_fd: int, pulse: Pulse) -> None:
    """Is called in the worker's process, as the real main function would be."""
    Directory.read = _never  # type: ignore[assignment, method-assign]
    process.main(spec, agent_fd, lifeline_fd, pulse)


def _never(storage: Directory, name: str) -> bytes:
    if name.endswith(".safetensors"):
        threading.Event().wait()
    return _read(storage, name)
