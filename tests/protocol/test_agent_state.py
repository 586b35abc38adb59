"""What an agent remembers and obeys: enough for the next coordinator, and no more."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.coordinated import (
    NOW_S,
    iteration_report,
    ready,
    save_failure,
    save_report,
    stop_report,
    worker,
    worker_exit,
)
from helpers.jobs import shaped_plan
from planaria.core.messages import (
    Abort,
    Acknowledged,
    Fact,
    HeartbeatRequested,
    HeartbeatTaken,
    NoticeTaken,
    PeerUnreachable,
    SaveLayers,
    Shutdown,
    StartEpoch,
    StopRequested,
    ToNode,
    Welcome,
    WorkerFailed,
)
from planaria.protocol.agent_state import (
    AgentState,
    on_coordinator_message,
    on_report,
    repeated_reports,
)

NODE = 1
RAISED = WorkerFailed(node=NODE, rank=1, traceback="of the user's code")


def after(*messages: Fact | ToNode, state: AgentState | None = None) -> AgentState:
    """The agent once it has said and heard these, in order."""
    state = state or AgentState(node=NODE)
    for message in messages:
        if isinstance(message, Fact):
            state = on_report(state, message, NOW_S)
        else:
            result = on_coordinator_message(state, message)
            assert not result.ends
            state = result.state
    return state


def facts(*messages: Fact | ToNode) -> list[Fact]:
    """What such an agent tells a new coordinator, in order."""
    return list(repeated_reports(after(*messages), NOW_S))


def abort(epoch: int) -> Abort:
    return Abort(epoch=epoch, nodes=(0, NODE))


def test_facts_are_said_again_in_order_the_newest_of_each_kind_only() -> None:
    """A coordinator has no use for what has been overtaken; each rank is a kind of its own."""
    told = facts(
        worker(1),
        worker(2),
        abort(1),
        stop_report(1, 1),
        ready(1, 1),
        abort(2),
        stop_report(1, 2),
        worker(1, pid=99),
        stop_report(2, 2),
        stop_report(1, 2, last=3),
    )

    assert told == [worker(2), worker(1, pid=99), stop_report(2, 2), stop_report(1, 2, last=3)]


def test_a_worker_that_has_ended_is_told_of_no_more() -> None:
    """Its successor may end before it is ready, and that must not look like the same end."""
    told = facts(worker(1), worker(2), worker_exit(1), abort(1))

    assert told == [worker(2)]


def test_an_iteration_that_is_done_again_replaces_its_report() -> None:
    """The other iterations stay, until they are acknowledged."""
    told = facts(
        iteration_report(1, 5, epoch=0),
        iteration_report(1, 6, epoch=0),
        abort(1),
        iteration_report(1, 6, epoch=1),
    )

    assert told == [iteration_report(1, 5, epoch=0), iteration_report(1, 6, epoch=1)]


@given(st.lists(st.integers(0, 20)), st.integers(0, 25))
def test_acknowledged_iterations_are_forgotten(iterations: list[int], number: int) -> None:
    """Whatever their order; nothing else is."""
    reports = [iteration_report(rank, i, epoch=0) for rank in (1, 2) for i in iterations]
    told = facts(worker(1), *reports, RAISED, Acknowledged(num_committed=number))

    left = {
        report.iteration
        for report in told
        if isinstance(report, type(iteration_report(1, 0, epoch=0)))
    }
    assert left == {i for i in iterations if i >= number}
    assert worker(1) in told
    assert RAISED in told


@given(st.integers(1, 300))
def test_memory_has_a_bound(num_iterations: int) -> None:
    """However long a job runs, with a save after every iteration."""
    state = AgentState(node=NODE)
    for number in range(num_iterations):
        parts = save_report(1, number + 1, epoch=0, layers=[0])
        state = after(iteration_report(1, number, epoch=0), parts, state=state)
        state = after(Acknowledged(num_committed=number), state=state)

    assert len(state.facts) <= 4


def test_of_saves_the_newest_two_are_kept() -> None:
    """Whether they were written or not: a save takes about as long as an iteration."""
    saves: list[Fact] = [
        save_report(1, 2, epoch=0, layers=[0]),
        save_failure(1, 4, epoch=0),
        save_failure(2, 4, epoch=0),
    ]
    newest = save_report(2, 6, epoch=0, layers=[1])
    told = facts(*saves, newest, Acknowledged(num_committed=0))

    assert told == [*saves[1:], newest]


def test_a_link_that_broke_is_told_until_its_epoch_is_over() -> None:
    """Who lost it has left the epoch and waits, so nobody else would ever tell a new coordinator.

    Found by the simulation.
    """
    unreachable = PeerUnreachable(rank=1, epoch=0, peer=0, reason="closed")

    assert facts(unreachable) == [unreachable]
    assert facts(unreachable, abort(1)) == []


def test_of_a_notice_is_told_what_is_left() -> None:
    """A new coordinator counts from when it hears of it. Another process of the node, or the same
    one, may say it again: the node is gone no later for that."""
    state = AgentState(node=NODE)
    for rank, now_s in ((2, 100.0), (3, 110.0), (2, 112.0)):
        state = on_report(state, NoticeTaken(node=NODE, rank=rank, after_s=30.0), now_s)

    for now_s, left_s in ((112.0, 18.0), (125.0, 5.0), (140.0, 0.0)):
        again = [fact for fact in repeated_reports(state, now_s) if isinstance(fact, NoticeTaken)]
        assert [fact.after_s for fact in again] == [left_s, left_s]


def test_a_notice_with_more_time_than_the_one_before_changes_nothing() -> None:
    """The cloud gives 10 s; then a SIGTERM each second says the seconds that the job assumes."""
    state = AgentState(node=NODE)
    for after_s, now_s in ((10.0, 100.0), (30.0, 101.0), (30.0, 102.0)):
        state = on_report(state, NoticeTaken(node=NODE, rank=2, after_s=after_s), now_s)
    (again,) = repeated_reports(state, 103.0)

    assert isinstance(again, NoticeTaken)
    assert again.after_s == 7.0


def test_a_later_notice_with_less_time_counts() -> None:
    state = AgentState(node=NODE)
    for after_s, now_s in ((120.0, 100.0), (10.0, 101.0)):
        state = on_report(state, NoticeTaken(node=NODE, rank=2, after_s=after_s), now_s)
    (again,) = repeated_reports(state, 103.0)

    assert isinstance(again, NoticeTaken)
    assert again.after_s == 8.0


def test_an_epoch_makes_what_was_said_of_older_ones_worthless() -> None:
    """Answers and readiness; the end of a worker, to which this epoch is the answer. Reports
    may still tell of iterations that are settled."""
    kept: list[Fact] = [
        worker(1),
        iteration_report(1, 5, epoch=0),
        save_report(1, 6, epoch=0, layers=[0]),
    ]
    told = facts(worker_exit(1), *kept, stop_report(1, 0), ready(1, 0), abort(1))

    assert told == kept


def test_an_epoch_that_is_told_again_changes_nothing() -> None:
    """A coordinator that was restarted asks again; the answer was given."""
    told = facts(abort(1), stop_report(1, 1), ready(1, 1), abort(1))

    assert told == [stop_report(1, 1), ready(1, 1)]


def test_a_worker_that_ends_in_an_epoch_is_told_of_whoever_asks_again() -> None:
    """It had answered, and a coordinator that was killed before it heard the end has decided by
    that answer."""
    told = facts(abort(1), stop_report(1, 1), worker_exit(1), abort(1))

    assert told == [stop_report(1, 1), worker_exit(1)]


def test_an_order_to_begin_ends_what_is_told_of_workers_whose_successors_it_names() -> None:
    """Whoever ordered it knows the successor, so that the end of the one before was answered."""
    old, new = worker(1), msgspec.structs.replace(worker(1, pid=99), port=7)
    order = StartEpoch(epoch=1, plan=shaped_plan((2,), 2), addresses={1: ("h", 7)}, iteration=0)
    before = msgspec.structs.replace(order, addresses={1: (old.host, old.port)})
    told: list[Fact | ToNode] = [abort(1), old, worker_exit(1), worker_exit(2)]

    assert facts(*told, new, order) == [worker_exit(2), new]
    assert facts(*told, new, before) == [worker_exit(1), worker_exit(2), new]
    assert facts(*told, order) == [worker_exit(1), worker_exit(2)]


def test_an_order_of_an_older_epoch_is_not_passed_on() -> None:
    """The coordinator that sent it did not know the newest members."""
    state = after(abort(2))
    result = on_coordinator_message(state, Abort(epoch=1, nodes=(0,)))

    assert (result.state, result.forwards, result.ends) == (state, False, "")


def test_a_node_that_is_evicted_ends_itself() -> None:
    """Others have taken its place; it says of which epoch."""
    result = on_coordinator_message(after(worker(1)), Abort(epoch=3, nodes=(0, 2)))

    assert result.ends == "it is no member of epoch 3"
    assert not result.forwards


def test_a_coordinator_of_an_older_term_is_not_obeyed() -> None:
    """Two may live for a moment; the store lets only the newest write."""
    state = after(Welcome(term=2), Welcome(term=2), Welcome(term=4))

    assert state.term == 4
    assert "term 3 is out of date" in on_coordinator_message(state, Welcome(term=3)).ends
    elsewhere = on_coordinator_message(replace(state, is_elsewhere=True), Welcome(term=3))
    assert ("term 3" in elsewhere.leaves, elsewhere.ends) == (True, "")


ORDERS: dict[str, tuple[ToNode, bool]] = {
    "abort": (abort(0), True),
    "start": (StartEpoch(epoch=0, plan=shaped_plan((2,), 2), addresses={}, iteration=0), True),
    "save": (SaveLayers(epoch=0, iteration=1, layers={}), True),
    "stop": (StopRequested(), True),
    "shutdown": (Shutdown(), True),
    "welcome": (Welcome(term=0), False),
    "acknowledged": (Acknowledged(num_committed=1), False),
    "heartbeat taken": (HeartbeatTaken(sent_s=1.0), False),
    "heartbeat requested": (HeartbeatRequested(number=1), False),
}


@pytest.mark.parametrize("order", ORDERS)
def test_workers_get_what_is_for_them(order: str) -> None:
    """And only that: their decoder knows no other words."""
    message, forwards = ORDERS[order]
    result = on_coordinator_message(AgentState(node=NODE), message)

    assert (result.forwards, result.ends) == (forwards, "")
