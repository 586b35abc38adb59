"""Pipeline templates: the numbers of nodes they have, and how each cuts the model into stages.

Node specification (4.1.1): there are templates of n0, n0 + 1, .. N - f * n0 nodes, where n0 is the
smallest number of nodes that can hold the model. f pipelines of n0 nodes and one of all other nodes
use any number of nodes from (f + 1) * n0 to N, so no node is ever idle. Where nodes may join, N is
the largest number of nodes that the job may come to have.

Stage partition (4.1.2): bound.py finds the partition with the lowest lower bound for the number of
microbatches that the pipeline would get; this minimum is exact. From there refine.py searches for
the fastest partition nearby, by simulated 1F1B with communication. The bound limits how much slower
than the best partition the result can be.

Source: Oobleck (SOSP '23), section 4.1.
Differs: the paper minimises T1 + T2 + T3 at N_b = 4S (paper.py), and leaves out transfers. Here a
template must have memory for all microbatches of the job, because it outlives plans: after failures
one pipeline may get them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planaria.core.plan import NodeKind, PipelineTemplate, Stage
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.estimator.makespan import makespan_s, makespans_of_each, stage_seconds
from planaria.planner.partition.bound import BoundSearch
from planaria.planner.partition.fewest_stages import FewestStages, rows_of
from planaria.planner.partition.paper import paper_partition
from planaria.planner.partition.positions import Positions
from planaria.planner.partition.refine import nearby, table_of
from planaria.planner.partition.windows import windows
from planaria.planner.problem import Counts, Problem, Shape, StageCosts, stage_costs
from planaria.planner.recomputation import cheapest_that_fits


@dataclass(frozen=True, slots=True)
class RankedTemplate:
    """A template, its objective, and a lower bound on that.

    Attributes:
        objective_s: value that the choice minimised: the makespan with the template's number of
            microbatches, or T1 + T2 + T3.
        bound_s: lower bound on the objective of any template with as many nodes of each kind.
        is_paper: whether the objective is T1 + T2 + T3.
    """

    template: PipelineTemplate
    objective_s: float
    bound_s: float
    is_paper: bool = False

    @property
    def gap(self) -> float:
        """Upper bound on (objective - best possible objective) / best possible objective."""
        return self.objective_s / self.bound_s - 1 if self.bound_s else 0.0


def smallest_num_nodes(problem: Problem) -> int:
    """n0, the smallest number of nodes whose pipeline can hold the model.

    Raises:
        InfeasibleError: no number of nodes can hold the model.
    """
    n0 = _smallest_feasible(stage_costs(problem), len(problem.profile.layers))
    if n0 is None:
        raise _no_partition_error(problem)
    return n0


def template_sizes(problem: Problem, num_nodes: int, *, max_nodes: int = 0) -> tuple[int, ...]:
    """Template sizes in nodes: n0 to N - f * n0, where N is the larger of num_nodes and max_nodes.

    Pipelines of these sizes can use all of any (f + 1) * n0 to N nodes.

    Args:
        num_nodes: number of nodes of the cluster.
        max_nodes: number of nodes once others have joined; ignored if it is below num_nodes.

    Raises:
        InfeasibleError: num_nodes is too small for f + 1 pipelines; its ways say which f, number of
            nodes or memory would work.
    """
    n0 = smallest_num_nodes(problem)
    if num_nodes < (problem.failures_tolerated + 1) * n0:
        raise _too_few_nodes_error(problem, num_nodes, n0)
    return tuple(range(n0, max(num_nodes, max_nodes) - problem.failures_tolerated * n0 + 1))


def pipeline_template(
    problem: Problem, num_nodes: int, *, num_pipelines: int = 1
) -> PipelineTemplate | None:
    """The fastest template for one pipeline; None if no partition uses all devices and fits.

    Args:
        num_nodes: number of nodes of the pipeline.
        num_pipelines: number of such pipelines, which share the job's microbatches.
    """
    ranked = ranked_template(problem, num_nodes, num_pipelines=num_pipelines)
    return ranked.template if ranked is not None else None


def ranked_template(
    problem: Problem, num_nodes: int, *, num_pipelines: int = 1
) -> RankedTemplate | None:
    """The template that `pipeline_template` gives, with its objective and bound."""
    num_microbatches = -(-problem.num_microbatches // num_pipelines)
    return fastest_templates(stage_costs(problem), {(num_nodes,): num_microbatches}).get(
        (num_nodes,)
    )


def pipeline_templates(
    problem: Problem,
    num_nodes: int,
    *,
    max_nodes: int = 0,
    known: Mapping[int, PipelineTemplate] | None = None,
) -> dict[int, PipelineTemplate]:
    """Templates for a cluster, by number of nodes; sizes without a partition are left out.

    Each template is the fastest for the number of microbatches that it would get if the whole
    cluster consisted of its pipelines. The cluster has max_nodes nodes for those sizes that
    num_nodes nodes do not need, and num_nodes for all others.

    Args:
        num_nodes, max_nodes: those of `template_sizes`.
        known: templates that are taken as they are, by number of nodes.

    Raises:
        InfeasibleError: `template_sizes` raises it.
    """
    known = known or {}
    sizes = template_sizes(problem, num_nodes, max_nodes=max_nodes)
    searched = [size for size in sizes if size not in known]
    ranked = _ranked_templates(problem, num_nodes, max_nodes, searched, n0=sizes[0])
    new_templates = {size: ranked_template.template for size, ranked_template in ranked.items()}
    templates = {**{size: known[size] for size in sizes if size in known}, **new_templates}
    return dict(sorted(templates.items()))


def ranked_templates(
    problem: Problem, num_nodes: int, *, max_nodes: int = 0
) -> dict[int, RankedTemplate]:
    """The templates that `pipeline_templates` gives, each with its objective and bound."""
    sizes = template_sizes(problem, num_nodes, max_nodes=max_nodes)
    return _ranked_templates(problem, num_nodes, max_nodes, sizes, n0=sizes[0])


def _ranked_templates(
    problem: Problem, num_nodes: int, max_nodes: int, sizes: Sequence[int], *, n0: int
) -> dict[int, RankedTemplate]:
    """The templates of these sizes; those without a partition are left out."""
    largest = num_nodes - problem.failures_tolerated * n0
    microbatches: dict[Counts, int] = {
        (size,): -(-problem.num_microbatches // (cluster // size))
        for size in sizes
        for cluster in [num_nodes if size <= largest else max(num_nodes, max_nodes)]
    }
    ranked = fastest_templates(stage_costs(problem), microbatches)
    return {size: ranked_template for (size,), ranked_template in ranked.items()}


def fastest_templates(
    costs: StageCosts, microbatches: Mapping[Counts, int]
) -> dict[Counts, RankedTemplate]:
    """The fastest template for each entry of `microbatches`; entries where none fits are left out.

    Args:
        microbatches: number of microbatches of a pipeline, by its number of nodes of each kind.
    """
    # Each node needs a stage, and each stage a layer.
    microbatches = {n: count for n, count in microbatches.items() if sum(n) <= costs.num_layers}
    if not microbatches:
        return {}
    best: dict[Counts, tuple[float, Shape]] = {}
    bounds_s: dict[Counts, float] = {}
    for searched in _costs_to_search(costs):
        search = BoundSearch(searched, microbatches)
        lowest_bounds = {
            counts: lowest_bound
            for counts in microbatches
            if (lowest_bound := search.lowest(counts)) is not None
        }
        bounds_s |= {counts: lowest_bound.bound_s for counts, lowest_bound in lowest_bounds.items()}
        starts = {counts: lowest_bound.shapes for counts, lowest_bound in lowest_bounds.items()}
        # One simulation serves all partitions that get the same number of microbatches.
        finalists: dict[int, list[tuple[Counts, Shape]]] = {}
        for counts, shapes in nearby(searched, starts, microbatches).items():
            pairs = finalists.setdefault(microbatches[counts], [])
            pairs.extend((counts, shape) for shape in shapes)
        for count, pairs in finalists.items():
            makespans_s = _makespans_s(costs, [shape for _, shape in pairs], count)
            for (counts, shape), seconds in zip(pairs, makespans_s, strict=True):
                best[counts] = min(best.get(counts, (seconds, shape)), (seconds, shape))
    return {
        counts: RankedTemplate(template_of(costs, shape), seconds, bounds_s[counts])
        for counts, (seconds, shape) in sorted(best.items())
    }


def _costs_to_search(costs: StageCosts) -> list[StageCosts]:
    """The costs, after those without recomputation where it makes more stages fit.

    The search knows nothing of the seconds of recomputation. So the partitions that need none
    are searched alone, too, and the fastest of both kinds is taken. The bounds of the second search
    hold for all partitions.
    """
    problem = costs.problem
    if not (problem.chooses_recomputation and costs.has_memory_limit):
        return [costs]
    without = stage_costs(replace(problem, chooses_recomputation=False), costs.kinds)
    is_equal = all(
        np.array_equal(without.most_in_flight[group], costs.most_in_flight[group])
        for group in costs.groups
    )
    return [costs] if is_equal else [without, costs]


def _makespans_s(costs: StageCosts, shapes: list[Shape], count: int) -> list[float]:
    """The makespan of each partition for a number of microbatches, with what it computes again."""
    makespans_s: list[float] = makespans_of_each(table_of(costs, rows_of(shapes)), count).tolist()
    if costs.problem.chooses_recomputation and costs.has_memory_limit:
        for index, shape in enumerate(shapes):
            template = template_of(costs, shape)
            if recomputes(template):
                seconds = stage_seconds(costs.problem.profile, template)
                makespans_s[index] = makespan_s(seconds, count)
    return makespans_s


def paper_templates(
    problem: Problem, num_nodes: int, *, max_nodes: int = 0
) -> dict[int, RankedTemplate]:
    """The templates that minimise Oobleck's own objective, which ignores memory limits."""
    sizes = template_sizes(problem, num_nodes, max_nodes=max_nodes)
    costs = stage_costs(_without_memory(problem))
    partitions = {size: paper_partition(costs, size) for size in sizes}
    return {
        size: RankedTemplate(template_of(costs, shape), seconds, seconds, is_paper=True)
        for size, (seconds, shape) in (
            (n, partition) for n, partition in partitions.items() if partition is not None
        )
    }


