"""The timelines of a plan's pipelines: a lane per stage, with a box for each forward and backward.

The tint of a box depends on its microbatch, so that a microbatch can be followed from lane to lane;
boxes that are wide enough have its number. All timelines share one axis of time. Gaps between boxes
are bubbles. Where boxes would be too narrow or a file too large, the middle of the iteration is cut
out, in which the schedule repeats itself; of many lanes, those in the middle are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Final, NamedTuple

import numpy as np

from planaria.core.plan import PipelineTemplate, Stage
from planaria.estimator.makespan import ActionEnds, action_ends
from planaria.planner.times import Iteration, Reduction
from planaria.schedule.action import BACKWARD, FORWARD, Kind
from planaria.show.alike import AlikePipelines
from planaria.show.pictures.page import (
    GRID_COLOUR,
    GROUND_COLOUR,
    LABEL,
    LEFT_PT,
    NAME,
    PLOT_LEFT_PT,
    PLOT_RIGHT_PT,
    PLOT_WIDTH_PT,
    REDUCTION_COLOUR,
    SMALL,
    Font,
    Page,
    Rectangle,
)
from planaria.show.words import (
    count_text,
    layers_text,
    nice_step,
    seconds_text,
    seconds_unit,
    share_text,
)

TIMELINES_MAX: Final = 4

_LANES_MAX: Final = 96  # Lanes of a picture, so that it is not too high.
_LANES_OF_ONE_MAX: Final = 64
_LANES_OF_ONE_MIN: Final = 4
_BOXES_MAX: Final = 20_000  # Approximately; a box takes about 65 bytes of an SVG.
# If a microbatch's forward and backward were narrower than the first width in the whole iteration,
# the middle is cut out so that they get the second one, in which numbers fit.
_PERIOD_WHOLE_PT: Final = 8.0
_PERIOD_CUT_PT: Final = 14.0
_WORTH_CUTTING: Final = 0.8
_NUMBERS_MAX: Final = 2_000
_CUT_PT: Final = 16.0
_TICK_PT: Final = 70.0
_LEFT_OUT_PT: Final = 14.0

_LANE_PT: Final = {16: 15.0, 40: 11.0, 56: 8.0, _LANES_MAX: 5.5}  # Keys: largest number of lanes.
_NUMBERED_PT: Final = 10.0  # On lower lanes, numbers would be too small to read.

# Microbatches take the tints from first to last, then back to the first, and so on.
_FORWARD_TINTS: Final = ("#2f87bd", "#549fcc", "#7cb7da", "#a3cde6")
_BACKWARD_TINTS: Final = ("#e5a11a", "#edb647", "#f3ca77", "#f8dea8")


class Box(NamedTuple):
    """A forward or backward on its stage's lane."""

    stage: int
    kind: Kind
    microbatch: int
    start_s: float
    end_s: float


