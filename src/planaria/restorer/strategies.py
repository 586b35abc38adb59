"""The ways to restore a job: how nodes get their places, and ranks the layers that they lack."""

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
    """Says who sends what, as `balanced_transfers` does."""

    def __call__(
        self, after: Plan, cluster: ClusterState, *, layer_bytes: Sequence[int]
    ) -> tuple[Transfer, ...]: ...


@dataclass(frozen=True, slots=True)
class Restoring:
    """A way to restore a job."""

    assignment: Assignment
    sources: Sources


# -- places and sources as they come, to measure the others against (Odyssey, figure 10) -----------


def assigned_in_order(
    openings: Sequence[Opening],
    nodes: Sequence[Node],
    *,
    before: Plan,
    layer_bytes: Sequence[int],
    covered: Collection[int] = (),
) -> tuple[Pipeline, ...]:
    """The pipelines bound to the nodes by number, place after place; as `assigned` else.

    Distrusted nodes may hold layers alone.
    """
    del before, layer_bytes, covered  # Whatever a node holds, it takes the place that is next.
    numbers = iter(sorted(node.node for node in nodes))
    return tuple(
        Pipeline(opening.template, tuple(next(numbers) for _ in range(opening.template.num_nodes)))
        for opening in openings
    )


def whole_transfers(
    after: Plan, cluster: ClusterState, *, layer_bytes: Sequence[int]
) -> tuple[Transfer, ...]:
    """Every layer that a rank lacks, whole, from the lowest rank that holds it."""
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
