"""Schedules in virtual time where ranks share processors: by hand, and what must hold of any."""

from dataclasses import replace
from itertools import product
from math import isclose
from random import Random

import pytest

from estimator.test_time import SEED, layer, model, random_profile
from helpers.plan_examples import pipeline, random_plan, rerouted_plan
from planaria.core.plan import Link, ModelProfile, NodeKind, Plan, plain_plan
from planaria.errors import DeadlockError
from planaria.estimator import sharing, time
from planaria.estimator.sharing import Costs, Times, last_end_s
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.schedule.action import Schedule, parse_schedule
from planaria.schedule.lower import plan_schedule

FREE = Link(0.0, float("inf"))


@pytest.fixture(autouse=True)
def _no_more_than_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "RANK_ITERATION_S", 0.0)


def timeline(plan: Plan, profile: ModelProfile, *, processors: int) -> Timeline:
    schedule = plan_schedule(plan, tied=profile.tied)
    return predicted_timeline(schedule, profile, plan=plan, processors=processors)


def spans(predicted: Timeline) -> dict[tuple[int, str], tuple[float, float]]:
    """When each action starts and ends, by rank and text."""
    return {(span.rank, str(span.action)): (span.start_s, span.end_s) for span in predicted.spans}


def computing_s(predicted: Timeline) -> float:
    """Of all ranks."""
    return sum(span.end_s - span.start_s for span in predicted.spans if span.lane == "compute")


def random_job(seed: int) -> tuple[Plan, ModelProfile]:
    rng = Random(seed)
    plan = random_plan(rng)
    plan = rerouted_plan(plan, rng) if rng.random() < 0.5 else plan
    return plan, random_profile(rng, plan.num_layers)


def test_two_ranks_on_one_processor_take_twice_as_long() -> None:
    """Nobody waits for anybody: each forward and backward goes on at half its speed."""
    plan = plain_plan(0, (pipeline((0, 1), (0,)), pipeline((0, 1), (1,))), (1, 1))

    shared = timeline(plan, model((layer(1.0, 2.0),)), processors=1)

    span_of = spans(shared)
    assert (0.0, 2.0) == span_of[0, "0F0"] == span_of[1, "0F1"]
    assert (2.0, 6.0) == span_of[0, "0B0"] == span_of[1, "0B1"]
    assert shared.iteration_s == 6.0


def test_a_rank_that_waits_leaves_its_share_to_the_others() -> None:
    """Three ranks, of which two at most are at work at a time; traced by hand."""
    pipelines = (pipeline((0, 1, 2), (0, 1)), pipeline((0, 2), (2,)))
    plan = plain_plan(0, pipelines, (1, 1))
    profile = model((layer(2.0, 2.0), layer(1.0, 1.0)))

    span_of = spans(timeline(plan, profile, processors=2))
    alone = spans(timeline(plan, profile, processors=1))

    assert span_of[0, "0F0"] == (0.0, 2.0)
    assert span_of[2, "0F1"] == (0.0, 3.0)
    assert span_of[1, "1F0"] == (2.0, 3.0)
    assert span_of[1, "1B0"] == (3.0, 4.0)
    assert span_of[0, "0B0"] == (4.0, 6.0)
    assert span_of[2, "0B1"] == (3.0, 6.0)
    # On one processor: two at half their speed until 0F0 is done, when 0F1 has 1 s left.
    assert alone[0, "0F0"] == (0.0, 4.0)
    assert alone[1, "1F0"] == (4.0, 6.0) == (alone[0, "0F0"][1], alone[2, "0F1"][1])


def test_a_reduction_keeps_threads_of_all_its_ranks_busy() -> None:
    """12 s of it by two ranks, with two threads each, on one processor: four times as long."""
    plan = plain_plan(0, (pipeline((0, 1), (0,)), pipeline((0, 1), (1,))), (1, 1))
    profile = model((layer(1.0, 2.0, parameter_bytes=12),), inter_node=Link(0.0, 1.0))

    shared = timeline(plan, profile, processors=1)

    assert sharing.RANK_THREADS == 2
    assert spans(shared)[0, "R0"] == (6.0, 6.0 + 4 * 12.0)
    assert shared.iteration_s == 54.0


def test_a_slow_node_leaves_the_processor_to_others_while_it_is_slow() -> None:
    """At half its speed: 1 s of work, at half of the processor, and as long again asleep."""
    slow = pipeline((0, 1), (0,))
    slow = replace(slow, template=replace(slow.template, kinds=(NodeKind(speed=0.5),)))
    plan = plain_plan(0, (slow, pipeline((0, 1), (1,))), (1, 1))

    span_of = spans(timeline(plan, model((layer(1.0, 1.0),)), processors=1))

    assert span_of[0, "0F0"] == (0.0, 4.0)
    assert span_of[1, "0F1"] == (0.0, 2.0)
    assert span_of[1, "0B1"] == (2.0, 3.0)  # Nobody else is at work.
    assert span_of[0, "0B0"] == (4.0, 6.0)


