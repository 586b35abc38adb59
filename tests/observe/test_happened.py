"""The recorder's events: what happened, in order, each of them once."""

from dataclasses import replace

import msgspec
import pytest

from helpers.recorder_messages import (
    PLAN,
    change_message,
    commit_message,
    decision_message,
    kill,
    loss_message,
    parts,
    recorder,
    recover,
    running,
    starting,
)
from planaria.core.cluster import ClusterState, Node
from planaria.core.findings import FailureHistory, Findings
from planaria.core.inject import Injection
from planaria.core.kinds import ChangeKind
from planaria.core.records import AwaitingMachine, DecisionInputs
from planaria.observe.ledger import Category
from planaria.observe.metrics import EventRecord


def test_other_events_say_what_happened_when_and_why() -> None:
    """A save that failed is one; a coordinator that was lost is one, and costs no training."""
    run = recorder()
    run.add_event("unsaved", iteration=4, reason="disk full")
    run.on_coordinator_restart(lost_s=15.0, now_s=15.5)

    assert run.events() == (
        EventRecord(kind="unsaved", nodes=(), iteration=4, reason="disk full"),
        EventRecord(kind="leader", nodes=(), iteration=0, detect_s=0.5, at_s=5.0, over_at_s=5.5),
    )
    assert run.ledger.category is Category.USEFUL


def test_a_fault_that_was_injected_is_one_event_with_the_loss_that_it_made() -> None:
    """Two nodes at once are noticed one after the other; the time of the fault is known."""
    run = recorder()
    run.on_fault(kill("kill:5,6@7.reduce"), now_s=19.0)
    run.on_recovering(loss_message(19.5, 5))
    events = recover(run)

    (event,) = events
    assert run.events() == events
    assert (event.kind, event.nodes, event.step, event.fired) == ("kill", (5, 6), "reduce", True)
    assert (event.detect_s, event.downtime_s) == (2.0, 7.0)
    assert (event.at_s, event.noticed_at_s) == (9.0, 10.0)


def test_what_is_no_moving_of_layers_is_regrouping() -> None:
    """Layers moved for 0.5 of the 3 s; groups of NCCL, say, were formed for 2 s. The ledger said
    so, and the event had 2.5 s of moving."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 6))
    run.on_decided(decision_message(21.0), predicted_peak_bytes=5)
    run.on_starting(starting(23.0))
    (event,) = run.on_running(running(26.0, epoch=4, regroup_s=0.5, transfer_s=0.5))

    assert (event.regroup_s, event.transfer_s) == (2.5, 0.5)
    spent = parts(run, 26.0)
    assert (spent["regroup"], spent["transfer"]) == (2.5, 0.5)


def test_a_loss_that_waits_for_a_machine_keeps_its_time() -> None:
    """The machine comes four seconds later, which is no other loss."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 6))
    run.on_awaiting_machine(AwaitingMachine(text="", now_s=20.5))
    run.on_recovering(loss_message(24.0, kind="granted"))
    run.on_decided(decision_message(24.25), predicted_peak_bytes=5)
    run.on_starting(starting(24.5))
    (event,) = run.on_running(running(25.0, epoch=4))

    assert (event.at_s, event.noticed_at_s, event.over_at_s) == (10.0, 10.0, 15.0)
    assert run.events() == (event,)


def test_a_new_coordinator_is_not_charged_to_a_short_stop_that_did_no_harm() -> None:
    """It has no node, so its nodes are among those of each fault."""
    run = recorder()
    run.on_fault(kill("hang=1:5@6"), now_s=15.0)
    run.on_committed(commit_message(6, 18.0))
    run.on_recovering(loss_message(20.0, kind="leader"))

    told = [(event.kind, event.at_s, event.noticed_at_s) for event in run.events()]
    assert told == [("hang", 5.0, -1.0), ("leader", 10.0, 10.0)]


def test_a_link_that_breaks_between_live_nodes_is_charged_to_the_cut() -> None:
    """The coordinator cannot tell which of the two nodes was cut off."""
    run = recorder()
    run.on_fault(kill("cut=0.5:5@6"), now_s=15.0)
    run.on_recovering(loss_message(16.0))

    told = [(event.kind, event.at_s, event.noticed_at_s) for event in run.events()]
    assert told == [("cut", 5.0, 6.0)]


