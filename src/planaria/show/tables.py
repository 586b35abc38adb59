"""Templates and a plan as `planaria plan` shows them: tables for a terminal, or JSON.

The iteration time of a template is that at the microbatches which it gets in the plan; of one that
the plan does not use, at the job's microbatches divided among as many such pipelines as its nodes
would hold, rounded up. The peak memory is that of the fullest device at the same microbatches. The
gap is how much slower than the best partition of as many nodes a template can be at most, at the
latter microbatches.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from planaria.core.plan import PipelineTemplate, Plan, Stage
from planaria.estimator.makespan import makespan_s, stage_seconds
from planaria.estimator.memory import peak_bytes
from planaria.planner.plans import pipeline_microbatches, plan_iteration_s
from planaria.planner.problem import Problem
from planaria.planner.templates import RankedTemplate
from planaria.planner.times import PlainTimes
from planaria.show.words import bytes_text, counted, range_text, ranges_text, seconds_text


def plan_table(problem: Problem, templates: Mapping[int, RankedTemplate], plan: Plan) -> Group:
    """What rich prints: the templates, those in use first to the eye, then the plan."""
    return Group(
        _heading(problem, plan),
        Text(),
        _templates_table(problem, templates, plan),
        Text(),
        _pipelines_table(problem, plan),
        Text(),
        _summary(problem, plan),
    )


def plan_json(
    problem: Problem,
    templates: Mapping[int, RankedTemplate],
    plan: Plan,
    *,
    planning_s: float,
) -> dict[str, Any]:
    """The same as `planaria plan --json` prints it; templates that were chosen by Oobleck's own
    objective are given with that.

    Args:
        planning_s: what it took to make templates and plan.
    """
    ranked_by_size = [templates[size] for size in sorted(templates)]
    iteration_s = plan_iteration_s(plan, PlainTimes(problem))
    costs = [_cost(problem, templates[size], plan) for size in sorted(templates)]
    return {
        "templates": [
            {
                "nodes": cost.template.num_nodes,
                "stages": [
                    {
                        "first_layer": stage.first_layer,
                        "end_layer": stage.end_layer,
                        "devices": stage.num_devices,
                    }
                    for stage in cost.template.stages
                ],
                "iteration_s": ranked.objective_s if ranked.is_paper else cost.iteration_s,
                "peak_bytes": cost.peak_bytes,
                **({} if ranked.is_paper else {"gap": ranked.gap}),
            }
            for cost, ranked in zip(costs, ranked_by_size, strict=True)
        ],
        "plan": {
            "pipelines": [
                {"nodes": list(pipeline.nodes), "microbatches": count}
                for pipeline, count in zip(plan.pipelines, pipeline_microbatches(plan), strict=True)
            ],
            "iteration_s": iteration_s,
            "samples_per_s": samples_per_s(problem, iteration_s),
        },
        "planning_s": planning_s,
    }


def model_text(problem: Problem) -> str:
    """What the profile was measured of."""
    profile = problem.profile
    return f"{counted(len(profile.layers), 'layer')}, {profile.dtype} on {profile.device}"


def job_text(problem: Problem, plan: Plan) -> str:
    """What is planned, and for which machines."""
    return (
        f"{counted(len(plan.nodes), 'node')} of {counted(problem.devices_per_node, 'device')}, "
        f"{counted(problem.num_microbatches, 'microbatch')} "
        f"of {counted(problem.profile.microbatch_size, 'sample')}, "
        f"{counted(problem.failures_tolerated, 'failure')} tolerated"
    )


def samples_per_s(problem: Problem, iteration_s: float) -> float:
    """Of the whole job; 0 if an iteration takes no time."""
    num_samples = problem.num_microbatches * problem.profile.microbatch_size
    return num_samples / iteration_s if iteration_s else 0.0


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a template costs at the microbatches that it gets.

    Attributes:
        num_used: pipelines of this template in the plan.
        peak_bytes: of the fullest device.
    """

    template: PipelineTemplate
    num_used: int
    iteration_s: float
    peak_bytes: int


def _cost(problem: Problem, ranked: RankedTemplate, plan: Plan) -> _Cost:
    template = ranked.template
    used = [
        count
        for pipeline, count in zip(plan.pipelines, pipeline_microbatches(plan), strict=True)
        if pipeline.template == template
    ]
    would_fit = max(1, len(plan.nodes) // template.num_nodes)
    microbatches = max(used, default=-(-problem.num_microbatches // would_fit))
    iteration_s = ranked.objective_s
    if used or ranked.is_paper:  # It was chosen by another number.
        iteration_s = makespan_s(stage_seconds(problem.profile, template), microbatches)
    return _Cost(
        template=template,
        num_used=len(used),
        iteration_s=iteration_s,
        peak_bytes=_peak_bytes(problem, template, microbatches),
    )


def _peak_bytes(problem: Problem, template: PipelineTemplate, num_microbatches: int) -> int:
    return max(
        peak_bytes(
            problem.profile,
            template,
            num_microbatches=num_microbatches,
            gradient_copies=problem.gradient_copies,
        )
    )


def _heading(problem: Problem, plan: Plan) -> Text:
    model, what = problem.profile.model, model_text(problem)
    return Text.assemble((model, "bold"), f"  {what}\n{job_text(problem, plan)}")


def _templates_table(
    problem: Problem, templates: Mapping[int, RankedTemplate], plan: Plan
) -> Table:
    table = Table(title="Pipeline templates", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("nodes", justify="right")
    table.add_column("used", justify="right")
    table.add_column("stages: layers x devices")
    table.add_column("iteration", justify="right", no_wrap=True)
    table.add_column("gap", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    for size in sorted(templates):
        cost = _cost(problem, templates[size], plan)
        table.add_row(
            str(size),
            str(cost.num_used or "-"),
            _stages_text(cost.template.stages),
            seconds_text(cost.iteration_s),
            "-" if templates[size].is_paper else _gap_text(templates[size].gap),
            bytes_text(cost.peak_bytes),
            style="bold green" if cost.num_used else "dim",
        )
    return table


def _pipelines_table(problem: Problem, plan: Plan) -> Table:
    table = Table(title="Plan", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("pipeline", justify="right")
    table.add_column("nodes")
    table.add_column("stages", justify="right")
    table.add_column("microbatches", justify="right")
    table.add_column("iteration", justify="right", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    counts = pipeline_microbatches(plan)
    for index, (pipeline, count) in enumerate(zip(plan.pipelines, counts, strict=True)):
        seconds = stage_seconds(problem.profile, pipeline.template)
        table.add_row(
            str(index),
            ranges_text(pipeline.nodes),
            str(len(pipeline.template.stages)),
            str(count),
            seconds_text(makespan_s(seconds, count)),
            bytes_text(_peak_bytes(problem, pipeline.template, count)),
        )
    return table


def _summary(problem: Problem, plan: Plan) -> Text:
    iteration_s = plan_iteration_s(plan, PlainTimes(problem))
    return Text.assemble(
        "iteration ",
        (seconds_text(iteration_s), "bold"),
        "   ",
        (f"{samples_per_s(problem, iteration_s):,.1f} samples/s", "bold"),
    )


def _stages_text(stages: Iterable[Stage]) -> str:
    return " | ".join(
        range_text(stage.first_layer, stage.end_layer - 1)
        + (f" x{stage.num_devices}" if stage.num_devices > 1 else "")
        for stage in stages
    )


def _gap_text(gap: float) -> str:
    return f"< {100 * gap:.1f}%" if gap >= 0.0005 else "0"
