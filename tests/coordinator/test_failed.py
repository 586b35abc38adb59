"""A job that has failed: what is live is saved first, and what is said of its end."""

from dataclasses import replace

import msgspec
import pytest

from helpers.coordinated import (
    NOW_S,
    Survivors,
    of_type,
    save_failure,
    small_rules,
    worker_exit,
    worker_failure,
)
from helpers.fake_cluster import FakeCluster, FakeNode
from helpers.raising import MISTAKE, NEXT, PLAN, UNREADABLE, ending, saves, trained
from planaria.coordinator.commands import MembersRecorded, RecordMembers, Tell, Tick
from planaria.coordinator.crashes import CRASHES_MAX, FAILING_S_MAX
from planaria.coordinator.state import Phase
from planaria.coordinator.step import step
from planaria.core.kinds import Ending
from planaria.core.messages import Abort
from planaria.protocol.agent_state import AgentState


def test_a_mistake_that_is_told_again_does_not_end_the_last_save() -> None:
    cluster = trained()
    cluster.is_saving_slow = True
    event = worker_failure(1, MISTAKE, epoch=0, pid=cluster.nodes[1].pid, blame="job")
    cluster.hear(event)
    assert cluster.state.phase is Phase.SAVING
    cluster.hear(event)

    assert cluster.state.phase is Phase.SAVING


def test_a_failed_job_saves_also_if_nodes_are_lost_meanwhile() -> None:
    """As long as every layer has a live holder."""
    cluster = trained()
    event = worker_failure(1, MISTAKE, epoch=0, blame="job")
    cluster.state, _ = step(cluster.rules, cluster.state, event, NOW_S)
    cluster.lose(0)

    assert [order.iteration for order in saves(cluster)] == [NEXT]
    assert ending(cluster).ending is Ending.FAILED


def test_a_failed_job_ends_without_a_save_where_a_layer_is_lost() -> None:
    """With the traceback all the same."""
    cluster = trained(rules=replace(small_rules(), source=""))
    event = worker_failure(1, MISTAKE, epoch=0, blame="job")
    cluster.state, _ = step(cluster.rules, cluster.state, event, NOW_S)
    cluster.lose(0, 2)

    end = ending(cluster)
    assert (end.ending, end.reason[:30]) == (Ending.FAILED, "no live node holds layer 0, so")
    assert end.failure is not None
    told = end.failure.traceback.splitlines()  # All that a person sees of it.
    assert told[-2:] == ["ValueError: a mistake", end.reason]


def test_a_failed_job_ends_unsaved_where_a_rank_does_not_answer() -> None:
    """It may hang in the job's own code, in an iteration that is exempt from being stalled."""
    cluster = trained()
    cluster.nodes[2].is_alive = False
    event = worker_failure(1, MISTAKE, epoch=0, blame="job")
    cluster.state, _ = step(cluster.rules, cluster.state, event, NOW_S)
    cluster.restart_epoch()
    for after_s in (0.0, FAILING_S_MAX):
        cluster.hear(Tick(), now_s=NOW_S + after_s)
        assert cluster.state.phase is Phase.STOPPING
    cluster.hear(Tick(), now_s=NOW_S + FAILING_S_MAX + 1.0)

    end = ending(cluster)
    assert end.ending is Ending.FAILED
    assert end.failure is not None
    assert "were not saved: ranks [2] do not answer" in end.failure.traceback


def test_a_failed_job_waits_for_no_worker_that_is_still_being_loaded() -> None:
    """It holds nothing, and loads for longer than all others are waited for: what they held was
    thrown away."""
    cluster = trained(rules=replace(small_rules(), n0=4))
    for _ in range(CRASHES_MAX - 1):
        cluster.crash(1)
    pid = cluster.nodes[1].pid
    cluster.nodes[1] = FakeNode(cluster.nodes[1].agent, is_alive=False)  # It says nothing yet.
    cluster.hear(worker_exit(1, status=-9, pid=pid))
    assert cluster.state.stop.failure is not None
    assert cluster.state.phase is Phase.STOPPING
    cluster.hear(Tick(), now_s=NOW_S + FAILING_S_MAX)
    assert cluster.state.phase is Phase.STOPPING
    cluster.hear(Tick(), now_s=NOW_S + FAILING_S_MAX + 1.0)

    (order,) = saves(cluster)
    assert set(range(10)) == {layer for layers in order.layers.values() for layer in layers}
    assert 1 not in order.layers
    assert ending(cluster).ending is Ending.FAILED


