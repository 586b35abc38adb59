"""The nodes that live, what each holds of the model, and what happened to the others.

A loss may strike while the job recovers from an earlier one, when some nodes hold less than their
plan says and others more. So what is held is said node by node, and never read from a plan.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from planaria.core.copies import Label
from planaria.core.plan import NodeKind, Plan

_USUAL: Final = NodeKind()


@dataclass(frozen=True, slots=True)
class Node:
    """A live node.

    Attributes:
        node: its number, which is never used again.
        held: by device, the layers whose state is there whole, parameters and optimizer state, and
            of the age at which the job goes on. Empty where the worker is new.
        kind: as it has been seen to be.
        is_trusted: its machine has not failed often of late.
    """

    node: int
    held: tuple[frozenset[int], ...]
    kind: NodeKind = _USUAL
    is_trusted: bool = True


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The members of an epoch.

    Attributes:
        epoch: of their membership record; the next plan gets it.
        nodes: that are to have work, ascending.
        leaving: that are not, but can still give what they hold.
    """

    epoch: int
    nodes: tuple[Node, ...]
    leaving: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        numbers = [node.node for node in self.nodes]
        assert numbers == sorted(set(numbers))
        assert not {node.node for node in self.leaving}.intersection(numbers)

    @property
    def distrusted(self) -> frozenset[int]:
        """The nodes that should hold nothing alone."""
        nodes = (*self.nodes, *self.leaving)
        return frozenset(node.node for node in nodes if not node.is_trusted)

    def held_by_rank(self) -> dict[int, frozenset[int]]:
        """For every live rank the layers that it holds."""
        return {
            node.node * len(node.held) + device: layers
            for node in (*self.nodes, *self.leaving)
            for device, layers in enumerate(node.held)
        }

    def lost_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of the model that no live rank holds, ascending.

        If there is one, the job cannot go on from what is live: it has to go back to a checkpoint.
        """
        held = frozenset[int]().union(*self.held_by_rank().values())
        return tuple(layer for layer in range(num_layers) if layer not in held)


@dataclass(frozen=True, slots=True)
class SavePoint:
    """The newest state of the whole model in memory or on disk, or that before the first iteration.

    Attributes:
        iteration: the first to run from there.
        source: the version of the disk tier; "" where only the seed or given weights tell it.
        redone_samples: if all go back to it.
        copied: the version of the copies in memory, if it is one.
    """

    iteration: int
    source: str
    redone_samples: int
    copied: Label | None = None


@dataclass(frozen=True, slots=True)
class NodesLost:
    """Nodes are gone, all at once as far as the job can tell.

    Attributes:
        nodes: may be empty: the node of a worker that ended lives, and holds less.
        redone_samples: of the iteration in flight, if its outcome is to redo it; else 0.
        saved: what all could go back to, None if they must not.
    """

    nodes: tuple[int, ...]
    redone_samples: int
    saved: SavePoint | None = None


@dataclass(frozen=True, slots=True)
class NodesChanged:
    """Nodes have come, are about to leave, or have another speed, while training goes on; nothing
    is done again. If none has, a better plan for those that there are is looked for."""

    joined: tuple[int, ...]
    leaving: tuple[int, ...]
    slow: tuple[int, ...] = ()

    @property
    def redone_samples(self) -> int:
        return 0


ClusterEvent = NodesLost | NodesChanged


def survivors(plan: Plan, lost: Collection[int], *, epoch: int) -> ClusterState:
    """The nodes of the plan but the lost ones, each with all that the plan gave it."""
    per_node = plan.pipelines[0].template.devices_per_node
    layers = {rank: frozenset(layers) for rank, layers in plan.layers_by_rank.items()}
    nodes = tuple(
        Node(node, tuple(layers[node * per_node + device] for device in range(per_node)))
        for node in plan.nodes
        if node not in lost
    )
    return ClusterState(epoch, nodes)
