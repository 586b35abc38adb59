"""Places for copies of a plan's layers that lose a layer less often than Gemini's placement does.

A layer is lost if all its keepers are lost: the nodes that hold it, and its copy holders. The fewer
different sets of keepers there are, the less likely a loss is. Where several pipelines hold the
same layers, `mixed` has more sets than necessary: layers with the same holders have different copy
holders, and a layer with other holders could often have the same set of keepers, too.

So, starting from `mixed`, sets are given up one after the other, each if all its layers can move to
other sets: failures that lose a layer afterwards would have lost one before, too. The same is done
from copies that are packed into few sets from the beginning and, if there is only one pipeline,
from the placements with which placement/spread.py starts. Of the results that are no worse than
`mixed` for any number of lost nodes, the one of least risk is taken. No node keeps more than some
node does in `mixed`, and a layer that moves to another set is in no fewer failure domains.

Source: none; in Gemini (SOSP '23), section 4, each node holds a state that no other node holds.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

from planaria.core.copies import LayerCopy
from planaria.core.plan import Plan
from planaria.placement.layer_copies import keeping_places, layer_copies
from planaria.placement.placement import paper_placement
from planaria.placement.spread import all_lost, as_placement, starts
from planaria.placement.survival import (
    DOMAIN_FAILURE,
    NODE_FAILURE,
    Failures,
    Holders,
    TooManyStatesError,
    minimal,
    survival_under,
    survivals,
)

LOST_MAX: Final = 32  # Placements are compared with `mixed` for up to this many lost nodes.
# A placement with more states to count is not taken: all nodes wait until the copies are placed.
_STATES_MAX: Final = 64
_WAYS_MAX: Final = 1 << 13  # With few nodes more states are allowed: this number / nodes.

_Keepers = tuple[Holders, ...]  # All nodes that keep each layer: its holders and copy holders.


def optimised_copies(
    plan: Plan,
    *,
    copies: int,
    layer_bytes: Sequence[int],
    domains: Sequence[Collection[int]] = (),
) -> tuple[LayerCopy, ...]:
    """The further copies of all layers, as `layer_copies` returns them, with the least risk found.

    O(layers^2 + layers * nodes), and nodes * _STATES_MAX for what is counted.
    """
    num_nodes = len(plan.nodes)
    copies_with = partial(
        layer_copies, plan, copies=copies, layer_bytes=layer_bytes, domains=domains
    )
    mixed_copies = copies_with(placement=paper_placement(num_nodes, copies, "mixed"))
    layers, mixed = _layers(plan, mixed_copies, layer_bytes=layer_bytes, domains=domains)
    candidates = [_packed_keepers(layers)]
    if len(plan.pipelines) == 1:  # Only then a placement of nodes is one of their layers.
        candidates += [
            keeping_places(plan, copies_with(placement=as_placement(start)))
            for start in starts(num_nodes, copies, layers.failures)
        ]
    best, before = _merge_sets(layers, mixed), _survival_counts(layers, mixed)
    for start in dict.fromkeys(candidates):
        if start == mixed or not layers.fits(start):
            continue
        merged = _merge_sets(layers, start)
        if layers.risk(merged) < layers.risk(best) and _is_at_least_as_safe(layers, merged, before):
            best = merged
    return _copies(plan, mixed_copies, layers.holders, best)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of which copies are to be placed. Nodes are numbered by place in plan.nodes.

    Attributes:
        holders: nodes that hold each layer, and so keep it anyway.
        num_copies: number of copies of each layer on other nodes.
        num_bytes: bytes of each layer's state.
        free_bytes: bytes of copies that each node may keep.
        domain_of: index of each node's failure domain; a node that is in none has a negative index
            of its own.
        failures: failures of nodes and domains, with the default probabilities.
        loss_probability: function that returns the probability that all of some nodes are lost.
    """

    holders: tuple[Holders, ...]
    num_copies: tuple[int, ...]
    num_bytes: tuple[int, ...]
    free_bytes: tuple[int, ...]
    domain_of: tuple[int, ...]
    failures: Failures
    loss_probability: Callable[[Holders], float]

    def num_domains(self, nodes: Iterable[int]) -> int:
        """The number of different failure domains of these nodes."""
        return len({self.domain_of[node] for node in nodes})

    def loads(self, keepers: _Keepers) -> list[int]:
        """The bytes of the copies that each node keeps."""
        loads = [0] * len(self.domain_of)
        for nodes, holders, num_bytes in zip(keepers, self.holders, self.num_bytes, strict=True):
            for node in nodes - holders:
                loads[node] += num_bytes
        return loads

    def fits(self, keepers: _Keepers) -> bool:
        """Whether no node keeps more bytes of copies than it has room for."""
        return all(
            load <= free_bytes
            for load, free_bytes in zip(self.loads(keepers), self.free_bytes, strict=True)
        )

    def risk(self, keepers: _Keepers) -> float:
        """The sum of the probabilities that a set is lost, over the minimal sets of keepers."""
        return sum(map(self.loss_probability, minimal(keepers)))


