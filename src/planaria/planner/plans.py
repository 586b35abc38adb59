"""Plans: how many pipelines of which template, on which nodes, with how many microbatches each.

Three steps, for the nodes that there are:
1. Instantiations: every multiset of template sizes that uses all nodes in f + 1 pipelines or more.
2. Microbatches: for each of them the distribution with the lowest makespan of the slowest pipeline.
   A makespan never falls as microbatches are added. So giving each next microbatch to the pipeline
   that would end first with it is exact: it takes the makespans in ascending order.
3. The fastest of all; of equals the one with more pipelines, which keeps more copies alive.

Source: Oobleck (SOSP '23), section 4.2.
Differs: equation 6 levels N_b * T, which ignores that a pipeline fills and drains; here the largest
makespan is minimised. Its constraint sums over templates where it means pipelines.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heapreplace

from planaria.core.plan import Pipeline, PipelineTemplate, Plan, plain_plan
from planaria.errors import ConfigError
from planaria.estimator.makespan import Seconds, makespan_s, makespans_up_to, stage_seconds
from planaria.planner.templates import Problem


def instantiations(
    num_nodes: int, sizes: Sequence[int], *, min_pipelines: int
) -> Iterator[tuple[int, ...]]:
    """Every multiset of sizes that sums to num_nodes and has min_pipelines members or more.

    Equation 5 of Oobleck: with the smallest size at least once, or without it. Equation 5 counts
    pipelines by template; these are the templates' sizes, ascending, one entry a pipeline.

    Args:
        sizes: of the templates, in nodes; each once.
    """
    yield from _multisets(num_nodes, tuple(sorted(sizes)), min_pipelines)


def distribute_microbatches(
    problem: Problem, templates: Sequence[PipelineTemplate]
) -> tuple[int, ...]:
    """How many microbatches each pipeline gets, at least one, so that the last ends earliest.

    Raises:
        ConfigError: there are fewer microbatches than pipelines.
    """
    _check_microbatches(problem, len(templates))
    makespans_s = {template: _makespans_s(problem, template) for template in set(templates)}
    return _distribution(problem, [makespans_s[template] for template in templates])[1]


def best_plan(
    problem: Problem,
    nodes: Sequence[int],
    templates: Mapping[int, PipelineTemplate],
    *,
    epoch: int,
) -> Plan:
    """The plan with the lowest predicted iteration time in which every node works.

    It depends on the set of nodes only. O(instantiations * microbatches * log(pipelines)).

    Args:
        templates: by number of nodes.

    Raises:
        ConfigError: the templates make no f + 1 pipelines of that many nodes, or there are fewer
            microbatches than pipelines.
    """
    min_pipelines = problem.failures_tolerated + 1
    _check_microbatches(problem, min_pipelines)
    makespans_s = {size: _makespans_s(problem, template) for size, template in templates.items()}
    best: tuple[float, int, tuple[int, ...]] | None = None
    num_fewest = None
    for sizes in instantiations(len(nodes), tuple(templates), min_pipelines=min_pipelines):
        num_fewest = min(len(sizes), num_fewest or len(sizes))
        if len(sizes) <= problem.num_microbatches:
            iteration_s, _ = _distribution(problem, [makespans_s[size] for size in sizes])
            candidate = (iteration_s, -len(sizes), sizes)
            best = candidate if best is None else min(best, candidate)
    if best is None:
        raise _no_plan_error(problem, len(nodes), templates, num_fewest)
    return bind(problem, [templates[size] for size in best[2]], sorted(nodes), epoch=epoch)


def bind(
    problem: Problem, templates: Sequence[PipelineTemplate], nodes: Sequence[int], *, epoch: int
) -> Plan:
    """The plan with one pipeline of each of these templates, on the nodes in their order.

    Raises:
        ConfigError: there are fewer microbatches than pipelines.
    """
    assert sum(template.num_nodes for template in templates) == len(nodes)
    unused = iter(nodes)
    pipelines = tuple(
        Pipeline(template, tuple(next(unused) for _ in range(template.num_nodes)))
        for template in templates
    )
    return plain_plan(epoch, pipelines, distribute_microbatches(problem, templates))


def pipeline_microbatches(plan: Plan) -> tuple[int, ...]:
    """How many microbatches take each pipeline's own route."""
    return tuple(plan.routes.count(pipeline.route()) for pipeline in plan.pipelines)


