"""The recorder collects the facts of a running job for its report.

Its callers pass the time; it reads no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile
from math import inf, nan
from operator import itemgetter
from typing import Final

import msgspec

from planaria.core.cluster import Node
from planaria.core.inject import NODELESS_KINDS, Injection
from planaria.core.kinds import LOSSLESS
from planaria.core.messages import IterationDone, MeasuredSpan, Raised, WorkerReady
from planaria.core.records import (
    AwaitingMachine,
    AwaitingSaves,
    Changed,
    Committed,
    Decided,
    DecisionInputs,
    Forked,
    ProfileCorrected,
    Recovering,
    Running,
    Starting,
)
from planaria.observe.ledger import Category, Ledger
from planaria.observe.measurements import CopyMeasurements, KeptPlans, Measurements
from planaria.observe.metrics import EvaluationRecord, EventRecord, IterationRecord, WorkerRecord
from planaria.observe.open_events import (
    OpenEvent,
    change_event,
    finished_event,
    injected_event,
    is_answered_by,
    recovery_tier,
    with_decision,
    with_error,
)

_AWAITED: Final = "all waited for it"
_STOOD_BY: Final = "stood by, in no plan until the end"


@dataclass(frozen=True, slots=True)
class _IterationInFlight:
    """The iteration in flight, whose computation a loss may waste.

    Attributes:
        began_s: time at which it began; infinite if none is in flight.
        lost_s: time of the first loss in it.
        training_until_s: the time until which the ledger counts it as training.
        noticed_s, answered_s: times at which the loss was noticed, and every member had left.
        is_redone: the iteration is computed again.
    """

    began_s: float = inf
    lost_s: float = inf
    training_until_s: float = inf
    noticed_s: float = inf
    answered_s: float = inf
    is_redone: bool = False

    def with_loss(
        self, lost_s: float, *, training_until_s: float, now_s: float
    ) -> "_IterationInFlight":
        """Adds a noticed loss: the first one, or another one before training goes on."""
        return replace(
            self,
            lost_s=min(lost_s, self.lost_s),
            training_until_s=min(training_until_s, self.training_until_s),
            noticed_s=min(now_s, self.noticed_s),
        )

    def with_answers(self, now_s: float, *, is_redone: bool) -> "_IterationInFlight":
        """Records that every member has left the epoch."""
        return replace(self, answered_s=now_s, is_redone=self.is_redone or is_redone)

    def after_commit(self, iteration_s: float) -> "_IterationInFlight":
        """The iteration after this one, which was in flight if this one is committed."""
        return replace(self, began_s=min(self.began_s + iteration_s, self.noticed_s))

    def seconds(self, iteration_s: float, unled: tuple[float, float]) -> dict[Category, float]:
        """Wasted seconds of the iteration, by the category as which they are booked.

        They last from its start to the loss. If a node is lost before the others begin the
        iteration, they compute it until the loss is noticed or, if they begin even later, until
        they leave the epoch, but no longer than an iteration takes. The time without a coordinator,
        which begins and ends as `unled` says, is booked as a restart.
        """
        if not self.is_redone or self.began_s == inf:
            return {}
        until_s = self.lost_s
        if until_s <= self.began_s:
            later_s = self.noticed_s if self.noticed_s > self.began_s else self.answered_s
            until_s = min(max(later_s, self.began_s), self.began_s + iteration_s)
        training_s = max(0.0, min(until_s, self.training_until_s) - self.began_s)
        from_s = self.began_s + training_s
        unled_s = max(0.0, min(until_s, unled[1]) - max(from_s, unled[0]))
        left_s = max(0.0, until_s - from_s - unled_s)
        return {Category.USEFUL: training_s, Category.DETECT: left_s, Category.RESTART: unled_s}


class Recorder:
    """The facts of one run.

    Args:
        first_iteration: iteration with which the run begins.

    Attributes:
        ledger: seconds so far by category.
        iterations: the committed iterations, in order.
        traces: spans by rank, and peak bytes of tensors by rank, of each committed iteration that
            workers traced; spans are in seconds since the first rank began it.
        measurements: times and memory that ranks measured.
        copy_measurements: measured cost of copies in memory.
        plans: plans so far, by epoch.
    """

    def __init__(
        self,
        *,
        start_s: float,
        predicted_s: float,
        predicted_peak_bytes: int,
        first_iteration: int = 0,
    ) -> None:
        self._first_iteration = first_iteration
        self.ledger = Ledger(start_s, start_s)
        self.iterations: list[IterationRecord] = []
        self.evaluations: dict[int, EvaluationRecord] = {}  # By iteration, in order.
        self.traces: dict[int, tuple[dict[int, tuple[MeasuredSpan, ...]], dict[int, int]]] = {}
        self.measurements = Measurements()
        self.copy_measurements = CopyMeasurements()
        self.plans = KeptPlans()
        self._nodes: dict[Node, Node] = {}
        self._shares_s: list[dict[Category, float]] = []  # One per committed iteration.
        self._orders = count()
        self._events: list[tuple[int, EventRecord]] = []  # (order, event that is over)
        self._open_events: list[OpenEvent] = []
        self._workers: dict[tuple[int, int], WorkerRecord] = {}
        # (seconds, peak bytes) of an iteration, by the first epoch for which they hold.
        self._predicted = {-1: (predicted_s, predicted_peak_bytes)}
        self._committed_s = start_s
        self._iteration_s = predicted_s  # Time of the newest iteration.
        self._idle_share = 0.0  # Share of the members that have no layer.
        self._in_flight = _IterationInFlight()
        # The newest loss of a coordinator: index of its event, when it was lost, and when the
        # next one ran.
        self._coordinator_loss = (-1, start_s, start_s)

    @property
    def next_iteration(self) -> int:
        """Number of the iteration after the newest committed one."""
        return self.iterations[-1].iteration + 1 if self.iterations else self._first_iteration

    def on_running(
        self, message: Running, *, predicted_peak_bytes: int = 0
    ) -> tuple[EventRecord, ...]:
        """Records that training runs, for the first time or again; returns the events that end.
        The peak bytes are those of the plan of a run that was taken up; 0: as known so far."""
        self.measurements.begin_epoch(message.epoch, self.plans.share(message.plan))
        if message.epoch not in self._predicted:
            peak_bytes = predicted_peak_bytes or self._prediction(message.epoch)[1]
            self._predicted[message.epoch] = (message.predicted_s, peak_bytes)
            self.measurements.add_correction(message.epoch, 0, message.layer_factors)
        for rank, worker in message.workers.items():
            self._note_worker(rank, worker, message)
        noticed = self._noticed_events()
        self._enter(Category.TRANSFER if noticed else self.ledger.category, message.now_s)
        over = tuple(
            (open_event.order, self._with_end(finished_event(open_event, message), message.now_s))
            for open_event in noticed
        )
        told_s = max((open_event.told_s for open_event in noticed), default=message.now_s)
        if over:
            between_s = message.now_s - told_s
            self._move(min(between_s, message.transfer_s), Category.REGROUP, Category.TRANSFER)
        self._events += over
        self._open_events = [e for e in self._open_events if not e.is_noticed]
        self._enter(Category.USEFUL, message.now_s)
        self._committed_s = message.now_s
        if noticed:
            self.ledger = self.ledger.close_recovery()
            self.copy_measurements.on_recovered()
        if noticed or self._in_flight.began_s == inf:  # Else a switch, in mid-iteration.
            self._in_flight = _IterationInFlight(began_s=message.now_s)
        working = {worker.node for worker in message.workers.values()}
        self._idle_share = 1.0 - len(working) / max(len(message.members), len(working))
        return tuple(event for _, event in over)

    def on_committed(self, message: Committed) -> IterationRecord:
        """Records that an iteration is committed, for the first time or again."""
        self._undo(message.iteration)
        reports = message.reports
        epoch = max((r.epoch for r in reports), default=message.epoch)
        # An iteration of the old epoch may be reported after the decision about a loss.
        predicted_s, peak_bytes = self._prediction(epoch)
        spans, clock_error_s = _placed_spans(reports)
        record = IterationRecord(
            iteration=message.iteration,
            loss=message.loss,
            samples=message.num_samples,
            sample_digest=message.sample_digest,
            # The ranks that measured it may all be lost; then take the coordinator's time.
            seconds=max((r.seconds for r in reports), default=message.now_s - self._committed_s),
            at_s=message.now_s - self.ledger.start_s,
            epoch=epoch,
            predicted_s=predicted_s,
            peak_bytes=max((report.peak_bytes for report in reports), default=0),
            predicted_peak_bytes=peak_bytes,
            clock_error_s=clock_error_s,
        )
        self.iterations.append(record)
        if spans:
            tensor_bytes = {r.rank: r.tensor_bytes for r in reports if r.tensor_bytes}
            self.traces[message.iteration] = spans, tensor_bytes
        self.measurements.add_iteration(message.iteration, reports)
        self.copy_measurements.add_iteration(message.iteration, reports, message.now_s)
        iteration_s = record.seconds
        if self._noticed_events():
            # Without reports `seconds` contains the loss, so the prediction is used instead.
            iteration_s = record.seconds if reports else predicted_s
            self._in_flight = self._in_flight.after_commit(iteration_s)
        else:
            self._enter(Category.USEFUL, message.now_s)
            self._committed_s = message.now_s
            self._in_flight = _IterationInFlight(began_s=message.now_s)
        self._iteration_s = iteration_s
        self._divide(iteration_s, reports)
        if message.ends:
            self._enter(Category.CHECKPOINT_STALL, message.now_s)
        return record

    def on_evaluated(self, message: Committed) -> tuple[EvaluationRecord, ...]:
        """Records the evaluations that are reported with a committed iteration, and returns them.

        All ranks report the same results. One that is done or reported again counts once.
        """
        reported = {e.iteration: e for report in message.reports for e in report.evaluated}
        records = tuple(
            EvaluationRecord(
                iteration=iteration,
                loss=nan if evaluated.loss is None else evaluated.loss,
                samples=evaluated.num_samples,
                targets=evaluated.num_targets,
                metrics={n: nan if v is None else v for n, v in evaluated.metrics.items()},
                seconds=evaluated.seconds,
                at_s=message.now_s - self.ledger.start_s,
            )
            for iteration, evaluated in sorted(reported.items())
            if evaluated.num_samples and iteration not in self.evaluations
        )
        self.evaluations |= {record.iteration: record for record in records}
        return records

    def _divide(self, iteration_s: float, reports: Sequence[IterationDone]) -> None:
        """Divides the seconds of an iteration among ledger categories."""
        evaluated_s = max((sum(e.seconds for e in r.evaluated) for r in reports), default=0.0)
        evaluated_s = min(evaluated_s, self.ledger.seconds.get(Category.USEFUL, 0.0))
        self._move(evaluated_s, Category.USEFUL, Category.EVALUATION)
        stall_s = max((report.stall_s for report in reports), default=0.0)
        self._move(stall_s, Category.USEFUL, Category.CHECKPOINT_STALL)
        # Ranks may begin before the ledger counts useful time; that part cannot be moved.
        booked_s = self.ledger.seconds.get(Category.USEFUL, 0.0)
        trained_s = min(max(0.0, iteration_s - stall_s), booked_s)
        eager_s = sum(report.eager_s for report in reports)
        computing_s = sum(report.computing_s for report in reports) + eager_s
        idle_s = trained_s * self._idle_share
        redundant_s = (trained_s - idle_s) * eager_s / computing_s if eager_s else 0.0
        shares_s = {Category.IDLE: idle_s, Category.REDUNDANT: redundant_s}
        for category, seconds in shares_s.items():
            self._move(seconds, Category.USEFUL, category)
        useful_s = trained_s - idle_s - redundant_s
        shares_s[Category.EVALUATION] = evaluated_s
        self._shares_s.append({Category.USEFUL: useful_s, **shares_s})

    def on_profile_corrected(self, message: ProfileCorrected) -> None:
        """Records the new prediction for later iterations, from a corrected profile."""
        _, peak_bytes = self._prediction(message.epoch)
        self._predicted[message.epoch] = (message.predicted_s, peak_bytes)
        self.measurements.add_correction(message.epoch, message.iteration, message.layer_factors)

    def _prediction(self, epoch: int) -> tuple[float, int]:
        return self._predicted[max(of for of in self._predicted if of <= epoch)]

    def _undo(self, num_left: int) -> None:
        """Discards the committed iterations from num_left on, because the job went back."""
        undone = takewhile(lambda record: record.iteration >= num_left, reversed(self.iterations))
        if num_undone := sum(1 for _ in undone):
            for category, seconds in chain(
                *(shares.items() for shares in self._shares_s[-num_undone:])
            ):
                self._move(seconds, category, Category.REDO)
            for records in (self.iterations, self._shares_s):
                del records[-num_undone:]
            self.traces = {n: trace for n, trace in self.traces.items() if n < num_left}
            self.evaluations = {n: e for n, e in self.evaluations.items() if n <= num_left}

    # -- events -----------------------------------------------------------------------------------

    def on_fault(self, injection: Injection, *, now_s: float) -> None:
        """Records an injected fault; for a join the injection has the numbers of the nodes."""
        event = replace(injected_event(injection), at_s=now_s - self.ledger.start_s)
        if injection.place.at_s >= 0.0 or injection.place.is_in_recovery:
            event = replace(event, iteration=self.next_iteration)
        if injection.kind == "slow" and injection.value == 1.0:
            event = replace(event, kind="unslowed")
        if event.kind in (*NODELESS_KINDS, "unslowed"):  # Training goes on without an answer.
            self._add(event)
        else:
            self._open_events.append(OpenEvent(event, next(self._orders), now_s))

    def add_missed_fault(self, injection: Injection) -> None:
        """Records a fault whose place never came."""
        self._add(replace(injected_event(injection), fired=False, reason=""))

    def on_recovering(self, message: Recovering) -> None:
        """Records that the coordinator noticed a loss; the newest fault that fits has made it."""
        if not self._noticed_events():  # What was done again before is of no recovery.
            self.ledger = self.ledger.close_recovery()
        for index, open_event in reversed(tuple(enumerate(self._open_events))):
            event, is_noticed = open_event.event, open_event.is_noticed
            if event.kind in ("slow", "join") or (message.kind in LOSSLESS and not is_noticed):
                continue  # Nothing was lost by these.
            if event.nodes and set(message.nodes) <= set(event.nodes):
                self._await_leader(open_event.lost_s)
                self._detect(message, message.lost_s if is_noticed else open_event.lost_s)
                if message.nodes or not is_noticed:
                    noticed_at_s = message.lost_s - self.ledger.start_s
                    event = replace(event, noticed_at_s=noticed_at_s)
                event = replace(event, reason=event.reason or message.reason)
                event = with_error(event, message.raised)
                self._open_events[index] = replace(open_event, event=event, is_noticed=True)
                return
        self._detect(message, message.lost_s)
        event = EventRecord(
            kind=message.kind,
            nodes=message.nodes,
            iteration=message.iteration,
            reason=message.reason,
            at_s=message.lost_s - self.ledger.start_s,
            noticed_at_s=message.lost_s - self.ledger.start_s,
        )
        event = with_error(event, message.raised)
        self._open_events.append(
            OpenEvent(event, next(self._orders), message.lost_s, is_noticed=True)
        )

    def _detect(self, message: Recovering, lost_s: float) -> None:
        """Books the time since a loss, when training stopped, until the coordinator noticed it."""
        start_s = max(lost_s, self.ledger.now_s)
        self._in_flight = self._in_flight.with_loss(
            lost_s, training_until_s=start_s, now_s=message.lost_s
        )
        self._enter(Category.DETECT, start_s)
        _, unled_s, led_s = self._coordinator_loss
        if start_s < led_s:
            self._enter(Category.RESTART, unled_s)
            self._enter(Category.DETECT, led_s)
        self._enter(Category.RESTART if message.is_forking else Category.DETECT, message.lost_s)

    def on_forked(self, message: Forked) -> None:
        """Records that every worker that was forked again has reported."""
        if self.ledger.category is Category.RESTART:
            self._enter(Category.DETECT, message.now_s)

    def on_awaiting_machine(self, message: AwaitingMachine) -> None:
        """Records that all wait for a node, until the next loss or decision."""
        self._enter(Category.IDLE, message.now_s)

    def on_awaiting_saves(self, message: AwaitingSaves) -> None:
        """Records that all wait for the disk to report what is saved."""
        self._enter(Category.CHECKPOINT_STALL, message.now_s)

    def _await_leader(self, lost_s: float) -> None:
        """Marks the loss of the coordinator as awaited if a node was lost before it ran again."""
        index, _, led_s = self._coordinator_loss
        if lost_s < led_s:
            order, event = self._events[index]
            self._events[index] = order, replace(event, reason=_AWAITED)

    def _noticed_events(self) -> list[OpenEvent]:
        return [event for event in self._open_events if event.is_noticed]

    def on_decided(self, message: Decided, *, predicted_peak_bytes: int) -> None:
        """Records how the coordinator decided that the job goes on."""
        message = msgspec.structs.replace(message, inputs=self._inputs(message.inputs))
        self._predicted[message.epoch] = (message.predicted_s, predicted_peak_bytes)
        self.plans.share(message.plan)
        self.ledger = self.ledger.recover(recovery_tier(message, self.next_iteration))
        self._undo(message.iteration)
        self._in_flight = self._in_flight.with_answers(
            message.detected_s, is_redone=message.redone_samples > 0
        )
        self._enter(Category.DECIDE, message.detected_s)
        self._open_events = [
            with_decision(open_event, message) if open_event.is_noticed else open_event
            for open_event in self._open_events
        ]
        if message.joined:
            order, joined = self._matching_event(
                "join", message.joined, noticed_s=message.noticed_s
            )
            reason = "got work in the recovery from a loss"
            joined = replace(joined, nodes=message.joined, reason=reason, epoch=message.epoch)
            self._events.append((order, replace(joined, iteration=message.iteration)))

    def _inputs(self, inputs: DecisionInputs | None) -> DecisionInputs | None:
        """The inputs of a decision as they are kept: the plan is among all plans, and nodes that
        are as at an earlier decision are the same objects, or 1,000 nodes take 1 MB."""
        if inputs is None:
            return None
        if inputs.plan is not None:
            self.plans.share(inputs.plan)
        nodes = tuple(self._nodes.setdefault(node, node) for node in inputs.cluster.nodes)
        cluster = replace(inputs.cluster, nodes=nodes)
        return msgspec.structs.replace(inputs, cluster=cluster, plan=None)

    def on_degraded(self, reason: str, *, iteration: int) -> bool:
        """Records that the job survives fewer failures from now on.

        Returns False if it was recorded before: the next coordinator may report it again.
        """
        event = EventRecord(kind="degraded", nodes=(), iteration=iteration, reason=reason)
        is_new = all(recorded != event for _, recorded in self._events)
        if is_new:
            self._add(event)
        return is_new

    def on_changed(self, message: Changed, *, predicted_peak_bytes: int) -> tuple[EventRecord, ...]:
        """Records nodes that came, left or changed while training went on; one event per kind."""
        message = msgspec.structs.replace(message, inputs=self._inputs(message.inputs))
        self._predicted[message.epoch] = (message.predicted_s, predicted_peak_bytes)
        self.plans.share(message.plan)
        self._move(message.pause_s, Category.USEFUL, Category.REGROUP)
        over = []
        for kind in dict.fromkeys(message.kinds.values()):
            nodes = tuple(sorted(n for n, why in message.kinds.items() if why == kind))
            order, event = self._matching_event(kind, nodes, noticed_s=message.asked_s)
            event = replace(event, noticed_at_s=message.asked_s - self.ledger.start_s)
            event = self._with_end(change_event(event, nodes, message), message.now_s)
            over.append((order, event))
        self._events += over
        return tuple(event for _, event in over)

    def _with_end(self, event: EventRecord, over_s: float) -> EventRecord:
        """The event that is over at a time of the coordinator's clock."""
        return replace(event, over_at_s=over_s - self.ledger.start_s)

    def _matching_event(
        self, kind: str, nodes: tuple[int, ...], *, noticed_s: float
    ) -> tuple[int, EventRecord]:
        """(order, event) of the injection that caused a change, or of a new one at `noticed_s`."""
        matching = [e for e in self._open_events if is_answered_by(e, kind, nodes)]
        # One change may answer two joins.
        for open_event in matching if kind == "join" else matching[:1]:
            self._open_events.remove(open_event)
            waiting = tuple(sorted(set(open_event.event.nodes) - set(nodes)))
            if kind == "join" and waiting:
                self._open_events.append(
                    replace(open_event, event=replace(open_event.event, nodes=waiting))
                )
        if matching:
            return matching[0].order, matching[0].event
        kind = {
            "join": "joined",
            "drain": "drained",
            "preempt": "preempted",
            "reform": "reformed",
        }.get(kind, kind)
        at_s = noticed_s - self.ledger.start_s
        event = EventRecord(kind=kind, nodes=nodes, iteration=-1, at_s=at_s, noticed_at_s=at_s)
        return next(self._orders), event

    def on_starting(self, message: Starting) -> None:
        """Records that the members were sent the plan."""
        if self._noticed_events():
            self._book_wasted()
            self._enter(Category.REGROUP, message.now_s)
            self._open_events = [replace(e, told_s=message.now_s) for e in self._open_events]

    def on_coordinator_restart(self, *, lost_s: float, now_s: float) -> None:
        """Records a lost coordinator that runs again; only training goes on without one."""
        category = self.ledger.category
        is_awaited = category is not Category.USEFUL
        if is_awaited:
            self._enter(Category.RESTART, lost_s)
            # The next coordinator does not report when a worker that was forked before is back.
            is_forking = category is Category.RESTART
            self._enter(Category.DETECT if is_forking else category, now_s)
        reason = _AWAITED if is_awaited else ""
        killed = (
            index
            for index, (_, event) in enumerate(self._events)
            if event.kind == "leader" and event.fired and not event.detect_s
        )
        index = next(killed, len(self._events))
        if index == len(self._events):
            self._add(EventRecord(kind="leader", nodes=(), iteration=self.next_iteration))
        order, event = self._events[index]
        event = replace(event, detect_s=now_s - lost_s, reason=reason)
        start_s = self.ledger.start_s
        self._events[index] = (
            order,
            replace(event, at_s=lost_s - start_s, over_at_s=now_s - start_s),
        )
        self._coordinator_loss = (index, lost_s, now_s)

    def add_event(
        self, kind: str, *, iteration: int, reason: str, raised: Raised | None = None
    ) -> None:
        """Records an event of another kind."""
        event = EventRecord(kind=kind, nodes=(), iteration=iteration, reason=reason)
        self._add(with_error(event, raised))

    def _add(self, event: EventRecord) -> None:
        self._events.append((next(self._orders), event))

    def on_end(self) -> None:
        """Records the end of the job."""
        for index, open_event in enumerate(self._open_events):
            if open_event.event.kind == "join":
                self._open_events[index] = replace(
                    open_event, event=replace(open_event.event, reason=_STOOD_BY)
                )

    def events(self) -> tuple[EventRecord, ...]:
        """All events in order; those that are not over have no downtime."""
        events = [
            *self._events,
            *((open_event.order, open_event.event) for open_event in self._open_events),
        ]
        return tuple(event for _, event in sorted(events, key=itemgetter(0)))

    def closed_events(self, first: int) -> tuple[EventRecord, ...]:
        """The events that are over, in the order in which they were, without the first ones."""
        return tuple(event for _, event in self._events[first:])

    def workers(self) -> tuple[WorkerRecord, ...]:
        """The workers of the run, sorted by rank and first epoch."""
        return tuple(sorted(self._workers.values(), key=lambda w: (w.rank, w.first_epoch)))

    def _note_worker(self, rank: int, worker: WorkerReady, message: Running) -> None:
        key = (rank, worker.pid)
        before = self._workers.get(key)
        self._workers[key] = WorkerRecord(
            node=worker.node,
            rank=rank,
            pid=worker.pid,
            pid_start=worker.pid_start,
            first_epoch=before.first_epoch if before else message.epoch,
            last_epoch=message.epoch,
            layers_materialised=message.materialised[rank],
        )

    def _enter(self, category: Category, now_s: float) -> None:
        self.ledger = self.ledger.enter(category, max(now_s, self.ledger.now_s))

    def _move(self, seconds: float, source: Category, target: Category) -> None:
        self.ledger = self.ledger.move(seconds, source, target)

    def _book_wasted(self) -> None:
        """Moves the wasted seconds of the iteration in flight to REDO."""
        wasted = self._in_flight.seconds(self._iteration_s, self._coordinator_loss[1:])
        for category, seconds in wasted.items():
            self._move(seconds, category, Category.REDO)
        self._in_flight = _IterationInFlight()  # A later loss must not count it again.


def _placed_spans(
    reports: Sequence[IterationDone],
) -> tuple[dict[int, tuple[MeasuredSpan, ...]], float | None]:
    """The spans of an iteration by rank, in seconds since the first rank began it, and a bound on
    the error with which they are placed.

    The bound is None if it is not known when each rank began; then each rank's spans count from its
    own begin.
    """
    traced = [report for report in reports if report.spans]
    begins_s = [report.began_s for report in traced if report.began_s is not None]
    if len(begins_s) < len(traced):
        return {report.rank: report.spans for report in traced}, None
    first_s = min(begins_s, default=0.0)
    spans = {
        report.rank: tuple(_later(span, began_s - first_s) for span in report.spans)
        for report, began_s in zip(traced, begins_s, strict=True)
    }
    # Each of two moments that are set side by side may be off.
    errors_s = sorted(report.clock_error_s for report in traced)
    return spans, sum(errors_s[-2:])


def _later(span: MeasuredSpan, by_s: float) -> MeasuredSpan:
    return MeasuredSpan(span.lane, span.action, span.start_s + by_s, span.end_s + by_s)
