"""A picture of simulated jobs: throughput over time with the losses of nodes, what the time was
spent on, and the samples trained so far. The lines are those of the first seed."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from planaria.observe.ledger import Category
from planaria.show.pictures.figures import draw_heading
from planaria.show.pictures.page import (
    FAINT_INK,
    GRID_COLOUR,
    GROUND_COLOUR,
    INK,
    LABEL,
    LEFT_PT,
    PLOT_LEFT_PT,
    PLOT_RIGHT_PT,
    PLOT_WIDTH_PT,
    SMALL,
    SUBTITLE,
    TITLE,
    Format,
    Page,
    Rectangle,
)
from planaria.show.words import count_text
from planaria.simulator.economics.compare import ClusterScenario, JobOutcome, Outcomes

# From the palettes of Okabe and Ito and of Tol, one for each system, in their order.
_SYSTEM_COLOURS: Final = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"),
    *(INK, "#999933", "#882255", "#44aa99", FAINT_INK, "#ddcc77"),
)
_LEDGER_COLOURS: Final[Mapping[Category, str]] = {
    Category.USEFUL: "#009e73",
    Category.REDUNDANT: "#56b4e9",
    Category.REDO: "#d55e00",
    Category.DETECT: "#e69f00",
    Category.DECIDE: "#f0e442",
    Category.REGROUP: "#cc79a7",
    Category.TRANSFER: "#0072b2",
    Category.RESTART: INK,
    Category.CHECKPOINT_STALL: "#882255",
    Category.EVALUATION: "#44aa99",
    Category.STARTUP: "#999933",
    Category.IDLE: GRID_COLOUR,
}
_PLOT_HEIGHT_PT: Final = 150.0
_NUM_WINDOWS: Final = 200  # Windows of time of which the throughput is shown.
_S_PER_HOUR: Final = 3600.0


def simulation_figure(scenario: ClusterScenario, outcomes: Outcomes, *, picture: Format) -> bytes:
    """The content of the picture file, the same bytes for the same outcomes."""
    page = Page()
    setting, firsts = scenario.setting, {name: runs[0] for name, runs in outcomes.items()}
    page.text((LEFT_PT, 42), scenario.name, TITLE)
    nodes = count_text(setting.num_nodes, "node")
    note = f"{setting.model} on {nodes}, policy {setting.job.resilience.policy}"
    page.text((LEFT_PT, 58), note, SUBTITLE)
    assert len(firsts) <= len(_SYSTEM_COLOURS)
    wall_s = max(run.wall_s for run in firsts.values())
    first_seed = "with the first seed, " if len(next(iter(outcomes.values()))) > 1 else ""
    top = _draw_lines(
        page,
        84.0,
        {name: _throughput(run) for name, run in firsts.items()},
        heading="Throughput",
        note=f"samples/s {first_seed}over time; a stroke below for each loss of nodes",
        wall_s=wall_s,
    )
    for at_s in next(iter(firsts.values())).lost_at_s:
        left = PLOT_LEFT_PT + PLOT_WIDTH_PT * at_s / wall_s
        page.box(INK, Rectangle(left, top - 22.0, 0.6, 5.0))
    top = _draw_ledgers(page, top + 24.0, outcomes)
    samples = {
        name: [(at_s, float(number)) for at_s, number in run.curve] for name, run in firsts.items()
    }
    top = _draw_lines(
        page,
        top + 24.0,
        samples,
        heading="Samples",
        note=f"samples that count {first_seed}so far",
        wall_s=wall_s,
    )
    return page.content(top + 24.0, picture)


def _throughput(run: JobOutcome) -> list[tuple[float, float]]:
    """The mean throughput in each window of time; a window that loses work is shown at 0."""
    window_s = run.wall_s / _NUM_WINDOWS
    points: list[tuple[float, float]] = []
    index, before = 0, 0.0
    for number in range(1, _NUM_WINDOWS + 1):
        end_s = number * window_s
        while index + 1 < len(run.curve) and run.curve[index + 1][0] <= end_s:
            index += 1
        now = _samples_at(run.curve, index, end_s)
        rate = max(0.0, now - before) / window_s
        points += [(end_s - window_s, rate), (end_s, rate)]
        before = now
    return points


def _samples_at(curve: Sequence[tuple[float, int]], index: int, at_s: float) -> float:
    """The samples at a time between two points of the curve, the first of which is `index`."""
    first_s, first = curve[index]
    end_s, end = curve[min(index + 1, len(curve) - 1)]
    share = (at_s - first_s) / (end_s - first_s) if end_s > first_s else 0.0
    return first + share * (end - first)


def _draw_lines(
    page: Page,
    baseline: float,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    heading: str,
    note: str,
    wall_s: float,
) -> float:
    """Draws a line for each system over time; returns the lower end of the plot."""
    draw_heading(page, baseline, heading=heading, note=note, legend=())
    legend = list(zip(_SYSTEM_COLOURS, lines, strict=False))
    top = _draw_legend(page, baseline + 16.0, legend) + 10.0
    bottom = top + _PLOT_HEIGHT_PT
    page.ground(GROUND_COLOUR, Rectangle(PLOT_LEFT_PT, top, PLOT_WIDTH_PT, _PLOT_HEIGHT_PT))
    most = max((y for line in lines.values() for _, y in line), default=0.0) or 1.0
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * _PLOT_HEIGHT_PT / 1.05
        page.line((PLOT_LEFT_PT, y), (PLOT_RIGHT_PT, y), colour=GRID_COLOUR)
        page.text((PLOT_LEFT_PT - 6, y + 2.5), _number_text(most * share), SMALL, align="right")
    # The first system comes last, on top of the others.
    for colour, line in reversed(list(zip(_SYSTEM_COLOURS, lines.values(), strict=False))):
        points = [
            (
                PLOT_LEFT_PT + PLOT_WIDTH_PT * at_s / wall_s,
                bottom - y / most * _PLOT_HEIGHT_PT / 1.05,
            )
            for at_s, y in line
        ]
        page.line(*points, colour=colour, width_pt=1.2)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = PLOT_LEFT_PT + share * PLOT_WIDTH_PT
        hours = share * wall_s / _S_PER_HOUR
        page.text((x, bottom + 18), f"{_number_text(hours)} h", SMALL, align="center")
    return bottom + 24.0


def _number_text(number: float) -> str:
    """A number of an axis: four digits or, if it is longer, all before the point."""
    return f"{number:,.0f}" if number >= 1000.0 else f"{number:.4g}"


def _draw_legend(page: Page, baseline: float, legend: Sequence[tuple[str, str]]) -> float:
    """Draws colours with their names, in rows as wide as a plot; returns the last baseline."""
    left = PLOT_LEFT_PT
    for colour, name in legend:
        width = page.text_width(name, SMALL) + 22
        if PLOT_LEFT_PT < left > PLOT_RIGHT_PT - width:
            left, baseline = PLOT_LEFT_PT, baseline + 12.0
        page.box(colour, Rectangle(left, baseline - 6, 7, 7))
        page.text((left + 10, baseline), name, SMALL)
        left += width
    return baseline


def _draw_ledgers(page: Page, baseline: float, outcomes: Outcomes) -> float:
    """Draws a bar for each system with the shares of its time; returns the lower end."""
    ledgers = {
        name: {category: fmean(run.ledger[category] for run in runs) for category in Category}
        for name, runs in outcomes.items()
    }
    spent = [c for c in Category if any(ledger[c] > 0.0 for ledger in ledgers.values())]
    note = "share of all seconds, mean over the seeds"
    draw_heading(page, baseline, heading="Ledger", note=note, legend=())
    legend = [(_LEDGER_COLOURS[c], str(c).replace("_", " ")) for c in spent]
    top = _draw_legend(page, baseline + 16.0, legend) + 10.0
    for name, ledger in ledgers.items():
        page.text((PLOT_LEFT_PT - 6, top + 9), name, LABEL, align="right")
        left, whole_s = PLOT_LEFT_PT, sum(ledger.values())
        for category in spent:
            width = PLOT_WIDTH_PT * ledger[category] / whole_s
            page.box(_LEDGER_COLOURS[category], Rectangle(left, top, width, 12))
            left += width
        page.text(
            (PLOT_RIGHT_PT + 6, top + 9), f"{100 * ledger[Category.USEFUL] / whole_s:.1f}%", SMALL
        )
        top += 18.0
    return top