# -- from a plan and back -------------------------------------------------------------------------


def _layers(
    plan: Plan,
    mixed_copies: Sequence[LayerCopy],
    *,
    layer_bytes: Sequence[int],
    domains: Sequence[Collection[int]],
) -> tuple[_Layers, _Keepers]:
    """The layers to be placed, and their keepers in `mixed`."""
    place = {node: index for index, node in enumerate(plan.nodes)}
    holders, mixed = keeping_places(plan, ()), keeping_places(plan, mixed_copies)
    domain_places = [frozenset(place[node] for node in nodes if node in place) for nodes in domains]
    domain_of = [-1 - index for index in place.values()]
    for index, nodes in enumerate(domain_places):
        for node in nodes:
            domain_of[node] = index
    failures = Failures(
        (NODE_FAILURE,) * len(place), {nodes: DOMAIN_FAILURE for nodes in domain_places if nodes}
    )
    layers = _Layers(
        holders=holders,
        num_copies=tuple(len(copy.targets) for copy in mixed_copies),
        num_bytes=tuple(layer_bytes[: plan.num_layers]),
        free_bytes=(),
        domain_of=tuple(domain_of),
        failures=failures,
        loss_probability=cache(partial(all_lost, failures)),
    )
    own_bytes, loads = [0] * len(place), layers.loads(mixed)
    for layer, nodes in enumerate(holders):
        for node in nodes:
            own_bytes[node] += layer_bytes[layer]
    max_bytes = max(own + load for own, load in zip(own_bytes, loads, strict=True))
    free_bytes = tuple(min(max(loads), max_bytes - own) for own in own_bytes)
    return replace(layers, free_bytes=free_bytes), mixed


def _copies(
    plan: Plan, like: Sequence[LayerCopy], holders: Sequence[Holders], keepers: _Keepers
) -> tuple[LayerCopy, ...]:
    """The copies with these keepers, sent by the same sources as in `like`.

    How much a source sends does not depend on where it sends it.
    """
    per_node = plan.devices_per_node
    return tuple(
        replace(
            copy,
            targets=tuple(
                plan.nodes[place] * per_node + copy.source % per_node
                for place in sorted(keepers[copy.layer] - holders[copy.layer])
            ),
        )
        for copy in like
    )


# -- fewer sets -----------------------------------------------------------------------------------


def _merge_sets(layers: _Layers, keepers: _Keepers) -> _Keepers:
    """The keepers after each set whose layers can all move to other sets has been given up.

    The sets that are most likely to be lost are tried first.
    """
    merged, loads = list(keepers), layers.loads(keepers)
    users: dict[Holders, list[int]] = {}
    for layer, nodes in enumerate(keepers):
        users.setdefault(nodes, []).append(layer)
    for nodes in sorted(users, key=lambda nodes: (-layers.loss_probability(nodes), sorted(nodes))):
        others = [other for other in users if other != nodes]
        moves = _moves(layers, merged, loads, moving=users[nodes], others=others)
        if moves is None:
            continue
        for layer, (other, new_keepers) in moves.items():
            _shift_load(loads, merged[layer], new_keepers, layers.num_bytes[layer])
            users[other].append(layer)
            merged[layer] = new_keepers
        del users[nodes]
    return tuple(merged)


def _moves(
    layers: _Layers,
    keepers: Sequence[Holders],
    loads: Sequence[int],
    *,
    moving: Sequence[int],
    others: Sequence[Holders],
) -> Mapping[int, tuple[Holders, Holders]] | None:
    """The set to which each of the layers `moving` can move and the layer's keepers then, keyed by
    layer; None if one of them cannot move."""
    loads_after = list(loads)
    moves: dict[int, tuple[Holders, Holders]] = {}
    for layer in sorted(moving, key=lambda layer: -layers.num_bytes[layer]):
        for other in others:
            new_keepers = _keepers_after_join(layers, layer, keepers[layer], other)
            if new_keepers is None or not _can_hold(
                layers, loads_after, layer, new_keepers - keepers[layer]
            ):
                continue
            _shift_load(loads_after, keepers[layer], new_keepers, layers.num_bytes[layer])
            moves[layer] = other, new_keepers
            break
        else:
            return None
    return moves


