"""Plans, against every multiset and every distribution there is."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.strategies import equal_problem, planned_problems, problems
from planaria.core.plan import PipelineTemplate, Plan, Stage, one_device_profile
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.planner.layout.instantiate import instantiations
from planaria.planner.layout.sets import distribute_microbatches
from planaria.planner.plans import (
    best_plan,
    pipeline_microbatches,
    plan_iteration_s,
    plan_of_templates,
)
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_template, pipeline_templates
from planaria.planner.times import PlainTimes
from planaria.profiles.shipped import shipped_profiles

Planned = tuple[Problem, dict[int, PipelineTemplate], Plan]


@settings(max_examples=40)
@given(problems(), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_distribution_has_the_lowest_makespan_of_all(problem: Problem, sizes: list[int]) -> None:
    """Against every distribution: equation 6 as a min-max over exact makespans."""
    found = [pipeline_template(problem, size) for size in sizes]
    templates = [template for template in found if template is not None]
    total = problem.num_microbatches
    times = PlainTimes(problem)
    if not templates or total < len(templates):
        return

    def slowest_s(counts: tuple[int, ...]) -> float:
        pairs = zip(templates, counts, strict=True)
        ends = [times.ends_by_count_s(t, num_pipelines=len(templates))[n - 1] for t, n in pairs]
        return float(max(ends))

    everything = [
        counts
        for counts in product(range(1, total + 1), repeat=len(templates))
        if sum(counts) == total
    ]
    counts = distribute_microbatches(problem, templates, times=times)

    assert counts in everything
    assert min(map(slowest_s, everything)) == slowest_s(counts)


def test_too_few_microbatches_are_refused_with_the_batch_that_works() -> None:
    """The batch size is the user's: it is never changed, the nearest that works is named."""
    problem = equal_problem(num_microbatches=2)
    template = PipelineTemplate((Stage(0, 6, 1),), 1)

    with pytest.raises(InfeasibleError) as caught:
        distribute_microbatches(problem, [template] * 3, times=PlainTimes(problem))

    assert (caught.value.limit, caught.value.value) == (Limit.MICROBATCHES, 2)
    assert caught.value.remedies == (FeasibleValue(Limit.MICROBATCHES, 3),)
    enough = equal_problem(num_microbatches=3)
    counts = distribute_microbatches(enough, [template] * 3, times=PlainTimes(enough))
    assert counts == (1, 1, 1)


@settings(max_examples=40)
@given(planned_problems())
def test_best_plan_uses_every_node_and_no_instantiation_is_faster(
    planned_problems: Planned,
) -> None:
    """Each node once, f + 1 pipelines, all microbatches; and each alternative is priced, with its
    reductions."""
    problem, templates, plan = planned_problems
    num_nodes = len(plan.nodes)
    sizes = tuple(templates)

    assert len(set(plan.nodes)) == num_nodes
    assert len(plan.pipelines) >= problem.failures_tolerated + 1
    assert len(plan.routes) == problem.num_microbatches == sum(pipeline_microbatches(plan))
    assert min(pipeline_microbatches(plan)) >= 1
    times = PlainTimes(problem)
    others = instantiations(num_nodes, sizes, min_pipelines=problem.failures_tolerated + 1)
    times_s = [
        plan_iteration_s(
            plan_of_templates(problem, [templates[n] for n in other], range(num_nodes), epoch=0),
            times,
        )
        for other in others
        if len(other) <= problem.num_microbatches
    ]
    assert plan_iteration_s(plan, times) == min(times_s)


def test_best_plan_depends_on_the_set_of_nodes_only() -> None:
    """Every coordinator that sees the same survivors must write the same plan."""
    problem = equal_problem(num_layers=5)
    templates = pipeline_templates(problem, 5)
    reverse = dict(reversed(templates.items()))

    expected = best_plan(problem, (1, 4, 6, 7, 9), templates, epoch=3)

    assert expected == best_plan(problem, (9, 4, 1, 7, 6), reverse, epoch=3)
    assert expected.epoch == 3


def test_bind_gives_nodes_to_templates_in_order() -> None:
    """A test that needs a certain shape gets exactly that shape."""
    problem = equal_problem()
    templates = pipeline_templates(problem, 5)

    plan = plan_of_templates(problem, [templates[3], templates[2]], (4, 2, 0, 1, 3), epoch=1)

    assert [pipeline.nodes for pipeline in plan.pipelines] == [(4, 2, 0), (1, 3)]
    assert sum(pipeline_microbatches(plan)) == 16


def test_larger_pipelines_get_more_microbatches() -> None:
    """Heterogeneous pipelines end together only if work follows their speed."""
    problem = equal_problem()
    templates = pipeline_templates(problem, 5)

    pair = [templates[1], templates[3]]
    small, large = distribute_microbatches(problem, pair, times=PlainTimes(problem))

    assert small < large


def test_nodes_that_no_templates_make_up_are_refused_with_the_nearest_number() -> None:
    """Five nodes cannot be pipelines of three; three, or six, could."""
    problem = equal_problem(failures_tolerated=0)
    template = pipeline_template(problem, 3)
    assert template is not None

    with pytest.raises(InfeasibleError) as caught:
        best_plan(problem, range(5), {3: template}, epoch=0)

    assert (caught.value.limit, caught.value.value) == (Limit.NODES, 5)
    assert caught.value.remedies == (FeasibleValue(Limit.NODES, 6),)


def test_nodes_that_only_too_many_pipelines_use_are_refused_with_the_batch_that_works() -> None:
    """With templates of one node only, four nodes need four microbatches."""
    problem = equal_problem(num_layers=1, num_microbatches=3)
    templates = pipeline_templates(problem, 4)

    with pytest.raises(InfeasibleError) as caught:
        best_plan(problem, range(4), templates, epoch=0)

    assert (caught.value.limit, caught.value.value) == (Limit.MICROBATCHES, 3)
    assert caught.value.remedies == (FeasibleValue(Limit.MICROBATCHES, 4),)


def test_no_equal_pipelines_are_faster_than_the_best_plan() -> None:
    """Of 32 nodes, with templates of 3 nodes and more: too many sets for each to be priced."""
    profile = one_device_profile(next(p for p in shipped_profiles() if p.model == "llama2-7b"))
    problem = Problem(
        profile=profile, devices_per_node=1, num_microbatches=128, failures_tolerated=1
    )
    templates = {n: t for n, t in pipeline_templates(problem, 32).items() if n >= 3}
    times = PlainTimes(problem)

    best_s = plan_iteration_s(best_plan(problem, tuple(range(32)), templates, epoch=0), times)

    for num_nodes in (4, 8, 16):
        alike = [templates[num_nodes]] * (32 // num_nodes)
        equal = plan_of_templates(problem, alike, range(32), epoch=0)
        assert best_s <= plan_iteration_s(equal, times)
