"""Failures of workers whose nodes live: whether each counts against the job or against the node.

An error in a worker, or the end of its process, has one of two causes. A mistake in the job's own
code ends the job. All else (no memory, a device or library that fails, data that one node cannot
read, a signal) counts against the node. Then the job recovers: the worker is replaced, or it goes
on if nobody else holds its layers. The same error CRASHES_MAX times in one rank evicts its node.
But if a second node had the error too, in layers that both computed, it counts against the job;
otherwise the error would evict node after node until none is left. The errors of a node whose
machine was found unfit are not compared: if the job needs that node, it ends, saved.

Once all ranks have reported an iteration, earlier crashes count no more, unless that iteration is
one that is done again. One that an outcome commits, without all reports, clears nothing: it may be
the one that the crash ended.

Before an error ends the job, the live layers are saved at the age that all have committed, unless
the state itself is suspect (`WorkerFailed.has_diverged`).

A spoilt copy ends the epoch, too. Links that break between live nodes: see broken_links.py.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from planaria.coordinator.commands import CheckSave, Command, End, Notify, SaveChecked, Tell
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.memory_estimates import with_more_room
from planaria.coordinator.membership.shortage import shortage_text, with_owed_try
from planaria.coordinator.recovery import (
    begin_recovery,
    end_job,
    replaceable_workers,
    sure_holders,
    unsaved_failure,
    with_reason,
)
from planaria.coordinator.saves import newest_save, with_sound, without_spoilt
from planaria.coordinator.state import Crash, JobState, Phase, Step
from planaria.core.kinds import Ending, LossKind
from planaria.core.messages import (
    Abort,
    CopySpoilt,
    Raised,
    SaveLayers,
    Stopped,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.persistent_map import PersistentMap
from planaria.core.records import Recovering, Warned

CRASHES_MAX: Final = 3  # Number of crashes of one rank with the same error.
FAILING_S_MAX: Final = 60.0  # Time for all ranks to leave the epoch in which the job failed.
# These are Linux's numbers on every processor that torch runs on.
_SIGNALS: Final = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL"} | {
    11: "SIGSEGV",
    15: "SIGTERM",
}
_STALL: Final = "stall"  # The error of a worker that stands still.
UNREAD: Final = "unreadable save"  # The error of a node that cannot read what the head can.
_LEAVING: Final = (Phase.RECORDING, Phase.STOPPING)


def on_copy_spoilt(rules: Rules, state: JobState, event: CopySpoilt, now_s: float) -> Step:
    """Begins another epoch without a copy in memory, or a save, that turned out to be spoilt."""
    node = event.rank // state.devices_per_node
    first: Command = Notify(Warned(text=f"node {node}: {event.reason}; it is not used"))
    if event.source:
        # The head reads it, too: that decides whether the save is spoilt, or the node's view of it.
        state = without_spoilt(state, event.source)
        checking = {**state.saves.checking, event.source: event}
        state = replace(state, saves=replace(state.saves, checking=checking))
        first = CheckSave(event.source, event.layer)
    reason = event.reason
    state, commands = begin_recovery(
        rules, state, LossKind.COPY, (), reason=reason, now_s=now_s, node=node
    )
    return state, (first, *commands)


def on_save_checked(rules: Rules, state: JobState, event: SaveChecked, now_s: float) -> Step:
    """Has a save count again that the head can read; that a node cannot counts against the node.

    Otherwise the node would have one sound save after the other dropped. If it is not out of the
    job by now, it tries again in the epoch that is to come.
    """
    complaint = state.saves.checking.get(event.source)
    checking = {s: by for s, by in state.saves.checking.items() if s != event.source}
    state = replace(state, saves=replace(state.saves, checking=checking))
    if complaint is None or not event.is_sound:
        return state, ()
    state = with_sound(rules, state, event.source)
    node = _node(state, complaint.rank)
    text = f"node {node} cannot read a save that the head can read: {complaint.reason}"
    notice = Notify(Warned(text=f"{text}; this counts against the node"))
    worker = state.workers.get(complaint.rank)
    if not state.is_member(node) or worker is None:
        return state, (notice,)
    raised = Raised(error=UNREAD)
    crash = Crash(node, complaint.rank, worker.pid, complaint.epoch, raised)
    if _is_repeated(state, crash):
        return state, ()
    failure = WorkerFailed(
        node=node, rank=complaint.rank, traceback="", pid=worker.pid, raised=raised, blame="node"
    )
    state = _with_crash(state, crash)
    step = _end_or_evict(rules, state, crash, text, failure, now_s)
    state, commands = step or (state, ())
    return state, (notice, *commands)


# -- workers --------------------------------------------------------------------------------------


def stop_members(state: JobState, now_s: float) -> Step:
    """Has all members leave the epoch before and answer, once the members are on record.

    Workers that raised, and whose layers others hold, end instead, and their successors answer.
    """
    new = replaceable_workers(state)
    # A worker that was to end before may still be ending, and its successor still be missing.
    before = state.troubles
    replaced = {rank: pid for rank, pid in before.replaced.items() if state.has_rank(rank)} | new
    order = Abort(epoch=state.epoch, nodes=state.nodes, replaced=replaced)
    state = replace(
        state,
        phase=Phase.STOPPING,
        workers=PersistentMap({r: w for r, w in state.workers.items() if r not in new}),
        facts=replace(state.facts, holding=state.facts.holding.difference(new)),
        troubles=replace(
            before,
            raised={rank: pid for rank, pid in before.raised.items() if rank not in new},
            replaced=replaced,
        ),
        # Read only if the job has failed: its timeout starts with this order.
        stop=replace(state.stop, failed_s=now_s),
    )
    # Without members, the decision follows at once, and may have made others members.
    return state, (Tell(order),) if state.nodes else ()


def on_worker_failed(rules: Rules, state: JobState, event: WorkerFailed, now_s: float) -> Step:
    """Handles an error that the code in a worker raised."""
    raised = event.raised or Raised(error="")
    crash = Crash(event.node, event.rank, event.pid, event.epoch, raised)
    is_new = event.epoch < 0
    is_over = not is_new and event.epoch not in state.epochs and state.phase not in _LEAVING
    text = _raised_text(event.rank, event.node, raised)
    if event.blame == "job":
        failed = state.stop.failure
        if failed and (is_over or crash.key == _key(failed)):
            return state, ()
        # Any other job may still have to go on, and the rank has no worker from then on.
        if (failed or state.stop.must_end) and _is_saved_by_others(state, crash):
            return _ignore(state, crash, text)
        return _fail_job(state, rules, event, reason="the code in a worker raised", now_s=now_s)
    troubles, worker = state.troubles, state.workers.get(event.rank)
    is_replaced = troubles.replaced.get(event.rank) == event.pid  # The worker raised while ending.
    # Its successor has reported already.
    is_older = not is_new and worker is not None and worker.pid != event.pid
    if is_over or is_replaced or is_older or _is_repeated(state, crash):
        return state, ()
    if is_new:  # The worker holds nothing, and ends by itself.
        workers = {rank: worker for rank, worker in state.workers.items() if rank != event.rank}
        state = replace(state, workers=PersistentMap(workers))
        troubles = replace(troubles, replaced={**troubles.replaced, event.rank: event.pid})
    else:
        troubles = replace(troubles, raised={**troubles.raised, event.rank: event.pid})
    state = replace(state, troubles=troubles)
    if not is_new and event.epoch < state.epoch and state.phase in _LEAVING:
        # All ranks are leaving that epoch already.
        return _with_crash(state, crash), ()
    return _on_crash(rules, state, crash, text, event, now_s)


def is_awaited(state: JobState, event: WorkerReady) -> bool:
    """Whether a worker belongs to a member or candidate, and is not being replaced."""
    is_known = state.is_member(event.node) or event.node in state.membership.candidates
    return is_known and state.troubles.replaced.get(event.rank) != event.pid


def with_estimate(
    rules: Rules, state: JobState, event: WorkerFailed
) -> tuple[JobState, WorkerFailed]:
    """The state in which the stage of a rank that ran out of memory is smaller, if it can be.

    The second item is the rank's report with the estimate added to its message. If the stage is
    planned smaller, earlier crashes with the same error no longer count.
    """
    raised = event.raised
    is_of_now = event.epoch == state.epoch and state.is_member(event.node)
    if raised is None or not is_of_now or not raised.end_layer:
        return state, event
    roomier, text = with_more_room(rules, state, event.rank)
    if text:
        message = "; ".join(filter(None, (raised.message, text)))
        raised = msgspec.structs.replace(raised, message=message)
        event = msgspec.structs.replace(event, raised=raised)
    if roomier is None:
        return state, event
    others = (crash for crash in state.troubles.crashes if crash.raised.error != raised.error)
    troubles = replace(roomier.troubles, crashes=tuple(others))
    return replace(roomier, troubles=troubles), event


def on_worker_exited(rules: Rules, state: JobState, event: WorkerExited, now_s: float) -> Step:
    """Ends the epoch because a worker's process ended, unless that worker was to be replaced."""
    rank = event.rank
    worker = state.workers.get(rank)
    if worker is not None and worker.pid != event.pid:  # Its successor has reported already.
        return state, ()
    if state.troubles.replaced.get(rank) == event.pid:
        return state, ()
    first_layer, end_layer = event.layers
    error = _STALL if event.stalled else _error_name(event.status)
    raised = Raised(error=error, first_layer=first_layer, end_layer=end_layer)
    crash = Crash(event.node, rank, event.pid, -1, raised)
    if _is_repeated(state, crash):
        return state, ()
    if state.phase is Phase.STARTING and rank in state.facts.ready:  # It may have begun a save.
        state = with_owed_try(state)
    troubles, facts = state.troubles, state.facts
    state = replace(
        state,
        workers=PersistentMap({r: worker for r, worker in state.workers.items() if r != rank}),
        troubles=replace(troubles, raised={r: p for r, p in troubles.raised.items() if r != rank}),
        facts=replace(
            facts,
            holding=facts.holding - {rank},
            ready=PersistentMap({r: ready for r, ready in facts.ready.items() if r != rank}),
        ),
    )
    how = f"{_exit_text(event.status)}{_layers_text(raised)}"
    text = f"the worker of rank {rank} on node {event.node} {how}"
    failure = WorkerFailed(
        node=event.node,
        rank=rank,
        traceback=event.stack.rstrip(),
        pid=event.pid,
        raised=raised,
        blame="node",
    )
    if event.stalled:
        text = f"rank {rank} made no progress{_layers_text(raised)}:\n{event.stack.rstrip()}"
    return _on_crash(rules, state, crash, text, failure, now_s)


