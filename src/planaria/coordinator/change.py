"""Changes while training goes on: nodes that come, nodes that leave in peace, slow ones, and better
plans than a quick answer to a loss.

A change leads from the plan to one for other nodes in switches, each of which begins an epoch at a
commit that all ranks agree upon, so that nothing is done again:

1. Whoever lacks layers of the plan to come becomes a silent member of them: their state is sent at
   the commit, and from then on it takes part in their reductions, adding +0, and takes the same
   steps, while all others train as before. Layers come in waves, an epoch each, none of which
   sends more over any link than it carries in an iteration. Layers that a leaving node is the only
   one to hold come first, so that they are safe if it is gone too early.
2. When all are in, one more switch begins the plan itself; nodes that leave are told to then.

Until then the plan as it is goes on, so a change is weighed as that, followed by its own plan: what
it would gain hardly counts where the next failure is likely to come before all layers have. So what
is not worth it right after a failure is looked at again each time that they have become half as
frequent.

The members of a switch's epoch are recorded before anybody is told, its decision once it has begun.
A loss or a new coordinator ends a change that is not made, and what it needs is looked at anew.

Source: DESIGN 5 (joins, preemption notices); Odyssey, section IV-B, for what has to move.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import frexp
from typing import Final

from planaria.coordinator.choice import candidates_of, gains, time_to_failure_s
from planaria.coordinator.learning.drift import iteration_s, policy_of
from planaria.coordinator.learning.overhead import prices_of, switch_s, with_switch
from planaria.coordinator.learning.slowness import of_members
from planaria.coordinator.placing import copies_of, idle_of
from planaria.coordinator.shortage import degraded_text, shortage_text, tolerated, undrained
from planaria.coordinator.standby import able_candidates, num_taken
from planaria.coordinator.state import (
    JobState,
    Notify,
    RecordDecision,
    RecordMembers,
    Rules,
    Step,
    Tell,
)
from planaria.coordinator.switching import Change, Switch, waves_of, weighed_as
from planaria.coordinator.trust import seen_node
from planaria.core.cluster import ClusterState, NodesChanged
from planaria.core.growing import Growing
from planaria.core.messages import AT_COMMIT, EpochReady, Shutdown, StartEpoch, StopRequested
from planaria.core.plan import Transition
from planaria.core.records import Candidate, Changed, Decision, Members, Outcome, Warned
from planaria.policies.unequal import STAY

JOIN: Final = "join"
SLOW: Final = "slow"
FAST: Final = "fast"  # Seen to be so again, or tried.
REFORM: Final = "reform"
# Policies whose answer to a loss gives way to a better one at a commit.
_IMPROVING: Final = ("adaptive", "repartition")
_STAYING: Final = (JOIN, SLOW, FAST, REFORM)  # Who is a member when the change is made.


def begun(rules: Rules, state: JobState, now_s: float) -> Step:
    """The change that brings members and work nearest to what is asked for, if there is any."""
    if state.change is not None or state.ends or state.stop_requested:
        return state, ()
    known, speeds = state.plan.slow_nodes, state.speeds
    hurried = _hurried(rules, state)
    if not (state.leaving or state.candidates or known or speeds or state.idle or hurried):
        return state, ()  # As after nearly every report.
    leaving = tuple(sorted(set(state.leaving).intersection(state.nodes)))
    joining = _joining(rules, state, len(state.nodes) - len(leaving), now_s)
    tried, slowness = _tried(state), tuple(speeds.values())
    often = frexp(time_to_failure_s(rules, state, now_s))[1]
    asked = (state.nodes, joining, leaving, tuple(speeds), slowness, tried, (often,))
    if not (joining or leaving or known or speeds or tried or hurried) or asked == state.asked:
        return state, ()
    staying = tuple(node for node in state.nodes if node not in leaving)
    num_left = len(staying) + len(joining)
    if leaving and _is_help_coming(rules, state, num_left, now_s):
        return state, ()
    if leaving and (short := shortage_text(rules, num_left)):
        return _too_few(rules, state, num_left, short)
    is_told = asked[:-1] == state.asked[:-1]
    state = replace(state, asked=asked)
    news = {n for n in staying if known.get(n, 1.0) != speeds.get(n, 1.0)}.union(tried)
    slow = tuple(sorted(news.difference(leaving)))
    if not (slow or joining or leaving):  # The last change was for something else.
        slow = tuple(sorted(speeds))
    event = NodesChanged(joining, leaving, slow)
    best, candidates = _chosen(rules, state, event, staying, now_s=now_s)
    is_asked_for = bool(slow or joining or leaving)
    if best is None:
        if not is_asked_for or is_told:
            return state, ()
        text = f"no plan for {num_left} nodes is known; the nodes stay as they are"
        warning = Warned(text=text, undrained=leaving)
        return state, (Notify(warning),)
    placed = tuple(node for node in joining if node in best.after.nodes)
    still = tuple(node for node in slow if node in speeds)
    if not placed and not leaving and not pays(rules, candidates):
        if joining or not still or is_told:
            return state, ()
        return state, (Notify(Warned(text=f"{_slow_text(state, still)}; no plan is faster")),)
    waves = waves_of(
        best, iteration_s=iteration_s(state), leaving=leaving, prices=prices_of(rules, state)
    )
    change = Change(
        kinds=_kinds(state, event, best),
        transition=best,
        candidates=candidates,
        waves=waves,
        began_s=now_s,
        time_to_failure_s=time_to_failure_s(rules, state, now_s),
        silent=state.plan.silent,
        reason=_slow_text(state, still) if still else "" if is_asked_for else hurried,
    )
    return _with_switch(replace(state, change=change))


def _tried(state: JobState) -> tuple[int, ...]:
    """Nodes without work whose speed is forgotten, so that they get some."""
    others = {*state.speeds, *state.plan.nodes}
    return tuple(node for node in state.idle if node in state.nodes and node not in others)


def pays(rules: Rules, candidates: Sequence[Candidate]) -> bool:
    """Whether the best is enough better than what there is."""
    as_is = [candidate for candidate in candidates if candidate.answer == STAY]
    if not as_is:
        return False
    best = max(candidate.score for candidate in candidates)
    samples_per_s = rules.job.training.global_batch_size / as_is[0].iteration_s
    return gains(best, as_is[0].score, samples_per_s=samples_per_s)


def _hurried(rules: Rules, state: JobState) -> str:
    """What the nodes train by for now, in words, where a better plan may follow at a commit; empty
    if none may."""
    policy = rules.job.resilience.policy
    if state.is_settled or policy not in _IMPROVING:
        return ""
    if rules.looks_ahead and state.sought != state.epoch:
        return ""
    if state.plan.gone and policy == "adaptive":
        return f"microbatches went around node {', '.join(map(str, state.plan.gone))}"
    return "the plan was the best at hand" if rules.looks_ahead else ""


def _kinds(state: JobState, event: NodesChanged, transition: Transition) -> dict[int, str]:
    """Why each node is concerned that is; a better plan is nobody's doing."""
    kinds = {node: SLOW if node in state.speeds else FAST for node in event.slow}
    kinds |= {node: JOIN for node in event.joined if node in transition.after.nodes}
    kinds |= {node: state.leaving[node].kind for node in event.leaving}
    return kinds or dict.fromkeys(_reformed(transition), REFORM)