def test_an_event_tells_when_it_happened_was_noticed_and_was_over() -> None:
    """On one clock that starts with the job, so that a replay can have it happen again."""
    run = recorder()
    run.on_fault(kill("kill:6@7.reduce"), now_s=19.0)
    (lost,) = recover(run)
    (joined,) = run.on_changed(change_message(7), predicted_peak_bytes=5)

    assert (lost.at_s, lost.noticed_at_s, lost.over_at_s, lost.epoch) == (9.0, 10.0, 16.0, 4)
    assert (joined.at_s, joined.noticed_at_s, joined.over_at_s) == (7.0, 7.0, 8.0)
    assert run.plans.json_by_epoch() == {PLAN.epoch: msgspec.json.encode(PLAN)}


def test_a_plan_that_a_decision_left_is_kept_though_it_never_ran() -> None:
    """Another loss may come before training by it; a decision is made again from it."""
    left = replace(PLAN, epoch=2)
    inputs = DecisionInputs(
        plan_epoch=2,
        members=(5,),
        cluster=ClusterState(4, ()),
        findings=Findings(),
        history=FailureHistory(),
        priced_s=20.0,
        next_iteration=7,
        saved_iteration=-1,
        version_iterations=1,
        processors=0,
        is_foreseen=False,
        plan=left,
    )
    run = recorder()
    run.on_recovering(loss_message(20.0, 6))
    message = msgspec.structs.replace(decision_message(21.0), inputs=inputs)
    run.on_decided(message, predicted_peak_bytes=5)

    (event,) = run.events()
    assert run.plans.json_by_epoch()[2] == msgspec.json.encode(left)
    assert event.inputs is not None
    assert event.inputs.plan is None  # The report has each plan once.


def test_decisions_share_what_is_as_at_an_earlier_one() -> None:
    """Each message is decoded anew: of 1,000 nodes each event kept 3.1 MB, not 1.3."""
    run = recorder()
    for epoch in (4, 5):
        inputs = DecisionInputs(
            plan_epoch=PLAN.epoch,
            members=(5,),
            cluster=ClusterState(epoch, (Node(5, (frozenset({0, 1}),)),)),
            findings=Findings(),
            history=FailureHistory(),
            priced_s=20.0,
            next_iteration=7,
            saved_iteration=-1,
            version_iterations=1,
            processors=0,
            is_foreseen=False,
            plan=replace(PLAN),
        )
        run.on_recovering(loss_message(20.0 + epoch, 6 + epoch))
        message = msgspec.structs.replace(decision_message(21.0 + epoch), inputs=inputs)
        run.on_decided(msgspec.structs.replace(message, plan=replace(PLAN)), predicted_peak_bytes=5)
        run.on_running(msgspec.structs.replace(running(22.0 + epoch), plan=replace(PLAN)))

    first, second = (event.inputs for event in run.events())
    assert first is not None
    assert second is not None
    assert first.cluster.nodes[0] is second.cluster.nodes[0]
    assert run.plans.share(PLAN) is run.measurements.epochs[3].plan


