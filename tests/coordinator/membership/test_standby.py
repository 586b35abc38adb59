"""Who stands by, who is taken for a lost node, and who is waited for."""

from typing import Literal

import pytest
from msgspec import structs

from helpers.coordinated import (
    FIRST,
    LOWER,
    NEXT,
    NOW_S,
    UPPER,
    Survivors,
    after,
    node_loss,
    of_type,
    small_rules,
    stop_report,
    training_halves,
    training_of_four_ranks,
    worker,
    worker_of_four,
)
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from helpers.recorder_messages import change_message
from planaria.coordinator.commands import End, MembersRecorded, Tick
from planaria.coordinator.crashes import shortage_without
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.membership.standby import (
    able_candidates,
    nodes_to_replace,
    num_joining,
    replacements_at_loss,
)
from planaria.coordinator.recovery import begin_recovery
from planaria.coordinator.state import Phase
from planaria.coordinator.step import Event
from planaria.core.kinds import ChangeKind, Ending, LossKind
from planaria.core.messages import (
    NodeArrived,
    NoticeTaken,
    SaveLayers,
    StopRequested,
    WorkerExited,
)
from planaria.core.records import AwaitingMachine, Decided, Recovering, Warned

PLAN = shaped_plan((1, 1), 6)


def rules(*, n0: int = 1, f: int = 1, standby: int = 0, grant_s: float = 0.0) -> Rules:
    made = small_rules(n0=n0, failures_tolerated=f, policy=Survivors())
    cluster = replace(made.job.cluster, nodes=2, max_nodes=4, standby=standby, grant_s=grant_s)
    return replace(made, job=replace(made.job, cluster=cluster), max_nodes=4)


def training(made: Rules, *standby: int) -> FakeCluster:
    """Two nodes train; these others have come, and had an iteration to be taken in."""
    cluster = FakeCluster(made, PLAN)
    cluster.begin()
    for node in standby:
        cluster.join(node)
    cluster.train(FIRST)
    return cluster


def is_training(cluster: FakeCluster) -> bool:
    return cluster.state.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("standby", "num_staying", "num_able", "taken"),
    [
        (0, 2, 2, 2),  # All that there is room for.
        (0, 3, 2, 1),
        (1, 2, 1, 0),  # As many are at work as the job began with.
        (1, 2, 3, 2),
        (2, 2, 1, 0),
        (1, 1, 1, 1),  # One of them has left.
        (2, 0, 1, 1),
        (1, 4, 3, 0),
    ],
)
def test_who_joins_while_training_goes_on(
    standby: int, num_staying: int, num_able: int, taken: int
) -> None:
    made = rules(standby=standby)
    assert num_joining(made, num_staying=num_staying, num_able=num_able) == taken


def test_a_standby_node_waits_until_one_is_lost() -> None:
    """Its worker has long been there; it is a member of the very next epoch."""
    cluster = training(rules(standby=1), 2)
    assert cluster.state.change is None
    assert cluster.state.nodes == (0, 1)
    cluster.lose(1)

    assert cluster.state.nodes == (0, 2)
    (decided,) = of_type(cluster.commands, Decided)
    assert decided.joined == (2,)
    assert cluster.state.membership.candidates == {}


def test_no_more_are_taken_than_are_lost() -> None:
    cluster = training(rules(standby=2), 2, 3)
    cluster.lose(0)

    assert cluster.state.nodes == (1, 2)
    assert list(cluster.state.membership.candidates) == [3]


def test_a_machine_that_failed_often_is_no_standby_until_it_is_taken_back() -> None:
    """But where f failures would not be tolerated any more anyone is taken."""
    cluster = training(rules(standby=1, f=0))
    cluster.set_failures({"flaky": (3, NOW_S)})
    cluster.join_on(2, "flaky")
    cluster.lose(1)
    assert cluster.state.nodes == (0,)

    cluster = training(rules(standby=1, f=1))
    cluster.set_failures({"flaky": (3, NOW_S)})
    cluster.join_on(2, "flaky")
    cluster.lose(1)
    assert cluster.state.nodes == (0, 2)


def test_a_standby_node_that_is_lost_is_no_loss() -> None:
    cluster = training(rules(standby=1), 2)
    cluster.lose(2)

    assert of_type(cluster.commands, Recovering) == []
    assert cluster.state.membership.candidates == {}


