"""From whom a rank gets the layers that it lacks, such that the busiest node sends the least.

A layer that a device of the own node holds comes from there. All others cross the network, where a
node's sending is what can be shared out: what it receives is what it lacks. Several holders of a
layer may each send some of its chunks, so the least that the busiest node has to send is

    max over sets N of nodes:  bytes of layers all of whose holders are in N,  over  |N|,

which no choice of sources can beat. It is found by flows from layers to their holders: with less
for each node some bytes find no way, and the nodes on the near side of the cut are a set N that
needs more. The next try is what that set needs, until all bytes find a way. Layers with the same
holders are one to the flow.

Exact but for the size of a chunk, of which a node may send one more for each set of layers that it
helps with, for what is too little to be worth a connection (tests/restorer/test_sources.py), and
for layers with more than SENDERS_MIN holders, of which not all are looked at.

What a node holds already is in none of the transfers: it is not touched. The ranks of a stage of
several devices each count as holders of its whole layers, as they do in a plan.

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

WORTH_BYTES: Final = 1 << 20  # Less from one node is left to the others.
SENDERS_MIN: Final = 16  # Of a set of layers, so many nodes at least are looked at.
_UNITS: Final = 1 << 29  # All bytes, as the flow counts them: it has 32 bits.


@dataclass(frozen=True, slots=True)
class _Need:
    layer: int
    target: int
    num_bytes: int


def balanced_transfers(
    after: Plan, cluster: ClusterState, *, layer_bytes: Sequence[int]
) -> tuple[Transfer, ...]:
    """Every layer that a rank of the plan lacks, in chunks from live ranks that hold it.

    No layer may be without a live holder: `ClusterState.lost_layers` says which are.
    """
    assert not cluster.lost_layers(after.num_layers)
    per_node = after.pipelines[0].template.devices_per_node
    held = cluster.held_by_rank()
    # By layer and node, one rank that holds it.
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
    """For each set of layers as many of their holders as help, taken in turn.

    With twice as many senders as there are nodes that lack something a node sends half of what one
    receives: more senders make nothing faster, and cost a connection each.
    """
    chosen = []
    first = 0
    for nodes, needs in zip(groups, wants, strict=True):
        number = min(len(nodes), max(SENDERS_MIN, 2 * len({need.target for need in needs})))
        chosen.append(tuple(sorted(nodes[(first + i) % len(nodes)] for i in range(number))))
        first += number
    return chosen


def transfer_rounds(transfers: Sequence[Transfer]) -> tuple[tuple[Transfer, ...], ...]:
    """The transfers in rounds, in whose order they are sent; the largest chosen first.

    In a round every rank sends at most one and receives at most one. They are fewer than twice the
    most that one rank sends or receives.
    """
    rounds: list[list[Transfer]] = []
    sending: dict[int, int] = {}  # By rank a bit for each round in which it sends.
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
    """The least that the busiest node sends, and the bytes by group and candidate.

    Args:
        groups: the nodes that could send, of each set of layers.
        sizes: bytes of these layers.
    """
    total = sum(sizes)
    if not total:
        return 0.0, [[0.0] * len(nodes) for nodes in groups]
    # It takes half a second to import; the job's processes have it from their fork server.
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
        # What the source still reaches: layers that lack a way, and all nodes that could help.
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
    """The chunks of these layers from the candidates, as far as each has bytes to send."""
    total = sum(need.num_bytes for need in needs)
    most = budgets.index(max(budgets))
    worth = [
        size if size >= WORTH_BYTES or index == most else 0.0 for index, size in enumerate(budgets)
    ]
    ends = [end * total / max(1.0, sum(worth)) for end in accumulate(worth)]
    found = []
    offset = 0
    for need in needs:
        # In chunks of this layer, where the share of all bytes of each candidate but the last ends.
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
