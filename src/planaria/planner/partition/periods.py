"""The partition with the shortest steady period, for very many microbatches and slow transfers.

Stages k to j pass j - k + 1 microbatches around in a cycle. One turn takes the seconds t_i of all
these stages and a round trip c_i over each link between them. 1F1B finishes one microbatch every
`period_s` seconds if no cycle takes longer than that per stage:

    sum of t_i over k <= i <= j, plus sum of c_i over k <= i < j,  <=  (j - k + 1) * period_s.

The excess of a cycle is the left side minus the right side. Of the cycles that begin with the first
stage k of a suffix, the largest excess is

    t_k - period_s + max(0, c_k + largest excess of the suffix behind stage k).

So a dynamic program over (first layer, position) finds the suffix with the least such excess.
Without a memory limit that is exact. With one, the program knows for each entry only the number of
stages of that one suffix, and may miss a partition that exists. So the result is a start for the
search of refine.py, and no bound.
"""

import numpy as np

from planaria.planner.partition.positions import Option, Positions
from planaria.planner.partition.windows import sliding_window, widest, windows
from planaria.planner.problem import Counts, Seconds, Shape, StageCosts


class Periods:
    """Partitions that finish one microbatch every period_s seconds or faster."""

    def __init__(self, costs: StageCosts, positions: Positions, period_s: float) -> None:
        self._costs = costs
        self._positions = positions
        tables = windows(costs, 1, period_s)
        self._stage_excess_s = {group: window.busy_s - period_s for group, window in tables.items()}
        self._trips_s = {
            group: [_trips_alone_s(through_s, window.busy_s) for through_s in window.through_s]
            for group, window in tables.items()
        }
        self._stages_left = {group: window.stages_left for group, window in tables.items()}
        self._nothing = np.full(costs.num_layers + widest(tables), np.inf)
        # For each position and layer, the least excess and the number of stages of its suffix.
        no_layers = self._nothing.copy()
        no_layers[costs.num_layers] = -np.inf
        self._excess_s = [no_layers]
        self._stages = [np.zeros(len(no_layers), dtype=np.int32)]

    def shape(self, counts: Counts) -> Shape | None:
        """A partition for these numbers of nodes; None if none is found.

        With a memory limit there may be a partition although none is found.
        """
        first, position = 0, self._positions.position_of(counts)
        while len(self._excess_s) <= position:
            self._append_next()
        if not self._excess_s[position][0] <= 0:
            return None
        shape: list[tuple[int, int]] = []
        while position:
            _, width, group, position = min(
                (float(excess_s[0]), width, option.group, option.after)
                for option in self._positions.options(position)
                for width, excess_s in enumerate(self._options(option, first, first + 1))
            )
            first += width + 1
            shape.append((first, group))
        return tuple(shape)

    def _append_next(self) -> None:
        num_layers = self._costs.num_layers
        excess_s, stages = self._nothing.copy(), np.zeros(len(self._nothing), dtype=np.int32)
        layers = np.arange(num_layers)
        for option in self._positions.options(len(self._excess_s)):
            options_s = self._options(option, 0, num_layers)
            if len(options_s):
                widths = options_s.argmin(axis=0)
                least_s = options_s[widths, layers]
                better = np.flatnonzero(least_s < excess_s[:num_layers])
                excess_s[better] = least_s[better]
                ends = better + widths[better] + 1
                stages[better] = self._stages[option.after][ends] + 1
        self._excess_s.append(excess_s)
        self._stages.append(stages)

    def _options(self, option: Option, first: int, end: int) -> Seconds:
        """Table [w, u]: the least excess of the suffix that begins at layer first + u with a stage
        of w + 1 layers; infinite if it is above 0, or if the stage does not fit into memory."""
        num_layers = self._costs.num_layers
        stage_excess_s = self._stage_excess_s[option.group][:, first:end]
        excess_behind_s = sliding_window(self._excess_s[option.after], num_layers)[
            : len(stage_excess_s), first:end
        ]
        trips_s = self._trips_s[option.group][option.between_nodes]
        options_s: Seconds = trips_s[:, first:end] + excess_behind_s
        np.maximum(options_s, 0.0, out=options_s)
        options_s += stage_excess_s
        options_s[options_s > 0] = np.inf
        if self._costs.has_memory_limit:
            stages = sliding_window(self._stages[option.after], num_layers)[
                : len(stage_excess_s), first:end
            ]
            options_s[stages >= self._stages_left[option.group][:, first:end]] = np.inf
        return options_s


def _trips_alone_s(through_s: Seconds, stage_s: Seconds) -> Seconds:
    """Seconds of the round trips alone; 0 where there is no such stage."""
    nothing = np.zeros_like(stage_s)
    return np.subtract(through_s, stage_s, out=nothing, where=np.isfinite(stage_s))
