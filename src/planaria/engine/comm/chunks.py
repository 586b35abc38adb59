"""The sub-buffers of a rank's device through which copies in memory go, and their host's memory.

Each sub-buffer has as much pinned memory beside it. All are made when an epoch begins, in memory of
the streams that use them, so that chunks never ask for memory while training computes. Chunks leave
on one stream and arrive on another; neither waits for what training computes, nor training for
them.

Source: Gemini (SOSP '23), section 5.2: sub-buffers receive in turn and are copied to the host.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from planaria.checkpoint.memory.turns import Buffers
from planaria.checkpoint.memory.version import Bytes
from planaria.engine.comm.device_comm import ChunkComm
from planaria.engine.comm.pieces import host_memory
from planaria.engine.devices import CopyLane, Device, Mark

# The streams of the threads. The copies between device and host have others (`CopyLane`): on one
# stream the next chunk would arrive only after the one before has landed.
_LEAVES: Final = "chunk leaves"
_ARRIVES: Final = "chunk arrives"


@dataclass(slots=True)
class _SubBuffer:
    """Memory of the device, as much of its host, and the copy between them that began last."""

    device: Tensor
    host: Tensor
    num_bytes: int = 0
    mark: Mark | None = None

    def on_device(self) -> Tensor:
        return self.device[: self.num_bytes]

    def on_host(self) -> Tensor:
        return self.host[: self.num_bytes]


def _sub_buffers(device: Device, buffers: Buffers, purpose: str) -> list[_SubBuffer]:
    with device.beside(purpose):
        size = buffers.piece_bytes
        return [
            _SubBuffer(
                torch.empty(size, dtype=torch.uint8, device=device.place),
                host_memory(device, size, torch.uint8),
            )
            for _ in range(buffers.count)
        ]


class LeavingChunks:
    """A `ChunkSender` of a device.

    Args:
        buffers: size and number of the sub-buffers.
    """

    def __init__(self, comm: ChunkComm, device: Device, buffers: Buffers) -> None:
        self._comm = comm
        self._device = device
        self._buffers = _sub_buffers(device, buffers, _LEAVES)
        self._free = deque(range(buffers.count))

    def load(self, content: Bytes) -> int:
        """See `ChunkSender`."""
        number = self._free.popleft()
        buffer = self._buffers[number]
        buffer.num_bytes = len(content)
        np.copyto(buffer.on_host().numpy(), content)  # Memory of an arena is not pinned.
        with self._device.beside(_LEAVES):
            pairs = [(buffer.on_device(), buffer.on_host())]
            buffer.mark = self._device.copy(pairs, CopyLane.CHUNKS_LEAVING)
        return number

    def send(self, target: int, number: int, buffer: int) -> None:
        """See `ChunkSender`."""
        loaded = self._buffers[buffer]
        assert loaded.mark is not None
        with self._device.beside(_LEAVES):
            loaded.mark.order()
            self._comm.send_chunk(target, number, loaded.on_device())

    def free(self, buffer: int) -> None:
        """See `ChunkSender`."""
        self._free.append(buffer)


class ArrivingChunks:
    """A `ChunkReceiver` of a device.

    Args:
        buffers: size and number of the sub-buffers, which all sources share.
    """

    def __init__(self, comm: ChunkComm, device: Device, buffers: Buffers) -> None:
        self._comm = comm
        self._device = device
        self._buffers = _sub_buffers(device, buffers, _ARRIVES)
        self.num_buffers = buffers.count
        self._free = deque(range(buffers.count))

    def receive(self, source: int, number: int, num_bytes: int) -> int:
        """See `ChunkReceiver`."""
        index = self._free.popleft()
        buffer = self._buffers[index]
        buffer.num_bytes = num_bytes
        with self._device.beside(_ARRIVES):
            self._comm.receive_chunk(source, number, buffer.on_device())
            pairs = [(buffer.on_host(), buffer.on_device())]
            buffer.mark = self._device.copy(pairs, CopyLane.CHUNKS_ARRIVING)
        return index

    def land(self, buffer: int) -> Bytes:
        """See `ChunkReceiver`."""
        arrived = self._buffers[buffer]
        assert arrived.mark is not None
        arrived.mark.wait()
        return arrived.on_host().numpy()

    def free(self, buffer: int) -> None:
        """See `ChunkReceiver`."""
        self._free.append(buffer)
