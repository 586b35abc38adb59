"""Nodes that are asked to leave while a change is under way, which is dropped for that."""

from itertools import product

import pytest

from coordinator.test_change import (
    committed,
    joins,
    rules,
    stopping_below,
    training,
    undrained,
)
from helpers import fake_cluster
from helpers.coordinated import FIRST, of_type
from helpers.fake_cluster import FakeCluster
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import Phase
from planaria.core.messages import (
    DrainRequested,
    NodeArrived,
    NodeLost,
    NoticeTaken,
    StartEpoch,
)
from planaria.core.records import Changed, Recovering


def lasting(made: Rules, monkeypatch: pytest.MonkeyPatch, *, iterations: int = 100) -> Rules:
    """The rules of a job with more iterations."""
    monkeypatch.setattr(fake_cluster, "END", iterations)
    training = replace(made.job.training, iterations=iterations)
    return replace(made, job=replace(made.job, training=training))


def train_on(cluster: FakeCluster, number: int) -> None:
    """So many more iterations."""
    for _ in range(number):
        cluster.train(cluster.state.commits.next_iteration)


def begin_long_join(cluster: FakeCluster, node: int) -> None:
    """A node joins, and gets layers in waves, of which the second is under way."""
    cluster.join(node)
    train_on(cluster, 3)
    assert cluster.state.change is not None
    assert len(cluster.state.change.waves) == NUM_LAYERS - 2
    assert len(cluster.state.plan.silent[node]) == 2


def test_a_node_that_is_taken_away_during_a_long_change_leaves_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stayed until the change was over, and got new work in it; 20 iterations later, when its
    machine was gone, it was planned out. The node that joins does so afterwards."""
    made = lasting(rules(bandwidth_bytes_per_s=8.0), monkeypatch)
    cluster = training(made, shaped_plan((1, 1, 1), 6))
    begin_long_join(cluster, 3)
    cluster.hear(NoticeTaken(node=0, rank=0, after_s=30.0))
    train_on(cluster, 4)

    assert cluster.state.nodes == (1, 2, 3)
    train_on(cluster, 2 * NUM_LAYERS + 2)
    assert cluster.state.change is None
    assert (cluster.state.plan.nodes, cluster.state.plan.silent) == ((1, 2, 3), {})
    changed = of_type(cluster.commands, Changed)
    assert [notice.kinds for notice in changed] == [{0: "preempt"}, {3: "join"}]
    assert of_type(cluster.commands, Recovering) == []


@pytest.mark.parametrize("word", ["drain", "preempt"])
def test_a_node_leaves_with_a_change_that_was_under_way_if_there_is_time(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that have moved count, so that all is over when it would have been without."""
    made = lasting(rules(bandwidth_bytes_per_s=8.0), monkeypatch)
    cluster = training(made, shaped_plan((1, 1, 1), 6))
    begin_long_join(cluster, 3)
    request = DrainRequested(node=0)
    notice = NoticeTaken(node=0, rank=0, after_s=120.0)
    cluster.hear(request if word == "drain" else notice)
    train_on(cluster, 2 * NUM_LAYERS - 1)

    assert cluster.state.nodes == cluster.state.plan.nodes == (1, 2, 3)
    (changed,) = of_type(cluster.commands, Changed)
    assert changed.kinds == {3: "join", 0: word}
    moved = [t for order in joins(cluster) for transfers in order.rounds for t in transfers]
    assert sorted(t.layer for t in moved) == list(range(NUM_LAYERS))


def test_what_a_dropped_change_has_cost_is_told_with_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes had joined without a byte where all their layers had come before."""
    made = lasting(rules(bandwidth_bytes_per_s=8.0), monkeypatch)
    cluster = training(made, shaped_plan((1, 1, 1), 6))
    begin_long_join(cluster, 3)
    assert cluster.state.change is not None
    change = replace(cluster.state.change, received_bytes=700, pause_s=0.5)
    cluster.state = replace(cluster.state, change=change)
    cluster.hear(DrainRequested(node=0))
    train_on(cluster, 2 * NUM_LAYERS - 1)

    (changed,) = of_type(cluster.commands, Changed)
    assert changed.received_bytes >= 700
    assert changed.pause_s >= 0.5
    assert (cluster.state.search.dropped_bytes, cluster.state.search.dropped_s) == (0, 0.0)


def test_a_change_goes_on_for_a_node_that_is_kept_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second node to be taken away leaves too few, until the third has come."""
    made = lasting(replace(rules(bandwidth_bytes_per_s=8.0), n0=2), monkeypatch)
    cluster = training(made, shaped_plan((1, 1, 1), 6))
    begin_long_join(cluster, 3)
    cluster.hear(NodeArrived(node=4, rank=4, machine="m"))
    cluster.hear(NoticeTaken(node=0, rank=0, after_s=120.0))
    change = cluster.state.change
    assert change is not None
    train_on(cluster, 2)
    assert cluster.state.change is not None
    assert cluster.state.change.kinds == change.kinds == {3: "join"}
    cluster.join_on(4, "m")
    train_on(cluster, 2)
    assert cluster.state.change.kinds == {3: "join", 4: "join", 0: "preempt"}


