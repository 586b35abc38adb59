"""The nodes of a job as its launcher sees them, and those that are processes of this machine."""

import logging
import os
from collections.abc import Callable, Collection
from typing import Final, Protocol

import msgspec

from planaria.core.records import AgentEnded, Members
from planaria.core.specs import NodeSpec
from planaria.nodes.forking import Forker
from planaria.nodes.head.job_processes import JobProcesses
from planaria.nodes.head.process_events import wait_last_exit, wait_until

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S: Final = 10.0  # Time for agents to end by themselves before their groups are killed.
KILL_TIMEOUT_S: Final = 5.0  # Time for the kernel to end killed processes.


class NodeHandles(Protocol):
    """The nodes of one job, wherever they run.

    Attributes:
        live_nodes: nodes whose agents live; changes during the job.
        next_node: lowest number that no node has had.
    """

    @property
    def live_nodes(self) -> Collection[int]: ...

    @property
    def next_node(self) -> int: ...

    def host(self, node: int) -> str:
        """The address at which others reach a node; "": the node is not known."""

    def is_reachable(self, node: int) -> bool:
        """Whether the head can tell a node's machine something now."""

    def start(self, spec: NodeSpec, *, is_granted: bool) -> None:
        """Starts a node as soon as possible.

        Args:
            spec: spec with a number that no node has had.
            is_granted: whether the node gets a machine that no node has had.
        """

    def drop(self, node: int) -> None:
        """Ends all processes of a lost node, which may still run, or may not have started yet."""

    def on_members(self, members: Members) -> None:
        """Takes note of the members, and of all nodes that are out of the job for good."""

    def on_candidates_lost(self, nodes: Collection[int]) -> None:
        """Takes note of nodes that had waited to join and are lost."""

    def release(self, node: int) -> None:
        """Has the machine of a node that was drained and has ended leave, too."""

    def ends(self) -> tuple[AgentEnded, ...]:
        """The messages that agents have ended, of all that have."""

    def stop(self) -> None:
        """Starts no more nodes; those that run go on."""

    async def wait_left(self, members: Collection[int]) -> None:
        """Kills the nodes that are no members, and waits up to EXIT_TIMEOUT_S for the members.

        The coordinator has told the members to leave.
        """

    def exit_statuses(self) -> Collection[int]:
        """The known exit statuses of the agents that ended by themselves."""


class LocalNodes:
    """The nodes that this process has had forked, each of them an agent and its workers.

    The launcher holds the only write end of the lifeline pipe: when it dies, by whatever signal,
    every process of the job sees the pipe close and ends. The job's processes hold all read ends:
    when the last of them is gone, the launcher's end breaks.

    Args:
        forker: forks the nodes; calls `on_fork` and `on_exit`.
        processes: the agents of all nodes, and the coordinators.
        on_end: callback, called with the end of each agent.

    Attributes:
        lifeline_fd: read end of the lifeline, for processes to be forked; -1 once that is over.
    """

    def __init__(
        self,
        forker: Callable[["LocalNodes"], Forker],
        processes: JobProcesses,
        on_end: Callable[[AgentEnded], None],
    ) -> None:
        self.forker = forker(self)
        self.processes = processes
        self.lifeline_fd = -1
        self._write_fd = -1
        self._on_end = on_end

    @property
    def live_nodes(self) -> Collection[int]:
        """See NodeHandles."""
        return self.processes.live_agents.keys()

    @property
    def next_node(self) -> int:
        """See NodeHandles."""
        return self.processes.next_node

    def host(self, node: int) -> str:
        """See NodeHandles."""
        del node
        return "127.0.0.1"

    def is_reachable(self, node: int) -> bool:
        """See NodeHandles."""
        return node in self.live_nodes

    def open(self) -> None:
        """Makes the lifeline; `end_all` closes it."""
        self.lifeline_fd, self._write_fd = os.pipe()

    def start(self, spec: NodeSpec, *, is_granted: bool) -> None:
        """See NodeHandles. A machine is a name here: every node has its slot on this one."""
        machine = self.processes.assign_machine(
            spec.node, starting=self.forker.nodes, is_new=is_granted
        )
        slot = self.processes.assign_slot(spec.node, starting=self.forker.nodes)
        payload = msgspec.json.encode(msgspec.structs.replace(spec, machine=machine, slot=slot))
        self.forker.add(spec.node, payload, (self.lifeline_fd,))

    def drop(self, node: int) -> None:
        """See NodeHandles."""
        self.forker.drop(node)
        self.processes.kill_node(node)

    def on_members(self, members: Members) -> None:
        """Does nothing: a node is gone when its process is, and that is seen here."""

    def on_candidates_lost(self, nodes: Collection[int]) -> None:
        """Does nothing; see `on_members`."""

    def release(self, node: int) -> None:
        """See NodeHandles. There is nothing but the node."""

    def ends(self) -> tuple[AgentEnded, ...]:
        """See NodeHandles."""
        return self.processes.agent_ends()

    def on_fork(self, node: int, pid: int) -> None:
        """Notes a forked agent; for the forker."""
        self.processes.add_agent(node, pid)
        if self.processes.has_ended(node):  # It ended before its pid was known here.
            self._on_end(self.processes.agent_end(node))

    def on_exit(self, pid: int, status: int) -> None:
        """Notes a process that has ended; for the forker."""
        for node in self.processes.add_exit(pid, status):
            self._on_end(self.processes.agent_end(node))

    def stop(self) -> None:
        """See NodeHandles. Then only the job's processes have read ends of the lifeline."""
        self.forker.stop()
        if self.lifeline_fd >= 0:
            os.close(self.lifeline_fd)
            self.lifeline_fd = -1

    async def wait_left(self, members: Collection[int]) -> None:
        """See NodeHandles."""
        self.processes.kill_other_nodes(members)
        if await wait_last_exit(self._write_fd, timeout_s=EXIT_TIMEOUT_S):
            return
        for node in self.live_nodes:
            logger.warning("node %s did not leave in %.0f s and is killed", node, EXIT_TIMEOUT_S)

    async def end_all(self) -> None:
        """Kills whatever is left, the coordinator too; waits for its end up to KILL_TIMEOUT_S."""
        self.stop()
        self.forker.report_exits()  # A process that has ended must not count as killed here.
        self.processes.kill_all()
        if not await wait_last_exit(self._write_fd, timeout_s=KILL_TIMEOUT_S):
            logger.warning("a process of the job is still there after it was killed")
        await wait_until(self.processes.have_ended, timeout_s=KILL_TIMEOUT_S)
        self.forker.close()
        os.close(self._write_fd)

    def exit_statuses(self) -> Collection[int]:
        """See NodeHandles."""
        return self.processes.agent_statuses()
