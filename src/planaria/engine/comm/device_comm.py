"""What a rank's iterations need to exchange tensors of its device with other ranks.

`DeviceComm` is one epoch's: the first loss ends it, and the next epoch opens another one. The
implementations are host.py (through the memory of the machines, over links) and nccl.py (from
device to device).
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.transport.links import Tag


class ChunkComm(Protocol):
    """Exchanges chunks of copies between devices, beside all else that an epoch exchanges.

    One thread calls `send_chunk`, another one `receive_chunk`; both raise as `DeviceComm` does.
    """

    def send_chunk(self, target: int, number: int, chunk: Tensor) -> None:
        """Begins to send bytes that lie on the device, once the calling thread's stream is there.

        The bytes must not change before the receiver has said that it has them.

        Args:
            number: number of the chunk among those that this rank sends to `target` in the epoch.
        """

    def receive_chunk(self, source: int, number: int, buffer: Tensor) -> None:
        """Receives a chunk of the size of `buffer`, for what the calling thread does from now on.

        Chunks of a source are received in the order of their numbers, each one after `send_chunk`
        has returned at the source.
        """


class DeviceComm(ChunkComm, Protocol):
    """Exchanges tensors of a rank's device with the other ranks of an epoch.

    The thread that computes calls `send`, `receive` and `check`, the thread that reduces calls
    `sum_over`, and any thread may call `abort`. All that raise end the epoch with the error of
    whatever went wrong first on this rank: a PeerLostError if a peer is gone, an AbortedError if
    the epoch was aborted, or the exception of a thread that works for the caller.

    Attributes:
        waits_on_device: whether `receive` may return before the message is there, so that the
            device waits for the sender's device, and not the host.
    """

    waits_on_device: bool

    def send(self, target: int, tag: Tag, tensor: Tensor, *, virtual_bytes: int) -> None:
        """Sends a tensor of up to six dimensions; waits neither for it nor for its receiver.

        What is computed from now on may not change the tensor.

        Args:
            virtual_bytes: size that paced links take the tensor to have; 0: its real size.
        """

    def receive(self, source: int, tag: Tag) -> Tensor:
        """The tensor that `source` sends with this tag, for what is computed from now on."""

    def sum_over(
        self,
        ranks: Sequence[int],
        sums: Sequence[Tensor],
        results: Sequence[Tensor],
        *,
        iteration: int,
        bucket: int,
        virtual_bytes: int,
    ) -> None:
        """Sums flat tensors over `ranks`, rounds the sums, and returns when they are in `results`.

        The parts are added in ascending order of rank, so all ranks get the same bits.

        Args:
            ranks: the holders, ascending; this rank is one of them.
            sums: this rank's parts, float64 or float32, the same sizes on all ranks.
            results: float32, of the same sizes; sums in float32 may be their own results.
            bucket: number of the sum, unique in the iteration and ascending.
            virtual_bytes: size that paced links take the results to have; 0: their real size.
        """

    def check(self) -> None:
        """Raises the error that has ended the epoch, if any has; does not block."""

    def abort(self, reason: str) -> None:
        """Ends the epoch: calls that block raise an AbortedError; returns within 0.1 s."""

    def close(self) -> None:
        """Ends all threads and drops all memory, after `abort` or when nothing is under way.

        Raises the exception of a thread that no other call has raised.
        """


# -- the description of a tensor that goes before its bytes ----------------------------------------
# Eight int64: the index of the dtype, the number of dimensions, and the shape.

HEAD_BYTES: Final = 64
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64)


def head_of(tensor: Tensor) -> npt.NDArray[np.int64]:
    """The description of a tensor of up to six dimensions."""
    head = np.zeros(HEAD_BYTES // 8, dtype=np.int64)
    assert tensor.dim() <= len(head) - 2
    head[:2] = _DTYPES.index(tensor.dtype), tensor.dim()
    head[2 : 2 + tensor.dim()] = tensor.shape
    return head


def parse_head(message: npt.NDArray[np.uint8]) -> tuple[torch.dtype, list[int]]:
    """Dtype and shape of the tensor that the message describes at its beginning."""
    head = message[:HEAD_BYTES].view(np.int64)
    return _DTYPES[int(head[0])], head[2 : 2 + int(head[1])].tolist()
