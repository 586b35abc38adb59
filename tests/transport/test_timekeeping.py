"""Work is late by one sleep at most, by its own time not at all, unless something stood still."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.transport import timekeeping
from planaria.transport.timekeeping import Timekeeper

LATE_S = 0.1


class LateClock:
    """A clock on which every sleep ends later than it should."""

    def __init__(self, seed: int, late_s: float) -> None:
        self.now_s = 0.0
        self._rng = random.Random(seed)
        self._late_s = late_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds + self._rng.random() * self._late_s


@given(st.integers(0, 1 << 32), st.lists(st.floats(0.0, 0.01), min_size=1, max_size=50))
def test_what_sleeps_overshoot_is_made_up_for(seed: int, durations: list[float]) -> None:
    """The whole is never short, and never later than by the lateness of one sleep; by the time of
    the work it is neither."""
    late_s = 0.004
    clock = LateClock(seed, late_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timekeeping, "time", clock)
        timekeeper = Timekeeper(LATE_S)
        for seconds in durations:
            timekeeper.sleep(seconds)

        assert -1e-9 <= clock.now_s - sum(durations) <= late_s + 1e-9
        assert timekeeper.now_s() == pytest.approx(sum(durations))


@given(st.floats(0.0, 0.5), st.floats(0.0, 0.2), st.floats(0.001, 0.1))
def test_work_begins_when_its_message_was_there(
    wait_s: float, late_s: float, seconds: float
) -> None:
    """However long it waited; unless it was woken so late that it must have been stopped."""
    clock = LateClock(0, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timekeeping, "time", clock)
        timekeeper = Timekeeper(LATE_S)
        timekeeper.sleep(1.0)
        clock.now_s += wait_s + late_s
        timekeeper.reach(1.0 + wait_s)
        timekeeper.sleep(seconds)

        is_stopped = late_s > LATE_S + 1e-9
        if abs(late_s - LATE_S) > 1e-9:
            begun_s = 1.0 + wait_s + (late_s if is_stopped else 0.0)
            assert timekeeper.now_s() == pytest.approx(begun_s + seconds)
            assert clock.now_s == pytest.approx(max(begun_s + seconds, 1.0 + wait_s + late_s))


def test_what_arrived_earlier_does_not_turn_time_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that was there while the thread still worked."""
    monkeypatch.setattr(timekeeping, "time", LateClock(0, 0.0))
    timekeeper = Timekeeper(LATE_S)
    timekeeper.sleep(1.0)
    timekeeper.reach(0.5)

    assert timekeeper.now_s() == 1.0


def test_work_goes_on_from_an_order_when_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited a little for it was not late with what it does then."""
    clock = LateClock(0, 0.0)
    monkeypatch.setattr(timekeeping, "time", clock)
    timekeeper = Timekeeper(LATE_S)
    timekeeper.sleep(1.0)
    clock.now_s += LATE_S / 2

    assert timekeeper.now_s() == 1.0
    assert timekeeper.catch_up() == timekeeper.now_s() == clock.now_s


def test_without_lateness_to_make_up_for_it_is_the_machines_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in every job that is not paced."""
    clock = LateClock(0, 0.01)
    monkeypatch.setattr(timekeeping, "time", clock)
    timekeeper = Timekeeper()
    for seconds in (0.5, 0.001, 2.0):
        timekeeper.sleep(seconds)
        timekeeper.reach(0.0)

        assert timekeeper.now_s() == clock.now_s
        clock.now_s += 0.003
        assert timekeeper.now_s() == clock.now_s


def test_each_thread_has_its_own_time() -> None:
    """Reductions wait for other messages than forwards do."""
    timekeeper = Timekeeper(LATE_S)
    timekeeper.reach(timekeeper.now_s() + 1e6)
    others: list[float] = []
    thread = threading.Thread(target=lambda: others.append(timekeeper.now_s()))
    thread.start()
    thread.join(timeout=10.0)

    assert timekeeper.now_s() > others[0] + 1e5
