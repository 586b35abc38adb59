"""`planaria train`: trains a job on nodes of this machine, or on machines that come to it."""

import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from planaria.cli.command_line import (
    Files,
    JobFile,
    Settings,
    check_writable,
    exit_codes,
    text_console,
    write_files,
)
from planaria.cli.machine_commands import TokenFile
from planaria.core.inject import Injection, check_injections, check_on_machines, parse_injection
from planaria.core.job import ClusterConfig, JobConfig
from planaria.errors import ConfigError
from planaria.estimator.correction import Comparison
from planaria.estimator.time import Timeline
from planaria.job.console_display import ConsoleDisplay
from planaria.job.on_machines import Listening
from planaria.job.scripts import named_job
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.head.process_events import LEAVE_SIGNALS, restore_handlers
from planaria.nodes.output import unfailing
from planaria.show.callbacks import Callbacks
from planaria.show.chrome_trace import chrome_trace
from planaria.show.pictures.gantt import compared_figure
from planaria.show.pictures.page import Format, is_picture, picture_format
from planaria.show.trackers import TensorBoard, WandB
from planaria.transport.acceptor import parse_address
from planaria.transport.credentials import read_credentials, token_path

State = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Directory for the coordinator's journal. Default: beside the saves, or in the user's "
        "state directory if the saves are in an object store.",
    ),
]
ReportFile = Annotated[Path | None, typer.Option(help="Write the report to this JSON file.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest save.")]
DevicesPerNode = Annotated[int | None, typer.Option(help="Number of devices in each node.")]
TimelineFile = Annotated[
    Path | None,
    typer.Option(
        help="Write predicted and measured timelines to this file: a picture if its name ends "
        "in .svg, .png or .pdf, else a Chrome trace."
    ),
]
Faults = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC", help="Inject a fault: KIND[=VALUE]:NODES@ITERATION[.STEP]; repeatable."
    ),
]

Nodes = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Number of nodes to start with; with --listen also the most that may train.",
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        metavar="ADDR:PORT",
        help="Run the nodes on other machines, which come to this address with "
        "`planaria agent --join`; port 0 is any free one.",
    ),
]
Reattach = Annotated[
    bool,
    typer.Option(
        "--reattach",
        help="With --listen: take up the machines of a head of this job that was lost.",
    ),
]
ResumeIfSaved = Annotated[
    bool,
    typer.Option(
        "--resume-if-saved",
        help="With --listen: go on as --resume does, or begin if nothing is saved, or end with 0 "
        "if all iterations are; for whoever starts the same command again.",
    ),
]
Operator = Annotated[
    str,
    typer.Option(
        metavar="NAME|COMMAND",
        help="Whom the head asks for a machine in place of a lost one: slurm, kubernetes, or a "
        "command for the shell. Default: nobody.",
    ),
]
Advertised = Annotated[
    str,
    typer.Option(
        "--advertise",
        metavar="HOST:PORT",
        help="Where machines that --operator brings find the head.",
        hidden=True,  # `planaria run` alone knows it.
    ),
]
TensorBoardDirectory = Annotated[
    str,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        help="Write the job's curves there for TensorBoard; needs the package tensorboard.",
    ),
]
WandBProject = Annotated[
    str,
    typer.Option(
        "--wandb",
        metavar="PROJECT",
        help="Send the job's curves to a project of Weights & Biases; needs the package wandb.",
    ),
]
_WAIT_NODES_S = 600.0
WaitNodes = Annotated[
    float, typer.Option(metavar="S", help="With --listen: seconds to wait for the first nodes.")
]


