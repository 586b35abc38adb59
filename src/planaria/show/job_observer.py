"""Forwards the launcher's messages about a running job to its report and its display."""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Final, Protocol

from planaria.core.inject import Injection
from planaria.core.plan import Plan
from planaria.core.records import (
    AwaitingMachine,
    AwaitingSaves,
    Changed,
    Committed,
    Decided,
    Ended,
    Forked,
    ProfileCorrected,
    Recovering,
    Running,
    Saved,
    Starting,
    ToLauncher,
    Unsaved,
    Warned,
)
from planaria.observe.metrics import EventRecord, IterationRecord
from planaria.observe.recorder import Recorder
from planaria.show.callbacks import CallbackThread
from planaria.show.choice_text import back_text, choice_text
from planaria.show.comparison import expected_text
from planaria.show.words import count_text

_TARGETS: Final = {
    "leader": "the coordinator",
    "forkserver": "the fork server",
    "head": "the head",
    "store": "the checkpoint directory",
    "disk": "the journal",
    "refuse": "the checkpoint directory",
}

_COMMITS_MAX: Final = 4096  # A save that takes more iterations to be complete is not counted.


class TrainingDisplay(Protocol):
    """A display of a job whose nodes have started."""

    def show_training(self) -> None:
        """Shows that training has begun."""

    def show_iteration(self, record: IterationRecord) -> None:
        """Shows a committed iteration."""

    def show_next_plan(self, plan: Plan) -> None:
        """Shows that the job goes on with another plan."""

    def note(self, text: str) -> None:
        """Shows something else that a person should know."""


