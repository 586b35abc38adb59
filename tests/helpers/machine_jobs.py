"""A job on test hosts: a head, and an agent on each machine, as a user starts them.

The head has the job file and the module of its model, and nobody else has. What all have is the
token file and the directory of the saves.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.hosts import Host, Hosts, Process
from helpers.slow_layers import HURRY
from planaria.job.config import load_job
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer

ITERATIONS = 120
TIMEOUT_S = 100.0
LEASE_S = 3.0

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
nodes = 4
device_memory_bytes = 100_000  # Two nodes can hold the model, one cannot.
lease_s = {LEASE_S}
"""


@dataclass
class MachineJob:
    """A job whose head listens, and the agents that have been told to join it.

    Attributes:
        hosts: machines of the job, the head's first.
        directory: directory that all hosts see.
        head: the command of the head.
        agents: commands of the newest agents, by the index of their host.
    """

    hosts: Hosts
    directory: Path
    head: Process
    agents: dict[int, Process] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """HOST:PORT of the head, once it says so."""
        return self.head.wait_for_line(r"planaria agent --join (\S+)")[1]

    def join(self, host: Host) -> Process:
        """Starts an agent on a host."""
        words = ("agent", "--join", self.address, "--token-file", str(_token(self.directory)))
        agent = host.start("planaria", *words, env=_environment(self.directory))
        self.agents[host.index] = agent
        return agent

    def wait_iteration(self, iteration: int) -> None:
        """Blocks until this iteration is committed."""
        self.head.wait_for_line(rf"^iteration {iteration} ", timeout_s=TIMEOUT_S)

    def wait_progress(self, num_iterations: int = 5) -> None:
        """Blocks until so many more iterations are committed."""
        self.wait_iteration(self.iteration + num_iterations)

    @property
    def iteration(self) -> int:
        """The newest iteration that the head has shown."""
        lines = self.head.output.splitlines()
        return max(int(line.split()[1]) for line in lines if line.startswith("iteration "))

    def node(self, host: Host, *, num_nodes: int = 1) -> int:
        """The node that a host runs, once it has run so many of them with its agent."""
        agent = self.agents[host.index]
        runs = r"(?s:^runs node (\d+)$.*?)" * num_nodes
        return int(agent.wait_for_line(runs, timeout_s=TIMEOUT_S)[num_nodes])

    def hurry(self) -> None:
        """Ends the slowness of the model."""
        _hurry_path(self.directory).touch()

    def report(self) -> Any:
        """The report, once the job has ended well."""
        self.hurry()
        assert self.head.wait(TIMEOUT_S) == 0, self.head.output
        return json.loads((self.directory / "report.json").read_text())


@contextmanager
def machine_job(
    hosts: Hosts, directory: Path, *, nodes: Sequence[int] = (1, 2, 3, 4), max_nodes: int = 4
) -> Iterator[MachineJob]:
    """A job that trains, with the hosts as its nodes that have these indices.

    Args:
        directory: directory that all hosts see, for this job alone.
    """
    head = _start_head(hosts[0], directory, f"{len(nodes)}:{max_nodes}")
    job = MachineJob(hosts, directory, head)
    for index in nodes:
        job.join(hosts[index])
    job.head.wait_for_line("^training$", timeout_s=TIMEOUT_S)
    job.wait_iteration(3)
    yield job


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


def _start_head(host: Host, directory: Path, nodes: str) -> Process:
    """Starts `planaria train --listen` on a host."""
    job = _write_job(host.directory, directory / "checkpoints")
    token = _token(directory)
    host.run("planaria", "token", str(token))
    return host.start(
        *("planaria", "train", str(job), "--listen", f"{host.address}:0", "--nodes", nodes),
        *("--token-file", str(token), "--report", str(directory / "report.json")),
        env=_environment(directory),
    )


def _write_job(directory: Path, saves: Path) -> Path:
    """Writes the job file and the module of its model."""
    shutil.copy(_MODULE, directory)
    path = directory / "job.toml"
    path.write_text(f'{_JOB}\n[checkpoint]\ndirectory = "{saves}"\n')
    return path


def _token(directory: Path) -> Path:
    return directory / "token"


def _hurry_path(directory: Path) -> Path:
    return directory / "hurry"


def _environment(directory: Path) -> dict[str, str]:
    return {HURRY: str(_hurry_path(directory))}
