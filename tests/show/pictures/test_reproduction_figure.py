"""Published numbers beside ours, as a picture."""

import re

from planaria.papers.experiments import EXPERIMENTS
from planaria.papers.rows import How, PublishedRow
from planaria.show.pictures.reproduction_figure import reproduction_figure


def test_rows_of_one_quantity_are_drawn_to_one_scale() -> None:
    """93 s of one system are shorter than 6,360 s of another; the picture shows it."""
    short = PublishedRow({"system": "a", "quantity": "s"}, None, 1.0, How.SIMULATED)
    experiment = EXPERIMENTS["gemini-figure-10"]

    def widths(other: PublishedRow) -> set[int]:
        """Widths of our bars, points."""
        picture = reproduction_figure(experiment, (short, other), picture="svg").decode()
        paths = re.findall(r'<path d="([^"]*)"[^>]*style="fill: #3d94c7', picture)
        points = [float(x) for x, _ in re.findall(r"([\d.]+) ([\d.]+)", " ".join(paths))]
        return {round(x - min(points)) for x in points if x - min(points) > 1}

    assert 110 in widths(PublishedRow({"system": "b", "quantity": "s"}, None, 4.0, How.SIMULATED))
    assert 110 not in widths(
        PublishedRow({"system": "b", "quantity": "h"}, None, 4.0, How.SIMULATED)
    )
