"""Layers on their way between ranks in processes of their own, over links that are limited."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import torch
import xxhash
from torch import Tensor, nn

from helpers.limited_network import TIMEOUT_S
from helpers.ranks import join_ranks, results
from planaria.core.job import ModelConfig, TrainingConfig
from planaria.core.plan import Transfer
from planaria.engine.exchange import exchange_layers
from planaria.engine.prepare import split_model
from planaria.engine.stage import RankStage
from planaria.nodes.forkserver import ForkServer
from planaria.protocol.worker_state import transfer_peers

AGE = 3


class _Order(msgspec.Struct, frozen=True):
    rank: int
    layer_bytes: tuple[int, ...]
    held: tuple[int, ...]
    rounds: tuple[tuple[Transfer, ...], ...]


class Exchanged(msgspec.Struct, frozen=True):
    """What a rank measured, by the machine's monotonic clock, and what it holds at the end."""

    begin_s: float
    linked_s: float
    end_s: float
    received_bytes: int
    digests: dict[int, str]


def run_exchange(
    server: ForkServer,
    held: Mapping[int, Sequence[int]],
    rounds: Sequence[Sequence[Transfer]],
    *,
    layer_bytes: Sequence[int],
    bytes_per_s: float,
    late_s: Mapping[int, float] | None = None,
) -> dict[int, Exchanged]:
    """What each rank measured while the transfers were under way.

    Args:
        held: by rank, the layers that it has at first.
        layer_bytes: of all layers; multiples of 4.
        late_s: by rank, how long links from lower ranks to it take to come about.
    """
    taken = tuple(tuple(transfers) for transfers in rounds)
    orders = {
        rank: msgspec.json.encode(_Order(rank, tuple(layer_bytes), tuple(layers), taken))
        for rank, layers in held.items()
    }
    found = results(
        server, "helpers.exchanging:serve", orders, bytes_per_s=bytes_per_s, late_s=late_s
    )
    return {rank: msgspec.json.decode(line, type=Exchanged) for rank, line in found.items()}


def seconds(measured: Mapping[int, Exchanged]) -> float:
    """From the first rank's begin to the last one's end."""
    return max(one.end_s for one in measured.values()) - min(
        one.begin_s for one in measured.values()
    )


def bound_s(rounds: Sequence[Sequence[Transfer]], *, bytes_per_s: float) -> float:
    """What the most loaded way, out of a rank or into one, needs at least."""
    ways: Counter[tuple[str, int]] = Counter()
    for transfer in (transfer for transfers in rounds for transfer in transfers):
        ways["out", transfer.source] += transfer.num_bytes
        ways["into", transfer.target] += transfer.num_bytes
    return max(ways.values(), default=0) / bytes_per_s


def serve(payload: bytes, talk_fd: int) -> None:
    """A rank: exchanges layers as soon as all ranks are there."""
    order = msgspec.json.decode(payload, type=_Order)
    torch.set_num_threads(1)
    stage = _stage(order)
    with join_ranks(order.rank, talk_fd) as (links, addresses, tell):
        begin_s = time.monotonic()
        links.enter(0, addresses=addresses, peers=transfer_peers(order.rounds, order.rank))
        num_bytes = exchange_layers(links, stage, order.rounds, age=AGE, timeout_s=TIMEOUT_S)
        links.wait_linked(timeout_s=TIMEOUT_S)
        end_s = time.monotonic()
        found = Exchanged(begin_s, links.linked_s, end_s, num_bytes, _digests(stage))
        tell(msgspec.json.encode(found).decode())


def _stage(order: _Order) -> RankStage:
    _sizes[:] = order.layer_bytes
    model = ModelConfig(kind="python", target="helpers.exchanging:layers")
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=0)
    training = TrainingConfig(optimizer={"name": "SGD"}, deterministic=False)
    stage = RankStage(split, training=training)
    stage.hold(order.held, states={}, age=AGE)
    return stage


_sizes: list[int] = []  # Of the layers of the order that this process was given.


def layers() -> list[Callable[[], nn.Module]]:
    """The model, in the way that a user gives one."""
    return [partial(_Numbers, size) for size in _sizes]


class _Numbers(nn.Module):
    """A layer of so many bytes, like no other."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(num_bytes // 4, dtype=torch.float32))
        with torch.no_grad():
            self.weight.add_(torch.rand(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.weight.sum()


def _digests(stage: RankStage) -> dict[int, str]:
    return {
        layer: xxhash.xxh3_128_hexdigest(next(iter(held.masters.values())).detach().numpy().data)
        for layer, held in stage.layers.items()
    }
