"""Tables of the stages whose time stays below a limit, by number of layers and first layer.

The dynamic programs of this package work on suffixes of the model, that is on layers [u, L). At
each layer u they need the stages of every width that begin there. Entry [w, u] of a table here is
the stage of layers [u, u + w + 1): a program reads a row for all u at once, and a row is contiguous
in memory. An array over layers, read at the end layer of each such stage, is a sliding window over
that array (`sliding_window`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Seconds, StageCosts

Number = TypeVar("Number", np.float64, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class StageWindow:
    """The stages of one group. Entry [w, u] of a table is the stage of layers [u, u + w + 1).

    Seconds are infinite, and stages_left is 0, where u + w + 1 exceeds the number of layers.

    Attributes:
        busy_s: [w, u], seconds that the stage takes for all microbatches.
        through_s: two tables [w, u], seconds of one microbatch in the stage (forward and backward)
            plus the round trip to the next stage; first for a link within a node, then for one
            between nodes.
        stages_left: [w, u], the largest number of stages from this one to the last, itself
            included, with which the stage fits into memory; 0 if busy_s is above the limit.
        least_s: [w], minimum of busy_s over u; it never falls as w grows.
    """

    busy_s: Seconds
    through_s: tuple[Seconds, Seconds]
    stages_left: NDArray[np.int32]
    least_s: Seconds

    def width(self, limit_s: float) -> int:
        """The largest number of layers with which some stage has busy_s of at most limit_s."""
        return int(np.searchsorted(self.least_s, limit_s, side="right"))


Windows = Mapping[int, StageWindow]  # The keys are groups.


def windows(costs: StageCosts, num_microbatches: int, limit_s: float) -> Windows:
    """Tables with every stage that fits into memory and takes at most limit_s for all microbatches.

    They also contain slower stages of the same widths; these have stages_left 0.
    """
    return {group: _window(costs, group, num_microbatches, limit_s) for group in costs.groups}


def widest(tables: Windows) -> int:
    """Number of layers of the widest stage in any of the tables, at least 1."""
    return max((1, *(len(window.busy_s) for window in tables.values())))


def sliding_window(row: NDArray[Number], num_layers: int) -> NDArray[Number]:
    """View [w, u] of an array over layers, whose entry is row[u + w + 1]: that of the layer behind
    the stage of layers [u, u + w + 1)."""
    (step,) = row.strides
    shape = (len(row) - num_layers, num_layers)
    # This takes a tenth of the time of as_strided.
    return np.ndarray(shape, row.dtype, buffer=row, offset=step, strides=(step, step))


def _window(costs: StageCosts, group: int, num_microbatches: int, limit_s: float) -> StageWindow:
    num_layers = costs.num_layers
    seconds, max_in_flight = costs.seconds[group], costs.most_in_flight[group]
    width = 0
    while width < num_layers and (np.diagonal(max_in_flight, width + 1) > 0).any():
        if num_microbatches * np.diagonal(seconds, width + 1).min() > limit_s:
            break
        width += 1
    firsts = np.arange(num_layers)
    ends = firsts + np.arange(1, width + 1)[:, None]
    is_there = ends <= num_layers
    ends = np.minimum(ends, num_layers)
    stage_s = np.where(is_there, seconds[firsts, ends], np.inf)
    busy_s = num_microbatches * stage_s
    max_in_flight = np.where(is_there & (busy_s <= limit_s), max_in_flight[firsts, ends], 0)
    is_unlimited = max_in_flight >= costs.problem.num_microbatches
    return StageWindow(
        busy_s=busy_s,
        through_s=(stage_s + _trip_s(costs, False)[ends], stage_s + _trip_s(costs, True)[ends]),
        stages_left=np.where(is_unlimited, num_layers, max_in_flight).astype(np.int32),
        least_s=busy_s.min(axis=1, initial=np.inf),
    )


def _trip_s(costs: StageCosts, between_nodes: bool) -> Seconds:
    """Seconds to send an output to the stage that begins with layer v and its gradient back, shape
    [L + 1]; 0 for v = L."""
    trip_s = costs.round_trip_s(between_nodes=between_nodes)
    trip_s[-1] = 0.0  # The last stage sends no output.
    return trip_s
