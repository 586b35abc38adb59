"""The recorder: one record per committed iteration, and the seconds where they belong."""

from dataclasses import asdict

import pytest
from msgspec import structs

from jobs import shaped_plan
from planaria.core.inject import Injection, parse_injection
from planaria.core.messages import IterationDone, MeasuredSpan, WorkerReady
from planaria.core.records import Candidate, Committed, Decided, Recovering, Running, Starting
from planaria.observe.ledger import Category
from planaria.observe.metrics import EventRecord
from planaria.observe.recorder import Recorder

SPAN = MeasuredSpan("compute", "0.0F0", 0.0, 0.5)
PLAN = shaped_plan((2,), 4)


def report(rank: int, iteration: int, *, epoch: int = 3) -> IterationDone:
    """What a rank says; rank 1 is the slow one, and the one that needs most memory."""
    return IterationDone(
        rank=rank,
        epoch=epoch,
        iteration=iteration,
        loss=2.5,
        num_samples=3,
        sample_digest="digest",
        seconds=1.0 + rank,
        stall_s=0.25 * rank,
        peak_bytes=100 * (rank + 1),
        ends=False,
        spans=(SPAN,) if rank == 1 else (),
    )


def committed(
    iteration: int,
    now_s: float,
    *,
    epoch: int = 3,
    ranks: tuple[int, ...] = (0, 1),
    ends: bool = False,
) -> Committed:
    return Committed(
        iteration=iteration,
        epoch=epoch,
        loss=2.5,
        num_samples=3,
        sample_digest="digest",
        ends=ends,
        reports=tuple(report(rank, iteration, epoch=epoch) for rank in ranks),
        now_s=now_s,
    )


def running(
    now_s: float, *, epoch: int = 3, pid: int = 70, regroup_s: float = 0.0, transfer_s: float = 0.0
) -> Running:
    """Every rank is ready; ranks 1 and 0 are on nodes 6 and 5."""
    workers = {
        rank: WorkerReady(node=rank + 5, rank=rank, pid=pid + rank, pid_start=8.0, host="h", port=1)
        for rank in (1, 0)
    }
    return Running(
        epoch=epoch,
        plan=PLAN,
        workers=workers,
        materialised={0: 3, 1: 4},
        received_bytes=50 if transfer_s else 0,
        regroup_s=regroup_s,
        transfer_s=transfer_s,
        now_s=now_s,
    )


def recorder() -> Recorder:
    """A run that started at second 10 and began to train at second 14."""
    started = Recorder(start_s=10.0, predicted_s=0.5, predicted_peak_bytes=999)
    assert started.running(running(14.0)) == ()
    return started


def lost(now_s: float, *nodes: int, kind: str = "lost") -> Recovering:
    return Recovering(
        epoch=4, kind=kind, nodes=nodes, iteration=7, reason="its connection closed", lost_s=now_s
    )


def decided(now_s: float, *, redone_samples: int = 0, degraded: str = "") -> Decided:
    candidate = Candidate(
        policy="reinstantiate",
        answer="borrow",
        iteration_s=0.75,
        downtime_s=1.0,
        moving_s=0.0,
        pause_s=0.0,
        then_s=0.0,
        samples_at_risk=0.5,
        then_at_risk=0.0,
        score=4.0,
    )
    return Decided(
        epoch=4,
        iteration=7,
        policy="reinstantiate",
        answer="borrow",
        candidates=(candidate,),
        plan=PLAN,
        predicted_s=0.75,
        predicted_downtime_s=1.0,
        predicted_transfer_s=0.75,
        transfer_bytes=50,
        redone_samples=redone_samples,
        detected_s=now_s,
        degraded=degraded,
    )


def starting(now_s: float) -> Starting:
    return Starting(epoch=4, num_nodes=2, now_s=now_s)


def recover(run: Recorder, *, redone_samples: int = 0) -> tuple[EventRecord, ...]:
    """A loss noticed at 20: answered at 21, told at 23, linked at 23.5, ready at 26."""
    run.recovering(lost(20.0, 6))
    run.decided(decided(21.0, redone_samples=redone_samples), predicted_peak_bytes=555)
    run.starting(starting(23.0))
    return run.running(running(26.0, epoch=4, pid=80, regroup_s=0.5, transfer_s=2.5))


def parts(run: Recorder, now_s: float) -> dict[str, float]:
    ledger = run.ledger.enter(run.ledger.category, now_s)
    return {name: seconds for name, seconds in ledger.parts().items() if seconds}


def test_an_iteration_is_recorded_as_the_report_has_it() -> None:
    """The longest time, the largest memory, the prediction beside them."""
    record = recorder().committed(committed(6, 16.0))

    assert asdict(record) == {
        "iteration": 6,
        "loss": 2.5,
        "samples": 3,
        "sample_digest": "digest",
        "seconds": 2.0,
        "epoch": 3,
        "predicted_s": 0.5,
        "peak_bytes": 200,
        "predicted_peak_bytes": 999,
    }


