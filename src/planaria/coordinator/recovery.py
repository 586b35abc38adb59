"""The recovery from a loss: which nodes are left, where they go on, and with which plan.

1. Members: the record of the nodes that are left is written before anybody is told
   (`begin_recovery`).
2. Answers: each member leaves the epoch before, then says what it holds. If holders of a layer have
   different hashes of it, the nodes that the majority outvotes are lost too; without a majority the
   job ends.
3. Outcome: the newest commit vector that any member holds says where all go on. It proves that all
   gradients of its iteration are complete on every holder, so that members without the vector can
   apply them too. Newer iterations are done again. If all go back to an older state, that state is
   the outcome (outcomes.py).
4. Decision: the policy proposes transitions, these are priced, and the best is taken. If there is
   none, or the job file says to stop, the live layers are saved and the job ends.

Outcome and decision are recorded before anybody is told. An outcome holds in all later epochs.

Source: docs/protocol.md, "The outcome". The search in tests/coordinator/
test_commit_search.py shows that the order of steps 1 and 2 is needed.
"""

from collections.abc import Mapping

import msgspec

from planaria.coordinator.commands import (
    Command,
    End,
    Evict,
    Notify,
    RecordDecision,
    RecordMembers,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.foresight import expected_recovery, with_likely
from planaria.coordinator.learning.history import with_failure
from planaria.coordinator.learning.overhead import prices_of, regroup_s, with_choice
from planaria.coordinator.learning.profile_correction import policy_of
from planaria.coordinator.learning.slowness import with_joining_speeds, without_former_members
from planaria.coordinator.membership.shortage import (
    degraded_text,
    is_newly_degraded,
    left_text,
    owes_save,
    refuse_drains,
    shortage_text,
    with_owed_save,
    with_tolerance,
    with_untold_shortage,
)
from planaria.coordinator.membership.standby import (
    await_machine,
    can_await,
    is_ending,
    is_granted_soon,
    may_return,
    replacements_at_loss,
)
from planaria.coordinator.membership.trust import node_for_policies, with_failures, without_gone
from planaria.coordinator.membership.untold import untold_joined, untold_warnings
from planaria.coordinator.outcomes import (
    Verdict,
    back_point,
    go_back,
    held_layers,
    is_elsewhere,
    outcome_of,
    safest_copies,
    save_point,
    settled_holders,
    verdict,
    votes,
    writers_of,
)
from planaria.coordinator.placing import copies_of, idle_of, with_exposed_domains
from planaria.coordinator.saves import await_saves, drop_partial, has_late_answer
from planaria.coordinator.state import EpochFacts, JobState, Loss, Phase, PlanSearch, Step
from planaria.coordinator.transition_choice import (
    choice_among,
    decision_inputs,
    time_to_failure_s,
)
from planaria.core.cluster import ClusterState, NodesLost
from planaria.core.commit import decode_vector
from planaria.core.findings import FailureHistory
from planaria.core.kinds import LOSSLESS, Ending, LossKind
from planaria.core.messages import Raised, SaveLayers, StartEpoch, WorkerFailed
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Transition
from planaria.core.records import Decided, Decision, Members, Outcome, Recovering


def begin_recovery(
    rules: Rules,
    state: JobState,
    kind: LossKind,
    nodes: tuple[int, ...],
    *,
    reason: str,
    now_s: float,
    node: int = -1,
    raised: Raised | None = None,
) -> Step:
    """Begins the next epoch without the lost nodes; a change that is under way is dropped.

    Args:
        kind: name of what happened, as the report has it.
        node: the node concerned if `nodes` is empty; -1: none.
        raised: error of a worker of that node.
    """
    concerned = nodes or ((node,) if node >= 0 else ())
    state = with_failures(state, nodes, now_s)
    history = _history(rules, state, kind, concerned, now_s=now_s)
    members, alive = state.membership, tuple(n for n in state.all_nodes if n not in nodes)
    num_left = sum(member not in members.leaving for member in alive)
    replacements = replacements_at_loss(rules, state, num_left, now_s)
    remaining = tuple(sorted({*alive, *replacements}))
    joined, departures = {*replacements, *untold_joined(state, alive)}, untold_warnings(state)
    epoch = max(state.epochs) + 1
    state = with_joining_speeds(state, remaining)
    loss = Loss(kind, concerned, reason, now_s, tuple(sorted(joined)))
    over = {*remaining, *nodes}  # A node that is lost while it joins is a candidate, too.
    members = replace(
        members,
        gone=tuple(sorted({*members.gone, *nodes})),
        candidates={n: waits for n, waits in members.candidates.items() if n not in over},
        leaving={n: leave for n, leave in members.leaving.items() if n in remaining},
        postponed={n: leave for n, leave in members.postponed.items() if n in remaining},
        untold={},
        history=history,
    )
    state, dropped = drop_partial(state)
    state = replace(
        state,
        epoch=epoch,
        nodes=remaining,
        phase=Phase.RECORDING,
        workers=PersistentMap({r: w for r, w in state.workers.items() if w.node not in nodes}),
        change=None,
        membership=members,
        facts=EpochFacts(loss=loss, holding=sure_holders(state)),
        saves=replace(state.saves, since_epoch=epoch),
        search=PlanSearch(short_of_memory=state.search.short_of_memory),
    )
    state = without_gone(without_former_members(state))
    evict = (Evict(nodes),) if nodes else ()
    commands: tuple[Command, ...] = (*departures, Notify(_notice(state, raised)), *dropped, *evict)
    if not (remaining or can_await(rules, state) or may_return(state)):
        lost = "; what was not saved yet is lost" if state.stop.failure else ""
        state, end = _end_unsaved(state, f"no node is left{lost}")
        return state, (*commands, *end)
    return state, (*commands, RecordMembers(_members(state)))


def _notice(state: JobState, raised: Raised | None) -> Recovering:
    """The launcher's notice of the loss that this epoch recovers from."""
    loss = state.facts.loss
    assert loss is not None
    return Recovering(
        epoch=state.epoch,
        kind=loss.kind,
        nodes=loss.nodes,
        iteration=state.commits.next_iteration,
        reason=loss.reason,
        lost_s=loss.lost_s,
        is_forking=state.is_forking or bool(replaceable_workers(state)),
        raised=raised,
    )


def replaceable_workers(state: JobState) -> dict[int, int]:
    """Process ids, by rank, of workers that raised and whose layers sound workers hold too.

    Empty in a job that has failed: it replaces no worker.
    """
    holding, raised = state.facts.holding, state.troubles.raised
    if state.stop.failure is not None or not raised:
        return {}
    held = state.plan.layers_by_rank
    sound = [r for r in held if r in holding and r not in raised and state.has_rank(r)]
    covered = {layer for rank in sound for layer in held[rank]}
    return {
        rank: pid
        for rank, pid in raised.items()
        if state.has_rank(rank) and covered.issuperset(held.get(rank, ()))
    }


def sure_holders(state: JobState) -> frozenset[int]:
    """The ranks that surely hold all layers that the plan of the ending epoch gives them."""
    if not state.facts.ready:  # Ranks have not begun the epoch.
        return state.facts.holding
    return frozenset(state.facts.ready) if state.change is None else frozenset()


def _history(
    rules: Rules, state: JobState, kind: LossKind, concerned: tuple[int, ...], *, now_s: float
) -> FailureHistory:
    """The failure history with this loss added, if the loss is a failure of the job's nodes."""
    if kind in LOSSLESS:
        return state.membership.history
    # A spoilt copy leaves the live layers intact.
    struck = () if kind is LossKind.COPY else concerned
    lease_s = rules.job.cluster.lease_s
    return with_failure(state.membership.history, now_s, nodes=struck, lease_s=lease_s)


def _members(state: JobState) -> Members:
    return Members(
        epoch=state.epoch,
        term=state.term,
        nodes=state.nodes,
        gone=state.membership.gone,
        failures=dict(state.membership.failures),
        history=state.membership.history,
        findings=state.learning.findings,
        spoilt=tuple(sorted(state.saves.surely_spoilt)),
    )


def decide(rules: Rules, state: JobState, now_s: float) -> Step:
    """Decides where all go on, and how, once every member has answered."""
    loss = state.facts.loss
    if loss is not None and loss.awaits_saves and has_late_answer(rules, state, now_s):
        return state, ()
    judged = verdict(votes(state.facts.answers.values()), devices_per_node=state.devices_per_node)
    if judged.layer >= 0:
        return _recover_without_odd(rules, state, judged, now_s)
    num_staying = sum(node not in state.membership.leaving for node in state.nodes)
    state, refused = refuse_drains(rules, state, num_staying)
    state, commands = _choose_continuation(rules, state, now_s)
    return state, (*refused, *commands)


def _choose_continuation(rules: Rules, state: JobState, now_s: float) -> Step:
    """Goes on with a plan, saves for the last time, waits, or ends the job."""
    outcome = outcome_of(state)
    held = held_layers(rules, state, outcome)
    cluster = _cluster(rules, state, held, now_s)
    num_nodes = _num_going_on(rules, state, len(cluster.nodes))
    ends = _has_agreed_to_end(rules, state, outcome)
    if ends and not _is_trained(rules, state, outcome):
        state = with_untold_shortage(rules, state, num_nodes)
        ends = not _has_nodes_again(rules, state, num_nodes)
    state = replace(state, commits=replace(state.commits, ends=state.commits.ends and ends))
    answered, missing = state, _missing_layers(rules, state, outcome, cluster)
    is_saved = ends and state.saves.newest_iteration >= outcome.iteration
    point = back_point(rules, state, outcome) if missing and not is_saved else None
    # A job that ends need not go back to a save: that save is on disk anyway.
    must_end = state.stop.failure is not None or bool(state.stop.must_end)
    if must_end and missing and not is_saved and not (point and point.copied):
        return _end_unsaved(state, _unsaved_text(missing[0]))
    if (missing or ends) and has_late_answer(rules, state, now_s):
        return await_saves(rules, state, now_s)
    redone = rules.job.training.global_batch_size if outcome.is_redo else 0
    if point is not None:
        state, outcome = go_back(state, point)
        held, redone = held_layers(rules, state, outcome), point.redone_samples
        cluster, missing, ends = _cluster(rules, state, held, now_s), (), False
    reports = {i: r for i, r in state.commits.reports.items() if i < outcome.iteration}
    state = replace(state, commits=replace(state.commits, reports=reports))
    if state.stop.failure is not None:
        if missing:  # The job was to go on from copies, and they are gone too.
            return _end_unsaved(state, _unsaved_text(missing[0]))
        reason = state.stop.failed_reason
        return _save_then_end(state, outcome, held, ending=Ending.FAILED, reason=reason)
    is_done = point is not None and point.iteration >= rules.job.training.iterations
    if is_done or (ends and (is_saved or not missing)):
        return _save_then_end(state, outcome, held, ending="", reason="")
    if state.stop.shortage and not state.stop.must_end:  # Nodes may have joined since the stop.
        state = replace(state, stop=replace(state.stop, is_requested=False, shortage=""))
        answered = replace(answered, stop=replace(answered.stop, is_requested=False, shortage=""))
    reason = state.stop.must_end or shortage_text(rules, num_nodes)
    if not reason:
        event = _loss_event(rules, state, outcome, redone)
        proposed = policy_of(rules, state).propose(
            state.plan, cluster, event, prices_of(rules, state)
        )
        transitions = tuple(
            transition for transition in proposed if transition.goes_back or not missing
        )
        if transitions:
            return _resume(rules, state, outcome, event, cluster, transitions, now_s)
        reason = f"{left_text(num_nodes)}, and no policy knows an answer"
    if missing:
        return _end_unsaved(state, _uncopied_text(state, missing[0]))
    if joined := _with_joined(rules, answered, num_nodes, now_s):
        return joined
    is_saved_first = can_await(rules, state) and _has_unsaved(state, outcome)
    if is_granted_soon(rules, answered, now_s) and not is_saved_first:
        return await_machine(rules, answered, reason, now_s)
    return _save_then_end(state, outcome, held, ending=Ending.LOST, reason=reason)


def _with_joined(rules: Rules, state: JobState, num_nodes: int, now_s: float) -> Step | None:
    """Begins an epoch with nodes that have joined since the loss; None if none help.

    If no machine is waited for, they help only if there are enough with them.
    """
    replacements = replacements_at_loss(rules, state, num_nodes, now_s)
    is_short = bool(shortage_text(rules, num_nodes)) and not is_ending(state)
    is_filled = is_short and not shortage_text(rules, num_nodes + len(replacements))
    is_awaited = can_await(rules, state) or is_granted_soon(rules, state, now_s)
    if not replacements or not (is_filled or is_awaited):
        return None
    reason = "a node has joined"
    return begin_recovery(rules, state, LossKind.GRANTED, (), reason=reason, now_s=now_s)


def _has_agreed_to_end(rules: Rules, state: JobState, outcome: Outcome) -> bool:
    """Whether all members have agreed that training ends with the outcome."""
    if not outcome.vector:
        return state.commits.ends
    vector = decode_vector(outcome.vector, rules.layout)
    return vector.is_last(outcome.iteration - 1, rules.job.training)


def _is_trained(rules: Rules, state: JobState, outcome: Outcome) -> bool:
    """Whether training would end with the outcome though nobody had asked for that."""
    training = rules.job.training
    if not outcome.vector:
        return state.commits.is_trained or outcome.iteration >= training.iterations
    vector = decode_vector(outcome.vector, rules.layout)
    return vector.is_trained(outcome.iteration - 1, training)


def _has_nodes_again(rules: Rules, state: JobState, num_nodes: int) -> bool:
    """Whether members agreed to end because too few were left, and there are enough by now."""
    is_for_want = bool(state.stop.shortage) and not state.stop.must_end
    return is_for_want and not shortage_text(rules, num_nodes)


def _missing_layers(
    rules: Rules, state: JobState, outcome: Outcome, cluster: ClusterState
) -> tuple[int, ...]:
    """The layers that nobody holds; none if no node is left of a job that was not trained yet."""
    origin = state.commits.origin
    is_begun = outcome.iteration > origin.iteration or origin.copied is not None
    if not (cluster.nodes or is_begun or origin.source in state.saves.spoilt):
        return ()
    return cluster.lost_layers(rules.num_layers)


def _num_going_on(rules: Rules, state: JobState, num_nodes: int) -> int:
    """The number of nodes that go on; those that leave do not if the job waits for others."""
    if not can_await(rules, state):
        return num_nodes
    return sum(node not in state.membership.leaving for node in state.nodes)


def _has_unsaved(state: JobState, outcome: Outcome) -> bool:
    """Whether the state at the outcome is not on disk as a save."""
    origin = state.commits.origin
    is_trained = outcome.iteration > origin.iteration or origin.copied is not None
    return is_trained and state.saves.newest_iteration < outcome.iteration


def await_machines(rules: Rules, state: JobState, reason: str, now_s: float) -> Step | None:
    """Has members that hold saved layers wait for machines; None if the job ends instead.

    The time counts from the first call. If nodes have come since the save began, they fill the gap.
    """
    num_staying = _num_going_on(rules, state, len(state.nodes))
    if joined := _with_joined(rules, state, num_staying, now_s):
        return joined
    if not can_await(rules, state):
        return None
    loss = state.facts.loss
    if loss is None or not loss.is_waiting:
        facts = replace(state.facts, loss=Loss(LossKind.SHORT, (), reason, now_s))
        state = replace(state, facts=facts)
    if not is_granted_soon(rules, state, now_s):
        return None
    return await_machine(rules, state, reason, now_s)


def _loss_event(rules: Rules, state: JobState, outcome: Outcome, redone: int) -> NodesLost:
    """The loss, as policies are told of it."""
    assert state.facts.loss is not None
    nodes = tuple(node for node in state.facts.loss.nodes if node not in state.nodes)
    return NodesLost(nodes, redone, save_point(rules, state, outcome, redone))


def on_hashes_differ(rules: Rules, state: JobState, now_s: float) -> Step:
    """Begins an epoch without the odd nodes; every rank left this one because hashes differ."""
    judged = verdict(votes(state.facts.corrupted.values()), devices_per_node=state.devices_per_node)
    if judged.layer < 0:
        reason = "the sums of the holders' hashes are wrong, though the hashes agree"
        return _end_unsaved(state, f"{reason}: nothing of this is saved")
    return _recover_without_odd(rules, state, judged, now_s)


def _recover_without_odd(rules: Rules, state: JobState, judged: Verdict, now_s: float) -> Step:
    """Begins an epoch without the odd nodes, or ends the job if no majority shows who is right."""
    if judged.undecided and has_late_answer(rules, state, now_s):
        return await_saves(rules, state, now_s)  # That save may be all that the job leaves.
    if judged.undecided:
        nodes = " and ".join(map(str, judged.undecided))
        return _end_unsaved(
            state,
            f"nodes {nodes} have different parameters in layer {judged.layer}, and no majority "
            "tells which are right, so none of it is saved: the memory of one is faulty, or the "
            "model's forward changes its parameters",
        )
    nodes = " and ".join(map(str, judged.odd))
    reason = (
        f"the parameters of layer {judged.layer} on node {nodes} have another hash than on "
        "most other nodes"
    )
    return begin_recovery(rules, state, LossKind.LOST, judged.odd, reason=reason, now_s=now_s)


def _cluster(
    rules: Rules, state: JobState, held: Mapping[int, frozenset[int]], now_s: float
) -> ClusterState:
    """The members as policies see them.

    Leaving nodes only give away what they hold, unless fewer than n0 nodes would stay.
    """
    nodes = [node_for_policies(state, node, held, now_s) for node in state.nodes]
    staying = tuple(node for node in nodes if node.node not in state.membership.leaving)
    if len(staying) < rules.n0:
        return ClusterState(state.epoch, tuple(nodes))
    leaving = tuple(node for node in nodes if node.node in state.membership.leaving)
    return ClusterState(state.epoch, staying, leaving)


def _resume(
    rules: Rules,
    state: JobState,
    outcome: Outcome,
    event: NodesLost,
    cluster: ClusterState,
    transitions: tuple[Transition, ...],
    now_s: float,
) -> Step:
    """Takes the best of the transitions, and records it."""
    loss = state.facts.loss
    assert loss is not None
    best, candidates = choice_among(rules, state, transitions, loss.lost_s)
    assert best is not None
    if best.goes_back and has_late_answer(rules, state, now_s):
        return await_saves(rules, state, now_s)
    inputs = decision_inputs(
        rules, state, cluster, event, loss.lost_s, is_foreseen=best.is_foreseen
    )
    if best.goes_back and event.saved is not None and is_elsewhere(state, outcome, event.saved):
        state, outcome = go_back(state, event.saved)
    is_new = is_newly_degraded(rules, state, len(state.nodes), best.after)
    order = _order(rules, state, outcome, best, persists=owes_save(rules, state, best.after))
    recovery = expected_recovery(rules, state, best.downtime_s)
    notice = Decided(
        epoch=state.epoch,
        iteration=outcome.iteration,
        policy=best.policy,
        answer=best.answer,
        candidates=candidates,
        plan=best.after,
        predicted_s=best.iteration_s,
        predicted_downtime_s=best.downtime_s,
        predicted_transfer_s=best.downtime_s - regroup_s(rules, state, best.after),
        transfer_bytes=sum(t.num_bytes for transfers in best.rounds for t in transfers),
        redone_samples=best.redone_samples,
        joined=loss.joined,
        source=order.source if state.commits.origin.epoch == state.epoch else "",
        copied=order.copied.age if order.copied else -1,
        detected_s=now_s,
        noticed_s=loss.lost_s,
        predicted_recovery_s=recovery.likely_s,
        predicted_recovery_s_min=recovery.least_s,
        predicted_recovery_s_max=recovery.most_s,
        time_to_failure_s=time_to_failure_s(rules, state, loss.lost_s),
        degraded=degraded_text(rules, len(state.nodes), best.after),
        is_newly_degraded=is_new,
        inputs=inputs,
    )
    decision = Decision(order=order, predicted_s=best.iteration_s)
    state = with_likely(with_choice(rules, state, best, now_s), recovery.likely_s)
    state = with_owed_save(rules, state, order)
    state = with_tolerance(rules, replace(state, plan=best.after))
    state, warnings = with_exposed_domains(rules, state, best.after, order.copies)
    state, commands = _record_decision(state, outcome, decision)
    return state, (Notify(notice), *warnings, *commands)


def _order(
    rules: Rules, state: JobState, outcome: Outcome, best: Transition, *, persists: bool
) -> StartEpoch:
    origin = state.commits.origin
    is_begun = outcome.iteration > origin.iteration
    copies = copies_of(rules, best.after, state.membership.domains)
    return StartEpoch(
        epoch=state.epoch,
        plan=best.after,
        addresses={},
        iteration=outcome.iteration,
        vector=outcome.vector,
        source="" if is_begun else origin.source,
        rounds=best.rounds,
        persists=persists and _has_unsaved(state, outcome),
        since=origin.epoch,
        copies=copies,
        copied=None if is_begun else origin.copied,
        # A newer copy belongs to an iteration that is done again, so it is of no use.
        kept=safest_copies(rules, state, most=outcome.iteration),
        idle=idle_of(rules, best.after, copies),
    )


def _save_then_end(
    state: JobState,
    outcome: Outcome,
    held: Mapping[int, frozenset[int]],
    *,
    ending: str,
    reason: str,
) -> Step:
    """Has each layer saved by one of its holders before the job ends."""
    origin = state.commits.origin
    is_begun = outcome.iteration > origin.iteration
    # Nothing was trained since the save or the seed.
    if ending and not is_begun and not origin.copied:
        return end_job(state, End(Ending(ending), reason, state.stop.failure))
    layers = {} if state.saves.newest_iteration >= outcome.iteration else writers_of(state, held)
    order = SaveLayers(
        epoch=state.epoch,
        iteration=outcome.iteration,
        layers=layers,
        vector=outcome.vector,
        since=origin.epoch,
        copied=None if is_begun else origin.copied,
    )
    decision = Decision(order=order, ending=ending, reason=reason, failure=state.stop.failure)
    return _record_decision(state, outcome, decision, settled_holders(state, outcome, held))


def _record_decision(
    state: JobState, outcome: Outcome, decision: Decision, holding: frozenset[int] = frozenset()
) -> Step:
    """Records where all go on, and how; `holding` as in the facts of the epoch."""
    state = replace(
        state,
        phase=Phase.DECIDING,
        commits=replace(state.commits, outcome=outcome),
        facts=replace(state.facts, decision=decision, holding=holding),
    )
    return state, (RecordDecision(outcome, decision),)


def _unsaved_text(layer: int) -> str:
    return f"no live node holds layer {layer}, so nothing was saved"


def _uncopied_text(state: JobState, layer: int) -> str:
    """The loss of a layer in words, with its reason if the nodes that held it live."""
    loss = state.facts.loss
    assert loss is not None
    reason = f": {loss.reason}" if loss.kind in (LossKind.CRASH, LossKind.COPY) else ""
    return f"no live node holds layer {layer}, and no copy of it is left{reason}"


def _end_unsaved(state: JobState, reason: str) -> Step:
    """Ends the job without a save of the live layers."""
    if state.stop.failure is not None:
        failure = unsaved_failure(state.stop.failure, reason)
        return end_job(state, End(Ending.FAILED, reason, failure))
    reason = f"{state.stop.must_end}; {reason}" if state.stop.must_end else reason
    return end_job(state, End(Ending.LOST, reason))


def end_job(state: JobState, end: End) -> Step:
    """Ends the job."""
    return replace(state, phase=Phase.ENDED), (end,)


def with_reason(failure: WorkerFailed, reason: str) -> WorkerFailed:
    """The failure, with a further reason appended to its traceback."""
    text = f"{failure.traceback.rstrip()}\n{reason}" if failure.traceback else reason
    return msgspec.structs.replace(failure, traceback=text)


def unsaved_failure(failure: WorkerFailed, reason: str) -> WorkerFailed:
    """The failure, with the reason why live layers are not saved.

    The reason is also appended to the remedy of a user's mistake, which is shown in place of the
    traceback.
    """
    failure = with_reason(failure, reason)
    if failure.mistake is None:
        return failure
    field, value, remedy = failure.mistake
    return msgspec.structs.replace(failure, mistake=(field, value, f"{remedy}; {reason}"))