def test_a_standby_node_can_join_after_one_of_its_workers_was_forked_anew() -> None:
    """Its agent forks only that worker, and the others do not report again."""
    made = rules(standby=1)
    exited = WorkerExited(node=2, rank=9, pid=59, status=-9)
    events: list[Event] = [
        NodeArrived(node=2, rank=8, machine="m"),
        *map(worker_of_four, range(8, 12)),
        exited,
    ]
    state, _ = after(training_of_four_ranks(made), events, made)
    assert able_candidates(state, NOW_S) == []
    # The agent may tell of the exit again after the new worker has reported.
    state, _ = after(state, [worker_of_four(9, pid=77), exited], made)

    assert able_candidates(state, NOW_S) == [2]


def test_with_too_few_left_a_machine_is_waited_for() -> None:
    """That is said once, training goes on where it was, and no failure is counted for it."""
    cluster = training(rules(n0=2, grant_s=60.0))
    cluster.lose(1)
    cluster.hear(Tick(), now_s=NOW_S + 129.0)
    (waiting,) = of_type(cluster.commands, AwaitingMachine)
    assert waiting.now_s == NOW_S
    assert waiting.text == (
        "1 node is left, fewer than the n0 = 2 that the model needs; the job has asked for a "
        "machine and waits for it, 130 s at most"
    )
    assert cluster.state.phase is Phase.STOPPING
    history = cluster.state.membership.history
    cluster.join(2)

    assert cluster.state.nodes == (0, 2)
    assert is_training(cluster)
    assert cluster.state.membership.history == history
    (decided,) = of_type(cluster.commands, Decided)
    assert decided.joined == (2,)
    cluster.train(FIRST + 1)
    assert cluster.state.commits.next_iteration == FIRST + 2


def test_a_machine_is_not_waited_for_forever() -> None:
    """What is live is saved then, as without anybody to ask."""
    cluster = training(rules(n0=2, grant_s=60.0))
    cluster.lose(1)
    cluster.hear(Tick(), now_s=NOW_S + 131.0)

    (end,) = [command for command in cluster.commands if isinstance(command, End)]
    assert end.ending is Ending.LOST
    assert "fewer than the n0 = 2" in end.reason


def test_nobody_waits_who_was_told_to_stop() -> None:
    cluster = training(rules(n0=2, grant_s=60.0))
    cluster.hear(StopRequested())
    cluster.lose(1)

    assert cluster.state.phase is Phase.ENDED


def test_nobody_waits_whose_job_has_to_end() -> None:
    """As where links stay cut: a machine is of no use to it, and what is live was not saved yet."""
    cluster = training(rules(standby=1, grant_s=60.0), 2)
    stop = replace(cluster.state.stop, must_end="links stay cut")
    cluster.state, _ = begin_recovery(
        cluster.rules,
        replace(cluster.state, stop=stop),
        LossKind.LOST,
        (),
        reason=stop.must_end,
        now_s=NOW_S,
    )
    cluster.restart_epoch()

    assert of_type(cluster.commands, AwaitingMachine) == []
    assert cluster.state.nodes == (0, 1)
    (save,) = of_type(cluster.commands, SaveLayers)
    assert save.iteration == FIRST + 1
    assert cluster.commands[-1] == End(Ending.LOST, "links stay cut")


def test_a_loss_while_all_wait_is_survived_and_waited_for_anew() -> None:
    cluster = training(rules(n0=2, grant_s=60.0))
    cluster.lose(1)
    cluster.join(2)
    cluster.lose(2)

    assert cluster.state.phase is Phase.STOPPING
    cluster.join(3)
    assert cluster.state.nodes == (0, 3)
    assert is_training(cluster)


def test_a_node_that_is_taken_away_does_not_count_as_left() -> None:
    """Whoever comes is taken at once, though with that node there would be enough."""
    made = rules(n0=1, f=1, grant_s=60.0)
    resilience = replace(made.job.resilience, when_below="stop")
    made = replace(made, job=replace(made.job, resilience=resilience))
    cluster = FakeCluster(made, shaped_plan((1, 1, 1), 6))
    cluster.begin()
    cluster.train(FIRST)
    cluster.hear(NoticeTaken(node=2, rank=2, after_s=30.0))
    cluster.lose(1)
    assert not is_training(cluster)
    cluster.join(3)

    assert cluster.state.nodes == (0, 2, 3)
    assert cluster.state.plan.nodes == (0, 3)
    assert is_training(cluster)


