"""A transition on live tensors: the outcome is applied, and missing layers come from their holders.

A layer comes in chunks, from one holder or several. Chunks travel as two messages: what the layer's
tensors are (JSON: name, dtype, shape; and the hash of the chunks' bytes), then those of their bytes
end to end that the chunks are. Whoever holds a layer already neither sends for it nor touches it.
Sends never block, so all of them are queued, round after round, before the first layer is awaited.

Source: DESIGN 4.5 (outcome) and 5 (transfer); Oobleck (SOSP '23), section 5.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from planaria.checkpoint.tiers import DiskTier
from planaria.core.commit import CommitVector, encode_vector
from planaria.core.messages import Stopped
from planaria.core.plan import NUM_CHUNKS, Transfer
from planaria.engine.stage import Stage, State
from planaria.errors import CheckpointError, ConfigError, PeerLostError
from planaria.transport.links import Channel, Links, Tag

_AGE_TAG = Tag(Channel.AGE, 0, 0)


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Head(msgspec.Struct, frozen=True):
    tensors: tuple[_Tensor, ...]
    xxh3_128: str


def drop_others(stage: Stage, *, age: int) -> None:
    """Keeps the layers of this age, without gradients; the others are of no use any more."""
    stage.keep_only([layer for layer, held in stage.layers.items() if held.age == age])
    for held in stage.layers.values():
        held.clear()


def loaded_layers(tier: DiskTier, source: str, layers: Sequence[int]) -> dict[int, State]:
    """The states of layers in a version of the disk tier; none if that is "".

    Raises:
        ConfigError: it cannot be read.
    """
    if not source:
        return {}
    manifest = next(v.manifest for v in tier.versions() if v.directory.name == source)
    try:
        if manifest is None:
            raise CheckpointError(f"checkpoint {source} is not complete any more")
        return {layer: tier.read_layer(manifest, layer) for layer in layers}
    except CheckpointError as error:
        raise ConfigError("checkpoint.directory", str(tier.directory), str(error)) from error


def answer(
    stage: Stage,
    rank: int,
    epoch: int,
    vector: tuple[int, CommitVector] | None,
    hashes: Mapping[int, int],
) -> Stopped:
    """What a rank holds, now that nothing of it changes any more.

    Args:
        vector: the newest one, with its iteration.
    """
    whole = stage.whole()
    return Stopped(
        rank=rank,
        epoch=epoch,
        ages={layer: held.age for layer, held in whole.items()},
        complete=tuple(n for n, held in whole.items() if held.gradients_of == held.age),
        vector_iteration=vector[0] if vector else -1,
        vector=encode_vector(vector[1]) if vector else b"",
        hashes=dict(hashes),
    )


def transfer_sources(rounds: Sequence[Sequence[Transfer]]) -> set[int]:
    """The ranks that others get layers from."""
    return {transfer.source for transfers in rounds for transfer in transfers}


def transfer_peers(rounds: Sequence[Sequence[Transfer]], rank: int) -> set[int]:
    """Whom a rank exchanges layers with."""
    ends = {(t.source, t.target) for transfers in rounds for t in transfers}
    return {a if b == rank else b for a, b in ends if rank in (a, b)}


def exchange_layers(
    links: Links,
    stage: Stage,
    rounds: Sequence[Sequence[Transfer]],
    *,
    age: int,
    timeout_s: float,
) -> int:
    """Sends what others lack and takes over what this rank lacks; the bytes that came for that.

    Raises:
        PeerLostError, AbortedError: a holder is gone; what has arrived by then is held.
    """
    ordered = [transfer for transfers in rounds for transfer in transfers]
    own: dict[int, _Layer] = {}
    for transfer in ordered:
        if transfer.source == links.rank:
            if transfer.layer not in own:
                own[transfer.layer] = _Layer(stage.layers[transfer.layer].state())
            own[transfer.layer].send(links, transfer, age)
    for layer, chunks in _lacked(links, rounds).items():
        state = _received(links, chunks, age, timeout_s=timeout_s)
        stage.hold([layer], states={layer: state}, age=age)
    return links.state_bytes[links.epoch]


def send_silently(
    links: Links, stage: Stage, rounds: Sequence[Sequence[Transfer]], *, age: int
) -> None:
    """Sends layers of this age to those who are to hold them silently, and first of all the age.

    Raises:
        PeerLostError: one of them is gone.
    """
    own = [t for transfers in rounds for t in transfers if t.source == links.rank]
    for target in {transfer.target for transfer in own}:
        links.send(target, _AGE_TAG, np.array([age], dtype=np.int64))
    states = {layer: _Layer(stage.layers[layer].state()) for layer in {t.layer for t in own}}
    for transfer in own:
        states[transfer.layer].send(links, transfer, age)


def received_age(links: Links, rounds: Sequence[Sequence[Transfer]], *, timeout_s: float) -> int:
    """The age of what is sent to this rank, which had no part in the epoch before.

    Raises:
        PeerLostError, AbortedError: whoever would send it is gone.
    """
    source = min(t.source for transfers in rounds for t in transfers if t.target == links.rank)
    received = links.receive(source, _AGE_TAG, timeout_s=timeout_s)
    return int(received.view(np.int64)[0])


def receive_silently(
    links: Links,
    stage: Stage,
    rounds: Sequence[Sequence[Transfer]],
    *,
    age: int,
    timeout_s: float,
) -> int:
    """Fills in the layers that this rank has prepared, once they are here; the bytes that came.

    Raises:
        PeerLostError, AbortedError: a holder is gone; what has arrived by then is held.
    """
    for layer, chunks in _lacked(links, rounds).items():
        stage.fill(layer, _received(links, chunks, age, timeout_s=timeout_s), age=age)
    return links.state_bytes[links.epoch]


def _lacked(links: Links, rounds: Sequence[Sequence[Transfer]]) -> dict[int, list[Transfer]]:
    lacked: dict[int, list[Transfer]] = {}
    for transfers in rounds:
        for transfer in transfers:
            if transfer.target == links.rank:
                lacked.setdefault(transfer.layer, []).append(transfer)
    return lacked


def missing_layers(layers: Collection[int], stage: Stage) -> list[int]:
    """Layers that the stage does not hold, ascending."""
    return sorted(set(layers) - stage.layers.keys())


class _Layer:
    """A layer's state as bytes end to end."""

    def __init__(self, state: State) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in state.items()}
        self._tensors = tuple(_Tensor(name, a.dtype.str, a.shape) for name, a in arrays.items())
        self._bytes = [array.reshape(-1).view(np.uint8) for array in arrays.values()]

    def send(self, links: Links, transfer: Transfer, age: int) -> None:
        """Queues some chunks of it."""
        size = sum(len(array) for array in self._bytes)
        pieces = self._cut(_offset(size, transfer.first_chunk), _offset(size, transfer.end_chunk))
        hashed = xxhash.xxh3_128()
        for piece in pieces:
            hashed.update(piece.data)
        head = msgspec.json.encode(_Head(self._tensors, hashed.hexdigest()))
        tag = Tag(Channel.STATE_HEAD, age, transfer.layer)
        links.send(transfer.target, tag, np.frombuffer(head, dtype=np.uint8))
        links.send(transfer.target, Tag(Channel.STATE, age, transfer.layer), *pieces)

    def _cut(self, first: int, end: int) -> list[npt.NDArray[np.uint8]]:
        pieces = []
        for array in self._bytes:
            piece = array[max(0, first) : max(0, end)]
            if len(piece):
                pieces.append(piece)
            first, end = first - len(array), end - len(array)
        return pieces


