"""The time of a plan as the planner looks it up, against the estimator's run of its schedule."""

import random
from dataclasses import replace

import pytest

from helpers.exhaustive import all_shapes, small_problem, template_of
from planaria.core.plan import Link, ModelProfile, PipelineTemplate, TiedParameters, plain_plan
from planaria.estimator.reductions import Reductions, equal_reduce_s
from planaria.estimator.time import predicted_timeline
from planaria.planner.problem import Problem
from planaria.planner.times import PlainTimes, pipelines_of
from planaria.schedule.buckets import buckets_of
from planaria.schedule.lower import plan_schedule

SEED = 20_261_121


def random_problem(rng: random.Random) -> Problem:
    """Some share a parameter between the first and the last layer."""
    problem, _ = small_problem(rng)
    layers = problem.profile.layers
    num_bytes = min(layers[0].parameter_bytes, layers[-1].parameter_bytes)
    tied = (TiedParameters((0, len(layers) - 1), num_bytes),) if rng.random() < 0.5 else ()
    profile = replace(problem.profile, device_memory_bytes=0, tied=tied)
    return replace(problem, profile=profile, is_deterministic=rng.random() < 0.5)


def random_templates(rng: random.Random, problem: Problem) -> list[PipelineTemplate]:
    """Of at most 16 devices: it takes ten seconds to list all partitions on 24."""
    found = []
    for num_nodes in range(1, min(3, 16 // problem.devices_per_node) + 1):
        shapes = all_shapes(problem, num_nodes)
        found += [template_of(rng.choice(shapes), num_nodes) for _ in range(2) if shapes]
    return found


@pytest.mark.parametrize("number", [40, pytest.param(100, marks=pytest.mark.long)])
def test_the_time_of_a_plan_is_that_of_its_schedule(number: int) -> None:
    """Pipelines of any depth, stages of several devices, tied parameters, float64 sums."""
    rng = random.Random(SEED)
    num_cases = 0
    while num_cases < number:
        problem = random_problem(rng)
        templates = random_templates(rng, problem)
        if not templates:
            continue
        num_cases += 1
        chosen = [rng.choice(templates) for _ in range(rng.randint(1, 4))]
        microbatches = tuple(rng.randint(1, 9) for _ in chosen)
        nodes = range(sum(template.num_nodes for template in chosen))
        plan = plain_plan(0, pipelines_of(chosen, nodes), microbatches)

        times = PlainTimes(replace(problem, num_microbatches=sum(microbatches)), templates)

        expected = predicted_timeline(
            plan_schedule(plan, tied=problem.profile.tied),
            problem.profile,
            plan=plan,
            reduce_bytes_factor=problem.reduce_bytes_factor,
        )
        found_s = times.iteration_s(chosen, microbatches)
        where = f"seed {SEED}, case {num_cases}"
        assert found_s == pytest.approx(expected.iteration_s, rel=1e-9), where
        found = times.bubble_share(chosen, microbatches)
        assert found == pytest.approx(expected.bubble_share, abs=1e-9), where


@pytest.mark.parametrize("number", [12, pytest.param(30, marks=pytest.mark.long)])
def test_reductions_of_an_iteration_are_those_of_its_schedule(number: int) -> None:
    """When each of them starts and ends; in the iteration's time they are only the last ones."""
    rng = random.Random(SEED)
    for case in range(number):
        problem = random_problem(rng)
        templates = random_templates(rng, problem)
        microbatches = tuple(rng.randint(1, 9) for _ in templates)
        nodes = range(sum(template.num_nodes for template in templates))
        plan = plain_plan(0, pipelines_of(templates, nodes), microbatches)
        timeline = predicted_timeline(
            plan_schedule(plan, tied=problem.profile.tied),
            problem.profile,
            plan=plan,
            reduce_bytes_factor=problem.reduce_bytes_factor,
        )
        spans = {
            span.action.bucket: (span.start_s, span.end_s)
            for span in timeline.spans
            if span.lane == "reduce"
        }

        times = PlainTimes(replace(problem, num_microbatches=sum(microbatches)), templates)

        found = times.iteration(templates, microbatches).reductions
        where = f"seed {SEED}, case {case}"
        assert len(found) == len(spans), where
        for index, reduction in enumerate(found):
            assert (reduction.start_s, reduction.end_s) == pytest.approx(spans[index]), where


def with_far_link(profile: ModelProfile) -> ModelProfile:
    """The profile with a link between failure domains that is ten times as slow."""
    near = profile.links["inter_node"]
    far = Link(10.0 * near.latency_s, near.bandwidth_bytes_per_s / 10.0)
    return replace(profile, links={**profile.links, "inter_domain": far})


def test_gradients_are_summed_over_links_between_failure_domains() -> None:
    """Pipelines lie within them, so what stages send one another does not get slower."""
    rng = random.Random(SEED)
    problem = random_problem(rng)
    template = next(iter(random_templates(rng, problem)))

    def reduce_s(profile: ModelProfile, num_pipelines: int) -> float:
        return sum(equal_reduce_s(profile, template, num_pipelines=num_pipelines, bytes_factor=1.0))

    far = with_far_link(problem.profile)
    assert reduce_s(far, 2) == pytest.approx(10.0 * reduce_s(problem.profile, 2))
    assert reduce_s(far, 1) == pytest.approx(reduce_s(problem.profile, 1))


def test_reductions_among_equal_pipelines_are_those_of_their_buckets() -> None:
    """By stage, the sum of the buckets that its ranks take part in; also where pipelines lie in
    different failure domains."""
    rng = random.Random(SEED)
    for case in range(25):
        problem = random_problem(rng)
        if case % 2:
            problem = replace(problem, profile=with_far_link(problem.profile))
        for template in random_templates(rng, problem):
            num_pipelines = rng.randint(1, 4)
            nodes = range(num_pipelines * template.num_nodes)
            plan = plain_plan(
                0, pipelines_of([template] * num_pipelines, nodes), (1,) * num_pipelines
            )
            reductions = Reductions(problem.profile, plan, bytes_factor=1.5)
            expected = [0.0] * len(template.stages)
            for bucket in buckets_of(plan, tied=problem.profile.tied):
                for index in range(len(template.stages)):
                    if plan.pipelines[0].stage_ranks(index)[0] in bucket.ranks:
                        expected[index] += reductions.seconds(bucket)

            found = equal_reduce_s(
                problem.profile, template, num_pipelines=num_pipelines, bytes_factor=1.5
            )

            assert found == pytest.approx(expected), f"seed {SEED}, case {case}"
