"""A real Slurm on test hosts: its controller and its user on the first one, a node on each other.

Debian's packages slurm-wlm and munge have all programs. One munged serves all hosts, through its
socket in a directory that they share.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from helpers.command import wait_for
from helpers.host_networks import TIMEOUT_S
from helpers.hosts import Hosts, Process

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
_DOWN_S: Final = 10  # Slurm calls a node down after that.
_CONFIG: Final = """\
ClusterName=test
SlurmctldHost={head.name}({head.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
SlurmdTimeout={down_s}
KillWait=30
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2,requeue_delay=1
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing_programs() -> tuple[str, ...]:
    """The programs that this machine lacks."""
    return tuple(program for program in PROGRAMS if shutil.which(program) is None)


class Slurm:
    """A Slurm on hosts, to which they belong as long as it runs.

    Attributes:
        head: host of the controller, at which users are.
        nodes: the other hosts; each is a node of its name.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.head, *self.nodes = hosts
        self._directory = directory
        self._environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        names = directory / "hosts"
        lines = [f"{host.address} {host.name}\n" for host in hosts]
        names.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        for host in hosts:
            host.run("mount", "--bind", str(names), "/etc/hosts")
        nodes = [
            f"NodeName={host.name} NodeAddr={host.address} CPUs=1 RealMemory=100"
            for host in self.nodes
        ]
        (directory / "slurm.conf").write_text(
            _CONFIG.format(
                head=self.head, directory=directory, nodes="\n".join(nodes), down_s=_DOWN_S
            )
        )
        (directory / "state").mkdir()
        self._start_munge()
        self.head.start("slurmctld", "-D", env=self._environment)
        self._start_nodes()

    def _start_munge(self) -> None:
        directory = self._directory / "munge"
        directory.mkdir(mode=0o755)
        key = directory / "key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        options = [f"--{kind}-file={directory / kind}" for kind in ("key", "pid", "log", "seed")]
        socket = directory / "socket"
        self.head.start("munged", "-F", "--force", f"--socket={socket}", *options)
        wait_for(socket.is_socket, what="munged listens", timeout_s=TIMEOUT_S)

    def _start_nodes(self) -> None:
        """Starts the daemons that are missing, and waits until all nodes are free."""
        for host in self.nodes:
            if not any(process.name() == "slurmd" for process in host.processes()):
                host.start("slurmd", "-D", "-N", host.name, env=self._environment)
        wait_for(
            lambda: self.states() == {host.name: "idle" for host in self.nodes},
            what="all nodes are idle",
            timeout_s=TIMEOUT_S,
        )

    def restore(self) -> None:
        """Ends all jobs, and brings lost nodes back."""
        for signal in ("KILL", "TERM"):  # The first one spares the time that processes have to end.
            with suppress(AssertionError):  # There is none.
                self.run("scancel", "--full", f"--signal={signal}", "--user=root")
        with suppress(AssertionError):
            self.run("scancel", "--user=root")
        for host in self.nodes:
            with suppress(AssertionError):  # Slurm resumes only those that were drained or down.
                self.run("scontrol", "update", f"nodename={host.name}", "state=resume")
        self._start_nodes()

    def run(self, *command: str) -> str:
        """What a command of a user prints."""
        return self.head.run(*command, env=self._environment)

    def start(self, *command: str, cwd: Path, env: dict[str, str]) -> Process:
        """Starts a command of a user."""
        return self.head.start(*command, env={**self._environment, **env}, cwd=cwd)

    def states(self) -> dict[str, str]:
        """The state of each node, in Slurm's words."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def job_state(self, job: str) -> str:
        """The state of a job, in Slurm's words."""
        record = self.run("scontrol", "--oneliner", "show", "job", job)
        return record.partition("JobState=")[2].split()[0]


@contextmanager
def slurm(directory: Path, *, num_nodes: int) -> Iterator[Slurm]:
    """A Slurm of so many nodes.

    Args:
        directory: directory that all hosts see.
    """
    with Hosts(num_nodes + 1, shared=[directory]) as hosts:
        yield Slurm(hosts, directory)
