"""How a coordinator starts: with a new job, or from the records of the coordinator before it."""

from typing import Final

import msgspec

from planaria.coordinator.commands import Notify, RecordDecision, RecordMembers, Tell
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.history import begun_history
from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.learning.memory_estimates import fitted_rules
from planaria.coordinator.learning.profile_correction import restored_learning
from planaria.coordinator.learning.slowness import without_former_members
from planaria.coordinator.membership.shortage import num_tolerated
from planaria.coordinator.membership.untold import untold_warnings, without_told
from planaria.coordinator.placing import SCHEDULED, copies_of, idle_of, with_exposed_domains
from planaria.coordinator.recovery import begin_recovery
from planaria.coordinator.state import (
    Commits,
    EpochFacts,
    JobState,
    Loss,
    Membership,
    Phase,
    PlanSearch,
    Saves,
    Step,
    Stop,
)
from planaria.coordinator.step import advance
from planaria.core.findings import FailureHistory, Findings
from planaria.core.kinds import ChangeKind, LossKind
from planaria.core.messages import Abort, StartEpoch
from planaria.core.plan import Plan
from planaria.core.records import (
    Decision,
    Members,
    Origin,
    Outcome,
    Progress,
    Warned,
)
from planaria.protocol.agent_lease import TICKS_PER_LEASE

_UNKNOWN_LOSS: Final = "the coordinator before this one knew"


def first_step(rules: Rules, plan: Plan, *, term: int, predicted_s: float) -> Step:
    """The first state of a job; the commands record its first members and decision."""
    first, origin = rules.first_iteration, _first_origin(rules)
    outcome = Outcome(epoch=plan.epoch, iteration=first, origin=origin)
    copies = copies_of(rules, plan)
    start = StartEpoch(
        epoch=plan.epoch,
        plan=plan,
        addresses={},
        iteration=first,
        source=rules.source,
        copies=copies,
        idle=() if rules.job.checkpoint.profile_iterations else idle_of(rules, plan, copies),
    )
    decision = Decision(order=start, predicted_s=predicted_s)
    state = JobState(
        term=term,
        epoch=plan.epoch,
        nodes=plan.nodes,
        plan=plan,
        phase=Phase.DECIDING,
        commits=Commits(next_iteration=first, outcome=outcome, origin=origin),
        facts=EpochFacts(decision=decision),
        saves=Saves(since_epoch=plan.epoch),
        learning=Learning(findings=Findings(speeds=dict(rules.speeds))),
    )
    findings = state.learning.findings
    members = Members(epoch=plan.epoch, term=term, nodes=plan.nodes, findings=findings)
    recorded = (RecordMembers(members), RecordDecision(outcome, decision))
    state, warnings = with_exposed_domains(rules, state, plan, copies)
    return state, (*recorded, *_unprotected_warning(rules, start), *warnings)


def _unprotected_warning(rules: Rules, start: StartEpoch) -> tuple[Notify, ...]:
    """The warning that there are no copies at first; () if copies begin at once or are not kept."""
    waits = rules.job.checkpoint.mode in SCHEDULED and not start.idle
    if not start.copies or not waits:
        return ()
    first = start.iteration + rules.job.checkpoint.profile_iterations
    text = (
        f"there are no copies in memory before iteration {first}, because the job first "
        "watches the network"
    )
    return (Notify(Warned(text=text)),)


