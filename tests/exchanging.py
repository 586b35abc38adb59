"""Layers on their way between ranks in processes of their own, over links that are limited."""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec
import torch
import xxhash
from torch import Tensor, nn

from limited import TIMEOUT_S, LimitedNetwork
from planaria.core.job import ModelConfig, TrainingConfig
from planaria.core.plan import Transfer
from planaria.engine.apply import exchange_layers, transfer_peers
from planaria.engine.prepare import split_model
from planaria.engine.stage import Stage
from planaria.nodes.forkserver import ForkServer
from planaria.transport.links import Address, Links

AGE = 3
SEARCH_PATH = (str(Path(__file__).parent),)
PRELOAD = ("torch", "torch._dynamo", "torch.optim", "exchanging")

_TOKEN = b"the job's token"


class Order(msgspec.Struct, frozen=True):
    """What a rank is told: what it holds, and who sends what to whom.

    Attributes:
        layer_bytes: of all layers of the model; multiples of 4.
    """

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


class _Numbers(nn.Module):
    """A layer of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(num_bytes // 4))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.weight.sum()


def exchanged(
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
        server: has this module on its path.
        held: by rank, the layers that it has at first.
        late_s: by rank, how long links from lower ranks to it take to come about.
    """
    with ExitStack() as stack:
        talks: dict[int, TextIO] = {}
        for rank, layers in held.items():
            ours, theirs = socket.socketpair()
            order = Order(
                rank, tuple(layer_bytes), tuple(layers), tuple(tuple(one) for one in rounds)
            )
            ours.settimeout(TIMEOUT_S)
            server.spawn("exchanging:serve", msgspec.json.encode(order), (theirs.fileno(),))
            theirs.close()
            talks[rank] = stack.enter_context(stack.enter_context(ours).makefile("rw"))
        addresses: dict[int, Address] = {}
        for rank, talk in talks.items():
            host, port = json.loads(talk.readline())
            addresses[rank] = (host, port)
        network = LimitedNetwork(addresses, bytes_per_s=bytes_per_s, late_s=late_s or {})
        stack.callback(network.close)
        for rank, talk in talks.items():
            print(json.dumps(network.addresses_for(rank)), file=talk, flush=True)
        return {
            rank: msgspec.json.decode(talk.readline(), type=Exchanged)
            for rank, talk in talks.items()
        }


def seconds(measured: Mapping[int, Exchanged]) -> float:
    """From the first rank's begin to the last one's end."""
    return max(one.end_s for one in measured.values()) - min(
        one.begin_s for one in measured.values()
    )


def bound_s(rounds: Sequence[Sequence[Transfer]], *, bytes_per_s: float) -> float:
    """What the most loaded way, out of a rank or into one, needs at least."""
    ways: dict[tuple[str, int], int] = {}
    for transfer in (transfer for transfers in rounds for transfer in transfers):
        for way in (("out", transfer.source), ("into", transfer.target)):
            ways[way] = ways.get(way, 0) + transfer.num_bytes
    return max(ways.values()) / bytes_per_s


def serve(payload: bytes, talk_fd: int) -> None:
    """A rank: exchanges layers when it is told to, then waits until nobody needs it any more."""
    order = msgspec.json.decode(payload, type=Order)
    torch.set_num_threads(1)
    links = Links(order.rank, token=_TOKEN)
    with socket.socket(fileno=talk_fd) as sock, sock.makefile("rw") as talk:
        stage = _stage(order)
        print(json.dumps(links.address), file=talk, flush=True)
        places = json.loads(talk.readline())
        addresses = {int(rank): (host, port) for rank, (host, port) in places.items()}
        begin_s = time.monotonic()
        peers = transfer_peers(order.rounds, order.rank)
        links.enter(0, addresses=addresses, peers=peers)
        num_bytes = exchange_layers(links, stage, order.rounds, age=AGE, timeout_s=TIMEOUT_S)
        links.wait_linked(timeout_s=TIMEOUT_S)
        end_s = time.monotonic()
        found = Exchanged(begin_s, links.linked_s, end_s, num_bytes, _digests(stage))
        print(msgspec.json.encode(found).decode(), file=talk, flush=True)
        talk.readline()  # Until the other end is closed: what is queued has to be written.
    links.close()


def _stage(order: Order) -> Stage:
    _sizes[:] = order.layer_bytes
    model = ModelConfig(kind="python", target="exchanging:layers")
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=0)
    training = TrainingConfig(optimizer={"name": "SGD"}, deterministic=False)
    stage = Stage(split, training=training)
    stage.hold(order.held, states={}, age=AGE)
    return stage


_sizes: list[int] = []  # Of the layers of the order that this process was given.


def layers() -> list[Callable[[], nn.Module]]:
    """The model, in the way that a user gives one."""
    return [partial(_Numbers, size) for size in _sizes]


def _digests(stage: Stage) -> dict[int, str]:
    return {
        layer: xxhash.xxh3_128_hexdigest(b"".join(a.tobytes() for a in held.state().values()))
        for layer, held in stage.layers.items()
    }
