"""The command `planaria chaos`: tries to break a job, and says what came of it."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from planaria.chaos import Chaos, Outcome
from planaria.command_line import JobFile, Settings, check_writable, exit_codes, write
from planaria.errors import ConfigError
from planaria.scripts import named_job
from planaria.show.score import run_text, score, score_table

_MINUTES_MAX: Final = 60.0 * 24 * 30


@exit_codes()
def chaos(
    job: JobFile,
    minutes: Annotated[float, typer.Option(help="Begin runs for so long.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Which faults are drawn follows from it.")] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Write the score and every run to a JSON file.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Runs a job again and again under many faults; every run has to end with the same bits.

    Nodes are killed, stopped, cut off, taken away and joined, workers crash, bits flip: several at
    once, also during recoveries. First the job trains in peace. It trains fewer iterations than
    its file says where these would take longer than about three seconds (six at least), and saves
    to a temporary directory. A run that had to end early is resumed. What is known of a run that is
    not as it must be is written to chaos-SEED-RUN.json, beside the report.
    """
    if not 0 < minutes <= _MINUTES_MAX:
        raise ConfigError("--minutes", minutes, f"must be above 0 and at most {_MINUTES_MAX:.0f}")
    check_writable("--report", report)
    overrides = list(settings or ())
    console = Console(soft_wrap=True, highlight=False)
    outcomes: list[Outcome] = []
    runs = Chaos(named_job(job, overrides), seed=seed, doing=_Doing(console).tell)
    try:
        for outcome in runs.outcomes(minutes=minutes):
            outcomes.append(replace(outcome, report=None, log=()))
            console.print(run_text(outcome), markup=False)
            if outcome.wrongs:
                directory = Path() if report is None else report.parent
                path = directory / f"chaos-{seed}-{outcome.number}.json"
                write(path, msgspec.json.format(msgspec.json.encode(outcome), indent=2))
                console.print(f"  seed {seed}, all that is known: {path}", markup=False)
                for wrong in outcome.wrongs:
                    console.print(f"  {wrong}", markup=False)
                console.print(
                    f"  {command_text(outcome, job=job, overrides=overrides)}", markup=False
                )
    finally:
        if outcomes:
            console.print(score_table(outcomes))
            console.print(f"seed {seed}")
        if outcomes and report is not None:
            data = msgspec.json.encode({"seed": seed, "score": score(outcomes), "runs": outcomes})
            write(report, msgspec.json.format(data, indent=2))
    if any(outcome.wrongs for outcome in outcomes):
        raise typer.Exit(1)


class _Doing:
    """Says what begins, where somebody looks."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def tell(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, style="dim", markup=False)


def command_text(outcome: Outcome, *, job: Path, overrides: list[str]) -> str:
    """The command line that does what a run did."""
    words = ["planaria", "train", str(job)]
    for setting in (*overrides, *outcome.settings, "checkpoint.directory=chaos-checkpoints"):
        words += ["--set", setting]
    for spec in outcome.specs:
        words += ["--inject", spec]
    return shlex.join(words)
