"""Back to copies in memory, where no live node holds a layer any more."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from msgspec import structs

from helpers.coordinated import (
    FIRST,
    HALVES,
    LOWER,
    NEXT,
    NUM_MICROBATCHES,
    SOURCE,
    UPPER,
    Survivors,
    after,
    iteration_report,
    node_loss,
    of_type,
    ready,
    small_rules,
    stop_report,
    training_halves,
    worker,
    worker_exit,
)
from helpers.jobs import NUM_LAYERS
from planaria.coordinator.commands import (
    DecisionRecorded,
    End,
    MembersRecorded,
    RecordDecision,
    Tell,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.start import first_step
from planaria.coordinator.state import Crash, JobState, Phase
from planaria.coordinator.step import Event
from planaria.core.cluster import NodesLost, SavePoint
from planaria.core.copies import Label
from planaria.core.kinds import Ending
from planaria.core.messages import (
    Abort,
    CopiesFailed,
    CopySpoilt,
    Raised,
    SaveLayers,
    StartEpoch,
    Stopped,
)
from planaria.core.records import Committed, Decided, Decision, Origin, Outcome, Warned

NEWEST, OLDER = Label(-1, 0, NEXT), Label(-1, 0, NEXT - 1)
BOTH = (OLDER, NEWEST)


def rules_with(copies: int = 2, policy: Survivors | None = None, **keys: Any) -> Rules:
    """As of other tests, with copies in memory."""
    rules = small_rules(policy=policy, **keys)
    checkpoint = replace(rules.job.checkpoint, copies=copies)
    return replace(rules, job=replace(rules.job, checkpoint=checkpoint))


def answers(
    rank: int, epoch: int, copies: Mapping[int, tuple[Label, ...]], *, since: int = -1
) -> Stopped:
    """Of a rank that computes the iteration in flight, with the upper half of the model."""
    told = stop_report(rank, epoch, layers=UPPER, age=NEXT, last=NEXT - 1)
    return structs.replace(told, copies=dict(copies), since=since)


def copies_of(
    lower: tuple[Label, ...], upper: tuple[Label, ...] = BOTH
) -> dict[int, tuple[Label, ...]]:
    return {layer: lower if layer in LOWER else upper for layer in range(NUM_LAYERS)}


def decided(
    rules: Rules, told: Iterable[Stopped], state: JobState | None = None
) -> tuple[JobState, Outcome, Decision]:
    """Nodes 0 and 2, the holders of the lower half, are lost at once."""
    events: list[Event] = [
        node_loss(0),
        node_loss(2),
        MembersRecorded(1),
        MembersRecorded(2),
        *told,
    ]
    state, commands = after(state or training_halves(rules), events, rules)
    (record,) = of_type(commands, RecordDecision)
    return state, record.outcome, record.decision


def test_all_go_back_to_the_newest_copies_that_there_are_of_all_layers() -> None:
    """Of the newest version rank 3 has two layers only, and rank 1 the rest."""
    policy = Survivors()
    newest = {layer: BOTH if layer < 2 else (OLDER,) for layer in LOWER}
    rest = dict.fromkeys(range(2, NUM_LAYERS), BOTH)
    rules = rules_with(policy=policy)
    _, outcome, decision = decided(rules, [answers(1, 2, rest), answers(3, 2, newest)])

    origin = Origin(iteration=NEXT, source="", epoch=2, copied=NEWEST)
    assert outcome == Outcome(epoch=2, iteration=NEXT, is_redo=True, origin=origin)
    order = decision.order
    assert isinstance(order, StartEpoch)
    assert (order.iteration, order.vector, order.source) == (NEXT, b"", "")
    assert (order.since, order.copied, order.kept) == (2, NEWEST, NEWEST)
    ((cluster, event),) = policy.seen
    assert cluster.held_by_rank() == {
        1: frozenset(range(2, NUM_LAYERS)),
        3: frozenset({0, 1}),
    }
    assert event.redone_samples == NUM_MICROBATCHES


def test_a_job_that_goes_back_to_copies_and_is_less_safe_is_saved() -> None:
    """What it has is in memory alone, on two nodes of which one was to be spared."""
    copies = copies_of(BOTH)
    _, outcome, decision = decided(rules_with(), [answers(1, 2, copies), answers(3, 2, copies)])

    assert outcome.origin.copied == NEWEST
    order = decision.order
    assert isinstance(order, StartEpoch)
    assert order.persists


def test_one_version_back_if_the_newest_is_not_there_of_all_layers() -> None:
    """An iteration more is done again, and both survivors forget what they hold of the newer."""
    copies = copies_of((OLDER,))
    _, outcome, decision = decided(rules_with(), [answers(1, 2, copies), answers(3, 2, {})])

    assert (outcome.iteration, outcome.origin.copied) == (NEXT - 1, OLDER)
    assert decision.order.copied == OLDER


def test_live_layers_come_before_copies() -> None:
    """Node 0 alone is lost, and node 2 holds the same: nothing is done again but what was begun."""
    rules = rules_with()
    told = [answers(1, 1, copies_of(BOTH)), answers(3, 1, {})]
    told.append(stop_report(2, 1, layers=LOWER, age=NEXT, last=NEXT - 1))
    events: list[Event] = [node_loss(0), MembersRecorded(1), *told]
    _, commands = after(training_halves(rules), events, rules)

    (record,) = of_type(commands, RecordDecision)
    assert record.outcome.origin.epoch == -1
    order = record.decision.order
    assert isinstance(order, StartEpoch)
    assert (order.iteration, order.copied, order.kept) == (NEXT, None, NEWEST)
    assert [copy.layer for copy in order.copies] == list(range(NUM_LAYERS))


def test_the_complete_version_is_kept_rather_than_the_one_under_way() -> None:
    """Of the newest one each rank has its own layers alone, so another loss would leave none."""
    told = [
        answers(1, 1, copies_of((OLDER,), BOTH)),
        structs.replace(
            stop_report(2, 1, layers=LOWER, age=NEXT, last=NEXT - 1),
            copies=copies_of(BOTH, (OLDER,)),
        ),
        answers(3, 1, copies_of((), BOTH)),
    ]
    events: list[Event] = [node_loss(0), MembersRecorded(1), *told]
    _, commands = after(training_halves(rules_with()), events, rules_with())

    (record,) = of_type(commands, RecordDecision)
    order = record.decision.order
    assert isinstance(order, StartEpoch)
    assert (order.iteration, order.copied, order.kept) == (NEXT, None, OLDER)


@pytest.mark.parametrize("copies", [0, 2])
def test_without_copies_of_all_layers_the_job_ends(copies: int) -> None:
    """Layer 4 is nowhere."""
    some = {layer: BOTH for layer in range(NUM_LAYERS) if layer != 4}
    rules = replace(rules_with(copies), source="")
    events: list[Event] = [node_loss(0), node_loss(2), MembersRecorded(2)]
    events += [answers(1, 2, some if copies else {}), answers(3, 2, {})]
    state, commands = after(training_halves(rules), events, rules)

    (end,) = of_type(commands, End)
    assert (end.ending, state.phase) == (Ending.LOST, Phase.ENDED)
    assert "no live node holds layer" in end.reason


@pytest.mark.parametrize(
    ("published", "copied", "source"),
    [
        (-1, True, ""),
        (OLDER.age, True, ""),
        (NEWEST.age, False, f"{NEWEST.age}-0"),
        (-1, False, SOURCE),
    ],
)
def test_all_go_back_to_the_newest_state_that_there_is(
    published: int, copied: bool, source: str
) -> None:
    """In memory, in a save of this run, or in the one that it began with."""
    rules = rules_with()
    state = training_halves(rules)
    if published >= 0:
        state = replace(state, saves=replace(state.saves, versions=((published, 0),)))
    labels = dict.fromkeys(range(NUM_LAYERS), (OLDER,)) if copied else {}
    events: list[Event] = [node_loss(0), node_loss(2), MembersRecorded(2)]
    events += [answers(1, 2, labels), answers(3, 2, {})]
    state, commands = after(state, events, rules)

    age = OLDER.age if copied else max(published, FIRST)
    wanted = Origin(iteration=age, source=source, epoch=2, copied=OLDER if copied else None)
    assert state.commits.origin == wanted
    (notice,) = of_type(commands, Decided)
    assert (notice.source, notice.copied) == (source, OLDER.age if copied else -1)
    assert notice.redone_samples >= (NEXT - age) * rules.job.training.global_batch_size


def test_copies_of_a_history_that_was_given_up_do_not_count() -> None:
    """The job has gone back to OLDER in epoch 2: what was copied after it before that is void, but
    OLDER itself may serve again."""
    rules = rules_with()
    copies = copies_of((OLDER,))
    state, _, _ = decided(rules, [answers(1, 2, copies), answers(3, 2, copies)])
    state, _ = after(state, [DecisionRecorded(2), ready(1, 2), ready(3, 2)], rules)
    assert state.phase is Phase.TRAINING

    void = copies_of(BOTH)
    told = structs.replace(stop_report(3, 3), copies=void)
    state, commands = after(state, [node_loss(1), MembersRecorded(3), told], rules)

    (record,) = of_type(commands, RecordDecision)
    assert record.outcome.origin.copied == OLDER
    assert record.outcome.iteration == NEXT - 1


def test_too_few_nodes_save_the_copies_before_the_job_ends() -> None:
    """They are in memory only: whoever goes on with --resume needs them on disk."""
    rules = rules_with(n0=3, policy=Survivors(knows_an_answer=False))
    copies = {1: dict.fromkeys(range(4), BOTH), 3: dict.fromkeys(range(4, NUM_LAYERS), BOTH)}
    state, _, decision = decided(rules, [answers(rank, 2, copies[rank]) for rank in (1, 3)])

    order = decision.order
    assert isinstance(order, SaveLayers)
    assert (order.iteration, order.copied, order.since) == (NEXT, NEWEST, 2)
    assert {rank: set(layers) for rank, layers in order.layers.items()} == {
        rank: set(layers) for rank, layers in copies.items()
    }
    assert decision.ending == Ending.LOST
    assert state.commits.origin.copied == NEWEST


def test_a_spoilt_copy_is_answered_by_all_anew() -> None:
    """Nobody is lost; whose copy it was tells the others that it has."""
    rules = rules_with()
    copies = copies_of(BOTH)
    state, _, _ = decided(rules, [answers(1, 2, copies), answers(3, 2, copies)])
    state, _ = after(state, [DecisionRecorded(2)], rules)
    spoilt = CopySpoilt(rank=1, epoch=2, reason="the copy of layer 3 is not what was written")
    state, commands = after(state, [spoilt, MembersRecorded(3)], rules)
    assert [order.epoch for order in of_type(commands, Abort)] == [3]
    (warning,) = of_type(commands, Warned)
    assert warning.text == "node 1: the copy of layer 3 is not what was written; it is not used"
    assert state.nodes == (1, 3)

    without = {layer: labels for layer, labels in copies.items() if layer != 3}
    told = [structs.replace(stop_report(1, 3), copies=without)]
    told.append(structs.replace(stop_report(3, 3), copies=copies))
    _, commands = after(state, told, rules)

    (record,) = of_type(commands, RecordDecision)
    assert record.outcome.origin.copied == NEWEST


def test_copies_that_are_lost_before_anybody_has_them_back_are_nothing_to_go_back_to() -> None:
    """Policies that go back are told of the save before them."""
    policy = Survivors()
    rules = rules_with(policy=policy, n0=1)
    copies = copies_of(BOTH)
    state, _, _ = decided(rules, [answers(1, 2, copies), answers(3, 2, copies)])
    state, _ = after(state, [DecisionRecorded(2)], rules)
    left = dict.fromkeys(range(1, NUM_LAYERS), BOTH)  # Rank 3 had the first one alone.
    told = structs.replace(stop_report(1, 3), copies=left)
    after(state, [node_loss(3), MembersRecorded(3), told], rules)

    _, event = policy.seen[-1]
    assert isinstance(event, NodesLost)
    assert event.saved is not None
    assert (event.saved.iteration, event.saved.source, event.saved.copied) == (FIRST, SOURCE, None)


def test_older_copies_count_if_those_that_all_went_back_to_are_lost_first() -> None:
    """The newest ones were on one node. The job ended, and another node had all that led to them,
    since nobody had been told to drop it."""
    rules = replace(rules_with(n0=1), source="")
    older, newest = dict.fromkeys(range(NUM_LAYERS), (OLDER,)), copies_of(BOTH)
    state, outcome, _ = decided(rules, [answers(1, 2, older), answers(3, 2, newest)])
    assert outcome.origin.copied == NEWEST
    events: list[Event] = [DecisionRecorded(2), node_loss(3), MembersRecorded(3)]
    state, commands = after(state, [*events, answers(1, 3, older)], rules)

    (record,) = of_type(commands, RecordDecision)
    assert record.outcome.origin == Origin(iteration=OLDER.age, source="", epoch=3, copied=OLDER)
    assert record.decision.order.copied == OLDER


def test_a_spoilt_copy_of_an_older_epoch_is_old_news() -> None:
    """It has been answered."""
    rules = rules_with()
    state = training_halves(rules)
    _, commands = after(state, [CopySpoilt(rank=1, epoch=-1, reason="old")], rules)

    assert not commands


def test_copies_that_fail_are_told_and_training_goes_on() -> None:
    """As on a node without memory for them."""
    rules = rules_with()
    failed = CopiesFailed(rank=1, epoch=0, reason="no memory")
    state, commands = after(training_halves(rules), [failed], rules)

    (warning,) = of_type(commands, Warned)
    assert "no memory" in warning.text
    assert state.phase is Phase.TRAINING


def test_the_first_order_tells_who_keeps_what() -> None:
    """And none does where the job has no copies."""
    for copies, targets in ((0, set()), (1, {0}), (2, {1})):
        rules = rules_with(copies)
        state, _ = first_step(rules, HALVES, term=0, predicted_s=1.0)
        assert state.facts.decision is not None
        order = state.facts.decision.order
        assert isinstance(order, StartEpoch)
        assert {len(copy.targets) for copy in order.copies} == targets


def test_the_launcher_is_told_where_the_layers_came_from() -> None:
    """For the report: from memory."""
    rules = rules_with()
    copies = copies_of(BOTH)
    events: list[Event] = [node_loss(0), node_loss(2), MembersRecorded(2)]
    events += [answers(1, 2, copies), answers(3, 2, copies)]
    _, commands = after(training_halves(rules), events, rules)

    (notice,) = of_type(commands, Decided)
    assert (notice.copied, notice.source) == (NEXT, "")
    assert not [c for c in commands if isinstance(c, Tell) and isinstance(c.message, StartEpoch)]


def test_copies_newer_than_all_that_was_reported_are_gone_forward_to() -> None:
    """All workers die when one rank alone has told of the iteration: who has a copy of what comes
    after it proves that it is committed, and its report is not lost."""
    rules = rules_with()
    newer = dict.fromkeys(range(NUM_LAYERS), (NEWEST, Label(-1, 0, NEXT + 1)))
    events: list[Event] = [
        iteration_report(0, NEXT, epoch=0),
        *(worker_exit(rank) for rank in HALVES.ranks),
    ]
    events += [MembersRecorded(epoch) for epoch in range(1, 5)]
    events += [worker(rank, pid=90 + rank) for rank in HALVES.ranks]
    events += [structs.replace(stop_report(rank, 4), copies=newer) for rank in HALVES.ranks]
    state, commands = after(training_halves(rules), [*events, DecisionRecorded(4)], rules)

    (record,) = of_type(commands, RecordDecision)
    assert record.outcome.iteration == NEXT + 1
    (committed,) = of_type(commands, Committed)
    assert (committed.iteration, committed.loss) == (NEXT, float(NEXT))
    assert not of_type(commands, Warned)
    assert state.commits.next_iteration == NEXT + 1


def test_what_all_went_back_to_is_told_to_policies_as_long_as_it_is_there() -> None:
    """Later it may have been dropped: then it is the job's start, or a save."""
    policy = Survivors()
    rules = rules_with(policy=policy, n0=1)
    copies = copies_of(BOTH)
    state, _, _ = decided(rules, [answers(1, 2, copies), answers(3, 2, copies)])
    (_, event) = policy.seen[-1]
    assert isinstance(event, NodesLost)
    assert event.saved == SavePoint(NEXT, "", NUM_MICROBATCHES, NEWEST)

    events: list[Event] = [DecisionRecorded(2), ready(1, 2), ready(3, 2)]
    events += [iteration_report(rank, NEXT, epoch=2) for rank in (1, 3)]
    told = structs.replace(stop_report(3, 3, age=NEXT + 1, layers=range(NUM_LAYERS)), since=2)
    events += [node_loss(1), MembersRecorded(3), told]
    after(state, events, rules)

    (_, event) = policy.seen[-1]
    assert isinstance(event, NodesLost)
    assert event.saved == SavePoint(FIRST, SOURCE, 4 * NUM_MICROBATCHES)