@pytest.mark.parametrize(("when_below", "taken"), [("continue", ()), ("stop", (2,))])
def test_after_a_broken_link_as_many_are_taken_as_the_job_goes_on_with(
    when_below: Literal["continue", "stop"], taken: tuple[int, ...]
) -> None:
    """A job that stops below (f + 1) * n0 nodes did so with a node that waited."""
    made = rules(n0=1, f=1, standby=1)
    resilience = replace(made.job.resilience, when_below=when_below)
    made = replace(made, job=replace(made.job, resilience=resilience))
    state = training(made, 2).state
    state = replace(state, troubles=replace(state.troubles, broken_links=1))

    assert replacements_at_loss(made, state, 1, NOW_S) == taken


def test_no_more_nodes_are_taken_than_there_may_be() -> None:
    """Raised estimates of memory had made n0 so large that (f + 1) * n0 nodes were more."""
    made = replace(rules(n0=1, f=1), n0=3, max_nodes=3)
    state = training(replace(made, max_nodes=2), 2, 3).state
    assert list(state.membership.candidates) == [2, 3]

    assert len(replacements_at_loss(made, state, 2, NOW_S)) == 1


def test_a_node_that_is_joining_takes_no_second_place() -> None:
    """Until its switch began it was a candidate, too, and filled the gap that another could."""
    made = replace(rules(f=2), max_nodes=3)
    cluster = training(made)
    cluster.join(2)
    assert cluster.state.switch is not None
    cluster.join(3)
    cluster.lose(0)

    assert cluster.state.nodes == (1, 2, 3)
    (decided,) = of_type(cluster.commands, Decided)
    assert decided.joined == (2, 3)


def test_a_node_that_is_lost_while_it_joins_is_not_its_own_replacement() -> None:
    """It was a member again of the epoch after its loss, which waited for it; and a candidate from
    then on, for whose workers a node with a notice was kept."""
    cluster = training(rules(f=2))
    cluster.join(2)
    assert cluster.state.switch is not None
    cluster.lose(2)

    assert cluster.state.nodes == (0, 1)
    assert cluster.state.membership.gone == (2,)
    assert cluster.state.membership.candidates == {}
    assert is_training(cluster)


def test_a_node_that_is_joining_counts_once_among_those_that_would_be_left() -> None:
    """Two are needed. The job evicted the only other one."""
    made = rules()
    resilience = replace(made.job.resilience, when_below="stop")
    made = replace(made, job=replace(made.job, resilience=resilience))
    cluster = FakeCluster(made, shaped_plan((1,), 6))
    cluster.begin()
    cluster.join(2)
    assert cluster.state.switch is not None

    assert "1 node is left" in shortage_without(made, cluster.state, 0)
    assert "1 node is left" in shortage_without(made, cluster.state, 2)


def test_machines_are_asked_for_where_nodes_are_lost_or_taken_away() -> None:
    """Not where a user drains one, or only a worker ended."""
    lost = Recovering(epoch=1, kind=LossKind.LOST, nodes=(3,), iteration=0, reason="", lost_s=0.0)
    crash = Recovering(epoch=1, kind=LossKind.CRASH, nodes=(3,), iteration=0, reason="", lost_s=0.0)
    assert nodes_to_replace(lost) == (3,)
    assert nodes_to_replace(crash) == ()
    assert nodes_to_replace(Warned(text="node 4 cannot join", gone=(4,))) == (4,)
    kinds = {1: ChangeKind.PREEMPT, 2: ChangeKind.DRAIN, 5: ChangeKind.JOIN}
    changed = structs.replace(change_message(), kinds=kinds)
    assert nodes_to_replace(changed) == (1,)


def test_a_job_that_would_end_takes_in_a_node_that_was_ready_before_that_was_decided() -> None:
    """Nobody was to be waited for, and it was not among the members that stopped."""
    made = small_rules(when_below="stop")
    events: list[Event] = [
        node_loss(3),
        NodeArrived(node=4, rank=4, machine="m"),
        MembersRecorded(1),
        worker(4),
    ]
    held = {0: LOWER, 1: UPPER, 2: LOWER}
    events += [stop_report(r, 1, layers=held[r], age=NEXT, last=NEXT - 1) for r in held]
    state, commands = after(training_halves(made), events, made)

    assert of_type(commands, End) == []
    assert state.nodes == (0, 1, 2, 4)
