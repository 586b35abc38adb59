"""Nodes that wait to become members, and nodes that wait to leave."""

from dataclasses import dataclass

from planaria.core.kinds import ChangeKind


@dataclass(frozen=True, slots=True)
class WaitingNode:
    """A node that has arrived and waits to become a member.

    Attributes:
        not_before_s: earliest time at which it is taken; later for machines that failed often.
        speed: speed of its machine relative to the job's profile, as far as it is known.
    """

    machine: str
    not_before_s: float
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """The request that a node leaves while training goes on.

    Attributes:
        kind: the reason, DRAIN or PREEMPT.
        until_s: time until which the node can be kept while others are about to join.
        is_unfit: whether nobody asked for it: the machine is unfit for a node.
    """

    kind: ChangeKind
    until_s: float
    is_unfit: bool = False
