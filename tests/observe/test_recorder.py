"""The recorder: one record per committed iteration, and the seconds where they belong."""

from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from msgspec import structs

from helpers.jobs import shaped_plan
from helpers.recorder_messages import (
    SPAN,
    commit_message,
    decision_message,
    loss_message,
    parts,
    recorder,
    recover,
    report,
    running,
)
from planaria.core.copies import CopiesDone
from planaria.core.inject import parse_injection
from planaria.core.messages import Evaluated
from planaria.core.records import Starting
from planaria.observe.ledger import Category
from planaria.observe.metrics import EvaluationRecord, EventRecord, IterationRecord
from planaria.observe.recorder import Recorder


def test_an_iteration_is_recorded_as_the_report_has_it() -> None:
    """The longest time, the largest memory, the prediction beside them."""
    record = recorder().on_committed(commit_message(6, 16.0))

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
        "at_s": 6.0,  # The run started at second 10.
        "clock_error_s": None,  # Rank 1 does not say when it began.
    }


def test_a_record_is_printed_in_one_short_line() -> None:
    """Who prints what a callback gets wants no prices of all answers, which take 3 KB."""
    event = EventRecord(
        kind="lost", nodes=(1,), iteration=0, downtime_s=0.5, candidates=({"answer": "redo"},) * 50
    )
    evaluation = EvaluationRecord(
        iteration=3, loss=0.5, samples=7, targets=7, metrics={"hits": 0.25}, seconds=0.5, at_s=9.0
    )

    assert str(event) == "EventRecord(kind='lost', nodes=(1,), iteration=0, downtime_s=0.5)"
    assert str(evaluation) == (
        "EvaluationRecord(iteration=3, loss=0.5, metrics={'hits': 0.25}, samples=7, seconds=0.5)"
    )
    assert str(recorder().on_committed(commit_message(6, 16.0))) == (
        "IterationRecord(iteration=6, loss=2.5, samples=3, seconds=2.0)"
    )


def test_an_iteration_that_nobody_is_left_to_report_has_the_coordinators_seconds() -> None:
    """Since training ran, or since the iteration before."""
    run = recorder()
    first = run.on_committed(commit_message(6, 16.5, ranks=()))
    second = run.on_committed(commit_message(7, 17.0, ranks=()))

    assert (first.seconds, second.seconds) == (2.5, 0.5)
    assert (first.epoch, first.peak_bytes) == (3, 0)


@pytest.mark.parametrize("shift_s", [0.0, 1e6])
def test_spans_of_all_ranks_count_from_when_the_first_one_began(shift_s: float) -> None:
    """On the clock of the head, whose value tells nothing. The two least certain ranks may both be
    off, in opposite directions."""
    begins_s = {0: (16.5, 0.125), 1: (16.0, 0.25), 2: (17.0, 0.0)}
    reports = tuple(
        structs.replace(report(1, 6), rank=rank, began_s=shift_s + began_s, clock_error_s=error_s)
        for rank, (began_s, error_s) in begins_s.items()
    )
    run = recorder()
    record = run.on_committed(structs.replace(commit_message(6, 18.0), reports=reports))

    by_rank, _ = run.traces[6]
    starts_s = {rank: spans[0].start_s for rank, spans in by_rank.items()}
    assert starts_s == {0: 0.5, 1: 0.0, 2: 1.0}
    assert {spans[0].end_s - spans[0].start_s for spans in by_rank.values()} == {0.5}
    assert record.clock_error_s == 0.375


def test_spans_count_from_each_rank_s_begin_if_one_cannot_be_placed() -> None:
    """Its node has not measured the offset of the head's clock yet."""
    known = structs.replace(report(1, 6), began_s=16.0)
    unknown = structs.replace(report(1, 6), rank=2)
    run = recorder()
    record = run.on_committed(structs.replace(commit_message(6, 18.0), reports=(known, unknown)))

    assert run.traces[6][0] == {1: (SPAN,), 2: (SPAN,)}
    assert record.clock_error_s is None


def test_spans_are_kept_of_the_ranks_that_sent_them() -> None:
    """Iterations that nobody has traced take no memory for that."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    run.on_committed(commit_message(7, 17.0, ranks=(0,)))

    assert [record.iteration for record in run.iterations] == [6, 7]
    assert {iteration: spans for iteration, (spans, _) in run.traces.items()} == {6: {1: (SPAN,)}}


def test_a_commit_looks_at_no_more_iterations_than_it_undoes() -> None:
    """A run of a month has millions, and each commit took longer than the one before."""

    class Unscanned(list[IterationRecord]):
        def __iter__(self) -> Iterator[IterationRecord]:
            raise AssertionError

    run = recorder()
    run.iterations = Unscanned()
    for iteration, now_s in ((6, 16.0), (7, 18.0), (8, 20.0), (7, 22.0)):
        run.on_committed(commit_message(iteration, now_s))

    assert [record.iteration for record in run.iterations[:]] == [6, 7]


def test_the_seconds_of_a_run_go_where_they_belong() -> None:
    """Startup, training less what saves held up, and the wait for the last save."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    run.on_committed(commit_message(7, 18.0, ends=True))

    expected = {"startup": 4.0, "useful": 3.5, "checkpoint_stall": 1.0, "wall": 8.5}
    assert parts(run, 18.5) == expected


