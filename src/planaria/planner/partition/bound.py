"""The partition with the lowest bound, a closed form below which no 1F1B makespan can be.

Let t_i be the seconds of a microbatch in stage i (forward and backward), and c_i those of sending
its output to the next stage and the gradient back. Then

    bound = max over stages k of  (sum over i < k of (t_i + c_i))  +  N_b * t_k.

The reason: the first microbatch reaches stage k only after the stages before it have done its
forward, stage k is busy with all N_b microbatches, and the backward of the last one then passes all
stages before k. The bound equals the makespan where stages are equal and transfers take no time;
elsewhere the makespan may be longer.

The bound of a suffix (the stages from layer u on) is the larger of N_b * t and t + c + the bound of
the suffix behind its first stage. So the problem has optimal substructure, and a dynamic program
over (first layer, position) finds the lowest bound. It need not know the number of stages, nor the
order of nodes of different kinds. One table serves pipelines of all sizes (positions.py).

At first the memory limit is relaxed: a suffix is assumed to have as few stages as it has nodes.
Only if the partition found so does not fit, a slower program runs that counts the stages of each
suffix (memory_bound.py).

Exact: `lowest` is the minimum over all partitions that fit (test_partitions.py).

Source: Oobleck (SOSP '23), section 4.1.2, for the problem.
Differs: its T1 + T2 + T3 at N_b = 4S (paper.py) leaves out transfers and memory, and can be above
the makespan as well as below it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Final, Protocol

import numpy as np

from planaria.planner.partition.fewest_stages import FewestStages, can_fit, rows_of
from planaria.planner.partition.memory_bound import MemoryBoundSearch, SearchLimits
from planaria.planner.partition.periods import Periods
from planaria.planner.partition.positions import Option, Positions
from planaria.planner.partition.refine import steady_period_s, table_of
from planaria.planner.partition.windows import Windows, sliding_window, widest, windows
from planaria.planner.problem import Counts, Seconds, Shape, StageCosts

# Stages are looked at only up to a limit. It begins at _LIMIT_FACTOR times a time that no partition
# can go below, and grows by _LIMIT_GROWTH until a partition is found.
_LIMIT_FACTOR: Final = 1.5
_LIMIT_GROWTH: Final = 1.5
_LIMIT_TRIES: Final = 8
_STEP: Final = 1.02  # The times that `_shape_in_shortest_time` tries are powers of it, in seconds.
_TINY_S: Final = 1e-12  # Shorter times are taken for this one, as 0 has no logarithm.
MANY_MICROBATCHES: Final = 1 << 20  # So many that the busiest stage alone decides the bound.


class _ShapeFinder(Protocol):
    def shape(self, counts: Counts) -> Shape | None:
        """A partition for these numbers of nodes that keeps within some time; None if none is
        found."""
        ...


@dataclass(frozen=True, slots=True)
class LowestBound:
    """The lowest bound, and partitions: first the one that has it, then others that may have a
    shorter makespan."""

    bound_s: float
    shapes: tuple[Shape, ...]


class BoundSearch:
    """Lowest bounds for pipelines of several numbers of nodes.

    Args:
        microbatches: number of microbatches of each pipeline that will be asked for, by its number
            of nodes of each kind. Pipelines with equal numbers of microbatches share a table.
    """

    def __init__(self, costs: StageCosts, microbatches: Mapping[Counts, int]) -> None:
        self._costs = costs
        self._microbatches = microbatches
        max_nodes = (max(of_kind) for of_kind in zip(*microbatches, strict=True))
        self._positions = Positions(costs, tuple(max_nodes))
        self._relaxed: dict[int, _SuffixTable] = {}
        self._factors: dict[int, Iterator[float]] = {}
        self._fewest_stages = FewestStages(costs, self._positions, windows(costs, 1, np.inf))
        self._fewest_stages_by_steps: dict[int, FewestStages] = {}
        self._periods_by_steps: dict[int, Periods] = {}

    def lowest(self, counts: Counts) -> LowestBound | None:
        """The lowest bound of a pipeline of these numbers of nodes; None if no partition fits."""
        if sum(counts) > self._costs.num_layers:  # Each node needs a stage.
            return None
        shape, lowest_s = self._relaxed_shape(counts, self._microbatches[counts])
        if shape is not None and can_fit(self._costs, rows_of([shape]))[0]:
            return LowestBound(lowest_s, (shape, *self._shapes_for_many_microbatches(counts)))
        if shape is None or not self._fewest_stages.is_feasible(counts):
            return None
        others = self._shapes_for_many_microbatches(counts)
        lowest_s, shape = self._lowest_within_memory(counts, others[0])
        return LowestBound(lowest_s, (shape, *others))

    def _shapes_for_many_microbatches(self, counts: Counts) -> tuple[Shape, ...]:
        """One or two partitions that fit and are good for very many microbatches.

        The fastest partition may be more similar to one of them than to the partition with the
        lowest bound.
        """
        shape, lowest_s = self._relaxed_shape(counts, MANY_MICROBATCHES)
        least_s = lowest_s / MANY_MICROBATCHES
        if shape is None or not can_fit(self._costs, rows_of([shape]))[0]:
            max_s = max(s[np.isfinite(s)].max() for s in self._costs.seconds.values())
            shape = _shape_in_shortest_time(self._fewest_stages_at, counts, least_s, _STEP * max_s)
            assert shape is not None
        period_s = float(steady_period_s(table_of(self._costs, rows_of([shape])))[0])
        steady_shape = _shape_in_shortest_time(self._periods_at, counts, least_s, period_s)
        return (shape,) if steady_shape is None else (shape, steady_shape)

    def _lowest_within_memory(self, counts: Counts, known_shape: Shape) -> tuple[float, Shape]:
        """The lowest bound of the partitions that fit, and a partition that has it.

        Args:
            known_shape: any partition that fits; its bound limits the search.
        """
        num_microbatches = self._microbatches[counts]
        limit_s = _bound_s(self._costs, known_shape, num_microbatches) * (1 + 1e-9)
        search = MemoryBoundSearch(
            self._costs,
            self._positions,
            counts,
            num_microbatches=num_microbatches,
            limits=SearchLimits(
                bound_s=limit_s,
                fewest_stages=self._fewest_stages_at(_steps_to(limit_s / num_microbatches) + 1),
                before_s=_layers_before_s(self._costs)[0],
            ),
        )
        return search.lowest()

    def _fewest_stages_at(self, steps: int) -> FewestStages:
        """The fewest stages of suffixes whose stages take at most _STEP ** steps seconds each."""
        if steps not in self._fewest_stages_by_steps:
            tables = windows(self._costs, 1, _STEP**steps)
            self._fewest_stages_by_steps[steps] = FewestStages(self._costs, self._positions, tables)
        return self._fewest_stages_by_steps[steps]

    def _periods_at(self, steps: int) -> Periods:
        if steps not in self._periods_by_steps:
            self._periods_by_steps[steps] = Periods(self._costs, self._positions, _STEP**steps)
        return self._periods_by_steps[steps]

    def _relaxed_shape(self, counts: Counts, num_microbatches: int) -> tuple[Shape | None, float]:
        """The partition with the lowest bound under the relaxed memory limit, or None; and that
        bound."""
        position = self._positions.position_of(counts)
        table = self._relaxed_table(position, num_microbatches)
        lowest_s = table.lowest_s(position)
        return (table.shape(position) if np.isfinite(lowest_s) else None), lowest_s

    def _relaxed_table(self, position: int, num_microbatches: int) -> "_SuffixTable":
        """Suffixes under the relaxed memory limit, whose lowest bound at this position is right."""
        factors = self._factors.setdefault(
            num_microbatches, _limit_factors(_LIMIT_FACTOR, _LIMIT_GROWTH)
        )
        table = self._relaxed.get(num_microbatches)
        while table is None or not table.is_known(position):
            factor, least_s = next(factors), self._least_s(num_microbatches)
            limits_s = factor * least_s if np.isfinite(factor) else np.full_like(least_s, np.inf)
            tables = windows(self._costs, num_microbatches, float(limits_s[0]))
            table = _SuffixTable(self._costs, self._positions, tables, limits_s.tolist())
        self._relaxed[num_microbatches] = table
        return table

    def _least_s(self, num_microbatches: int) -> Seconds:
        """Time from which the limit at each position grows, up to the last position asked for.

        For each pipeline there is a time that the bound of none of its partitions goes below. A
        position has the largest of these times over the pipelines that contain its nodes, and -inf
        if none does.
        """
        asked_counts = np.array(
            [
                counts
                for counts, count in self._microbatches.items()
                if num_microbatches in (count, MANY_MICROBATCHES)
            ]
        )
        speeds = [kind.speed for kind in self._costs.kinds]
        alone_s, work_s = _layers_before_s(self._costs)[:, -1]
        speed = self._costs.devices_per_node * (asked_counts @ speeds)
        asked_s = np.maximum(alone_s, num_microbatches * work_s / speed)
        last_position = max(
            self._positions.position_of(tuple(counts)) for counts in asked_counts.tolist()
        )
        nodes_left = self._positions.nodes_left()[: last_position + 1]
        least_s: Seconds = np.full(len(nodes_left), -np.inf)
        for counts, seconds in zip(asked_counts, asked_s.tolist(), strict=True):
            is_part = (nodes_left <= counts).all(axis=1)
            least_s[is_part] = np.maximum(least_s[is_part], seconds)
        return least_s


def _shape_in_shortest_time(
    finder_at: Callable[[int], _ShapeFinder], counts: Counts, least_s: float, end_s: float
) -> Shape | None:
    """The partition found within the shortest time, between least_s and end_s, in which there is
    one; None if there is none.

    Args:
        finder_at: function that gives, for a number of steps, what finds partitions within
            _STEP ** steps seconds.
    """
    first, width = _steps_to(least_s), 1
    end = max(_steps_to(end_s), first + 1)  # All layers may take no time.
    shape_found = None
    while first < end:
        middle = min(first + width, end) - 1 if shape_found is None else (first + end) // 2
        shape = finder_at(middle).shape(counts)
        if shape is None:
            first, width = middle + 1, 2 * width
        else:
            shape_found, end = shape, middle
    return shape_found


def _steps_to(seconds: float) -> int:
    return ceil(log(max(seconds, _TINY_S)) / log(_STEP))


def _limit_factors(first: float, growth: float) -> Iterator[float]:
    """Growing factors of a limit; the last one is infinite, since a limit of 0 never grows."""
    for index in range(_LIMIT_TRIES):
        yield first * growth**index
    yield np.inf


class _SuffixTable:
    """The lowest bound of layers [u, L) for each u and position, under a relaxed memory limit.

    Relaxed: a stage is taken to fit if it would with as few stages left as there are nodes left.

    Args:
        limits_s: limit on the bounds at each position, never above the limit of a position that a
            stage can lead to. Bounds above their limit need not be right.
    """

    def __init__(
        self,
        costs: StageCosts,
        positions: Positions,
        tables: Windows,
        limits_s: Sequence[float],
    ) -> None:
        self._costs = costs
        self._positions = positions
        self._nodes_left = positions.nodes_left().sum(axis=1).tolist()
        self._windows = tables
        self._limits_s = limits_s
        self._num_columns = costs.num_layers + widest(tables)
        nothing = np.full(self._num_columns, np.inf)
        nothing[costs.num_layers] = 0.0
        self._bounds_s = [nothing]
        self._behind_s = [sliding_window(nothing, costs.num_layers)]
        for position in range(1, len(limits_s)):
            self._bounds_s.append(self._next_bounds_s(position))
            self._behind_s.append(sliding_window(self._bounds_s[-1], costs.num_layers))

    def is_known(self, position: int) -> bool:
        """Whether the lowest bound of the whole model at a position is right, because it does not
        exceed the limit."""
        limit_s = self._limits_s[position]
        return limit_s == np.inf or self.lowest_s(position) <= limit_s

    def lowest_s(self, position: int) -> float:
        """The lowest bound of the whole model at a position; infinite if no partition is known."""
        return float(self._bounds_s[position][0])

    def shape(self, position: int) -> Shape:
        """The partition of the whole model with the lowest bound at a position, which must be
        finite."""
        shape: list[tuple[int, int]] = []
        first = 0
        while position:
            choices = []
            for option in self._positions.options(position):
                bounds_s = self._options(position, option, slice(first, first + 1))[:, 0]
                if len(bounds_s):
                    width = int(bounds_s.argmin())
                    choices.append((float(bounds_s[width]), width, option.group, option.after))
            _, width, group, position = min(choices)
            first += width + 1
            shape.append((first, group))
        return tuple(shape)

    def _next_bounds_s(self, position: int) -> Seconds:
        bounds_s = np.full(self._num_columns, np.inf)
        layers = slice(0, self._costs.num_layers)
        for option in self._positions.options(position):
            options_s = self._options(position, option, layers)
            lowest_s = options_s.min(axis=0, initial=np.inf)
            np.minimum(bounds_s[layers], lowest_s, out=bounds_s[layers])
        return bounds_s

    def _options(self, position: int, option: Option, layers: slice) -> Seconds:
        """Table [w, u] of the lowest bounds of layers [u, L) if the first stage has layers
        [u, u + w + 1)."""
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
    """Sums over the layers before each layer, for one microbatch, shape [2, L + 1].

    Row 0 has the least seconds that these layers take one after the other; row 1 the least
    device-seconds that they cost on devices of speed 1.
    """
    layers = np.arange(costs.num_layers)
    by_group = {group: costs.seconds[group][layers, layers + 1] for group in costs.groups}
    alone_s = np.min(list(by_group.values()), axis=0)
    work_s = np.min([c * by_group[c] * costs.kinds[0].speed for c in costs.counts], axis=0)
    before_s: Seconds = np.zeros((2, costs.num_layers + 1))
    before_s[:, 1:] = np.cumsum([alone_s, work_s], axis=1)
    return before_s


def _bound_s(costs: StageCosts, shape: Shape, num_microbatches: int) -> float:
    """The bound of a partition, in seconds."""
    bound_s = before_s = 0.0
    first = device = 0
    for end, group in shape:
        device += costs.count_of(group)
        stage_s = float(costs.seconds[group][first, end])
        bound_s = max(bound_s, before_s + num_microbatches * stage_s)
        between_nodes = device % costs.devices_per_node == 0
        before_s += stage_s + float(costs.round_trip_s(between_nodes=between_nodes)[end])
        first = end
    return bound_s
