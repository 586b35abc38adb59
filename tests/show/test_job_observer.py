"""What the observer shows of what the launcher tells."""

import threading
import time

import pytest
from msgspec import structs

from helpers.jobs import shaped_plan
from helpers.recorder_messages import (
    PLAN,
    commit_message,
    decision_message,
    loss_message,
    report,
    running,
    starting,
)
from planaria.core.copies import CopiesDone
from planaria.core.inject import parse_injection
from planaria.core.messages import Evaluated
from planaria.core.plan import Plan
from planaria.core.records import Saved, ToLauncher, Warned
from planaria.observe.metrics import IterationRecord
from planaria.observe.recorder import Recorder
from planaria.show.callbacks import Callbacks, CallbackThread
from planaria.show.job_observer import JobObserver


class Notes:
    """A display that keeps what it is given to note."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.plans: list[Plan] = []

    def show_training(self) -> None: ...

    def show_iteration(self, record: IterationRecord) -> None: ...

    def show_next_plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def note(self, text: str) -> None:
        self.texts.append(text)


def watched(callbacks: CallbackThread | None = None) -> tuple[JobObserver, Recorder, Notes]:
    recorder = Recorder(start_s=10.0, predicted_s=0.5, predicted_peak_bytes=999)
    notes = Notes()
    observer = JobObserver(
        recorder,
        notes,
        plan=PLAN,
        predicted_peak_bytes=lambda _: 555,
        evaluates=True,
        callbacks=callbacks or CallbackThread(()),
    )
    return observer, recorder, notes


def test_a_missing_last_evaluation_is_told() -> None:
    """If training has ended as it should, and not if it goes on or is stopped."""
    observer, _, notes = watched()
    for iteration, is_trained, ends in ((4, False, False), (5, False, True), (5, True, True)):
        message = structs.replace(
            commit_message(iteration, 12.0 + iteration, ends=ends), is_trained=is_trained
        )
        observer.on_message(message)

    (text,) = notes.texts
    assert text.startswith("held-out data were not evaluated after 6 iterations: a node was lost")


def test_the_plan_of_a_run_that_is_taken_up_is_shown() -> None:
    """Else the table showed pipelines on nodes that were gone, until the next loss."""
    observer, recorder, notes = watched()
    plan = shaped_plan((1,), 4)
    observer.on_message(structs.replace(running(12.0, epoch=7), plan=plan))
    observer.on_message(commit_message(6, 14.0, epoch=7))

    assert notes.plans == [plan]
    assert recorder.iterations[0].predicted_peak_bytes == 555


def test_the_first_plan_of_a_run_is_not_shown_again() -> None:
    """It is shown before the nodes start."""
    observer, _, notes = watched()
    observer.on_message(running(12.0))

    assert not notes.plans


class _Raising(Callbacks):
    """Raises after an iteration, and tells when."""

    def __init__(self, iteration: int) -> None:
        self.has_raised = threading.Event()
        self._iteration = iteration

    def on_commit(self, record: IterationRecord) -> None:
        if record.iteration == self._iteration:
            self.has_raised.set()
            raise ZeroDivisionError("mine")


def _repeat(observer: JobObserver, message: ToLauncher) -> None:
    """Sends a message many times: the thread notes what was raised a moment after it was."""
    for _ in range(1000):
        time.sleep(0)
        observer.on_message(message)


def test_what_a_callback_raises_after_the_last_iteration_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The coordinator was killed while it made the last save complete, and the job failed."""
    raising = _Raising(6)
    with CallbackThread([raising]) as thread:
        observer, recorder, _ = watched(thread)
        observer.on_message(commit_message(5, 17.0))
        observer.on_message(commit_message(6, 18.0, ends=True))
        assert raising.has_raised.wait(60.0)
        _repeat(observer, Saved(iteration=7, epoch=3))

    assert [record.iteration for record in recorder.iterations] == [5, 6]
    assert "a callback raised ZeroDivisionError('mine')" in caplog.text


def test_what_a_callback_raises_before_costs_nothing_of_the_last_iteration() -> None:
    """The job ends with it, and the report has the last evaluation."""
    raising = _Raising(5)
    last = commit_message(6, 18.0, ends=True)
    evaluated = Evaluated(
        iteration=7, loss=1.5, num_samples=4, num_targets=4, metrics={}, seconds=0.5
    )
    last = structs.replace(
        last, reports=tuple(structs.replace(r, evaluated=(evaluated,)) for r in last.reports)
    )
    with CallbackThread([raising]) as thread:
        observer, recorder, _ = watched(thread)
        observer.on_message(commit_message(5, 17.0))
        assert raising.has_raised.wait(60.0)
        with pytest.raises(ZeroDivisionError, match="mine"):
            _repeat(observer, last)

    assert list(recorder.evaluations) == [7]


def test_one_node_is_one_node() -> None:
    """And two are two."""
    observer, _, notes = watched()
    observer.on_message(structs.replace(starting(11.0), num_nodes=1))
    observer.on_message(starting(11.0))
    observer.on_fault(parse_injection("join:1@5"), now_s=12.0)
    observer.on_fault(parse_injection("join:2@5"), now_s=12.0)

    assert notes.texts == [
        "1 node is up and takes its layers",
        "2 nodes are up and take their layers",
        "injecting join: 1 node",
        "injecting join: 2 nodes",
    ]


