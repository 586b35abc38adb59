"""A picture of predicted and measured timelines, peak memory and transitions.

Of all iterations with the same prediction, the one of median length is drawn. Each rank has two
lanes on one axis of time, the predicted one above the measured one.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from planaria.estimator.correction import Comparison
from planaria.estimator.time import Timeline
from planaria.observe.metrics import EventRecord
from planaria.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from planaria.show.comparison import off_text
from planaria.show.pictures.figures import draw_heading
from planaria.show.pictures.page import (
    BACKWARD_COLOUR,
    FORWARD_COLOUR,
    GROUND_COLOUR,
    LABEL,
    LEFT_PT,
    MEMORY_COLOUR,
    PLOT_LEFT_PT,
    PLOT_WIDTH_PT,
    REDUCTION_COLOUR,
    SUBTITLE,
    TITLE,
    Format,
    Page,
    Rectangle,
)
from planaria.show.pictures.timelines import TimeWindow, box_colour, draw_axis
from planaria.show.words import bytes_text, count_text, seconds_text

ITERATIONS_MAX: Final = 4
RANKS_MAX: Final = 32
TRANSITIONS_MAX: Final = 12

_COMPUTING: Final = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
_WEIGHT_COLOUR: Final = "#c9713c"
_DETECT_COLOUR: Final = "#9aa5b1"
_LANE_PT: Final = {8: 9.0, 16: 6.5, RANKS_MAX: 4.5}  # Keys: largest number of ranks.
_GAP_PT: Final = 3.0
_BARS_WIDTH_PT: Final = 380.0  # Width of the longest bar; text follows to its right.
_WEIGHTS: Final = "weights' gradients"
_LEGEND: Final[tuple[tuple[str, str], ...]] = (
    (FORWARD_COLOUR, "forward"),
    (BACKWARD_COLOUR, "backward"),
    (_WEIGHT_COLOUR, _WEIGHTS),
    (REDUCTION_COLOUR, "reduction"),
    (GROUND_COLOUR, "bubble"),
)
_PHASES_LEGEND: Final = (
    (_DETECT_COLOUR, "detect"),
    (FORWARD_COLOUR, "decide"),
    (BACKWARD_COLOUR, "regroup (predicted: with decide)"),
    (MEMORY_COLOUR, "transfer"),
)


def compared_figure(
    title: str,
    iterations: Sequence[Comparison],
    events: Sequence[EventRecord] = (),
    *,
    picture: Format,
) -> bytes:
    """The content of the picture file.

    Args:
        iterations: the traced iterations, in order.
        events: events of the job; those with an answer and a predicted downtime are drawn.
    """
    page = Page()
    page.text((LEFT_PT, 42), page.shortened_text(title, PLOT_WIDTH_PT, TITLE), TITLE)
    drawn = list(_median_iterations(iterations))
    text = "each rank has two lanes: the predicted one, and below it the measured one"
    if len(drawn) > ITERATIONS_MAX:
        text += f"; the last {ITERATIONS_MAX} of {len(drawn)} predictions"
    page.text((LEFT_PT, 58), text, SUBTITLE)
    top = 92.0
    for comparison in drawn[-ITERATIONS_MAX:]:
        top = _draw_iteration(page, comparison, top=top) + 40
    if drawn and drawn[-1].peaks:
        top = _draw_peaks(page, drawn[-1], top=top) + 40
    priced = [event for event in events if event.answer and event.predicted_downtime_s > 0.0]
    if priced:
        top = _draw_transitions(page, priced[-TRANSITIONS_MAX:], top=top) + 40
    return page.content(top, picture)


def _median_iterations(iterations: Sequence[Comparison]) -> Iterator[Comparison]:
    """The iteration of median length of each run of iterations with the same prediction.

    The first iteration of a run does one-time setup, so it counts only if it is the only one.
    """
    for _, alike in groupby(iterations, key=lambda comparison: id(comparison.predicted)):
        first, *later = alike
        by_length = sorted(later or [first], key=lambda comparison: comparison.measured.iteration_s)
        yield by_length[len(by_length) // 2]


def _draw_iteration(page: Page, comparison: Comparison, *, top: float) -> float:
    """Draws the lanes of an iteration; returns the y at which they end."""
    predicted, measured = comparison.predicted, comparison.measured
    note = (
        f"{seconds_text(predicted.iteration_s)} predicted, "
        f"{seconds_text(measured.iteration_s)} measured "
        f"({off_text(predicted.iteration_s, measured.iteration_s)}){_clock_text(comparison)}"
    )
    is_split = any(span.action.kind is BACKWARD_WEIGHT for span in predicted.spans)
    legend = [entry for entry in _LEGEND if is_split or entry[1] != _WEIGHTS]
    draw_heading(page, top, heading=f"Iteration {comparison.iteration}", note=note, legend=legend)
    ranks = sorted({span.rank for span in (*predicted.spans, *measured.spans)})
    shown = ranks[:RANKS_MAX]
    height = next(height for most, height in _LANE_PT.items() if len(shown) <= most)
    window = TimeWindow(0.0, comparison.end_s, PLOT_LEFT_PT, PLOT_WIDTH_PT)
    lanes = {}
    top += 16
    for rank in shown:
        page.text((PLOT_LEFT_PT - 8, top + height + 2.6), f"rank {rank}", LABEL, align="right")
        lanes[rank] = top
        for lane_top in (top, top + height):
            ground = Rectangle(PLOT_LEFT_PT, lane_top, PLOT_WIDTH_PT, height - 0.5)
            page.ground(GROUND_COLOUR, ground)
        top += 2 * height + _GAP_PT
    _draw_spans(page, predicted, lanes, window=window, height=height - 0.5)
    below = {rank: lane_top + height for rank, lane_top in lanes.items()}
    _draw_spans(page, measured, below, window=window, height=height - 0.5)
    draw_axis(page, (window,), top=top)
    if len(ranks) > RANKS_MAX:
        text = f"{count_text(len(ranks) - RANKS_MAX, 'rank')} left out"
        page.text((LEFT_PT, top + 11), text, LABEL)
    return top + 14


def _clock_text(comparison: Comparison) -> str:
    """How well ranks of several machines are placed; "" if all have one clock."""
    error_s = comparison.clock_error_s
    if error_s is None:
        return ", each measured rank from its own begin"
    return f", measured ranks placed to within {seconds_text(error_s)}" if error_s else ""


def _draw_spans(
    page: Page, timeline: Timeline, tops: dict[int, float], *, window: TimeWindow, height: float
) -> None:
    """Draws forwards and backwards, and the parts of reductions that follow a rank's last one."""
    computed_s = dict.fromkeys(tops, 0.0)
    for span in timeline.spans:
        if span.rank in tops and span.lane == "compute" and span.action.kind in _COMPUTING:
            computed_s[span.rank] = max(computed_s[span.rank], span.end_s)
            colour = (
                _WEIGHT_COLOUR
                if span.action.kind is BACKWARD_WEIGHT
                else box_colour(span.action.kind, span.action.microbatch)
            )
            _draw_box(page, colour, (span.start_s, span.end_s), tops[span.rank], window, height)
    for span in timeline.spans:
        if span.rank in tops and span.lane == "reduce":
            times_s = (max(span.start_s, computed_s[span.rank]), span.end_s)
            _draw_box(page, REDUCTION_COLOUR, times_s, tops[span.rank], window, height)


