"""What `planaria plan` shows."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from rich.console import Console

from helpers.strategies import (
    MEBIBYTE,
    equal_problem,
    layer_profile,
    model_profile,
    planned_problems,
)
from planaria.core.plan import NodeKind, PipelineTemplate, Plan
from planaria.planner.layout.unequal import unequal_plans
from planaria.planner.plans import (
    best_plan,
    foreseen_plans,
    plan_bubble_share,
    plan_iteration_s,
    plan_of_templates,
)
from planaria.planner.problem import Problem
from planaria.planner.templates import RankedTemplate, paper_templates, ranked_templates
from planaria.planner.times import PlainTimes
from planaria.show.tables import plan_json, plan_table


def printed(
    problem: Problem,
    plan: Plan,
    templates: Mapping[int, RankedTemplate],
    *,
    columns: int = 100,
    max_nodes: int = 0,
) -> str:
    """What `planaria plan` prints, each line with single spaces."""
    by_size = {size: ranked.template for size, ranked in templates.items()}
    catalog = foreseen_plans(problem, len(plan.nodes), by_size, max_nodes=max_nodes)
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(plan_table(catalog, plan, templates=tuple(templates.values())))
    return "\n".join(" ".join(line.split()) for line in console.export_text().splitlines())


def test_table_shows_templates_pipelines_and_speed() -> None:
    """(N_b + S - 1) stages: 5 of 180 ms for one node, 12 of 90 ms for two, then reductions. Of the
    three stages' 1.107 s they compute 5 * 180 + 2 * 11 * 90 ms."""
    problem = equal_problem(failures_tolerated=0)
    templates = ranked_templates(problem, 3)
    plan = plan_of_templates(
        problem, [templates[1].template, templates[2].template], (0, 1, 2), epoch=0
    )

    text = printed(problem, plan, templates)

    assert "3 nodes of 1 device, 16 microbatches of 2 samples, 0 failures tolerated" in text
    assert "2 1 0-2 | 3-5 1.08 s < 0.1% 54.0 MiB" in text
    assert "3 - 0-1 | 2-3 | 4-5 1.08 s < 0.2% 38.0 MiB" in text
    assert "0 1 0 5 900.0 ms 18.7% 102.0 MiB" in text
    assert "1 1 1-2 11 1.08 s 10.6% 54.0 MiB" in text
    assert "iteration 1.11 s 28.9 samples/s 13.3% bubbles" in text
    assert "After failures" not in text
    assert "If nodes join" not in text


def test_equal_pipelines_are_one_row() -> None:
    """Also where one of them gets a microbatch more: that is a row of its own."""
    problem = equal_problem(num_layers=1, num_microbatches=9)
    templates = ranked_templates(problem, 4)

    text = printed(
        problem,
        plan_of_templates(problem, [templates[1].template] * 4, range(4), epoch=0),
        templates,
    )

    assert "\n0 1 0 3 " in text
    assert "\n1-3 3 1-3 2 " in text


def test_the_table_says_what_failures_leave() -> None:
    """Two pipelines of two nodes, 9 stages of 90 ms and reductions; then one, 18 of 60 ms."""
    problem = equal_problem(device_memory_bytes=80 * MEBIBYTE)
    templates = ranked_templates(problem, 4)
    plan = best_plan(problem, range(4), {2: templates[2].template}, epoch=0)

    text = printed(problem, plan, templates)

    assert "\n3 1 x 3 nodes 1.08 s 29.6 +31.4%" in text


def test_the_table_says_what_joins_make() -> None:
    """Two pipelines of two nodes; with three and three nodes 8 + 2 stages of 60 ms. Five nodes, of
    which not all could work without a template of three, are two and three."""
    problem = equal_problem(device_memory_bytes=80 * MEBIBYTE)
    templates = ranked_templates(problem, 4, max_nodes=6)
    by_size = {size: ranked.template for size, ranked in templates.items()}
    plan = best_plan(problem, range(4), by_size, epoch=0)

    text = printed(problem, plan, templates, max_nodes=6)

    after = text[text.index("After joins") :]
    assert "\n5 1 x 2 nodes, 1 x 3 nodes " in after
    assert "\n6 2 x 3 nodes 610.4 ms 52.4 -25.9%" in after
    assert "If nodes join" not in text
    assert "After joins" not in printed(problem, plan, templates)


