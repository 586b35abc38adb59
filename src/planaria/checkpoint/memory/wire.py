"""The messages that carry copies: their order, their tags, and the opening of each layer."""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from planaria.checkpoint.memory.filling import Fill
from planaria.checkpoint.memory.version import Bytes, Version, hash_of
from planaria.core.copies import Label, LayerCopy
from planaria.transport.links import Channel, Tag

GOOD: Final = np.ones(1, dtype=np.uint8)  # A receiver's answers to a message: good or bad.
BAD: Final = np.zeros(1, dtype=np.uint8)

_HASH: Final = struct.Struct("!Q")

State = Mapping[str, npt.NDArray[np.generic]]


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """The description of one tensor in a layer's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Opening(msgspec.Struct, frozen=True):
    """The first message of a layer, which describes the pieces that follow.

    Attributes:
        num_bytes: size of head and tensors; 0: the source has no copy to send.
        piece_bytes: size of each piece but the last.
        head: encoded description of the tensors.
        hashes: hash of each piece.
        is_same: whether the layer has not changed since the version that is complete on all ranks;
            then a full opening follows only if the receiver does not have that version any more.
    """

    num_bytes: int = 0
    piece_bytes: int = 1
    head: bytes = b""
    hashes: tuple[int, ...] = ()
    is_same: bool = False


def opening_of(version: Version) -> Opening:
    """The opening of a version whose pieces are hashed."""
    num_bytes = len(version.content)
    return Opening(num_bytes, version.piece_bytes, version.head, version.hashes)


def opening_message(opening: Opening) -> Bytes:
    """The message that carries an opening: its hash, then the opening."""
    encoded = np.frombuffer(msgspec.json.encode(opening), dtype=np.uint8)
    return np.concatenate([np.frombuffer(_HASH.pack(hash_of(encoded)), dtype=np.uint8), encoded])


def checked_opening(raw: Bytes) -> Opening | None:
    """The opening that a message carries; None if its hash or its own numbers contradict it."""
    encoded = raw[_HASH.size :]
    if raw[: _HASH.size].tobytes() != _HASH.pack(hash_of(encoded)):
        return None
    try:
        opening = msgspec.json.decode(encoded.tobytes(), type=Opening)
        num_bytes = len(opening.head) + bytes_of(tensors_of(opening.head)) if opening.head else 0
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    is_whole = num_bytes == opening.num_bytes and opening.piece_bytes > 0
    num_pieces = -(-num_bytes // opening.piece_bytes) if is_whole else -1
    return opening if num_pieces == len(opening.hashes) else None


def head_of(state: State) -> bytes:
    """The encoded description of a layer's tensors: names, dtypes and shapes."""
    tensors = tuple(Tensor(name, a.dtype.str, a.shape) for name, a in state.items())
    return msgspec.json.encode(tensors)


def tensors_of(head: bytes) -> tuple[Tensor, ...]:
    """The description that `head_of` has encoded.

    Raises:
        ValueError: these bytes are no such description.
    """
    try:
        return msgspec.json.decode(head, type=tuple[Tensor, ...])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no description of tensors: {error}") from error


def fill_tensors(version: Version, state: State, fill: Fill) -> None:
    """Copies a layer's tensors into a version, end to end."""
    pairs, offset = [], 0
    for array in state.values():
        flat = array.reshape(-1).view(np.uint8)
        pairs.append((version.tensors[offset : offset + len(flat)], flat))
        offset += len(flat)
    fill(pairs)


def state_of(version: Version) -> State:
    """The tensors of a version, as views of its memory."""
    return tensor_views(tensors_of(version.head), version.tensors)


def tensor_views(tensors: Iterable[Tensor], memory: Bytes) -> State:
    """Views of the tensors that lie in memory end to end."""
    state, offset = {}, 0
    for tensor in tensors:
        array = memory[offset : offset + bytes_of([tensor])]
        state[tensor.name] = array.view(np.dtype(tensor.dtype)).reshape(tensor.shape)
        offset += len(array)
    assert offset == len(memory)
    return state


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The size of all tensors together.

    Raises:
        ValueError: no tensor can be as one is described.
    """
    num_bytes = 0
    for tensor in tensors:
        try:
            dtype = np.dtype(tensor.dtype)
        except TypeError as error:
            raise ValueError(f"no dtype: {tensor.dtype!r}") from error
        if dtype.hasobject or min(tensor.shape, default=0) < 0:
            raise ValueError(f"no tensor: {tensor}")
        num_bytes += dtype.itemsize * math.prod(tensor.shape)
    return num_bytes


def copy_peers(rank: int, copies: Sequence[LayerCopy]) -> set[int]:
    """The ranks that a rank sends copies to or receives them from."""
    targets = {target for target, _ in outgoing_copies(rank, copies)}
    return targets | incoming_layers(rank, copies).keys()


def outgoing_copies(rank: int, copies: Sequence[LayerCopy]) -> tuple[tuple[int, int], ...]:
    """The copies that a rank sends, as (target, layer), in the order in which it sends them.

    It sends the first copy of all its layers, then the second, and so on.
    """
    own = [(n, copy) for copy in copies if copy.source == rank for n in range(len(copy.targets))]
    own.sort(key=lambda entry: (entry[0], entry[1].layer))
    return tuple((copy.targets[number], copy.layer) for number, copy in own)


def incoming_layers(rank: int, copies: Sequence[LayerCopy]) -> Mapping[int, tuple[int, ...]]:
    """The layers whose copies a rank receives, by source, in the order in which they come."""
    sources = {copy.source for copy in copies if rank in copy.targets}
    return {
        source: tuple(layer for target, layer in outgoing_copies(source, copies) if target == rank)
        for source in sorted(sources)
    }


def opening_tag(label: Label, layer: int) -> Tag:
    """The tag of a layer's opening."""
    return Tag(Channel.COPY, label.age, layer, 0)


def piece_tag(label: Label, layer: int, index: int) -> Tag:
    """The tag of a piece."""
    return Tag(Channel.COPY, label.age, layer, 1 + index)


def answer_tag(label: Label, layer: int, index: int) -> Tag:
    """The tag of the receiver's answer to a piece."""
    return Tag(Channel.COPY_TAKEN, label.age, layer, 1 + index)


def opening_answer_tag(label: Label, layer: int) -> Tag:
    """The tag of the receiver's answer to a layer's opening."""
    return Tag(Channel.COPY_TAKEN, label.age, layer, 0)