def test_a_failed_job_saves_where_the_disk_of_records_was_slow() -> None:
    """Nobody was asked before the members were on record; ticks have queued up meanwhile."""
    cluster = trained()
    event = worker_failure(1, MISTAKE, epoch=0, blame="job")
    cluster.state, _ = step(cluster.rules, cluster.state, event, NOW_S)
    late_s = NOW_S + FAILING_S_MAX + 1.0
    cluster.hear(Tick(), now_s=late_s)
    assert cluster.state.phase is Phase.RECORDING
    cluster.state, _ = step(cluster.rules, cluster.state, MembersRecorded(1), late_s)
    cluster.state, _ = step(cluster.rules, cluster.state, Tick(), late_s + FAILING_S_MAX)
    assert cluster.state.phase is Phase.STOPPING
    cluster.hear(*(word for node in cluster.nodes.values() for word in node.take(asked(1))))

    assert [order.iteration for order in saves(cluster)] == [NEXT]
    assert ending(cluster).ending is Ending.FAILED


def test_workers_that_fail_again_and_again_hold_up_no_job_that_has_failed() -> None:
    """On a slow disk dozens come before the members are on record: each began an epoch, which had
    to be recorded, too. A worker that raised before its first epoch is replaced, and its successor
    is asked with all others."""
    cluster = trained()
    failures = [(1, 101), *((2, pid) for pid in range(201, 206))]
    for rank, pid in failures:
        failure = worker_failure(rank, UNREADABLE, epoch=-1, pid=pid)
        cluster.state, commands = step(cluster.rules, cluster.state, failure, NOW_S)
    assert cluster.state.stop.failure is not None
    assert (cluster.state.phase, cluster.state.epoch) == (Phase.RECORDING, 3)
    assert not of_type(commands, RecordMembers)
    _, (told,) = step(cluster.rules, cluster.state, MembersRecorded(3), NOW_S)

    assert isinstance(told, Tell)
    assert isinstance(told.message, Abort)
    assert told.message.replaced == {1: 101, 2: 205}


def test_a_failed_job_names_those_who_do_not_come_to_save() -> None:
    """To a new coordinator; who holds nothing is not waited for."""
    cluster = trained(rules=small_rules(policy=Survivors(num_idle=1)))
    cluster.lose(3)
    cluster.fail(1, MISTAKE, blame="job")
    (order,) = saves(cluster)
    assert order.layers.keys() == {0, 1}
    moment = next(m for m in reversed(cluster.moments) if m.state.phase is Phase.DECIDING)
    for node in (1, 2):
        moment.nodes[node].agent = AgentState(node=node)
    moment.restart()
    assert moment.state.phase is Phase.JOINING
    moment.hear(Tick(), now_s=NOW_S + FAILING_S_MAX + 1.0)

    end = ending(moment)
    assert end.failure is not None
    assert "were not saved: ranks [1] do not answer" in end.failure.traceback


def test_a_failed_job_that_raises_while_it_saves_ends_unsaved() -> None:
    """It would raise for ever."""
    cluster = trained()
    cluster.is_saving_slow = True
    cluster.fail(1, MISTAKE, blame="job")
    assert cluster.state.phase is Phase.SAVING
    cluster.fail(3, MISTAKE, blame="job")

    end = ending(cluster)
    assert end.failure is not None
    assert "the live layers were not saved" in end.failure.traceback


@pytest.mark.parametrize("has_diverged", [False, True])
def test_only_a_job_that_has_diverged_saves_nothing(has_diverged: bool) -> None:
    """A mistake that a person can mend is nothing against what was trained before it."""
    cluster = trained()
    event = msgspec.structs.replace(
        worker_failure(1, MISTAKE, epoch=0, blame="job"),
        mistake=("data.target", '"mine:data"', "mend it"),
        has_diverged=has_diverged,
    )
    cluster.hear(event)

    end = ending(cluster)
    assert end.ending is Ending.FAILED
    assert end.failure is not None
    assert end.failure.mistake == event.mistake
    assert bool(saves(cluster)) is not has_diverged


