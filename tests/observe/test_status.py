"""What the status of a job says, after each message of its coordinator."""

from collections.abc import Collection

import msgspec

from helpers.jobs import shaped_plan
from helpers.recorder_messages import (
    change_message,
    commit_message,
    decision_message,
    loss_message,
    running,
)
from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.kinds import ChangeKind
from planaria.core.plan import NodeKind
from planaria.core.records import Leading, ToLauncher, Warned
from planaria.observe.metrics import EventRecord
from planaria.observe.status import Health, JobStatus, NodeState, Standing, job_status
from planaria.policies.unequal_nodes import with_kinds

JOB = JobConfig(name="mine", cluster=ClusterConfig(devices_per_node=2))
FIRST = shaped_plan((2, 1), 4)
ON = msgspec.structs.replace(running(1.0), plan=FIRST)


def status(
    *messages: ToLauncher,
    live: Collection[int] = (0, 1, 2),
    unreachable: Collection[int] = (),
    leaving: Collection[int] = (),
    last_event: EventRecord | None = None,
) -> JobStatus:
    """The record after these messages; node 3 lives at host h3."""
    standing = Standing(plan=FIRST)
    for message in messages:
        standing = standing.after(message)
    return job_status(
        JOB,
        standing,
        hosts={node: f"h{node}" for node in range(9)},
        live=live,
        unreachable=unreachable,
        leaving=leaving,
        last_event=last_event,
    )


def states(record: JobStatus) -> dict[int, str]:
    return {node.node: str(node.state) for node in record.nodes}


def health(record: JobStatus) -> dict[int, str]:
    return {node.node: str(node.health) for node in record.nodes}


def test_the_record_has_these_keys() -> None:
    """Scripts read them."""
    event = EventRecord(kind="lost", nodes=(2,), iteration=3)
    record = status(Leading(term=1, now_s=0.0), ON, commit_message(6, 2.0), last_event=event)

    told = msgspec.json.decode(msgspec.json.encode(record))
    assert told.pop("last_event")["kind"] == "lost"
    assert told.pop("nodes")[1] == {
        "node": 1,
        "host": "h1",
        "state": "training",
        "ranks": [2, 3],
        "health": "ok",
    }
    assert told == {
        "job": "mine",
        "iteration": 7,
        "epoch": 0,
        "term": 1,
        "policy": "adaptive",
        "degraded": "",
        "pipelines": [[0, 1], [2]],
        "standby": [],
        "links": {},
    }


def test_a_job_that_waits_for_machines_has_no_node_and_no_plan() -> None:
    record = job_status(JOB, Standing(), hosts={})

    assert (record.epoch, record.term, record.nodes, record.pipelines) == (-1, -1, (), ())


def test_nodes_start_train_and_recover() -> None:
    assert states(status(live=(0,))) == dict.fromkeys(range(3), "starting")
    assert states(status(ON)) == dict.fromkeys(range(3), "training")
    lost = status(ON, loss_message(2.0, 2))
    assert states(lost) == {0: "recovering", 1: "recovering", 2: "lost"}
    assert health(lost)[2] == "lost"


def test_after_a_loss_the_plan_is_the_new_one_and_the_iteration_may_go_back() -> None:
    """An agent of an evicted node may live on for a while, and is no standby."""
    decided = status(ON, commit_message(9, 2.0), loss_message(2.0, 2), decision_message(3.0))

    assert (decided.iteration, decided.pipelines) == (7, ((0, 1),))
    assert states(decided) == {0: "recovering", 1: "recovering", 2: "lost"}
    assert states(status(ON, live=(0, 1))) == {0: "training", 1: "training", 2: "lost"}


def test_nodes_outside_the_plan_stand_by_and_some_are_leaving() -> None:
    record = status(ON, live=(0, 1, 2, 3), leaving=(1,))

    assert states(record) == {0: "training", 1: "leaving", 2: "training", 3: "standby"}
    assert record.standby == (3,)


def test_a_node_that_is_lost_while_it_stands_by_does_not_stand_by_any_more() -> None:
    """A machine without power never says that its node has ended."""
    gone = Warned(text="node 3 cannot join: its connection closed", gone=(3,))
    record = status(ON, gone, live=(0, 1, 2, 3), unreachable=(3,))

    assert states(record)[3] == health(record)[3] == "lost"
    assert record.standby == ()


def test_a_crashed_worker_loses_no_node() -> None:
    crashed = status(ON, loss_message(2.0, 2, kind="crash"))

    assert states(crashed)[2] == "recovering"


def test_slow_and_unreachable_nodes_are_marked_until_they_are_not() -> None:
    slow = msgspec.structs.replace(
        change_message(), kinds={0: ChangeKind.SLOW, 1: ChangeKind.SLOW}, degraded="one short"
    )
    fast = msgspec.structs.replace(change_message(), kinds={0: ChangeKind.FAST})

    marked = status(ON, slow, live=(0, 1, 2), unreachable=(2,))
    assert health(marked) == {0: "slow", 1: "slow", 2: "unreachable"}
    assert marked.degraded == "one short"
    assert health(status(ON, slow, fast, live=(0, 1))) == {0: "ok", 1: "slow"}
    assert status(ON, slow, fast).degraded == ""


def test_a_node_that_joined_with_a_known_low_speed_is_slow() -> None:
    """Its speed is in the plan, and no change ever tells that it has become slow."""
    slow = msgspec.structs.replace(
        change_message(), plan=with_kinds(FIRST, {2: NodeKind(0.5), 1: NodeKind(1.0, 9)})
    )

    assert health(status(ON, slow)) == {0: "ok", 1: "ok", 2: "slow"}
    assert health(status(ON, slow, unreachable=(2,)))[2] == "unreachable"


def test_a_slow_node_is_slow_after_a_loss_only_if_the_new_plan_says_so() -> None:
    """No change tells that it is fast again, so it was slow for the rest of the job."""
    slow = msgspec.structs.replace(
        change_message(), kinds=dict.fromkeys((0, 1, 2), ChangeKind.SLOW), plan=FIRST
    )
    plan = with_kinds(shaped_plan((2,), 4), {1: NodeKind(0.5)})
    decided = msgspec.structs.replace(decision_message(3.0), plan=plan)

    assert health(status(ON, slow, decided)) == {0: "ok", 1: "slow", 2: "slow"}


def test_the_newest_commit_tells_the_speeds_of_links() -> None:
    first, second = commit_message(6, 2.0), commit_message(7, 3.0)
    first = msgspec.structs.replace(first, links={"inter_node": 1e9})
    second = msgspec.structs.replace(second, links={"inter_node": 2e9, "inter_domain": 1e8})

    assert status(ON, first).links == {"inter_node": 1e9}
    assert status(ON, first, second).links == {"inter_node": 2e9, "inter_domain": 1e8}


def test_states_and_health_are_words() -> None:
    """They are printed as they stand."""
    assert [str(state) for state in NodeState] == [state.value for state in NodeState]
    assert str(Health.OK) == "ok"
