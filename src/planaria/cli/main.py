"""The command line: `planaria train | profile | plan | placement | drain | events | chaos | token`,
and `planaria checkpoint ls | verify | prune | save | export`.

Exit codes:

    0    The command succeeded.
    1    The user's code raised, workers failed again and again, the last save failed, a check
         failed (`checkpoint verify`, `chaos`), or planaria has a bug.
    2    The user made a mistake in the job or on the command line.
    3    Too few nodes or copies are left, or the job could not go on and was saved.
    130  Ctrl-C or a signal to leave stopped the command. The job is saved, unless training had not
         begun, or a second Ctrl-C came.

Signals to leave are SIGTERM and SIGHUP, and once nodes are started also SIGQUIT, SIGUSR1, SIGUSR2
and SIGXCPU. Before that these four end the process without any of these codes.
"""

import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer
from rich.console import Console

import planaria
from planaria.cli.chaos_command import chaos
from planaria.cli.checkpoint_command import checkpoint
from planaria.cli.command_line import (
    JobFile,
    Settings,
    check_writable,
    exit_codes,
    finish,
    unfailing,
    write,
)
from planaria.cli.console_display import ConsoleDisplay
from planaria.cli.events_command import events
from planaria.cli.machine_commands import TokenFile, agent
from planaria.cli.placement_command import placement
from planaria.cli.plan_command import plan
from planaria.cli.token_command import token
from planaria.core.inject import check_injections, parse_injection
from planaria.core.profile_json import encode_profile
from planaria.errors import ConfigError
from planaria.estimator.correction import Comparison
from planaria.estimator.time import Timeline
from planaria.job.on_machines import Listening
from planaria.job.scripts import named_job
from planaria.job.training_job import TrainingResult
from planaria.nodes.head.process_events import LEAVE_SIGNALS, restore_handlers
from planaria.nodes.head.request_socket import Drain, ask
from planaria.nodes.output import Outlet
from planaria.show.gantt import compared_figure
from planaria.show.page import Format, is_picture, picture_format
from planaria.show.plots import chrome_trace
from planaria.show.words import count_text
from planaria.transport.credentials import read_credentials, token_path

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # It wraps all paragraphs of a help text at the terminal's width.
    help="Trains large PyTorch models on nodes that fail.",
)


app.command()(agent)
app.command()(chaos)
app.command()(events)
app.command()(placement)
app.command()(plan)
app.command()(token)
app.add_typer(checkpoint, name="checkpoint")


def main() -> None:
    """Runs the command line; it is the entry point of the console script."""
    errors = _QueuedStream(unfailing(sys.stderr))
    logging.basicConfig(
        level=logging.WARNING,
        format="%(name)s: %(message)s",
        handlers=[logging.StreamHandler(errors)],
    )
    # Without this, `stty tostop` stops a command in the background as soon as it prints.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP.
            signal.signal(number, _on_signal_to_leave)
    try:
        app()
    finally:
        finish(errors.outlet)


class _QueuedStream:
    """A stream for log messages that never blocks its writer, not even an event loop.

    Args:
        stream: stream to which the messages are printed later.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.outlet = Outlet(lambda text: print(text, file=stream))

    def write(self, text: str) -> None:
        """Queues a message."""
        self.outlet.post(partial(self._stream.write, text), num_bytes=len(text))

    def flush(self) -> None:
        """Does nothing: queued messages are waited for only at the end."""


def _on_signal_to_leave(number: int, _: object) -> None:
    """Treats SIGTERM, sent by a scheduler, and SIGHUP, sent by a closed terminal, like Ctrl-C."""
    # A shell and the kernel may both send SIGHUP; the second must not interrupt the clean-up.
    if number == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _ignoring_signals_to_leave() -> Iterator[None]:
    """Ignores all signals to leave except Ctrl-C: finishing takes less time than a new run."""
    with restore_handlers():
        for number in LEAVE_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        yield


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"planaria {planaria.__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Trains large PyTorch models on nodes that fail."""


State = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Directory for the coordinator's journal. Default: beside the saves, or in the user's "
        "state directory if the saves are in an object store.",
    ),
]
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


