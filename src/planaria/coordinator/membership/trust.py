"""Which nodes a job trusts: those whose machine has not failed often of late.

A node whose machine failed more than once is distrusted until the machine has not failed for an
hour. It trains like any other node, but is not the only holder of a layer if that can be avoided
(restorer/assignment.py), and joins after the candidates that failed less.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from planaria.coordinator.frozen import replace
from planaria.coordinator.state import JobState
from planaria.core.cluster import Node
from planaria.core.persistent_map import PersistentMap

FORGIVEN_S: Final = 3600.0  # A machine's failures are forgotten when the last is older than this.
DISTRUSTED_MIN: Final = 2  # Number of failures. A first failure may strike any machine.


def num_failures(state: JobState, node: int, now_s: float) -> int:
    """The number of failures of the node's machine; 0 if they count no more."""
    members = state.membership
    count, last_s = members.failures.get(members.machines.get(node, ""), (0, 0.0))
    return 0 if now_s - last_s > FORGIVEN_S else count


def is_trusted(state: JobState, node: int, now_s: float) -> bool:
    """Whether the node may be the only holder of a layer."""
    return num_failures(state, node, now_s) < DISTRUSTED_MIN


def node_for_policies(
    state: JobState, node: int, held: Mapping[int, frozenset[int]], now_s: float
) -> Node:
    """The node as policies see it.

    Args:
        held: layers that each rank holds; a rank without an entry holds none.
    """
    layers = tuple(held.get(rank, frozenset()) for rank in state.ranks_of((node,)))
    return Node(node, layers, state.kind_of(node), is_trusted(state, node, now_s))


def trusted_first(state: JobState, nodes: Iterable[int], now_s: float) -> list[int]:
    """The nodes, sorted by the failures of their machines, fewest first; ties keep their order."""
    return sorted(nodes, key=lambda node: num_failures(state, node, now_s))


def with_failures(state: JobState, nodes: Iterable[int], now_s: float) -> JobState:
    """The state in which the machines of these nodes have failed once more, now.

    Failures that do not count any more are dropped from it.
    """
    failures = {
        machine: (count, last_s)
        for machine, (count, last_s) in state.membership.failures.items()
        if now_s - last_s <= FORGIVEN_S
    }
    for node in nodes:
        machine = state.membership.machines.get(node)
        if machine is not None:
            count, _ = failures.get(machine, (0, 0.0))
            failures[machine] = count + 1, now_s
    return replace(state, membership=replace(state.membership, failures=failures))


def without_gone(state: JobState) -> JobState:
    """The state without the machines and domains of nodes that are out for good.

    A new coordinator does not know them either: the agents of such nodes are not admitted.
    """
    members, gone = state.membership, set(state.membership.gone)
    machines = {node: machine for node, machine in members.machines.items() if node not in gone}
    domains = {node: domain for node, domain in members.domains.items() if node not in gone}
    members = replace(members, machines=PersistentMap(machines), domains=PersistentMap(domains))
    return replace(state, membership=members)
