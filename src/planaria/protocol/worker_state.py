"""The decisions of a worker; engine/worker.py and the simulator's modelled worker carry them out.

Orders tell a worker to leave its epoch, to begin one, or to save what it holds. This module decides
whether an order is for this worker, what the worker answers, at which iteration it goes on, and
when it joins silently, switches, votes and saves. Each function takes the state and an event, and
returns the new state and the actions to take, in order. Only the last action of a step may have a
result. The docstring of such an action names the function that takes its result.

    on_order          an order came
    on_settled        Settle is done: the layers have the age at which all ranks go on
    on_exchanged      Exchange is done: the rank has the layers of its plan
    on_save_begun     SaveFirst is done
    on_computed       Compute is done: the rank has the commit vector of an iteration
    on_iteration_told TellIteration is done
    on_epoch_left     an action raised an error that ends the epoch, such as a lost peer
    on_raised         an action raised another error

This state belongs to the thread that computes. Another thread, with a state of its own, sorts the
messages that arrive meanwhile: see `MessageSummary` and `on_message`.

Source: docs/protocol.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import msgspec

from planaria.core.commit import CommitVector, VectorLayout, Votes, decode_vector, encode_vector
from planaria.core.job import TrainingConfig
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    CopySpoilt,
    Corrupted,
    Fact,
    Order,
    PeerUnreachable,
    SaveLayers,
    SavePart,
    Shutdown,
    StartEpoch,
    StopRequested,
    ToWorker,
)
from planaria.core.plan import Transfer
from planaria.errors import (
    AbortedError,
    CheckpointError,
    CorruptedError,
    PeerLostError,
    SpoiltError,
)
from planaria.protocol import worker_actions as act

EpochError = AbortedError | CheckpointError | CorruptedError | PeerLostError
EVERY_EPOCH: Final = 1 << 62  # As the first epoch that is not over: all epochs are.
EPOCH_ERRORS: Final = (AbortedError, CheckpointError, CorruptedError, PeerLostError)


@dataclass(frozen=True, slots=True)
class WorkerRules:
    """Constants of a worker.

    Attributes:
        address: (host, port) at which the worker's links listen. An order with another address is
            for another process of this rank.
        persist_every: number of iterations between saves; 0: no saves during training.
        save_timeout_s: longest wait of a rank for its save after parameters were found corrupt.
        evaluate_every: number of iterations between evaluations; 0: there are none.
    """

    rank: int
    pid: int
    address: tuple[str, int]
    layout: VectorLayout
    training: TrainingConfig
    persist_every: int
    save_timeout_s: float
    evaluate_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """State of a worker, without its layers.

    Attributes:
        epoch: the newest epoch that it was ordered to begin, or to leave older ones for.
        linked_epoch: the newest epoch for which it has made links.
        saved_epoch: the newest epoch in which it was ordered to save its layers and end.
        since: the newest epoch, as far as it knows, in which all nodes went back.
        vector: the newest commit vector that it has, and its iteration.
        start: the order of the epoch that it serves, with the iteration at which it goes on once
            that is known; None: it serves none.
        is_planned: training was not interrupted for that epoch.
        is_training: it trains in that epoch, which has links and copies to end.
        takes_part: it trains in the newest epoch that it was ordered to begin.
        switches_at: the iteration at which all ranks agreed to begin the next epoch; -1: none.
        recovers_from: the iteration in which it was told to leave its epoch, until it trains in
            another one; -1: it is not recovering.
        owes_save: the save with which its epoch should have begun is still due.
    """

    rules: WorkerRules
    epoch: int = -1
    linked_epoch: int = -1
    saved_epoch: int = -1
    since: int = -1
    vector: tuple[int, CommitVector] | None = None
    start: StartEpoch | None = None
    is_planned: bool = False
    is_training: bool = False
    takes_part: bool = False
    switches_at: int = -1
    recovers_from: int = -1
    owes_save: bool = False

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self.rules.rank

    @property
    def vector_iteration(self) -> int:
        """The iteration of the newest commit vector, -1 if there is none."""
        return self.vector[0] if self.vector is not None else -1

    @property
    def encoded_vector(self) -> bytes:
        """The newest commit vector as bytes, empty if there is none."""
        return encode_vector(self.vector[1]) if self.vector is not None else b""


WorkerStep = tuple[WorkerState, tuple[act.Action, ...]]


# -- orders ---------------------------------------------------------------------------------------


def on_order(state: WorkerState, order: Order) -> WorkerStep:
    """The step on an order; no action if the order is old, or meant for another process."""
    rank, state = state.rank, _without_epoch(state)
    match order:
        case Shutdown():
            return state, (act.Leave(waits=True),)
        case SavePart():
            return state, (act.WritePart(state.epoch, state.since),)
        case Abort() if order.replaced.get(rank) == state.rules.pid:
            return state, (act.Leave(waits=False),)
        case Abort() if order.epoch >= state.epoch:
            recovers_from = state.vector_iteration + 1
            state = replace(state, epoch=order.epoch, owes_save=False, recovers_from=recovers_from)
            return state, (act.TellHeld(order.epoch),)
        case SaveLayers() if order.epoch == state.epoch > state.saved_epoch:
            return _settle(replace(state, saved_epoch=order.epoch), order)
        case StartEpoch() if _is_for_this(state, order):
            return _start_epoch(replace(state, epoch=order.epoch), order)
        case Abort() | SaveLayers() | StartEpoch():
            return state, ()


def _is_for_this(state: WorkerState, start: StartEpoch) -> bool:
    """Whether the order is for this process, and the epoch is one that it can begin now."""
    is_new = start.epoch > state.epoch or start.epoch == state.epoch > state.linked_epoch
    is_agreed = state.switches_at >= 0 or not state.takes_part
    return (
        is_new
        and (is_agreed or start.iteration != AT_COMMIT)
        and tuple(start.addresses.get(state.rank, ())) == state.rules.address
    )


def _settle(state: WorkerState, order: StartEpoch | SaveLayers) -> WorkerStep:
    """The step that brings the layers to the age at which all ranks go on."""
    drops = order.since != state.since
    if drops:
        state = replace(state, since=order.since, vector=None)
    outcome = None
    if order.vector:
        outcome = (order.iteration - 1, decode_vector(order.vector, state.rules.layout))
        state = replace(state, vector=outcome)
    return state, (act.Settle(order, drops, outcome, order.iteration),)


def on_settled(state: WorkerState, settle: act.Settle) -> WorkerStep:
    """The step after Settle: the layers have the age at which all ranks go on."""
    if isinstance(settle.order, SaveLayers):
        return state, (act.WriteLast(settle.order),)
    start = settle.order
    takes_part = state.rank in start.plan.all_ranks
    state = replace(state, start=start, takes_part=takes_part, switches_at=-1)
    if not takes_part and state.rank not in transfer_sources(start.rounds):
        return state, ()
    return replace(state, linked_epoch=start.epoch), (
        act.Reach("regroup", start.iteration, state.recovers_from),
        act.Regroup(start),
        act.Reach("transfer", start.iteration, state.recovers_from),
        act.Exchange(start),
    )


# -- an epoch -------------------------------------------------------------------------------------


def _start_epoch(state: WorkerState, start: StartEpoch) -> WorkerStep:
    is_planned = start.iteration == AT_COMMIT
    state = replace(state, start=start, is_planned=is_planned)
    if not is_planned:
        return _settle(state, start)
    if state.switches_at < 0:  # It did not train before: others tell it the age.
        state = replace(state, since=start.since)
        return state, (act.Settle(start, drops=True, outcome=None, age=AT_COMMIT),)
    vector = state.encoded_vector
    return _settle(
        state, msgspec.structs.replace(start, iteration=state.switches_at, vector=vector)
    )


def on_exchanged(state: WorkerState, iteration: int) -> WorkerStep:
    """The step after Exchange: the rank has its layers, and the epoch begins at this iteration."""
    start = _start_order(state)
    start = msgspec.structs.replace(start, iteration=iteration)
    if not state.takes_part:
        return state, ()
    resumes = act.Reach("resume", iteration, state.recovers_from)
    state = replace(state, start=start, is_training=True, recovers_from=-1)
    begins = (resumes, act.BeginEpoch(start, is_planned=state.is_planned))
    if start.persists:
        return state, (*begins, act.Compare(iteration), act.SaveFirst(iteration))
    state, actions = _train(state, iteration, ends=_is_done(state, iteration))
    return state, (*begins, *actions)


def on_save_begun(state: WorkerState, is_begun: bool) -> WorkerStep:
    """The step after SaveFirst: the first save of the epoch has begun, or could not begin."""
    iteration = _start_order(state).iteration
    state = replace(state, owes_save=not is_begun)
    return _train(state, iteration, ends=_is_done(state, iteration))


def _is_done(state: WorkerState, iteration: int) -> bool:
    return iteration >= state.rules.training.iterations


def _train(state: WorkerState, iteration: int, *, ends: bool) -> WorkerStep:
    """The step to the next iteration, or to the end of the epoch if training has ended."""
    if not ends:
        every = state.rules.evaluate_every
        is_due = every > 0 and iteration > 0 and iteration % every == 0
        evaluates = (act.Evaluate(iteration),) if is_due else ()
        return state, (*evaluates, act.Reach("start", iteration), act.Compute(iteration))
    epoch = _start_order(state).epoch
    return state, (act.WaitWritten(epoch), act.EndEpoch(epoch))


def on_computed(state: WorkerState, iteration: int, vector: CommitVector) -> WorkerStep:
    """The step after Compute: the rank has the vector, so all gradients are complete everywhere."""
    start, rules = _start_order(state), state.rules
    state = replace(state, vector=(iteration, vector))
    ends = vector.is_last(iteration, rules.training)
    switches = not ends and vector.is_switch_agreed(start.plan)
    age = iteration + 1
    saves = not ends and (vector.is_save_due or _persists(rules, age))
    actions: list[act.Action] = [
        # All ranks have their layers, so nobody needs the layers that left this rank's plan.
        act.KeepLayers(tuple(start.plan.held_by_rank[state.rank])),
        act.CheckVector(iteration, vector),
    ]
    if start.plan.silent and iteration == start.iteration:
        actions.append(act.ReceiveSilently(iteration))
    actions += [
        act.Reach("optimizer", iteration),
        act.Apply(iteration, vector),
        act.Reach("applied", iteration),
        act.Copy(age, vector, goes_on=not ends and not switches),
    ]
    if ends or saves:
        actions.append(act.Compare(age))
    if saves:
        actions.append(act.Save(age))
    if ends and rules.evaluate_every and not vector.votes.stop:  # Who stops it waits for a save.
        actions += [act.BeginLast(age), act.Evaluate(age)]
    return state, (*actions, act.TellIteration(iteration, vector, ends=ends, switches=switches))


def _persists(rules: WorkerRules, age: int) -> bool:
    """Whether a save of this age is due during training."""
    return rules.persist_every > 0 and age % rules.persist_every == 0


def on_iteration_told(state: WorkerState, report: act.TellIteration) -> WorkerStep:
    """The step after TellIteration: the iteration is over for this rank."""
    epoch, vector = _start_order(state).epoch, report.vector
    state = replace(state, owes_save=vector.votes.unsaved > 0 and not vector.is_save_due)
    next_iteration = report.iteration + 1
    if report.switches:
        return replace(state, switches_at=next_iteration), (act.EndEpoch(epoch),)
    state, actions = _train(state, next_iteration, ends=report.ends)
    return state, ((act.SaveLast(next_iteration), *actions) if report.ends else actions)


def on_epoch_left(state: WorkerState, error: EpochError) -> WorkerStep:
    """The step after an error that ends the epoch for this rank; it reports its own reasons."""
    epoch = _start_order(state).epoch
    state, actions = on_raised(state)
    if isinstance(error, CorruptedError):
        # The save may be all that remains, if two holders differ and none can be trusted.
        actions = (*actions, act.WaitWritten(epoch, state.rules.save_timeout_s))
    message = _complaint(error, rank=state.rank, epoch=epoch)
    return state, actions if message is None else (*actions, act.Complain(message))


def on_raised(state: WorkerState) -> WorkerStep:
    """The step after any other error, such as one in the job's code: the rank leaves its epoch."""
    actions = (act.EndEpoch(state.epoch),) if state.is_training else ()
    return _without_epoch(state), actions


