"""What `planaria simulate` does with reports of real runs: costs, replays, and other policies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import RenderableType
from rich.text import Text

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


class ReplayOutput(NamedTuple):
    """What a replay gives.

    Attributes:
        content: content for --json.
        shown: tables and lines for a person.
        is_same: whether all decisions are the same, if they have the inputs of the run.
    """

    content: dict[str, Any]
    shown: tuple[RenderableType, ...]
    is_same: bool = True


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


def decide_again(report: Path) -> ReplayOutput:
    """Makes each decision of a run again from its recorded inputs.

    Raises:
        ConfigError: the same as in `calibrated_overrides`.
    """
    run = read_run(report, option="--replay")
    decisions = with_inputs(tuple(decisions_again(run)))
    is_same = all(decision.is_same for decision in decisions)
    return ReplayOutput(decisions_json(run, decisions), (decisions_table(decisions),), is_same)


def simulate_again(report: Path, calibrate: Path | None) -> ReplayOutput:
    """Simulates a run without its recorded inputs, to compare it.

    Args:
        calibrate: report of the run that gives the costs; None: the same.

    Raises:
        ConfigError: the same as in `calibrated_overrides`.
    """
    run, source = _runs(report, calibrate)
    costs = calibrated_costs(source)
    policy = run.planned.config.resilience.policy
    simulated = simulated_run(run, recovery_costs(costs), policy=policy)
    decisions = decisions_table(without_inputs(run, simulated))
    text = Text("\n".join(goodput_text(run, simulated)))
    shown = (costs_table(source.name, costs), decisions, text)
    return ReplayOutput(replay_json(run, costs, simulated), shown)


def simulate_policies(report: Path, names: str, calibrate: Path | None) -> ReplayOutput:
    """Simulates a run with other policies.

    Args:
        names: policies, separated by commas, or "all".
        calibrate: the same as in `simulate_again`.

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
    return ReplayOutput(policies_json(run, costs, results), (policies_table(run, results),))


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
