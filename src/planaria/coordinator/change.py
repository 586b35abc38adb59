"""Changes during training: for nodes that join, leave on request or are slow, or for a better plan.

A change leads from the current plan to a new one in switches. Each switch begins an epoch at a
commit on which all ranks agree, so that no iteration is done again:

1. A rank that lacks layers of the new plan becomes a silent member of them: it receives their state
   at the commit. From then on it takes part in their reductions with +0 and takes the same
   optimizer steps, while all other ranks train as before. Layers come in waves, one epoch each. No
   wave sends more over a link than the link carries in an iteration, or while the longest of its
   layers moves alone. Layers that only a leaving node holds come first, so that they are safe if
   the node is gone too early.
2. When all layers have arrived, one more switch begins the new plan itself, and leaving nodes are
   told to leave.

The current plan goes on until then, so a change is weighed as the current plan followed by the new
one. The gain of the new plan hardly counts if the next failure is likely to come before all layers
have arrived. So a change that does not pay right after a failure is considered again each time the
expected time to the next failure has doubled.

A change is dropped after a wave if another node is to leave by then, and a change with that node is
looked for; layers that have moved count. Nodes that are taken away before others could join leave
first.

The members of a switch's epoch are recorded before anybody is told, its decision once it has begun.
A loss or a new coordinator ends an unfinished change, and tells who has come and left by then;
afterwards a change is looked for anew.

Source: docs/protocol.md, "Joins"; Odyssey, section IV-B, for the layers
that have to move.
"""

from collections.abc import Sequence
from functools import partial
from math import frexp, inf
from typing import Final

import msgspec

from planaria.coordinator.commands import Notify, RecordDecision, RecordMembers, Tell
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.overhead import prices_of, switch_s, with_switch
from planaria.coordinator.learning.profile_correction import iteration_s, policy_of
from planaria.coordinator.learning.slowness import with_joining_speeds, without_former_members
from planaria.coordinator.membership.shortage import (
    degraded_text,
    is_newly_degraded,
    refuse_drains,
    shortage_text,
    with_owed_save,
    with_owed_try,
    with_tolerance,
    without_drains,
)
from planaria.coordinator.membership.standby import (
    able_candidates,
    can_await,
    may_return,
    num_joining,
    with_postponed,
)
from planaria.coordinator.membership.trust import node_for_policies
from planaria.coordinator.membership.untold import untold_after, without_told
from planaria.coordinator.placing import copies_of, idle_of, with_exposed_domains
from planaria.coordinator.recovery import begin_recovery
from planaria.coordinator.state import JobState, Situation, Step
from planaria.coordinator.switching import Change, KnownWaves, Switch, weighed_changes
from planaria.coordinator.transition_choice import (
    choice_among,
    decision_inputs,
    is_better,
    time_to_failure_s,
)
from planaria.core.cluster import ClusterState, NodesChanged
from planaria.core.kinds import LEAVING, ChangeKind, LossKind
from planaria.core.messages import AT_COMMIT, EpochReady, Shutdown, StartEpoch, StopRequested
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Transition
from planaria.core.records import Candidate, Changed, Decision, Members, Outcome, Warned
from planaria.policies.traits import TRAITS

_PUT_OFF_S_MAX: Final = 20.0  # Nodes that join wait for all others for at most a minute.


