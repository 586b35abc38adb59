"""Which ranks keep copies of which layers in memory, for a plan.

Every rank keeps a copy of the layers that it holds in the memory of its own node. Each layer has
up to k - 1 further copies. One holder of the layer sends them to nodes that do not hold it: a copy
on a node that computes the same layer in another pipeline would be lost together with that node.
The copy holders are those that the placement of nodes (placement/placement.py) names for the
sender, as far as they qualify, so that a node sends to as few other nodes as possible. Nodes that
may fail together with holders are chosen last.

Source: Gemini (SOSP '23), section 4.
Differs: in Gemini each state has one owner, so each machine sends all of its state; here a layer
may have several holders, and the one that has the fewest bytes to send so far sends it.
"""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan
from planaria.placement.placement import Placement


def layer_copies(
    plan: Plan,
    *,
    copies: int,
    placement: Placement,
    layer_bytes: Sequence[int],
    domains: Sequence[Collection[int]] = (),
) -> tuple[LayerCopy, ...]:
    """The further copies of all layers, ascending by layer. O(layers * nodes).

    A layer has fewer than copies - 1 of them if fewer nodes do not hold it.

    Args:
        copies: k, the number of copies of each layer, the sender's own included.
        placement: placement of as many nodes as the plan has, indexed by place in plan.nodes.
        layer_bytes: bytes of each layer's state.
        domains: sets of nodes that may fail together. Where possible, a copy is in another domain
            than the layer's holders and its other copies.
    """
    per_node = plan.devices_per_node
    preferred = {
        node: frozenset(plan.nodes[place] for place in places[1:])
        for node, places in zip(plan.nodes, placement.holders, strict=True)
    }
    domain_of = {node: index for index, nodes in enumerate(domains) for node in nodes}
    holders, sources = _holding_nodes(plan), _computing_ranks(plan)
    sent_bytes: Counter[int] = Counter()
    kept_bytes: Counter[int] = Counter()
    nodes_by_kept = [(0, node) for node in plan.nodes]
    copy_of: dict[int, LayerCopy] = {}
    for layer in sorted(range(plan.num_layers), key=lambda n: (-layer_bytes[n], n)):
        source = min(sources[layer], key=lambda rank: (sent_bytes[rank], rank))
        first = preferred[source // per_node] - holders[layer]
        # The placement does not name these: the one that keeps the fewest bytes comes first.
        others = (n for _, n in nodes_by_kept if n not in first and n not in holders[layer])
        chosen = _nodes_in_other_domains(
            chain(sorted(first, key=lambda n: (kept_bytes[n], n)), others),
            number=min(copies - 1, len(set(plan.nodes) - holders[layer])),
            used_domains={domain_of[n] for n in holders[layer] if n in domain_of},
            domain_of=domain_of,
        )
        for target in chosen:
            sent_bytes[source] += layer_bytes[layer]
            nodes_by_kept.remove((kept_bytes[target], target))
            kept_bytes[target] += layer_bytes[layer]
            insort(nodes_by_kept, (kept_bytes[target], target))
        targets = tuple(target * per_node + source % per_node for target in chosen)
        copy_of[layer] = LayerCopy(layer, source, targets)
    return tuple(copy_of[layer] for layer in range(plan.num_layers))


def _nodes_in_other_domains(
    nodes: Iterable[int], *, number: int, used_domains: set[int], domain_of: Mapping[int, int]
) -> list[int]:
    """The first `number` nodes that share no domain with each other or with `used_domains`, filled
    up with the first of the other nodes if those are too few.

    Adds the domains of the chosen nodes to `used_domains`.
    """
    chosen, others = list[int](), list[int]()
    for node in nodes:
        if len(chosen) == number:
            break
        if node not in domain_of:
            chosen.append(node)
        elif domain_of[node] not in used_domains:
            chosen.append(node)
            used_domains.add(domain_of[node])
        else:
            others.append(node)
    return chosen + others[: number - len(chosen)]


def shard_copies(nodes: Sequence[str], placement: Placement) -> tuple[LayerCopy, ...]:
    """The copies of shards, of which each rank has one: the copy holders of a shard are on the
    nodes that the placement names for the rank's node, at the same place within the node.

    Args:
        nodes: name of each rank's node.
        placement: placement of the nodes, in the order in which they first occur.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    by_node = list(ranks_of.values())
    copies_of_shards = {}
    for ranks, holders in zip(by_node, placement.holders, strict=True):
        for place, rank in enumerate(ranks):
            others = (by_node[holder] for holder in holders[1:])
            targets = tuple(there[place % len(there)] for there in others)
            copies_of_shards[rank] = LayerCopy(rank, rank, targets)
    return tuple(copies_of_shards[rank] for rank in range(len(nodes)))


def keeping_places(plan: Plan, copies: Iterable[LayerCopy]) -> tuple[frozenset[int], ...]:
    """The nodes of the plan, for each layer, that hold it or keep one of these copies, as places in
    plan.nodes. A node that joins holds layers silently before it is one of them."""
    per_node = plan.devices_per_node
    place = {node: index for index, node in enumerate(plan.nodes)}
    holders = _holding_nodes(plan)
    nodes = [{place[n] for n in holders[x] if n in place} for x in range(plan.num_layers)]
    for copy in copies:
        nodes[copy.layer].update(place[target // per_node] for target in copy.targets)
    return tuple(map(frozenset, nodes))


def _holding_nodes(plan: Plan) -> Mapping[int, frozenset[int]]:
    """The nodes that hold each layer, whether they compute it or not."""
    per_node = plan.devices_per_node
    nodes: dict[int, set[int]] = {layer: set() for layer in range(plan.num_layers)}
    for rank, layers in plan.held_by_rank.items():
        for layer in layers:
            nodes[layer].add(rank // per_node)
    return {layer: frozenset(holders) for layer, holders in nodes.items()}


def _computing_ranks(plan: Plan) -> Sequence[Sequence[int]]:
    """The ranks that compute each layer, ascending, as plan.holders has them."""
    ranks: list[list[int]] = [[] for _ in range(plan.num_layers)]
    for rank in plan.ranks:
        for layer in plan.layers_by_rank[rank]:
            ranks[layer].append(rank)
    return ranks
