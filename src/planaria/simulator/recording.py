"""The ledger of a simulated job: the recorder of real ones, told by the same messages.

`wrongs` says what must hold for it: its parts sum to the time that the job took, and a category has
seconds if what it stands for has happened, and only then.
"""

from collections.abc import Iterator

from planaria.core.records import (
    AwaitingMachine,
    AwaitingSaves,
    Changed,
    Committed,
    Decided,
    Ended,
    Forked,
    Leading,
    Recovering,
    Running,
    Starting,
    ToLauncher,
)
from planaria.observe.ledger import Category
from planaria.observe.recorder import Recorder

_TOLERANCE_S = 1e-6


class Recording:
    """What a simulated launcher records of its job.

    Args:
        predicted_s: of an iteration by the first plan.
    """

    def __init__(self, *, predicted_s: float) -> None:
        self.recorder = Recorder(start_s=0.0, predicted_s=predicted_s, predicted_peak_bytes=0)
        self._committed = (-1, 0)
        self._unled_s = -1.0  # Since when there is no coordinator, negative where there is one.
        self._causes: set[Category] = set()
        self._is_training = False
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
        recorder = self.recorder
        match message:
            case Leading() if self._unled_s >= 0.0:
                self._causes.add(Category.RESTART)
                recorder.restarted(lost_s=self._unled_s, now_s=now_s)
                self._unled_s = -1.0
            case Starting():
                recorder.starting(message)
                self._check_redo()
            case Running():
                self._is_training, self._was_training = True, False
                if len(message.members) > len({one.node for one in message.workers.values()}):
                    self._causes.add(Category.IDLE)
                recorder.running(message)
            case Committed() if (message.since, message.iteration) < self._committed:
                return  # The coordinator before this one has told it, as in nodes/launcher.py.
            case Committed():
                self._committed = (message.since, message.iteration + 1)
                self._has_settled = not self._is_training
                recorder.committed(message)
            case Recovering():
                self._causes.add(Category.DETECT)
                if message.is_forking:
                    self._was_forking = True
                    self._causes.add(Category.RESTART)
                self._was_training |= self._is_training
                self._is_training = False
                recorder.recovering(message)
            case Forked():
                recorder.forked(message)
            case AwaitingMachine():
                self._causes.add(Category.IDLE)
                recorder.awaiting_machine(message)
            case AwaitingSaves():
                recorder.awaiting_saves(message)
            case Decided():
                self._causes |= {Category.DECIDE, Category.REGROUP, Category.TRANSFER}
                goes_back = message.iteration < recorder.next_iteration
                if message.redone_samples:  # Ranks may train before all are known to.
                    self._causes.add(Category.REDO)
                if message.redone_samples and (self._was_training or goes_back):
                    self._redo_due = recorder.ledger.seconds.get(Category.REDO, 0.0)
                recorder.decided(message, predicted_peak_bytes=0)
            case Changed():
                self._causes.add(Category.REGROUP)
                recorder.changed(message, predicted_peak_bytes=0)
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
        always = {Category.STARTUP, Category.USEFUL, Category.CHECKPOINT_STALL}
        uncaused = {name for name in Category if parts[name]} - self._causes - always
        if uncaused:
            yield f"seconds in the ledger without a cause: {sorted(uncaused)}"
