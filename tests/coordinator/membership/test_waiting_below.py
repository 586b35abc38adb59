"""A job on several machines with fewer than n0 nodes saves what is whole, and waits for others."""

from dataclasses import replace
from typing import Literal

import pytest

from helpers.coordinated import FIRST, NOW_S, SOURCE, Survivors, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.commands import Command, End, RecordDecision, RecordMembers, Tick
from planaria.coordinator.state import Phase
from planaria.core.kinds import Ending, LossKind
from planaria.core.messages import DrainRequested, NoticeTaken, SaveLayers, StopRequested
from planaria.core.records import AwaitingMachine, Recovering

PLAN = shaped_plan((1, 1), 6)
WAIT_S = 600.0


def training(
    *, n0: int = 2, f: int = 1, wait_s: float = WAIT_S, source: str = SOURCE
) -> FakeCluster:
    """A job of two nodes that have trained an iteration; each holds all layers."""
    rules = small_rules(n0=n0, failures_tolerated=f, policy=Survivors())
    cluster = FakeCluster(replace(rules, max_nodes=4, wait_s=wait_s, source=source), PLAN)
    cluster.begin()
    cluster.train(FIRST)
    return cluster


def nodes(cluster: FakeCluster) -> tuple[int, ...]:
    """The members."""
    return cluster.state.nodes


def is_training(cluster: FakeCluster) -> bool:
    """Whether the job trains."""
    return cluster.state.phase is Phase.TRAINING


def ends(cluster: FakeCluster) -> list[End]:
    """The ends of the job, at most one."""
    return [command for command in cluster.commands if isinstance(command, End)]


def saves(cluster: FakeCluster) -> list[tuple[int, list[int]]]:
    """The last saves that were ordered: the iteration, and the layers in order."""
    commands: list[Command] = cluster.commands
    orders = [c.decision.order for c in commands if isinstance(c, RecordDecision)]
    return [
        (order.iteration, sorted(layer for layers in order.layers.values() for layer in layers))
        for order in orders
        if isinstance(order, SaveLayers)
    ]


def test_what_lives_is_saved_before_machines_are_waited_for() -> None:
    """The nodes that are left may be gone, too, before others come."""
    cluster = training()
    cluster.lose(1)

    assert saves(cluster) == [(FIRST + 1, list(range(10)))]
    assert cluster.state.phase is Phase.SAVING
    assert cluster.state.saves.newest_iteration == FIRST + 1
    (waiting,) = of_type(cluster.commands, AwaitingMachine)
    assert waiting.text == (
        "1 node is left, fewer than the n0 = 2 that the model needs; the job waits for machines, "
        "600 s at most"
    )
    assert not ends(cluster)


def test_training_goes_on_from_what_lives_when_a_machine_comes() -> None:
    """Nothing is done again, and nothing is counted as a failure for it."""
    cluster = training()
    cluster.lose(1)
    history = cluster.state.membership.history
    cluster.join(2)

    assert nodes(cluster) == (0, 2)
    assert is_training(cluster)
    assert cluster.state.commits.origin.epoch == -1
    assert cluster.state.membership.history == history
    cluster.train(FIRST + 1)
    assert cluster.state.commits.next_iteration == FIRST + 2


def test_the_job_ends_when_nobody_has_come() -> None:
    """As without anybody to wait for, but later."""
    cluster = training()
    cluster.lose(1)
    cluster.hear(Tick(), now_s=NOW_S + WAIT_S - 1.0)
    assert not ends(cluster)
    cluster.hear(Tick(), now_s=NOW_S + WAIT_S + 1.0)

    (end,) = ends(cluster)
    assert end.ending is Ending.LOST
    assert "fewer than the n0 = 2" in end.reason


def test_a_job_on_one_machine_waits_for_nobody() -> None:
    """Nobody joins there by itself."""
    cluster = training(wait_s=0.0)
    cluster.lose(1)

    assert len(ends(cluster)) == 1


