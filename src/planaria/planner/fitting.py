"""Which partitions fit into memory, and for how many nodes there is one, fast or slow.

Layers [u, L) fit on the last d devices in r stages if some first stage fits with r stages left, and
the layers behind it fit on the devices that remain in r - 1 stages. A table of truths over (u, r),
one for every number of devices, answers it exactly; it grows as more devices are asked for.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Shape, StageCosts


class Fitting:
    """Whether pipelines of 1, 2, .. nodes have a partition that fits."""

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs
        num_layers = costs.num_layers
        # By devices: [u, r], whether layers [u, L) fit in r stages; from L + 1 on there are none.
        nothing = np.zeros((2 * num_layers + 1, num_layers + 1), dtype=bool)
        nothing[num_layers, 0] = True
        self._fits = [nothing]
        self._stages_left = {count: self._most_stages_left(count) for count in costs.counts}

    def is_feasible(self, num_nodes: int) -> bool:
        """Whether a pipeline of so many nodes has a partition that fits."""
        if num_nodes > self._costs.num_layers:  # Each node needs a stage.
            return False
        num_devices = num_nodes * self._costs.devices_per_node
        while len(self._fits) <= num_devices:
            self._fits.append(self._next())
        return bool(self._fits[num_devices][0].any())

    def _most_stages_left(self, count: int) -> NDArray[np.int64]:
        """[w, u]: with how many stages left a stage of layers [u, u + w + 1) fits, 0 for none."""
        costs = self._costs
        num_layers, most = costs.num_layers, costs.most_in_flight[count]
        widest = max((v - u for u, v in np.argwhere(most > 0).tolist() if v > u), default=0)
        stages_left = np.zeros((widest, num_layers), dtype=np.int64)
        for width in range(widest):
            there = np.diagonal(most, width + 1)
            enough = there >= costs.problem.num_microbatches
            stages_left[width, : len(there)] = np.where(enough, num_layers, there)
        return stages_left

    def _next(self) -> NDArray[np.bool_]:
        costs = self._costs
        devices_left = len(self._fits)
        num_layers = costs.num_layers
        found = np.zeros_like(self._fits[0])
        left = np.arange(1, num_layers + 1)
        for count in costs.counts_left(devices_left):
            rest = self._fits[devices_left - count]
            if not rest.any():
                continue
            for width, most in enumerate(self._stages_left[count]):
                behind = rest[width + 1 : width + 1 + num_layers, :-1]
                found[:num_layers, 1:] |= behind & (left <= most[:, None])
        return found


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
