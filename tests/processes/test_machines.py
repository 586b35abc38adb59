"""A job whose nodes come by themselves: a head and agents that know only its address and the token.

All of them run on this machine here; tests/hosts gives each a machine of its own.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.command import Command, wait_for
from planaria.transport.credentials import write_credentials

JOB = """
[model]
kind = "hf"
[model.config]
model_type = "gpt2"
vocab_size = 256
n_positions = 16
n_layer = 2
n_embd = 8
n_head = 2
[data]
kind = "text"
tokenizer = "bytes"
sequence_length = 8
[training]
iterations = 40
global_batch_size = 8
microbatch_size = 2
seed = 7
deterministic = true
[resilience]
failures_tolerated = 1
[cluster]
nodes = 3
"""
PLANARIA = (sys.executable, "-m", "planaria")


class Machines:
    """A head and the agents that were told to join it.

    Attributes:
        head: the newest command `planaria train --listen`.
        agents: the commands `planaria agent`, in the order of their start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nodes: str,
        settings: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> None:
        self._directory = directory
        self._token = directory / "token"
        self.report_path = directory / "report.json"
        write_credentials(self._token)
        (directory / "job.toml").write_text(JOB)
        self._nodes, self._settings, self._port = nodes, settings, 0
        self.head = self.start_head(*options)
        self.agents: list[Command] = []

    def start_head(self, *options: str, address: str = "") -> Command:
        """Starts a head, at the address of the one before it unless another is given."""
        address = address or f"127.0.0.1:{self._port}"
        words = [word for setting in self._settings for word in ("--set", setting)]
        self.head = self._start(
            *("train", "job.toml", "--listen", address, "--nodes", self._nodes),
            *("--report", str(self.report_path), *options, *words),
        )
        return self.head

    def kill_head(self) -> None:
        """Kills the head, and waits until all its processes have ended."""
        self._port = int(self.address.rpartition(":")[2])
        self.head.process.kill()
        wait_for(lambda: not self.head.processes(), what="the head's processes end")

    def fork_servers(self, agent: Command) -> set[int]:
        """The pids of the fork servers of an agent."""
        return {child.pid for child in psutil.Process(agent.process.pid).children()}

    def worker_pids(self) -> set[int]:
        """The pids of the workers of all agents."""
        return {
            process.pid
            for agent in self.agents
            for process in agent.processes()
            if process.parents()[2:] and process.parents()[2].pid == agent.process.pid
        }

    def _start(self, *arguments: str, around: tuple[str, ...] = ()) -> Command:
        named = ("--token-file", str(self._token))
        return Command([*around, *PLANARIA, *arguments, *named], directory=self._directory)

    @property
    def address(self) -> str:
        """HOST:PORT of the head, once it says so."""
        self.head.wait_output("planaria agent --join ")
        return self.head.output.partition("planaria agent --join ")[2].split()[0]

    def join(
        self, *others: str, options: tuple[str, ...] = (), around: tuple[str, ...] = ()
    ) -> Command:
        """Starts another agent, which knows further addresses of heads.

        Args:
            around: a command that runs the agent's.
        """
        addresses = ",".join((self.address, *others))
        self.agents.append(self._start("agent", "--join", addresses, *options, around=around))
        return self.agents[-1]

    def report(self) -> Any:
        """The report, once the job has ended well."""
        assert self.head.wait(timeout_s=120.0) == 0, self.head.output + self.head.errors
        return json.loads(self.report_path.read_text())

    def close(self) -> None:
        """Kills what is left."""
        for command in (self.head, *self.agents):
            for process in command.processes():
                process.kill()