def test_each_loss_and_each_machine_that_comes_begins_the_wait_anew() -> None:
    """Machines of a pool come one after the other."""
    cluster = training(n0=3, f=0)
    cluster.lose(1)
    cluster.hear(Tick(), now_s=NOW_S + WAIT_S - 1.0)
    cluster.join(2)
    assert nodes(cluster) == (0, 2)
    assert not is_training(cluster)
    assert len(of_type(cluster.commands, AwaitingMachine)) == 2
    cluster.join(3)

    assert nodes(cluster) == (0, 2, 3)
    assert is_training(cluster)


def test_a_job_waits_without_any_node() -> None:
    """A pool that is taken away as a whole comes back as a whole; the job goes on from its save."""
    cluster = training(n0=1)
    cluster.hear(NoticeTaken(node=0, rank=0, after_s=30.0))
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    cluster.train(FIRST + 1)
    cluster.lose(0, 1)
    assert nodes(cluster) == ()
    assert not ends(cluster)
    cluster.join(2)

    assert nodes(cluster) == (2,)
    assert is_training(cluster)
    assert cluster.state.commits.next_iteration == FIRST + 2


def test_without_a_save_there_is_nothing_to_wait_for_when_the_last_node_is_gone() -> None:
    """A layer that is nowhere never comes back."""
    cluster = training(n0=1, source="")
    cluster.lose(0, 1)

    (end,) = ends(cluster)
    assert "no live node holds layer 0" in end.reason


def test_a_new_coordinator_waits_on() -> None:
    """The order to save is on record; whoever finds it carried out does not end the job."""
    cluster = training()
    cluster.lose(1)
    cluster.restart()
    assert not [end for end in ends(cluster) if end.ending is Ending.LOST]
    cluster.join(2)

    assert nodes(cluster) == (0, 2)
    assert is_training(cluster)


def test_nobody_waits_who_was_told_to_stop() -> None:
    """Neither before nor after the wait has begun."""
    cluster = training()
    cluster.lose(1)
    cluster.hear(StopRequested())
    assert len(ends(cluster)) == 1

    cluster = training()
    cluster.hear(StopRequested())
    cluster.lose(1)
    assert len(ends(cluster)) == 1


def test_a_notice_that_leaves_too_few_saves_while_the_node_is_there() -> None:
    """Its layers may be nowhere else. When it is gone the job still waits, and has that save."""
    cluster = training()
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    cluster.train(FIRST + 1)
    (short,) = of_type(cluster.commands, Recovering)
    assert short.kind is LossKind.SHORT
    assert saves(cluster) == [(FIRST + 1, list(range(10)))]
    cluster.lose(1)
    assert nodes(cluster) == (0,)
    assert not ends(cluster)
    cluster.join(2)

    assert nodes(cluster) == (0, 2)
    assert is_training(cluster)


def test_a_node_that_the_user_drains_stays_where_too_few_would_be_left() -> None:
    """The wish is refused; the job does not wait for its sake."""
    cluster = training()
    cluster.hear(DrainRequested(node=1))
    cluster.train(FIRST + 1)

    assert is_training(cluster)
    assert not of_type(cluster.commands, Recovering)


@pytest.mark.parametrize("when_below", ["stop", "continue"])
def test_with_n0_nodes_the_job_obeys_when_below(
    when_below: Literal["stop", "continue"],
) -> None:
    """The wait is for those without whom nothing can be trained."""
    cluster = training(n0=1)
    rules = cluster.rules
    resilience = replace(rules.job.resilience, when_below=when_below)
    cluster.rules = replace(rules, job=replace(rules.job, resilience=resilience))
    cluster.lose(1)

    assert not of_type(cluster.commands, AwaitingMachine)
    assert (cluster.state.phase is Phase.ENDED) == (when_below == "stop")


def test_an_empty_membership_is_on_record_before_machines_are_waited_for() -> None:
    """Those who are gone must not come back after a restart of the coordinator."""
    cluster = training(n0=1)
    cluster.hear(NoticeTaken(node=0, rank=0, after_s=30.0))
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    cluster.train(FIRST + 1)
    cluster.lose(0, 1)
    cluster.restart()
    members = [c.members for c in cluster.commands if isinstance(c, RecordMembers)][-1]
    cluster.join(2)

    assert (members.nodes, members.gone) == ((), (0, 1))
    assert nodes(cluster) == (2,)
    assert is_training(cluster)
