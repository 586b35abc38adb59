"""`planaria doctor`: what it prints of this machine and of those of a head, and its exit codes."""

import json
from pathlib import Path

import msgspec
import pytest

from helpers.command import command
from planaria.cli import doctor_command
from planaria.core.checkups import CheckResult, ClusterCheckup, MachineCheckup, PathCheck
from planaria.nodes.head.requests import Examine, RequestReply
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


def test_no_word_is_cut_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a path, or half of what to change, is of no use."""
    monkeypatch.setenv("COLUMNS", "40")
    remedy = "systemd-timesyncd-or-another-long-word"
    with_checks(monkeypatch, CheckResult(subject="clock", value="wrong", remedy=remedy))
    output = command("doctor").output

    assert "\u2026" not in output  # The sign of what was cut.


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


def test_a_home_that_cannot_be_entered_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback. Root enters any directory, so its name is too long to be looked at."""
    monkeypatch.setenv("HOME", f"/{'home' * 100}")
    with_checks(monkeypatch, FINE)
    result = command("doctor", "--json")

    token = json.loads(result.output)["checks"][-1]
    assert (result.exit_code, token["verdict"]) == (0, "warning")
    assert "cannot be read" in token["remedy"]


def test_without_a_head_there_the_user_is_told_what_to_start(tmp_path: Path) -> None:
    write_credentials(tmp_path / "token")
    result = command("doctor", "127.0.0.1:1", "--token-file", "token")

    assert result.exit_code == 2
    assert "planaria train JOB --listen" in result.stderr
    assert "planaria agent --join" in result.stderr


def test_bandwidth_needs_machines_between_which_it_is_measured() -> None:
    result = command("doctor", "--bandwidth")

    assert result.exit_code == 2
    assert "HOST:PORT" in result.stderr


CHECKUP = ClusterCheckup(
    head_versions={},
    machines=(
        MachineCheckup(name="a", host="10.0.0.1", node=0, processor="x", versions={"torch": "1"}),
        MachineCheckup(name="b", host="10.0.0.2", node=1, processor="x", versions={"torch": "2"}),
    ),
    paths=(PathCheck(source="a", target="b", latency_s=1e-3),),
)


def test_the_machines_of_a_head_are_told_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in JSON, with the facts that the rows are made of."""
    requests = []

    def reply(request: Examine, **_: object) -> RequestReply:
        requests.append(request)
        return RequestReply(is_done=True, text=msgspec.json.encode(CHECKUP).decode())

    monkeypatch.setattr(doctor_command, "ask_job", reply)
    result = command("doctor", "head:1")
    facts = json.loads(command("doctor", "head:1", "--bandwidth", "--json").output)

    assert result.exit_code == 1  # The machines have not answered.
    assert "versions of torch" in result.output
    assert "a to b" in result.output
    assert facts["paths"][0]["latency_s"] == 1e-3
    assert {check["where"] for check in facts["checks"]} == {"a, b", "machines", "a to b"}
    assert requests == [Examine(has_bandwidth=False), Examine(has_bandwidth=True)]


def test_what_a_head_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = RequestReply(is_done=False, text="the machines are being examined already")
    monkeypatch.setattr(doctor_command, "ask_job", lambda _, **__: reply)

    result = command("doctor", "head:1")
    assert result.exit_code == 2
    assert "being examined already" in result.stderr
