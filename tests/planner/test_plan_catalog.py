"""Plans for every number of nodes that failures may leave."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.strategies import MEBIBYTE, equal_problem
from planaria.core.plan import PipelineTemplate, Stage
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.planner.layout.sets import distribute_microbatches
from planaria.planner.plans import (
    best_plan,
    foreseen_plans,
    lazy_plan_catalog,
    outline_of,
    outlined_plan,
    pipeline_microbatches,
    plan_catalog,
    plan_iteration_s,
)
from planaria.planner.templates import pipeline_templates, smallest_num_nodes


def _one_stage_each(num_layers: int, num_nodes: int) -> PipelineTemplate:
    ends = [num_layers * (i + 1) // num_nodes for i in range(num_nodes)]
    stages = (Stage(u, v, 1) for u, v in zip([0, *ends], ends, strict=False))
    return PipelineTemplate(tuple(stages), num_nodes)


@settings(max_examples=40)
@given(st.data())
def test_every_number_of_nodes_has_a_plan_with_all_of_them(data: st.DataObject) -> None:
    """f + 1 pipelines while they fit, then as many as do; every node works, down to n0."""
    memory_bytes = data.draw(st.sampled_from((0, 100, 60, 40))) * MEBIBYTE
    f = data.draw(st.integers(0, 3))
    problem = equal_problem(
        num_layers=9, failures_tolerated=f, device_memory_bytes=memory_bytes, num_microbatches=12
    )
    n0 = smallest_num_nodes(problem)
    num_nodes = (f + 1) * n0 + data.draw(st.integers(0, 4))
    templates = {n: t for n, t in pipeline_templates(problem, num_nodes).items() if n <= 9}

    catalog = plan_catalog(problem, num_nodes, templates)

    assert list(range(n0, num_nodes + 1)) == sorted(catalog.plans)
    for num_left, plan in catalog.plans.items():
        assert tuple(range(num_left)) == plan.nodes
        assert len(plan.pipelines) >= min(f + 1, num_left // n0)
        assert len(plan.routes) == 12 == sum(pipeline_microbatches(plan))
        if num_left >= (f + 1) * n0:
            assert best_plan(problem, range(num_left), catalog.templates, epoch=0) == plan
        assert outlined_plan(outline_of(plan), catalog.templates) == plan


def test_the_outlines_of_plans_do_not_grow_with_the_microbatches() -> None:
    """The coordinator of 1,000 machines was told gigabytes, each time that it was started."""
    problem = equal_problem(num_microbatches=2000)
    plans = plan_catalog(problem, 9, pipeline_templates(problem, 9)).plans
    outlines = {number: outline_of(plan) for number, plan in plans.items()}

    assert len(msgspec.json.encode(outlines)) < 100 * len(plans)
    assert len(msgspec.json.encode(plans)) > 100_000 * len(plans)


def test_templates_of_fewer_nodes_than_f_allows_are_added() -> None:
    """With N = (f + 1) * n0 there is one template, of n0; three nodes left need one of three."""
    problem = equal_problem(device_memory_bytes=80 * MEBIBYTE)
    templates = pipeline_templates(problem, 4)

    catalog = plan_catalog(problem, 4, templates)

    assert list(templates) == [2]
    assert {
        n: [len(pipeline.nodes) for pipeline in plan.pipelines] for n, plan in catalog.plans.items()
    } == {2: [2], 3: [3], 4: [2, 2]}


def test_nodes_beyond_what_any_template_uses_are_left_without_work() -> None:
    """Five nodes, three layers that need a node each: one pipeline, two idle, no job that ends."""
    problem = equal_problem(num_layers=3, device_memory_bytes=20 * MEBIBYTE, failures_tolerated=1)
    template = _one_stage_each(3, 3)

    catalog = plan_catalog(problem, 6, {3: template})

    working = {num_left: len(plan.nodes) for num_left, plan in catalog.plans.items()}
    assert working == {3: 3, 4: 3, 5: 3, 6: 6}


def test_a_batch_too_small_for_some_number_of_survivors_is_refused_at_the_start() -> None:
    """Four nodes are one pipeline, but three are three: better to hear it now than then."""
    problem = equal_problem(num_microbatches=2, failures_tolerated=0)
    templates = {n: _one_stage_each(6, n) for n in (1, 4)}

    with pytest.raises(InfeasibleError) as caught:
        plan_catalog(problem, 5, templates)

    assert (caught.value.limit, caught.value.value) == (Limit.MICROBATCHES, 2)
    assert "with 3 nodes" in caught.value.why
    assert caught.value.remedies == (FeasibleValue(Limit.MICROBATCHES, 3),)
    enough = equal_problem(num_microbatches=3, failures_tolerated=0)
    assert sorted(plan_catalog(enough, 5, templates).plans) == [1, 2, 3, 4, 5]


def test_distribution_is_that_of_the_planner_also_for_templates_not_planned_with() -> None:
    """A plan given by hand may have pipelines that no template made."""
    problem = equal_problem(failures_tolerated=0)
    catalog = plan_catalog(problem, 3, {n: _one_stage_each(6, n) for n in (1, 2)})
    templates = [catalog.templates[1], _one_stage_each(6, 3), catalog.templates[2]]

    iteration_s, microbatches = catalog.distribution(templates)

    assert distribute_microbatches(problem, templates, times=catalog.times) == microbatches
    two = catalog.plans[2]
    of_two = catalog.distribution([pipeline.template for pipeline in two.pipelines])
    assert (plan_iteration_s(two, catalog.times), pipeline_microbatches(two)) == of_two
    assert iteration_s < of_two[0]


@pytest.mark.parametrize("memory_mebibytes", [0, 80, 60, 40])
@pytest.mark.parametrize("f", [0, 1, 2])
def test_what_joins_make_is_planned_too(f: int, memory_mebibytes: int) -> None:
    """Up to max_nodes every number has a plan, in which all work; those of no more nodes than there
    are at the start are the same as if none could join, but for what is left below (f + 1) n0."""
    problem = equal_problem(
        num_layers=9, failures_tolerated=f, device_memory_bytes=memory_mebibytes * MEBIBYTE
    )
    n0 = smallest_num_nodes(problem)
    num_nodes = (f + 1) * n0 + 1

    without = plan_catalog(problem, num_nodes, pipeline_templates(problem, num_nodes))
    templates = pipeline_templates(problem, num_nodes, max_nodes=num_nodes + 5)
    catalog = plan_catalog(problem, num_nodes + 5, templates)

    assert list(catalog.plans) == list(range(n0, num_nodes + 6))
    for num_there, plan in catalog.plans.items():
        if num_there >= (f + 1) * n0:
            assert tuple(range(num_there)) == plan.nodes
            assert len(plan.pipelines) > f
            assert best_plan(problem, range(num_there), catalog.templates, epoch=0) == plan
            assert without.plans.get(num_there, plan) == plan
    foreseen = foreseen_plans(problem, num_nodes, templates, max_nodes=num_nodes + 5)
    assert sorted(foreseen.plans) == list(range(num_nodes - f, num_nodes + 6))
    for num_there, plan in foreseen.plans.items():
        assert catalog.plans[num_there] == plan


def test_a_batch_too_small_for_nodes_that_may_join_is_refused_at_the_start() -> None:
    """Six layers keep six nodes of a pipeline at work, so thirteen need three pipelines."""
    problem = equal_problem(num_microbatches=2)

    with pytest.raises(InfeasibleError) as caught:
        plan_catalog(problem, 13, pipeline_templates(problem, 5, max_nodes=13))

    assert "with 13 nodes" in caught.value.why
    assert caught.value.remedies == (FeasibleValue(Limit.MICROBATCHES, 3),)
    enough = replace(problem, num_microbatches=3)
    catalog = plan_catalog(enough, 13, pipeline_templates(enough, 5, max_nodes=13))
    assert len(catalog.plans[13].nodes) == 13


@settings(max_examples=25)
@given(st.data())
def test_foreseen_plans_are_those_of_the_plan_catalog(data: st.DataObject) -> None:
    """From all nodes down to f fewer; with more than eight failures eight numbers, 1 and f too."""
    memory_bytes = data.draw(st.sampled_from((0, 100, 60, 40))) * MEBIBYTE
    f = data.draw(st.sampled_from((0, 1, 2, 3, 8, 11)))
    problem = equal_problem(
        num_layers=9, failures_tolerated=f, device_memory_bytes=memory_bytes, num_microbatches=12
    )
    n0 = smallest_num_nodes(problem)
    num_nodes = (f + 1) * n0 + data.draw(st.integers(0, 4))
    templates = pipeline_templates(problem, num_nodes)

    foreseen = foreseen_plans(problem, num_nodes, templates)

    failures = [num_nodes - num_left for num_left in sorted(foreseen.plans, reverse=True)]
    expected = {11: [0, 1, 2, 3, 5, 6, 8, 9, 11]}.get(f, list(range(f + 1)))
    assert failures == expected
    catalog = plan_catalog(problem, num_nodes, templates)
    for num_left, plan in foreseen.plans.items():
        assert plan == catalog.plans[num_left]


def test_all_nodes_work_in_what_is_foreseen_before_failures() -> None:
    """As with `best_plan`; an idle node is a mistake that can be mended at the start."""
    problem = equal_problem(failures_tolerated=0)
    templates = {2: pipeline_templates(problem, 2)[2]}

    with pytest.raises(InfeasibleError) as raised:
        foreseen_plans(problem, 5, templates)

    assert raised.value.remedies == (FeasibleValue(Limit.NODES, 4),)


def test_plans_that_are_made_when_asked_for_are_those_of_the_catalog() -> None:
    """In any order, and for the same numbers of nodes."""
    problem = equal_problem(
        num_layers=9, device_memory_bytes=80 * MEBIBYTE, num_microbatches=12, failures_tolerated=1
    )
    templates = pipeline_templates(problem, 8)
    catalog, lazy = plan_catalog(problem, 8, templates), lazy_plan_catalog(problem, 8, templates)

    assert list(lazy.plans) == list(catalog.plans)
    assert lazy.templates == catalog.templates
    assert all(lazy.plans[n] == plan for n, plan in catalog.plans.items())
    assert lazy.plans.get(1) is None
