"""A coordinator that is restarted from its records gets where the one before it was."""

from collections.abc import Callable

import pytest

from helpers.coordinated import (
    END,
    FIRST,
    LEASE_S,
    NOW_S,
    Survivors,
    of_type,
    save_report,
    small_rules,
    worker,
    worker_exit,
)
from helpers.fake_cluster import FakeCluster, FakeNode
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.commands import End, Tell, Tick
from planaria.coordinator.frozen import replace
from planaria.coordinator.start import restored_step
from planaria.coordinator.state import Phase
from planaria.core.kinds import Ending
from planaria.core.messages import Abort, NoticeTaken, PeerUnreachable, Raised
from planaria.core.persistent_map import PersistentMap
from planaria.core.records import Committed, Members, Progress
from planaria.protocol.agent_lease import TICKS_PER_LEASE
from planaria.protocol.agent_state import on_report

PLAN = shaped_plan((2, 2), 6)


def begun() -> FakeCluster:
    cluster = FakeCluster(small_rules(), PLAN)
    cluster.begin()
    return cluster


def trained() -> FakeCluster:
    """Its moments, from which a coordinator may have to restart, begin here."""
    cluster = begun()
    cluster.train(FIRST)
    cluster.train(FIRST + 1)
    cluster.moments.clear()
    return cluster


def lost_one() -> FakeCluster:
    cluster = trained()
    cluster.lose(3)
    return cluster


def lost_two() -> FakeCluster:
    """The second one while the first is being answered."""
    cluster = trained()
    cluster.lose(3, 2)
    return cluster


def crashed() -> FakeCluster:
    cluster = trained()
    cluster.crash(2)
    return cluster


STORIES: dict[str, Callable[[], FakeCluster]] = {
    "the start": begun,
    "a lost node": lost_one,
    "two lost nodes": lost_two,
    "a crash": crashed,
}


@pytest.mark.parametrize("story", STORIES)
def test_a_coordinator_may_be_killed_after_each_of_its_steps(story: str) -> None:
    """Between any two records and any two words: from what is written down and from what the
    agents remember the next one gets the job to train, with the same members."""
    cluster = STORIES[story]()
    assert cluster.state.phase is Phase.TRAINING
    assert len(cluster.moments) > 4
    for moment in cluster.moments:
        moment.restart()
        state = moment.state

        where = f"{story}: killed after {moment.last_command}"
        assert state.phase is Phase.TRAINING, where
        alive = {node for node, one in moment.nodes.items() if one.is_alive}
        assert set(state.nodes) == alive, where
        assert {moment.nodes[node].age for node in alive} == {state.commits.next_iteration}, where
        assert not of_type(moment.commands, End), where


def waiting(n0: int) -> FakeCluster:
    """Two nodes train, and a third one waits. The coordinator is lost, and the third one's facts
    come last."""
    made = small_rules(n0=n0, policy=Survivors())
    cluster = FakeCluster(replace(made, max_nodes=2), shaped_plan((1, 1), 6))
    cluster.begin()
    cluster.train(FIRST)
    cluster.join(2)
    cluster.restart()
    assert cluster.state.phase is Phase.TRAINING
    membership = replace(cluster.state.membership, candidates={})
    workers = cluster.state.workers
    workers = PersistentMap({rank: workers[rank] for rank in workers if rank != 2})
    cluster.state = replace(cluster.state, membership=membership, workers=workers)
    return cluster


@pytest.mark.parametrize("comes", [True, False])
def test_a_loss_that_is_heard_before_a_node_that_waited_is_back_ends_no_job(comes: bool) -> None:
    """With it there are nodes enough."""
    cluster = waiting(n0=2)
    cluster.lose(1)
    cluster.hear(*[Tick()] * (TICKS_PER_LEASE - 1))
    assert not of_type(cluster.commands, End)
    if comes:
        cluster.join(2)
    cluster.hear(Tick())

    assert cluster.state.phase is (Phase.TRAINING if comes else Phase.ENDED)
    assert cluster.state.nodes == ((0, 2) if comes else (0,))


def test_a_loss_of_all_members_is_survived_by_a_node_that_waited() -> None:
    """It goes on from the save."""
    cluster = waiting(n0=1)
    cluster.lose(0, 1)
    cluster.join(2)

    assert cluster.state.phase is Phase.TRAINING
    assert cluster.state.nodes == (2,)


def test_a_notice_that_is_heard_before_a_node_that_waited_is_back_stops_no_job() -> None:
    """A node that will be taken away can wait for the one that takes its place."""
    cluster = waiting(n0=2)
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    assert not cluster.state.stop.is_requested
    cluster.join(2)
    for iteration in range(FIRST + 1, FIRST + 4):
        cluster.train(iteration)

    assert cluster.state.nodes == (0, 2)


def test_each_of_them_may_be_killed() -> None:
    """The third coordinator stands on the records of two others."""
    for second in lost_one().moments:
        second.restart()
        for third in second.moments:
            third.restart()

            assert third.state.phase is Phase.TRAINING
            assert third.state.term > 0


