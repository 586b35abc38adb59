"""The stages that may stay below a limit, by their number of layers and their first layer.

A program over tails of the model asks for all stages that begin at a layer, of all widths. In
tables [w, u], of layers [u, u + w + 1), what it reads for all u at once lies side by side; and what
is known of the layers behind such stages is a sliding window over a row by layer (`behind`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import Seconds, StageCosts

Number = TypeVar("Number", np.float64, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The stages of one group; infinite, or 0, behind the end of the model.

    Attributes:
        busy_s: [w, u], of a stage with all microbatches.
        through_s: [w, u], of one microbatch in the stage, to the next one and back; by whether the
            link between them lies between nodes.
        stages_left: [w, u], the most with which a stage fits into memory, itself included; 0 for
            those above the limit.
        least_s: [w], the least of busy_s; never falls.
    """

    busy_s: Seconds
    through_s: tuple[Seconds, Seconds]
    stages_left: NDArray[np.int32]
    least_s: Seconds

    def width(self, limit_s: float) -> int:
        """How many layers a stage has at most that stays below a limit."""
        return int(np.searchsorted(self.least_s, limit_s, side="right"))


Windows = Mapping[int, Window]  # By group.


def windows(costs: StageCosts, num_microbatches: int, limit_s: float) -> Windows:
    """The stages that need no more than limit_s for all microbatches; some others among them."""
    return {group: _window(costs, group, num_microbatches, limit_s) for group in costs.groups}


def widest(some: Windows) -> int:
    """The layers of the widest stage, at least 1."""
    return max(1, *(len(window.busy_s) for window in some.values()))


def behind(row: NDArray[Number], num_layers: int) -> NDArray[Number]:
    """[w, u]: what a row by layer has for layer u + w + 1; a view of it."""
    (step,) = row.strides
    shape = (len(row) - num_layers, num_layers)
    # A tenth of the time of as_strided.
    return np.ndarray(shape, row.dtype, buffer=row, offset=step, strides=(step, step))


def _window(costs: StageCosts, group: int, num_microbatches: int, limit_s: float) -> Window:
    num_layers = costs.num_layers
    seconds, most = costs.seconds[group], costs.most_in_flight[group]
    width = 0
    while width < num_layers and (np.diagonal(most, width + 1) > 0).any():
        if num_microbatches * np.diagonal(seconds, width + 1).min() > limit_s:
            break
        width += 1
    firsts = np.arange(num_layers)
    ends = firsts + np.arange(1, width + 1)[:, None]
    is_there = ends <= num_layers
    ends = np.minimum(ends, num_layers)
    stage_s = np.where(is_there, seconds[firsts, ends], np.inf)
    busy_s = num_microbatches * stage_s
    most = np.where(is_there & (busy_s <= limit_s), most[firsts, ends], 0)
    is_enough = most >= costs.problem.num_microbatches
    return Window(
        busy_s=busy_s,
        through_s=(stage_s + _trip_s(costs, False)[ends], stage_s + _trip_s(costs, True)[ends]),
        stages_left=np.where(is_enough, num_layers, most).astype(np.int32),
        least_s=busy_s.min(axis=1, initial=np.inf),
    )


def _trip_s(costs: StageCosts, between_nodes: bool) -> Seconds:
    """Of an output and its gradient, by the layer that it is for."""
    trip_s = costs.round_trip_s(between_nodes=between_nodes)
    trip_s[-1] = 0.0  # Behind the last stage is nothing.
    return trip_s