def _reformed(transition: Transition) -> tuple[int, ...]:
    """The nodes that compute other layers afterwards; where none does all have other work: another
    order of it, or other numbers of microbatches."""
    before, after = transition.before.layers_by_rank, transition.after.layers_by_rank
    per_node = transition.after.pipelines[0].template.devices_per_node
    moved = tuple(sorted({r // per_node for r in after if before.get(r) != after[r]}))
    return moved or transition.after.nodes


def _slow_text(state: JobState, slow: tuple[int, ...]) -> str:
    """How slow these nodes are, in words."""
    takes = (f"node {node} takes {1.0 / state.speeds[node]:.2f} times" for node in slow)
    return f"{', '.join(takes)} as long as usual"


def _joining(rules: Rules, state: JobState, num_staying: int, now_s: float) -> tuple[int, ...]:
    """The candidates that are taken now."""
    able = able_candidates(state, now_s)
    number = num_taken(rules, num_staying=num_staying, num_able=len(able))
    return tuple(sorted(able[:number]))


def _is_help_coming(rules: Rules, state: JobState, num_left: int, now_s: float) -> bool:
    """Whether those that stay would tolerate fewer failures, but nodes are about to join, and those
    that leave can wait for them."""
    if num_left >= (rules.job.resilience.failures_tolerated + 1) * rules.n0:
        return False
    is_coming = any(
        waits.not_before_s <= now_s and not state.has_workers(node)
        for node, waits in state.candidates.items()
    )
    return is_coming and all(now_s < leave.until_s for leave in state.leaving.values())


def _too_few(rules: Rules, state: JobState, num_left: int, shortage: str) -> Step:
    """Those that need not go stay; only nodes that are taken away end the job, saved."""
    kept, refused = undrained(rules, state, num_left)
    if refused:
        return kept, refused
    stopping = replace(state, stop_requested=True, stop_reason=shortage)
    return stopping, (Tell(StopRequested()),)


def _chosen(
    rules: Rules,
    state: JobState,
    event: NodesChanged,
    staying: tuple[int, ...],
    *,
    now_s: float,
) -> tuple[Transition | None, tuple[Candidate, ...]]:
    """The best of what the policy would do, if it knows anything, and the prices of all."""
    held, prices = state.plan.held_by_rank, prices_of(rules, state)
    cluster = ClusterState(
        state.epoch + 1,
        tuple(seen_node(state, node, held, now_s) for node in sorted((*staying, *event.joined))),
        tuple(seen_node(state, node, held, now_s) for node in event.leaving),
    )
    changes = policy_of(rules, state).propose(state.plan, cluster, event, prices)
    weighed = weighed_as(
        changes,
        iteration_s=iteration_s(state),
        leaving=event.leaving,
        prices=prices,
        switch_s=partial(switch_s, rules, state),
    )
    return candidates_of(rules, state, changes, now_s, weighed=weighed)


# -- switches -------------------------------------------------------------------------------------


def _with_switch(state: JobState) -> Step:
    """The change with its next switch; its members are to be recorded."""
    assert state.change is not None
    change, epoch = state.change, state.epoch + 1
    joined = {node for node, kind in change.kinds.items() if kind == JOIN}
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
        there = sorted({*state.nodes, *joined})
        nodes = tuple(n for n in there if change.kinds.get(n, JOIN) in _STAYING)
    rounds = (tuple(wave),) if wave else ()
    switch = Switch(epoch=epoch, nodes=nodes, plan=plan, rounds=rounds)
    gone = tuple(sorted({*state.gone, *set(state.nodes).difference(nodes)}))
    members = Members(
        epoch=epoch,
        term=state.term,
        nodes=nodes,
        gone=gone,
        is_planned=True,
        failures=dict(state.failures),
        history=state.history,
        findings=state.learning.findings,
        spoilt=tuple(sorted(state.spoilt)),
    )
    return replace(state, change=replace(change, switch=switch)), (RecordMembers(members),)


def told(rules: Rules, state: JobState) -> Step:
    """The members of the next epoch are on record: everybody is told to begin it together."""
    change, switch = state.change, state.switch
    assert change is not None
    assert switch is not None
    state = replace(state, change=replace(change, switch=replace(switch, is_told=True)))
    order = _order(rules, state, switch, AT_COMMIT)
    return state, (Tell(order, tuple(sorted({*state.nodes, *switch.nodes}))),)


def _order(rules: Rules, state: JobState, switch: Switch, iteration: int) -> StartEpoch:
    copies = copies_of(rules, switch.plan)
    return StartEpoch(
        epoch=switch.epoch,
        plan=switch.plan,
        # Those that leave too: what they have not read yet must not be cut off.
        addresses={rank: (worker.host, worker.port) for rank, worker in state.workers.items()},
        iteration=iteration,
        rounds=switch.rounds,
        since=state.origin.epoch,
        copies=copies,
        idle=idle_of(rules, switch.plan, copies),
    )


def entering(state: JobState, ready: EpochReady) -> JobState:
    """A rank has begun the next epoch; not all may have ended this one yet."""
    change, switch = state.change, state.switch
    assert change is not None
    assert switch is not None
    switch = replace(switch, ready=switch.ready.plus(ready.rank, ready))
    return replace(state, change=replace(change, switch=switch))


def switched(rules: Rules, state: JobState) -> Step:
    """All ranks have ended this epoch by agreement: the next one has begun."""
    change, switch = state.change, state.switch
    assert change is not None
    assert switch is not None
    number = state.next_iteration
    outcome = Outcome(epoch=switch.epoch, iteration=number, is_redo=False, origin=state.origin)
    # Waves come while the plan is as it was.
    predicted_s = iteration_s(state) if switch.rounds else change.transition.iteration_s
    decision = Decision(order=_order(rules, state, switch, number), predicted_s=predicted_s)
    left = tuple(node for node in state.nodes if node not in switch.nodes)
    state = replace(
        state,
        epoch=switch.epoch,
        nodes=switch.nodes,
        plan=switch.plan,
        ready=switch.ready,
        is_entered=False,
        outcome=outcome,
        decision=decision,
        learning=replace(state.learning, plan_s=0.0),
        change=replace(change, switch=None, trained=state.plan.all_ranks),
        gone=tuple(sorted({*state.gone, *left})),
        candidates={n: c for n, c in state.candidates.items() if n not in switch.nodes},
        leaving={node: kind for node, kind in state.leaving.items() if node in switch.nodes},
        workers=Growing({r: w for r, w in state.workers.items() if w.node not in left}),
    )
    record = RecordDecision(outcome, decision)
    return of_members(state), (record, *((Tell(Shutdown(), left),) if left else ()))


def entered(rules: Rules, state: JobState, now_s: float) -> Step:
    """Every rank has begun the epoch; what the change has cost so far, or that it is made."""
    change = state.change
    if change is None or change.switch is not None:
        return state, ()
    # Whoever did not train before had nothing to pause.
    paused = [event for rank, event in state.ready.items() if rank in change.trained]
    pause_s = max((event.regroup_s + event.transfer_s for event in paused), default=0.0)
    state = with_switch(rules, state, pause_s)
    change = replace(change, pause_s=change.pause_s + pause_s)
    if state.plan.silent or change.waves:
        return replace(state, change=change), ()
    degraded = degraded_text(rules, state, state.plan)
    transition = change.transition
    notice = Changed(
        epoch=state.epoch,
        kinds=dict(change.kinds),
        iteration=state.next_iteration,
        policy=transition.policy,
        answer=transition.answer,
        candidates=change.candidates,
        plan=state.plan,
        predicted_s=transition.iteration_s,
        predicted_pause_s=transition.downtime_s,
        transfer_bytes=sum(t.num_bytes for transfers in transition.rounds for t in transfers),
        received_bytes=change.received_bytes,
        asked_s=change.began_s,
        pause_s=change.pause_s,
        now_s=now_s,
        time_to_failure_s=change.time_to_failure_s,
        reason=change.reason,
        degraded=degraded,
    )
    f = rules.job.resilience.failures_tolerated
    kinds = set(change.kinds.values())
    is_settled = kinds <= {REFORM} or (state.is_settled and kinds <= {SLOW, FAST})
    is_degraded = bool(degraded) or (state.is_degraded and tolerated(rules, state, state.plan) < f)
    state = replace(state, change=None, is_settled=is_settled, is_degraded=is_degraded)
    return state, (Notify(notice),)


def continued(state: JobState) -> Step:
    """The next switch of the change, once the silent ranks have taken a step with their layers."""
    change = state.change
    if change is None or change.switch is not None or not state.is_entered:
        return state, ()
    assert state.outcome is not None
    if state.next_iteration <= state.outcome.iteration or state.stop_requested or state.ends:
        return state, ()
    return _with_switch(state)