def _without_epoch(state: WorkerState) -> WorkerState:
    return replace(state, start=None, is_training=False)


def _complaint(error: EpochError, *, rank: int, epoch: int) -> Fact | None:
    """The report on why a rank left an epoch; None if it was ordered to leave."""
    match error:
        case CorruptedError():
            return Corrupted(rank=rank, epoch=epoch, age=error.age, hashes=error.hashes)
        case SpoiltError():
            return CopySpoilt(
                rank=rank,
                epoch=epoch,
                reason=str(error),
                source=error.source,
                layer=error.layer,
            )
        case CheckpointError():
            return CopySpoilt(rank=rank, epoch=epoch, reason=str(error))
        case PeerLostError():
            return PeerUnreachable(rank=rank, epoch=epoch, peer=error.rank, reason=str(error))
        case AbortedError():
            return None


def _start_order(state: WorkerState) -> StartEpoch:
    assert state.start is not None
    return state.start


def transfer_sources(rounds: Sequence[Sequence[Transfer]]) -> set[int]:
    """The ranks that send layers."""
    return {transfer.source for transfers in rounds for transfer in transfers}


def transfer_peers(rounds: Sequence[Sequence[Transfer]], rank: int) -> set[int]:
    """The ranks with which a rank exchanges layers."""
    ends = {(t.source, t.target) for transfers in rounds for t in transfers}
    return {a if b == rank else b for a, b in ends if rank in (a, b)}


