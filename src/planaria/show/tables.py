"""Templates and plans as `planaria plan` shows them: tables for a terminal, or JSON.

The iteration time and the peak memory (of the fullest device) of a template are computed for the
most microbatches that one of its pipelines gets in the plan. A template that the plan does not use
is given an even share, rounded up: the job's microbatches divided by the number of such pipelines
that fit into the plan's nodes, or into the most nodes that there can be after joins if the template
is too large for any plan of the present nodes.

The gap is an upper bound on how much slower a template is than the best partition of as many nodes,
at such an even share. Bubbles are a share of the plan's whole iteration, reductions included.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planaria.core.plan import PipelineTemplate, Plan, Stage
from planaria.estimator.makespan import makespan_s, stage_seconds
from planaria.estimator.peak_memory import peak_bytes
from planaria.planner.layout.instantiate import first_gap
from planaria.planner.plans import (
    PlanCatalog,
    pipeline_microbatches,
    plan_bubble_share,
    plan_iteration_s,
)
from planaria.planner.problem import Problem
from planaria.planner.templates import RankedTemplate
from planaria.show.alike import alike_pipelines
from planaria.show.words import (
    bytes_text,
    count_text,
    printable,
    range_text,
    ranges_text,
    seconds_text,
    share_text,
)

_STAGES_MAX: Final = 8


def plan_table(catalog: PlanCatalog, plan: Plan, *, templates: Sequence[RankedTemplate]) -> Group:
    """The tables of the templates, of the plan, and of the plans after failures and joins.

    Args:
        catalog: all plans of the job, those for fewer and for more nodes included.
    """
    parts: list[RenderableType] = [
        _heading(catalog.problem, plan),
        _templates_table(catalog, templates, plan),
        *_recomputation_lines(templates),
        _pipelines_table(catalog, plan),
        _summary(catalog, plan),
    ]
    fewer, more = _fewer_plans(catalog, plan), _more_plans(catalog, plan)
    if fewer:
        title = f"After failures{' of the fastest nodes' if _is_unequal(plan) else ''}"
        parts.append(_others_table(catalog, plan, fewer, title=title, nodes="nodes\nleft"))
    if more:
        parts.append(_others_table(catalog, plan, more, title="After joins", nodes="nodes"))
    note = _joins_note(catalog.problem, plan, templates)
    if note:
        parts.append(Text(note, style="yellow"))
    return Group(*(line for part in parts for line in (part, Text())))


def plan_json(
    catalog: PlanCatalog,
    plan: Plan,
    *,
    templates: Sequence[RankedTemplate],
    planning_s: float,
) -> dict[str, Any]:
    """The content of `planaria plan --json`: what `plan_table` shows.

    A template that was chosen by the objective of Oobleck's paper has its value as iteration_s.

    Args:
        planning_s: time that it took to make templates and plans, seconds.
    """
    costs = _costs(catalog, templates, plan)
    return {
        "templates": [
            {
                "nodes": cost.template.num_nodes,
                "stages": [
                    {
                        "first_layer": stage.first_layer,
                        "end_layer": stage.end_layer,
                        "devices": stage.num_devices,
                        **_recomputation_json(stage),
                    }
                    for stage in cost.template.stages
                ],
                **_kinds_json(cost.template),
                "iteration_s": ranked.objective_s if ranked.is_paper else cost.iteration_s,
                "peak_bytes": cost.peak_bytes,
                **({} if ranked.is_paper else {"gap": ranked.gap}),
            }
            for cost, ranked in zip(costs, templates, strict=True)
        ],
        "plan": {
            "pipelines": [
                {"nodes": list(pipeline.nodes), "microbatches": count}
                for pipeline, count in zip(plan.pipelines, pipeline_microbatches(plan), strict=True)
            ],
            **_speed(catalog, plan),
        },
        "fewer_nodes": _others_json(catalog, _fewer_plans(catalog, plan)),
        "more_nodes": _others_json(catalog, _more_plans(catalog, plan)),
        "planning_s": planning_s,
    }


def _others_json(catalog: PlanCatalog, others: Mapping[int, Plan]) -> list[dict[str, Any]]:
    """JSON of the plans for other numbers of nodes."""
    return [
        {
            "nodes": num_nodes,
            "pipelines": [
                {"nodes": pipeline.template.num_nodes, "microbatches": count}
                for pipeline, count in zip(
                    other.pipelines, pipeline_microbatches(other), strict=True
                )
            ],
            **_speed(catalog, other),
        }
        for num_nodes, other in others.items()
    ]


def _kinds_json(template: PipelineTemplate) -> dict[str, Any]:
    """JSON of the kinds of a template's nodes, in order; empty if all are as profiled."""
    return {"node_kinds": [asdict(kind) for kind in template.kinds]} if template.kinds else {}