def _evaluated(iteration: int, loss: float) -> Evaluated:
    return Evaluated(iteration=iteration, loss=loss, num_samples=3, num_targets=9, seconds=0.5)


def test_evaluations_are_recorded_once_and_their_time_is_no_training() -> None:
    """All ranks report the same result; what is undone goes with the iterations."""
    run = recorder()
    reports = tuple(
        structs.replace(report(rank, 6), evaluated=(_evaluated(6, 2.5),)) for rank in (0, 1)
    )
    message = structs.replace(commit_message(6, 16.0), reports=reports)
    run.on_committed(message)
    (record,) = run.on_evaluated(message)

    assert (record.iteration, record.loss, record.targets, record.at_s) == (6, 2.5, 9, 6.0)
    spent = parts(run, 16.0)
    assert spent["evaluation"] == 0.5

    later = structs.replace(report(0, 7), evaluated=(_evaluated(8, 2.0),))
    message = structs.replace(commit_message(7, 18.0), reports=(later,))
    run.on_committed(message)
    run.on_evaluated(message)
    assert list(run.evaluations) == [6, 8]
    assert parts(run, 18.0)["evaluation"] == 1.0
    run.on_committed(commit_message(6, 20.0))  # The job went back.
    assert list(run.evaluations) == [6]
    assert "evaluation" not in parts(run, 20.0)


def test_a_run_that_is_taken_up_has_the_prediction_of_its_plan_of_now() -> None:
    """Its next head is told of no decision before it, and had the first plan's until a loss."""
    taken_up = Recorder(start_s=10.0, predicted_s=0.5, predicted_peak_bytes=999)
    message = structs.replace(
        running(14.0, epoch=7), plan=shaped_plan((1,), 4), predicted_s=2.0, layer_factors=(3.0,)
    )
    taken_up.on_running(message, predicted_peak_bytes=777)
    record = taken_up.on_committed(commit_message(6, 16.0, epoch=7))

    assert (record.predicted_s, record.predicted_peak_bytes) == (2.0, 777)
    assert taken_up.measurements.epochs[7].layer_factors(6) == (3.0,)


def test_workers_are_listed_by_rank_each_with_its_epochs() -> None:
    """One that was replaced comes before the one in its place."""
    run = recorder()
    run.on_running(running(15.0, epoch=4))
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


def test_a_recovery_is_one_event_with_its_answer_and_its_phases() -> None:
    """The phases add up to the downtime: from the loss until every rank could go on."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    (event,) = recover(run)

    assert run.events() == (event,)
    assert (event.kind, event.nodes, event.iteration) == ("lost", (6,), 7)
    assert (event.policy, event.answer) == ("reinstantiate", "borrow")
    assert [candidate["score"] for candidate in event.candidates] == [4.0]
    assert (event.transfer_bytes, event.received_bytes, event.source_tier) == (50, 50, "live")
    assert (event.detect_s, event.decide_s) == (1.0, 2.0)
    assert (event.regroup_s, event.transfer_s) == (0.5, 2.5)
    assert (event.downtime_s, event.predicted_downtime_s) == (6.0, 1.0)


def test_a_recovery_and_what_was_expected_of_it_count_from_when_it_was_noticed() -> None:
    """A node that hangs is noticed when its lease runs out: nobody can foresee when it began to."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    run.on_fault(parse_injection("hang:6@7"), now_s=19.0)
    run.on_recovering(loss_message(20.0, 6))
    told = structs.replace(
        decision_message(21.0),
        noticed_s=20.0,
        predicted_recovery_s=5.0,
        predicted_recovery_s_min=2.0,
        predicted_recovery_s_max=8.0,
    )
    run.on_decided(told, predicted_peak_bytes=555)
    run.on_starting(Starting(epoch=4, num_nodes=2, now_s=23.0))
    (event,) = run.on_running(running(26.0, epoch=4, pid=80))

    assert (event.downtime_s, event.recovery_s) == (7.0, 6.0)
    assert event.predicted_recovery_s == 5.0
    assert event.is_foreseen
    assert not replace(event, predicted_recovery_s_max=5.5).is_foreseen
    assert not replace(event, predicted_recovery_s_min=6.5).is_foreseen


