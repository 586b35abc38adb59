"""`planaria doctor`: what it prints of this machine, and its exit codes."""

import json
from pathlib import Path

import pytest

from helpers.command import command
from planaria.cli import doctor_command
from planaria.core.checkups import CheckResult
from planaria.transport.credentials import read_credentials, write_credentials

FINE = CheckResult(subject="memory", value="1.0 GiB")
SLOW = CheckResult(subject="clock", value="not synchronised", remedy="run chronyd")
BROKEN = CheckResult(subject="torch", value="not installed", remedy="install it", is_fatal=True)


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("PLANARIA_TOKEN_FILE", raising=False)


def with_checks(monkeypatch: pytest.MonkeyPatch, *checks: CheckResult) -> None:
    monkeypatch.setattr(doctor_command, "checks_of_this_machine", lambda: checks)


def test_this_machine_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, FINE, SLOW)
    result = command("doctor")
    rows = [line.split() for line in result.output.splitlines()]

    assert result.exit_code == 0
    assert ["memory", "1.0", "GiB", "ok"] in rows
    assert ["clock", "not", "synchronised", "warning", "run", "chronyd"] in rows
    assert any(row[:3] == ["token", "file", "none;"] for row in rows)


def test_what_keeps_every_job_from_running_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, FINE, BROKEN)

    assert command("doctor").exit_code == 1
    assert command("doctor", "--json").exit_code == 1


def test_scripts_read_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, SLOW)
    (clock, token) = json.loads(command("doctor", "--json").output)["checks"]

    assert clock == {
        "subject": "clock",
        "value": "not synchronised",
        "verdict": "warning",
        "remedy": "run chronyd",
    }
    assert token["verdict"] == "ok"


def test_a_token_file_that_will_not_do_is_told(tmp_path: Path) -> None:
    """Before an agent is started with it."""
    write_credentials(tmp_path / "token")
    fingerprint = read_credentials(tmp_path / "token").fingerprint()

    assert fingerprint in command("doctor", "--token-file", "token").output
    (tmp_path / "token").chmod(0o644)
    refused = json.loads(command("doctor", "--token-file", "token", "--json").output)["checks"][-1]
    assert (refused["value"], refused["verdict"]) == ("token", "warning")
    assert "chmod 600" in refused["remedy"]
    missing = json.loads(command("doctor", "--token-file", "none", "--json").output)["checks"][-1]
    assert "cannot be read" in missing["remedy"]