def begin_change(rules: Rules, state: JobState, now_s: float) -> Step:
    """Begins the best change for joining, leaving and slow nodes, or to a better plan, if any."""
    if state.change is not None or state.commits.ends or state.stop.is_requested:
        return state, ()
    if state.membership.postponed:
        state = with_postponed(rules, state, now_s)
    planned, speeds, members = state.plan.slow_nodes, state.speeds, state.membership
    hurried, waiting = _hurry_text(rules, state), _waiting_nodes(state)
    is_calm = not (members.leaving or members.candidates or planned or speeds or state.idle)
    if is_calm and not (hurried or waiting):
        return state, ()  # The usual case, decided fast because it follows nearly every report.
    situation, last = _situation(rules, state, now_s), state.search.last_situation
    joining, leaving, retried = situation.joining, situation.leaving, situation.retried
    if not (joining or leaving or planned or speeds or retried or hurried) or situation == last:
        return state, ()
    if state.nodes == state.search.short_of_memory and not (joining or leaving):
        return state, ()
    staying = tuple(sorted({*state.nodes}.difference(leaving, waiting)))
    num_left = len(staying) + len(joining)
    if leaving and _is_help_coming(rules, state, num_left, now_s):
        return state, ()
    if leaving and (short := shortage_text(rules, num_left)):
        return _refuse_or_stop(rules, state, num_left, short, now_s)
    exponent = situation.failure_exponent
    is_told = last is not None and replace(last, failure_exponent=exponent) == situation
    changed = {n for n in staying if planned.get(n, 1.0) != speeds.get(n, 1.0)}.union(retried)
    slow = tuple(sorted(changed.difference(leaving)))
    if not (slow or joining or leaving):  # A better plan is looked for, with slow nodes as known.
        slow = tuple(sorted(speeds))
    event = NodesChanged(joining, leaving, slow)
    proposal = _timely_proposal(rules, state, event, staying, now_s)
    event, best, as_it_is = proposal.event, proposal.best, proposal.as_it_is
    waiting = tuple(node for node in waiting if node not in event.joined)
    state = replace(state, search=replace(state.search, last_situation=situation, waiting=waiting))
    is_asked_for = bool(slow or joining or leaving)
    if best is None:
        if not is_asked_for or is_told:
            return state, ()
        text = f"no plan for {num_left} nodes is known; the nodes stay as they are"
        return without_drains(state), (Notify(Warned(text=text, undrained=leaving)),)
    placed = tuple(node for node in joining if node in best.after.nodes)
    still_slow = tuple(node for node in slow if node in speeds)
    if not placed and not leaving and not is_worthwhile(rules, proposal.candidates, as_it_is):
        if joining or not still_slow or is_told:
            return state, ()
        return state, (Notify(Warned(text=f"{_slow_text(state, still_slow)}; no plan is faster")),)
    change = Change(
        kinds=_kinds(state, event, best),
        transition=best,
        candidates=proposal.candidates,
        waves=proposal.waves.of(best, iteration_s=iteration_s(state)),
        began_s=now_s,
        time_to_failure_s=time_to_failure_s(rules, state, now_s),
        silent=state.plan.silent,
        reason=_slow_text(state, still_slow) if still_slow else "" if is_asked_for else hurried,
        inputs=decision_inputs(
            rules, state, proposal.cluster, event, now_s, is_foreseen=best.is_foreseen
        ),
    )
    return _record_switch(replace(state, change=_with_dropped(state, change)))


def _with_dropped(state: JobState, change: Change) -> Change:
    """The change with what those have moved that were dropped before it."""
    search = state.search
    return replace(change, pause_s=search.dropped_s, received_bytes=search.dropped_bytes)


def _situation(rules: Rules, state: JobState, now_s: float) -> Situation:
    leaving = tuple(sorted(set(state.membership.leaving).intersection(state.nodes)))
    return Situation(
        nodes=state.nodes,
        joining=tuple(sorted((*_joining_nodes(rules, state, now_s), *_waiting_nodes(state)))),
        leaving=leaving,
        speeds=tuple(state.speeds.items()),
        retried=_retried_nodes(state),
        failure_exponent=frexp(time_to_failure_s(rules, state, now_s))[1],
    )


def _waiting_nodes(state: JobState) -> tuple[int, ...]:
    """The members that count as joining nodes, because they are to get work."""
    waiting = state.search.waiting
    return tuple(node for node in state.workless if node in waiting) if waiting else ()


def _retried_nodes(state: JobState) -> tuple[int, ...]:
    """The nodes without work whose low speed is forgotten, so that they get work again."""
    others = {*state.speeds, *state.plan.nodes}
    return tuple(node for node in state.idle if node in state.nodes and node not in others)


def is_worthwhile(
    rules: Rules, candidates: Sequence[Candidate], as_it_is: Candidate | None
) -> bool:
    """Whether the best candidate is enough better than the one that keeps the plan.

    False if there is none that keeps it.
    """
    if as_it_is is None:
        return False
    best = max(candidate.score for candidate in candidates)
    samples_per_s = rules.job.training.global_batch_size / as_it_is.iteration_s
    return is_better(best, as_it_is.score, samples_per_s=samples_per_s)