def _on_crash(
    rules: Rules, state: JobState, crash: Crash, text: str, failure: WorkerFailed, now_s: float
) -> Step:
    """Begins the next epoch, with or without the node, or ends the job."""
    if _is_saved_by_others(state, crash):
        return _ignore(state, crash, text)
    state = _with_crash(state, crash)
    if step := _end_or_evict(rules, state, crash, text, failure, now_s):
        return step
    kind = LossKind.STALL if crash.raised.error == _STALL else LossKind.CRASH
    return begin_recovery(
        rules, state, kind, (), reason=text, now_s=now_s, node=crash.node, raised=crash.raised
    )


def _end_or_evict(
    rules: Rules, state: JobState, crash: Crash, text: str, failure: WorkerFailed, now_s: float
) -> Step | None:
    """Goes on without the node, or ends the job, if the crash is one too many; None: it is not."""
    node, raised = crash.node, crash.raised
    counted = [other for other in state.troubles.crashes if not other.is_ignored]
    alike = [other for other in counted if other.raised.error == raised.error]
    # Counted by rank, because a fault that ends all workers of a node at once is one fault.
    counts = Counter(other.rank for other in alike)
    often = {other.node for other in alike if counts[other.rank] >= CRASHES_MAX}
    is_often = node in often
    unfit = {other.node: other.unfit for other in state.troubles.crashes if other.unfit}
    others = {
        other.node
        for other in alike
        if other.node != node
        and unfit.keys().isdisjoint((node, other.node))
        and (is_often or other.node in often)
        and any(mine.node == node and mine.raised.is_like(other.raised) for mine in alike)
    }
    times = (
        f"{text}, the {CRASHES_MAX}rd time in a row" if counts[crash.rank] >= CRASHES_MAX else text
    )
    is_of_saves = raised.error == UNREAD  # And no fault of the job's.
    if others and not is_of_saves:
        nodes = ", ".join(map(str, sorted(others)))
        reason = f"{times}; the same happened on node {nodes}, so it is not the fault of one node"
        return _fail_job(state, rules, with_reason(failure, reason), reason=reason, now_s=now_s)
    if is_often and not state.stop.failure:
        if why := _why_needed(rules, state, node):
            reason = f"{times}; {why}"
            if is_of_saves:  # Whoever starts the job again may find that the disk answers.
                return end_job(state, End(Ending.LOST, reason))
            if node in unfit:
                reason = f"{reason}, and its machine is unfit: {unfit[node]}"
                return _end_for_unfit(rules, state, crash, reason, now_s)
            return _fail_job(state, rules, with_reason(failure, reason), reason=reason, now_s=now_s)
        return begin_recovery(
            rules, state, LossKind.LOST, (node,), reason=times, now_s=now_s, raised=raised
        )
    if counts[crash.rank] < CRASHES_MAX:
        return None
    # The job has failed, and this rank cannot save what it alone may hold.
    return _without_answer(rules, state, crash) or _end_unsaved(state, text)