class JobObserver:
    """Forwards the launcher's messages to the recorder and the display.

    Args:
        plan: plan that the display shows first.
        predicted_peak_bytes: function that predicts the peak memory of a plan.
        evaluates: whether the job evaluates held-out data.
        callbacks: thread that calls the user's callbacks.
    """

    def __init__(
        self,
        recorder: Recorder,
        display: TrainingDisplay,
        *,
        plan: Plan,
        predicted_peak_bytes: Callable[[Plan], int],
        evaluates: bool,
        callbacks: CallbackThread,
    ) -> None:
        self._evaluates = evaluates
        self._callbacks = callbacks
        self._has_trained = False
        self._num_events_told = 0
        self._recorder = recorder
        self._display = display
        self._shown_plan = plan
        self._predicted_peak_bytes = predicted_peak_bytes
        self._starting_s = self._began_s = time.monotonic()
        self._has_begun = False
        self._committed_s: dict[int, float] = {}  # By iterations done, newer than what is saved.
        self._checkpoint_s: list[float] = []
        self._saved_at_s: list[float] = []  # Moments of the commits that complete saves are of.

    def on_message(self, message: ToLauncher) -> None:
        """See `Observer` in nodes/head/observer.py."""
        self._note_message(message)
        for event in self._recorder.closed_events(self._num_events_told):
            self._num_events_told += 1
            self._callbacks.post("on_event", event)

    @property
    def stop_reason(self) -> str:
        """See `Observer`."""
        return "" if self._has_trained else self._callbacks.stop_reason

    def _note_message(self, message: ToLauncher) -> None:
        match message:
            case Starting():
                self._on_starting(message)
            case Running():
                self._on_running(message)
            case Committed():
                self._on_committed(message)
            case Recovering():
                self._recorder.on_recovering(message)
                self._display.note(_loss_text(message))
            case Forked():
                self._recorder.on_forked(message)
            case AwaitingMachine():
                self._recorder.on_awaiting_machine(message)
                self._display.note(message.text)
            case AwaitingSaves():
                self._recorder.on_awaiting_saves(message)
                self._display.note(message.text)
            case Decided():
                self._on_decided(message)
            case Changed():
                self._on_changed(message)
            case ProfileCorrected():
                self._recorder.on_profile_corrected(message)
                if message.warning:
                    self._display.note(message.warning)
            case Saved():
                self._on_saved(message)
            case Unsaved():
                self._recorder.add_event(
                    "save_failed", iteration=message.iteration, reason=message.reason
                )
                text = f"iteration {message.iteration} was not saved: {message.reason}"
                self._display.note(text)
            case Warned():
                if message.event:
                    iteration = self._recorder.next_iteration
                    self._recorder.add_event(
                        message.event, iteration=iteration, reason=message.text
                    )
                self._display.note(message.text)

    def on_fault(self, injection: Injection, *, now_s: float) -> None:
        """See `Observer`."""
        self._recorder.on_fault(injection, now_s=now_s)
        nodes = ", ".join(str(node) for node in injection.nodes)
        target = f"node {nodes}" if nodes else _TARGETS.get(injection.kind, "")
        if injection.num_nodes:
            target = count_text(injection.num_nodes, "node")
        self._display.note(f"injecting {injection.kind}: {target}")

    def on_coordinator_restart(self, *, lost_s: float, now_s: float) -> None:
        """See `Observer`."""
        self._recorder.on_coordinator_restart(lost_s=lost_s, now_s=now_s)
        self._display.note(f"the coordinator runs again after {1000 * (now_s - lost_s):.0f} ms")

    def on_grant(self, node: int, *, replaced_node: int) -> None:
        """See `Observer`."""
        reason = f"another machine is granted in place of that of node {replaced_node}: node {node}"
        self._recorder.add_event("granted", iteration=self._recorder.next_iteration, reason=reason)
        self._display.note(reason)

    def on_stop_request(self, reason: str) -> None:
        """See `Observer`."""
        if not reason:
            self._display.note(
                "the job stops at the next commit; a second Ctrl-C stops it at once, without a save"
            )
            return
        text = f"training stops at the next commit: {reason}"
        self._recorder.add_event("early", iteration=self._recorder.next_iteration, reason=text)
        self._display.note(text)

    def events(self) -> tuple[EventRecord, ...]:
        """See `Observer`."""
        return self._recorder.events()

    def record_failure(self, reason: str, ended: Ended) -> None:
        """Records that training ended too early, and why."""
        iteration = self._recorder.next_iteration
        raised = ended.failure.raised if ended.failure else None
        self._recorder.add_event(ended.ending, iteration=iteration, reason=reason, raised=raised)

    def record_end(self, unfired: tuple[Injection, ...]) -> None:
        """Records the end of the job, and the faults that were never injected because the job never
        reached their places."""
        self._recorder.on_end()
        for injection in unfired:
            self._recorder.add_missed_fault(injection)
            self._display.note(
                f"never injected, because the job never came to that place: {injection.spec}"
            )

    def checkpoints(self, *, every: int, is_resumed: bool) -> dict[str, dict[str, float]]:
        """The report's tables of checkpoints, "disk" and "memory": seconds to complete a save, or
        copies, after a commit and to read one, and the use of the idle network by copies.

        Args:
            every: number of iterations from one save to the next; 0: none are made.
            is_resumed: whether the job started from a save.
        """
        saves, records = self._checkpoint_s, self._recorder.iterations
        reads_s = {
            tier: [
                event.transfer_s
                for event in self._recorder.events()
                if event.source_tier == tier and event.downtime_s  # Else the job ended before.
            ]
            for tier in ("disk", "memory")
        }
        if is_resumed:
            reads_s["disk"].append(self._began_s - self._starting_s)
        retrieval_s = {tier: fmean(seconds or (0.0,)) for tier, seconds in reads_s.items()}
        checkpoint_s = fmean(saves) if saves else 0.0
        period_s = every * fmean(record.seconds for record in records) if records else 0.0
        if len(at_s := self._saved_at_s) > 1:  # A save is left out while one is being written.
            period_s = (at_s[-1] - at_s[0]) / (len(at_s) - 1)
        wasted_s = checkpoint_s + period_s / 2.0 + retrieval_s["disk"] if every else 0.0
        disk = {
            "every": float(every),
            "checkpoint_s": checkpoint_s,
            "retrieval_s": retrieval_s["disk"],
            "expected_wasted_s": wasted_s,
        }
        memory = self._recorder.copy_measurements.table(retrieval_s["memory"])
        return {"disk": disk, "memory": memory}

    def _on_committed(self, message: Committed) -> None:
        self._committed_s[message.iteration + 1] = message.now_s
        if len(self._committed_s) > _COMMITS_MAX:
            del self._committed_s[next(iter(self._committed_s))]
        record = self._recorder.on_committed(message)
        self._display.show_iteration(record)
        evaluations = tuple(self._recorder.on_evaluated(message))
        for evaluated in evaluations:
            metrics = "".join(f", {name} {value:.4f}" for name, value in evaluated.metrics.items())
            self._display.note(
                f"held-out data after {count_text(evaluated.iteration, 'iteration')}: "
                f"loss {evaluated.loss:.4f}{metrics}"
            )
        num_done = message.iteration + 1
        has_last = not self._evaluates or num_done in self._recorder.evaluations
        if message.ends and message.is_trained and not has_last:
            self._display.note(
                f"held-out data were not evaluated after {count_text(num_done, 'iteration')}: a "
                "node was lost, or a stop was requested, while that was to be done"
            )
        elif any(not of.num_samples for report in message.reports for of in report.evaluated):
            self._display.note("an evaluation was broken off, because the job is to stop")
        if message.ends and any(report.early for report in message.reports):
            reason = "training has ended: the loss of held-out data is not lower any more"
            self._recorder.add_event("early", iteration=message.iteration, reason=reason)
            self._display.note(reason)
        self._has_trained = message.ends
        self._callbacks.note_commit(ends=message.ends)
        self._callbacks.post("on_commit", record)
        for evaluated in evaluations:
            self._callbacks.post("on_evaluation", evaluated)

    def _on_saved(self, message: Saved) -> None:
        committed = self._committed_s
        if message.iteration in committed:
            self._checkpoint_s.append(time.monotonic() - committed[message.iteration])
            self._saved_at_s.append(committed[message.iteration])
        self._committed_s = {n: at_s for n, at_s in committed.items() if n > message.iteration}
        self._display.note(f"saved iteration {message.iteration}")
        self._callbacks.post("on_save", message.iteration)

    def _on_starting(self, message: Starting) -> None:
        self._recorder.on_starting(message)
        if not self._has_begun:
            self._starting_s = message.now_s
            is_one = message.num_nodes == 1
            they = "is up and takes its" if is_one else "are up and take their"
            self._display.note(f"{count_text(message.num_nodes, 'node')} {they} layers")

    def _on_running(self, message: Running) -> None:
        # A head that takes a run up is not told of the decisions before it.
        is_other = not self._has_begun and message.plan != self._shown_plan
        peak_bytes = self._predicted_peak_bytes(message.plan) if is_other else 0
        for event in self._recorder.on_running(message, predicted_peak_bytes=peak_bytes):
            for text in _event_texts(event):
                self._display.note(text)
        if is_other:
            self._show_next_plan(message.plan)
        if not self._has_begun:
            self._has_begun = True
            self._began_s = message.now_s
            self._display.show_training()

    def _on_decided(self, message: Decided) -> None:
        peak_bytes = self._predicted_peak_bytes(message.plan)
        self._recorder.on_decided(message, predicted_peak_bytes=peak_bytes)
        self._note_degraded(message)
        self._show_next_plan(message.plan)

    def _on_changed(self, message: Changed) -> None:
        peak_bytes = self._predicted_peak_bytes(message.plan)
        for event in self._recorder.on_changed(message, predicted_peak_bytes=peak_bytes):
            nodes = ", ".join(str(node) for node in event.nodes)
            self._display.note(
                f"{event.kind}: node {nodes}: {choice_text(event)}; "
                f"{event.transfer_bytes / 1e6:.1f} MB moved while training went on; "
                f"it paused for {1000 * event.downtime_s:.0f} ms"
            )
        self._note_degraded(message)
        self._show_next_plan(message.plan)

    def _show_next_plan(self, plan: Plan) -> None:
        self._shown_plan = plan
        self._display.show_next_plan(plan)

    def _note_degraded(self, message: Decided | Changed) -> None:
        text = message.degraded
        is_new = message.is_newly_degraded
        if is_new and self._recorder.on_degraded(text, iteration=message.iteration):
            self._display.note(f"degraded: {text}")


def _loss_text(message: Recovering) -> str:
    nodes = ", ".join(str(node) for node in message.nodes)
    return f"{message.kind}: node {nodes}: {message.reason}" if nodes else message.reason


def _event_texts(event: EventRecord) -> tuple[str, ...]:
    """Sentences with the costs of a loss and the answer to it; empty without an answer."""
    if not event.answer:
        return ()
    phases = (
        ("detect", event.detect_s),
        ("decide", event.decide_s),
        ("regroup", event.regroup_s),
        ("transfer", event.transfer_s),
    )
    parts = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in phases)
    redone = f"{count_text(event.redone_samples, 'sample')} redone"
    moved = f"{event.transfer_bytes / 1e6:.1f} MB moved, {redone}"
    back = back_text(event)
    expected = ""
    if event.predicted_recovery_s_max and event.recovery_s:
        noticed = f"{1000 * event.recovery_s:.0f} ms of it after the loss was noticed"
        expected = f"; {noticed}, {expected_text(event)}"
    return (
        f"training went on after {1000 * event.downtime_s:.0f} ms: {parts}{expected}",
        choice_text(event),
        f"{back}: {moved}" if back else moved,
    )
