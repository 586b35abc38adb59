"""The closed forms by which the search for fast partitions chooses what it times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.estimator.makespan import StageSeconds, makespan_s, stage_table
from planaria.planner.partition.refine import least_s, steady_period_s

SECONDS = st.integers(0, 9).map(float)


@st.composite
def stages(draw: st.DrawFn) -> StageSeconds:
    """One to six stages of whole seconds, whose sums are exact."""
    num_stages = draw(st.integers(1, 6))

    def some(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=count, max_size=count)))

    return StageSeconds(
        forward_s=some(num_stages),
        backward_s=some(num_stages),
        transfer_s=some(num_stages - 1),
        latency_s=some(num_stages - 1),
    )


@settings(max_examples=200)
@given(stages(), st.integers(1, 20))
def test_what_is_not_timed_is_never_faster_than_its_closed_form(
    seconds: StageSeconds, num_microbatches: int
) -> None:
    """A partition is passed over where this alone is more than the best few take."""
    least = float(least_s(stage_table([seconds]), num_microbatches)[0])

    assert least <= makespan_s(seconds, num_microbatches)


@settings(max_examples=100)
@given(stages())
def test_many_microbatches_end_at_the_rate_of_the_slowest_cycle(seconds: StageSeconds) -> None:
    """That is how few microbatches that are simulated speak for many that are not."""
    few, turns = 40, 60  # A multiple of all numbers of stages that a cycle may have.
    lasts_s = makespan_s(seconds, few + turns) - makespan_s(seconds, few)

    assert lasts_s == pytest.approx(turns * float(steady_period_s(stage_table([seconds]))[0]))