def test_the_ledger_counts_from_the_fault_where_its_time_is_known() -> None:
    """A node that hangs is noticed a lease later; nothing useful was done in between."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    run.on_fault(kill("hang:6@7"), now_s=17.0)
    (event,) = recover(run)

    assert event.detect_s == 4.0
    assert parts(run, 26.0)["detect"] == event.detect_s


def test_another_loss_beside_an_injected_one_is_an_event_of_its_own() -> None:
    """Both are answered by the same plan."""
    run = recorder()
    run.on_fault(kill(), now_s=19.0)
    run.on_recovering(loss_message(19.5, 5))
    events = recover(run)

    assert [(event.kind, event.nodes) for event in events] == [("kill", (6,)), ("lost", (5,))]
    assert [event.downtime_s for event in events] == [7.0, 6.5]


def test_a_slow_node_and_the_end_of_that_are_told_apart() -> None:
    """Nobody is lost by either, and nobody has to answer to the second."""
    run = recorder()
    run.on_fault(kill("slow=2:5@4"), now_s=15.0)
    run.on_fault(kill("slow=1:5@6"), now_s=17.0)
    run.on_recovering(loss_message(19.5, 5))
    recover(run)

    told = [(event.kind, event.iteration, event.downtime_s) for event in run.events()]
    assert told[:2] == [("slow", 4, 0.0), ("unslowed", 6, 0.0)]


def test_a_short_stop_is_not_charged_with_the_loss_of_another_node() -> None:
    """The node went on before its lease ran out, and training with it."""
    run = recorder()
    run.on_fault(kill("hang=1:5@6"), now_s=15.0)
    for iteration in range(6, 9):
        run.on_committed(commit_message(iteration, 10.0 + iteration))
    recover(run)

    told = {event.kind: (event.nodes, event.answer, event.downtime_s) for event in run.events()}
    assert told == {"hang": ((5,), "", 0.0), "lost": ((6,), "borrow", 6.0)}


def test_a_loss_is_charged_to_the_newest_fault_on_its_node() -> None:
    """A short stop that did no harm stays open; it took the loss that the kill made later."""
    run = recorder()
    run.on_fault(kill("hang=0.5:6@5"), now_s=15.0)
    run.on_committed(commit_message(6, 18.0))
    run.on_fault(kill("kill:6@7"), now_s=19.0)
    recover(run)

    told = {event.kind: (event.answer, event.downtime_s) for event in run.events()}
    assert told == {"hang": ("", 0.0), "kill": ("borrow", 7.0)}


def test_a_killed_coordinator_is_an_event_that_ends_with_the_next_one() -> None:
    """How long the job had none; training goes on meanwhile."""
    run = recorder()
    run.on_fault(kill("leader:@6.commit"), now_s=15.0)
    run.on_coordinator_restart(lost_s=15.0, now_s=15.25)

    (event,) = run.events()
    assert (event.kind, event.step, event.detect_s) == ("leader", "commit", 0.25)
    assert run.ledger.category is Category.USEFUL


@pytest.mark.parametrize("kills_s", [14.75, 15.1])
def test_a_recovery_waits_for_the_coordinator(kills_s: float) -> None:
    """One that was under way, and one of a node that was lost while there was none."""
    run = recorder()
    run.on_fault(kill(), now_s=kills_s)
    if kills_s < 15.0:
        run.on_recovering(loss_message(14.8, 6))
    run.on_fault(kill("leader:@7.decide"), now_s=15.0)
    run.on_coordinator_restart(lost_s=15.0, now_s=15.25)
    if kills_s > 15.0:
        run.on_recovering(loss_message(15.3, 6))

    (leader,) = [event for event in run.events() if event.kind == "leader"]
    assert (leader.detect_s, leader.reason) == (0.25, "all waited for it")


def test_a_later_loss_did_not_wait_for_the_coordinator() -> None:
    """It ran again by then."""
    run = recorder()
    run.on_coordinator_restart(lost_s=15.0, now_s=15.25)
    run.on_fault(kill(), now_s=16.0)
    run.on_recovering(loss_message(16.5, 6))

    (leader,) = [event for event in run.events() if event.kind == "leader"]
    assert leader.reason == ""


def came(*nodes: int, at: int = 6) -> Injection:
    """As the launcher tells it, with the numbers that the nodes will have."""
    return replace(kill(f"join:{len(nodes)}@{at}"), nodes=nodes)


def test_nodes_that_are_not_taken_are_told_by_their_numbers_and_stand_by() -> None:
    """One of two is taken. The other is no member, so a later loss is none of its own."""
    run = recorder()
    run.on_fault(came(7, 8), now_s=15.0)
    run.on_changed(change_message(7), predicted_peak_bytes=555)
    recover(run)
    before = run.events()
    run.on_end()

    told = [(event.kind, event.nodes, event.answer) for event in run.events()]
    assert told == [("join", (7,), "grow"), ("join", (8,), ""), ("lost", (6,), "borrow")]
    assert before[1].reason == "standing by, in no plan so far"
    assert run.events()[1].reason == "stood by, in no plan until the end"


def test_joins_that_are_answered_together_are_both_over() -> None:
    """Neither is left to stand by."""
    run = recorder()
    run.on_fault(came(7), now_s=15.0)
    run.on_fault(came(8, at=7), now_s=15.5)
    run.on_changed(change_message(7, 8), predicted_peak_bytes=555)

    assert [(event.kind, event.nodes) for event in run.events()] == [("join", (7, 8))]


def test_a_standby_node_is_not_taken_for_one_that_came_to_join() -> None:
    """Node 7 waited from the start."""
    run = recorder()
    run.on_fault(came(8), now_s=15.0)
    run.on_changed(change_message(7), predicted_peak_bytes=555)

    assert [(event.kind, event.nodes) for event in run.events()] == [
        ("join", (8,)),
        ("joined", (7,)),
    ]


def test_a_machine_that_makes_up_for_a_loss_has_the_time_of_that() -> None:
    """It came by itself; without a time a replay went on without it."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 6))
    message = msgspec.structs.replace(decision_message(21.0), joined=(7,), noticed_s=20.0)
    run.on_decided(message, predicted_peak_bytes=5)

    (joined,) = [event for event in run.events() if event.kind == "joined"]
    assert (joined.nodes, joined.at_s, joined.noticed_at_s) == ((7,), 10.0, 10.0)


