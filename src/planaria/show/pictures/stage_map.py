"""The stage map of a plan: the layers, the time and the peak memory of each stage.

Each group of alike pipelines has a row, in which the model's layers run from left to right. From
top to bottom, a row has: brackets around the stages of each node; a column per stage, as wide as
its layers and as high as the seconds of one microbatch, the backward on top of the forward; the
layers and devices; the peak memory of a device. All rows share one scale, so a stage that others
wait for stands out.
"""

from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import Final, NamedTuple

from planaria.core.plan import PipelineTemplate, Stage
from planaria.estimator.peak_memory import peak_bytes
from planaria.planner.problem import Problem
from planaria.show.alike import AlikePipelines
from planaria.show.pictures.page import (
    BACKWARD_COLOUR,
    FORWARD_COLOUR,
    GRID_COLOUR,
    GROUND_COLOUR,
    INK,
    LABEL,
    LEFT_PT,
    MEMORY_COLOUR,
    NAME,
    PLOT_LEFT_PT,
    PLOT_RIGHT_PT,
    PLOT_WIDTH_PT,
    SMALL,
    Font,
    Page,
    Rectangle,
)
from planaria.show.words import (
    bytes_text,
    bytes_unit,
    count_text,
    layers_text,
    nice_step,
    ranges_text,
    seconds_unit,
)

ROWS_MAX: Final = 8

_COLUMNS_PT: Final = 46.0
_MEMORY_PT: Final = 4.0
_AXIS_TICKS_MAX: Final = 16
_SCALE_STEPS_MAX: Final = 4
_VALUE: Final = Font(SMALL.size_pt, INK)


class _Column(NamedTuple):
    """A stage with its place on the page; gaps are wider between nodes than within a node."""

    stage: Stage
    left: float
    width: float

    @property
    def middle(self) -> float:
        return self.left + self.width / 2


class _Scale(NamedTuple):
    """The scale of the columns and bars of all rows.

    Attributes:
        seconds: time of a column of full height: the longest of any stage.
        num_bytes: bytes of a bar of full width: the memory of a device, or the highest peak if that
            is unknown.
    """

    seconds: float
    num_bytes: int


def draw_stage_map(
    page: Page, problem: Problem, groups: Sequence[AlikePipelines], *, top: float
) -> float:
    """Draws a row per group.

    Returns:
        the y at which the map ends.
    """
    peaks = [_peak_bytes(problem, group) for group in groups]
    scale = _Scale(
        seconds=max(second for group in groups for second in group.stages_s),
        num_bytes=problem.profile.device_memory_bytes or max(map(max, peaks)),
    )
    memory = "of" if problem.profile.device_memory_bytes else "max"
    memory = f"{memory} {bytes_text(scale.num_bytes)}"
    num_layers = len(problem.profile.layers)
    for group, peak in zip(groups, peaks, strict=True):
        columns = tuple(_columns(group.template, num_layers))
        _draw_name(page, group, baseline=top + 9)
        _draw_nodes(page, group, columns=columns, baseline=top + 9)
        ground = top + 26 + _COLUMNS_PT
        _draw_scale(page, scale, ground=ground)
        _draw_columns(page, group, columns=columns, scale=scale, ground=ground)
        bars = 4 + _draw_labels(page, group.template, columns=columns, baseline=ground + 10)
        _draw_memory(page, peak, columns=columns, scale=scale, top=bars)
        page.text((PLOT_RIGHT_PT + 5, bars + _MEMORY_PT / 2 + 2.5), memory, SMALL)
        top = bars + _MEMORY_PT + 24
    return _draw_layer_axis(page, num_layers, top=top)


def _peak_bytes(problem: Problem, group: AlikePipelines) -> tuple[int, ...]:
    return peak_bytes(
        problem.profile,
        group.template,
        num_microbatches=group.num_microbatches,
        gradient_copies=problem.gradient_copies,
    )


def _draw_name(page: Page, group: AlikePipelines, *, baseline: float) -> None:
    width = PLOT_LEFT_PT - LEFT_PT - 10
    nodes = f"{'node' if len(group.nodes) == 1 else 'nodes'} {ranges_text(group.nodes)}"
    page.text((LEFT_PT, baseline), page.shortened_text(group.name, width, NAME), NAME)
    stages = count_text(len(group.template.stages), "stage")
    for index, text in enumerate((nodes, stages, group.work)):
        place = (LEFT_PT, baseline + 12 + 11 * index)
        page.text(place, page.shortened_text(text, width, LABEL), LABEL)


