"""Shadows: which node keeps the layers of which other one, to compute them when that one is lost.

Within a pipeline each node keeps the layers of its successor, and the second node also those of the
first. So the layers that a node computes after its neighbour is lost are consecutive, as one stage.

Source: Bamboo (NSDI '23).
Differs: in Bamboo the last node keeps the first node's layers; it would then compute both ends of
the model.
"""

from dataclasses import replace

from planaria.core.plan import Pipeline, Plan
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.estimator.peak_memory import bytes_by_rank
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import PricedPlan, price_plan


def with_shadows(plan: Plan) -> Plan:
    """The plan with shadows in each pipeline of two or more nodes: a neighbour keeps the layers of
    each node. Nodes must have one device."""
    assert plan.pipelines[0].template.devices_per_node == 1
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


def first_plan_with_shadows(problem: Problem, plan: Plan) -> PricedPlan:
    """A job's first plan with shadows, and its iteration time.

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
    if priced_plan is None:
        copies = problem.gradient_copies
        bytes_of = bytes_by_rank(problem.profile, with_shadows(plan), gradient_copies=copies)
        max_bytes = max(
            rank_bytes.state_bytes + rank_bytes.microbatch_bytes for rank_bytes in bytes_of.values()
        )
        why = "a node that keeps its neighbour's layers holds more than a device has"
        raise InfeasibleError(
            Limit.DEVICE_MEMORY,
            problem.profile.device_memory_bytes,
            f"{why}; more nodes or another policy would work, too",
            FeasibleValue(Limit.DEVICE_MEMORY, max_bytes, or_more=True),
        )
    return priced_plan
