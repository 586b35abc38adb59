"""The places of a job for nodes: whether there is one left, and which machine takes it."""

from collections.abc import Mapping, Sequence

from planaria.core.machine_messages import MachineFacts
from planaria.nodes.head.remote.machine_handle import MachineHandle
from planaria.nodes.head.remote.run_nodes import RunNodes


class MachinePlaces:
    """The places for nodes on the machines of one job.

    Args:
        machines: all machines, in the order of their arrival; changes during the job.
        nodes: the nodes of the run; changes during the job.
        num_max: number of machines that may run nodes at once.
        missing_s: seconds after which a node whose machine is away keeps no place.

    Attributes:
        num_max: see above.
        is_short: whether the job waits for any machine, because too few nodes are left.
    """

    def __init__(
        self,
        machines: Mapping[str, MachineHandle],
        nodes: RunNodes,
        *,
        num_max: int,
        missing_s: float,
    ) -> None:
        self.num_max = num_max
        self.is_short = False
        self._machines, self._nodes = machines, nodes
        self._missing_s = missing_s
        self._reserved: dict[int, MachineHandle] = {}  # The machines of the first nodes.

    def has_room(self, now_s: float) -> bool:
        """Whether another node may be started, on a machine that is free."""
        if not self._nodes.knows_members or not self._usable(now_s):
            return False
        return self._nodes.num_places(now_s, missing_s=self._missing_s) < self.num_max

    def _usable(self, now_s: float) -> list[MachineHandle]:
        """The machines on which a node may be started now, in the order of their arrival.

        Those come last that get one only because the job cannot go on without.
        """
        is_short = self.is_short
        usable = [m for m in self._machines.values() if m.may_run(now_s, is_needed=is_short)]
        return sorted(usable, key=lambda machine: not machine.may_run(now_s))  # Stable.

    def pause_s(self, machine: MachineHandle, now_s: float) -> float:
        """The seconds for which a machine gets no node, as it has lost too many; 0.0: it may."""
        return machine.pause_s(now_s, is_needed=self.is_short)

    def begin(self) -> None:
        """Reserves no machine any more, because another run begins."""
        self._reserved.clear()

    def reserve(self, nodes: Sequence[int], now_s: float) -> dict[int, MachineFacts]:
        """Chooses the machines of the first nodes; returns what they have reported, by node.

        Machines of one failure domain get neighbouring numbers, and so most pipelines lie within
        one domain: the loss of a domain leaves others whole. Nodes that live have machines, and so
        have those of a run that is taken up, though not all of them are back.
        """
        if self._nodes.knows_members:
            free = sorted(self._usable(now_s), key=lambda each: each.facts.domain)  # Stable.
            self._reserved = dict(zip(nodes, free, strict=False))
        machines = self._reserved | self._nodes.machines
        return {node: machines[node].facts for node in nodes if node in machines}

    def take(self, node: int, now_s: float) -> MachineHandle | None:
        """The machine on which a node is to start, which runs it from now on; None: none can."""
        reserved, usable = self._reserved.pop(node, None), self._usable(now_s)
        if not usable:
            return None
        machine = reserved if reserved in usable else usable[0]
        machine.node = node
        self._nodes.add(node, machine)
        return machine
