"""The files of `planaria launch` with real heads and agents; only ssh and Slurm are fakes.

All machines are this one. Slurm's fake runs the body of the batch script and its tasks.
"""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.command import Command, command, wait_for
from helpers.fake_scheduler import FakeScheduler
from helpers.machines import free_port
from planaria.checkpoint.disk.tiers import tier_of
from planaria.transport.credentials import write_credentials

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = str(ROOT / "examples" / "small.toml")
TIMEOUT_S = 300.0  # Five processes that import torch at once take 80 s on a busy machine.


class Launched:
    """Files of `planaria launch` for small.toml on two machines, in a directory of their own.

    Attributes:
        directory: the directory, with the saves and the token file.
        fakes: programs that the files use.
        commands: the files that were run.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.fakes = FakeScheduler(directory / "fakes")
        self.fakes.use_planaria()
        self.commands: list[Command] = []
        for name, text in {**self.fakes.environment, "NUM_MACHINES": "2"}.items():
            monkeypatch.setenv(name, text)
        write_credentials(directory / "token")
        (directory / "hosts").write_text("127.0.0.2\nme@127.0.0.3 rack-2\n")

    def start(self, *arguments: str, iterations: int) -> Command:
        """Writes the file of a job, and runs it."""
        settings = (
            f"training.iterations={iterations}",
            f"checkpoint.directory={self.directory / 'checkpoints'}",
            "cluster.device_memory_bytes=0",
        )
        words = [word for setting in settings for word in ("--set", setting)]
        words += ["--token-file", str(self.directory / "token")]
        printed = command("launch", SMALL, "--nodes", "2", *words, *arguments, "--dry-run")
        assert printed.exit_code == 0, printed.output
        path = self.directory / "launched"
        path.write_text(printed.output)
        self.commands.append(Command(["bash", str(path)], directory=self.directory))
        return self.commands[-1]

    def ssh(self, *, iterations: int) -> Command:
        """Runs a job on two machines over ssh."""
        hosts = str(self.directory / "hosts")
        own = ("--on", "ssh", "--hosts", hosts, "--port", str(free_port()))
        return self.start(*own, iterations=iterations)

    def newest(self) -> int:
        """The iteration of the newest save; -1: there is none."""
        newest = tier_of(str(self.directory / "checkpoints")).newest()
        return -1 if newest is None else newest.iteration

    def close(self) -> None:
        """Kills what is left."""
        for started in self.commands:
            for process in started.processes():
                process.kill()
            started.wait()


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    made = Launched(tmp_path, monkeypatch)
    yield made
    made.close()


def everything(command: Command) -> str:
    """What a command has printed."""
    return f"{command.output}\n{command.errors}"


def job_with_free_port() -> str:
    """The number of a job of Slurm from which `planaria run` derives a port that is free."""
    for job in range(7, 10_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 20_000 + job)):
            return str(job)
    raise AssertionError("no port is free")


def wait_iteration(command: Command, number: int) -> None:
    """Waits until an iteration is committed."""
    wait_for(
        lambda: f"iteration {number} " in command.output or command.process.poll() is not None,
        what=f"iteration {number}",
        timeout_s=TIMEOUT_S,
    )
    assert command.process.poll() is None, everything(command)


def test_two_machines_of_ssh_train_a_job_to_its_end(launched: Launched) -> None:
    """The first one is the head. No process is left, and both locks are free."""
    script = launched.ssh(iterations=30)

    assert script.wait(timeout_s=TIMEOUT_S) == 0, everything(script)
    assert launched.newest() == 30
    hosts = {line.split()[0] for line in launched.fakes.words("ssh")}
    assert hosts == {"127.0.0.2", "me@127.0.0.3"}
    wait_for(lambda: not script.processes(), what="all processes are gone")


def test_ssh_starts_a_killed_machine_again_and_ctrl_c_saves_the_job(launched: Launched) -> None:
    """Its node joins those that went on; then the head is told to stop, and the script ends with
    the head's exit code."""
    script = launched.ssh(iterations=1_000_000)
    wait_iteration(script, 2)
    (pid_file,) = launched.fakes.directory.glob(".planaria-small-*-1.pid")
    pid = int(pid_file.read_text())
    psutil.Process(pid).kill()
    wait_for(lambda: int(pid_file.read_text() or pid) != pid, what="it is started again")
    wait_for(lambda: "joined" in script.output, what="it joins", timeout_s=TIMEOUT_S)
    script.process.send_signal(signal.SIGTERM)

    assert script.wait(timeout_s=TIMEOUT_S) == 130, everything(script)
    assert launched.newest() > 2
    wait_for(lambda: not script.processes(), what="all processes are gone")


def test_slurm_goes_on_with_a_job_whose_time_was_over(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All machines get the signal; the job is saved and queued again, and its next start, with the
    same script, ends it."""
    monkeypatch.setenv("SLURM_JOB_ID", job := job_with_free_port())
    script = launched.start("--on", "slurm", iterations=100)
    wait_iteration(script, 2)
    script.process.send_signal(signal.SIGUSR1)

    assert script.wait(timeout_s=TIMEOUT_S) == 0, everything(script)
    assert launched.fakes.words("scontrol") == [f"requeue {job}"], everything(script)
    assert 2 < launched.newest() < 100
    again = launched.start("--on", "slurm", iterations=100)
    assert again.wait(timeout_s=TIMEOUT_S) == 0, everything(again)
    assert launched.newest() == 100
    assert launched.fakes.words("scontrol") == [f"requeue {job}"]
    wait_for(lambda: not again.processes(), what="all processes are gone")
