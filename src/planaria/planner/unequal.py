"""Plans for nodes that differ in speed and memory.

As for equal nodes, with a template for each way to take nodes of each kind: its nodes stand in the
order that suits them, a slow one gets fewer layers, and a pipeline of slow ones fewer microbatches.
Templates are made for the microbatches that a pipeline of their speed would get; those of the set
that is chosen are made anew for what they get there, as long as that is faster.

Ranked, not proved: against all sets, orders, partitions and batches of small clusters see
tests/planner/test_unequal.py.

Source: none of the papers; they assume equal nodes.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import isfinite, prod
from typing import Final

import numpy as np

from planaria.core.plan import NodeKind, Pipeline, PipelineTemplate, Plan, plain_plan
from planaria.errors import ConfigError
from planaria.planner.batches import check_microbatches
from planaria.planner.fitting import Fitting
from planaria.planner.instantiate import sets_of
from planaria.planner.positions import Positions
from planaria.planner.problem import Counts, Problem, StageCosts, stage_costs
from planaria.planner.sets import Instantiated, SetSearch, distribute_microbatches
from planaria.planner.templates import fastest_templates
from planaria.planner.times import PlainTimes
from planaria.planner.windows import windows

PARTS_MAX: Final = 1500
_ROUNDING: Final = 1e-9  # Of sums of speeds.


def unequal_plan(problem: Problem, nodes: Mapping[int, NodeKind], *, epoch: int) -> Plan:
    """The plan with the lowest predicted iteration time in which every node works.

    Args:
        nodes: their kinds, by number.

    Raises:
        ConfigError: a speed is not above 0, there are too many kinds, the nodes make no f + 1
            pipelines that hold the model, or there are fewer microbatches than pipelines.
    """
    kinds = sorted(set(nodes.values()))
    numbers = {kind: [node for node in sorted(nodes) if nodes[node] == kind] for kind in kinds}
    counts = tuple(map(len, numbers.values()))
    _check_kinds(kinds, counts)
    check_microbatches(problem, problem.failures_tolerated + 1)
    costs = stage_costs(problem, kinds)
    templates = _templates(costs, counts)
    times = PlainTimes(problem, templates.values())
    best = None
    if templates:
        search = SetSearch(problem, templates, times)
        best = search.fastest(counts, problem.failures_tolerated + 1)
    if best is None:
        raise _no_plan_error(problem, counts, templates)
    chosen, microbatches = _suited(costs, [templates[size] for size in best.sizes], best, times)
    unused = {kind: iter(of_kind) for kind, of_kind in numbers.items()}
    pipelines = tuple(
        Pipeline(template, tuple(next(unused[kind]) for kind in template.node_kinds))
        for template in chosen
    )
    return plain_plan(epoch, pipelines, microbatches)


def _templates(costs: StageCosts, nodes: Counts) -> dict[Counts, PipelineTemplate]:
    """By nodes of each kind, up to all but those of f of the smallest pipelines."""
    problem = costs.problem
    fitting = Fitting(costs, Positions(costs, nodes), windows(costs, 1, np.inf))
    parts = product(*(range(count + 1) for count in nodes))
    feasible = [part for part in parts if any(part) and fitting.is_feasible(part)]
    n0 = min(map(sum, feasible), default=0)
    most = sum(nodes) - problem.failures_tolerated * n0
    speeds = np.array([kind.speed for kind in costs.kinds])
    microbatches: dict[Counts, int] = {}
    for part in feasible:
        if sum(part) <= most:
            alike = max(1, int(nodes @ speeds / (part @ speeds) + _ROUNDING))
            microbatches[part] = -(-problem.num_microbatches // alike)
    ranked = fastest_templates(costs, microbatches) if microbatches else {}
    return {part: one.template for part, one in ranked.items()}


def _suited(
    costs: StageCosts,
    templates: Sequence[PipelineTemplate],
    best: Instantiated,
    times: PlainTimes,
) -> tuple[Sequence[PipelineTemplate], tuple[int, ...]]:
    """Templates for the microbatches that they get, and what they get, until nothing is faster."""
    iteration_s, microbatches = best.iteration_s, best.microbatches
    while True:
        by_count: dict[int, dict[Counts, PipelineTemplate]] = {}
        for count in set(microbatches):
            asked = {
                size: count for size, n in zip(best.sizes, microbatches, strict=True) if n == count
            }
            ranked = fastest_templates(costs, asked)
            by_count[count] = {size: one.template for size, one in ranked.items()}
        suited = [by_count[n][size] for size, n in zip(best.sizes, microbatches, strict=True)]
        dealt = distribute_microbatches(costs.problem, suited, times=times)
        next_s = times.iteration_s(suited, dealt)
        if next_s >= iteration_s:
            return templates, microbatches
        iteration_s, templates, microbatches = next_s, suited, dealt


def _check_kinds(kinds: Sequence[NodeKind], counts: Counts) -> None:
    for kind in kinds:
        if not (isfinite(kind.speed) and kind.speed > 0):
            raise ConfigError("speed", kind.speed, "must be above 0, 1 for the profile's own")
        if kind.device_memory_bytes < 0:
            raise ConfigError("memory", kind.device_memory_bytes, "must be 0 or more bytes")
    num_parts = prod(count + 1 for count in counts)
    if num_parts > PARTS_MAX:
        remedy = f"make {num_parts} different pipelines; at most {PARTS_MAX} would do: give nodes "
        remedy += "that are nearly alike the same speed and memory"
        raise ConfigError("nodes of different kinds", len(kinds), remedy)


def _no_plan_error(
    problem: Problem, counts: Counts, templates: Mapping[Counts, PipelineTemplate]
) -> ConfigError:
    """Why no pipelines of unequal nodes will do."""
    num_nodes = sum(counts)
    if not templates:
        remedy = "none of them holds the model, alone or with others; give nodes more memory"
        return ConfigError("cluster.nodes", num_nodes, remedy)
    for would_do in range(problem.failures_tolerated, -1, -1):
        found = next(sets_of(counts, list(templates), min_pipelines=would_do + 1), None)
        if found is not None and would_do == problem.failures_tolerated:
            size = problem.profile.microbatch_size
            remedy = f"all nodes work only in {len(found)} pipelines or so, of a microbatch each"
            return ConfigError(
                "training.global_batch_size", problem.num_microbatches * size, remedy
            )
        if found is not None:
            remedy = f"they make no {problem.failures_tolerated + 1} pipelines that hold the model"
            remedy += f"; resilience.failures_tolerated = {would_do} would do"
            return ConfigError("cluster.nodes", num_nodes, remedy)
    remedy = "some of them are in no pipeline that holds the model; leave them out"
    return ConfigError("cluster.nodes", num_nodes, remedy)