@exit_codes()
def train(
    job: JobFile,
    nodes: Nodes = "",
    devices_per_node: DevicesPerNode = None,
    report: ReportFile = None,
    timeline: TimelineFile = None,
    resume: Resume = False,
    resume_if_saved: ResumeIfSaved = False,
    inject: Faults = None,
    reattach: Reattach = False,
    state: State = "",
    listen: Listen = "",
    wait_nodes: WaitNodes = _WAIT_NODES_S,
    token_file: TokenFile = "",
    operator: Operator = "",
    advertise: Advertised = "",
    tensorboard: TensorBoardDirectory = "",
    wandb: WandBProject = "",
    settings: Settings = None,
) -> None:
    """Trains a job on emulated nodes of this machine, or with --listen on other machines."""
    sizes = _node_overrides(nodes, devices_per_node, has_max=bool(listen))
    overrides = [*(settings or ()), *sizes]
    check_writable("--report", report, job, timeline)
    check_writable("--timeline", timeline, job)
    picture = _picture_format(timeline)
    injections = tuple(parse_injection(spec) for spec in inject or ())
    # A script that defines the job runs in this process, so its prints need these streams too.
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)
    loaded_job = _loaded_job(job, overrides, report=report, timeline=timeline)
    cluster = loaded_job.config.cluster
    begins = resume_if_saved and not resume
    listening = _listening(
        listen, cluster, wait_nodes, token_file, operator, reattach=reattach, begins=begins
    )
    listening = _with_faults(_with_address(listening, advertise), cluster, injections)
    display = ConsoleDisplay(text_console(sys.stdout, highlight=True))
    try:
        result = loaded_job.run(
            resume=resume or resume_if_saved,
            state=state,
            injections=injections,
            trace=timeline is not None,
            display=display,
            output=display.output,
            listening=listening,
            callbacks=_trackers(tensorboard, wandb, loaded_job.config),
        )
        with _ignoring_signals_to_leave():
            unwritten = write_files(_files(result, report, timeline, picture))
        display.end(result)
    finally:
        with _ignoring_signals_to_leave():
            display.close()
    for failure in unwritten:
        typer.echo(f"planaria: {failure}", err=True)
    if result.error is not None:
        raise result.error
    if result.stopped or unwritten:
        raise typer.Exit(130 if result.stopped else 1)


def _loaded_job(
    job: Path, overrides: list[str], *, report: Path | None, timeline: Path | None
) -> Job:
    """The job, whose own profile is no file that is to be written."""
    loaded_job = named_job(job, overrides)
    profile = loaded_job.config.model.profile
    for option, path in (("--report", report), ("--timeline", timeline)):
        check_writable(option, path, Path(profile))
    return loaded_job


def _files(
    result: TrainingResult, report: Path | None, timeline: Path | None, picture: Format | None
) -> Files:
    """The files that were asked for."""
    return {
        "--report": (report, partial(_report, result)),
        "--timeline": (timeline, partial(_timeline, result, picture)),
    }


def _report(result: TrainingResult) -> bytes:
    """The file that --report writes."""
    return msgspec.json.format(msgspec.json.encode(result.report), indent=2)


def _picture_format(timeline: Path | None) -> Format | None:
    """The format of the timeline, if its file is to be a picture."""
    if timeline is None or not is_picture(timeline.name):
        return None
    return picture_format("--timeline", timeline.name)


def _trackers(tensorboard: str, wandb: str, config: JobConfig) -> list[Callbacks]:
    """What draws the job's curves elsewhere."""
    trackers: list[Callbacks] = [TensorBoard(tensorboard)] if tensorboard else []
    return [*trackers, WandB(wandb, config)] if wandb else trackers


@contextmanager
def _ignoring_signals_to_leave() -> Iterator[None]:
    """Ignores all signals to leave except Ctrl-C: finishing takes less time than a new run."""
    with restore_handlers():
        for number in LEAVE_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        yield


