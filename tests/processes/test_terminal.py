"""Whatever becomes of the terminal or pipe that a job prints to, it trains on."""

import fcntl
import json
import os
import pty
import select
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from helpers.command import PACED, TIMEOUT_S, Command, running, train_arguments, wait_for
from helpers.jobs import digests
from planaria.checkpoint.disk.tiers import tier_of
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer

SMALL = (
    "model.time_scale=0.1",
    "cluster.nodes=3",
    "resilience.failures_tolerated=0",
    "training.global_batch_size=12",
)
SHORT = (*SMALL, "training.iterations=10")
ENDLESS = (*SMALL, "training.iterations=1_000_000_000")
REPORT = "report.json"
STOP, GO_ON = b"\x13", b"\x11"  # Ctrl-S and Ctrl-Q.
SUSPEND = b"\x1a"  # Ctrl-Z.
SHELL = ["bash", "--norc", "--noprofile", "-i"]


class Reader:
    """Whoever looks at what a command prints: the end of a pipe, or of a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def read(self) -> bool:
        """Reads what is there; whether more may come."""
        while select.select([self._descriptor], [], [], 0)[0]:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:  # Of a terminal that nobody has open any more.
                return False
            if not data:
                return False
            self.text += data.decode(errors="replace")
        return True

    def wait_text(self, text: str) -> None:
        def is_there() -> bool:
            assert self.read() or text in self.text, self.text
            return text in self.text

        wait_for(is_there, what=text)

    def wait_end(self) -> None:
        wait_for(lambda: not self.read(), what="everybody has closed it")

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


@contextmanager
def read(
    command_line: list[str], directory: Path, *descriptors: int
) -> Iterator[tuple[Command, Reader]]:
    """A command that prints to the second of two connected descriptors; the first is read."""
    source_fd, target_fd = descriptors
    with (
        closing(Reader(source_fd)) as reader,
        running(command_line, directory=directory, output_fd=target_fd) as command,
    ):
        os.close(target_fd)
        yield command, reader


def arguments(*settings: str, job: Path = PACED) -> list[str]:
    settings = (*settings, "checkpoint.directory=checkpoints")
    return [*train_arguments(job, *settings), "--report", REPORT]


def final(directory: Path) -> tuple[str, str]:
    """The digests in a report."""
    told = json.loads((directory / REPORT).read_text())["final"]
    return told["parameters_sha256"], told["optimizer_sha256"]


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of the short job, of which nothing is shown."""
    directory = tmp_path_factory.mktemp("calm") / "checkpoints"
    job = Job.from_file(PACED, overrides=[*SHORT, f"checkpoint.directory={directory}"])
    return digests(job.train(server=server))


@pytest.mark.long
def test_under_nohup_a_job_trains_on_when_its_reader_has_read_enough(
    tmp_path: Path, calm: tuple[str, str]
) -> None:
    """As `nohup planaria train JOB | head -3` does in a terminal that closes. nohup ignores SIGHUP,
    and the job has to leave it at that; its exit code is its own, and no word of a broken pipe is
    said."""
    with read(["nohup", *arguments(*SHORT)], tmp_path, *os.pipe()) as (command, reader):
        reader.wait_text("iteration 1 ")
        assert reader.text.count("\n") >= 3
        reader.close()
        command.process.send_signal(signal.SIGHUP)

        assert command.wait() == 0, command.errors
    assert not command.errors
    assert final(tmp_path) == calm


@pytest.mark.long
def test_a_job_trains_on_while_its_terminal_is_stopped(
    tmp_path: Path, calm: tuple[str, str]
) -> None:
    """Ctrl-S blocks whoever writes. What the job said meanwhile is there after Ctrl-Q."""
    with read(arguments(*SHORT), tmp_path, *pty.openpty()) as (command, reader):
        reader.wait_text("importing torch")
        reader.type(STOP)
        wait_for((tmp_path / REPORT).exists, what="the report of a job that has ended")
        reader.read()
        assert "training" not in reader.text
        reader.type(GO_ON)
        reader.wait_end()

        assert command.wait() == 0, reader.text
    assert "saved iteration 10" in reader.text
    assert final(tmp_path)[0] in reader.text
    assert final(tmp_path) == calm


PRINTING = """
import sys
print("from the script")
print("an error of the script", file=sys.stderr)
"""


