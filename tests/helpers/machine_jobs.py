"""A job on test hosts: a head, and an agent on each machine, as a user starts them.

The head has the job file and the module of its model, and nobody else has. What all have is the
token file and the directory of the saves.
"""

import json
import shutil
from collections.abc import Iterator
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
TIMEOUT_S = 100.0
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


class Machines:
    """Hosts whose agents serve job after job, so that they import torch once.

    The first host is the head's. The last one has no agent of its own accord, see `join`.

    Attributes:
        directory: directory that all hosts see.
        node_hosts: hosts with such agents.
        agents: commands of the newest agents, by the index of their host.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self.node_hosts = tuple(hosts)[1:-1]
        self.agents: dict[int, Process] = {}
        self.hurry_path = directory / "hurry"
        self._token = directory / "token"
        write_credentials(self._token)
        port = hosts[0].run("python", "-c", _FREE_PORT, hosts[0].address).strip()
        self.address = f"{hosts[0].address}:{port}"

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
        words = ("agent", "--join", self.address, "--token-file", str(self._token), *options)
        self.agents[host.index] = host.start("planaria", *words, env=self._environment)
        return self.agents[host.index]

    def start_head(self, nodes: str, directory: Path) -> Process:
        """Starts the head of a job, whose saves and report go to the directory."""
        head = self.hosts[0]
        job = _write_job(head.directory, directory / "checkpoints")
        return head.start(
            *("planaria", "train", str(job), "--listen", self.address, "--nodes", nodes),
            *("--token-file", str(self._token), "--report", str(directory / "report.json")),
            env=self._environment,
        )

    @property
    def _environment(self) -> dict[str, str]:
        return {HURRY: str(self.hurry_path)}


class MachineJob:
    """A job on such hosts.

    Attributes:
        head: the command of its head.
    """

    def __init__(self, machines: Machines, directory: Path, *, max_nodes: int) -> None:
        self._machines = machines
        self._report_path = directory / "report.json"
        self._starts = {index: len(one.output) for index, one in machines.agents.items()}
        machines.hurry_path.unlink(missing_ok=True)
        self.head = machines.start_head(f"{NUM_NODES}:{max_nodes}", directory)

    def wait_training(self) -> None:
        """Blocks until a few iterations are committed."""
        self.head.wait_for_line("^training$", timeout_s=TIMEOUT_S)
        self._wait_iteration(3)

    def wait_progress(self, num_iterations: int = 5) -> None:
        """Blocks until so many more iterations are committed."""
        lines = self.head.output.splitlines()
        newest = max(int(line.split()[1]) for line in lines if line.startswith("iteration "))
        self._wait_iteration(newest + num_iterations)

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

    def report(self) -> Any:
        """The report, once the job has ended well, and without the slowness of the model."""
        self._machines.hurry_path.touch()
        assert self.head.wait(TIMEOUT_S) == 0, self.head.output
        assert "Traceback" not in self.head.output
        return json.loads(self._report_path.read_text())


@contextmanager
def machine_job(
    machines: Machines, directory: Path, *, max_nodes: int = NUM_NODES
) -> Iterator[MachineJob]:
    """A job that trains on four machines.

    Args:
        directory: directory that all hosts see, for this job alone.
    """
    machines.make_ready()
    job = MachineJob(machines, directory, max_nodes=max_nodes)
    try:
        job.wait_training()
        yield job
    except BaseException:
        machines.end_agents()
        raise


def local_digests(directory: Path, server: ForkServer) -> tuple[str, str]:
    """What the same job ends with where its nodes are processes of this machine."""
    here = [f"{table}.target=helpers.slow_layers:{name}" for table, name in _TARGETS.items()]
    fewer = ("cluster.nodes=2", "resilience.failures_tolerated=0")
    path = _write_job(directory, directory / "checkpoints")
    config = load_job(path, overrides=(*here, *fewer))
    final = Job(config).train(server=server).report.final
    return final.parameters_sha256, final.optimizer_sha256


def digests(report: Any) -> tuple[str, str]:
    """What must not depend on anything but the job."""
    return report["final"]["parameters_sha256"], report["final"]["optimizer_sha256"]


def _write_job(directory: Path, saves: Path) -> Path:
    """Writes the job file and the module of its model."""
    shutil.copy(_MODULE, directory)
    path = directory / "job.toml"
    path.write_text(f'{_JOB}\n[checkpoint]\ndirectory = "{saves}"\n')
    return path
