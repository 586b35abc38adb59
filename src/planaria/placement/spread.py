"""A placement of copies for nodes that differ, that fail together, or that have spare memory.

The search minimises the probability that a state is lost, within what each node can keep and can
receive for each checkpoint. A state is lost if all nodes that keep it are lost. Simulated annealing
starts from several placements and reduces the sum of that probability over all different sets of
nodes that keep a state. A step replaces a copy holder, exchanges two copy holders, lets a node take
over the copy holders of another one, or swaps two nodes. Of the starts and the best placements that
the walks met, the one with the least exact probability is taken, so it is never worse than `mixed`
where `mixed` is within the limits.

Source: none; Gemini (SOSP '23), section 4, has nodes that are all alike.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, gcd, prod
from random import Random
from typing import Final

from planaria.errors import ConfigError
from planaria.placement.placement import Placement, check_copies, paper_placement
from planaria.placement.survival import Failures, TooManyStatesError, loss_under, minimal

_STEPS: Final = 20_000
# Temperatures, as shares of the risk. At first a step that adds this share is taken by chance 1/e.
_START_TEMPERATURE: Final = 0.3
_END_TEMPERATURE: Final = 1e-4
_COOLING: Final = _END_TEMPERATURE / _START_TEMPERATURE

Holders = frozenset[int]


@dataclass(frozen=True, slots=True)
class Limits:
    """The bytes that each node has, can keep and can receive.

    Attributes:
        state: bytes of each node's own state.
        memory: bytes that each node can keep, its own state included.
        receive: bytes that each node can receive for each checkpoint.
    """

    state: tuple[int, ...]
    memory: tuple[int, ...]
    receive: tuple[int, ...]


def even_limits(num_nodes: int, copies: int) -> Limits:
    """The limits of nodes that are alike, each of which can keep `copies` states of size 1."""
    return Limits((1,) * num_nodes, (copies,) * num_nodes, (copies - 1,) * num_nodes)


def optimised_placement(
    copies: int, *, failures: Failures, limits: Limits, seed: int = 0
) -> Placement:
    """The placement of least risk that the search finds.

    O(starts * 20,000 steps); a step looks only at what the nodes that it changes keep.

    Raises:
        ConfigError: there are fewer nodes than copies, or no placement is within the limits.
    """
    num_nodes = len(limits.state)
    check_copies(num_nodes, copies)
    rng = Random(seed)
    candidates: dict[frozenset[tuple[int, Holders]], tuple[Holders, ...]] = {}
    for start in starts(num_nodes, copies, failures):
        for holders in (start, _best_on_walk(_Walk(start, failures, limits), rng)):
            if not _Walk(holders, failures, limits).overflow:
                candidates[frozenset(enumerate(holders))] = holders
    if not candidates:
        missing = -sum(limits.memory) + copies * sum(limits.state)
        remedy = (
            "planaria found no way to keep so many copies within what each node can keep "
            "and receive"
        ) + (
            f"; the nodes lack {missing} bytes in all"
            if missing > 0
            else "; make fewer copies, or allow more"
        )
        raise ConfigError("copies", copies, remedy)
    best = min(candidates.values(), key=lambda holders: risk(failures, holders))
    return as_placement(best)


def as_placement(holders: Sequence[Holders]) -> Placement:
    """The placement with these holders of each node's state."""
    return Placement(tuple((node, *sorted(nodes - {node})) for node, nodes in enumerate(holders)))


def risk(failures: Failures, holders: Sequence[Collection[int]]) -> float:
    """The probability that some state is lost; its upper bound, the sum over all sets of holders,
    where an exact count needs too many states."""
    try:
        return loss_under(failures, holders)
    except TooManyStatesError:
        return sum(all_lost(failures, nodes) for nodes in minimal(holders))


def all_lost(failures: Failures, holders: Holders) -> float:
    """The probability that all of these nodes are lost."""
    probability, undomained = 1.0, set(holders)
    for domain, domain_probability in failures.domains.items():
        if members := domain & holders:
            all_alone = prod(failures.node[node] for node in members)
            probability *= domain_probability + (1.0 - domain_probability) * all_alone
            undomained -= members
    return probability * prod(failures.node[node] for node in undomained)


