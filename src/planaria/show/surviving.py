"""How likely every layer of a plan survives, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from planaria.placement.layer_survival import LOST_MAX, LayerSurvival
from planaria.show.copies import probability_text


def survival_table(survival: Sequence[LayerSurvival]) -> Table:
    """A row for each number of lost nodes."""
    title, is_cut = "Every layer survives", len(survival) == LOST_MAX
    caption = f"more than {LOST_MAX} lost nodes are not told" if is_cut else None
    table = Table(box=box.SIMPLE, title=title, title_justify="left", caption=caption)
    for name in ("lost nodes", "by live holders alone", "by copies, too"):
        table.add_column(name, justify="right")
    for row in survival:
        table.add_row(str(row.num_lost), probability_text(row.live), probability_text(row.kept))
    return table


def survival_json(survival: Sequence[LayerSurvival]) -> list[dict[str, Any]]:
    """The same; errors are 0 where probabilities are exact."""
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
