"""Tables, JSON and a picture that show which nodes keep copies of whose state, what the copies take
of the network, and how likely all state survives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planaria.placement.idle import Sending
from planaria.placement.layer_survival import LOST_MAX, LayerSurvival
from planaria.placement.placement import Placement
from planaria.placement.survival import Estimate
from planaria.show.pictures.figures import draw_heading
from planaria.show.pictures.page import (
    FORWARD_COLOUR,
    GROUND_COLOUR,
    LABEL,
    LEFT_PT,
    MEMORY_COLOUR,
    PLOT_LEFT_PT,
    PLOT_WIDTH_PT,
    SMALL,
    TITLE,
    Format,
    Page,
    Rectangle,
)
from planaria.show.words import bytes_text, count_text, ranges_text, seconds_text

_ROWS_MAX: Final = 32
_CELL_PT_MAX: Final = 16.0
_NAMES_MAX: Final = 64  # Names of nodes along an edge of the picture.


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """A placement of copies and its probabilities of survival.

    Attributes:
        copies: number of copies of each state, the node's own one included.
        by_lost: probability that all state survives, by the number of lost nodes.
        risks: probability of losing state under the failures that were asked for, by strategy.
    """

    strategy: str
    placement: Placement
    copies: int
    by_lost: Mapping[int, Estimate]
    risks: Mapping[str, float]

    @property
    def title(self) -> str:
        """The numbers of nodes and copies, and the strategy."""
        num_nodes = len(self.placement.holders)
        copies = f"{count_text(self.copies, 'copy')} of each state"
        return f"{count_text(num_nodes, 'node')}, {copies}, {self.strategy}"


def placement_table(result: PlacementResult) -> Group:
    """A table of the nodes that keep each state, and one of the probabilities of survival."""
    holders = Table("state of nodes", "is kept by", box=box.SIMPLE)
    groups = _groups_by_holders(result.placement)
    for nodes, kept_by in groups[:_ROWS_MAX]:
        holders.add_row(ranges_text(nodes), ranges_text(kept_by))
    survives = Table(box=box.SIMPLE)
    survives.add_column("lost nodes", justify="right")
    survives.add_column("all state survives", justify="right")
    for lost, estimate in result.by_lost.items():
        survives.add_row(str(lost), probability_text(estimate))
    parts: list[RenderableType] = [Text(result.title, style="bold"), holders]
    if len(groups) > _ROWS_MAX:
        parts.append(Text(f"{len(groups) - _ROWS_MAX} more rows are not shown; --json prints all"))
    parts.append(survives)
    if result.risks:
        risks = ", ".join(f"{name} {risk:.3g}" for name, risk in result.risks.items())
        parts.append(Text(f"probability of losing state under these failures: {risks}"))
    return Group(*parts)


def probability_text(estimate: Estimate) -> str:
    """A probability in percent, with its error if it has one.

    One without an error is not rounded to 100% unless it is 1.
    """
    error = f" +- {100.0 * estimate.error:.2f}%" if estimate.error else ""
    if not error and 0.99995 <= estimate.probability < 1.0:
        return "> 99.99%"
    return f"{100.0 * estimate.probability:.2f}%{error}"


def placement_figure(result: PlacementResult, *, picture: Format) -> bytes:
    """A picture file with a matrix of states and the nodes that keep them, and bars below it with
    the probability that all state survives."""
    page = Page()
    page.text((LEFT_PT, 42), result.title, TITLE)
    draw_heading(
        page,
        76,
        heading="Copies",
        note="a row is a node's state, a column a node that may keep it",
        legend=((FORWARD_COLOUR, "own"), (MEMORY_COLOUR, "copy")),
    )
    holders = result.placement.holders
    cell = min(_CELL_PT_MAX, PLOT_WIDTH_PT / len(holders))
    gap, top, left = cell * 0.08, 98.0, PLOT_LEFT_PT
    page.ground(GROUND_COLOUR, Rectangle(left, top, cell * len(holders), cell * len(holders)))
    step = -(-len(holders) // _NAMES_MAX)
    for node, nodes in enumerate(holders):
        if node % step == 0:
            middle = cell * (node + 0.5)
            page.text((left - 6, top + middle + 2.5), str(node), SMALL, align="right")
            page.text((left + middle, top - 4), str(node), SMALL, align="center")
        for holder in nodes:
            colour = FORWARD_COLOUR if holder == node else MEMORY_COLOUR
            place = (left + cell * holder + gap, top + cell * node + gap)
            page.box(colour, Rectangle(*place, cell - 2 * gap, cell - 2 * gap))
    top += cell * len(holders) + 40
    return page.content(_draw_survival(page, result.by_lost, top=top) + 24, picture)


def _draw_survival(page: Page, by_lost: Mapping[int, Estimate], *, top: float) -> float:
    """Draws a bar for each number of lost nodes; returns the y at which the bars end."""
    note = "probability that all state survives, by the nodes that are lost at once"
    draw_heading(page, top, heading="Survival", note=note, legend=())
    top += 14
    for lost, estimate in by_lost.items():
        page.text((PLOT_LEFT_PT - 6, top + 9), count_text(lost, "node"), LABEL, align="right")
        page.ground(GROUND_COLOUR, Rectangle(PLOT_LEFT_PT, top, PLOT_WIDTH_PT, 12))
        width = PLOT_WIDTH_PT * estimate.probability
        page.box(MEMORY_COLOUR, Rectangle(PLOT_LEFT_PT, top, width, 12))
        text = probability_text(estimate)
        page.text((PLOT_LEFT_PT + PLOT_WIDTH_PT + 6, top + 9), text, LABEL)
        top += 16
    return top


def _groups_by_holders(placement: Placement) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Groups of nodes whose state is kept by the same nodes, each group with these."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for node, nodes in enumerate(placement.holders):
        groups.setdefault(tuple(sorted(nodes)), []).append(node)
    return [(tuple(nodes), kept_by) for kept_by, nodes in groups.items()]


# -- what copies in memory take of a plan's network, in words and as JSON --------------------------


def sending_text(sending: Mapping[int, Sending], copies: int) -> Text:
    """Sentences about the node that takes longest to send its copies: a version of the copies is
    complete only when that node has sent its part."""
    if not sending:
        return Text("No copies are sent: every node keeps its own, and all nodes hold every layer.")
    node, slowest = _slowest(sending)
    text = Text.assemble(
        (f"{count_text(copies, 'copy')} of each layer", "bold"),
        f": of a version node {node} sends {bytes_text(slowest.num_bytes)}, which takes "
        f"{seconds_text(slowest.sends_s)} of the {seconds_text(slowest.idle_s)} in which its "
        "network is idle in an iteration.\n",
    )
    if slowest.iterations == 1:
        return text.append("Every iteration has room for a version.")
    return text.append(
        f"A version takes {slowest.iterations} iterations; if each iteration waited for one, it "
        f"would be {seconds_text(slowest.longer_s)} longer."
    )


def sending_json(sending: Mapping[int, Sending]) -> dict[str, Any] | None:
    """The facts of `sending_text` as JSON; None if no copies are sent."""
    if not sending:
        return None
    node, slowest = _slowest(sending)
    return {
        "node": node,
        "bytes": slowest.num_bytes,
        "sends_s": slowest.sends_s,
        "idle_s": slowest.idle_s,
        "iterations": slowest.iterations,
        "longer_s": slowest.longer_s,
    }


def _slowest(sending: Mapping[int, Sending]) -> tuple[int, Sending]:
    """The node that takes longest to send its copies (of equal ones the lowest), with its costs."""
    node = min(
        sending,
        key=lambda n: (-sending[n].iterations, -sending[n].longer_s, -sending[n].sends_s, n),
    )
    return node, sending[node]


# -- how likely every layer of a plan survives, as a table and as JSON -----------------------------


def survival_table(survival: Sequence[LayerSurvival]) -> Table:
    """The probability that every layer survives, a row for each number of lost nodes."""
    title, is_cut = "Every layer survives", len(survival) == LOST_MAX
    caption = f"not shown: more than {LOST_MAX} lost nodes" if is_cut else None
    table = Table(box=box.SIMPLE, title=title, title_justify="left", caption=caption)
    for name in ("lost nodes", "by live holders alone", "by copies, too"):
        table.add_column(name, justify="right")
    for row in survival:
        table.add_row(str(row.num_lost), probability_text(row.live), probability_text(row.kept))
    return table


def survival_json(survival: Sequence[LayerSurvival]) -> list[dict[str, Any]]:
    """The rows of `survival_table` as JSON; the error of an exact probability is 0."""
    return [
        {
            "lost": row.num_lost,
            "live": row.live.probability,
            "live_error": row.live.error,
            "kept": row.kept.probability,
            "kept_error": row.kept.error,
        }
        for row in survival
    ]