def _draw_box(
    page: Page,
    colour: str,
    times_s: tuple[float, float],
    top: float,
    window: TimeWindow,
    height: float,
) -> None:
    left, right = (window.place(time_s) for time_s in times_s)
    seam = min(0.35, (right - left) / 10)
    if right > left:
        page.box(colour, Rectangle(left + seam, top, right - left - 2 * seam, height))


def _draw_peaks(page: Page, comparison: Comparison, *, top: float) -> float:
    """Draws two bars of peak memory for each rank; returns the y at which they end."""
    note = (
        f"tensors of each rank in iteration {comparison.iteration}: the predicted bytes, and below "
        "them the measured ones"
    )
    draw_heading(page, top, heading="Peak memory", note=note, legend=((MEMORY_COLOUR, "bytes"),))
    top += 16
    shown = comparison.peaks[:RANKS_MAX]
    most = max(max(peak.predicted, peak.measured) for peak in shown)
    height = _LANE_PT[16]
    for peak in shown:
        baseline = top + height + 2.6
        page.text((PLOT_LEFT_PT - 8, baseline), f"rank {peak.rank}", LABEL, align="right")
        for num_bytes, bar_top in ((peak.predicted, top), (peak.measured, top + height)):
            width = _BARS_WIDTH_PT * num_bytes / most
            page.box(MEMORY_COLOUR, Rectangle(PLOT_LEFT_PT, bar_top, width, height - 0.5))
        text = (
            f"{bytes_text(peak.predicted)} predicted, {bytes_text(peak.measured)} measured "
            f"({off_text(peak.predicted, peak.measured)})"
        )
        page.text((PLOT_LEFT_PT + _BARS_WIDTH_PT + 8, baseline), text, LABEL)
        top += 2 * height + _GAP_PT
    if len(comparison.peaks) > RANKS_MAX:
        text = f"{count_text(len(comparison.peaks) - RANKS_MAX, 'rank')} left out"
        page.text((LEFT_PT, top + 11), text, LABEL)
    return top


def _draw_transitions(page: Page, events: Sequence[EventRecord], *, top: float) -> float:
    """Draws two bars of phases for each event; returns the y at which they end."""
    note = "from the loss until every rank could go on"
    draw_heading(page, top, heading="Transitions", note=note, legend=_PHASES_LEGEND)
    top += 16
    end_s = max(
        e.detect_s + e.decide_s + max(e.predicted_downtime_s, e.transition_s) for e in events
    )
    window = TimeWindow(0.0, end_s, PLOT_LEFT_PT, PLOT_WIDTH_PT)
    height = _LANE_PT[8]
    for event in events:
        text = f"{event.answer} at {event.iteration}"
        text = page.shortened_text(text, PLOT_LEFT_PT - LEFT_PT - 8, LABEL)
        page.text((PLOT_LEFT_PT - 8, top + height + 2.6), text, LABEL, align="right")
        rest_s = event.predicted_downtime_s - event.predicted_transfer_s
        # Predictions cover only what follows the decision: neither detect nor decide.
        predicted = (0.0, 0.0, rest_s, event.predicted_transfer_s)
        measured = (event.detect_s, event.decide_s, event.regroup_s, event.transfer_s)
        for begins_s, phases, lane_top in (
            (event.detect_s + event.decide_s, predicted, top),
            (0.0, measured, top + height),
        ):
            ground = Rectangle(PLOT_LEFT_PT, lane_top, PLOT_WIDTH_PT, height - 0.5)
            page.ground(GROUND_COLOUR, ground)
            start_s = begins_s
            for (colour, _), duration_s in zip(_PHASES_LEGEND, phases, strict=True):
                times_s = (start_s, start_s + duration_s)
                _draw_box(page, colour, times_s, lane_top, window, height - 0.5)
                start_s += duration_s
        top += 2 * height + _GAP_PT
    draw_axis(page, (window,), top=top)
    return top + 14
