"""Which nodes a job trusts: those whose machine has not failed often of late.

A node whose machine failed more than once is distrusted until it has not failed for an hour. It
trains like any other, but holds no layer alone where that can be had (restorer/assignment.py), and
joins when nodes that failed less have joined.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from planaria.coordinator.state import JobState
from planaria.core.cluster import Node

FORGIVEN_S: Final = 3600.0  # A machine that has not failed for so long may as well never have.
DISTRUSTED_MIN: Final = 2  # Failures. The first may strike any machine.


def num_failures(state: JobState, node: int, now_s: float) -> int:
    """How often the machine of a node has failed, as far as that is not forgiven."""
    count, last_s = state.failures.get(state.machines.get(node, ""), (0, 0.0))
    return 0 if now_s - last_s > FORGIVEN_S else count


def is_trusted(state: JobState, node: int, now_s: float) -> bool:
    """Whether layers may be left to this node alone."""
    return num_failures(state, node, now_s) < DISTRUSTED_MIN


def seen_node(state: JobState, node: int, held: Mapping[int, frozenset[int]], now_s: float) -> Node:
    """The node as policies see it, with what its ranks hold; nothing where that is not said."""
    layers = tuple(held.get(rank, frozenset()) for rank in state.ranks_of((node,)))
    return Node(node, layers, state.kind_of(node), is_trusted(state, node, now_s))


def trusted_first(state: JobState, nodes: Iterable[int], now_s: float) -> list[int]:
    """The nodes whose machines failed least first; of equals in the order given."""
    return sorted(nodes, key=lambda node: num_failures(state, node, now_s))


def with_failures(state: JobState, nodes: Iterable[int], now_s: float) -> JobState:
    """The state in which these nodes have failed now."""
    for node in nodes:
        machine = state.machines.get(node)
        if machine is not None:
            count = num_failures(state, node, now_s) + 1
            state = replace(state, failures={**state.failures, machine: (count, now_s)})
    return state