def _columns(template: PipelineTemplate, num_layers: int) -> Iterator[_Column]:
    per_node = template.devices_per_node
    layer_pt = PLOT_WIDTH_PT / num_layers
    num_devices = 0
    for stage in template.stages:
        is_first, num_devices = num_devices % per_node == 0, num_devices + stage.num_devices
        is_last = num_devices % per_node == 0
        width = (stage.end_layer - stage.first_layer) * layer_pt
        before, after = (
            min(2.5 if at_node else 0.75, width / (4 if at_node else 8))
            for at_node in (is_first, is_last)
        )
        left = PLOT_LEFT_PT + stage.first_layer * layer_pt + before
        yield _Column(stage, left, width - before - after)


def _draw_nodes(
    page: Page, group: AlikePipelines, *, columns: Sequence[_Column], baseline: float
) -> None:
    """Draws a bracket over the stages of each node, with that node's number in every pipeline."""
    brackets = tuple(_brackets(group.template, columns))
    y = baseline + 4
    for left, right in brackets:
        page.line((left, y + 3), (left, y), (right, y), (right, y + 3))
    by_place = zip(*(pipeline.nodes for pipeline in group.pipelines), strict=True)
    *forms, shortest = zip(*(_nodes_texts(nodes) for nodes in by_place), strict=True)
    texts = page.all_fitting(forms, [right - left for left, right in brackets], SMALL)
    middles = [(left + right) / 2 for left, right in brackets]
    if not all(texts):
        texts = _thinned_texts(page, shortest, middles)
    for middle, text in zip(middles, texts, strict=True):
        page.text((middle, baseline), text, SMALL, align="center")


def _brackets(
    template: PipelineTemplate, columns: Sequence[_Column]
) -> Iterator[tuple[float, float]]:
    """The left and right ends of the stages of each node."""
    num_devices, left = 0, columns[0].left
    for column in columns:
        if num_devices % template.devices_per_node == 0:
            left = column.left
        num_devices += column.stage.num_devices
        if num_devices % template.devices_per_node == 0:
            yield left, column.left + column.width


def _nodes_texts(nodes: Sequence[int]) -> tuple[str, str, str]:
    """The numbers of some nodes in words, in a long, a short and the shortest form."""
    if len(nodes) == 1:
        return f"node {nodes[0]}", str(nodes[0]), str(nodes[0])
    ends = f"{nodes[0]}{', ' if len(nodes) == 2 else ' .. '}{nodes[-1]}"
    return f"nodes {ranges_text(nodes)}", ranges_text(nodes), ends


def _thinned_texts(page: Page, texts: Sequence[str], middles: Sequence[float]) -> list[str]:
    """The texts, with all but every second, fifth, .. one empty if neighbours would touch."""
    halves = [page.text_width(text, SMALL) / 2 + 2 for text in texts]
    num_texts = len(texts)
    steps = [times * 10**power for power in range(5) for times in (1, 2, 5)]
    step = next(
        step
        for step in steps
        if all(
            middles[i + step] - middles[i] >= halves[i] + halves[i + step]
            for i in range(0, num_texts - step, step)
        )
    )
    return [text if index % step == 0 else "" for index, text in enumerate(texts)]


def _draw_scale(page: Page, scale: _Scale, *, ground: float) -> None:
    """Draws horizontal lines behind the columns, with their seconds at the right."""
    step_s = nice_step(scale.seconds, _SCALE_STEPS_MAX)
    unit, unit_s = seconds_unit(scale.seconds)
    for index in range(int(scale.seconds / step_s + 1e-9) + 1):
        y = ground - _COLUMNS_PT * index * step_s / (scale.seconds or 1.0)
        page.ground(GRID_COLOUR, Rectangle(PLOT_LEFT_PT, y - 0.25, PLOT_WIDTH_PT, 0.5))
        text = f"{index * step_s / unit_s:,g} {unit}" if index else "0"
        page.text((PLOT_RIGHT_PT + 5, y + 2.5), text, SMALL)


