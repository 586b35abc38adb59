"""Shadows: which node keeps the layers of which other one, to compute them when that one is lost.

Within a pipeline each node keeps the layers of its successor, and the second node also those of the
first. So the layers that a node computes after its neighbour is lost are consecutive, as one stage.

Source: Bamboo (NSDI '23).
Differs: in Bamboo the last node keeps the first node's layers; it would then compute both ends of
the model.
"""

from collections.abc import Mapping
from dataclasses import replace

from planaria.core.plan import Pipeline, PipelineTemplate, Plan, Stage, plain_plan
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.estimator.peak_memory import bytes_by_rank
from planaria.planner.plans import best_plan
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import PricedPlan, price_plan


def with_shadows(plan: Plan) -> Plan:
    """The plan with shadows in each pipeline of two or more nodes: a neighbour keeps the layers of
    each node. Nodes must have one device."""
    assert plan.devices_per_node == 1
    shadows: dict[int, set[int]] = {}
    for pipeline in plan.pipelines:
        for index, keeper in _keepers(pipeline).items():
            stage = pipeline.template.stages[index]
            kept_layers = shadows.setdefault(keeper, set())
            kept_layers.update(range(stage.first_layer, stage.end_layer))
    return replace(plan, shadows={rank: tuple(sorted(shadows[rank])) for rank in sorted(shadows)})


def _keepers(pipeline: Pipeline) -> dict[int, int]:
    """The rank that keeps the layers of each stage, by stage; empty for a single stage."""
    ranks = [ranks[0] for ranks in pipeline.ranks_by_stage()]
    if len(ranks) == 1:
        return {}
    return {0: ranks[1]} | dict(enumerate(ranks[:-1], start=1))


def first_plan_with_shadows(
    problem: Problem, plan: Plan, *, templates: Mapping[int, PipelineTemplate] | None = None
) -> PricedPlan:
    """A job's first plan with shadows, and its iteration time.

    The fastest plan without shadows has pipelines of few nodes, whose stages are large. Where its
    devices have no memory for shadows, the fastest plan is taken of those templates whose have.

    Args:
        plan: first plan without shadows.
        templates: templates by number of nodes; None: there is no other plan. They are not used
            where nodes are of different kinds.

    Raises:
        InfeasibleError: nodes have several devices, or a device has no memory for the shadows.
    """
    if problem.devices_per_node > 1:
        why = "a node that keeps its neighbour's layers has one device"
        raise InfeasibleError(
            Limit.DEVICES_PER_NODE,
            problem.devices_per_node,
            why,
            FeasibleValue(Limit.DEVICES_PER_NODE, 1),
        )
    priced_plan = price_plan(problem, with_shadows(plan))
    is_plain = not any(pipeline.template.kinds for pipeline in plan.pipelines)
    if priced_plan is None and templates and is_plain:
        priced_plan = _plan_of_fitting_templates(problem, plan, templates)
    if priced_plan is None:
        layers = range(len(problem.profile.layers))
        smallest = PipelineTemplate(tuple(Stage(n, n + 1, 1) for n in layers), len(layers))
        ways = "another policy would work, too"
        if _fits_with_shadows(problem, smallest):
            ways = f"more nodes or {ways}"
        why = "a node that keeps its neighbour's layers holds more than a device has"
        raise InfeasibleError(
            Limit.DEVICE_MEMORY,
            problem.profile.device_memory_bytes,
            f"{why}; {ways}",
            FeasibleValue(Limit.DEVICE_MEMORY, _needed_bytes(problem, plan), or_more=True),
        )
    return priced_plan


def _plan_of_fitting_templates(
    problem: Problem, plan: Plan, templates: Mapping[int, PipelineTemplate]
) -> PricedPlan | None:
    """The plan with shadows on the same nodes, of the templates that have memory for them; None if
    there is none."""
    fitting = {
        n: template for n, template in templates.items() if _fits_with_shadows(problem, template)
    }
    if not fitting:
        return None
    try:
        deeper = best_plan(problem, plan.nodes, fitting, epoch=plan.epoch)
    except InfeasibleError:
        return None
    return price_plan(problem, with_shadows(deeper))


def _fits_with_shadows(problem: Problem, template: PipelineTemplate) -> bool:
    limit_bytes = problem.profile.device_memory_bytes
    pipeline = Pipeline(template, tuple(range(template.num_nodes)))
    return not limit_bytes or limit_bytes >= _needed_bytes(
        problem, plain_plan(0, (pipeline,), (1,))
    )


def _needed_bytes(problem: Problem, plan: Plan) -> int:
    """The memory that a device needs for the plan with shadows, with one microbatch in flight."""
    copies = problem.gradient_copies
    bytes_of = bytes_by_rank(problem.profile, with_shadows(plan), gradient_copies=copies)
    return max(memory.state_bytes + memory.microbatch_bytes for memory in bytes_of.values())
