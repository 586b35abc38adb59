"""What a policy is, what its answers cost, and which of them is the best.

A policy answers an event with transitions, as many as it has ideas, none if it cannot go on. All
are priced alike: the downtime by the bytes that move, the iteration by the policy's estimate.

Source: DESIGN 6 (Policies).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.plan import Link, ModelProfile, Plan, Transfer, Transition
from planaria.restorer.cover import trusted_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What recovery costs.

    Attributes:
        links: by kind: "intra_node" and "inter_node".
        layer_bytes: of each layer's state: parameters and optimizer state.
        regroup_s: of what every recovery needs, whatever moves: links and groups made anew.
    """

    links: Mapping[str, Link]
    layer_bytes: tuple[int, ...]
    regroup_s: float


class Policy(Protocol):
    """A way to answer what happens to the cluster."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        """The transitions from the plan that would answer the event; none if this policy has none.

        Args:
            plan: that the job leaves.
            cluster: after the event; its epoch is that of the plans proposed.
        """
        ...


def profile_prices(profile: ModelProfile, *, regroup_s: float) -> Prices:
    """The prices that a profile tells, with a constant for what it does not."""
    return Prices(
        links=profile.links,
        layer_bytes=tuple(
            layer.parameter_bytes + layer.optimizer_bytes for layer in profile.layers
        ),
        regroup_s=regroup_s,
    )


def downtime_s(transfers: Iterable[Transfer], prices: Prices, *, devices_per_node: int) -> float:
    """Regrouping, then transfers for as long as the busiest link needs.

    Between nodes that is what one node sends to others, or what it receives; within a node what one
    device sends or receives there.
    """
    bytes_on: Counter[tuple[str, str, int]] = Counter()
    for transfer in transfers:
        source, target = transfer.source // devices_per_node, transfer.target // devices_per_node
        if source != target:
            bytes_on["inter_node", "from", source] += transfer.num_bytes
            bytes_on["inter_node", "to", target] += transfer.num_bytes
        else:
            bytes_on["intra_node", "from", transfer.source] += transfer.num_bytes
            bytes_on["intra_node", "to", transfer.target] += transfer.num_bytes
    busiest_s = (prices.links[kind].seconds(size) for (kind, _, _), size in bytes_on.items())
    return prices.regroup_s + max(busiest_s, default=0.0)


def num_exposed(plan: Plan, cluster: ClusterState) -> int:
    """How many layers distrusted nodes alone would hold."""
    distrusted = cluster.distrusted
    if not distrusted:
        return 0
    return plan.num_layers - len(trusted_layers(plan.pipelines, distrusted))


def least_exposed(
    transitions: Sequence[Transition], cluster: ClusterState
) -> tuple[Transition, ...]:
    """Those that leave the fewest layers to distrusted nodes alone."""
    exposed = [num_exposed(transition.after, cluster) for transition in transitions]
    fewest = min(exposed, default=0)
    return tuple(one for one, number in zip(transitions, exposed, strict=True) if number == fewest)


def expected_samples_per_s(
    transition: Transition, *, global_batch_size: int, time_to_failure_s: float
) -> float:
    """The goodput until the next failure, if that comes exactly when it is expected.

    In the time to the next failure T nothing is done for the downtime D, then a batch of B samples
    every iteration; R samples are done again and do not count: (B / iteration_s * (T - D) - R) / T.
    A downtime that outlasts T makes no samples.

    Args:
        time_to_failure_s: above 0; infinite if none is expected, which leaves B / iteration_s.
    """
    assert time_to_failure_s > 0
    up_share = max(0.0, 1.0 - transition.downtime_s / time_to_failure_s)
    samples_per_s = global_batch_size / transition.iteration_s
    return samples_per_s * up_share - transition.redone_samples / time_to_failure_s


def best_transition(
    transitions: Sequence[Transition], *, global_batch_size: int, time_to_failure_s: float
) -> Transition:
    """The one with the highest expected goodput; of equals that with the least downtime, the first.

    Args:
        transitions: at least one.
    """
    assert transitions

    def rank(transition: Transition) -> tuple[float, float]:
        goodput = expected_samples_per_s(
            transition, global_batch_size=global_batch_size, time_to_failure_s=time_to_failure_s
        )
        return -goodput, transition.downtime_s

    return min(transitions, key=rank)
