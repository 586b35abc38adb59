"""Which partitions fit into memory, and in how few stages the model fits on so many nodes.

A stage keeps as many microbatches in flight as stages are left. So of two tails of the model on
the same devices that with fewer stages lets more fit in front of it, and it is enough to know the
fewest stages in which layers [u, L) fit on the last d devices: one number for each u and d, which
follows from those of the tails behind the first stage.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Shape, StageCosts
from planaria.planner.windows import Windows, behind, widest

NEVER: Final = 1 << 30  # Stages of a tail that does not fit.


class Fitting:
    """The fewest stages that fit, for pipelines of 1, 2, .. nodes.

    Args:
        some: the stages that there may be.
    """

    def __init__(self, costs: StageCosts, some: Windows) -> None:
        self._costs = costs
        self._windows = some
        self._widest = widest(self._windows)
        self._nothing = np.full(costs.num_layers + self._widest, NEVER, dtype=np.int32)
        no_layers = self._nothing.copy()
        no_layers[costs.num_layers] = 0
        self._fewest = [no_layers]
        # By devices: the tails that fit begin in layers [first, end), if in any.
        self._layers = [(costs.num_layers, costs.num_layers + 1)]

    def is_feasible(self, num_nodes: int) -> bool:
        """Whether a pipeline of so many nodes has a partition that fits."""
        if num_nodes > self._costs.num_layers:  # Each node needs a stage.
            return False
        return bool(self.fewest(num_nodes * self._costs.devices_per_node)[0] < NEVER)

    def fewest(self, devices_left: int) -> NDArray[np.int32]:
        """[u]: the fewest stages of layers [u, L) on so many devices, or NEVER."""
        while len(self._fewest) <= devices_left:
            self._append_next()
        return self._fewest[devices_left][: self._costs.num_layers + 1]

    def shape(self, num_nodes: int) -> Shape | None:
        """A partition with the fewest stages, None if there is none."""
        if not self.is_feasible(num_nodes):
            return None
        shape: list[tuple[int, int]] = []
        first, devices_left = 0, num_nodes * self._costs.devices_per_node
        while devices_left:
            _, first, count = min(
                (int(option[0]), first + width + 1, count)
                for count in self._costs.counts_left(devices_left)
                for width, option in enumerate(self._options(devices_left, count, first, first + 1))
            )
            shape.append((first, count))
            devices_left -= count
        return tuple(shape)

    def _append_next(self) -> None:
        devices_left, num_layers = len(self._fewest), self._costs.num_layers
        counts = self._costs.counts_left(devices_left)
        those_behind = [self._layers[devices_left - count] for count in counts]
        first = max(0, min(layer for layer, _ in those_behind) - self._widest)
        end = min(num_layers, max(layer for _, layer in those_behind) - 1)
        if first >= end:
            self._fewest.append(self._nothing)
            self._layers.append((num_layers, 0))
            return
        found = self._nothing.copy()
        for count in counts:
            options = self._options(devices_left, count, first, end)
            np.minimum(found[first:end], options.min(axis=0, initial=NEVER), out=found[first:end])
        there = np.flatnonzero(found < NEVER)
        self._fewest.append(found)
        self._layers.append((int(there[0]), int(there[-1]) + 1) if len(there) else (num_layers, 0))

    def _options(self, devices_left: int, count: int, first: int, end: int) -> NDArray[np.int32]:
        """[w, u]: the fewest stages of the tail from layer first + u on, whose first stage has
        w + 1 layers and `count` devices."""
        most = self._windows[count].stages_left[:, first:end]
        rest = behind(self._fewest[devices_left - count], self._costs.num_layers)
        options = rest[: len(most), first:end] + np.int32(1)
        options[options > most] = NEVER
        return options


class Rows(NamedTuple):
    """Partitions, a column each: first layer, end layer and devices of their stages. In front of
    the short ones all three are 0."""

    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]
    counts: NDArray[np.int64]


def rows_of(shapes: Sequence[Shape]) -> Rows:
    lengths = np.array([len(shape) for shape in shapes])
    numbers = chain.from_iterable(chain.from_iterable(shapes))
    pairs = np.fromiter(numbers, dtype=np.int64, count=2 * int(lengths.sum())).reshape(-1, 2)
    there = np.arange(lengths.max()) >= lengths.max() - lengths[:, None]
    ends, counts = np.zeros((2, *there.shape), dtype=np.int64)
    ends[there], counts[there] = pairs[:, 0], pairs[:, 1]
    ends, counts = np.ascontiguousarray(ends.T), np.ascontiguousarray(counts.T)
    return Rows(np.vstack((np.zeros_like(ends[:1]), ends[:-1])), ends, counts)


def fitting(costs: StageCosts, rows: Rows) -> NDArray[np.bool_]:
    """Which of the partitions fit into memory."""
    stages_left = len(rows.ends) - np.arange(len(rows.ends))[:, None]
    in_flight = np.minimum(stages_left, costs.problem.num_microbatches)
    most: NDArray[np.int64] = np.where(rows.counts, 0, in_flight)
    for count in costs.counts:
        there = rows.counts == count
        most[there] = costs.most_in_flight[count][rows.firsts[there], rows.ends[there]]
    fits: NDArray[np.bool_] = np.all(most >= in_flight, axis=0)
    return fits
