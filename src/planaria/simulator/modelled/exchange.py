"""Transfers modelled layers to ranks that lack them, before an epoch begins or while it trains.

Sends and receives are in the same order as in engine/exchange.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from planaria.core.messages import AT_COMMIT, StartEpoch
from planaria.core.plan import NUM_CHUNKS, Transfer
from planaria.errors import PeerLostError
from planaria.simulator.loop import Process
from planaria.simulator.modelled.executor import NOT_YET, ModelledLayer
from planaria.simulator.modelled.layout import IterationLayout
from planaria.simulator.modelled.links import SimulatedLinks

_BYTES_PER_S = 2e8
_TAKEN = ("taken",)


class Holder(Protocol):
    """The part of a worker that transfers use."""

    rank: int
    process: Process
    links: SimulatedLinks
    layers: dict[int, ModelledLayer]


async def exchange(
    holder: Holder, transfers: Sequence[Transfer], age: int, *, copies: Mapping[int, int]
) -> None:
    """Sends the layers that others lack, and receives those that this rank lacks.

    Args:
        age: age of the layers.
        copies: contents of layers that this rank does not hold, but keeps copies of.
    """
    _send(holder, transfers, age, copies)
    for layer, content in await _receive_layers(holder, transfers, age):
        holder.layers[layer] = ModelledLayer(age=age, content=content)
    for source in sorted(
        {transfer.source for transfer in transfers if transfer.target == holder.rank}
    ):
        with suppress(PeerLostError):
            holder.links.send(source, _TAKEN, None)


async def wait_taken(holder: Holder, transfers: Iterable[Transfer]) -> None:
    """Waits until all ranks that receive layers from this rank have them."""
    for target in sorted(
        {transfer.target for transfer in transfers if transfer.source == holder.rank}
    ):
        await holder.links.receive(target, _TAKEN)


async def prepare(holder: Holder, start: StartEpoch, layout: IterationLayout) -> StartEpoch:
    """Sends layers to silent members, and adds empty entries for those that this rank will receive;
    returns the order with its iteration filled in."""
    transfers = [transfer for transfers in start.rounds for transfer in transfers]
    if start.iteration == AT_COMMIT:
        source = min(transfer.source for transfer in transfers if transfer.target == holder.rank)
        age = await holder.links.receive(source, ("age",))
        start = msgspec.structs.replace(start, iteration=age)
    for target in sorted(
        {transfer.target for transfer in transfers if transfer.source == holder.rank}
    ):
        holder.links.send(target, ("age",), start.iteration)
    _send(holder, transfers, start.iteration, {})
    for layer in set(layout.layers_of(holder.rank)) - holder.layers.keys():
        holder.layers[layer] = ModelledLayer(age=NOT_YET, content=0)
    return start


async def receive_silently(holder: Holder, start: StartEpoch, iteration: int) -> None:
    """Receives this rank's silent layers in the first iteration of the epoch."""
    if not start.plan.silent or iteration > start.iteration:
        return
    transfers = [transfer for transfers in start.rounds for transfer in transfers]
    for layer, content in await _receive_layers(holder, transfers, iteration):
        holder.layers[layer].content = content
        holder.layers[layer].age = iteration


def _send(
    holder: Holder, transfers: Iterable[Transfer], age: int, copies: Mapping[int, int]
) -> None:
    live = {layer: layer_state.content for layer, layer_state in holder.layers.items()}
    for transfer in transfers:
        if transfer.source == holder.rank:
            tag = ("state", age, transfer.layer, transfer.first_chunk)
            content = live[transfer.layer] if transfer.layer in live else copies[transfer.layer]
            holder.links.send(transfer.target, tag, content)


async def _receive_layers(
    holder: Holder, transfers: Iterable[Transfer], age: int
) -> list[tuple[int, int]]:
    """Receives layers; returns number and content of each, after checking that chunks are equal."""
    contents_by_layer: dict[int, list[int]] = {}
    for transfer in transfers:
        if transfer.target == holder.rank:
            tag = ("state", age, transfer.layer, transfer.first_chunk)
            content = await holder.links.receive(transfer.source, tag)
            await holder.process.sleep(transfer.num_bytes / _BYTES_PER_S)
            contents_by_layer.setdefault(transfer.layer, []).append(content)
            if transfer.end_chunk == NUM_CHUNKS:
                assert len(set(contents_by_layer[transfer.layer])) == 1, (
                    f"layer {transfer.layer} from two states"
                )
    return [(layer, contents[0]) for layer, contents in contents_by_layer.items()]
