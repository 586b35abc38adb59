"""The buckets in which gradients are summed, and the order of their reductions.

Consecutive layers with the same holders are one bucket; a tied parameter is a bucket of its own.
Reductions run in one global order, in rounds: buckets that share a rank are never in the same
round, so that the buckets of one round run in parallel. Rounds are the colours of a greedy
colouring in layer order. Tied parameters come last, in rounds of their own.

No colouring has fewer rounds if each rank holds consecutive layers, which only silent ranks may not
do. Proof: let b be a bucket, and a the first one before it with which it shares a rank. That rank
holds the layers of a and of b, so all layers between them, and is in all buckets from a to b. So b
and the k buckets before it with which it shares ranks all have this rank in common. They need k + 1
rounds in any colouring, and the greedy one gives b one of the first k + 1.

In layer order, without colours, a bucket waits for the one before it if the two share a rank.
Hardly any buckets run in parallel then if all pipelines have different stages.

Source: Odyssey, section IV-B and figures 4 and 11.
Differs: Oobleck and Odyssey reduce each layer by itself; here consecutive layers with the same
holders are one bucket, so that messages are few and large. Odyssey colours greedily, too, and says
that this gives the least number of rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import groupby

from planaria.core.plan import Plan, TiedParameters
from planaria.schedule.action import Bucket


class ReductionOrder(StrEnum):
    """The order of reductions: in the fewest rounds, or each in a round of its own."""

    COLOURED = "coloured"
    UNCOLOURED = "uncoloured"


def buckets_of(
    plan: Plan,
    *,
    tied: Sequence[TiedParameters] = (),
    order: ReductionOrder = ReductionOrder.COLOURED,
) -> tuple[Bucket, ...]:
    """The buckets of a plan, in the global order of their reductions."""
    own, shared = _buckets(plan, tied)
    if order is ReductionOrder.COLOURED:
        return _coloured_buckets(own, shared)
    in_layer_order = enumerate([*own, *shared])
    return tuple(replace(bucket, round_index=index) for index, bucket in in_layer_order)


def _buckets(plan: Plan, tied: Sequence[TiedParameters]) -> tuple[list[Bucket], list[Bucket]]:
    """The buckets of the layers' own parameters and those of tied ones, in layer order."""
    holders: list[list[int]] = [[] for _ in range(plan.num_layers)]
    for rank, layers in plan.held_by_rank.items():
        for layer in layers:
            holders[layer].append(rank)
    own = [
        Bucket(tuple(run), tuple(ranks))
        for ranks, run in groupby(range(plan.num_layers), key=lambda layer: holders[layer])
        if len(ranks) > 1
    ]
    shared = []
    for index, parameter in enumerate(tied):
        ranks = sorted({rank for layer in parameter.layers for rank in holders[layer]})
        if len(ranks) > 1:
            shared.append(Bucket(tuple(sorted(parameter.layers)), tuple(ranks), tied=index))
    return own, sorted(shared, key=lambda bucket: (bucket.layers, bucket.tied))


def _coloured_buckets(own: Iterable[Bucket], tied: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """All buckets with their rounds, in the order (round, first layer)."""
    coloured: list[Bucket] = []
    for group in (own, tied):
        num_rounds = max((bucket.round_index + 1 for bucket in coloured), default=0)
        rounds_of_rank: dict[int, set[int]] = {}
        for bucket in group:
            busy = {index for rank in bucket.ranks for index in rounds_of_rank.get(rank, ())}
            free = next(index for index in range(len(busy) + 1) if index not in busy)
            coloured.append(replace(bucket, round_index=num_rounds + free))
            for rank in bucket.ranks:
                rounds_of_rank.setdefault(rank, set()).add(free)
    return tuple(sorted(coloured, key=lambda bucket: (bucket.round_index, bucket.layers)))