class TimeWindow(NamedTuple):
    """A part of the iteration and its place on the page.

    Attributes:
        left, width: place on the page, points.
    """

    start_s: float
    end_s: float
    left: float
    width: float

    def place(self, time_s: float) -> float:
        """The x of a time; a time outside the window gets the nearer edge."""
        inside_s = min(max(time_s, self.start_s), self.end_s) - self.start_s
        return self.left + self.width * inside_s / ((self.end_s - self.start_s) or 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """The lanes that are drawn of a group of alike pipelines.

    Attributes:
        ends: end times of every forward and backward of one pipeline.
        stages: indices of the stages that are drawn, ascending.
    """

    group: AlikePipelines
    ends: ActionEnds
    stages: tuple[int, ...]

    @property
    def num_left_out(self) -> int:
        return len(self.group.stages_s) - len(self.stages)

    @property
    def computed_s(self) -> float:
        """When the last backward ends."""
        return float(self.ends.backward_s.max())


class _Lane(NamedTuple):
    """The place of a lane on the page.

    Attributes:
        font: font of the numbers on boxes.
        numbered_width: least width of a box that gets a number.
    """

    top: float
    height: float
    font: Font
    numbered_width: float


class _Number(NamedTuple):
    """A microbatch's number on one of its boxes."""

    microbatch: int
    middle: float
    baseline: float
    font: Font


def drawn_lanes(groups: Sequence[AlikePipelines]) -> tuple[Lanes, ...]:
    """The lanes of the first TIMELINES_MAX groups, as many as there is room for."""
    drawn = groups[:TIMELINES_MAX]
    affordable = _BOXES_MAX // (4 * _num_periods(drawn) * len(drawn))
    most = min(_LANES_OF_ONE_MAX, _LANES_MAX // len(drawn), max(_LANES_OF_ONE_MIN, affordable))
    return tuple(
        Lanes(
            group,
            action_ends(group.seconds, group.num_microbatches),
            _shown_stages(len(group.stages_s), most),
        )
        for group in drawn
    )


def _num_periods(drawn: Sequence[AlikePipelines]) -> int:
    """The number of periods (forward and backward of one microbatch) to show at the beginning and
    at the end: enough for all stages to reach the steady state, and a few more."""
    depth = max(len(group.stages_s) for group in drawn)
    return max(depth + 8, int(PLOT_WIDTH_PT / 2 / _PERIOD_CUT_PT))


def _shown_stages(num_stages: int, most: int) -> tuple[int, ...]:
    """The indices of all stages, or of equally many first and last ones if there are too many."""
    if num_stages <= most:
        return tuple(range(num_stages))
    return (*range(most // 2), *range(num_stages - most // 2, num_stages))


def time_windows(drawn: Sequence[Lanes], iteration_s: float) -> tuple[TimeWindow, ...]:
    """The parts of an iteration that are shown: all of it, or its beginning and its end."""
    whole = (TimeWindow(0.0, iteration_s, PLOT_LEFT_PT, PLOT_WIDTH_PT),)
    period_s = min(max(group_lanes.group.stages_s) for group_lanes in drawn)
    if not period_s or PLOT_WIDTH_PT * period_s >= _PERIOD_WHOLE_PT * iteration_s:
        return whole
    first_s = _num_periods([group_lanes.group for group_lanes in drawn]) * period_s
    computed_s = max(group_lanes.computed_s for group_lanes in drawn)
    if 2 * first_s >= _WORTH_CUTTING * computed_s:
        return whole
    last_s = first_s + iteration_s - computed_s
    pt_per_s = (PLOT_WIDTH_PT - _CUT_PT) / (first_s + last_s)
    return (
        TimeWindow(0.0, first_s, PLOT_LEFT_PT, pt_per_s * first_s),
        TimeWindow(
            iteration_s - last_s, iteration_s, PLOT_RIGHT_PT - pt_per_s * last_s, pt_per_s * last_s
        ),
    )


def lane_boxes(group_lanes: Lanes, stage: int, windows: Sequence[TimeWindow]) -> Iterator[Box]:
    """The forwards and backwards of a lane that are at least partly inside a window."""
    seconds = group_lanes.group.seconds
    for kind, duration_s, ends_s in (
        (FORWARD, seconds.forward_s[stage], group_lanes.ends.forward_s[stage]),
        (BACKWARD, seconds.backward_s[stage], group_lanes.ends.backward_s[stage]),
    ):
        starts_s = ends_s - duration_s
        inside = [(starts_s < w.end_s) & (ends_s > w.start_s) for w in windows]
        for microbatch in np.flatnonzero(np.logical_or.reduce(inside)).tolist():
            start_s, end_s = float(starts_s[microbatch]), float(ends_s[microbatch])
            yield Box(stage, kind, microbatch, start_s, end_s)


def lane_reductions(stage: Stage, iteration: Iteration) -> Iterator[Reduction]:
    """The reductions that contain a layer of a stage."""
    held = range(stage.first_layer, stage.end_layer)
    return (
        reduction
        for reduction in iteration.reductions
        if not set(held).isdisjoint(reduction.bucket.layers)
    )


def draw_timelines(
    page: Page,
    drawn: Sequence[Lanes],
    windows: Sequence[TimeWindow],
    *,
    iteration: Iteration,
    top: float,
) -> float:
    """Draws the timelines one below the other.

    Returns:
        the y at which they end.
    """
    num_lanes = sum(len(group_lanes.stages) for group_lanes in drawn)
    height = next(height for most, height in _LANE_PT.items() if num_lanes <= most)
    numbers: list[_Number] = []
    for group_lanes in drawn:
        _draw_title(page, group_lanes, iteration_s=iteration.end_s, baseline=top + 9)
        lanes = _lanes_by_stage(page, group_lanes, top=top + 16, height=height)
        _draw_grounds(page, group_lanes, lanes=lanes, windows=windows)
        for index, lane in lanes.items():
            for box in lane_boxes(group_lanes, index, windows):
                numbers += _draw_box(page, box, lane=lane, windows=windows)
            for reduction in lane_reductions(group_lanes.group.template.stages[index], iteration):
                _draw_reduction(page, reduction, lane=lane, windows=windows)
        bottom = lanes[group_lanes.stages[-1]].top + height
        draw_axis(page, windows, top=bottom + 3)
        top = bottom + 34
    _draw_numbers(page, numbers)
    return top - 14


def _draw_title(page: Page, group_lanes: Lanes, *, iteration_s: float, baseline: float) -> None:
    group = group_lanes.group
    page.text((LEFT_PT, baseline), group.name, NAME)
    facts = (
        f"{group.work}, computed in {seconds_text(group_lanes.computed_s)}; "
        f"{share_text(group.bubble_share(iteration_s))} bubbles"
    )
    page.text((LEFT_PT + page.text_width(group.name, NAME) + 8, baseline), facts, LABEL)


def _lanes_by_stage(
    page: Page, group_lanes: Lanes, *, top: float, height: float
) -> dict[int, _Lane]:
    """The lane of each drawn stage, with gaps between nodes and where lanes are left out."""
    template = group_lanes.group.template
    font = Font(0.62 * height if height < 11 else 7.0)
    # The longest number decides for all boxes of a lane: it would be confusing if microbatch 9 had
    # a number and microbatch 10 had none.
    widest = page.text_width("0" * len(str(group_lanes.group.num_microbatches - 1)), font) + 1.5
    lanes: dict[int, _Lane] = {}
    num_devices = 0
    for stage_index, stage in enumerate(template.stages):
        if stage_index in group_lanes.stages:
            at_node = num_devices % template.devices_per_node == 0 < template.devices_per_node - 1
            if lanes:
                top += height * (1.32 if at_node else 1.12)
            if lanes and stage_index - 1 not in lanes:
                top += _LEFT_OUT_PT
            numbered_width = widest if height >= _NUMBERED_PT else float("inf")
            lanes[stage_index] = _Lane(top, height, font, numbered_width)
        num_devices += stage.num_devices
    return lanes


def _draw_grounds(
    page: Page, group_lanes: Lanes, *, lanes: Mapping[int, _Lane], windows: Sequence[TimeWindow]
) -> None:
    """Draws the background of the lanes, and their names where there is room."""
    labelled = float("-inf")
    for stage, lane in lanes.items():
        for window in windows:
            ground = Rectangle(window.left, lane.top, window.width, lane.height)
            page.ground(GROUND_COLOUR, ground)
        baseline = lane.top + lane.height / 2 + 2.6
        if stage and stage - 1 not in lanes:
            text = f"{count_text(group_lanes.num_left_out, 'stage')} left out"
            page.text((PLOT_LEFT_PT - 8, lane.top - 5), text, LABEL, align="right")
        if baseline - labelled >= LABEL.size_pt + 1:
            text = _stage_text(group_lanes.group.template, stage)
            page.text((PLOT_LEFT_PT - 8, baseline), text, LABEL, align="right")
            labelled = baseline


def _stage_text(template: PipelineTemplate, stage_index: int) -> str:
    stage = template.stages[stage_index]
    devices = f" \u00d7{stage.num_devices}" if template.devices_per_node > 1 else ""
    return layers_text(stage) + devices


def box_colour(kind: Kind, microbatch: int) -> str:
    """The tint of a microbatch's forward or backward."""
    tints = _FORWARD_TINTS if kind is FORWARD else _BACKWARD_TINTS
    turn = len(tints) - 1
    return tints[turn - abs(turn - microbatch % (2 * turn))]


def _draw_box(
    page: Page, box: Box, *, lane: _Lane, windows: Sequence[TimeWindow]
) -> Iterator[_Number]:
    """Draws the parts of a box that are inside windows.

    Yields:
        the box's number for each part in which it fits.
    """
    colour = box_colour(box.kind, box.microbatch)
    for drawn in _rectangles(box.start_s, box.end_s, lane=lane, windows=windows):
        page.box(colour, drawn)
        if lane.numbered_width <= drawn.width:
            baseline = lane.top + lane.height / 2 + 0.36 * lane.font.size_pt
            yield _Number(box.microbatch, drawn.left + drawn.width / 2, baseline, lane.font)


def _draw_reduction(
    page: Page, reduction: Reduction, *, lane: _Lane, windows: Sequence[TimeWindow]
) -> None:
    for drawn in _rectangles(reduction.start_s, reduction.end_s, lane=lane, windows=windows):
        page.box(REDUCTION_COLOUR, drawn)


def _rectangles(
    start_s: float, end_s: float, *, lane: _Lane, windows: Sequence[TimeWindow]
) -> Iterator[Rectangle]:
    """The parts of a span of time that are inside windows, with a thin gap at both ends."""
    for window in windows:
        left, right = window.place(start_s), window.place(end_s)
        seam = min(0.35, (right - left) / 10)
        if right > left:
            yield Rectangle(left + seam, lane.top, right - left - 2 * seam, lane.height)


def _draw_numbers(page: Page, numbers: Sequence[_Number]) -> None:
    """Draws the numbers, only of every second, fifth, .. microbatch if there are too many."""
    step = ceil(nice_step(len(numbers), _NUMBERS_MAX))
    for number in numbers:
        if number.microbatch % step == 0:
            place = (number.middle, number.baseline)
            page.text(place, str(number.microbatch), number.font, align="center")


def draw_axis(page: Page, windows: Sequence[TimeWindow], *, top: float) -> None:
    """Draws an axis with ticks at round times, and two strokes where time is cut out."""
    end_s = windows[-1].end_s
    shown_s = sum(window.end_s - window.start_s for window in windows)
    step_s = nice_step(shown_s, int(PLOT_WIDTH_PT / _TICK_PT))
    unit, unit_s = seconds_unit(end_s)
    num_decimals = max(0, -floor(log10(step_s / unit_s) + 1e-9))
    labelled = float("-inf")
    for window in windows:
        right = window.left + window.width
        page.line((window.left, top), (right, top), colour=GRID_COLOUR)
        for tick in range(ceil(window.start_s / step_s), floor(window.end_s / step_s + 1e-9) + 1):
            x = window.place(tick * step_s)
            page.line((x, top), (x, top + 3), colour=GRID_COLOUR)
            text = f"{tick * step_s / unit_s:,.{num_decimals}f}"
            if x - labelled >= page.text_width(text, SMALL) + 6:
                page.text((x, top + 11), text, SMALL, align="center")
                labelled = x
    page.text((PLOT_RIGHT_PT + 16, top + 11), unit, SMALL)
    for window in windows[1:]:
        middle = window.left - _CUT_PT / 2
        for x in (middle - 2, middle + 2):
            page.line((x - 2, top + 4), (x + 2, top - 4))
