"""The live nodes, what each of them holds of the model, and what happened to the others.

A loss may happen while the job recovers from an earlier one, when some nodes hold less than their
plan says and others more. So what each node holds is stated here, and never derived from a plan.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from planaria.core.copies import Label
from planaria.core.plan import NodeKind, Plan

PROFILED_KIND: Final = NodeKind()  # Of a node like those that the profile was measured on.


@dataclass(frozen=True, slots=True)
class Node:
    """A live node.

    Attributes:
        node: number of the node, which is never used again.
        held: layers whose whole state (parameters and optimizer state) each device holds at the age
            at which the job goes on, by device; empty sets where the worker is new.
        kind: observed differences of the node from others.
        is_trusted: whether its machine has not failed often in recent time.
    """

    node: int
    held: tuple[frozenset[int], ...]
    kind: NodeKind = PROFILED_KIND
    is_trusted: bool = True


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The members of an epoch.

    Attributes:
        epoch: epoch of their membership record, which the next plan gets.
        nodes: members that the next plan may give work, ascending.
        leaving: members that get no work any more, but can still send what they hold.
    """

    epoch: int
    nodes: tuple[Node, ...]
    leaving: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        numbers = [node.node for node in self.nodes]
        assert numbers == sorted(set(numbers))
        assert not {node.node for node in self.leaving}.intersection(numbers)

    @property
    def distrusted_nodes(self) -> frozenset[int]:
        """The nodes that should not be the only holder of any layer."""
        nodes = (*self.nodes, *self.leaving)
        return frozenset(node.node for node in nodes if not node.is_trusted)

    def held_by_rank(self) -> dict[int, frozenset[int]]:
        """The layers that each live rank holds, by rank."""
        return {
            node.node * len(node.held) + device: layers
            for node in (*self.nodes, *self.leaving)
            for device, layers in enumerate(node.held)
        }

    def lost_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of the model that no live rank holds, ascending.

        If there is one, the job cannot go on from live layers and has to go back to a checkpoint.
        """
        held = frozenset[int]().union(*self.held_by_rank().values())
        return tuple(layer for layer in range(num_layers) if layer not in held)


@dataclass(frozen=True, slots=True)
class SavePoint:
    """The newest state of the whole model that all ranks can go back to: in memory, on disk, or the
    start of the job.

    Attributes:
        iteration: first iteration to run from there.
        source: version of the disk tier; "": none, but copies in memory, the seed or given weights.
        redone_samples: number of samples that are trained again if all go back to this state.
        copied: version of the copies in memory; None: the state is not one of these.
    """

    iteration: int
    source: str
    redone_samples: int
    copied: Label | None = None


@dataclass(frozen=True, slots=True)
class NodesLost:
    """Nodes were lost, all at the same time as far as the job can tell.

    Attributes:
        nodes: lost nodes; may be empty, if a worker ended whose node lives and now holds less.
        redone_samples: number of samples of the iteration in flight if it is done again; else 0.
        saved: state that all can go back to; None: they must not go back, or there is none.
    """

    nodes: tuple[int, ...]
    redone_samples: int
    saved: SavePoint | None = None


@dataclass(frozen=True, slots=True)
class NodesChanged:
    """Nodes have joined, are about to leave or have another speed, while training goes on; no
    iteration is done again. If all three are empty, a better plan for the same nodes is looked for.

    Attributes:
        slow: nodes that are slow, or whose speed has changed.
    """

    joined: tuple[int, ...]
    leaving: tuple[int, ...]
    slow: tuple[int, ...] = ()

    @property
    def redone_samples(self) -> int:
        return 0


ClusterEvent = NodesLost | NodesChanged


def survivors(plan: Plan, lost: Collection[int], *, epoch: int) -> ClusterState:
    """The nodes of the plan without the lost ones, each of the kind that the plan assumes, holding
    all that the plan assigns to it."""
    per_node = plan.devices_per_node
    layers = {rank: frozenset(layers) for rank, layers in plan.layers_by_rank.items()}
    kinds = plan.kinds_by_node
    nodes = tuple(
        Node(
            node,
            tuple(layers[node * per_node + device] for device in range(per_node)),
            kinds[node],
        )
        for node in plan.nodes
        if node not in lost
    )
    return ClusterState(epoch, nodes)
