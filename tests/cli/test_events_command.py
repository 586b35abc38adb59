"""`planaria events`: what it reads, and what it refuses."""

import json
import socket
from pathlib import Path

import pytest

from helpers.command import assert_mistake, command, keep_request_sockets_in

EVENT = {"kind": "lost", "nodes": [3], "iteration": 5, "reason": "its connection closed"}
LINE = "iteration 5: node 3 was lost (its connection closed)\n"


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, *events: object) -> Path:
    """A report with these events; null is what JSON has for no loss."""
    path = Path(name)
    path.write_text(json.dumps({"version": 1, "final": {"loss": None}, "events": events}))
    return path


def test_a_report_is_explained_and_its_events_are_json() -> None:
    """Reports of older versions lack keys, those of newer ones have more."""
    path = write("report.json", EVENT | {"more": 1})

    assert command("events", str(path)).output == LINE
    (event,) = json.loads(command("events", str(path), "--json").output)
    assert (event["kind"], event["nodes"], event["candidates"]) == ("lost", [3], [])


def test_a_job_in_peace_has_nothing_to_explain() -> None:
    """Rather than nothing at all."""
    output = command("events", str(write("report.json"))).output

    assert output == "nothing happened: no node was lost, and none came or left\n"


def test_of_a_directory_every_report_is_explained() -> None:
    """Other files may lie there too."""
    write("b.json", EVENT)
    write("a.json")
    Path("other.json").write_text('{"traceEvents": []}')
    Path("broken.json").write_text("{")

    output = command("events", ".").output
    told = json.loads(command("events", ".", "--json").output)

    assert (
        output
        == f"a.json\nnothing happened: no node was lost, and none came or left\nb.json\n{LINE}"
    )
    assert {path: len(events) for path, events in told.items()} == {"a.json": 0, "b.json": 1}


def test_without_a_report_a_running_job_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there is none here."""
    keep_request_sockets_in(Path("planaria"), monkeypatch)

    for told in (command("events"), command("drain", "3")):
        assert_mistake(told, "planaria: no job of yours runs here\n")
    assert_mistake(command("events", "--job", "mine"), "no such job of yours runs")


def test_of_several_jobs_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an option that was not given, and so is not at fault."""
    directory = Path("planaria")
    keep_request_sockets_in(directory, monkeypatch)
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        for number, listening in enumerate((one, other), start=1):
            listening.bind(str(directory / f"job{number}-7.sock"))
            listening.listen()
        told = command("events")

    assert_mistake(told, "planaria: 2 jobs run here: say with --job which of job1, job2\n")


def test_what_is_no_report_is_refused() -> None:
    """With what is wrong with it."""
    Path("trace.json").write_text('{"traceEvents": []}')
    Path("empty").mkdir()

    assert_mistake(command("events", "none.json"), "REPORT = 'none.json'", "No such file")
    assert_mistake(command("events", "trace.json"), "is not a report of planaria train --report")
    assert_mistake(
        command("events", "empty"), "there is no report of planaria train in this directory"
    )


def test_a_job_is_not_named_where_a_report_is() -> None:
    """It was left out of account, as if the report were that job's."""
    for option in ("--job", "--head", "--token-file"):
        refused = command("events", "report.json", option, "a")
        assert_mistake(refused, option, "leave it out where a report is named")
