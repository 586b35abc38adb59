"""The interface of a policy, and the costs by which it prices its answers.

A policy answers an event with any number of transitions, with none if it knows no way to go on. It
makes them with the functions of policies/building.py, so that all are priced alike;
policies/value.py finds the best one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.plan import Link, ModelProfile, Plan, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The costs from which the downtime of a recovery is predicted.

    Attributes:
        links: links by kind, "intra_node" and "inter_node", and others that were measured.
        layer_bytes: bytes of each layer's state, parameters and optimizer state.
        regroup_s: seconds that every recovery takes, whatever moves, to make links and groups anew.
        hop_s: seconds to compute a plan's schedules, per hop of the largest schedule.
        domains: name of the failure domain of each node that is in one.
    """

    links: Mapping[str, Link]
    layer_bytes: tuple[int, ...]
    regroup_s: float
    hop_s: float = 0.0
    domains: Mapping[int, str] = field(default_factory=dict)

    def kind_between(self, node: int, other: int) -> str:
        """The kind of link between two nodes, as in `links`.

        Where no node is in a domain, all links are those between domains if there are such.
        """
        is_near = bool(self.domains) and self.domains.get(node) == self.domains.get(other)
        return "inter_node" if is_near or "inter_domain" not in self.links else "inter_domain"


class Policy(Protocol):
    """A way to answer events of the cluster."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The transitions from the plan that would answer the event; none if this policy has none.

        Args:
            plan: plan that the job leaves.
            cluster: state after the event; the proposed plans get its epoch.
            event: event to answer.
            prices: costs of recovery.
        """
        ...


def profile_prices(profile: ModelProfile, *, regroup_s: float) -> Prices:
    """The prices that follow from a profile, and `regroup_s`, which a profile does not tell."""
    return Prices(
        links=profile.links,
        layer_bytes=tuple(
            layer.parameter_bytes + layer.optimizer_bytes for layer in profile.layers
        ),
        regroup_s=regroup_s,
    )
