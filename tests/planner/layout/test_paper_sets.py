"""Oobleck's choice of pipelines and microbatches, against every set and distribution there is."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.command import PACED, command
from helpers.exhaustive import paper_objective_s, small_problem
from helpers.strategies import equal_problem, layer_profile, model_profile
from planaria.core.plan import PipelineTemplate
from planaria.errors import InfeasibleError
from planaria.job.planning import read_profile
from planaria.planner.layout import paper_sets
from planaria.planner.layout.instantiate import instantiations
from planaria.planner.layout.paper_sets import PAPER_METHOD, PaperSets
from planaria.planner.plans import (
    METHOD,
    foreseen_plans,
    pipeline_microbatches,
    plan_iteration_s,
)
from planaria.planner.problem import Problem, Shape
from planaria.planner.templates import paper_templates
from planaria.planner.times import PlainTimes

SEED = 20_261_121
MEMORY_BYTES = 3000  # Of a device: three nodes hold the model of the example.


def microbatch_s(problem: Problem, template: PipelineTemplate) -> float:
    """T by its definition."""
    shape: Shape = tuple((stage.end_layer, stage.num_devices) for stage in template.stages)
    return paper_objective_s(problem, shape) / (4 * len(shape))


def distributions(num_pipelines: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_microbatches), num_pipelines - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, num_microbatches)))


def unevenness(seconds: list[float], counts: tuple[int, ...]) -> float:
    """Equation 6."""
    products_s = [one_s * count for one_s, count in zip(seconds, counts, strict=True)]
    mean_s = sum(products_s) / len(products_s)
    return sum((product_s - mean_s) ** 2 for product_s in products_s)


def most_level(seconds: list[float], num_microbatches: int) -> list[tuple[int, ...]]:
    """All distributions that minimise equation 6."""
    by_counts = {
        counts: unevenness(seconds, counts)
        for counts in distributions(len(seconds), num_microbatches)
    }
    least = min(by_counts.values())
    scale = max(seconds) ** 2
    return [counts for counts, found in by_counts.items() if found <= least + 1e-9 * scale]


def slowest_s(seconds: list[float], counts: tuple[int, ...]) -> float:
    return max(one_s * count for one_s, count in zip(seconds, counts, strict=True))


def check_plan(
    seconds_of: dict[int, float],
    shown: list[tuple[int, int]],
    *,
    num_microbatches: int,
    min_pipelines: int,
) -> None:
    """Pipelines, as pairs of nodes and microbatches, are those of equations 5 and 6.

    Args:
        seconds_of: T by number of nodes.
    """
    sizes = [nodes for nodes, _ in shown]
    counts = tuple(count for _, count in shown)
    seconds = [seconds_of[size] for size in sizes]
    assert counts in most_level(seconds, num_microbatches)
    every = [
        [seconds_of[size] for size in one]
        for one in instantiations(sum(sizes), list(seconds_of), min_pipelines=min_pipelines)
        if len(one) <= num_microbatches
    ]
    fastest_s = min(
        max(slowest_s(one, level) for level in most_level(one, num_microbatches)) for one in every
    )
    assert slowest_s(seconds, counts) <= fastest_s * (1 + 1e-9)


@pytest.mark.parametrize(("num_nodes", "num_microbatches"), [(6, 7), (7, 9), (9, 11)])
def test_the_command_plans_as_equations_5_and_6_say(
    num_nodes: int, num_microbatches: int, tmp_path: Path
) -> None:
    """What a comparison with Oobleck rests on; its iteration is the one that is predicted."""
    profile = json.loads(PACED.with_name("paced-profile.json").read_text())
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile | {"device_memory_bytes": MEMORY_BYTES}))
    problem = Problem(
        profile=read_profile(path),
        devices_per_node=1,
        num_microbatches=num_microbatches,
        failures_tolerated=1,
    )

    result = command(
        *("plan", str(path), "--nodes", str(num_nodes), "--objective", "paper", "--json"),
        *("--microbatches", str(num_microbatches)),
    )

    shown = json.loads(result.stdout)
    templates = {one["nodes"]: one for one in shown["templates"]}
    seconds_of = {n: one["iteration_s"] / (4 * len(one["stages"])) for n, one in templates.items()}
    pipelines = [(len(one["nodes"]), one["microbatches"]) for one in shown["plan"]["pipelines"]]
    check_plan(seconds_of, pipelines, num_microbatches=num_microbatches, min_pipelines=2)
    assert shown["plan"]["iteration_s"] == pytest.approx(predicted_s(problem, templates, pipelines))


def predicted_s(
    problem: Problem, templates: dict[int, Any], pipelines: list[tuple[int, int]]
) -> float:
    """What the estimator finds for templates as they were printed."""
    by_size = paper_templates(problem, sum(nodes for nodes, _ in pipelines))
    for size, ranked in by_size.items():
        ends = [stage["end_layer"] for stage in templates[size]["stages"]]
        assert ends == [stage.end_layer for stage in ranked.template.stages]
    chosen = [by_size[nodes].template for nodes, _ in pipelines]
    return PlainTimes(problem).iteration_s(chosen, [count for _, count in pipelines])


@pytest.mark.parametrize("listed_max", [paper_sets.LISTED_MAX, 0])
def test_no_set_is_faster_by_the_papers_measure(
    listed_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With microbatches by equation 6; where sets are not listed, with the best there are."""
    monkeypatch.setattr(paper_sets, "LISTED_MAX", listed_max)
    rng = random.Random(SEED)
    num_several = 0
    for case in range(30):
        problem, _ = small_problem(rng)
        problem = replace(
            problem, num_microbatches=rng.randint(2, 10), failures_tolerated=rng.randint(0, 1)
        )
        num_nodes, fewest = rng.randint(2, 7), problem.failures_tolerated + 1
        try:
            templates = {n: one.template for n, one in paper_templates(problem, num_nodes).items()}
        except InfeasibleError:
            continue
        found = PaperSets(problem, {(n,): one for n, one in templates.items()}).fastest(
            (num_nodes,), fewest
        )

        seconds_of = {n: microbatch_s(problem, one) for n, one in templates.items()}
        every = [
            one
            for one in instantiations(num_nodes, list(templates), min_pipelines=fewest)
            if len(one) <= problem.num_microbatches
        ]
        assert (found is None) == (not every), f"seed {SEED}, case {case}"
        if found is None:
            continue
        num_several += len(every) > 1
        sizes = [size for (size,) in found.sizes]
        seconds = [seconds_of[size] for size in sizes]
        assert found.microbatches in most_level(seconds, problem.num_microbatches)
        assert found.iteration_s == pytest.approx(slowest_s(seconds, found.microbatches))
        if listed_max:
            check_plan(
                seconds_of,
                list(zip(sizes, found.microbatches, strict=True)),
                num_microbatches=problem.num_microbatches,
                min_pipelines=fewest,
            )
            continue
        best_s = [
            min(slowest_s(one_s, n) for n in distributions(len(one_s), problem.num_microbatches))
            for one_s in ([seconds_of[size] for size in one] for one in every)
        ]
        assert best_s[every.index(tuple(sizes))] == pytest.approx(min(best_s))
    assert num_several > 5


