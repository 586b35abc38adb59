"""A rank's part of a transition: it sends layers that others lack and receives those it lacks.

A layer arrives in chunks, from one holder or several. Each holder sends a head (JSON: name, dtype
and shape of the layer's tensors), then the bytes of its chunks in pieces of at most one MiB, and
last the hash of those bytes. A rank that already holds a layer does not receive it.

Sending and receiving overlap. A piece is hashed and queued while earlier pieces are on the wire.
The targets take turns piece by piece, so that all links are busy from the first piece on. A link is
used as soon as it is up. A received piece is hashed and written to its place in the layer's memory,
in any order; while nothing has arrived, the modules that will take the layers are built. No layer
is copied to be sent: senders send from the tensors themselves.

Source: docs/protocol.md, "The outcome"; Oobleck (SOSP '23), section 5.
"""

from collections import Counter, deque
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from planaria.checkpoint.memory.wire import Tensor, bytes_of, tensor_views
from planaria.core.plan import NUM_CHUNKS, Transfer
from planaria.engine.stage import HeldLayer, RankStage
from planaria.engine.staging import State
from planaria.errors import PeerLostError
from planaria.transport.links import UNLIMITED_S, Channel, Links, Tag

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES: Final = 1 << 20
_AGE_TAG: Final = Tag(Channel.AGE, 0, 0)
_TAKEN_TAG: Final = Tag(Channel.TAKEN, 0, 0)


class _StateHead(msgspec.Struct, frozen=True):
    tensors: tuple[Tensor, ...]


def keep_only_age(stage: RankStage, *, age: int) -> None:
    """Keeps the layers of this age and clears their gradient sums; drops all other layers."""
    stage.keep_only([layer for layer, held in stage.layers.items() if held.age == age])
    for held in stage.layers.values():
        held.clear()


def exchange_layers(
    links: Links,
    stage: RankStage,
    rounds: Sequence[Sequence[Transfer]],
    *,
    age: int,
    timeout_s: float,
    copies: Mapping[int, State] | None = None,
) -> int:
    """Sends layers that others lack and receives those this rank lacks; returns the bytes received.

    The layers that this rank sends may still be on the wire when this function returns, so they
    must not change until the targets have them. That holds because no layer is stepped before the
    commit vector of an iteration, which needs all ranks of the plan.

    Args:
        timeout_s: maximum wait for the next piece.
        copies: states of layers that this rank sends from copies in memory, without holding them.

    Raises:
        PeerLostError, AbortedError: a holder is gone; layers that have arrived by then are held.
    """
    ordered = [transfer for transfers in rounds for transfer in transfers]
    own = [t for t in ordered if t.source == links.rank]

    def views(layer: int) -> State:
        held = stage.layers.get(layer)
        return held.state_views() if held else (copies or {})[layer]

    outgoing = _outgoing(own, stage, views, age)
    arriving = _ArrivingLayers([t for t in ordered if t.target == links.rank], age)
    to_build = deque(arriving.layers)
    empty_layers: dict[int, HeldLayer] = {}
    is_sending = True
    while is_sending or arriving.wanted:
        message = next(outgoing, None)
        if message is not None:
            message.send(links)
        is_sending = message is not None
        while arriving.wanted:
            if not links.has_any(arriving.wanted):
                if is_sending:
                    break
                if to_build:
                    layer = to_build.popleft()
                    empty_layers[layer] = stage.empty_layer(layer)
                    continue
            peer, received = links.receive_any(arriving.wanted, timeout_s=timeout_s)
            for layer, state in arriving.on_message(peer, received):
                if layer not in empty_layers:
                    to_build.remove(layer)
                    empty_layers[layer] = stage.empty_layer(layer)
                stage.hold_loaded(empty_layers.pop(layer), state, age=age)
    for source in {t.source for t in ordered if t.target == links.rank}:
        with suppress(PeerLostError):  # The source may leave once everything has arrived.
            links.send(source, _TAKEN_TAG)
    return links.state_bytes[links.epoch]


def wait_received(links: Links, rounds: Sequence[Sequence[Transfer]]) -> None:
    """Blocks until all ranks that receive layers from this rank have confirmed them.

    Raises:
        PeerLostError, AbortedError: a target is gone, or what was sent to it may be lost.
    """
    own = [t for transfers in rounds for t in transfers if t.source == links.rank]
    for target in sorted({transfer.target for transfer in own}):
        links.receive(target, _TAKEN_TAG, timeout_s=UNLIMITED_S)


