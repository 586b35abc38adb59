"""The rules by which an agent judges its node's lease, and workers that stand still.

Each heartbeat that the coordinator answers renews the lease from the moment at which the heartbeat
was sent. While the lease has run out, nothing is written to disk. Time in which the agent itself
was stopped counts neither against the coordinator nor against workers. CPU steal during an action
does not count against its worker: steal stops whoever computes on that processor, but not the
agent.

On the launcher's machine there is always a coordinator, or soon another one. If one that is
connected leaves heartbeats unanswered for another lease, others have taken the node's place, and it
ends itself. On another machine the network may be at fault (`patience_s`): a connection over which
nothing has come for a lease is left, the agent looks for the coordinator again and again, and the
node ends itself only when it has heard of none for that long after its lease.

Source: docs/protocol.md, "Epochs fence" (Leases) and "Software failures".
"""

from dataclasses import dataclass, replace
from math import inf

from planaria.core.clock_offsets import ClockOffset, better_offset, measured_offset
from planaria.core.messages import HeartbeatTaken, ToNode

# Some of it is for a client of NFS, which may show what was there some seconds ago.
_MEETING_LEASES, _MEETING_S = 2.0, 5.0
_RECONNECT_S, _PAUSE_S_MAX = 0.02, 1.0
_PAUSE_SHARE = 0.1  # Of the time that an agent has had no coordinator, and may lose again by it.
TICKS_PER_LEASE = 6  # Looks at the clock per lease, by an agent and by the coordinator.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLease:
    """A node's lease, as its agent knows it.

    Attributes:
        lease_s: length of a lease.
        end_s: time until which the node is certainly a member.
        awake_since_s: time since which the agent has run without being stopped.
        ticked_s: time at which the agent last looked at its clock.
        heard_s: time at which the agent last connected to, or heard from, a coordinator.
        before_s: `heard_s` before the newest connection, whose coordinator may be out of date.
        patience_s: time after the end of its lease in which the agent looks for a coordinator that
            it does not hear; 0: the coordinator is on the same machine.
    """

    lease_s: float
    end_s: float
    awake_since_s: float
    ticked_s: float
    heard_s: float
    before_s: float
    patience_s: float = 0.0


def first_lease(lease_s: float, now_s: float, *, patience_s: float = 0.0) -> AgentLease:
    """The lease of a node that starts."""
    return AgentLease(
        lease_s=lease_s,
        end_s=now_s + lease_s,
        awake_since_s=now_s,
        ticked_s=now_s,
        heard_s=now_s,
        before_s=now_s,
        patience_s=patience_s,
    )


def lease_after_tick(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease after the agent looks at its clock; call it TICKS_PER_LEASE times per lease."""
    was_stopped = now_s - lease.ticked_s > lease.lease_s / 2
    awake_since_s = now_s if was_stopped else lease.awake_since_s
    return replace(lease, ticked_s=now_s, awake_since_s=awake_since_s)


def connected_lease(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease after the agent has connected to a coordinator."""
    return replace(lease, heard_s=now_s, before_s=lease.heard_s)


def lease_after_contact(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease after the agent has heard from a coordinator."""
    return replace(lease, heard_s=now_s)


def refused_lease(lease: AgentLease) -> AgentLease:
    """The lease after the agent has found its coordinator out of date, and leaves it.

    The connection does not count: an old head may answer for ever, and the new one be lost.
    """
    return replace(lease, heard_s=lease.before_s)


def renewed_lease(lease: AgentLease, sent_s: float) -> AgentLease:
    """The lease after the answer to a heartbeat that was sent at sent_s."""
    return replace(lease, end_s=sent_s + lease.lease_s)


def unconnected_lease(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease while the agent has no connection to a coordinator.

    On the launcher's machine there is no coordinator then: nobody is evicted meanwhile, and the
    next coordinator grants each member a full lease. So the lease is full again, unless it has run
    out. On another machine the agent cannot know that, and the lease runs out.
    """
    if lease.patience_s or now_s >= lease.end_s:
        return lease
    return renewed_lease(lease, now_s)


def is_silent(lease: AgentLease, now_s: float) -> bool:
    """Whether a connection must be left, because the network may have failed without a trace."""
    heard_s = max(lease.heard_s, lease.awake_since_s)
    return bool(lease.patience_s) and now_s > heard_s + lease.lease_s


def is_given_up(
    lease: AgentLease, now_s: float, *, is_connected: bool, is_leaving: bool = False
) -> bool:
    """Whether a coordinator was away, or left heartbeats unanswered, for so long that the node must
    end itself.

    Args:
        is_leaving: whether the node will be taken away: it saves what it holds while it can, and
            does not look for a coordinator any more once its lease has run out.
    """
    since_s = max(lease.end_s, lease.awake_since_s)
    if lease.patience_s:  # Who says something, if only while its disk is slow, is not away.
        patience_s = 0.0 if is_leaving else lease.patience_s
        return now_s > max(since_s, lease.heard_s) + patience_s
    return is_connected and now_s > since_s + lease.lease_s


def reconnect_s(lease_s: float, *, lost_s: float, is_refused: bool) -> float:
    """The seconds after which an agent connects to a coordinator again.

    At first it does so at once: mostly the next coordinator is there in a fraction of a second. A
    head that plans for minutes, or that refuses an agent since it runs another job or another run,
    must not be kept busy by thousands.

    Args:
        lost_s: seconds for which the agent has had no coordinator.
    """
    pause_s_max = min(_PAUSE_S_MAX, lease_s / 4)
    if is_refused:
        return pause_s_max
    return min(max(_RECONNECT_S, _PAUSE_SHARE * lost_s), pause_s_max)


def meeting_s(lease_s: float) -> float:
    """The seconds for which a rank that has given its head up waits for the answers of others.

    Agents give a head up at nearly the same time, each so long after it has heard its last word.
    """
    return _MEETING_LEASES * lease_s + _MEETING_S


def can_judge_workers(lease: AgentLease, now_s: float) -> bool:
    """Whether the agent ran long enough, one lease without a stop, to judge its workers."""
    return now_s - lease.awake_since_s > lease.lease_s


def offset_after(before: ClockOffset | None, message: ToNode, now_s: float) -> ClockOffset | None:
    """The offset of the coordinator's clock from the agent's after a message from the coordinator.

    Args:
        before: offset by earlier messages on the same connection; None: unknown. On the next
            connection there may be a coordinator on another machine.
        now_s: moment at which the message arrived, by the agent's clock.
    """
    if not isinstance(message, HeartbeatTaken) or message.sent_s > now_s:
        return before
    return better_offset(before, measured_offset(message.sent_s, message.taken_s, now_s))


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
