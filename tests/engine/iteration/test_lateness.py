"""When an action is late: not where its input takes long, and in a bounded time where it hangs."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.jobs import tiny_job
from helpers.noted_pulse import NotedPulse
from planaria.engine.iteration.lateness import ActionTimes, EpochLimits, Workload

JOB = tiny_job("sequential", Path())
LEASE_S = JOB.cluster.lease_s
COMPILED = replace(JOB, training=replace(JOB.training, compile=True))
LAYERS = 2, 5


def _limit_s(limits: EpochLimits, shape: tuple[int, ...], seconds: float) -> float:
    """The limit of a forward with an input of this shape, which then takes so many seconds."""
    assert isinstance(limits._pulse, NotedPulse)
    limits.begin(Workload("F", LAYERS, shape))
    limits.note(seconds)
    return limits._pulse.limits_s[-1]


def test_the_longest_action_of_all_epochs_counts() -> None:
    """An epoch may begin with short rows, or with shapes for which all is compiled."""
    times, pulse = ActionTimes(JOB), NotedPulse()
    before, after = EpochLimits(times, pulse), EpochLimits(times, pulse)
    first_s = _limit_s(before, (4, 8), 5.0), _limit_s(after, (4, 8), 0.05)

    assert first_s == (math.inf, math.inf)
    assert _limit_s(after, (4, 8), 0.05) == 50.0


@pytest.mark.parametrize(("is_compiled", "smaller_s"), [(False, LEASE_S), (True, 600.0)])
def test_an_input_that_may_take_longer_has_ten_minutes_once(
    is_compiled: bool, smaller_s: float
) -> None:
    """A larger one takes longer, and compiled layers any new shape. Each has a limit."""
    limits = EpochLimits(ActionTimes(COMPILED if is_compiled else JOB), NotedPulse())
    _limit_s(limits, (4, 8), 0.01)

    assert [_limit_s(limits, (4, 800), 0.1) for _ in range(2)] == [600.0, LEASE_S]
    assert [_limit_s(limits, (4, 2), 0.01) for _ in range(2)] == [smaller_s, LEASE_S]


def test_a_larger_input_has_time_in_proportion() -> None:
    """Where ten minutes are too short for it."""
    limits = EpochLimits(ActionTimes(JOB), NotedPulse())
    _limit_s(limits, (4, 64), 30.0)

    assert _limit_s(limits, (4, 2048), 960.0) == 10 * 32 * 30.0
    assert _limit_s(limits, (4, 64), 30.0) == 10 * 960.0
