"""Which files can be replayed, and what is said of others."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.command import PACED
from helpers.strategies import equal_problem
from planaria.core.cluster import NodesLost, survivors
from planaria.core.findings import FailureHistory, Findings
from planaria.core.plan import NodeKind, Plan
from planaria.core.records import DecisionInputs
from planaria.core.specs import Prepared
from planaria.errors import ConfigError
from planaria.job.config import load_job
from planaria.job.machine_kinds import plan_for_kinds
from planaria.job.planning import plan_job
from planaria.job.replays.calibration import PlanSeconds, calibrated_costs, recovery_costs
from planaria.job.replays.recorded_run import read_run
from planaria.job.replays.simulated_run import simulated_run
from planaria.observe.metrics import REPORT_VERSION
from planaria.planner.templates import smallest_num_nodes
from planaria.profiles.profile_json import encode_profile

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


@pytest.fixture(scope="module")
def whole_report() -> dict[str, Any]:
    """The report of a run of 20 iterations, in which one node was lost."""
    overrides = ["cluster.nodes=4", "training.global_batch_size=16", "training.microbatch_size=1"]
    job = load_job(PACED.with_name("small.toml"), overrides=overrides)
    profile = equal_problem(device_memory_bytes=200 << 20).profile
    plan = plan_job(job, Prepared(profile=profile)).plan
    inputs = DecisionInputs(
        plan_epoch=plan.epoch,
        members=plan.nodes[:-1],
        cluster=survivors(plan, plan.nodes[-1:], epoch=plan.epoch + 1),
        findings=Findings(),
        history=FailureHistory(),
        priced_s=20.0,
        next_iteration=10,
        saved_iteration=-1,
        version_iterations=1,
        processors=0,
        is_foreseen=False,
        lost=NodesLost(plan.nodes[-1:], 0),
    )
    lost = {"kind": "lost", "nodes": plan.nodes[-1:], "iteration": 10, "epoch": plan.epoch + 1}
    content: dict[str, Any] = json.loads(
        msgspec.json.encode(
            {
                "job": asdict(job),
                "plan": plan,
                "plans": {plan.epoch: plan, plan.epoch + 1: replace(plan, epoch=plan.epoch + 1)},
                "profile": msgspec.Raw(encode_profile(profile)),
                "processors": 0,
                "first_iteration": 0,
                "checkpoints": {"disk": {"checkpoint_s": 0.5}, "memory": {}},
                "ledger": {"startup": 1.0, "checkpoint_stall": 0.0, "wall": 30.0},
                "events": [lost | {"inputs": inputs}],
                "iterations": [
                    {"iteration": i, "samples": 16, "seconds": 1.0, "epoch": plan.epoch}
                    | {"at_s": 2.0 + i}
                    for i in range(20)
                ],
                "version": REPORT_VERSION,
            }
        )
    )
    return content


def test_a_report_is_enough_where_the_files_of_its_job_are_gone(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """The profile is in the report; the job may have run on another machine."""
    content = whole_report
    content["job"]["model"]["profile"] = str(tmp_path / "gone.json")
    content["job"]["checkpoint"]["directory"] = str(Path(__file__))  # A file.
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))

    assert len(read_run(path, option="--replay").iterations) == 20


def test_a_run_that_was_resumed_with_fewer_nodes_than_f_needs_is_read(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """It was planned with as many failures as its nodes tolerated."""
    content = whole_report
    content["job"]["resilience"]["failures_tolerated"] = 4
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))

    planned = read_run(path, option="--replay").planned
    assert len(planned.plan.nodes) == 4 < 5 * smallest_num_nodes(planned.problem)


def test_an_iteration_that_took_no_time_says_nothing_of_the_others(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """Its reports were lost with the coordinator; a simulation went on by tiny steps for it."""
    report = copy.deepcopy(whole_report)
    report["iterations"][7]["seconds"] = 0.0
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))

    assert PlanSeconds(read_run(path, option="--replay")).fastest_s == pytest.approx(1.0)


def test_a_simulation_of_a_run_takes_the_time_of_its_evaluations(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """Half of this run's time. Without them each policy, and that of the run as well, seemed to
    train twice as much."""
    report = copy.deepcopy(whole_report)
    report["job"]["resilience"]["failures_tolerated"] = 0
    report["evaluations"] = [{"iteration": age, "seconds": 0.5} for age in range(20)]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    run = read_run(path, option="--replay")
    policy = run.planned.config.resilience.policy
    simulated = simulated_run(run, recovery_costs(calibrated_costs(run)), policy=policy)

    real = run.samples / (run.trained_until_s - run.startup_s)
    assert simulated.trained_samples_per_s / real == pytest.approx(1.0, rel=0.02)
    assert simulated.ledger["evaluation"] == pytest.approx(10.0, rel=0.02)


def relative_goodput(tmp_path: Path, report: dict[str, Any], events: list[Any]) -> float:
    """Simulated over real goodput of a run on machines of two kinds, which changes no plan."""
    first = msgspec.convert(report["plan"], Plan, str_keys=True)
    problem = equal_problem(device_memory_bytes=200 << 20, num_microbatches=len(first.routes))
    plan = json.loads(msgspec.json.encode(plan_for_kinds(problem, first, {0: NodeKind(0.5)})))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report | {"plan": plan, "plans": {"0": plan}, "events": events}))
    run = read_run(path, option="--replay")
    policy = run.planned.config.resilience.policy
    simulated = simulated_run(run, recovery_costs(calibrated_costs(run)), policy=policy)
    assert not simulated.decisions
    real = run.samples / (run.trained_until_s - run.startup_s)
    return simulated.trained_samples_per_s / real


def test_a_simulation_of_a_run_has_the_machines_of_two_kinds_that_it_had(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """All were equally fast there, so the seconds that the run had measured were taken for those
    of slow machines, and the coordinator looked for a plan for nodes that were slow no more."""
    assert relative_goodput(tmp_path, whole_report, []) == pytest.approx(1.0, rel=0.02)


def test_a_machine_of_a_slower_kind_that_slows_down_is_slower_than_its_kind(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """An injection says how many times as long as before its node takes."""
    slow = {"kind": "slow", "nodes": [0], "iteration": 15, "at_s": 16.5, "value": 2.0}

    assert relative_goodput(tmp_path, whole_report, [slow]) < 0.95


@pytest.mark.parametrize(("version", "table"), [(2, {"every": 5.0}), (3, {"disk": {"every": 5.0}})])
def test_a_report_from_before_saves_had_a_table_of_their_own_is_still_read(
    version: int, table: dict[str, Any], tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """Whoever has kept one replays it with a newer planaria."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(whole_report | {"version": version, "checkpoints": table}))

    assert read_run(path, option="--replay").saves == {"every": 5.0}


