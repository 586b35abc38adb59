"""A head and agents as commands that know only its address and the token, all on this machine."""

import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from helpers.command import CHECKPOINTS, Command, command, wait_for
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
REPORT_TIMEOUT_S = 300.0  # Five processes that import torch at once take 80 s on a busy machine.
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

    def lose_head_machine(self, agent: Command) -> None:
        """Loses the machine on which the head and an agent run, and the head's journal with it.

        All at once: the head does nothing more once the node is gone.
        """
        stopped = self.head.processes()
        for process in stopped:
            process.suspend()
        agent.process.kill()
        for process in stopped:
            process.kill()
        self.kill_head()
        shutil.rmtree(self.saves / ".journal")

    @property
    def saves(self) -> Path:
        """The place of the saves."""
        return self._directory / CHECKPOINTS

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

    def ask(self, *arguments: str, code: int = 0) -> str:
        """What a command in this process prints, or its errors if it has to fail.

        It has the token file if it asks the head.
        """
        named = ("--token-file", str(self._token)) if self.address in arguments else ()
        result = command(*arguments, *named)
        assert result.exit_code == code, result.output
        return result.stderr if code else result.stdout

    def report(self) -> Any:
        """The report, once the job has ended well."""
        assert self.head.wait(timeout_s=REPORT_TIMEOUT_S) == 0, self.head.output + self.head.errors
        return json.loads(self.report_path.read_text())

    def close(self) -> None:
        """Kills what is left."""
        for started in (self.head, *self.agents):
            for process in started.processes():
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