def paper_template(problem: Problem, num_nodes: int) -> PipelineTemplate | None:
    """The template of any number of nodes that minimises Oobleck's own objective; None if there is
    no partition."""
    costs = stage_costs(_without_memory(problem))
    partition = paper_partition(costs, num_nodes)
    return None if partition is None else template_of(costs, partition[1])


def template_of(costs: StageCosts, shape: Shape) -> PipelineTemplate:
    """The template with this partition."""
    firsts = (0, *(end for end, _ in shape))
    stages = []
    kinds = []
    device = 0
    for index, (first, (end, group)) in enumerate(zip(firsts, shape, strict=False)):
        stage = Stage(first, end, costs.count_of(group))
        num_in_flight = min(costs.problem.num_microbatches, len(shape) - index)
        stages.append(_with_recomputation(costs, stage, costs.kind_of(group), num_in_flight))
        if device % costs.devices_per_node == 0:
            kinds.append(costs.kinds[costs.kind_of(group)])
        device += costs.count_of(group)
    is_plain = all(kind == NodeKind() for kind in kinds)
    return PipelineTemplate(tuple(stages), len(kinds), () if is_plain else tuple(kinds))


def recomputes(template: PipelineTemplate) -> bool:
    """Whether some stage computes activations again."""
    return any(stage.recomputation for stage in template.stages)


