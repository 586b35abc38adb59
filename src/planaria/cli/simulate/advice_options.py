"""The options of `planaria simulate` without a scenario file: a model, nodes, and how often they
fail."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.progress import Progress, TaskID

from planaria.cli.command_line import Files, hand_over, json_data, text_console
from planaria.core.job import POLICIES, PolicyName
from planaria.errors import ConfigError
from planaria.job.what_if import Grounds, answer
from planaria.show.advice_words import advice_json, advice_text
from planaria.simulator.economics.question import Question
from planaria.simulator.failures.presets import PRESETS

NUM_SEEDS: Final = 8
_REPAIR: Final = "1h"
_UNITS_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_LONG_UNITS: Final = {"hour": "h", "hours": "h", "day": "d", "days": "d", "week": "w", "weeks": "w"}
_NUMBER: Final = r"\d+(?:\.\d+)?"
_TIME: Final = rf"({_NUMBER})?\s*({'|'.join(sorted((*_UNITS_S, *_LONG_UNITS), key=len)[::-1])})"
_RATE: Final = re.compile(rf"({_NUMBER})\s*/\s*(?:(\d+)\s*/\s*)?{_TIME}")
_FORMS: Final = (
    "must be losses of the whole cluster in a time, such as 1/8h or 2/day; losses of so many nodes "
    f"in a time, such as 4/1000/day; a published rate: {', '.join(PRESETS)}; or 0"
)
_TIME_FORMS: Final = "must be a time, such as 90s, 30min, 2h or 1d, or none"

_PANEL: Final = "Without a scenario: what pays most"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="PROFILE",
        rich_help_panel=_PANEL,
        help="Say which policy, f, spares and saves pay most for this profile, a shipped one's "
        "name or a file.",
    ),
]
Nodes = Annotated[
    int,
    typer.Option(
        "--nodes",
        metavar="N",
        rich_help_panel=_PANEL,
        help="Number of nodes, spares included.",
        show_default=False,
    ),
]
Devices = Annotated[
    int,
    typer.Option(
        "--devices-per-node",
        metavar="N",
        rich_help_panel=_PANEL,
        help="Number of devices in each node.",
    ),
]
FailureRate = Annotated[
    str,
    typer.Option(
        "--failure-rate",
        metavar="RATE",
        rich_help_panel=_PANEL,
        help="Losses of the whole cluster (1/8h, 2/day) or of so many nodes (4/1000/day), the name "
        "of a published rate (llama3), or 0.",
    ),
]
Repair = Annotated[
    str,
    typer.Option(
        "--repair",
        metavar="TIME",
        rich_help_panel=_PANEL,
        help="Mean time until a lost node is back, or none: it never is. Default: as published, "
        f"else {_REPAIR}.",
    ),
]
Notice = Annotated[
    str,
    typer.Option(
        "--notice",
        metavar="TIME",
        rich_help_panel=_PANEL,
        help="Notice that precedes each loss, such as 2min. Default: none.",
    ),
]
Price = Annotated[
    float,
    typer.Option(
        "--price",
        metavar="DOLLARS",
        rich_help_panel=_PANEL,
        help="Price of a node for an hour; 0: unknown.",
    ),
]
Hours = Annotated[
    float,
    typer.Option(
        "--hours",
        metavar="HOURS",
        rich_help_panel=_PANEL,
        help="Simulated hours of each run; 0: as many as have ten losses, and ten times the mean "
        "repair.",
    ),
]
Batch = Annotated[
    int,
    typer.Option(
        "--batch",
        metavar="N",
        rich_help_panel=_PANEL,
        help="Samples in an iteration; 0: 4 microbatches for each device.",
    ),
]
Policies = Annotated[
    str,
    typer.Option(
        "--policies",
        metavar="A,B",
        rich_help_panel=_PANEL,
        help="Policies to choose among. Default: all that are fast enough.",
    ),
]


@dataclass(frozen=True, slots=True)
class AdviceOptions:
    """The options of a question, as the user wrote them; see their help."""

    model: str = ""
    nodes: int = 0
    devices_per_node: int = 1
    failure_rate: str = ""
    repair: str = ""
    notice: str = ""
    price: float = 0.0
    hours: float = 0.0
    batch: int = 0
    policies: str = ""


def check_alone(
    options: AdviceOptions, *, systems: str, sweep: Sequence[str] | None, plot: Path | None
) -> None:
    """Refuses a question without a model, and what belongs to a scenario.

    Raises:
        ConfigError: an option is missing, or has no meaning.
    """
    if not options.model:
        raise ConfigError("", "", "name a scenario's file, or a model with --model")
    for option, value in (("--sweep", sweep), ("--plot", plot)):
        if value:
            raise ConfigError(option, str(value), "has no meaning with --model; name a scenario")
    if systems != "planaria":
        remedy = "has no meaning with --model, which compares with restarts; name a scenario"
        raise ConfigError("--systems", systems, remedy)


def check_unused(options: AdviceOptions, *, remedy: str) -> None:
    """Refuses options of a question where none is asked.

    Raises:
        ConfigError: one was given.
    """
    for field in fields(AdviceOptions):
        value = getattr(options, field.name)
        if value != field.default:
            option = f"--{field.name.replace('_', '-')}"
            raise ConfigError(option, value, remedy)


def question_of(options: AdviceOptions, overrides: tuple[str, ...]) -> Question:
    """The question that the options ask.

    Raises:
        ConfigError: an option is missing, or has another form.
    """
    if not options.failure_rate:
        raise ConfigError("--failure-rate", "", f"say how often nodes are lost; it {_FORMS}")
    if options.nodes < 1:
        raise ConfigError("--nodes", options.nodes, "say how many nodes the cluster has")
    return Question(
        model=options.model,
        nodes=options.nodes,
        devices_per_node=options.devices_per_node,
        failures=failures_table(options),
        price=options.price,
        hours=options.hours,
        batch=options.batch,
        policies=_policies(options.policies),
        overrides=overrides,
    )


def failures_table(options: AdviceOptions) -> dict[str, Any]:
    """The table `[failures]` of a scenario.

    Raises:
        ConfigError: a rate or a time has another form.
    """
    table: dict[str, Any] = _rate_table(options.failure_rate.strip(), options.nodes)
    repair = options.repair or ("" if "preset" in table else _REPAIR)
    if repair == "none":
        table["repair"] = "never"
    elif repair:
        table["repair_s"] = _time_s("--repair", repair)
    if options.notice not in {"", "none"}:
        table["notice_s"] = _time_s("--notice", options.notice)
    return table


def _rate_table(text: str, nodes: int) -> dict[str, Any]:
    if text in PRESETS:
        return {"kind": "preset", "preset": text}
    if text == "0":
        return {"kind": "poisson", "per_node_hour": 0.0}
    match = _RATE.fullmatch(text)
    if match is None:
        raise ConfigError("--failure-rate", text, _FORMS)
    number, of_nodes, times, unit = match.groups()
    num_nodes = int(of_nodes or nodes)
    hours = float(times or 1) * _seconds_of(unit) / _UNITS_S["h"]
    if not (num_nodes and hours):
        raise ConfigError("--failure-rate", text, _FORMS)
    return {"kind": "poisson", "per_node_hour": float(number) / num_nodes / hours}


def _time_s(option: str, text: str) -> float:
    """The seconds of a time such as 30min.

    Raises:
        ConfigError: it has another form, or is 0.
    """
    match = re.fullmatch(_TIME, text.strip())
    seconds = float(match[1] or 1) * _seconds_of(match[2]) if match else 0.0
    if not seconds:
        raise ConfigError(option, text, _TIME_FORMS)
    return seconds


def _seconds_of(unit: str) -> float:
    return _UNITS_S[_LONG_UNITS.get(unit, unit)]


def _policies(names: str) -> tuple[PolicyName, ...]:
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in POLICIES:
            raise ConfigError("--policies", name, f"there are {', '.join(POLICIES)}")
    return tuple(policy for policy in POLICIES if policy in chosen)


def give_advice(
    question: Question, *, num_seeds: int, num_processes: int, json_file: Path | None
) -> None:
    """Writes what pays most as JSON if the user asked for that, and prints it.

    Raises:
        ConfigError: a value is wrong, or the model fits on these nodes in no way.
    """
    if num_seeds < 2:
        raise ConfigError("--seeds", num_seeds, "two seeds or more have an interval")
    grounds = Grounds(question)
    with Progress(console=text_console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def watch(stage: str, num_done: int, number: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            progress.update(tasks[stage], completed=num_done, total=number)

        planning = progress.add_task("planning", total=None)
        result = answer(grounds, num_seeds=num_seeds, num_processes=num_processes, watch=watch)
        progress.remove_task(planning)
    files: Files = {"--json": (json_file, lambda: json_data(advice_json(result)))}
    hand_over(files, (advice_text(result),), console=text_console())
