"""The lowest bound of the partitions that fit, where the memory limit excludes some.

A stage keeps as many microbatches in flight as there are stages from it to the last. So the dynamic
program over suffixes (bound.py) gets a third dimension: an upper bound on the stages of a suffix.
It stays small because only partitions below a limit matter, the bound of some partition that fits.
For these there are, for layers [u, L) at a position,

- a least number of stages, as fewer do not fit themselves (fewest_stages.py), and
- a largest number of stages, as with more the stages in front do not fit (`_max_stages`).

At each position the first is not above the second for few layers u only, and few numbers of stages
lie between them. Exact: no partition with a bound below the limit is left out.

Source: Odyssey, equation 14, for what a stage holds.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from planaria.planner.partition.fewest_stages import FewestStages
from planaria.planner.partition.positions import Option, Positions
from planaria.planner.partition.windows import StageWindow, Windows, widest, windows
from planaria.planner.problem import Counts, Seconds, Shape, StageCosts


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    """The lowest bounds of suffixes at a position; suffixes that are not in the table have none.

    Attributes:
        bounds_s: [r, u], lowest bound of layers [first_layer + u, L) in at most first_stages + r
            stages, in seconds; infinite if there is none. The last row also holds for more stages.
    """

    first_layer: int
    first_stages: int
    bounds_s: Seconds


@dataclass(frozen=True, slots=True, eq=False)
class SearchLimits:
    """What keeps the search small.

    Attributes:
        bound_s: upper bound on the result, in seconds; some partition that fits must have a bound
            as low.
        fewest_stages: the fewest stages of suffixes, over at least all stages that bound_s allows.
        before_s: [u], least seconds of a microbatch, forward and backward, in the layers before u.
    """

    bound_s: float
    fewest_stages: FewestStages
    before_s: Seconds


class MemoryBoundSearch:
    """The lowest bound of the whole model on given nodes, of the partitions that fit.

    Args:
        counts: number of nodes of each kind.
        num_microbatches: number of microbatches of the pipeline.
    """

    def __init__(
        self,
        costs: StageCosts,
        positions: Positions,
        counts: Counts,
        *,
        num_microbatches: int,
        limits: SearchLimits,
    ) -> None:
        self._positions = positions
        self._windows = {
            group: _within_limits(window, limits.bound_s - limits.before_s[:-1])
            for group, window in windows(costs, num_microbatches, limits.bound_s).items()
        }
        max_stages = _max_stages(
            costs.num_layers, positions, self._windows, positions.position_of(counts)
        )
        self._bands = [_Band(costs.num_layers, 0, np.zeros((1, 1)))]
        for position in range(1, len(max_stages)):
            min_stages = limits.fewest_stages.fewest(position)
            self._bands.append(self._band(position, min_stages, max_stages[position]))

    def lowest(self) -> tuple[float, Shape]:
        """The lowest bound, in seconds, and a partition that has it in the fewest stages."""
        band = self._bands[-1]
        row = int(band.bounds_s[:, 0].argmin())
        return float(band.bounds_s[row, 0]), self._shape(band.first_stages + row)

    def _shape(self, stages_left: int) -> Shape:
        """A partition with the lowest bound of those that have at most stages_left stages, and
        whose first stage fits with as many."""
        shape: list[tuple[int, int]] = []
        first, position = 0, len(self._bands) - 1
        while position:
            choices = []
            for option in self._positions.options(position):
                stage = slice(first, first + 1)
                bounds_s = self._options(option, stage, np.array([stages_left]))
                if len(bounds_s):
                    width = int(bounds_s[:, 0, 0].argmin())
                    choices.append(
                        (float(bounds_s[width, 0, 0]), width, option.group, option.after)
                    )
            _, width, group, position = min(choices)
            first += width + 1
            shape.append((first, group))
            stages_left = self._stages_needed(position, first, stages_left - 1)
        return tuple(shape)

    def _stages_needed(self, position: int, first: int, max_stages: int) -> int:
        """The fewest stages with which a suffix has the same bound as with `max_stages` stages."""
        band = self._bands[position]
        bounds_s = band.bounds_s[: max_stages - band.first_stages + 1, first - band.first_layer]
        return band.first_stages + int(np.argmax(bounds_s == bounds_s[-1]))

    def _band(
        self, position: int, min_stages: NDArray[np.int32], max_stages: NDArray[np.int32]
    ) -> _Band:
        """The lowest bounds of suffixes at a position.

        Args:
            min_stages: [u], the fewest stages in which layers [u, L) fit.
            max_stages: [u], the most stages of layers [u, L) with which stages in front of them
                fit.
        """
        layers = np.flatnonzero(min_stages <= max_stages)
        if not len(layers):
            return _Band(0, 0, np.full((1, 1), np.inf))
        first, end = int(layers[0]), int(layers[-1]) + 1
        stages = np.arange(min_stages[layers].min(), max_stages[layers].max() + 1)
        bounds_s = np.full((len(stages), end - first), np.inf)
        for option in self._positions.options(position):
            options_s = self._options(option, slice(first, end), stages)
            np.minimum(bounds_s, options_s.min(axis=0, initial=np.inf), out=bounds_s)
        return _Band(first, int(stages[0]), np.minimum.accumulate(bounds_s, axis=0))

    def _options(self, option: Option, layers: slice, stages: NDArray[np.int64]) -> Seconds:
        """Table [w, r, u] of the lowest bounds of layers [u, L) if the first stage has layers
        [u, u + w + 1) and must fit with stages[r] stages from it to the last."""
        window = self._windows[option.group]
        stages_left = window.stages_left[:, layers]
        fit = np.flatnonzero((stages_left >= stages[0]).any(axis=1))
        width = int(fit[-1]) + 1 if len(fit) else 0
        through_s = window.through_s[option.between_nodes][:width, None, layers]
        busy_s = window.busy_s[:width, None, layers]
        options_s = through_s + self._behind(option.after, width, layers, stages)
        np.maximum(options_s, busy_s, out=options_s)
        options_s[stages_left[:width, None] < stages[:, None]] = np.inf
        return options_s

    def _behind(
        self, position: int, width: int, layers: slice, stages: NDArray[np.int64]
    ) -> Seconds:
        """Table [w, r, u] of the lowest bounds of layers [u + w + 1, L) in at most stages[r] - 1
        stages."""
        band = self._bands[position]
        num_rows, num_columns = band.bounds_s.shape
        num_layers = layers.stop - layers.start
        block_s = np.full((len(stages), num_layers + max(0, width - 1)), np.inf)
        rows = np.minimum(stages - 1 - band.first_stages, num_rows - 1)
        has_row = rows >= 0
        first = max(layers.start + 1, band.first_layer)
        end = min(layers.start + 1 + block_s.shape[1], band.first_layer + num_columns)
        if first < end:
            source = slice(first - band.first_layer, end - band.first_layer)
            target = slice(first - layers.start - 1, end - layers.start - 1)
            block_s[has_row, target] = band.bounds_s[rows[has_row], source]
        row_step, step = block_s.strides
        shape = (width, len(stages), num_layers)
        return as_strided(block_s, shape, (step, row_step, step), writeable=False)


def _within_limits(window: StageWindow, limits_s: Seconds) -> StageWindow:
    """The window with stages_left 0 for stages that are busy for longer than the limit of their
    first layer."""
    is_below = window.busy_s <= limits_s
    return replace(window, stages_left=np.where(is_below, window.stages_left, np.int32(0)))


def _max_stages(
    num_layers: int, positions: Positions, tables: Windows, start: int
) -> list[NDArray[np.int32]]:
    """The most stages of layers [u, L) with which some stages for the layers before u fit.

    Args:
        start: position of the whole pipeline.

    Returns:
        an array over u for each position from 0 to start; 0 where no stages fit.
    """
    max_stages = [np.zeros(num_layers + 1, dtype=np.int32) for _ in range(start + 1)]
    max_stages[start][0] = num_layers
    skewed = np.zeros((widest(tables), 2 * num_layers), dtype=np.int32)
    row_step, step = skewed.strides
    for position in range(start, 0, -1):
        if not max_stages[position].any():
            continue
        for option in positions.options(position):
            stages_left = tables[option.group].stages_left
            width = len(stages_left)
            # Stages [w, u] and [w - 1, u + 1] end at the same layer. In this skewed view all stages
            # with one end are written to one column of `skewed`.
            by_first = as_strided(skewed, (width, num_layers), (row_step + step, step))
            np.minimum(stages_left, max_stages[position][:-1], out=by_first)
            ends = skewed[:width, :num_layers].max(axis=0, initial=0) - 1
            np.maximum(max_stages[option.after][1:], ends, out=max_stages[option.after][1:])
    return max_stages