@pytest.mark.parametrize("lower", [BOTH, ()])
def test_a_job_that_ends_for_an_unfit_machine_saves_copies_of_what_only_that_one_held(
    lower: tuple[Label, ...],
) -> None:
    """Its rank, which was to save its layers, has crashed once more."""
    rules = replace(rules_with(), n0=4)
    crashes = tuple(Crash(0, 0, pid, -1, Raised(error="SIGBUS"), "hot") for pid in (10, 11, 12))
    state = training_halves(rules)
    state = replace(
        state,
        stop=replace(state.stop, must_end="it is hot"),
        troubles=replace(state.troubles, crashes=crashes),
    )
    told = [answers(rank, 2, copies_of(lower)) for rank in (1, 3)]
    events: list[Event] = [node_loss(2), worker_exit(0, status=-7), MembersRecorded(2), *told]
    _, commands = after(state, events, rules)

    if lower:
        (record,) = of_type(commands, RecordDecision)
        assert isinstance(record.decision.order, SaveLayers)
        assert record.decision.order.copied == NEWEST
        assert (record.decision.ending, record.decision.reason) == (Ending.LOST, "it is hot")
    else:
        (end,) = of_type(commands, End)
        assert end.reason == "it is hot; no live node holds layer 0, so nothing was saved"
