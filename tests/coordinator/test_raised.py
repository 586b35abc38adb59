"""What raises in a worker, or ends it: whether it counts against the job or against a node."""

import pytest

from helpers.coordinated import (
    END,
    FIRST,
    NOW_S,
    after,
    node_loss,
    of_type,
    small_rules,
    training_of_four_ranks,
    worker,
    worker_exit,
    worker_failure,
)
from helpers.raising import (
    ELSEWHERE,
    MISTAKE,
    NEXT,
    SINGLE,
    UNREADABLE,
    ending,
    replace_layers,
    saves,
    trained,
)
from planaria.coordinator.commands import (
    Evict,
    MembersRecorded,
    RecordMembers,
)
from planaria.coordinator.crashes import _why_needed
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import Crash, Phase
from planaria.coordinator.step import Event, step
from planaria.core.kinds import Ending
from planaria.core.messages import Abort, Raised, StopRequested, WorkerExited, WorkerFailed
from planaria.core.records import AwaitingMachine, Forked, Recovering

# -- against the node -----------------------------------------------------------------------------


def test_what_is_no_mistake_of_the_jobs_is_recovered_from() -> None:
    """As from a worker that was killed; the report is told what raised, and where."""
    cluster = trained()
    cluster.fail(1, ELSEWHERE)

    (notice,) = of_type(cluster.commands, Recovering)
    assert (notice.kind, notice.nodes, notice.raised) == ("crash", (1,), ELSEWHERE)
    assert "rank 1 on node 1 raised OSError in layers 5 to 9: [Errno 5] data" in notice.reason
    for iteration in range(NEXT, END):
        cluster.train(iteration)
    assert cluster.state.commits.next_iteration == END


def test_a_worker_that_raised_is_replaced_if_others_hold_its_layers() -> None:
    """Its process may hold on to what made it raise; its successor answers in its place."""
    cluster = trained()
    before = cluster.nodes[1].pid
    cluster.fail(1, ELSEWHERE)

    (order,) = of_type(cluster.commands, Abort)
    assert order.replaced == {1: before}
    assert cluster.nodes[1].pid != before
    (notice,) = of_type(cluster.commands, Recovering)  # Its end is no second loss.
    assert notice.is_forking
    assert len(of_type(cluster.commands, Forked)) == 1
    assert cluster.state.phase is Phase.TRAINING


def test_a_worker_that_is_to_end_is_said_again_in_the_next_epoch() -> None:
    """Its successor may have come after that order, and has to be told whose stead it is in."""
    cluster = trained()
    before = cluster.nodes[1].pid
    cluster.fail(1, ELSEWHERE)
    cluster.lose(2)

    assert of_type(cluster.commands, Abort)[-1].replaced == {1: before}
    assert cluster.state.phase is Phase.TRAINING


def test_two_holders_that_raise_at_once_both_keep_what_they_hold() -> None:
    """If both made way the layers would be gone, and with them what was trained."""
    cluster = trained(rules=replace(small_rules(), source=""))
    for rank in (1, 3):
        event = worker_failure(rank, ELSEWHERE, epoch=0)
        cluster.state, _ = step(cluster.rules, cluster.state, event, NOW_S)
    cluster.restart_epoch()

    (order,) = of_type(cluster.commands, Abort)
    assert order.replaced == {}
    assert cluster.state.phase is Phase.TRAINING
    assert cluster.state.commits.next_iteration == NEXT


def test_a_worker_whose_peer_was_just_forked_is_not_replaced() -> None:
    """The new one reports before it has any layer: nobody else holds them."""
    cluster = trained(rules=replace(small_rules(), source=""))
    cluster.nodes[3].pid += 1
    exited = WorkerExited(node=3, rank=3, pid=53, status=-9)
    cluster.state, _ = step(cluster.rules, cluster.state, exited, NOW_S)
    event = worker_failure(1, ELSEWHERE, epoch=0)
    cluster.state, _ = step(cluster.rules, cluster.state, event, NOW_S)
    cluster.nodes[3].layers = ()
    cluster.restart_epoch()

    assert of_type(cluster.commands, Abort)[-1].replaced == {}