def _listening(
    listen: str,
    cluster: ClusterConfig,
    wait_s: float,
    token_file: str,
    operator: str,
    *,
    reattach: bool,
    begins: bool,
) -> Listening | None:
    """How the head waits for machines; None: all nodes are processes of this machine."""
    if not listen:
        if reattach:
            raise ConfigError("--reattach", True, "it needs --listen, for machines to come back to")
        if begins:
            raise ConfigError("--resume-if-saved", True, "it needs --listen; write --resume")
        if operator:
            remedy = "it needs --listen; on one machine cluster.grant_s has lost nodes replaced"
            raise ConfigError("--operator", operator, remedy)
        if token_file:
            raise ConfigError("--token-file", token_file, "it is of use only with --listen")
        if wait_s != _WAIT_NODES_S:
            raise ConfigError("--wait-nodes", wait_s, "it is of use only with --listen")
        return None
    if not 0.0 <= wait_s < math.inf:
        raise ConfigError("--wait-nodes", wait_s, "must be a finite number of seconds, at least 0")
    return Listening(
        address=listen,
        credentials=read_credentials(token_path(token_file)),
        nodes_min=cluster.nodes,
        nodes_max=max(cluster.nodes, cluster.max_nodes) + cluster.standby,
        wait_s=wait_s,
        reattaches=reattach,
        may_begin=begins,
        operator=operator,
        token_file=token_file,
    )


def _with_address(listening: Listening | None, advertise: str) -> Listening | None:
    """How the head waits if machines that are asked for find it at an address of their own."""
    if not advertise:
        return listening
    if listening is None:
        raise ConfigError("--advertise", advertise, "it is of use only with --listen")
    parse_address(advertise, field="--advertise")
    return replace(listening, advertised=advertise)


def _with_faults(
    listening: Listening | None, cluster: ClusterConfig, injections: Sequence[Injection]
) -> Listening | None:
    """How the head waits if faults are injected: places of joins are kept free until then.

    Raises:
        ConfigError: a fault names a node that the job never has, cannot be injected on other
            machines, or lets more of them join than there are places.
    """
    if listening is None:
        check_injections(injections, num_nodes=cluster.nodes + cluster.standby)
        return None
    check_on_machines(injections)
    # The machine of a lost node comes back with a new one.
    num_again = sum(len(injection.nodes) for injection in injections)
    num_joining = sum(injection.num_nodes for injection in injections)
    nodes_max = listening.nodes_max - num_joining
    if nodes_max < listening.nodes_min:
        first = next(injection for injection in injections if injection.num_nodes)
        remedy = (
            "the places of machines that join are kept free until then; write "
            f"--nodes {listening.nodes_min}:{listening.nodes_min + num_joining} or more"
        )
        raise ConfigError("--inject", first.spec, remedy)
    check_injections(injections, num_nodes=nodes_max + num_again)
    return replace(listening, nodes_max=nodes_max)


def _node_overrides(nodes: str, devices_per_node: int | None, *, has_max: bool) -> list[str]:
    """The overrides that --nodes and --devices-per-node stand for.

    Args:
        has_max: whether MIN:MAX is allowed.

    Raises:
        ConfigError: --nodes is no number, or no pair of numbers.
    """
    devices = [] if devices_per_node is None else [f"cluster.devices_per_node={devices_per_node}"]
    if not nodes:
        return devices
    least, colon, most = nodes.partition(":")
    is_number = least.isdecimal() and (most.isdecimal() or not colon)
    if not is_number or (colon and (not has_max or int(most) < int(least))):
        bounds = "must be N, or MIN:MAX with MIN <= MAX"
        remedy = bounds if has_max else "write a number, or with --listen MIN:MAX"
        raise ConfigError("--nodes", nodes, remedy)
    overrides = [f"cluster.nodes={int(least)}", *devices]
    return [*overrides, f"cluster.max_nodes={int(most)}"] if colon else overrides


def _timeline(result: TrainingResult, picture: Format | None) -> bytes:
    """The file that --timeline writes: a picture in the given format, or else a Chrome trace."""
    if picture is not None:
        title = f"{result.planned.config.name}: predicted and measured"
        return compared_figure(title, result.compared, result.report.events, picture=picture)
    trace = chrome_trace(
        result.compared or (Comparison(0, result.planned.predicted, Timeline((), 0.0)),),
        result.report.events,
        devices_per_node=result.planned.problem.devices_per_node,
    )
    return json.dumps(trace).encode()
