"""`planaria simulate --model`: what pays most, without a scenario file."""

import json
from pathlib import Path

import pytest

from helpers.command import assert_mistake, command
from planaria.cli.simulate.advice_options import AdviceOptions, failures_table
from planaria.errors import ConfigError

SMALL = (
    *("simulate", "--model", "gpt2", "--nodes", "4", "--failure-rate", "1/4h", "--hours", "3"),
    *("--policies", "reinstantiate,morph", "--seeds", "3", "--price", "2"),
)


@pytest.mark.parametrize(
    ("rate", "per_node_hour"),
    [
        ("1/8h", 1 / 8 / 16),
        ("3/30min", 6 / 16),
        ("2/day", 2 / 24 / 16),
        ("1.5/2d", 1.5 / 48 / 16),
        ("1/week", 1 / 168 / 16),
        ("4/1000/day", 4 / 1000 / 24),
        ("1 / 100 / 12 h", 1 / 100 / 12),
        ("0", 0.0),
    ],
)
def test_a_failure_rate_is_that_of_the_cluster_or_of_so_many_nodes(
    rate: str, per_node_hour: float
) -> None:
    """Here of 16 nodes."""
    table = failures_table(AdviceOptions(nodes=16, failure_rate=rate))

    assert table == {
        "kind": "poisson",
        "per_node_hour": pytest.approx(per_node_hour),
        "repair_s": 3600.0,
    }


def test_a_published_rate_has_its_own_repair() -> None:
    """Unless the user says another one."""
    tables = [
        failures_table(AdviceOptions(nodes=16, failure_rate="llama3", repair=repair, notice="2min"))
        for repair in ("", "90s", "none")
    ]

    shared = {"kind": "preset", "preset": "llama3", "notice_s": 120.0}
    assert tables == [shared, shared | {"repair_s": 90.0}, shared | {"repair": "never"}]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"failure_rate": "often"}, ["--failure-rate", "1/8h", "4/1000/day", "llama3", "or 0"]),
        ({"failure_rate": "1/8"}, ["--failure-rate", "1/8h"]),
        ({"failure_rate": "1/0h"}, ["--failure-rate"]),
        ({"failure_rate": "1/0/day"}, ["--failure-rate"]),
        ({"failure_rate": "1/8h", "repair": "soon"}, ["--repair", "30min", "none"]),
        ({"failure_rate": "1/8h", "notice": "0s"}, ["--notice", "30min"]),
    ],
)
def test_a_rate_or_time_of_another_form_is_refused(
    options: dict[str, str], parts: list[str]
) -> None:
    """With the forms that there are."""
    with pytest.raises(ConfigError) as error:
        failures_table(AdviceOptions(nodes=16, **options))  # type: ignore[arg-type]

    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--model"]),
        (["--model", "gpt2"], ["--failure-rate", "1/8h"]),
        (["--model", "gpt2", "--failure-rate", "1/8h"], ["--nodes"]),
        (["--model", "gpt2", "--sweep", "run.hours=1,2"], ["--sweep"]),
        (["--model", "gpt2", "--systems", "all"], ["--systems"]),
        ([*SMALL[1:], "--seeds", "1"], ["--seeds", "two"]),
        ([*SMALL[1:], "--policies", "best"], ["--policies", "adaptive"]),
        ([*SMALL[1:], "--model", "gpt9"], ["gpt9", "llama2-7b"]),
        ([*SMALL[1:], "--model", "gpt3-175b"], ["cluster.nodes", "93 or more"]),
        ([*SMALL[1:], "--calibrate", "README.md"], ["--calibrate", "is not JSON"]),
        ([*SMALL[1:], "--set", "job.cluster.standby=1"], ["--set", "is what is chosen"]),
        (["examples/spot.toml", "--nodes", "4"], ["--nodes", "--set"]),
    ],
)
def test_a_mistake_is_named(arguments: list[str], parts: list[str]) -> None:
    """With what would do."""
    assert_mistake(command("simulate", *arguments), *parts)


def test_the_same_seeds_give_the_same_bytes(tmp_path: Path) -> None:
    """In any number of processes; and the answer names a choice, its gains, and the job's keys."""
    files = [tmp_path / name for name in ("one.json", "two.json")]
    results = [
        command(*SMALL, "--processes", str(number), "--json", str(file))
        for number, file in enumerate(files, start=1)
    ]

    assert files[0].read_bytes() == files[1].read_bytes()
    assert results[0].stdout == results[1].stdout
    output = results[0].stdout
    assert "Use policy reinstantiate with f = 1, no spares, a save every 30 min" in output
    assert "[resilience]" in output
    content = json.loads(files[0].read_text())
    assert content["job"]["cluster"] == {"nodes": 4, "devices_per_node": 1, "standby": 0}
    assert content["comparisons"] == len(content["choices"]) - 1
    systems = {choice["system"] for choice in content["choices"]}
    assert systems == {"planaria", "restart", "static"}
    (not_played,) = content["not_played"]
    assert "f = 2" in not_played
