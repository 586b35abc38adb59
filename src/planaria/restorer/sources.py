"""Choice of the ranks that send missing layers, such that the busiest node sends the least.

If a device of the same node holds a missing layer, it is the source. All other layers cross the
network. What a node receives there is fixed (the layers that it lacks); only the sending can be
divided. Several holders of a layer may each send some of its chunks. So the busiest node sends at
least

    max over sets N of nodes:  bytes of layers all of whose holders are in N,  over  |N|.

No choice of sources can be better, and flows from layers to their holders find one that is as good.
If the limit per node is lower, the flow does not carry all bytes, and the nodes on the source side
of the minimum cut are a set N that needs a higher limit. The next limit is what that set needs,
until the flow carries all bytes. Layers with the same holders are one vertex of the flow network.

The result is exact but for three things: a node may send one more chunk for each set of layers that
it helps to send; a share that is too small to be worth a connection goes to other nodes
(tests/restorer/test_sources.py); and of more than SENDERS_MIN holders not all are considered.

No transfer contains a layer that its target already holds. Each rank of a stage with several
devices counts as a holder of the stage's whole layers, as it does in a plan.

Source: none; Oobleck (SOSP '23), section 5, and Odyssey, section IV-B, copy a layer from one peer.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

import numpy as np

from planaria.core.cluster import ClusterState
from planaria.core.plan import NUM_CHUNKS, Plan, Transfer

WORTH_BYTES: Final = 1 << 20  # The smallest share for a node; other nodes send a smaller one.
SENDERS_MIN: Final = 16  # How many holders of a set of layers are considered, at least.
NO_DOMAINS: Final[Mapping[int, str]] = MappingProxyType({})
_UNITS: Final = 1 << 29  # The flow counts in 32 bits, so all bytes together are this many units.


@dataclass(frozen=True, slots=True)
class _Need:
    layer: int
    target: int
    num_bytes: int


def balanced_transfers(
    after: Plan,
    cluster: ClusterState,
    *,
    layer_bytes: Sequence[int],
    domains: Mapping[int, str] = NO_DOMAINS,
) -> tuple[Transfer, ...]:
    """The transfers of all layers that ranks of the plan lack, in chunks from live holders.

    Every layer must have a live holder; `ClusterState.lost_layers` names those that have none.

    Args:
        domains: name of the failure domain of each node that is in one. If any are given, a layer
            comes from holders in its target's domain if there are such.
    """
    assert not cluster.lost_layers(after.num_layers)
    per_node = after.devices_per_node
    layers_by_rank = cluster.held_by_rank()
    # For each layer: one rank that holds it, by node.
    holders: list[dict[int, int]] = [{} for _ in range(after.num_layers)]
    for rank in sorted(layers_by_rank, reverse=True):
        for layer in layers_by_rank[rank]:
            holders[layer][rank // per_node] = rank
    transfers: list[Transfer] = []
    groups: dict[tuple[int, ...], list[_Need]] = {}
    for rank, layers in after.held_by_rank.items():
        for layer in layers:
            if layer in layers_by_rank[rank]:
                continue
            rank_in_node = holders[layer].get(rank // per_node)
            if rank_in_node is not None:
                transfers.append(Transfer(layer, rank_in_node, rank, layer_bytes[layer]))
            else:
                need = _Need(layer, rank, layer_bytes[layer])
                nodes = _holders_to_ask(holders[layer], rank // per_node, domains)
                groups.setdefault(tuple(sorted(nodes)), []).append(need)
    needs_by_group = [groups[nodes] for nodes in sorted(groups)]
    senders = _senders_to_consider(sorted(groups), needs_by_group)
    sizes = [sum(need.num_bytes for need in needs) for needs in needs_by_group]
    for needs, nodes, budgets in zip(
        needs_by_group, senders, least_sending(senders, sizes)[1], strict=True
    ):
        transfers += _chunk_transfers(needs, nodes, budgets, holders)
    return tuple(sorted(transfers))


def _holders_to_ask(
    holders: Collection[int], target: int, domains: Mapping[int, str]
) -> Collection[int]:
    """The holders in the domain of a node, if domains are given and there are such; else all."""
    if not domains:
        return holders
    domain = domains.get(target)
    return [node for node in holders if domains.get(node) == domain] or holders


def _senders_to_consider(
    groups: Sequence[tuple[int, ...]], needs_by_group: Sequence[Sequence[_Need]]
) -> list[tuple[int, ...]]:
    """The senders to consider for each set of layers, chosen in turn among its holders.

    If there are twice as many senders as receivers, a sender sends half of what a receiver
    receives. More senders would make nothing faster, and each costs a connection.
    """
    chosen = []
    first = 0
    for nodes, needs in zip(groups, needs_by_group, strict=True):
        number = min(len(nodes), max(SENDERS_MIN, 2 * len({need.target for need in needs})))
        chosen.append(tuple(sorted(nodes[(first + i) % len(nodes)] for i in range(number))))
        first += number
    return chosen


def transfer_rounds(transfers: Sequence[Transfer]) -> tuple[tuple[Transfer, ...], ...]:
    """The transfers divided into rounds, in the order of sending; the largest is placed first.

    In a round every rank sends at most one transfer and receives at most one. There are fewer
    rounds than twice the largest number of transfers that one rank sends or receives.
    """
    rounds: list[list[Transfer]] = []
    sending: dict[int, int] = {}  # For each rank: a bit mask of its rounds.
    receiving: dict[int, int] = {}
    for transfer in sorted(transfers, key=lambda t: (-t.num_bytes, t)):
        busy = sending.get(transfer.source, 0) | receiving.get(transfer.target, 0)
        free = ~busy & (busy + 1)  # The lowest bit that is not set.
        if free.bit_length() > len(rounds):
            rounds.append([])
        rounds[free.bit_length() - 1].append(transfer)
        sending[transfer.source] = sending.get(transfer.source, 0) | free
        receiving[transfer.target] = receiving.get(transfer.target, 0) | free
    return tuple(tuple(sorted(together)) for together in rounds)


def least_sending(
    groups: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> tuple[float, list[list[float]]]:
    """The smallest possible number of bytes that the busiest node sends, and how it is reached.

    Args:
        groups: nodes that can send each set of layers.
        sizes: size of each set of layers in bytes.

    Returns:
        The bytes that the busiest node sends, and the bytes by group and node of the group.
    """
    total = sum(sizes)
    if not total:
        return 0.0, [[0.0] * len(nodes) for nodes in groups]
    # The import takes half a second; the fork server does it once for the job's processes.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    every_node = sorted({node for nodes in groups for node in nodes})
    vertex_of = {node: 1 + len(groups) + index for index, node in enumerate(every_node)}
    sink = 1 + len(groups) + len(every_node)
    units = [max(1, round(size * _UNITS / total)) if size else 0 for size in sizes]
    edges = [(0, 1 + group, unit) for group, unit in enumerate(units)]
    edges += [(1 + g, vertex_of[n], units[g]) for g, nodes in enumerate(groups) for n in nodes]
    limit = -(-sum(units) // len(every_node))
    while True:
        all_edges = edges + [(vertex, sink, limit) for vertex in vertex_of.values()]
        rows, columns, capacities = (
            np.array(part, dtype=np.int32) for part in zip(*all_edges, strict=True)
        )
        graph = csr_array((capacities, (rows, columns)), shape=(sink + 1, sink + 1))
        result = maximum_flow(graph, 0, sink)
        if result.flow_value == sum(units):
            break
        # The source side of the cut: groups with bytes left, and all nodes that could send them.
        residual = csr_array(graph - result.flow)
        residual.eliminate_zeros()
        reachable = set(breadth_first_order(residual, 0, return_predecessors=False).tolist())
        num_reachable_nodes = sum(vertex in reachable for vertex in vertex_of.values())
        needed_units = sum(unit for g, unit in enumerate(units) if 1 + g in reachable)
        limit = max(limit + 1, -(-needed_units // num_reachable_nodes))
    flow = result.flow.todok()
    scale = total / sum(units)
    budgets = [
        [float(flow.get((1 + g, vertex_of[n]), 0)) * scale for n in nodes]
        for g, nodes in enumerate(groups)
    ]
    return limit * scale, budgets


def _chunk_transfers(
    needs: Sequence[_Need],
    candidates: Sequence[int],
    budgets: Sequence[float],
    holders: Sequence[dict[int, int]],
) -> list[Transfer]:
    """The transfers of these layers in chunks, divided among candidates by their budgets."""
    total = sum(need.num_bytes for need in needs)
    busiest = budgets.index(max(budgets))
    worth = [
        size if size >= WORTH_BYTES or index == busiest else 0.0
        for index, size in enumerate(budgets)
    ]
    ends = [end * total / max(1.0, sum(worth)) for end in accumulate(worth)]
    transfers = []
    offset = 0
    for need in needs:
        # Chunk numbers of this layer at which the shares of candidates end, but for the last one.
        first_candidate = bisect_right(ends, offset, hi=len(ends) - 1)
        last_candidate = bisect_left(
            ends, offset + need.num_bytes, lo=first_candidate, hi=len(ends) - 1
        )
        cuts = [
            round((end - offset) * NUM_CHUNKS / need.num_bytes)
            for end in ends[first_candidate:last_candidate]
        ]
        nodes = candidates[first_candidate : last_candidate + 1]
        for node, first, end in zip(nodes, (0, *cuts), (*cuts, NUM_CHUNKS), strict=True):
            if first < end:
                source = holders[need.layer][node]
                num_bytes = (
                    need.num_bytes * end // NUM_CHUNKS - need.num_bytes * first // NUM_CHUNKS
                )
                transfers.append(Transfer(need.layer, source, need.target, num_bytes, first, end))
        offset += need.num_bytes
    return transfers
