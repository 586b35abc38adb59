"""How to spread nodes over pipelines: how many pipelines, and how many nodes in each.

The depth of a pipeline is its number of nodes. The most even spreads come first, because pipelines
of equal depth seldom wait for each other; for many pipelines there are more spreads than can be
looked at.

Source: Odyssey, section IV-A: DP/PP parallelism and batch distribution.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from planaria.planner.problem import Problem
from planaria.planner.templates import smallest_num_nodes

DEPTHS_MAX: Final = 512  # Bound on the spreads over one number of pipelines.


@dataclass(frozen=True, slots=True)
class Ranges:
    """How far a layout may differ from the present pipelines and from even depths.

    Attributes:
        dp: largest difference from the present number of pipelines.
        pp: largest difference of a depth from an even share of the nodes.
    """

    dp: int = 2
    pp: int = 2

    def __post_init__(self) -> None:
        assert min(self.dp, self.pp) >= 0


def by_share(depths: Sequence[int], num_microbatches: int) -> tuple[int, ...]:
    """Microbatches of each pipeline in proportion to its nodes, at least one each.

    Those that rounding down leaves over go to the pipelines with the largest remainders.

    Args:
        depths: number of nodes of each pipeline.
        num_microbatches: number of microbatches to distribute, at least that of pipelines.
    """
    assert num_microbatches >= len(depths)
    num_nodes = sum(depths)
    counts = [num_microbatches * depth // num_nodes for depth in depths]
    lacks = [num_microbatches * depth % num_nodes for depth in depths]
    in_order = sorted(range(len(depths)), key=lambda index: (-lacks[index], index))
    for index in in_order[: num_microbatches - sum(counts)]:
        counts[index] += 1
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)


def numbers_possible(problem: Problem, num_nodes: int) -> range:
    """The numbers of pipelines that nodes, layers and microbatches allow: f + 1 or more, or as many
    as there can be."""
    max_pipelines = min(num_nodes // smallest_num_nodes(problem), problem.num_microbatches)
    num_layers = len(problem.profile.layers)
    min_pipelines = max(
        1, min(problem.failures_tolerated + 1, max_pipelines), -(-num_nodes // num_layers)
    )
    return range(min_pipelines, max_pipelines + 1)


def numbers_to_try(problem: Problem, num_nodes: int, num_present: int, ranges: Ranges) -> list[int]:
    """The possible numbers of pipelines within the range, the nearest to num_present first."""
    possible = numbers_possible(problem, num_nodes)
    if not possible:
        return []
    nearest = min(max(num_present, possible[0]), possible[-1])
    in_range = range(
        max(possible[0], nearest - ranges.dp), min(possible[-1], nearest + ranges.dp) + 1
    )
    return sorted(in_range, key=lambda number: (abs(number - nearest), number))


def spreads(
    problem: Problem, num_nodes: int, num_pipelines: int, *, range_of_depths: int
) -> Iterator[tuple[int, ...]]:
    """Spreads within the range, at most DEPTHS_MAX, the most even first; each gives the number of
    nodes of every pipeline, ascending."""
    each, num_more = divmod(num_nodes, num_pipelines)
    first = max(1, each - range_of_depths)
    last = min(len(problem.profile.layers), each + (num_more > 0) + range_of_depths)
    counts = [0] * (last - first + 1)
    counts[each - first] = num_pipelines - num_more
    if num_more:
        counts[each + 1 - first] = num_more
    # Every other spread is reached from the even one by steps that move a node from a pipeline to
    # one that is at least as deep.
    heap = [(_unevenness(counts), tuple(counts))]
    seen = {tuple(counts)}
    for _ in range(DEPTHS_MAX):
        if not heap:
            return
        _, pipelines_of_depth = heappop(heap)
        yield tuple(
            first + index for index, number in enumerate(pipelines_of_depth) for _ in range(number)
        )
        used_depths = [index for index, number in enumerate(pipelines_of_depth) if number]
        for low in used_depths:
            for high in used_depths:
                if low > high or (low == high and pipelines_of_depth[low] < 2):
                    continue
                if low == 0 or high == len(pipelines_of_depth) - 1:
                    continue
                neighbour = list(pipelines_of_depth)
                for index, step in ((low, -1), (high, -1), (low - 1, 1), (high + 1, 1)):
                    neighbour[index] += step
                if tuple(neighbour) not in seen:
                    seen.add(tuple(neighbour))
                    heappush(heap, (_unevenness(neighbour), tuple(neighbour)))


def _unevenness(counts: Sequence[int]) -> int:
    """The sum of squared depths, less what is the same for all spreads.

    Args:
        counts: number of pipelines of each depth, from the smallest depth on.
    """
    return sum(number * index * index for index, number in enumerate(counts))
