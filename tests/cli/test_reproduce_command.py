"""The command `planaria reproduce`."""

import json
from pathlib import Path

import pytest

from helpers.command import assert_mistake, command
from planaria.cli import reproduce_command
from planaria.papers.experiments import EXPERIMENTS


def test_a_table_is_printed_as_json_with_published_numbers_and_ours() -> None:
    """Scripts compare these."""
    result = json.loads(command("reproduce", "oobleck-table-2", "--json").stdout)

    assert result["name"] == "oobleck-table-2"
    row = next(
        row
        for row in result["rows"]
        if (row["model"], row["system"], row["frequency"]) == ("GPT-3 6.7b", "oobleck", "10m")
    )
    assert row["published"] == 3.55
    assert row["ratio"] == row["ours"] / row["published"]
    assert row["how"].startswith("simulated")


def test_a_table_is_printed_for_people() -> None:
    """With the verdict below."""
    output = command("reproduce", "oobleck-table-4").stdout

    assert "Oobleck (SOSP '23), Table 4" in output
    assert "17 of 17 rows with a printed number come back" in output


def test_without_a_name_all_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what comes back and why not; here only two, as all take some seconds."""
    two = {name: EXPERIMENTS[name] for name in ("oobleck-table-2", "gemini-table-2")}
    monkeypatch.setattr(reproduce_command, "EXPERIMENTS", two)

    output = command("reproduce").stdout

    assert "oobleck-table-2" in output
    reasons = output.partition("What does not come back:")[2]
    assert "gemini-table-2, 1 row: 96 layers" in reasons
    assert "oobleck-table-2" not in reasons


def test_an_unknown_name_is_a_mistake_that_names_the_known_ones() -> None:
    """Names are long; nobody guesses them."""
    assert_mistake(command("reproduce", "oobleck-table-9"), "oobleck-table-9", "oobleck-table-2")


def test_a_table_is_drawn(tmp_path: Path) -> None:
    """The same bytes each time; a plot of all of them at once is refused."""
    files = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for file in files:
        command("reproduce", "oobleck-table-4", "--plot", str(file))

    assert b"varuna-no-checkpoint" in files[0].read_bytes()
    assert files[0].read_bytes() == files[1].read_bytes()
    assert_mistake(command("reproduce", "--plot", str(files[0])), "--plot", "name a table")
