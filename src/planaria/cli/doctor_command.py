"""The command `planaria doctor`: looks for what would keep a job from running, or slow it down.

It examines this machine, or over the port of a head all machines of a job and the paths between
them.
"""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.table import Table

from planaria.cli.asking import HeadTokenFile, ask_job, record_of
from planaria.cli.command_line import exit_codes, plain_table, table_console
from planaria.core.checkups import CheckResult, ClusterCheckup
from planaria.errors import ConfigError
from planaria.nodes.examination import checks_of_this_machine
from planaria.nodes.head.requests import Examine
from planaria.show.checkup_rows import Row, checkup_rows
from planaria.transport.credentials import read_credentials, token_path

_TIMEOUT_S: Final = 120.0  # Machines are examined for a minute at most, and then answer.
_FIELD: Final = "HOST:PORT"


@exit_codes()
def doctor(
    head: Annotated[
        str,
        typer.Argument(
            metavar=_FIELD,
            help="Address of a head: all machines that have joined it are examined, and the paths "
            "between them. Default: this machine alone.",
        ),
    ] = "",
    token_file: HeadTokenFile = "",
    has_bandwidth: Annotated[
        bool,
        typer.Option(
            "--bandwidth",
            help="Measure the bandwidth between machines also while the job trains, which slows it "
            "down meanwhile.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Checks this machine, or all machines of a job, for what a job needs; says what to change.

    With HOST:PORT, the job may train, or wait for machines. The exit code is 1 if something keeps
    every job from running.
    """
    if head:
        checkup = _checkup(head, token_file=token_file, has_bandwidth=has_bandwidth)
        rows = checkup_rows(checkup)
        facts: dict[str, Any] = {**msgspec.to_builtins(checkup), "checks": _facts(rows)}
        title = "where"
    elif has_bandwidth:
        remedy = "name the head of the machines between which it is to be measured: HOST:PORT"
        raise ConfigError("--bandwidth", True, remedy)
    else:
        rows = [Row("", check) for check in (*checks_of_this_machine(), _token_check(token_file))]
        facts, title = {"checks": _facts(rows)}, ""
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        table_console().print(_table(rows, title))
    if any(row.check.verdict == "problem" for row in rows):
        raise typer.Exit(1)


def _checkup(head: str, *, token_file: str, has_bandwidth: bool) -> ClusterCheckup:
    """What a head has found out of its machines.

    Raises:
        ConfigError: there is no head, or it does not answer; the text says what to do.
    """
    request = Examine(has_bandwidth)
    try:
        answer = ask_job(
            request, head=head, token_file=token_file, job="", timeout_s=_TIMEOUT_S, field=_FIELD
        )
    except ConfigError as error:
        if error.field != _FIELD:
            raise
        remedy = (
            f"{error.remedy}; start it with planaria train JOB --listen, which may wait for "
            "machines, and planaria agent --join on each of them; or examine one machine, there, "
            "without HOST:PORT"
        )
        raise ConfigError(_FIELD, head, remedy) from error
    return record_of(answer, ClusterCheckup, head=head, field=_FIELD)


def _token_check(token_file: str) -> CheckResult:
    """Whether the token file can be used; a machine without one can still train alone."""
    path = token_path(token_file)
    try:
        credentials = read_credentials(path)
    except ConfigError as error:
        if not token_file and isinstance(error.__cause__, FileNotFoundError):
            value = "none; jobs on several machines need one"
            return CheckResult(subject="token file", value=value)
        return CheckResult(subject="token file", value=str(path), remedy=error.remedy)
    until = f"valid until {credentials.last_instant():%Y-%m-%d}"
    return CheckResult(subject="token file", value=f"{credentials.fingerprint()}, {until}")


def _table(rows: Sequence[Row], title: str) -> Table:
    """A row per check: what was looked at, what it is like, and what to change.

    Args:
        title: title of the column that says where; "": there is no such column.
    """
    titles = (title, "", "") if title else ("this machine", "")
    table = plain_table(*titles, "", "what to change")
    for where, check in rows:
        place = (where,) if title else ()
        table.add_row(*place, check.subject, check.value, check.verdict, check.remedy)
    return table


def _facts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as they are in JSON; those of this machine alone do not say where."""
    return [
        {
            **({"where": where} if where else {}),
            "subject": check.subject,
            "value": check.value,
            "verdict": check.verdict,
            "remedy": check.remedy,
        }
        for where, check in rows
    ]
