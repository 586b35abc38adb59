"""The nodes of a simulated job and what their ranks hold, and the messages that follow from it.

Each machine of the cluster runs one node at a time. A machine that comes back runs a new node,
because node numbers are never used again.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from planaria.core.commit import CommitVector, VectorLayout, Votes, encode_vector
from planaria.core.copies import Label, LayerCopy
from planaria.core.messages import (
    EpochReady,
    IterationDone,
    LayerFile,
    LayersSaved,
    NodeArrived,
    Stopped,
    WorkerReady,
)
from planaria.core.plan import Plan
from planaria.core.records import Origin

_LOSS: Final = 1.0
_DIGEST: Final = "0" * 32


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version of the copies in memory that is complete, and the layers that each rank keeps."""

    label: Label
    layers_by_rank: Mapping[int, tuple[int, ...]]


class VirtualMachines:
    """The machines of a cluster: which are there, and which of these can run a node.

    Attributes:
        started: machines that can.
        starting: time at which each other one can, and the number of its return.
        speeds: speeds of those that are slow; 0.5: half as fast as the profile says.
        deadlines_s: times at which machines will be gone, as they were told.
    """

    def __init__(self, machines: Iterable[int]) -> None:
        self.started = set(machines)
        self.starting: dict[int, tuple[float, int]] = {}
        self.speeds: dict[int, float] = {}
        self.deadlines_s: dict[int, float] = {}
        self._num_returns = 0

    @property
    def there(self) -> frozenset[int]:
        """The machines that are there."""
        return frozenset(self.started.union(self.starting))

    def lose(self, machine: int) -> None:
        """A machine is gone."""
        self.speeds.pop(machine, None)
        self.deadlines_s.pop(machine, None)
        if machine in self.started:
            self.started.remove(machine)
        else:
            del self.starting[machine]

    def take_back(self, machine: int, starts_at_s: float) -> int:
        """A machine is there again, and will have started; returns the number of its return."""
        self._num_returns += 1
        self.starting[machine] = (starts_at_s, self._num_returns)
        return self._num_returns

    def set_speeds(self, speeds: Mapping[int, float]) -> None:
        """Machines go on at other speeds; 1.0: as fast as the profile says."""
        self.speeds.update(speeds)
        self.speeds = {machine: speed for machine, speed in self.speeds.items() if speed != 1.0}

    def start(self, machine: int, number: int) -> bool:
        """A machine has started, unless it is gone since that return; whether it has."""
        has_started = self.starting.get(machine, (0.0, 0))[1] == number
        if has_started:
            del self.starting[machine]
            self.started.add(machine)
        return has_started


