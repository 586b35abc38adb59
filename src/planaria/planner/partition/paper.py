"""Oobleck's own objective, T1 + T2 + T3 at N_b = 4S, and the partition that minimises it.

Let t_i be the seconds of a microbatch in stage i (forward and backward), and k* the slowest stage,
counted from 0 (the last of them if several are equally slow). Then

    T1 = sum of all t_i        T2 = (4S - S + k* - 1) * t_k*        T3 = sum of t_i from k* on

Let t* be the seconds of stage k*. For a given t* the objective is a sum over stages, less t*: a
stage before k* adds t_i + 4 t*, any other stage 2 t_i + 3 t*. So a dynamic program finds the best
partition for one t*. Its state is the first layer, the devices left, and whether k* is still to
come. For an interval [a, b] of values of t* the program finds a lower bound: it takes t* as a where
t* is a cost, and as b where t* limits the stages. Intervals whose bound is no better than the best
partition so far are dropped. The others are divided, down to single values, for which the bound is
exact. One run of the program treats many intervals.

Exact: the minimum over all partitions (tests/planner/partition/test_partitions.py).

Source: Oobleck (SOSP '23), section 4.1.2, equations 1 - 4.
Differs: equations 1 and 3 start the second half at layer k + 1, which skips layer k. T2 is computed
for the whole pipeline, because it is not the sum of the values of its halves. The paper's divide
and conquer keeps only the best of each half, which need not give the best whole; this program does
not have that flaw. As in the paper, communication and memory are left out. This module serves only
for comparison, as `paper_sets.py` does: planaria plans with `templates.py` and `sets.py`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.planner.partition.bound import MANY_MICROBATCHES, BoundSearch
from planaria.planner.partition.positions import Positions
from planaria.planner.problem import Seconds, Shape, StageCosts

_INTERVALS: Final = 32  # Bound on intervals that one run of the program treats.


def paper_s(costs: StageCosts, shape: Shape) -> float:
    """T1 + T2 + T3 of a partition."""
    stage_s = []
    first = 0
    for end, count in shape:
        stage_s.append(float(costs.seconds[count][first, end]))
        first = end
    return paper_iteration_s(stage_s)


def paper_iteration_s(stage_s: Sequence[float]) -> float:
    """T1 + T2 + T3 at N_b = 4S.

    Args:
        stage_s: seconds of a microbatch in each stage, forward and backward.
    """
    num_stages = len(stage_s)
    slowest = max(range(num_stages), key=lambda i: (stage_s[i], i))
    steady_s = (3 * num_stages + slowest - 1) * stage_s[slowest]
    return sum(stage_s) + steady_s + sum(stage_s[slowest:])


def paper_partition(costs: StageCosts, num_nodes: int) -> tuple[float, Shape] | None:
    """The lowest T1 + T2 + T3 of a pipeline of num_nodes nodes, and its partition; None if there
    is no partition."""
    start = BoundSearch(costs, {(num_nodes,): MANY_MICROBATCHES}).lowest((num_nodes,))
    if start is None:
        return None
    best = min((paper_s(costs, shape), shape) for shape in start.shapes)
    times_s = np.unique(np.concatenate([t[np.isfinite(t)] for t in costs.seconds.values()]))
    # T1 + T2 + T3 is at least 3 S t*, and there are num_nodes stages or more.
    times_s = times_s[times_s <= best[0] / (3 * num_nodes)]
    intervals = _even_parts(0, len(times_s) - 1, _INTERVALS)
    while intervals:
        open_intervals: list[tuple[int, int]] = []
        for first in range(0, len(intervals), _INTERVALS):
            run = _IntervalRun(costs, times_s, intervals[first : first + _INTERVALS], num_nodes)
            best = min(best, *run.best_shapes())
            open_intervals += run.open_intervals(best[0])
        num_parts = max(2, _INTERVALS // max(1, len(open_intervals)))
        intervals = [
            part for interval in open_intervals for part in _even_parts(*interval, num_parts)
        ]
    return best


def _even_parts(first: int, last: int, num_parts: int) -> list[tuple[int, int]]:
    edges = np.unique(np.linspace(first, last + 1, num_parts + 1).astype(int)).tolist()
    return [(a, b - 1) for a, b in pairwise(edges)]


class _IntervalRun:
    """One run of the program, for several intervals of t*.

    Args:
        times_s: possible values of t*, ascending.
        intervals: pairs of the first and the last index into times_s.
    """

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
        # Stages behind the slowest one are faster than t*. That can be required only where the
        # interval is a single value.
        self._is_exact = self._least_s == self._most_s
        self._windows = {count: self._window(count) for count in costs.counts}
        self._num_devices = num_nodes * costs.devices_per_node
        self._positions = Positions(costs, (num_nodes,))
        shape = (self._num_devices + 1, len(intervals), 2 * costs.num_layers + 1)
        # [d, i, u]: the least cost of layers [u, L) on the last d devices in interval i; in the
        # first table all stages are behind k*, in the second k* is among them.
        self._behind_s, self._with_s = np.full((2, *shape), np.inf)
        self._behind_s[0, :, costs.num_layers] = 0.0
        for devices_left in range(1, self._num_devices + 1):
            self._fill_tables(devices_left)
        # For each interval, a lower bound for the partitions whose t* is in it.
        self._bounds_s = self._with_s[-1, :, 0] - self._least_s

    def best_shapes(self) -> Iterator[tuple[float, Shape]]:
        """The partitions that have the lowest bound, and the lowest exact bound, with their
        T1 + T2 + T3."""
        exact_s = np.where(self._is_exact, self._bounds_s, np.inf)
        for bounds_s in (self._bounds_s, exact_s):
            interval = int(np.argmin(bounds_s))
            if np.isfinite(bounds_s[interval]):
                shape = self._shape(interval)
                yield paper_s(self._costs, shape), shape

    def open_intervals(self, limit_s: float) -> list[tuple[int, int]]:
        """The intervals of several values that may hold a partition better than the limit."""
        is_open = (self._bounds_s < limit_s) & ~self._is_exact
        return [self._intervals[index] for index in np.flatnonzero(is_open).tolist()]

    def _shape(self, interval: int) -> Shape:
        shape: list[tuple[int, int]] = []
        first, devices_left, is_behind = 0, self._num_devices, False
        while devices_left:
            options = []
            for count, *_ in self._positions.options(devices_left):
                for after, options_s in self._options(devices_left, count, is_behind=is_behind):
                    costs_s = options_s[interval, first]
                    if len(costs_s):
                        width = int(np.argmin(costs_s))
                        options.append((float(costs_s[width]), first + width + 1, count, after))
            _, first, count, is_behind = min(options)
            shape.append((first, count))
            devices_left -= count
        return tuple(shape)

    def _window(self, count: int) -> tuple[Seconds, Seconds, Seconds, NDArray[np.int64]]:
        """What a stage of `count` devices adds to the objective, and where it ends.

        Returns:
            three tables [i, u, w] for layers [u, u + w + 1) in interval i, if the stage is before
            k*, if it is k*, and if it is behind k*; and a table [u, w] of its end layer.
        """
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
        """Costs of a suffix whose first stage has `count` devices.

        Args:
            is_behind: whether the suffix lies behind k*.

        Returns:
            pairs: whether the rest of the suffix lies behind k*, and a table [i, u, w] of the costs
            in interval i if the first stage has layers [u, u + w + 1).
        """
        before_s, slowest_s, after_s, ends = self._windows[count]
        rest_s = self._behind_s[devices_left - count][:, ends]
        if is_behind:
            return [(True, after_s + rest_s)]
        ahead_s = before_s + self._with_s[devices_left - count][:, ends]
        return [(True, slowest_s + rest_s), (False, ahead_s)]

    def _fill_tables(self, devices_left: int) -> None:
        num_layers = self._costs.num_layers
        for count, *_ in self._positions.options(devices_left):
            for target, is_behind in ((self._behind_s, True), (self._with_s, False)):
                costs_s = target[devices_left, :, :num_layers]
                for _, options_s in self._options(devices_left, count, is_behind=is_behind):
                    if options_s.shape[2]:
                        np.minimum(costs_s, options_s.min(axis=2), out=costs_s)
