"""What an agent decides about its node's lease, and about workers that stand still.

The lease is renewed by heartbeats that the coordinator answers, from the moment at which each was
sent. While it has run out nothing is written to disk; when it has been out for as long again, and
heartbeats go out unanswered, the node ends itself: others have taken its place. Time in which the
agent itself was stopped proves nothing against anybody, nor does time that the machine's host gave
to other machines while an action was under way: a processor that is taken away takes along whoever
computes on it, but not the agent.

Source: DESIGN 5 (epochs fence; stalled workers).
"""

from dataclasses import dataclass, replace
from math import inf

TICKS_PER_LEASE = 6  # Of an agent, and of the coordinator.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLease:
    """A node's lease, as its agent knows it.

    Attributes:
        end_s: until when the node is a member for sure.
        awake_since_s: since when the agent runs without having been stopped.
        ticked_s: when it last looked at its clock.
    """

    lease_s: float
    end_s: float
    awake_since_s: float
    ticked_s: float


def first_lease(lease_s: float, now_s: float) -> AgentLease:
    """The lease of a node that begins."""
    return AgentLease(lease_s=lease_s, end_s=now_s + lease_s, awake_since_s=now_s, ticked_s=now_s)


def ticked(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease after a look at the clock, TICKS_PER_LEASE times a lease."""
    was_stopped = now_s - lease.ticked_s > lease.lease_s / 2
    awake_since_s = now_s if was_stopped else lease.awake_since_s
    return replace(lease, ticked_s=now_s, awake_since_s=awake_since_s)


def renewed(lease: AgentLease, sent_s: float) -> AgentLease:
    """The lease after a heartbeat of that moment was answered."""
    return replace(lease, end_s=sent_s + lease.lease_s)


def unconnected(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease while there is no coordinator: nobody is evicted, and the next grants a whole one.

    One that has run out stays so.
    """
    return renewed(lease, now_s) if now_s < lease.end_s else lease


def is_given_up(lease: AgentLease, now_s: float) -> bool:
    """Whether a connected coordinator has left heartbeats unanswered for too long."""
    return now_s > max(lease.end_s, lease.awake_since_s) + lease.lease_s


def watches_workers(lease: AgentLease, now_s: float) -> bool:
    """Whether what workers did, or did not, in the last lease can be held against them."""
    return now_s - lease.awake_since_s > lease.lease_s


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker's action, as its agent first saw it.

    Attributes:
        deadline_s: when it is late; infinite while the worker waits for others.
        stolen_s: what the host had taken from the busiest processor by then, ever.
    """

    deadline_s: float = inf
    stolen_s: float = 0.0


def watched(before: Watched, deadline_s: float, stolen_s: float) -> Watched:
    """The action after another look."""
    return before if before.deadline_s == deadline_s else Watched(deadline_s, stolen_s)


def is_late(action: Watched, now_s: float, stolen_s: float) -> bool:
    """Whether an action takes too long, without what the host has taken since it was first seen."""
    return now_s - (stolen_s - action.stolen_s) > action.deadline_s
