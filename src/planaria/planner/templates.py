"""Pipeline templates: for how many nodes, and how each cuts the model into stages.

Node specification (4.1.1): templates of n0, n0 + 1, .. N - f * n0 nodes, where n0 is the smallest
number of nodes that can hold the model. f pipelines of n0 nodes and one of all the others use any
number of nodes from (f + 1) * n0 to N, so no node ever idles. Where nodes may join, N is the most
that there may be.

Stage partition (4.1.2): the partition with the lowest bound at the microbatches that the pipeline
would get, which is exact (bound.py), and from there the fastest nearby by simulated 1F1B with
communication (refine.py). The bound says how far from the best it can be at most.

Source: Oobleck (SOSP '23), section 4.1.
Differs: the paper minimises T1 + T2 + T3 at N_b = 4S (paper.py), and leaves out transfers. Memory
allows for all microbatches of the job, as a template outlives plans: after failures one pipeline
may get them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planaria.core.plan import NodeKind, PipelineTemplate, Stage
from planaria.errors import ConfigError
from planaria.estimator.makespan import makespans_of_each
from planaria.planner.partition.bound import BoundSearch
from planaria.planner.partition.fitting import Fitting, rows_of
from planaria.planner.partition.paper import paper_partition
from planaria.planner.partition.positions import Positions
from planaria.planner.partition.refine import nearby, table_of
from planaria.planner.partition.windows import windows
from planaria.planner.problem import Counts, Problem, Shape, StageCosts, stage_costs


@dataclass(frozen=True, slots=True)
class RankedTemplate:
    """A template and what is known of it.

    Attributes:
        objective_s: what it was chosen by: its makespan at its microbatches, or T1 + T2 + T3.
        bound_s: no template of so many nodes has less.
        is_paper: it is T1 + T2 + T3.
    """

    template: PipelineTemplate
    objective_s: float
    bound_s: float
    is_paper: bool = False

    @property
    def gap(self) -> float:
        """By how much it can exceed the best at most, as a share of that."""
        return self.objective_s / self.bound_s - 1 if self.bound_s else 0.0


def smallest_num_nodes(problem: Problem) -> int:
    """n0: the fewest nodes of which a pipeline can hold the model.

    Raises:
        ConfigError: no number of nodes can.
    """
    n0 = _smallest(stage_costs(problem), len(problem.profile.layers))
    if n0 is None:
        raise _no_partition_error(problem)
    return n0


def template_sizes(problem: Problem, num_nodes: int, *, max_nodes: int = 0) -> tuple[int, ...]:
    """n0 .. N - f * n0: the sizes of templates that keep all of at most N nodes at work.

    Args:
        num_nodes: N, of the cluster.
        max_nodes: N once nodes have joined, if that is more.

    Raises:
        ConfigError: N nodes are too few for f + 1 pipelines; it says which f, N or memory would do.
    """
    n0 = smallest_num_nodes(problem)
    if num_nodes < (problem.failures_tolerated + 1) * n0:
        raise _too_few_nodes_error(problem, num_nodes, n0)
    return tuple(range(n0, max(num_nodes, max_nodes) - problem.failures_tolerated * n0 + 1))


def pipeline_template(
    problem: Problem, num_nodes: int, *, num_pipelines: int = 1
) -> PipelineTemplate | None:
    """The fastest stage partition of one pipeline, None where none fits or uses all devices.

    Args:
        num_nodes: of the pipeline.
        num_pipelines: such pipelines that share the job's microbatches.
    """
    ranked = ranked_template(problem, num_nodes, num_pipelines=num_pipelines)
    return ranked.template if ranked is not None else None


def ranked_template(
    problem: Problem, num_nodes: int, *, num_pipelines: int = 1
) -> RankedTemplate | None:
    """As `pipeline_template`, with what is known of it."""
    num_microbatches = -(-problem.num_microbatches // num_pipelines)
    return fastest_templates(stage_costs(problem), {(num_nodes,): num_microbatches}).get(
        (num_nodes,)
    )


def pipeline_templates(
    problem: Problem, num_nodes: int, *, max_nodes: int = 0
) -> dict[int, PipelineTemplate]:
    """By number of nodes, the templates for a cluster; sizes that cannot be are left out.

    Each is the fastest at the microbatches that it gets where the whole cluster is made of it; of
    those that only more nodes need, the cluster of max_nodes.

    Args:
        num_nodes, max_nodes: as `template_sizes`.

    Raises:
        ConfigError: as `template_sizes`.
    """
    ranked = ranked_templates(problem, num_nodes, max_nodes=max_nodes)
    return {size: one.template for size, one in ranked.items()}


def ranked_templates(
    problem: Problem, num_nodes: int, *, max_nodes: int = 0
) -> dict[int, RankedTemplate]:
    """As `pipeline_templates`, with what is known of each."""
    sizes = template_sizes(problem, num_nodes, max_nodes=max_nodes)
    largest = num_nodes - problem.failures_tolerated * sizes[0]
    microbatches: dict[Counts, int] = {
        (size,): -(-problem.num_microbatches // (cluster // size))
        for size in sizes
        for cluster in [num_nodes if size <= largest else max(num_nodes, max_nodes)]
    }
    ranked = fastest_templates(stage_costs(problem), microbatches)
    return {size: one for (size,), one in ranked.items()}


def fastest_templates(
    costs: StageCosts, microbatches: Mapping[Counts, int]
) -> dict[Counts, RankedTemplate]:
    """By nodes of each kind the fastest at so many microbatches; none where nothing fits."""
    # Each node needs a stage, and each stage a layer.
    microbatches = {n: count for n, count in microbatches.items() if sum(n) <= costs.num_layers}
    if not microbatches:
        return {}
    search = BoundSearch(costs, microbatches)
    found = {counts: one for counts in microbatches if (one := search.lowest(counts)) is not None}
    starts = {counts: one.shapes for counts, one in found.items()}
    # The last round is run for all that have as many microbatches at once.
    finalists: dict[int, list[tuple[Counts, Shape]]] = {}
    for counts, shapes in nearby(costs, starts, microbatches).items():
        pairs = finalists.setdefault(microbatches[counts], [])
        pairs.extend((counts, shape) for shape in shapes)
    best: dict[Counts, tuple[float, Shape]] = {}
    for count, pairs in finalists.items():
        makespans_s = makespans_of_each(
            table_of(costs, rows_of([shape for _, shape in pairs])), count
        )
        for (counts, shape), seconds in zip(pairs, makespans_s.tolist(), strict=True):
            best[counts] = min(best.get(counts, (seconds, shape)), (seconds, shape))
    return {
        counts: RankedTemplate(template_of(costs, shape), seconds, found[counts].bound_s)
        for counts, (seconds, shape) in sorted(best.items())
    }


def paper_templates(
    problem: Problem, num_nodes: int, *, max_nodes: int = 0
) -> dict[int, RankedTemplate]:
    """The templates that Oobleck's own objective chooses, without memory as there."""
    sizes = template_sizes(problem, num_nodes, max_nodes=max_nodes)
    costs = stage_costs(_without_memory(problem))
    found = {size: paper_partition(costs, size) for size in sizes}
    return {
        size: RankedTemplate(template_of(costs, shape), seconds, seconds, is_paper=True)
        for size, (seconds, shape) in ((n, one) for n, one in found.items() if one is not None)
    }