# -- what arrives meanwhile -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageSummary:
    """Summary of the messages that have arrived, also of those not yet handled.

    Attributes:
        first_epoch: the oldest epoch that is not over; -1: no epoch was aborted.
        is_shut_down: the job has ended.
        stop_requested: the ranks must stop at the next commit.
        next_epoch: the newest epoch that must begin at a commit; -1: none.
        put_off_until_s: time until which that commit is put off while a save is written.
    """

    first_epoch: int = -1
    is_shut_down: bool = False
    stop_requested: bool = False
    next_epoch: int = -1
    put_off_until_s: float = 0.0

    def is_over(self, epoch: int) -> bool:
        """Whether saves of this epoch are useless by now.

        Only an `Abort` of a later epoch, a `SavePart` or a `Shutdown` ends an epoch. A restarted
        coordinator repeats the orders to begin an epoch or to save in it, and an order to begin the
        next epoch at a commit leaves this one running.
        """
        return epoch < self.first_epoch or self.is_shut_down


def on_message(
    summary: MessageSummary, message: ToWorker, *, now_s: float
) -> tuple[MessageSummary, Order | None]:
    """The summary after a message, and the order to queue if the message is one.

    The caller must end waits for peers in epochs that an `Abort` makes older, or a `SavePart`.
    """
    match message:
        case StopRequested():
            return replace(summary, stop_requested=True), None
        case StartEpoch() if message.iteration == AT_COMMIT:
            until_s = now_s + message.put_off_s
            return replace(summary, next_epoch=message.epoch, put_off_until_s=until_s), message
        case StartEpoch():
            return replace(summary, stop_requested=False), message
        case Abort():
            return replace(summary, first_epoch=max(summary.first_epoch, message.epoch)), message
        case Shutdown():
            return replace(summary, is_shut_down=True), message
        case SaveLayers():
            return summary, message
        case SavePart():
            return replace(summary, first_epoch=EVERY_EPOCH), message
    raise AssertionError(message)


