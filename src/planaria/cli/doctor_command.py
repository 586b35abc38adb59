"""The command `planaria doctor`: looks for what would keep a job from running, or slow it down."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from planaria.cli.asking import HeadTokenFile
from planaria.cli.command_line import exit_codes
from planaria.core.checkups import CheckResult
from planaria.errors import ConfigError
from planaria.nodes.examination import checks_of_this_machine
from planaria.transport.credentials import read_credentials, token_path


@exit_codes()
def doctor(
    token_file: HeadTokenFile = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Checks this machine for what a job needs, and says what to change.

    The exit code is 1 if something keeps every job from running here.
    """
    checks = (*checks_of_this_machine(), _token_check(token_file))
    if as_json:
        sys.stdout.write(json.dumps({"checks": _facts(checks)}, indent=2) + "\n")
    else:
        Console(highlight=False).print(_table(checks), markup=False)
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(1)


def _token_check(token_file: str) -> CheckResult:
    """Whether the token file can be used; a machine without one can still train alone."""
    path = token_path(token_file)
    if not token_file and not path.exists():
        return CheckResult(subject="token file", value="none; jobs on several machines need one")
    try:
        credentials = read_credentials(path)
    except ConfigError as error:
        return CheckResult(subject="token file", value=str(path), remedy=error.remedy)
    until = f"valid until {credentials.last_instant():%Y-%m-%d}"
    return CheckResult(subject="token file", value=f"{credentials.fingerprint()}, {until}")


def _table(checks: Sequence[CheckResult]) -> Table:
    """A row per check: what was looked at, what it is like, and what to change."""
    table = Table("this machine", "", "", "what to change", box=box.SIMPLE, pad_edge=False)
    for check in checks:
        table.add_row(check.subject, check.value, check.verdict, check.remedy)
    return table


def _facts(checks: Sequence[CheckResult]) -> list[dict[str, Any]]:
    return [
        {
            "subject": check.subject,
            "value": check.value,
            "verdict": check.verdict,
            "remedy": check.remedy,
        }
        for check in checks
    ]