def restored_step(
    rules: Rules,
    plan: Plan,
    *,
    term: int,
    members: Members,
    outcome: Outcome | None,
    decision: Decision | None,
    progress: Progress | None,
    predicted_s: float,
    now_s: float,
) -> Step:
    """The first state of a coordinator that finds these records, each the newest of its kind.

    Args:
        plan: plan of the newest decision to start an epoch, or the job's first plan.
        predicted_s: predicted duration of an iteration with the job's first plan.
    """
    members, progress = _on_own_clock(rules, members, progress, now_s)
    progress = _without_revoked_stop(members, decision, progress)
    findings = _findings(members, progress)
    rules = (fitted := fitted_rules(rules, findings, len(members.nodes), is_new=True)) or rules
    state = JobState(
        term=term,
        epoch=members.epoch,
        nodes=members.nodes,
        plan=plan,
        commits=_commits(rules, outcome, progress),
        membership=Membership(
            gone=members.gone,
            returning_ticks=TICKS_PER_LEASE,
            failures=members.failures,
            history=_history(rules, members, progress, predicted_s=predicted_s, now_s=now_s),
            tolerance=num_tolerated(rules, len(plan.nodes), plan),
            untold=members.untold,
        ),
        facts=EpochFacts(loss=Loss(LossKind.LOST, (), _UNKNOWN_LOSS, now_s)),
        saves=_saves(rules, members, plan),
        stop=_stop_on_record(progress),
        learning=replace(restored_learning(rules, findings, plan), fitted=fitted),
    )
    # The record of a switch still has findings on nodes that have left.
    state = without_former_members(state)
    if decision is None and plan.epoch == members.epoch:
        # The coordinator before this one was killed while it recorded how the job begins.
        first, (_, record, *_) = first_step(rules, plan, term=term, predicted_s=predicted_s)
        commits = replace(first.commits, next_iteration=state.commits.next_iteration)
        return replace(first, commits=commits), (record,)
    if decision and decision.order.epoch == members.epoch and not _is_midway(decision):
        warnings = () if _has_told(decision, progress) else untold_warnings(state, ChangeKind)
        state = _with_decision(without_told(state, members.untold), decision, now_s)
        state, commands = advance(rules, state, now_s)
        return state, (*warnings, *commands)
    if members.is_planned:
        # Nobody knows which ranks have begun this epoch, or what was to follow it. If all did not
        # leave it, silent members would stay silent: nobody would ask for the change again.
        reason = "the coordinator before this one was changing the members"
        return begin_recovery(rules, state, LossKind.LEADER, (), reason=reason, now_s=now_s)
    order = Abort(epoch=members.epoch, nodes=members.nodes)
    return replace(state, phase=Phase.STOPPING), (Tell(order),)


def _has_told(decision: Decision, progress: Progress | None) -> bool:
    """Whether the coordinator before this one has surely told of the change that led to this epoch.

    It did so before the first commit of the epoch.
    """
    order = decision.order
    if progress is None or progress.epoch != order.epoch:
        return False
    return progress.num_committed > order.iteration


def _saves(rules: Rules, members: Members, plan: Plan) -> Saves:
    """What is on record of saves; those on disk are told later.

    In a job that is less safe than it should be, one is owed until one of this plan's epoch is
    told.
    """
    tolerance = num_tolerated(rules, len(plan.nodes), plan)
    return Saves(
        spoilt=frozenset(members.spoilt),
        since_epoch=members.epoch,
        owed_since=plan.epoch if tolerance < rules.job.resilience.failures_tolerated else -1,
    )


def _with_decision(state: JobState, decision: Decision, now_s: float) -> JobState:
    """The state of the epoch that a decision on record begins, or has begun."""
    failure, reason = decision.failure, decision.reason
    return replace(
        state,
        phase=Phase.JOINING,
        stop=replace(state.stop, failure=failure, failed_s=now_s, failed_reason=reason),
        facts=replace(state.facts, decision=decision),
        # A change that was dropped may have made nodes members that were to get work in the next.
        search=PlanSearch(waiting=state.workless),
    )


def _is_midway(decision: Decision | None) -> bool:
    """Whether the decision is one in the middle of a change: it gives some ranks silent layers."""
    order = decision.order if decision else None
    return isinstance(order, StartEpoch) and bool(order.plan.silent)


def _without_revoked_stop(
    members: Members, decision: Decision | None, progress: Progress | None
) -> Progress | None:
    """The progress without a stop, or an end, that was revoked after the newest commit on record.

    A recovery that has all train on has found nodes enough for that.
    """
    if progress is None or progress.epoch < 0 or decision is None or members.is_planned:
        return progress
    order = decision.order
    is_newest = progress.epoch < order.epoch == members.epoch
    if not (isinstance(order, StartEpoch) and is_newest):
        return progress
    return msgspec.structs.replace(progress, ends=False, stop_reason="")