def test_what_a_script_prints_fails_nothing(tmp_path: Path) -> None:
    """It runs in the command's own process. Left in a buffer that nobody reads, the flush of it at
    the end would be what the exit code tells of."""
    (tmp_path / "script.py").write_text(PRINTING)
    source_fd, target_fd = os.pipe()
    os.close(source_fd)
    with open(tmp_path / "errors", "wb") as errors:
        process = subprocess.Popen(
            train_arguments(Path("script.py")),
            cwd=tmp_path,
            stdout=target_fd,
            stderr=errors,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
    os.close(target_fd)

    assert process.wait(TIMEOUT_S) == 2
    first, last = (tmp_path / "errors").read_text().splitlines()
    assert first == "an error of the script"
    assert last.startswith("planaria: script = 'script.py'")


TALKING = """
import sys
import torch
from torch import nn

LINES = ("x" * 99 + "\\n") * 1000

class Talking(nn.Module):
    def forward(self, x):
        for stream in (sys.stdout, sys.stderr):
            print(LINES, end="", file=stream)
        return x

def model():
    return nn.Sequential(nn.Linear(8, 24), Talking(), nn.Linear(24, 5))

def points():
    return [(torch.randn(8), torch.tensor(index % 5)) for index in range(500)]
"""
TALKING_JOB = (
    "model.kind=python",
    "model.target=talking:model",
    "data.kind=python",
    "data.target=talking:points",
    "cluster.nodes=2",
    "training.iterations=10",
    "training.global_batch_size=12",
    "training.microbatch_size=1",
)


@pytest.mark.long
def test_a_worker_that_prints_more_than_anybody_reads_trains_on(tmp_path: Path) -> None:
    """More than 10 MB, into a pipe of 4 KiB. How many lines nobody has taken is told to whoever
    reads at last."""
    (tmp_path / "talking.py").write_text(TALKING)
    job = tmp_path / "job.toml"
    job.touch()
    source_fd, target_fd = os.pipe()
    fcntl.fcntl(target_fd, fcntl.F_SETPIPE_SZ, 4096)
    with read(arguments(*TALKING_JOB, job=job), tmp_path, source_fd, target_fd) as (
        command,
        reader,
    ):
        wait_for((tmp_path / REPORT).exists, what="the report of a job that has ended")
        reader.wait_end()

        assert command.wait() == 0, command.errors
    assert "lines are left out here: nobody read them in time" in reader.text


@pytest.mark.faults
@pytest.mark.long
def test_a_closed_terminal_saves_and_resume_goes_on(server: ForkServer, tmp_path: Path) -> None:
    """The kernel tells of it, and a shell once more; neither counts as a second Ctrl-C, nor do both
    make SIGTERM one. Nobody can be told anything any more."""
    with read(arguments(*ENDLESS), tmp_path, *pty.openpty()) as (command, reader):
        reader.wait_text("loss")
        reader.close()
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            command.process.send_signal(number)

        assert command.wait() == 130
    directory = tmp_path / "checkpoints"
    manifest = tier_of(str(directory)).newest()
    assert manifest is not None
    overrides = [
        *SMALL,
        f"training.iterations={manifest.iteration + 1}",
        f"checkpoint.directory={directory}",
    ]
    result = Job.from_file(PACED, overrides=overrides).train(resume=True, server=server)
    assert [record.iteration for record in result.report.iterations] == [manifest.iteration]


def typed(command_line: list[str]) -> bytes:
    """What one types to have a shell run it."""
    return shlex.join(command_line).encode() + b"\n"


@pytest.mark.long
def test_a_job_trains_on_while_its_launcher_is_suspended_and_ends_in_the_background(
    tmp_path: Path,
) -> None:
    """Ctrl-Z stops the launcher alone. Workers that print go on, and nobody is lost: the last save
    is there before the launcher goes on. It does so in the background, where with `stty tostop` the
    kernel stops whoever writes to the terminal."""
    (tmp_path / "talking.py").write_text(TALKING.replace("* 1000", "* 4"))
    job = tmp_path / "job.toml"
    job.touch()
    settings = ("training.iterations=40", "checkpoint.persist_every=1")
    with read(SHELL, tmp_path, *pty.openpty()) as (_, reader):
        reader.type(typed(arguments(*TALKING_JOB, *settings, job=job)))
        saves = tmp_path / "checkpoints"
        wait_for(lambda: reader.read() and any(saves.glob("*/manifest.json")), what="a save")
        reader.type(SUSPEND)
        reader.wait_text("Stopped")
        wait_for((saves / "40-0" / "manifest.json").exists, what="the last save")
        assert not (tmp_path / REPORT).exists()
        reader.type(b"stty tostop; bg\n")
        there = (tmp_path / REPORT).exists
        wait_for(lambda: reader.read() and there(), what="the report of a job that has ended")

    report = json.loads((tmp_path / REPORT).read_text())
    # A save of each iteration may be more than a busy disk takes; then some are skipped.
    assert [event for event in report["events"] if event["kind"] != "save_failed"] == []
    assert [record["iteration"] for record in report["iterations"]] == list(range(40))
