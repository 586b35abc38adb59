"""The command `planaria simulate`."""

import json
import os
import sys
from pathlib import Path

import pytest

from helpers.command import assert_mistake, command
from planaria.cli import main as cli
from planaria.cli.simulate import simulate_command
from planaria.cli.simulate.replay_output import ReplayOutput
from planaria.job.scenario_file import swept_overrides

SCENARIO = """
[cluster]
nodes = 4
profile = "gpt2"
price_per_node_hour = 2.0
[failures]
kind = "poisson"
per_node_hour = 0.5
repair_s = 600.0
[run]
hours = 1.0
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def test_a_scenario_gives_goodput_ledger_and_cost_as_json(scenario: Path) -> None:
    """Scripts read these; the ledger sums to the simulated time. The same seeds give the same bytes
    in any number of processes. The policy is one that searches little."""
    files = [scenario.with_name(name) for name in ("one.json", "two.json")]
    for number, file in enumerate(files, start=1):
        options = ("--seeds", "2", "--processes", str(number), "--json", str(file))
        policy = ("--set", "job.resilience.policy=reinstantiate")
        command("simulate", str(scenario), *options, *policy)
    result = json.loads(files[0].read_text())

    assert (result["version"], result["seeds"], result["versus"]) == (1, 2, {})
    planaria = result["systems"]["planaria"]
    goodput = planaria["goodput_samples_per_s"]
    assert goodput["low"] < goodput["mean"] < goodput["high"]
    assert goodput["mean"] < result["failure_free_samples_per_s"]
    ledger = planaria["ledger"]
    assert ledger.pop("wall") == pytest.approx(sum(ledger.values())) == pytest.approx(3600.0)
    assert 0.0 < planaria["cost"] < 4 * 1 * 2.0
    assert planaria["failures"] > 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_table_is_printed_for_people(scenario: Path) -> None:
    """With what the time was spent on."""
    output = command("simulate", str(scenario)).stdout

    assert "on 4 nodes, policy adaptive, 1 seed" in output
    assert "without failures, by the estimator" in output
    assert "useful" in output


def test_a_sweep_runs_every_combination(scenario: Path) -> None:
    """Any key of the scenario can be swept, those of the job included."""
    file = scenario.with_name("sweep.json")
    output = command(
        *("simulate", str(scenario), "--json", str(file)),
        *("--sweep", "failures.per_node_hour=0.1,0.5"),
        *("--sweep", "job.resilience.policy=reinstantiate,rollback"),
    ).stdout
    points = json.loads(file.read_text())["sweep"]

    assert [point["set"] for point in points] == [
        [f"failures.per_node_hour={rate}", f"job.resilience.policy={policy}"]
        for rate in ("0.1", "0.5")
        for policy in ("reinstantiate", "rollback")
    ]
    assert "failures.per_node_hour=0.5" in output


def test_a_sweep_takes_lists_and_texts_with_commas() -> None:
    """A comma within brackets or quotes ends no value."""
    (points,) = zip(
        *swept_overrides(["failures.nodes=[1, [2,3]], 4 ,'a,b',{x = \"1,2\"}"]), strict=True
    )

    assert [point.partition("=")[2] for point in points] == [
        "[1, [2,3]]",
        "4",
        "'a,b'",
        '{x = "1,2"}',
    ]


def test_the_result_says_what_was_set(scenario: Path) -> None:
    """Else nobody could tell later of which scenario a file is; a sweep's values come last."""
    settings = ("--set", "run.hours=0.5", "--set", "job.resilience.policy=reinstantiate")
    file = scenario.with_name("one.json")
    command("simulate", str(scenario), *settings, "--json", str(file))
    set_once = json.loads(file.read_text())["set"]
    sweep = ("--sweep", "failures.per_node_hour=0")
    command("simulate", str(scenario), *settings, *sweep, "--json", str(file))
    (point,) = json.loads(file.read_text())["sweep"]

    assert set_once == ["run.hours=0.5", "job.resilience.policy=reinstantiate"]
    assert point["set"] == [*set_once, "failures.per_node_hour=0"]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["cluster.nods=4"], ["cluster.nods", "did you mean nodes?"]),
        (["cluster.nodes=1"], ["cluster.nodes"]),
        (["cluster.profile="], ["cluster.profile", "name a profile"]),
        (["run.hours=0"], ["run.hours", "above 0"]),
        (["costs.detect_s=-1.0"], ["costs.detect_s", "at least 0"]),
        (["nodes.number=4"], ["nodes", "is no table of a scenario"]),
        (["job.resilience.policy=best"], ["job.resilience.policy"]),
        (
            ["job.resilience.failures_tolerated=9"],
            [
                "planaria: cluster.nodes = 4",
                "cluster.nodes = 10 or more, job.resilience.failures_tolerated = 3",
            ],
        ),
        (["job.training.global_batch_size=7"], ["job.training.global_batch_size"]),
        (["job.cluster.nodes=5"], ["job.cluster.nodes", "cluster.nodes; leave it out"]),
        (["job.cluster.devices_per_node=2"], ["job.cluster.devices_per_node"]),
        (["job.training.iterations=5"], ["job.training.iterations", "run.iterations"]),
        (["job.model.profile=gpt2"], ["job.model.profile", "cluster.profile"]),
        (["job.training=3"], ["job.training = 3", "must be a table"]),
        (["nodes.number=4"], ["there are cluster, job, failures, costs, run"]),
    ],
)
def test_a_mistake_in_a_scenario_is_named(
    scenario: Path, settings: list[str], parts: list[str]
) -> None:
    """With the key, the value and what would do."""
    options = [word for setting in settings for word in ("--set", setting)]

    assert_mistake(command("simulate", str(scenario), *options), *parts)


