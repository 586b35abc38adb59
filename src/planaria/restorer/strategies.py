"""The strategies to restore a job: assignment of nodes to places, and sources of missing layers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from planaria.core.cluster import ClusterState, Node
from planaria.core.plan import Pipeline, Plan, Transfer
from planaria.restorer.assignment import UnboundPipeline, assign_nodes
from planaria.restorer.sources import NO_DOMAINS, balanced_transfers


class Assignment(Protocol):
    """Binds pipelines to nodes, as `assign_nodes` does."""

    def __call__(
        self,
        unbound: Sequence[UnboundPipeline],
        nodes: Sequence[Node],
        *,
        before: Plan,
        layer_bytes: Sequence[int],
        covered: Collection[int] = (),
    ) -> tuple[Pipeline, ...]: ...


class Sources(Protocol):
    """Chooses who sends which layers, as `balanced_transfers` does."""

    def __call__(
        self,
        after: Plan,
        cluster: ClusterState,
        *,
        layer_bytes: Sequence[int],
        domains: Mapping[int, str] = NO_DOMAINS,
    ) -> tuple[Transfer, ...]: ...


@dataclass(frozen=True, slots=True)
class RestoreStrategy:
    """A strategy to restore a job."""

    assignment: Assignment
    sources: Sources


# -- baselines without optimization, for comparison (Odyssey, figure 10) ---------------------------


def assign_nodes_in_order(
    unbound: Sequence[UnboundPipeline],
    nodes: Sequence[Node],
    *,
    before: Plan,
    layer_bytes: Sequence[int],
    covered: Collection[int] = (),
) -> tuple[Pipeline, ...]:
    """The pipelines with nodes bound to them in ascending order; arguments as in `assign_nodes`.

    Distrusted nodes may be the only holders of a layer.
    """
    del before, layer_bytes, covered  # Nodes take the next place, whatever they hold.
    numbers = iter(sorted(node.node for node in nodes))
    return tuple(
        Pipeline(
            pipeline.template, tuple(next(numbers) for _ in range(pipeline.template.num_nodes))
        )
        for pipeline in unbound
    )


def whole_transfers(
    after: Plan,
    cluster: ClusterState,
    *,
    layer_bytes: Sequence[int],
    domains: Mapping[int, str] = NO_DOMAINS,
) -> tuple[Transfer, ...]:
    """The transfers of all layers that ranks lack, each whole and from the lowest rank with it."""
    del domains  # The lowest rank may be in any.
    layers_by_rank = cluster.held_by_rank()
    first_holder: dict[int, int] = {}
    for rank in sorted(layers_by_rank, reverse=True):
        first_holder.update(dict.fromkeys(layers_by_rank[rank], rank))
    return tuple(
        Transfer(layer, first_holder[layer], rank, layer_bytes[layer])
        for rank, layers in sorted(after.held_by_rank.items())
        for layer in layers
        if layer not in layers_by_rank[rank]
    )


LEAST_BYTES: Final = RestoreStrategy(assign_nodes, balanced_transfers)
NAIVE: Final = RestoreStrategy(assign_nodes_in_order, whole_transfers)
