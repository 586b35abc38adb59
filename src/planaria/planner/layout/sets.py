"""The fastest set of pipelines that uses all nodes: how many of which template.

The seconds of the reductions after a pipeline's last backward depend on the number of pipelines. So
for each number of pipelines the fastest set is found, with reductions as among pipelines of one
template. Of these sets, and of those whose pipelines are all alike, the one with the lowest
iteration time is taken; that time is exact (times.py). The result is not proved to be the fastest
set, for two reasons. Pipelines of several templates wait for each other in reductions that they
share. And all numbers of pipelines above NUMBERS_APART are searched together, with the reductions
of the smallest of these numbers. Where there are no more than LISTED_MAX sets, the iteration time
of each is computed instead.

Source: Oobleck (SOSP '23), section 4.2.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from planaria.core.plan import PipelineTemplate
from planaria.planner.layout.distribution import check_microbatches, fastest_distribution
from planaria.planner.layout.instantiate import SizeSearches, pipeline_ranges, sets_of
from planaria.planner.problem import Counts, Problem, Seconds
from planaria.planner.times import PlainTimes

LISTED_MAX: Final = 24


@dataclass(frozen=True, slots=True, order=True)
class PipelineSet:
    """A set of pipelines; the lesser of two is the better one.

    Of equally fast sets that is the one with more pipelines, as more of them survive a failure, and
    then the first in order.

    Attributes:
        iteration_s: seconds of an iteration.
        num_fewer: the negative number of pipelines.
        sizes: number of nodes of each kind, by pipeline.
        microbatches: number of microbatches, by pipeline.
    """

    iteration_s: float
    num_fewer: int
    sizes: tuple[Counts, ...]
    microbatches: tuple[int, ...]


class SetSearch:
    """The fastest sets of pipelines of some templates, for any number of nodes."""

    def __init__(
        self, problem: Problem, templates: Mapping[Counts, PipelineTemplate], times: PlainTimes
    ) -> None:
        self._problem = problem
        self._templates = templates
        self._times = times
        self._searches = SizeSearches(problem.num_microbatches, self._times_of)

    def fastest(self, nodes: Counts, min_pipelines: int) -> PipelineSet | None:
        """The fastest set that uses all of these numbers of nodes; None if there is none."""
        sizes = [size for size in self._templates if sum(size) <= sum(nodes)]
        every = sets_of(nodes, sizes, min_pipelines=min_pipelines)
        listed = list(islice(every, LISTED_MAX + 1))
        if len(listed) <= LISTED_MAX:
            possible = [
                sizes_of_set
                for sizes_of_set in listed
                if len(sizes_of_set) <= self._problem.num_microbatches
            ]
            return min(map(self._pipeline_set, possible), default=None)
        return self._fastest_of_many(nodes, min_pipelines)

    def _fastest_of_many(self, nodes: Counts, min_pipelines: int) -> PipelineSet | None:
        best = min(map(self._pipeline_set, self._equal_sets(nodes, min_pipelines)), default=None)
        numbers = range(min_pipelines, self._max_pipelines(sum(nodes)) + 1)
        for pipelines in pipeline_ranges(numbers, would_fit=self._would_fit(sum(nodes))):
            # An equally fast set with more pipelines is better, so the bound is just above.
            below_s = np.nextafter(best.iteration_s, np.inf) if best else np.inf
            fastest = self._searches.search(nodes, pipelines).fastest(nodes, below_s=below_s)
            if fastest is not None:
                candidate = self._pipeline_set(fastest[1])
                best = min(best, candidate) if best else candidate
        return best

    def _equal_sets(self, nodes: Counts, min_pipelines: int) -> Iterator[tuple[Counts, ...]]:
        """The sets whose pipelines all have the same size.

        One of them may be faster than any set that a search finds: a search neglects that pipelines
        of different templates wait for each other, and so may prefer a mixed set that is slower.
        """
        for number in range(max(1, min_pipelines), self._max_pipelines(sum(nodes)) + 1):
            size = tuple(count // number for count in nodes)
            is_whole = all(each * number == count for each, count in zip(size, nodes, strict=True))
            if is_whole and size in self._templates:
                yield (size,) * number

    def _times_of(self, num_pipelines: int) -> Mapping[Counts, Seconds]:
        return {
            size: self._times.ends_by_count_s(template, num_pipelines=num_pipelines)
            for size, template in self._templates.items()
        }

    def _max_pipelines(self, num_nodes: int) -> int:
        return min(self._would_fit(num_nodes), self._problem.num_microbatches)

    def _would_fit(self, num_nodes: int) -> int:
        return num_nodes // min(map(sum, self._templates))

    def _pipeline_set(self, sizes: tuple[Counts, ...]) -> PipelineSet:
        templates = [self._templates[size] for size in sizes]
        microbatches = distribute_microbatches(self._problem, templates, times=self._times)
        iteration_s = self._times.iteration_s(templates, microbatches)
        return PipelineSet(iteration_s, -len(sizes), sizes, microbatches)


def distribute_microbatches(
    problem: Problem, templates: Sequence[PipelineTemplate], *, times: PlainTimes
) -> tuple[int, ...]:
    """How many microbatches each pipeline gets, at least one, so that the last one ends earliest.

    Raises:
        InfeasibleError: there are fewer microbatches than pipelines.
    """
    check_microbatches(problem, len(templates))
    tables = {
        template: times.ends_by_count_s(template, num_pipelines=len(templates))
        for template in set(templates)
    }
    by_pipeline = [tables[template] for template in templates]
    return fastest_distribution(by_pipeline, problem.num_microbatches)
