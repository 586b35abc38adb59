"""What is predicted of a plan, whatever its routes are."""

from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

from helpers.jobs import template
from helpers.plan_examples import random_plan, rerouted_plan
from helpers.recorder_messages import report as iteration_done
from helpers.strategies import layer_profile, model_profile
from planaria.core.plan import ModelProfile, Plan
from planaria.estimator.peak_memory import peak_bytes
from planaria.job.predictions import Prediction, predicted_peak_bytes, prediction
from planaria.job.report import epoch_records
from planaria.observe.measurements import EpochMeasurements
from planaria.planner.plans import plan_of_templates
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import best_reroute
from planaria.planner.reroute.shadows import with_shadows

NUM_MICROBATCHES = 9


def profile() -> ModelProfile:
    """Ten layers, none like the next."""
    return model_profile(
        tuple(
            layer_profile(
                f"layer {i}",
                0.01 * (i + 1),
                parameter_bytes=1000 + 70 * i,
                activation_bytes=300 + 11 * i,
            )
            for i in range(10)
        )
    )


PROBLEM = Problem(
    profile=profile(),
    devices_per_node=1,
    num_microbatches=NUM_MICROBATCHES,
    failures_tolerated=1,
    is_deterministic=True,
)
SIZES = (4, 3)
PLAN = plan_of_templates(PROBLEM, [template(size) for size in SIZES], range(7), epoch=0)


def test_of_plain_pipelines_each_rank_holds_what_equation_14_says() -> None:
    """Counted on the schedule itself, in closed form there: in flight are min(N_b, S - i)."""
    found = prediction(PROBLEM, PLAN).peak_bytes
    expected: list[int] = []
    for pipeline in PLAN.pipelines:
        expected += peak_bytes(
            PROBLEM.profile,
            pipeline.template,
            num_microbatches=PLAN.routes.count(pipeline.route()),
            gradient_copies=PROBLEM.gradient_copies,
        )

    assert dict(enumerate(expected)) == found
    assert predicted_peak_bytes(PROBLEM, PLAN) == max(expected)


def test_around_an_empty_place_a_rank_holds_what_its_detours_bring() -> None:
    """More microbatches than its own pipeline has; of who is gone nothing is said."""
    broken = replace(PLAN, epoch=1, gone=(1,))
    priced = best_reroute(PROBLEM, broken)
    assert priced is not None

    found = prediction(PROBLEM, priced.plan)

    assert set(found.peak_bytes) == set(PLAN.ranks) - {1}
    assert found.timeline.iteration_s == pytest.approx(priced.iteration_s)


def test_the_largest_peak_is_that_of_the_schedule_for_any_plan() -> None:
    """It is computed without one. A launcher that made schedule and timeline at each decision stood
    still meanwhile, with 64,000 hops for longer than a lease."""
    for seed in range(100):
        rng = Random(seed)
        plan = replace(random_plan(rng), splits_backward=rng.random() < 0.5)
        if rng.random() < 0.5:
            plan = rerouted_plan(plan, rng)
        elif plan.devices_per_node == 1:
            plan = with_shadows(plan)
        layers = tuple(
            layer_profile(
                f"layer {index}",
                0.01,
                device_counts=(1, 2, 3, 4),
                parameter_bytes=rng.randint(1, 9),
                activation_bytes=rng.randint(0, 99),
                output_bytes=rng.randint(0, 9),
            )
            for index in range(plan.num_layers)
        )
        problem = replace(
            PROBLEM, profile=model_profile(layers), devices_per_node=plan.devices_per_node
        )

        peak_bytes_of = prediction(problem, plan).peak_bytes
        assert predicted_peak_bytes(problem, plan) == max(peak_bytes_of.values()), f"seed {seed}"


def test_the_largest_peak_needs_no_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a schedule that is complete and validated: these take most of the time."""
    largest = max(prediction(PROBLEM, PLAN).peak_bytes.values())
    monkeypatch.delattr("planaria.job.predictions.predicted_timeline")
    monkeypatch.delattr("planaria.job.predictions.plan_schedule")

    assert predicted_peak_bytes(PROBLEM, PLAN) == largest


def test_silent_members_are_left_out() -> None:
    """A plan in the middle of a join has ranks that compute nothing; it can be predicted."""
    silent = replace(PLAN, silent={7: (0, 1)})

    assert prediction(PROBLEM, silent).timeline == prediction(PROBLEM, PLAN).timeline
    assert predicted_peak_bytes(PROBLEM, silent) == predicted_peak_bytes(PROBLEM, PLAN)


def test_factors_multiply_seconds_and_leave_bytes() -> None:
    """Links and memory are not what ranks tell the seconds of."""
    factors = (2.0,) * 10
    plain, doubled = prediction(PROBLEM, PLAN), prediction(PROBLEM, PLAN, layer_factors=factors)

    assert doubled.peak_bytes == plain.peak_bytes
    for rank in PLAN.ranks:
        assert doubled.timeline.busy_s(rank) == pytest.approx(2.0 * plain.timeline.busy_s(rank))


@pytest.mark.parametrize(("factors", "expected"), [((), 1), ((2.0,) * 10, 2)])
def test_a_report_predicts_each_plan_once_as_profiled_and_once_as_corrected(
    monkeypatch: pytest.MonkeyPatch, factors: tuple[float, ...], expected: int
) -> None:
    """It did so three times, which took minutes at 1,000 ranks and many epochs."""
    measured = EpochMeasurements(PLAN, [(0, ()), (3, factors)])
    for rank in PLAN.ranks:
        done = structs.replace(iteration_done(rank, 4), tensor_bytes=7)
        measured.add(done)
    calls = []

    def counted(problem: Problem, plan: Plan, **options: tuple[float, ...]) -> Prediction:
        calls.append(options)
        return prediction(problem, plan, **options)

    monkeypatch.setattr("planaria.job.report.prediction", counted)
    actions, memory = epoch_records(PROBLEM, 6, measured, has_bytes=True)

    assert len(calls) == expected
    assert [(each.epoch, each.rank) for each in memory] == [(6, rank) for rank in PLAN.ranks]
    assert [each.predicted_bytes for each in memory] == [
        prediction(PROBLEM, PLAN).peak_bytes[rank] for rank in PLAN.ranks
    ]
    assert {each.kind for each in actions} == {"F", "B"}
    for each in actions:
        assert each.corrected_s == pytest.approx(expected * each.predicted_s)
    assert epoch_records(PROBLEM, 6, measured, has_bytes=False)[1] == ()
    assert epoch_records(PROBLEM, 6, EpochMeasurements(PLAN, []), has_bytes=True) == ((), ())
