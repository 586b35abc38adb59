"""The agents and coordinators that a launcher has had forked: which live, and how others ended."""

from collections.abc import Collection
from itertools import count

from planaria.core.records import AgentEnded
from planaria.nodes.forkserver import UNKNOWN, exit_text
from planaria.nodes.head.process_events import kill_group


class JobProcesses:
    """The agents and coordinators of one job.

    The kernel gives the pid of a process that has ended to another one. So what is known of an
    agent that has ended is kept by its node.

    Attributes:
        live_agents: pids of the agents that have not ended, by node.
    """

    def __init__(self) -> None:
        self.live_agents: dict[int, int] = {}
        self._statuses: dict[int, int] = {}  # The exit statuses of ended agents, by node.
        self._killed: set[int] = set()  # Nodes whose agents were killed here.
        self._coordinators: set[int] = set()  # Pids of those that have not ended.
        self._machines: dict[int, str] = {}
        self._slots: dict[int, int] = {}
        # The exit statuses of processes that ended before they were noted here, by pid.
        self._exits: dict[int, int] = {}

    @property
    def next_node(self) -> int:
        """The lowest number that no node has had."""
        return max(self._machines) + 1

    def assign_machine(self, node: int, *, starting: Collection[int], is_new: bool) -> str:
        """Notes and returns the name of the machine on which a node starts.

        Args:
            starting: nodes that have a machine but no agent yet.
            is_new: whether the machine is one that no node has had; else it is any that has neither
                a live nor a starting node.
        """
        others = self._machines if is_new else {*self.live_agents, *starting}
        used = {self._machines[other] for other in others}
        names = map("machine-{}".format, count())
        self._machines[node] = next(name for name in names if name not in used)
        return self._machines[node]

    def assign_slot(self, node: int, *, starting: Collection[int]) -> int:
        """Notes and returns the lowest slot that no other node has, alive or to be started.

        A node in the place of a lost one has its devices, while others keep theirs.

        Args:
            starting: nodes that have a slot but no agent yet.
        """
        used = {self._slots[other] for other in {*self.live_agents, *starting}}
        self._slots[node] = next(slot for slot in count() if slot not in used)
        return self._slots[node]

    def add_agent(self, node: int, pid: int) -> None:
        """Notes the agent of a node, which may have ended already."""
        if pid in self._exits:
            self._statuses[node] = self._exits.pop(pid)
        else:
            self.live_agents[node] = pid

    def add_coordinator(self, pid: int) -> None:
        """Notes a coordinator, which may have ended already."""
        if self._exits.pop(pid, None) is None:
            self._coordinators.add(pid)

    def add_exit(self, pid: int, status: int) -> tuple[int, ...]:
        """Notes that a process has ended; returns the node whose agent it was, if any."""
        nodes = tuple(node for node, agent in self.live_agents.items() if agent == pid)
        for node in nodes:
            del self.live_agents[node]
            self._statuses[node] = status
        if pid in self._coordinators:
            self._coordinators.remove(pid)
        elif not nodes:
            self._exits[pid] = status
        return nodes

    def has_ended(self, node: int) -> bool:
        """Whether the agent of a node has ended."""
        return node in self._statuses

    def agent_end(self, node: int) -> AgentEnded:
        """The message that the agent of a node has ended."""
        return AgentEnded(node=node, reason=f"its agent {exit_text(self._statuses[node])}")

    def agent_ends(self) -> tuple[AgentEnded, ...]:
        """The messages that agents have ended, of all that have."""
        return tuple(map(self.agent_end, self._statuses))

    def agent_statuses(self) -> set[int]:
        """The known exit statuses of the agents that the launcher has not killed."""
        ended = self._statuses.keys() - self._killed
        return {self._statuses[node] for node in ended} - {UNKNOWN}

    def have_ended(self) -> bool:
        """Whether all agents and coordinators have ended."""
        return not self.live_agents and not self._coordinators

    def kill_coordinator(self, pid: int) -> None:
        """Kills a coordinator with its process group, unless it has ended."""
        if pid in self._coordinators:
            kill_group(pid)

    def kill_node(self, node: int) -> None:
        """Kills all processes of a node, if its agent was forked and has not ended."""
        if node in self.live_agents:
            self._killed.add(node)
            kill_group(self.live_agents[node])

    def kill_other_nodes(self, members: Collection[int]) -> None:
        """Kills the nodes that are no members; an evicted node may hang for ever."""
        for node in self.live_agents.keys() - set(members):
            self.kill_node(node)

    def kill_all(self) -> None:
        """Kills all agents and coordinators that have not ended."""
        self.kill_other_nodes(())
        for pid in self._coordinators:
            kill_group(pid)
