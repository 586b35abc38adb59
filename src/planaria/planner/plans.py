"""Plans: how many pipelines of which template, on which nodes, with how many microbatches each.

In three steps, for the nodes that there are:
1. Instantiation: the fastest multiset of template sizes that uses all nodes in f + 1 pipelines or
   more (instantiate.py).
2. Microbatches: the distribution with the lowest makespan of the slowest pipeline. A makespan never
   falls as microbatches are added. So giving each next microbatch to the pipeline that would end
   first with it is exact: it takes the makespans in ascending order.
3. Nodes, in their order.

`every_plan` takes them for every number of nodes that failures may leave.

Source: Oobleck (SOSP '23), section 4.2.
Differs: equation 6 levels N_b * T, which ignores that a pipeline fills and drains; here the largest
makespan is minimised. Its constraint sums over templates where it means pipelines.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from planaria.core.plan import Pipeline, PipelineTemplate, Plan, plain_plan
from planaria.errors import ConfigError
from planaria.estimator.makespan import (
    Seconds,
    makespan_s,
    makespans_up_to,
    stage_seconds,
    stage_table,
)
from planaria.planner.instantiate import fastest_sizes, numbers_of_pipelines
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_template


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EveryPlan:
    """What a job can be re-formed to, computed at its start so that a failure finds it ready.

    Attributes:
        templates: by number of nodes.
        makespans_s: of each template; entry n - 1 is that of n microbatches.
        plans: by the number of nodes that are left, on nodes 0, 1, ..; without it a job is
            re-formed by Oobleck's three steps only.
    """

    problem: Problem
    templates: Mapping[int, PipelineTemplate]
    makespans_s: Mapping[PipelineTemplate, Seconds]
    plans: Mapping[int, Plan]

    def distribution(self, templates: Sequence[PipelineTemplate]) -> tuple[float, tuple[int, ...]]:
        """The iteration time of these pipelines, and how many microbatches each of them gets.

        As `distribute_microbatches`, in well under a millisecond for templates that are known here.

        Raises:
            ConfigError: there are fewer microbatches than pipelines.
        """
        _check_microbatches(self.problem, len(templates))
        unknown = _makespans_s(self.problem, set(templates) - self.makespans_s.keys())
        makespans_s = {**self.makespans_s, **unknown}
        return _distribution(self.problem, [makespans_s[template] for template in templates])


def distribute_microbatches(
    problem: Problem, templates: Sequence[PipelineTemplate]
) -> tuple[int, ...]:
    """How many microbatches each pipeline gets, at least one, so that the last ends earliest.

    Raises:
        ConfigError: there are fewer microbatches than pipelines.
    """
    _check_microbatches(problem, len(templates))
    makespans_s = _makespans_s(problem, set(templates))
    return _distribution(problem, [makespans_s[template] for template in templates])[1]


def best_plan(
    problem: Problem,
    nodes: Sequence[int],
    templates: Mapping[int, PipelineTemplate],
    *,
    epoch: int,
) -> Plan:
    """The plan with the lowest predicted iteration time in which every node works.

    It depends on the set of nodes only.

    Args:
        templates: by number of nodes.

    Raises:
        ConfigError: the templates make no f + 1 pipelines of that many nodes, or there are fewer
            microbatches than pipelines.
    """
    min_pipelines = problem.failures_tolerated + 1
    _check_microbatches(problem, min_pipelines)
    by_template = _makespans_s(problem, templates.values())
    makespans_s = {size: by_template[template] for size, template in templates.items()}
    best = _fastest_sizes(problem, len(nodes), makespans_s)
    if best is None:
        raise _no_plan_error(problem, len(nodes), templates)
    return bind(problem, [templates[size] for size in best], sorted(nodes), epoch=epoch)


def every_plan(
    problem: Problem, num_nodes: int, templates: Mapping[int, PipelineTemplate]
) -> EveryPlan:
    """The best plan for every number of nodes from num_nodes down to n0.

    While (f + 1) * n0 nodes are left a plan has f + 1 pipelines or more; with fewer nodes it has as
    many as fit. Where no pipelines of these templates add up to the number of nodes, as with more
    nodes in a pipeline than the model has layers, the plan uses as many nodes as can work.

    The templates get company: fewer than (f + 1) * n0 nodes may need one of up to 2 * n0 - 1.

    Args:
        num_nodes: N, of the cluster at its largest.
        templates: by number of nodes, as `pipeline_templates` gives them.

    Raises:
        ConfigError: some number of nodes works only in more pipelines than there are microbatches.
    """
    n0 = min(templates)
    extra = {n: pipeline_template(problem, n) for n in range(max(templates) + 1, 2 * n0)}
    templates = dict(templates) | {n: template for n, template in extra.items() if template}
    by_template = _makespans_s(problem, templates.values())
    by_size = {size: by_template[template] for size, template in templates.items()}
    at_work = _nodes_at_work(problem, num_nodes, n0=n0, sizes=tuple(templates))
    plans = {}
    for num_left, (num_working, min_pipelines) in at_work.items():
        degraded = replace(problem, failures_tolerated=min_pipelines - 1)
        sizes = _fastest_sizes(degraded, num_working, by_size)
        assert sizes is not None
        _, microbatches = _distribution(problem, [by_size[size] for size in sizes])
        pipelines = _pipelines([templates[size] for size in sizes], range(num_working))
        plans[num_left] = plain_plan(0, pipelines, microbatches)
    return every_plan_of(problem, templates, plans)


def every_plan_of(
    problem: Problem, templates: Mapping[int, PipelineTemplate], plans: Mapping[int, Plan]
) -> EveryPlan:
    """What `every_plan` found, from its parts: the makespans follow from the templates."""
    makespans_s = _makespans_s(problem, templates.values())
    return EveryPlan(problem=problem, templates=templates, makespans_s=makespans_s, plans=plans)


def bind(
    problem: Problem, templates: Sequence[PipelineTemplate], nodes: Sequence[int], *, epoch: int
) -> Plan:
    """The plan with one pipeline of each of these templates, on the nodes in their order.

    Raises:
        ConfigError: there are fewer microbatches than pipelines.
    """
    pipelines = _pipelines(templates, nodes)
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


def _pipelines(templates: Sequence[PipelineTemplate], nodes: Sequence[int]) -> tuple[Pipeline, ...]:
    assert sum(template.num_nodes for template in templates) == len(nodes)
    unused = iter(nodes)
    return tuple(
        Pipeline(template, tuple(next(unused) for _ in range(template.num_nodes)))
        for template in templates
    )


def _nodes_at_work(
    problem: Problem, num_nodes: int, *, n0: int, sizes: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """For n0 .. num_nodes nodes left, how many can work, and in how many pipelines at least.

    Raises:
        ConfigError: there are fewer microbatches than pipelines.
    """
    counts = numbers_of_pipelines(num_nodes, sizes)
    at_work = {}
    needed: tuple[int, int] = (0, 0)
    for num_left in range(n0, num_nodes + 1):
        min_pipelines = min(problem.failures_tolerated + 1, num_left // n0)
        num_working = next(n for n in range(num_left, 0, -1) if counts[n] >> min_pipelines)
        at_work[num_left] = (num_working, min_pipelines)
        num_fewest = _fewest(counts[num_working], min_pipelines)
        needed = max(needed, (num_fewest, num_left))
    num_fewest, num_left = needed
    if problem.num_microbatches < num_fewest:
        size = problem.profile.microbatch_size
        remedy = (
            f"once {num_left} nodes are left, all that can work do so only in {num_fewest} "
            f"pipelines or more, of a microbatch of {size} samples each; {num_fewest * size} is "
            "the nearest that would do"
        )
        raise ConfigError("training.global_batch_size", problem.num_microbatches * size, remedy)
    return at_work


def _fewest(numbers: int, min_pipelines: int) -> int:
    """The fewest pipelines, of min_pipelines or more, in a set of numbers."""
    above = numbers >> min_pipelines
    return min_pipelines + (above & -above).bit_length() - 1


def _fastest_sizes(
    problem: Problem, num_nodes: int, makespans_s: Mapping[int, Seconds]
) -> tuple[int, ...] | None:
    """The fastest instantiation.

    Args:
        makespans_s: by the number of nodes of a template.
    """
    return fastest_sizes(
        num_nodes,
        makespans_s,
        num_microbatches=problem.num_microbatches,
        min_pipelines=problem.failures_tolerated + 1,
    )


def _makespans_s(
    problem: Problem, templates: Iterable[PipelineTemplate]
) -> dict[PipelineTemplate, Seconds]:
    """The makespans of each template: entry n - 1 is that of n microbatches."""
    found = list(dict.fromkeys(templates))
    if not found:
        return {}
    table = stage_table([stage_seconds(problem.profile, template) for template in found])
    return dict(zip(found, makespans_up_to(table, problem.num_microbatches), strict=True))


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
    problem: Problem, num_nodes: int, templates: Mapping[int, PipelineTemplate]
) -> ConfigError:
    """Why no instantiation will do."""
    min_pipelines = problem.failures_tolerated + 1
    most = 2 * num_nodes + max(templates, default=0)
    numbers = numbers_of_pipelines(most, sorted(templates))
    if numbers[num_nodes] >> min_pipelines:
        num_fewest = _fewest(numbers[num_nodes], min_pipelines)
        samples = problem.num_microbatches * problem.profile.microbatch_size
        remedy = (
            f"all {num_nodes} nodes work only in {num_fewest} pipelines or more; "
            f"{num_fewest * problem.profile.microbatch_size} is the nearest that would do"
        )
        return ConfigError("training.global_batch_size", samples, remedy)
    fit = [count for count, there in enumerate(numbers) if there >> min_pipelines]
    remedy = (
        f"no {min_pipelines} or more pipelines of {sorted(templates)} nodes use all of them; "
        f"cluster.nodes = {min(fit, key=lambda n: abs(n - num_nodes))} would do"
        if fit
        else "there is no template for any number of nodes"
    )
    return ConfigError("cluster.nodes", num_nodes, remedy)
