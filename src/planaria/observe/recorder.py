"""The recorder collects the facts of a running job for its report.

Its callers pass the time; it reads no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from math import inf
from operator import itemgetter
from typing import Final

from planaria.core.inject import NODELESS_KINDS, Injection
from planaria.core.messages import IterationDone, MeasuredSpan, Raised, WorkerReady
from planaria.core.records import (
    AwaitingMachine,
    AwaitingSaves,
    Candidate,
    Changed,
    Committed,
    Decided,
    Forked,
    ProfileCorrected,
    Recovering,
    Running,
    Starting,
)
from planaria.observe.ledger import Category, Ledger
from planaria.observe.measured import Copied, Measured
from planaria.observe.metrics import EventRecord, IterationRecord, WorkerRecord

_AWAITED: Final = "all waited for it"
_STANDING_BY: Final = "standing by, in no plan so far"
_STOOD_BY: Final = "stood by, in no plan until the end"


@dataclass(frozen=True, slots=True)
class _Open:
    """An event that is not over yet.

    Attributes:
        order: position among all events, in the order in which the recorder heard of them.
        lost_s: time at which it happened if that is known, else at which it was noticed.
        is_noticed: the coordinator has noticed the loss.
        noticed_s: time at which the coordinator noticed the newest loss that the same plan answers.
        detected_s, told_s: times at which all members had answered, and were sent the plan; 0
            before that.
    """

    event: EventRecord
    order: int
    lost_s: float
    is_noticed: bool = False
    noticed_s: float = 0.0
    detected_s: float = 0.0
    told_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Lost:
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

    def noticed(self, lost_s: float, *, training_until_s: float, now_s: float) -> "_Lost":
        """Adds a noticed loss: the first one, or another one before training goes on."""
        return replace(
            self,
            lost_s=min(lost_s, self.lost_s),
            training_until_s=min(training_until_s, self.training_until_s),
            noticed_s=min(now_s, self.noticed_s),
        )

    def answered(self, now_s: float, *, is_redone: bool) -> "_Lost":
        """Records that every member has left the epoch."""
        return replace(self, answered_s=now_s, is_redone=self.is_redone or is_redone)

    def settled(self, iteration_s: float) -> "_Lost":
        """The iteration after this one, which was in flight if this one is committed."""
        return replace(self, began_s=min(self.began_s + iteration_s, self.noticed_s))

    def seconds(self, iteration_s: float) -> tuple[float, float]:
        """Wasted seconds of the iteration: (while the ledger counts training, after that).

        They last from its start to the loss. If a node is lost before the others begin the
        iteration, they compute it until the loss is noticed or, if they begin even later, until
        they leave the epoch, but no longer than an iteration takes.
        """
        if not self.is_redone or self.began_s == inf:
            return 0.0, 0.0
        until_s = self.lost_s
        if until_s <= self.began_s:
            later_s = self.noticed_s if self.noticed_s > self.began_s else self.answered_s
            until_s = min(max(later_s, self.began_s), self.began_s + iteration_s)
        training_s = max(0.0, min(until_s, self.training_until_s) - self.began_s)
        return training_s, until_s - self.began_s - training_s


class Recorder:
    """The facts of one run.

    Attributes:
        ledger: seconds so far by category.
        iterations: the committed iterations, in order.
        spans: measured spans by rank, one mapping per committed iteration; the mappings are empty
            unless workers trace.
        tensor_bytes: peak bytes of tensors by rank, in the same form.
        measured: times and memory that ranks measured.
        copied: measured cost of copies in memory.
    """

    def __init__(self, *, start_s: float, predicted_s: float, predicted_peak_bytes: int) -> None:
        self.ledger = Ledger(start_s, start_s)
        self.iterations: list[IterationRecord] = []
        self.spans: list[dict[int, tuple[MeasuredSpan, ...]]] = []
        self.tensor_bytes: list[dict[int, int]] = []
        self.measured = Measured()
        self.copied = Copied()
        self._shares_s: list[dict[Category, float]] = []  # One per committed iteration.
        self._orders = count()
        self._events: list[tuple[int, EventRecord]] = []  # (order, event that is over)
        self._open: list[_Open] = []
        self._workers: dict[tuple[int, int], WorkerRecord] = {}
        # (seconds, peak bytes) of an iteration, by the first epoch for which they hold.
        self._predicted = {-1: (predicted_s, predicted_peak_bytes)}
        self._committed_s = start_s
        self._iteration_s = predicted_s  # Time of the newest iteration.
        self._idle_share = 0.0  # Share of the members that have no layer.
        self._lost = _Lost()
        # The newest loss of a coordinator: index of its event, when it was lost, and when the
        # next one ran.
        self._led = (-1, start_s, start_s)

    @property
    def next_iteration(self) -> int:
        """Number of the iteration after the newest committed one."""
        return self.iterations[-1].iteration + 1 if self.iterations else 0

    def running(self, message: Running) -> tuple[EventRecord, ...]:
        """Records that training runs, for the first time or again; returns the events that end."""
        self.measured.begun(message.epoch, message.plan)
        for rank, worker in message.workers.items():
            self._note_worker(rank, worker, message)
        noticed = self._noticed()
        self._enter(Category.TRANSFER if noticed else self.ledger.category, message.now_s)
        over = tuple((one.order, _closed(one, message)) for one in noticed)
        told_s = max((one.told_s for one in noticed), default=message.now_s)
        if over:
            between_s = message.now_s - told_s
            self._move(min(between_s, message.transfer_s), Category.REGROUP, Category.TRANSFER)
        self._events += over
        self._open = [one for one in self._open if not one.is_noticed]
        self._enter(Category.USEFUL, message.now_s)
        self._committed_s = message.now_s
        if noticed or self._lost.began_s == inf:  # Else a switch, in mid-iteration.
            self._lost = _Lost(began_s=message.now_s)
        working = {worker.node for worker in message.workers.values()}
        self._idle_share = 1.0 - len(working) / max(len(message.members), len(working))
        return tuple(event for _, event in over)

    def committed(self, message: Committed) -> IterationRecord:
        """Records that an iteration is committed, for the first time or again."""
        self._undo(message.iteration)
        reports = message.reports
        epoch = max((r.epoch for r in reports), default=message.epoch)
        # An iteration of the old epoch may be reported after the decision about a loss.
        predicted_s, peak_bytes = self._predicted_in(epoch)
        record = IterationRecord(
            iteration=message.iteration,
            loss=message.loss,
            samples=message.num_samples,
            sample_digest=message.sample_digest,
            # The ranks that measured it may all be lost; then take the coordinator's time.
            seconds=max((r.seconds for r in reports), default=message.now_s - self._committed_s),
            epoch=epoch,
            predicted_s=predicted_s,
            peak_bytes=max((report.peak_bytes for report in reports), default=0),
            predicted_peak_bytes=peak_bytes,
        )
        self.iterations.append(record)
        self.spans.append({report.rank: report.spans for report in reports if report.spans})
        self.tensor_bytes.append({r.rank: r.tensor_bytes for r in reports if r.tensor_bytes})
        self.measured.committed(message.iteration, reports)
        self.copied.committed(message.iteration, reports, message.now_s)
        iteration_s = record.seconds
        if self._noticed():
            # Without reports `seconds` contains the loss, so the prediction is used instead.
            iteration_s = record.seconds if reports else predicted_s
            self._lost = self._lost.settled(iteration_s)
        else:
            self._enter(Category.USEFUL, message.now_s)
            self._committed_s = message.now_s
            self._lost = _Lost(began_s=message.now_s)
        self._iteration_s = iteration_s
        self._divide(iteration_s, reports)
        if message.ends:
            self._enter(Category.CHECKPOINT_STALL, message.now_s)
        return record

    def _divide(self, iteration_s: float, reports: Sequence[IterationDone]) -> None:
        """Divides the seconds of an iteration among ledger categories."""
        stall_s = max((report.stall_s for report in reports), default=0.0)
        self._move(stall_s, Category.USEFUL, Category.CHECKPOINT_STALL)
        # Ranks may begin before the ledger counts useful time; that part cannot be moved.
        useful_s = self.ledger.seconds.get(Category.USEFUL, 0.0)
        trained_s = min(max(0.0, iteration_s - stall_s), useful_s)
        eager_s = sum(report.eager_s for report in reports)
        computing_s = sum(report.computing_s for report in reports) + eager_s
        idle_s = trained_s * self._idle_share
        redundant_s = (trained_s - idle_s) * eager_s / computing_s if eager_s else 0.0
        shares_s = {Category.IDLE: idle_s, Category.REDUNDANT: redundant_s}
        for category, seconds in shares_s.items():
            self._move(seconds, Category.USEFUL, category)
        left_s = trained_s - idle_s - redundant_s
        self._shares_s.append({Category.USEFUL: left_s, **shares_s})

    def corrected(self, message: ProfileCorrected) -> None:
        """Records the new prediction for later iterations, from a corrected profile."""
        _, peak_bytes = self._predicted_in(message.epoch)
        self._predicted[message.epoch] = (message.predicted_s, peak_bytes)
        self.measured.corrected(message.epoch, message.iteration, message.layer_factors)

    def _predicted_in(self, epoch: int) -> tuple[float, int]:
        return self._predicted[max(of for of in self._predicted if of <= epoch)]

    def _undo(self, num_left: int) -> None:
        """Discards the committed iterations from num_left on, because the job went back."""
        num_undone = sum(one.iteration >= num_left for one in self.iterations)
        if num_undone:
            for category, seconds in chain(*(one.items() for one in self._shares_s[-num_undone:])):
                self._move(seconds, category, Category.REDO)
            for kept in (self.iterations, self.spans, self.tensor_bytes, self._shares_s):
                del kept[-num_undone:]

    # -- events -----------------------------------------------------------------------------------

    def fired(self, injection: Injection, *, now_s: float) -> None:
        """Records an injected fault; for a join the injection has the numbers of the nodes."""
        event = _injected_event(injection)
        if injection.place.at_s >= 0.0:
            event = replace(event, iteration=self.next_iteration)
        if injection.kind == "slow" and injection.value == 1.0:
            event = replace(event, kind="unslowed")
        if event.kind in (*NODELESS_KINDS, "unslowed"):  # Training goes on without an answer.
            self._add(event)
        else:
            self._open.append(_Open(event, next(self._orders), now_s))

    def unfired(self, injection: Injection) -> None:
        """Records a fault whose place never came."""
        self._add(replace(_injected_event(injection), fired=False, reason=""))

    def recovering(self, message: Recovering) -> None:
        """Records that the coordinator noticed a loss."""
        for index, one in enumerate(self._open):
            if one.event.kind in ("slow", "join"):  # These lose no node.
                continue
            if one.event.nodes and set(message.nodes) <= set(one.event.nodes):  # It was injected.
                self._await_leader(one.lost_s)
                self._detect(message, message.lost_s if one.is_noticed else one.lost_s)
                event = replace(one.event, reason=one.event.reason or message.reason)
                event = _with_raised(event, message.raised)
                self._open[index] = replace(one, event=event, is_noticed=True)
                return
        self._detect(message, message.lost_s)
        event = EventRecord(
            kind=message.kind,
            nodes=message.nodes,
            iteration=message.iteration,
            reason=message.reason,
        )
        event = _with_raised(event, message.raised)
        self._open.append(_Open(event, next(self._orders), message.lost_s, is_noticed=True))

    def _detect(self, message: Recovering, lost_s: float) -> None:
        """Books the time since a loss, when training stopped, until the coordinator noticed it."""
        start_s = max(lost_s, self.ledger.now_s)
        self._lost = self._lost.noticed(lost_s, training_until_s=start_s, now_s=message.lost_s)
        self._enter(Category.DETECT, start_s)
        _, unled_s, led_s = self._led
        if start_s < led_s:
            self._enter(Category.RESTART, unled_s)
            self._enter(Category.DETECT, led_s)
        self._enter(Category.RESTART if message.is_forking else Category.DETECT, message.lost_s)

    def forked(self, message: Forked) -> None:
        """Records that every worker that was forked again has reported."""
        if self.ledger.category is Category.RESTART:
            self._enter(Category.DETECT, message.now_s)

    def awaiting_machine(self, message: AwaitingMachine) -> None:
        """Records that all wait for a node, until the next loss or decision."""
        self._enter(Category.IDLE, message.now_s)

    def awaiting_saves(self, message: AwaitingSaves) -> None:
        """Records that all wait for the disk to report what is saved."""
        self._enter(Category.CHECKPOINT_STALL, message.now_s)

    def _await_leader(self, lost_s: float) -> None:
        """Marks the loss of the coordinator as awaited if a node was lost before it ran again."""
        index, _, led_s = self._led
        if lost_s < led_s:
            order, event = self._events[index]
            self._events[index] = order, replace(event, reason=_AWAITED)

    def _noticed(self) -> list[_Open]:
        return [one for one in self._open if one.is_noticed]

    def decided(self, message: Decided, *, predicted_peak_bytes: int) -> None:
        """Records how the coordinator decided that the job goes on."""
        self._predicted[message.epoch] = (message.predicted_s, predicted_peak_bytes)
        self._undo(message.iteration)
        self._lost = self._lost.answered(message.detected_s, is_redone=message.redone_samples > 0)
        self._enter(Category.DECIDE, message.detected_s)
        self._open = [_decided(one, message) if one.is_noticed else one for one in self._open]
        if message.joined:
            order, joined = self._injected("join", message.joined)
            reason = "taken at once, to make up for a loss"
            joined = replace(joined, nodes=message.joined, reason=reason)
            self._events.append((order, replace(joined, iteration=message.iteration)))

    def degraded(self, reason: str, *, iteration: int) -> bool:
        """Records that the job survives fewer failures from now on.

        Returns False if it was recorded before: the next coordinator may report it again.
        """
        event = EventRecord(kind="degraded", nodes=(), iteration=iteration, reason=reason)
        is_new = all(told != event for _, told in self._events)
        if is_new:
            self._add(event)
        return is_new

    def changed(self, message: Changed, *, predicted_peak_bytes: int) -> tuple[EventRecord, ...]:
        """Records nodes that came, left or changed while training went on; one event per kind."""
        self._predicted[message.epoch] = (message.predicted_s, predicted_peak_bytes)
        self._move(message.pause_s, Category.USEFUL, Category.REGROUP)
        over = []
        for kind in dict.fromkeys(message.kinds.values()):
            nodes = tuple(sorted(n for n, why in message.kinds.items() if why == kind))
            order, event = self._injected(kind, nodes)
            over.append((order, _changed(event, nodes, message)))
        self._events += over
        return tuple(event for _, event in over)

    def _injected(self, kind: str, nodes: tuple[int, ...]) -> tuple[int, EventRecord]:
        """(order, event) of the injection that caused a change, or of a new event."""
        meant = [one for one in self._open if _is_meant(one, kind, nodes)]
        for one in meant if kind == "join" else meant[:1]:  # One change may answer two joins.
            self._open.remove(one)
            left = tuple(sorted(set(one.event.nodes) - set(nodes)))
            if kind == "join" and left:
                self._open.append(replace(one, event=replace(one.event, nodes=left)))
        if meant:
            return meant[0].order, meant[0].event
        told = {
            "join": "joined",
            "drain": "drained",
            "preempt": "drained",
            "reform": "reformed",
        }.get(kind, kind)
        return next(self._orders), EventRecord(kind=told, nodes=nodes, iteration=-1)

    def starting(self, message: Starting) -> None:
        """Records that the members were sent the plan."""
        if self._noticed():
            self._book_lost()
            self._enter(Category.REGROUP, message.now_s)
            self._open = [replace(one, told_s=message.now_s) for one in self._open]

    def restarted(self, *, lost_s: float, now_s: float) -> None:
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
        self._events[index] = order, replace(event, detect_s=now_s - lost_s, reason=reason)
        self._led = (index, lost_s, now_s)

    def noted(
        self, kind: str, *, iteration: int, reason: str, raised: Raised | None = None
    ) -> None:
        """Records an event of another kind."""
        event = EventRecord(kind=kind, nodes=(), iteration=iteration, reason=reason)
        self._add(_with_raised(event, raised))

    def _add(self, event: EventRecord) -> None:
        self._events.append((next(self._orders), event))

    def ended(self) -> None:
        """Records the end of the job."""
        for index, one in enumerate(self._open):
            if one.event.kind == "join":
                self._open[index] = replace(one, event=replace(one.event, reason=_STOOD_BY))

    def events(self) -> tuple[EventRecord, ...]:
        """All events in order; those that are not over have no downtime."""
        told = [*self._events, *((one.order, one.event) for one in self._open)]
        return tuple(event for _, event in sorted(told, key=itemgetter(0)))

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
        self.ledger = self.ledger.moved(seconds, source, target)

    def _book_lost(self) -> None:
        """Moves the wasted seconds of the iteration in flight to REDO."""
        training_s, leaving_s = self._lost.seconds(self._iteration_s)
        self._move(training_s, Category.USEFUL, Category.REDO)
        self._move(leaving_s, Category.DETECT, Category.REDO)
        self._lost = _Lost()  # A later loss must not count it again.


def _with_raised(event: EventRecord, raised: Raised | None) -> EventRecord:
    if raised is None:
        return event
    layers = tuple(range(raised.first_layer, raised.end_layer))
    return replace(event, error=raised.error, message=raised.message, layers=layers)


def _is_meant(one: _Open, kind: str, nodes: tuple[int, ...]) -> bool:
    """Whether a change may answer an injection: it has all its nodes, or some of a join."""
    both = set(nodes) & set(one.event.nodes)
    is_meant = bool(both) if kind == "join" else both == set(nodes)
    return is_meant and one.event.kind == kind and not one.is_noticed


def _injected_event(injection: Injection) -> EventRecord:
    place = injection.place
    return EventRecord(
        kind=injection.kind,
        nodes=injection.nodes,
        iteration=place.iteration,
        step=place.step if place.at_s < 0.0 else f"~{place.at_s}",
        reason=_STANDING_BY if injection.num_nodes else "",
    )


def _changed(event: EventRecord, nodes: tuple[int, ...], message: Changed) -> EventRecord:
    steps = f"{message.now_s - message.asked_s:.2f} s from the first step to the last"
    return replace(
        event,
        nodes=nodes,
        iteration=message.iteration if event.iteration < 0 else event.iteration,
        policy=message.policy,
        answer=message.answer,
        candidates=_priced(message.candidates),
        time_to_failure_s=message.time_to_failure_s,
        regroup_s=message.pause_s,
        transfer_bytes=message.transfer_bytes,
        received_bytes=message.received_bytes,
        source_tier="live" if message.transfer_bytes else "",
        downtime_s=message.pause_s,
        predicted_downtime_s=message.predicted_pause_s,
        reason="; ".join(filter(None, (message.reason, steps))),
    )


def _priced(candidates: tuple[Candidate, ...]) -> tuple[Mapping[str, object], ...]:
    return tuple(map(asdict, candidates))


def _decided(one: _Open, message: Decided) -> _Open:
    event = replace(
        one.event,
        policy=message.policy,
        answer=message.answer,
        candidates=_priced(message.candidates),
        time_to_failure_s=message.time_to_failure_s,
        transfer_bytes=message.transfer_bytes,
        source_tier=_tier(message),
        predicted_downtime_s=message.predicted_downtime_s,
        predicted_transfer_s=message.predicted_transfer_s,
        predicted_recovery_s=message.predicted_recovery_s,
        predicted_recovery_s_min=message.predicted_recovery_s_min,
        predicted_recovery_s_max=message.predicted_recovery_s_max,
        redone_samples=message.redone_samples,
    )
    return replace(one, event=event, noticed_s=message.noticed_s, detected_s=message.detected_s)


def _closed(one: _Open, message: Running) -> EventRecord:
    """The event with the times of its phases, from the loss until every rank could go on."""
    if not one.detected_s:  # This recovery does not answer the fault, such as a short stop.
        return one.event
    regroup_s = min(message.regroup_s, message.now_s - one.told_s)
    return replace(
        one.event,
        detect_s=one.detected_s - one.lost_s,
        decide_s=one.told_s - one.detected_s,
        regroup_s=regroup_s,
        transfer_s=message.now_s - one.told_s - regroup_s,
        received_bytes=message.received_bytes,
        downtime_s=message.now_s - one.lost_s,
        recovery_s=message.now_s - one.noticed_s if one.noticed_s else 0.0,
    )


def _tier(message: Decided) -> str:
    """The tier that serves layers: "memory", "disk", "live", or "" if no layer moves."""
    if message.copied >= 0:
        return "memory"
    return "disk" if message.source else "live" if message.transfer_bytes else ""