def _draw_columns(
    page: Page, group: AlikePipelines, *, columns: Sequence[_Column], scale: _Scale, ground: float
) -> None:
    unit, unit_s = seconds_unit(scale.seconds)
    numbers = [
        f"{second / unit_s:.{_decimals(scale.seconds / unit_s)}f}" for second in group.stages_s
    ]
    texts = page.all_fitting(
        ([f"{number} {unit}" for number in numbers], numbers),
        [column.width for column in columns],
        _VALUE,
    )
    both = zip(group.seconds.forward_s, group.seconds.backward_s, strict=True)
    for column, text, seconds in zip(columns, texts, both, strict=True):
        top = ground
        for colour, duration_s in zip((FORWARD_COLOUR, BACKWARD_COLOUR), seconds, strict=True):
            height = _COLUMNS_PT * duration_s / (scale.seconds or 1.0)
            top -= height
            page.box(colour, Rectangle(column.left, top, column.width, height))
        width = page.text_width(text, _VALUE) + 4
        page.ground("white", Rectangle(column.middle - width / 2, top - 8, width, 8))
        page.text((column.middle, top - 2.5), text, _VALUE, align="center")


def _decimals(largest: float) -> int:
    """The decimals with which the largest number of a scale has three significant digits."""
    return max(0, 2 - floor(log10(largest))) if largest >= 1 else 2


def _draw_labels(
    page: Page, template: PipelineTemplate, *, columns: Sequence[_Column], baseline: float
) -> float:
    """Draws each column's layers below it, and its devices if a node has several.

    Returns:
        the last baseline.
    """
    widths = [column.width for column in columns]
    layers = [layers_text(column.stage) for column in columns]
    devices = [f"\u00d7{column.stage.num_devices}" for column in columns]
    lines = [page.all_fitting((layers, [text.split()[1] for text in layers]), widths, SMALL)]
    if template.devices_per_node > 1:
        lines.append(page.all_fitting((devices,), widths, SMALL))
    for index, line in enumerate(lines):
        for column, text in zip(columns, line, strict=True):
            page.text((column.middle, baseline + 9 * index), text, SMALL, align="center")
    return baseline + 9 * (len(lines) - 1)


def _draw_memory(
    page: Page, peaks: Sequence[int], *, columns: Sequence[_Column], scale: _Scale, top: float
) -> None:
    """Draws a bar below each column, filled in proportion to the peak memory of a device."""
    widths = [column.width for column in columns]
    unit, unit_bytes = bytes_unit(scale.num_bytes)
    numbers = [f"{peak / unit_bytes:.1f}" for peak in peaks]
    texts = page.all_fitting(([f"{number} {unit}" for number in numbers], numbers), widths, SMALL)
    for column, num_bytes, text in zip(columns, peaks, texts, strict=True):
        page.ground(GROUND_COLOUR, Rectangle(column.left, top, column.width, _MEMORY_PT))
        filled = column.width * num_bytes / (scale.num_bytes or 1)
        page.box(MEMORY_COLOUR, Rectangle(column.left, top, filled, _MEMORY_PT))
        page.text((column.middle, top + _MEMORY_PT + 8), text, SMALL, align="center")
    place = (PLOT_LEFT_PT - 8, top + _MEMORY_PT / 2 + 2.5)
    page.text(place, "peak memory", SMALL, align="right")


def _draw_layer_axis(page: Page, num_layers: int, *, top: float) -> float:
    """Draws an axis of layers, since narrow columns have no text."""
    page.line((PLOT_LEFT_PT, top), (PLOT_RIGHT_PT, top), colour=GRID_COLOUR)
    step = max(1, round(nice_step(num_layers, _AXIS_TICKS_MAX)))
    for layer in range(0, num_layers, step):
        x = PLOT_LEFT_PT + (layer + 0.5) * PLOT_WIDTH_PT / num_layers
        page.line((x, top), (x, top + 3), colour=GRID_COLOUR)
        page.text((x, top + 11), str(layer), SMALL, align="center")
    page.text((PLOT_LEFT_PT - 8, top + 11), "layer", SMALL, align="right")
    return top + 11
