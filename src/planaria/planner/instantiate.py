"""How many pipelines of which template: sets of sizes that use all nodes, and the fastest of them.

In a time T a pipeline of each template ends so many microbatches, its capacity. A set of pipelines
is fast enough if their capacities add up to the job's microbatches. The most that n nodes can end
is found for all n at once by a dynamic program over nodes (Oobleck's coin change, with the largest
sum in place of a list of all sets), and the smallest T for which that suffices by bisection over
the times there are. So hundreds of nodes, with more sets than could ever be listed, are answered
exactly.

Source: Oobleck (SOSP '23), section 4.2.1, equation 5 and its two requirements.
Differs: equation 5 lists all sets, and 4.2.2 prices each; here none but the fastest is looked at.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Seconds

Numbers = NDArray[np.int64]

_NEVER: Final = -(1 << 40)
_LOW_STEPS: Final = 20


@dataclass(frozen=True, slots=True)
class Range:
    """How many pipelines a set may have; `most` is None where there is no limit."""

    fewest: int
    most: int | None


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
    times_s: Mapping[int, Seconds],
    *,
    num_microbatches: int,
    pipelines: Range,
    below_s: float = np.inf,
) -> tuple[float, tuple[int, ...]] | None:
    """When the slowest pipeline ends in the fastest multiset of sizes, and that, ascending.

    Of equals the first in order. O(nodes * sizes * pipelines.fewest) for each of some 20 times that
    are tried.

    Args:
        times_s: by size; entry n - 1 is when a pipeline with n microbatches ends; they never fall.
        pipelines: how many the set may have; `most` must keep them from outnumbering microbatches.
        below_s: there is none unless it is faster than that.
    """
    sizes = sorted(size for size in times_s if size <= num_nodes)
    if not sizes:
        return None
    tables = [times_s[size] for size in sizes]
    sums = _Sums(num_nodes, sizes, pipelines)

    def suffices(time_s: float) -> bool:
        return sums.most(_capacities(tables, time_s)) >= num_microbatches

    fast_enough_s = _largest_below(tables, below_s)
    if not suffices(fast_enough_s):
        return None
    too_fast_s = _too_fast_s(num_nodes, sizes, tables, num_microbatches)
    while (next_s := _largest_below(tables, fast_enough_s)) > too_fast_s:
        middle_s = (too_fast_s + next_s) / 2
        if middle_s <= too_fast_s:  # There is no number between them.
            middle_s = next_s
        time_s = _largest_below(tables, np.nextafter(middle_s, np.inf))
        if time_s > too_fast_s and suffices(time_s):
            fast_enough_s = time_s
        else:
            too_fast_s = middle_s
    return fast_enough_s, sums.first(_capacities(tables, fast_enough_s), num_microbatches)


class _Sums:
    """What sets of pipelines end together, for capacities that change."""

    def __init__(self, num_nodes: int, sizes: Sequence[int], pipelines: Range) -> None:
        self._num_nodes = num_nodes
        self._sizes = np.array(sizes, dtype=np.int64)
        self._pipelines = pipelines
        # [n, i]: where n nodes less size i stand in a row that has as many nodes in front.
        self._less = np.arange(num_nodes + 1)[:, None] - self._sizes + num_nodes

    def most(self, capacities: Numbers) -> int:
        """The most that a set ends."""
        return int(self._rest(self._rows(capacities), capacities, 0)[-1])

    def first(self, capacities: Numbers, num_microbatches: int) -> tuple[int, ...]:
        """Of the sets that end so many the first in order: the smallest sizes first."""
        rows = self._rows(capacities)
        rests: dict[int, Numbers] = {}
        chosen: list[int] = []
        left, ended = self._num_nodes, 0
        while left:
            # More than the fewest needed make no difference where there is no limit.
            used = len(chosen) + 1
            if self._pipelines.most is None:
                used = min(used, self._pipelines.fewest)
            if used not in rests:
                rests[used] = self._rest(rows, capacities, used)
            there = np.flatnonzero(self._sizes <= left)
            ends = ended + capacities[there] + rests[used][left - self._sizes[there]]
            index = int(there[np.flatnonzero(ends >= num_microbatches)[0]])
            chosen.append(int(self._sizes[index]))
            left, ended = left - chosen[-1], ended + int(capacities[index])
        return tuple(chosen)

    def _rows(self, capacities: Numbers) -> list[Numbers]:
        """[k][n]: the most that k pipelines of n nodes together end."""
        row = np.full(self._num_nodes + 1, _NEVER)
        row[0] = 0
        rows = [row]
        padding = np.full(self._num_nodes, _NEVER)
        number = self._pipelines.most
        for _ in range(self._pipelines.fewest if number is None else number):
            sums = np.concatenate((padding, rows[-1]))[self._less] + capacities
            rows.append(np.maximum(sums.max(axis=1), _NEVER))
        return rows

    def _rest(self, rows: Sequence[Numbers], capacities: Numbers, used: int) -> Numbers:
        """[n]: the most that n nodes end, with as many pipelines as may follow so many."""
        fewest = max(0, self._pipelines.fewest - used)
        if self._pipelines.most is None:
            return self._any_more(rows[fewest], capacities)
        rest: Numbers = np.max(rows[fewest : max(1, self._pipelines.most - used + 1)], axis=0)
        return rest

    def _any_more(self, row: Numbers, capacities: Numbers) -> Numbers:
        """The most where any number of pipelines may be added."""
        for size, capacity in zip(self._sizes.tolist(), capacities.tolist(), strict=True):
            if capacity == _NEVER:
                continue
            num_rows = -(-len(row) // size)
            padded = np.full(num_rows * size, _NEVER)
            padded[: len(row)] = row
            # Row q of this table less q capacities: what q more pipelines make of the one above.
            added = capacity * np.arange(num_rows)[:, None]
            table = np.maximum.accumulate(padded.reshape(num_rows, size) - added, axis=0) + added
            row = np.maximum(table.ravel()[: len(row)], _NEVER)
        return row


def _capacities(tables: Sequence[Seconds], time_s: float) -> Numbers:
    """Microbatches that a pipeline of each template ends in a time; _NEVER for none."""
    ended = np.array([np.searchsorted(table, time_s, side="right") for table in tables])
    return np.where(ended > 0, ended, _NEVER)


def _largest_below(tables: Sequence[Seconds], time_s: float) -> float:
    """The largest time below another, 0 if there is none."""
    found = 0.0
    for table in tables:
        index = int(np.searchsorted(table, time_s, side="left"))
        if index:
            found = max(found, float(table[index - 1]))
    return found


def _too_fast_s(
    num_nodes: int, sizes: Sequence[int], tables: Sequence[Seconds], num_microbatches: int
) -> float:
    """A time in which no set ends all microbatches: not if each node were worth as many as one of
    the best template."""
    of_size = np.array(sizes)
    low_s, high_s = 0.0, max(float(table[-1]) for table in tables)
    for _ in range(_LOW_STEPS):
        middle_s = (low_s + high_s) / 2
        worth = np.maximum(_capacities(tables, middle_s), 0) / of_size
        is_enough = num_nodes * float(worth.max()) >= num_microbatches
        low_s, high_s = (low_s, middle_s) if is_enough else (middle_s, high_s)
    return low_s


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
