"""Tensors between ranks over links, through the memory of the machines.

On a processor the links send from the tensors themselves. What is on a device is copied to pinned
memory on the device's stream for copies, while the device goes on: a thread waits for the copy and
gives the bytes to the links, so that the thread that computes never waits for a send. What arrives
is copied to the device from pinned memory on the same stream; the device computes with it once it
is there, and the thread that computes does not wait for that either. It works between any machines,
and for several ranks on one device.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.engine.comm.device_comm import HEAD_BYTES, head_of, parse_head
from planaria.engine.comm.pieces import ArrivingPieces, begin_pieces, host_memory, send_pieces
from planaria.engine.devices import CopyLane, Device, Mark
from planaria.engine.iteration.groups import reduce_bucket
from planaria.errors import AbortedError, PeerLostError
from planaria.transport.links import UNLIMITED_S, Channel, Links, Tag


class HostComm:
    """A `DeviceComm` over links.

    Args:
        links: the rank's links, which have entered the epoch.
        device: the device of the tensors.
    """

    def __init__(self, links: Links, device: Device) -> None:
        self.waits_on_device = False
        self._links = links
        self._device = device
        self._epoch = links.epoch
        self._sender = None if device.is_host else ThreadPoolExecutor(1, thread_name_prefix="send")
        self._error: BaseException | None = None
        self._is_error_raised = False

    def send(self, target: int, tag: Tag, tensor: Tensor, *, virtual_bytes: int) -> None:
        """See `DeviceComm`."""
        tensor = tensor.detach()
        if self._sender is None:
            send_tensor(self._links, target, tag, tensor, virtual_bytes=virtual_bytes)
            return
        pieces = begin_pieces(self._device, [tensor.contiguous().reshape(-1)])
        # The head goes ahead, so the receiver can have the pieces arrive in pinned memory.
        self._links.send(target, tag, head_of(tensor))
        if not tensor.numel():
            return
        links = self._links
        sent = self._sender.submit(send_pieces, links, target, tag, pieces, first_number=1)
        sent.add_done_callback(self._note_error)

    def _note_error(self, sent: "Future[None]") -> None:
        """Keeps the first error of the thread that sends, and frees the threads that wait."""
        if sent.cancelled() or sent.exception() is None or self._error is not None:
            return
        self._error = sent.exception()
        self.abort(f"a send failed: {self._error}")

    def receive(self, source: int, tag: Tag) -> Tensor:
        """See `DeviceComm`."""
        try:
            message = self._links.receive(source, tag, timeout_s=UNLIMITED_S)
            return self._rest(source, tag, message)
        except AbortedError:
            self.check()
            raise

    def _rest(self, source: int, tag: Tag, message: npt.NDArray[np.uint8]) -> Tensor:
        """The tensor whose head, or all of which, has arrived."""
        dtype, shape = parse_head(message)
        body = message[HEAD_BYTES:]
        if self._device.is_host and len(body):
            return torch.from_numpy(body).view(dtype).view(shape)
        if len(body):  # A processor has sent it.
            return self._device.bring(torch.from_numpy(body).view(dtype).view(shape))
        with self._device.beside("arrive"):  # It waits for nothing that is being computed.
            tensor = torch.empty(shape, dtype=dtype, device=self._device.place)
            marks: list[Mark] = []
            if tensor.numel():
                arriving = ArrivingPieces(
                    self._links, source, tag, [tensor.view(-1)], device=self._device, first_number=1
                )
                marks = arriving.begin_fill()
        for mark in marks:
            mark.order()
        self._device.adopt(tensor)
        return tensor

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
        """See `DeviceComm`."""
        try:
            reduce_bucket(
                self._links,
                sums,
                results,
                ranks=ranks,
                iteration=iteration,
                bucket=bucket,
                timeout_s=UNLIMITED_S,
                virtual_bytes=virtual_bytes,
                device=self._device,
            )
        except AbortedError:
            self.check()
            raise

    def send_chunk(self, target: int, number: int, chunk: Tensor) -> None:
        """See `ChunkComm`."""
        content = host_memory(self._device, chunk.numel(), chunk.dtype)
        self._device.copy([(content, chunk)], CopyLane.CHUNKS_LEAVING).wait()
        self._links.send(target, _chunk_tag(number), content.numpy())

    def receive_chunk(self, source: int, number: int, buffer: Tensor) -> None:
        """See `ChunkComm`."""
        message = self._links.receive(source, _chunk_tag(number), timeout_s=UNLIMITED_S)
        content = host_memory(self._device, buffer.numel(), buffer.dtype)
        content.copy_(torch.from_numpy(message))
        self._device.copy([(buffer, content)], CopyLane.CHUNKS_ARRIVING).order()

    def check(self) -> None:
        """See `DeviceComm`."""
        if self._error is not None:
            self._is_error_raised = True
            raise self._error
        self._links.check_epoch()

    def abort(self, reason: str) -> None:
        """See `DeviceComm`."""
        self._links.abort(reason, first_epoch=self._epoch + 1)

    def close(self) -> None:
        """See `DeviceComm`."""
        if self._sender is not None:
            self._sender.shutdown(wait=True, cancel_futures=True)
        is_lost = isinstance(self._error, PeerLostError | AbortedError)
        if self._error is not None and not is_lost and not self._is_error_raised:
            raise self._error
        self._error = None  # It refers to its frames, which refer to this comm and to layers.


def _chunk_tag(number: int) -> Tag:
    return Tag(Channel.CHUNK, 1, number)


def send_tensor(links: Links, target: int, tag: Tag, tensor: Tensor, *, virtual_bytes: int) -> None:
    """Sends a tensor of the host, of up to six dimensions, without waiting for its receiver.

    Args:
        virtual_bytes: size that paced links take the tensor to have; 0: its real size.

    Raises:
        PeerLostError: no link to the target is up or being made.
    """
    tensor = tensor.detach().contiguous()
    body = tensor.reshape(-1).view(torch.uint8).numpy()
    links.send(target, tag, head_of(tensor), body, virtual_bytes=virtual_bytes)
