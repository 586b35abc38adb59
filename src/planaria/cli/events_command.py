"""The command `planaria events`: explains what happened in a job, and how planaria answered it."""

import json
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from planaria.cli.asking import Head, HeadTokenFile, JobName, ask_job, record_of
from planaria.cli.command_line import exit_codes, text_console
from planaria.errors import ConfigError
from planaria.job.checks import name_refusals
from planaria.nodes.head.requests import TellEvents
from planaria.observe.metrics import EventRecord
from planaria.show.story import event_lines


@exit_codes()
def events(
    report: Annotated[
        Path | None,
        typer.Argument(
            metavar="REPORT.json|DIRECTORY",
            help="A report of `planaria train`, or a directory with reports. Default: the job that "
            "runs on this machine.",
        ),
    ] = None,
    head: Head = "",
    token_file: HeadTokenFile = "",
    job: JobName = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explains each event of a job: the possible answers with their prices, which answer was
    chosen and why, and how long it took compared with the prediction."""
    if report is None:
        answer = ask_job(TellEvents(), head=head, token_file=token_file, job=job)
        running = record_of(answer, tuple[EventRecord, ...], head=head, field="--head")
        events_by_path = {Path(): running}
    elif head or token_file or job:
        fields = {"--head": head, "--token-file": token_file, "--job": job}
        field, value = next(pair for pair in fields.items() if pair[1])
        raise ConfigError(field, value, "leave it out where a report is named")
    else:
        events_by_path = {path: _events(path) for path in _reports(report)}
    if as_json:
        by_path = {
            str(path): msgspec.to_builtins(events_of_report)
            for path, events_of_report in events_by_path.items()
        }
        is_one = report is None or report.is_file()
        shown = next(iter(by_path.values())) if is_one else by_path
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
        return
    console = text_console(soft_wrap=True)
    for path, events_of_report in events_by_path.items():
        if len(events_by_path) > 1:
            console.print(str(path), style="bold")
        if not events_of_report:
            console.print("nothing happened: no node was lost, and none came or left")
        for event in events_of_report:
            first, *details = event_lines(event)
            console.print(first, style="bold")
            for line in details:
                console.print(f"  {line}")


def _reports(path: Path) -> list[Path]:
    """The path itself if it is a file; else the reports in the directory, sorted by name."""
    with name_refusals("REPORT", str(path)):
        if not path.is_dir():
            return [path]
    reports = [file for file in sorted(path.glob("*.json")) if _is_report(file)]
    if not reports:
        raise ConfigError(
            "REPORT", str(path), "there is no report of planaria train in this directory"
        )
    return reports


def _is_report(path: Path) -> bool:
    try:
        _events(path)
    except ConfigError:
        return False
    return True


def _events(path: Path) -> tuple[EventRecord, ...]:
    """The events of a report.

    Raises:
        ConfigError: the file cannot be read, or is no report.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        remedy = f"cannot be read: {error.strerror}"
        raise ConfigError("REPORT", str(path), remedy) from error
    try:
        return msgspec.json.decode(data, type=_ReportEvents).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        remedy = f"is not a report of planaria train --report: {error}"
        raise ConfigError("REPORT", str(path), remedy) from error


class _ReportEvents(msgspec.Struct, frozen=True):
    """The part of a report that this command reads."""

    events: tuple[EventRecord, ...]