def _without_answer(rules: Rules, state: JobState, crash: Crash) -> Step | None:
    """Goes on as if the rank held nothing; None if others may not hold all, or it is too late."""
    is_covered = not missing_without(rules, state, -1, held=_sure_layers(state, crash))
    if state.phase not in _LEAVING or not is_covered:
        return None
    return _with_empty_answers(state, [crash.rank]), ()


def _sure_layers(state: JobState, crash: Crash) -> dict[int, range]:
    """The layers that each rank surely holds, without ranks that have crashed."""
    sure = sure_holders(state).difference(state.troubles.raised, (crash.rank,))
    return {rank: layers for rank, layers in state.plan.layers_by_rank.items() if rank in sure}


def _end_for_unfit(rules: Rules, state: JobState, crash: Crash, reason: str, now_s: float) -> Step:
    """Ends the job, which is to be started again elsewhere, once the live layers are saved.

    The node is left out of that save if others surely hold all layers. If not, its rank is asked
    for its own. If that rank crashes once more, it alone is left out, or the node if only that rank
    may hold some layers.
    """
    held = _sure_layers(state, crash)
    mine = [other for other in state.troubles.crashes if other.rank == crash.rank]
    num_alike = sum(
        other.raised.error == crash.raised.error and not other.is_ignored for other in mine
    )
    was_asked = bool(state.stop.must_end) and num_alike > CRASHES_MAX
    if was_asked and (step := _without_answer(rules, state, crash)):
        return step
    is_covered = not missing_without(rules, state, -1, held=held)
    is_needed = bool(missing_without(rules, state, crash.node, held=held))
    is_out = not is_needed or (was_asked and not is_covered)
    stop = replace(state.stop, is_requested=True, must_end=state.stop.must_end or reason)
    return begin_recovery(
        rules,
        replace(state, stop=stop),
        LossKind.LOST if is_out else LossKind.CRASH,
        (crash.node,) if is_out else (),
        reason=reason,
        now_s=now_s,
        node=crash.node,
        raised=crash.raised,
    )