def test_a_member_that_a_dropped_change_was_to_give_work_gets_it_though_a_drain_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the node that joins nor the one that stays is forgotten."""
    made = lasting(stopping_below(rules(bandwidth_bytes_per_s=8.0)), monkeypatch)
    made = replace(made, n0=2)
    cluster = training(made, shaped_plan((1, 1, 1, 1), 6))
    begin_long_join(cluster, 4)
    cluster.hear(DrainRequested(node=0), DrainRequested(node=1))
    train_on(cluster, 2 * NUM_LAYERS + 2)

    assert undrained(cluster) == [(0, 1)]
    assert cluster.state.change is None
    assert cluster.state.nodes == cluster.state.plan.nodes == (0, 1, 2, 3, 4)
    assert not cluster.state.plan.silent


def test_a_loss_after_a_change_was_dropped_leads_to_the_survivors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever it is, and however far the next change is."""
    for number, later in product(range(4), range(6)):
        made = lasting(rules(bandwidth_bytes_per_s=8.0), monkeypatch)
        cluster = training(made, shaped_plan((1, 1, 1), 6))
        begin_long_join(cluster, 3)
        cluster.hear(NoticeTaken(node=0, rank=0, after_s=30.0))
        train_on(cluster, later)
        left = set(cluster.state.nodes) - {number}
        if number in cluster.state.nodes:
            cluster.lose(number)
        train_on(cluster, 2 * NUM_LAYERS + 2)

        assert cluster.state.phase is Phase.TRAINING
        assert set(cluster.state.plan.nodes) == left - {0}
        assert cluster.state.change is None
        numbers = committed(cluster)
        assert numbers == list(range(FIRST, FIRST + len(numbers)))


def test_a_new_coordinator_finds_its_way_at_any_moment_after_a_change_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node that joins is a member already, and stays one; the notice is repeated."""
    made = lasting(rules(bandwidth_bytes_per_s=8.0), monkeypatch)
    cluster = training(made, shaped_plan((1, 1, 1), 6))
    begin_long_join(cluster, 3)
    before = len(cluster.moments)
    notice = NoticeTaken(node=0, rank=0, after_s=30.0)
    cluster.hear(*cluster.nodes[0].say(notice))
    train_on(cluster, 6)
    moments = cluster.moments[before:]
    assert len(moments) > 10

    for moment in moments:
        moment.restart()
        train_on(moment, 2 * NUM_LAYERS + 6)
        assert moment.state.phase is Phase.TRAINING, moment.last_command
        assert moment.state.nodes == moment.state.plan.nodes == (1, 2, 3)


def test_a_node_whose_drain_is_refused_after_a_loss_gets_work_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan after the loss has none for it. Then another drain leaves too few, so both stay."""
    made = lasting(stopping_below(rules()), monkeypatch)
    resilience = replace(made.job.resilience, policy="reinstantiate")
    made = replace(made, job=replace(made.job, resilience=resilience))
    cluster = training(made, shaped_plan((1, 1, 1, 1), 6))
    held_up = cluster.nodes[1]
    held_up.is_linked = lambda _: False
    cluster.hear(DrainRequested(node=3), NodeLost(node=0, reason="closed"))
    cluster.hear(DrainRequested(node=2))
    assert cluster.state.phase is Phase.STARTING
    assert 3 not in cluster.state.plan.nodes
    held_up.is_linked = lambda _: True
    order = of_type(cluster.commands, StartEpoch)[-1]
    cluster.hear(*held_up.begin(order, order.iteration))
    train_on(cluster, 6)

    assert undrained(cluster) == [(2, 3)]
    assert cluster.state.nodes == (1, 2, 3)
    assert cluster.state.plan.nodes == (1, 2, 3)
