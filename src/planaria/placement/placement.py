"""Placements: which nodes keep copies of which node's state.

N is the number of nodes, k the number of copies of each state, the node's own included.

    group     nodes 0 .. k-1 keep each other's states, so do nodes k .. 2k-1, ..; k must divide N
    ring      nodes i, i+1, .. i+k-1 keep the state of node i
    mixed     groups of k nodes; the last group also has the N mod k remaining nodes and is a ring
    optimised what placement/spread.py finds for nodes that differ, or that fail together

Each node keeps its own state, which costs no network traffic, and k - 1 other nodes keep a copy.

Source: Gemini (SOSP '23), section 4, algorithm 1.
Differs: the loop of algorithm 1 is read as a loop over all g groups, as the paper's text says, and
counts from 0. N < k, for which the algorithm is not defined, is refused here. Theorem 1 says that
`mixed` is optimal where k divides N; that holds when k nodes are lost. With four nodes, two copies
and three lost nodes it is better that all nodes keep a copy at node 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

from planaria.errors import ConfigError
from planaria.placement.survival import group_survivals, mixed_survivals, ring_survivals

PaperStrategy = Literal["mixed", "group", "ring"]
Strategy = Literal["mixed", "group", "ring", "optimised"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes that keep each node's state; the node itself is the first."""

    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for node, nodes in enumerate(self.holders):
            assert nodes[0] == node
            assert len(set(nodes)) == len(nodes)

    @property
    def num_kept(self) -> tuple[int, ...]:
        """How many states each node keeps, its own included."""
        counts = [0] * len(self.holders)
        for nodes in self.holders:
            for node in nodes:
                counts[node] += 1
        return tuple(counts)


def paper_placement(num_nodes: int, copies: int, strategy: PaperStrategy) -> Placement:
    """The placement of a strategy: groups, a ring, or both.

    Raises:
        ConfigError: there are fewer nodes than copies, or `copies` does not divide the number of
            nodes though the strategy is "group".
    """
    check_copies(num_nodes, copies)
    if strategy == "group" and num_nodes % copies:
        remedy = f"with --strategy group it must divide the {num_nodes} nodes; use --strategy mixed"
        raise ConfigError("copies", copies, remedy)
    if strategy == "ring":
        return _placement(num_nodes, [range(num_nodes)], copies)
    num_groups = num_nodes // copies
    bounds = [group * copies for group in range(num_groups)]
    ends = [*bounds[1:], num_nodes]
    return _placement(
        num_nodes, [range(*bound) for bound in zip(bounds, ends, strict=True)], copies
    )


def check_copies(num_nodes: int, copies: int) -> None:
    """Raises ConfigError if `num_nodes` nodes cannot keep `copies` copies of a state."""
    if not 1 <= copies <= num_nodes:
        remedy = (
            f"it must be from 1 to the number of nodes, {num_nodes}, because a node keeps one copy"
        )
        raise ConfigError("copies", copies, remedy)


def paper_probability(
    num_nodes: int, copies: int, strategy: PaperStrategy, *, num_lost: int
) -> float:
    """The exact probability that no state is lost if `num_lost` nodes are, all sets equally likely.

    For groups and copies <= num_lost < 2 * copies this is corollary 1 of Gemini.
    """
    survival_counts = {"mixed": mixed_survivals, "group": group_survivals, "ring": ring_survivals}
    return survival_counts[strategy](num_nodes, copies, num_lost) / comb(num_nodes, num_lost)


def _placement(num_nodes: int, groups: Sequence[Sequence[int]], copies: int) -> Placement:
    """The placement in which each group is a ring; in a ring of `copies` nodes, all keep all."""
    holders: dict[int, tuple[int, ...]] = {}
    for group in groups:
        for index, node in enumerate(group):
            holders[node] = tuple(group[(index + step) % len(group)] for step in range(copies))
    return Placement(tuple(holders[node] for node in range(num_nodes)))
