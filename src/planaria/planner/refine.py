"""From partitions with a low bound to the fastest one nearby, by simulated 1F1B.

A bound leaves out what transfers and unequal stages cost a real schedule. So the partitions that
`BoundSearch` finds are only where this search begins: it times them, then all that differ from the
best one by a small change, then those near the new best, until nothing near the best few is left
to look at or the budget is spent. A change moves the cuts of neighbouring stages by a layer, moves
devices of a node from stage to stage, splits a stage or joins two.

Ranked, not proved: against exhaustive search on small instances see docs/PLANNER.md. With many
microbatches a partition is timed for fewer here, and the rest taken at the steady rate of its
slowest cycle; the few that remain are then timed in full (templates.py).

Source: Oobleck (SOSP '23), section 4.1.2, which takes the best by T1 + T2 + T3 at N_b = 4S instead.
"""

from collections.abc import Iterator, Sequence
from itertools import compress, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.estimator.makespan import Seconds, StageTable, makespans_of_each
from planaria.planner.fitting import fitting, rows_of
from planaria.planner.problem import Shape, StageCosts

NUM_KEPT: Final = 5  # The best ones, near which to look.
BUDGET: Final = 3_000_000  # Stage ticks; some 30 ms on a core of 2020.
_TICK_COST: Final = 1500  # Of a tick itself, in stages.
_FEWEST: Final = 16  # That are timed of any changes.
_CHANGES_MAX: Final = 256
_CUTS_MAX: Final = 9
_SETTLED_STAGES: Final = 3  # Microbatches per stage after which the rate is steady.


def nearby(costs: StageCosts, shapes: Sequence[Shape], num_microbatches: int) -> list[Shape]:
    """The few partitions near these that seem to be the fastest.

    Args:
        shapes: partitions that fit, the most promising first.
    """
    search = _Search(costs, num_microbatches)
    search.time(shapes)
    done: set[Shape] = set()
    while search.budget > 0:
        nearest = next((shape for shape in search.best(NUM_KEPT) if shape not in done), None)
        if nearest is None:
            break
        done.add(nearest)
        search.time(changed(costs, nearest))
    return search.best(NUM_KEPT)


