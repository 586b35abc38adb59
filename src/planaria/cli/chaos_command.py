"""The command `planaria chaos`: tries to break a job, and reports the result."""

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import RenderableType

from planaria.chaos.runs import Chaos, RunOutcome
from planaria.cli.command_line import (
    JobFile,
    Settings,
    check_writable,
    exit_codes,
    text_console,
    write,
)
from planaria.errors import ConfigError
from planaria.job.scripts import named_job
from planaria.nodes.output import Outlet, finish, unfailing
from planaria.show.score import run_text, score, score_table

_MINUTES_MAX: Final = 60.0 * 24 * 30


@exit_codes()
def chaos(
    job: JobFile,
    minutes: Annotated[float, typer.Option(help="Begin new runs for this many minutes.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed from which the faults are drawn.")] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Write the score and every run to this JSON file.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Runs a job again and again under many faults; every run has to end with the same bits.

    Nodes are killed, stopped, cut off and preempted, other nodes join, workers crash, bits flip,
    and disks hang. Several faults may strike at once, and also during recoveries. Some runs have no
    usable temporary directory, or print where nobody reads. First the job trains without faults. If
    that would take longer than about three seconds, all runs train fewer iterations than the job
    file says, but at least six. Saves go to a temporary directory. A run that had to end early is
    resumed. If a run does not end as it must, the command writes all that is known of it to
    chaos-SEED-RUN.json, beside the report.
    """
    if not 0 < minutes <= _MINUTES_MAX:
        raise ConfigError("--minutes", minutes, f"must be above 0 and at most {_MINUTES_MAX:.0f}")
    check_writable("--report", report, job)
    directory = Path() if report is None else report.parent
    if not os.access(directory, os.W_OK):
        remedy = (
            "runs that do not end as they must are written to the current directory, which is not "
            "writable; name a report in a directory that is"
        )
        raise ConfigError("--report", "", remedy)
    overrides = list(settings or ())
    loaded_job = named_job(job, overrides)
    check_writable("--report", report, Path(loaded_job.config.model.profile))
    console = _Console()
    outcomes: list[RunOutcome] = []
    is_written = True
    runs = Chaos(loaded_job, seed=seed, doing=console.tell)
    try:
        for outcome in runs.outcomes(minutes=minutes):
            outcomes.append(msgspec.structs.replace(outcome, report=None, log=()))
            console.print(run_text(outcome))
            if outcome.violations:
                for violation in outcome.violations:
                    console.print(f"  {violation}")
                console.print(f"  {command_text(outcome, job=job, overrides=overrides)}")
                path = directory / f"chaos-{seed}-{outcome.number}.json"
                console.print(f"  seed {seed}; {_keep(outcome, path)}")
    finally:
        console.close(*((score_table(outcomes), f"seed {seed}") if outcomes else ()))
        if outcomes and report is not None:
            is_written = _write_report(report, seed, outcomes)
    if not is_written or any(outcome.violations for outcome in outcomes):
        raise typer.Exit(1)


def _write_report(path: Path, seed: int, outcomes: list[RunOutcome]) -> bool:
    """Writes the report, or says why it cannot: that is not to hide how the runs have ended."""
    data = msgspec.json.encode({"seed": seed, "score": score(outcomes), "runs": outcomes})
    try:
        write("--report", path, msgspec.json.format(data, indent=2))
    except ConfigError as error:
        typer.echo(f"planaria: {error}", err=True)
        return False
    return True


def _keep(outcome: RunOutcome, path: Path) -> str:
    """Writes all that is known of a run; returns where it is, or why it is nowhere."""
    data = msgspec.json.format(msgspec.json.encode(outcome), indent=2)
    try:
        write("--report", path, data)
    except ConfigError as error:  # What was found so far, and further runs, matter more.
        return f"what is known of this run is not in {path}: it {error.remedy}"
    return f"all that is known of this run is in {path}"


class _Console:
    """A console for the command's output; runs do not wait for it if nobody reads it."""

    def __init__(self) -> None:
        self._console = text_console(unfailing(sys.stdout), soft_wrap=True)
        self._outlet = Outlet(self._console.print)

    def tell(self, text: str) -> None:
        """Prints what begins, if the console is a terminal."""
        if self._console.is_terminal:
            self._post(text, style="dim")

    def print(self, text: str) -> None:
        """Prints a line."""
        self._post(text)

    def close(self, *last: RenderableType) -> None:
        """Prints all queued lines, then `last`; gives up if nobody reads."""
        finish(self._outlet, *(partial(self._console.print, text) for text in last))

    def _post(self, text: str, *, style: str = "") -> None:
        line = partial(self._console.print, text, style=style)
        self._outlet.post(line, num_bytes=len(text))


def command_text(outcome: RunOutcome, *, job: Path, overrides: list[str]) -> str:
    """The command line that repeats a run; a comment names surroundings that a person must make."""
    words = ["planaria", "train", str(job)]
    for setting in (*overrides, *outcome.settings, "checkpoint.directory=chaos-checkpoints"):
        words += ["--set", setting]
    for spec in outcome.specs:
        words += ["--inject", spec]
    comment = f"  # {' '.join(outcome.surroundings)}" if outcome.surroundings else ""
    return shlex.join(words) + comment
