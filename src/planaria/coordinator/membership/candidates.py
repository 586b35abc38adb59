"""Nodes that want to join, and nodes that are asked to leave: how long each of them waits.

A node that arrives is a candidate until a change (change.py) or a recovery makes it a member. A
machine that failed before is taken back later with each failure: at once after the first, after
`cluster.rejoin_delay_s` after the second, and after about twice as long with each further one. The
failures of a machine that has not failed for an hour count no more (trust.py).
"""

from typing import Final

from planaria.coordinator.commands import Evict, Notify
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.membership.trust import num_failures
from planaria.coordinator.membership.waiting_nodes import LeaveRequest, WaitingNode
from planaria.coordinator.state import JobState, Step
from planaria.core.kinds import ChangeKind
from planaria.core.messages import (
    DrainRequested,
    NodeArrived,
    NodeLost,
    NoticeTaken,
    WorkerExited,
    WorkerFailed,
)
from planaria.core.persistent_map import PersistentMap
from planaria.core.records import Warned

_DELAY_S_MAX: Final = 3600.0
_DOUBLINGS_MAX: Final = 20
# Share of its notice for which a preempted node is kept until others join; then it is planned out.
_KEPT_SHARE: Final = 0.5


def on_arrival(rules: Rules, state: JobState, event: NodeArrived, now_s: float) -> Step:
    """Notes a node that has arrived; unless it is a member it becomes a candidate."""
    node, members = event.node, state.membership
    if node in members.gone or node in members.candidates:
        return state, ()
    members = replace(members, machines=members.machines.plus(node, event.machine))
    if event.domain:
        members = replace(members, domains=members.domains.plus(node, event.domain))
    state = replace(state, membership=members)
    if state.is_member(node):
        return state, ()
    count = num_failures(state, node, now_s)
    _, last_s = members.failures.get(event.machine, (0, now_s))
    delay_s = rejoin_delay_s(count, rules.job.cluster.rejoin_delay_s)
    candidate = WaitingNode(event.machine, last_s + delay_s if count else now_s, event.speed)
    members = replace(members, candidates={**members.candidates, node: candidate})
    return replace(state, membership=members), ()


def rejoin_delay_s(num_failures: int, first_s: float) -> float:
    """The delay between a machine's last failure and its return.

    It is 0 after the first failure, then `first_s` times 1, 3, 7, ..., at most `_DELAY_S_MAX`.
    """
    doublings = min(max(0, num_failures - 1), _DOUBLINGS_MAX)
    return min(_DELAY_S_MAX, first_s * float(2**doublings - 1))


def on_candidate_lost(state: JobState, event: NodeLost | WorkerFailed | WorkerExited) -> Step:
    """Drops a candidate that was lost or whose worker raised; training goes on.

    A candidate whose worker only exited stays: its agent forks another one for that rank alone.
    """
    node = event.node
    match event:
        case WorkerExited():
            workers = {
                rank: worker
                for rank, worker in state.workers.items()
                if (rank, worker.pid) != (event.rank, event.pid)
            }
            return replace(state, workers=PersistentMap(workers)), ()
        case WorkerFailed():
            reason = f"its worker raised:\n{event.traceback.rstrip()}"
        case NodeLost():
            reason = event.reason
    workers = {r: worker for r, worker in state.workers.items() if worker.node != node}
    state = replace(state, workers=PersistentMap(workers))
    warning = Notify(Warned(text=f"node {node} cannot join: {reason}", gone=(node,)))
    return _without_candidate(state, node), (Evict((node,)), warning)


def _without_candidate(state: JobState, node: int) -> JobState:
    members = state.membership
    candidates = {n: candidate for n, candidate in members.candidates.items() if n != node}
    members = replace(members, candidates=candidates, gone=tuple(sorted({*members.gone, node})))
    return replace(state, membership=members)


def on_leave_request(
    rules: Rules, state: JobState, event: NoticeTaken | DrainRequested, now_s: float
) -> Step:
    """Notes that a node is to leave; a candidate leaves at once.

    One whose machine is unfit leaves as if it were drained: it stays if the job needs it.
    """
    node, members = event.node, state.membership
    is_unfit = isinstance(event, NoticeTaken) and bool(event.reason)
    leave = LeaveRequest(ChangeKind.DRAIN, now_s + rules.job.cluster.notice_s, is_unfit)
    if isinstance(event, NoticeTaken) and not event.reason:
        leave = LeaveRequest(ChangeKind.PREEMPT, now_s + event.after_s * _KEPT_SHARE)
    if isinstance(event, NoticeTaken) and event.reason:
        state = _with_unfit(state, node, event.reason)
    before = members.leaving.get(node)
    if before is not None and leave.kind in (ChangeKind.DRAIN, before.kind):
        # The same request came before, but a later notice may leave less time.
        if leave.kind is before.kind and leave.until_s < before.until_s:
            before = replace(before, until_s=leave.until_s)
        members = replace(members, leaving={**members.leaving, node: before})
        return replace(state, membership=members), ()
    if node in members.postponed:
        if is_unfit:
            return state, ()
        # A drain is decided anew, because somebody waits for the answer.
        leave = members.postponed[node] if leave.kind is ChangeKind.DRAIN else leave
        postponed = {n: other for n, other in members.postponed.items() if n != node}
        members = replace(members, postponed=postponed)
    notices: tuple[Notify, ...] = ()
    if isinstance(event, NoticeTaken) and event.reason:
        text = f"node {node} leaves the job, because its machine is unfit: {event.reason}"
        notices = (Notify(Warned(text=text, unfit=(node,), event="unfit")),)
    if state.is_member(node):
        members = replace(members, leaving={**members.leaving, node: leave})
        return replace(state, membership=members), notices
    if node in members.candidates:
        text = f"node {node}, which had no work yet, leaves as it was asked to"
        preempted = (node,) if leave.kind is ChangeKind.PREEMPT else ()
        notices = notices or (Notify(Warned(text=text, left=(node,), preempted=preempted)),)
        return _without_candidate(state, node), (Evict((node,)), *notices)
    if node in members.gone and isinstance(event, DrainRequested):  # Somebody waits for it.
        return state, (Notify(Warned(text=f"node {node} has left already", left=(node,))),)
    if leave.kind is ChangeKind.DRAIN and node not in members.gone:
        text = f"there is no node {node} to drain, or it has not arrived yet"
        return state, (Notify(Warned(text=text, undrained=(node,))),)
    return state, ()


def _with_unfit(state: JobState, node: int, reason: str) -> JobState:
    """The state in which a node's crashes are its machine's fault, and not the job's."""
    crashes = (
        replace(crash, unfit=reason) if crash.node == node else crash
        for crash in state.troubles.crashes
    )
    return replace(state, troubles=replace(state.troubles, crashes=tuple(crashes)))