def test_leaving_out_fill_and_drain_costs_time() -> None:
    """Three microbatches on five nodes: N_b * T is the same for 2 + 3 and 1 + 2 + 2, but the larger
    pipeline is filled and drained for longer."""
    problem = equal_problem(num_microbatches=3, failures_tolerated=0)
    templates = {n: one.template for n, one in paper_templates(problem, 5).items()}

    ours, paper = (
        foreseen_plans(problem, 5, templates, method=method) for method in (METHOD, PAPER_METHOD)
    )

    assert [len(pipeline.nodes) for pipeline in ours.plans[5].pipelines] == [1, 2, 2]
    assert [len(pipeline.nodes) for pipeline in paper.plans[5].pipelines] == [2, 3]
    ours_s, paper_s = (plan_iteration_s(one.plans[5], one.times) for one in (ours, paper))
    assert paper_s > 1.1 * ours_s


def test_layers_that_take_no_time_have_a_plan_too() -> None:
    """T is 0 then, and whoever divides by it fails."""
    layer = layer_profile("none", 0.0, parameter_bytes=0, activation_bytes=0)
    problem = replace(equal_problem(), profile=model_profile((layer, layer)))
    templates = {n: one.template for n, one in paper_templates(problem, 4).items()}

    catalog = foreseen_plans(problem, 4, templates, method=PAPER_METHOD)

    assert sum(pipeline_microbatches(catalog.plans[4])) == problem.num_microbatches
