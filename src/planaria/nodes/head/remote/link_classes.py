"""Classes of links between the machines of a job, and which pairs of machines are measured.

Two nodes of one machine need no network. Machines of one failure domain are near to each other,
others are far. A machine that names no domain is near to all that name none.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import combinations

from planaria.core.machine_messages import MachineFacts


class LinkClass(StrEnum):
    """A class of links; the value is its name in a profile."""

    MACHINE = "intra_node"
    NEAR = "inter_node"
    FAR = "inter_domain"


def link_class(one: MachineFacts, other: MachineFacts) -> LinkClass:
    """The class of the link between two machines, or two agents of one machine."""
    if one.host == other.host:
        return LinkClass.MACHINE
    return LinkClass.NEAR if one.domain == other.domain else LinkClass.FAR


def first_pairs(machines: Sequence[MachineFacts]) -> dict[LinkClass, tuple[int, int]]:
    """The first two machines of each class of links that there is between machines, by index."""
    pairs: dict[LinkClass, tuple[int, int]] = {}
    for one, other in combinations(range(len(machines)), 2):
        kind = link_class(machines[one], machines[other])
        if kind is not LinkClass.MACHINE and kind not in pairs:
            pairs[kind] = one, other
    return pairs