@pytest.mark.parametrize(
    ("kind", "told"), [(ChangeKind.DRAIN, "drained"), (ChangeKind.PREEMPT, "preempted")]
)
def test_a_node_that_is_taken_away_is_told_from_one_that_a_user_drains(
    kind: ChangeKind, told: str
) -> None:
    """A notice of the cloud was said to be the user's wish."""
    run = recorder()
    message = msgspec.structs.replace(change_message(), kinds={6: kind})
    run.on_changed(message, predicted_peak_bytes=555)

    assert [(event.kind, event.nodes) for event in run.events()] == [(told, (6,))]


def test_faults_by_the_clock_and_faults_that_never_came_are_told_as_such() -> None:
    """A report must not look as if a place had been tested that was never reached."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    run.on_fault(kill("kill:6@~2.5"), now_s=16.5)
    run.add_missed_fault(kill("kill:5@99"))

    fired, unfired = run.events()
    assert (unfired.kind, unfired.iteration, unfired.fired) == ("kill", 99, False)
    assert (fired.iteration, fired.step, fired.fired) == (7, "~2.5", True)


def test_a_fault_of_a_recovery_is_told_at_the_iteration_where_it_struck() -> None:
    """It waits for the first recovery from there on, which may be much later."""
    run = recorder()
    run.on_committed(commit_message(39, 16.0))
    run.on_recovering(loss_message(17.0, 5))
    run.on_fault(kill("kill:6@5.transfer"), now_s=17.5)

    assert [event.iteration for event in run.events() if event.step == "transfer"] == [40]


def test_events_are_in_the_order_in_which_they_happened() -> None:
    """A loss is told of before what came of it, whether it is over or not."""
    run = recorder()
    run.on_fault(kill("preempt:5@6"), now_s=15.0)
    run.on_fault(kill("kill:6@7"), now_s=16.0)
    run.on_recovering(loss_message(16.5, 6))
    run.on_decided(decision_message(17.0), predicted_peak_bytes=555)
    assert run.on_degraded("one node is left", iteration=7)
    run.on_fault(kill("leader:@7.decide"), now_s=17.1)
    run.on_coordinator_restart(lost_s=17.1, now_s=17.4)
    run.on_decided(decision_message(17.5), predicted_peak_bytes=555)
    run.add_event("lost", iteration=7, reason="no node is left")

    kinds = [event.kind for event in run.events()]
    assert kinds == ["preempt", "kill", "degraded", "leader", "lost"]


def test_a_recovery_that_is_over_keeps_its_place() -> None:
    """It began before what happened meanwhile."""
    run = recorder()
    run.on_fault(kill(), now_s=19.0)
    run.add_event("save_failed", iteration=6, reason="disk full")
    recover(run)

    assert [event.kind for event in run.events()] == ["kill", "save_failed"]


def test_a_job_is_degraded_once() -> None:
    """The next coordinator decides again, and says the same; what is new is told."""
    run = recorder()
    told = [
        run.on_degraded(reason, iteration=7)
        for reason in ("two nodes are left", "two nodes are left", "one node is left")
    ]

    assert told == [True, False, True]
    assert run.events() == tuple(
        EventRecord(kind="degraded", nodes=(), iteration=7, reason=reason)
        for reason in ("two nodes are left", "one node is left")
    )


def test_a_loss_that_ended_the_job_has_no_downtime() -> None:
    """It is there all the same."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 5, 6))

    (event,) = run.events()
    assert (event.kind, event.nodes, event.downtime_s) == ("lost", (5, 6), 0.0)
    assert event.reason == "its connection closed"
