"""The partition with the lowest bound: a closed form that no 1F1B iteration can beat.

With t_i the seconds of a microbatch in stage i (forward and backward) and c_i those of its way to
the next stage and of its gradient's way back,

    bound = max over stages k of  sum of t_i + c_i over i < k,  and  N_b * t_k.

The first microbatch reaches stage k only after the stages above it have done its forward, stage k
is busy with all N_b, and the last one's backward passes all stages above k on its way out. It is
the makespan where stages are equal and transfers free, and lies below it elsewhere.

The bound of a tail (the stages from layer u on) is the larger of N_b * t and t + c + that of the
tail after its first stage. So it has optimal substructure, and a dynamic program over (first layer,
devices left) finds the lowest one without knowing the number of stages. Counted from the end, the
devices left also say where nodes end, so that one table serves pipelines of all sizes.

Memory takes one more dimension: the stages left, which say what a stage keeps in flight. First
memory is relaxed: the stages left are at least devices / devices per node. Only where the partition
found so does not fit is the program run with stages; tails that cannot be part of a partition
below a limit are left out, and the limit is raised until there is one.

Exact: `lowest_bound` is the minimum over all partitions that fit (tests/planner/test_bound.py).

Source: Oobleck (SOSP '23), section 4.1.2, for the problem.
Differs: its T1 + T2 + T3 at N_b = 4S (paper.py) leaves out transfers and memory, and can exceed the
truth as well as fall below it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planaria.planner.fitting import Fitting, fitting, rows_of
from planaria.planner.problem import Seconds, Shape, StageCosts

# A limit begins as so many times what no partition can do without, and grows until there is one.
_LIMIT_FACTOR: Final = 1.5
_LIMIT_GROWTH: Final = 1.5
_LIMIT_TRIES: Final = 8
# With memory it begins closer: at so many times the lowest bound without.
_CLOSE_FACTOR: Final = 1.05
_CLOSE_GROWTH: Final = 1.3
MANY_MICROBATCHES: Final = 1 << 20  # With so many, the bound is that of the slowest stage.


@dataclass(frozen=True, slots=True)
class Found:
    """The lowest bound, the partition that has it, and others that may be faster in truth: where
    memory binds one for each number of stages, and the one for very many microbatches."""

    bound_s: float
    shapes: tuple[Shape, ...]


class BoundSearch:
    """Lowest bounds for pipelines of several numbers of nodes.

    Args:
        microbatches: by number of nodes, of the pipelines that will be asked for. Those with equal
            numbers of microbatches share a table.
    """

    def __init__(self, costs: StageCosts, microbatches: Mapping[int, int]) -> None:
        self._costs = costs
        self._microbatches = microbatches
        self._relaxed: dict[int, _Tails] = {}
        self._factors: dict[int, Iterator[float]] = {}
        self._fitting = Fitting(costs)

    def lowest(self, num_nodes: int) -> Found | None:
        """The lowest bound of a pipeline of so many nodes; None if no partition fits."""
        if num_nodes > self._costs.num_layers:  # Each node needs a stage.
            return None
        num_microbatches = self._microbatches[num_nodes]
        num_devices = num_nodes * self._costs.devices_per_node
        relaxed = self._relaxed_tails(num_nodes, num_microbatches)
        lowest_s = relaxed.lowest_s(num_devices)
        if np.isfinite(lowest_s):
            shape = relaxed.shape(num_devices, 0)
            if fitting(self._costs, rows_of([shape]))[0]:
                return Found(lowest_s, (shape, *self._balanced(num_nodes)))
        if not self._fitting.is_feasible(num_nodes):
            return None
        found: list[tuple[float, int]] = []
        for limit_s in _growing(_CLOSE_FACTOR * lowest_s, _CLOSE_GROWTH):
            limits_s = [limit_s] * (num_devices + 1)
            tails = _Tails(self._costs, num_microbatches, limits_s, by_stages=True, below=relaxed)
            found = tails.by_stages_left(num_devices)
            if found:
                break
        shapes = [tails.shape(num_devices, column) for _, column in found]
        return Found(found[0][0], (*shapes, *self._balanced(num_nodes)))

    def _balanced(self, num_nodes: int) -> Iterator[Shape]:
        """The partition for very many microbatches, if it fits: the fastest one may lie nearer to
        it than to the one with the lowest bound."""
        tails = self._relaxed_tails(num_nodes, MANY_MICROBATCHES)
        shape = tails.shape(num_nodes * self._costs.devices_per_node, 0)
        if fitting(self._costs, rows_of([shape]))[0]:
            yield shape

    def _relaxed_tails(self, num_nodes: int, num_microbatches: int) -> "_Tails":
        """The tails without memory, which know this number of nodes."""
        per_node = self._costs.devices_per_node
        factors = self._factors.setdefault(num_microbatches, _growing(_LIMIT_FACTOR, _LIMIT_GROWTH))
        tails = self._relaxed.get(num_microbatches)
        while tails is None or not tails.knows(num_nodes * per_node):
            factor, least_s = next(factors), self._least_s(num_microbatches)
            limits_s = factor * least_s if np.isfinite(factor) else np.full_like(least_s, np.inf)
            tails = _Tails(self._costs, num_microbatches, limits_s.tolist(), by_stages=False)
        self._relaxed[num_microbatches] = tails
        return tails

    def _least_s(self, num_microbatches: int) -> Seconds:
        """Where a limit begins, by devices left: that of the smallest pipeline with as many."""
        asked = sorted(
            nodes
            for nodes, count in self._microbatches.items()
            if num_microbatches in (count, MANY_MICROBATCHES)
        )
        devices = np.array(asked) * self._costs.devices_per_node
        alone_s, work_s = _layers_before_s(self._costs)[:, -1]
        smallest = devices[np.searchsorted(devices, np.arange(devices[-1] + 1))]
        least_s: Seconds = np.maximum(alone_s, num_microbatches * work_s / smallest)
        return least_s


def _growing(first: float, growth: float) -> Iterator[float]:
    """A limit and ever larger ones, the last of which is none: what is 0 does not grow."""
    for index in range(_LIMIT_TRIES):
        yield first * growth**index
    yield np.inf


class _Tails:
    """The lowest bound of layers [u, L) on the last d devices, by u, d and perhaps stages left.

    Args:
        limits_s: by devices left, from 0 on; never growing. Bounds above need not be right.
        by_stages: whether the stages left are told apart, as memory asks for; otherwise they are
            taken for as few as the devices allow.
        below: the tails of the same problem without memory, which tell what is out of reach.
    """

    def __init__(
        self,
        costs: StageCosts,
        num_microbatches: int,
        limits_s: Sequence[float],
        *,
        by_stages: bool,
        below: "_Tails | None" = None,
    ) -> None:
        self.num_devices = num_devices = len(limits_s) - 1
        self._limits_s = limits_s
        self._costs = costs
        self._num_microbatches = num_microbatches
        self._by_stages = by_stages
        self._windows = {c: _window(costs, c, num_microbatches, limits_s[0]) for c in costs.counts}
        self._trips_s = [
            np.append(costs.round_trip_s(between_nodes=b), np.zeros(costs.num_layers))
            for b in (False, True)
        ]
        num_layers = costs.num_layers
        # Bounds by number of devices: row u - first layer, column by stages left; the last row
        # is infinite, for layers that are not there.
        self._first_layer: list[int] = [num_layers]
        self._bounds_s: list[Seconds] = [np.array([[0.0], [np.inf]])]
        for devices_left in range(1, num_devices + 1):
            first, end = self._layers_worth(devices_left, below)
            self._first_layer.append(first)
            self._bounds_s.append(self._bounds(devices_left, np.arange(first, end)))

    def knows(self, num_devices: int) -> bool:
        """Whether the lowest bound on so many devices is right: it is not above the limit."""
        if num_devices > self.num_devices:
            return False
        limit_s = self._limits_s[num_devices]
        return np.isinf(limit_s) or self.lowest_s(num_devices) <= limit_s

    def lowest_s(self, num_devices: int) -> float:
        """The lowest bound of the whole model on so many devices; infinite if there is none."""
        bounds_s = self._bounds_s[num_devices]
        return float(bounds_s[0].min()) if self._first_layer[num_devices] == 0 else np.inf

    def by_stages_left(self, num_devices: int) -> list[tuple[float, int]]:
        """The bounds that are below the limit, and the columns where they stand; best first."""
        if self._first_layer[num_devices] != 0:
            return []
        limit_s = self._limits_s[num_devices]
        row = self._bounds_s[num_devices][0].tolist()
        return sorted((s, column) for column, s in enumerate(row) if s <= limit_s)

    def shape(self, num_devices: int, column: int) -> Shape:
        """The partition behind a finite bound of the whole model."""
        shape: list[tuple[int, int]] = []
        first, devices_left = 0, num_devices
        while devices_left:
            stages_left = self._stages_left(devices_left)[column : column + 1]
            options = []
            for count in self._costs.counts_left(devices_left):
                bounds_s, stage_s = self._through(
                    devices_left, count, np.array([first]), stages_left
                )
                if bounds_s.size:
                    width = int(np.lexsort((stage_s[0], bounds_s[0, :, 0]))[0])
                    key = (float(bounds_s[0, width, 0]), float(stage_s[0, width]))
                    options.append((*key, count, first + width + 1))
            _, _, count, first = min(options)
            shape.append((first, count))
            devices_left -= count
            column = self._column(devices_left, int(stages_left[0]) - 1)
        return tuple(shape)

    def _stages_left(self, devices_left: int) -> NDArray[np.int64]:
        fewest = self._fewest_stages(devices_left)
        if not self._by_stages:
            return np.array([fewest])
        return np.arange(fewest, min(devices_left, self._costs.num_layers) + 1)

    def _fewest_stages(self, devices_left: int) -> int:
        return -(-devices_left // self._costs.devices_per_node)

    def _column(self, devices_left: int, stages_left: int) -> int:
        """Where the bounds with so many stages left stand."""
        return stages_left - self._fewest_stages(devices_left) if self._by_stages else 0

    def _layers_worth(self, devices_left: int, below: "_Tails | None") -> tuple[int, int]:
        """The first layers of tails that may be part of a partition below the limit."""
        num_layers = self._costs.num_layers
        if below is None:
            return 0, num_layers
        devices_before = self.num_devices - devices_left
        if devices_before == 0:
            return 0, 1
        # What is above their limit may lie anywhere above it.
        rows = below._bounds_s[devices_left][:, 0]
        tail_s = np.minimum(rows, below._limits_s[devices_left])
        alone_s, work_s = _layers_before_s(self._costs)
        busiest_s = self._num_microbatches * work_s / devices_before
        is_worth = np.maximum(tail_s + alone_s, busiest_s) <= self._limits_s[devices_left]
        layers = np.flatnonzero(is_worth[:num_layers])
        return (int(layers[0]), int(layers[-1]) + 1) if len(layers) else (0, 0)

    def _bounds(self, devices_left: int, first_layers: NDArray[np.int64]) -> Seconds:
        stages_left = self._stages_left(devices_left)
        bounds_s = np.full((len(first_layers) + 1, len(stages_left)), np.inf)
        for count in self._costs.counts_left(devices_left):
            options_s, _ = self._through(devices_left, count, first_layers, stages_left)
            if options_s.shape[1]:
                np.minimum(bounds_s[:-1], options_s.min(axis=1), out=bounds_s[:-1])
        return bounds_s

    def _through(
        self,
        devices_left: int,
        count: int,
        first_layers: NDArray[np.int64],
        stages_left: NDArray[np.int64],
    ) -> tuple[Seconds, Seconds]:
        """The bounds of tails by their first stage, which has `count` devices.

        Returns:
            [U, W, R], for the first layers, the layers of the first stage less one, and the stages
            left; and the seconds of that stage, [U, W].
        """
        costs = self._costs
        windows = self._windows[count]
        width = windows.width(self._limits_s[devices_left])
        stage_s = windows.stage_s[first_layers, :width]
        most_in_flight = windows.in_flight[first_layers, :width]
        ends = first_layers[:, None] + np.arange(1, stage_s.shape[1] + 1)
        after = devices_left - count
        rows = self._bounds_s[after]
        index = ends - self._first_layer[after]
        index = np.where((index >= 0) & (index < len(rows)), index, len(rows) - 1)
        columns = np.array([self._column(after, int(left) - 1) for left in stages_left])
        is_there = (columns >= 0) & (columns < rows.shape[1])
        rest_s = np.where(is_there, rows[:, np.where(is_there, columns, 0)], np.inf)[index]
        through_s = stage_s
        if after:
            between_nodes = after % costs.devices_per_node == 0
            through_s = stage_s + self._trips_s[between_nodes][ends]
        bounds_s = np.maximum(
            (self._num_microbatches * stage_s)[:, :, None], through_s[:, :, None] + rest_s
        )
        in_flight = np.minimum(stages_left, costs.problem.num_microbatches)
        bounds_s[most_in_flight[:, :, None] < in_flight] = np.inf
        return bounds_s, stage_s


@dataclass(frozen=True, slots=True)
class _Window:
    """The stages of one count of devices that may stay below a limit.

    Attributes:
        stage_s, in_flight: [u, w], seconds and most in flight for layers [u, u + w + 1); infinite
            and 0 behind the end of the model.
        least_s: [w], what the fastest of them takes for all microbatches.
    """

    stage_s: Seconds
    in_flight: NDArray[np.int64]
    least_s: Seconds

    def width(self, limit_s: float) -> int:
        """How many layers a stage has at most that stays below a limit."""
        return int(np.searchsorted(self.least_s, limit_s, side="right"))


def _window(costs: StageCosts, count: int, num_microbatches: int, limit_s: float) -> _Window:
    num_layers = costs.num_layers
    seconds, most = costs.seconds[count], costs.most_in_flight[count]
    can_be = (num_microbatches * seconds <= limit_s) & np.isfinite(seconds) & (most > 0)
    edges = np.arange(num_layers + 1)
    widest = int((can_be * (edges - edges[:, None])).max())
    stage_s = np.full((num_layers, widest), np.inf)
    in_flight = np.zeros((num_layers, widest), dtype=np.int64)
    for width in range(widest):
        rows = num_layers - width
        kept = np.diagonal(can_be, width + 1)
        stage_s[:rows, width] = np.where(kept, np.diagonal(seconds, width + 1), np.inf)
        in_flight[:rows, width] = np.where(kept, np.diagonal(most, width + 1), 0)
    return _Window(stage_s, in_flight, num_microbatches * stage_s.min(axis=0))


def _layers_before_s(costs: StageCosts) -> Seconds:
    """Of the layers before each: one microbatch alone, and its device-seconds; shape [2, L + 1]."""
    layers = np.arange(costs.num_layers)
    by_count = [(c, costs.seconds[c][layers, layers + 1]) for c in costs.counts]
    alone_s = np.min([layer_s for _, layer_s in by_count], axis=0)
    work_s = np.min([c * layer_s for c, layer_s in by_count], axis=0)
    before_s: Seconds = np.zeros((2, costs.num_layers + 1))
    before_s[:, 1:] = np.cumsum([alone_s, work_s], axis=1)
    return before_s