class VirtualNodes:
    """The nodes that live, whether they are members of the job or wait to be.

    Args:
        layout: order of entries in a commit vector, which all ranks sum.

    Attributes:
        held: layers whose newest state each live rank has, by rank.
        versions: complete versions of the copies in memory, the newest last; at most two.
    """

    def __init__(self, layout: VectorLayout, *, devices_per_node: int) -> None:
        self.held: dict[int, frozenset[int]] = {}
        self.versions: tuple[KeptVersion, ...] = ()
        self._layout = layout
        self._per_node = devices_per_node
        self._num_nodes = 0
        self._since = -1
        self._node_on: dict[int, int] = {}
        self._machine_of: dict[int, int] = {}
        self._vector = encode_vector(
            CommitVector(
                squared_norms=(_LOSS,) * layout.num_layers,
                loss=_LOSS,
                num_samples=layout.num_samples,
                sample_digest=_DIGEST,
                votes=Votes(stop=0),
            )
        )

    @property
    def machines(self) -> tuple[int, ...]:
        """The machines that are there, ascending."""
        return tuple(sorted(self._node_on))

    @property
    def nodes(self) -> Collection[int]:
        """The nodes that live."""
        return self._machine_of.keys()

    def add(self, machine: int) -> int:
        """Starts a node on a machine that is there; returns its number."""
        node = self._num_nodes
        self._num_nodes += 1
        self._node_on[machine] = node
        self._machine_of[node] = machine
        return node

    def node_on(self, machine: int) -> int:
        """The node on a machine; -1: none is, or the job has done without it."""
        return self._node_on.get(machine, -1)

    def machine_of(self, node: int) -> int:
        """The machine of a node that lives."""
        return self._machine_of[node]

    def remove_machine(self, machine: int) -> None:
        """Ends the node on a machine that is gone, with all that it held."""
        self._remove_node(self._node_on.pop(machine, -1))

    def leave_out(self, nodes: Iterable[int]) -> None:
        """Ends nodes whose machines are still there, because the job goes on without them."""
        for node in nodes:
            if node in self._machine_of:
                self._node_on[self._machine_of[node]] = -1
                self._remove_node(node)

    def _remove_node(self, node: int) -> None:
        if node >= 0:
            del self._machine_of[node]
            for rank in self._ranks((node,)):
                self.held.pop(rank, None)

    def live_ranks(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """The ranks of those of these nodes that live."""
        return self._ranks(node for node in nodes if node in self._machine_of)

    def _ranks(self, nodes: Iterable[int]) -> tuple[int, ...]:
        per_node = self._per_node
        return tuple(node * per_node + device for node in nodes for device in range(per_node))

    def live_ranks_of(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks whose nodes live."""
        live, per_node = self._machine_of, self._per_node
        return [rank for rank in ranks if rank // per_node in live]

    def slow_members(self, plan: Plan, speeds: Mapping[int, float]) -> dict[int, float]:
        """The speed of each node of a plan that is slow.

        Args:
            speeds: speeds of the machines that are slow.
        """
        nodes = ((self.node_on(machine), speed) for machine, speed in speeds.items())
        members = set(plan.nodes) if speeds else set()
        return {node: speed for node, speed in nodes if node in members}

    def hold(self, plan: Plan, *, since: int) -> None:
        """Has each rank hold what a plan gives it, all built on the state of epoch `since`."""
        live = self._machine_of
        self.held = {r: h for r, h in plan.held_by_rank.items() if r // self._per_node in live}
        self._since = since

    # -- messages ---------------------------------------------------------------------------------

    def arrivals(self, node: int) -> list[NodeArrived | WorkerReady]:
        """The messages of a node that has started, and of its workers."""
        machine = f"machine {self._machine_of[node]}"
        first, *_ = ranks = self._ranks((node,))
        ready = [
            WorkerReady(node=node, rank=r, pid=r, pid_start=0.0, host="host", port=1) for r in ranks
        ]
        return [NodeArrived(node=node, rank=first, machine=machine), *ready]

    def answers(
        self, ranks: Iterable[int], *, epoch: int, age: int, origin: Origin
    ) -> list[Stopped]:
        """The answers of ranks that have left their epoch.

        Args:
            age: number of iterations applied to all layers.
            origin: state that the job last went back to.
        """
        # Most ranks hold the same few sets of layers, so they share their dicts.
        ages: dict[frozenset[int], dict[int, int]] = {}
        none: frozenset[int] = frozenset()
        copies = self._copies_by_rank()
        answers = []
        for rank in ranks:
            held = self.held.get(rank, none)
            if held not in ages:
                ages[held] = dict.fromkeys(sorted(held), age)
            is_holder = bool(held) and age > origin.iteration and self._since == origin.epoch
            answers.append(
                Stopped(
                    rank=rank,
                    epoch=epoch,
                    ages=ages[held],
                    complete=(),
                    vector_iteration=age - 1 if is_holder else -1,
                    vector=self._vector if is_holder else b"",
                    since=self._since,
                    copies=copies.get(rank, {}),
                )
            )
        return answers

    def _copies_by_rank(self) -> dict[int, dict[int, tuple[Label, ...]]]:
        copies: dict[int, dict[int, tuple[Label, ...]]] = {}
        for version in self.versions:
            for rank, layers in version.layers_by_rank.items():
                of_rank = copies.setdefault(rank, {})
                for layer in layers:
                    of_rank[layer] = (*of_rank.get(layer, ()), version.label)
        return copies

    def keep(self, label: Label, copies: tuple[LayerCopy, ...]) -> None:
        """Completes a version of the copies: each rank keeps its own layers and those of others."""
        layers_by_rank = {rank: set(held) for rank, held in self.held.items()}
        for copy in copies:
            for target in copy.targets:
                layers_by_rank.setdefault(target, set()).add(copy.layer)
        layers = {rank: tuple(sorted(layers)) for rank, layers in layers_by_rank.items()}
        self.versions = (*self.versions, KeptVersion(label, layers))[-2:]

    def ready(
        self, ranks: Iterable[int], *, epoch: int, regroup_s: float, transfer_s: float
    ) -> list[EpochReady]:
        """The messages of ranks that have begun an epoch."""
        return [
            EpochReady(
                rank=rank,
                epoch=epoch,
                layers_materialised=len(self.held.get(rank, ())),
                regroup_s=regroup_s,
                transfer_s=transfer_s,
            )
            for rank in ranks
        ]

    def reports(
        self,
        ranks: Iterable[int],
        *,
        epoch: int,
        iteration: int,
        seconds: float,
        computing_s: Mapping[int, float],
        ends: bool,
        switches: bool,
    ) -> list[IterationDone]:
        """The reports of ranks that have applied an iteration.

        Args:
            computing_s: seconds that each rank computed; empty if nobody asks.
        """
        none: dict[str, float] = {}
        return [
            IterationDone(
                rank=rank,
                epoch=epoch,
                iteration=iteration,
                loss=_LOSS,
                num_samples=self._layout.num_samples,
                sample_digest=_DIGEST,
                seconds=seconds,
                stall_s=0.0,
                peak_bytes=0,
                ends=ends,
                switches=switches,
                action_s={"F": computing_s[rank]} if rank in computing_s else none,
            )
            for rank in ranks
        ]

    def save_report(self, *, epoch: int, iteration: int) -> LayersSaved:
        """The message that all layers of an iteration are written."""
        files = tuple(LayerFile(layer, "", 0, "") for layer in range(self._layout.num_layers))
        return LayersSaved(rank=0, epoch=epoch, iteration=iteration, files=files)