def _stop_on_record(progress: Progress | None) -> Stop:
    """The stop on record.

    A launcher repeats what it was asked for, but that of a new head knows of nothing. A request
    that was made to the head before it holds only if all have agreed to end.
    """
    if progress is None:
        return Stop()
    shortage, is_asked = progress.stop_reason, progress.ends and progress.is_stopping
    is_early = is_asked and progress.is_early
    return Stop(is_requested=bool(shortage) or is_asked, is_early=is_early, shortage=shortage)


def _on_own_clock(
    rules: Rules, members: Members, progress: Progress | None, now_s: float
) -> tuple[Members, Progress | None]:
    """The records with all their moments by this coordinator's clock.

    The machine may have been rebooted since, or be another one: monotonic clocks begin anew then,
    and the clocks of two machines tell nothing about each other. So the newest moment on record of
    each other clock is taken for now. The time in which nobody coordinated the job makes nothing
    older.
    """
    readings = [members.recorded, *([progress.recorded] if progress else [])]
    newest_s = {of.clock: of.now_s for of in sorted(readings, key=lambda of: of.now_s)}
    # Records without the name of a clock are of this machine, and mostly of this boot.
    others = newest_s.keys() - {"", rules.clock}
    shifts_s = {clock: now_s - newest_s[clock] for clock in others}
    shift_s = shifts_s.get(members.recorded.clock, 0.0)
    members = msgspec.structs.replace(
        members,
        failures={name: (n, last_s + shift_s) for name, (n, last_s) in members.failures.items()},
        history=_moved_history(members.history, shift_s),
        findings=_moved_findings(members.findings, shift_s),
    )
    if progress is not None:
        shift_s = shifts_s.get(progress.recorded.clock, 0.0)
        findings = _moved_findings(progress.findings, shift_s)
        progress = msgspec.structs.replace(progress, findings=findings)
    return members, progress


def _moved_history(history: FailureHistory, shift_s: float) -> FailureHistory:
    if not history.since_s:  # The job has not trained yet.
        return history
    return msgspec.structs.replace(
        history, since_s=history.since_s + shift_s, last_s=history.last_s + shift_s
    )


def _moved_findings(findings: Findings, shift_s: float) -> Findings:
    idle = {
        node: (num_retries, since_s and since_s + shift_s)
        for node, (num_retries, since_s) in findings.idle.items()
    }
    return msgspec.structs.replace(findings, idle=idle)


def _history(
    rules: Rules, members: Members, progress: Progress | None, *, predicted_s: float, now_s: float
) -> FailureHistory:
    """The failure history on record.

    If none has begun, it begins as long ago as the committed iterations were predicted to take.
    """
    if progress is None:
        return members.history
    num_done = max(0, progress.num_committed - rules.first_iteration)
    return begun_history(members.history, now_s, trained_s=num_done * predicted_s)


def _findings(members: Members, progress: Progress | None) -> Findings:
    """The newest findings on record."""
    if progress is None or progress.epoch != members.epoch:
        return members.findings
    return progress.findings


def _first_origin(rules: Rules) -> Origin:
    return Origin(iteration=rules.first_iteration, source=rules.source)


def _commits(rules: Rules, outcome: Outcome | None, progress: Progress | None) -> Commits:
    origin = outcome.origin if outcome else _first_origin(rules)
    newest = progress if progress is not None and progress.since == origin.epoch else None
    return Commits(
        next_iteration=_num_committed(rules, origin, progress),
        outcome=outcome,
        origin=origin,
        ends=newest is not None and newest.ends,
        is_trained=newest is not None and newest.is_trained,
        furthest=progress.num_committed if progress else 0,
    )


def _num_committed(rules: Rules, origin: Origin, progress: Progress | None) -> int:
    """The number of committed iterations on record that still count.

    The progress on record may be from before the job went back, and then reaches beyond the origin.
    It may also end before the origin, if commits were never recorded; those are told again later.
    """
    if progress is None:
        return min(rules.first_iteration, origin.iteration)
    if progress.since != origin.epoch:
        return min(progress.num_committed, origin.iteration)
    return progress.num_committed