def test_three_times_on_one_node_evict_it_and_the_job_goes_on() -> None:
    """Data that one node cannot read, others can."""
    cluster = trained()
    for _ in range(3):
        cluster.fail(1, ELSEWHERE)

    assert of_type(cluster.commands, Evict) == [Evict((1,))]
    notice = of_type(cluster.commands, Recovering)[-1]
    assert (notice.kind, notice.nodes, notice.raised) == ("lost", (1,), ELSEWHERE)
    assert "raised OSError in layers 5 to 9: [Errno 5] data, the 3rd time" in notice.reason
    for iteration in range(NEXT, END):
        cluster.train(iteration)
    assert cluster.state.commits.next_iteration == END


@pytest.mark.parametrize("status", [-7, -11, -9, 1])
def test_a_process_that_ends_three_times_on_one_node_evicts_it(status: int) -> None:
    """A bus error, a fault in a library, a kill and an exit are no different."""
    cluster = trained()
    for _ in range(3):
        cluster.crash(1, status=status)

    assert of_type(cluster.commands, Evict) == [Evict((1,))]
    assert cluster.state.phase is Phase.TRAINING
    assert cluster.state.nodes == (0, 2, 3)


def test_an_iteration_in_between_forgives() -> None:
    """Now and then is no loop."""
    cluster = trained()
    for iteration in range(NEXT, END - 1):
        cluster.fail(1, ELSEWHERE)
        cluster.fail(1, ELSEWHERE)
        cluster.train(iteration)

    assert cluster.state.phase is Phase.TRAINING
    assert not of_type(cluster.commands, Evict)


def test_iterations_that_are_done_again_forgive_nothing() -> None:
    """All go back each time, and what made them comes again: it would go on for ever."""
    cluster = trained(SINGLE, small_rules(failures_tolerated=0))
    for _ in range(2):
        cluster.crash(1, status=-7)
        assert cluster.state.commits.next_iteration == FIRST
        for iteration in range(FIRST, NEXT):
            cluster.train(iteration)
    cluster.crash(1, status=-7)

    end = ending(cluster)
    assert end.failure is not None
    assert "the 3rd time in a row" in end.failure.traceback


@pytest.mark.parametrize("raises", [True, False])
def test_iterations_that_an_outcome_commits_forgive_nothing(*, raises: bool) -> None:
    """A worker that ends or raises in each optimizer step leaves a vector of its iteration, which
    counts. It would go on for ever, with a recovery in each iteration."""
    cluster = trained()
    for iteration in range(NEXT, END):
        for number in (0, 2, 3):
            cluster.hear(*cluster.nodes[number].trains(iteration))
        if raises:
            cluster.fail(1, ELSEWHERE)
        else:
            cluster.crash(1)
        assert cluster.state.commits.next_iteration == iteration + 1

    assert END - NEXT == 3
    assert of_type(cluster.commands, Evict) == [Evict((1,))]
    assert "the 3rd time in a row" in of_type(cluster.commands, Recovering)[-1].reason


def test_workers_of_a_node_that_end_at_once_are_one_misfortune() -> None:
    """As where the kernel kills all of a container for want of memory."""
    rules = small_rules(n0=1)
    state = training_of_four_ranks(rules)
    killed = [WorkerExited(node=0, rank=rank, pid=50 + rank, status=-9) for rank in range(3)]
    state, commands = after(state, killed, rules)

    assert [crash.rank for crash in state.troubles.crashes] == [0, 1, 2]
    assert not of_type(commands, Evict)
    assert state.stop.failure is None


def test_a_rank_that_crashes_once_is_not_said_to_have_crashed_three_times() -> None:
    """Another rank of its node has; the third time all were leaving the epoch already."""
    rules = small_rules(n0=1)
    state = training_of_four_ranks(rules)
    thrice = tuple(Crash(0, 0, 50, epoch, Raised(error="SIGKILL")) for epoch in range(3))
    state = replace(state, troubles=replace(state.troubles, crashes=thrice))
    killed = WorkerExited(node=0, rank=1, pid=51, status=-9)
    _, commands = step(rules, state, killed, NOW_S)

    assert of_type(commands, Evict) == [Evict((0,))]
    (notice,) = of_type(commands, Recovering)
    assert notice.reason == "the worker of rank 1 on node 0 was killed by signal 9"


