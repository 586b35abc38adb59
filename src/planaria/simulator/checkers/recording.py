"""The ledger of a simulated job: the recorder of real ones, told by the same messages.

It must sum to the time that the job took, and a category must have seconds where what it stands for
took time, and only there. So two things are said of each message, from what it tells alone: which
categories may have more seconds after it than before, and which must.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from planaria.core.records import (
    AwaitingMachine,
    AwaitingSaves,
    Changed,
    Committed,
    Decided,
    Ended,
    Forked,
    Leading,
    ProfileCorrected,
    Recovering,
    Running,
    Starting,
    ToLauncher,
)
from planaria.observe.ledger import Category
from planaria.observe.recorder import Recorder

_TOLERANCE_S: Final = 1e-6

# Of what there was before it a message tells that it was this.
_WAS: Final[Mapping[type[ToLauncher], frozenset[Category]]] = {
    Decided: frozenset({Category.REDO}),
    Starting: frozenset({Category.REDO}),
    Running: frozenset({Category.REGROUP, Category.TRANSFER}),
    Changed: frozenset({Category.REGROUP}),
}


@dataclass(frozen=True, slots=True)
class _Wait:
    """All wait for something, since a moment, when the ledger had so many seconds of it."""

    category: Category
    since_s: float
    before_s: float


class Recording:
    """What a simulated launcher records of its job.

    Args:
        predicted_s: of an iteration by the first plan.
    """

    def __init__(self, *, predicted_s: float) -> None:
        self.recorder = Recorder(start_s=0.0, predicted_s=predicted_s, predicted_peak_bytes=0)
        self._committed = (-1, 0)
        self._unled_s = -1.0  # Since when there is no coordinator, negative where there is one.
        self._led_s = 0.0  # Since when there is one again.
        self._wait: _Wait | None = None
        self._idle_members = 0
        self._is_recovering = False
        self._is_training = False
        self._training_s = 0.0  # When it was told last that all train, or what they have done.
        self._was_training = False  # When the loss struck that is being answered.
        self._was_forking = False  # Then, too.
        self._has_settled = False  # An iteration counts that was in flight then.
        self._redo_due: float | None = None  # More than that once the next plan is told.
        self._wrongs: list[str] = []

    def leader_lost(self, now_s: float) -> None:
        """The coordinator is gone."""
        if self._unled_s < 0.0:
            self._unled_s = now_s

    def noticed(self, message: ToLauncher, now_s: float) -> None:
        """The coordinator has told something."""
        if isinstance(message, Committed):
            if (message.since, message.iteration) < self._committed:
                return  # The coordinator before this one has told it, as in nodes/head/launcher.py.
            self._committed = (message.since, message.iteration + 1)
        ledger = self.recorder.ledger
        before, did = dict(ledger.seconds), ledger.category
        may_grow = self._may_grow(message) | {did}
        must_grow = self._must_grow(message, now_s)
        self._record(message, now_s)
        after = self.recorder.ledger.seconds
        grown = {c for c in Category if after.get(c, 0.0) > before.get(c, 0.0) + _TOLERANCE_S}
        told = f"{type(message).__name__} at {now_s:.4f} s"
        if wrong := sorted(grown - may_grow):
            self._wrongs.append(f"{told} adds to the ledger's {wrong}, and is no cause")
        if missing := sorted(c for c in must_grow if after.get(c, 0.0) <= before.get(c, 0.0)):
            self._wrongs.append(f"{told} adds nothing to the ledger's {missing}")
        does, category = self._does(message), self.recorder.ledger.category
        if does is not None and category is not does:
            self._wrongs.append(f"{told}: {category} follows, not {does}")
        self._check_wait(message, now_s)

    # -- what a message means for the ledger ------------------------------------------------------

    def _may_grow(self, message: ToLauncher) -> set[Category]:
        """Of what there may be more seconds, beside what was being done so far."""
        match message:
            case Leading() if self._unled_s >= 0.0:
                return {Category.RESTART}
            case Recovering():
                # What it answers to may have been before there was a coordinator again.
                waited = (
                    {Category.RESTART} if message.lost_s <= self._led_s + _TOLERANCE_S else set()
                )
                return {Category.DETECT, *waited}
            case Committed():
                found = (
                    {Category.REDO} if message.iteration < self.recorder.next_iteration else set()
                )
                found |= {Category.IDLE} if self._idle_members else set()
                if any(report.eager_s for report in message.reports):
                    found.add(Category.REDUNDANT)
                if any(report.stall_s for report in message.reports):
                    found.add(Category.CHECKPOINT_STALL)
                return found
        return set(_WAS.get(type(message), ()))

    def _must_grow(self, message: ToLauncher, now_s: float) -> set[Category]:
        """Of what there must be more seconds."""
        ledger = self.recorder.ledger
        match message:
            case Leading() if self._unled_s >= 0.0 and ledger.category is not Category.USEFUL:
                waited_s = now_s - max(self._unled_s, ledger.now_s)
                return {Category.RESTART} if waited_s > _TOLERANCE_S else set()
            case Committed() if message.iteration < self.recorder.next_iteration:
                return set()  # As much as it had before may be given back with it.
            case Committed() if self._useful_s(message) > _TOLERANCE_S:
                trained_s = min((report.seconds for report in message.reports), default=0.0)
                found = {Category.IDLE} if self._idle_members and trained_s else set()
                if trained_s and any(report.eager_s for report in message.reports):
                    found.add(Category.REDUNDANT)
                return found
        return set()

    def _useful_s(self, message: Committed) -> float:
        """What the ledger has of useful seconds with this iteration, of which some may be others;
        none where a job is told at once that it runs and what it has done."""
        ledger = self.recorder.ledger
        newest_s = message.now_s - ledger.now_s if self._is_training else 0.0
        return ledger.seconds.get(Category.USEFUL, 0.0) + newest_s

    def _does(self, message: ToLauncher) -> Category | None:
        """What all do after a message; None if it does not change that."""
        match message:
            case Recovering():
                return Category.RESTART if message.is_forking else Category.DETECT
            case AwaitingMachine():
                return Category.IDLE
            case Decided():
                return Category.DECIDE
            case Starting() if self._is_recovering:
                return Category.REGROUP
            case Running():
                return Category.USEFUL
        return None

    def _check_wait(self, message: ToLauncher, now_s: float) -> None:
        """A wait that is over by this message has seconds, and another one may begin."""
        ledger = self.recorder.ledger
        until_s = message.lost_s if isinstance(message, Recovering) else now_s
        if isinstance(message, Leading):
            self._wait = None  # For the coordinator, too.
        if (wait := self._wait) and isinstance(message, Recovering | Forked | Decided | Ended):
            spent_s = ledger.seconds.get(wait.category, 0.0) - wait.before_s
            if ledger.category is wait.category:
                spent_s += now_s - ledger.now_s
            if spent_s <= 0.0 and until_s - wait.since_s > _TOLERANCE_S:
                took_s = until_s - wait.since_s
                self._wrongs.append(f"{took_s} s of {wait.category} are not in the ledger")
            self._wait = None
        match message:
            case Recovering() if message.is_forking:
                category, since_s = Category.RESTART, message.lost_s
            case AwaitingMachine():
                category, since_s = Category.IDLE, message.now_s
            case _:
                return
        self._wait = _Wait(category, since_s, ledger.seconds.get(category, 0.0))

    # -- the recorder -----------------------------------------------------------------------------

    def _record(self, message: ToLauncher, now_s: float) -> None:
        recorder = self.recorder
        match message:
            case Leading() if self._unled_s >= 0.0:
                recorder.restarted(lost_s=self._unled_s, now_s=now_s)
                self._unled_s, self._led_s = -1.0, now_s
            case Starting():
                recorder.starting(message)
                self._check_redo()
            case Running():
                self._is_recovering = False
                self._is_training, self._was_training = True, False
                self._training_s = now_s
                at_work = {one.node for one in message.workers.values()}
                self._idle_members = max(0, len(message.members) - len(at_work))
                recorder.running(message)
            case Committed():
                self._has_settled = not self._is_training
                self._training_s = now_s
                recorder.committed(message)
            case Recovering():
                self._is_recovering = True
                self._was_forking |= message.is_forking
                # What was begun before that was told has no seconds to give back.
                trained_s = now_s - self._training_s
                self._was_training |= self._is_training and trained_s > _TOLERANCE_S
                self._is_training = False
                recorder.recovering(message)
            case Forked():
                recorder.forked(message)
            case AwaitingMachine():
                recorder.awaiting_machine(message)
            case AwaitingSaves():
                recorder.awaiting_saves(message)
            case Decided():
                # What was committed before it was told that all run has no seconds to give back.
                has_trained = recorder.ledger.seconds.get(Category.USEFUL, 0.0) > 0.0
                goes_back = message.iteration < recorder.next_iteration and has_trained
                is_new = self._redo_due is None  # Or decided anew, of the same loss.
                if message.redone_samples and is_new and (self._was_training or goes_back):
                    self._redo_due = recorder.ledger.seconds.get(Category.REDO, 0.0)
                recorder.decided(message, predicted_peak_bytes=0)
            case Changed():
                recorder.changed(message, predicted_peak_bytes=0)
            case ProfileCorrected():
                recorder.corrected(message)
            case Ended():
                recorder.ended()

    def _check_redo(self) -> None:
        """Where samples are computed again the ledger has seconds for what was lost of them.

        But where all wait for a worker, and the iteration before was settled meanwhile: nobody can
        tell then whether the next one had begun.
        """
        redo_s = self.recorder.ledger.seconds.get(Category.REDO, 0.0)
        is_known = not (self._was_forking and self._has_settled)
        if self._redo_due is not None and redo_s <= self._redo_due and is_known:
            self._wrongs.append(f"samples are redone, and {redo_s} s in all")
        self._redo_due, self._was_training = None, False
        self._was_forking = self._has_settled = False

    def wrongs(self, now_s: float) -> Iterator[str]:
        """What is wrong with the ledger, in words."""
        yield from self._wrongs
        ledger = self.recorder.ledger
        parts = ledger.enter(ledger.category, max(now_s, ledger.now_s)).parts()
        wall_s = parts.pop("wall")
        if abs(sum(parts.values()) - wall_s) > _TOLERANCE_S or wall_s < now_s:
            yield f"the ledger's parts {parts} do not sum to {wall_s} s of {now_s} s"
        if negative := [name for name, seconds in parts.items() if seconds < 0.0]:
            yield f"negative seconds in the ledger: {negative}"
