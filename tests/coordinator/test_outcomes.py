"""Outcomes: at which iteration all go on after a loss, and what is told of those before it."""

from collections.abc import Iterable

import pytest
from msgspec import structs

from helpers.coordinated import (
    END,
    FIRST,
    HALVES,
    LEASE_S,
    LOWER,
    NEXT,
    NOW_S,
    SOURCE,
    UPPER,
    Survivors,
    after,
    iteration_report,
    node_loss,
    of_type,
    ready,
    save_report,
    small_rules,
    stop_report,
    training_halves,
    vector,
    worker,
)
from helpers.fake_cluster import FakeCluster
from helpers.jobs import NUM_LAYERS
from planaria.coordinator.commands import (
    DecisionRecorded,
    End,
    MembersRecorded,
    Published,
    RecordDecision,
    Tick,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import Phase
from planaria.coordinator.step import Event, step
from planaria.core.kinds import Ending
from planaria.core.messages import (
    PeerUnreachable,
    SaveLayers,
    StartEpoch,
    Stopped,
    StopRequested,
)
from planaria.core.persistent_map import PersistentMap
from planaria.core.plan import Transfer
from planaria.core.records import Committed, Decided, Origin, Outcome, Warned

HELD = {0: LOWER, 1: UPPER, 2: LOWER, 3: UPPER}


def holds(rank: int, *, age: int, complete: bool = False, last: int) -> Stopped:
    """The answer of a rank in epoch 1."""
    return stop_report(rank, 1, layers=HELD[rank], age=age, complete=complete, last=last)


def waits(rank: int) -> Stopped:
    """The rank has its gradients and waits for the vector of the iteration in flight."""
    return holds(rank, age=NEXT, complete=True, last=NEXT - 1)


def computes(rank: int) -> Stopped:
    """The rank was in the middle of the iteration in flight."""
    return holds(rank, age=NEXT, last=NEXT - 1)


def has_vector(rank: int) -> Stopped:
    """The rank holds the vector, and was stopped before it could apply it."""
    return holds(rank, age=NEXT, complete=True, last=NEXT)


def applied(rank: int) -> Stopped:
    return holds(rank, age=NEXT + 1, last=NEXT)


def outcome_of(answers: Iterable[Stopped], rules: Rules | None = None) -> Outcome:
    """What the survivors of a loss of node 3 agree on."""
    rules = rules or small_rules()
    events: list[Event] = [node_loss(3), MembersRecorded(1), *answers]
    _, commands = after(training_halves(rules), events, rules)
    (record,) = of_type(commands, RecordDecision)
    assert record.outcome.epoch == 1
    return record.outcome


ORIGIN = Origin(iteration=FIRST, source=SOURCE)
REDO = Outcome(epoch=1, iteration=NEXT, vector=vector(NEXT - 1), is_redo=True, origin=ORIGIN)
COMMIT = structs.replace(REDO, iteration=NEXT + 1, vector=vector(NEXT), is_redo=False)
ANSWERS: dict[str, tuple[tuple[Stopped, ...], Outcome]] = {
    "all compute": ((computes(0), computes(1), computes(2)), REDO),
    "all wait": ((waits(0), waits(1), waits(2)), REDO),
    "one has the vector": ((waits(0), has_vector(1), waits(2)), COMMIT),
    "one has applied it": ((applied(0), waits(1), waits(2)), COMMIT),
    "two have applied it": ((applied(0), applied(1), has_vector(2)), COMMIT),
    "all have applied it": (
        (applied(0), applied(1), applied(2)),
        structs.replace(COMMIT, is_redo=True),
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_the_outcome_is_the_newest_vector_anywhere(case: str) -> None:
    """Whoever holds it proves that every gradient of its iteration is complete everywhere."""
    answers, outcome = ANSWERS[case]

    assert outcome_of(answers) == outcome
    assert outcome_of(reversed(answers)) == outcome


@pytest.mark.parametrize(
    ("answers", "num_redone"),
    [((waits(0), waits(1), waits(2)), 6), ((applied(0), waits(1), waits(2)), 0)],
    ids=["redo", "commit"],
)
def test_only_an_iteration_that_is_done_again_costs_samples(
    answers: tuple[Stopped, ...], num_redone: int
) -> None:
    """Its global batch."""
    policy = Survivors()
    outcome_of(answers, small_rules(policy=policy))

    ((_, event),) = policy.seen
    assert event.redone_samples == num_redone


def test_a_layer_is_held_only_where_it_has_or_will_have_the_age() -> None:
    """Rank 2 was in the middle of what the others have finished: what it has is of no use."""
    policy = Survivors()
    outcome_of((applied(0), has_vector(1), computes(2)), small_rules(policy=policy))

    ((cluster, _),) = policy.seen
    assert cluster.epoch == 1
    assert cluster.held_by_rank() == {0: frozenset(LOWER), 1: frozenset(UPPER), 2: frozenset()}


def test_before_the_first_iteration_every_rank_can_make_every_layer() -> None:
    """From the seed or the checkpoint that the run goes on from."""
    policy = Survivors()
    cluster = FakeCluster(small_rules(policy=policy), HALVES)
    cluster.begin()
    cluster.lose(1, 3)

    held = policy.seen[-1][0].held_by_rank()
    assert held == {0: frozenset(range(NUM_LAYERS)), 2: frozenset(range(NUM_LAYERS))}
    order = of_type(cluster.commands, StartEpoch)[-1]
    assert (order.iteration, order.vector, order.source) == (FIRST, b"", SOURCE)


@pytest.mark.parametrize("source", ["", SOURCE])
def test_a_job_whose_workers_are_all_new_does_not_begin_again(source: str) -> None:
    """Nobody has a vector, as before the first iteration; but iterations are committed. It may go
    back to a save and say so.

    Found by the simulation: the worker of the only node that was left crashed.
    """
    rules = replace(small_rules(), source=source)
    answers = [stop_report(rank, 1) for rank in (0, 1, 2)]
    events: list[Event] = [node_loss(3), MembersRecorded(1), *answers]

    _, commands = after(training_halves(rules), events, rules)

    told = of_type(commands, RecordDecision)
    if source:
        (record,) = told
        assert record.outcome.origin == Origin(iteration=FIRST, source=SOURCE, epoch=1)
        return
    assert told == []
    (end,) = of_type(commands, End)
    assert end.ending == Ending.LOST
    assert end.reason == "no live node holds layer 0, and no copy of it is left"


def test_a_job_whose_last_save_is_on_disk_needs_no_workers_any_more() -> None:
    """All of them crashed between the last save and its manifest."""
    rules = small_rules()
    state = training_halves(rules)
    state = replace(state, commits=replace(state.commits, next_iteration=END, ends=True))
    answers = [stop_report(rank, 1) for rank in (0, 1, 2)]
    events: list[Event] = [node_loss(3), Published(END, 0), MembersRecorded(1), *answers]

    _, commands = after(state, [*events, DecisionRecorded(1)], rules)

    assert of_type(commands, End) == [End(Ending.FINISHED)]


def test_later_epochs_start_from_nothing_on_disk() -> None:
    """The layers are in the ranks, and newer than what the run began with."""
    cluster = FakeCluster(small_rules(), HALVES)
    cluster.begin()
    cluster.train(FIRST)
    cluster.lose(3)

    order = of_type(cluster.commands, StartEpoch)[-1]
    assert (order.epoch, order.iteration, order.source) == (1, FIRST + 1, "")
    assert order.vector == vector(FIRST)


def test_an_outcome_on_record_is_inherited_over_epochs() -> None:
    """Its only witness is lost, but others may have obeyed it by then."""
    rules = small_rules(n0=1)
    answers = (applied(0), waits(1), waits(2))
    events: list[Event] = [node_loss(3), MembersRecorded(1), *answers, DecisionRecorded(1)]
    events += [node_loss(0), PeerUnreachable(rank=1, epoch=2, peer=2, reason="closed")]
    state, _ = after(training_halves(rules), events, rules)
    state, _ = step(rules, state, Tick(), NOW_S + 2 * LEASE_S)
    assert (state.epoch, state.nodes) == (3, (1, 2))
    later = [structs.replace(answer, epoch=3) for answer in (waits(1), waits(2))]
    _, commands = after(state, [MembersRecorded(3), *later], rules)

    (record,) = of_type(commands, RecordDecision)
    assert record.outcome == structs.replace(COMMIT, epoch=3)
    order = record.decision.order
    assert (order.iteration, order.vector) == (NEXT + 1, vector(NEXT))


def test_iterations_of_the_epoch_before_are_told_once_the_next_begins() -> None:
    """By the vector, also where all who reported them are lost; others hear of it once."""
    rules = small_rules()
    answers = (applied(0), waits(1), waits(2))
    events: list[Event] = [
        iteration_report(3, NEXT, epoch=0),
        node_loss(3),
        MembersRecorded(1),
        *answers,
        DecisionRecorded(1),
    ]
    state, commands = after(training_halves(rules), events, rules)

    (committed,) = of_type(commands, Committed)
    assert (committed.iteration, committed.loss, committed.ends) == (NEXT, float(NEXT), False)
    assert [report.rank for report in committed.reports] == [3]
    assert state.commits.next_iteration == NEXT + 1
    late: list[Event] = [iteration_report(rank, NEXT, epoch=0) for rank in (0, 1, 2)]
    _, more = after(state, [*late, *(ready(rank, 1) for rank in (0, 1, 2))], rules)
    assert not of_type(more, Committed)


def test_reports_that_come_after_a_loss_was_noticed_still_count() -> None:
    """A rank reports an iteration, then the next one is settled by its vector: of the first one
    only the reports tell the loss, and they come before the answers."""
    rules = small_rules()
    reports: list[Event] = [iteration_report(rank, NEXT, epoch=0) for rank in (0, 1, 2)]
    answers = [holds(rank, age=NEXT + 2, last=NEXT + 1) for rank in (0, 1, 2)]
    events: list[Event] = [
        node_loss(3),
        *reports,
        MembersRecorded(1),
        *answers,
        DecisionRecorded(1),
    ]
    _, commands = after(training_halves(rules), events, rules)

    assert [c.iteration for c in of_type(commands, Committed)] == [NEXT, NEXT + 1]
    assert not of_type(commands, Warned)


def test_a_report_of_what_is_done_again_counts_for_nothing() -> None:
    """Rank 3 held the vector alone, reported, and was lost: the others do the iteration again,
    and it is committed when all of them have."""
    rules = small_rules()
    answers = (waits(0), waits(1), waits(2))
    events: list[Event] = [
        iteration_report(3, NEXT, epoch=0),
        node_loss(3),
        MembersRecorded(1),
        *answers,
    ]
    events += [DecisionRecorded(1), *(ready(rank, 1) for rank in (0, 1, 2))]
    state, _ = after(training_halves(rules), events, rules)
    assert state.phase is Phase.TRAINING
    again: list[Event] = [iteration_report(rank, NEXT, epoch=1) for rank in (0, 1, 2)]
    state, early = after(state, again[:2], rules)
    _, commands = after(state, again[2:], rules)

    assert not of_type(early, Committed)
    (committed,) = of_type(commands, Committed)
    assert {(r.rank, r.epoch) for r in committed.reports} == {(0, 1), (1, 1), (2, 1)}


def test_an_iteration_of_which_nobody_can_tell_is_warned_of() -> None:
    """It counts all the same, for the ranks have applied it."""
    rules = small_rules()
    answers = [holds(rank, age=NEXT + 2, last=NEXT + 1) for rank in (0, 1, 2)]
    events: list[Event] = [node_loss(3), MembersRecorded(1), *answers, DecisionRecorded(1)]
    state, commands = after(training_halves(rules), events, rules)

    (warned,) = of_type(commands, Warned)
    assert f"iteration {NEXT} is committed" in warned.text
    assert [c.iteration for c in of_type(commands, Committed)] == [NEXT + 1]
    assert state.commits.next_iteration == NEXT + 2


def last_answers(stop_votes: int) -> list[Stopped]:
    """The survivors have applied the iteration after which training ends."""
    last = NEXT if stop_votes else END - 1
    told = vector(last, stop_votes=stop_votes)
    answers = [holds(rank, age=last + 1, last=last) for rank in (0, 1, 2)]
    return [structs.replace(answer, vector=told) for answer in answers]


@pytest.mark.parametrize("stop_votes", [0, 1], ids=["the end", "a stop"])
def test_an_outcome_that_is_the_last_iteration_is_saved_and_ends_the_job(stop_votes: int) -> None:
    """Nobody trains any more; those who are left save what the lost ones would have saved."""
    rules = small_rules()
    answers = last_answers(stop_votes)
    number = answers[0].vector_iteration + 1
    asked: list[Event] = [StopRequested()] if stop_votes else []
    events: list[Event] = [*asked, node_loss(3), MembersRecorded(1), *answers, DecisionRecorded(1)]
    state, commands = after(training_halves(rules), events, rules)

    assert state.phase is Phase.SAVING
    (order,) = of_type(commands, SaveLayers)
    assert (order.epoch, order.iteration, order.vector) == (1, number, answers[0].vector)
    assert not of_type(commands, Decided)
    assert of_type(commands, Committed)[-1].ends
    parts = [save_report(rank, number, epoch=1, layers=part) for rank, part in order.layers.items()]
    _, commands = after(state, [*parts, Published(number, 1)], rules)
    assert commands[-1] == End(Ending.STOPPED if stop_votes else Ending.FINISHED)


@pytest.mark.parametrize("lost", [(3,), (1, 3)], ids=["one copy", "all copies"])
def test_a_job_whose_last_save_is_on_disk_has_finished(lost: tuple[int, ...]) -> None:
    """Whoever is lost before its end is noted; nothing is written again."""
    rules = small_rules()
    events: list[Event] = [
        iteration_report(rank, i, epoch=0, ends=i + 1 == END)
        for i in range(NEXT, END)
        for rank in range(4)
    ]
    events += [save_report(rank, END, epoch=0, layers=HELD[rank]) for rank in (0, 1)]
    events += [*map(node_loss, lost), Published(END, 0), MembersRecorded(len(lost))]
    left = [rank for rank in HALVES.ranks if rank not in lost]
    answers = [
        stop_report(rank, len(lost), layers=HELD[rank], age=END, last=END - 1) for rank in left
    ]
    _, commands = after(
        training_halves(rules), [*events, *answers, DecisionRecorded(len(lost))], rules
    )

    assert [order.layers for order in of_type(commands, SaveLayers)] in ([{}], [])
    assert commands[-1] == End(Ending.FINISHED)


def test_an_epoch_begins_only_once_those_who_send_layers_have_addresses() -> None:
    """A node without work in the new plan may hold what others need."""
    moves = ((Transfer(layer=0, source=2, target=1, num_bytes=8),),)
    rules = small_rules(n0=1, policy=Survivors(num_idle=1, rounds=moves))
    events: list[Event] = [*(waits(rank) for rank in (0, 1, 2)), DecisionRecorded(1)]
    state, _ = after(training_halves(rules), [node_loss(3), MembersRecorded(1)], rules)
    state = replace(state, workers=PersistentMap({rank: worker(rank) for rank in (0, 1)}))
    state, early = after(state, events, rules)
    state, commands = after(state, [worker(2)], rules)

    assert not of_type(early, StartEpoch)
    (order,) = of_type(commands, StartEpoch)
    assert set(order.addresses) == {0, 1, 2}


def test_a_link_that_stays_broken_between_live_nodes_costs_the_one_most_cannot_reach() -> None:
    """It is tried again twice, from a new epoch each time; for ever would be no answer."""
    rules = small_rules(n0=1)
    state, _ = after(training_halves(rules), [], rules)
    for epoch in range(1, 4):
        rank_3 = [
            PeerUnreachable(rank=rank, epoch=epoch - 1, peer=3, reason="nothing came")
            for rank in (1, 2)
        ]
        other = PeerUnreachable(rank=3, epoch=epoch - 1, peer=1, reason="nothing came")
        state, _ = after(state, [*rank_3, other], rules)
        state, _ = step(rules, state, Tick(), NOW_S + 2 * LEASE_S)
        assert state.epoch == epoch
        assert state.nodes == ((0, 1, 2, 3) if epoch < 3 else (0, 1, 2))
