"""What `planaria simulate` does with reports of real runs: costs, replays, and other policies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from planaria.cli.command_line import text_console
from planaria.cli.simulate.replay_tables import (
    costs_table,
    decisions_json,
    decisions_table,
    goodput_text,
    policies_json,
    policies_table,
    replay_json,
    with_inputs,
    without_inputs,
)
from planaria.core.job import PolicyName
from planaria.errors import ConfigError, InfeasibleError
from planaria.job.replays.calibration import calibrated_costs, recovery_costs
from planaria.job.replays.decisions import decisions_again
from planaria.job.replays.recorded_run import RecordedRun, read_run
from planaria.job.replays.simulated_run import ReplayedRun, simulated_run
from planaria.policies.traits import TRAITS

_ALL: Final = "all"


def calibrated_overrides(report: Path | None) -> Iterator[str]:
    """Overrides of `[costs]` with the costs of a real run, which are printed; none without one.

    Raises:
        ConfigError: the file is no report, or one of another version.
    """
    if report is None:
        return
    costs = calibrated_costs(read_run(report, option="--calibrate"))
    text_console(highlight=True).print(costs_table(report.name, costs))
    for cost in costs:
        if cost.num_events:
            yield f"costs.{cost.name}={cost.value!r}"


def decide_again(report: Path, console: Console) -> tuple[dict[str, Any], bool]:
    """Makes each decision of a run again from its recorded inputs, and prints them.

    Returns:
        The content for --json, and whether all decisions are the same.

    Raises:
        ConfigError: the same as in `calibrated_overrides`.
    """
    run = read_run(report, option="--replay")
    decisions = with_inputs(tuple(decisions_again(run)))
    console.print(decisions_table(decisions))
    return decisions_json(run, decisions), all(decision.is_same for decision in decisions)


def simulate_again(report: Path, calibrate: Path | None, console: Console) -> dict[str, Any]:
    """Simulates a run without its recorded inputs, and prints how the simulation differs.

    Args:
        calibrate: report of the run that gives the costs; None: the same.

    Returns:
        The content for --json.

    Raises:
        ConfigError: the same as in `calibrated_overrides`.
    """
    run, source = _runs(report, calibrate)
    costs = calibrated_costs(source)
    console.print(costs_table(source.name, costs))
    policy = run.planned.config.resilience.policy
    simulated = simulated_run(run, recovery_costs(costs), policy=policy)
    console.print(decisions_table(without_inputs(run, simulated)))
    for line in goodput_text(run, simulated):
        console.print(line, highlight=False)
    return replay_json(run, costs, simulated)


def simulate_policies(
    report: Path, names: str, calibrate: Path | None, console: Console
) -> dict[str, Any]:
    """Simulates a run with other policies, and prints what each would have given.

    Args:
        names: policies, separated by commas, or "all".
        calibrate: the same as in `simulate_again`.

    Returns:
        The content for --json.

    Raises:
        ConfigError: the same as in `calibrated_overrides`, or there is no such policy.
    """
    policies = _policies(names)
    run, source = _runs(report, calibrate)
    costs = calibrated_costs(source)
    results: dict[str, ReplayedRun | str] = {}
    for policy in policies:
        try:
            results[policy] = simulated_run(run, recovery_costs(costs), policy=policy)
        except InfeasibleError as error:
            results[policy] = str(error)
    console.print(policies_table(run, results))
    return policies_json(run, costs, results)


def _runs(report: Path, calibrate: Path | None) -> tuple[RecordedRun, RecordedRun]:
    run = read_run(report, option="--replay")
    return run, run if calibrate is None else read_run(calibrate, option="--calibrate")


def _policies(names: str) -> tuple[PolicyName, ...]:
    """The policies of these names, in the given order.

    Raises:
        ConfigError: there is no such policy.
    """
    if names.strip() == _ALL:
        return tuple(TRAITS)
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in TRAITS:
            raise ConfigError("--policy", name, f"there are {', '.join(TRAITS)}, and {_ALL}")
    return tuple(policy for name in chosen for policy in TRAITS if policy == name)
