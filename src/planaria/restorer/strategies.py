"""The ways to restore a job: how nodes get their places, and ranks the layers that they lack."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from planaria.core.cluster import ClusterState, Node
from planaria.core.plan import Pipeline, Plan, Transfer
from planaria.restorer.assignment import Opening, assigned
from planaria.restorer.naive import assigned_in_order, whole_transfers
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


LEAST_BYTES: Final = Restoring(assigned, balanced_transfers)
NAIVE: Final = Restoring(assigned_in_order, whole_transfers)