def test_an_iteration_that_nobody_is_left_to_report_has_the_coordinators_seconds() -> None:
    """Since training ran, or since the iteration before."""
    run = recorder()
    first = run.committed(committed(6, 16.5, ranks=()))
    second = run.committed(committed(7, 17.0, ranks=()))

    assert (first.seconds, second.seconds) == (2.5, 0.5)
    assert (first.epoch, first.peak_bytes) == (3, 0)


def test_spans_are_kept_of_the_ranks_that_sent_them() -> None:
    """One entry per iteration, also without tracing, so that they keep in step."""
    run = recorder()
    run.committed(committed(6, 16.0))
    run.committed(committed(7, 17.0, ranks=(0,)))

    assert [record.iteration for record in run.iterations] == [6, 7]
    assert run.spans == [{1: (SPAN,)}, {}]


def test_the_seconds_of_a_run_go_where_they_belong() -> None:
    """Startup, training less what saves held up, and the wait for the last save."""
    run = recorder()
    run.committed(committed(6, 16.0))
    run.committed(committed(7, 18.0, ends=True))

    expected = {"startup": 4.0, "useful": 3.5, "checkpoint_stall": 1.0, "wall": 8.5}
    assert parts(run, 18.5) == expected


def test_workers_are_listed_by_rank_each_with_its_epochs() -> None:
    """One that was replaced comes before the one in its place."""
    run = recorder()
    run.running(running(15.0, epoch=4))
    recover(run)
    workers = run.workers()

    assert [(w.rank, w.pid, w.first_epoch, w.last_epoch) for w in workers] == [
        (0, 70, 3, 4),
        (0, 80, 4, 4),
        (1, 71, 3, 4),
        (1, 81, 4, 4),
    ]
    assert [(w.node, w.pid_start, w.layers_materialised) for w in workers[::2]] == [
        (5, 8.0, 3),
        (6, 8.0, 4),
    ]


def test_other_events_say_what_happened_when_and_why() -> None:
    """A save that failed is one; a coordinator that was lost is one, and costs no training."""
    run = recorder()
    run.noted("unsaved", iteration=4, reason="disk full")
    run.restarted(lost_s=15.0, now_s=15.5)

    assert run.events() == (
        EventRecord(kind="unsaved", nodes=(), iteration=4, reason="disk full"),
        EventRecord(kind="leader", nodes=(), iteration=0, detect_s=0.5),
    )
    assert run.ledger.category is Category.USEFUL


def test_a_recovery_is_one_event_with_its_answer_and_its_phases() -> None:
    """The phases add up to the downtime: from the loss until every rank could go on."""
    run = recorder()
    run.committed(committed(6, 16.0))
    (event,) = recover(run)

    assert run.events() == (event,)
    assert (event.kind, event.nodes, event.iteration) == ("lost", (6,), 7)
    assert (event.policy, event.answer) == ("reinstantiate", "borrow")
    assert [candidate["score"] for candidate in event.candidates] == [4.0]
    assert (event.transfer_bytes, event.received_bytes, event.source_tier) == (50, 50, "live")
    assert (event.detect_s, event.decide_s) == (1.0, 2.0)
    assert (event.regroup_s, event.transfer_s) == (0.5, 2.5)
    assert (event.downtime_s, event.predicted_downtime_s) == (6.0, 1.0)


def test_the_ledger_has_the_phases_of_a_recovery() -> None:
    """The same seconds as the event, and all others as before."""
    run = recorder()
    run.committed(committed(6, 16.0))
    recover(run)

    expected = {"detect": 1.0, "decide": 2.0, "regroup": 0.5, "transfer": 2.5}
    others = {"startup": 4.0, "useful": 5.75, "checkpoint_stall": 0.25, "wall": 16.0}
    assert parts(run, 26.0) == pytest.approx(expected | others)
    assert run.ledger.category is Category.USEFUL


def test_iterations_that_all_went_back_before_were_not_useful() -> None:
    """They are committed once more; what counts of the first time is what they cost."""
    run = recorder()
    for iteration, now_s in ((6, 16.0), (7, 18.0), (8, 20.0)):
        run.committed(committed(iteration, now_s))
    run.recovering(lost(20.0, 6))
    back = structs.replace(decided(21.0, redone_samples=8), source="7-3")
    run.decided(back, predicted_peak_bytes=555)
    run.decided(back, predicted_peak_bytes=555)  # Told again by the next coordinator.
    (event,) = run.running(running(26.0, epoch=4, pid=80))
    spent = parts(run, 26.0)
    again = run.committed(committed(7, 28.0))

    assert event.source_tier == "disk"
    assert [record.iteration for record in run.iterations] == [6, 7]
    assert run.iterations[1] == again
    assert len(run.spans) == 2
    assert spent["redo"] == pytest.approx(3.5)  # Twice two seconds, less what saves took.
    assert sum(spent.values()) == pytest.approx(2 * spent["wall"])


