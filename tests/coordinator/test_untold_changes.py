"""Changes that a loss or a new coordinator ends before the launcher is told who came and left."""

import pytest

from coordinator.test_change import rules, training
from coordinator.test_dropped_changes import begin_long_join, lasting, train_on
from helpers.coordinated import of_type
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.commands import Notify, RecordMembers
from planaria.coordinator.membership.standby import nodes_to_replace
from planaria.coordinator.state import Phase
from planaria.core.messages import DrainRequested, NoticeTaken
from planaria.core.records import Changed, Decided, Progress, Warned

NOTICE = NoticeTaken(node=2, rank=2, after_s=30.0)


def leaving(request: NoticeTaken | DrainRequested = NOTICE) -> FakeCluster:
    """A job that node 2 has left; node 3 has not begun the epoch without it yet."""
    cluster = training(rules(), shaped_plan((1, 1, 1, 1), 6))
    cluster.hear(request)
    cluster.nodes[3].is_linked = lambda _: False
    train_on(cluster, 1)
    assert cluster.state.membership.gone == (2,)
    assert cluster.state.change is not None
    return cluster


def replaced(cluster: FakeCluster) -> list[int]:
    """The nodes in whose places machines are asked for."""
    notices = [command for command in cluster.commands if isinstance(command, Notify)]
    return [node for notice in notices for node in nodes_to_replace(notice.message)]


def warned_events(cluster: FakeCluster) -> list[str]:
    return [warning.event for warning in of_type(cluster.commands, Warned) if warning.event]


def test_a_preempted_node_is_replaced_though_a_loss_ends_the_change() -> None:
    """No machine was asked for in its place, and the report did not have it."""
    cluster = leaving()
    cluster.lose(3)

    assert cluster.state.phase is Phase.TRAINING
    assert replaced(cluster) == [2, 3]
    assert warned_events(cluster) == ["preempted"]
    train_on(cluster, 1)
    cluster.lose(1)
    assert replaced(cluster) == [2, 3, 1]


def test_a_drained_node_is_told_to_have_left_though_a_loss_ends_the_change() -> None:
    """Whoever asked for it waits for that; nobody replaces the node."""
    cluster = leaving(DrainRequested(node=2))
    cluster.lose(3)

    assert replaced(cluster) == [3]
    (warning,) = of_type(cluster.commands, Warned)
    assert (warning.left, warning.event) == ((2,), "drained")
    assert warning.text == "node 2 has left, as it was asked to"


def test_a_new_coordinator_tells_of_a_preempted_node_at_any_moment_of_the_change() -> None:
    """The one before it may have been lost between the record of the members and the report."""
    cluster = training(rules(), shaped_plan((1, 1, 1, 1), 6))
    before = len(cluster.moments)
    cluster.hear(*cluster.nodes[2].say(NOTICE))
    train_on(cluster, 2)
    assert of_type(cluster.commands, Changed)
    moments = cluster.moments[before:]
    while not isinstance(moments[0].last_command, RecordMembers):
        del moments[0]
    assert len(moments) > 3

    for moment in moments:
        moment.restart()
        train_on(moment, 1)
        assert moment.state.nodes == (0, 1, 3), moment.last_command
        assert replaced(moment) == [2], moment.last_command
        assert warned_events(moment) == ["preempted"], moment.last_command


def test_a_new_coordinator_tells_nothing_anew_after_a_commit_without_the_node() -> None:
    """The one before has told of the change by then."""
    cluster = training(rules(), shaped_plan((1, 1, 1, 1), 6))
    cluster.hear(NOTICE)
    train_on(cluster, 3)
    assert replaced(cluster) == [2]
    number, epoch = cluster.state.commits.next_iteration, cluster.state.epoch
    cluster.progress = Progress(num_committed=number, ends=False, epoch=epoch)
    cluster.restart()

    assert cluster.state.phase is Phase.TRAINING
    assert replaced(cluster) == [2]


@pytest.mark.parametrize("has_new_coordinator", [False, True])
def test_the_answer_to_a_loss_names_a_node_that_joined_in_waves(
    monkeypatch: pytest.MonkeyPatch, *, has_new_coordinator: bool
) -> None:
    """It is a member from the first wave on, and no candidate that the loss makes one."""
    made = lasting(rules(bandwidth_bytes_per_s=8.0), monkeypatch)
    cluster = training(made, shaped_plan((1, 1, 1), 6))
    begin_long_join(cluster, 3)
    if has_new_coordinator:
        number, epoch = cluster.state.commits.next_iteration, cluster.state.epoch
        cluster.progress = Progress(num_committed=number, ends=False, epoch=epoch)
        cluster.restart()
    else:
        cluster.lose(0)

    assert of_type(cluster.commands, Decided)[-1].joined == (3,)
    assert cluster.state.plan.nodes == cluster.state.nodes
    cluster.lose(1)
    assert of_type(cluster.commands, Decided)[-1].joined == ()


def test_the_answer_to_a_loss_names_a_node_that_joined_in_a_dropped_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The change after it may be one without the node."""
    made = lasting(rules(bandwidth_bytes_per_s=8.0), monkeypatch)
    cluster = training(made, shaped_plan((1, 1, 1), 6))
    begin_long_join(cluster, 3)
    cluster.hear(NoticeTaken(node=0, rank=0, after_s=30.0))
    while 0 in cluster.state.nodes:
        train_on(cluster, 1)
    (changed,) = of_type(cluster.commands, Changed)
    assert set(changed.kinds) == {0}
    cluster.lose(1)

    assert of_type(cluster.commands, Decided)[-1].joined == (3,)


def test_a_node_is_told_to_have_joined_once() -> None:
    """The next loss does not name it again."""
    cluster = training(rules())
    cluster.join(2)
    train_on(cluster, 3)
    (changed,) = of_type(cluster.commands, Changed)
    assert changed.kinds == {2: "join"}
    cluster.lose(0)

    assert of_type(cluster.commands, Decided)[-1].joined == ()