def test_the_table_says_which_nodes_that_join_could_not_work() -> None:
    """n0 = 2 and N = 4 make templates of two nodes only: Oobleck's p = 1 is below n0."""
    problem = equal_problem(device_memory_bytes=80 * MEBIBYTE)
    few, more = ranked_templates(problem, 4), ranked_templates(problem, 5)

    few_text, more_text = (
        printed(problem, best_plan(problem, range(n), sizes, epoch=0), templates)
        for n, templates in ((4, few), (5, more))
        for sizes in ({size: ranked.template for size, ranked in templates.items()},)
    )

    assert (
        "If nodes join and there are 5, not all of them can work: templates of 2 nodes" in few_text
    )
    assert "If nodes join" not in more_text


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_numbers_are_whole_in_narrow_terminals(columns: int) -> None:
    """Where a column is too narrow rich writes dots for the rest."""
    problem = equal_problem(num_layers=12, failures_tolerated=2, num_microbatches=400)
    templates = ranked_templates(problem, 30)
    by_size = {size: ranked.template for size, ranked in templates.items()}

    text = printed(
        problem, best_plan(problem, range(30), by_size, epoch=0), templates, columns=columns
    )

    assert "\u2026" not in text


def test_a_model_may_be_called_anything_and_take_no_time() -> None:
    """No markup, no control characters, no division by the seconds of an iteration."""
    layer = layer_profile("none", 0.0, parameter_bytes=0, activation_bytes=0)
    profile = replace(model_profile((layer,)), model="a\x1b[31m [bold]b\n")
    problem = replace(equal_problem(failures_tolerated=0), profile=profile)
    templates = ranked_templates(problem, 1)

    text = printed(
        problem, plan_of_templates(problem, [templates[1].template], [0], epoch=0), templates
    )

    assert text.startswith("a [31m [bold]b 1 layer, float32 on cpu\n1 node of 1 device")
    assert "iteration 0 s 0.0 samples/s 0.0% bubbles" in text


@settings(max_examples=20)
@given(planned_problems())
def test_json_holds_the_plan_and_what_each_template_would_take(
    planned_problems: tuple[Problem, dict[int, PipelineTemplate], Plan],
) -> None:
    """Scripts read it: its keys, and that its numbers agree with each other."""
    problem, found, plan = planned_problems
    templates = {size: RankedTemplate(one, 1.1, 1.0) for size, one in found.items()}

    catalog = foreseen_plans(problem, len(plan.nodes), found)

    shown = json.loads(
        json.dumps(plan_json(catalog, plan, templates=tuple(templates.values()), planning_s=0.25))
    )

    assert sorted(shown) == ["fewer_nodes", "more_nodes", "plan", "planning_s", "templates"]
    assert sorted(templates) == [template["nodes"] for template in shown["templates"]]
    keys = {"nodes", "stages", "iteration_s", "peak_bytes", "gap"}
    assert all(keys == set(template) for template in shown["templates"])
    nodes = sorted(node for pipeline in shown["plan"]["pipelines"] for node in pipeline["nodes"])
    assert list(plan.nodes) == nodes
    counts = [pipeline["microbatches"] for pipeline in shown["plan"]["pipelines"]]
    assert problem.num_microbatches == sum(counts)
    iteration_s = plan_iteration_s(plan, PlainTimes(problem))
    used = {len(pipeline.nodes) for pipeline in plan.pipelines}
    assert iteration_s == pytest.approx(shown["plan"]["iteration_s"])
    slowest_s = max(t["iteration_s"] for t in shown["templates"] if t["nodes"] in used)
    assert iteration_s >= slowest_s * (1 - 1e-9)  # Reductions and the commit follow.
    samples = problem.num_microbatches * problem.profile.microbatch_size
    assert samples / iteration_s == pytest.approx(shown["plan"]["samples_per_s"])
    assert plan_bubble_share(plan, catalog.times) == shown["plan"]["bubble_share"]
    left = [fewer["nodes"] for fewer in shown["fewer_nodes"]]
    assert left == [n for n in sorted(catalog.plans, reverse=True) if n < len(plan.nodes)]
    for fewer in shown["fewer_nodes"]:
        assert {"nodes", "pipelines", "iteration_s", "samples_per_s", "bubble_share"} == set(fewer)
        assert sum(pipeline["nodes"] for pipeline in fewer["pipelines"]) <= fewer["nodes"]
        counts = [pipeline["microbatches"] for pipeline in fewer["pipelines"]]
        assert problem.num_microbatches == sum(counts)
        assert fewer["iteration_s"] == plan_iteration_s(
            catalog.plans[fewer["nodes"]], catalog.times
        )
    assert shown["more_nodes"] == []
    assert shown["planning_s"] == 0.25