def _recomputation_json(stage: Stage) -> dict[str, Any]:
    """JSON of what each layer of a stage computes again; empty where the planner chose nothing."""
    return {"recomputation": list(stage.recomputation)} if stage.recomputation else {}


def _speed(catalog: PlanCatalog, plan: Plan) -> dict[str, float]:
    iteration_s = plan_iteration_s(plan, catalog.times)
    return {
        "iteration_s": iteration_s,
        "samples_per_s": samples_per_s(catalog.problem, iteration_s),
        "bubble_share": plan_bubble_share(plan, catalog.times),
    }


def model_text(problem: Problem) -> str:
    """The model and device on which the profile was measured, in words."""
    profile = problem.profile
    return f"{count_text(len(profile.layers), 'layer')}, {profile.dtype} on {profile.device}"


def job_text(problem: Problem, plan: Plan) -> str:
    """The job's nodes, microbatches and tolerated failures, in words."""
    return (
        f"{count_text(len(plan.nodes), 'node')} of "
        f"{count_text(problem.devices_per_node, 'device')}, "
        f"{count_text(problem.num_microbatches, 'microbatch')} "
        f"of {count_text(problem.profile.microbatch_size, 'sample')}, "
        f"{count_text(problem.failures_tolerated, 'failure')} tolerated"
    )