def votes(
    state: WorkerState,
    summary: MessageSummary,
    *,
    iteration: int,
    now_s: float,
    copied: int,
    uncopied: int,
    is_writing: bool,
    early: bool = False,
) -> Votes:
    """The votes of this rank in the commit vector of the iteration that it computes.

    A rank that leaves at a commit has no time to write a save. So all put that commit off while
    they write one, or would begin one there.

    Args:
        copied, uncopied: votes about its copies in memory, see `Votes`.
        is_writing: a save is being written, so another one cannot begin now.
        early: the losses of held-out data end training with this iteration.
    """
    # Where each commit begins one, none can be waited for.
    is_due = state.rules.persist_every > 1 and _persists(state.rules, iteration + 1)
    saves = is_writing or state.owes_save or is_due
    is_put_off = saves and now_s < summary.put_off_until_s
    switches = summary.next_epoch > _start_order(state).epoch and not is_put_off
    return Votes(
        int(summary.stop_requested),
        int(switches),
        copied,
        uncopied,
        int(state.owes_save),
        int(is_writing),
        int(early),
    )


class HeldOutLosses:
    """The lowest loss of held-out data, and the number of evaluations since that were no better.

    They belong to the state of a layer and have its age, so that whoever holds the layer knows when
    training ends, whatever was lost. An evaluation counts once the layer has had its next step,
    because it is done again if that iteration is.

    Args:
        patience: number of evaluations in a row that are no better, after which training ends.
        held_out_id: number that tells the held-out data from others.

    Attributes:
        counted: the two numbers.
    """

    def __init__(self, patience: int, *, held_out_id: int) -> None:
        self._patience = patience
        self._held_out_id = held_out_id
        self.counted: tuple[float, float] = inf, 0
        self._newest = -1, inf

    def state(self) -> tuple[float, ...]:
        """The numbers that are saved with the layer."""
        return *self.counted, float(self._held_out_id)

    def load(self, state: Sequence[float]) -> None:
        """Takes the numbers of a save; losses of other held-out data say nothing, and count not."""
        lowest, num_worse, *ids = state
        is_same = not ids or ids == [self._held_out_id]  # Older saves do not say of which they are.
        self.counted = (lowest, num_worse) if is_same else (inf, 0)

    def note(self, loss: float | None, *, age: int) -> None:
        """Notes the loss of layers of this age; None: it is not a number, and so not lower."""
        self._newest = age, inf if loss is None else loss

    def are_worse(self, age: int) -> bool:
        """Whether training ends with the iteration that layers of this age compute."""
        return self._with_newest(age)[1] >= self._patience

    def count(self, age: int) -> None:
        """Counts the evaluation of layers of this age, if there was one."""
        self.counted = self._with_newest(age)

    def _with_newest(self, age: int) -> tuple[float, float]:
        (lowest, num_worse), (newest_age, loss) = self.counted, self._newest
        if newest_age != age:
            return self.counted
        return (loss, 0) if loss < lowest else (lowest, num_worse + 1)