def _offset(num_bytes: int, chunk: int) -> int:
    """Where a chunk of so many bytes begins."""
    return num_bytes * chunk // NUM_CHUNKS


def _received(
    links: Links, chunks: Sequence[Transfer], age: int, *, timeout_s: float
) -> Mapping[str, np.ndarray]:
    """A layer's state, of the chunks that its holders send."""
    in_order = sorted(chunks, key=lambda transfer: transfer.first_chunk)
    assert [p.end_chunk for p in in_order] == [*(p.first_chunk for p in in_order[1:]), NUM_CHUNKS]
    tensors: tuple[_Tensor, ...] = ()
    bodies = []
    for chunk in in_order:
        tag = Tag(Channel.STATE_HEAD, age, chunk.layer)
        raw = links.receive(chunk.source, tag, timeout_s=timeout_s)
        head = msgspec.json.decode(raw.tobytes(), type=_Head)
        tag = Tag(Channel.STATE, age, chunk.layer)
        body = links.receive(chunk.source, tag, timeout_s=timeout_s)
        is_alike = head.tensors == (tensors or head.tensors)
        if xxhash.xxh3_128_hexdigest(body.data) != head.xxh3_128 or not is_alike:
            raise PeerLostError(chunk.source, f"layer {chunk.layer} did not arrive as it was sent")
        tensors = head.tensors
        bodies.append(body)
    whole = np.concatenate(bodies) if len(bodies) > 1 else bodies[0]
    state = {}
    offset = 0
    for tensor in tensors:
        dtype = np.dtype(tensor.dtype)
        num_bytes = dtype.itemsize * int(np.prod(tensor.shape, dtype=np.int64))
        state[tensor.name] = (
            whole[offset : offset + num_bytes].copy().view(dtype).reshape(tensor.shape)
        )
        offset += num_bytes
    assert offset == len(whole)
    return state
