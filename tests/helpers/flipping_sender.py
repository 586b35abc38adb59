"""A worker of rank 0 whose machine damages one message after its checksum was computed."""

from collections.abc import Sequence

import numpy as np

from planaria.core.specs import NodeSpec
from planaria.engine import process
from planaria.transport import pacing
from planaria.transport.connection import Channel, Tag, checked_header
from planaria.transport.pulse import Pulse

ITERATION = 3

_damaged: list[Tag] = []


def main(spec: NodeSpec, agent_fd: int, lifeline_fd: int, pulse: Pulse) -> None:
    """Is called in the worker's process, as the real main function would be."""
    if spec.rank == 0:
        pacing.checked_header = _damaging_header  # type: ignore[attr-defined]
    process.main(spec, agent_fd, lifeline_fd, pulse)


def _damaging_header(epoch: int, tag: Tag, payload: Sequence[memoryview]) -> bytes:
    head = checked_header(epoch, tag, payload)
    if tag.channel is Channel.FORWARD and tag.iteration == ITERATION and not _damaged:
        _damaged.append(tag)
        np.frombuffer(payload[-1], dtype=np.uint8)[-1] ^= 1
    return head
