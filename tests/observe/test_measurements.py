"""What ranks tell of their work, by epoch."""

import pickle
from dataclasses import replace
from itertools import pairwise

import msgspec
from msgspec import structs

from helpers.recorder_messages import PLAN, report
from planaria.core.messages import IterationDone
from planaria.observe.measurements import KeptPlans, Measurements


def done(
    rank: int,
    iteration: int,
    forward_s: float,
    *,
    epoch: int = 3,
    peak_bytes: int = 0,
    tensor_bytes: int = 0,
) -> IterationDone:
    return structs.replace(
        report(rank, iteration, epoch=epoch),
        peak_bytes=peak_bytes,
        tensor_bytes=tensor_bytes,
        action_s={"F": forward_s, "B": 2 * forward_s},
    )


def test_an_epoch_tells_medians_and_peaks_of_all_but_its_first_iteration() -> None:
    """One long iteration is no news, and caches are cold in the first."""
    measurements = Measurements()
    measurements.begin_epoch(3, PLAN)
    for iteration, forward_s in enumerate((9.0, 1.0, 8.0, 1.5), start=5):
        peaks = {"peak_bytes": 10 * iteration, "tensor_bytes": 9 - iteration}
        measurements.add_iteration(iteration, [done(0, iteration, forward_s, **peaks)])
        measurements.add_iteration(
            iteration, [done(0, iteration, 7.0, epoch=2)]
        )  # Of no epoch known.

    assert measurements.epochs[3].seconds() == {(0, "B"): 3.0, (0, "F"): 1.5}
    assert measurements.epochs[3].peak_bytes() == {0: (3, 80)}
    assert done(0, 0, 1.5).computing_s == 4.5


def test_corrections_hold_from_their_iteration_on_and_in_later_epochs() -> None:
    """An iteration is compared to what was predicted when it began."""
    measurements = Measurements()
    measurements.begin_epoch(0, PLAN)
    measurements.add_correction(0, 7, (2.0,))
    measurements.add_correction(0, 9, (3.0,))
    measurements.begin_epoch(1, PLAN)
    before, after = measurements.epochs[0], measurements.epochs[1]

    assert [before.layer_factors(i) for i in (6, 7, 8, 9)] == [(), (2.0,), (2.0,), (3.0,)]
    assert after.layer_factors(12) == (3.0,)


def test_an_epoch_that_is_told_again_goes_on() -> None:
    """A coordinator that is restarted tells that its epoch runs, and the epoch lost its figures."""
    measurements = Measurements()
    measurements.begin_epoch(3, PLAN)
    for iteration, forward_s in enumerate((9.0, 1.0, 2.0)):
        measurements.add_iteration(iteration, [done(0, iteration, forward_s, peak_bytes=8)])
    measurements.add_correction(3, 3, (2.0,))
    measurements.begin_epoch(3, PLAN)
    again = measurements.epochs[3]

    assert again.seconds() == {(0, "B"): 3.0, (0, "F"): 1.5}
    assert again.peak_bytes() == {0: (0, 8)}
    assert [again.layer_factors(i) for i in (0, 2, 3)] == [(), (), (2.0,)]


def test_epochs_that_are_over_keep_medians_alone() -> None:
    """At 1,000 ranks the numbers of an epoch were 5.9 MB, and the report has only medians."""
    measurements, sizes = Measurements(), list[int]()
    num_ranks = 50
    for epoch in range(8):
        measurements.begin_epoch(epoch, PLAN)
        for iteration in range(100):
            reports = [
                done(rank, iteration, 1.0 + rank + iteration, epoch=epoch)
                for rank in range(num_ranks)
            ]
            measurements.add_iteration(iteration, reports)
        sizes.append(len(pickle.dumps(measurements)))

    growth = [later - earlier for earlier, later in pairwise(sizes)]
    assert max(growth) < 60 * num_ranks
    # The newest 64 of 99 iterations.
    for epoch in range(8):
        assert measurements.epochs[epoch].seconds()[1, "F"] == 2.0 + (36 + 99) / 2


def test_a_late_report_of_an_epoch_that_is_over_counts_where_nothing_else_does() -> None:
    """Ranks switch to a plan in mid-iteration."""
    measurements = Measurements()
    measurements.begin_epoch(0, PLAN)
    for iteration in range(3):
        measurements.add_iteration(iteration, [done(0, iteration, 1.0, epoch=0)])
    measurements.begin_epoch(1, PLAN)
    measurements.add_iteration(3, [done(0, 3, 1.0, epoch=1)])
    measurements.add_iteration(4, [done(0, 4, 9.0, epoch=0), done(1, 4, 9.0, epoch=0)])
    measurements.begin_epoch(2, PLAN)

    seconds = measurements.epochs[0].seconds()
    assert (seconds[0, "F"], seconds[1, "F"]) == (1.0, 9.0)


def test_the_oldest_epochs_are_forgotten_once_there_are_many_figures() -> None:
    """With 8,000 ranks an epoch's figures were megabytes, and each was predicted at the end."""
    num_hops = sum(map(len, PLAN.routes))
    measurements = Measurements(figures_max=20 + 2 * num_hops)
    for epoch in range(6):
        measurements.begin_epoch(epoch, PLAN)
        for iteration in (10 * epoch, 10 * epoch + 1):
            reports = [done(rank, iteration, 1.0, epoch=epoch, peak_bytes=9) for rank in range(3)]
            measurements.add_iteration(iteration, reports)

    # An epoch has two medians and a peak of each of three ranks.
    assert list(measurements.epochs) == [3, 4, 5]
    assert measurements.epochs[3].seconds()[2, "F"] == 1.0


def test_epochs_of_one_iteration_are_forgotten_too() -> None:
    """They have no figures, but each has a plan. The epochs of a change's switches are such."""
    measurements = Measurements(figures_max=5 * sum(map(len, PLAN.routes)))
    for epoch in range(20):
        measurements.begin_epoch(epoch, PLAN)

    assert list(measurements.epochs) == [14, 15, 16, 17, 18, 19]


def test_older_plans_take_little_memory_and_are_all_told() -> None:
    """An iteration with thousands of microbatches has megabytes of routes."""
    kept = KeptPlans()
    plans = [replace(PLAN, epoch=epoch, routes=PLAN.routes * 1000) for epoch in range(9)]
    for plan in plans:
        assert kept.share(plan) is plan
        assert kept.share(replace(plan)) is plan

    encoded = {plan.epoch: msgspec.json.encode(plan) for plan in plans}
    assert kept.json_by_epoch() == encoded
    assert len(kept._older) >= 4
    assert max(map(len, kept._older.values())) < len(encoded[0]) / 50
