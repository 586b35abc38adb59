"""Nodes that wait: to become members, or to leave."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that is there and no member; it waits to be taken.

    Attributes:
        not_before_s: machines that failed often are taken back later.
    """

    machine: str
    not_before_s: float


@dataclass(frozen=True, slots=True)
class Leave:
    """A node is to leave in peace.

    Attributes:
        kind: why: drain or preempt.
        until_s: as long as this it can be kept for others that are about to join.
    """

    kind: str
    until_s: float
