"""`planaria run`, the same command on each machine; here all machines are this one.

Each has the variables that Kubeflow would give it, and no option.
"""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.command import PACED, Command, wait_for
from helpers.machines import free_port
from planaria.checkpoint.disk.tiers import tier_of
from planaria.transport.credentials import write_credentials

pytestmark = pytest.mark.faults

# Iterations of a ninth of a second.
SETTINGS = (
    "model.time_scale=0.04",
    "resilience.failures_tolerated=0",
    "training.global_batch_size=12",
    "cluster.device_memory_bytes=0",
    "checkpoint.directory=checkpoints",
)


class Machines:
    """Machines that were started by a scheduler, each with a rank of its own."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._monkeypatch = monkeypatch
        self.commands: list[Command] = []
        self._port = free_port("127.0.0.1")
        write_credentials(directory / "token")
        monkeypatch.setenv("PLANARIA_TOKEN_FILE", str(directory / "token"))

    def start(
        self, rank: int, *settings: str, nnodes: str, options: tuple[str, ...] = ()
    ) -> Command:
        """Runs the command on the machine of a rank."""
        variables = {
            "PET_NNODES": nnodes,
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": "auto",
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(self._port),
        }
        for name, text in variables.items():
            self._monkeypatch.setenv(name, text)
        words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        arguments = ("run", str(PACED), "--report", f"report-{rank}.json", *words, *options)
        command = Command([sys.executable, "-m", "planaria", *arguments], directory=self._directory)
        self.commands.append(command)
        return command

    def processes(self) -> list[psutil.Process]:
        """The processes of all commands that are alive."""
        return [process for command in self.commands for process in command.processes()]

    def everything(self) -> str:
        """What all commands have printed."""
        return "\n".join(f"{c.output}\n{c.errors}" for c in self.commands)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Machines of which no process is left in the end."""
    started = Machines(tmp_path, monkeypatch)
    yield started
    for process in started.processes():
        process.kill()
    for command in started.commands:
        command.wait()


@pytest.mark.parametrize("num_noticed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_machines_train_a_job_with_one_command_and_are_taken_back(
    num_noticed: int, machines: Machines, tmp_path: Path
) -> None:
    """The one of rank 0 is the head and an agent; another one comes first here, and waits. SIGTERM
    to the command on a machine and its source of notices take its node out of the job: nothing is
    done twice, and the command ends in peace, with 76 after a notice."""
    settings = ("training.iterations=25", "cluster.notice_s=60")
    nnodes = str(2 + num_noticed)
    first = machines.start(1, *settings, nnodes=nnodes)
    first.wait_output("this machine is an agent: rank 1 (PET_NODE_RANK); the head is at 127.0.0.1:")
    head = machines.start(0, *settings, nnodes=nnodes)
    options = ("--notice", str(tmp_path / "leave"))
    for rank in range(2, 2 + num_noticed):
        machines.start(rank, *settings, nnodes=nnodes, options=options)
    head.wait_output("iteration 2 ")
    first.process.send_signal(signal.SIGTERM)
    (tmp_path / "leave").write_text("60")

    codes = [command.wait() for command in machines.commands]
    assert codes == [0, 0, *[76] * num_noticed], machines.everything()
    role = f"this machine is the head and an agent: rank 0 (PET_NODE_RANK); {nnodes} machines"
    assert role in head.output
    report = json.loads((tmp_path / "report-0.json").read_text())
    left = [event for event in report["events"] if event["kind"] == "preempted"]
    assert sum(len(event["nodes"]) for event in left) == 1 + num_noticed
    assert not any(event["redone_samples"] for event in report["events"])
    assert len(report["iterations"]) == report["final"]["iteration"] == 25
    assert len(report["final"]["nodes"]) == 1
    assert [path.name for path in tmp_path.glob("report-*.json")] == ["report-0.json"]
    wait_for(lambda: not machines.processes(), what="all processes are gone")


@pytest.mark.long
def test_a_killed_command_leaves_nothing_and_a_signal_to_the_head_saves_the_job(
    machines: Machines, tmp_path: Path
) -> None:
    """A scheduler kills the command alone; its agent and node end with it. The head's machine ends
    with the code of Ctrl-C, and the others with that of an unfinished job."""
    settings = ("training.iterations=1_000_000",)
    head, killed, other = (machines.start(rank, *settings, nnodes="3") for rank in range(3))
    head.wait_output("iteration 2 ")
    assert len(psutil.Process(killed.process.pid).children(recursive=True)) > 1
    killed.process.kill()
    wait_for(lambda: not killed.processes(), what="the agent and the node are gone")
    head.wait_output("training went on after")
    head.process.send_signal(signal.SIGTERM)

    assert (head.wait(), other.wait()) == (130, 3), machines.everything()
    assert tier_of(str(tmp_path / "checkpoints")).newest() is not None
    wait_for(lambda: not machines.processes(), what="all processes are gone")
