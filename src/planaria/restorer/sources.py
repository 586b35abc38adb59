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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from planaria.core.cluster import ClusterState
from planaria.core.plan import NUM_CHUNKS, Plan, Transfer

WORTH_BYTES: Final = 1 << 20  # The smallest share for a node; other nodes send a smaller one.
SENDERS_MIN: Final = 16  # How many holders of a set of layers are considered, at least.
_UNITS: Final = 1 << 29  # The flow counts in 32 bits, so all bytes together are this many units.


@dataclass(frozen=True, slots=True)
class _Need:
    layer: int
    target: int
    num_bytes: int


def balanced_transfers(
    after: Plan, cluster: ClusterState, *, layer_bytes: Sequence[int]
) -> tuple[Transfer, ...]:
    """The transfers of all layers that ranks of the plan lack, in chunks from live holders.

    Every layer must have a live holder; `ClusterState.lost_layers` names those that have none.
    """
    assert not cluster.lost_layers(after.num_layers)
    per_node = after.pipelines[0].template.devices_per_node
    held = cluster.held_by_rank()
    # For each layer: one rank that holds it, by node.
    holders: list[dict[int, int]] = [{} for _ in range(after.num_layers)]
    for rank in sorted(held, reverse=True):
        for layer in held[rank]:
            holders[layer][rank // per_node] = rank
    found: list[Transfer] = []
    groups: dict[tuple[int, ...], list[_Need]] = {}
    for rank, layers in after.held_by_rank.items():
        for layer in layers:
            if layer in held[rank]:
                continue
            own = holders[layer].get(rank // per_node)
            if own is not None:
                found.append(Transfer(layer, own, rank, layer_bytes[layer]))
            else:
                need = _Need(layer, rank, layer_bytes[layer])
                groups.setdefault(tuple(sorted(holders[layer])), []).append(need)
    wants = [groups[nodes] for nodes in sorted(groups)]
    senders = _enough(sorted(groups), wants)
    sizes = [sum(need.num_bytes for need in needs) for needs in wants]
    for needs, nodes, budgets in zip(wants, senders, least_sending(senders, sizes)[1], strict=True):
        found += _shared_out(needs, nodes, budgets, holders)
    return tuple(sorted(found))


def _enough(
    groups: Sequence[tuple[int, ...]], wants: Sequence[Sequence[_Need]]
) -> list[tuple[int, ...]]:
    """The senders to consider for each set of layers, chosen in turn among its holders.

    If there are twice as many senders as receivers, a sender sends half of what a receiver
    receives. More senders would make nothing faster, and each costs a connection.
    """
    chosen = []
    first = 0
    for nodes, needs in zip(groups, wants, strict=True):
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
    place = {node: 1 + len(groups) + index for index, node in enumerate(every_node)}
    sink = 1 + len(groups) + len(every_node)
    units = [max(1, round(size * _UNITS / total)) if size else 0 for size in sizes]
    edges = [(0, 1 + group, unit) for group, unit in enumerate(units)]
    edges += [(1 + g, place[n], units[g]) for g, nodes in enumerate(groups) for n in nodes]
    level = -(-sum(units) // len(every_node))
    while True:
        all_edges = edges + [(there, sink, level) for there in place.values()]
        rows, columns, capacities = (
            np.array(part, dtype=np.int32) for part in zip(*all_edges, strict=True)
        )
        graph = csr_array((capacities, (rows, columns)), shape=(sink + 1, sink + 1))
        result = maximum_flow(graph, 0, sink)
        if result.flow_value == sum(units):
            break
        # The source side of the cut: groups with bytes left, and all nodes that could send them.
        left = csr_array(graph - result.flow)
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        in_set = sum(there in reached for there in place.values())
        needed = sum(unit for g, unit in enumerate(units) if 1 + g in reached)
        level = max(level + 1, -(-needed // in_set))
    flow = result.flow.todok()
    scale = total / sum(units)
    budgets = [
        [float(flow.get((1 + g, place[n]), 0)) * scale for n in nodes]
        for g, nodes in enumerate(groups)
    ]
    return level * scale, budgets


def _shared_out(
    needs: Sequence[_Need],
    candidates: Sequence[int],
    budgets: Sequence[float],
    holders: Sequence[dict[int, int]],
) -> list[Transfer]:
    """The transfers of these layers in chunks, divided among candidates by their budgets."""
    total = sum(need.num_bytes for need in needs)
    most = budgets.index(max(budgets))
    worth = [
        size if size >= WORTH_BYTES or index == most else 0.0 for index, size in enumerate(budgets)
    ]
    ends = [end * total / max(1.0, sum(worth)) for end in accumulate(worth)]
    found = []
    offset = 0
    for need in needs:
        # Chunk numbers of this layer at which the shares of candidates end, but for the last one.
        low = bisect_right(ends, offset, hi=len(ends) - 1)
        high = bisect_left(ends, offset + need.num_bytes, lo=low, hi=len(ends) - 1)
        cuts = [round((end - offset) * NUM_CHUNKS / need.num_bytes) for end in ends[low:high]]
        nodes = candidates[low : high + 1]
        for node, first, end in zip(nodes, (0, *cuts), (*cuts, NUM_CHUNKS), strict=True):
            if first < end:
                source = holders[need.layer][node]
                num_bytes = (
                    need.num_bytes * end // NUM_CHUNKS - need.num_bytes * first // NUM_CHUNKS
                )
                found.append(Transfer(need.layer, source, need.target, num_bytes, first, end))
        offset += need.num_bytes
    return found