def test_a_last_save_survives_its_coordinator() -> None:
    """The job ends as it would have ended, and no iteration is left out."""
    cluster = FakeCluster(small_rules(when_below="stop"), PLAN)
    cluster.begin()
    cluster.train(FIRST)
    cluster.train(FIRST + 1)
    cluster.moments.clear()
    cluster.lose(3)
    end = cluster.commands[-1]
    assert isinstance(end, End)
    assert end.ending is Ending.LOST
    for moment in cluster.moments[:-1]:
        moment.restart()
        moment.hear(*[Tick()] * TICKS_PER_LEASE)  # Nodes that had waited may come back before.

        where = f"killed after {moment.last_command}"
        assert moment.commands[-1] == end, where
        told = [c.iteration for c in of_type(moment.commands, Committed)]
        assert told == [FIRST, FIRST + 1], where


def test_what_is_on_record_as_committed_is_not_told_again() -> None:
    """What is not, is; the launcher knows what it has heard."""
    cluster = trained()
    cluster.progress = Progress(num_committed=FIRST + 1, ends=False)
    before = len(cluster.commands)
    cluster.restart()

    told = [c.iteration for c in of_type(cluster.commands[before:], Committed)]
    assert told == [FIRST + 1]
    assert cluster.state.commits.next_iteration == FIRST + 2


def test_what_was_reported_while_nobody_led_is_committed() -> None:
    """Training does not wait for a coordinator."""
    cluster = trained()
    for node in cluster.nodes.values():
        node.trains(FIRST + 2)
    cluster.restart()

    assert cluster.state.commits.next_iteration == FIRST + 3


def test_what_was_reported_before_a_loss_is_told_once_somebody_leads_again() -> None:
    """Members were on record, progress was behind, and the vector tells of the last one only."""
    cluster = trained()
    for number in (0, 1, 2):
        cluster.nodes[number].trains(FIRST + 2)
        cluster.nodes[number].trains(FIRST + 3)
    cluster.nodes[3].is_alive = False
    cluster.progress = Progress(num_committed=FIRST + 2, ends=False)
    cluster.records.append(Members(epoch=1, term=0, nodes=(0, 1, 2)))
    before = len(cluster.commands)
    cluster.restart()

    told = [c.iteration for c in of_type(cluster.commands[before:], Committed)]
    assert told == [FIRST + 2, FIRST + 3]


def test_a_link_that_broke_before_a_coordinator_was_killed_is_answered_by_the_next() -> None:
    """All ranks wait: those who lost the link for an order, the others for them."""
    cluster = trained()
    agent = cluster.nodes[1].agent
    unreachable = PeerUnreachable(rank=1, epoch=cluster.state.epoch, peer=0, reason="closed")
    cluster.nodes[1].agent = on_report(agent, unreachable, NOW_S)
    epoch = cluster.state.epoch
    cluster.restart()
    cluster.hear(Tick(), now_s=NOW_S + 2 * LEASE_S)

    assert cluster.state.epoch == epoch + 1


def test_a_crash_that_nobody_heard_of_is_answered_by_the_next() -> None:
    """The new worker holds nothing of what the order of the epoch takes for granted."""
    cluster = trained()
    new = cluster.nodes[2] = FakeNode(cluster.nodes[2].agent)
    new.say(worker_exit(2))
    new.say(worker(2))
    cluster.restart()

    assert cluster.state.phase is Phase.TRAINING
    assert cluster.state.epoch == 1
    assert new.layers == tuple(range(NUM_LAYERS))


def test_a_worker_that_was_replaced_long_ago_does_not_end_the_epoch() -> None:
    """Its end was told after the order that answered it. The next coordinator took it for a crash
    that nobody had heard of."""
    cluster = trained()
    cluster.fail(1, Raised(error="OSError"))
    cluster.train(FIRST + 2)
    cluster.progress = Progress(num_committed=FIRST + 3, ends=False)
    epoch = cluster.state.epoch
    before = len(cluster.commands)
    cluster.restart()

    assert (cluster.state.phase, cluster.state.epoch) == (Phase.TRAINING, epoch)
    assert not of_type(cluster.commands[before:], Abort)


def test_a_job_whose_last_iteration_is_on_record_does_not_train_again() -> None:
    """Its save is awaited, from agents that say again what was written."""
    cluster = begun()
    for iteration in range(FIRST, END):
        cluster.train(iteration)
    assert cluster.state.phase is Phase.SAVING
    cluster.progress = Progress(num_committed=END, ends=True)
    for rank, layers in ((0, range(5)), (1, range(5, 10))):
        cluster.nodes[rank].say(save_report(rank, END, epoch=0, layers=layers))
    before = len(cluster.commands)
    cluster.restart()

    assert cluster.commands[-1] == End(Ending.FINISHED)
    assert not of_type(cluster.commands[before:], Committed)


def test_without_a_decision_members_are_asked_again() -> None:
    """The coordinator before this one may have told some of them, or none."""
    members = Members(epoch=4, term=1, nodes=(0, 1, 2))
    state, commands = restored_step(
        small_rules(),
        PLAN,
        term=2,
        members=members,
        outcome=None,
        decision=None,
        progress=None,
        predicted_s=1.0,
        now_s=NOW_S,
    )

    assert (state.phase, state.term, state.epoch) == (Phase.STOPPING, 2, 4)
    assert commands == (Tell(Abort(epoch=4, nodes=(0, 1, 2))),)
