"""Eager forwards of shadowed layers: where they stand, and what they cost."""

from dataclasses import replace

import pytest

from helpers.jobs import NUM_LAYERS, shaped_plan
from helpers.strategies import layer_profile, model_profile
from planaria.errors import ScheduleError
from planaria.estimator.time import predicted_timeline
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import expected_times
from planaria.planner.reroute.shadows import with_shadows
from planaria.schedule.action import Kind, Schedule, format_schedule, parse_schedule
from planaria.schedule.lower import place_transfers, plan_schedule, rank_schedule, validate
from planaria.schedule.redundant import place_shadows
from planaria.schedule.routed import routed_1f1b

PLAN = shaped_plan((3,), 4)


def test_eager_forwards_stand_where_a_rank_may_wait() -> None:
    """Before a receive, the oldest first; the last stage has no hop behind it."""
    plan = shaped_plan((3,), 3)
    schedule = place_shadows(place_transfers(routed_1f1b(plan)), with_shadows(plan))
    drawn = """
0: 0F0 0SF0 0F1 0SF1 0F2 0SF2 1E0 0RB0 0B0 1E1 0RB1 0B1 1E2 0RB2 0B2
1: 1RF0 1F0 1SF0 2E0 1RF1 1F1 1SF1 2E1 1RB0 1B0 1SB0 1RF2 1F2 1SF2 2E2 1RB1 1B1 1SB1 1RB2 1B2 1SB2
2: 2RF0 2F0 2B0 2SB0 2RF1 2F1 2B1 2SB1 2RF2 2F2 2B2 2SB2
"""

    assert parse_schedule(drawn, plan.routes) == schedule


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 4), (1, 5)])
def test_every_shadowed_hop_is_computed_once(sizes: tuple[int, ...], splits_backward: bool) -> None:
    """In whole schedules, which are valid, and in a rank's own part of them."""
    plan = replace(with_shadows(shaped_plan(sizes, 6)), splits_backward=splits_backward)
    schedule = plan_schedule(plan)

    found = {
        (action.microbatch, action.hop): rank
        for rank, actions in schedule.actions.items()
        for action in actions
        if action.kind is Kind.SHADOW
    }
    assert found == {
        (microbatch, hop): route[hop - 1].rank
        for microbatch, route in enumerate(plan.routes)
        for hop in range(1, len(route))
    }
    for rank in plan.ranks:
        assert rank_schedule(plan, rank).actions[rank] == schedule.actions[rank]
    assert parse_schedule(format_schedule(schedule), plan.routes, schedule.buckets) == schedule


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("0F0 0SF0", "1E0 0F0 0SF0", "needs 0F0 before it"),
        ("0RB3 0B3", "0RB3 0B3 1E3", "stands twice"),
        ("1E3 0RB3 0B3", "0RB3 0B3 1E3", "has no output to begin with"),
        ("1E3", "2E3", "belongs to the rank of the hop before"),
    ],
)
def test_an_eager_forward_that_cannot_run_is_refused(before: str, after: str, why: str) -> None:
    schedule = place_shadows(place_transfers(routed_1f1b(PLAN)), with_shadows(PLAN))
    text = format_schedule(schedule)
    assert before in text
    wrong = parse_schedule(text.replace(before, after, 1), PLAN.routes)

    with pytest.raises(ScheduleError, match=why):
        validate(wrong, NUM_LAYERS)


def test_an_iteration_with_eager_forwards_is_predicted_longer() -> None:
    """Odyssey's Table I has 9.5 to 20 percent for it; here stages are equal and bubbles few."""
    profile = model_profile(tuple(layer_profile(f"{i}", 0.01) for i in range(NUM_LAYERS)))
    plan = with_shadows(shaped_plan((2, 2), 16))

    def seconds(schedule: Schedule) -> float:
        return predicted_timeline(schedule, profile, plan=plan).iteration_s

    plain, eager = plan_schedule(replace(plan, shadows={})), plan_schedule(plan)
    assert seconds(plain) < seconds(eager) < 1.5 * seconds(plain)
    busy = predicted_timeline(eager, profile, plan=plan).busy_s(0)
    forwards = 8 * sum(profile.layers[x].forward_s[1] for x in plan.layers_by_rank[1])
    assert busy == pytest.approx(predicted_timeline(plain, profile, plan=plan).busy_s(0) + forwards)


@pytest.mark.parametrize("processors", [1, 2])
def test_expected_seconds_of_a_rank_are_without_eager_forwards(processors: int) -> None:
    """So they compare with what it measures: eager forwards are measured by themselves."""
    profile = model_profile(tuple(layer_profile(f"{n}", 0.1) for n in range(NUM_LAYERS)))
    problem = Problem(
        profile=profile,
        devices_per_node=1,
        num_microbatches=4,
        failures_tolerated=1,
        processors=processors,
    )
    plan = with_shadows(PLAN)
    schedule = plan_schedule(plan)
    timeline = predicted_timeline(schedule, profile, plan=plan, processors=processors)
    own_s = {
        rank: sum(
            span.end_s - span.start_s
            for span in timeline.spans
            if span.rank == rank and str(span.action.kind) in "FB"
        )
        for rank in plan.ranks
    }

    assert expected_times(problem, plan).computing_s == pytest.approx(own_s)
