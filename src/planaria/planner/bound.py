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

Memory is relaxed first: the stages left are at least devices / devices per node. Only where the
partition found so does not fit is the program run that knows the stages left (held.py).

Exact: `lowest` is the minimum over all partitions that fit (tests/planner/test_partitions.py).

Source: Oobleck (SOSP '23), section 4.1.2, for the problem.
Differs: its T1 + T2 + T3 at N_b = 4S (paper.py) leaves out transfers and memory, and can exceed the
truth as well as fall below it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Final, Protocol

import numpy as np

from planaria.planner.fitting import Fitting, fitting, rows_of
from planaria.planner.held import Held
from planaria.planner.problem import Seconds, Shape, StageCosts
from planaria.planner.rates import Rates
from planaria.planner.refine import steady_s, table_of
from planaria.planner.windows import Windows, behind, widest, windows

# A limit begins as so many times what no partition can do without, and grows until there is one.
_LIMIT_FACTOR: Final = 1.5
_LIMIT_GROWTH: Final = 1.5
_LIMIT_TRIES: Final = 8
_STEP: Final = 1.02  # The factor by which a time grows until a partition is found that keeps it.
_TINY_S: Final = 1e-12  # The least that is told from no time at all.
MANY_MICROBATCHES: Final = 1 << 20  # With so many, the bound is that of the busiest stage.


class _Shapes(Protocol):
    def shape(self, num_nodes: int) -> Shape | None:
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
        microbatches: by number of nodes, of the pipelines that will be asked for. Those with equal
            numbers of microbatches share a table.
    """

    def __init__(self, costs: StageCosts, microbatches: Mapping[int, int]) -> None:
        self._costs = costs
        self._microbatches = microbatches
        self._relaxed: dict[int, _Tails] = {}
        self._factors: dict[int, Iterator[float]] = {}
        self._fitting = Fitting(costs, windows(costs, 1, np.inf))
        self._fitting_by_steps: dict[int, Fitting] = {}
        self._rates_by_steps: dict[int, Rates] = {}

    def lowest(self, num_nodes: int) -> Found | None:
        """The lowest bound of a pipeline of so many nodes; None if no partition fits."""
        if num_nodes > self._costs.num_layers:  # Each node needs a stage.
            return None
        shape, lowest_s = self._relaxed_shape(num_nodes, self._microbatches[num_nodes])
        if shape is not None and fitting(self._costs, rows_of([shape]))[0]:
            return Found(lowest_s, (shape, *self._many(num_nodes)))
        if shape is None or not self._fitting.is_feasible(num_nodes):
            return None
        others = self._many(num_nodes)
        lowest_s, shapes = self._held(num_nodes, others[0])
        return Found(lowest_s, (*shapes, *others))

    def _many(self, num_nodes: int) -> tuple[Shape, ...]:
        """Partitions for very many microbatches that fit: the fastest one may lie nearer to one of
        them than to that with the lowest bound."""
        shape, lowest_s = self._relaxed_shape(num_nodes, MANY_MICROBATCHES)
        least_s = lowest_s / MANY_MICROBATCHES
        if shape is None or not fitting(self._costs, rows_of([shape]))[0]:
            most_s = max(s[np.isfinite(s)].max() for s in self._costs.seconds.values())
            shape = _soonest(self._fitting_at, num_nodes, least_s, _STEP * most_s)
            assert shape is not None
        rate_s = float(steady_s(table_of(self._costs, rows_of([shape])))[0])
        steady = _soonest(self._rates_at, num_nodes, least_s, rate_s)
        return (shape,) if steady is None else (shape, steady)

    def _held(self, num_nodes: int, some: Shape) -> tuple[float, list[Shape]]:
        """The lowest bound of the partitions that fit, and some of those, given any one of them."""
        num_microbatches = self._microbatches[num_nodes]
        limit_s = _bound_s(self._costs, some, num_microbatches) * (1 + 1e-9)
        held = Held(
            self._costs,
            num_nodes,
            num_microbatches=num_microbatches,
            limit_s=limit_s,
            fewest=self._fitting_at(_steps_to(limit_s / num_microbatches) + 1),
            above_s=_layers_before_s(self._costs)[0],
        )
        found = held.shapes(limit_s)
        return found[0][0], [shape for _, shape in found]

    def _fitting_at(self, steps: int) -> Fitting:
        """With stages that take no longer than so many steps."""
        if steps not in self._fitting_by_steps:
            some = windows(self._costs, 1, _STEP**steps)
            self._fitting_by_steps[steps] = Fitting(self._costs, some)
        return self._fitting_by_steps[steps]

    def _rates_at(self, steps: int) -> Rates:
        if steps not in self._rates_by_steps:
            self._rates_by_steps[steps] = Rates(self._costs, _STEP**steps)
        return self._rates_by_steps[steps]

    def _relaxed_shape(self, num_nodes: int, num_microbatches: int) -> tuple[Shape | None, float]:
        """The partition with the lowest bound without memory, None if there is none; its bound."""
        tails = self._relaxed_tails(num_nodes, num_microbatches)
        num_devices = num_nodes * self._costs.devices_per_node
        lowest_s = tails.lowest_s(num_devices)
        return (tails.shape(num_devices) if np.isfinite(lowest_s) else None), lowest_s

    def _relaxed_tails(self, num_nodes: int, num_microbatches: int) -> "_Tails":
        """The tails without memory, which know this number of nodes."""
        num_devices = num_nodes * self._costs.devices_per_node
        factors = self._factors.setdefault(num_microbatches, _growing(_LIMIT_FACTOR, _LIMIT_GROWTH))
        tails = self._relaxed.get(num_microbatches)
        while tails is None or not tails.knows(num_devices):
            factor, least_s = next(factors), self._least_s(num_microbatches)
            limits_s = factor * least_s if np.isfinite(factor) else np.full_like(least_s, np.inf)
            some = windows(self._costs, num_microbatches, float(limits_s[0]))
            tails = _Tails(self._costs, some, limits_s.tolist())
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


def _soonest(
    at: Callable[[int], _Shapes], num_nodes: int, least_s: float, end_s: float
) -> Shape | None:
    """The partition for the fewest steps that have one, from least_s on and before end_s."""
    first, end, width = _steps_to(least_s), _steps_to(end_s), 1
    found = None
    while first < end:
        middle = min(first + width, end) - 1 if found is None else (first + end) // 2
        shape = at(middle).shape(num_nodes)
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
    """The lowest bound of layers [u, L) on the last d devices, by u and d, without memory: the
    stages left are taken for as few as the devices allow.

    Args:
        limits_s: by devices left, from 0 on; never growing. Bounds above need not be right.
    """

    def __init__(self, costs: StageCosts, some: Windows, limits_s: Sequence[float]) -> None:
        self._costs = costs
        self._windows = some
        self._limits_s = limits_s
        self._num_columns = costs.num_layers + widest(some)
        nothing = np.full(self._num_columns, np.inf)
        nothing[costs.num_layers] = 0.0
        self._bounds_s = [nothing]
        self._behind_s = [behind(nothing, costs.num_layers)]
        for devices_left in range(1, len(limits_s)):
            self._bounds_s.append(self._next(devices_left))
            self._behind_s.append(behind(self._bounds_s[-1], costs.num_layers))

    def knows(self, num_devices: int) -> bool:
        """Whether the lowest bound on so many devices is right: it is not above the limit."""
        if num_devices >= len(self._limits_s):
            return False
        limit_s = self._limits_s[num_devices]
        return np.isinf(limit_s) or self.lowest_s(num_devices) <= limit_s

    def lowest_s(self, num_devices: int) -> float:
        """The lowest bound of the whole model on so many devices; infinite if there is none."""
        return float(self._bounds_s[num_devices][0])

    def shape(self, num_devices: int) -> Shape:
        """The partition behind a finite bound of the whole model."""
        shape: list[tuple[int, int]] = []
        first, devices_left = 0, num_devices
        while devices_left:
            options = []
            for count in self._costs.counts_left(devices_left):
                bounds_s = self._options(devices_left, count, slice(first, first + 1))[:, 0]
                if len(bounds_s):
                    width = int(bounds_s.argmin())
                    options.append((float(bounds_s[width]), width, count))
            _, width, count = min(options)
            first += width + 1
            shape.append((first, count))
            devices_left -= count
        return tuple(shape)

    def _next(self, devices_left: int) -> Seconds:
        bounds_s = np.full(self._num_columns, np.inf)
        layers = slice(0, self._costs.num_layers)
        for count in self._costs.counts_left(devices_left):
            options_s = self._options(devices_left, count, layers)
            lowest_s = options_s.min(axis=0, initial=np.inf)
            np.minimum(bounds_s[layers], lowest_s, out=bounds_s[layers])
        return bounds_s

    def _options(self, devices_left: int, count: int, layers: slice) -> Seconds:
        """[w, u]: the bounds if the first stage has `count` devices and layers [u, u + w + 1)."""
        window, after = self._windows[count], devices_left - count
        width = window.width(self._limits_s[devices_left])
        between_nodes = after % self._costs.devices_per_node == 0
        through_s = window.through_s[between_nodes][:width, layers]
        options_s: Seconds = through_s + self._behind_s[after][:width, layers]
        np.maximum(options_s, window.busy_s[:width, layers], out=options_s)
        if self._costs.problem.profile.device_memory_bytes:
            fewest = -(-devices_left // self._costs.devices_per_node)
            options_s[window.stages_left[:width, layers] < fewest] = np.inf
        return options_s


def _layers_before_s(costs: StageCosts) -> Seconds:
    """Of the layers before each: one microbatch alone, and its device-seconds; shape [2, L + 1]."""
    layers = np.arange(costs.num_layers)
    by_count = [(c, costs.seconds[c][layers, layers + 1]) for c in costs.counts]
    alone_s = np.min([layer_s for _, layer_s in by_count], axis=0)
    work_s = np.min([c * layer_s for c, layer_s in by_count], axis=0)
    before_s: Seconds = np.zeros((2, costs.num_layers + 1))
    before_s[:, 1:] = np.cumsum([alone_s, work_s], axis=1)
    return before_s


def _bound_s(costs: StageCosts, shape: Shape, num_microbatches: int) -> float:
    """The bound of a partition."""
    bound_s = way_s = 0.0
    first = device = 0
    for end, count in shape:
        device += count
        stage_s = float(costs.seconds[count][first, end])
        bound_s = max(bound_s, way_s + num_microbatches * stage_s)
        between_nodes = device % costs.devices_per_node == 0
        way_s += stage_s + float(costs.round_trip_s(between_nodes=between_nodes)[end])
        first = end
    return bound_s
