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
from heapq import heappop, heappush
from math import comb
from operator import mul
from typing import Final

import numpy as np

STATES_MAX: Final = 1 << 14  # 1,000 nodes in a ring of 3 have 9.
WAYS_MAX: Final = 1 << 21  # States of all nodes, of those that are counted in a second or two.
NUM_DRAWS: Final = 100_000
_CELLS_MAX: Final = 1 << 24  # Draws times nodes; of more than 167 nodes there are fewer draws.
NODE_FAILURE: Final = 0.01  # Of a node by itself, where nobody tells.
DOMAIN_FAILURE: Final = 0.001  # Of a failure domain with all its nodes.
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
    by_first: defaultdict[int, list[Holders]] = defaultdict(list)
    distinct = {frozenset(nodes) for nodes in kept_by}
    for holders in sorted(distinct, key=lambda one: (len(one), sorted(one))):
        if not any(smaller <= holders for node in holders for smaller in by_first[node]):
            found.append(holders)
            by_first[min(holders)].append(holders)
    return tuple(found)


def survival_by_lost(
    num_nodes: int, kept_by: Iterable[Collection[int]], *, most_lost: int, rng: np.random.Generator
) -> tuple[Estimate, ...]:
    """That nothing is lost when 0, 1, .. most_lost nodes are, any of them alike.

    Args:
        kept_by: the nodes that keep each piece.
        rng: for what cannot be counted.
    """
    kept = minimal(kept_by)
    states_max = min(STATES_MAX, WAYS_MAX // num_nodes)
    try:
        numbers = survivals(num_nodes, kept, most_lost=most_lost, states_max=states_max)
    except TooManyStatesError:
        return _drawn(num_nodes, kept, most_lost=most_lost, rng=rng)
    return tuple(Estimate(number / comb(num_nodes, lost)) for lost, number in enumerate(numbers))


# -- counted --------------------------------------------------------------------------------------


def survivals(
    num_nodes: int,
    kept_by: Iterable[Collection[int]],
    *,
    most_lost: int | None = None,
    states_max: int = STATES_MAX,
) -> tuple[int, ...]:
    """Of all sets of 0, 1, .. most_lost lost nodes, how many lose nothing.

    O(nodes * most_lost * states) numbers of as many digits as there are nodes.

    Args:
        most_lost: all nodes if not given; the fewer, the fewer states there are.

    Raises:
        TooManyStatesError: there are more than states_max.
    """
    most = num_nodes if most_lost is None else most_lost
    digits = num_nodes + 1  # No number of sets is longer, so that one whole number has them all.
    fates = ((1, False, 0), (1 << digits, True, 0))
    kept = minimal(nodes for nodes in kept_by if len(nodes) <= most)
    shown = (1 << digits * (most + 1)) - 1
    order = _in_order(num_nodes, kept)
    total, _ = _totals(
        order,
        kept,
        lambda _node, _down: fates,
        times=lambda one, other: int(one) if other == 1 else int(one) << digits & shown,
        states_max=states_max,
    )
    return tuple(int(total) >> (digits * n) & ((1 << digits) - 1) for n in range(most + 1))


def survival_under(
    failures: Failures, kept_by: Iterable[Collection[int]], *, states_max: int = STATES_MAX
) -> float:
    """The probability that nothing is lost.

    Raises:
        TooManyStatesError: there are more than states_max.
    """
    return _under(failures, minimal(kept_by), states_max=states_max)[0]


def loss_under(
    failures: Failures, kept_by: Iterable[Collection[int]], *, states_max: int = STATES_MAX
) -> float:
    """The probability that something is lost: a sum of positive terms, so that it has almost all
    of its digits also where it is far less than what a survival is rounded to.

    Raises:
        TooManyStatesError: there are more than states_max.
    """
    return _under(failures, minimal(kept_by), states_max=states_max)[1]


def _under(failures: Failures, kept: Sequence[Holders], *, states_max: int) -> tuple[float, float]:
    """How likely nothing is lost, and how likely something is."""
    domains = tuple(failures.domains)
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

    survives, loses = _totals(order, kept, fates, times=mul, states_max=states_max)
    return float(survives), float(loses)


def _totals(
    order: Sequence[int],
    kept: Sequence[Holders],
    fates: Callable[[int, int], Iterable[_Fate]],
    *,
    times: Callable[[float, float], float],
    states_max: int,
) -> tuple[float, float]:
    """The sum over all ways in which nothing is lost of the product of what they multiply by; and
    over those in which something is, each as far as the node with which it is."""
    place = {node: index for index, node in enumerate(order)}
    begins, ends, keeps = (defaultdict[int, int](int) for _ in range(3))
    for index, holders in enumerate(kept):
        begins[min(holders, key=place.__getitem__)] |= 1 << index
        ends[max(holders, key=place.__getitem__)] |= 1 << index
        for node in holders:
            keeps[node] |= 1 << index
    # By the pieces that are not saved so far, and the domains that are down.
    totals: dict[tuple[int, int], float] = {(0, 0): 1}
    lost: float = 0
    for node in order:
        after: defaultdict[tuple[int, int], float] = defaultdict(int)
        for (unsaved, down), total in totals.items():
            for factor, is_lost, down_after in fates(node, down):
                left = unsaved | begins[node] if is_lost else unsaved & ~keeps[node]
                product = times(total, factor)
                if left & ends[node]:
                    lost += product
                elif product:
                    after[left, down_after] += product
        totals = after
        if len(totals) > states_max:
            raise TooManyStatesError(f"{len(totals)} ways to go on after node {node}")
    return sum(totals.values()), lost


def _in_order(num_nodes: int, groups: Sequence[Holders]) -> list[int]:
    """All nodes, those of groups that have begun before others, so that few are open at a time."""
    of_node: dict[int, list[int]] = {node: [] for node in range(num_nodes)}
    for index, group in enumerate(groups):
        for node in group:
            of_node[node].append(index)
    missing = [set(group) for group in groups]
    # Of each node how many groups it would begin, less those that it would end.
    opens = [sum(len(groups[index]) > 1 for index in of_node[node]) for node in range(num_nodes)]
    near: list[tuple[int, int]] = []  # What is no longer so is passed over.
    left = dict.fromkeys(range(num_nodes))
    order: list[int] = []
    while left:
        node = next(iter(left))
        while near:
            opened, first = heappop(near)
            if first in left and opened == opens[first]:
                node = first
                break
        del left[node]
        order.append(node)
        for index in of_node[node]:
            is_new = len(missing[index]) == len(groups[index])
            missing[index].discard(node)
            if is_new or len(missing[index]) == 1:
                for other in missing[index]:
                    opens[other] -= is_new + (len(missing[index]) == 1)
                    heappush(near, (opens[other], other))
    return order


# -- drawn ----------------------------------------------------------------------------------------


def _drawn(
    num_nodes: int, kept: Sequence[Holders], *, most_lost: int, rng: np.random.Generator
) -> tuple[Estimate, ...]:
    """The shares of drawn losses that lose nothing; their errors are never 0, whatever was drawn,
    but where no piece is kept by as few nodes as are lost.

    A draw is an order in which nodes are lost, so it serves for every number of them.
    """
    num_draws = max(1, min(NUM_DRAWS, _CELLS_MAX // num_nodes))
    at_once = max(1, _CELLS_AT_ONCE // num_nodes)
    num_losing = np.zeros(num_nodes + 1, dtype=np.int64)  # By how many are lost when something is.
    for begin in range(0, num_draws, at_once):
        number = min(at_once, num_draws - begin)
        ranks = rng.random((number, num_nodes)).argsort(axis=1).argsort(axis=1)
        first = np.full(number, num_nodes)
        for holders in kept:
            np.minimum(first, ranks[:, sorted(holders)].max(axis=1) + 1, out=first)
        num_losing += np.bincount(first, minlength=num_nodes + 1)
    num_alive = num_draws - num_losing.cumsum()[: most_lost + 1]
    shares = (num_alive + 1) / (num_draws + 2)
    errors = np.sqrt(shares * (1.0 - shares) / num_draws)
    errors[: min(map(len, kept), default=num_nodes + 1)] = 0.0
    return tuple(map(Estimate, (num_alive / num_draws).tolist(), errors.tolist()))


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
