"""A coordinator whose clock is another one than that of the coordinator before it.

Its machine was rebooted, or it runs on another machine: moments on record are not its own.
"""

import msgspec
import pytest

from helpers.coordinated import NOW_S, small_rules
from helpers.jobs import shaped_plan
from planaria.coordinator.frozen import replace
from planaria.coordinator.learning.history import learned_failures_per_s
from planaria.coordinator.membership.trust import num_failures, with_failures
from planaria.coordinator.start import restored_step
from planaria.coordinator.state import JobState
from planaria.core.clock_offsets import ClockReading
from planaria.core.findings import FailureHistory, Findings
from planaria.core.persistent_map import PersistentMap
from planaria.core.records import Members, Progress

PLAN = shaped_plan((2, 2), 6)
RULES = small_rules()
SHIFTS_S = (-1e6, 1e6)  # A monotonic clock may say less than before, and more.
FAILED_AGO_S = 1000.0
RECORDED_AGO_S = 600.0  # Before the newest commit.
MEMBERS = Members(
    epoch=4,
    term=1,
    nodes=(0, 1, 2),
    failures={"box": (3, NOW_S - FAILED_AGO_S)},
    history=FailureHistory(
        since_s=NOW_S - 5000.0, weight=2.0, last_s=NOW_S - FAILED_AGO_S, nodes=2.0
    ),
    findings=Findings(idle={1: (2, NOW_S - 300.0), 2: (1, 0.0)}),
    recorded=ClockReading("old", NOW_S - RECORDED_AGO_S),
)
PROGRESS = Progress(
    num_committed=7,
    ends=False,
    epoch=4,
    findings=MEMBERS.findings,
    recorded=ClockReading("old", NOW_S),
)


def restored(members: Members, progress: Progress | None, *, clock: str, now_s: float) -> JobState:
    state, _ = restored_step(
        replace(RULES, clock=clock),
        PLAN,
        term=2,
        members=members,
        outcome=None,
        decision=None,
        progress=progress,
        predicted_s=1.0,
        now_s=now_s,
    )
    machines = PersistentMap[int, str]().plus(0, "box")
    return replace(state, membership=replace(state.membership, machines=machines))


@pytest.mark.parametrize("shift_s", SHIFTS_S)
def test_what_is_on_record_is_as_old_by_another_clock(shift_s: float) -> None:
    """As if the newest commit were now: nobody can know how long the job was not coordinated."""
    same = restored(MEMBERS, PROGRESS, clock="old", now_s=NOW_S)
    other = restored(MEMBERS, PROGRESS, clock="new", now_s=NOW_S + shift_s)

    for after_s in (0.0, 2000.0, 4000.0):
        now_s, other_s = NOW_S + after_s, NOW_S + shift_s + after_s
        assert num_failures(same, 0, now_s) == num_failures(other, 0, other_s)
        assert learned_failures_per_s(same.membership.history, now_s) == pytest.approx(
            learned_failures_per_s(other.membership.history, other_s)
        )
    assert num_failures(other, 0, NOW_S + shift_s) == 3
    assert num_failures(other, 0, NOW_S + shift_s + 3600.0) == 0
    expected = {1: (2, pytest.approx(NOW_S + shift_s - 300.0)), 2: (1, 0.0)}
    assert other.learning.findings.idle == expected


@pytest.mark.parametrize("shift_s", SHIFTS_S)
def test_moments_that_were_moved_are_moved_no_further(shift_s: float) -> None:
    """The next record has them all by the clock that is named in it."""
    once = restored(MEMBERS, PROGRESS, clock="new", now_s=NOW_S + shift_s)
    failed = with_failures(once, (0,), NOW_S + shift_s)
    record = msgspec.structs.replace(
        MEMBERS,
        failures=dict(failed.membership.failures),
        history=failed.membership.history,
        recorded=ClockReading("new", NOW_S + shift_s),
    )
    again = restored(record, None, clock="new", now_s=NOW_S + shift_s + 10.0)

    assert dict(again.membership.failures) == {"box": (4, NOW_S + shift_s)}
    assert again.membership.history == once.membership.history


@pytest.mark.parametrize("shift_s", SHIFTS_S)
def test_each_record_is_moved_by_its_own_clock(shift_s: float) -> None:
    """The members are on record from a coordinator on another machine, and the commits since from
    one on this. What was its own was moved with the rest, again with each restart."""
    own = Findings(idle={1: (2, NOW_S + shift_s - 300.0)})
    progress = msgspec.structs.replace(
        PROGRESS, findings=own, recorded=ClockReading("new", NOW_S + shift_s)
    )
    now_s = NOW_S + shift_s + 20.0
    state = restored(MEMBERS, progress, clock="new", now_s=now_s)

    assert state.learning.findings.idle == own.idle
    ((count, last_s),) = state.membership.failures.values()
    assert count == 3
    assert last_s == pytest.approx(now_s - (FAILED_AGO_S - RECORDED_AGO_S))


@pytest.mark.parametrize("shift_s", SHIFTS_S)
def test_records_of_two_other_clocks_are_both_moved(shift_s: float) -> None:
    """Each was the newest that its coordinator recorded."""
    own = Findings(idle={1: (2, shift_s - 300.0)})
    progress = msgspec.structs.replace(
        PROGRESS, findings=own, recorded=ClockReading("third", shift_s)
    )
    state = restored(MEMBERS, progress, clock="new", now_s=NOW_S)

    _, since_s = state.learning.findings.idle[1]
    assert since_s == pytest.approx(NOW_S - 300.0)
    ((_, last_s),) = state.membership.failures.values()
    assert last_s == pytest.approx(NOW_S - (FAILED_AGO_S - RECORDED_AGO_S))


def test_without_progress_the_record_of_members_is_taken_for_now() -> None:
    """It may be the first one."""
    state = restored(MEMBERS, None, clock="new", now_s=50.0)

    ((count, last_s),) = state.membership.failures.values()
    assert count == 3
    assert last_s == pytest.approx(50.0 - (FAILED_AGO_S - RECORDED_AGO_S))


def test_a_job_that_has_not_trained_has_no_history_by_any_clock() -> None:
    """The moment 0 stands for none."""
    members = msgspec.structs.replace(MEMBERS, history=FailureHistory())
    state = restored(members, None, clock="new", now_s=50.0)

    assert state.membership.history == FailureHistory()


def test_records_of_a_planaria_that_named_no_clock_are_left_as_they_are() -> None:
    """They are of this machine, and mostly of this boot."""
    members = msgspec.structs.replace(MEMBERS, recorded=ClockReading())
    state = restored(members, PROGRESS, clock="new", now_s=NOW_S)

    assert state.membership.failures == members.failures