def test_what_is_done_again_was_not_useful() -> None:
    """From the last commit to the loss, if the outcome is to redo it."""
    run = recorder()
    run.committed(committed(6, 16.0))
    (event,) = recover(run, redone_samples=8)

    spent = parts(run, 26.0)
    assert event.redone_samples == 8
    assert spent["redo"] == 4.0
    assert spent["useful"] == pytest.approx(1.75)


def test_predictions_follow_the_plan() -> None:
    """Of the iterations that come after the decision; one of before may be told later."""
    run = recorder()
    before = run.committed(committed(5, 16.0))
    recover(run)
    late = run.committed(committed(6, 27.0))
    after = run.committed(committed(7, 28.0, epoch=4))

    for record in (before, late):
        assert (record.predicted_s, record.predicted_peak_bytes) == (0.5, 999)
    assert (after.predicted_s, after.predicted_peak_bytes) == (0.75, 555)


def test_an_iteration_that_is_settled_by_a_recovery_does_not_end_it() -> None:
    """It is told once its members have answered, before they go on."""
    run = recorder()
    run.recovering(lost(20.0, 6))
    run.decided(decided(21.0), predicted_peak_bytes=555)
    run.committed(committed(6, 22.0, ranks=()))

    assert run.ledger.category is Category.DECIDE


def kill(text: str = "kill:6@7.reduce") -> Injection:
    return parse_injection(text)


def test_a_fault_that_was_injected_is_one_event_with_the_loss_that_it_made() -> None:
    """Two nodes at once are noticed one after the other; the time of the fault is known."""
    run = recorder()
    run.fired(kill("kill:5,6@7.reduce"), now_s=19.0)
    run.recovering(lost(19.5, 5))
    events = recover(run)

    (event,) = events
    assert run.events() == events
    assert (event.kind, event.nodes, event.step, event.fired) == ("kill", (5, 6), "reduce", True)
    assert (event.detect_s, event.downtime_s) == (2.0, 7.0)


def test_the_ledger_counts_from_the_fault_where_its_time_is_known() -> None:
    """A node that hangs is noticed a lease later; nothing useful was done in between."""
    run = recorder()
    run.committed(committed(6, 16.0))
    run.fired(kill("hang:6@7"), now_s=17.0)
    (event,) = recover(run)

    assert event.detect_s == 4.0
    assert parts(run, 26.0)["detect"] == event.detect_s


def test_another_loss_beside_an_injected_one_is_an_event_of_its_own() -> None:
    """Both are answered by the same plan."""
    run = recorder()
    run.fired(kill(), now_s=19.0)
    run.recovering(lost(19.5, 5))
    events = recover(run)

    assert [(event.kind, event.nodes) for event in events] == [("kill", (6,)), ("lost", (5,))]
    assert [event.downtime_s for event in events] == [7.0, 6.5]


def test_a_short_stop_is_not_charged_with_the_loss_of_another_node() -> None:
    """The node went on before its lease ran out, and training with it."""
    run = recorder()
    run.fired(kill("hang=1:5@6"), now_s=15.0)
    for iteration in range(6, 9):
        run.committed(committed(iteration, 10.0 + iteration))
    recover(run)

    told = {event.kind: (event.nodes, event.answer, event.downtime_s) for event in run.events()}
    assert told == {"hang": ((5,), "", 0.0), "lost": ((6,), "borrow", 6.0)}


def test_a_killed_coordinator_is_an_event_that_ends_with_the_next_one() -> None:
    """How long the job had none; training goes on meanwhile."""
    run = recorder()
    run.fired(kill("leader:@6.commit"), now_s=15.0)
    run.restarted(lost_s=15.0, now_s=15.25)

    (event,) = run.events()
    assert (event.kind, event.step, event.detect_s) == ("leader", "commit", 0.25)
    assert run.ledger.category is Category.USEFUL


def test_faults_by_the_clock_and_faults_that_never_came_are_told_as_such() -> None:
    """A report must not look as if a place had been tested that was never reached."""
    run = recorder()
    run.fired(kill("kill:6@~2.5"), now_s=16.5)
    run.unfired(kill("kill:5@99"))

    unfired, fired = run.events()
    assert (unfired.kind, unfired.iteration, unfired.fired) == ("kill", 99, False)
    assert (fired.step, fired.fired) == ("~2.5", True)


def test_a_job_that_is_degraded_is_an_event() -> None:
    """With the words that a person was warned with."""
    run = recorder()
    run.recovering(lost(20.0, 6))
    run.decided(decided(21.0, degraded="one node is left"), predicted_peak_bytes=555)

    degraded = EventRecord(kind="degraded", nodes=(), iteration=7, reason="one node is left")
    assert run.events()[0] == degraded


def test_a_loss_that_ended_the_job_has_no_downtime() -> None:
    """It is there all the same."""
    run = recorder()
    run.recovering(lost(20.0, 5, 6))

    (event,) = run.events()
    assert (event.kind, event.nodes, event.downtime_s) == ("lost", (5, 6), 0.0)
    assert event.reason == "its connection closed"
