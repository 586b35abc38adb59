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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Counts, Seconds

Numbers = NDArray[np.int64]

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


def fastest_sizes(
    nodes: Counts,
    times_s: Mapping[Counts, Seconds],
    *,
    num_microbatches: int,
    pipelines: Range,
    below_s: float = np.inf,
) -> tuple[float, tuple[Counts, ...]] | None:
    """When the slowest pipeline ends in the fastest multiset of sizes, and that, ascending.

    Of equals the first in order. O(V * sizes * pipelines.fewest) for each of some 20 times that are
    tried, where V is the number of parts that nodes of several kinds have: n + 1 of n alike.

    Args:
        nodes: all of each kind, which the pipelines use.
        times_s: by size; entry n - 1 is when a pipeline with n microbatches ends; they never fall.
        pipelines: how many the set may have; `most` must keep them from outnumbering microbatches.
        below_s: there is none unless it is faster than that.
    """
    sizes = sorted((size for size in times_s if _is_part(size, nodes)), key=_order)
    if not sizes:
        return None
    tables = [times_s[size] for size in sizes]
    ends_s = np.sort(np.concatenate(tables))
    sums = _Sums(nodes, sizes, pipelines)

    def suffices(time_s: float) -> bool:
        return sums.most(_capacities(tables, time_s)) >= num_microbatches

    fast_enough_s = _largest_below(ends_s, below_s)
    if not suffices(fast_enough_s):
        return None
    too_fast_s = _too_fast_s(sum(nodes), list(map(sum, sizes)), tables, num_microbatches)
    while (next_s := _largest_below(ends_s, fast_enough_s)) > too_fast_s:
        middle_s = (too_fast_s + next_s) / 2
        if middle_s <= too_fast_s:  # There is no number between them.
            middle_s = next_s
        time_s = _largest_below(ends_s, np.nextafter(middle_s, np.inf))
        if time_s > too_fast_s and suffices(time_s):
            fast_enough_s = time_s
        else:
            too_fast_s = middle_s
    return fast_enough_s, sums.first(_capacities(tables, fast_enough_s), num_microbatches)


class _Sums:
    """What sets of pipelines end together, for capacities that change.

    Parts of the nodes are counted: the part without any first, all nodes last. In a row over parts
    an entry that stands for none is in front.
    """

    def __init__(self, nodes: Counts, sizes: Sequence[Counts], pipelines: Range) -> None:
        self._sizes = sizes
        self._pipelines = pipelines
        parts = np.array(list(product(*(range(count + 1) for count in nodes))))
        steps = [prod(count + 1 for count in nodes[kind + 1 :]) for kind in range(len(nodes))]
        # [v, i]: where part v without size i stands in a row.
        self._less = parts @ steps + 1 - (np.array(sizes) @ steps)[:, None]
        for kind in range(len(nodes)):
            self._less[parts[:, kind] < np.array(sizes)[:, None, kind]] = 0
        self._less = np.ascontiguousarray(self._less.T)

    def most(self, capacities: Numbers) -> int:
        """The most that a set ends."""
        return int(self._rest(self._rows(capacities), capacities, 0)[-1])

    def first(self, capacities: Numbers, num_microbatches: int) -> tuple[Counts, ...]:
        """Of the sets that end so many the first in order: the smallest sizes first."""
        rows = self._rows(capacities)
        rests: dict[int, Numbers] = {}
        chosen: list[Counts] = []
        part, ended = len(self._less) - 1, 0
        while part:
            # More than the fewest needed make no difference where there is no limit.
            used = len(chosen) + 1
            if self._pipelines.most is None:
                used = min(used, self._pipelines.fewest)
            if used not in rests:
                rests[used] = self._rest(rows, capacities, used)
            ends = ended + capacities + rests[used][self._less[part]]
            index = int(np.flatnonzero(ends >= num_microbatches)[0])
            chosen.append(self._sizes[index])
            part, ended = int(self._less[part, index]) - 1, ended + int(capacities[index])
        return tuple(chosen)

    def _rows(self, capacities: Numbers) -> list[Numbers]:
        """[k][1 + v]: the most that k pipelines of part v together end."""
        row = np.full(len(self._less) + 1, _NEVER)
        row[1] = 0
        rows = [row]
        number = self._pipelines.most
        for _ in range(self._pipelines.fewest if number is None else number):
            row = np.full_like(row, _NEVER)
            sums = rows[-1][self._less] + capacities
            np.maximum(sums.max(axis=1), _NEVER, out=row[1:])
            rows.append(row)
        return rows

    def _rest(self, rows: Sequence[Numbers], capacities: Numbers, used: int) -> Numbers:
        """[1 + v]: the most that part v ends, with as many pipelines as may follow so many."""
        fewest = max(0, self._pipelines.fewest - used)
        if self._pipelines.most is None:
            return self._any_more(rows[fewest], capacities)
        rest: Numbers = np.max(rows[fewest : max(1, self._pipelines.most - used + 1)], axis=0)
        return rest

    def _any_more(self, row: Numbers, capacities: Numbers) -> Numbers:
        """The most where any number of pipelines may be added."""
        row = row.copy()
        for part, less in enumerate(self._less):
            row[1 + part] = max(row[1 + part], (row[less] + capacities).max())
        return row


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
    open_sets: list[tuple[Counts, int, tuple[Counts, ...]]] = [(nodes, 0, ())]
    while open_sets:  # A stack, as a set may have more pipelines than Python has frames.
        left, index, chosen = open_sets.pop()
        missing = min_pipelines - len(chosen)
        if not any(left) and missing <= 0:
            yield chosen
        # The rest is at least as large as the smallest size, and cannot be that often.
        if index == len(sizes) or sum(left) < sum(sizes[index]) * max(1, missing):
            continue
        if reachable is not None and left not in reachable:
            continue
        open_sets.append((left, index + 1, chosen))
        if _is_part(sizes[index], left):
            rest = tuple(count - used for count, used in zip(left, sizes[index], strict=True))
            open_sets.append((rest, index, (*chosen, sizes[index])))


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
