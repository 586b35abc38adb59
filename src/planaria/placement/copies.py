"""Which ranks keep copies of which layers in memory, for a plan.

Every rank keeps a copy of the layers that it holds in its own node's memory. Of each layer there
are k - 1 further copies, which one of its holders sends, to nodes that do not compute it where
there are any: a pipeline's nodes have replicas in other pipelines, and a copy there would be lost
with them. Which nodes those are follows the placement of copies of nodes (placement/placement.py),
as far as it allows that; so what a node sends goes to as few others as possible. Nodes that may
fail together with holders come last.

Source: DESIGN 6 (checkpoints); Gemini (SOSP '23), section 4.
Differs: Gemini has no replicas, so each of its machines sends all that it has; here one of several
holders sends a layer, the one that has least to send by then.
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
    """The further copies of all layers, ascending. O(layers * nodes).

    There are fewer than copies - 1 where nodes that hold a layer are all that there are.

    Args:
        copies: k, the sender's own included.
        placement: of as many nodes as the plan has, by their places in plan.nodes.
        layer_bytes: of each layer's state.
        domains: nodes that may fail together; copies are outside of those of the layer's holders,
            and of other copies, where that can be.
    """
    per_node = plan.pipelines[0].template.devices_per_node
    preferred = {
        node: frozenset(plan.nodes[place] for place in places[1:])
        for node, places in zip(plan.nodes, placement.holders, strict=True)
    }
    domain_of = {node: index for index, nodes in enumerate(domains) for node in nodes}
    holders, sources = _holding_nodes(plan), _computing_ranks(plan)
    sent: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    by_kept = [(0, node) for node in plan.nodes]
    found: dict[int, LayerCopy] = {}
    for layer in sorted(range(plan.num_layers), key=lambda n: (-layer_bytes[n], n)):
        source = min(sources[layer], key=lambda rank: (sent[rank], rank))
        first = preferred[source // per_node] - holders[layer]
        # Of those that the placement does not tell the one that keeps least.
        others = (n for _, n in by_kept if n not in first and n not in holders[layer])
        chosen = _apart(
            chain(sorted(first, key=lambda n: (kept[n], n)), others),
            number=min(copies - 1, len(plan.nodes) - len(holders[layer])),
            struck={domain_of[n] for n in holders[layer] if n in domain_of},
            domain_of=domain_of,
        )
        for target in chosen:
            sent[source] += layer_bytes[layer]
            by_kept.remove((kept[target], target))
            kept[target] += layer_bytes[layer]
            insort(by_kept, (kept[target], target))
        targets = tuple(target * per_node + source % per_node for target in chosen)
        found[layer] = LayerCopy(layer, source, targets)
    return tuple(found[layer] for layer in range(plan.num_layers))


def _apart(
    nodes: Iterable[int], *, number: int, struck: set[int], domain_of: Mapping[int, int]
) -> list[int]:
    """The first so many of no domain that is struck or that another one is in, and of the others
    where those are too few."""
    chosen, others = list[int](), list[int]()
    for node in nodes:
        if len(chosen) == number:
            break
        if node not in domain_of:
            chosen.append(node)
        elif domain_of[node] not in struck:
            chosen.append(node)
            struck.add(domain_of[node])
        else:
            others.append(node)
    return chosen + others[: number - len(chosen)]


def shard_copies(nodes: Sequence[str], copies: int) -> tuple[LayerCopy, ...]:
    """Of each rank's shard, which are as many as there are ranks: it is kept by ranks of the nodes
    behind its own, place by place, on as many other nodes as there are if those are too few.

    Args:
        nodes: of each rank its node.
        copies: of each shard, its own node's included.
    """
    names = list(dict.fromkeys(nodes))
    places = {node: [rank for rank, at in enumerate(nodes) if at == node] for node in names}
    found = []
    for rank, node in enumerate(nodes):
        place, targets = places[node].index(rank), []
        for step in range(1, min(copies, len(names))):
            there = places[names[(names.index(node) + step) % len(names)]]
            targets.append(there[place % len(there)])
        found.append(LayerCopy(rank, rank, tuple(targets)))
    return tuple(found)


def keeping_places(plan: Plan, copies: Iterable[LayerCopy]) -> tuple[frozenset[int], ...]:
    """Of each layer the nodes that have it or keep one of these copies, by their places in
    plan.nodes."""
    per_node = plan.pipelines[0].template.devices_per_node
    place = {node: index for index, node in enumerate(plan.nodes)}
    held = _holding_nodes(plan)
    nodes = [{place[node] for node in held[layer]} for layer in range(plan.num_layers)]
    for copy in copies:
        nodes[copy.layer].update(place[target // per_node] for target in copy.targets)
    return tuple(map(frozenset, nodes))


def _holding_nodes(plan: Plan) -> Mapping[int, frozenset[int]]:
    """By layer the nodes that have it, be it to compute it or not."""
    per_node = plan.pipelines[0].template.devices_per_node
    nodes: dict[int, set[int]] = {layer: set() for layer in range(plan.num_layers)}
    for rank, layers in plan.held_by_rank.items():
        for layer in layers:
            nodes[layer].add(rank // per_node)
    return {layer: frozenset(those) for layer, those in nodes.items()}


def _computing_ranks(plan: Plan) -> Sequence[Sequence[int]]:
    """By layer its plan.holders."""
    ranks: list[list[int]] = [[] for _ in range(plan.num_layers)]
    for rank in plan.ranks:
        for layer in plan.layers_by_rank[rank]:
            ranks[layer].append(rank)
    return ranks
