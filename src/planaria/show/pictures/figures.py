"""A picture of a plan: a map of its stages and their costs, and timelines of an iteration.

Alike pipelines are drawn once. The last lines of the picture say what was left out for lack of
room.
"""

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Final

from planaria.core.plan import Plan
from planaria.planner.plans import PlanCatalog, pipeline_microbatches, plan_bubble_share
from planaria.show.alike import AlikePipelines, alike_pipelines
from planaria.show.pictures.page import (
    BACKWARD_COLOUR,
    FORWARD_COLOUR,
    GROUND_COLOUR,
    HEADING,
    LABEL,
    LEFT_PT,
    MEMORY_COLOUR,
    REDUCTION_COLOUR,
    RIGHT_PT,
    SUBTITLE,
    TITLE,
    Format,
    Page,
    Rectangle,
)
from planaria.show.pictures.stage_map import ROWS_MAX, draw_stage_map
from planaria.show.pictures.timelines import (
    TIMELINES_MAX,
    Lanes,
    TimeWindow,
    draw_timelines,
    drawn_lanes,
    time_windows,
)
from planaria.show.tables import job_text, model_text, samples_per_s
from planaria.show.words import count_text, seconds_text, share_text

_CAPTION_COLUMNS: Final = 170
_NAMED_MAX: Final = 12


def plan_figure(catalog: PlanCatalog, plan: Plan, *, picture: Format) -> bytes:
    """The content of the picture file, the same bytes for the same plan.

    64 stages with 768 microbatches take about a second.
    """
    templates = [pipeline.template for pipeline in plan.pipelines]
    iteration = catalog.times.iteration(templates, pipeline_microbatches(plan))
    groups = alike_pipelines(catalog.problem.profile, plan)
    drawn = drawn_lanes(groups)
    windows = time_windows(drawn, iteration.end_s)
    page = Page()
    top = _draw_title(page, catalog, plan, iteration_s=iteration.end_s)
    note = "seconds of one microbatch, and peak memory of a device"
    draw_heading(page, top, heading="Stages", note=note, legend=_STAGE_LEGEND)
    top = draw_stage_map(page, catalog.problem, groups[:ROWS_MAX], top=top + 14)
    note = "one iteration up to its commit, as predicted; reductions count as bubbles"
    draw_heading(page, top + 34, heading="Timeline", note=note, legend=_TIMELINE_LEGEND)
    top = draw_timelines(page, drawn, windows, iteration=iteration, top=top + 48)
    for caption in _captions(groups, drawn, windows):
        for line in wrap(caption, _CAPTION_COLUMNS):
            top += 11
            page.text((LEFT_PT, top), line, LABEL)
    return page.content(top + 24, picture)


_STAGE_LEGEND: Final = (
    (FORWARD_COLOUR, "forward"),
    (BACKWARD_COLOUR, "backward"),
    (MEMORY_COLOUR, "peak memory"),
)
_TIMELINE_LEGEND: Final = (
    (FORWARD_COLOUR, "forward"),
    (BACKWARD_COLOUR, "backward"),
    (REDUCTION_COLOUR, "reduction"),
    (GROUND_COLOUR, "bubble"),
)


def _draw_title(page: Page, catalog: PlanCatalog, plan: Plan, *, iteration_s: float) -> float:
    problem = catalog.problem
    width = RIGHT_PT - LEFT_PT
    predicted = f"{seconds_text(iteration_s)} an iteration"
    bubbles = f"{share_text(plan_bubble_share(plan, catalog.times))} bubbles"
    speed = f"{samples_per_s(problem, iteration_s):,.1f} samples/s, {bubbles}"
    page.text((LEFT_PT, 42), page.shortened_text(problem.profile.model, width - 190, TITLE), TITLE)
    page.text((RIGHT_PT, 42), predicted, HEADING, align="right")
    page.text((RIGHT_PT, 58), speed, SUBTITLE, align="right")
    job = f"{model_text(problem)}; {job_text(problem, plan)}"
    left_over = width - page.text_width(speed, SUBTITLE) - 20
    page.text((LEFT_PT, 58), page.shortened_text(job, left_over, SUBTITLE), SUBTITLE)
    return 92.0


def draw_heading(
    page: Page,
    baseline: float,
    *,
    heading: str,
    note: str,
    legend: Sequence[tuple[str, str]],
) -> None:
    """Draws a heading with its note at the left, and the legend of colours at the right."""
    page.text((LEFT_PT, baseline), heading, HEADING)
    page.text((LEFT_PT + page.text_width(heading, HEADING) + 10, baseline), note, SUBTITLE)
    right = RIGHT_PT
    for colour, text in reversed(legend):
        page.text((right, baseline), text, LABEL, align="right")
        left = right - page.text_width(text, LABEL)
        page.box(colour, Rectangle(left - 12, baseline - 7, 8, 8))
        right = left - 24


def _captions(
    groups: Sequence[AlikePipelines], drawn: Sequence[Lanes], windows: Sequence[TimeWindow]
) -> Iterator[str]:
    """Sentences that say what the picture leaves out."""
    if len(windows) > 1:
        start_s, end_s = windows[0].end_s, windows[1].start_s
        yield (
            f"{seconds_text(end_s - start_s)} in the middle of the time are cut out, from "
            f"{seconds_text(start_s)} to {seconds_text(end_s)}."
        )
    if any(group_lanes.num_left_out for group_lanes in drawn):
        yield "Of long pipelines, the stages in the middle are left out of the timeline."
    for what, num_max in (("stages", ROWS_MAX), ("timelines", TIMELINES_MAX)):
        if len(groups) > num_max:
            yield f"The {what} of {_names(groups[num_max:])} are not drawn."


def _names(groups: Sequence[AlikePipelines]) -> str:
    names = [f"{group.name} ({group.work})" for group in groups[:_NAMED_MAX]]
    more = len(groups) - _NAMED_MAX
    return ", ".join(names) + (f" and {count_text(more, 'other')}" if more > 0 else "")
