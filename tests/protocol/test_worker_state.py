"""What a worker decides, without tensors, threads or a simulation: both that run it rely on it."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from helpers.plan_examples import pipeline
from planaria.core.commit import CommitVector, VectorLayout, Votes, encode_vector
from planaria.core.job import TrainingConfig
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    Order,
    SaveLayers,
    SavePart,
    Shutdown,
    StartEpoch,
    StopRequested,
)
from planaria.core.plan import Transfer, plain_plan
from planaria.errors import (
    AbortedError,
    CheckpointError,
    CorruptedError,
    PeerLostError,
)
from planaria.protocol import worker_actions as act
from planaria.protocol.worker_state import (
    EpochError,
    HeldOutLosses,
    MessageSummary,
    WorkerRules,
    WorkerState,
    WorkerStep,
    on_computed,
    on_epoch_left,
    on_exchanged,
    on_iteration_told,
    on_message,
    on_order,
    on_raised,
    on_save_begun,
    on_settled,
    votes,
)

RANK, PID, ADDRESS = 1, 4711, ("10.0.0.1", 1234)
NOW_S = 50.0
PLAN = plain_plan(0, (pipeline((0, 2, 4), (0, 1)),), (2,))
RULES = WorkerRules(
    rank=RANK,
    pid=PID,
    address=ADDRESS,
    layout=VectorLayout(4, 2, 2),
    training=TrainingConfig(iterations=5, global_batch_size=2, microbatch_size=1),
    persist_every=0,
    save_timeout_s=7.0,
)
NEW = WorkerState(rules=RULES)


def vector(**voted: int) -> CommitVector:
    return CommitVector((1.0,) * 4, 0.5, 2, "0" * 32, Votes(**{"stop": 0, **voted}))


def start(epoch: int = 0, iteration: int = 0, **others: Any) -> StartEpoch:
    addresses = {0: ("10.0.0.0", 1), RANK: ADDRESS}
    order = StartEpoch(epoch=epoch, plan=PLAN, addresses=addresses, iteration=iteration)
    return msgspec.structs.replace(order, **others)


def settled(state: WorkerState, order: Order) -> WorkerStep:
    """What follows once the layers are of the age that the order says."""
    state, actions = on_order(state, order)
    (settle,) = actions
    assert isinstance(settle, act.Settle)
    return on_settled(state, settle)


def begun(state: WorkerState, order: StartEpoch) -> WorkerStep:
    """What follows once it has the layers of the epoch."""
    state, actions = settled(state, order)
    assert isinstance(actions[-1], act.Exchange)
    return on_exchanged(state, actions[-1].start.iteration)


def training(state: WorkerState = NEW, order: StartEpoch | None = None) -> WorkerState:
    """It computes the first iteration of the epoch."""
    state, actions = begun(state, order or start())
    assert isinstance(actions[-1], act.Compute)
    return state


def told(state: WorkerState, iteration: int, committed: CommitVector) -> WorkerStep:
    """What follows once an iteration is told."""
    state, actions = on_computed(state, iteration, committed)
    assert isinstance(actions[-1], act.TellIteration)
    return on_iteration_told(state, actions[-1])


def kinds(actions: tuple[act.Action, ...]) -> list[type]:
    return [type(action) for action in actions]


# -- which order is for it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [
        Abort(epoch=2, nodes=(0, 1)),
        start(epoch=2),
        SaveLayers(epoch=2, iteration=0, layers={}),
        SaveLayers(epoch=4, iteration=0, layers={}),
    ],
)
def test_nothing_follows_from_what_is_of_another_epoch(order: Order) -> None:
    """An older coordinator, or one that was restarted, says it again; a save is of this epoch."""
    state = replace(NEW, epoch=3)

    assert on_order(state, order) == (state, ())


def test_an_order_for_another_process_of_the_rank_is_not_obeyed() -> None:
    """A process that was forked anew listens at another port."""
    order = start(addresses={RANK: ("10.0.0.1", 4321)})

    assert on_order(NEW, order) == (NEW, ())


def test_an_epoch_is_begun_once_but_tried_again_where_it_was_not_linked() -> None:
    """The code that applies the outcome raised before: the same order may have better luck."""
    raised, _ = on_order(NEW, start())
    raised, actions = on_raised(raised)
    again, _ = settled(raised, start())

    assert actions == ()
    assert again.linked_epoch == 0
    assert on_order(again, start())[1] == ()


def test_a_rank_leaves_if_another_process_takes_its_place() -> None:
    """Its code raised, and others hold its layers; any other process of the rank answers."""
    replaced = Abort(epoch=1, nodes=(0, 1), replaced={RANK: PID})
    other = Abort(epoch=1, nodes=(0, 1), replaced={RANK: PID + 1})

    assert on_order(NEW, replaced)[1] == (act.Leave(waits=False),)
    assert on_order(NEW, other)[1] == (act.TellHeld(1),)
    assert on_order(NEW, Shutdown())[1] == (act.Leave(waits=True),)


def test_who_trains_joins_the_next_epoch_only_where_all_agreed() -> None:
    """Told of it after the commit it would wait for peers that still train in the epoch before."""
    planned = start(epoch=1, iteration=AT_COMMIT)
    asked = training()
    switched, actions = told(training(), 0, vector(switch=2))
    joined, joining = on_order(switched, planned)

    assert on_order(asked, planned)[1] == ()
    assert actions == (act.EndEpoch(0),)
    (settle,) = joining
    assert isinstance(settle, act.Settle)
    assert (settle.age, settle.outcome) == (1, (0, vector(switch=2)))
    assert joined.epoch == 1


# -- between epochs -------------------------------------------------------------------------------


def test_what_is_older_than_what_all_went_back_to_is_dropped() -> None:
    """Layers and the vector: another rank may have the same ages of another history."""
    state = replace(training(), vector=(0, vector()))
    state, (settle,) = on_order(state, start(epoch=2, iteration=0, since=2))

    assert isinstance(settle, act.Settle)
    assert settle.drops
    assert (state.since, state.vector) == (2, None)


def test_the_outcome_is_applied_before_the_layers_are_looked_at() -> None:
    """And what it was is known from then on, for the next answer."""
    order = start(epoch=1, iteration=3, vector=encode_vector(vector()))
    state, (settle,) = on_order(NEW, order)

    assert settle == act.Settle(order, drops=False, outcome=(2, vector()), age=3)
    assert state.vector_iteration == 2


def test_layers_are_saved_once_for_an_end_of_the_job() -> None:
    """The order comes again from a coordinator that was restarted."""
    order = SaveLayers(epoch=1, iteration=2, layers={RANK: (2, 3)})
    state = replace(NEW, epoch=1)
    state, actions = settled(state, order)

    assert actions == (act.WriteLast(order),)
    assert on_order(state, order)[1] == ()


def test_a_rank_without_part_in_the_plan_waits_for_orders() -> None:
    """Unless others get layers from it: then it sends these, and does not train."""
    plan = plain_plan(1, (pipeline((0, 4), (0,)),), (2,))
    idle = start(epoch=1, plan=plan)
    rounds = ((Transfer(0, RANK, 0, 8),),)
    state, actions = settled(NEW, msgspec.structs.replace(idle, rounds=rounds))

    assert settled(NEW, idle)[1] == ()
    assert kinds(actions) == [act.Reach, act.Regroup, act.Reach, act.Exchange]
    assert on_exchanged(state, 0)[1] == ()


def test_a_newcomer_hears_the_iteration_from_whoever_sends_layers() -> None:
    """It had no part in the epoch before, in which the others agree when the next one begins."""
    plan = replace(PLAN, silent={RANK: (0,)})
    order = start(epoch=1, iteration=AT_COMMIT, plan=plan, since=0)
    state, (settle,) = on_order(NEW, order)
    assert isinstance(settle, act.Settle)
    state, _ = on_settled(state, settle)
    state, actions = on_exchanged(state, 3)
    computed = on_computed(state, 3, vector())[1]
    later = on_computed(state, 4, vector())[1]

    assert settle.drops
    assert actions[-2:] == (act.Reach("start", 3), act.Compute(3))
    assert act.ReceiveSilently(3) in computed
    assert act.ReceiveSilently not in kinds(later)


# -- an iteration ---------------------------------------------------------------------------------


def test_an_iteration_is_applied_then_copied_then_told() -> None:
    """Nothing of it is told before the parameters have its age."""
    _, actions = on_computed(training(), 0, vector())

    assert kinds(actions) == [
        act.KeepLayers,
        act.CheckVector,
        act.Reach,
        act.Apply,
        act.Reach,
        act.Copy,
        act.TellIteration,
    ]
    assert actions[0] == act.KeepLayers((2, 3))
    assert actions[5] == act.Copy(1, vector(), goes_on=True)


@pytest.mark.parametrize("reason", ["iterations", "stop", "target_loss", "early"])
def test_training_ends_with_a_save_that_is_waited_for(reason: str) -> None:
    """And what is saved is compared with what other holders have."""
    target_loss = 0.5 if reason == "target_loss" else 0.0
    rules = replace(RULES, training=replace(RULES.training, target_loss=target_loss))
    iteration = 4 if reason == "iterations" else 0
    committed = vector(stop=int(reason == "stop"), early=int(reason == "early"))
    state = training(WorkerState(rules=rules), start(iteration=iteration))
    _, actions = on_computed(state, iteration, committed)
    _, last = told(state, iteration, committed)

    assert kinds(actions)[-3:] == [act.Copy, act.Compare, act.TellIteration]
    assert actions[-1] == act.TellIteration(iteration, committed, ends=True, switches=False)
    assert last == (act.SaveLast(iteration + 1), act.WaitWritten(0), act.EndEpoch(0))


def test_no_epoch_is_switched_to_when_training_ends() -> None:
    """The order to begin it may have come when the last iteration was computed."""
    _, actions = on_computed(training(order=start(iteration=4)), 4, vector(switch=2))

    assert actions[-1] == act.TellIteration(4, vector(switch=2), ends=True, switches=False)


def test_a_save_that_could_not_begin_is_made_when_all_ranks_can() -> None:
    """Else some layers of a version would be missing: each rank begins it at the same commit."""
    state, actions = begun(NEW, start(persists=True))
    assert actions[-2:] == (act.Compare(0), act.SaveFirst(0))
    state, _ = on_save_begun(state, False)
    ballot = votes(
        state, MessageSummary(), iteration=0, now_s=NOW_S, copied=0, uncopied=0, is_writing=True
    )
    state, _ = told(state, 0, vector(unsaved=1, writing=1))
    _, later = on_computed(state, 1, vector(unsaved=1))
    state, _ = told(state, 1, vector(unsaved=1))

    assert (ballot.unsaved, ballot.writing) == (1, 1)
    assert kinds(later)[-3:] == [act.Compare, act.Save, act.TellIteration]
    assert not state.owes_save


def test_saves_are_made_every_so_many_iterations() -> None:
    """Counted from the beginning of the job, so that all ranks make the same ones."""
    state = training(WorkerState(rules=replace(RULES, persist_every=2)))
    found = [
        act.Save in kinds(on_computed(state, iteration, vector())[1]) for iteration in range(5)
    ]

    assert found == [False, True, False, True, False]


def test_an_epoch_whose_training_is_over_only_waits_for_its_save() -> None:
    """All went on after a loss behind the last iteration."""
    state, _ = begun(NEW, start(iteration=5, persists=True))
    _, actions = on_save_begun(state, True)

    assert actions == (act.WaitWritten(0), act.EndEpoch(0))


# -- evaluations ----------------------------------------------------------------------------------


def test_evaluations_come_between_iterations_and_after_the_last() -> None:
    """All ranks know when, without a word: also in an epoch that begins there."""
    state = replace(NEW, rules=replace(RULES, evaluate_every=2))
    state, actions = begun(state, start())
    assert act.Evaluate not in kinds(actions)
    state, actions = told(state, 0, vector())
    assert act.Evaluate not in kinds(actions)
    state, actions = told(state, 1, vector())
    assert actions == (act.Evaluate(2), act.Reach("start", 2), act.Compute(2))

    _, actions = begun(replace(NEW, rules=replace(RULES, evaluate_every=2)), start(1, 4))
    assert actions[-3:] == (act.Evaluate(4), act.Reach("start", 4), act.Compute(4))

    _, actions = on_computed(training(state, start(2, 4)), 4, vector())
    # The last save has begun by then: an evaluation may take long, and be broken off.
    assert kinds(actions)[-4:] == [act.Compare, act.BeginLast, act.Evaluate, act.TellIteration]
    # Whoever stops it waits for a save, and may have seconds.
    _, actions = on_computed(training(state, start(3, 2)), 2, vector(stop=1))
    assert not {act.BeginLast, act.Evaluate} & {*kinds(actions)}


# -- how an epoch ends ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AbortedError("told to"), ""),
        (PeerLostError(0, "gone"), "PeerUnreachable"),
        (CorruptedError(2, {0: 7}, (0,)), "Corrupted"),
        (CheckpointError("spoilt"), "CopySpoilt"),
    ],
)
def test_a_rank_says_why_it_left_unless_it_was_told_to(error: EpochError, expected: str) -> None:
    """Its links go first, or peers would wait for it."""
    state, actions = on_epoch_left(training(), error)
    said = [type(a.message).__name__ for a in actions if isinstance(a, act.Complain)]

    assert actions[0] == act.EndEpoch(0)
    assert said == ([expected] if expected else [])
    assert (act.WaitWritten(0, 7.0) in actions) == (expected == "Corrupted")
    assert state.start is None


def test_what_was_not_begun_is_not_taken_down() -> None:
    """Peers still get layers from this rank, over the links of the epoch that it cannot begin."""
    state, _ = settled(NEW, start())

    assert act.EndEpoch not in kinds(on_epoch_left(state, PeerLostError(0, "gone"))[1])
    assert on_raised(state)[1] == ()
    assert on_raised(training())[1] == (act.EndEpoch(0),)


def test_steps_of_a_recovery_are_known_as_such_until_it_is_over() -> None:
    """Faults are injected there; a change without a loss has none of these steps."""
    state = replace(training(), vector=(2, vector()))
    state, _ = on_order(state, Abort(epoch=1, nodes=(0, 1)))
    state, actions = begun(state, start(epoch=1, iteration=3, vector=encode_vector(vector())))

    assert actions[0] == act.Reach("resume", 3, recovers_from=3)
    assert isinstance(actions[1], act.BeginEpoch)
    assert state.recovers_from == -1


def test_a_rank_without_a_head_writes_its_part_of_the_newest_epoch_that_it_has_heard_of() -> None:
    """Also one that it has only been told to leave the epoch before for."""
    state, _ = begun(replace(NEW, since=1), start(epoch=2, since=1))
    state, _ = on_epoch_left(state, AbortedError("there is no head"))
    assert on_order(state, SavePart()) == (state, (act.WritePart(epoch=2, since=1),))

    state, _ = on_order(state, Abort(epoch=3, nodes=(0, 1)))
    assert on_order(state, SavePart()) == (state, (act.WritePart(epoch=3, since=1),))


# -- what arrives meanwhile -----------------------------------------------------------------------


def test_a_save_is_wanted_until_its_epoch_is_left_or_the_job_is_over() -> None:
    """An order that comes again, or one to begin the next epoch at a commit, ends nothing."""
    line, _ = on_message(MessageSummary(), start(epoch=1), now_s=NOW_S)
    line, _ = on_message(line, start(epoch=2, iteration=AT_COMMIT), now_s=NOW_S)

    assert not line.is_over(1)
    assert on_message(line, Abort(epoch=2, nodes=(0,)), now_s=NOW_S)[0].is_over(1)
    assert on_message(line, Shutdown(), now_s=NOW_S)[0].is_over(1)
    assert on_message(line, SavePart(), now_s=NOW_S)[0].is_over(2)


def test_evaluations_that_are_no_better_than_the_best_end_training() -> None:
    """One that is done again counts once, and one whose loss is not a number is no better."""
    losses, ends = HeldOutLosses(2, held_out_id=7), []
    told = [(2, 3.0), (4, 2.0), (6, 2.5), (6, 2.5), (8, 1.9), (10, None), (12, 1.9)]
    for age, loss in told:
        losses.note(loss, age=age)
        ends.append(losses.are_worse(age))
        if age != 6 or len(ends) == 4:
            losses.count(age)

    assert ends == [False] * 6 + [True]
    assert losses.counted == (1.9, 2)
    assert losses.are_worse(13)


def test_a_rank_votes_for_an_early_end_beside_what_it_was_told() -> None:
    """That training ends early, and that somebody wants it to stop, are different things."""
    line, _ = on_message(MessageSummary(), StopRequested(), now_s=NOW_S)
    ballot = votes(
        training(),
        line,
        iteration=0,
        now_s=NOW_S,
        copied=0,
        uncopied=0,
        is_writing=False,
        early=True,
    )

    assert ballot == Votes(stop=1, early=1)


@pytest.mark.parametrize(
    ("iteration", "is_writing", "later_s", "switches"),
    [
        (0, False, 0.0, True),
        (0, True, 4.0, False),
        (1, False, 4.0, False),  # A save is due after it.
        (0, True, 5.0, True),
        (1, False, 5.0, True),
    ],
)
def test_a_commit_after_which_nodes_leave_waits_for_saves_for_a_while(
    iteration: int, is_writing: bool, later_s: float, switches: bool
) -> None:
    """A rank that left had a second for its part of one, and the save was never complete."""
    state = training(replace(NEW, rules=replace(RULES, persist_every=2)))
    order = start(epoch=1, iteration=AT_COMMIT, put_off_s=5.0)
    line, _ = on_message(MessageSummary(), order, now_s=NOW_S)
    ballot = votes(
        state,
        line,
        iteration=iteration,
        now_s=NOW_S + later_s,
        copied=0,
        uncopied=0,
        is_writing=is_writing,
    )

    assert bool(ballot.switch) == switches


def test_a_rank_votes_as_it_was_told_meanwhile() -> None:
    """A stop is asked for until an epoch begins after it; the next epoch until it is begun."""
    line, order = on_message(MessageSummary(), StopRequested(), now_s=NOW_S)
    line, _ = on_message(line, start(epoch=1, iteration=AT_COMMIT), now_s=NOW_S)
    ballot = votes(
        training(), line, iteration=0, now_s=NOW_S, copied=1, uncopied=0, is_writing=False
    )
    resumed, _ = on_message(line, start(epoch=3), now_s=NOW_S)

    assert order is None
    assert ballot == Votes(stop=1, switch=1, copied=1)
    assert votes(
        training(NEW, start(epoch=3)),
        resumed,
        iteration=0,
        now_s=NOW_S,
        copied=0,
        uncopied=0,
        is_writing=False,
    ) == (Votes(stop=0))
