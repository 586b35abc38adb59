"""Plans: how many pipelines of which template, on which nodes, with how many microbatches each.

A plan for given nodes is made in three steps:
1. Instantiation: find the fastest set of f + 1 or more pipelines that uses all nodes (sets.py).
2. Microbatches: distribute them so that the slowest pipeline ends as early as possible
   (distribution.py).
3. Binding: assign the nodes to the pipelines in ascending order.

`plan_catalog` makes a plan for every number of nodes that failures may leave or joins may make;
`foreseen_plans` for all nodes, for up to f failures, and for nodes that may join.

A `Method` can replace how templates are made and how the first two steps are done.

Source: Oobleck (SOSP '23), section 4.2.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from planaria.core.plan import PipelineTemplate, Plan, plain_plan
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.planner.layout.distribution import check_microbatches
from planaria.planner.layout.instantiate import numbers_of_pipelines
from planaria.planner.layout.sets import PipelineSet, SetSearch, distribute_microbatches
from planaria.planner.problem import Counts, Problem, batch_error
from planaria.planner.templates import pipeline_template
from planaria.planner.times import PlainTimes, pipelines_of

FORESEEN_MAX: Final = 8  # Bounds the time: one plan for 24 nodes of 8 devices takes 0.1 s.


class Sets(Protocol):
    """Chooses sets of pipelines of some templates, with their microbatches."""

    def fastest(self, nodes: Counts, min_pipelines: int) -> PipelineSet | None:
        """The chosen set for these numbers of nodes, all of which it uses; None if there is none.

        Args:
            nodes: number of nodes of each kind.
            min_pipelines: lower bound on pipelines in the set.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How plans are made.

    Attributes:
        template: function that makes the template of a number of nodes, or None if there is none.
        sets: function that makes what chooses sets of pipelines of given templates.
    """

    template: Callable[[Problem, int], PipelineTemplate | None]
    sets: Callable[[Problem, Mapping[Counts, PipelineTemplate], PlainTimes], Sets]


METHOD: Final = Method(template=pipeline_template, sets=SetSearch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanCatalog:
    """The plans to which a job can be re-formed, computed at its start so that none has to be
    computed after a failure.

    Attributes:
        templates: templates by number of nodes; empty where nodes differ.
        plans: plans by the number of nodes left. Those for equal nodes are bound to nodes 0, 1, ..;
            for a number without an entry only Oobleck's three steps re-form the job.
        times: times of the templates' pipelines.
    """

    problem: Problem
    templates: Mapping[int, PipelineTemplate]
    plans: Mapping[int, Plan]
    times: PlainTimes

    def distribution(self, templates: Sequence[PipelineTemplate]) -> tuple[float, tuple[int, ...]]:
        """The iteration time of these pipelines, and how many microbatches each of them gets.

        `distribute_microbatches` decides the numbers. Fast for templates of these plans, whose
        times are kept.

        Raises:
            InfeasibleError: there are fewer microbatches than pipelines.
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

    The order of `nodes` does not matter.

    Args:
        templates: templates by number of nodes.

    Raises:
        InfeasibleError: no f + 1 or more pipelines of these templates use exactly that many nodes,
            or there are fewer microbatches than pipelines.
    """
    min_pipelines = problem.failures_tolerated + 1
    check_microbatches(problem, min_pipelines)
    search = SetSearch(problem, _by_counts(templates), PlainTimes(problem, templates.values()))
    best = search.fastest((len(nodes),), min_pipelines)
    if best is None:
        raise _no_plan_error(problem, len(nodes), templates)
    pipelines = pipelines_of([templates[size] for (size,) in best.sizes], sorted(nodes))
    return plain_plan(epoch, pipelines, best.microbatches)


def plan_catalog(
    problem: Problem, num_nodes: int, templates: Mapping[int, PipelineTemplate]
) -> PlanCatalog:
    """The best plan for every number of nodes from num_nodes down to n0.

    While (f + 1) * n0 or more nodes are left, a plan has f + 1 pipelines or more; with fewer nodes
    it has at least as many as can hold the model. Where no set of these templates adds up to the
    number of nodes, for instance because a pipeline cannot have more nodes than the model has
    layers, the plan uses as many nodes as possible.

    Templates of up to 2 * n0 - 1 nodes are added, because fewer than (f + 1) * n0 nodes may need
    one.

    Args:
        num_nodes: N, the largest number of nodes that the cluster may have, joined nodes included.
        templates: templates by number of nodes, as `pipeline_templates` gives them.

    Raises:
        InfeasibleError: some number of nodes works only in more pipelines than there are
            microbatches.
    """
    numbers_left = range(min(templates), num_nodes + 1)
    return _plans_for(
        problem, numbers_left, _with_larger_templates(problem, templates, METHOD), METHOD
    )


def lazy_plan_catalog(
    problem: Problem, num_nodes: int, templates: Mapping[int, PipelineTemplate]
) -> PlanCatalog:
    """The plans of `plan_catalog`, each of which is made when it is asked for.

    1,000 nodes have 999 plans, which take a minute and a half; a job needs few of them.
    """
    larger = _with_larger_templates(problem, templates, METHOD)
    plans = _PlansOnDemand(problem, range(min(templates), num_nodes + 1), larger)
    return PlanCatalog(problem=problem, templates=larger, plans=plans, times=plans.times)


class _PlansOnDemand(Mapping[int, Plan]):
    """The plans for these numbers of nodes; a plan that was made is kept.

    Attributes:
        times: times of the templates' pipelines.
    """

    def __init__(
        self, problem: Problem, numbers_left: range, templates: Mapping[int, PipelineTemplate]
    ) -> None:
        self.times = PlainTimes(problem, templates.values())
        self._templates = templates
        sizes = tuple(templates)
        self._working = _nodes_at_work(problem, numbers_left, n0=min(templates), sizes=sizes)
        self._search = METHOD.sets(problem, _by_counts(templates), self.times)
        self._plans: dict[int, Plan] = {}

    def __getitem__(self, num_left: int) -> Plan:
        if num_left not in self._plans:
            num_working, min_pipelines = self._working[num_left]
            self._plans[num_left] = _fastest_plan(
                self._search, self._templates, num_working, min_pipelines
            )
        return self._plans[num_left]

    def __contains__(self, num_left: object) -> bool:
        return num_left in self._working

    def __iter__(self) -> Iterator[int]:
        return iter(self._working)

    def __len__(self) -> int:
        return len(self._working)


def _fastest_plan(
    search: Sets, templates: Mapping[int, PipelineTemplate], num_working: int, min_pipelines: int
) -> Plan:
    """The fastest plan in which exactly so many nodes work, in so many pipelines at least."""
    best = search.fastest((num_working,), min_pipelines)
    assert best is not None
    pipelines = pipelines_of([templates[size] for (size,) in best.sizes], range(num_working))
    return plain_plan(0, pipelines, best.microbatches)


def foreseen_plans(
    problem: Problem,
    num_nodes: int,
    templates: Mapping[int, PipelineTemplate],
    *,
    max_nodes: int = 0,
    method: Method = METHOD,
) -> PlanCatalog:
    """The best plan for all nodes, for those left by 1 to f failures, and for up to max_nodes.

    The plans are those of `plan_catalog`, with two differences. A plan in which not all num_nodes
    nodes work is an error. Of the numbers of failures, and of the numbers of nodes that may join,
    at most FORESEEN_MAX are planned for; 1 and the largest are always among them.

    Args:
        max_nodes: number of nodes once others have joined; ignored if it is below num_nodes.

    Raises:
        InfeasibleError: `best_plan` or `plan_catalog` would raise it.
    """
    f, n0 = problem.failures_tolerated, min(templates)
    check_microbatches(problem, f + 1)
    after_failures = [num_nodes - number for number in _sample_up_to(f)]
    after_joins = [num_nodes + number for number in _sample_up_to(max_nodes - num_nodes)]
    numbers_left = sorted((*after_failures, num_nodes, *after_joins))
    if numbers_left[0] < (f + 1) * n0:
        templates = _with_larger_templates(problem, templates, method)
    plans = _plans_for(problem, numbers_left, templates, method)
    if len(plans.plans[num_nodes].nodes) < num_nodes:
        raise _no_plan_error(problem, num_nodes, templates)
    return plans


class PlanOutline(NamedTuple):
    """A plan of a catalog without its routes, of which there is one for each microbatch.

    Attributes:
        sizes: number of nodes of each pipeline, which tells its template.
        microbatches: number of microbatches of each pipeline.
    """

    sizes: tuple[int, ...]
    microbatches: tuple[int, ...]


def outline_of(plan: Plan) -> PlanOutline:
    """What `outlined_plan` makes a plan of a catalog from."""
    sizes = tuple(pipeline.template.num_nodes for pipeline in plan.pipelines)
    return PlanOutline(sizes, pipeline_microbatches(plan))


def outlined_plan(outline: PlanOutline, templates: Mapping[int, PipelineTemplate]) -> Plan:
    """The plan of a catalog of these templates that has an outline."""
    used = [templates[size] for size in outline.sizes]
    return plain_plan(0, pipelines_of(used, range(sum(outline.sizes))), outline.microbatches)


def rebuilt_catalog(
    problem: Problem, templates: Mapping[int, PipelineTemplate], plans: Mapping[int, Plan]
) -> PlanCatalog:
    """A `PlanCatalog` rebuilt from its templates and plans; the times follow from the templates."""
    times = PlainTimes(problem, templates.values())
    return PlanCatalog(problem=problem, templates=templates, plans=plans, times=times)


def plan_of_templates(
    problem: Problem, templates: Sequence[PipelineTemplate], nodes: Sequence[int], *, epoch: int
) -> Plan:
    """The plan with one pipeline of each of these templates, on consecutive nodes of the sequence.

    Raises:
        InfeasibleError: there are fewer microbatches than pipelines.
    """
    times = PlainTimes(problem, templates)
    microbatches = distribute_microbatches(problem, templates, times=times)
    return plain_plan(epoch, pipelines_of(templates, nodes), microbatches)


def pipeline_microbatches(plan: Plan) -> tuple[int, ...]:
    """How many microbatches of the plan take each pipeline's own route."""
    counts = Counter(plan.routes)
    return tuple(counts[pipeline.route()] for pipeline in plan.pipelines)