def _is_saved_by_others(state: JobState, crash: Crash) -> bool:
    """Whether the job's last save is under way, and needs nothing of the rank."""
    decision, number = state.facts.decision, state.commits.next_iteration
    if decision is None or not isinstance(decision.order, SaveLayers):
        return False
    # A job that has been saved waits for machines, to go on.
    is_tried = (
        state.saves.newest_iteration >= number or (number, state.epoch) in state.saves.unsaved
    )
    is_over = state.phase is Phase.SAVING and (is_tried or not decision.order.layers)
    return crash.rank not in decision.order.layers and not is_over


def _ignore(state: JobState, crash: Crash, text: str) -> Step:
    """Counts a crash against nobody; tells the user of the first one of the rank."""
    if _is_repeated(state, crash):
        return state, ()
    # New workers may raise at once, again and again.
    is_told = any(c.is_ignored and c.rank == crash.rank for c in state.troubles.crashes)
    state = _with_crash(state, replace(crash, is_ignored=True))
    notice = Warned(text=f"{text}; the last save needs nothing of that rank")
    return state, () if is_told else (Notify(notice),)


def _with_crash(state: JobState, crash: Crash) -> JobState:
    crashes = (*state.troubles.crashes, crash)
    return replace(state, troubles=replace(state.troubles, crashes=crashes))


def _why_needed(rules: Rules, state: JobState, node: int) -> str:
    """The reason why the job cannot go on without a node; empty if it can."""
    if shortage := shortage_without(rules, state, node):
        return f"without that node {shortage}"
    saved = newest_save(rules, state)
    can_go_back = rules.job.checkpoint.copies > 1 or bool(saved and saved[1])
    missing = missing_without(rules, state, node, held=state.plan.layers_by_rank)
    if missing and not can_go_back:
        return f"no other node holds layer {min(missing)}"
    return ""


def shortage_without(rules: Rules, state: JobState, node: int) -> str:
    """Why too few nodes would be left without a node; empty if there would be enough."""
    joining = {n for n in state.membership.candidates if state.has_workers(n)}
    others = joining.union(state.all_nodes).difference((node, *state.membership.leaving))
    is_asked_for = rules.job.cluster.grant_s > 0.0 and not state.stop.is_requested
    return "" if is_asked_for else shortage_text(rules, len(others))


def missing_without(
    rules: Rules, state: JobState, node: int, *, held: Mapping[int, Collection[int]]
) -> set[int]:
    """The layers that no other member holds.

    Args:
        held: layers that each rank holds; also ranks of nodes that were lost meanwhile.
    """
    elsewhere = {
        layer
        for rank, layers in held.items()
        if _node(state, rank) != node and state.is_member(_node(state, rank))
        for layer in layers
    }
    return set(range(rules.num_layers)) - elsewhere


