"""A job on test hosts: a head, and an agent on each machine, as a user starts them.

The head has the job file and the module of its model, and nobody else has. What all have is the
token file and the directory of the saves. A job may be another one, see `Machines`.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.hosts import Host, Hosts, Process
from helpers.slow_layers import HURRY
from planaria.job.config import load_job
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer
from planaria.transport.credentials import write_credentials

ITERATIONS = 120
TIMEOUT_S = 300.0  # Six hosts that import torch at once on two cores take two minutes.
LEASE_S = 3.0
NUM_NODES = 4

_FREE_PORT = """
import socket, sys
print(socket.create_server((sys.argv[1], 0)).getsockname()[1])
"""
_MODULE = Path(__file__).with_name("slow_layers.py")
_TARGETS = {"model": "layers", "data": "points"}
_JOB = f"""
[model]
kind = "python"
target = "slow_layers:{_TARGETS["model"]}"

[data]
kind = "python"
target = "slow_layers:{_TARGETS["data"]}"

[training]
iterations = {ITERATIONS}
global_batch_size = 4
microbatch_size = 1
learning_rate = 1e-2
gradient_clip = 1.0
seed = 7

[cluster]
nodes = {NUM_NODES}
device_memory_bytes = 100_000  # Two nodes can hold the model, one cannot.
lease_s = {LEASE_S}
"""


# The words of `planaria train` that name a job, given a host's own directory and that of the saves.
JobWords = Callable[[Path, Path], tuple[str, ...]]


class Machines:
    """Hosts whose agents serve job after job, so that they import torch once.

    The first host is the head's. The last one has no agent of its own accord, see `join`; it may
    run another head, at the other address that all agents know.

    Args:
        job_words: words that name the job.

    Attributes:
        directory: directory that all hosts see.
        node_hosts: hosts with such agents.
        agents: commands of the newest agents, by the index of their host.
        head_environment: variables that heads have beside those of the agents.
    """

    def __init__(self, hosts: Hosts, directory: Path, *, job_words: JobWords | None = None) -> None:
        self._job_words = job_words or _slow_job_words
        self.hosts = hosts
        self.directory = directory
        self.node_hosts = tuple(hosts)[1:-1]
        self.agents: dict[int, Process] = {}
        self.head_environment: dict[str, str] = {}
        self.hurry_path = directory / "hurry"
        self._token = directory / "token"
        write_credentials(self._token)
        self._head_hosts = (hosts[0], tuple(hosts)[-1])
        self._addresses = {host: _free_address(host) for host in self._head_hosts}

    def make_ready(self) -> None:
        """Ends whatever was done to the hosts, and starts the agents that are missing."""
        for host in self.hosts:
            host.mend()
            if host not in self.node_hosts:
                host.kill_processes()
        for host in self.node_hosts:
            agent = self.agents.get(host.index)
            if agent is None or agent.returncode is not None:
                host.kill_processes()
                self.join(host, "--stay")

    def end_agents(self) -> None:
        """Ends all agents, because they may wait for the head of a job that has failed."""
        for host in self.hosts:
            host.mend()
            host.kill_processes()

    def join(self, host: Host, *options: str) -> Process:
        """Starts an agent on a host."""
        addresses = ",".join(self._addresses.values())
        words = ("agent", "--join", addresses, "--token-file", str(self._token), *options)
        self.agents[host.index] = host.start("planaria", *words, env=self._environment)
        return self.agents[host.index]

    def start_head(
        self,
        nodes: str,
        directory: Path,
        *options: str,
        is_elsewhere: bool = False,
        is_known: bool = True,
    ) -> Process:
        """Starts the head of a job, whose journal, saves and report go to the directory.

        Args:
            options: further options of `planaria train`.
            is_elsewhere: whether it runs on the last host.
            is_known: whether it listens at the address that agents know.
        """
        head = self._head_hosts[is_elsewhere]
        address = self._addresses[head] if is_known else _free_address(head)
        return head.start(
            *("planaria", "train", *self._job_words(head.directory, directory / "checkpoints")),
            *("--listen", address, "--nodes", nodes, *options),
            *("--token-file", str(self._token), "--report", str(directory / "report.json")),
            *("--state", str(directory / "state")),
            env=self._environment | self.head_environment,
        )

    @property
    def _environment(self) -> dict[str, str]:
        return {HURRY: str(self.hurry_path)}


class MachineJob:
    """A job on such hosts.

    Attributes:
        head: the command of its head.
    """

    def __init__(
        self, machines: Machines, directory: Path, options: tuple[str, ...], *, max_nodes: int
    ) -> None:
        self._machines = machines
        self._directory = directory
        self._report_path = directory / "report.json"
        num_nodes = len(machines.node_hosts)
        self._nodes = f"{num_nodes}:{max_nodes or num_nodes}"
        self._starts = {index: len(one.output) for index, one in machines.agents.items()}
        machines.hurry_path.unlink(missing_ok=True)
        self.head = machines.start_head(self._nodes, directory, *options)

    def take_up(self, *, is_elsewhere: bool, is_known: bool = True) -> None:
        """Starts the head again once it has been lost; see `Machines.start_head`."""
        options = ("--reattach",)
        self.head = self._machines.start_head(
            *(self._nodes, self._directory, *options), is_elsewhere=is_elsewhere, is_known=is_known
        )
        self.head.wait_for_line("^iteration ", timeout_s=TIMEOUT_S)

    def wait_training(self) -> None:
        """Blocks until a few iterations are committed."""
        self.head.wait_for_line("^training$", timeout_s=TIMEOUT_S)
        self._wait_iteration(3)

    def wait_progress(self, num_iterations: int = 5) -> None:
        """Blocks until so many more iterations are committed."""
        lines = self.head.output.splitlines()
        newest = max(int(line.split()[1]) for line in lines if line.startswith("iteration "))
        self._wait_iteration(newest + num_iterations)

    def wait_lost(self, node: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Blocks until a node is lost and the others train again."""
        self.head.wait_for_line(rf"^lost: node {node}\b", timeout_s=timeout_s)
        self.wait_progress()

    def _wait_iteration(self, iteration: int) -> None:
        self.head.wait_for_line(rf"^iteration {iteration} ", timeout_s=TIMEOUT_S)

    def node(self, host: Host, *, num_nodes: int = 1) -> int:
        """The node that a host runs, once its agent has run so many of them in this job."""
        runs = r"(?s:^runs node (\d+)$.*?)" * num_nodes
        start = self._starts.get(host.index, 0)
        agent = self._machines.agents[host.index]
        return int(agent.wait_for_line(runs, timeout_s=TIMEOUT_S, start=start)[num_nodes])

    def join(self, host: Host) -> Process:
        """Starts an agent for this job alone."""
        self._starts.pop(host.index, None)
        return self._machines.join(host)

    def report(self, timeout_s: float = TIMEOUT_S) -> Any:
        """The report, once the job has ended well, and without the slowness of the model."""
        self._machines.hurry_path.touch()
        assert self.head.wait(timeout_s) == 0, self.head.output
        assert "Traceback" not in self.head.output
        return json.loads(self._report_path.read_text())


