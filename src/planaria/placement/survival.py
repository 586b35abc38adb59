"""How likely it is that no piece of state is lost, given which nodes keep each piece.

A piece is lost if all nodes that keep it are lost. The exact count is a dynamic program over the
nodes, one after the other. Its states are what matters for the remaining nodes: the pieces of which
some keeping nodes were looked at, all of them lost, and some are still to come. Groups and rings
have few such states, so thousands of nodes are counted exactly. Where there are too many states,
losses are sampled and the estimate has an error.

Source: Gemini (SOSP '23), section 4 and corollary 1.
Differs: corollary 1 is exact for k <= f < 2k only, a bound beyond, and below 0 for large f. Here
the probability is exact for every number f of lost nodes and every placement, whether all nodes are
equally likely to fail, each has its own probability, or nodes fail together with their failure
domain. `group_survivals`, `ring_survivals` and `mixed_survivals` are the same counts in closed
form.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import comb
from operator import mul
from typing import Final

import numpy as np

STATES_MAX: Final = 1 << 14  # A ring of 1,000 nodes with 3 copies has 9 states.
WAYS_MAX: Final = 1 << 21  # Nodes times states that can be counted in a second or two.
NUM_DRAWS: Final = 100_000
_CELLS_MAX: Final = 1 << 24  # Samples times nodes; beyond 167 nodes there are fewer samples.
NODE_FAILURE: Final = 0.01  # Default probability that a node fails by itself.
DOMAIN_FAILURE: Final = 0.001  # Default probability that a failure domain fails as a whole.
_CELLS_AT_ONCE: Final = 1 << 22

Holders = frozenset[int]
# The factor of a node's fate, whether the node is lost, and the domains (bits) down after it.
_Fate = tuple[float, bool, int]


class TooManyStatesError(Exception):
    """Raised when an exact count needs more states than are allowed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A probability and how well it is known.

    Attributes:
        error: standard error of the probability, 0 if it is exact.
    """

    probability: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures that may happen before lost copies are made again.

    Attributes:
        node: probability of each node that it fails by itself.
        domains: probability that all nodes of a failure domain, such as a rack, fail together,
            keyed by the domain's nodes; a node is in at most one domain.
    """

    node: tuple[float, ...]
    domains: Mapping[frozenset[int], float] = field(default_factory=dict)


def minimal(kept_by: Iterable[Collection[int]]) -> tuple[Holders, ...]:
    """The distinct sets of nodes of which none contains another one.

    A larger set is lost only if each set inside it is, so it adds nothing.
    """
    sets: list[Holders] = []
    by_first: defaultdict[int, list[Holders]] = defaultdict(list)
    distinct = {frozenset(nodes) for nodes in kept_by}
    for holders in sorted(distinct, key=lambda nodes: (len(nodes), sorted(nodes))):
        if not any(smaller <= holders for node in holders for smaller in by_first[node]):
            sets.append(holders)
            by_first[min(holders)].append(holders)
    return tuple(sets)


