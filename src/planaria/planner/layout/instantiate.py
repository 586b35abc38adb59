"""How many pipelines of which template: sets of sizes that use all nodes, and the fastest of them.

In a time T a pipeline of each template ends so many microbatches, its capacity. A set of pipelines
is fast enough if their capacities add up to the job's microbatches. The most that n nodes can end
is found for all n at once by a dynamic program over nodes (Oobleck's coin change, with the largest
sum in place of a list of all sets), and the smallest T for which that suffices by bisection over
the times there are. So hundreds of nodes, with more sets than could ever be listed, are answered
exactly. What was tried for one number of nodes serves all others.

Source: Oobleck (SOSP '23), section 4.2.1, equation 5 and its two requirements.
Differs: equation 5 lists all sets, and 4.2.2 prices each; here none but the fastest is looked at.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Counts, Seconds

Numbers = NDArray[np.int64]
_Chain: TypeAlias = "tuple[_Chain, Counts] | None"

_NEVER: Final = -(1 << 40)
_LOW_STEPS: Final = 20


@dataclass(frozen=True, slots=True)
class Range:
    """How many pipelines a set may have; `most` is None where there is no limit."""

    fewest: int
    most: int | None


def instantiations(
    num_nodes: int, sizes: Collection[int], *, min_pipelines: int
) -> Iterator[tuple[int, ...]]:
    """Every multiset of sizes that sums to num_nodes and has min_pipelines members or more.

    Equation 5 of Oobleck: with the smallest size at least once, or without it. Equation 5 counts
    pipelines by template; these are the templates' sizes, ascending, one entry a pipeline.

    Args:
        sizes: of the templates, in nodes; each once.
    """
    for found in sets_of((num_nodes,), [(size,) for size in sizes], min_pipelines=min_pipelines):
        yield tuple(size for (size,) in found)


def sets_of(
    nodes: Counts, sizes: Collection[Counts], *, min_pipelines: int
) -> Iterator[tuple[Counts, ...]]:
    """As `instantiations`, of nodes of several kinds: every node of every kind is used."""
    in_order = tuple(sorted(sizes, key=_order))
    reachable = None if len(nodes) == 1 else _reachable(nodes, in_order)
    yield from _sets(nodes, in_order, min_pipelines, reachable)


def numbers_of_pipelines(num_nodes: int, sizes: Sequence[int]) -> list[int]:
    """For 0, 1, .. num_nodes nodes: bit k is set if some k of these sizes have so many together."""
    numbers = [1]
    for total in range(1, num_nodes + 1):
        numbers.append(0)
        for size in sizes:
            if size <= total:
                numbers[total] |= numbers[total - size] << 1
    return numbers


def first_gap(num_nodes: int, sizes: Sequence[int], *, min_pipelines: int) -> range:
    """The first numbers above num_nodes to which no min_pipelines or more of these sizes add up.

    Empty if there are none, as where the sizes are n0 consecutive numbers from n0 on.

    Args:
        sizes: ascending; sets of them add up to num_nodes.
    """
    n0 = sizes[0]
    if tuple(sizes[:n0]) == tuple(range(n0, 2 * n0)):
        return range(0)
    # To what n adds up n + n0 does too, so the first gap is less than n0 away.
    numbers = numbers_of_pipelines(num_nodes + n0, sizes)
    gaps = [n for n in range(num_nodes + 1, num_nodes + n0) if not numbers[n] >> min_pipelines]
    if not gaps:
        return range(0)
    end = next(n for n in range(gaps[0], num_nodes + n0 + 1) if numbers[n] >> min_pipelines)
    return range(gaps[0], end)


class SizeSearch:
    """The fastest multisets of sizes that use all of some nodes, for any part of the nodes.

    What a time suffices for is kept, for all parts at once: so the search for one part begins
    between times that were tried for others, which for a few nodes more or less are close by.

    Args:
        nodes: the most that will be asked for, of each kind.
        times_s: by size; entry n - 1 is when a pipeline with n microbatches ends; they never fall.
        pipelines: how many a set may have; `most` must keep them from outnumbering microbatches.
    """

    def __init__(
        self,
        nodes: Counts,
        times_s: Mapping[Counts, Seconds],
        *,
        num_microbatches: int,
        pipelines: Range,
    ) -> None:
        self._num_microbatches = num_microbatches
        self._sizes = sorted((size for size in times_s if _is_part(size, nodes)), key=_order)
        self._tables = [times_s[size] for size in self._sizes]
        self._ends_s = np.sort(np.concatenate(self._tables)) if self._tables else np.zeros(0)
        self._sums = _Sums(nodes, self._sizes, pipelines) if self._sizes else None
        # By time, ascending: for which parts it suffices.
        self._tried: list[tuple[float, NDArray[np.bool_]]] = []

    def fastest(
        self, nodes: Counts, *, below_s: float = np.inf
    ) -> tuple[float, tuple[Counts, ...]] | None:
        """When the slowest pipeline ends in the fastest multiset, and that, ascending.

        Of equals the first in order. O(V * sizes * pipelines.fewest) for each of the times that are
        tried, some 20 for the first part, where V is the number of parts that nodes of several
        kinds have: n + 1 of n alike.

        Args:
            nodes: all of each kind, which the pipelines use.
            below_s: there is none unless it is faster than that.
        """
        if self._sums is None:
            return None
        part = self._sums.part(nodes)
        fast_enough_s = _largest_below(self._ends_s, below_s)
        if not self._suffices(fast_enough_s, part):
            return None
        index = bisect_left(self._tried, True, key=lambda tried: bool(tried[1][part]))
        fast_enough_s = min(fast_enough_s, self._tried[index][0])
        if index:
            too_fast_s = self._tried[index - 1][0]
        else:
            in_nodes = [sum(size) for size in self._sizes]
            too_fast_s = _too_fast_s(sum(nodes), in_nodes, self._tables, self._num_microbatches)
        while (next_s := _largest_below(self._ends_s, fast_enough_s)) > too_fast_s:
            middle_s = (too_fast_s + next_s) / 2
            if middle_s <= too_fast_s:  # There is no number between them.
                middle_s = next_s
            time_s = _largest_below(self._ends_s, np.nextafter(middle_s, np.inf))
            if time_s > too_fast_s and self._suffices(time_s, part):
                fast_enough_s = time_s
            else:
                too_fast_s = middle_s
        capacities = _capacities(self._tables, fast_enough_s)
        return fast_enough_s, self._sums.first(part, capacities, self._num_microbatches)

    def _suffices(self, time_s: float, part: int) -> bool:
        assert self._sums is not None
        index = bisect_left(self._tried, time_s, key=lambda tried: tried[0])
        if index == len(self._tried) or self._tried[index][0] != time_s:
            most = self._sums.most(_capacities(self._tables, time_s), self._num_microbatches)
            self._tried.insert(index, (time_s, most >= self._num_microbatches))
        return bool(self._tried[index][1][part])


class _Sums:
    """What sets of pipelines end together, for capacities that change.

    Parts of the nodes are counted: the part without any first, all nodes last. In a row over parts
    an entry that stands for none is in front.
    """

    def __init__(self, nodes: Counts, sizes: Sequence[Counts], pipelines: Range) -> None:
        self._sizes = sizes
        self._pipelines = pipelines
        self._shape = tuple(count + 1 for count in nodes)
        parts = np.array(list(product(*map(range, self._shape))))
        self._steps = [prod(self._shape[kind + 1 :]) for kind in range(len(nodes))]
        # [v, i]: where part v without size i stands in a row.
        self._less = parts @ self._steps + 1 - (np.array(sizes) @ self._steps)[:, None]
        for kind in range(len(nodes)):
            self._less[parts[:, kind] < np.array(sizes)[:, None, kind]] = 0
        self._less = np.ascontiguousarray(self._less.T)
        self._jumps = tuple(_jumps(sizes, self._shape))

    def part(self, nodes: Counts) -> int:
        """The number of the part with so many nodes of each kind."""
        return sum(count * step for count, step in zip(nodes, self._steps, strict=True))

    def most(self, capacities: Numbers, num_microbatches: int) -> Numbers:
        """[v]: the most that a set of part v ends; less if no set of any part ends so many."""
        most = self._pipelines.most
        if most is not None and most * int(capacities.max()) < num_microbatches:
            return np.full(len(self._less), _NEVER)
        return self._rests(self._rows(capacities), capacities, 0)[0, 1:]

    def first(self, part: int, capacities: Numbers, num_microbatches: int) -> tuple[Counts, ...]:
        """Of the sets of a part that end so many the first in order: the smallest sizes first."""
        # More than the fewest needed make no difference where there is no limit.
        last = self._pipelines.most or self._pipelines.fewest
        rests = self._rests(self._rows(capacities), capacities, last)
        chosen: list[Counts] = []
        ended = 0
        while part:
            used = min(len(chosen) + 1, last)
            ends = ended + capacities + rests[used, self._less[part]]
            index = int(np.flatnonzero(ends >= num_microbatches)[0])
            chosen.append(self._sizes[index])
            part, ended = int(self._less[part, index]) - 1, ended + int(capacities[index])
        return tuple(chosen)

    def _rows(self, capacities: Numbers) -> Numbers:
        """[k, 1 + v]: the most that k pipelines of part v together end."""
        number = self._pipelines.fewest if self._pipelines.most is None else self._pipelines.most
        rows = np.full((number + 1, len(self._less) + 1), _NEVER)
        rows[0, 1] = 0
        for row, next_row in pairwise(rows):
            np.maximum((row[self._less] + capacities).max(axis=1), _NEVER, out=next_row[1:])
        return rows

    def _rests(self, rows: Numbers, capacities: Numbers, last: int) -> Numbers:
        """[used, 1 + v]: the most that part v ends, with as many pipelines as may follow so many,
        of which there are 0, 1, .. last."""
        fewest, most = self._pipelines.fewest, self._pipelines.most
        if most is None:
            return self._any_more(rows[fewest - last : fewest + 1][::-1], capacities)
        first = [max(0, fewest - used) for used in range(last + 1)]
        ends = [max(1, most - used + 1) for used in range(last + 1)]
        return np.stack([rows[a:b].max(axis=0) for a, b in zip(first, ends, strict=True)])

    def _any_more(self, rows: Numbers, capacities: Numbers) -> Numbers:
        """The most where any number of pipelines may be added to each row."""
        grid = np.array(rows[:, 1:]).reshape(-1, *self._shape)
        each = capacities.tolist()
        for index, number, ahead, behind in self._jumps:
            if each[index] > 0:
                target = grid[ahead]
                np.maximum(target, grid[behind] + number * each[index], out=target)
        return np.concatenate((rows[:, :1], grid.reshape(len(rows), -1)), axis=1)


def _jumps(
    sizes: Sequence[Counts], shape: Counts
) -> Iterator[tuple[int, int, tuple[slice, ...], tuple[slice, ...]]]:
    """For each size, by its index, 1, 2, 4, .. of it at once, as far as they are in the grid of all
    parts: from which parts to which they lead. All of them in turn add any number."""
    for index, size in enumerate(sizes):
        number = 1
        while all(number * count < end for count, end in zip(size, shape, strict=True)):
            ahead = (slice(number * count, None) for count in size)
            behind = (slice(end - number * count) for count, end in zip(size, shape, strict=True))
            yield index, number, (slice(None), *ahead), (slice(None), *behind)
            number *= 2


def _capacities(tables: Sequence[Seconds], time_s: float) -> Numbers:
    """Microbatches that a pipeline of each template ends in a time; _NEVER for none."""
    ended = np.array([table.searchsorted(time_s, side="right") for table in tables])
    return np.where(ended > 0, ended, _NEVER)


def _largest_below(ends_s: Seconds, time_s: float) -> float:
    """The largest time below another, 0 if there is none."""
    index = int(ends_s.searchsorted(time_s, side="left"))
    return float(ends_s[index - 1]) if index else 0.0


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


def _sets(
    nodes: Counts,
    sizes: Sequence[Counts],
    min_pipelines: int,
    reachable: Collection[Counts] | None,
) -> Iterator[tuple[Counts, ...]]:
    """Sets of these sizes, ascending; `reachable` are the nodes that there are sets for."""
    # A stack, as a set may have more pipelines than Python has frames; a set that is not whole
    # yet is a chain, the last pipeline first, for there are far more of these.
    open_sets: list[tuple[Counts, int, int, _Chain]] = [(nodes, 0, 0, None)]
    while open_sets:
        left, index, used, chosen = open_sets.pop()
        missing = min_pipelines - used
        if not any(left) and missing <= 0:
            yield _unchained(chosen)
        # The rest is at least as large as the smallest size, and cannot be that often.
        if index == len(sizes) or sum(left) < sum(sizes[index]) * max(1, missing):
            continue
        if reachable is not None and left not in reachable:
            continue
        open_sets.append((left, index + 1, used, chosen))
        if _is_part(sizes[index], left):
            rest = tuple(count - taken for count, taken in zip(left, sizes[index], strict=True))
            open_sets.append((rest, index, used + 1, (chosen, sizes[index])))


def _unchained(chain: _Chain) -> tuple[Counts, ...]:
    sizes = []
    while chain is not None:
        chain, size = chain
        sizes.append(size)
    return tuple(reversed(sizes))


def _reachable(nodes: Counts, sizes: Sequence[Counts]) -> set[Counts]:
    """The parts of the nodes that are sums of these sizes."""
    found = {(0,) * len(nodes)}
    ahead = list(found)
    while ahead:
        part = ahead.pop()
        for size in sizes:
            more = tuple(count + added for count, added in zip(part, size, strict=True))
            if more not in found and _is_part(more, nodes):
                found.add(more)
                ahead.append(more)
    return found


def _is_part(size: Counts, nodes: Counts) -> bool:
    return all(used <= count for used, count in zip(size, nodes, strict=True))


def _order(size: Counts) -> tuple[int, Counts]:
    """By nodes, then by kind."""
    return sum(size), size
