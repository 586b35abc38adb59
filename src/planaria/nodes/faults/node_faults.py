"""Faults that strike a node from outside: signals to its processes, on whatever machine it runs.

A node is the process group of its agent. Where nodes are processes of this machine, the head sends
the signals (`LocalFaults`). Else it has the node's machine send them, and waits for its answer
(`MachineFaults`): a step at which a fault is to strike must not go on before that.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping
from typing import Final, Protocol

import psutil

from planaria.core.machine_messages import FaultRequested

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S: Final = 5.0


class NodeFaults(Protocol):
    """The nodes of a job, as faults strike them."""

    @property
    def live_nodes(self) -> Collection[int]:
        """The nodes whose agents live."""

    def inject(self, kind: str, node: int, *, value: float) -> None:
        """Begins to inject a fault of kind kill, hang, stall, crash or preempt into a live node.

        Args:
            value: seconds; see core/inject.py.
        """

    async def wait_injected(self) -> None:
        """Waits until all faults so far have struck, up to a few seconds."""


class LocalFaults:
    """Faults of nodes that are processes of this machine.

    Args:
        agents: pid of the agent of each live node, by node; changes during the job.
    """

    def __init__(self, agents: Mapping[int, int]) -> None:
        self._agents = agents

    @property
    def live_nodes(self) -> Collection[int]:
        """See NodeFaults."""
        return self._agents.keys()

    def inject(self, kind: str, node: int, *, value: float) -> None:
        """See NodeFaults."""
        if kind == "preempt":
            _kill(self._agents[node], signal.SIGTERM)
            asyncio.get_running_loop().call_later(value, self._kill_after_notice, node)
        else:
            inject_into_group(kind, self._agents[node], value=value)

    def _kill_after_notice(self, node: int) -> None:
        """Kills a node whose notice has run out, unless it has left."""
        if node in self._agents:
            _kill_group(self._agents[node], signal.SIGKILL)

    async def wait_injected(self) -> None:
        """See NodeFaults. A signal is sent at once."""


class MachineFaults:
    """Faults of nodes that run on other machines.

    Args:
        live_nodes: nodes whose agents live; changes during the job.
        tell: sends a message to the machine of a node.
    """

    def __init__(
        self, live_nodes: Collection[int], tell: Callable[[int, FaultRequested], None]
    ) -> None:
        self._live_nodes = live_nodes
        self._tell = tell
        self._unanswered: dict[int, asyncio.Future[None]] = {}  # The newest, by node.

    @property
    def live_nodes(self) -> Collection[int]:
        """See NodeFaults."""
        return self._live_nodes

    def inject(self, kind: str, node: int, *, value: float) -> None:
        """See NodeFaults."""
        self._unanswered[node] = asyncio.get_running_loop().create_future()
        self._tell(node, FaultRequested(kind=kind, node=node, value=value))

    def on_injected(self, node: int) -> None:
        """Notes that the machine of a node has injected a fault."""
        future = self._unanswered.pop(node, None)
        if future is not None:
            future.set_result(None)

    async def wait_injected(self) -> None:
        """See NodeFaults. A machine may have lost its connection."""
        waiting = dict(self._unanswered)
        if waiting:
            await asyncio.wait(waiting.values(), timeout=_ANSWER_TIMEOUT_S)
        for node, future in waiting.items():
            if not future.done():
                logger.warning("the machine of node %s does not say that it has its fault", node)


def inject_into_group(kind: str, agent_pid: int, *, value: float) -> None:
    """Injects a fault of kind kill, hang, stall or crash into the node of an agent."""
    match kind:
        case "kill":
            _kill_group(agent_pid, signal.SIGKILL)
        case "hang":
            _kill_group(agent_pid, signal.SIGSTOP)
            if value:
                loop = asyncio.get_running_loop()
                loop.call_later(value, _kill_group, agent_pid, signal.SIGCONT)
        case "stall" | "crash":
            number = signal.SIGSTOP if kind == "stall" else signal.SIGKILL
            with contextlib.suppress(psutil.NoSuchProcess):
                for worker in psutil.Process(agent_pid).children():
                    _kill(worker.pid, number)


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