def _hurry_text(rules: Rules, state: JobState) -> str:
    """A description of the plan that was chosen in a hurry, if a better one may replace it.

    Empty if none may.
    """
    traits = TRAITS[rules.job.resilience.policy]
    if state.search.is_plan_searched or not traits.can_improve:
        return ""
    if rules.looks_ahead and state.search.searched_epoch != state.epoch:
        return ""
    if state.plan.gone and traits.is_choice:
        return f"microbatches went around node {', '.join(map(str, state.plan.gone))}"
    return "the plan was the best at hand" if rules.looks_ahead else ""


def _kinds(state: JobState, event: NodesChanged, transition: Transition) -> dict[int, ChangeKind]:
    """The kind of change for each node concerned.

    It is REFORM for all nodes with other work if the plan is just a better one.
    """
    slow, fast = ChangeKind.SLOW, ChangeKind.FAST
    kinds = {node: slow if node in state.speeds else fast for node in event.slow}
    kinds |= {node: ChangeKind.JOIN for node in event.joined if node in transition.after.nodes}
    kinds |= {node: state.membership.leaving[node].kind for node in event.leaving}
    return kinds or dict.fromkeys(_nodes_with_other_work(transition), ChangeKind.REFORM)


def _nodes_with_other_work(transition: Transition) -> tuple[int, ...]:
    """The nodes that compute other layers after the transition.

    All nodes if none does: then the order of their work or the numbers of microbatches differ.
    """
    before, after = transition.before.layers_by_rank, transition.after.layers_by_rank
    per_node = transition.after.devices_per_node
    moved = tuple(sorted({r // per_node for r in after if before.get(r) != after[r]}))
    return moved or transition.after.nodes


def _slow_text(state: JobState, slow: tuple[int, ...]) -> str:
    """The slowness of these nodes, in words."""
    takes = (f"node {node} takes {1.0 / state.speeds[node]:.2f} times" for node in slow)
    return f"{', '.join(takes)} as long as usual"


def _joining_nodes(rules: Rules, state: JobState, now_s: float) -> tuple[int, ...]:
    """The candidates that become members now, ascending."""
    num_staying = sum(node not in state.membership.leaving for node in state.nodes)
    able = able_candidates(state, now_s)
    number = num_joining(rules, num_staying=num_staying, num_able=len(able))
    return tuple(sorted(able[:number]))


def _is_help_coming(rules: Rules, state: JobState, num_left: int, now_s: float) -> bool:
    """Whether leaving nodes should wait for nodes that are about to join.

    They should if too few nodes would be left to tolerate f failures, and all of them can wait.
    """
    if num_left >= (rules.job.resilience.failures_tolerated + 1) * rules.n0:
        return False
    may_help = may_return(state) and bool(shortage_text(rules, num_left))
    is_coming = may_help or any(
        waits.not_before_s <= now_s and not state.has_workers(node)
        for node, waits in state.membership.candidates.items()
    )
    return is_coming and all(now_s < leave.until_s for leave in state.membership.leaving.values())


def _refuse_or_stop(
    rules: Rules, state: JobState, num_left: int, shortage: str, now_s: float
) -> Step:
    """Keeps drained nodes, since too few would be left; if there are none, stops the job, saved.

    So only preempted nodes end a job. It may wait for machines first, but trains no more meanwhile.
    """
    kept, refused = refuse_drains(rules, state, num_left)
    if refused:
        # The answer to a loss has no work for nodes that are to leave.
        return replace(kept, search=replace(kept.search, waiting=kept.workless)), refused
    if can_await(rules, state):
        return begin_recovery(rules, state, LossKind.SHORT, (), reason=shortage, now_s=now_s)
    stopping = replace(state, stop=replace(state.stop, is_requested=True, shortage=shortage))
    return stopping, (Tell(StopRequested()),)


class _Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The best change for an event.

    Attributes:
        cluster: members after the change, as policies see them.
        best: transition of the change; None: no policy knows one.
        candidates: prices of all transitions that were proposed.
        as_it_is: prices of the one that keeps the plan; None: none does.
        waves: waves of the transitions, found so far.
    """

    event: NodesChanged
    cluster: ClusterState
    best: Transition | None
    candidates: tuple[Candidate, ...]
    as_it_is: Candidate | None
    waves: KnownWaves


def _timely_proposal(
    rules: Rules, state: JobState, event: NodesChanged, staying: tuple[int, ...], now_s: float
) -> _Proposal:
    """The best change for the event or, if it takes too long for nodes that are taken away, for
    these alone.

    Nodes join afterwards then. But if too few nodes would be left to tolerate f failures, those
    that leave are kept until others have joined.

    Args:
        staying: members with work that do not leave.
    """
    proposal = _proposal(rules, state, event, staying, now_s)
    leaving = (state.membership.leaving[node] for node in event.leaving)
    until_s = min((x.until_s for x in leaving if x.kind is ChangeKind.PREEMPT), default=inf)
    is_safe = len(staying) >= (rules.job.resilience.failures_tolerated + 1) * rules.n0
    if not event.joined or not is_safe or until_s == inf or proposal.best is None:
        return proposal
    as_is_s = iteration_s(state)
    num_waves = len(proposal.waves.of(proposal.best, iteration_s=as_is_s))
    if not num_waves or now_s + (2 * num_waves + 1) * as_is_s <= until_s:
        return proposal
    sooner = _proposal(rules, state, replace(event, joined=()), staying, now_s)
    if sooner.best is None or len(sooner.waves.of(sooner.best, iteration_s=as_is_s)) >= num_waves:
        return proposal
    return sooner


def _proposal(
    rules: Rules, state: JobState, event: NodesChanged, staying: tuple[int, ...], now_s: float
) -> _Proposal:
    held = state.plan.held_by_rank
    cluster = ClusterState(
        state.epoch + 1,
        tuple(
            node_for_policies(state, node, held, now_s)
            for node in sorted((*staying, *event.joined))
        ),
        tuple(node_for_policies(state, node, held, now_s) for node in event.leaving),
    )
    waves = KnownWaves(leaving=event.leaving, prices=prices_of(rules, state))
    changes = policy_of(rules, state).propose(state.plan, cluster, event, waves.prices)
    weighed = weighed_changes(
        changes,
        iteration_s=iteration_s(state),
        waves=waves,
        switch_s=partial(switch_s, rules, state),
    )
    best, candidates = choice_among(rules, state, changes, now_s, weighed=weighed)
    priced = zip(changes, candidates, strict=True)
    return _Proposal(
        event=event,
        cluster=cluster,
        best=best,
        candidates=candidates,
        as_it_is=next((candidate for change, candidate in priced if change.keeps_plan), None),
        waves=waves,
    )


# -- switches -------------------------------------------------------------------------------------


def _record_switch(state: JobState) -> Step:
    """The state in which the change has its next switch; the command records its members."""
    assert state.change is not None
    change, epoch = state.change, state.epoch + 1
    joined = {node for node, kind in change.kinds.items() if kind == ChangeKind.JOIN}
    if change.waves:
        wave, *rest = change.waves
        silent = {rank: set(layers) for rank, layers in change.silent.items()}
        for transfer in wave:
            silent.setdefault(transfer.target, set()).add(transfer.layer)
        so_far = {rank: tuple(sorted(layers)) for rank, layers in sorted(silent.items())}
        plan = replace(state.plan, epoch=epoch, silent=so_far)
        nodes = tuple(sorted({*state.nodes, *joined}))
        change = replace(change, waves=tuple(rest), silent=so_far)
    else:
        wave = ()
        plan = replace(change.transition.after, epoch=epoch)
        all_nodes = sorted({*state.nodes, *joined})
        nodes = tuple(n for n in all_nodes if change.kinds.get(n) not in LEAVING)
    rounds = (tuple(wave),) if wave else ()
    switch = Switch(epoch=epoch, nodes=nodes, plan=plan, rounds=rounds)
    gone = tuple(sorted({*state.membership.gone, *set(state.nodes).difference(nodes)}))
    members = Members(
        epoch=epoch,
        term=state.term,
        nodes=nodes,
        gone=gone,
        is_planned=True,
        untold=untold_after(state, nodes, change.kinds),
        failures=dict(state.membership.failures),
        history=state.membership.history,
        findings=state.learning.findings,
        spoilt=tuple(sorted(state.saves.surely_spoilt)),
    )
    return replace(state, change=replace(change, switch=switch)), (RecordMembers(members),)


def on_switch_recorded(rules: Rules, state: JobState, now_s: float) -> Step:
    """Tells everybody to begin the next epoch together, once its members are on record."""
    change, switch = state.change, state.switch
    assert change is not None
    assert switch is not None
    state = replace(state, change=replace(change, switch=replace(switch, is_told=True)))
    order = _order(rules, state, switch, AT_COMMIT)
    order = msgspec.structs.replace(order, put_off_s=_put_off_s(state, switch, now_s))
    state, warnings = with_exposed_domains(rules, state, switch.plan, order.copies)
    return state, (Tell(order, tuple(sorted({*state.nodes, *switch.nodes}))), *warnings)


def _order(rules: Rules, state: JobState, switch: Switch, iteration: int) -> StartEpoch:
    copies = copies_of(rules, switch.plan, state.membership.domains)
    return StartEpoch(
        epoch=switch.epoch,
        plan=switch.plan,
        # Leaving ranks are included: their links stay up until they have read all data.
        addresses={rank: (worker.host, worker.port) for rank, worker in state.workers.items()},
        iteration=iteration,
        rounds=switch.rounds,
        # The last switch of a change that leaves the job less safe than it was.
        persists=not switch.plan.silent
        and is_newly_degraded(rules, state, len(switch.nodes), switch.plan),
        since=state.commits.origin.epoch,
        copies=copies,
        idle=idle_of(rules, switch.plan, copies),
    )


def _put_off_s(state: JobState, switch: Switch, now_s: float) -> float:
    """Seconds for which a switch may wait for saves, which would lack what leaving nodes write.

    They may take half of the time that these have left once three more iterations are computed.
    """
    leaving = state.membership.leaving.items()
    untils_s = [leave.until_s for node, leave in leaving if node not in switch.nodes]
    left_s = min(untils_s, default=now_s) - now_s - 3.0 * iteration_s(state)
    return min(max(0.0, left_s / 2.0), _PUT_OFF_S_MAX)


def on_next_epoch_ready(state: JobState, ready: EpochReady) -> JobState:
    """Notes that a rank has begun the next epoch, while others may still be in this one."""
    change, switch = state.change, state.switch
    assert change is not None
    assert switch is not None
    switch = replace(switch, ready=switch.ready.plus(ready.rank, ready))
    return replace(state, change=replace(change, switch=switch))


def commit_switch(rules: Rules, state: JobState) -> Step:
    """Makes the next epoch the current one: all ranks have agreed to end this one."""
    change, switch = state.change, state.switch
    assert change is not None
    assert switch is not None
    number, origin = state.commits.next_iteration, state.commits.origin
    outcome = Outcome(epoch=switch.epoch, iteration=number, is_redo=False, origin=origin)
    # A switch with a wave keeps the old plan.
    predicted_s = iteration_s(state) if switch.rounds else change.transition.iteration_s
    order = _order(rules, state, switch, number)
    decision = Decision(order=order, predicted_s=predicted_s)
    departed = tuple(node for node in state.nodes if node not in switch.nodes)
    state = with_joining_speeds(state, switch.nodes)
    complaints = {r: f for r, f in state.facts.corrupted.items() if f.epoch == switch.epoch}
    members = state.membership
    members = replace(
        members,
        gone=tuple(sorted({*members.gone, *departed})),
        candidates={n: waits for n, waits in members.candidates.items() if n not in switch.nodes},
        leaving={node: leave for node, leave in members.leaving.items() if node in switch.nodes},
        postponed={n: leave for n, leave in members.postponed.items() if n in switch.nodes},
        untold=untold_after(state, switch.nodes, change.kinds),
    )
    state = replace(
        state,
        epoch=switch.epoch,
        nodes=switch.nodes,
        plan=switch.plan,
        workers=PersistentMap({r: w for r, w in state.workers.items() if w.node not in departed}),
        change=replace(change, switch=None, trained=state.plan.all_ranks),
        commits=replace(state.commits, outcome=outcome),
        membership=members,
        facts=replace(
            state.facts,
            decision=decision,
            ready=switch.ready,
            is_entered=False,
            corrupted=PersistentMap(complaints),
            ratios={},
        ),
        learning=replace(state.learning, plan_s=0.0),
    )
    state = with_owed_try(with_owed_save(rules, state, order))
    shutdowns = (Tell(Shutdown(), departed),) if departed else ()
    return without_former_members(state), (RecordDecision(outcome, decision), *shutdowns)


def on_epoch_entered(rules: Rules, state: JobState, now_s: float) -> Step:
    """Notes that every rank has begun the epoch: adds its pause, and reports a finished change."""
    change = state.change
    if change is None or change.switch is not None:
        return state, ()
    # Ranks that did not train before the switch were not paused by it.
    paused = [event for rank, event in state.facts.ready.items() if rank in change.trained]
    pauses_s = (event.regroup_s + event.transfer_s + event.comm_s for event in paused)
    pause_s = max(pauses_s, default=0.0)
    state = with_switch(rules, state, pause_s)
    change = replace(change, pause_s=change.pause_s + pause_s)
    if state.plan.silent or change.waves:
        return replace(state, change=change), ()
    transition = change.transition
    planned_bytes = sum(t.num_bytes for transfers in transition.rounds for t in transfers)
    notice = Changed(
        epoch=state.epoch,
        kinds=dict(change.kinds),
        iteration=state.commits.next_iteration,
        policy=transition.policy,
        answer=transition.answer,
        candidates=change.candidates,
        plan=state.plan,
        predicted_s=transition.iteration_s,
        predicted_pause_s=transition.downtime_s,
        transfer_bytes=planned_bytes + state.search.dropped_bytes,
        received_bytes=change.received_bytes,
        asked_s=change.began_s,
        pause_s=change.pause_s,
        now_s=now_s,
        time_to_failure_s=change.time_to_failure_s,
        reason=change.reason,
        degraded=degraded_text(rules, len(state.nodes), state.plan),
        is_newly_degraded=is_newly_degraded(rules, state, len(state.nodes), state.plan),
        inputs=change.inputs,
    )
    kinds = set(change.kinds.values())
    was_searched = state.search.is_plan_searched and kinds <= {ChangeKind.SLOW, ChangeKind.FAST}
    is_searched = kinds <= {ChangeKind.REFORM} or was_searched
    state = replace(
        state,
        change=None,
        search=replace(state.search, is_plan_searched=is_searched, dropped_s=0.0, dropped_bytes=0),
    )
    return with_tolerance(rules, without_told(state, change.kinds)), (Notify(notice),)


def order_next_switch(rules: Rules, state: JobState, now_s: float) -> Step:
    """Orders the next switch once the silent ranks have taken a step with their new layers.

    If a node is to leave since the change was chosen, the change is dropped in its place. Silent
    ranks keep what they have received, and another change is looked for.
    """
    change = state.change
    if change is None or change.switch is not None or not state.facts.is_entered:
        return state, ()
    commits = state.commits
    assert commits.outcome is not None
    is_first = commits.next_iteration <= commits.outcome.iteration
    if is_first or state.stop.is_requested or commits.ends:
        return state, ()
    if _is_overtaken(rules, state, change, now_s):
        search = replace(
            state.search,
            last_situation=None,
            waiting=state.workless,
            dropped_s=change.pause_s,
            dropped_bytes=change.received_bytes,
        )
        return replace(state, change=None, search=search), ()
    return _record_switch(state)


def _is_overtaken(rules: Rules, state: JobState, change: Change, now_s: float) -> bool:
    """Whether a member is to leave that stays after the change, and need not wait for others."""
    leaving = state.membership.leaving
    if all(change.kinds.get(node) in LEAVING for node in leaving if node in state.nodes):
        return False
    num_staying = sum(node not in leaving for node in state.nodes)
    num_left = num_staying + len(_joining_nodes(rules, state, now_s))
    return not _is_help_coming(rules, state, num_left, now_s)