def _keepers_after_join(
    layers: _Layers, layer: int, nodes: Holders, other: Holders
) -> Holders | None:
    """The keepers of a layer that joins the set `other`: all of `other`, filled up with keepers
    from `nodes` to as many as before; None if the layer cannot join it.

    Args:
        layer: layer that moves.
        nodes: its keepers so far.
        other: set of keepers that it joins.
    """
    if not layers.holders[layer] <= other or len(other) > len(nodes):
        return None
    joined = other.union(sorted(nodes - other)[: len(nodes) - len(other)])
    return joined if layers.num_domains(joined) >= layers.num_domains(nodes) else None


def _can_hold(layers: _Layers, loads: Sequence[int], layer: int, nodes: Iterable[int]) -> bool:
    """Whether these nodes have room for a copy of the layer."""
    num_bytes = layers.num_bytes[layer]
    return all(loads[node] + num_bytes <= layers.free_bytes[node] for node in nodes)


def _shift_load(loads: list[int], before: Holders, after: Holders, num_bytes: int) -> None:
    for node in before - after:
        loads[node] -= num_bytes
    for node in after - before:
        loads[node] += num_bytes


def _packed_keepers(layers: _Layers) -> _Keepers:
    """The keepers if each layer, one after the other, gets a set that exists already if one fits,
    and else a new one."""
    num_bytes, loads = layers.num_bytes, [0] * len(layers.domain_of)
    of_holders: dict[Holders, list[int]] = {}
    for layer, nodes in enumerate(layers.holders):
        of_holders.setdefault(nodes, []).append(layer)
    num_domains = len(set(layers.domain_of))
    keepers_of, sets = dict[int, Holders](), list[Holders]()
    for holders, layers_there in sorted(
        of_holders.items(),
        key=lambda item: (-sum(num_bytes[n] for n in item[1]), sorted(item[0])),
    ):
        for layer in sorted(layers_there, key=lambda layer: -num_bytes[layer]):
            number = layers.num_copies[layer]
            wanted = min(layers.num_domains(holders) + number, num_domains)
            keepers = next(
                (
                    nodes
                    for nodes in sets
                    if holders <= nodes
                    and len(nodes) == len(holders) + number
                    and _can_hold(layers, loads, layer, nodes - holders)
                    and layers.num_domains(nodes) == wanted
                ),
                None,
            )
            if keepers is None:
                keepers = _new_set(layers, loads, layer)
                sets.append(keepers)
            _shift_load(loads, holders, keepers, num_bytes[layer])
            keepers_of[layer] = keepers
    return tuple(keepers_of[layer] for layer in range(len(layers.holders)))


def _new_set(layers: _Layers, loads: Sequence[int], layer: int) -> Holders:
    """A new set of keepers for a layer.

    Nodes are preferred that are in domains which the set lacks; of those, nodes with room; of
    those, nodes that hold a layer next to this one, so that the two layers may share the set.
    """
    keepers, num_bytes = layers.holders[layer], layers.num_bytes[layer]
    near = frozenset[int]().union(*layers.holders[max(0, layer - 1) : layer + 2])
    for _ in range(layers.num_copies[layer]):
        used_domains = {layers.domain_of[node] for node in keepers}
        keepers |= {
            min(
                (node for node in range(len(loads)) if node not in keepers),
                key=lambda node: (
                    layers.domain_of[node] in used_domains,
                    loads[node] + num_bytes > layers.free_bytes[node],
                    node not in near,
                    loads[node] - layers.free_bytes[node],
                    node,
                ),
            )
        }
    return keepers


# -- which is best --------------------------------------------------------------------------------


def _survival_counts(layers: _Layers, keepers: _Keepers) -> tuple[float, ...] | None:
    """The number of sets of 0, 1, .. lost nodes with which no layer is lost, followed, if there are
    failure domains, by the probability that none is lost; None if counting takes too long."""
    num_nodes = len(layers.domain_of)
    states_max = max(_STATES_MAX, _WAYS_MAX // num_nodes)
    try:
        numbers = survivals(
            num_nodes, keepers, most_lost=min(num_nodes, LOST_MAX), states_max=states_max
        )
        if not layers.failures.domains:
            return numbers
        return *numbers, survival_under(layers.failures, keepers, states_max=states_max)
    except TooManyStatesError:
        return None


def _is_at_least_as_safe(
    layers: _Layers, keepers: _Keepers, before: tuple[float, ...] | None
) -> bool:
    """Whether all layers survive at least as often with these keepers as `before` says; False if
    that takes too long to count."""
    after = None if before is None else _survival_counts(layers, keepers)
    if before is None or after is None:
        return False
    return all(
        number_after >= number_before
        for number_after, number_before in zip(after, before, strict=True)
    )
