"""Makes the transitions that policies propose: what moves, how long that takes, and which layers
distrusted nodes alone would hold.

The downtime of a transition follows from the bytes that move; its iteration is the policy's
estimate.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, TypeAlias

import msgspec

from planaria.core.cluster import ClusterState
from planaria.core.plan import Plan, Transfer, Transition
from planaria.policies.policy import Prices
from planaria.restorer.cover import trusted_layers
from planaria.restorer.sources import transfer_rounds
from planaria.restorer.strategies import RestoreStrategy
from planaria.schedule.lower import num_connected_hops

_FIXED_HOPS: Final = 64  # The fixed cost of a schedule, as a number of hops; measured.

# The bytes on each direction of links by kind of link. A direction is within a node or not, "from"
# or "to", and has an end.
Load: TypeAlias = dict[tuple[bool, str, int], dict[str, int]]
_NO_LOAD: Final[Load] = {}
_NOTHING: Final[Mapping[str, int]] = {}


def transition_between(
    plan: Plan,
    after: Plan,
    cluster: ClusterState,
    prices: Prices,
    restoring: RestoreStrategy,
    *,
    iteration_s: float,
    redone_samples: int,
    policy: str,
    answer: str,
) -> Transition:
    """The transition from `plan` to `after` in which ranks get layers from their holders."""
    transfers = fastest_transfers(after, cluster, prices, restoring)
    per_node = after.devices_per_node
    return Transition(
        before=plan,
        after=after,
        rounds=transfer_rounds(transfers),
        downtime_s=downtime_s(transfers, prices, devices_per_node=per_node),
        iteration_s=iteration_s,
        redone_samples=redone_samples,
        policy=policy,
        answer=answer,
    )


def fastest_transfers(
    after: Plan, cluster: ClusterState, prices: Prices, restoring: RestoreStrategy
) -> tuple[Transfer, ...]:
    """The transfers of all layers that ranks of the plan lack: from all holders, or, if that is
    faster, from those in the domains of the ranks."""
    transfers = restoring.sources(after, cluster, layer_bytes=prices.layer_bytes)
    if not prices.domains or "inter_domain" not in prices.links:
        return transfers
    near = restoring.sources(after, cluster, layer_bytes=prices.layer_bytes, domains=prices.domains)
    per_node = after.devices_per_node
    return min(transfers, near, key=lambda x: transfer_s(x, prices, devices_per_node=per_node))


def with_near_sources(transition: Transition, cluster: ClusterState, prices: Prices) -> Transition:
    """The transition in which ranks get layers from holders in their domains, if that is faster.

    What comes from another domain comes from all near holders in turn instead. This is for answers
    that were found for other nodes, where `fastest_transfers` would take too long.
    """
    per_node = transition.after.devices_per_node
    domain_of = prices.domains.get
    holders: dict[tuple[int, str | None], list[int]] = {}
    for rank, layers in cluster.held_by_rank().items():
        for layer in layers:
            holders.setdefault((layer, domain_of(rank // per_node)), []).append(rank)
    near: list[Transfer] = []
    transfers = tuple(chain.from_iterable(transition.rounds))
    for transfer in transfers:
        domain = domain_of(transfer.target // per_node)
        others = holders.get((transfer.layer, domain))
        if not others or domain_of(transfer.source // per_node) == domain:
            near.append(transfer)
            continue
        others.append(others.pop(0))
        near.append(msgspec.structs.replace(transfer, source=others[-1]))
    found_s = transfer_s(transfers, prices, devices_per_node=per_node)
    saved_s = found_s - transfer_s(near, prices, devices_per_node=per_node)
    if saved_s <= 0.0:
        return transition
    rounds, left_s = transfer_rounds(near), transition.downtime_s - saved_s
    return replace(transition, rounds=rounds, downtime_s=left_s)


def scheduling_s(plan: Plan, hop_s: float) -> float:
    """Seconds to compute the schedules of a plan, before any rank trains in its epoch."""
    return hop_s * (_FIXED_HOPS + num_connected_hops(plan)) if hop_s else 0.0


def downtime_s(transfers: Iterable[Transfer], prices: Prices, *, devices_per_node: int) -> float:
    """Seconds to regroup, without computing schedules, and then to run the transfers."""
    return prices.regroup_s + transfer_s(transfers, prices, devices_per_node=devices_per_node)


def transfer_s(transfers: Iterable[Transfer], prices: Prices, *, devices_per_node: int) -> float:
    """Seconds for which simultaneous transfers keep the busiest link direction busy.

    A node has one direction out to other nodes and one in, however far these are.
    """
    return busiest_s(load_of(transfers, prices, devices_per_node=devices_per_node), prices)


def load_of(transfers: Iterable[Transfer], prices: Prices, *, devices_per_node: int) -> Load:
    """The bytes on each link direction, by kind of link.

    The end of a direction between nodes is a node: it counts what that node sends to other nodes,
    or receives. That of a direction within a node is a rank: it counts what that rank sends within
    its node, or receives.
    """
    by_ranks: dict[tuple[int, int], int] = {}  # Most pairs of ranks have many transfers.
    for transfer in transfers:
        ranks = transfer.source, transfer.target
        by_ranks[ranks] = by_ranks.get(ranks, 0) + transfer.num_bytes
    load: Load = {}
    for ranks, num_bytes in by_ranks.items():
        source, target = ranks[0] // devices_per_node, ranks[1] // devices_per_node
        is_within = source == target
        if is_within:
            kind, (source, target) = "intra_node", ranks
        else:
            kind = prices.kind_between(source, target)
        for direction in ((is_within, "from", source), (is_within, "to", target)):
            on_direction = load.setdefault(direction, {})
            on_direction[kind] = on_direction.get(kind, 0) + num_bytes
    return load


def busiest_s(load: Load, prices: Prices, *, beside: Load = _NO_LOAD) -> float:
    """Seconds for which the busiest direction of a load carries bytes.

    Args:
        beside: further bytes, of which those on directions of the load are carried, too.
    """
    longest_s = 0.0
    for direction, on_kinds in load.items():
        further = beside.get(direction, _NOTHING)
        busy_s = 0.0
        for kind, num_bytes in on_kinds.items():
            busy_s += prices.links[kind].seconds(num_bytes + further.get(kind, 0))
        for kind, num_bytes in further.items():
            if kind not in on_kinds:
                busy_s += prices.links[kind].seconds(num_bytes)
        longest_s = max(longest_s, busy_s)
    return longest_s


def num_exposed(plan: Plan, cluster: ClusterState) -> int:
    """The number of layers that only distrusted nodes would hold."""
    distrusted = cluster.distrusted_nodes
    if not distrusted:
        return 0
    # Nodes that are gone are not in the cluster, but still have places in pipelines.
    untrusted = distrusted.union(plan.gone)
    return plan.num_layers - len(trusted_layers(plan.pipelines, untrusted))


def least_exposed(
    transitions: Sequence[Transition], cluster: ClusterState
) -> tuple[Transition, ...]:
    """The transitions that leave the fewest layers to distrusted nodes alone."""
    exposed = [num_exposed(transition.after, cluster) for transition in transitions]
    fewest = min(exposed, default=0)
    return tuple(
        transition
        for transition, number in zip(transitions, exposed, strict=True)
        if number == fewest
    )