def test_what_is_told_again_counts_once() -> None:
    """Agents tell it on each connection, and one may be made anew while all leave the epoch."""
    cluster = trained()
    event, ended = worker_failure(1, ELSEWHERE, epoch=0), worker_exit(3, status=-9)
    for _ in range(4):
        for word in (event, ended):
            cluster.state, _ = step(cluster.rules, cluster.state, word, NOW_S)

    assert [crash.rank for crash in cluster.state.troubles.crashes] == [1, 3]
    assert not of_type(cluster.commands, Evict)


def test_a_worker_that_raises_once_more_before_it_makes_way_has_one_successor() -> None:
    """Its successor was taken for the one that raised at the next loss, and waited for in vain."""
    cluster = trained(rules=replace(small_rules(), source=""))
    state, _ = step(cluster.rules, cluster.state, worker_failure(1, ELSEWHERE, epoch=0), NOW_S)
    events: list[Event] = [
        MembersRecorded(1),
        worker_exit(0),
        worker_failure(1, ELSEWHERE, epoch=1),
    ]
    events += [worker(1, pid=77), MembersRecorded(2)]
    state, _ = after(state, events, cluster.rules)

    assert state.workers[1].pid == 77
    assert state.troubles.replaced[1] == 51


def test_the_successor_of_a_worker_whose_end_fails_the_job_is_told_to_answer() -> None:
    """The order before was for the one that is gone; what the others hold would not be saved."""
    cluster = trained(rules=replace(small_rules(), source=""))
    cluster.crash(3)
    cluster.crash(1)
    pid = cluster.nodes[1].pid
    cluster.state, _ = step(cluster.rules, cluster.state, worker_exit(1, pid=pid), NOW_S)
    epoch = cluster.state.epoch
    cluster.state, _ = step(cluster.rules, cluster.state, worker(1, pid=pid + 1), NOW_S)
    cluster.state, _ = step(cluster.rules, cluster.state, MembersRecorded(epoch), NOW_S)
    assert cluster.state.phase is Phase.STOPPING
    cluster.state, commands = step(cluster.rules, cluster.state, worker_exit(1, pid=pid + 1), NOW_S)

    assert cluster.state.stop.failure is not None
    assert [one.members.epoch for one in of_type(commands, RecordMembers)] == [epoch + 1]


def test_a_worker_that_raises_before_it_has_reported_is_forked_anew() -> None:
    """It holds nothing, and its end is no second loss."""
    cluster = trained()
    cluster.crash(1)
    pid = cluster.nodes[1].pid
    events = (
        WorkerFailed(node=1, rank=1, traceback="", pid=pid, blame="node", raised=UNREADABLE),
        WorkerExited(node=1, rank=1, pid=pid, status=1),
    )
    cluster.nodes[1].pid = 77
    cluster.hear(*events)

    assert len(of_type(cluster.commands, Recovering)) == 2
    assert cluster.state.phase is Phase.JOINING
    assert 1 not in cluster.state.workers


# -- against the job ------------------------------------------------------------------------------


def test_a_mistake_of_the_job_ends_it_once_what_is_live_is_saved() -> None:
    """It is no loss, so it is told once, with its traceback."""
    cluster = trained()
    cluster.fail(1, MISTAKE, blame="job")

    (order,) = saves(cluster)
    assert order.iteration == NEXT
    assert sorted(n for layers in order.layers.values() for n in layers) == list(range(10))
    end = ending(cluster)
    assert end.ending is Ending.FAILED
    assert end.failure is not None
    assert end.failure.traceback.endswith("ValueError: a mistake")
    assert not of_type(cluster.commands, Recovering)


