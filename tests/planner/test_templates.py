"""Which templates there are, and what each must be."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.exhaustive import all_shapes, fits
from helpers.strategies import MEBIBYTE, equal_problem, layer_profile, model_profile, problems
from planaria.core.plan import Link, PipelineTemplate, Stage
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.planner.problem import Problem
from planaria.planner.templates import (
    pipeline_template,
    pipeline_templates,
    ranked_templates,
    smallest_num_nodes,
    template_sizes,
)

REFUSED_S = 20.0
FREE = {"intra_node": Link(0.0, 1e30), "inter_node": Link(0.0, 1e30)}


@settings(max_examples=60)
@given(problems(max_devices_per_node=2))
def test_smallest_number_of_nodes_is_the_first_with_a_partition(problem: Problem) -> None:
    """n0 decides what may fail; one too many wastes nodes, one too few runs out of memory."""
    num_layers = len(problem.profile.layers)
    feasible = (n for n in range(1, num_layers + 1) if all_shapes(problem, n))
    expected = next(feasible, None)

    if expected is None:
        with pytest.raises(InfeasibleError):
            smallest_num_nodes(problem)
    else:
        assert expected == smallest_num_nodes(problem)


@settings(max_examples=40)
@given(problems(max_devices_per_node=2), st.integers(1, 6))
def test_templates_use_every_device_within_memory(problem: Problem, num_nodes: int) -> None:
    """A stage never straddles two nodes, layers follow each other, every device has a stage."""
    try:
        templates = pipeline_templates(problem, num_nodes)
    except InfeasibleError:
        return
    per_node = problem.devices_per_node
    for size, template in templates.items():
        stages = template.stages
        edges = [0, *(stage.end_layer for stage in stages)]

        assert size == template.num_nodes
        assert [stage.first_layer for stage in stages] == edges[:-1]
        assert edges[-1] == len(problem.profile.layers)
        assert all(stage.first_layer < stage.end_layer for stage in stages)
        device_ends = {sum(s.num_devices for s in stages[:i]) for i in range(len(stages) + 1)}
        assert device_ends >= {node * per_node for node in range(size + 1)}
        assert max(device_ends) == size * per_node
        assert fits(problem, template)


def test_memory_moves_a_cut_that_time_alone_would_place_elsewhere() -> None:
    """The first of two stages keeps two microbatches in flight: there, three layers take 96 MiB."""
    layers = tuple(
        layer_profile(f"layer {i}", forward_s, activation_bytes=8 * MEBIBYTE)
        for i, forward_s in enumerate((0.01, 0.01, 0.01, 0.01, 0.02))
    )
    loose = Problem(
        profile=model_profile(layers, device_memory_bytes=96 * MEBIBYTE),
        devices_per_node=1,
        num_microbatches=4,
        failures_tolerated=0,
    )
    tight = replace(loose, profile=model_profile(layers, device_memory_bytes=96 * MEBIBYTE - 1))

    assert pipeline_template(loose, 2) == PipelineTemplate((Stage(0, 3, 1), Stage(3, 5, 1)), 2)
    assert pipeline_template(tight, 2) == PipelineTemplate((Stage(0, 2, 1), Stage(2, 5, 1)), 2)


def test_equal_problems_get_equal_templates() -> None:
    """Many partitions are equally fast; each coordinator must pick the same one."""
    first, second = (equal_problem(num_layers=9, num_microbatches=8) for _ in range(2))

    assert pipeline_templates(first, 7) == pipeline_templates(second, 7)


def test_sizes_run_from_n0_to_what_f_smallest_pipelines_leave() -> None:
    """Oobleck, 4.1.1: with two layers a device, six layers need three nodes; 13 - 2 * 3 = 7."""
    problem = equal_problem(device_memory_bytes=40 * MEBIBYTE, failures_tolerated=2)

    assert smallest_num_nodes(problem) == 3
    assert template_sizes(problem, 13) == (3, 4, 5, 6, 7)


def test_nodes_that_may_join_add_larger_templates_and_leave_the_others() -> None:
    """Six nodes need templates of 3 nodes, ten at most those of 4 - 7."""
    problem = equal_problem(
        num_layers=8, device_memory_bytes=54 * MEBIBYTE, failures_tolerated=1, num_microbatches=8
    )

    assert template_sizes(problem, 6) == (3,)
    assert template_sizes(problem, 6, max_nodes=10) == (3, 4, 5, 6, 7)
    assert template_sizes(problem, 6, max_nodes=5) == (3,)
    fewer = pipeline_templates(problem, 6)
    more = pipeline_templates(problem, 6, max_nodes=10)
    assert list(more) == [3, 4, 5, 6, 7]
    assert fewer[3] == more[3]


def test_a_size_with_more_devices_than_layers_has_no_template() -> None:
    """Each stage needs a layer; the plan must do without such a template, not fail."""
    problem = equal_problem(num_layers=3)

    assert pipeline_template(problem, 4) is None
    assert list(pipeline_templates(problem, 8)) == [1, 2, 3]


def test_too_few_nodes_are_refused_with_each_way_out_and_each_works() -> None:
    """The remedy is followed to the letter: more nodes, a smaller f, or more memory."""
    problem = equal_problem(device_memory_bytes=40 * MEBIBYTE, failures_tolerated=2)

    with pytest.raises(InfeasibleError) as caught:
        template_sizes(problem, 6)

    needed = (3 * 16 + 2 * 3) * MEBIBYTE
    assert (caught.value.limit, caught.value.value) == (Limit.NODES, 6)
    assert "pipelines of 3 or more nodes are needed, f + 1 = 3 of them" in caught.value.why
    assert caught.value.remedies == (
        FeasibleValue(Limit.NODES, 9, or_more=True),
        FeasibleValue(Limit.FAILURES, 1),
        FeasibleValue(Limit.DEVICE_MEMORY, needed, or_more=True),
    )
    assert template_sizes(problem, 9) == (3,)
    assert template_sizes(with_limits(problem, failures_tolerated=1), 6) == (3,)
    assert template_sizes(with_limits(problem, device_memory_bytes=needed), 6) == (2,)
    with pytest.raises(InfeasibleError):
        template_sizes(with_limits(problem, device_memory_bytes=needed - 1), 6)


def with_limits(
    problem: Problem, *, failures_tolerated: int = 2, device_memory_bytes: int = 40 * MEBIBYTE
) -> Problem:
    return equal_problem(
        num_layers=len(problem.profile.layers),
        device_memory_bytes=device_memory_bytes,
        failures_tolerated=failures_tolerated,
    )


def test_a_model_that_no_cluster_holds_is_refused_with_the_memory_that_would_do() -> None:
    """Stages of one layer each: 16 MiB stay, and the first keeps up to six microbatches."""
    problem = equal_problem(device_memory_bytes=16 * MEBIBYTE)

    with pytest.raises(InfeasibleError) as caught:
        smallest_num_nodes(problem)

    assert caught.value.limit is Limit.DEVICE_MEMORY
    (way,) = caught.value.remedies
    needed = way.value
    assert 1 <= smallest_num_nodes(with_limits(problem, device_memory_bytes=needed)) <= 6
    with pytest.raises(InfeasibleError):
        smallest_num_nodes(with_limits(problem, device_memory_bytes=needed - 1))


@pytest.mark.parametrize(("num_layers", "measured", "devices"), [(2, (1,), 3), (4, (2,), 1)])
def test_devices_of_a_node_that_no_layers_can_use_are_refused(
    num_layers: int, measured: tuple[int, ...], devices: int
) -> None:
    """More than the model has layers, which no memory helps; fewer than any was measured with."""
    layers = tuple(
        layer_profile(f"layer {i}", 0.01, device_counts=measured) for i in range(num_layers)
    )
    problem = Problem(
        profile=model_profile(layers),
        devices_per_node=devices,
        num_microbatches=4,
        failures_tolerated=0,
    )

    with pytest.raises(InfeasibleError) as caught:
        smallest_num_nodes(problem)

    assert (caught.value.limit, caught.value.value) == (Limit.DEVICES_PER_NODE, devices)


@pytest.mark.parametrize(
    ("limit", "key"),
    [
        (Limit.DEVICES_PER_NODE, "devices_per_node"),
        (Limit.FAILURES, "failures_tolerated"),
    ],
)
def test_impossible_numbers_are_refused_at_once(limit: Limit, key: str) -> None:
    """What a search would meet as an odd shape is said before it starts."""
    numbers = {"devices_per_node": 1, "num_microbatches": 1, "failures_tolerated": 0, key: -1}

    with pytest.raises(InfeasibleError) as caught:
        Problem(
            profile=equal_problem().profile,
            devices_per_node=numbers["devices_per_node"],
            num_microbatches=numbers["num_microbatches"],
            failures_tolerated=numbers["failures_tolerated"],
        )

    assert limit is caught.value.limit


@pytest.mark.parametrize("memory_bytes", [0, 60 * MEBIBYTE])
def test_layers_that_take_no_time_are_planned_too(memory_bytes: int) -> None:
    """A profile may say 0 seconds; then transfers alone count, and no limit grows from 0."""
    layers = tuple(
        layer_profile(f"layer {i}", 0.0, device_counts=(1, 2), activation_bytes=8 * MEBIBYTE)
        for i in range(6)
    )
    problem = Problem(
        profile=model_profile(layers, device_memory_bytes=memory_bytes),
        devices_per_node=2,
        num_microbatches=4,
        failures_tolerated=0,
    )

    ranked = ranked_templates(problem, 3)

    assert 3 in ranked
    assert all(fits(problem, one.template) and one.gap >= 0 for one in ranked.values())
    nothing = replace(problem, profile=replace(problem.profile, links=FREE))
    assert [one.gap for one in ranked_templates(nothing, 3).values()] == [0.0] * len(ranked)


@pytest.mark.parametrize("forward_s", [0.0, 1e-13])
def test_layers_that_take_no_time_are_cut_where_memory_says_so(forward_s: float) -> None:
    """Two layers fit on two devices only, and one layer must be first."""
    layers = tuple(
        replace(
            layer_profile(
                f"layer {i}",
                forward_s,
                device_counts=(1, 2),
                parameter_bytes=5,
                activation_bytes=20,
            ),
            optimizer_bytes=0,
        )
        for i in range(3)
    )
    problem = Problem(
        profile=replace(model_profile(layers, device_memory_bytes=55), links=FREE),
        devices_per_node=2,
        num_microbatches=8,
        failures_tolerated=0,
    )

    template = pipeline_template(problem, 2)

    assert template is not None
    assert fits(problem, template)


def test_too_little_memory_is_refused_while_one_waits() -> None:
    """96 layers on nodes of eight devices; the memory that would do is searched for, too."""
    layers = tuple(
        layer_profile(f"layer {i}", 0.01 + i % 7 / 1000, device_counts=(1, 2, 4, 8))
        for i in range(96)
    )
    problem = Problem(
        profile=model_profile(layers, device_memory_bytes=MEBIBYTE),
        devices_per_node=8,
        num_microbatches=768,
        failures_tolerated=1,
    )

    start_s = time.process_time()
    with pytest.raises(InfeasibleError, match=r"values that work: .* bytes of device memory"):
        template_sizes(problem, 24)

    assert time.process_time() - start_s < REFUSED_S