# -- where walks begin ----------------------------------------------------------------------------


def starts(num_nodes: int, copies: int, failures: Failures) -> Iterable[tuple[Holders, ...]]:
    """The placements from which walks start: each shape, with the nodes in ascending order and, if
    there are domains, in an order that keeps nodes of one domain apart."""
    shapes = [
        tuple(frozenset(nodes) for nodes in paper_placement(num_nodes, copies, "mixed").holders),
        _ring_of_blocks(num_nodes, copies),
        _overlapping_groups(num_nodes, copies),
    ]
    orders = [tuple(range(num_nodes))]
    if failures.domains:
        orders.append(_interleaved_order(num_nodes, failures))
    for order in orders:
        for shape in dict.fromkeys(shapes):
            renamed = {
                order[i]: frozenset(order[j] for j in nodes) for i, nodes in enumerate(shape)
            }
            yield tuple(renamed[node] for node in range(num_nodes))


def _ring_of_blocks(num_nodes: int, copies: int) -> tuple[Holders, ...]:
    """The copy holders in groups; the last nodes are a ring of blocks, and the nodes of a block
    share their copy holders."""
    rest = copies + num_nodes % copies
    block = gcd(copies, num_nodes % copies)
    first = num_nodes - rest
    if rest == copies:
        first = num_nodes
    holders = [
        frozenset(range(node - node % copies, node - node % copies + copies))
        for node in range(first)
    ]
    for index in range(num_nodes - first):
        begin = index - index % block
        holders.append(frozenset(first + (begin + step) % rest for step in range(copies)))
    return tuple(holders)


def _overlapping_groups(num_nodes: int, copies: int) -> tuple[Holders, ...]:
    """The copy holders in groups, the last of which shares nodes with the one before it.

    There are as few different sets as possible, but the shared nodes keep more than others.
    """
    return tuple(
        frozenset(range(begin, begin + copies))
        for node in range(num_nodes)
        for begin in (min(node - node % copies, num_nodes - copies),)
    )


def _interleaved_order(num_nodes: int, failures: Failures) -> tuple[int, ...]:
    """The nodes in an order that spreads the nodes of each domain evenly over it."""
    in_domains = frozenset[int]().union(*failures.domains)
    domains = [sorted(domain) for domain in failures.domains]
    domains += [[node] for node in range(num_nodes) if node not in in_domains]
    domains.sort(key=lambda domain: (-len(domain), domain))
    slots = [
        ((index + 0.5) / len(domain), number, node)
        for number, domain in enumerate(domains)
        for index, node in enumerate(domain)
    ]
    return tuple(node for _, _, node in sorted(slots))


# -- walks ----------------------------------------------------------------------------------------


class _Walk:
    """A placement that is changed step by step.

    Attributes:
        holders: nodes that keep each node's state.
        risk: sum, over the different sets of holders, of the probability that the set is lost.
        overflow: bytes by which nodes exceed their limits, summed over all nodes.
        kept_for: nodes whose states each node keeps, itself included.
    """

    def __init__(self, holders: Sequence[Holders], failures: Failures, limits: Limits) -> None:
        self.holders = list(holders)
        self.risk = 0.0
        self.overflow = 0
        self._failures = failures
        self._limits = limits
        self._numbers: dict[Holders, int] = {}
        self._lost: dict[Holders, float] = {}
        self._received = [0] * len(holders)
        self.kept_for: list[set[int]] = [set() for _ in holders]
        for node, nodes in enumerate(holders):
            self._add(node, nodes)

    def change(self, to: Mapping[int, Holders]) -> dict[int, Holders]:
        """Changes the holders of the nodes in `to`; returns the holders that they had before."""
        before = {node: self.holders[node] for node in to}
        for node, holders in to.items():
            self._remove(node)
            self._add(node, holders)
        return before

    def _add(self, node: int, holders: Holders) -> None:
        self.holders[node] = holders
        number = self._numbers.get(holders, 0)
        self._numbers[holders] = number + 1
        if not number:
            self.risk += self._all_lost(holders)
        for holder in holders:
            self.kept_for[holder].add(node)
            self._receive(holder, self._limits.state[node] if holder != node else 0)

    def _remove(self, node: int) -> None:
        holders = self.holders[node]
        self._numbers[holders] -= 1
        if not self._numbers[holders]:
            self.risk -= self._all_lost(holders)
        for holder in holders:
            self.kept_for[holder].discard(node)
            self._receive(holder, -self._limits.state[node] if holder != node else 0)

    def _receive(self, node: int, num_bytes: int) -> None:
        self.overflow -= self._excess_bytes(node)
        self._received[node] += num_bytes
        self.overflow += self._excess_bytes(node)

    def _excess_bytes(self, node: int) -> int:
        received = self._received[node]
        memory = received + self._limits.state[node] - self._limits.memory[node]
        return max(0, memory) + max(0, received - self._limits.receive[node])

    def _all_lost(self, holders: Holders) -> float:
        if holders not in self._lost:
            self._lost[holders] = all_lost(self._failures, holders)
        return self._lost[holders]