def test_seconds_of_copies_in_an_old_report_are_not_taken_for_those_of_saves(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """Both had one table, in which the entries of copies took the place of those of saves."""
    report = copy.deepcopy(whole_report)
    report["job"]["checkpoint"]["copies"] = 2
    table = {"every": 1.0, "checkpoint_s": 0.5, "idle_used_s": 0.1, "idle_left_s": 0.2}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report | {"version": 2, "checkpoints": table}))
    run = read_run(path, option="--calibrate")

    assert run.saves == {}
    costs = {cost.name: cost for cost in calibrated_costs(run)}
    assert costs["save_bytes_per_s"].num_events == 0


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("job",), [], "Expected `object`"),
        (("plans",), {}, "no plan of epoch"),
        (("plan", "pipelines"), [], "has no stages"),
        (("plan", "routes"), [], "is one of another job"),
        (("ledger",), {"startup": 1.0}, "the ledger has no checkpoint_stall"),
        (("checkpoints",), None, "Expected `object`"),
        (("iterations", -1, "at_s"), 0.5, "before it trained"),
        (("iterations", 3, "seconds"), -1.0, "iteration 3 has negative seconds"),
        (("iterations", 3, "samples"), 0, "iteration 3 has negative seconds or no samples"),
        (("events", 0, "epoch"), -1, "no plan of epoch -1, which a decision needs"),
        (("events", 0, "inputs", "lost"), None, "either a loss or a change"),
        (("events", 0, "inputs", "cluster", "epoch"), -1, "left that of"),
        (("events", 0, "inputs", "findings", "layer_factors"), [1.0], "of another model"),
        (("events", 0, "inputs", "findings", "more_bytes"), [1], "of another model"),
        (("events", 0, "inputs", "cluster", "nodes", 0, "node"), 2, "contradicts another"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused_before_it_is_replayed(
    tmp_path: Path,
    whole_report: dict[str, Any],
    place: tuple[Any, ...],
    value: object,
    why: str,
) -> None:
    """Someone may have edited it, or put two together; a traceback would help nobody."""
    report = copy.deepcopy(whole_report)
    *outer, last = place
    table: Any = report
    for key in outer:
        table = table[key]
    table[last] = value

    text = refusal(tmp_path, json.dumps(report))
    assert "it is a damaged report" in text
    assert why in text


def test_a_report_without_one_of_its_tables_names_it(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """A cut-off file is no JSON, but an edited one may lack anything."""
    report = {key: value for key, value in whole_report.items() if key != "first_iteration"}

    assert "it has no first_iteration" in refusal(tmp_path, json.dumps(report))


def test_the_newest_findings_are_those_of_the_last_epoch(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """The coordinator after the first decision was on a machine whose clock is behind."""
    report = copy.deepcopy(whole_report)
    (first,) = report["events"]
    second = copy.deepcopy(first)
    report["plans"]["2"] = report["plans"]["1"] | {"epoch": 2}
    second["epoch"] = second["inputs"]["cluster"]["epoch"] = 2
    second["inputs"] |= {"plan_epoch": 1, "priced_s": first["inputs"]["priced_s"] - 9.0}
    second["inputs"]["findings"]["beside_s"] = 0.5
    report["events"].append(second)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))

    assert read_run(path, option="--replay").findings.beside_s == 0.5


def test_the_profile_of_a_report_is_checked_as_one_of_a_file(
    tmp_path: Path, whole_report: dict[str, Any]
) -> None:
    """Without the seconds of its microbatch no plan has a time."""
    report = copy.deepcopy(whole_report)
    report["profile"]["layers"][1]["backward_input_s"] = {}

    assert "profile = 'report': layer" in refusal(tmp_path, json.dumps(report))
