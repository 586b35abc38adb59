"""Whole recoveries over limited links: ranks in processes, real links, layers of several MB.

benchmarks/restorer.py asks for 1.2 times what the most loaded link needs, on links of 100 MB/s.
Here others use the machine, too: links are slower, and the best of a few tries counts.
"""

from collections import Counter
from dataclasses import replace

import pytest

from helpers.exchanging import bound_s, run_exchange, seconds
from helpers.losses import NUM_LAYERS, example_catalog, plan_of, prices
from helpers.plan_examples import figure_9_plan
from helpers.reducing import reduce_buckets
from planaria.core.cluster import NodesLost, survivors
from planaria.nodes.forkserver import ForkServer
from planaria.policies.reinstantiate import Reinstantiate
from planaria.schedule.buckets import ReductionOrder, buckets_of

RATIO_MAX = 3.0
NUM_TRIES = 3
BYTES_PER_S = 20e6
LAYER_BYTES = tuple(1_500_000 + 500_000 * (layer % 5) for layer in range(NUM_LAYERS))


@pytest.mark.timed
def test_a_transfer_takes_little_longer_than_its_most_loaded_link_needs(
    server: ForkServer,
) -> None:
    """Three pipelines of two lose a node: holders share the sending, hashes agree."""
    catalog = replace(example_catalog(6, n0=1, f=1), plans={})
    plan = plan_of(catalog, (2, 2, 2))
    cluster = survivors(plan, (1,), epoch=1)
    costs = replace(prices(catalog), layer_bytes=LAYER_BYTES)
    answers = Reinstantiate(catalog).propose(plan, cluster, NodesLost((1,), 0), costs)
    rounds = answers[0].rounds
    held = {node.node: sorted(node.held[0]) for node in cluster.nodes}

    best_s = float("inf")
    for _ in range(NUM_TRIES):
        found = run_exchange(server, held, rounds, layer_bytes=LAYER_BYTES, bytes_per_s=BYTES_PER_S)
        check_holders_agree({rank: one.digests for rank, one in found.items()})
        for rank, one in found.items():
            moved = [t for transfers in rounds for t in transfers if t.target == rank]
            assert one.received_bytes == sum(transfer.num_bytes for transfer in moved)
            assert one.digests.keys() == {*held[rank], *(transfer.layer for transfer in moved)}
        best_s = min(best_s, seconds(found))
        if best_s < RATIO_MAX * bound_s(rounds, bytes_per_s=BYTES_PER_S):
            break

    sources = Counter(
        transfer.layer for transfers in rounds for transfer in transfers if transfer.target == 0
    )
    assert max(sources.values()) > 1, "no layer comes from several holders"
    assert best_s < RATIO_MAX * bound_s(rounds, bytes_per_s=BYTES_PER_S)


def test_gradients_summed_in_either_order_are_the_same(server: ForkServer) -> None:
    """The pipelines of Oobleck's figure 9, over real links."""
    plan = figure_9_plan()
    sizes = (400_000,) * plan.num_layers

    coloured, uncoloured = (
        reduce_buckets(
            server, buckets_of(plan, order=order), layer_bytes=sizes, bytes_per_s=BYTES_PER_S
        )
        for order in ReductionOrder
    )

    for rank in plan.ranks:
        assert coloured[rank].digests == uncoloured[rank].digests
    check_holders_agree({rank: one.digests for rank, one in coloured.items()})


def check_holders_agree(digests: dict[int, dict[int, str]] | dict[int, dict[str, str]]) -> None:
    """Whoever has a thing has the same bits of it."""
    by_thing: dict[int | str, set[str]] = {}
    for one in digests.values():
        for thing, digest in one.items():
            by_thing.setdefault(thing, set()).add(digest)
    assert all(len(found) == 1 for found in by_thing.values())