def test_json_has_what_joins_make() -> None:
    """With the keys of what failures leave, after one join first."""
    problem = equal_problem(device_memory_bytes=80 * MEBIBYTE)
    templates = ranked_templates(problem, 4, max_nodes=7)
    by_size = {size: ranked.template for size, ranked in templates.items()}
    catalog = foreseen_plans(problem, 4, by_size, max_nodes=7)

    shown = plan_json(
        catalog, catalog.plans[4], templates=tuple(templates.values()), planning_s=0.25
    )

    assert [more["nodes"] for more in shown["more_nodes"]] == [5, 6, 7]
    for more in shown["more_nodes"]:
        assert set(more) == set(shown["fewer_nodes"][0])
        assert sum(pipeline["nodes"] for pipeline in more["pipelines"]) == more["nodes"]
        assert more["iteration_s"] == plan_iteration_s(catalog.plans[more["nodes"]], catalog.times)


def test_json_with_the_papers_objective_has_its_value() -> None:
    """T1 + T2 + T3 at N_b = 4S: equal stages of 90 ms take (4 * 2 + 2 - 1) of them."""
    problem = equal_problem(failures_tolerated=0)
    templates = paper_templates(problem, 2)
    plan = plan_of_templates(problem, [templates[2].template], (0, 1), epoch=0)

    catalog = foreseen_plans(problem, 2, {size: one.template for size, one in templates.items()})

    shown = plan_json(catalog, plan, templates=tuple(templates.values()), planning_s=0.25)

    two = shown["templates"][1]
    assert (two["nodes"], len(two["stages"])) == (2, 2)
    assert abs(two["iteration_s"] - 9 * 0.09) < 1e-9
    assert "gap" not in two


def test_unequal_nodes_are_shown_with_their_speed_and_memory() -> None:
    """Nodes 0 and 2 share a pipeline; failures are those of the fastest."""
    problem = equal_problem(device_memory_bytes=120 * MEBIBYTE)
    kinds = {0: NodeKind(0.5, 80 * MEBIBYTE), 1: NodeKind(), 2: NodeKind(2.0)}
    catalog, templates = unequal_plans(problem, kinds)
    plan = catalog.plans[3]
    console = Console(width=100, record=True, file=io.StringIO())

    console.print(plan_table(catalog, plan, templates=templates))
    shown = json.loads(json.dumps(plan_json(catalog, plan, templates=templates, planning_s=0.25)))

    text = "\n".join(" ".join(line.split()) for line in console.export_text().splitlines())
    assert "\n1 1 of 1 1 0-5 " in text
    assert "\n2 1 of 2, 1 of 0.5 and 80.0 1 0-4 | 5 " in text
    assert "After failures of the fastest nodes" in text
    assert "\n2 1 x 2 nodes " in text
    assert "If nodes join" not in text
    assert [one.get("node_kinds") for one in shown["templates"]] == [
        None,
        [
            {"speed": 2.0, "device_memory_bytes": 0},
            {"speed": 0.5, "device_memory_bytes": 80 * MEBIBYTE},
        ],
    ]
    assert [one["nodes"] for one in shown["plan"]["pipelines"]] == [[1], [2, 0]]
    assert [one["nodes"] for one in shown["fewer_nodes"]] == [2]
