"""The coordinator as a function: (state, event, now) -> (state, commands).

An epoch goes through the phases of `Phase`:

    RECORDING   its members are written down
    STOPPING    they leave the epoch before, and answer what they hold (not in the first epoch)
    DECIDING    where all go on, and with which plan, is written down (recovery.py)
    JOINING     every rank of the plan has a worker
    STARTING    every rank holds its layers, and its links are up
    TRAINING    iterations are committed, each when every rank has reported the age after it
    SAVING      the last iteration is committed; its save is awaited

A loss in any phase begins the next epoch. Events are facts: each is noted when it comes, in
whatever order, and then the state advances as far as the facts allow. What a rank says twice, or
says of an older epoch, changes nothing. A coordinator that is restarted from its records is told
all facts again, and so gets where it was.

It decides; who calls it (nodes/leader.py) acts.

Source: DESIGN 4.5, 5 and 6 (Coordination).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from planaria.coordinator.recovery import decided, lost, refuted
from planaria.coordinator.saves import layers_saved, save_failed
from planaria.coordinator.state import (
    Command,
    DecisionRecorded,
    End,
    Ending,
    JobState,
    MembersRecorded,
    Notify,
    Phase,
    Published,
    Rules,
    Step,
    Tell,
    Tick,
)
from planaria.core.commit import decode_vector
from planaria.core.messages import (
    Abort,
    Corrupted,
    EpochReady,
    Fact,
    IterationDone,
    LayersSaved,
    NodeLost,
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
from planaria.core.records import (
    Committed,
    Running,
    Starting,
    Warned,
)

# With no iteration committed in between: of one rank with the same status, and of epochs.
CRASHES_MAX = 3
BROKEN_LINKS_MAX = 3

Event = Fact | NodeLost | StopRequested | MembersRecorded | DecisionRecorded | Published | Tick


def step(rules: Rules, state: JobState, event: Event, now_s: float) -> Step:
    """The state after an event, and what is to be done about it."""
    if state.phase is Phase.ENDED:
        return state, ()
    state, noted = _noted(rules, state, event, now_s)
    state, commands = advanced(rules, state, now_s)
    return state, (*noted, *commands)


def _noted(rules: Rules, state: JobState, event: Event, now_s: float) -> Step:
    """The state with one more fact in it."""
    match event:
        case WorkerReady() if event.rank in state.ranks:
            return replace(state, workers={**state.workers, event.rank: event}), ()
        case Stopped() if event.epoch == state.epoch and event.rank in state.ranks:
            return replace(state, answers={**state.answers, event.rank: event}), ()
        case EpochReady() if event.epoch == state.epoch:
            return replace(state, ready={**state.ready, event.rank: event}), ()
        case IterationDone() if _is_open(state, event):
            reports = {**state.reports.get(event.iteration, {}), event.rank: event}
            return replace(state, reports={**state.reports, event.iteration: reports}), ()
        case Corrupted() if event.epoch == state.epoch:
            return replace(state, corrupted={**state.corrupted, event.rank: event}), ()
        case LayersSaved():
            return layers_saved(state, event)
        case Published():
            return replace(state, published=max(state.published, event.iteration)), ()
        case SaveFailed() if event.epoch == state.epoch:
            return save_failed(state, event)
        case StopRequested() if not state.stop_requested:
            return replace(state, stop_requested=True), (Tell(event),)
        case WorkerFailed():
            return _end(state, End(Ending.FAILED, "the code in a worker raised", event))
        case WorkerExited() if event.rank in state.ranks:
            return _worker_exited(state, event, now_s)
        case NodeLost() if event.node in state.nodes:
            return lost(state, "lost", (event.node,), reason=event.reason, now_s=now_s)
        case PeerUnreachable() if event.epoch == state.epoch:
            since_s = state.unreachable_s or now_s
            unreached = (*state.unreached, event.peer)
            return replace(state, unreachable_s=since_s, unreached=unreached), ()
        case MembersRecorded(epoch) if epoch == state.epoch and state.phase is Phase.RECORDING:
            order = Abort(epoch=state.epoch, nodes=state.nodes)
            return replace(state, phase=Phase.STOPPING), (Tell(order),)
        case DecisionRecorded(epoch) if epoch == state.epoch and state.phase is Phase.DECIDING:
            return replace(state, phase=Phase.JOINING), ()
        case Tick() if state.unreachable_s:
            # Whoever cannot be reached is usually lost, and then found within a lease.
            if now_s - state.unreachable_s > rules.job.cluster.lease_s:
                return _link_broken(state, now_s)
    return state, ()


def advanced(rules: Rules, state: JobState, now_s: float) -> Step:
    """The state as far as the facts in it allow."""
    commands: list[Command] = []
    while True:
        before = state.phase
        state, more = _advanced(rules, state, now_s)
        commands += more
        if state.phase is before:
            return state, tuple(commands)


def _advanced(rules: Rules, state: JobState, now_s: float) -> Step:
    """One phase further, if nothing is missing."""
    match state.phase:
        case Phase.STOPPING if set(state.answers) >= set(state.ranks):
            return decided(rules, state, now_s)
        case Phase.JOINING:
            return _joined(rules, state, now_s)
        case Phase.STARTING if set(state.ready) >= set(state.plan.ranks):
            return _running(state, now_s)
        case Phase.TRAINING if set(state.corrupted) >= set(state.plan.ranks):
            return refuted(state, now_s)
        case Phase.TRAINING:
            return _committed(state, now_s)
        case Phase.SAVING:
            return _saved(rules, state)
    return state, ()


def _joined(rules: Rules, state: JobState, now_s: float) -> Step:
    """Tells the order of this epoch once all whom it needs are there."""
    assert state.decision is not None
    order = state.decision.order
    if not set(state.workers) >= set(state.ranks):
        return state, ()
    state, settled = _settled(rules, state, now_s)
    if isinstance(order, SaveLayers):
        return replace(state, phase=Phase.SAVING), (*settled, Tell(order))
    addresses = {rank: (w.host, w.port) for rank, w in state.workers.items()}
    order = _with_addresses(order, addresses)
    # A node that connected after the user's request has not heard of it.
    stop = (Tell(StopRequested()),) if state.stop_requested else ()
    starting = Notify(Starting(epoch=state.epoch, num_nodes=len(state.nodes), now_s=now_s))
    return replace(state, phase=Phase.STARTING), (*settled, starting, Tell(order), *stop)


def _with_addresses(order: StartEpoch, addresses: dict[int, tuple[str, int]]) -> StartEpoch:
    return StartEpoch(
        epoch=order.epoch,
        plan=order.plan,
        addresses=addresses,
        iteration=order.iteration,
        vector=order.vector,
        source=order.source,
        rounds=order.rounds,
        persists=order.persists,
    )


def _running(state: JobState, now_s: float) -> Step:
    running = Running(
        epoch=state.epoch,
        plan=state.plan,
        workers={rank: state.workers[rank] for rank in state.plan.ranks},
        materialised={rank: event.layers_materialised for rank, event in state.ready.items()},
        received_bytes=sum(event.received_bytes for event in state.ready.values()),
        regroup_s=max(event.regroup_s for event in state.ready.values()),
        transfer_s=max(event.transfer_s for event in state.ready.values()),
        now_s=now_s,
    )
    began_s = state.began_s or now_s
    return replace(state, phase=Phase.TRAINING, began_s=began_s), (Notify(running),)


# -- iterations -----------------------------------------------------------------------------------


def _is_open(state: JobState, event: IterationDone) -> bool:
    """A report that counts: of this epoch, or of what was settled when it began."""
    if event.iteration < state.next_iteration:
        return False
    if state.phase in (Phase.RECORDING, Phase.STOPPING):  # What is settled is not known yet.
        return True
    assert state.outcome is not None
    if event.iteration < state.outcome.iteration:
        return True
    return event.epoch == state.epoch and event.rank in state.plan.ranks


def _settled(rules: Rules, state: JobState, now_s: float) -> Step:
    """Commits the iterations that every member of this epoch has applied before it begins."""
    assert state.outcome is not None
    commands: list[Command] = []
    while state.next_iteration < state.outcome.iteration:
        iteration = state.next_iteration
        reports = state.reports.get(iteration, {})
        if iteration == state.outcome.iteration - 1 and state.outcome.vector:
            vector = decode_vector(state.outcome.vector, rules.layout)
            ends = vector.is_last(iteration, rules.job.training)
            told = (vector.loss, len(vector.samples), vector.sample_digest)
        elif reports:
            first = reports[min(reports)]
            ends, told = first.ends, (first.loss, first.num_samples, first.sample_digest)
        else:  # Whoever could tell of it was lost with the coordinator before this one.
            text = f"iteration {iteration} is committed, but nobody can tell its loss any more"
            commands.append(Notify(Warned(text=text)))
            state = _after_commit(state, ends=False)
            continue
        commands.append(Notify(_commit_notice(state, reports, told, ends=ends, now_s=now_s)))
        state = _after_commit(state, ends=ends)
    return state, tuple(commands)


def _committed(state: JobState, now_s: float) -> Step:
    """Commits what every rank has reported, in the order of iterations."""
    commands: list[Command] = []
    while not state.ends:
        reports = state.reports.get(state.next_iteration, {})
        if len(reports) < len(state.plan.ranks):
            return state, tuple(commands)
        first = reports[min(reports)]
        told = (first.loss, first.num_samples, first.sample_digest)
        notice = _commit_notice(state, reports, told, ends=first.ends, now_s=now_s)
        commands.append(Notify(notice))
        state = _after_commit(state, ends=first.ends)
    return replace(state, phase=Phase.SAVING), tuple(commands)


def _commit_notice(
    state: JobState,
    reports: Mapping[int, IterationDone],
    told: tuple[float, int, str],
    *,
    ends: bool,
    now_s: float,
) -> Committed:
    loss, num_samples, digest = told
    return Committed(
        iteration=state.next_iteration,
        epoch=state.epoch,
        loss=loss,
        num_samples=num_samples,
        sample_digest=digest,
        ends=ends,
        reports=tuple(reports[rank] for rank in sorted(reports)),
        now_s=now_s,
    )


def _after_commit(state: JobState, *, ends: bool) -> JobState:
    reports = {i: r for i, r in state.reports.items() if i > state.next_iteration}
    number = state.next_iteration + 1
    return replace(
        state, reports=reports, next_iteration=number, ends=ends, crashes=(), broken_links=0
    )


# -- losses and ends ------------------------------------------------------------------------------


def _saved(rules: Rules, state: JobState) -> Step:
    """Ends the job if the last save is complete, or cannot be."""
    assert state.decision is not None
    number = state.next_iteration
    order, decision = state.decision.order, state.decision
    failure = state.unsaved.get((number, state.epoch))
    if decision.ending and failure is not None:
        reason = f"{decision.reason}; what is live was not saved: {failure}"
        return _end(state, End(Ending(decision.ending), reason))
    if failure is not None:
        return _end(state, End(Ending.UNSAVED, failure))
    has_nothing_to_save = isinstance(order, SaveLayers) and not order.layers
    if state.published < number and not has_nothing_to_save:
        return state, ()
    if decision.ending:
        return _end(state, End(Ending(decision.ending), decision.reason))
    is_cut_short = state.stop_requested and number < rules.job.training.iterations
    return _end(state, End(Ending.STOPPED if is_cut_short else Ending.FINISHED))


def _link_broken(state: JobState, now_s: float) -> Step:
    """Live nodes cannot reach each other: once more, then without whom most cannot reach."""
    broken_links = state.broken_links + 1
    state = replace(state, broken_links=broken_links)
    if broken_links < BROKEN_LINKS_MAX:
        return lost(state, "lost", (), reason="a link broke between live nodes", now_s=now_s)
    counts = Counter(state.unreached)
    rank = max(counts, key=lambda rank: (counts[rank], rank))
    node = rank // (len(state.ranks) // len(state.nodes))
    reason = f"others cannot reach its rank {rank}, {broken_links} times in a row"
    return lost(state, "lost", (node,), reason=reason, now_s=now_s)


def _worker_exited(state: JobState, event: WorkerExited, now_s: float) -> Step:
    """A worker is gone and its node is not: the epoch ends, unless that happens in a loop."""
    worker = state.workers.get(event.rank)
    if worker is not None and worker.pid != event.pid:  # Its successor has reported already.
        return state, ()
    crash = (event.rank, event.status)
    crashes = (*state.crashes, crash)
    told = f"the worker of rank {event.rank} on node {event.node} {_told(event.status)}"
    if crashes.count(crash) >= CRASHES_MAX:
        reason = f"{told}, the {CRASHES_MAX}rd time in a row"
        text = f"{event.stack.rstrip()}\n{reason}" if event.stack else reason
        failure = WorkerFailed(node=event.node, rank=event.rank, traceback=text)
        return _end(state, End(Ending.FAILED, reason, failure))
    workers = {rank: worker for rank, worker in state.workers.items() if rank != event.rank}
    state = replace(state, crashes=crashes, workers=workers)
    kind, reason = "crash", told
    if event.stalled:
        kind, reason = "stall", f"rank {event.rank} made no progress:\n{event.stack.rstrip()}"
    return lost(state, kind, (), reason=reason, now_s=now_s, node=event.node)


def _end(state: JobState, end: End) -> Step:
    return replace(state, phase=Phase.ENDED), (end,)


def _told(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"left with status {status}"