def free_port() -> int:
    """A port at which nobody listens, and that no connection gets of itself."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        end = int(file.read().split()[0])
    for port in range(end - 1, 1024, -1):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.2", port)):
            return port
    raise AssertionError("no port is free")


@contextmanager
def machines(directory: Path, **arguments: Any) -> Iterator[Machines]:
    """A head and agents for the length of the context."""
    made = Machines(directory, **arguments)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def local_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters that the job ends with where all nodes are processes of one machine."""
    directory = tmp_path_factory.mktemp("local")
    (directory / "job.toml").write_text(JOB)
    arguments = ("train", "job.toml", "--report", "report.json")
    command = Command([*PLANARIA, *arguments], directory=directory)
    assert command.wait(timeout_s=120.0) == 0, command.output + command.errors
    report = json.loads((directory / "report.json").read_text())
    return str(report["final"]["parameters_sha256"])


def test_nodes_that_came_by_themselves_train_to_the_same_bits(
    tmp_path: Path, local_hash: str
) -> None:
    with machines(tmp_path, nodes="3") as job:
        for _ in range(3):
            job.join()
        report = job.report()

        assert report["final"]["parameters_sha256"] == local_hash
        assert [agent.wait() for agent in job.agents] == [0, 0, 0]
        assert all("the job is finished" in agent.output for agent in job.agents)


@pytest.mark.hosts
@pytest.mark.long
def test_an_agent_that_is_killed_costs_its_node_alone_and_another_one_joins(
    tmp_path: Path, local_hash: str
) -> None:
    with machines(tmp_path, nodes="3:4") as job:
        first, *_ = (job.join() for _ in range(3))
        job.head.wait_output("iteration 5 ")
        os.kill(first.process.pid, signal.SIGKILL)
        job.join()
        report = job.report()

        assert report["final"]["parameters_sha256"] == local_hash
        kinds = [event["kind"] for event in report["events"]]
        assert "lost" in kinds
        wait_for(lambda: not first.processes(), what="the killed agent's processes end, too")


@pytest.mark.hosts
@pytest.mark.long
def test_a_machine_that_is_told_to_leave_is_drained(tmp_path: Path, local_hash: str) -> None:
    with machines(tmp_path, nodes="3:4") as job:
        first, *_ = (job.join() for _ in range(3))
        job.head.wait_output("iteration 5 ")
        os.kill(first.process.pid, signal.SIGTERM)

        assert first.wait(timeout_s=60.0) == 0, first.output + first.errors
        report = job.report()
        assert report["final"]["parameters_sha256"] == local_hash
        assert all(event["redone_samples"] == 0 for event in report["events"])


def test_an_agent_with_another_token_is_told_so(tmp_path: Path) -> None:
    with machines(tmp_path, nodes="3") as job:
        write_credentials(tmp_path / "other")
        arguments = ("agent", "--join", job.address, "--token-file", str(tmp_path / "other"))
        stranger = Command([*PLANARIA, *arguments], directory=tmp_path)

        assert stranger.wait() == 2
        assert "token" in stranger.errors
        assert stranger.errors.count("\n") == 1


def test_a_head_that_is_killed_takes_its_living_nodes_up_again(
    tmp_path: Path, local_hash: str
) -> None:
    """No worker ends, and nothing but the iteration in flight may be done again."""
    with machines(tmp_path, nodes="3") as job:
        for _ in range(3):
            job.join()
        job.head.wait_output("iteration 5 ")
        before = job.worker_pids()
        job.kill_head()
        refused = job.start_head()
        assert refused.wait() == 2
        assert "--reattach" in refused.errors

        job.start_head("--reattach")
        report = job.report()
        assert report["final"]["parameters_sha256"] == local_hash
        assert {worker["pid"] for worker in report["workers"]} == before
        assert [agent.wait() for agent in job.agents] == [0, 0, 0]


@pytest.mark.hosts
@pytest.mark.long
def test_resume_finds_the_living_nodes_of_a_lost_head_by_itself(
    tmp_path: Path, local_hash: str
) -> None:
    with machines(tmp_path, nodes="3") as job:
        for _ in range(3):
            job.join()
        job.head.wait_output("iteration 5 ")
        job.kill_head()
        job.start_head("--resume")

        assert job.report()["final"]["parameters_sha256"] == local_hash


