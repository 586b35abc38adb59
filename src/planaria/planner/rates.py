"""The partition with the highest steady rate, for very many microbatches and slow transfers.

Stages k to j hand j - k + 1 microbatches around in a cycle, which takes all their seconds and a
round trip over each link between them. 1F1B ends a microbatch in `rate_s` if no cycle takes more
than that for each of its stages:

    sum of t_i over k <= i <= j, and of c_i over k <= i < j,  <=  (j - k + 1) * rate_s.

Of the cycles that begin with the first stage k of a tail, the largest excess over the right side is

    t_k - rate_s + max(0, c_k + excess of the tail behind it).

So a dynamic program over (first layer, devices left) finds the tail with the least excess, exactly.
With memory it knows the stages of that one tail only, and may miss a partition that there is: what
it finds is where a search begins (refine.py), no bound.
"""

import numpy as np

from planaria.planner.problem import Seconds, Shape, StageCosts
from planaria.planner.windows import behind, widest, windows


class Rates:
    """Partitions that end a microbatch in so many seconds, for 1, 2, .. nodes."""

    def __init__(self, costs: StageCosts, rate_s: float) -> None:
        self._costs = costs
        some = windows(costs, 1, rate_s)
        self._over_s = {count: window.busy_s - rate_s for count, window in some.items()}
        self._trips_s = {
            count: [_difference_s(through_s, window.busy_s) for through_s in window.through_s]
            for count, window in some.items()
        }
        self._stages_left = {count: window.stages_left for count, window in some.items()}
        self._nothing = np.full(costs.num_layers + widest(some), np.inf)
        # By devices left and layer: the least excess, and the stages of the tail that has it.
        no_layers = self._nothing.copy()
        no_layers[costs.num_layers] = -np.inf
        self._excess_s = [no_layers]
        self._stages = [np.zeros(len(no_layers), dtype=np.int32)]

    def shape(self, num_nodes: int) -> Shape | None:
        """A partition, None if there is none; with memory, or if none is found."""
        first, devices_left = 0, num_nodes * self._costs.devices_per_node
        while len(self._excess_s) <= devices_left:
            self._append_next()
        if not self._excess_s[devices_left][0] <= 0:
            return None
        shape: list[tuple[int, int]] = []
        while devices_left:
            _, width, count = min(
                (float(option[0]), width, count)
                for count in self._costs.counts_left(devices_left)
                for width, option in enumerate(self._options(devices_left, count, first, first + 1))
            )
            first += width + 1
            shape.append((first, count))
            devices_left -= count
        return tuple(shape)

    def _append_next(self) -> None:
        devices_left, num_layers = len(self._excess_s), self._costs.num_layers
        excess_s, stages = self._nothing.copy(), np.zeros(len(self._nothing), dtype=np.int32)
        layers = np.arange(num_layers)
        for count in self._costs.counts_left(devices_left):
            options_s = self._options(devices_left, count, 0, num_layers)
            if len(options_s):
                widths = options_s.argmin(axis=0)
                least_s = options_s[widths, layers]
                better = np.flatnonzero(least_s < excess_s[:num_layers])
                excess_s[better] = least_s[better]
                ends = better + widths[better] + 1
                stages[better] = self._stages[devices_left - count][ends] + 1
        self._excess_s.append(excess_s)
        self._stages.append(stages)

    def _options(self, devices_left: int, count: int, first: int, end: int) -> Seconds:
        """[w, u]: the excess of the tail from layer first + u on, if its first stage has w + 1
        layers and `count` devices; infinite above 0, and where the stage does not fit."""
        after = devices_left - count
        num_layers = self._costs.num_layers
        over_s = self._over_s[count][:, first:end]
        between_nodes = after % self._costs.devices_per_node == 0
        rest_s = behind(self._excess_s[after], num_layers)[: len(over_s), first:end]
        options_s: Seconds = self._trips_s[count][between_nodes][:, first:end] + rest_s
        np.maximum(options_s, 0.0, out=options_s)
        options_s += over_s
        options_s[options_s > 0] = np.inf
        if self._costs.problem.profile.device_memory_bytes:
            stages = behind(self._stages[after], num_layers)[: len(over_s), first:end]
            options_s[stages >= self._stages_left[count][:, first:end]] = np.inf
        return options_s


def _difference_s(through_s: Seconds, stage_s: Seconds) -> Seconds:
    """The round trips alone; 0 where there is no such stage."""
    nothing = np.zeros_like(stage_s)
    return np.subtract(through_s, stage_s, out=nothing, where=np.isfinite(stage_s))
