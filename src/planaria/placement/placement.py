"""Which nodes keep copies of whose state.

    group     nodes 0 .. k-1 keep each other's, nodes k .. 2k-1 theirs, ..; k has to divide N
    ring      node i's state is kept by nodes i, i+1, .. i+k-1
    mixed     groups; the last one has the N mod k nodes that remain, too, and is a ring
    optimised what placement/spread.py finds for nodes that differ, or that fail together

Each node keeps its own state, which costs no network, and k - 1 others keep a copy of it.

Source: Gemini (SOSP '23), section 4, algorithm 1.
Differs: algorithm 1's loop is read as over all g groups, as its text says, and counts from 0; with
N < k it is not defined, which is refused here. Theorem 1 has `mixed` for optimal where k divides N;
that holds for k lost nodes. Of four nodes with two copies of which three are lost, all keeping one
at node 0 is better.
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
    """The nodes that keep each node's state, itself first."""

    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for node, nodes in enumerate(self.holders):
            assert nodes[0] == node
            assert len(set(nodes)) == len(nodes)

    @property
    def num_kept(self) -> tuple[int, ...]:
        """Of each node how many states it keeps, its own included."""
        counts = [0] * len(self.holders)
        for nodes in self.holders:
            for node in nodes:
                counts[node] += 1
        return tuple(counts)


def paper_placement(num_nodes: int, copies: int, strategy: PaperStrategy) -> Placement:
    """Groups, a ring, or both.

    Raises:
        ConfigError: there are fewer nodes than copies, or groups do not come out even.
    """
    check_copies(num_nodes, copies)
    if strategy == "group" and num_nodes % copies:
        remedy = f"has to divide {num_nodes} nodes with --strategy group; use mixed"
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
    """Raises ConfigError where a state cannot have so many copies."""
    if not 1 <= copies <= num_nodes:
        remedy = f"has to be from 1 to the number of nodes, {num_nodes}: a node keeps one copy"
        raise ConfigError("copies", copies, remedy)


def paper_probability(
    num_nodes: int, copies: int, strategy: PaperStrategy, *, num_lost: int
) -> float:
    """That no state is lost when so many nodes are, any of them alike; exact.

    For k <= f < 2k and groups this is corollary 1.
    """
    found = {"mixed": mixed_survivals, "group": group_survivals, "ring": ring_survivals}
    return found[strategy](num_nodes, copies, num_lost) / comb(num_nodes, num_lost)


def _placement(num_nodes: int, groups: Sequence[Sequence[int]], copies: int) -> Placement:
    """Each group a ring; one of as many nodes as copies is one in which all keep all."""
    holders: dict[int, tuple[int, ...]] = {}
    for group in groups:
        for index, node in enumerate(group):
            holders[node] = tuple(group[(index + step) % len(group)] for step in range(copies))
    return Placement(tuple(holders[node] for node in range(num_nodes)))