@contextmanager
def machine_job(
    machines: Machines,
    directory: Path,
    *options: str,
    max_nodes: int = 0,
    others: Sequence[Host] = (),
) -> Iterator[MachineJob]:
    """A job that trains on all machines with agents.

    Args:
        directory: directory that all hosts see, for this job alone.
        options: further options of `planaria train`.
        max_nodes: number of machines that may train; 0: no more than at the start.
        others: further hosts that have an agent from the start.
    """
    machines.make_ready()
    for host in others:
        machines.join(host)
    job = MachineJob(machines, directory, options, max_nodes=max_nodes)
    try:
        job.wait_training()
        yield job
    except BaseException:
        machines.end_agents()
        raise


def local_digests(
    directory: Path, server: ForkServer, *, iterations: int = ITERATIONS
) -> tuple[str, str]:
    """What the same job ends with where its nodes are processes of this machine."""
    here = [f"{table}.target=helpers.slow_layers:{name}" for table, name in _TARGETS.items()]
    fewer = ("cluster.nodes=2", "resilience.failures_tolerated=0")
    length = f"training.iterations={iterations}"
    path = write_job(directory, directory / "checkpoints")
    config = load_job(path, overrides=(*here, *fewer, length))
    final = Job(config).train(server=server).report.final
    return final.parameters_sha256, final.optimizer_sha256


def losses(report: Any) -> list[tuple[int, ...]]:
    """The nodes that were lost, loss by loss."""
    return [tuple(event["nodes"]) for event in report["events"] if event["kind"] == "lost"]


def joins(report: Any) -> list[tuple[int, ...]]:
    """The nodes that joined, join by join."""
    return [tuple(event["nodes"]) for event in report["events"] if event["kind"] == "joined"]


def pids(host: Host) -> set[int]:
    """The processes of a host."""
    return {process.pid for process in host.processes()}


def digests(report: Any) -> tuple[str, str]:
    """What must not depend on anything but the job."""
    return report["final"]["parameters_sha256"], report["final"]["optimizer_sha256"]


def _free_address(host: Host) -> str:
    """HOST:PORT of a host, where nobody listens."""
    port = host.run("python", "-c", _FREE_PORT, host.address).strip()
    return f"{host.address}:{port}"


def _slow_job_words(directory: Path, saves: Path) -> tuple[str, ...]:
    return (str(write_job(directory, saves)),)


def write_job(directory: Path, saves: Path) -> Path:
    """Writes the job file and the module of its model."""
    shutil.copy(_MODULE, directory)
    path = directory / "job.toml"
    path.write_text(f'{_JOB}\n[checkpoint]\ndirectory = "{saves}"\n')
    return path
