"""Published numbers beside ours, as a picture with bars."""

from collections.abc import Sequence
from typing import Final

from planaria.papers.rows import Experiment, Key, PublishedRow
from planaria.show.pictures.figures import draw_heading
from planaria.show.pictures.page import (
    FORWARD_COLOUR,
    GRID_COLOUR,
    LABEL,
    LEFT_PT,
    RIGHT_PT,
    SMALL,
    TITLE,
    Format,
    Page,
    Rectangle,
)
from planaria.show.reproductions import keys_text, number_text

_BAR_LEFT_PT: Final = 330.0
_BAR_PT: Final = 440.0  # Length of the longest bar.


def reproduction_figure(
    experiment: Experiment, rows: Sequence[PublishedRow], *, picture: Format
) -> bytes:
    """A picture file with a bar for each published number, and one for ours below it.

    Rows of a model and quantity share a scale, or rows with the same first key.
    """
    page = Page()
    page.text((LEFT_PT, 42), experiment.title, TITLE)
    legend = ((GRID_COLOUR, "published"), (FORWARD_COLOUR, "ours"))
    note = f"{experiment.source}; {experiment.unit}"
    draw_heading(page, 66, heading=experiment.name, note=note, legend=legend)
    largest: dict[tuple[Key, ...], float] = {}
    for row in rows:
        group = _scale_group(row)
        largest[group] = max(largest.get(group, 0.0), row.published or 0.0, row.ours or 0.0)
    top = 84.0
    for row in rows:
        scale = _BAR_PT / (largest[_scale_group(row)] or 1.0)
        width = _BAR_LEFT_PT - LEFT_PT - 8
        page.text((LEFT_PT, top + 10), page.shortened_text(keys_text(row), width, LABEL), LABEL)
        for place, number, colour in (
            (top + 2, row.published, GRID_COLOUR),
            (top + 8, row.ours, FORWARD_COLOUR),
        ):
            if number is not None:
                page.box(colour, Rectangle(_BAR_LEFT_PT, place, max(0.5, number * scale), 5))
        numbers = f"{number_text(row.published)}   {number_text(row.ours)}"
        page.text((RIGHT_PT, top + 10), numbers, SMALL, align="right")
        top += 18
    return page.content(top + 24, picture)


def _scale_group(row: PublishedRow) -> tuple[Key, ...]:
    named = tuple(row.keys[name] for name in ("model", "quantity") if name in row.keys)
    return named or (next(iter(row.keys.values())),)
