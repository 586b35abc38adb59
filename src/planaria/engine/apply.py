"""A transition on live tensors: the outcome is applied, and missing layers come from their holders.

A layer travels as two messages: what its tensors are (JSON: name, dtype, shape; and the hash of
the bytes), then their bytes end to end. Whoever holds a layer already neither sends for it nor
touches it. Sends never block, so all of them are queued, round after round, before the first
layer is awaited.

Source: DESIGN 4.5 (outcome) and 5 (transfer); Oobleck (SOSP '23), section 5.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
import xxhash

from planaria.core.plan import Transfer
from planaria.engine.stage import Stage, State
from planaria.errors import PeerLostError
from planaria.transport.links import Channel, Links, Tag


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
    rank = links.rank
    ordered = [transfer for transfers in rounds for transfer in transfers]
    for transfer in ordered:
        if transfer.source == rank:
            _send(links, transfer.target, transfer.layer, stage.layers[transfer.layer].state(), age)
    for transfer in ordered:
        if transfer.target == rank:
            state = _receive(links, transfer.source, transfer.layer, age, timeout_s=timeout_s)
            stage.hold([transfer.layer], states={transfer.layer: state}, age=age)
    return links.state_bytes[links.epoch]


def missing_layers(layers: Collection[int], stage: Stage) -> list[int]:
    """Layers that the stage does not hold, ascending."""
    return sorted(set(layers) - stage.layers.keys())


def _send(links: Links, target: int, layer: int, state: State, age: int) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in state.items()}
    hashed = xxhash.xxh3_128()
    for array in arrays.values():
        hashed.update(array.reshape(-1).view(np.uint8).data)
    tensors = tuple(_Tensor(name, a.dtype.str, a.shape) for name, a in arrays.items())
    head = msgspec.json.encode(_Head(tensors, hashed.hexdigest()))
    links.send(target, Tag(Channel.STATE_HEAD, age, layer), np.frombuffer(head, dtype=np.uint8))
    links.send(target, Tag(Channel.STATE, age, layer), *arrays.values())


def _receive(
    links: Links, source: int, layer: int, age: int, *, timeout_s: float
) -> Mapping[str, np.ndarray]:
    raw = links.receive(source, Tag(Channel.STATE_HEAD, age, layer), timeout_s=timeout_s)
    head = msgspec.json.decode(raw.tobytes(), type=_Head)
    body = links.receive(source, Tag(Channel.STATE, age, layer), timeout_s=timeout_s)
    if xxhash.xxh3_128_hexdigest(body.data) != head.xxh3_128:
        raise PeerLostError(source, f"layer {layer} did not arrive as it was sent")
    state = {}
    offset = 0
    for tensor in head.tensors:
        dtype = np.dtype(tensor.dtype)
        num_bytes = dtype.itemsize * int(np.prod(tensor.shape, dtype=np.int64))
        state[tensor.name] = (
            body[offset : offset + num_bytes].copy().view(dtype).reshape(tensor.shape)
        )
        offset += num_bytes
    assert offset == len(body)
    return state
