"""Reductions over links: the sum in ascending order of ranks, rounded once, the same everywhere."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.linked_ranks import TIMEOUT_S, link_ranks, on_all
from planaria.engine.iteration.groups import reduce_bucket, reduce_vector, tree_peers
from planaria.transport.links import Channel, Links

Sums = dict[int, list[Tensor]]

SIZES = [(7,), (0,), (1,), (5, 0, 3), (2, 11, 1, 64), (1000, 333)]


def parts(rank: int, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Sums of one rank, of very different magnitude, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(size, generator=generator, dtype=torch.float64)
        .mul_(10.0 ** (3 * (rank % 3)))
        .to(dtype)
        for size in sizes
    ]


def ascending(all_parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What the reduction must give: added in order from +0, rounded at the end."""
    totals = [torch.zeros_like(part) for part in all_parts[0]]
    for own in all_parts:
        for total, part in zip(totals, own, strict=True):
            total += part
    return [total.to(torch.float32) for total in totals]


def reduced(ranks: list[Links], sums: Sums, bucket: int = 0) -> list[list[Tensor]]:
    def run(links: Links) -> list[Tensor]:
        own = sums[links.rank]
        results = [torch.full((part.numel(),), float("nan")) for part in own]
        reduce_bucket(
            links,
            own,
            results,
            ranks=[each.rank for each in ranks],
            iteration=0,
            bucket=bucket,
            timeout_s=TIMEOUT_S,
        )
        return results

    return on_all(ranks, run)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("num_holders", range(1, 7))
def test_a_bucket_is_the_ascending_sum_rounded_once_on_all_holders(
    num_holders: int, dtype: torch.dtype
) -> None:
    """Bit for bit, for sizes that the holders do not divide, and for tensors without elements."""
    with link_ranks(num_holders) as ranks:
        for bucket, sizes in enumerate(SIZES):
            sums = {links.rank: parts(links.rank, sizes, dtype) for links in ranks}
            expected = ascending([sums[rank] for rank in sorted(sums)])
            for results in reduced(ranks, sums, bucket):
                for wanted, result in zip(expected, results, strict=True):
                    assert torch.equal(wanted.view(torch.int32), result.view(torch.int32))


@pytest.mark.parametrize("num_holders", range(1, 7))
def test_float32_sums_may_be_where_their_results_go(num_holders: int) -> None:
    """A part is written over once its sum is there, so whoever adds it up has got it."""
    with link_ranks(num_holders) as ranks:
        for bucket, sizes in enumerate(SIZES):
            sums = {links.rank: parts(links.rank, sizes, torch.float32) for links in ranks}
            expected = ascending([sums[rank] for rank in sorted(sums)])

            def run(links: Links, bucket: int = bucket, sums: Sums = sums) -> list[Tensor]:
                own = sums[links.rank]
                holders = [each.rank for each in ranks]
                reduce_bucket(
                    links,
                    own,
                    own,
                    ranks=holders,
                    iteration=0,
                    bucket=bucket,
                    timeout_s=TIMEOUT_S,
                )
                return own

            for results in on_all(ranks, run):
                for wanted, result in zip(expected, results, strict=True):
                    assert torch.equal(wanted.view(torch.int32), result.view(torch.int32))


def test_the_holders_of_a_bucket_may_be_any_ranks() -> None:
    """Ranks without the layers take no part, and the order is that of ranks."""
    with link_ranks(5) as ranks:
        holders = [ranks[1], ranks[4]]
        sums = {rank: parts(rank, (9,), torch.float32) for rank in (1, 4)}
        results = reduced(holders, sums)

    expected = ascending([sums[1], sums[4]])
    assert all(torch.equal(expected[0], result[0]) for result in results)


def test_a_sum_that_float32_cannot_hold_is_rounded_at_the_end_alone() -> None:
    """1e8 + 1 - 1e8 is 1 in float64 sums; rounding in between would give 0."""
    values = (1e8, 1.0, -1e8)
    with link_ranks(3) as ranks:
        sums = {
            rank: [torch.full((4,), value, dtype=torch.float64)]
            for rank, value in enumerate(values)
        }
        results = reduced(ranks, sums)

    assert all(result[0].tolist() == [1.0] * 4 for result in results)


def test_negative_zeros_sum_to_positive_zero() -> None:
    """As in one process, whose sums start at +0."""
    with link_ranks(2) as ranks:
        sums = {rank: [torch.full((3,), -0.0, dtype=torch.float64)] for rank in (0, 1)}
        results = reduced(ranks, sums)

    assert not any(torch.signbit(result[0]).any() for result in results)


def test_a_holder_moves_no_more_than_a_ring_would() -> None:
    """2 (k-1)/k of the bucket: the scattered part as it is summed, the gathered part rounded."""
    with link_ranks(4) as ranks:
        sums = {rank: parts(rank, (4000,), torch.float64) for rank in range(4)}
        reduced(ranks, sums)

        for links in ranks:
            assert links.sent_bytes[Channel.SCATTER] == 3 * 1000 * 8
            assert links.sent_bytes[Channel.GATHER] == 3 * 1000 * 4


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_the_vector_is_exact_and_the_same_everywhere(num_ranks: int) -> None:
    """Each entry is one rank's own; thirds have no short binary form, so any rounding shows."""
    size = 2 * num_ranks

    def run(links: Links) -> np.ndarray:
        vector = np.zeros(size)
        vector[[links.rank, links.rank + num_ranks]] = (links.rank + 1) / 3, -1e-300 / 3
        return reduce_vector(
            links,
            vector,
            ranks=[each.rank for each in ranks],
            iteration=0,
            timeout_s=TIMEOUT_S,
        )

    with link_ranks(num_ranks) as ranks:
        totals = on_all(ranks, run)

    expected = np.array([(r + 1) / 3 for r in range(num_ranks)] + [-1e-300 / 3] * num_ranks)
    assert all(total.tobytes() == expected.tobytes() for total in totals)


def test_the_vector_counts_votes() -> None:
    """Entries that all ranks contribute to are summed, too."""
    with link_ranks(5) as ranks:
        numbers = [links.rank for links in ranks]
        totals = on_all(
            ranks,
            lambda links: reduce_vector(
                links, np.array([1.0]), ranks=numbers, iteration=0, timeout_s=TIMEOUT_S
            ),
        )

    assert [total.tolist() for total in totals] == [[5.0]] * 5


@pytest.mark.parametrize("ranks", [(3,), (0, 2), (1, 4, 5, 7, 8, 9, 30)])
def test_the_tree_is_one_tree(ranks: tuple[int, ...]) -> None:
    """Whom a rank exchanges with exchanges with it, and everybody is reached from the first."""
    neighbours = {rank: set(tree_peers(rank, ranks)) for rank in ranks}

    assert all(rank in neighbours[peer] for rank in ranks for peer in neighbours[rank])
    assert sum(map(len, neighbours.values())) == 2 * (len(ranks) - 1)
    reached = {ranks[0]}
    for _ in ranks:
        reached |= {peer for rank in reached for peer in neighbours[rank]}
    assert reached == set(ranks)
