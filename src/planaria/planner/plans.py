"""Plans: how many pipelines of which template, on which nodes, with how many microbatches each.

In three steps, for the nodes that there are:
1. Instantiation: the fastest multiset of template sizes that uses all nodes in f + 1 pipelines or
   more (instantiate.py).
2. Microbatches: the distribution with which the slowest pipeline ends earliest (batches.py).
3. Nodes, in their order.

What reductions take after a pipeline's last backward depends on the number of pipelines. So the
fastest set is found for each number of them, with reductions as among pipelines of one template,
and of these sets the one with the lowest iteration time is taken, which is exact (times.py). It is
ranked, not proved, in two points: pipelines of several templates wait for each other in reductions
that they share, and more than NUMBERS_APART pipelines are priced as one more than these. Where
there are no more than LISTED_MAX sets, each of them is priced.

`every_plan` takes them for every number of nodes that failures may leave.

Source: Oobleck (SOSP '23), section 4.2.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from planaria.core.plan import PipelineTemplate, Plan, plain_plan
from planaria.errors import ConfigError
from planaria.estimator.makespan import Seconds
from planaria.planner.batches import check_microbatches, fastest_distribution
from planaria.planner.instantiate import (
    Range,
    fastest_sizes,
    instantiations,
    numbers_of_pipelines,
)
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_template
from planaria.planner.times import PlainTimes, pipelines_of

LISTED_MAX: Final = 24
NUMBERS_APART: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EveryPlan:
    """What a job can be re-formed to, computed at its start so that a failure finds it ready.

    Attributes:
        templates: by number of nodes.
        plans: by the number of nodes that are left, on nodes 0, 1, ..; without it a job is
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


def distribute_microbatches(
    problem: Problem, templates: Sequence[PipelineTemplate], *, times: PlainTimes
) -> tuple[int, ...]:
    """How many microbatches each pipeline gets, at least one, so that the last ends earliest.

    Raises:
        ConfigError: there are fewer microbatches than pipelines.
    """
    check_microbatches(problem, len(templates))
    tables = {
        template: times.of_each_number(template, num_pipelines=len(templates))
        for template in set(templates)
    }
    by_pipeline = [tables[template] for template in templates]
    return fastest_distribution(by_pipeline, problem.num_microbatches)


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
    search = _Search(problem, templates, PlainTimes(problem, templates.values()))
    best = search.fastest(len(nodes), min_pipelines)
    if best is None:
        raise _no_plan_error(problem, len(nodes), templates)
    pipelines = pipelines_of([templates[size] for size in best.sizes], sorted(nodes))
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
        num_nodes: N, of the cluster at its largest.
        templates: by number of nodes, as `pipeline_templates` gives them.

    Raises:
        ConfigError: some number of nodes works only in more pipelines than there are microbatches.
    """
    n0 = min(templates)
    extra = {n: pipeline_template(problem, n) for n in range(max(templates) + 1, 2 * n0)}
    templates = dict(templates) | {n: template for n, template in extra.items() if template}
    at_work = _nodes_at_work(problem, num_nodes, n0=n0, sizes=tuple(templates))
    times = PlainTimes(problem, templates.values())
    search = _Search(problem, templates, times)
    plans = {}
    for num_left, (num_working, min_pipelines) in at_work.items():
        best = search.fastest(num_working, min_pipelines)
        assert best is not None
        pipelines = pipelines_of([templates[size] for size in best.sizes], range(num_working))
        plans[num_left] = plain_plan(0, pipelines, best.microbatches)
    return EveryPlan(problem=problem, templates=templates, plans=plans, times=times)


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


@dataclass(frozen=True, slots=True, order=True)
class _Instantiated:
    """A set of pipelines. Of equally fast ones the least has more pipelines, which keeps more of
    them alive, and is the first in order."""

    iteration_s: float
    num_fewer: int
    sizes: tuple[int, ...]
    microbatches: tuple[int, ...]


class _Search:
    """The fastest sets of pipelines of some templates, for any number of nodes."""

    def __init__(
        self, problem: Problem, templates: Mapping[int, PipelineTemplate], times: PlainTimes
    ) -> None:
        self._problem = problem
        self._templates = templates
        self._times = times
        self._tables: dict[int, dict[int, Seconds]] = {}

    def fastest(self, num_nodes: int, min_pipelines: int) -> _Instantiated | None:
        """The fastest set that uses all of so many nodes; None if there is none."""
        sizes = tuple(size for size in self._templates if size <= num_nodes)
        every = instantiations(num_nodes, sizes, min_pipelines=min_pipelines)
        listed = list(islice(every, LISTED_MAX + 1))
        if len(listed) <= LISTED_MAX:
            few = [one for one in listed if len(one) <= self._problem.num_microbatches]
            return min(map(self._instantiated, few), default=None)
        return self._fastest_of_many(num_nodes, min_pipelines)

    def _fastest_of_many(self, num_nodes: int, min_pipelines: int) -> _Instantiated | None:
        best: _Instantiated | None = None
        for pipelines in self._ranges(num_nodes, min_pipelines):
            found = fastest_sizes(
                num_nodes,
                self._of_each_number(pipelines.fewest),
                num_microbatches=self._problem.num_microbatches,
                pipelines=pipelines,
                # Also what is as fast, and has more pipelines.
                below_s=np.nextafter(best.iteration_s, np.inf) if best else np.inf,
            )
            if found is not None:
                one = self._instantiated(found[1])
                best = min(best, one) if best else one
        return best

    def _ranges(self, num_nodes: int, fewest: int) -> Iterator[Range]:
        """The numbers of pipelines: one by one, then all others."""
        would_fit = num_nodes // min(self._templates)
        most = min(would_fit, self._problem.num_microbatches)
        for number in range(fewest, min(most, NUMBERS_APART) + 1):
            yield Range(number, number)
        fewest = max(fewest, NUMBERS_APART + 1)
        if fewest <= most:
            yield Range(fewest, None if most == would_fit else most)

    def _of_each_number(self, num_pipelines: int) -> dict[int, Seconds]:
        """By size, when one of so many pipelines ends."""
        if num_pipelines not in self._tables:
            self._tables[num_pipelines] = {
                size: self._times.of_each_number(template, num_pipelines=num_pipelines)
                for size, template in self._templates.items()
            }
        return self._tables[num_pipelines]

    def _instantiated(self, sizes: tuple[int, ...]) -> _Instantiated:
        templates = [self._templates[size] for size in sizes]
        microbatches = distribute_microbatches(self._problem, templates, times=self._times)
        iteration_s = self._times.iteration_s(templates, microbatches)
        return _Instantiated(iteration_s, -len(sizes), sizes, microbatches)


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
