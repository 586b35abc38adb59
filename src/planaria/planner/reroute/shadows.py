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
from planaria.planner.reroute.reroutes import Priced, priced


def shadowed(plan: Plan) -> Plan:
    """The plan with shadows in each pipeline of two or more nodes: a neighbour keeps the layers of
    each node. Nodes must have one device."""
    assert plan.pipelines[0].template.devices_per_node == 1
    shadows: dict[int, set[int]] = {}
    for pipeline in plan.pipelines:
        for index, keeper in _keepers(pipeline).items():
            stage = pipeline.template.stages[index]
            kept = shadows.setdefault(keeper, set())
            kept.update(range(stage.first_layer, stage.end_layer))
    return replace(plan, shadows={rank: tuple(sorted(shadows[rank])) for rank in sorted(shadows)})


def _keepers(pipeline: Pipeline) -> dict[int, int]:
    """The rank that keeps the layers of each stage, by stage; empty for a single stage."""
    ranks = [ranks[0] for ranks in pipeline.ranks_by_stage()]
    if len(ranks) == 1:
        return {}
    return {0: ranks[1]} | dict(enumerate(ranks[:-1], start=1))


def shadowed_start(problem: Problem, plan: Plan) -> Priced:
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
    found = priced(problem, shadowed(plan))
    if found is None:
        copies = problem.gradient_copies
        held = bytes_by_rank(problem.profile, shadowed(plan), gradient_copies=copies)
        most = max(one.state_bytes + one.microbatch_bytes for one in held.values())
        why = "a node that keeps its neighbour's layers holds more than a device has"
        raise InfeasibleError(
            Limit.DEVICE_MEMORY,
            problem.profile.device_memory_bytes,
            f"{why}; more nodes or another policy would do, too",
            FeasibleValue(Limit.DEVICE_MEMORY, most, or_more=True),
        )
    return found