def survival_by_lost(
    num_nodes: int, kept_by: Iterable[Collection[int]], *, most_lost: int, rng: np.random.Generator
) -> tuple[Estimate, ...]:
    """The probabilities that no piece is lost if 0, 1, .. most_lost nodes are, each set of lost
    nodes equally likely.

    Args:
        kept_by: nodes that keep each piece.
        rng: source of the samples, for what is too large to count.
    """
    holder_sets = minimal(kept_by)
    states_max = min(STATES_MAX, WAYS_MAX // num_nodes)
    try:
        numbers = survivals(num_nodes, holder_sets, most_lost=most_lost, states_max=states_max)
    except TooManyStatesError:
        return _sampled_estimates(num_nodes, holder_sets, most_lost=most_lost, rng=rng)
    return tuple(Estimate(number / comb(num_nodes, lost)) for lost, number in enumerate(numbers))


# -- counted --------------------------------------------------------------------------------------


def survivals(
    num_nodes: int,
    kept_by: Iterable[Collection[int]],
    *,
    most_lost: int | None = None,
    states_max: int = STATES_MAX,
) -> tuple[int, ...]:
    """The number of sets of 0, 1, .. most_lost lost nodes with which no piece is lost.

    O(nodes * most_lost * states) numbers of as many binary digits as there are nodes.

    Args:
        kept_by: nodes that keep each piece.
        most_lost: largest number of lost nodes, all nodes by default; the smaller it is, the fewer
            states there are.
        states_max: upper bound on the states of the count.

    Raises:
        TooManyStatesError: there are more states than states_max.
    """
    max_lost = num_nodes if most_lost is None else most_lost
    # No count has more bits than this, so one integer holds the counts of all numbers of losses.
    digits = num_nodes + 1
    fates = ((1, False, 0), (1 << digits, True, 0))
    holder_sets = minimal(nodes for nodes in kept_by if len(nodes) <= max_lost)
    kept_bits = (1 << digits * (max_lost + 1)) - 1
    order = _node_order(num_nodes, holder_sets)
    total, _ = _totals(
        order,
        holder_sets,
        lambda _node, _down: fates,
        multiply=lambda weight, factor: (
            int(weight) if factor == 1 else int(weight) << digits & kept_bits
        ),
        states_max=states_max,
    )
    return tuple(int(total) >> (digits * n) & ((1 << digits) - 1) for n in range(max_lost + 1))


def survival_under(
    failures: Failures, kept_by: Iterable[Collection[int]], *, states_max: int = STATES_MAX
) -> float:
    """The probability that no piece is lost.

    Raises:
        TooManyStatesError: there are more states than states_max.
    """
    return _probabilities(failures, minimal(kept_by), states_max=states_max)[0]


def loss_under(
    failures: Failures, kept_by: Iterable[Collection[int]], *, states_max: int = STATES_MAX
) -> float:
    """The probability that some piece is lost.

    It is a sum of positive terms, so it is accurate also where it is far smaller than the rounding
    error of 1 - survival_under(..).

    Raises:
        TooManyStatesError: there are more states than states_max.
    """
    return _probabilities(failures, minimal(kept_by), states_max=states_max)[1]


def _probabilities(
    failures: Failures, holder_sets: Sequence[Holders], *, states_max: int
) -> tuple[float, float]:
    """The probability that no piece is lost, and the probability that some piece is."""
    domains = tuple(failures.domains)
    order = _node_order(len(failures.node), (*holder_sets, *domains))
    place = {node: index for index, node in enumerate(order)}
    domain_of = {node: index for index, domain in enumerate(domains) for node in domain}
    first = {min(domain, key=place.__getitem__) for domain in domains}
    last = {max(domain, key=place.__getitem__) for domain in domains}

    def fates(node: int, down: int) -> Iterator[_Fate]:
        alone = failures.node[node]
        bit = 1 << domain_of[node] if node in domain_of else 0
        together = (
            failures.domains[domains[domain_of[node]]] if node in first else float(down & bit > 0)
        )
        after = 0 if node in last else bit
        yield together, True, down & ~bit | after
        yield (1.0 - together) * alone, True, down & ~bit
        yield (1.0 - together) * (1.0 - alone), False, down & ~bit

    survives, loses = _totals(order, holder_sets, fates, multiply=mul, states_max=states_max)
    return float(survives), float(loses)


def _totals(
    order: Sequence[int],
    holder_sets: Sequence[Holders],
    fates: Callable[[int, int], Iterable[_Fate]],
    *,
    multiply: Callable[[float, float], float],
    states_max: int,
) -> tuple[float, float]:
    """The total weights of all outcomes without and with a lost piece.

    The weight of an outcome is the product of its nodes' factors. An outcome with a lost piece ends
    at the node with which the first piece is lost; later nodes do not count.

    Args:
        order: order in which the nodes are looked at.
        holder_sets: nodes that keep each piece.
        fates: function of a node and the domains that are down (bits), returns its possible fates.
        multiply: product of a weight and a factor.
        states_max: upper bound on the states.
    """
    place = {node: index for index, node in enumerate(order)}
    begins, ends, keeps = (defaultdict[int, int](int) for _ in range(3))
    for index, holders in enumerate(holder_sets):
        begins[min(holders, key=place.__getitem__)] |= 1 << index
        ends[max(holders, key=place.__getitem__)] |= 1 << index
        for node in holders:
            keeps[node] |= 1 << index
    # A state is the pieces that no live node keeps so far, and the domains that are down.
    totals: dict[tuple[int, int], float] = {(0, 0): 1}
    lost: float = 0
    for node in order:
        after: defaultdict[tuple[int, int], float] = defaultdict(int)
        for (unsaved, down), total in totals.items():
            for factor, is_lost, down_after in fates(node, down):
                unsaved_after = unsaved | begins[node] if is_lost else unsaved & ~keeps[node]
                product = multiply(total, factor)
                if unsaved_after & ends[node]:
                    lost += product
                elif product:
                    after[unsaved_after, down_after] += product
        totals = after
        if len(totals) > states_max:
            raise TooManyStatesError(f"{len(totals)} ways to go on after node {node}")
    return sum(totals.values()), lost


def _node_order(num_nodes: int, groups: Sequence[Holders]) -> list[int]:
    """All nodes, ordered so that few groups at a time have some but not all nodes placed."""
    groups_of: dict[int, list[int]] = {node: [] for node in range(num_nodes)}
    for index, group in enumerate(groups):
        for node in group:
            groups_of[node].append(index)
    missing = [set(group) for group in groups]
    # How many groups each node would begin, less how many it would end.
    opens = [sum(len(groups[index]) > 1 for index in groups_of[node]) for node in range(num_nodes)]
    candidates: list[tuple[int, int]] = []  # A heap; outdated entries are skipped.
    unplaced = dict.fromkeys(range(num_nodes))
    order: list[int] = []
    while unplaced:
        node = next(iter(unplaced))
        while candidates:
            num_opened, candidate = heappop(candidates)
            if candidate in unplaced and num_opened == opens[candidate]:
                node = candidate
                break
        del unplaced[node]
        order.append(node)
        for index in groups_of[node]:
            is_new = len(missing[index]) == len(groups[index])
            missing[index].discard(node)
            if is_new or len(missing[index]) == 1:
                for other in missing[index]:
                    opens[other] -= is_new + (len(missing[index]) == 1)
                    heappush(candidates, (opens[other], other))
    return order


# -- drawn ----------------------------------------------------------------------------------------


def _sampled_estimates(
    num_nodes: int, holder_sets: Sequence[Holders], *, most_lost: int, rng: np.random.Generator
) -> tuple[Estimate, ...]:
    """The shares of sampled losses with which no piece is lost, for 0, 1, .. most_lost lost nodes.

    An error is 0 only where fewer nodes are lost than keep any piece, never by chance. A sample is
    an order in which nodes are lost, so it serves for every number of lost nodes.
    """
    num_draws = max(1, min(NUM_DRAWS, _CELLS_MAX // num_nodes))
    samples_at_once = max(1, _CELLS_AT_ONCE // num_nodes)
    # Samples, by the number of lost nodes with which the first piece is lost.
    num_losing = np.zeros(num_nodes + 1, dtype=np.int64)
    for begin in range(0, num_draws, samples_at_once):
        number = min(samples_at_once, num_draws - begin)
        ranks = rng.random((number, num_nodes)).argsort(axis=1).argsort(axis=1)
        num_lost_at_first_loss = np.full(number, num_nodes)
        for holders in holder_sets:
            np.minimum(
                num_lost_at_first_loss,
                ranks[:, sorted(holders)].max(axis=1) + 1,
                out=num_lost_at_first_loss,
            )
        num_losing += np.bincount(num_lost_at_first_loss, minlength=num_nodes + 1)
    num_alive = num_draws - num_losing.cumsum()[: most_lost + 1]
    shares = (num_alive + 1) / (num_draws + 2)
    errors = np.sqrt(shares * (1.0 - shares) / num_draws)
    errors[: min(map(len, holder_sets), default=num_nodes + 1)] = 0.0
    return tuple(map(Estimate, (num_alive / num_draws).tolist(), errors.tolist()))


# -- in closed form -------------------------------------------------------------------------------


def group_survivals(num_nodes: int, copies: int, num_lost: int) -> int:
    """The number of sets of `num_lost` lost nodes with which no state is lost, for groups of
    `copies` nodes in which each state is kept by all nodes of its group.

    It is the coefficient of x^f in ((1 + x)^k - x^k)^(N / k), by inclusion and exclusion of groups
    that are lost as a whole.
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
    """The same number for a ring in which each state is kept by its own node and by those that
    follow.

    It is the number of cyclic words of n letters with z = n - f zeros and no run of k ones: n / z
    times the number of such words that end in a zero, by inclusion and exclusion of runs.
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
    """The same number for groups of k nodes; the last k and the remaining nodes are a ring."""
    num_in_ring = copies + num_nodes % copies
    if num_in_ring == copies:
        return group_survivals(num_nodes, copies, num_lost)
    grouped = num_nodes - num_in_ring
    return sum(
        group_survivals(grouped, copies, num_lost - in_ring)
        * ring_survivals(num_in_ring, copies, in_ring)
        for in_ring in range(max(0, num_lost - grouped), min(num_in_ring, num_lost) + 1)
    )
