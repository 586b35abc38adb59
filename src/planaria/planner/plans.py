"""Plans: how many pipelines of which template, on which nodes, with how many microbatches each.

In three steps, for the nodes that there are:
1. Instantiation: the fastest set of pipelines that uses all nodes, f + 1 or more (sets.py).
2. Microbatches: the distribution with which the slowest pipeline ends earliest (batches.py).
3. Nodes, in their order.

`every_plan` takes them for every number of nodes that failures may leave or joins may make,
`foreseen_plans` for as many failures as a job tolerates.

The first two steps are planaria's own unless a `Method` says otherwise.

Source: Oobleck (SOSP '23), section 4.2.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from planaria.core.plan import PipelineTemplate, Plan, plain_plan
from planaria.errors import ConfigError
from planaria.planner.layout.batches import check_microbatches
from planaria.planner.layout.instantiate import numbers_of_pipelines
from planaria.planner.layout.sets import Instantiated, SetSearch, distribute_microbatches
from planaria.planner.problem import Counts, Problem, batch_error
from planaria.planner.templates import pipeline_template
from planaria.planner.times import PlainTimes, pipelines_of

FORESEEN_MAX: Final = 8  # A plan for 24 nodes of 8 devices takes 0.1 s.


class Sets(Protocol):
    """Chooses sets of pipelines of some templates, with their microbatches."""

    def fastest(self, nodes: Counts, min_pipelines: int) -> Instantiated | None:
        """The one for so many nodes, which uses all of them; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How plans are made.

    Attributes:
        template: of so many nodes, None if there is none.
        sets: of templates.
    """

    template: Callable[[Problem, int], PipelineTemplate | None]
    sets: Callable[[Problem, Mapping[Counts, PipelineTemplate], PlainTimes], Sets]


METHOD: Final = Method(template=pipeline_template, sets=SetSearch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EveryPlan:
    """What a job can be re-formed to, computed at its start so that a failure finds it ready.

    Attributes:
        templates: by number of nodes; none where nodes differ.
        plans: by the number of nodes that there are, on nodes 0, 1, ..; without it a job is
            re-formed by Oobleck's three steps only.
        times: of the templates.
    """

    problem: Problem
    templates: Mapping[int, PipelineTemplate]
    plans: Mapping[int, Plan]
    times: PlainTimes

    def distribution(self, templates: Sequence[PipelineTemplate]) -> tuple[float, tuple[int, ...]]:
        """The iteration time of these pipelines, and how many microbatches each of them gets.

        As `distribute_microbatches`; fast for templates that are known here.

        Raises:
            ConfigError: there are fewer microbatches than pipelines.
        """
        microbatches = distribute_microbatches(self.problem, templates, times=self.times)
        return self.times.iteration_s(templates, microbatches), microbatches


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
    check_microbatches(problem, min_pipelines)
    search = SetSearch(problem, _by_counts(templates), PlainTimes(problem, templates.values()))
    best = search.fastest((len(nodes),), min_pipelines)
    if best is None:
        raise _no_plan_error(problem, len(nodes), templates)
    pipelines = pipelines_of([templates[size] for (size,) in best.sizes], sorted(nodes))
    return plain_plan(epoch, pipelines, best.microbatches)


def every_plan(
    problem: Problem, num_nodes: int, templates: Mapping[int, PipelineTemplate]
) -> EveryPlan:
    """The best plan for every number of nodes from num_nodes down to n0.

    While (f + 1) * n0 nodes are left a plan has f + 1 pipelines or more; with fewer nodes it has as
    many as fit. Where no pipelines of these templates add up to the number of nodes, as with more
    nodes in a pipeline than the model has layers, the plan uses as many nodes as can work.

    The templates get company: fewer than (f + 1) * n0 nodes may need one of up to 2 * n0 - 1.

    Args:
        num_nodes: N, of the cluster at its largest, once nodes have joined.
        templates: by number of nodes, as `pipeline_templates` gives them.

    Raises:
        ConfigError: some number of nodes works only in more pipelines than there are microbatches.
    """
    left = range(min(templates), num_nodes + 1)
    return _plans_for(problem, left, _with_company(problem, templates, METHOD), METHOD)


def foreseen_plans(
    problem: Problem,
    num_nodes: int,
    templates: Mapping[int, PipelineTemplate],
    *,
    max_nodes: int = 0,
    method: Method = METHOD,
) -> EveryPlan:
    """The best plan for all nodes, for what one to f failures leave of them, and for more of them.

    As `every_plan`, but all nodes work before the first failure, and of more than FORESEEN_MAX
    numbers of failures, or of nodes that join, so many are looked at, from 1 to the most.

    Args:
        max_nodes: nodes that there may be, if that is more.

    Raises:
        ConfigError: as `best_plan` and `every_plan`.
    """
    f, n0 = problem.failures_tolerated, min(templates)
    check_microbatches(problem, f + 1)
    fewer = [num_nodes - number for number in _some_up_to(f)]
    more = [num_nodes + number for number in _some_up_to(max_nodes - num_nodes)]
    left = sorted((*fewer, num_nodes, *more))
    if left[0] < (f + 1) * n0:
        templates = _with_company(problem, templates, method)
    every = _plans_for(problem, left, templates, method)
    if len(every.plans[num_nodes].nodes) < num_nodes:
        raise _no_plan_error(problem, num_nodes, templates)
    return every


def every_plan_of(
    problem: Problem, templates: Mapping[int, PipelineTemplate], plans: Mapping[int, Plan]
) -> EveryPlan:
    """What `every_plan` found, from its parts: the times follow from the templates."""
    times = PlainTimes(problem, templates.values())
    return EveryPlan(problem=problem, templates=templates, plans=plans, times=times)


def bind(
    problem: Problem, templates: Sequence[PipelineTemplate], nodes: Sequence[int], *, epoch: int
) -> Plan:
    """The plan with one pipeline of each of these templates, on the nodes in their order.

    Raises:
        ConfigError: there are fewer microbatches than pipelines.
    """
    times = PlainTimes(problem, templates)
    microbatches = distribute_microbatches(problem, templates, times=times)
    return plain_plan(epoch, pipelines_of(templates, nodes), microbatches)


def pipeline_microbatches(plan: Plan) -> tuple[int, ...]:
    """How many microbatches take each pipeline's own route."""
    counts = Counter(plan.routes)
    return tuple(counts[pipeline.route()] for pipeline in plan.pipelines)


