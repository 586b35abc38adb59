"""A head and agents as commands that know only its address and the token, all on this machine."""

import contextlib
import json
import os
import random
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
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


class StayingAgents:
    """Agents that serve job after job of the heads at one address, so that they import torch once.

    Attributes:
        token: file of the token that they share with the heads.
        address: HOST:PORT of the heads, at which nobody else listens.
        agents: their commands.
    """

    def __init__(self, directory: Path, *, num_agents: int) -> None:
        self._directory = directory
        self._num_agents = num_agents
        self.token = directory / "token"
        write_credentials(self.token)
        pid = os.getpid()  # Addresses differ from process to process, for tests run side by side.
        host = f"127.{1 + (pid >> 16) % 254}.{pid >> 8 & 255}.{pid & 255}"
        self.address = f"{host}:{free_port(host)}"
        self.agents: list[Command] = []

    def make_ready(self) -> None:
        """Starts the agents that are missing."""
        self.agents = [agent for agent in self.agents if agent.process.poll() is None]
        words = ("agent", "--stay", "--join", self.address, "--token-file", str(self.token))
        while len(self.agents) < self._num_agents:
            self.agents.append(Command([*PLANARIA, *words], directory=self._directory))

    def close(self) -> None:
        """Kills them."""
        _kill(self.agents)
        for agent in self.agents:
            agent.wait()


class Machines:
    """A head and the agents that were told to join it.

    Args:
        staying: agents that join it by themselves.

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
        staying: StayingAgents | None = None,
    ) -> None:
        self._directory = directory
        self._token = directory / "token"
        self.report_path = directory / "report.json"
        self._nodes, self._settings = nodes, settings
        self._head_address, self._own_agents = "127.0.0.1:0", list[Command]()
        self._staying = staying
        if staying is None:
            write_credentials(self._token)
        else:
            self._token, self._head_address = staying.token, staying.address
            staying.make_ready()
        (directory / "job.toml").write_text(JOB)
        self.head = self.start_head(*options)

    @property
    def agents(self) -> list[Command]:
        return [*(self._staying.agents if self._staying else ()), *self._own_agents]

    def start_head(self, *options: str, address: str = "") -> Command:
        """Starts a head, at the address of the one before it unless another is given."""
        address = address or self._head_address
        words = [word for setting in self._settings for word in ("--set", setting)]
        self.head = self._start(
            *("train", "job.toml", "--listen", address, "--nodes", self._nodes),
            *("--report", str(self.report_path), *options, *words),
        )
        return self.head

    def kill_head(self) -> None:
        """Kills the head, and waits until all its processes have ended."""
        self._head_address = self.address
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
        self._own_agents.append(self._start("agent", "--join", addresses, *options, around=around))
        return self._own_agents[-1]

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
        """Kills what is left; agents that stay are left alone."""
        _kill([self.head, *self._own_agents])


def _kill(started: Sequence[Command]) -> None:
    """Kills all processes of commands."""
    for one in started:
        for process in one.processes():
            process.kill()


def free_port(host: str = "127.0.0.2") -> int:
    """A port of an address at which nobody listens, and that no connection gets of itself.

    It is drawn, since tests in other processes look for one at the same time, and listen later.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        ports = range(1025, int(file.read().split()[0]))
    for port in random.SystemRandom().sample(ports, k=len(ports)):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise AssertionError("no port is free")


@contextmanager
def machines(
    directory: Path, *, staying: StayingAgents | None = None, **arguments: Any
) -> Iterator[Machines]:
    """A head and agents for the length of the context; agents that stay are killed if it fails."""
    made = Machines(directory, staying=staying, **arguments)
    try:
        yield made
    except BaseException:
        if staying is not None:
            staying.close()
        raise
    finally:
        made.close()
