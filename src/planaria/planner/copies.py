"""Which ranks keep copies of which layers in memory, for a plan.

Every rank keeps a copy of the layers that it holds in its own node's memory. Of each layer there
are k - 1 further copies, which one of its holders sends, to nodes that do not compute it where
there are any: a pipeline's nodes have replicas in other pipelines, and a copy there would be lost
with them. Which nodes those are follows the placement of copies of nodes (planner/placement.py), as
far as it allows that; so what a node sends goes to as few others as possible. Nodes that may fail
together with holders come last.

Source: DESIGN 6 (checkpoints); Gemini (SOSP '23), section 4.
Differs: Gemini has no replicas, so each of its machines sends all that it has; here one of several
holders sends a layer, the one that has least to send by then.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan
from planaria.planner.placement import Placement


def layer_copies(
    plan: Plan,
    *,
    copies: int,
    placement: Placement | None,
    layer_bytes: Sequence[int],
    domains: Sequence[Collection[int]] = (),
) -> tuple[LayerCopy, ...]:
    """The further copies of all layers, ascending. O(layers * nodes * log nodes).

    There are fewer than copies - 1 where nodes that hold a layer are all that there are.

    Args:
        copies: k, the sender's own included.
        placement: of as many nodes as the plan has, by their places in plan.nodes; None: copies
            are wherever least is kept.
        layer_bytes: of each layer's state.
        domains: nodes that may fail together; copies are outside of those of the layer's holders,
            and of other copies, where that can be.
    """
    per_node = plan.pipelines[0].template.devices_per_node
    preferred: dict[int, tuple[int, ...]] = {}
    if placement is not None:
        assert len(placement.holders) == len(plan.nodes)
        preferred = {
            node: tuple(plan.nodes[place] for place in places[1:])
            for node, places in zip(plan.nodes, placement.holders, strict=True)
        }
    domain_of = {node: index for index, nodes in enumerate(domains) for node in nodes}
    holders = _holding_nodes(plan)
    sent: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    found: dict[int, LayerCopy] = {}
    for layer in sorted(range(plan.num_layers), key=lambda n: (-layer_bytes[n], n)):
        without = [node for node in plan.nodes if node not in holders[layer]]
        source = min(plan.holders(layer), key=lambda rank: (sent[rank], rank))
        node = source // per_node
        # Of those that the placement does not tell the one that keeps least.
        without.sort(key=lambda n: (n not in preferred.get(node, ()), kept[n], n))
        chosen: list[int] = []
        for _ in range(min(copies - 1, len(without))):
            struck = {domain_of.get(n) for n in (*holders[layer], *chosen)} - {None}
            best = min(without, key=lambda n: domain_of.get(n) in struck)
            without.remove(best)
            chosen.append(best)
        for target in chosen:
            sent[source] += layer_bytes[layer]
            kept[target] += layer_bytes[layer]
        targets = tuple(target * per_node + source % per_node for target in chosen)
        found[layer] = LayerCopy(layer, source, targets)
    return tuple(found[layer] for layer in range(plan.num_layers))


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


def _holding_nodes(plan: Plan) -> Mapping[int, frozenset[int]]:
    """By layer the nodes that have it, be it to compute it or not."""
    per_node = plan.pipelines[0].template.devices_per_node
    nodes: dict[int, set[int]] = {layer: set() for layer in range(plan.num_layers)}
    for rank, layers in plan.held_by_rank.items():
        for layer in layers:
            nodes[layer].add(rank // per_node)
    return {layer: frozenset(those) for layer, those in nodes.items()}
