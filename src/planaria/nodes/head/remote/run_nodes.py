"""The nodes of a run on machines, as its head knows them: which live, and which take a place.

A head that takes a run up knows nothing at first. Machines come back and tell which nodes they run,
or how theirs have ended; the coordinator tells who the members are.
"""

from collections.abc import Collection

from planaria.core.kinds import Ending
from planaria.core.machine_messages import JobOver, NodeEnded
from planaria.core.records import AgentEnded, Ended, Members
from planaria.nodes.forkserver import exit_text
from planaria.nodes.head.remote.machine_handle import MachineHandle


class RunNodes:
    """The nodes of one run.

    Attributes:
        machines: machine of each node that was started or has come back.
        live: nodes whose end is not known.
        gone: nodes that are out of the job, though they may live.
        dropped: nodes that the head has had killed.
        knows_members: whether it is known who may come back.
    """

    def __init__(self) -> None:
        self.machines: dict[int, MachineHandle] = {}
        self.live: dict[int, None] = {}
        self.gone: set[int] = set()
        self.dropped: set[int] = set()
        self.knows_members = True
        self._members: frozenset[int] = frozenset()
        self._ends: dict[int, NodeEnded] = {}

    def begin(self) -> None:
        """Forgets all nodes, because another run begins."""
        for noted in (self.machines, self.live, self.gone, self.dropped, self._ends):
            noted.clear()
        self._members, self.knows_members = frozenset(), True

    def add(self, node: int, machine: MachineHandle) -> None:
        """Notes a node that starts or has come back."""
        self.machines[node] = machine
        self.live[node] = None

    def add_members(self, members: Members) -> None:
        """Notes who belongs to the job, and who does not any more."""
        self.knows_members, self._members = True, frozenset(members.nodes)
        if not members.is_planned:
            self.gone |= {*members.gone}
        self.gone -= self._members  # A new coordinator may take a node back that only waited.

    def leftovers(self) -> list[int]:
        """The nodes that are out of the job and whose ends are not known."""
        return [node for node in self.live if node in self.gone]

    def num_places(self, now_s: float, *, missing_s: float) -> int:
        """The number of nodes that keep a place in the job, members that are not back yet included.

        A node that the coordinator has never seen is never gone from the job.

        Args:
            missing_s: seconds after which a node whose machine is away keeps none.
        """
        living = self.live.keys() - self.gone
        num_here = sum(
            not self.machines[node].is_missing(now_s, limit_s=missing_s) for node in living
        )
        return num_here + len(self._members - self.machines.keys() - self._ends.keys() - self.gone)

    def reachable(self) -> list[int]:
        """The nodes in the job that live and whose machines are connected."""
        nodes = self.live.keys() - self.gone
        return [node for node in nodes if self.machines[node].writer is not None]

    def has_ended(self, node: int) -> bool:
        """Whether the end of a node is known."""
        return node in self._ends

    def add_end(self, ended: NodeEnded) -> None:
        """Notes the end of a node."""
        self._ends[ended.node] = ended
        self.live.pop(ended.node, None)

    def ends(self) -> tuple[AgentEnded, ...]:
        """The messages that agents have ended, of all that have."""
        return tuple(agent_ended(ended) for ended in self._ends.values())

    def exit_statuses(self) -> Collection[int]:
        """The exit statuses of the agents that ended by themselves."""
        return {e.status for node, e in self._ends.items() if node not in self.dropped}


def agent_ended(ended: NodeEnded) -> AgentEnded:
    """The message to the coordinator that a node's agent has ended."""
    return AgentEnded(node=ended.node, reason=f"its agent {exit_text(ended.status)}")


def job_over(ended: Ended | None) -> JobOver:
    """What machines are told at the end of the job; one that a callback has stopped is done.

    Args:
        ended: end that the coordinator has told; None: the head alone ends it.
    """
    if ended is None:
        return JobOver(is_done=False, text="the head ended the job")
    text = f"the job is {ended.ending}" + (f": {ended.reason}" if ended.reason else "")
    is_stopped_early = ended.ending is Ending.STOPPED and ended.is_early
    return JobOver(is_done=ended.ending is Ending.FINISHED or is_stopped_early, text=text)
