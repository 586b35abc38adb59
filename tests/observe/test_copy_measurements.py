"""What copies in memory took, as the report tells it."""

import pickle

import pytest
from msgspec import structs

from helpers.recorder_messages import report
from planaria.core.copies import CopiesDone
from planaria.core.messages import IterationDone
from planaria.observe.measurements import CopyMeasurements


def done(
    iteration: int, rank: int, age: int, *, idle_s: float = 0.0, used_s: float = 0.0
) -> IterationDone:
    copied = CopiesDone(age=age, idle_s=idle_s, idle_used_s=used_s)
    return structs.replace(report(rank, iteration), copied=copied)


def test_a_failure_wastes_a_version_half_a_period_and_what_reading_takes() -> None:
    """A version every two iterations of 3 s, each complete with the commit after it."""
    measurements = CopyMeasurements()
    for iteration in range(8):
        age = iteration // 2 * 2 - (1 if iteration < 2 else 0)
        reports = [done(iteration, rank, age) for rank in range(2)]
        measurements.add_iteration(iteration, reports, 3.0 * iteration)

    table = measurements.table(0.5)
    assert table["every"] == 2.0
    assert table["checkpoint_s"] == pytest.approx(3.0)
    assert table["retrieval_s"] == 0.5
    assert table["expected_wasted_s"] == pytest.approx(3.0 + 6.0 / 2.0 + 0.5)


def test_without_versions_there_is_nothing_to_tell() -> None:
    """The version that a job begins with does not count, nor does one that is told again."""
    measurements = CopyMeasurements()
    for iteration in range(4):
        measurements.add_iteration(iteration, [done(iteration, 0, 1)], float(iteration))

    assert measurements.table(0.0) == {"idle_used_s": 0.0, "idle_left_s": 0.0}


def test_versions_with_a_recovery_between_them_tell_no_period() -> None:
    measurements = CopyMeasurements()
    for iteration in range(4):
        if iteration == 2:
            measurements.on_recovered()
        measurements.add_iteration(iteration, [done(iteration, 0, iteration)], 9.0 * iteration)

    assert "every" not in measurements.table(0.0)


@pytest.mark.parametrize("first", [3, 4, 5])
def test_a_version_from_before_a_recovery_took_no_downtime(first: int) -> None:
    """It is told with the first commit after the recovery alone, whether the job went back to it,
    even to the newest committed state, or went on with it.

    Args:
        first: iteration with which the job goes on, and so the age of the version.
    """
    measurements = CopyMeasurements()
    for iteration in range(5):
        measurements.add_iteration(iteration, [done(iteration, 0, -1)], float(iteration))
    measurements.on_recovered()
    for iteration in range(first, first + 3):
        measurements.add_iteration(iteration, [done(iteration, 0, iteration)], 100.0 + iteration)

    table = measurements.table(0.0)
    assert table["checkpoint_s"] == pytest.approx(1.0)
    assert table["every"] == 1.0


@pytest.mark.parametrize("first", [90, 100])
def test_the_period_between_versions_contains_no_downtime(first: int) -> None:
    """One wait of 600 s for a machine doubled what a failure was expected to waste.

    Args:
        first: iteration with which the job goes on after the wait.
    """
    measurements = CopyMeasurements()
    for iteration in range(100):
        measurements.add_iteration(iteration, [done(iteration, 0, iteration)], float(iteration))
    measurements.on_recovered()
    for iteration in range(first, 200):
        now_s = 600.0 + 100 - first + iteration
        measurements.add_iteration(iteration, [done(iteration, 0, iteration)], now_s)

    table = measurements.table(0.0)
    assert table["every"] == 1.0
    assert table["expected_wasted_s"] == pytest.approx(1.0 + 1.0 / 2.0)


@pytest.mark.parametrize("has_copies", [False, True])
def test_measurements_take_no_more_memory_for_a_longer_run(has_copies: bool) -> None:
    """Two numbers were kept for each rank and iteration, of which only the mean is told."""
    measurements, sizes = CopyMeasurements(), dict[int, int]()
    for iteration in range(10_001):
        age = iteration - 1 if has_copies else -1
        reports = [done(iteration, rank, age, idle_s=2.0, used_s=0.5) for rank in range(2)]
        measurements.add_iteration(iteration, reports, 3.0 * iteration)
        if iteration in (5_000, 10_000):
            sizes[iteration] = len(pickle.dumps(measurements))

    assert sizes[10_000] < sizes[5_000] + 100
    table = measurements.table(0.0)
    assert (table["idle_used_s"], table["idle_left_s"]) == (0.5, 1.5)
    if has_copies:
        assert (table["every"], table["checkpoint_s"]) == (1.0, 6.0)


def test_idle_time_is_told_by_iteration_and_rank() -> None:
    """Of those who send copies; what took longer than the spans leaves nothing."""
    measurements = CopyMeasurements()
    measurements.add_iteration(0, [done(0, 0, -1), done(0, 1, -1, idle_s=2.0, used_s=0.5)], 1.0)
    measurements.add_iteration(1, [done(1, 0, -1), done(1, 1, -1, idle_s=2.0, used_s=2.5)], 2.0)

    assert measurements.table(0.0) == {"idle_used_s": 1.5, "idle_left_s": 0.75}