def test_a_scenario_that_is_not_there_is_named() -> None:
    """As a scenario, not as a job file."""
    assert_mistake(command("simulate", "none.toml"), "planaria: scenario = 'none.toml'")


def test_an_unknown_system_is_refused(scenario: Path) -> None:
    """With those that there are."""
    assert_mistake(command("simulate", str(scenario), "--systems", "plan"), "--systems", "planaria")


def test_a_picture_shows_throughput_ledger_and_samples(scenario: Path) -> None:
    """The same bytes for the same outcomes."""
    files = [scenario.with_name(name) for name in ("one.svg", "two.svg")]
    options = ("--systems", "planaria,varuna", "--set", "job.resilience.policy=reinstantiate")
    for file in files:
        command("simulate", str(scenario), *options, "--plot", str(file))

    text = files[0].read_text()
    assert all(heading in text for heading in ("Throughput", "Ledger", "Samples", "varuna"))
    assert text == files[1].read_text()


def test_a_sweep_has_no_picture(scenario: Path) -> None:
    """It has a run for each point."""
    options = ("--sweep", "run.hours=1,2", "--plot", str(scenario.with_name("one.svg")))

    assert_mistake(command("simulate", str(scenario), *options), "--plot", "leave --sweep out")


@pytest.mark.parametrize(
    "option",
    [
        *(("--nodes", "5"), ("--price", "2"), ("--seeds", "3"), ("--systems", "all")),
        ("--processes", "4"),
    ],
)
def test_a_replay_refuses_what_it_would_not_use(option: tuple[str, str]) -> None:
    """Nodes, seeds and systems are those of the report."""
    result = command("simulate", "--replay", "report.json", *option)

    assert_mistake(result, option[0], "a replay takes all from its report")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policy", "all", "--without-inputs"), "it has no meaning with --policy"),
        (("--calibrate", "other.json"), "add --without-inputs or --policy"),
    ],
)
def test_options_of_a_replay_that_have_no_effect_are_refused(
    options: tuple[str, ...], words: str
) -> None:
    """They were dropped without a word; the file of --calibrate was not even looked for."""
    assert_mistake(command("simulate", "--replay", "report.json", *options), words)


ADVICE = ("--model", "gpt2", "--nodes", "4", "--failure-rate", "1/4h", "--hours", "1")


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (("small.toml", "--plot", "out.svg"), ("out.json", "out.svg")),
        ((*ADVICE, "--policies", "morph", "--seeds", "2"), ("out.json",)),
        (("--replay", "report.json"), ("out.json",)),
    ],
)
def test_the_files_are_there_if_nobody_reads_what_is_printed(
    options: tuple[str, ...],
    files: tuple[str, ...],
    scenario: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What hours of simulation had found was lost with `| head`."""
    monkeypatch.chdir(scenario.parent)
    output = ReplayOutput({"decisions": []}, ("a table",))
    monkeypatch.setattr(simulate_command, "decide_again", lambda _: output)
    unread, end = os.pipe()
    os.close(unread)

    with open(end, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit):
            cli.app(["simulate", *options, "--json", "out.json"], standalone_mode=False)

    assert all(Path(file).stat().st_size for file in files)


def test_one_file_that_cannot_be_written_costs_no_other(
    scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is full only when the hours of work are over; the result is printed all the same."""
    monkeypatch.chdir(scenario.parent)

    options = ("--plot", "out.svg", "--json", "/dev/full")
    result = command("simulate", str(scenario), *options)

    assert result.exit_code == 1
    assert "planaria: --json = '/dev/full': cannot be written: No space left" in result.stderr
    assert "on 4 nodes, policy adaptive, 1 seed" in result.stdout
    assert Path("out.svg").stat().st_size