def test_steps_of_the_optimizer_share_the_processors_at_the_end() -> None:
    """1 s on each rank of an iteration of 6 s; without shared processors they are in no price."""
    plan = plain_plan(0, (pipeline((0, 1), (0,)), pipeline((0, 1), (1,))), (1, 1))
    profile = model((replace(layer(1.0, 2.0), update_s={1: 1.0, 2: 0.5}),))

    assert timeline(plan, profile, processors=1).iteration_s == 6.0 + 2.0
    assert timeline(plan, profile, processors=2).iteration_s == 3.0 + 1.0
    assert timeline(plan, profile, processors=0).iteration_s == 3.0


def test_a_rank_steps_the_layers_that_it_keeps_for_its_neighbour() -> None:
    """Each of two ranks steps its own layer and that of the other: 2 s more on each than alone."""
    profile = model((replace(layer(1.0, 2.0), update_s={1: 1.0}),) * 2)
    plan = plain_plan(0, (pipeline((0, 1, 2), (0, 1)),), (1,))
    without = timeline(plan, profile, processors=2).iteration_s

    kept = replace(plan, shadows={0: (1,), 1: (0,)})
    assert timeline(kept, profile, processors=2).iteration_s == without + 1.0


def test_each_rank_that_shares_takes_some_time_beside_its_actions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.25 s on each of two ranks, which one processor takes one after the other."""
    monkeypatch.setattr(time, "RANK_ITERATION_S", 0.25)
    plan = plain_plan(0, (pipeline((0, 1), (0,)), pipeline((0, 1), (1,))), (1, 1))
    profile = model((layer(1.0, 2.0),))

    assert timeline(plan, profile, processors=1).iteration_s == 6.0 + 0.5
    assert timeline(plan, profile, processors=2).iteration_s == 3.0


@pytest.mark.parametrize(
    ("works_s", "processors", "ends_s"),
    [((), 1, 0.0), ((1.0, 3.0), 1, 4.0), ((1.0, 3.0), 2, 3.0), ((2.0, 2.0, 2.0), 2, 3.0)],
)
def test_works_that_begin_together_end_when_their_sum_is_done(
    works_s: tuple[float, ...], processors: int, ends_s: float
) -> None:
    """Or with the longest, if it is left alone before that."""
    assert last_end_s(works_s, processors=processors) == ends_s


def _on_many_processors(schedule: Schedule, costs: Costs, *, processors: int) -> Times:
    """The run for ranks that share, with more processors than there are threads."""
    return sharing.shared_times(schedule, costs, processors=processors << 20)


def test_with_a_processor_for_each_thread_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start and end is that of ranks that share nothing, also on links that queue, around
    lost nodes and on slow ones; so it is by the run for ranks that do share."""
    for seed in range(SEED, SEED + 100):
        plan, profile = random_job(seed)
        schedule = plan_schedule(plan, tied=profile.tied)
        own = predicted_timeline(schedule, profile, plan=plan)
        enough = predicted_timeline(schedule, profile, plan=plan, processors=len(plan.ranks))
        with monkeypatch.context() as patch:
            patch.setattr("planaria.estimator.time.shared_times", _on_many_processors)
            shared = predicted_timeline(schedule, profile, plan=plan, processors=1)

        assert enough == own, f"seed {seed}"
        for own_span, shared_span in zip(own.spans, shared.spans, strict=True):
            assert own_span[:3] == shared_span[:3], f"seed {seed}"
            assert isclose(own_span.start_s, shared_span.start_s, abs_tol=1e-9), (
                f"seed {seed}: {own_span} {shared_span}"
            )
            assert isclose(own_span.end_s, shared_span.end_s, abs_tol=1e-9), (
                f"seed {seed}: {own_span} {shared_span}"
            )
        assert isclose(own.iteration_s, shared.iteration_s), f"seed {seed}"


def test_one_processor_takes_the_sum_of_all_work() -> None:
    """It never idles where messages take no time: whatever plan, the same seconds."""
    for seed in range(SEED, SEED + 100):
        plan, profile = random_job(seed)
        plan = replace(
            plan,
            pipelines=tuple(
                replace(p, template=replace(p.template, kinds=())) for p in plan.pipelines
            ),
        )
        profile = replace(profile, links={"intra_node": FREE, "inter_node": FREE})
        work_s = computing_s(timeline(plan, profile, processors=0))

        assert isclose(timeline(plan, profile, processors=1).iteration_s, work_s), f"seed {seed}"


def test_no_iteration_is_faster_than_its_work_or_than_ranks_that_share_nothing() -> None:
    """And with more processors none is slower."""
    for seed, processors in product(range(SEED, SEED + 30), (1, 2, 3)):
        plan, profile = random_job(seed)
        own = timeline(plan, profile, processors=0)
        shared = timeline(plan, profile, processors=processors)
        more = timeline(plan, profile, processors=processors + 1)

        assert shared.iteration_s >= own.iteration_s * (1 - 1e-9), f"seed {seed}"
        assert more.iteration_s <= shared.iteration_s * (1 + 1e-9), f"seed {seed}"


def test_a_schedule_that_cannot_finish_has_no_shared_timeline() -> None:
    """As where ranks share nothing."""
    plan = plain_plan(0, (pipeline((0, 1, 2), (0, 1)),), (1,))
    schedule = parse_schedule("0: 0F0 0RB0 0B0 0SF0\n1: 1RF0 1F0 1B0 1SB0", plan.routes)

    with pytest.raises(DeadlockError):
        predicted_timeline(schedule, model((layer(1.0, 2.0),) * 2), plan=plan, processors=1)