def test_the_same_error_on_a_second_node_is_the_jobs() -> None:
    """Otherwise it would walk from node to node until none is left."""
    cluster = trained()
    for _ in range(3):
        cluster.fail(1, ELSEWHERE)
    rank = next(r for r in cluster.state.plan.ranks if r != 1)
    cluster.fail(rank, replace_layers(ELSEWHERE, 0, 10))

    assert of_type(cluster.commands, Evict) == [Evict((1,))]
    end = ending(cluster)
    assert end.ending is Ending.FAILED
    assert end.failure is not None
    assert (
        "the same happened on node 1, so it is not the fault of one node" in end.failure.traceback
    )
    assert saves(cluster)


def test_two_nodes_that_raise_in_turn_end_the_job_and_lose_nothing() -> None:
    """The third time of either; until then it may have been bad luck."""
    cluster = trained(rules=replace(small_rules(), source=""))
    for rank in (0, 2, 2, 0):
        cluster.fail(rank, UNREADABLE)
        assert cluster.state.phase is Phase.TRAINING
    cluster.fail(0, UNREADABLE)

    assert ending(cluster).ending is Ending.FAILED
    assert not of_type(cluster.commands, Evict)
    assert saves(cluster)


def test_the_same_error_in_other_layers_of_a_second_node_is_not_the_jobs() -> None:
    """The two may have nothing to do with each other."""
    cluster = trained()
    cluster.fail(0, UNREADABLE)
    for _ in range(3):
        cluster.fail(1, replace_layers(ELSEWHERE, 6, 10))

    assert of_type(cluster.commands, Evict) == [Evict((1,))]


def test_a_job_that_needs_the_node_ends_saved_instead_of_evicting_it() -> None:
    """Alone the others could not go on, and what only that node holds would be lost."""
    cluster = trained(SINGLE, small_rules(failures_tolerated=0))
    for _ in range(3):
        cluster.fail(1, ELSEWHERE)

    assert not of_type(cluster.commands, Evict)
    end = ending(cluster)
    assert end.ending is Ending.FAILED
    assert end.failure is not None
    assert "without that node 1 node is left, fewer than the n0 = 2" in end.failure.traceback
    assert [order.iteration for order in saves(cluster)] == [NEXT]


def granting(rules: Rules) -> Rules:
    """A machine is asked for in place of each that is lost."""
    cluster = replace(rules.job.cluster, grant_s=60.0)
    return replace(rules, job=replace(rules.job, cluster=cluster))


def test_a_node_is_evicted_for_which_another_machine_is_granted() -> None:
    """As if it had been killed: too few are left only until that comes."""
    cluster = trained(rules=granting(small_rules(n0=4, failures_tolerated=0)))
    for _ in range(3):
        cluster.fail(1, ELSEWHERE)

    assert of_type(cluster.commands, Evict) == [Evict((1,))]
    assert of_type(cluster.commands, AwaitingMachine)


def test_a_job_that_is_to_stop_keeps_a_node_that_it_needs() -> None:
    """It waits for no other machine."""
    cluster = trained(rules=granting(small_rules(n0=4, failures_tolerated=0)))
    assert not _why_needed(cluster.rules, cluster.state, 1)
    cluster.state, _ = step(cluster.rules, cluster.state, StopRequested(), NOW_S)

    assert "fewer than the n0 = 4" in _why_needed(cluster.rules, cluster.state, 1)


def test_a_node_is_needed_whose_layers_a_lost_one_held_too() -> None:
    """The plan still has that one until all have recovered from its loss."""
    cluster = trained(rules=replace(small_rules(failures_tolerated=0), source=""))
    assert not _why_needed(cluster.rules, cluster.state, 1)

    cluster.state, _ = step(cluster.rules, cluster.state, node_loss(3), NOW_S)

    assert _why_needed(cluster.rules, cluster.state, 1) == "no other node holds layer 5"


def test_what_a_node_says_that_is_no_member_any_more_changes_nothing() -> None:
    """It may have raised because it was shut out."""
    cluster = trained()
    cluster.hear(node_loss(1))
    state = cluster.state
    event = worker_failure(1, MISTAKE, epoch=0, blame="job")

    assert step(cluster.rules, state, event, NOW_S)[0] is state
