"""Which partitions fit into memory, and the fewest stages in which the model fits on given nodes.

A stage keeps as many microbatches in flight as there are stages from it to the last. So of two
tails of the model at the same position, the one with fewer stages leaves more memory to the stages
in front of it. It is therefore enough to know the fewest stages in which layers [u, L) fit at a
position: one number for each u and position, which a dynamic program computes from the numbers of
the tails behind the first stage.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.partition.positions import Option, Positions
from planaria.planner.partition.windows import Windows, behind, widest
from planaria.planner.problem import Counts, Shape, StageCosts

NEVER: Final = 1 << 30  # Number of stages that stands for a tail that does not fit.


class Fitting:
    """The fewest stages in which tails of the model fit into memory.

    Args:
        some: tables of the stages that a partition may have.
    """

    def __init__(self, costs: StageCosts, positions: Positions, some: Windows) -> None:
        self._costs = costs
        self._positions = positions
        self._windows = some
        self._widest = widest(self._windows)
        self._nothing = np.full(costs.num_layers + self._widest, NEVER, dtype=np.int32)
        no_layers = self._nothing.copy()
        no_layers[costs.num_layers] = 0
        self._fewest = [no_layers]
        # For each position, the range [first, end) of the layers in which tails that fit begin;
        # an empty range if none fits.
        self._layers = [(costs.num_layers, costs.num_layers + 1)]

    def is_feasible(self, counts: Counts) -> bool:
        """Whether a pipeline of these numbers of nodes has a partition that fits."""
        if sum(counts) > self._costs.num_layers:  # Each node needs a stage.
            return False
        return bool(self.fewest(self._positions.of(counts))[0] < NEVER)

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
        first, position = 0, self._positions.of(counts)
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
        those_behind = [self._layers[option.after] for option in options]
        first = max(0, min((layer for layer, _ in those_behind), default=0) - self._widest)
        end = min(num_layers, max((layer for _, layer in those_behind), default=0) - 1)
        if first >= end:
            self._fewest.append(self._nothing)
            self._layers.append((num_layers, 0))
            return
        found = self._nothing.copy()
        for option in options:
            stages = self._options(option, first, end)
            np.minimum(found[first:end], stages.min(axis=0, initial=NEVER), out=found[first:end])
        there = np.flatnonzero(found < NEVER)
        self._fewest.append(found)
        self._layers.append((int(there[0]), int(there[-1]) + 1) if len(there) else (num_layers, 0))

    def _options(self, option: Option, first: int, end: int) -> NDArray[np.int32]:
        """Table [w, u]: the fewest stages of the tail that begins at layer first + u with a stage
        of w + 1 layers, or NEVER."""
        most = self._windows[option.group].stages_left[:, first:end]
        rest = behind(self._fewest[option.after], self._costs.num_layers)
        stages = rest[: len(most), first:end] + np.int32(1)
        stages[stages > most] = NEVER
        return stages


class Rows(NamedTuple):
    """The first layer, end layer and group of each stage of several partitions.

    Each partition is a column, and each stage a row. A partition with fewer stages than others has
    rows in front in which all three are 0.
    """

    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]
    groups: NDArray[np.int64]


def rows_of(shapes: Sequence[Shape]) -> Rows:
    lengths = np.array([len(shape) for shape in shapes])
    numbers = chain.from_iterable(chain.from_iterable(shapes))
    pairs = np.fromiter(numbers, dtype=np.int64, count=2 * int(lengths.sum())).reshape(-1, 2)
    there = np.arange(lengths.max()) >= lengths.max() - lengths[:, None]
    ends, groups = np.zeros((2, *there.shape), dtype=np.int64)
    ends[there], groups[there] = pairs[:, 0], pairs[:, 1]
    ends, groups = np.ascontiguousarray(ends.T), np.ascontiguousarray(groups.T)
    return Rows(np.vstack((np.zeros_like(ends[:1]), ends[:-1])), ends, groups)


def fitting(costs: StageCosts, rows: Rows) -> NDArray[np.bool_]:
    """Array over partitions: whether each fits into memory."""
    stages_left = len(rows.ends) - np.arange(len(rows.ends))[:, None]
    in_flight = np.minimum(stages_left, costs.problem.num_microbatches)
    most: NDArray[np.int64] = np.where(rows.groups, 0, in_flight)
    for group in costs.groups:
        there = rows.groups == group
        most[there] = costs.most_in_flight[group][rows.firsts[there], rows.ends[there]]
    fits: NDArray[np.bool_] = np.all(most >= in_flight, axis=0)
    return fits