def _with_recomputation(
    costs: StageCosts, stage: Stage, kind_index: int, num_in_flight: int
) -> Stage:
    """The stage with what it has to compute again to fit into the memory of its node's devices."""
    problem, kind = costs.problem, costs.kinds[kind_index]
    limit_bytes = kind.device_memory_bytes or problem.profile.device_memory_bytes
    if not (problem.chooses_recomputation and limit_bytes):
        return stage
    return cheapest_that_fits(
        problem.profile,
        stage,
        num_in_flight=num_in_flight,
        gradient_copies=problem.gradient_copies,
        limit_bytes=limit_bytes,
    )


def _without_memory(problem: Problem) -> Problem:
    return replace(problem, profile=replace(problem.profile, device_memory_bytes=0))


def _smallest_feasible(costs: StageCosts, max_nodes: int) -> int | None:
    """The smallest number of nodes, up to max_nodes, for which a partition fits; None if there is
    none."""
    fewest_stages = FewestStages(costs, Positions(costs, (max_nodes,)), windows(costs, 1, np.inf))
    return next((n for n in range(1, max_nodes + 1) if fewest_stages.is_feasible((n,))), None)


def _no_partition_error(problem: Problem) -> InfeasibleError:
    num_layers = len(problem.profile.layers)
    needed = _smallest_memory_bytes(problem, num_layers)
    if needed is None:
        why = f"the {num_layers} layers cannot use that many devices of a node; use fewer"
        return InfeasibleError(Limit.DEVICES_PER_NODE, problem.devices_per_node, why)
    limit_bytes = problem.profile.device_memory_bytes
    why = "no number of nodes can hold the model"
    way = FeasibleValue(Limit.DEVICE_MEMORY, needed, or_more=True)
    return InfeasibleError(Limit.DEVICE_MEMORY, limit_bytes, why, way)


def _too_few_nodes_error(problem: Problem, num_nodes: int, n0: int) -> InfeasibleError:
    num_pipelines = problem.failures_tolerated + 1
    ways = [FeasibleValue(Limit.NODES, num_pipelines * n0, or_more=True)]
    if num_nodes >= n0:
        ways.append(FeasibleValue(Limit.FAILURES, num_nodes // n0 - 1))
    needed = _smallest_memory_bytes(problem, num_nodes // num_pipelines)
    if needed is not None:
        ways.append(FeasibleValue(Limit.DEVICE_MEMORY, needed, or_more=True))
    why = f"pipelines of {n0} or more nodes are needed, f + 1 = {num_pipelines} of them"
    return InfeasibleError(Limit.NODES, num_nodes, why, *ways)


def _smallest_memory_bytes(problem: Problem, max_nodes: int) -> int | None:
    """The least device memory with which a pipeline of at most max_nodes nodes can hold the model;
    None if it cannot even without a memory limit."""

    def holds(memory_bytes: int) -> bool:
        profile = replace(problem.profile, device_memory_bytes=memory_bytes)
        costs = stage_costs(replace(problem, profile=profile))
        return _smallest_feasible(costs, max_nodes) is not None

    if not holds(0):  # 0 stands for no memory limit.
        return None
    enough = 1
    while not holds(enough):
        enough *= 2
    too_little = enough // 2
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        too_little, enough = (too_little, middle) if holds(middle) else (middle, enough)
    return enough