def test_a_job_is_degraded_once_though_two_coordinators_tell_it() -> None:
    """The second decides again what the first did not live to record."""
    observer, recorder, notes = watched()
    observer.on_message(loss_message(20.0, 6))
    message = structs.replace(
        decision_message(21.0), degraded="one node is left", is_newly_degraded=True
    )
    observer.on_message(message)
    observer.on_message(message)

    assert notes.texts.count("degraded: one node is left") == 1
    assert [event.kind for event in recorder.events()] == ["lost", "degraded"]


def test_a_warning_is_an_event_if_it_says_of_which_kind() -> None:
    """All are shown."""
    observer, recorder, notes = watched()
    observer.on_message(Warned(text="the disk is slow"))
    observer.on_message(Warned(text="GPU 0 does not answer", event="unfit"))

    assert notes.texts == ["the disk is slow", "GPU 0 does not answer"]
    assert [(event.kind, event.reason) for event in recorder.events()] == [
        ("unfit", "GPU 0 does not answer")
    ]


def test_a_fault_that_never_came_is_told_as_it_was_asked_for() -> None:
    """Whole, for there may be several of a kind."""
    observer, _, notes = watched()
    observer.record_end((parse_injection("hang=8:1@~2.5"), parse_injection("leader:@4.commit")))

    assert notes.texts == [
        "never injected, because the job never came to that place: hang=8:1@~2.5",
        "never injected, because the job never came to that place: leader:@4.commit",
    ]


def test_a_recovery_stands_beside_what_was_expected_from_when_it_was_noticed() -> None:
    """What passed before, until the lease of a node that hangs ran out, was in no prediction."""
    observer, _, notes = watched()
    observer.on_message(running(14.0))
    observer.on_message(loss_message(20.0, 6))
    message = structs.replace(
        decision_message(22.21),
        noticed_s=22.2,
        predicted_recovery_s_min=0.06,
        predicted_recovery_s_max=0.14,
    )
    observer.on_message(message)
    observer.on_message(starting(22.22))
    observer.on_message(running(22.3, epoch=4, pid=80, regroup_s=0.01, transfer_s=0.07))

    (text,) = (text for text in notes.texts if "training went on after" in text)
    assert text.startswith("training went on after 2300 ms: "), text
    assert text.endswith("; 100 ms of it after the loss was noticed, 60-140 ms expected"), text


def test_what_saves_took_is_told_apart_from_what_copies_took() -> None:
    """Entries of the one took the place of the other's, under the same names."""
    observer, recorder, _ = watched()
    for message in (starting(11.0), running(12.0), Saved(iteration=4, epoch=3)):
        observer.on_message(message)
    for iteration in range(4):
        copied = CopiesDone(age=iteration)
        reports = [structs.replace(report(0, iteration), copied=copied)]
        recorder.copy_measurements.add_iteration(iteration, reports, 20.0 + iteration)

    tables = observer.checkpoints(every=5, is_resumed=False)

    assert tables["disk"]["every"] == 5.0
    assert tables["memory"]["every"] == 1.0
    assert tables["disk"]["checkpoint_s"] != tables["memory"]["checkpoint_s"]


def test_what_a_save_took_counts_from_the_commit_of_its_iteration() -> None:
    """Training goes on while a save is written, so that later iterations are committed before."""
    observer, _, _ = watched()
    now_s = time.monotonic()
    for iteration, committed_s in ((3, now_s - 10.5), (4, now_s - 9.5), (13, now_s - 0.5)):
        observer.on_message(commit_message(iteration, committed_s))
    observer.on_message(Saved(iteration=4, epoch=3))
    first_s = observer.checkpoints(every=4, is_resumed=False)["disk"]["checkpoint_s"]
    observer.on_message(Saved(iteration=14, epoch=3))
    table = observer.checkpoints(every=4, is_resumed=False)["disk"]
    mean_s = table["checkpoint_s"]

    assert first_s >= 10.5
    assert 5.5 <= mean_s < first_s
    # They were to come more often, but one is left out while another one is written.
    assert table["expected_wasted_s"] == pytest.approx(mean_s + 10.0 / 2.0)


@pytest.mark.parametrize(
    ("is_resumed", "source", "copied", "expected"),
    [
        (False, "step-5", -1, {"disk": 3.0, "memory": 0.0}),
        (True, "step-5", -1, {"disk": 2.0, "memory": 0.0}),
        (True, "", -1, {"disk": 1.0, "memory": 0.0}),
        (False, "", 5, {"disk": 0.0, "memory": 3.0}),
    ],
)
def test_what_reading_took_is_the_mean_of_the_start_and_of_all_that_went_back(
    is_resumed: bool, source: str, copied: int, expected: dict[str, float]
) -> None:
    """A recovery from saves counted nothing. The start reads for 1 s, a recovery for 3 s; the last
    one had not come to an end with the job."""
    observer, recorder, _ = watched()
    decided = structs.replace(decision_message(21.0), source=source, copied=copied)
    for message in (
        starting(11.0),
        running(12.0),
        loss_message(20.0, 6),
        decided,
        starting(22.0),
        running(26.0, epoch=4, pid=80, regroup_s=1.0, transfer_s=3.0),
        loss_message(30.0, 5),
        structs.replace(decided, detected_s=31.0),
    ):
        observer.on_message(message)
    for iteration in range(4):
        reports = [structs.replace(report(0, iteration), copied=CopiesDone(age=iteration))]
        recorder.copy_measurements.add_iteration(iteration, reports, 40.0 + iteration)

    tables = observer.checkpoints(every=5, is_resumed=is_resumed)

    assert {tier: table["retrieval_s"] for tier, table in tables.items()} == expected
    assert tables["disk"]["expected_wasted_s"] == expected["disk"]