@pytest.mark.hosts
@pytest.mark.long
def test_resume_begins_a_new_run_where_the_machines_of_a_lost_head_are_gone(
    tmp_path: Path, local_hash: str
) -> None:
    settings = ("checkpoint.persist_every=2", "cluster.lease_s=1.0")
    with machines(tmp_path, nodes="3", settings=settings) as job:
        for _ in range(3):
            job.join()
        job.head.wait_output("saved iteration")
        job.kill_head()
        for agent in job.agents:
            agent.process.kill()
        job.start_head("--resume")
        for _ in range(3):
            job.join()

        assert job.report()["final"]["parameters_sha256"] == local_hash


@pytest.mark.hosts
@pytest.mark.long
def test_a_head_that_comes_back_at_another_address_is_found_there(
    tmp_path: Path, local_hash: str
) -> None:
    """As one that is started on another machine, with the journal of the first."""
    with machines(tmp_path, nodes="3") as job:
        other = f"127.0.0.2:{free_port()}"
        for _ in range(3):
            job.join(other)
        job.head.wait_output("iteration 5 ")
        before = job.worker_pids()
        job.kill_head()
        job.start_head("--reattach", address=other)
        report = job.report()

        assert report["final"]["parameters_sha256"] == local_hash
        assert {worker["pid"] for worker in report["workers"]} == before


@pytest.mark.hosts
@pytest.mark.long
def test_an_agent_that_stays_serves_job_after_job(tmp_path: Path, local_hash: str) -> None:
    """Its fork server, which has imported torch, stays too."""
    with machines(tmp_path, nodes="3") as job:
        for _ in range(3):
            job.join("127.0.0.1:1", options=("--stay",))
        assert job.report()["final"]["parameters_sha256"] == local_hash
        servers = {agent.process.pid: job.fork_servers(agent) for agent in job.agents}
        job.start_head("--set", f"checkpoint.directory={tmp_path / 'second'}", address=job.address)

        assert job.report()["final"]["parameters_sha256"] == local_hash
        assert {agent.process.pid: job.fork_servers(agent) for agent in job.agents} == servers
        for agent in job.agents:
            agent.process.terminate()
        assert [agent.wait() for agent in job.agents] == [0, 0, 0]


# A time namespace, whose processes have a monotonic clock of their own.
ELSEWHEN = ("unshare", "--time", "--monotonic", "1000000")


@pytest.mark.skipif(
    os.geteuid() != 0
    or not shutil.which("unshare")
    or subprocess.run([*ELSEWHEN, "true"], capture_output=True, check=False).returncode != 0,
    reason="only root has another clock on this machine",
)
def test_a_machine_whose_clock_is_far_ahead_trains_like_any_other(tmp_path: Path) -> None:
    """Leases hold, and the timeline has its ranks beside the others', to within what is told."""
    timeline = tmp_path / "timeline.json"
    settings = ("training.iterations=12", "resilience.failures_tolerated=0")
    options = ("--timeline", str(timeline))
    with machines(tmp_path, nodes="2", settings=settings, options=options) as job:
        job.join()
        job.join(around=ELSEWHEN)
        report = job.report()

    trace = json.loads(timeline.read_text())
    errors_s = [iteration["clock_error_s"] for iteration in report["iterations"]]
    assert all(0.0 < error_s < 0.5 for error_s in errors_s), errors_s
    assert trace["otherData"] == {"clock_error_s": max(errors_s)}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    wall_s = sum(max(i["seconds"], i["predicted_s"]) for i in report["iterations"])
    assert len({event["pid"] for event in spans}) == 2 * 2  # Predicted and measured, of two nodes.
    assert max(event["ts"] + event["dur"] for event in spans) < 1e6 * (wall_s + 60.0)
    assert report["events"] == []