def plan_iteration_s(plan: Plan, times: PlainTimes) -> float:
    """The predicted iteration time of a plan in which every microbatch stays in one pipeline."""
    microbatches = pipeline_microbatches(plan)
    assert sum(microbatches) == len(plan.routes)
    return times.iteration_s([pipeline.template for pipeline in plan.pipelines], microbatches)


def plan_bubble_share(plan: Plan, times: PlainTimes) -> float:
    """The predicted share of an iteration, 0 to 1, in which the stages do not compute."""
    templates = [pipeline.template for pipeline in plan.pipelines]
    return times.bubble_share(templates, pipeline_microbatches(plan))


def _sample_up_to(last: int) -> Sequence[int]:
    """The numbers 1 to last, or FORESEEN_MAX of them with the first and the last among them."""
    if last <= FORESEEN_MAX:
        return range(1, last + 1)
    steps = FORESEEN_MAX - 1
    return [1 + (last - 1) * step // steps for step in range(steps + 1)]


def _by_counts(templates: Mapping[int, PipelineTemplate]) -> dict[Counts, PipelineTemplate]:
    """The templates with tuples of one number as keys, since there is one kind of node."""
    return {(size,): template for size, template in templates.items()}


def _with_larger_templates(
    problem: Problem, templates: Mapping[int, PipelineTemplate], method: Method
) -> dict[int, PipelineTemplate]:
    """These templates and larger ones, of up to 2 * n0 - 1 nodes."""
    larger_sizes = range(max(templates) + 1, 2 * min(templates))
    larger = {n: method.template(problem, n) for n in larger_sizes}
    return dict(templates) | {n: template for n, template in larger.items() if template}


def _plans_for(
    problem: Problem,
    numbers_left: Sequence[int],
    templates: Mapping[int, PipelineTemplate],
    method: Method,
) -> PlanCatalog:
    """The best plan for each number of nodes, with as many of them at work as possible.

    Args:
        numbers_left: numbers of nodes, ascending.
    """
    working = _nodes_at_work(problem, numbers_left, n0=min(templates), sizes=tuple(templates))
    times = PlainTimes(problem, templates.values())
    search = method.sets(problem, _by_counts(templates), times)
    plans = {}
    # The largest number comes first, because its search serves all smaller ones.
    for num_left, (num_working, min_pipelines) in reversed(working.items()):
        plans[num_left] = _fastest_plan(search, templates, num_working, min_pipelines)
    ascending = dict(reversed(plans.items()))
    return PlanCatalog(problem=problem, templates=templates, plans=ascending, times=times)


def _nodes_at_work(
    problem: Problem, numbers_left: Sequence[int], *, n0: int, sizes: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """How many nodes can work and the least number of pipelines, by number of nodes left.

    Raises:
        InfeasibleError: some number of nodes needs more pipelines than there are microbatches.
    """
    counts = numbers_of_pipelines(numbers_left[-1], sizes)
    working = {}
    most_needed: tuple[int, int] = (0, 0)
    for num_left in numbers_left:
        min_pipelines = min(problem.failures_tolerated + 1, num_left // n0)
        num_working = next(n for n in range(num_left, 0, -1) if counts[n] >> min_pipelines)
        working[num_left] = (num_working, min_pipelines)
        num_fewest = _fewest_pipelines(counts[num_working], min_pipelines)
        most_needed = max(most_needed, (num_fewest, num_left))
    num_fewest, num_left = most_needed
    if problem.num_microbatches < num_fewest:
        why = f"with {num_left} nodes, all that can work do so only in {num_fewest} pipelines or "
        raise batch_error(problem, num_fewest, why=f"{why}more, each of which needs a microbatch")
    return working


def _fewest_pipelines(numbers: int, min_pipelines: int) -> int:
    """The smallest number of pipelines that is min_pipelines or more.

    Args:
        numbers: a set as an integer whose bit k is set if k pipelines are possible.
    """
    above = numbers >> min_pipelines
    return min_pipelines + (above & -above).bit_length() - 1


def _no_plan_error(
    problem: Problem, num_nodes: int, templates: Mapping[int, PipelineTemplate]
) -> InfeasibleError:
    """The error that says why no set of pipelines is a plan, and what would work."""
    min_pipelines = problem.failures_tolerated + 1
    max_nodes = 2 * num_nodes + max(templates, default=0)
    numbers = numbers_of_pipelines(max_nodes, sorted(templates))
    if numbers[num_nodes] >> min_pipelines:
        num_fewest = _fewest_pipelines(numbers[num_nodes], min_pipelines)
        why = f"all {num_nodes} nodes work only in {num_fewest} pipelines or more"
        return batch_error(problem, num_fewest, why=why)
    numbers_that_work = [
        count for count, pipelines in enumerate(numbers) if pipelines >> min_pipelines
    ]
    if not numbers_that_work:
        why = "there is no template for any number of nodes"
        return InfeasibleError(Limit.NODES, num_nodes, why)
    why = f"no {min_pipelines} or more pipelines of {sorted(templates)} nodes use all of them"
    nearest = min(numbers_that_work, key=lambda n: abs(n - num_nodes))
    return InfeasibleError(Limit.NODES, num_nodes, why, FeasibleValue(Limit.NODES, nearest))
