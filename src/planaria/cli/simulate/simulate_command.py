"""The command `planaria simulate`: what a job would train on a cluster whose nodes fail."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from rich.console import RenderableType
from rich.progress import Progress

from planaria.cli.command_line import (
    Files,
    Settings,
    check_writable,
    exit_codes,
    hand_over,
    json_data,
    text_console,
)
from planaria.cli.simulate.advice_options import (
    NUM_SEEDS,
    AdviceOptions,
    Batch,
    Devices,
    FailureRate,
    Hours,
    Model,
    Nodes,
    Notice,
    Policies,
    Price,
    Repair,
    check_alone,
    check_unused,
    give_advice,
    question_of,
)
from planaria.cli.simulate.replay_output import (
    calibrated_overrides,
    decide_again,
    simulate_again,
    simulate_policies,
)
from planaria.errors import ConfigError
from planaria.job.scenario_file import load_scenario, scenario_inputs, swept_overrides
from planaria.show.pictures.page import picture_format
from planaria.show.pictures.simulation_plots import simulation_figure
from planaria.show.simulations import simulation_json, simulation_table, sweep_table
from planaria.simulator.economics.compare import PLANARIA, Outcomes, compare
from planaria.simulator.economics.planaria_system import PlanariaSystem
from planaria.systems.bamboo import Bamboo
from planaria.systems.gemini import Gemini
from planaria.systems.highfreq import HighFreq
from planaria.systems.odyssey import Duration, Odyssey
from planaria.systems.oobleck import Oobleck
from planaria.systems.recycle import ReCycle
from planaria.systems.replicas import Replicas
from planaria.systems.restart import Restart
from planaria.systems.strawman import Strawman
from planaria.systems.system import System
from planaria.systems.varuna import Varuna

SYSTEMS: Final[tuple[System, ...]] = (
    PlanariaSystem(),
    Oobleck(),
    Varuna(),
    Restart(),
    Bamboo(),
    ReCycle(),
    Odyssey(),
    Odyssey(duration=Duration.ORACLE),
    Gemini(),
    Strawman(),
    HighFreq(),
    Replicas(),
)
_ALL: Final = "all"
_UNUSED_BY_REPLAY: Final = (
    *("SCENARIO", "--sweep", "--plot", "--set", "--seeds", "--processes"),
    "--systems",
)
_NOT_WITH_REPLAY: Final = "a replay takes all from its report; leave this out"

ScenarioFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="SCENARIO.toml",
        help="The scenario; see docs/SIMULATE.md. Without one, --model asks what pays most, "
        "and --replay what else a real run might have been.",
        show_default=False,
    ),
]
CalibrateFile = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="REPORT.json",
        help="Take the costs of recoveries and the speed of layers from the report of a real run.",
    ),
]
ReplayFile = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="REPORT.json",
        help="Make each decision of a real run again from the inputs in its report.",
    ),
]
WithoutInputs = Annotated[
    bool,
    typer.Option(
        "--without-inputs",
        help="With --replay: simulate the run without the recorded inputs, and compare goodput.",
    ),
]
PolicyNames = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="A,B|all",
        help="With --replay: simulate the run with these policies instead.",
    ),
]
SystemNames = Annotated[
    str,
    typer.Option(
        "--systems",
        metavar="A,B|all",
        help=f"Systems to compare: {', '.join(system.name for system in SYSTEMS)}.",
    ),
]
NumSeeds = Annotated[
    int,
    typer.Option(
        "--seeds",
        min=0,
        help="Number of seeds; each draws other failures. 0: one, or eight with --model.",
    ),
]
Sweeps = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=V,V,..",
        help="Run with each of these values of a key, such as failures.per_node_hour=0.01,0.1; "
        "repeatable, for all combinations.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result to this file.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw throughput, ledger and samples to this file: .svg, .png or .pdf.",
    ),
]
NumProcesses = Annotated[
    int,
    typer.Option("--processes", min=0, help="Number of processes; 0: one for each processor."),
]


@exit_codes()
def simulate(
    scenario: ScenarioFile = None,
    systems: SystemNames = PLANARIA,
    seeds: NumSeeds = 0,
    sweep: Sweeps = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    processes: NumProcesses = 0,
    calibrate: CalibrateFile = None,
    replay: ReplayFile = None,
    without_inputs: WithoutInputs = False,
    policy: PolicyNames = "",
    settings: Settings = None,
    model: Model = "",
    nodes: Nodes = 0,
    devices_per_node: Devices = 1,
    failure_rate: FailureRate = "",
    repair: Repair = "",
    notice: Notice = "",
    price: Price = 0.0,
    hours: Hours = 0.0,
    batch: Batch = 0,
    policies: Policies = "",
) -> None:
    """Simulates a job on a cluster whose nodes fail: its goodput, its time and its cost.

    The coordinator and the policies are the real ones; nodes, links and failures are modelled.
    """
    check_writable("--json", json_file, scenario, replay, calibrate, plot, Path(model))
    asked = (model, nodes, devices_per_node, failure_rate, repair, notice, price, hours, batch)
    options = AdviceOptions(*asked, policies)
    if replay is not None:
        others = (scenario, sweep, plot, settings, seeds, processes, _others_than_default(systems))
        _refuse(dict(zip(_UNUSED_BY_REPLAY, others, strict=True)), _NOT_WITH_REPLAY)
        check_unused(options, remedy=_NOT_WITH_REPLAY)
        _replay(replay, _ReplayMode(without_inputs, policy, calibrate), json_file)
        return
    _refuse({"--policy": policy, "--without-inputs": without_inputs}, "it needs --replay")
    number = processes or len(os.sched_getaffinity(0))
    overrides = (*calibrated_overrides(calibrate), *(settings or ()))
    if scenario is None:
        check_alone(options, systems=systems, sweep=sweep, plot=plot)
        give_advice(
            question_of(options, overrides),
            num_seeds=seeds or NUM_SEEDS,
            num_processes=number,
            json_file=json_file,
        )
        return
    check_unused(options, remedy="has no meaning with a scenario; use --set")
    _simulate_scenario(
        scenario,
        systems,
        num_seeds=seeds or 1,
        sweep=sweep or (),
        json_file=json_file,
        plot=plot,
        num_processes=number,
        settings=list(overrides),
    )


def _simulate_scenario(
    scenario: Path,
    systems: str,
    *,
    num_seeds: int,
    sweep: Sequence[str],
    json_file: Path | None,
    plot: Path | None,
    num_processes: int,
    settings: Sequence[str],
) -> None:
    """Simulates the systems in the scenario of a file."""
    check_writable("--plot", plot, scenario)
    picture = None if plot is None else picture_format("--plot", plot.name)
    if plot is not None and sweep:
        raise ConfigError("--plot", str(plot), "a sweep has no picture; leave --sweep out")
    chosen = _systems(systems)
    points = {}
    for overrides in swept_overrides(sweep):
        points[overrides] = load_scenario(scenario, overrides=[*settings, *overrides])
        inputs = scenario_inputs(scenario, overrides=[*settings, *overrides])
        check_writable("--json", json_file, *inputs)
        check_writable("--plot", plot, *inputs)
    results: dict[tuple[str, ...], Outcomes] = {}
    with Progress(console=text_console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(points) * len(chosen) * num_seeds)
        for overrides, point in points.items():
            results[overrides] = compare(
                point,
                chosen,
                num_seeds=num_seeds,
                num_processes=num_processes,
                on_done=lambda: progress.advance(task),
            )
    contents = [
        {"set": [*settings, *overrides], **simulation_json(points[overrides], outcomes)}
        for overrides, outcomes in results.items()
    ]
    content = {"version": 1, "sweep": contents} if sweep else contents[0]
    files: Files = {"--json": (json_file, partial(json_data, content))}
    table: RenderableType
    if sweep:
        table = sweep_table({", ".join(key): value for key, value in results.items()})
    else:
        ((overrides, outcomes),) = results.items()
        table = simulation_table(points[overrides], outcomes)
        if picture is not None:
            figure = partial(simulation_figure, points[overrides], outcomes, picture=picture)
            files["--plot"] = (plot, figure)
    hand_over(files, (table,), console=text_console(highlight=True))


class _ReplayMode(NamedTuple):
    """How a report is replayed; see the options of the same names."""

    without_inputs: bool
    policy: str
    calibrate: Path | None


def _replay(report: Path, mode: _ReplayMode, json_file: Path | None) -> None:
    """Replays a report, writes and prints what came, and exits with 1 if a decision differs though
    its inputs are those of the run."""
    if mode.policy:
        _refuse({"--without-inputs": mode.without_inputs}, "it has no meaning with --policy")
    elif not mode.without_inputs:
        remedy = "decisions are made again from the report; add --without-inputs or --policy"
        _refuse({"--calibrate": mode.calibrate}, remedy)
    if mode.policy:
        output = simulate_policies(report, mode.policy, mode.calibrate)
    elif mode.without_inputs:
        output = simulate_again(report, mode.calibrate)
    else:
        output = decide_again(report)
    files: Files = {"--json": (json_file, partial(json_data, output.content))}
    hand_over(files, output.shown, console=text_console(highlight=True))
    if not output.is_same:
        raise typer.Exit(1)


def _others_than_default(systems: str) -> str:
    return "" if systems == PLANARIA else systems


def _refuse(options: Mapping[str, object], remedy: str) -> None:
    """Refuses options that are given.

    Raises:
        ConfigError: one of them is.
    """
    for name, value in options.items():
        if value:
            raise ConfigError(name, str(value), remedy)


def _systems(names: str) -> tuple[System, ...]:
    """The systems of these names, in the given order.

    Raises:
        ConfigError: there is no such system.
    """
    known = {system.name: system for system in SYSTEMS}
    if names.strip() == _ALL:
        return SYSTEMS
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise ConfigError("--systems", name, f"there are {', '.join(known)}, and {_ALL}")
    return tuple(known[name] for name in dict.fromkeys(chosen))