def plan_iteration_s(plan: Plan, times: PlainTimes) -> float:
    """The predicted iteration of a plan whose microbatches take plain routes."""
    microbatches = pipeline_microbatches(plan)
    assert sum(microbatches) == len(plan.routes)
    return times.iteration_s([pipeline.template for pipeline in plan.pipelines], microbatches)


def plan_bubble_share(plan: Plan, times: PlainTimes) -> float:
    """The predicted part of an iteration in which the ranks that compute do not, 0 to 1."""
    templates = [pipeline.template for pipeline in plan.pipelines]
    return times.bubble_share(templates, pipeline_microbatches(plan))


def _some_up_to(most: int) -> Sequence[int]:
    """1 to so many, or FORESEEN_MAX of these numbers, the first and the last among them."""
    if most <= FORESEEN_MAX:
        return range(1, most + 1)
    steps = FORESEEN_MAX - 1
    return [1 + (most - 1) * step // steps for step in range(steps + 1)]


def _by_counts(templates: Mapping[int, PipelineTemplate]) -> dict[Counts, PipelineTemplate]:
    """The templates where nodes are all of one kind."""
    return {(size,): template for size, template in templates.items()}


def _with_company(
    problem: Problem, templates: Mapping[int, PipelineTemplate], method: Method
) -> dict[int, PipelineTemplate]:
    """These templates and larger ones, of up to 2 * n0 - 1 nodes."""
    company = range(max(templates) + 1, 2 * min(templates))
    extra = {n: method.template(problem, n) for n in company}
    return dict(templates) | {n: template for n, template in extra.items() if template}


def _plans_for(
    problem: Problem,
    left: Sequence[int],
    templates: Mapping[int, PipelineTemplate],
    method: Method,
) -> EveryPlan:
    """The best plan for each number of nodes, ascending, with as many of them as can work."""
    at_work = _nodes_at_work(problem, left, n0=min(templates), sizes=tuple(templates))
    times = PlainTimes(problem, templates.values())
    search = method.sets(problem, _by_counts(templates), times)
    plans = {}
    # What is found for the most nodes helps with fewer.
    for num_left, (num_working, min_pipelines) in reversed(at_work.items()):
        best = search.fastest((num_working,), min_pipelines)
        assert best is not None
        pipelines = pipelines_of([templates[size] for (size,) in best.sizes], range(num_working))
        plans[num_left] = plain_plan(0, pipelines, best.microbatches)
    ascending = dict(reversed(plans.items()))
    return EveryPlan(problem=problem, templates=templates, plans=ascending, times=times)


def _nodes_at_work(
    problem: Problem, left: Sequence[int], *, n0: int, sizes: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """For each number of nodes left, how many can work, and in how many pipelines at least.

    Raises:
        ConfigError: there are fewer microbatches than pipelines.
    """
    counts = numbers_of_pipelines(left[-1], sizes)
    at_work = {}
    needed: tuple[int, int] = (0, 0)
    for num_left in left:
        min_pipelines = min(problem.failures_tolerated + 1, num_left // n0)
        num_working = next(n for n in range(num_left, 0, -1) if counts[n] >> min_pipelines)
        at_work[num_left] = (num_working, min_pipelines)
        num_fewest = _fewest(counts[num_working], min_pipelines)
        needed = max(needed, (num_fewest, num_left))
    num_fewest, num_left = needed
    if problem.num_microbatches < num_fewest:
        why = f"with {num_left} nodes, all that can work do so only in {num_fewest} pipelines or "
        raise batch_error(problem, num_fewest, why=f"{why}more, each of which needs a microbatch")
    return at_work


def _fewest(numbers: int, min_pipelines: int) -> int:
    """The fewest pipelines, of min_pipelines or more, in a set of numbers."""
    above = numbers >> min_pipelines
    return min_pipelines + (above & -above).bit_length() - 1


def _no_plan_error(
    problem: Problem, num_nodes: int, templates: Mapping[int, PipelineTemplate]
) -> ConfigError:
    """Why no instantiation will do."""
    min_pipelines = problem.failures_tolerated + 1
    most = 2 * num_nodes + max(templates, default=0)
    numbers = numbers_of_pipelines(most, sorted(templates))
    if numbers[num_nodes] >> min_pipelines:
        num_fewest = _fewest(numbers[num_nodes], min_pipelines)
        why = f"all {num_nodes} nodes work only in {num_fewest} pipelines or more"
        return batch_error(problem, num_fewest, why=why)
    fit = [count for count, there in enumerate(numbers) if there >> min_pipelines]
    remedy = (
        f"no {min_pipelines} or more pipelines of {sorted(templates)} nodes use all of them; "
        f"cluster.nodes = {min(fit, key=lambda n: abs(n - num_nodes))} would do"
        if fit
        else "there is no template for any number of nodes"
    )
    return ConfigError("cluster.nodes", num_nodes, remedy)
