"""The timeline of a pipeline as boxes in lanes, and the axis of time that they stand on.

A lane is a stage. What would be too narrow to see or too much for a file is cut out: of time the
middle, where an iteration repeats itself, and of many lanes those in the middle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from planaria.schedule.action import BACKWARD, FORWARD, Kind
from planaria.show.alike import Alike

BOXES_MAX: Final = 14_000  # Of a picture: 65 bytes each, in an SVG.
LANES_MAX: Final = 96  # Of a picture, so that the page stays a page.
TIMELINES_MAX: Final = 4

_LANES_MIN: Final = 8
_LANES_OF_ONE_MAX: Final = 64
_PERIOD_WHOLE_PT: Final = 8.0  # A microbatch's forward and backward take this much, or it is cut
_PERIOD_CUT_PT: Final = 14.0  # so that they take this much, and numbers fit.
_WORTH_CUTTING: Final = 0.8


class Box(NamedTuple):
    """A forward or backward on its stage's lane."""

    stage: int
    kind: Kind
    microbatch: int
    start_s: float
    end_s: float


class Window(NamedTuple):
    """A piece of the iteration and where on the page it lies."""

    start_s: float
    end_s: float
    left: float
    width: float

    def place(self, time_s: float) -> float:
        """Where a time lies; times outside lie on the nearer edge."""
        inside_s = min(max(time_s, self.start_s), self.end_s) - self.start_s
        return self.left + self.width * inside_s / ((self.end_s - self.start_s) or 1.0)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Some or all of the lanes of alike pipelines.

    Attributes:
        stages: in order; a number is missing where lanes are left out.
    """

    group: Alike
    stages: tuple[int, ...]

    @property
    def num_left_out(self) -> int:
        return len(self.group.stages_s) - len(self.stages)


def drawn_lanes(groups: Sequence[Alike]) -> tuple[Lanes, ...]:
    """The first few timelines, with the lanes for which there is room."""
    drawn = groups[:TIMELINES_MAX]
    return tuple(_lanes(group, _num_lanes_max(group, len(drawn))) for group in drawn)


def _num_lanes_max(group: Alike, num_timelines: int) -> int:
    """The lanes that leave enough boxes for each to be shown in its warmup and its cooldown."""
    num_boxes = 2 * min(_num_periods(group), group.num_microbatches)
    affordable = max(_LANES_MIN, BOXES_MAX // num_timelines // num_boxes)
    return min(_LANES_OF_ONE_MAX, LANES_MAX // num_timelines, affordable)


def _num_periods(group: Alike) -> int:
    """Until the last stage is in its steady part, the first one is too, and a few more."""
    return len(group.stages_s) + 8


def _lanes(group: Alike, num_max: int) -> Lanes:
    """All lanes, or as many of the first as of the last."""
    num_stages = len(group.stages_s)
    if num_stages <= num_max:
        return Lanes(group, tuple(range(num_stages)))
    half = num_max // 2
    return Lanes(group, (*range(half), *range(num_stages - half, num_stages)))


def lane_boxes(group: Alike, stage: int, windows: Sequence[Window]) -> Iterator[Box]:
    """The boxes of a lane of which some part lies in a window."""
    seconds, ends = group.seconds, group.ends
    for kind, lasts_s, ends_s in (
        (FORWARD, seconds.forward_s[stage], ends.forward_s[stage]),
        (BACKWARD, seconds.backward_s[stage], ends.backward_s[stage]),
    ):
        starts_s = ends_s - lasts_s
        inside = [(starts_s < w.end_s) & (ends_s > w.start_s) for w in windows]
        for microbatch in np.flatnonzero(np.logical_or.reduce(inside)).tolist():
            start_s, end_s = float(starts_s[microbatch]), float(ends_s[microbatch])
            yield Box(stage, kind, microbatch, start_s, end_s)


def time_windows(
    drawn: Sequence[Lanes], *, left: float, width: float, gap: float
) -> tuple[Window, ...]:
    """What is shown of an iteration: all of it, or its beginning and its end."""
    end_s = max(one.group.iteration_s for one in drawn)
    half_s = _half_s(drawn, end_s, width)
    if 2 * half_s >= _WORTH_CUTTING * end_s:
        return (Window(0.0, end_s, left, width),)
    half = (width - gap) / 2
    return (
        Window(0.0, half_s, left, half),
        Window(end_s - half_s, end_s, left + half + gap, half),
    )


def _half_s(drawn: Sequence[Lanes], end_s: float, width: float) -> float:
    """Seconds to show from either end."""
    period_s = max(second for one in drawn for second in one.group.stages_s)
    affordable_s = _affordable_s(drawn, end_s)
    if width * period_s >= _PERIOD_WHOLE_PT * end_s:
        return min(end_s, affordable_s)
    num_periods = max(width / 2 / _PERIOD_CUT_PT, *(_num_periods(one.group) for one in drawn))
    return min(num_periods * period_s, affordable_s)


def _affordable_s(drawn: Sequence[Lanes], end_s: float) -> float:
    """Seconds from either end in which there are no more boxes than a picture may have."""
    from_ends_s = []
    for one in drawn:
        seconds, ends, shown = one.group.seconds, one.group.ends, list(one.stages)
        for lasts_s, ends_s in (
            (seconds.forward_s, ends.forward_s[shown]),
            (seconds.backward_s, ends.backward_s[shown]),
        ):
            starts_s = ends_s - np.array(lasts_s)[shown, None]
            from_ends_s.append(np.minimum(starts_s, end_s - ends_s).ravel())
    nearest_s = np.concatenate(from_ends_s)
    if len(nearest_s) <= BOXES_MAX:
        return end_s
    return float(np.partition(nearest_s, BOXES_MAX)[BOXES_MAX])