def _best_on_walk(walk: _Walk, rng: Random) -> tuple[Holders, ...]:
    """The best placement on a walk: the one of least overflow and, of equals, of least risk."""
    steps: tuple[Callable[[_Walk, Random], dict[int, Holders]], ...]
    steps = (_replace_holder, _exchange_holders, _adopt_holders, _swap_nodes)
    best, best_cost = tuple(walk.holders), (walk.overflow, walk.risk)
    risk = walk.risk
    for number in range(_STEPS):
        temperature = risk * _START_TEMPERATURE * _COOLING ** (number / _STEPS)
        cost = (walk.overflow, walk.risk)
        undo = walk.change(rng.choice(steps)(walk, rng))
        worse = walk.risk - cost[1]
        # The temperature is 0 where the product of very small probabilities is.
        is_kept = walk.overflow < cost[0] or (
            walk.overflow == cost[0]
            and (worse <= 0 or (temperature > 0 and rng.random() < exp(-worse / temperature)))
        )
        if not is_kept:
            walk.change(undo)
        elif (walk.overflow, walk.risk) < best_cost:
            best, best_cost = tuple(walk.holders), (walk.overflow, walk.risk)
    return best


def _replace_holder(walk: _Walk, rng: Random) -> dict[int, Holders]:
    """The step in which another node becomes a copy holder in place of one."""
    node, other = _random_pair(walk, rng)
    holders = walk.holders[node]
    given_up = sorted(holders - {node})
    if other in holders or not given_up:
        return {}
    return {node: holders - {rng.choice(given_up)} | {other}}


def _exchange_holders(walk: _Walk, rng: Random) -> dict[int, Holders]:
    """The step in which two nodes exchange one copy holder each."""
    node, other = _random_pair(walk, rng)
    node_holders, other_holders = walk.holders[node], walk.holders[other]
    from_node = sorted(node_holders - other_holders - {node})
    from_other = sorted(other_holders - node_holders - {other})
    if not from_node or not from_other:
        return {}
    given, taken = rng.choice(from_node), rng.choice(from_other)
    return {node: node_holders - {given} | {taken}, other: other_holders - {taken} | {given}}


def _adopt_holders(walk: _Walk, rng: Random) -> dict[int, Holders]:
    """The step in which a node takes over the holders of another node whose state it keeps."""
    node = rng.randrange(len(walk.holders))
    other = rng.choice(sorted(walk.kept_for[node]))
    return {node: walk.holders[other]}


def _swap_nodes(walk: _Walk, rng: Random) -> dict[int, Holders]:
    """The step in which two nodes swap places, both as owners of a state and as holders."""
    first, second = _random_pair(walk, rng)
    names = {first: second, second: first}
    return {
        names.get(node, node): frozenset(names.get(holder, holder) for holder in walk.holders[node])
        for node in walk.kept_for[first] | walk.kept_for[second]
    }


def _random_pair(walk: _Walk, rng: Random) -> tuple[int, int]:
    first = rng.randrange(len(walk.holders))
    return first, rng.randrange(len(walk.holders))