def send_silently(
    links: Links, stage: RankStage, rounds: Sequence[Sequence[Transfer]], *, age: int
) -> None:
    """Sends the age, then layers of this age, to the ranks that are to hold them silently.

    Raises:
        PeerLostError: a target is gone.
    """
    own = [t for transfers in rounds for t in transfers if t.source == links.rank]
    for target in {transfer.target for transfer in own}:
        links.send(target, _AGE_TAG, np.array([age], dtype=np.int64))
    # Training goes on and changes the tensors, so what is sent must be a copy.
    copies = {layer: stage.layers[layer].state() for layer in {t.layer for t in own}}
    for message in _outgoing(own, stage, copies.__getitem__, age):
        message.send(links)


def receive_age(links: Links, rounds: Sequence[Sequence[Transfer]], *, timeout_s: float) -> int:
    """The age of the layers sent to this rank, which took no part in the epoch before.

    Raises:
        PeerLostError, AbortedError: the source is gone.
    """
    source = min(t.source for transfers in rounds for t in transfers if t.target == links.rank)
    received = links.receive(source, _AGE_TAG, timeout_s=timeout_s)
    return int(received.view(np.int64)[0])


def receive_silently(
    links: Links,
    stage: RankStage,
    rounds: Sequence[Sequence[Transfer]],
    *,
    age: int,
    timeout_s: float,
) -> int:
    """Receives the states of the layers that this rank has prepared; returns the bytes received.

    Raises:
        PeerLostError, AbortedError: a holder is gone; layers that have arrived by then are held.
    """
    own = [t for transfers in rounds for t in transfers if t.target == links.rank]
    arriving = _ArrivingLayers(own, age)
    while arriving.wanted:
        peer, received = links.receive_any(arriving.wanted, timeout_s=timeout_s)
        for layer, state in arriving.on_message(peer, received):
            stage.fill(layer, state, age=age)
    return links.state_bytes[links.epoch]


def missing_layers(layers: Collection[int], stage: RankStage) -> list[int]:
    """Layers that the stage does not hold, ascending."""
    return sorted(set(layers) - stage.layers.keys())


class _StateMessage(NamedTuple):
    target: int
    tag: Tag
    pieces: list[Bytes]
    virtual_bytes: int = 0

    def send(self, links: Links) -> None:
        links.send(self.target, self.tag, *self.pieces, virtual_bytes=self.virtual_bytes)


def _outgoing(
    transfers: Iterable[Transfer], stage: RankStage, state_of: Callable[[int], State], age: int
) -> Iterator[_StateMessage]:
    """All messages of these transfers; the targets take turns, one message each."""
    by_target: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        by_target.setdefault(transfer.target, []).append(transfer)
    waiting = deque(_messages(own, stage, state_of, age) for own in by_target.values())
    while waiting:
        messages = waiting.popleft()
        message = next(messages, None)
        if message is not None:
            yield message
            waiting.append(messages)


def _messages(
    transfers: Iterable[Transfer], stage: RankStage, state_of: Callable[[int], State], age: int
) -> Iterator[_StateMessage]:
    for transfer in transfers:
        target, virtual_bytes = transfer.target, stage.model.virtual_state_bytes(transfer.layer)
        state = state_of(transfer.layer)
        tensors = tuple(Tensor(name, a.dtype.str, a.shape) for name, a in state.items())
        arrays = [array.reshape(-1).view(np.uint8) for array in state.values()]
        head = msgspec.json.encode(_StateHead(tensors))
        yield _StateMessage(target, _head_tag(transfer, age), [np.frombuffer(head, dtype=np.uint8)])
        hasher = xxhash.xxh3_128()
        size = bytes_of(tensors)
        for index, (first, end) in enumerate(_pieces(transfer, size)):
            piece = _byte_range(arrays, first, end)
            for array in piece:
                hasher.update(array.data)
            share = virtual_bytes * (end - first) // size
            yield _StateMessage(target, _piece_tag(transfer, age, index), piece, share)
        digest = np.frombuffer(hasher.digest(), dtype=np.uint8)
        yield _StateMessage(target, _digest_tag(transfer, age), [digest])


