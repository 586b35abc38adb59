"""The strategies to restore a job: assignment of nodes to places, and sources of missing layers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from planaria.core.cluster import ClusterState, Node
from planaria.core.plan import Pipeline, Plan, Transfer
from planaria.restorer.assignment import Opening, assigned
from planaria.restorer.sources import balanced_transfers


class Assignment(Protocol):
    """Binds pipelines to nodes, as `assigned` does."""

    def __call__(
        self,
        openings: Sequence[Opening],
        nodes: Sequence[Node],
        *,
        before: Plan,
        layer_bytes: Sequence[int],
        covered: Collection[int] = (),
    ) -> tuple[Pipeline, ...]: ...


class Sources(Protocol):
    """Chooses who sends which layers, as `balanced_transfers` does."""

    def __call__(
        self, after: Plan, cluster: ClusterState, *, layer_bytes: Sequence[int]
    ) -> tuple[Transfer, ...]: ...


@dataclass(frozen=True, slots=True)
class Restoring:
    """A strategy to restore a job."""

    assignment: Assignment
    sources: Sources


# -- baselines without optimization, for comparison (Odyssey, figure 10) ---------------------------


def assigned_in_order(
    openings: Sequence[Opening],
    nodes: Sequence[Node],
    *,
    before: Plan,
    layer_bytes: Sequence[int],
    covered: Collection[int] = (),
) -> tuple[Pipeline, ...]:
    """The pipelines with nodes bound to them in ascending order; arguments as in `assigned`.

    Distrusted nodes may be the only holders of a layer.
    """
    del before, layer_bytes, covered  # Nodes take the next place, whatever they hold.
    numbers = iter(sorted(node.node for node in nodes))
    return tuple(
        Pipeline(opening.template, tuple(next(numbers) for _ in range(opening.template.num_nodes)))
        for opening in openings
    )


def whole_transfers(
    after: Plan, cluster: ClusterState, *, layer_bytes: Sequence[int]
) -> tuple[Transfer, ...]:
    """The transfers of all layers that ranks lack, each whole and from the lowest rank with it."""
    held = cluster.held_by_rank()
    first: dict[int, int] = {}
    for rank in sorted(held, reverse=True):
        first.update(dict.fromkeys(held[rank], rank))
    return tuple(
        Transfer(layer, first[layer], rank, layer_bytes[layer])
        for rank, layers in sorted(after.held_by_rank.items())
        for layer in layers
        if layer not in held[rank]
    )


LEAST_BYTES: Final = Restoring(assigned, balanced_transfers)
NAIVE: Final = Restoring(assigned_in_order, whole_transfers)
