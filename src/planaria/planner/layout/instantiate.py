"""How many pipelines of which template: sets of sizes that use all nodes, and the fastest of them.

The capacity of a template is the number of microbatches that a pipeline of it finishes in a time T.
A set of pipelines is fast enough if its capacities add up to the job's microbatches. A dynamic
program over nodes finds the largest sum of capacities for each number of nodes n at once; it is
Oobleck's coin change with a maximum in place of a list of all sets. Bisection over the times at
which pipelines can end finds the smallest T that suffices. So the answer is exact for hundreds of
nodes, whose sets are too many to list. A time that was tried for one number of nodes serves all
others.

Source: Oobleck (SOSP '23), section 4.2.1, equation 5 and its two requirements.
Differs: equation 5 lists all sets, and section 4.2.2 prices each; here only the fastest is built.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Counts, Seconds

Numbers = NDArray[np.int64]
_Chain: TypeAlias = "tuple[_Chain, Counts] | None"

NUMBERS_APART: Final = 8
_NEVER: Final = -(1 << 40)
_LOW_STEPS: Final = 20


@dataclass(frozen=True, slots=True)
class PipelineRange:
    """How many pipelines a set may have; `max_pipelines` is None if there is no upper limit."""

    min_pipelines: int
    max_pipelines: int | None


def pipeline_ranges(numbers: range, *, would_fit: int) -> Iterator[PipelineRange]:
    """The ranges in which numbers of pipelines are searched, largest numbers first.

    All numbers above NUMBERS_APART are one range, each other number is a range of its own. In a
    large cluster the first range has the fastest set, and little is then tried for the others.

    Args:
        would_fit: number of pipelines of the smallest template for which there are nodes.
    """
    if not numbers:
        return
    first, last = numbers[0], numbers[-1]
    many = max(first, NUMBERS_APART + 1)
    if many <= last:
        yield PipelineRange(many, None if would_fit <= last else last)
    for number in range(min(last, NUMBERS_APART), first - 1, -1):
        yield PipelineRange(number, number)


def instantiations(
    num_nodes: int, sizes: Collection[int], *, min_pipelines: int
) -> Iterator[tuple[int, ...]]:
    """Every multiset of sizes that sums to num_nodes and has min_pipelines members or more.

    Equation 5 of Oobleck, a recursion: sets with the smallest size at least once, and sets without
    it. Equation 5 counts pipelines by template; here a set is a tuple of sizes, ascending, with one
    entry per pipeline.

    Args:
        sizes: numbers of nodes of the templates, each once.
    """
    for sizes_of_set in sets_of(
        (num_nodes,), [(size,) for size in sizes], min_pipelines=min_pipelines
    ):
        yield tuple(size for (size,) in sizes_of_set)


def sets_of(
    nodes: Counts, sizes: Collection[Counts], *, min_pipelines: int
) -> Iterator[tuple[Counts, ...]]:
    """Every multiset of sizes that uses all nodes of every kind and has min_pipelines members or
    more; `instantiations` is the case of one kind."""
    in_order = tuple(sorted(sizes, key=_order))
    reachable = None if len(nodes) == 1 else _reachable_parts(nodes, in_order)
    yield from _sets(nodes, in_order, min_pipelines, reachable)


def numbers_of_pipelines(num_nodes: int, sizes: Sequence[int]) -> list[int]:
    """The possible numbers of pipelines, for each number of nodes from 0 to num_nodes.

    Returns:
        a set of bits for each number of nodes: bit k is set if some k of the sizes, repeats
        allowed, add up to it.
    """
    numbers = [1]
    for total in range(1, num_nodes + 1):
        numbers.append(0)
        for size in sizes:
            if size <= total:
                numbers[total] |= numbers[total - size] << 1
    return numbers


def first_gap(num_nodes: int, sizes: Sequence[int], *, min_pipelines: int) -> range:
    """The first run of numbers of nodes above num_nodes that no set of min_pipelines or more
    pipelines of these sizes uses.

    Empty if there is none, as where the sizes are n0 consecutive numbers from n0 on.

    Args:
        sizes: sizes in nodes, ascending; sets of them add up to num_nodes.
    """
    n0 = sizes[0]
    if tuple(sizes[:n0]) == tuple(range(n0, 2 * n0)):
        return range(0)
    # If a set uses n nodes, the set with one more pipeline of n0 nodes uses n + n0. So the first
    # gap begins less than n0 above num_nodes.
    numbers = numbers_of_pipelines(num_nodes + n0, sizes)
    gaps = [n for n in range(num_nodes + 1, num_nodes + n0) if not numbers[n] >> min_pipelines]
    if not gaps:
        return range(0)
    end = next(n for n in range(gaps[0], num_nodes + n0 + 1) if numbers[n] >> min_pipelines)
    return range(gaps[0], end)


class SizeSearch:
    """The fastest multisets of sizes that use all of some nodes, for any part of the given nodes.

    A part is a number of nodes of each kind. For every time that was tried, the parts that it
    suffices for are kept. So the search for one part begins between times that were tried for
    others; for a few nodes more or less these are close to each other.

    Args:
        nodes: largest number of nodes of each kind that will be asked for.
        times_s: end times of a pipeline, by size; entry n - 1 is for n microbatches. They never
            fall.
        pipelines: range of the number of pipelines in a set. Its upper end must ensure that no set
            has more pipelines than there are microbatches.
    """

    def __init__(
        self,
        nodes: Counts,
        times_s: Mapping[Counts, Seconds],
        *,
        num_microbatches: int,
        pipelines: PipelineRange,
    ) -> None:
        self._num_microbatches = num_microbatches
        self._sizes = sorted((size for size in times_s if _is_part(size, nodes)), key=_order)
        self._tables = [times_s[size] for size in self._sizes]
        self._ends_s = np.sort(np.concatenate(self._tables)) if self._tables else np.zeros(0)
        self._sums = _Sums(nodes, self._sizes, pipelines) if self._sizes else None
        # A limit makes each try many times as slow, and rarely makes a set slower.
        self._unlimited: SizeSearch | None = None
        if (
            pipelines.max_pipelines is not None
            and pipelines.max_pipelines > pipelines.min_pipelines
        ):
            self._unlimited = SizeSearch(
                nodes,
                times_s,
                num_microbatches=num_microbatches,
                pipelines=replace(pipelines, max_pipelines=None),
            )
        # Pairs of a time and, for each part, whether the time suffices; ascending by time.
        self._tried: list[tuple[float, NDArray[np.bool_]]] = []

    def fastest(
        self, nodes: Counts, *, below_s: float = np.inf
    ) -> tuple[float, tuple[Counts, ...]] | None:
        """The time of the slowest pipeline in the fastest multiset, and that multiset, ascending.

        Of equally fast ones it is the first in order. O(V * sizes * pipelines.min_pipelines) for
        each time that is tried, some 20 for the first part. V is the number of parts of the nodes:
        n + 1 for n nodes of one kind.

        Args:
            nodes: number of nodes of each kind, all of which the pipelines use.
            below_s: exclusive upper bound on the time; the result is None if no set is faster.
        """
        if self._sums is None:
            return None
        part = self._sums.part(nodes)
        if self._unlimited is not None:
            unlimited = self._unlimited.fastest(nodes, below_s=below_s)
            if unlimited is None or self._is_enough(unlimited[0], part):
                return unlimited and self._first_set(unlimited[0], part)
        fast_enough_s = _largest_below(self._ends_s, below_s)
        if not self._is_enough(fast_enough_s, part):
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
            if middle_s <= too_fast_s:  # No float lies between the two.
                middle_s = next_s
            time_s = _largest_below(self._ends_s, np.nextafter(middle_s, np.inf))
            if time_s > too_fast_s and self._is_enough(time_s, part):
                fast_enough_s = time_s
            else:
                too_fast_s = middle_s
        return self._first_set(fast_enough_s, part)

    def _first_set(self, time_s: float, part: int) -> tuple[float, tuple[Counts, ...]]:
        assert self._sums is not None
        capacities = _capacities(self._tables, time_s)
        return time_s, self._sums.first_set(part, capacities, self._num_microbatches)

    def _is_enough(self, time_s: float, part: int) -> bool:
        assert self._sums is not None
        index = bisect_left(self._tried, time_s, key=lambda tried: tried[0])
        if index == len(self._tried) or self._tried[index][0] != time_s:
            max_microbatches = self._sums.max_microbatches(
                _capacities(self._tables, time_s), self._num_microbatches
            )
            self._tried.insert(index, (time_s, max_microbatches >= self._num_microbatches))
        return bool(self._tried[index][1][part])


class SizeSearches:
    """A search for each range of numbers of pipelines.

    It is kept and serves fewer nodes, so it is best to ask for the most nodes first.

    Args:
        times_of: function from a number of pipelines to the end times of each size, see
            `SizeSearch`.
    """

    def __init__(
        self, num_microbatches: int, times_of: Callable[[int], Mapping[Counts, Seconds]]
    ) -> None:
        self._num_microbatches = num_microbatches
        self._times_of = times_of
        self._searches: dict[PipelineRange, tuple[Counts, SizeSearch]] = {}

    def search(self, nodes: Counts, pipelines: PipelineRange) -> SizeSearch:
        """A search that covers these nodes."""
        max_nodes, search = self._searches.get(pipelines, ((0,) * len(nodes), None))
        if search is None or not _is_part(nodes, max_nodes):
            search = SizeSearch(
                nodes,
                self._times_of(pipelines.min_pipelines),
                num_microbatches=self._num_microbatches,
                pipelines=pipelines,
            )
            self._searches[pipelines] = nodes, search
        return search


class _Sums:
    """How many microbatches sets of pipelines finish together, for any capacities.

    The parts of the nodes are numbered, from 0 for no nodes to the last for all nodes. A row over
    parts has one entry more, in front, which stands for no such part; part v is at index 1 + v.
    """

    def __init__(self, nodes: Counts, sizes: Sequence[Counts], pipelines: PipelineRange) -> None:
        self._sizes = sizes
        self._pipelines = pipelines
        self._shape = tuple(count + 1 for count in nodes)
        parts = np.array(list(product(*map(range, self._shape))))
        self._steps = [prod(self._shape[kind + 1 :]) for kind in range(len(nodes))]
        # [v, i]: index in a row of part v less the nodes of size i; 0 if v has too few nodes.
        self._index_less = parts @ self._steps + 1 - (np.array(sizes) @ self._steps)[:, None]
        for kind in range(len(nodes)):
            self._index_less[parts[:, kind] < np.array(sizes)[:, None, kind]] = 0
        self._index_less = np.ascontiguousarray(self._index_less.T)
        self._jumps = tuple(_jumps(sizes, self._shape))
        # The capacities that were asked for last, and their table by number of pipelines.
        self._counted: tuple[Numbers, Numbers] | None = None

    def part(self, nodes: Counts) -> int:
        """The number of the part that has `nodes[k]` nodes of each kind k."""
        return sum(count * step for count, step in zip(nodes, self._steps, strict=True))

    def max_microbatches(self, capacities: Numbers, num_microbatches: int) -> Numbers:
        """Array over parts: the most microbatches that a set of a part finishes.

        The entries may be too low if no set of any part finishes num_microbatches.
        """
        max_pipelines = self._pipelines.max_pipelines
        if max_pipelines is not None and max_pipelines * int(capacities.max()) < num_microbatches:
            return np.full(len(self._index_less), _NEVER)
        return self._max_by_used(self._max_by_count(capacities), capacities, 0)[0, 1:]

    def first_set(
        self, part: int, capacities: Numbers, num_microbatches: int
    ) -> tuple[Counts, ...]:
        """The first in order, smallest sizes first, of the sets of a part that finish
        num_microbatches; there must be one."""
        # Where there is no upper limit, it does not matter how far the number of pipelines exceeds
        # the fewest needed.
        last = self._pipelines.max_pipelines or self._pipelines.min_pipelines
        max_by_used = self._max_by_used(self._max_by_count(capacities), capacities, last)
        chosen: list[Counts] = []
        ended = 0
        while part:
            used = min(len(chosen) + 1, last)
            ends = ended + capacities + max_by_used[used, self._index_less[part]]
            index = int(np.flatnonzero(ends >= num_microbatches)[0])
            chosen.append(self._sizes[index])
            part, ended = int(self._index_less[part, index]) - 1, ended + int(capacities[index])
        return tuple(chosen)

    def _max_by_count(self, capacities: Numbers) -> Numbers:
        """Table [k, 1 + v]: the most microbatches that k pipelines of part v finish together."""
        min_pipelines, max_pipelines = self._pipelines.min_pipelines, self._pipelines.max_pipelines
        if self._counted is not None and np.array_equal(self._counted[0], capacities):
            return self._counted[1]
        number = min_pipelines if max_pipelines is None else max_pipelines
        rows = np.full((number + 1, len(self._index_less) + 1), _NEVER)
        rows[0, 1] = 0
        for row, next_row in pairwise(rows):
            np.maximum((row[self._index_less] + capacities).max(axis=1), _NEVER, out=next_row[1:])
        self._counted = capacities, rows
        return rows

    def _max_by_used(self, rows: Numbers, capacities: Numbers, last: int) -> Numbers:
        """Table [used, 1 + v]: the most microbatches that part v finishes in pipelines that, added
        to `used` others, are within the range of a set; `used` is from 0 to last."""
        min_pipelines, max_pipelines = self._pipelines.min_pipelines, self._pipelines.max_pipelines
        if max_pipelines is None:
            return self._with_more_pipelines(
                rows[min_pipelines - last : min_pipelines + 1][::-1], capacities
            )
        # With min_pipelines others or more, any number up to the limit may follow.
        up_to = np.maximum.accumulate(rows)
        fewer = min(min_pipelines, last + 1)
        table = [
            rows[min_pipelines - used : max_pipelines - used + 1].max(axis=0)
            for used in range(fewer)
        ]
        return np.stack([*table, *up_to[max_pipelines - last : max_pipelines - fewer + 1][::-1]])

    def _with_more_pipelines(self, rows: Numbers, capacities: Numbers) -> Numbers:
        """The rows, with the entries that result if any number of pipelines may be added."""
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
    """Steps over the grid of all parts that add 1, 2, 4, .. pipelines of each size at once.

    Taken in order, they can add any number of pipelines of any sizes.

    Yields:
        index of the size, number of pipelines, slices of the parts after the step, and slices of
        those before it.
    """
    for index, size in enumerate(sizes):
        number = 1
        while all(number * count < end for count, end in zip(size, shape, strict=True)):
            ahead = (slice(number * count, None) for count in size)
            behind = (slice(end - number * count) for count, end in zip(size, shape, strict=True))
            yield index, number, (slice(None), *ahead), (slice(None), *behind)
            number *= 2


def _capacities(tables: Sequence[Seconds], time_s: float) -> Numbers:
    """Number of microbatches that a pipeline of each template finishes in a time; _NEVER if it
    finishes none."""
    ended = np.array([table.searchsorted(time_s, side="right") for table in tables])
    return np.where(ended > 0, ended, _NEVER)


def _largest_below(ends_s: Seconds, time_s: float) -> float:
    """The largest of the times that is below time_s; 0 if there is none."""
    index = int(ends_s.searchsorted(time_s, side="left"))
    return float(ends_s[index - 1]) if index else 0.0


def _too_fast_s(
    num_nodes: int, sizes: Sequence[int], tables: Sequence[Seconds], num_microbatches: int
) -> float:
    """A time in which no set can finish all microbatches, not even if every node finished as many
    as a node of the best template does."""
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
    """Sets of sizes that use all nodes, each ascending.

    Args:
        sizes: sizes, sorted by `_order`.
        reachable: parts of the nodes that some set uses; None: not known.
    """
    # This is a stack and no recursion, because a set may have more pipelines than Python has
    # frames. An incomplete set is a linked chain, the last pipeline first, which costs no copy:
    # there are far more incomplete sets than complete ones.
    open_sets: list[tuple[Counts, int, int, _Chain]] = [(nodes, 0, 0, None)]
    while open_sets:
        nodes_left, index, num_used, chosen = open_sets.pop()
        missing = min_pipelines - num_used
        if not any(nodes_left) and missing <= 0:
            yield _sizes_of_chain(chosen)
        # The missing pipelines need at least this size each, and too few nodes are left for that.
        if index == len(sizes) or sum(nodes_left) < sum(sizes[index]) * max(1, missing):
            continue
        if reachable is not None and nodes_left not in reachable:
            continue
        open_sets.append((nodes_left, index + 1, num_used, chosen))
        if _is_part(sizes[index], nodes_left):
            rest = tuple(
                count - used_nodes
                for count, used_nodes in zip(nodes_left, sizes[index], strict=True)
            )
            open_sets.append((rest, index, num_used + 1, (chosen, sizes[index])))


def _sizes_of_chain(chain: _Chain) -> tuple[Counts, ...]:
    sizes = []
    while chain is not None:
        chain, size = chain
        sizes.append(size)
    return tuple(reversed(sizes))


def _reachable_parts(nodes: Counts, sizes: Sequence[Counts]) -> set[Counts]:
    """The parts of the nodes that are sums of these sizes."""
    parts = {(0,) * len(nodes)}
    open_parts = list(parts)
    while open_parts:
        part = open_parts.pop()
        for size in sizes:
            larger = tuple(count + added for count, added in zip(part, size, strict=True))
            if larger not in parts and _is_part(larger, nodes):
                parts.add(larger)
                open_parts.append(larger)
    return parts


def _is_part(size: Counts, nodes: Counts) -> bool:
    return all(used <= count for used, count in zip(size, nodes, strict=True))


def _order(size: Counts) -> tuple[int, Counts]:
    """Sort key of sizes: the total number of nodes, then that of each kind."""
    return sum(size), size