def plan_iteration_s(problem: Problem, plan: Plan) -> float:
    """The predicted makespan of the slowest pipeline; microbatches must take plain routes."""
    microbatches = pipeline_microbatches(plan)
    assert sum(microbatches) == len(plan.routes)
    return max(
        makespan_s(stage_seconds(problem.profile, pipeline.template), count)
        for pipeline, count in zip(plan.pipelines, microbatches, strict=True)
    )


def _multisets(
    num_nodes: int, sizes: tuple[int, ...], min_pipelines: int
) -> Iterator[tuple[int, ...]]:
    if num_nodes == 0 and min_pipelines <= 0:
        yield ()
    # The rest is at least as large as the smallest size, and cannot be that often.
    if not sizes or num_nodes < sizes[0] * max(1, min_pipelines):
        return
    for multiset in _multisets(num_nodes - sizes[0], sizes, min_pipelines - 1):
        yield (sizes[0], *multiset)
    yield from _multisets(num_nodes, sizes[1:], min_pipelines)


def _makespans_s(problem: Problem, template: PipelineTemplate) -> Seconds:
    return makespans_up_to(stage_seconds(problem.profile, template), problem.num_microbatches)


def _distribution(
    problem: Problem, makespans_s: Sequence[Seconds]
) -> tuple[float, tuple[int, ...]]:
    """The iteration time, and the microbatches of each pipeline.

    Args:
        makespans_s: by pipeline, entry n - 1 that of n microbatches.
    """
    counts = [1] * len(makespans_s)
    iteration_s = max(float(makespans[0]) for makespans in makespans_s)
    spare = problem.num_microbatches - len(counts)
    if spare == 0:
        return iteration_s, tuple(counts)
    ends_s = [(float(makespans[1]), index) for index, makespans in enumerate(makespans_s)]
    heapify(ends_s)
    for _ in range(spare):
        end_s, index = ends_s[0]
        iteration_s = max(iteration_s, end_s)
        counts[index] += 1
        # The last entry stands in for one more than all microbatches, which nobody is given.
        next_count = min(counts[index] + 1, problem.num_microbatches)
        heapreplace(ends_s, (float(makespans_s[index][next_count - 1]), index))
    return iteration_s, tuple(counts)


def _check_microbatches(problem: Problem, num_pipelines: int) -> None:
    if problem.num_microbatches < num_pipelines:
        samples = problem.num_microbatches * problem.profile.microbatch_size
        needed = num_pipelines * problem.profile.microbatch_size
        remedy = (
            f"{num_pipelines} pipelines need a microbatch of {problem.profile.microbatch_size} "
            f"samples each; {needed} is the nearest that would do"
        )
        raise ConfigError("training.global_batch_size", samples, remedy)


def _no_plan_error(
    problem: Problem,
    num_nodes: int,
    templates: Mapping[int, PipelineTemplate],
    num_fewest: int | None,
) -> ConfigError:
    """Why no instantiation will do; num_fewest is the pipelines of the smallest one, if any."""
    if num_fewest is not None:
        samples = problem.num_microbatches * problem.profile.microbatch_size
        remedy = (
            f"all {num_nodes} nodes work only in {num_fewest} pipelines or more; "
            f"{num_fewest * problem.profile.microbatch_size} is the nearest that would do"
        )
        return ConfigError("training.global_batch_size", samples, remedy)
    min_pipelines = problem.failures_tolerated + 1
    sizes = tuple(templates)
    fit = [
        count
        for count in range(2 * num_nodes + max(sizes, default=0) + 1)
        if any(True for _ in instantiations(count, sizes, min_pipelines=min_pipelines))
    ]
    remedy = (
        f"no {min_pipelines} or more pipelines of {sorted(sizes)} nodes use all of them; "
        f"cluster.nodes = {min(fit, key=lambda n: abs(n - num_nodes))} would do"
        if fit
        else "there is no template for any number of nodes"
    )
    return ConfigError("cluster.nodes", num_nodes, remedy)
