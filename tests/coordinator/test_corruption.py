"""Holders of a layer differ: who is outvoted is lost, and where nobody is, the job ends unsaved."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from helpers.coordinated import (
    FIRST,
    NOW_S,
    node_loss,
    of_type,
    ready,
    small_rules,
    stop_report,
    worker,
)
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.commands import (
    Command,
    DecisionRecorded,
    End,
    Evict,
    MembersRecorded,
    RecordDecision,
    RecordMembers,
)
from planaria.coordinator.outcomes import Verdict, verdict, votes
from planaria.coordinator.start import first_step
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event, step
from planaria.core.kinds import Ending
from planaria.core.messages import Abort, Corrupted, DrainRequested, SaveLayers, StartEpoch, Stopped
from planaria.core.records import Committed, Recovering
from planaria.protocol.agent_state import AgentState, on_report

PLAN = shaped_plan((2, 2, 2), 6)  # Ranks 0, 2 and 4 hold layers 0 to 4, the others the rest.
LOWER, UPPER = range(5), range(5, 10)
HELD = {rank: UPPER if rank % 2 else LOWER for rank in PLAN.ranks}
RULES = small_rules()
GOOD, BAD, WORSE = 7, 8, 9


def corrupted(rank: int, hashes: dict[int, int], *, age: int = FIRST) -> Corrupted:
    return Corrupted(rank=rank, epoch=0, age=age, hashes=hashes)


def all_report(odd: dict[int, int], *, age: int = FIRST) -> list[Corrupted]:
    """Every rank has left; ranks in `odd` have another hash of layer 3 than the others."""
    return [
        corrupted(rank, {3: odd.get(rank, GOOD)} if 3 in HELD[rank] else {}, age=age)
        for rank in PLAN.ranks
    ]


def answers(epoch: int, ranks: Iterable[int], odd: dict[int, int]) -> list[Event]:
    """What the ranks hold, with hashes."""
    told: list[Event] = []
    for rank in ranks:
        hashes = dict.fromkeys(HELD[rank], GOOD)
        if rank in odd:
            hashes[3] = odd[rank]
        answer = stop_report(rank, epoch, layers=HELD[rank])
        told.append(structs.replace(answer, hashes=hashes))
    return told


def after(events: Iterable[Event]) -> tuple[JobState, list[Command]]:
    """A job that trains, once it has heard of these."""
    state, _ = first_step(RULES, PLAN, term=0, predicted_s=1.0)
    begin: list[Event] = [DecisionRecorded(0), *map(worker, PLAN.ranks)]
    begin += [ready(rank, 0) for rank in PLAN.ranks]
    commands: list[Command] = []
    for event in begin:
        state, _ = step(RULES, state, event, NOW_S)
    assert state.phase is Phase.TRAINING
    for event in events:
        state, more = step(RULES, state, event, NOW_S)
        commands += more
    return state, commands


# -- who is believed ------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.integers(0, 3),
        st.dictionaries(st.integers(0, 9), st.sampled_from([GOOD, BAD, WORSE]), min_size=1),
        max_size=4,
    ),
    st.integers(1, 2),
)
def test_whoever_is_left_agrees_and_was_a_majority(
    hashes: dict[int, dict[int, int]], devices_per_node: int
) -> None:
    """Or nobody is believed, where some layer has no majority."""
    found = verdict(
        {(layer, FIRST): one for layer, one in hashes.items()}, devices_per_node=devices_per_node
    )
    has_majority = all(
        2 * max(list(one.values()).count(h) for h in one.values()) > len(one)
        for one in hashes.values()
        if len(set(one.values())) > 1
    )
    differs = any(len(set(one.values())) > 1 for one in hashes.values())

    assert bool(found.undecided) != has_majority
    assert (found.layer >= 0) == differs
    if not found.undecided:
        assert bool(found.odd) == differs
        for one in hashes.values():
            left = {h for rank, h in one.items() if rank // devices_per_node not in found.odd}
            assert len(left) <= 1


def test_hashes_are_compared_at_the_same_age_only() -> None:
    """A rank that has applied the iteration has other parameters, and rightly so."""
    one = Stopped(rank=0, epoch=1, ages={3: 5}, complete=(), hashes={3: GOOD})
    other = Stopped(rank=2, epoch=1, ages={3: 6}, complete=(), hashes={3: BAD})

    assert verdict(votes([one, other]), devices_per_node=1) == Verdict()


# -- every rank has left --------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 2, 4])
def test_the_odd_one_of_three_is_evicted_and_the_iteration_is_done_again(odd: int) -> None:
    """Once all have left; the redo begins without gradients of the parameters that differ."""
    events: list[Event] = [*all_report({odd: BAD})]
    waiting, early = after(events[:-1])
    assert (waiting.phase, early) == (Phase.TRAINING, [])
    left = tuple(rank for rank in PLAN.ranks if rank != odd)
    events += [MembersRecorded(1), *answers(1, left, {}), DecisionRecorded(1)]
    state, commands = after(events)

    assert of_type(commands, Evict) == [Evict((odd,))]
    (record,) = of_type(commands, RecordMembers)
    assert record.members.nodes == left
    (notice,) = of_type(commands, Recovering)
    assert (notice.kind, notice.nodes) == ("lost", (odd,))
    assert f"layer 3 on node {odd}" in notice.reason
    (start,) = of_type(commands, StartEpoch)
    assert (start.iteration, start.vector) == (FIRST, b"")
    assert state.facts.corrupted == {}


def test_two_odd_ones_in_different_layers_are_evicted_at_once() -> None:
    """Each is outvoted by two others."""
    events: list[Event] = [
        corrupted(rank, {3: BAD if rank == 0 else GOOD})
        if rank % 2 == 0
        else corrupted(rank, {7: WORSE if rank == 5 else GOOD})
        for rank in PLAN.ranks
    ]
    _, commands = after(events)

    assert of_type(commands, Evict) == [Evict((0, 5))]


def test_without_a_majority_the_job_ends_and_names_all_of_them() -> None:
    """Nothing is saved, for nobody can tell what is right."""
    state, commands = after(all_report({2: BAD, 4: WORSE}))

    (end,) = commands
    assert isinstance(end, End)
    assert (state.phase, end.ending) == (Phase.ENDED, Ending.LOST)
    assert "nodes 0 and 2 and 4 have different parameters in layer 3" in end.reason


def test_what_comes_late_of_an_older_epoch_changes_nothing() -> None:
    """The loss of a node came first, and is answered; the answers have hashes of their own."""
    state, commands = after([node_loss(1), *all_report({2: BAD})])

    assert (state.phase, state.epoch) == (Phase.RECORDING, 1)
    assert not state.facts.corrupted
    assert of_type(commands, Evict) == [Evict((1,))]


def test_hashes_that_agree_though_their_sums_do_not_end_the_job() -> None:
    """The vector itself was damaged; to try again for ever would be no answer."""
    _, commands = after(all_report({}))

    (end,) = commands
    assert isinstance(end, End)
    assert end.ending is Ending.LOST


# -- a loss in between ----------------------------------------------------------------------------


def test_an_odd_node_is_found_in_the_answers_to_a_loss() -> None:
    """It would have sent its layer to others, and they would have been the majority."""
    left = [rank for rank in PLAN.ranks if rank != 1]
    events: list[Event] = [node_loss(1), MembersRecorded(1), *answers(1, left, {2: BAD})]
    state, commands = after(events)

    assert (state.phase, state.nodes) == (Phase.RECORDING, (0, 3, 4, 5))
    assert [evict.nodes for evict in of_type(commands, Evict)] == [(1,), (2,)]
    assert not of_type(commands, RecordDecision)
    events += [MembersRecorded(2), *answers(2, (0, 3, 4, 5), {}), DecisionRecorded(2)]
    _, commands = after(events)
    (start,) = of_type(commands, StartEpoch)
    assert set(start.plan.nodes) == {0, 3, 4, 5}


def test_two_that_differ_are_all_that_is_left_of_three() -> None:
    """The third could have told, and is lost: the job ends, and saves neither."""
    left = [rank for rank in PLAN.ranks if rank != 0]
    reports = all_report({2: BAD})[1:]
    state, commands = after(
        [*reports, node_loss(0), MembersRecorded(1), *answers(1, left, {2: BAD})]
    )

    end = commands[-1]
    assert isinstance(end, End)
    assert (state.phase, end.ending) == (Phase.ENDED, Ending.LOST)
    assert "nodes 2 and 4" in end.reason
    assert not of_type(commands, SaveLayers)


# -- a new coordinator ----------------------------------------------------------------------------


def test_whenever_the_coordinator_is_killed_the_odd_one_is_gone_in_the_end() -> None:
    """Agents say again what their workers have found, until an epoch answers it."""
    cluster = FakeCluster(RULES, PLAN)
    cluster.begin()
    cluster.train(FIRST)
    cluster.moments.clear()
    for report in all_report({2: BAD}, age=FIRST + 1):
        cluster.hear(*cluster.nodes[report.rank].say(report))
        cluster.restart()
    assert len(cluster.moments) > 4
    for moment in cluster.moments:
        if not moment.nodes[5].agent.facts.get(("Corrupted", 5, 0)) and moment.state.epoch == 0:
            continue  # Not all have left yet.
        moment.restart()

        where = f"killed after {moment.last_command}"
        assert moment.state.phase is Phase.TRAINING, where
        assert moment.state.nodes == (0, 1, 3, 4, 5), where
        assert [c.iteration for c in of_type(moment.commands, Committed)] in ([], [FIRST]), where


def test_an_agent_forgets_what_an_epoch_has_answered() -> None:
    """And keeps it until then."""
    state = on_report(AgentState(node=1), corrupted(1, {7: BAD}), NOW_S)
    assert list(state.facts.values()) == [corrupted(1, {7: BAD})]

    cluster = FakeCluster(RULES, PLAN)
    cluster.begin()
    node = cluster.nodes[1]
    node.say(corrupted(1, {7: BAD}))
    node.take(Abort(epoch=1, nodes=PLAN.nodes))
    assert not [fact for fact in node.agent.facts.values() if isinstance(fact, Corrupted)]


def test_a_save_after_an_iteration_that_is_not_told_yet_counts_it() -> None:
    """Parameters are compared before they are saved, when the iteration has been applied by all
    but reported by none: it is committed all the same."""
    left = tuple(rank for rank in PLAN.ranks if rank != 2)
    reports = all_report({2: BAD}, age=FIRST + 1)
    held: list[Event] = [
        stop_report(rank, 1, layers=HELD[rank], age=FIRST + 1, last=FIRST) for rank in left
    ]
    events: list[Event] = [*reports, MembersRecorded(1), *held, DecisionRecorded(1)]
    state, commands = after(events)

    assert state.commits.next_iteration == FIRST + 1
    assert [c.iteration for c in of_type(commands, Committed)] == [FIRST]


def test_complaints_of_an_epoch_end_with_a_switch() -> None:
    """The next epoch knows none of the one before; those of ranks that are in it already stay."""
    cluster = FakeCluster(small_rules(), PLAN)
    cluster.begin()
    cluster.train(FIRST)
    cluster.hear(corrupted(1, {7: BAD}))
    cluster.hear(DrainRequested(node=5))
    next_epoch = cluster.state.epochs[-1]
    cluster.hear(structs.replace(corrupted(2, {3: BAD}), epoch=next_epoch))
    cluster.train(FIRST + 1)

    assert cluster.state.epoch == next_epoch == 1
    assert {rank: fact.epoch for rank, fact in cluster.state.facts.corrupted.items()} == {2: 1}
