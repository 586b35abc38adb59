"""What `planaria plan` shows."""

import io
import json

from hypothesis import given, settings
from rich.console import Console

from planaria.core.plan import PipelineTemplate, Plan
from planaria.planner.plans import bind, plan_iteration_s
from planaria.planner.problem import Problem
from planaria.planner.templates import RankedTemplate, paper_templates, ranked_templates
from planaria.planner.times import PlainTimes
from planaria.show.tables import plan_json, plan_table
from strategies import equal_problem, planned


def test_table_shows_templates_pipelines_and_speed() -> None:
    """(N_b + S - 1) stages: 5 of 180 ms for one node, 12 of 90 ms for two, then reductions."""
    problem = equal_problem(failures_tolerated=0)
    templates = ranked_templates(problem, 3)
    plan = bind(problem, [templates[1].template, templates[2].template], (0, 1, 2), epoch=0)
    console = Console(width=100, record=True, file=io.StringIO())

    console.print(plan_table(problem, templates, plan))

    text = " ".join(console.export_text().split())
    assert "3 nodes of 1 device, 16 microbatches of 2 samples, 0 failures tolerated" in text
    assert "2 1 0-2 | 3-5 1.08 s < 0.1% 54.0 MiB" in text
    assert "3 - 0-1 | 2-3 | 4-5 1.08 s < 0.2% 38.0 MiB" in text
    assert "0 0 1 5 900.0 ms 102.0 MiB" in text
    assert "1 1-2 2 11 1.08 s 54.0 MiB" in text
    assert "iteration 1.11 s 28.9 samples/s" in text


@settings(max_examples=20, deadline=None)
@given(planned())
def test_json_holds_the_plan_and_what_each_template_would_take(
    planned: tuple[Problem, dict[int, PipelineTemplate], Plan],
) -> None:
    """Scripts read it: its keys, and that its numbers agree with each other."""
    problem, found, plan = planned
    templates = {size: RankedTemplate(one, 1.1, 1.0) for size, one in found.items()}

    shown = json.loads(json.dumps(plan_json(problem, templates, plan, planning_s=0.25)))

    assert sorted(shown) == ["plan", "planning_s", "templates"]
    assert sorted(templates) == [template["nodes"] for template in shown["templates"]]
    keys = {"nodes", "stages", "iteration_s", "peak_bytes", "gap"}
    assert all(keys == set(template) for template in shown["templates"])
    nodes = sorted(node for pipeline in shown["plan"]["pipelines"] for node in pipeline["nodes"])
    assert list(plan.nodes) == nodes
    counts = [pipeline["microbatches"] for pipeline in shown["plan"]["pipelines"]]
    assert problem.num_microbatches == sum(counts)
    iteration_s = plan_iteration_s(plan, PlainTimes(problem))
    used = {len(pipeline.nodes) for pipeline in plan.pipelines}
    assert iteration_s == shown["plan"]["iteration_s"]
    slowest_s = max(t["iteration_s"] for t in shown["templates"] if t["nodes"] in used)
    assert iteration_s >= slowest_s * (1 - 1e-9)  # Reductions and the commit follow.
    samples = problem.num_microbatches * problem.profile.microbatch_size
    assert samples / iteration_s == shown["plan"]["samples_per_s"]
    assert shown["planning_s"] == 0.25


def test_json_with_the_papers_objective_has_its_value() -> None:
    """T1 + T2 + T3 at N_b = 4S: equal stages of 90 ms take (4 * 2 + 2 - 1) of them."""
    problem = equal_problem(failures_tolerated=0)
    templates = paper_templates(problem, 2)
    plan = bind(problem, [templates[2].template], (0, 1), epoch=0)

    shown = plan_json(problem, templates, plan, planning_s=0.25)

    two = shown["templates"][1]
    assert (two["nodes"], len(two["stages"])) == (2, 2)
    assert abs(two["iteration_s"] - 9 * 0.09) < 1e-9
    assert "gap" not in two
