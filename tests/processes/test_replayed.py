"""A real run, replayed from its report: the same decisions, and what else it might have been."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.chaos import chaos_job, run_under_faults
from helpers.command import assert_mistake, command
from planaria.nodes.forkserver import ForkServer
from planaria.policies.traits import TRAITS

ITERATIONS = 44
FAULTS = ("kill:2@8.backward", "join:1@12", "kill:0@18", "slow=3:3@22")


@pytest.fixture(scope="module")
def report(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a job of six nodes that loses two, gets one, and has a slow one."""
    directory = tmp_path_factory.mktemp("replayed")
    config = chaos_job(
        "sequential", directory / "run", server, policy="adaptive", iterations=ITERATIONS
    )
    result = run_under_faults(config, server, *FAULTS)
    assert result.error is None
    path = directory / "report.json"
    path.write_bytes(msgspec.json.encode(result.report))
    return path


def replayed(report: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """The JSON that a replay writes."""
    file = report.with_name("replay.json")
    result = command("simulate", "--replay", str(report), "--json", str(file), *options)
    assert result.exit_code == code, result.output
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_with_recorded_inputs_every_decision_is_the_same(report: Path) -> None:
    """Policies, prices and choice are functions of what the report has."""
    content = replayed(report)

    events = [decision["event"] for decision in content["decisions"]]
    assert "kill 2" in " ".join(events)
    assert content["num_different"] == 0, content["decisions"]
    assert all(decision["recorded"] for decision in content["decisions"])


def test_a_decision_that_does_not_follow_from_its_inputs_is_listed(report: Path) -> None:
    """With another answer in the report, one that nobody would choose; the exit code says so."""
    changed = json.loads(report.read_text())
    for event in changed["events"]:
        if event["kind"] == "kill" and event["nodes"] == [2]:
            event["answer"] = "prayer"
    path = report.with_name("changed.json")
    path.write_text(json.dumps(changed))
    content = replayed(path, code=1)

    different = [one for one in content["decisions"] if not one["is_same"]]
    assert content["num_different"] == len(different) == 1
    assert "prayer" in different[0]["recorded"]


def test_without_inputs_goodput_and_differences_are_compared(report: Path) -> None:
    """The same iterations are trained; how near the seconds are is measured in docs/LOG.md."""
    content = replayed(report, "--without-inputs")

    real, simulated = content["real"], content["simulated"]
    assert simulated["samples"] == real["samples"] == ITERATIONS * 12
    assert simulated["over_real"] == pytest.approx(1.0, rel=0.6)
    assert content["costs"]["decide_s"]["events"] >= 1
    assert content["costs"]["restart_s"] == {
        "value": 60.0,
        "events": 0,
        "low": None,
        "high": None,
    }
    for run in (real, simulated):
        assert run["wasted"]["live"]["recoveries"] == 2.0
        assert run["wasted"]["live"]["redo_s"] == pytest.approx(run["ledger"]["redo"])
    lost = [one for one in content["decisions"] if one["event"].startswith("kill")]
    assert all(decision["replayed"] for decision in lost)


def test_other_policies_are_run_through_what_happened(report: Path) -> None:
    """Each of them trains as many iterations, or says why it has no plan."""
    content = replayed(report, "--policy", "all")

    assert list(content["policies"]) == list(TRAITS)
    for policy in content["policies"].values():
        assert "error" in policy or policy["samples"] == content["real"]["samples"]
    assert list(replayed(report, "--policy", "reroute")["policies"]) == ["reroute"]


def test_a_scenario_takes_the_costs_of_the_run(report: Path, tmp_path: Path) -> None:
    """They are printed with where each is from; what is set by hand holds against them."""
    scenario = tmp_path / "small.toml"
    scenario.write_text('[cluster]\nnodes = 4\nprofile = "gpt2"\n[run]\nhours = 1.0\n')
    options = ("--set", "costs.profile_factor=1", "--set", "costs.startup_s=1800")
    file = tmp_path / "result.json"
    result = command(
        *("simulate", str(scenario), "--calibrate", str(report), "--json", str(file), *options)
    )

    assert "save_bytes_per_s" in result.stdout
    assert "default" in result.stdout
    ledger = json.loads(file.read_text())["systems"]["planaria"]["ledger"]
    assert ledger["startup"] == pytest.approx(1800.0, rel=0.01)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--policy", "hope"), "there are absorb, adaptive"),
        (("--set", "costs.detect_s=1"), "a replay takes all from its report"),
        (("--sweep", "costs.detect_s=1"), "a replay takes all from its report"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    report: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    part: str,
) -> None:
    """With what would do."""
    monkeypatch.chdir(tmp_path)
    assert_mistake(command("simulate", "--replay", str(report), *options), part)
