"""What ranks tell of their work, by epoch."""

from msgspec import structs

from helpers.recorder_messages import PLAN, report
from planaria.core.messages import IterationDone
from planaria.observe.measurements import Measurements


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
