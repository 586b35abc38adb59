"""Bugs to plant around the commit protocol: in how jobs end, in records that cannot be kept, and in
the ledger."""

from typing import Any

import msgspec
import pytest

from planaria.coordinator import crashes, recovery
from planaria.coordinator import step as coordinator
from planaria.coordinator.commands import MustEnd
from planaria.coordinator.crashes import _end_unsaved
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import JobState, Step
from planaria.core.kinds import Ending
from planaria.core.messages import WorkerFailed
from planaria.core.records import Rescue
from planaria.observe.ledger import Category
from planaria.observe.recorder import Recorder
from planaria.policies.memory_checked import MemoryChecked
from planaria.simulator.modelled.rescue import ReportedRecords


def who_crashes_often_is_needed(patch: pytest.MonkeyPatch) -> None:
    """The job ends where it could go on without a node."""
    patch.setattr(crashes, "_why_needed", lambda *_: "it is needed")


def failed_jobs_save_nothing(patch: pytest.MonkeyPatch) -> None:
    """What is live is not saved when the code in a worker has raised."""

    def failing(
        state: JobState, rules: Rules, failure: WorkerFailed, *, reason: str, now_s: float
    ) -> Step:
        del rules, now_s
        return _end_unsaved(replace(state, stop=replace(state.stop, failure=failure)), reason)

    patch.setattr(crashes, "_fail_job", failing)


def any_error_is_the_jobs(patch: pytest.MonkeyPatch) -> None:
    """Two nodes that had different layers in hand count as one mistake of the job's."""
    patch.setattr("planaria.core.messages.Raised.is_like", lambda *_: True)


def stages_without_room_are_planned(patch: pytest.MonkeyPatch) -> None:
    """What is known of memory is not looked at."""
    patch.setattr(MemoryChecked, "_fitting_answers", lambda _, transitions: transitions)


def jobs_go_on_without_records(patch: pytest.MonkeyPatch) -> None:
    """Nobody minds that nothing is recorded any more."""
    real = coordinator.step

    def step(rules: Rules, state: JobState, event: Any, now_s: float) -> Step:
        return (state, ()) if isinstance(event, MustEnd) else real(rules, state, event, now_s)

    patch.setattr("planaria.coordinator.leadership.step", step)


def what_is_live_is_given_up(patch: pytest.MonkeyPatch) -> None:
    """A job that cannot go on ends as it is."""
    real = recovery._save_then_end

    def save(state: JobState, *arguments: Any, ending: str, reason: str) -> Step:
        if ending == Ending.LOST:
            return recovery._end_unsaved(state, reason)
        return real(state, *arguments, ending=ending, reason=reason)

    patch.setattr(recovery, "_save_then_end", save)


def who_saves_begins_a_new_job(patch: pytest.MonkeyPatch) -> None:
    """It leads in the first term, and knows no members but the first."""
    real = ReportedRecords.rescue

    def rescue(self: ReportedRecords, there: Any) -> Rescue:
        return msgspec.structs.replace(real(self, there), term=0)

    patch.setattr(ReportedRecords, "rescue", rescue)


def _without(patch: pytest.MonkeyPatch, missing: Category) -> None:
    """The ledger never has seconds of a category."""
    enters, moves = Recorder._enter, Recorder._move

    def enter(self: Recorder, category: Category, now_s: float) -> None:
        enters(self, self.ledger.category if category is missing else category, now_s)

    def move(self: Recorder, seconds: float, source: Category, target: Category) -> None:
        if target is not missing:
            moves(self, seconds, source, target)

    patch.setattr(Recorder, "_enter", enter)
    patch.setattr(Recorder, "_move", move)


def restarts_take_no_time(patch: pytest.MonkeyPatch) -> None:
    """Waiting for processes is taken for whatever was before."""
    _without(patch, Category.RESTART)


def nobody_is_idle(patch: pytest.MonkeyPatch) -> None:
    """Members without work do useful work."""
    _without(patch, Category.IDLE)


def nothing_is_redundant(patch: pytest.MonkeyPatch) -> None:
    """Eager forwards are useful."""
    _without(patch, Category.REDUNDANT)


def what_was_restarted_once_restarts_for_ever(patch: pytest.MonkeyPatch) -> None:
    """All losses behind the first worker that was forked anew are taken for such."""
    real = Recorder.on_recovering

    def on_recovering(self: Recorder, message: Any) -> None:
        is_forking = message.is_forking or self.__dict__.get("has_forked", False)
        self.__dict__["has_forked"] = is_forking
        real(self, msgspec.structs.replace(message, is_forking=is_forking))

    patch.setattr(Recorder, "on_recovering", on_recovering)
