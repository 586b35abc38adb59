"""The rules by which an agent judges its node's lease, and workers that stand still.

Each heartbeat that the coordinator answers renews the lease from the moment at which the heartbeat
was sent. While the lease has run out, nothing is written to disk. If another lease passes without
an answer, the node ends itself, because others have taken its place. Time in which the agent itself
was stopped counts neither against the coordinator nor against workers. CPU steal during an action
does not count against its worker: steal stops whoever computes on that processor, but not the
agent.

Source: docs/protocol.md, "Epochs fence" (Leases) and "Software failures".
"""

from dataclasses import dataclass, replace
from math import inf

TICKS_PER_LEASE = 6  # Looks at the clock per lease, by an agent and by the coordinator.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLease:
    """A node's lease, as its agent knows it.

    Attributes:
        lease_s: length of a lease.
        end_s: time until which the node is certainly a member.
        awake_since_s: time since which the agent has run without being stopped.
        ticked_s: time at which the agent last looked at its clock.
    """

    lease_s: float
    end_s: float
    awake_since_s: float
    ticked_s: float


def first_lease(lease_s: float, now_s: float) -> AgentLease:
    """The lease of a node that starts."""
    return AgentLease(lease_s=lease_s, end_s=now_s + lease_s, awake_since_s=now_s, ticked_s=now_s)


def lease_after_tick(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease after the agent looks at its clock; call it TICKS_PER_LEASE times per lease."""
    was_stopped = now_s - lease.ticked_s > lease.lease_s / 2
    awake_since_s = now_s if was_stopped else lease.awake_since_s
    return replace(lease, ticked_s=now_s, awake_since_s=awake_since_s)


def renewed_lease(lease: AgentLease, sent_s: float) -> AgentLease:
    """The lease after the answer to a heartbeat that was sent at sent_s."""
    return replace(lease, end_s=sent_s + lease.lease_s)


def unconnected_lease(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease while there is no coordinator: full again, unless it has run out.

    Meanwhile nobody is evicted, and the next coordinator grants each member a full lease.
    """
    return renewed_lease(lease, now_s) if now_s < lease.end_s else lease


def is_given_up(lease: AgentLease, now_s: float) -> bool:
    """Whether a connected coordinator has left heartbeats unanswered for too long."""
    return now_s > max(lease.end_s, lease.awake_since_s) + lease.lease_s


def can_judge_workers(lease: AgentLease, now_s: float) -> bool:
    """Whether the agent ran long enough, one lease without a stop, to judge its workers."""
    return now_s - lease.awake_since_s > lease.lease_s


@dataclass(frozen=True, slots=True)
class WatchedAction:
    """A worker's action, as its agent first saw it.

    Attributes:
        deadline_s: time after which it is late; infinite while the worker waits for others.
        stolen_s: total CPU steal of the node when the agent first saw the action.
    """

    deadline_s: float = inf
    stolen_s: float = 0.0


def watched_action(before: WatchedAction, deadline_s: float, stolen_s: float) -> WatchedAction:
    """The action after the agent has looked again; another deadline means another action."""
    return before if before.deadline_s == deadline_s else WatchedAction(deadline_s, stolen_s)


def is_late(action: WatchedAction, now_s: float, stolen_s: float) -> bool:
    """Whether an action is past its deadline, less the CPU steal since the agent first saw it."""
    return now_s - (stolen_s - action.stolen_s) > action.deadline_s