class _ArrivingLayers:
    """Layers that this rank is receiving.

    Attributes:
        layers: the layers that have not arrived completely.
        wanted: tag of the next message from each source, by source rank.
    """

    def __init__(self, transfers: Iterable[Transfer], age: int) -> None:
        self._age = age
        self._tensors: dict[int, tuple[Tensor, ...]] = {}
        self._memory: dict[int, Bytes] = {}
        self._num_chunks: Counter[int] = Counter()  # Chunks still to arrive, by layer.
        by_source: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            by_source.setdefault(transfer.source, []).append(transfer)
            self._num_chunks[transfer.layer] += transfer.end_chunk - transfer.first_chunk
        assert set(self._num_chunks.values()) <= {NUM_CHUNKS}
        self._steps = {
            source: self._read_messages(transfers) for source, transfers in by_source.items()
        }
        self.wanted: dict[int, Tag] = {source: next(step) for source, step in self._steps.items()}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._num_chunks)

    def on_message(self, source: int, received: Bytes) -> Iterator[tuple[int, State]]:
        """Takes the wanted message from a source; yields the layers that it completes.

        Raises:
            PeerLostError: the message differs from what the source sent.
        """
        try:
            self.wanted[source] = self._steps[source].send(received)
        except StopIteration:
            del self.wanted[source]
        for layer in [layer for layer, num_missing in self._num_chunks.items() if not num_missing]:
            del self._num_chunks[layer]
            yield layer, tensor_views(self._tensors.pop(layer), self._memory.pop(layer))

    def _read_messages(self, transfers: Sequence[Transfer]) -> Generator[Tag, Bytes, None]:
        """Yields the tag of each message of one source, in order, and is sent its payload."""
        for transfer in transfers:
            layer = transfer.layer
            raw = yield _head_tag(transfer, self._age)
            try:
                head = msgspec.json.decode(raw.tobytes(), type=_StateHead)
                size = bytes_of(head.tensors)
                if layer not in self._memory:
                    self._memory[layer] = np.empty(size, dtype=np.uint8)
            except (msgspec.DecodeError, ValueError, MemoryError, RecursionError) as error:
                why = f"the description of layer {layer} makes no sense: {error}"
                raise PeerLostError(transfer.source, why) from error
            is_alike = self._tensors.setdefault(layer, head.tensors) == head.tensors
            hasher = xxhash.xxh3_128()
            for index, (first, end) in enumerate(_pieces(transfer, size)):
                piece = yield _piece_tag(transfer, self._age, index)
                hasher.update(piece.data)
                is_alike = is_alike and len(piece) == end - first
                if is_alike:
                    self._memory[layer][first:end] = piece
            digest = yield _digest_tag(transfer, self._age)
            if digest.tobytes() != hasher.digest() or not is_alike:
                why = f"layer {layer} arrived damaged"
                raise PeerLostError(transfer.source, why)
            self._num_chunks[layer] -= transfer.end_chunk - transfer.first_chunk


def _head_tag(transfer: Transfer, age: int) -> Tag:
    return Tag(Channel.STATE_HEAD, age, transfer.layer, 0)


def _digest_tag(transfer: Transfer, age: int) -> Tag:
    return Tag(Channel.STATE_HEAD, age, transfer.layer, 1)


def _piece_tag(transfer: Transfer, age: int, index: int) -> Tag:
    return Tag(Channel.STATE, age, transfer.layer, index)


def _pieces(transfer: Transfer, num_bytes: int) -> Iterator[tuple[int, int]]:
    """First and end byte of each piece of the transfer, in a layer of `num_bytes` bytes."""
    first = num_bytes * transfer.first_chunk // NUM_CHUNKS
    end = num_bytes * transfer.end_chunk // NUM_CHUNKS
    for begin in range(first, end, PIECE_BYTES):
        yield begin, min(end, begin + PIECE_BYTES)


def _byte_range(arrays: Sequence[Bytes], first: int, end: int) -> list[Bytes]:
    """The bytes [first, end) of the concatenated arrays, as views."""
    cut = []
    for array in arrays:
        part = array[max(0, first) : max(0, end)]
        if len(part):
            cut.append(part)
        first, end = first - len(array), end - len(array)
    return cut
