"""Checks the ledger of a simulated job, which the real recorder keeps from the same messages.

The ledger must sum to the time that the job took, and a category must have seconds if, and only if,
its activity took time. So each message alone determines which categories may have more seconds
after it than before, and which must.
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

# The categories to which a message may assign the time before it.
_GROWS_BEFORE: Final[Mapping[type[ToLauncher], frozenset[Category]]] = {
    Decided: frozenset({Category.REDO}),
    Starting: frozenset({Category.REDO}),
    Running: frozenset({Category.REGROUP, Category.TRANSFER}),
    Changed: frozenset({Category.REGROUP}),
}


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait of all nodes.

    Attributes:
        category: category of the ledger that the wait belongs to.
        since_s: time at which the wait began.
        before_s: seconds of the category in the ledger at that time.
    """

    category: Category
    since_s: float
    before_s: float


class Recording:
    """The recorder of a simulated launcher, with checks of its ledger.

    Args:
        predicted_s: predicted time of an iteration by the first plan.
    """

    def __init__(self, *, predicted_s: float) -> None:
        self.recorder = Recorder(start_s=0.0, predicted_s=predicted_s, predicted_peak_bytes=0)
        self._committed = (-1, 0)
        self._unled_s = -1.0  # Since when there is no coordinator; negative: there is one.
        self._led_s = 0.0  # Since when there is a coordinator again.
        self._wait: _Wait | None = None
        self._idle_members = 0
        self._is_recovering = False
        self._is_training = False
        self._training_s = 0.0  # Time of the newest Running or Committed.
        # The state when the loss struck that is being answered, and whether the iteration that was
        # in flight then has been committed.
        self._was_training = False
        self._was_forking = False
        self._has_settled = False
        # Seconds of REDO that the ledger must exceed once the next plan is told; None: no check.
        self._redo_due: float | None = None
        self._violations: list[str] = []

    def on_coordinator_loss(self, now_s: float) -> None:
        """Notes that the coordinator is gone."""
        if self._unled_s < 0.0:
            self._unled_s = now_s

    def on_message(self, message: ToLauncher, now_s: float) -> None:
        """Records a message of the coordinator and checks what it adds to the ledger."""
        if isinstance(message, Committed):
            if (message.since, message.iteration) < self._committed:
                return  # An earlier coordinator has told it; nodes/head/launcher.py skips it too.
            self._committed = (message.since, message.iteration + 1)
        ledger = self.recorder.ledger
        before, old_category = dict(ledger.seconds), ledger.category
        may_grow = self._may_grow(message) | {old_category}
        must_grow = self._must_grow(message, now_s)
        self._record(message, now_s)
        after = self.recorder.ledger.seconds
        grown = {c for c in Category if after.get(c, 0.0) > before.get(c, 0.0) + _TOLERANCE_S}
        message_text = f"{type(message).__name__} at {now_s:.4f} s"
        if wrong := sorted(grown - may_grow):
            self._violations.append(f"{message_text} adds to the ledger's {wrong}, and is no cause")
        if missing := sorted(c for c in must_grow if after.get(c, 0.0) <= before.get(c, 0.0)):
            self._violations.append(f"{message_text} adds nothing to the ledger's {missing}")
        new_category, category = self._next_category(message), self.recorder.ledger.category
        if new_category is not None and category is not new_category:
            self._violations.append(f"{message_text}: {category} follows, not {new_category}")
        self._check_wait(message, now_s)

    # -- what a message means for the ledger ------------------------------------------------------

    def _may_grow(self, message: ToLauncher) -> set[Category]:
        """The categories that may grow with a message, besides the current one."""
        match message:
            case Leading() if self._unled_s >= 0.0:
                return {Category.RESTART}
            case Recovering():
                # The loss may have struck while there was no coordinator.
                restart = (
                    {Category.RESTART} if message.lost_s <= self._led_s + _TOLERANCE_S else set()
                )
                return {Category.DETECT, *restart}
            case Committed():
                categories = (
                    {Category.REDO} if message.iteration < self.recorder.next_iteration else set()
                )
                categories |= {Category.IDLE} if self._idle_members else set()
                if any(report.eager_s for report in message.reports):
                    categories.add(Category.REDUNDANT)
                if any(report.stall_s for report in message.reports):
                    categories.add(Category.CHECKPOINT_STALL)
                return categories
        return set(_GROWS_BEFORE.get(type(message), ()))

    def _must_grow(self, message: ToLauncher, now_s: float) -> set[Category]:
        """The categories that must grow with a message."""
        ledger = self.recorder.ledger
        match message:
            case Leading() if self._unled_s >= 0.0 and ledger.category is not Category.USEFUL:
                waited_s = now_s - max(self._unled_s, ledger.now_s)
                return {Category.RESTART} if waited_s > _TOLERANCE_S else set()
            case Committed() if message.iteration < self.recorder.next_iteration:
                return set()  # The ledger may take back as many seconds as it adds.
            case Committed() if self._useful_s(message) > _TOLERANCE_S:
                trained_s = min((report.seconds for report in message.reports), default=0.0)
                categories = {Category.IDLE} if self._idle_members and trained_s else set()
                if trained_s and any(report.eager_s for report in message.reports):
                    categories.add(Category.REDUNDANT)
                return categories
        return set()

    def _useful_s(self, message: Committed) -> float:
        """An upper bound on the useful seconds in the ledger after a commit; 0 where the launcher
        hears at the same time that the job runs and what it has committed."""
        ledger = self.recorder.ledger
        newest_s = message.now_s - ledger.now_s if self._is_training else 0.0
        return ledger.seconds.get(Category.USEFUL, 0.0) + newest_s

    def _next_category(self, message: ToLauncher) -> Category | None:
        """The category that begins with a message; None if the message does not change it."""
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
        """Checks that a wait that ends with a message has seconds, and notes one that begins."""
        ledger = self.recorder.ledger
        until_s = message.lost_s if isinstance(message, Recovering) else now_s
        if isinstance(message, Leading):
            self._wait = None  # All have waited for a coordinator as well.
        if (wait := self._wait) and isinstance(message, Recovering | Forked | Decided | Ended):
            spent_s = ledger.seconds.get(wait.category, 0.0) - wait.before_s
            if ledger.category is wait.category:
                spent_s += now_s - ledger.now_s
            if spent_s <= 0.0 and until_s - wait.since_s > _TOLERANCE_S:
                took_s = until_s - wait.since_s
                self._violations.append(f"{took_s} s of {wait.category} are not in the ledger")
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
                recorder.on_coordinator_restart(lost_s=self._unled_s, now_s=now_s)
                self._unled_s, self._led_s = -1.0, now_s
            case Starting():
                recorder.on_starting(message)
                self._check_redo()
            case Running():
                self._is_recovering = False
                self._is_training, self._was_training = True, False
                self._training_s = now_s
                at_work = {worker.node for worker in message.workers.values()}
                self._idle_members = max(0, len(message.members) - len(at_work))
                recorder.on_running(message)
            case Committed():
                self._has_settled = not self._is_training
                self._training_s = now_s
                recorder.on_committed(message)
            case Recovering():
                self._is_recovering = True
                self._was_forking |= message.is_forking
                # What was begun before the Running message has no seconds to take back.
                trained_s = now_s - self._training_s
                self._was_training |= self._is_training and trained_s > _TOLERANCE_S
                self._is_training = False
                recorder.on_recovering(message)
            case Forked():
                recorder.on_forked(message)
            case AwaitingMachine():
                recorder.on_awaiting_machine(message)
            case AwaitingSaves():
                recorder.on_awaiting_saves(message)
            case Decided():
                # What was committed before the Running message has no seconds to take back.
                has_trained = recorder.ledger.seconds.get(Category.USEFUL, 0.0) > 0.0
                goes_back = message.iteration < recorder.next_iteration and has_trained
                is_new = self._redo_due is None  # False: another decision on the same loss.
                if message.redone_samples and is_new and (self._was_training or goes_back):
                    self._redo_due = recorder.ledger.seconds.get(Category.REDO, 0.0)
                recorder.on_decided(message, predicted_peak_bytes=0)
            case Changed():
                recorder.on_changed(message, predicted_peak_bytes=0)
            case ProfileCorrected():
                recorder.on_profile_corrected(message)
            case Ended():
                recorder.on_end()

    def _check_redo(self) -> None:
        """Checks that the ledger has seconds of REDO if samples are computed again.

        There is no check if all waited for a worker process to be forked and the iteration in
        flight was committed meanwhile: nobody can tell then whether the next one had begun.
        """
        redo_s = self.recorder.ledger.seconds.get(Category.REDO, 0.0)
        is_known = not (self._was_forking and self._has_settled)
        if self._redo_due is not None and redo_s <= self._redo_due and is_known:
            self._violations.append(f"samples are redone, and {redo_s} s in all")
        self._redo_due, self._was_training = None, False
        self._was_forking = self._has_settled = False

    def violations(self, now_s: float) -> Iterator[str]:
        """What is wrong with the ledger, in words."""
        yield from self._violations
        ledger = self.recorder.ledger
        parts = ledger.enter(ledger.category, max(now_s, ledger.now_s)).parts()
        wall_s = parts.pop("wall")
        if abs(sum(parts.values()) - wall_s) > _TOLERANCE_S or wall_s < now_s:
            yield f"the ledger's parts {parts} do not sum to {wall_s} s of {now_s} s"
        wasted = ledger.wasted_parts().values()
        for key, category in (("redo_s", Category.REDO), ("transfer_s", Category.TRANSFER)):
            seconds, spent_s = [of[key] for of in wasted], parts[category]
            if abs(sum(seconds) - spent_s) > _TOLERANCE_S or min(seconds) < 0.0:
                yield f"wasted time of {seconds} s by tier, {spent_s} s of {category} in the ledger"
        if negative := [name for name, seconds in parts.items() if seconds < 0.0]:
            yield f"negative seconds in the ledger: {negative}"
