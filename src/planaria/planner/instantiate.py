"""How many pipelines of which template: sets of sizes that use all nodes, and the fastest of them.

In a time T a pipeline of each template ends so many microbatches, its capacity. A set of pipelines
is fast enough if their capacities add up to the job's microbatches. The most that n nodes can end
is found for all n at once by a dynamic program over nodes (Oobleck's coin change, with the largest
sum in place of a list of all sets), and the smallest T for which that suffices by bisection over
the makespans there are. So hundreds of nodes, with more sets than could ever be listed, are
answered exactly.

Source: Oobleck (SOSP '23), section 4.2.1, equation 5 and its two requirements.
Differs: equation 5 lists all sets, and 4.2.2 prices each; here none but the fastest is looked at.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Seconds

_NEVER: Final = -(1 << 60)


def instantiations(
    num_nodes: int, sizes: Sequence[int], *, min_pipelines: int
) -> Iterator[tuple[int, ...]]:
    """Every multiset of sizes that sums to num_nodes and has min_pipelines members or more.

    Equation 5 of Oobleck: with the smallest size at least once, or without it. Equation 5 counts
    pipelines by template; these are the templates' sizes, ascending, one entry a pipeline.

    Args:
        sizes: of the templates, in nodes; each once.
    """
    yield from _multisets(num_nodes, tuple(sorted(sizes)), min_pipelines)


def numbers_of_pipelines(num_nodes: int, sizes: Sequence[int]) -> list[int]:
    """For 0, 1, .. num_nodes nodes: bit k is set if some k of these sizes have so many together."""
    numbers = [1]
    for total in range(1, num_nodes + 1):
        numbers.append(0)
        for size in sizes:
            if size <= total:
                numbers[total] |= numbers[total - size] << 1
    return numbers


def fastest_sizes(
    num_nodes: int,
    makespans_s: Mapping[int, Seconds],
    *,
    num_microbatches: int,
    min_pipelines: int,
) -> tuple[int, ...] | None:
    """The multiset of sizes whose slowest pipeline ends first, ascending; None if there is none.

    Of equals the one with more pipelines, which keeps more copies alive, then the first in order.
    O(nodes * sizes) for each of some 40 times that are tried.

    Args:
        makespans_s: by size; entry n - 1 is that of n microbatches, and they never fall.
    """
    sizes = sorted(makespans_s)
    numbers = numbers_of_pipelines(num_nodes, sizes)[num_nodes]
    if not numbers >> min_pipelines & ((1 << max(0, num_microbatches + 1 - min_pipelines)) - 1):
        return None
    tables = [makespans_s[size] for size in sizes]
    most = num_microbatches
    rows = min_pipelines if num_nodes // sizes[0] <= most else most + 1

    def suffices(time_s: float) -> bool:
        best = _most_microbatches(num_nodes, sizes, _capacities(tables, time_s), rows)
        return bool(best[min_pipelines : most + 1, num_nodes].max() >= most)

    fast_enough_s = max(float(table[most - 1]) for table in tables)
    too_fast_s = 0.0
    while (below_s := _largest_below(tables, fast_enough_s)) > too_fast_s:
        middle_s = (too_fast_s + below_s) / 2
        if middle_s <= too_fast_s:  # There is no number between them.
            middle_s = below_s
        time_s = _largest_below(tables, np.nextafter(middle_s, np.inf))
        if time_s > too_fast_s and suffices(time_s):
            fast_enough_s = time_s
        else:
            too_fast_s = middle_s
    return _sizes_within(num_nodes, sizes, _capacities(tables, fast_enough_s), most, min_pipelines)


def _capacities(tables: Sequence[Seconds], time_s: float) -> NDArray[np.int64]:
    """Microbatches that a pipeline of each template ends in a time; _NEVER for none."""
    ended = np.array([np.searchsorted(table, time_s, side="right") for table in tables])
    return np.where(ended > 0, ended, _NEVER)


def _largest_below(tables: Sequence[Seconds], time_s: float) -> float:
    """The largest makespan below a time, 0 if there is none."""
    found = 0.0
    for table in tables:
        index = int(np.searchsorted(table, time_s, side="left"))
        if index:
            found = max(found, float(table[index - 1]))
    return found


def _most_microbatches(
    num_nodes: int, sizes: Sequence[int], capacities: NDArray[np.int64], rows: int
) -> NDArray[np.int64]:
    """[k, n]: the most that k pipelines of n nodes together end; the last row is k or more."""
    best = np.full((rows + 1, num_nodes + 1), _NEVER)
    best[0, 0] = 0
    of_size = np.array(sizes)
    for total in range(sizes[0], num_nodes + 1):
        there = int(np.searchsorted(of_size, total, side="right"))
        sums = best[:, total - of_size[:there]] + capacities[:there]
        best[1:, total] = sums[:-1].max(axis=1)
        best[-1, total] = max(best[-1, total], sums[-1].max(), _NEVER)
    best[best < 0] = _NEVER
    return best


def _sizes_within(
    num_nodes: int,
    sizes: Sequence[int],
    capacities: NDArray[np.int64],
    num_microbatches: int,
    min_pipelines: int,
) -> tuple[int, ...]:
    """The most pipelines that suffice, and of those the smallest ones first."""
    rows = min(num_microbatches, num_nodes // sizes[0])
    best = _most_microbatches(num_nodes, sizes, capacities, rows + 1)
    enough = np.flatnonzero(best[min_pipelines : rows + 1, num_nodes] >= num_microbatches)
    left, chosen, ended = num_nodes, [], 0
    for number in range(min_pipelines + int(enough[-1]), 0, -1):
        size, capacity = next(
            (size, int(capacity))
            for size, capacity in zip(sizes, capacities, strict=True)
            if size <= left and ended + capacity + best[number - 1, left - size] >= num_microbatches
        )
        chosen.append(size)
        left, ended = left - size, ended + capacity
    return tuple(chosen)


def _multisets(
    num_nodes: int, sizes: tuple[int, ...], min_pipelines: int
) -> Iterator[tuple[int, ...]]:
    if num_nodes == 0 and min_pipelines <= 0:
        yield ()
    # The rest is at least as large as the smallest size, and cannot be that often.
    if not sizes or num_nodes < sizes[0] * max(1, min_pipelines):
        return
    for multiset in _multisets(num_nodes - sizes[0], sizes, min_pipelines - 1):
        yield (sizes[0], *multiset)
    yield from _multisets(num_nodes, sizes[1:], min_pipelines)
