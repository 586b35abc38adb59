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

import torch
from torch import Tensor

from planaria.engine.comm.device_comm import HEAD_BYTES, head_of, parse_head
from planaria.engine.devices import Device, Mark
from planaria.engine.iteration.groups import reduce_bucket
from planaria.engine.staging import fill_device, to_host
from planaria.errors import AbortedError, PeerLostError
from planaria.transport.links import UNLIMITED_S, Links, Tag


class HostComm:
    """A `DeviceComm` over links.

    Args:
        links: the rank's links, which have entered the epoch.
        device: the device of the tensors.
    """

    def __init__(self, links: Links, device: Device) -> None:
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
        copy = self._device.host_like(tensor)
        mark = self._device.copy([(copy, tensor)])
        sent = self._sender.submit(self._send_copy, target, tag, copy, mark, virtual_bytes)
        sent.add_done_callback(self._note_error)

    def _send_copy(
        self, target: int, tag: Tag, copy: Tensor, mark: Mark, virtual_bytes: int
    ) -> None:
        mark.wait()
        if self._error is None:
            send_tensor(self._links, target, tag, copy, virtual_bytes=virtual_bytes)

    def _note_error(self, sent: "Future[None]") -> None:
        """Keeps the first error of the thread that sends, and frees the threads that wait."""
        if sent.cancelled() or sent.exception() is None or self._error is not None:
            return
        self._error = sent.exception()
        self.abort(f"a send failed: {self._error}")

    def receive(self, source: int, tag: Tag) -> Tensor:
        """See `DeviceComm`."""
        try:
            received = receive_tensor(self._links, source, tag, timeout_s=UNLIMITED_S)
        except AbortedError:
            self.check()
            raise
        if self._device.is_host:
            return received
        pinned = self._device.host_like(received)
        pinned.copy_(received)
        target = torch.empty(received.shape, dtype=received.dtype, device=self._device.place)
        self._device.copy([(target, pinned)]).order()
        return target

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
        device, host_results = self._device, results
        host_sums = to_host(device, sums)
        if not device.is_host:
            host_results = [device.host_like(result) for result in results]
        try:
            reduce_bucket(
                self._links,
                host_sums,
                host_results,
                ranks=ranks,
                iteration=iteration,
                bucket=bucket,
                timeout_s=UNLIMITED_S,
                virtual_bytes=virtual_bytes,
            )
        except AbortedError:
            self.check()
            raise
        fill_device(device, results, host_results)

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


def receive_tensor(links: Links, source: int, tag: Tag, *, timeout_s: float) -> Tensor:
    """The tensor that `source` sends with this tag, in the host's memory.

    Raises:
        PeerLostError: the tensor will not arrive.
        AbortedError: the epoch was aborted.
    """
    received = links.receive(source, tag, timeout_s=timeout_s)
    dtype, shape = parse_head(received)
    # torch cannot view an empty tensor as another dtype.
    body = torch.from_numpy(received[HEAD_BYTES:])
    return body.view(dtype).view(shape) if len(body) else torch.empty(shape, dtype=dtype)
