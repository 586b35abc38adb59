"""Oobleck's own objective, T1 + T2 + T3 at N_b = 4S, and the partition that minimises it.

With t_i the seconds of a microbatch in stage i (forward and backward), and k* the slowest stage,
the rightmost of equals, counted from 0:

    T1 = sum of all t_i        T2 = (4S - S + k* - 1) * t_k*        T3 = sum of t_i from k* on

For a given k* of t* seconds that is additive over stages: t_i + 4 t* before k*, 2 t_i + 3 t* from
k* on, less t*. So a dynamic program over (first layer, devices left), with k* ahead or behind,
finds the best partition for one t*; with an interval [a, b] for t*, taken as a where it costs and
as b where it limits, it finds a lower bound for all t* in there. Intervals whose bound is no better
than the best partition so far are dropped, the others are cut, down to single values, where the
bound is exact. One run of the program treats many intervals.

Exact: the minimum over all partitions (tests/planner/partition/test_partitions.py).

Source: Oobleck (SOSP '23), section 4.1.2, equations 1 - 4.
Differs: equations 1 and 3 start the second half at layer k + 1, which skips layer k; T2 is computed
for the whole pipeline, for it is not the sum of those of its halves. The paper's divide and conquer
keeps the best of each half only, which need not give the best whole; this does not. Communication
and memory are left out, as there. Used for comparison, as `paper_sets.py` is: planaria plans by
`templates.py` and `sets.py`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.planner.partition.bound import MANY_MICROBATCHES, BoundSearch
from planaria.planner.partition.positions import Positions
from planaria.planner.problem import Seconds, Shape, StageCosts

_INTERVALS: Final = 32  # That one run of the program treats.


def paper_s(costs: StageCosts, shape: Shape) -> float:
    """T1 + T2 + T3 of a partition."""
    stage_s = []
    first = 0
    for end, count in shape:
        stage_s.append(float(costs.seconds[count][first, end]))
        first = end
    return paper_iteration_s(stage_s)


def paper_iteration_s(stage_s: Sequence[float]) -> float:
    """T1 + T2 + T3 at N_b = 4S of stages that take so long for a microbatch."""
    num_stages = len(stage_s)
    slowest = max(range(num_stages), key=lambda i: (stage_s[i], i))
    steady_s = (3 * num_stages + slowest - 1) * stage_s[slowest]
    return sum(stage_s) + steady_s + sum(stage_s[slowest:])


def paper_partition(costs: StageCosts, num_nodes: int) -> tuple[float, Shape] | None:
    """The lowest T1 + T2 + T3 of a pipeline of so many nodes, and its partition; None if there is
    no partition."""
    start = BoundSearch(costs, {(num_nodes,): MANY_MICROBATCHES}).lowest((num_nodes,))
    if start is None:
        return None
    best = min((paper_s(costs, shape), shape) for shape in start.shapes)
    times_s = np.unique(np.concatenate([t[np.isfinite(t)] for t in costs.seconds.values()]))
    # Each of n stages or more takes t* thrice and some time of its own: T2, T3 and T1.
    times_s = times_s[times_s <= best[0] / (3 * num_nodes)]
    intervals = _cut(0, len(times_s) - 1, _INTERVALS)
    while intervals:
        alive: list[tuple[int, int]] = []
        for first in range(0, len(intervals), _INTERVALS):
            run = _Run(costs, times_s, intervals[first : first + _INTERVALS], num_nodes)
            best = min(best, *run.promising())
            alive += run.alive(best[0])
        parts = max(2, _INTERVALS // max(1, len(alive)))
        intervals = [part for interval in alive for part in _cut(*interval, parts)]
    return best


def _cut(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    edges = np.unique(np.linspace(first, last + 1, parts + 1).astype(int)).tolist()
    return [(a, b - 1) for a, b in pairwise(edges)]


class _Run:
    """One run of the program, for several intervals of times of the slowest stage."""

    def __init__(
        self,
        costs: StageCosts,
        times_s: Seconds,
        intervals: Sequence[tuple[int, int]],
        num_nodes: int,
    ) -> None:
        self._costs = costs
        self._intervals = intervals
        self._least_s = times_s[[first for first, _ in intervals]]
        self._most_s = times_s[[last for _, last in intervals]]
        # Stages after the slowest one are faster; that can be said where its time is known.
        self._is_exact = self._least_s == self._most_s
        self._windows = {count: self._window(count) for count in costs.counts}
        self._num_devices = num_nodes * costs.devices_per_node
        self._positions = Positions(costs, (num_nodes,))
        shape = (self._num_devices + 1, len(intervals), 2 * costs.num_layers + 1)
        # [d, i, u]: layers [u, L) on the last d devices, all behind k*; or with k* among them.
        self._behind_s, self._with_s = np.full((2, *shape), np.inf)
        self._behind_s[0, :, costs.num_layers] = 0.0
        for devices_left in range(1, self._num_devices + 1):
            self._fill(devices_left)
        # For each interval, no partition whose slowest stage is in there has less.
        self._bounds_s = self._with_s[-1, :, 0] - self._least_s

    def promising(self) -> Iterator[tuple[float, Shape]]:
        """The partitions behind the lowest bound, and behind the lowest one that is exact."""
        exact_s = np.where(self._is_exact, self._bounds_s, np.inf)
        for bounds_s in (self._bounds_s, exact_s):
            interval = int(np.argmin(bounds_s))
            if np.isfinite(bounds_s[interval]):
                shape = self._shape(interval)
                yield paper_s(self._costs, shape), shape

    def alive(self, limit_s: float) -> list[tuple[int, int]]:
        """The intervals that may hold something better than the limit."""
        is_alive = (self._bounds_s < limit_s) & ~self._is_exact
        return [self._intervals[index] for index in np.flatnonzero(is_alive).tolist()]

    def _shape(self, interval: int) -> Shape:
        shape: list[tuple[int, int]] = []
        first, devices_left, is_behind = 0, self._num_devices, False
        while devices_left:
            options = []
            for count, *_ in self._positions.options(devices_left):
                for after, options_s in self._options(devices_left, count, is_behind=is_behind):
                    there = options_s[interval, first]
                    if len(there):
                        width = int(np.argmin(there))
                        options.append((float(there[width]), first + width + 1, count, after))
            _, first, count, is_behind = min(options)
            shape.append((first, count))
            devices_left -= count
        return tuple(shape)

    def _window(self, count: int) -> tuple[Seconds, Seconds, Seconds, NDArray[np.int64]]:
        """What a stage adds, before, as and after k*: [i, u, w], for layers [u, u + w + 1)."""
        num_layers = self._costs.num_layers
        table = self._costs.seconds[count]
        width = int((table <= self._most_s.max()).sum(axis=1).max())
        ends = np.arange(num_layers)[:, None] + np.arange(1, width + 1)
        inside = np.minimum(ends, num_layers)
        stage_s = np.where(
            ends <= num_layers, table[np.arange(num_layers)[:, None], inside], np.inf
        )
        least_s, most_s = self._least_s[:, None, None], self._most_s[:, None, None]
        is_exact = self._is_exact[:, None, None]
        can_be = stage_s <= most_s
        is_faster = can_be & ~(is_exact & (stage_s >= most_s))
        before_s = np.where(can_be, stage_s + 4 * least_s, np.inf)
        slowest_s = np.where(can_be & (stage_s >= least_s), 2 * stage_s + 3 * least_s, np.inf)
        after_s = np.where(is_faster, 2 * stage_s + 3 * least_s, np.inf)
        return before_s, slowest_s, after_s, ends

    def _options(
        self, devices_left: int, count: int, *, is_behind: bool
    ) -> list[tuple[bool, Seconds]]:
        """By whether all that follows is behind k*, the costs by first stage: [i, u, w]."""
        before_s, slowest_s, after_s, ends = self._windows[count]
        rest_s = self._behind_s[devices_left - count][:, ends]
        if is_behind:
            return [(True, after_s + rest_s)]
        ahead_s = before_s + self._with_s[devices_left - count][:, ends]
        return [(True, slowest_s + rest_s), (False, ahead_s)]

    def _fill(self, devices_left: int) -> None:
        num_layers = self._costs.num_layers
        for count, *_ in self._positions.options(devices_left):
            for target, is_behind in ((self._behind_s, True), (self._with_s, False)):
                found_s = target[devices_left, :, :num_layers]
                for _, options_s in self._options(devices_left, count, is_behind=is_behind):
                    if options_s.shape[2]:
                        np.minimum(found_s, options_s.min(axis=2), out=found_s)
