"""The command `planaria reproduce`: numbers of the published tables and figures, beside ours."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from planaria.cli.command_line import check_writable, exit_codes, text_console, write
from planaria.errors import ConfigError
from planaria.papers.experiments import EXPERIMENTS, named_experiment
from planaria.show.pictures.page import picture_format
from planaria.show.pictures.reproduction_figure import reproduction_figure
from planaria.show.reproductions import (
    reproduction_json,
    reproduction_table,
    reproductions_table,
)

ExperimentName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A table or figure, such as oobleck-table-2. Default: all of them, in brief.",
        show_default=False,
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(help="Draw the rows of NAME as bars to this file: .svg, .png or .pdf."),
]


@exit_codes()
def reproduce(
    name: ExperimentName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: PlotFile = None,
) -> None:
    """Computes tables and figures of the papers of Oobleck, Gemini and Odyssey.

    Each row has the published number, ours, their ratio, and how ours came about; a number that
    does not come back has the reason.
    """
    picture = None if plot is None else picture_format("--plot", plot.name)
    check_writable("--plot", plot)
    if name is None and plot is not None:
        raise ConfigError("--plot", str(plot), "name a table or figure, too")
    experiments = EXPERIMENTS if name is None else {name: named_experiment(name)}
    results = {known: experiment.rows() for known, experiment in experiments.items()}
    for known, rows in results.items():
        if plot is not None and picture is not None:
            write("--plot", plot, reproduction_figure(experiments[known], rows, picture=picture))
    if as_json:
        contents = [reproduction_json(known, rows) for known, rows in results.items()]
        sys.stdout.write(json.dumps(contents if name is None else contents[0], indent=2) + "\n")
    elif name is None:
        text_console(highlight=True).print(reproductions_table(experiments, results))
    else:
        text_console(highlight=True).print(reproduction_table(experiments[name], results[name]))
