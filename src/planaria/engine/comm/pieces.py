"""Flat tensors on their way between ranks, as one message or as several.

What comes from a device or goes to one is sent in pieces, so that some are copied while others are
on the links. A processor sends one piece, of the tensors themselves. Whoever receives takes the
pieces as they come, so ranks of all devices can exchange tensors.

A piece that comes once its memory was offered arrives in pinned memory; any other one is copied
there first. Of large messages few pieces are in pinned memory at a time: of the sums of a bucket
all would be as much as the gradients.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.engine.devices import CopyLane, Device, Mark
from planaria.transport.links import UNLIMITED_S, Links, Tag

Bytes = npt.NDArray[Any]

# Larger pieces are on their way for longer before the next hop of their way can begin; smaller ones
# cost more of a thread's time than their bytes.
PIECE_BYTES: Final = 4 << 20
_NUMBER_SHIFT: Final = 16
_AHEAD: Final = 16  # Pieces of a sum that are copied or awaited before they are needed.
_UNSENT: Final = 32  # Pieces of a sum that may be pinned while links have not sent them.


def piece_tag(tag: Tag, number: int) -> Tag:
    """The tag of a piece of a message; that of the message itself for the first one."""
    assert tag.b < 1 << _NUMBER_SHIFT
    return tag._replace(b=tag.b | number << _NUMBER_SHIFT)


class LeavingPiece:
    """Elements of flat tensors on their way to the host.

    Args:
        mark: the copies from the device; None: the arrays are the tensors themselves.

    Attributes:
        arrays: arrays that will hold the elements, in order.
    """

    def __init__(self, arrays: Sequence[Bytes], mark: Mark | None) -> None:
        self.arrays = arrays
        self._mark = mark

    def wait(self) -> Sequence[Bytes]:
        """Blocks until the elements are there; returns their arrays."""
        if self._mark is not None:
            self._mark.wait()
        return self.arrays


def begin_pieces(device: Device, parts: Sequence[Tensor]) -> list[LeavingPiece]:
    """Begins to copy flat tensors of one dtype to the host, after what was computed so far."""
    return list(_beginning_pieces(device, parts, partial(host_memory, device)))


class LeavingSums:
    """Sums of a device on their way to the host, a few pieces ahead of what is needed.

    Those that links have not sent stay in memory. Once they are many the network is slower than
    copies from the device, and the next ones are copied to memory that is not pinned.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._unsent: list[weakref.ref[Bytes]] = []

    def pieces(self, parts: Sequence[Tensor]) -> Iterator[LeavingPiece]:
        """The pieces of flat tensors, whose copies begin while those before are taken."""
        begun: deque[LeavingPiece] = deque()
        for piece in _beginning_pieces(self._device, parts, self._memory):
            begun.append(piece)
            self._unsent += map(weakref.ref, piece.arrays)
            if len(begun) > _AHEAD:
                yield begun.popleft()
        while begun:
            yield begun.popleft()

    def _memory(self, size: int, dtype: torch.dtype) -> Tensor:
        self._unsent = [array for array in self._unsent if array() is not None]
        if len(self._unsent) < _UNSENT:
            return host_memory(self._device, size, dtype)
        return torch.empty(size, dtype=dtype)


def _beginning_pieces(
    device: Device, parts: Sequence[Tensor], memory: Callable[[int, torch.dtype], Tensor]
) -> Iterator[LeavingPiece]:
    """Begins to copy a piece each time that one is taken."""
    if device.is_host:
        yield LeavingPiece([part.numpy() for part in parts], None)
        return
    for first, end in _cuts(parts):
        views = flat_range(parts, first, end)
        buffer = memory(end - first, views[0].dtype)
        pairs = [(part, view) for view, part in pairs_with(buffer, views)]
        mark = device.copy(pairs, CopyLane.LEAVING)
        yield LeavingPiece([_bytes_of(buffer)], mark)
    if not sum(part.numel() for part in parts):
        yield LeavingPiece([], None)


def pieces_on_host(device: Device, tensor: Tensor) -> list[LeavingPiece]:
    """A flat tensor of the host, cut as its receiver would have it for such a device."""
    if device.is_host:
        return [LeavingPiece([_bytes_of(tensor)], None)]
    cuts = [LeavingPiece([_bytes_of(tensor[a:b])], None) for a, b in _cuts([tensor])]
    return cuts or [LeavingPiece([], None)]


def send_pieces(
    links: Links,
    target: int,
    tag: Tag,
    pieces: Iterable[LeavingPiece],
    *,
    first_number: int = 0,
    virtual_bytes: int = 0,
) -> None:
    """Sends each piece once it is on the host; waits for no receiver.

    Args:
        virtual_bytes: size that paced links take each piece to have; 0: its real size.

    Raises:
        PeerLostError: no link to the target is up or being made.
    """
    for number, piece in enumerate(pieces, first_number):
        links.send(target, piece_tag(tag, number), *piece.wait(), virtual_bytes=virtual_bytes)


