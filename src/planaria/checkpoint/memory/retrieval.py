"""Sends a copy back, from a rank that keeps it to a rank that needs it.

A copy travels in the pieces in which it was hashed when it was made. The sender has checked the
copy when it read it; the receiver hashes each piece once more, while the next one arrives.
"""

from typing import Final

import numpy as np

from planaria.checkpoint.memory.version import Bytes, Version, hash_of
from planaria.checkpoint.memory.wire import (
    State,
    checked_opening,
    opening_message,
    opening_of,
    tensor_views,
    tensors_of,
)
from planaria.core.copies import Label
from planaria.errors import CheckpointError
from planaria.transport.links import Channel, Links, Tag

_OPENING: Final = 0


def send_copy(links: Links, target: int, version: Version) -> None:
    """Sends a copy, which must not change until the target has it; never blocks.

    Raises:
        PeerLostError: no link to the target is up or being made.
    """
    links.send(
        target, _tag(version.layer, version.label, _OPENING), opening_message(opening_of(version))
    )
    for index in range(version.num_pieces):
        tag = _tag(version.layer, version.label, 1 + index)
        links.send(target, tag, version.piece(index))


def receive_copy(
    links: Links,
    source: int,
    layer: int,
    label: Label,
    *,
    timeout_s: float,
    memory: Bytes | None = None,
) -> State:
    """Receives the copy that the source sends by `send_copy`.

    Args:
        timeout_s: longest wait for each message.
        memory: memory for the copy, at least as large as it; None: new memory is allocated, and
            its pages may take longer to get than the copy takes to arrive.

    Returns:
        The tensors of the copy, as views of that memory.

    Raises:
        CheckpointError: the copy that arrived differs from the one that was made.
        PeerLostError, AbortedError: the source was lost, or the epoch is over.
    """
    raw = links.receive(source, _tag(layer, label, _OPENING), timeout_s=timeout_s)
    opening = checked_opening(raw)
    if opening is None or not opening.head:
        raise CheckpointError(
            f"the first bytes of a copy of layer {layer} are not those that were sent"
        )
    if memory is None:
        memory = _new_memory(layer, opening.num_bytes)
    memory = memory[: opening.num_bytes]
    pieces = [
        memory[begin : begin + opening.piece_bytes]
        for begin in range(0, opening.num_bytes, opening.piece_bytes)
    ]
    for index, piece in enumerate(pieces):
        links.offer_memory(source, _tag(layer, label, 1 + index), piece)
    for index, (piece, expected_hash) in enumerate(zip(pieces, opening.hashes, strict=True)):
        received = links.receive(source, _tag(layer, label, 1 + index), timeout_s=timeout_s)
        if len(received) != len(piece) or hash_of(received) != expected_hash:
            raise CheckpointError(
                f"the bytes of layer {layer} that arrived are not those that rank {source} keeps"
            )
        if received is not piece:  # The piece came before its memory was offered.
            piece[:] = received
    return tensor_views(tensors_of(opening.head), memory[len(opening.head) :])


def _new_memory(layer: int, num_bytes: int) -> Bytes:
    try:
        return np.empty(num_bytes, dtype=np.uint8)
    except (MemoryError, ValueError) as error:
        reason = f"there is no memory for a copy of layer {layer} of {num_bytes} bytes"
        raise CheckpointError(reason) from error


def _tag(layer: int, label: Label, number: int) -> Tag:
    return Tag(Channel.STATE, label.age, layer, number)