def samples_per_s(problem: Problem, iteration_s: float) -> float:
    """Samples per second of the whole job; 0 if an iteration takes no time."""
    num_samples = problem.num_microbatches * problem.profile.microbatch_size
    return num_samples / iteration_s if iteration_s else 0.0


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a template costs at the microbatches that it gets.

    Attributes:
        num_used: number of pipelines of this template in the plan.
        peak_bytes: peak memory of the fullest device.
    """

    template: PipelineTemplate
    num_used: int
    iteration_s: float
    peak_bytes: int


def _costs(
    catalog: PlanCatalog, templates: Sequence[RankedTemplate], plan: Plan
) -> Iterator[_Cost]:
    """The cost of each template, in their order."""
    problem, num_nodes = catalog.problem, len(plan.nodes)
    largest = num_nodes - problem.failures_tolerated * templates[0].template.num_nodes
    used: dict[PipelineTemplate, list[int]] = {}
    for pipeline, count in zip(plan.pipelines, pipeline_microbatches(plan), strict=True):
        used.setdefault(pipeline.template, []).append(count)
    for ranked in templates:
        counts = used.get(ranked.template, [])
        size = ranked.template.num_nodes
        would_fit = max(1, (num_nodes if size <= largest else max(catalog.plans)) // size)
        microbatches = max(counts, default=-(-problem.num_microbatches // would_fit))
        yield _cost(problem, ranked, num_used=len(counts), num_microbatches=microbatches)


def _cost(
    problem: Problem, ranked: RankedTemplate, *, num_used: int, num_microbatches: int
) -> _Cost:
    template, iteration_s = ranked.template, ranked.objective_s
    if num_used or ranked.is_paper:  # The objective is not the makespan at these microbatches.
        iteration_s = makespan_s(stage_seconds(problem.profile, template), num_microbatches)
    return _Cost(
        template=template,
        num_used=num_used,
        iteration_s=iteration_s,
        peak_bytes=_peak_bytes(problem, template, num_microbatches),
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
    model, what = printable(problem.profile.model), model_text(problem)
    return Text.assemble((model, "bold"), f"  {what}\n{job_text(problem, plan)}")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)


def _templates_table(
    catalog: PlanCatalog, templates: Sequence[RankedTemplate], plan: Plan
) -> Table:
    table = _table("Pipeline templates")
    table.add_column("nodes", justify="right")
    if _is_unequal(plan):
        table.add_column("their speed\nand memory")
    table.add_column("used", justify="right")
    table.add_column("stages: layers x devices")
    table.add_column("iteration", justify="right", no_wrap=True)
    table.add_column("gap", justify="right", no_wrap=True)
    table.add_column("peak\nmemory", justify="right", no_wrap=True)
    for ranked, cost in zip(templates, _costs(catalog, templates, plan), strict=True):
        kinds = [", ".join(_kinds_texts(cost.template))] if _is_unequal(plan) else []
        table.add_row(
            str(cost.template.num_nodes),
            *kinds,
            str(cost.num_used or "-"),
            _stages_text(cost.template.stages, is_used=cost.num_used > 0),
            seconds_text(cost.iteration_s),
            "-" if ranked.is_paper else _gap_text(ranked.gap),
            bytes_text(cost.peak_bytes),
            style="bold green" if cost.num_used else "dim",
        )
    return table


def _recomputation_lines(templates: Sequence[RankedTemplate]) -> list[Text]:
    """A paragraph with what the stages of each template compute again, if any stage does."""
    lines = []
    for template in (ranked.template for ranked in templates):
        stages = [
            f"{range_text(stage.first_layer, stage.end_layer - 1)} {_modes_text(stage)}"
            for stage in template.stages
        ]
        if any(stage.recomputation for stage in template.stages):
            lines.append(f"{count_text(template.num_nodes, 'node')}: {' | '.join(stages)}")
    text = "computed again in the backward, with the number of layers:\n" + "\n".join(lines)
    return [Text(text)] if lines else []


def _modes_text(stage: Stage) -> str:
    """The modes of recomputation in a stage, with the number of layers of each."""
    counts = Counter(stage.recomputation)
    modes = [f"{mode} {counts[mode]}" for mode in ("none", "selective", "full") if counts[mode]]
    return ", ".join(modes) or "none"


def _pipelines_table(catalog: PlanCatalog, plan: Plan) -> Table:
    """The table of the plan: a row for all pipelines of one template with equal microbatches."""
    problem = catalog.problem
    iteration_s = plan_iteration_s(plan, catalog.times)
    table = _table("Plan")
    table.add_column("pipe-\nlines")
    table.add_column("how\nmany", justify="right")
    table.add_column("nodes")
    table.add_column("micro-\nbatches", justify="right")
    table.add_column("computed", justify="right", no_wrap=True)
    table.add_column("bubbles", justify="right", no_wrap=True)
    table.add_column("peak\nmemory", justify="right", no_wrap=True)
    for group in alike_pipelines(problem.profile, plan):
        table.add_row(
            ranges_text(group.indices),
            str(len(group.pipelines)),
            ranges_text(group.nodes),
            str(group.num_microbatches),
            seconds_text(catalog.times.makespan_s(group.template, group.num_microbatches)),
            share_text(group.bubble_share(iteration_s)),
            bytes_text(_peak_bytes(problem, group.template, group.num_microbatches)),
        )
    return table


def _summary(catalog: PlanCatalog, plan: Plan) -> Text:
    iteration_s = plan_iteration_s(plan, catalog.times)
    return Text.assemble(
        "iteration ",
        (seconds_text(iteration_s), "bold"),
        "   ",
        (f"{samples_per_s(catalog.problem, iteration_s):,.1f} samples/s", "bold"),
        f"   {share_text(plan_bubble_share(plan, catalog.times))} bubbles",
    )


def _fewer_plans(catalog: PlanCatalog, plan: Plan) -> dict[int, Plan]:
    """Plans for fewer nodes by number of nodes, largest first."""
    num_nodes = len(plan.nodes)
    return {n: catalog.plans[n] for n in sorted(catalog.plans, reverse=True) if n < num_nodes}


def _more_plans(catalog: PlanCatalog, plan: Plan) -> dict[int, Plan]:
    """Plans for more nodes by number of nodes, smallest first."""
    return {n: catalog.plans[n] for n in sorted(catalog.plans) if n > len(plan.nodes)}


def _others_table(
    catalog: PlanCatalog, plan: Plan, others: Mapping[int, Plan], *, title: str, nodes: str
) -> Table:
    """A table of plans for other numbers of nodes, compared with the present plan.

    Args:
        nodes: heading of the column with the number of nodes.
    """
    now_s = plan_iteration_s(plan, catalog.times)
    table = _table(title)
    table.add_column(nodes, justify="right")
    table.add_column("pipelines")
    table.add_column("iteration", justify="right", no_wrap=True)
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("longer\nthan now", justify="right", no_wrap=True)
    for num_nodes, other in others.items():
        iteration_s = plan_iteration_s(other, catalog.times)
        table.add_row(
            str(num_nodes),
            ", ".join(_pipelines_texts(other, num_nodes)),
            seconds_text(iteration_s),
            f"{samples_per_s(catalog.problem, iteration_s):,.1f}",
            f"{100 * (iteration_s / now_s - 1 if now_s else 0.0):+.1f}%",
        )
    return table


def _pipelines_texts(plan: Plan, num_left: int) -> Iterator[str]:
    """Numbers of pipelines by size, such as "3 x 4 nodes", then the number of idle nodes.

    Args:
        num_left: number of nodes that there are.
    """
    by_size = Counter(pipeline.template.num_nodes for pipeline in plan.pipelines)
    for num_nodes, count in sorted(by_size.items()):
        yield f"{count} x {count_text(num_nodes, 'node')}"
    if num_left > len(plan.nodes):
        yield f"{num_left - len(plan.nodes)} idle"


def _joins_note(problem: Problem, plan: Plan, templates: Sequence[RankedTemplate]) -> str:
    """A warning that after some joins not all nodes could work; empty if all always can.

    That happens where the first condition of Oobleck, section 4.1.1, is not met.
    """
    if _is_unequal(plan):
        return ""
    sizes = [ranked.template.num_nodes for ranked in templates]
    num_nodes = len(plan.nodes)
    gap = first_gap(num_nodes, sizes, min_pipelines=problem.failures_tolerated + 1)
    if not gap:
        return ""
    return (
        f"If nodes join and there are {range_text(gap[0], gap[-1])}, not all of them can "
        f"work: templates of {ranges_text(sizes)} nodes do not add up to that many."
    )


def _is_unequal(plan: Plan) -> bool:
    return any(pipeline.template.kinds for pipeline in plan.pipelines)


def _kinds_texts(template: PipelineTemplate) -> Iterator[str]:
    """Speed and memory of a template's nodes in their order: "2 of 1", "1 of 0.5 and 8.0 GiB"."""
    for kind, alike_nodes in groupby(template.node_kinds):
        memory = kind.device_memory_bytes
        of = f"{kind.speed:g}" + (f" and {bytes_text(memory)}" if memory else "")
        yield f"{len(list(alike_nodes))} of {of}"


def _stages_text(stages: Sequence[Stage], *, is_used: bool) -> str:
    """The layers and devices of each stage; only number and sizes of stages if the template is not
    used and has more than _STAGES_MAX."""
    if is_used or len(stages) <= _STAGES_MAX:
        return " | ".join(
            range_text(stage.first_layer, stage.end_layer - 1)
            + (f" x{stage.num_devices}" if stage.num_devices > 1 else "")
            for stage in stages
        )
    layers = sorted(stage.end_layer - stage.first_layer for stage in stages)
    devices = sorted(stage.num_devices for stage in stages)
    times = f" x{range_text(devices[0], devices[-1])}" if devices[-1] > 1 else ""
    noun = "layer" if layers[-1] == 1 else "layers"
    return f"{len(stages)} stages of {range_text(layers[0], layers[-1])} {noun}{times}"


def _gap_text(gap: float) -> str:
    return f"< {100 * gap:.1f}%" if gap >= 0.0005 else "0"