def receive_pieces(
    links: Links,
    source: int,
    tag: Tag,
    num_bytes: int,
    *,
    first_number: int = 0,
    timeout_s: float = UNLIMITED_S,
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields the pieces of so many bytes, at least one, as they arrive.

    Raises:
        PeerLostError: the next piece will not arrive.
        AbortedError: the epoch was aborted.
    """
    number = first_number
    is_complete = False
    while not is_complete:
        piece = links.receive(source, piece_tag(tag, number), timeout_s=timeout_s)
        assert 0 < len(piece) <= num_bytes or not num_bytes, (tag, len(piece), num_bytes)
        num_bytes -= len(piece)
        number += 1
        is_complete = not num_bytes
        yield piece


class ArrivingPieces:
    """Flat tensors of a device that are filled with what a peer sends.

    From when it is made, what the peer sends arrives in pinned memory, but for pieces that come
    long before those that are copied to the tensors.

    Attributes:
        marks: the copies to the tensors that have begun.
    """

    def __init__(
        self,
        links: Links,
        source: int,
        tag: Tag,
        targets: Sequence[Tensor],
        *,
        device: Device,
        first_number: int = 0,
    ) -> None:
        self._links = links
        self._source = source
        self._tag = tag
        self._targets = targets
        self._device = device
        self._first_number = first_number
        self.marks: list[Mark] = []
        self._cuts = enumerate([] if device.is_host else _cuts(targets))
        self._offered: dict[int, Tensor] = {}
        self._offer(_AHEAD)

    def _offer(self, count: int) -> None:
        """Offers pinned memory for so many pieces more."""
        for index, (first, end) in islice(self._cuts, count):
            buffer = host_memory(self._device, end - first, self._targets[0].dtype)
            self._offered[index] = buffer
            tag = piece_tag(self._tag, self._first_number + index)
            self._links.offer_memory(self._source, tag, _bytes_of(buffer))

    def begin_fill(self, *, timeout_s: float = UNLIMITED_S) -> list[Mark]:
        """Begins to copy each piece to the tensors once it has arrived.

        Raises as `receive_pieces` does.
        """
        first = 0
        pieces = receive_pieces(
            self._links,
            self._source,
            self._tag,
            sum(target.nbytes for target in self._targets),
            first_number=self._first_number,
            timeout_s=timeout_s,
        )
        for index, received in enumerate(pieces):
            self._offer(1)
            if len(received):
                values = self._values_to_copy(index, received)
                views = flat_range(self._targets, first, first + len(values))
                pairs = pairs_with(values, views)
                self.marks.append(self._device.copy(pairs, CopyLane.ARRIVING))
                first += len(values)
        return self.marks

    def _values_to_copy(self, index: int, received: Bytes) -> Tensor:
        """The values of a piece, in memory from which the device can copy them."""
        values = torch.from_numpy(received).view(self._targets[0].dtype)
        if self._device.is_host:
            return values
        offered = self._offered.pop(index, None)
        if offered is not None and offered.data_ptr() == values.data_ptr():
            return offered
        return host_memory(self._device, len(values), values.dtype).copy_(values)


def flat_range(parts: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
    """The views that make up elements [first, end) of the concatenated flat tensors."""
    views = []
    offset = 0
    for part in parts:
        low, high = max(first - offset, 0), min(end - offset, part.numel())
        if low < high:
            views.append(part[low:high])
        offset += part.numel()
    return views


def pairs_with(buffer: Tensor, views: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The views, each with the part of the buffer that stands for it, in order."""
    parts = torch.split(buffer, [view.numel() for view in views])
    return list(zip(views, parts, strict=True))


def host_memory(device: Device, size: int, dtype: torch.dtype) -> Tensor:
    """A new flat tensor of the host, to or from which copies are fast."""
    return device.host_like(torch.empty(size, dtype=dtype, device="meta"))


def _cuts(parts: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """First and end element of each piece of the concatenated flat tensors."""
    size = sum(part.numel() for part in parts)
    step = PIECE_BYTES // parts[0].element_size() if size else 1
    return ((first, min(first + step, size)) for first in range(0, size, step))


def _bytes_of(buffer: Tensor) -> Bytes:
    """The memory of a flat tensor of the host; numpy has no bfloat16."""
    # torch cannot view an empty tensor as another dtype.
    return buffer.view(torch.uint8).numpy() if buffer.numel() else np.empty(0, dtype=np.uint8)