class _Search:
    """Partitions and their times so far.

    Attributes:
        budget: stage ticks that are left.
    """

    def __init__(self, costs: StageCosts, num_microbatches: int) -> None:
        self.budget = BUDGET
        self._costs = costs
        self._num_microbatches = num_microbatches
        self._seconds: dict[Shape, float] = {}

    def time(self, shapes: Sequence[Shape]) -> None:
        """Times those that are new and fit: where the budget is short, the most promising."""
        new = [shape for shape in shapes if shape not in self._seconds]
        new = list(compress(new, fitting(self._costs, new).tolist())) if new else []
        if not new:
            return
        table = table_of(self._costs, new)
        num_stages = len(table.forward_s)
        settled = min(self._num_microbatches, _SETTLED_STAGES * num_stages)
        num_ticks = 2 * (settled + num_stages)
        rates_s = steady_s(table)
        affordable = max(_FEWEST, (self.budget // num_ticks - _TICK_COST) // num_stages)
        if len(new) > affordable:
            alone_s = (table.forward_s + table.backward_s).sum(axis=0)
            seem_s = alone_s + 2 * (table.transfer_s + table.latency_s).sum(axis=0)
            seem_s += (self._num_microbatches - 1) * rates_s
            kept = np.sort(np.argsort(seem_s, kind="stable")[:affordable])
            new, rates_s = [new[index] for index in kept], rates_s[kept]
            table = table_of(self._costs, new)
        seconds = makespans_of_each(table, settled)
        seconds = seconds + (self._num_microbatches - settled) * rates_s
        self._seconds.update(zip(new, seconds.tolist(), strict=True))
        self.budget -= num_ticks * (num_stages * len(new) + _TICK_COST)

    def best(self, number: int) -> list[Shape]:
        """The fastest so far, best first."""
        return sorted(self._seconds, key=lambda shape: (self._seconds[shape], shape))[:number]


def changed(costs: StageCosts, shape: Shape) -> list[Shape]:
    """The partitions that differ from this one by one small change, whether they fit or not."""
    found = dict.fromkeys((*_moved_cuts(shape), *_moved_devices(costs, shape)))
    found |= dict.fromkeys(_split(costs, shape))
    found.pop(shape, None)
    return list(found)


def _moved_cuts(shape: Shape) -> Iterator[Shape]:
    """A run of neighbouring cuts moved by a layer, or one by two."""
    num_cuts = len(shape) - 1
    longest = max(1, _CHANGES_MAX // (2 * max(1, num_cuts)))
    edges = (0, *(end for end, _ in shape))
    for first in range(num_cuts):
        for last in range(first, min(num_cuts, first + longest)):
            # Layers of the stages at either side of the run, of which one must stay.
            before = edges[first + 1] - edges[first]
            after = edges[last + 2] - edges[last + 1]
            for step in (-1, 1) if last > first else (-1, 1, -2, 2):
                if -before < step < after:
                    moved = [(end + step, count) for end, count in shape[first : last + 1]]
                    yield (*shape[:first], *moved, *shape[last + 1 :])


def _moved_devices(costs: StageCosts, shape: Shape) -> Iterator[Shape]:
    """Two neighbouring stages of a node joined, or with their devices dealt anew."""
    first, device = 0, 0
    for index, ((cut, count), (end, next_count)) in enumerate(pairwise(shape)):
        device += count
        if device % costs.devices_per_node:
            both = count + next_count
            before, after = shape[:index], shape[index + 2 :]
            if both in costs.counts:
                yield (*before, (end, both), *after)
            for other in costs.counts:
                if both - other in costs.counts:
                    for cut_there in _cuts(costs, first, end, other, both - other):
                        yield (*before, (cut_there, other), (end, both - other), *after)
        first = cut


def _split(costs: StageCosts, shape: Shape) -> Iterator[Shape]:
    """A stage of several devices made two."""
    first = 0
    for index, (end, count) in enumerate(shape):
        for other in costs.counts:
            if count - other in costs.counts:
                for cut in _cuts(costs, first, end, other, count - other):
                    before, after = shape[:index], shape[index + 1 :]
                    yield (*before, (cut, other), (end, count - other), *after)
        first = end


def _cuts(costs: StageCosts, first: int, end: int, count: int, next_count: int) -> Iterator[int]:
    """Cuts between two stages; where there are many, those that share the time most evenly."""
    cuts = np.arange(first + 1, end)
    uneven_s = np.maximum(costs.seconds[count][first, cuts], costs.seconds[next_count][cuts, end])
    best = np.argsort(uneven_s, kind="stable")[:_CUTS_MAX]
    return (int(cut) for cut in cuts[best] if np.isfinite(uneven_s[cut - first - 1]))


def table_of(costs: StageCosts, shapes: Sequence[Shape]) -> StageTable:
    """The seconds of partitions, a column each."""
    firsts, ends, counts = rows_of(shapes)
    forward_s, backward_s = np.zeros((2, *ends.shape))
    for count in costs.counts:
        there = counts == count
        stages = (firsts[there], ends[there])
        forward_s[there] = costs.forward_s[count][stages]
        backward_s[there] = costs.backward_s[count][stages]
    between_nodes = np.cumsum(counts, axis=0) % costs.devices_per_node == 0
    behind = np.where(between_nodes, costs.transfer_s[1][ends], costs.transfer_s[0][ends])
    latency_s = np.where(between_nodes, costs.latency_s[1], costs.latency_s[0])
    is_last = np.arange(len(ends))[:, None] == len(ends) - 1
    nowhere = is_last | (counts == 0)
    none = np.zeros((1, len(shapes)))
    return StageTable(
        forward_s=forward_s,
        backward_s=backward_s,
        transfer_s=np.vstack((none, np.where(nowhere, 0.0, behind))),
        latency_s=np.vstack((none, np.where(nowhere, 0.0, latency_s))),
    )


def steady_s(table: StageTable) -> Seconds:
    """The time from microbatch to microbatch once 1F1B is steady, of each pipeline.

    Stages k to j hand j - k + 1 microbatches around in a cycle, which takes all their seconds and
    a round trip over each link between them; the slowest cycle sets the rate. Transfers that follow
    each other on a link do, too.

    Returns:
        shape [C].
    """
    stage_s = table.forward_s + table.backward_s
    trip_s = 2 * (table.transfer_s + table.latency_s)[1:]
    zero = np.zeros((1, stage_s.shape[1]))
    until_s = np.vstack((zero, np.cumsum(stage_s + trip_s, axis=0)))
    rates_s: NDArray[np.float64] = table.transfer_s.max(axis=0)
    for width in range(1, len(stage_s) + 1):
        cycles_s = until_s[width:] - until_s[:-width] - trip_s[width - 1 :]
        np.maximum(rates_s, cycles_s.max(axis=0) / width, out=rates_s)
    return rates_s
