"""The command line inside the test's process, and as a process of its own that leaves traces."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from planaria.cli import main as cli
from planaria.nodes.head import request_socket

MARK = "PLANARIA_TEST_MARK"
TIMEOUT_S = 60.0  # A bound for a machine that does other things too; nothing should take as long.
CHECKPOINTS = "checkpoints"  # Where a job saves that does not say.
PACED = Path(__file__).parents[2] / "examples" / "paced.toml"


def command(*arguments: str) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)


def train(job: Path, *settings: str) -> Result:
    """Runs `planaria train` in this process."""
    return command("train", str(job), *(word for one in settings for word in ("--set", one)))


def assert_mistake(result: Result, *parts: str, code: int = 2) -> None:
    """One line with these parts, the exit code, and nothing written."""
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("planaria: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr
    assert not Path(CHECKPOINTS).exists()


def keep_request_sockets_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of this process are asked there alone, whatever other jobs of the user run here."""
    monkeypatch.setattr(request_socket, "socket_directories", lambda: (directory,))


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that has ended may wait for its parent."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], *, what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Blocks until the condition holds; AssertionError if it does not in time."""
    begin_s = time.monotonic()
    deadline_s = begin_s + timeout_s
    while not condition():
        end_s = time.monotonic()
        assert end_s < deadline_s, f"not within {timeout_s} s: {what}"
        # To look at all processes takes longer than this, and what is waited for needs the cores.
        time.sleep(max(0.005, 3 * (end_s - begin_s)))
        begin_s = time.monotonic()


@contextmanager
def _interruptible() -> Iterator[None]:
    """What is started in between heeds Ctrl-C and a closed terminal, also where the tests run in
    the background: a shell has its background jobs ignore the one, nohup the other, and they hand
    that on."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Command:
    """A running `planaria` command, in a process group of its own as a shell makes it.

    Args:
        output_fd: where it prints, instead of a file; a terminal is its only one, errors included.

    Attributes:
        mark: in the environment of every process of the job, and of no other.
    """

    def __init__(
        self, arguments: Sequence[str], *, directory: Path, output_fd: int | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._output = directory / f"{self.mark}.out"
        self._errors = directory / f"{self.mark}.err"
        with (
            self._output.open("wb") as output,
            self._errors.open("wb") as errors,
            _interruptible(),
        ):
            terminal_fd = output_fd if output_fd is not None and os.isatty(output_fd) else None
            self.process = subprocess.Popen(
                arguments,
                cwd=directory,
                stdin=subprocess.DEVNULL if terminal_fd is None else terminal_fd,
                stdout=output if output_fd is None else output_fd,
                stderr=errors if terminal_fd is None else terminal_fd,
                env=os.environ | {MARK: self.mark, "PYTHONUNBUFFERED": "1", "TERM": "xterm"},
                start_new_session=True,
                preexec_fn=None if terminal_fd is None else _control_terminal,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def wait_output(self, text: str) -> None:
        """Blocks until the command has printed the text."""

        def is_there() -> bool:
            assert text in self.output or self.process.poll() is None, self.output + self.errors
            return text in self.output

        wait_for(is_there, what=text)

    def wait(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code."""
        return self.process.wait(timeout=timeout_s)

    def processes(self) -> list[psutil.Process]:
        """Those of the job that are alive, the command itself among them."""
        return [process for process in psutil.process_iter() if self._is_alive(process)]

    def _is_alive(self, process: psutil.Process) -> bool:
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
        except (OSError, psutil.NoSuchProcess):
            return False
        return self.mark.encode() in environment and not is_zombie

    def ports(self) -> set[int]:
        """On which processes of the job listen."""
        return {port for process in self.processes() for port in _listening(process)}


def _control_terminal() -> None:
    """Its input is the terminal of this process and its children, which it tells when it closes."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def listening_ports() -> set[int]:
    """On which anything on this machine listens."""
    return _listening(psutil)


def _listening(source: Any) -> set[int]:
    return {
        connection.laddr.port
        for connection in source.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def train_arguments(job: Path, *settings: str) -> list[str]:
    """The command line that trains a job."""
    options = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "planaria", "train", str(job), *options]


@contextmanager
def running(
    arguments: Sequence[str], *, directory: Path, output_fd: int | None = None
) -> Iterator[Command]:
    """The command; whatever is left of it in the end is killed, for it is a test's failure."""
    command = Command(arguments, directory=directory, output_fd=output_fd)
    try:
        yield command
    finally:
        for process in command.processes():
            process.send_signal(signal.SIGKILL)
        command.wait()
