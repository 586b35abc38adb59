"""The command line: `planaria train | run | launch | agent | token | doctor | status | drain`,
`planaria events | chaos | profile | plan | placement | reproduce | simulate`, and `planaria
checkpoint ls | verify | prune | save | export | import`.

Exit codes:

    0    The command succeeded.
    1    The user's code raised, workers failed again and again, the last save failed, a check
         failed (`checkpoint verify`, `chaos`, `doctor`), or planaria has a bug.
    2    The user made a mistake in the job or on the command line.
    3    Too few nodes or copies are left, or the job could not go on and was saved.
    130  Ctrl-C or a signal to leave stopped the command. The job is saved, unless training had not
         begun, or a second Ctrl-C came.

Signals to leave are SIGTERM and SIGHUP, and once nodes are started also SIGQUIT, SIGUSR1, SIGUSR2
and SIGXCPU. Before that these four end the process without any of these codes.
"""

import logging
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import typer

import planaria
from planaria.cli.chaos_command import chaos
from planaria.cli.checkpoint_command import checkpoint
from planaria.cli.command_line import (
    JobFile,
    Settings,
    check_writable,
    exit_codes,
    text_console,
    write,
)
from planaria.cli.doctor_command import doctor
from planaria.cli.events_command import events
from planaria.cli.job_commands import drain, status
from planaria.cli.launch.launch_command import launch
from planaria.cli.machine_commands import agent
from planaria.cli.placement_command import placement
from planaria.cli.plan_command import plan
from planaria.cli.reproduce_command import reproduce
from planaria.cli.run_command import run
from planaria.cli.simulate.simulate_command import simulate
from planaria.cli.token_command import token
from planaria.cli.train_command import train
from planaria.job.scripts import named_job
from planaria.nodes.output import Outlet, finish, unfailing
from planaria.profiles.profile_json import encode_profile
from planaria.show.words import count_text

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # It wraps all paragraphs of a help text at the terminal's width.
    help="Trains large PyTorch models on nodes that fail.",
)


app.command()(agent)
app.command()(run)
app.command()(train)
app.command()(chaos)
app.command()(doctor)
app.command()(drain)
app.command()(events)
app.command()(launch)
app.command()(placement)
app.command()(plan)
app.command()(reproduce)
app.command()(simulate)
app.command()(status)
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


@app.command()
@exit_codes()
def profile(
    job: JobFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the profile to this file.")],
    settings: Settings = None,
) -> None:
    """Measures a job's layers and links on this machine."""
    check_writable("--output", output, job)
    # The profile then serves jobs with every kind of activation checkpointing. The one that the job
    # names may be an older one, or the one that is to be written.
    measures_all = ["training.activation_checkpointing=auto", "model.profile="]
    measured = named_job(job, [*(settings or ()), *measures_all]).profile()
    write("--output", output, encode_profile(measured))
    text = f"wrote the profile of {count_text(len(measured.layers), 'layer')} to {output}"
    text_console(soft_wrap=True).print(text)
