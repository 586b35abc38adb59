"""The partition with the lowest bound: a closed form that no 1F1B iteration can beat.

With t_i the seconds of a microbatch in stage i (forward and backward) and c_i those of its way to
the next stage and of its gradient's way back,

    bound = max over stages k of  sum of t_i + c_i over i < k,  and  N_b * t_k.

The first microbatch reaches stage k only after the stages above it have done its forward, stage k
is busy with all N_b, and the last one's backward passes all stages above k on its way out. It is
the makespan where stages are equal and transfers free, and lies below it elsewhere.

The bound of a tail (the stages from layer u on) is the larger of N_b * t and t + c + that of the
tail after its first stage. So it has optimal substructure, and a dynamic program over (first layer,
position) finds the lowest one without knowing the number of stages, nor in which order nodes of
different kinds are to stand. One table serves pipelines of all sizes (positions.py).

Memory is relaxed first: the stages left are at least as many as nodes. Only where the partition
found so does not fit is the program run that knows the stages left (memory_bound.py).

Exact: `lowest` is the minimum over all partitions that fit (test_partitions.py).

Source: Oobleck (SOSP '23), section 4.1.2, for the problem.
Differs: its T1 + T2 + T3 at N_b = 4S (paper.py) leaves out transfers and memory, and can exceed the
truth as well as fall below it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Final, Protocol

import numpy as np

from planaria.planner.partition.fitting import Fitting, fitting, rows_of
from planaria.planner.partition.memory_bound import Held
from planaria.planner.partition.positions import Option, Positions
from planaria.planner.partition.rates import Rates
from planaria.planner.partition.refine import steady_s, table_of
from planaria.planner.partition.windows import Windows, behind, widest, windows
from planaria.planner.problem import Counts, Seconds, Shape, StageCosts

# A limit begins as so many times what no partition can do without, and grows until there is one.
_LIMIT_FACTOR: Final = 1.5
_LIMIT_GROWTH: Final = 1.5
_LIMIT_TRIES: Final = 8
_STEP: Final = 1.02  # The factor by which a time grows until a partition is found that keeps it.
_TINY_S: Final = 1e-12  # The least that is told from no time at all.
MANY_MICROBATCHES: Final = 1 << 20  # With so many, the bound is that of the busiest stage.


class _Shapes(Protocol):
    def shape(self, counts: Counts) -> Shape | None:
        """A partition for so many nodes that keeps some time."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """The lowest bound, the partition that has it, and others that may be faster in truth."""

    bound_s: float
    shapes: tuple[Shape, ...]


class BoundSearch:
    """Lowest bounds for pipelines of several numbers of nodes.

    Args:
        microbatches: by nodes of each kind, of the pipelines that will be asked for. Those with
            equal numbers of microbatches share a table.
    """

    def __init__(self, costs: StageCosts, microbatches: Mapping[Counts, int]) -> None:
        self._costs = costs
        self._microbatches = microbatches
        most = (max(of_kind) for of_kind in zip(*microbatches, strict=True))
        self._positions = Positions(costs, tuple(most))
        self._relaxed: dict[int, _Tails] = {}
        self._factors: dict[int, Iterator[float]] = {}
        self._fitting = Fitting(costs, self._positions, windows(costs, 1, np.inf))
        self._fitting_by_steps: dict[int, Fitting] = {}
        self._rates_by_steps: dict[int, Rates] = {}

    def lowest(self, counts: Counts) -> Found | None:
        """The lowest bound of a pipeline of so many nodes; None if no partition fits."""
        if sum(counts) > self._costs.num_layers:  # Each node needs a stage.
            return None
        shape, lowest_s = self._relaxed_shape(counts, self._microbatches[counts])
        if shape is not None and fitting(self._costs, rows_of([shape]))[0]:
            return Found(lowest_s, (shape, *self._many(counts)))
        if shape is None or not self._fitting.is_feasible(counts):
            return None
        others = self._many(counts)
        lowest_s, shape = self._held(counts, others[0])
        return Found(lowest_s, (shape, *others))

    def _many(self, counts: Counts) -> tuple[Shape, ...]:
        """Partitions for very many microbatches that fit: the fastest one may lie nearer to one of
        them than to that with the lowest bound."""
        shape, lowest_s = self._relaxed_shape(counts, MANY_MICROBATCHES)
        least_s = lowest_s / MANY_MICROBATCHES
        if shape is None or not fitting(self._costs, rows_of([shape]))[0]:
            most_s = max(s[np.isfinite(s)].max() for s in self._costs.seconds.values())
            shape = _soonest(self._fitting_at, counts, least_s, _STEP * most_s)
            assert shape is not None
        rate_s = float(steady_s(table_of(self._costs, rows_of([shape])))[0])
        steady = _soonest(self._rates_at, counts, least_s, rate_s)
        return (shape,) if steady is None else (shape, steady)

    def _held(self, counts: Counts, some: Shape) -> tuple[float, Shape]:
        """The lowest bound of the partitions that fit, and one that has it, given any of them."""
        num_microbatches = self._microbatches[counts]
        limit_s = _bound_s(self._costs, some, num_microbatches) * (1 + 1e-9)
        held = Held(
            self._costs,
            self._positions,
            counts,
            num_microbatches=num_microbatches,
            limit_s=limit_s,
            fewest=self._fitting_at(_steps_to(limit_s / num_microbatches) + 1),
            above_s=_layers_before_s(self._costs)[0],
        )
        return held.lowest()

    def _fitting_at(self, steps: int) -> Fitting:
        """With stages that take no longer than so many steps."""
        if steps not in self._fitting_by_steps:
            some = windows(self._costs, 1, _STEP**steps)
            self._fitting_by_steps[steps] = Fitting(self._costs, self._positions, some)
        return self._fitting_by_steps[steps]

    def _rates_at(self, steps: int) -> Rates:
        if steps not in self._rates_by_steps:
            self._rates_by_steps[steps] = Rates(self._costs, self._positions, _STEP**steps)
        return self._rates_by_steps[steps]

    def _relaxed_shape(self, counts: Counts, num_microbatches: int) -> tuple[Shape | None, float]:
        """The partition with the lowest bound without memory, None if there is none; its bound."""
        position = self._positions.of(counts)
        tails = self._relaxed_tails(position, num_microbatches)
        lowest_s = tails.lowest_s(position)
        return (tails.shape(position) if np.isfinite(lowest_s) else None), lowest_s

    def _relaxed_tails(self, position: int, num_microbatches: int) -> "_Tails":
        """The tails without memory, which know this position."""
        factors = self._factors.setdefault(num_microbatches, _growing(_LIMIT_FACTOR, _LIMIT_GROWTH))
        tails = self._relaxed.get(num_microbatches)
        while tails is None or not tails.knows(position):
            factor, least_s = next(factors), self._least_s(num_microbatches)
            limits_s = factor * least_s if np.isfinite(factor) else np.full_like(least_s, np.inf)
            some = windows(self._costs, num_microbatches, float(limits_s[0]))
            tails = _Tails(self._costs, self._positions, some, limits_s.tolist())
        self._relaxed[num_microbatches] = tails
        return tails

    def _least_s(self, num_microbatches: int) -> Seconds:
        """Where a limit begins, by position up to the last that is asked for: that of the slowest
        pipeline that has as many nodes; no time where none has."""
        asked = np.array(
            [
                counts
                for counts, count in self._microbatches.items()
                if num_microbatches in (count, MANY_MICROBATCHES)
            ]
        )
        speeds = [kind.speed for kind in self._costs.kinds]
        alone_s, work_s = _layers_before_s(self._costs)[:, -1]
        speed = self._costs.devices_per_node * (asked @ speeds)
        asked_s = np.maximum(alone_s, num_microbatches * work_s / speed)
        last = max(self._positions.of(tuple(counts)) for counts in asked.tolist())
        nodes_left = self._positions.nodes_left()[: last + 1]
        least_s: Seconds = np.full(len(nodes_left), -np.inf)
        for counts, seconds in zip(asked, asked_s.tolist(), strict=True):
            is_part = (nodes_left <= counts).all(axis=1)
            least_s[is_part] = np.maximum(least_s[is_part], seconds)
        return least_s


def _soonest(
    at: Callable[[int], _Shapes], counts: Counts, least_s: float, end_s: float
) -> Shape | None:
    """The partition for the fewest steps that have one, from least_s on and before end_s."""
    first, end, width = _steps_to(least_s), _steps_to(end_s), 1
    found = None
    while first < end:
        middle = min(first + width, end) - 1 if found is None else (first + end) // 2
        shape = at(middle).shape(counts)
        if shape is None:
            first, width = middle + 1, 2 * width
        else:
            found, end = shape, middle
    return found


def _steps_to(seconds: float) -> int:
    return ceil(log(max(seconds, _TINY_S)) / log(_STEP))


def _growing(first: float, growth: float) -> Iterator[float]:
    """A limit and ever larger ones, the last of which is none: what is 0 does not grow."""
    for index in range(_LIMIT_TRIES):
        yield first * growth**index
    yield np.inf


class _Tails:
    """The lowest bound of layers [u, L) by u and position, without memory: the stages left are
    taken for as few as nodes.

    Args:
        limits_s: by position; never above that of a position on the way. Bounds above need not be
            right.
    """

    def __init__(
        self,
        costs: StageCosts,
        positions: Positions,
        some: Windows,
        limits_s: Sequence[float],
    ) -> None:
        self._costs = costs
        self._positions = positions
        self._nodes_left = positions.nodes_left().sum(axis=1).tolist()
        self._windows = some
        self._limits_s = limits_s
        self._num_columns = costs.num_layers + widest(some)
        nothing = np.full(self._num_columns, np.inf)
        nothing[costs.num_layers] = 0.0
        self._bounds_s = [nothing]
        self._behind_s = [behind(nothing, costs.num_layers)]
        for position in range(1, len(limits_s)):
            self._bounds_s.append(self._next(position))
            self._behind_s.append(behind(self._bounds_s[-1], costs.num_layers))

    def knows(self, position: int) -> bool:
        """Whether the lowest bound at a position is right: it is not above the limit."""
        limit_s = self._limits_s[position]
        return limit_s == np.inf or self.lowest_s(position) <= limit_s

    def lowest_s(self, position: int) -> float:
        """The lowest bound of the whole model on all of it; infinite if there is none."""
        return float(self._bounds_s[position][0])

    def shape(self, position: int) -> Shape:
        """The partition behind a finite bound of the whole model."""
        shape: list[tuple[int, int]] = []
        first = 0
        while position:
            found = []
            for option in self._positions.options(position):
                bounds_s = self._options(position, option, slice(first, first + 1))[:, 0]
                if len(bounds_s):
                    width = int(bounds_s.argmin())
                    found.append((float(bounds_s[width]), width, option.group, option.after))
            _, width, group, position = min(found)
            first += width + 1
            shape.append((first, group))
        return tuple(shape)

    def _next(self, position: int) -> Seconds:
        bounds_s = np.full(self._num_columns, np.inf)
        layers = slice(0, self._costs.num_layers)
        for option in self._positions.options(position):
            options_s = self._options(position, option, layers)
            lowest_s = options_s.min(axis=0, initial=np.inf)
            np.minimum(bounds_s[layers], lowest_s, out=bounds_s[layers])
        return bounds_s

    def _options(self, position: int, option: Option, layers: slice) -> Seconds:
        """[w, u]: the bounds if the first stage has layers [u, u + w + 1)."""
        window = self._windows[option.group]
        width = window.width(self._limits_s[position])
        through_s = window.through_s[option.between_nodes][:width, layers]
        options_s: Seconds = through_s + self._behind_s[option.after][:width, layers]
        np.maximum(options_s, window.busy_s[:width, layers], out=options_s)
        if self._costs.has_memory_limit:
            fewest = self._nodes_left[position]
            options_s[window.stages_left[:width, layers] < fewest] = np.inf
        return options_s


def _layers_before_s(costs: StageCosts) -> Seconds:
    """Of the layers before each: one microbatch alone, and its seconds on a device of speed 1;
    shape [2, L + 1]."""
    layers = np.arange(costs.num_layers)
    by_group = {group: costs.seconds[group][layers, layers + 1] for group in costs.groups}
    alone_s = np.min(list(by_group.values()), axis=0)
    work_s = np.min([c * by_group[c] * costs.kinds[0].speed for c in costs.counts], axis=0)
    before_s: Seconds = np.zeros((2, costs.num_layers + 1))
    before_s[:, 1:] = np.cumsum([alone_s, work_s], axis=1)
    return before_s


def _bound_s(costs: StageCosts, shape: Shape, num_microbatches: int) -> float:
    """The bound of a partition."""
    bound_s = way_s = 0.0
    first = device = 0
    for end, group in shape:
        device += costs.count_of(group)
        stage_s = float(costs.seconds[group][first, end])
        bound_s = max(bound_s, way_s + num_microbatches * stage_s)
        between_nodes = device % costs.devices_per_node == 0
        way_s += stage_s + float(costs.round_trip_s(between_nodes=between_nodes)[end])
        first = end
    return bound_s