def test_the_ledger_has_the_phases_of_a_recovery() -> None:
    """The same seconds as the event, and all others as before."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    recover(run)

    expected = {"detect": 1.0, "decide": 2.0, "regroup": 0.5, "transfer": 2.5}
    others = {"startup": 4.0, "useful": 5.75, "checkpoint_stall": 0.25, "wall": 16.0}
    assert parts(run, 26.0) == pytest.approx(expected | others)
    assert run.ledger.category is Category.USEFUL


def test_iterations_that_all_went_back_before_were_not_useful() -> None:
    """They are committed once more; what counts of the first time is what they cost."""
    run = recorder()
    for iteration, now_s in ((6, 16.0), (7, 18.0), (8, 20.0)):
        run.on_committed(commit_message(iteration, now_s))
    run.on_recovering(loss_message(20.0, 6))
    back = structs.replace(decision_message(21.0, redone_samples=8), source="7-3")
    run.on_decided(back, predicted_peak_bytes=555)
    run.on_decided(back, predicted_peak_bytes=555)  # Told again by the next coordinator.
    (event,) = run.on_running(running(26.0, epoch=4, pid=80))
    spent = parts(run, 26.0)
    again = run.on_committed(commit_message(7, 28.0))

    assert event.source_tier == "disk"
    assert [record.iteration for record in run.iterations] == [6, 7]
    assert run.iterations[1] == again
    assert list(run.traces) == [6, 7]
    assert spent["redo"] == pytest.approx(3.5)  # Twice two seconds, less what saves took.
    assert sum(spent.values()) == pytest.approx(2 * spent["wall"])


def test_nothing_of_iterations_that_all_went_back_before_is_left_elsewhere() -> None:
    """Not as eager forwards, nor as a node's that had no layer."""
    run = recorder()
    run.on_running(running(14.0, members=(5, 6, 7)))
    for iteration, now_s in ((7, 16.0), (8, 18.0)):
        run.on_committed(commit_message(iteration, now_s, eager_s=0.5))
    trained = parts(run, 18.0)
    run.on_recovering(loss_message(18.0, 6))
    run.on_decided(decision_message(18.0), predicted_peak_bytes=555)
    spent = parts(run, 18.0)

    assert {"useful", "redundant", "idle"} <= trained.keys()
    assert spent.keys() == {"startup", "checkpoint_stall", "redo", "wall"}
    assert spent["redo"] == pytest.approx(3.5)  # Twice two seconds, less what saves took.


def test_what_is_done_again_was_not_useful() -> None:
    """From the last commit to the loss, if the outcome is to redo it."""
    run = recorder()
    run.on_committed(commit_message(6, 16.0))
    (event,) = recover(run, redone_samples=8)

    spent = parts(run, 26.0)
    assert event.redone_samples == 8
    assert spent["redo"] == 4.0
    assert spent["useful"] == pytest.approx(1.75)


def test_predictions_follow_the_plan() -> None:
    """Of the iterations that come after the decision; one of before may be told later."""
    run = recorder()
    before = run.on_committed(commit_message(5, 16.0))
    recover(run)
    late = run.on_committed(commit_message(6, 27.0))
    after = run.on_committed(commit_message(7, 28.0, epoch=4))

    for record in (before, late):
        assert (record.predicted_s, record.predicted_peak_bytes) == (0.5, 999)
    assert (after.predicted_s, after.predicted_peak_bytes) == (0.75, 555)


def test_an_iteration_that_is_settled_by_a_recovery_does_not_end_it() -> None:
    """It is told once its members have answered, before they go on."""
    run = recorder()
    run.on_recovering(loss_message(20.0, 6))
    run.on_decided(decision_message(21.0), predicted_peak_bytes=555)
    run.on_committed(commit_message(6, 22.0, ranks=()))

    assert run.ledger.category is Category.DECIDE


def test_what_copies_took_contains_no_downtime() -> None:
    """The version of iteration 8 was begun before the loss, and is told after the recovery."""
    run = recorder()
    run.on_committed(commit_message(7, 18.0))
    recover(run)
    for age, now_s in ((8, 28.0), (9, 30.0), (10, 32.0)):
        message = commit_message(age, now_s)
        copied = CopiesDone(age=age, idle_s=0.0, idle_used_s=0.0)
        reports = tuple(structs.replace(report, copied=copied) for report in message.reports)
        run.on_committed(structs.replace(message, reports=reports))

    assert run.copy_measurements.table(0.0)["checkpoint_s"] == pytest.approx(2.0)


def test_what_happens_before_the_first_commit_of_a_resumed_job_has_its_iteration() -> None:
    """It was said to have happened in iteration 0."""
    resumed = Recorder(start_s=0.0, predicted_s=0.5, predicted_peak_bytes=9, first_iteration=100)
    resumed.on_fault(parse_injection("leader:@~1"), now_s=1.0)

    assert [event.iteration for event in resumed.events()] == [100]
