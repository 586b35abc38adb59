"""How likely it is that no piece of state is lost, given which nodes keep each.

A piece is lost when all nodes that keep it are. Nodes are looked at one after the other; of each
way in which those so far are alive or lost only that is remembered which matters for the rest: the
pieces that no node so far has saved, of which some nodes are still to come. For groups and rings
these are few, so thousands of nodes are counted exactly. Where there are too many, losses are drawn
and the estimate has an error.

Source: Gemini (SOSP '23), section 4 and corollary 1.
Differs: corollary 1 is exact for k <= f < 2k only, a bound beyond, and below 0 for large f; here
every f and every placement has its exact probability, for nodes that fail alike, on their own, or
together with all others of their failure domain. `group_survivals`, `ring_survivals` and
`mixed_survivals` are the same in closed form.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, sqrt
from typing import Final

import numpy as np

STATES_MAX: Final = 1 << 14  # 1,000 nodes in a ring of 3 have 9.
NUM_DRAWS: Final = 100_000
_CELLS_AT_ONCE: Final = 1 << 22

Holders = frozenset[int]
# What a node's fate multiplies by, whether it is lost, and the domains that are down after it.
_Fate = tuple[float, bool, int]


class TooManyStatesError(Exception):
    """When pieces are kept in so many ways that losses cannot be counted."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A probability.

    Attributes:
        error: its standard error, 0 if it is exact.
    """

    probability: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Failures:
    """What may be lost before what was lost is kept anew.

    Attributes:
        node: the probability of each node to fail by itself.
        domains: nodes that may fail together, such as those of a rack, and how likely they do; a
            node is in one at most.
    """

    node: tuple[float, ...]
    domains: Mapping[frozenset[int], float] = field(default_factory=dict)


def minimal(kept_by: Iterable[Collection[int]]) -> tuple[Holders, ...]:
    """Each set of nodes once, without those that are lost only if a smaller one is."""
    found: list[Holders] = []
    distinct = {frozenset(nodes) for nodes in kept_by}
    for holders in sorted(distinct, key=lambda one: (len(one), sorted(one))):
        if not any(smaller <= holders for smaller in found):
            found.append(holders)
    return tuple(found)


def survival_probability(
    num_nodes: int, kept_by: Iterable[Collection[int]], *, num_lost: int, rng: np.random.Generator
) -> Estimate:
    """That nothing is lost when so many nodes are, any of them alike.

    Args:
        kept_by: the nodes that keep each piece.
        rng: for what cannot be counted.
    """
    kept = minimal(kept_by)
    try:
        number = survivals(num_nodes, kept)[num_lost]
    except TooManyStatesError:
        return _drawn(num_nodes, kept, num_lost=num_lost, rng=rng)
    return Estimate(number / comb(num_nodes, num_lost))


# -- counted --------------------------------------------------------------------------------------


def survivals(num_nodes: int, kept_by: Iterable[Collection[int]]) -> tuple[int, ...]:
    """Of all sets of 0, 1, .. num_nodes lost nodes, how many lose nothing.

    O(nodes^2 * states) digits.

    Raises:
        TooManyStatesError: see STATES_MAX.
    """
    digits = num_nodes + 1  # No number of sets is longer, so that one whole number has them all.
    fates = ((1, False, 0), (1 << digits, True, 0))
    kept = minimal(kept_by)
    total = _total(_in_order(num_nodes, kept), kept, lambda _node, _down: fates)
    return tuple(int(total) >> (digits * n) & ((1 << digits) - 1) for n in range(num_nodes + 1))


def survival_under(failures: Failures, kept_by: Iterable[Collection[int]]) -> float:
    """The probability that nothing is lost.

    Raises:
        TooManyStatesError: see STATES_MAX.
    """
    kept, domains = minimal(kept_by), tuple(failures.domains)
    order = _in_order(len(failures.node), (*kept, *domains))
    place = {node: index for index, node in enumerate(order)}
    of_node = {node: index for index, domain in enumerate(domains) for node in domain}
    first = {min(domain, key=place.__getitem__) for domain in domains}
    last = {max(domain, key=place.__getitem__) for domain in domains}

    def fates(node: int, down: int) -> Iterator[_Fate]:
        alone = failures.node[node]
        bit = 1 << of_node[node] if node in of_node else 0
        together = (
            failures.domains[domains[of_node[node]]] if node in first else float(down & bit > 0)
        )
        after = 0 if node in last else bit
        yield together, True, down & ~bit | after
        yield (1.0 - together) * alone, True, down & ~bit
        yield (1.0 - together) * (1.0 - alone), False, down & ~bit

    return float(_total(order, kept, fates))


def _total(
    order: Sequence[int], kept: Sequence[Holders], fates: Callable[[int, int], Iterable[_Fate]]
) -> float:
    """The sum over all ways in which nothing is lost of the product of what they multiply by."""
    place = {node: index for index, node in enumerate(order)}
    begins, ends, keeps = (defaultdict[int, int](int) for _ in range(3))
    for index, holders in enumerate(kept):
        begins[min(holders, key=place.__getitem__)] |= 1 << index
        ends[max(holders, key=place.__getitem__)] |= 1 << index
        for node in holders:
            keeps[node] |= 1 << index
    # By the pieces that are not saved so far, and the domains that are down.
    totals: dict[tuple[int, int], float] = {(0, 0): 1}
    for node in order:
        after: defaultdict[tuple[int, int], float] = defaultdict(int)
        for (unsaved, down), total in totals.items():
            for factor, is_lost, down_after in fates(node, down):
                left = unsaved | begins[node] if is_lost else unsaved & ~keeps[node]
                if factor and not left & ends[node]:
                    after[left, down_after] += total * factor
        totals = after
        if len(totals) > STATES_MAX:
            raise TooManyStatesError(f"{len(totals)} ways to go on after node {node}")
    return sum(totals.values())


def _in_order(num_nodes: int, groups: Sequence[Holders]) -> list[int]:
    """All nodes, those of groups that have begun before others, so that few are open at a time."""
    of_node: dict[int, list[int]] = {node: [] for node in range(num_nodes)}
    for index, group in enumerate(groups):
        for node in group:
            of_node[node].append(index)
    missing = [set(group) for group in groups]
    order: list[int] = []
    near: set[int] = set()
    left = dict.fromkeys(range(num_nodes))

    def opened(node: int) -> tuple[int, int]:
        new = sum(len(missing[index]) == len(groups[index]) for index in of_node[node])
        done = sum(len(missing[index]) == 1 for index in of_node[node])
        return new - done, node

    while left:
        node = min(near, key=opened) if near else next(iter(left))
        del left[node]
        order.append(node)
        for index in of_node[node]:
            missing[index].discard(node)
            near |= missing[index]
        near.discard(node)
    return order


# -- drawn ----------------------------------------------------------------------------------------


def _drawn(
    num_nodes: int, kept: Sequence[Holders], *, num_lost: int, rng: np.random.Generator
) -> Estimate:
    """The share of drawn losses that lose nothing; its error is never 0, whatever was drawn."""
    num_alive, at_once = 0, max(1, _CELLS_AT_ONCE // num_nodes)
    for begin in range(0, NUM_DRAWS, at_once):
        number = min(at_once, NUM_DRAWS - begin)
        ranks = rng.random((number, num_nodes)).argsort(axis=1).argsort(axis=1)
        is_lost = ranks < num_lost
        loses = np.zeros(number, dtype=bool)
        for holders in kept:
            loses |= is_lost[:, sorted(holders)].all(axis=1)
        num_alive += number - int(loses.sum())
    share = (num_alive + 1) / (NUM_DRAWS + 2)
    return Estimate(num_alive / NUM_DRAWS, sqrt(share * (1.0 - share) / NUM_DRAWS))


# -- in closed form -------------------------------------------------------------------------------


def group_survivals(num_nodes: int, copies: int, num_lost: int) -> int:
    """Of all sets of so many lost nodes, how many lose nothing, where the nodes are in groups of as
    many as there are copies, each kept by all of its group.

    The coefficient of x^f in ((1 + x)^k - x^k)^(N / k), by inclusion and exclusion of groups that
    are lost whole.
    """
    assert num_nodes % copies == 0
    num_groups = num_nodes // copies
    return sum(
        (-1 if j % 2 else 1)
        * comb(num_groups, j)
        * comb(num_nodes - j * copies, num_lost - j * copies)
        for j in range(min(num_groups, num_lost // copies) + 1)
    )


def ring_survivals(num_nodes: int, copies: int, num_lost: int) -> int:
    """As above, where they are in a ring, each kept by itself and by those that follow.

    Cyclic words of n letters with z = n - f zeros and no run of k ones: n / z times the words that
    end in a zero, by inclusion and exclusion of runs.
    """
    assert 1 <= copies <= num_nodes
    zeros = num_nodes - num_lost
    if not zeros:
        return 0
    total = sum(
        (-1 if j % 2 else 1) * comb(zeros, j) * comb(num_nodes - 1 - j * copies, zeros - 1)
        for j in range(num_lost // copies + 1)
    )
    return num_nodes * total // zeros


def mixed_survivals(num_nodes: int, copies: int, num_lost: int) -> int:
    """As above, for groups of k nodes of which the last k and those that remain are a ring."""
    rest = copies + num_nodes % copies
    if rest == copies:
        return group_survivals(num_nodes, copies, num_lost)
    grouped = num_nodes - rest
    return sum(
        group_survivals(grouped, copies, num_lost - in_ring) * ring_survivals(rest, copies, in_ring)
        for in_ring in range(max(0, num_lost - grouped), min(rest, num_lost) + 1)
    )