@app.command()
@exit_codes()
def train(
    job: JobFile,
    nodes: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Number of nodes to start with; with --listen also the most that may train.",
        ),
    ] = "",
    devices_per_node: Annotated[
        int | None, typer.Option(help="Number of devices in each node.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report to this JSON file.")] = None,
    timeline: TimelineFile = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest save.")] = False,
    inject: Faults = None,
    state: State = "",
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDR:PORT",
            help="Run the nodes on other machines, which come to this address with "
            "`planaria agent --join`; port 0 is any free one.",
        ),
    ] = "",
    wait_nodes: Annotated[
        float,
        typer.Option(metavar="S", help="With --listen: seconds to wait for the first nodes."),
    ] = 600.0,
    token_file: TokenFile = "",
    settings: Settings = None,
) -> None:
    """Trains a job on emulated nodes of this machine, or with --listen on other machines."""
    overrides = list(settings or ())
    overrides += _node_overrides(nodes, has_max=bool(listen))
    if devices_per_node is not None:
        overrides.append(f"cluster.devices_per_node={devices_per_node}")
    for name, path in (("--report", report), ("--timeline", timeline)):
        check_writable(name, path)
    picture = None
    if timeline is not None and is_picture(timeline.name):
        picture = picture_format("--timeline", timeline.name)
    injections = tuple(parse_injection(spec) for spec in inject or ())
    # A script that defines the job runs in this process, so its prints need these streams too.
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)
    loaded_job = named_job(job, overrides)
    cluster = loaded_job.config.cluster
    check_injections(injections, num_nodes=cluster.nodes + cluster.standby)
    listening = None
    if listen:
        if injections:
            raise ConfigError("--inject", inject, "faults are injected on one machine only")
        listening = Listening(
            address=listen,
            credentials=read_credentials(token_path(token_file)),
            nodes_min=cluster.nodes,
            nodes_max=max(cluster.nodes, cluster.max_nodes) + cluster.standby,
            wait_s=wait_nodes,
        )
    display = ConsoleDisplay(Console(file=sys.stdout))
    try:
        result = loaded_job.run(
            resume=resume,
            state=state,
            injections=injections,
            trace=timeline is not None,
            display=display,
            output=display.output,
            listening=listening,
        )
        with _ignoring_signals_to_leave():
            if report is not None:
                write(report, msgspec.json.format(msgspec.json.encode(result.report), indent=2))
            if timeline is not None:
                write(timeline, _timeline(result, picture))
        display.end(result)
    finally:
        with _ignoring_signals_to_leave():
            display.close()
    if result.error is not None:
        raise result.error
    if result.stopped:
        raise typer.Exit(130)


@app.command()
@exit_codes()
def profile(
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the profile to this file.")],
    settings: Settings = None,
) -> None:
    """Measures a job's layers and links on this machine."""
    check_writable("--output", output)
    measured = named_job(job, list(settings or ())).profile()
    write(output, encode_profile(measured))
    Console().print(f"wrote the profile of {count_text(len(measured.layers), 'layer')} to {output}")


@app.command()
@exit_codes()
def drain(
    node: Annotated[int, typer.Argument(help="Number of the node that is to leave.")],
    job: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the job, if several jobs run here.")
    ] = "",
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", help="Wait at most this many seconds for the node to leave."),
    ] = 600.0,
) -> None:
    """Removes a node from a running job; returns when the node has left.

    No iteration is done again. If a standby node waits, it takes the place of the node.
    """
    answer = ask(Drain(node), job=job, timeout_s=timeout_s)
    if not answer.is_done:
        raise ConfigError("NODE", node, answer.text)
    Console().print(answer.text)


def _node_overrides(nodes: str, *, has_max: bool) -> list[str]:
    """The overrides that --nodes stands for.

    Args:
        has_max: whether MIN:MAX is allowed.

    Raises:
        ConfigError: the option is no number, or no pair of numbers.
    """
    if not nodes:
        return []
    least, colon, most = nodes.partition(":")
    is_number = least.isdecimal() and (most.isdecimal() or not colon)
    if not is_number or (colon and (not has_max or int(most) < int(least))):
        remedy = "write a number, or with --listen MIN:MAX"
        raise ConfigError("--nodes", nodes, remedy)
    overrides = [f"cluster.nodes={int(least)}"]
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
