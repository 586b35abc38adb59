"""Which files can be replayed, and what is said of others."""

import json
from pathlib import Path
from typing import Any

import pytest

from planaria.errors import ConfigError
from planaria.job.replays.recorded_run import read_run
from planaria.observe.metrics import REPORT_VERSION

REPORT: dict[str, Any] = {
    "job": {},
    "events": [],
    "ledger": {},
    "version": REPORT_VERSION,
    "iterations": [{"iteration": 0}],
}


def refusal(tmp_path: Path, content: str) -> str:
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_run(path, option="--replay")
    return str(raised.value)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": 1}, "has version 1, which has no inputs of decisions; train again"),
        ({"version": REPORT_VERSION + 1}, f"and this planaria knows {REPORT_VERSION}"),
        ({"version": "two"}, "has version two"),
        ({"iterations": []}, "no iteration of that run was committed"),
        ({}, "damaged report"),
    ],
)
def test_a_report_that_cannot_be_replayed_is_refused_with_the_reason(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    """An older one lacks what is needed; a newer one may mean something else by it."""
    text = refusal(tmp_path, json.dumps(REPORT | changed))

    assert why in text
    assert text.startswith("--replay = ")


@pytest.mark.parametrize("content", ["[1, 2]", "3", '{"version": 1, "systems": {}}', "{}"])
def test_json_of_something_else_is_told_from_a_report(tmp_path: Path, content: str) -> None:
    """The result of a simulation is JSON with a version, too."""
    assert "it is no report" in refusal(tmp_path, content)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """A job file given by mistake."""
    assert "is not JSON" in refusal(tmp_path, "[model]\nkind = 'hf'\n")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """With its name."""
    with pytest.raises(ConfigError, match=r"nowhere\.json.*cannot be read"):
        read_run(tmp_path / "nowhere.json", option="--calibrate")
