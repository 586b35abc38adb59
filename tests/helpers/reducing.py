"""Gradients summed among ranks in processes of their own, over links that are limited.

Each rank runs its buckets one after the other, in their order, as its communication thread does.
"""

import time
from collections.abc import Mapping, Sequence

import msgspec
import torch
import xxhash

from helpers.limited_network import TIMEOUT_S
from helpers.ranks import join_ranks, results
from planaria.engine.iteration.groups import reduce_bucket
from planaria.nodes.forkserver import ForkServer
from planaria.schedule.action import Bucket


class _Order(msgspec.Struct, frozen=True):
    rank: int
    buckets: tuple[Bucket, ...]
    layer_bytes: tuple[int, ...]


class Reduced(msgspec.Struct, frozen=True):
    """What a rank measured, by the machine's monotonic clock; hashes of sums, by their layers."""

    begin_s: float
    end_s: float
    digests: dict[str, str]


def reduce_buckets(
    server: ForkServer,
    buckets: Sequence[Bucket],
    *,
    layer_bytes: Sequence[int],
    bytes_per_s: float,
) -> dict[int, Reduced]:
    """What each rank measured while the buckets of float32 gradients were summed.

    Args:
        layer_bytes: of the gradients of each layer, a multiple of 4.
    """
    ranks = sorted({rank for bucket in buckets for rank in bucket.ranks})
    orders = {
        rank: msgspec.json.encode(_Order(rank, tuple(buckets), tuple(layer_bytes)))
        for rank in ranks
    }
    found = results(server, "helpers.reducing:serve", orders, bytes_per_s=bytes_per_s)
    return {rank: msgspec.json.decode(line, type=Reduced) for rank, line in found.items()}


def seconds(measured: Mapping[int, Reduced]) -> float:
    """From when all ranks have begun to the last one's end."""
    return max(one.end_s for one in measured.values()) - max(
        one.begin_s for one in measured.values()
    )


def serve(payload: bytes, talk_fd: int) -> None:
    """A rank: sums its buckets as soon as all links stand."""
    order = msgspec.json.decode(payload, type=_Order)
    torch.set_num_threads(1)
    own = [index for index, bucket in enumerate(order.buckets) if order.rank in bucket.ranks]
    peers = {rank for index in own for rank in order.buckets[index].ranks} - {order.rank}
    sums = {index: _gradients(order, order.buckets[index]) for index in own}
    digests = {}
    with join_ranks(order.rank, talk_fd) as (links, addresses, tell):
        links.begin(0, addresses=addresses, peers=peers, timeout_s=TIMEOUT_S)
        begin_s = time.monotonic()
        for index in own:
            result = torch.empty_like(sums[index])
            reduce_bucket(
                links,
                [sums[index]],
                [result],
                ranks=order.buckets[index].ranks,
                iteration=0,
                bucket=index,
                timeout_s=TIMEOUT_S,
            )
            name = str(order.buckets[index].layers)
            digests[name] = xxhash.xxh3_128_hexdigest(result.numpy().data)
        found = Reduced(begin_s, time.monotonic(), digests)
        tell(msgspec.json.encode(found).decode())


def _gradients(order: _Order, bucket: Bucket) -> torch.Tensor:
    size = sum(order.layer_bytes[layer] for layer in bucket.layers) // 4
    return torch.arange(size, dtype=torch.float32) / (order.rank + 3)