def paper_template(problem: Problem, num_nodes: int) -> PipelineTemplate | None:
    """One of them, of any number of nodes; None if there is no partition."""
    costs = stage_costs(_without_memory(problem))
    found = paper_partition(costs, num_nodes)
    return None if found is None else template_of(costs, found[1])


def template_of(costs: StageCosts, shape: Shape) -> PipelineTemplate:
    """The template with this partition."""
    firsts = (0, *(end for end, _ in shape))
    stages = []
    kinds = []
    device = 0
    for first, (end, group) in zip(firsts, shape, strict=False):
        stages.append(Stage(first, end, costs.count_of(group)))
        if device % costs.devices_per_node == 0:
            kinds.append(costs.kinds[costs.kind_of(group)])
        device += costs.count_of(group)
    is_plain = all(kind == NodeKind() for kind in kinds)
    return PipelineTemplate(tuple(stages), len(kinds), () if is_plain else tuple(kinds))


def _without_memory(problem: Problem) -> Problem:
    return replace(problem, profile=replace(problem.profile, device_memory_bytes=0))


def _smallest(costs: StageCosts, max_nodes: int) -> int | None:
    """The fewest nodes, of at most max_nodes, for which there is a partition."""
    fitting = Fitting(costs, Positions(costs, (max_nodes,)), windows(costs, 1, np.inf))
    return next((n for n in range(1, max_nodes + 1) if fitting.is_feasible((n,))), None)


def _no_partition_error(problem: Problem) -> ConfigError:
    num_layers = len(problem.profile.layers)
    needed = _smallest_memory_bytes(problem, num_layers)
    if needed is None:
        remedy = f"the {num_layers} layers cannot use that many devices of a node; use fewer"
        return ConfigError("cluster.devices_per_node", problem.devices_per_node, remedy)
    limit_bytes = problem.profile.device_memory_bytes
    remedy = f"no number of nodes can hold the model; {needed} bytes or more would do"
    return ConfigError("cluster.device_memory_bytes", limit_bytes, remedy)


def _too_few_nodes_error(problem: Problem, num_nodes: int, n0: int) -> ConfigError:
    num_pipelines = problem.failures_tolerated + 1
    ways = [f"cluster.nodes = {num_pipelines * n0} or more"]
    if num_nodes >= n0:
        ways.append(f"resilience.failures_tolerated = {num_nodes // n0 - 1}")
    needed = _smallest_memory_bytes(problem, num_nodes // num_pipelines)
    if needed is not None:
        ways.append(f"cluster.device_memory_bytes = {needed} or more")
    remedy = (
        f"pipelines of {n0} or more nodes are needed, f + 1 = {num_pipelines} of them; "
        f"would do: {', '.join(ways)}"
    )
    return ConfigError("cluster.nodes", num_nodes, remedy)


def _smallest_memory_bytes(problem: Problem, max_nodes: int) -> int | None:
    """The device memory with which a pipeline of at most max_nodes nodes holds the model."""

    def holds(memory_bytes: int) -> bool:
        profile = replace(problem.profile, device_memory_bytes=memory_bytes)
        costs = stage_costs(replace(problem, profile=profile))
        return _smallest(costs, max_nodes) is not None

    if not holds(0):  # That is without a limit.
        return None
    most = 1
    while not holds(most):
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if holds(middle) else (middle, most)
    return most
