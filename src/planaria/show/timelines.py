"""The timelines of a plan's pipelines: a lane per stage, a box per forward and backward.

Tints come and go, so that a microbatch can be followed from lane to lane; numbers stand where
they fit. All timelines have one axis of time. What shows between boxes is a bubble.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor, log10
from typing import Final, NamedTuple

from planaria.core.plan import PipelineTemplate
from planaria.schedule.action import FORWARD
from planaria.show.alike import Alike
from planaria.show.lanes import LANES_MAX, Box, Lanes, Window, lane_boxes, time_windows
from planaria.show.layout import (
    GRID_COLOUR,
    GROUND_COLOUR,
    LABEL,
    LEFT_PT,
    NAME,
    PLOT_LEFT_PT,
    PLOT_RIGHT_PT,
    PLOT_WIDTH_PT,
    SMALL,
    nice_step,
)
from planaria.show.page import Font, Page, Rectangle
from planaria.show.words import counted, layers_text, seconds_text, seconds_unit

_NUMBERS_MAX: Final = 2_000
_CUT_PT: Final = 16.0
_TICK_PT: Final = 70.0
_LEFT_OUT_PT: Final = 14.0

_LANE_PT: Final = {16: 15.0, 40: 11.0, 56: 8.0, LANES_MAX: 5.5}  # By lanes at most.
_NUMBERED_PT: Final = 10.0  # On lower lanes, numbers would be too small to read.

# From the first microbatch on, then back to it, and so on.
_FORWARD_TINTS: Final = ("#2f87bd", "#549fcc", "#7cb7da", "#a3cde6")
_BACKWARD_TINTS: Final = ("#e5a11a", "#edb647", "#f3ca77", "#f8dea8")


class _Lane(NamedTuple):
    """Where a lane's boxes lie, and how wide a box is that has a number on it."""

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


def windows_of(drawn: Sequence[Lanes]) -> tuple[Window, ...]:
    """The pieces of time that all of these timelines show."""
    return time_windows(drawn, left=PLOT_LEFT_PT, width=PLOT_WIDTH_PT, gap=_CUT_PT)


def draw_timelines(
    page: Page, drawn: Sequence[Lanes], windows: Sequence[Window], *, top: float
) -> float:
    """Draws them one below the other.

    Returns:
        where they end.
    """
    num_lanes = sum(len(one.stages) for one in drawn)
    height = next(height for most, height in _LANE_PT.items() if num_lanes <= most)
    numbers: list[_Number] = []
    for one in drawn:
        _draw_title(page, one.group, baseline=top + 9)
        placed = _placed(page, one, top=top + 16, height=height)
        _draw_grounds(page, one, placed=placed, windows=windows)
        for stage, lane in placed.items():
            for box in lane_boxes(one.group, stage, windows):
                numbers += _draw_box(page, box, lane=lane, windows=windows)
        bottom = placed[one.stages[-1]].top + height
        _draw_axis(page, windows, top=bottom + 3)
        top = bottom + 34
    _draw_numbers(page, numbers)
    return top - 14


def _draw_title(page: Page, group: Alike, *, baseline: float) -> None:
    page.text((LEFT_PT, baseline), group.name, NAME)
    facts = (
        f"{group.work} in {seconds_text(group.iteration_s)}, "
        f"{100 * group.bubble_share:.1f}% bubbles"
    )
    page.text((LEFT_PT + page.text_width(group.name, NAME) + 8, baseline), facts, LABEL)


def _placed(page: Page, one: Lanes, *, top: float, height: float) -> dict[int, _Lane]:
    """The lane of each stage; between nodes, and where lanes are left out, there is a gap."""
    template = one.group.template
    font = Font(0.62 * height if height < 11 else 7.0)
    # All boxes of a lane have numbers, or none: a 9 that fits beside a 10 that does not misleads.
    widest = page.text_width("0" * len(str(one.group.num_microbatches - 1)), font) + 1.5
    placed: dict[int, _Lane] = {}
    num_devices = 0
    for stage_index, stage in enumerate(template.stages):
        if stage_index in one.stages:
            at_node = num_devices % template.devices_per_node == 0 < template.devices_per_node - 1
            if placed:
                top += height * (1.32 if at_node else 1.12)
            if placed and stage_index - 1 not in placed:
                top += _LEFT_OUT_PT
            numbered_width = widest if height >= _NUMBERED_PT else float("inf")
            placed[stage_index] = _Lane(top, height, font, numbered_width)
        num_devices += stage.num_devices
    return placed


def _draw_grounds(
    page: Page, one: Lanes, *, placed: Mapping[int, _Lane], windows: Sequence[Window]
) -> None:
    """The ground that bubbles are seen on, and the lanes' names as far as there is room."""
    labelled = float("-inf")
    for stage, lane in placed.items():
        for window in windows:
            ground = Rectangle(window.left, lane.top, window.width, lane.height)
            page.ground(GROUND_COLOUR, ground)
        baseline = lane.top + lane.height / 2 + 2.6
        if stage and stage - 1 not in placed:
            text = f"{counted(one.num_left_out, 'stage')} left out"
            page.text((PLOT_LEFT_PT - 8, lane.top - 5), text, LABEL, align="right")
        if baseline - labelled >= LABEL.size_pt + 1:
            text = _stage_text(one.group.template, stage)
            page.text((PLOT_LEFT_PT - 8, baseline), text, LABEL, align="right")
            labelled = baseline


def _stage_text(template: PipelineTemplate, stage_index: int) -> str:
    stage = template.stages[stage_index]
    devices = f" \u00d7{stage.num_devices}" if template.devices_per_node > 1 else ""
    return layers_text(stage) + devices


def _draw_box(page: Page, box: Box, *, lane: _Lane, windows: Sequence[Window]) -> Iterator[_Number]:
    """Draws the parts of a box that windows show.

    Yields:
        its number, where it fits.
    """
    tints = _FORWARD_TINTS if box.kind is FORWARD else _BACKWARD_TINTS
    turn = len(tints) - 1
    colour = tints[turn - abs(turn - box.microbatch % (2 * turn))]
    for window in windows:
        left, right = window.place(box.start_s), window.place(box.end_s)
        seam = min(0.35, (right - left) / 10)
        width = right - left - 2 * seam
        if width <= 0:
            continue
        page.box(colour, Rectangle(left + seam, lane.top, width, lane.height))
        if lane.numbered_width <= width:
            baseline = lane.top + lane.height / 2 + 0.36 * lane.font.size_pt
            yield _Number(box.microbatch, (left + right) / 2, baseline, lane.font)


def _draw_numbers(page: Page, numbers: Sequence[_Number]) -> None:
    """All that fit, or those of every second, fifth .. microbatch if they are too many."""
    step = ceil(nice_step(len(numbers), _NUMBERS_MAX))
    for number in numbers:
        if number.microbatch % step == 0:
            place = (number.middle, number.baseline)
            page.text(place, str(number.microbatch), number.font, align="center")


def _draw_axis(page: Page, windows: Sequence[Window], *, top: float) -> None:
    """Ticks of time at round numbers; two strokes where time is cut out."""
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
