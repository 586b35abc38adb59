"""A moment of one machine's clock on another's: never further off than is said."""

from hypothesis import given
from hypothesis import strategies as st

from planaria.core.clock_offsets import (
    DRIFT_MAX,
    NO_OFFSET,
    ClockOffset,
    better_offset,
    measured_offset,
)

SECONDS = st.floats(0.0, 2.0)
EXCHANGES = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=30)
ROUNDING_S = 1e-6  # Of moments of a clock that says a million seconds.


@given(
    shift_s=st.sampled_from((-1e6, -3.0, 0.0, 1e6)),
    drift=st.floats(-DRIFT_MAX, DRIFT_MAX),
    exchanges=EXCHANGES,
    later_s=st.floats(-100.0, 100.0),
)
def test_a_moment_is_placed_to_within_the_error_that_is_told(
    shift_s: float, drift: float, exchanges: list[tuple[float, float, float]], later_s: float
) -> None:
    """Whatever the network takes in either direction, and however the clocks run apart."""

    def head_clock(node_s: float) -> float:
        return shift_s + node_s * (1.0 + drift)

    node_s = 1000.0
    offset: ClockOffset | None = None
    for wait_s, there_s, back_s in exchanges:
        node_s += wait_s
        sent_s, taken_s = node_s, node_s + there_s
        node_s = taken_s + back_s
        offset = better_offset(offset, measured_offset(sent_s, head_clock(taken_s), node_s))
    assert offset is not None
    moment_s = node_s + later_s

    error_s = abs(moment_s + offset.offset_s - head_clock(moment_s))
    assert error_s <= offset.error_at(moment_s) + ROUNDING_S


def test_the_exchange_with_the_least_round_trip_tells_most() -> None:
    """Until the clocks may have run further apart than a slower one is off."""
    fast = measured_offset(0.0, 5.0, 0.001)
    slow = measured_offset(0.5, 6.0, 1.0)
    later = measured_offset(1000.0, 1005.0, 1001.0)

    assert better_offset(fast, slow) is fast
    assert better_offset(slow, fast) is fast
    assert better_offset(fast, later) is later
    assert better_offset(None, slow) is slow


def test_one_clock_is_never_off() -> None:
    assert (NO_OFFSET.offset_s, NO_OFFSET.error_at(1e9)) == (0.0, 0.0)
