"""The coordinator as a function: (state, event, now) -> (state, commands).

An epoch goes through the phases of `Phase`. In each phase the coordinator waits for this:

    RECORDING   the record of the epoch's members is durable
    STOPPING    members leave the epoch before, and answer what they hold (not in the first epoch)
    DECIDING    the record of where all go on, and with which plan, is durable (recovery.py)
    JOINING     every rank of the plan has a worker
    STARTING    every rank holds its layers, and its links are up
    TRAINING    iterations are committed, each when every rank has reported the age after it
    SAVING      the last iteration is committed; its save is complete

A loss in any phase begins the next epoch. A switch also begins one, at a commit and without most of
these phases: nodes join, or leave on request, while the job trains (change.py). Events are facts:
each is noted when it arrives, in any order, and then the state advances as far as the facts allow.
A fact that a rank tells twice, or that is about an older epoch, changes nothing. A coordinator that
is restarted from its records is told all facts again, and so reaches the same state.

This function decides; its caller (nodes/head/leader.py) acts.

Source: docs/protocol.md.
"""

from collections.abc import Mapping, Sequence

import msgspec

from planaria.coordinator.broken_links import on_broken_links
from planaria.coordinator.change import (
    begin_change,
    commit_switch,
    on_epoch_entered,
    on_next_epoch_ready,
    on_switch_recorded,
    order_next_switch,
)
from planaria.coordinator.commands import (
    AnswersFound,
    Command,
    DecisionRecorded,
    End,
    MembersRecorded,
    MustEnd,
    Notify,
    Pruned,
    Published,
    SaveChecked,
    SavesListed,
    Tell,
    Tick,
)
from planaria.coordinator.crashes import (
    give_up_last_save,
    is_awaited,
    is_unsavable,
    on_copy_spoilt,
    on_save_checked,
    on_worker_exited,
    on_worker_failed,
    stop_members,
    with_estimate,
    writers,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.foresight import with_recovery
from planaria.coordinator.learning.history import begun_history
from planaria.coordinator.learning.link_speeds import (
    link_speeds,
    with_link_speeds,
    without_receptions,
)
from planaria.coordinator.learning.memory_estimates import with_memory_shortage
from planaria.coordinator.learning.overhead import with_order, with_start
from planaria.coordinator.learning.profile_correction import iteration_s, with_corrections
from planaria.coordinator.learning.slowness import with_speeds
from planaria.coordinator.membership.candidates import (
    on_arrival,
    on_candidate_lost,
    on_leave_request,
)
from planaria.coordinator.membership.missing_members import check_missing
from planaria.coordinator.membership.shortage import with_owed_try, with_untold_shortage
from planaria.coordinator.outcomes import answer_since_origin
from planaria.coordinator.recovery import (
    await_machines,
    begin_recovery,
    decide,
    end_job,
    on_hashes_differ,
    unsaved_failure,
)
from planaria.coordinator.saves import VersionEvent, await_last_save, on_saving
from planaria.coordinator.state import JobState, Phase, Step
from planaria.core.commit import decode_vector, is_trained_after
from planaria.core.kinds import Ending, LossKind
from planaria.core.messages import (
    CopiesFailed,
    CopySpoilt,
    Corrupted,
    DrainRequested,
    EpochReady,
    Fact,
    IterationDone,
    LayersSaved,
    NodeArrived,
    NodeLost,
    NoticeTaken,
    PeerUnreachable,
    SaveFailed,
    SaveLayers,
    StartEpoch,
    Stopped,
    StopRequested,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.persistent_map import PersistentMap, has_all
from planaria.core.records import Committed, Forked, Running, Starting, Warned

Request = StopRequested | DrainRequested
Recorded = MembersRecorded | DecisionRecorded
Event = (
    Fact
    | NodeLost
    | Request
    | Recorded
    | AnswersFound
    | VersionEvent
    | SaveChecked
    | MustEnd
    | Tick
)


def step(rules: Rules, state: JobState, event: Event, now_s: float) -> Step:
    """The state after an event, and the commands for the caller to carry out."""
    if state.phase is Phase.ENDED:
        return state, ()
    if isinstance(event, WorkerFailed) and event.blame == "memory":
        state, event = with_estimate(rules, with_memory_shortage(state, event.rank), event)
    rules = state.learning.fitted or rules
    state, noted = _on_event(rules, state, event, now_s)
    state, commands = advance(rules, state, now_s)
    return state, (*noted, *commands)


def step_together(rules: Rules, state: JobState, events: Sequence[Event], now_s: float) -> Step:
    """The state after several events of one moment.

    The result is that of a `step` for each of them. If they are what all ranks report in an epoch,
    all but the last are noted at once; only the last one may advance the state.
    """
    commands: list[Command] = []
    noted = _noted_together(state, events[:-1])
    state, events = (state, events) if noted is None else (noted, events[-1:])
    for event in events:
        state, new_commands = step(rules, state, event, now_s)
        commands += new_commands
    return state, tuple(commands)


def _noted_together(state: JobState, facts: Sequence[Event]) -> JobState | None:
    """The state that knows all these facts; None if they are not all of one kind, of this epoch."""
    known, epoch = state.facts, state.epoch
    stopped = [f for f in facts if isinstance(f, Stopped) and f.epoch == epoch]
    if facts and len(stopped) == len(facts):
        answers = {f.rank: answer_since_origin(state, f) for f in stopped if state.has_rank(f.rank)}
        known = replace(known, answers=PersistentMap({**known.answers, **answers}))
        return replace(state, facts=known)
    ready = {f.rank: f for f in facts if isinstance(f, EpochReady) and f.epoch == epoch}
    if facts and len(ready) == len(facts):
        known = replace(known, ready=PersistentMap({**known.ready, **ready}))
        return replace(state, facts=known)
    done = [f for f in facts if isinstance(f, IterationDone)]
    if facts and len(done) == len(facts) and len({f.iteration for f in done}) == 1:
        commits, iteration = state.commits, done[0].iteration
        reports = {f.rank: f for f in done if _is_open(state, f)}
        all_reports = PersistentMap({**commits.reports_of(iteration), **reports})
        commits = replace(commits, reports={**commits.reports, iteration: all_reports})
        return replace(state, commits=commits)
    return None


def _on_event(rules: Rules, state: JobState, event: Event, now_s: float) -> Step:
    """The state that knows one more fact, and the commands that follow from the fact alone."""
    facts, stop = state.facts, state.stop
    match event:
        case NodeArrived():
            return on_arrival(rules, state, event, now_s)
        case NoticeTaken() | DrainRequested():
            return on_leave_request(rules, state, event, now_s)
        case WorkerReady() if is_awaited(state, event):
            return _on_worker_ready(state, event, now_s)
        case Stopped() if event.epoch == state.epoch and state.has_rank(event.rank):
            answer = answer_since_origin(state, event)
            facts = replace(facts, answers=facts.answers.plus(event.rank, answer))
            return replace(state, facts=facts), ()
        case EpochReady() if event.epoch == state.epoch:
            facts = replace(facts, ready=facts.ready.plus(event.rank, event))
            return replace(state, facts=facts), ()
        case EpochReady() if event.epoch in state.epochs:
            return on_next_epoch_ready(state, event), ()
        case IterationDone() if _is_open(state, event):
            return _with_report(state, event), ()
        case Corrupted() if event.epoch in state.epochs:
            facts = replace(facts, corrupted=facts.corrupted.plus(event.rank, event))
            return replace(state, facts=facts), ()
        case CopySpoilt() if event.epoch in state.epochs:
            return on_copy_spoilt(rules, state, event, now_s)
        case SaveChecked():
            return on_save_checked(rules, state, event, now_s)
        case CopiesFailed() if event.epoch in state.epochs:
            return state, (Notify(Warned(text=f"copies are not complete: {event.reason}")),)
        case LayersSaved() | Published() | Pruned() | SavesListed() | SaveFailed():
            return on_saving(rules, state, event, now_s)
        case StopRequested() if stop.shortage or not stop.is_requested:
            stop = replace(stop, is_requested=True, is_early=event.is_early, shortage="")
            return replace(state, stop=stop), (Tell(event),)
        case MustEnd(reason) if not stop.must_end:
            stop = replace(stop, is_requested=True, must_end=reason)
            return replace(state, stop=stop), (Tell(StopRequested()),)
        case NodeLost() | WorkerFailed() | WorkerExited() if _is_mere_candidate(state, event.node):
            return on_candidate_lost(state, event)
        case WorkerFailed() if state.is_member(event.node):
            return on_worker_failed(rules, state, event, now_s)
        case WorkerExited() if state.is_member(event.node):
            return on_worker_exited(rules, state, event, now_s)
        case NodeLost() if state.is_member(event.node):
            return _on_node_lost(rules, state, event, now_s)
        case PeerUnreachable() if event.epoch in state.epochs:
            return _on_peer_unreachable(state, event, now_s)
        case MembersRecorded(epoch) if epoch == state.epoch and state.phase is Phase.RECORDING:
            return stop_members(state, now_s)
        case MembersRecorded(epoch) if state.switch is not None and epoch == state.switch.epoch:
            return on_switch_recorded(rules, state, now_s)
        case DecisionRecorded(epoch) if epoch == state.epoch and state.phase is Phase.DECIDING:
            return replace(state, phase=Phase.JOINING), ()
        case AnswersFound(epoch) if epoch == state.epoch:
            search = replace(state.search, searched_epoch=epoch, last_situation=None)
            return replace(state, search=search), ()
        case Tick():
            return _on_tick(rules, state, event, now_s)
    return state, ()


def _on_worker_ready(state: JobState, event: WorkerReady, now_s: float) -> Step:
    """Notes that a worker is ready; the launcher is told if it was the last one forked anew."""
    was_forking = state.is_forking
    state = replace(state, workers=state.workers.plus(event.rank, event))
    is_forked = was_forking and not state.is_forking
    return state, (Notify(Forked(now_s=now_s)),) if is_forked else ()


def _on_node_lost(rules: Rules, state: JobState, event: NodeLost, now_s: float) -> Step:
    nodes, reason = (event.node,), event.reason
    return begin_recovery(rules, state, LossKind.LOST, nodes, reason=reason, now_s=now_s)


def _on_peer_unreachable(state: JobState, event: PeerUnreachable, now_s: float) -> Step:
    facts = state.facts
    since_s = facts.unreachable_s or now_s
    facts = replace(facts, unreachable_s=since_s, complaints=(*facts.complaints, event))
    return replace(state, facts=facts), ()


def _without_silence(state: JobState, now_s: float) -> JobState:
    """The state in which members are given all their time anew, because nobody can hear them."""
    facts, stop = state.facts, state.stop
    return replace(
        state,
        facts=replace(facts, unreachable_s=now_s if facts.unreachable_s else 0.0),
        saves=replace(state.saves, wrote_s=now_s),
        stop=replace(stop, failed_s=now_s),
    )


def _on_tick(rules: Rules, state: JobState, tick: Tick, now_s: float) -> Step:
    if tick.is_cut_off:
        return _without_silence(state, now_s), ()
    if state.membership.returning_ticks:
        returning_ticks = state.membership.returning_ticks - 1
        members = replace(state.membership, returning_ticks=returning_ticks)
        state = replace(state, membership=members)
    if is_unsavable(state, now_s):
        return give_up_last_save(state)
    # Else the survivor of a lost node could be taken for the one that is cut off.
    is_cut = not tick.is_lease_overdue and _is_cut(rules, state, now_s)
    further = on_broken_links if is_cut else check_missing
    return further(rules, state, now_s)


def _is_cut(rules: Rules, state: JobState, now_s: float) -> bool:
    """Whether a member could not reach another one for longer than a lease.

    A node that cannot be reached is usually lost, and then its lease runs out before that.
    """
    since_s = state.facts.unreachable_s
    return since_s > 0.0 and now_s - since_s > rules.job.cluster.lease_s


def advance(rules: Rules, state: JobState, now_s: float) -> Step:
    """The state advanced as far as the facts in it allow."""
    commands: list[Command] = []
    while True:
        before = state.phase
        state, new_commands = _advance_phase(rules, state, now_s)
        commands += new_commands
        if state.phase is before:
            return state, tuple(commands)


def _advance_phase(rules: Rules, state: JobState, now_s: float) -> Step:
    """The state advanced by at most one phase."""
    match state.phase:
        case Phase.STOPPING if state.has_all_ranks(state.facts.answers):
            return decide(rules, state, now_s)
        case Phase.JOINING:
            return _tell_order(rules, state, now_s)
        case Phase.STARTING if has_all(state.facts.ready, state.plan.all_ranks):
            history = begun_history(state.membership.history, now_s)
            state = with_owed_try(with_recovery(with_start(rules, state, now_s), now_s))
            state = replace(
                state,
                phase=Phase.TRAINING,
                membership=replace(state.membership, history=history),
                facts=replace(state.facts, is_entered=True),
            )
            return state, (_running_notice(state, now_s),)
        case Phase.TRAINING if _has_different_hashes(state):
            return on_hashes_differ(rules, state, now_s)
        case Phase.TRAINING:
            return _advance_training(rules, state, now_s)
        case Phase.SAVING:
            return _end_when_saved(rules, state, now_s)
    return state, ()


def _has_different_hashes(state: JobState) -> bool:
    """Whether every rank has left this epoch because holders of a layer have different hashes."""
    complaints = {r: fact for r, fact in state.facts.corrupted.items() if fact.epoch == state.epoch}
    return has_all(complaints, state.plan.all_ranks)


def _tell_order(rules: Rules, state: JobState, now_s: float) -> Step:
    """Tells the order of this epoch once every worker that it needs has reported."""
    assert state.facts.decision is not None
    order = state.facts.decision.order
    # For a last save, some workers may never report: their code raises before that.
    is_last, workers = isinstance(order, SaveLayers), state.workers
    if not (has_all(workers, writers(state)) if is_last else state.has_all_ranks(workers)):
        return state, ()
    state, settled = _commit_to_outcome(rules, state, now_s)
    if isinstance(order, SaveLayers):
        return _begin_last_save(state, now_s), (*settled, Tell(order))
    addresses = {rank: (worker.host, worker.port) for rank, worker in workers.items()}
    order = msgspec.structs.replace(order, addresses=addresses)
    # A rank forgets a requested stop when it begins an epoch.
    stop = (Tell(StopRequested()),) if state.stop.is_requested else ()
    starting = Notify(Starting(epoch=state.epoch, num_nodes=len(state.nodes), now_s=now_s))
    state = with_order(replace(state, phase=Phase.STARTING), now_s)
    return state, (*settled, starting, Tell(order), *stop)


def _running_notice(state: JobState, now_s: float) -> Notify:
    ready = state.facts.ready
    running = Running(
        epoch=state.epoch,
        plan=state.plan,
        members=state.nodes,
        workers={rank: state.workers[rank] for rank in state.plan.all_ranks},
        materialised={rank: event.layers_materialised for rank, event in ready.items()},
        received_bytes=sum(event.received_bytes for event in ready.values()),
        regroup_s=max(event.regroup_s for event in ready.values()),
        transfer_s=max(event.transfer_s for event in ready.values()),
        now_s=now_s,
        predicted_s=iteration_s(state),
        layer_factors=state.learning.findings.layer_factors,
    )
    return Notify(running)


def _advance_training(rules: Rules, state: JobState, now_s: float) -> Step:
    """Commits what every rank has reported, then continues a change or begins one."""
    commands: list[Command] = []
    steps = (_note_entered, _commit_reported, _note_entered, order_next_switch, begin_change)
    for advance_one in steps:
        state, new_commands = advance_one(rules, state, now_s)
        commands += new_commands
        if state.phase is not Phase.TRAINING:
            break
    return state, tuple(commands)


def _note_entered(rules: Rules, state: JobState, now_s: float) -> Step:
    """Notes that, after a switch, every rank has begun the new epoch."""
    if state.facts.is_entered or not has_all(state.facts.ready, state.plan.all_ranks):
        return state, ()
    notice = _running_notice(state, now_s)
    state = replace(state, facts=replace(state.facts, is_entered=True))
    state, commands = on_epoch_entered(rules, state, now_s)
    return state, (notice, *commands)


# -- iterations -----------------------------------------------------------------------------------


def _with_report(state: JobState, event: IterationDone) -> JobState:
    commits = state.commits
    reports = commits.reports_of(event.iteration).plus(event.rank, event)
    commits = replace(commits, reports={**commits.reports, event.iteration: reports})
    return replace(state, commits=commits)


def _is_open(state: JobState, event: IterationDone) -> bool:
    """Whether a report counts: it is from this epoch, or about an iteration before its outcome."""
    if event.iteration < state.commits.next_iteration or event.epoch < state.commits.origin.epoch:
        return False
    if state.phase in (Phase.RECORDING, Phase.STOPPING):  # The outcome is not known yet.
        return True
    assert state.commits.outcome is not None
    if event.iteration < state.commits.outcome.iteration:
        return True
    plans = (state.plan, state.switch.plan) if state.switch else (state.plan,)
    return any(event.epoch == p.epoch and event.rank in p.held_by_rank for p in plans)


def _commit_to_outcome(rules: Rules, state: JobState, now_s: float) -> Step:
    """Commits the iterations before the outcome's, which every member applies before it begins."""
    outcome, decision = state.commits.outcome, state.facts.decision
    assert outcome is not None
    assert decision is not None
    goes_on = isinstance(decision.order, StartEpoch)  # Also if all had agreed to end.
    commands: list[Command] = []
    while state.commits.next_iteration < outcome.iteration:
        iteration = state.commits.next_iteration
        reports = state.commits.reports_of(iteration)
        if iteration == outcome.iteration - 1 and outcome.vector:
            vector = decode_vector(outcome.vector, rules.layout)
            ends = not goes_on and vector.is_last(iteration, rules.job.training)
            is_trained = vector.is_trained(iteration, rules.job.training)
            values = (vector.loss, vector.num_samples, vector.sample_digest)
        elif reports:
            first = reports[min(reports)]
            ends, is_trained = not goes_on and first.ends, _is_trained(rules, first)
            values = (first.loss, first.num_samples, first.sample_digest)
        else:  # Every rank that knew its loss is gone, or told the coordinator before this one.
            text = f"iteration {iteration} is committed, but its loss is no longer known"
            commands.append(Notify(Warned(text=text, untold=iteration)))
            state = _after_commit(state, ends=False, is_trained=False)
            continue
        notice = _commit_notice(
            state, reports, values, ends=ends, is_trained=is_trained, now_s=now_s
        )
        commands.append(Notify(notice))
        state = _after_commit(state, ends=ends, is_trained=is_trained)
    return state, tuple(commands)


def _commit_reported(rules: Rules, state: JobState, now_s: float) -> Step:
    """Commits each iteration that every rank has reported, in order."""
    commands: list[Command] = []
    while not state.commits.ends:
        reports = state.commits.reports_of(state.commits.next_iteration)
        if not has_all(reports, state.plan.all_ranks):
            return state, tuple(commands)
        first = reports[min(reports)]
        ends, is_trained = first.ends, _is_trained(rules, first)
        values = (first.loss, first.num_samples, first.sample_digest)
        state = with_link_speeds(rules, state, reports.values())
        notice = _commit_notice(
            state, reports, values, ends=ends, is_trained=is_trained, now_s=now_s
        )
        commands.append(Notify(notice))
        state, new_commands = with_corrections(
            rules, with_speeds(rules, state, now_s), before=state
        )
        commands += new_commands
        state = _after_commit(_without_old_troubles(state), ends=ends, is_trained=is_trained)
        if first.switches and not state.commits.ends:
            state, new_commands = commit_switch(rules, state)
            commands += new_commands
            state, new_commands = _note_entered(rules, state, now_s)
            commands += new_commands
    return _begin_last_save(state, now_s), tuple(commands)


def _is_trained(rules: Rules, report: IterationDone) -> bool:
    return is_trained_after(
        report.iteration,
        rules.job.training,
        loss=report.loss,
        has_targets=report.has_targets,
        is_early=report.early,
    )


def _commit_notice(
    state: JobState,
    reports: Mapping[int, IterationDone],
    values: tuple[float, int, str],
    *,
    ends: bool,
    is_trained: bool,
    now_s: float,
) -> Committed:
    loss, num_samples, digest = values
    return Committed(
        iteration=state.commits.next_iteration,
        epoch=state.epoch,
        loss=loss,
        num_samples=num_samples,
        sample_digest=digest,
        ends=ends,
        is_trained=is_trained,
        reports=tuple(without_receptions(reports[rank]) for rank in sorted(reports)),
        now_s=now_s,
        since=state.commits.origin.epoch,
        links=link_speeds(state),
    )


def _after_commit(state: JobState, *, ends: bool, is_trained: bool) -> JobState:
    commits = state.commits
    if state.change is not None:
        reports = commits.reports_of(commits.next_iteration)
        came = sum(report.received_bytes for report in reports.values())
        change = replace(state.change, received_bytes=state.change.received_bytes + came)
        state = replace(state, change=change)
    number = commits.next_iteration + 1
    commits = replace(
        commits,
        next_iteration=number,
        reports={i: reports for i, reports in commits.reports.items() if i >= number},
        ends=ends,
        is_trained=is_trained,
        furthest=max(number, commits.furthest),
    )
    return replace(state, commits=commits, troubles=replace(state.troubles, raised={}))


def _without_old_troubles(state: JobState) -> JobState:
    """The state in which crashes and broken links count no more: all ranks get over an iteration.

    They count on if an iteration is done again, since the one that crashed may follow it. Nor does
    an outcome that commits an iteration clear them: a worker may crash in each optimizer step.
    """
    if state.commits.next_iteration < state.commits.furthest:
        return state
    troubles = replace(state.troubles, crashes=(), broken_links=0, unlinked=frozenset())
    return replace(state, troubles=troubles)


# -- losses and ends ------------------------------------------------------------------------------


def _begin_last_save(state: JobState, now_s: float) -> JobState:
    saves = replace(state.saves, wrote_s=now_s, is_slow_told=False)
    return replace(state, phase=Phase.SAVING, saves=saves)


def _end_when_saved(rules: Rules, state: JobState, now_s: float) -> Step:
    """Ends the job if the last save is complete, or cannot be completed."""
    decision, number, stop = state.facts.decision, state.commits.next_iteration, state.stop
    assert decision is not None
    order = decision.order
    unsaved = state.saves.unsaved.get((number, state.epoch))
    has_nothing_to_save = isinstance(order, SaveLayers) and not order.layers
    is_saved = state.saves.newest_iteration >= number or has_nothing_to_save
    if decision.ending == Ending.LOST and (is_saved or unsaved is not None):
        waiting = await_machines(rules, state, decision.reason, now_s)
        if waiting is not None:
            return waiting
    if decision.ending and unsaved is not None:
        why, failure = f"the live layers were not saved: {unsaved}", decision.failure
        failure = unsaved_failure(failure, why) if failure else None
        return end_job(state, End(Ending(decision.ending), f"{decision.reason}; {why}", failure))
    if unsaved is not None and stop.must_end:
        reason = f"{stop.must_end}; the live layers were not saved: {unsaved}"
        return end_job(state, End(Ending.LOST, reason))
    if unsaved is not None:
        return end_job(state, End(Ending.UNSAVED, unsaved))
    if not is_saved:
        return await_last_save(rules, state, now_s)
    if decision.ending:
        return end_job(state, End(Ending(decision.ending), decision.reason, decision.failure))
    if state.commits.is_trained or number >= rules.job.training.iterations:
        return end_job(state, End(Ending.FINISHED))
    stop = with_untold_shortage(rules, state, len(state.nodes)).stop
    if reason := stop.must_end or stop.shortage:
        return end_job(state, End(Ending.LOST, reason))
    return end_job(state, End(Ending.STOPPED))


def _is_mere_candidate(state: JobState, node: int) -> bool:
    return node in state.membership.candidates and not state.is_member(node)
