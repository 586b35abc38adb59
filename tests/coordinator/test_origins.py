"""Going back to a save: what counts then, also for those who hear of it late."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from msgspec import structs

from helpers.coordinated import (
    FIRST,
    NOW_S,
    NUM_MICROBATCHES,
    SOURCE,
    Survivors,
    after,
    iteration_report,
    node_loss,
    of_type,
    ready,
    save_report,
    small_rules,
    stop_report,
    vector,
    worker,
)
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.commands import (
    CheckSave,
    Command,
    DecisionRecorded,
    End,
    Evict,
    MembersRecorded,
    Pruned,
    Publish,
    Published,
    RecordDecision,
    RecordMembers,
    SaveChecked,
)
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.saves import newest_save, on_version_event, without_spoilt
from planaria.coordinator.start import first_step, restored_step
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event
from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost
from planaria.core.kinds import Ending
from planaria.core.messages import Abort, CopySpoilt, StartEpoch, Stopped
from planaria.core.plan import Plan, Transition
from planaria.core.records import Committed, Decided, Origin, Progress, Warned
from planaria.policies.policy import Prices

PLAN = shaped_plan((2, 2, 2), NUM_MICROBATCHES)
LAST = FIRST + 3  # The next to be committed, where a test begins.
SAVED = Origin(iteration=FIRST + 1, source=f"{FIRST + 1}-0", epoch=1)


@dataclass
class GoesBack(Survivors):
    """Goes back to the newest save as often as it is told to, then goes on."""

    times: int = 1

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        found = Survivors.propose(self, plan, cluster, event, prices)
        if not self.times:
            return found
        self.times -= 1
        assert isinstance(event, NodesLost)
        assert event.saved is not None
        redone = event.saved.redone_samples
        return tuple(replace(one, goes_back=True, redone_samples=redone) for one in found)


def training(rules: Rules, *, is_saved: bool = True) -> JobState:
    """All six ranks have committed three iterations, of which the first is saved."""
    state, _ = first_step(rules, PLAN, term=0, predicted_s=1.0)
    events: list[Event] = [DecisionRecorded(0), *map(worker, PLAN.ranks)]
    events += [ready(rank, 0) for rank in PLAN.ranks]
    events += [
        iteration_report(rank, i, epoch=0) for i in range(FIRST, LAST) for rank in PLAN.ranks
    ]
    if is_saved:
        events.append(Published(FIRST + 1, 0))
    state, _ = after(state, events, rules)
    assert (state.phase, state.commits.next_iteration) == (Phase.TRAINING, LAST)
    return state


def answers(epoch: int, nodes: Iterable[int], *, since: int = -1) -> list[Event]:
    """All have what they had before anybody went back."""
    told = [
        stop_report(rank, epoch, layers=range(NUM_LAYERS), age=LAST, last=LAST - 1)
        for rank in nodes
    ]
    return [structs.replace(one, since=since) for one in told]


def back(policy: GoesBack, *, is_saved: bool = True) -> tuple[Rules, JobState, list[Command]]:
    """Node 5 is lost, and the policy decides; nobody has begun epoch 1 yet."""
    rules = small_rules(policy=policy)
    events = [node_loss(5), MembersRecorded(1), *answers(1, range(5))]
    state, commands = after(training(rules, is_saved=is_saved), events, rules)
    assert state.phase is Phase.DECIDING
    return rules, state, commands


def test_all_go_back_to_the_newest_save() -> None:
    """The outcome on record says so before anybody is told."""
    _, state, commands = back(GoesBack())

    (record,) = of_type(commands, RecordDecision)
    order = record.decision.order
    assert record.outcome.origin == state.commits.origin == SAVED
    assert (record.outcome.iteration, record.outcome.vector) == (SAVED.iteration, b"")
    assert isinstance(order, StartEpoch)
    assert (order.iteration, order.vector) == (SAVED.iteration, b"")
    assert (order.source, order.since) == (SAVED.source, 1)
    (decided,) = of_type(commands, Decided)
    assert decided.iteration == state.commits.next_iteration == SAVED.iteration
    assert decided.redone_samples == 3 * NUM_MICROBATCHES  # Two committed ones, one in flight.


def test_without_a_save_all_go_back_to_the_start_of_the_run() -> None:
    _, state, _ = back(GoesBack(), is_saved=False)

    assert state.commits.origin == Origin(iteration=FIRST, source=SOURCE, epoch=1)


def test_what_ranks_have_from_before_counts_no_more() -> None:
    """A loss strikes before anybody has heard of going back, and the next answer goes on."""
    policy = GoesBack()
    rules, state, _ = back(policy)
    events = [node_loss(4), MembersRecorded(2), *answers(2, range(4))]
    state, commands = after(state, events, rules)

    (record,) = of_type(commands, RecordDecision)
    assert policy.times == 0
    assert record.outcome.origin == SAVED
    assert (record.outcome.iteration, record.outcome.vector) == (SAVED.iteration, b"")
    order = record.decision.order
    assert isinstance(order, StartEpoch)
    assert (order.source, order.since) == (SAVED.source, SAVED.epoch)


def test_what_is_trained_after_going_back_counts() -> None:
    """Of two witnesses of the same iteration only the one of now says where all go on."""
    policy = GoesBack()
    rules, state, _ = back(policy)
    old = answers(2, (0,))
    new: list[Stopped] = [
        stop_report(
            rank, 2, layers=range(NUM_LAYERS), age=SAVED.iteration + 1, last=SAVED.iteration
        )
        for rank in (1, 2, 3)
    ]
    state, commands = after(
        state,
        [node_loss(4), MembersRecorded(2), *old, *(structs.replace(one, since=1) for one in new)],
        rules,
    )

    (record,) = of_type(commands, RecordDecision)
    assert record.outcome.iteration == SAVED.iteration + 1
    assert record.outcome.vector == vector(SAVED.iteration)
    held = {node.node: node.held for node in policy.seen[-1][0].nodes}
    assert held[0] == (frozenset(),)
    assert held[1] == (frozenset(range(NUM_LAYERS)),)


def test_iterations_are_committed_again_by_reports_of_now_only() -> None:
    """Those of before may be told once more, to a coordinator that was restarted."""
    rules, state, _ = back(GoesBack())
    events: list[Event] = [DecisionRecorded(1), *(ready(rank, 1) for rank in range(5))]
    state, _ = after(state, events, rules)
    assert state.phase is Phase.TRAINING
    again = SAVED.iteration
    state, old = after(state, [iteration_report(rank, again, epoch=0) for rank in range(5)], rules)
    state, new = after(state, [iteration_report(rank, again, epoch=1) for rank in range(5)], rules)

    assert not of_type(old, Committed)
    (committed,) = of_type(new, Committed)
    assert (committed.iteration, committed.since) == (again, 1)
    assert state.commits.next_iteration == again + 1


def test_a_save_that_is_being_published_is_waited_for() -> None:
    """It may be the one to go back to, and may replace the one that would be."""
    rules = small_rules(policy=GoesBack(times=9))
    state = training(rules)
    state, commands = after(state, [save_report(0, LAST, epoch=0, layers=range(NUM_LAYERS))], rules)
    assert of_type(commands, Publish)
    state, _ = after(state, [node_loss(5), MembersRecorded(1), *answers(1, range(5))], rules)
    assert state.phase is Phase.STOPPING
    state, _ = after(state, [Published(LAST, 0)], rules)

    assert state.commits.origin == Origin(iteration=LAST, source=f"{LAST}-0", epoch=1)


def test_a_new_coordinator_knows_that_all_went_back() -> None:
    """Its predecessor died with the outcome on record, and neither decision nor progress of now."""
    policy = GoesBack(times=2)
    rules, _, commands = back(policy)
    (record,) = of_type(commands, RecordDecision)
    _, lost = after(training(rules), [node_loss(5)], rules)
    (members,) = of_type(lost, RecordMembers)
    state, told = restored_step(
        rules,
        PLAN,
        term=1,
        members=members.members,
        outcome=record.outcome,
        decision=None,
        progress=Progress(num_committed=LAST, ends=False),
        predicted_s=1.0,
        now_s=NOW_S,
    )
    assert of_type(told, Abort)
    assert state.commits.next_iteration == SAVED.iteration
    newer = Published(LAST, 0)  # Had it been there, the first would have gone back to it.
    state, commands = after(state, [newer, *answers(1, range(5))], rules)

    (again,) = of_type(commands, RecordDecision)
    assert again.outcome == structs.replace(record.outcome, is_redo=again.outcome.is_redo)


@pytest.mark.parametrize("times", [0, 1])
def test_a_layer_without_a_live_holder_sends_all_back(times: int) -> None:
    """To the newest save, whatever policies propose."""
    rules = small_rules(policy=GoesBack(times=times))
    empty = [stop_report(rank, 1) for rank in range(5)]
    events: list[Event] = [node_loss(5), MembersRecorded(1), *empty]
    state, commands = after(training(rules), events, rules)

    assert not of_type(commands, End)
    assert state.commits.origin == SAVED


def unread(
    source: str, *, older: tuple[int, ...] = (), is_sound: bool = False
) -> tuple[JobState, list[Command]]:
    """A run that begins with a save that rank 2 cannot read, and all have answered.

    Args:
        is_sound: whether the head can read it.
    """
    rules = small_rules(policy=GoesBack(times=0))
    state, _ = first_step(rules, PLAN, term=0, predicted_s=1.0)
    events: list[Event] = [Published(iteration, 0) for iteration in older]
    events += [DecisionRecorded(0), *map(worker, PLAN.ranks)]
    state, _ = after(state, events, rules)
    return refused(state, rules, epoch=0, source=source, is_sound=is_sound)


def refused(
    state: JobState, rules: Rules, *, epoch: int, source: str, is_sound: bool
) -> tuple[JobState, list[Command]]:
    """A run in whose epoch rank 2 cannot read the save, once the next epoch is decided."""
    reason = "layer 4: a bit is wrong"
    events: list[Event] = [
        CopySpoilt(rank=2, epoch=epoch, reason=reason, source=source, layer=4),
        MembersRecorded(epoch + 1),
    ]
    events += [
        Stopped(rank=rank, epoch=epoch + 1, ages={}, complete=(), vector_iteration=-1, vector=b"")
        for rank in PLAN.ranks
    ]
    state, commands = after(state, events, rules)
    assert CheckSave(source, 4) in commands
    assert not of_type(commands, RecordDecision)  # It depends on what the head reads.
    state, decided = after(state, [SaveChecked(source, is_sound)], rules)
    return state, [*commands, *decided]


def test_a_save_that_cannot_be_read_is_set_aside_and_an_older_one_used() -> None:
    """Though it is older than what this run began with."""
    state, commands = unread(SOURCE, older=(FIRST - 2, FIRST - 1))

    assert state.commits.origin == Origin(iteration=FIRST - 1, source=f"{FIRST - 1}-0", epoch=1)
    (record,) = of_type(commands, RecordDecision)
    assert record.decision.order.iteration == state.commits.next_iteration == FIRST - 1


def test_a_node_that_cannot_read_what_the_head_can_tries_again_and_leaves() -> None:
    """Its mount of the saves may be gone; all would go to older and older saves for it."""
    rules = small_rules(policy=GoesBack(times=0))
    state, commands = unread(SOURCE, older=(FIRST - 1,), is_sound=True)
    for epoch in (1, 2):
        assert not state.saves.spoilt
        assert state.commits.origin.source == SOURCE
        assert of_type(commands, RecordDecision)
        text = "node 2 cannot read a save that the head can read: layer 4: a bit is wrong"
        warning = Warned(text=f"{text}; this counts against the node")
        assert warning in of_type(commands, Warned)
        assert not of_type(commands, Evict)
        state, _ = after(state, [DecisionRecorded(epoch)], rules)
        state, commands = refused(state, rules, epoch=epoch, source=SOURCE, is_sound=True)

    assert of_type(commands, Evict) == [Evict((2,))]
    assert state.nodes == (0, 1, 3, 4, 5)
    assert newest_save(rules, state) == (FIRST, SOURCE)


def test_a_save_of_this_run_that_the_head_can_read_counts_again() -> None:
    rules = small_rules()
    saves = [Published(FIRST + 1, 0), Published(FIRST + 2, 0)]
    newest = f"{FIRST + 2}-0"
    told = CopySpoilt(rank=2, epoch=0, reason="no such file", source=newest)
    state, _ = after(training(rules), [*saves, told], rules)
    assert newest_save(rules, state) == (FIRST + 1, f"{FIRST + 1}-0")
    for _ in range(2):  # Whoever is told of it again changes nothing.
        state, _ = after(state, [SaveChecked(newest, is_sound=True)], rules)

    assert newest_save(rules, state) == (FIRST + 2, newest)
    assert len(state.troubles.crashes) == 1


def test_nobody_makes_a_model_anew_where_no_save_can_be_read() -> None:
    """Layers from the seed, at the iteration of a save, would be the wrong model."""
    state, commands = unread(SOURCE)

    (end,) = of_type(commands, End)
    assert (end.ending, state.phase) == (Ending.LOST, Phase.ENDED)
    assert "layer 4: a bit is wrong" in end.reason


def test_a_damaged_save_of_this_run_is_followed_by_the_one_before() -> None:
    """Whoever is told of it again changes nothing."""
    state, _ = after(training(small_rules()), [Published(FIRST + 2, 0)], small_rules())
    for _ in range(2):
        state = without_spoilt(state, f"{FIRST + 2}-0")
    state = on_version_event(small_rules(), state, Published(FIRST + 2, 0))

    assert newest_save(small_rules(), state) == (FIRST + 1, f"{FIRST + 1}-0")


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_new_coordinator_knows_which_saves_could_not_be_read(is_checked: bool) -> None:
    """Its predecessor has recorded that with the members of the next epoch. Nobody tries them
    again, and they are none of those that are kept.

    If the head was lost while it read the save itself, the save may be sound, and counts.
    """
    rules = small_rules(policy=GoesBack(times=0))
    told = CopySpoilt(rank=2, epoch=0, reason="the disk refuses", source=SAVED.source)
    checked = [SaveChecked(SAVED.source, is_sound=False)] if is_checked else []
    state, commands = after(training(rules), [told, *checked, node_loss(5)], rules)
    state, _ = restored_step(
        rules,
        PLAN,
        term=1,
        members=of_type(commands, RecordMembers)[-1].members,
        outcome=state.commits.outcome,
        decision=None,
        progress=Progress(num_committed=LAST, ends=False),
        predicted_s=1.0,
        now_s=NOW_S,
    )
    state, _ = after(state, [Published(FIRST + 1, 0)], rules)
    files = [save_report(0, LAST, epoch=2, layers=range(NUM_LAYERS))]
    _, commands = after(state, files, rules)

    (publish,) = of_type(commands, Publish)
    if is_checked:
        assert newest_save(rules, state) == (FIRST, SOURCE)
        assert publish.unused == {SAVED.source}
    else:
        assert newest_save(rules, state) == (SAVED.iteration, SAVED.source)
        assert publish.unused == frozenset()


def test_nobody_goes_back_to_a_save_that_was_removed() -> None:
    """Newer ones are kept, and if none of those can be read all have nothing to go back to."""
    rules = small_rules()
    saves = [Published(FIRST + 1, 0), Published(FIRST + 2, 0)]
    gone = [Pruned(SOURCE), Pruned(f"{FIRST + 1}-0")]
    state, _ = after(training(rules), [*saves, *gone], rules)

    assert newest_save(rules, state) == (FIRST + 2, f"{FIRST + 2}-0")
    assert newest_save(rules, without_spoilt(state, f"{FIRST + 2}-0")) is None


def test_all_that_went_back_to_a_damaged_save_go_back_once_more() -> None:
    """To the seed, of a run that began with it; nobody has trained since, so nothing else tells
    that they are elsewhere."""
    rules = replace(small_rules(policy=GoesBack(times=2)), source="")
    events: list[Event] = [
        node_loss(5),
        MembersRecorded(1),
        *answers(1, range(5)),
        DecisionRecorded(1),
    ]
    state, _ = after(training(rules), events, rules)
    assert state.commits.origin == SAVED
    events = [CopySpoilt(rank=2, epoch=1, reason="a bit is wrong", source=SAVED.source)]
    events += [MembersRecorded(2), *(stop_report(rank, 2, layers=()) for rank in range(5))]
    events.append(SaveChecked(SAVED.source, is_sound=False))
    state, commands = after(state, events, rules)

    assert state.commits.origin == Origin(iteration=FIRST, source="", epoch=2)
    (record,) = of_type(commands, RecordDecision)
    assert isinstance(record.decision.order, StartEpoch)
    assert (record.decision.order.source, record.decision.order.iteration) == ("", FIRST)
