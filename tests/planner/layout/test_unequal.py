"""Nodes that differ in speed and memory, against every way to use them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product

import numpy as np
import pytest

from helpers.exhaustive import all_shapes, fits, small_problem, template_of
from helpers.strategies import MEBIBYTE, equal_problem
from planaria.core.plan import Link, NodeKind, PipelineTemplate, Plan
from planaria.errors import InfeasibleError
from planaria.estimator.makespan import makespans_of_each, stage_seconds, stage_table
from planaria.estimator.time import predicted_timeline
from planaria.planner.layout.unequal import UnequalPlanner
from planaria.planner.partition.bound import BoundSearch
from planaria.planner.plans import best_plan, pipeline_microbatches, plan_iteration_s
from planaria.planner.problem import Counts, Problem, stage_costs
from planaria.planner.templates import pipeline_templates, smallest_num_nodes
from planaria.planner.times import PlainTimes
from planaria.schedule.lower import plan_schedule

SEED = 20_261_121
NUM_PIPELINES = 150


def kinds(rng: random.Random, problem: Problem) -> list[NodeKind]:
    """Two, of different speeds, and of different memory if it is limited."""
    limit_bytes = problem.profile.device_memory_bytes
    speeds = rng.sample((0.25, 0.5, 1.0, 2.0, 3.0), 2)
    return sorted(NodeKind(speed, int(limit_bytes * rng.choice((0.7, 1, 2)))) for speed in speeds)


def unequal_problem(rng: random.Random, most_nodes: int) -> tuple[Problem, int]:
    """Two nodes or more, and few layers: there are many orders."""
    while True:
        problem, num_nodes = small_problem(rng)
        if 2 <= num_nodes <= most_nodes and len(problem.profile.layers) <= 6:
            return problem, num_nodes


def templates(problem: Problem, kinds: list[NodeKind], counts: Counts) -> list[PipelineTemplate]:
    """Every partition that fits, on these nodes in every order."""
    of_nodes = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    unlimited = replace(problem, profile=replace(problem.profile, device_memory_bytes=0))
    shapes = all_shapes(unlimited, len(of_nodes))
    found = [
        replace(template_of(shape, len(of_nodes)), kinds=order)
        for order in sorted(set(permutations(of_nodes)))
        for shape in shapes
    ]
    return [template for template in found if fits(problem, template)]


def bound_s(problem: Problem, template: PipelineTemplate) -> float:
    """The largest of: the way down to a stage and up again, and its work on all microbatches."""
    seconds = stage_seconds(problem.profile, template)
    bound = way_s = 0.0
    trips_s = [2 * (a + b) for a, b in zip(seconds.transfer_s, seconds.latency_s, strict=True)]
    for forward_s, backward_s, trip_s in zip(
        seconds.forward_s, seconds.backward_s, [*trips_s, 0.0], strict=True
    ):
        bound = max(bound, way_s + problem.num_microbatches * (forward_s + backward_s))
        way_s += forward_s + backward_s + trip_s
    return bound


def test_the_lowest_bound_of_unequal_nodes_is_that_of_exhaustive_search() -> None:
    """In all orders of the nodes, with and without memory."""
    rng = random.Random(SEED)
    num_impossible = num_mixed = 0
    for index in range(NUM_PIPELINES):
        problem, num_nodes = unequal_problem(rng, 6)
        of_kind = kinds(rng, problem)
        first = rng.randint(0, num_nodes)
        counts = (first, num_nodes - first)
        every = templates(problem, of_kind, counts)
        costs = stage_costs(problem, of_kind)
        found = BoundSearch(costs, {counts: problem.num_microbatches}).lowest(counts)
        where = f"seed {SEED}, instance {index}"
        if found is None:
            assert not every, where
            num_impossible += 1
            continue
        num_mixed += min(counts) > 0
        lowest_s = min(bound_s(problem, template) for template in every)
        assert found.bound_s == pytest.approx(lowest_s, rel=1e-12), where
    assert num_impossible > 5
    assert num_mixed > NUM_PIPELINES / 4


def parts(counts: Counts) -> Iterator[Counts]:
    return product(*(range(count + 1) for count in counts))


def least_s(problem: Problem, of_kind: list[NodeKind], counts: Counts) -> float:
    """The earliest end of the slowest pipeline, over all sets of pipelines, all their templates,
    and all ways to deal microbatches."""
    most = problem.num_microbatches

    @cache
    def alone_s(part: Counts, num_microbatches: int) -> float:
        every = templates(problem, of_kind, part)
        if not every:
            return np.inf
        table = stage_table([stage_seconds(problem.profile, template) for template in every])
        return float(makespans_of_each(table, num_microbatches).min())

    @cache
    def together_s(left: Counts, pipelines: int, num_microbatches: int) -> float:
        if not any(left):
            return 0.0 if pipelines <= 0 and num_microbatches == 0 else np.inf
        found_s = np.inf
        for part in parts(left):
            if not any(part):
                continue
            rest = tuple(a - b for a, b in zip(left, part, strict=True))
            for count in range(1, num_microbatches + 1):
                rest_s = together_s(rest, pipelines - 1, num_microbatches - count)
                if rest_s < found_s:
                    found_s = min(found_s, max(rest_s, alone_s(part, count)))
        return found_s

    return together_s(counts, problem.failures_tolerated + 1, most)


def cluster(rng: random.Random) -> tuple[Problem, list[NodeKind], Counts]:
    """At most four nodes and six microbatches; gradients cost nothing to reduce."""
    problem, num_nodes = unequal_problem(rng, 4)
    layers = tuple(
        replace(layer, parameter_bytes=0, optimizer_bytes=layer.optimizer_bytes * 2)
        for layer in problem.profile.layers
    )
    links = {kind: replace(link, latency_s=0.0) for kind, link in problem.profile.links.items()}
    problem = replace(
        problem,
        profile=replace(problem.profile, layers=layers, links=links),
        num_microbatches=rng.randint(2, 9),
        failures_tolerated=rng.randint(0, 1),
    )
    first = rng.randint(1, num_nodes - 1)
    return problem, kinds(rng, problem), (first, num_nodes - first)


def planned(problem: Problem, nodes: dict[int, NodeKind]) -> Plan:
    planner = UnequalPlanner(problem, nodes)
    return planner.plan(nodes, min_pipelines=problem.failures_tolerated + 1, epoch=0)


@pytest.mark.parametrize("number", [30, pytest.param(60, marks=pytest.mark.long)])
def test_plans_for_unequal_nodes_are_as_fast_as_the_fastest(number: int) -> None:
    """Of all pipelines, orders, partitions and batches: within 1% in 99 of 100, all within 3%."""
    rng = random.Random(SEED)
    regrets = []
    for index in range(number):
        problem, of_kind, counts = cluster(rng)
        expected_s = least_s(problem, of_kind, counts)
        where = f"seed {SEED}, instance {index}"
        of_nodes = [kind for kind, count in zip(of_kind, counts, strict=True) for _ in range(count)]
        nodes = dict(enumerate(of_nodes))
        if np.isinf(expected_s):
            with pytest.raises(InfeasibleError):
                planned(problem, nodes)
            continue
        plan = planned(problem, nodes)
        for pipeline in plan.pipelines:
            places = tuple(of_nodes[node] for node in pipeline.nodes)
            assert pipeline.template.node_kinds == places, where
            assert fits(problem, pipeline.template), where
        assert plan.nodes == tuple(nodes), where
        found_s = plan_iteration_s(plan, PlainTimes(problem))
        regrets.append(found_s / expected_s - 1)
        assert regrets[-1] <= 0.03, where
    assert len(regrets) > number * 0.8
    assert np.quantile(regrets, 0.99) <= 0.01, f"seed {SEED}"


def test_a_slow_node_gets_fewer_layers_or_a_pipeline_of_fewer_microbatches() -> None:
    """Half the speed: four of six equal layers stand on the other node, or the job's work is dealt
    as 2 to 1."""
    slow, other = NodeKind(0.5), NodeKind()
    joined = equal_problem(failures_tolerated=0, device_memory_bytes=80 * MEBIBYTE)
    apart = equal_problem(failures_tolerated=1, num_microbatches=9)

    (one,) = planned(joined, {0: slow, 1: other}).pipelines
    plan = planned(apart, {0: slow, 1: other})

    layers = {
        node: stage.end_layer - stage.first_layer
        for node, stage in zip(one.nodes, one.template.stages, strict=True)
    }
    assert layers == {0: 2, 1: 4}
    by_node = dict(zip((p.nodes for p in plan.pipelines), pipeline_microbatches(plan), strict=True))
    assert by_node == {(0,): 3, (1,): 6}
    assert plan_iteration_s(plan, PlainTimes(apart)) == pytest.approx(
        predicted_timeline(plan_schedule(plan), apart.profile, plan=plan).iteration_s
    )


def test_work_is_proportional_to_speed() -> None:
    """Seven nodes, each a pipeline: none gets a microbatch more or less than its share."""
    speeds = (0.3, 0.5, 0.9, 1.0, 1.0, 2.0, 3.1)
    problem = equal_problem(failures_tolerated=6, num_microbatches=500, num_layers=2)

    plan = planned(problem, {node: NodeKind(speed) for node, speed in enumerate(speeds)})

    for pipeline, count in zip(plan.pipelines, pipeline_microbatches(plan), strict=True):
        share = 500 * speeds[pipeline.nodes[0]] / sum(speeds)
        assert abs(count - share) <= 1.0


def test_a_node_of_little_memory_holds_the_end_of_a_pipeline() -> None:
    """There fewer microbatches are in flight; and it gets no more than it can hold."""
    problem = equal_problem(failures_tolerated=0, device_memory_bytes=100 * MEBIBYTE)
    small = NodeKind(1.0, 40 * MEBIBYTE)

    (one,) = planned(problem, {0: small, 1: NodeKind()}).pipelines

    assert one.nodes == (1, 0)
    assert fits(problem, one.template)
    with pytest.raises(InfeasibleError, match="no pipeline of them holds the model"):
        planned(problem, {0: small, 1: small})


def test_a_speed_that_all_nodes_have_changes_nothing_but_the_time() -> None:
    """Where transfers and reductions are free; else they would count for more."""
    problem = equal_problem(num_layers=5, num_microbatches=20)
    links = {kind: Link(0.0, 1e18) for kind in problem.profile.links}
    problem = replace(problem, profile=replace(problem.profile, links=links))
    templates = pipeline_templates(problem, 5)
    plain = best_plan(problem, range(5), templates, epoch=0)

    fast = planned(problem, dict.fromkeys(range(5), NodeKind(4.0)))

    times = PlainTimes(problem)
    assert plan_iteration_s(fast, times) == pytest.approx(plan_iteration_s(plain, times) / 4)
    assert sorted(pipeline_microbatches(fast)) == sorted(pipeline_microbatches(plain))


def test_a_planner_answers_for_those_that_are_left() -> None:
    """Without making templates anew; and says which f would do where they are too few."""
    problem = equal_problem(failures_tolerated=2, num_microbatches=20)
    nodes = {node: NodeKind(0.5 if node < 2 else 1.0) for node in range(5)}
    planner = UnequalPlanner(problem, nodes)

    left = planner.plan((0, 2, 4), min_pipelines=3, epoch=7)

    assert left.nodes == (0, 2, 4)
    assert left.epoch == 7
    assert sorted(pipeline_microbatches(left)) == [4, 8, 8]
    with pytest.raises(InfeasibleError, match="values that work: 1 failures tolerated"):
        planner.plan((0, 4), min_pipelines=3, epoch=8)


@pytest.mark.parametrize("known", [range(4), range(3)])
def test_fewer_nodes_than_f_allows_work_in_one_pipeline(known: range) -> None:
    """As equal nodes do: two pipelines of two are more than three nodes make."""
    problem = equal_problem(device_memory_bytes=80 * MEBIBYTE)
    assert smallest_num_nodes(problem) == 2
    planner = UnequalPlanner(problem, {n: NodeKind(1.0 if n else 0.5) for n in known})

    assert planner.most_pipelines(range(3), at_most=2) == 1
    plan = planner.plan(range(3), min_pipelines=1, epoch=0)
    assert [len(pipeline.nodes) for pipeline in plan.pipelines] == [3]


def test_too_many_kinds_are_refused() -> None:
    problem = equal_problem(num_microbatches=50)

    with pytest.raises(InfeasibleError, match="nearly alike"):
        planned(problem, {node: NodeKind(1 + node / 100) for node in range(16)})
