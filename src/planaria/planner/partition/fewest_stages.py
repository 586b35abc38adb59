"""Which partitions fit into memory, and the fewest stages in which the model fits on given nodes.

A stage keeps as many microbatches in flight as there are stages from it to the last. So of two
suffixes of the model at the same position, the one with fewer stages leaves more memory to the
stages in front of it. It is therefore enough to know the fewest stages in which layers [u, L) fit
at a position: one number for each u and position, which a dynamic program computes from the numbers
of the suffixes behind the first stage.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.partition.positions import Option, Positions
from planaria.planner.partition.windows import Windows, sliding_window, widest
from planaria.planner.problem import Counts, Shape, StageCosts

NEVER: Final = 1 << 30  # Number of stages that stands for a suffix that does not fit.


class FewestStages:
    """The fewest stages in which suffixes of the model fit into memory.

    Args:
        tables: tables of the stages that a partition may have.
    """

    def __init__(self, costs: StageCosts, positions: Positions, tables: Windows) -> None:
        self._costs = costs
        self._positions = positions
        self._windows = tables
        self._widest = widest(self._windows)
        self._nothing = np.full(costs.num_layers + self._widest, NEVER, dtype=np.int32)
        no_layers = self._nothing.copy()
        no_layers[costs.num_layers] = 0
        self._fewest = [no_layers]
        # For each position, the range [first, end) of the layers in which suffixes that fit begin;
        # an empty range if none fits.
        self._layers = [(costs.num_layers, costs.num_layers + 1)]

    def is_feasible(self, counts: Counts) -> bool:
        """Whether a pipeline of these numbers of nodes has a partition that fits."""
        if sum(counts) > self._costs.num_layers:  # Each node needs a stage.
            return False
        return bool(self.fewest(self._positions.position_of(counts))[0] < NEVER)

    def fewest(self, position: int) -> NDArray[np.int32]:
        """Array over u: the fewest stages in which layers [u, L) fit at a position, or NEVER."""
        while len(self._fewest) <= position:
            self._append_next()
        return self._fewest[position][: self._costs.num_layers + 1]

    def shape(self, counts: Counts) -> Shape | None:
        """A partition that fits, with the fewest stages; None if there is none."""
        if not self.is_feasible(counts):
            return None
        shape: list[tuple[int, int]] = []
        first, position = 0, self._positions.position_of(counts)
        while position:
            _, first, group, position = min(
                (int(stages[0]), first + width + 1, option.group, option.after)
                for option in self._positions.options(position)
                for width, stages in enumerate(self._options(option, first, first + 1))
            )
            shape.append((first, group))
        return tuple(shape)

    def _append_next(self) -> None:
        num_layers = self._costs.num_layers
        options = self._positions.options(len(self._fewest))
        ranges_behind = [self._layers[option.after] for option in options]
        first = max(0, min((layer for layer, _ in ranges_behind), default=0) - self._widest)
        end = min(num_layers, max((layer for _, layer in ranges_behind), default=0) - 1)
        if first >= end:
            self._fewest.append(self._nothing)
            self._layers.append((num_layers, 0))
            return
        fewest = self._nothing.copy()
        for option in options:
            stages = self._options(option, first, end)
            np.minimum(fewest[first:end], stages.min(axis=0, initial=NEVER), out=fewest[first:end])
        fitting_layers = np.flatnonzero(fewest < NEVER)
        self._fewest.append(fewest)
        self._layers.append(
            (int(fitting_layers[0]), int(fitting_layers[-1]) + 1)
            if len(fitting_layers)
            else (num_layers, 0)
        )

    def _options(self, option: Option, first: int, end: int) -> NDArray[np.int32]:
        """Table [w, u]: the fewest stages of the suffix that begins at layer first + u with a stage
        of w + 1 layers, or NEVER."""
        stages_left = self._windows[option.group].stages_left[:, first:end]
        stages_behind = sliding_window(self._fewest[option.after], self._costs.num_layers)
        stages = stages_behind[: len(stages_left), first:end] + np.int32(1)
        stages[stages > stages_left] = NEVER
        return stages


class PartitionRows(NamedTuple):
    """The first layer, end layer and group of each stage of several partitions.

    Each partition is a column, and each stage a row. A partition with fewer stages than others has
    rows in front in which all three are 0.
    """

    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]
    groups: NDArray[np.int64]


def rows_of(shapes: Sequence[Shape]) -> PartitionRows:
    lengths = np.array([len(shape) for shape in shapes])
    numbers = chain.from_iterable(chain.from_iterable(shapes))
    pairs = np.fromiter(numbers, dtype=np.int64, count=2 * int(lengths.sum())).reshape(-1, 2)
    is_stage = np.arange(lengths.max()) >= lengths.max() - lengths[:, None]
    ends, groups = np.zeros((2, *is_stage.shape), dtype=np.int64)
    ends[is_stage], groups[is_stage] = pairs[:, 0], pairs[:, 1]
    ends, groups = np.ascontiguousarray(ends.T), np.ascontiguousarray(groups.T)
    return PartitionRows(np.vstack((np.zeros_like(ends[:1]), ends[:-1])), ends, groups)


def can_fit(costs: StageCosts, rows: PartitionRows) -> NDArray[np.bool_]:
    """Array over partitions: whether each fits into memory."""
    stages_left = len(rows.ends) - np.arange(len(rows.ends))[:, None]
    in_flight = np.minimum(stages_left, costs.problem.num_microbatches)
    max_in_flight: NDArray[np.int64] = np.where(rows.groups, 0, in_flight)
    for group in costs.groups:
        has_group = rows.groups == group
        max_in_flight[has_group] = costs.most_in_flight[group][
            rows.firsts[has_group], rows.ends[has_group]
        ]
    fits: NDArray[np.bool_] = np.all(max_in_flight >= in_flight, axis=0)
    return fits