def test_a_mistake_that_a_person_can_mend_is_told_with_what_was_not_saved() -> None:
    """Its remedy is all that is shown of it."""
    cluster = trained(rules=replace(small_rules(), source=""))
    event = msgspec.structs.replace(
        worker_failure(1, MISTAKE, epoch=0, blame="job"),
        mistake=("data.target", '"mine:data"', "mend it"),
    )
    cluster.state, _ = step(cluster.rules, cluster.state, event, NOW_S)
    cluster.lose(0, 2)

    end = ending(cluster)
    assert end.failure is not None
    assert end.failure.mistake is not None
    assert end.failure.mistake[2] == f"mend it; {end.reason}"
    assert end.reason == "no live node holds layer 0, so nothing was saved"


KILLED = (
    "the worker of rank 0 on node 0 was killed by signal 11, the 3rd time in a row; the same "
    "happened on node 2, so it is not the fault of one node"
)


def killed(*, is_saving_slow: bool = False) -> FakeCluster:
    """Workers of two nodes are killed in turn, which ends the job."""
    cluster = trained(rules=replace(small_rules(), source=""))
    for rank in (0, 2, 2, 0):
        cluster.crash(rank, status=-11)
    cluster.is_saving_slow = is_saving_slow
    cluster.crash(0, status=-11)
    return cluster


def test_a_job_that_signals_end_does_not_say_that_its_code_raised() -> None:
    """Whoever looks for what raised would look in vain."""
    assert ending(killed()).reason == KILLED


def test_a_job_that_signals_end_says_so_if_it_is_not_saved() -> None:
    """What kept it from being saved is not what ended it."""
    cluster = killed(is_saving_slow=True)
    cluster.fail(3, MISTAKE, blame="job")

    assert ending(cluster).reason.startswith(f"{KILLED}; the live layers were not saved: ")


def test_a_new_coordinator_knows_from_the_records_why_the_job_has_failed() -> None:
    """It says so also where a further loss has another save made."""
    cluster = killed()
    moment = next(m for m in reversed(cluster.moments) if m.state.phase is Phase.DECIDING)
    moment.nodes[1].agent = AgentState(node=1)
    moment.restart()
    assert moment.state.phase is Phase.JOINING
    moment.lose(1)

    assert saves(moment)
    assert ending(moment).reason == KILLED


def test_a_failed_job_says_why_what_is_live_was_not_saved() -> None:
    """Below what raised, which is all that a person sees of it."""
    cluster = trained()
    cluster.is_saving_slow = True
    cluster.fail(1, MISTAKE, blame="job")
    cluster.hear(save_failure(0, NEXT, epoch=cluster.state.epoch))

    end = ending(cluster)
    assert end.ending is Ending.FAILED
    assert end.failure is not None
    mistake, why = end.failure.traceback.splitlines()[-2:]
    assert mistake == "ValueError: a mistake"
    assert why.startswith("the live layers were not saved: ")


def test_a_new_coordinator_ends_a_failed_job_like_the_one_before() -> None:
    """Wherever that one was killed; agents tell it again what raised."""
    cluster = trained()
    first = len(cluster.moments)
    cluster.fail(1, MISTAKE, blame="job")
    moments = [moment for moment in cluster.moments[first:] if moment.state.phase.value]

    assert len(moments) > 5
    for moment in moments:
        if moment.state.phase is not Phase.ENDED:
            moment.restart()
            end = ending(moment)
            assert end.ending is Ending.FAILED, moment.last_command
            assert end.failure is not None
            assert end.failure.traceback.endswith("ValueError: a mistake")


def test_a_new_coordinator_knows_from_the_records_that_the_job_has_failed() -> None:
    """What counted against nodes no agent tells again, and it does not train on after a loss."""
    cluster = trained(rules=replace(small_rules(), source=""))
    for rank in (0, 2, 2, 0):
        cluster.fail(rank, UNREADABLE)
    cluster.is_saving_slow = True
    cluster.fail(0, UNREADABLE)
    assert cluster.state.phase is Phase.SAVING
    cluster.restart()
    cluster.is_saving_slow = False
    cluster.lose(1)

    assert ending(cluster).ending is Ending.FAILED
    assert saves(cluster)


def asked(epoch: int) -> Abort:
    return Abort(epoch=epoch, nodes=PLAN.nodes)