def _key(failure: WorkerFailed) -> tuple[int, int, int]:
    return (failure.rank, failure.pid, failure.epoch)


def _is_repeated(state: JobState, crash: Crash) -> bool:
    return any(other.key == crash.key for other in state.troubles.crashes)


def _node(state: JobState, rank: int) -> int:
    return rank // state.devices_per_node


# -- the end --------------------------------------------------------------------------------------


def _fail_job(
    state: JobState, rules: Rules, failure: WorkerFailed, *, reason: str, now_s: float
) -> Step:
    """Ends the job because of the failure, once the live layers are saved."""
    if state.stop.failure is not None and state.phase not in _LEAVING:
        return _end_unsaved(state, reason)
    if failure.has_diverged:  # The state that led to it is suspect, so it is not saved.
        return end_job(state, End(Ending.FAILED, reason, failure))
    is_untrained = (
        state.commits.next_iteration == state.commits.origin.iteration
        and not state.commits.origin.copied
    )
    if is_untrained and not any(state.commits.reports.values()):
        return end_job(state, End(Ending.FAILED, reason, state.stop.failure or failure))
    if state.stop.failure is None:
        state = replace(
            state, stop=replace(state.stop, failure=failure, failed_s=now_s, failed_reason=reason)
        )
    still_answers = failure.epoch >= 0 or failure.blame == "job"
    # A worker that does not answer has a successor, which does if it is not too late to ask it.
    if state.phase is Phase.RECORDING or (state.phase in _LEAVING and still_answers):
        return state, ()
    state, commands = begin_recovery(rules, state, LossKind.FAILED, (), reason=reason, now_s=now_s)
    # The launcher is told of no recovery, because the job ends.
    shown = (
        c for c in commands if not (isinstance(c, Notify) and isinstance(c.message, Recovering))
    )
    return state, tuple(shown)


def is_unsavable(state: JobState, now_s: float) -> bool:
    """Whether the job has failed, and ranks or the disk take too long for its last save."""
    is_late = state.stop.failure is not None and now_s - state.stop.failed_s > FAILING_S_MAX
    return is_late and state.phase in (Phase.STOPPING, Phase.JOINING)


def writers(state: JobState) -> tuple[int, ...]:
    """The ranks that are to save the live layers before the job ends."""
    order = state.facts.decision.order if state.facts.decision else None
    return tuple(order.layers) if isinstance(order, SaveLayers) else ()


def give_up_last_save(state: JobState) -> Step:
    """Ends a failed job that cannot save its live layers (`is_unsavable`).

    It saves them after all if only workers do not answer that have not reported yet: these load the
    model or the data, for as long as that takes, and hold nothing.
    """
    if state.phase is Phase.JOINING:
        silent = [rank for rank in writers(state) if rank not in state.workers]
    else:
        silent = [rank for rank in state.ranks if rank not in state.facts.answers]
        if silent and not any(rank in state.workers for rank in silent):
            return _with_empty_answers(state, silent), ()
    if silent:
        return _end_unsaved(state, f"ranks {silent} do not answer")
    return _end_unsaved(state, f"the disk of saves did not answer for {FAILING_S_MAX:g} s")


def _with_empty_answers(state: JobState, ranks: Collection[int]) -> JobState:
    """The state in which these ranks count as having answered that they hold nothing."""
    answers = state.facts.answers
    for rank in ranks:
        nothing = Stopped(rank=rank, epoch=state.epoch, ages={}, complete=())
        answers = answers.plus(rank, nothing)
    return replace(state, facts=replace(state.facts, answers=answers))


def _end_unsaved(state: JobState, why: str) -> Step:
    assert state.stop.failure is not None
    unsaved = f"the live layers were not saved: {why}"
    reason = f"{state.stop.failed_reason}; {unsaved}"
    return end_job(state, End(Ending.FAILED, reason, unsaved_failure(state.stop.failure, unsaved)))


# -- in words -------------------------------------------------------------------------------------


def _raised_text(rank: int, node: int, raised: Raised) -> str:
    message = f": {raised.message}" if raised.message else ""
    return f"rank {rank} on node {node} raised {raised.error}{_layers_text(raised)}{message}"


def _layers_text(raised: Raised) -> str:
    first, last = raised.first_layer, raised.end_layer - 1
    if last < first:
        return ""
    return f" in layer {first}" if first == last else f" in layers {first} to {last}"


def _error_name(status: int) -> str:
    return _SIGNALS.get(-status, f"signal {-status}") if status < 0 else f"status {status}"


def _exit_text(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
