"""Oobleck's own choice of a set of pipelines and of their microbatches, for comparison.

Of all sets of equation 5 that have f + 1 pipelines or more, it is the one whose slowest pipeline
ends first. A pipeline ends after N_b * T, with the microbatches N_b that equation 6 gives it. T is
the time of a microbatch in a template by the paper's own measure: T1 + T2 + T3 at N_b = 4S, divided
by 4S.

No set ends earlier than its pipelines would if microbatches were divisible. Sets are looked at in
ascending order of that time, until no further one can be faster: the result is exact. If there are
more than LISTED_MAX sets, they are not listed. Then the set is taken that would be fastest with its
best distribution (instantiate.py), and it gets the distribution of equation 6.

Source: Oobleck (SOSP '23), section 4.2.
Differs: the paper calls T the iteration time of a pipeline with a single microbatch. That hardly
depends on the number of stages, and would give a small pipeline as much work as a large one.
Oobleck's code has (T1 + T2 + T3) / S, which is the T used here times a constant. Of equally fast
sets the one with more pipelines is taken, as in sets.py.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Final

import numpy as np

from planaria.core.plan import PipelineTemplate
from planaria.estimator.makespan import stage_seconds
from planaria.planner.layout.distribution import levelled_distribution
from planaria.planner.layout.instantiate import PipelineRange, SizeSearch, sets_of
from planaria.planner.layout.sets import PipelineSet
from planaria.planner.partition.paper import paper_iteration_s
from planaria.planner.plans import Method
from planaria.planner.problem import Counts, Problem, Seconds
from planaria.planner.templates import paper_template
from planaria.planner.times import PlainTimes

LISTED_MAX: Final = 10_000
_ROUNDING: Final = 1e-9
_LEAST_S: Final = 1e-15  # Keeps T above 0, as all layers of a profile may take no time.


class PaperSets:
    """Oobleck's sets of pipelines of some templates, for any number of nodes."""

    def __init__(self, problem: Problem, templates: Mapping[Counts, PipelineTemplate]) -> None:
        self._num_microbatches = problem.num_microbatches
        self._microbatch_s = {
            size: paper_microbatch_s(problem, template) for size, template in templates.items()
        }

    def fastest(self, nodes: Counts, min_pipelines: int) -> PipelineSet | None:
        """The set that is fastest by the paper's measure and uses all of these numbers of nodes;
        None if there is none.

        Its `iteration_s` is the paper's measure.
        """
        sizes = [size for size in self._microbatch_s if sum(size) <= sum(nodes)]
        every = sets_of(nodes, sizes, min_pipelines=min_pipelines)
        listed = list(islice(every, LISTED_MAX + 1))
        if len(listed) > LISTED_MAX:
            return self._fastest_of_many(nodes, min_pipelines)
        possible = [
            sizes_of_set for sizes_of_set in listed if len(sizes_of_set) <= self._num_microbatches
        ]
        best: PipelineSet | None = None
        for even_s, sizes_of_set in sorted(
            (self._even_s(sizes_of_set), sizes_of_set) for sizes_of_set in possible
        ):
            if best and even_s > best.iteration_s * (1 + _ROUNDING):
                break
            candidate = self._pipeline_set(sizes_of_set)
            best = min(best, candidate) if best else candidate
        return best

    def _even_s(self, sizes: tuple[Counts, ...]) -> float:
        """Seconds after which all pipelines would end together if microbatches were divisible."""
        return self._num_microbatches / sum(1 / self._microbatch_s[size] for size in sizes)

    def _fastest_of_many(self, nodes: Counts, min_pipelines: int) -> PipelineSet | None:
        numbers: Seconds = np.arange(1.0, self._num_microbatches + 1)
        would_fit = sum(nodes) // min(map(sum, self._microbatch_s))
        max_pipelines = None if would_fit <= self._num_microbatches else self._num_microbatches
        search = SizeSearch(
            nodes,
            {size: numbers * microbatch_s for size, microbatch_s in self._microbatch_s.items()},
            num_microbatches=self._num_microbatches,
            pipelines=PipelineRange(min_pipelines, max_pipelines),
        )
        fastest = search.fastest(nodes)
        return None if fastest is None else self._pipeline_set(fastest[1])

    def _pipeline_set(self, sizes: tuple[Counts, ...]) -> PipelineSet:
        seconds = [self._microbatch_s[size] for size in sizes]
        microbatches = levelled_distribution(seconds, self._num_microbatches)
        slowest_s = max(
            microbatch_s * n for microbatch_s, n in zip(seconds, microbatches, strict=True)
        )
        return PipelineSet(slowest_s, -len(sizes), sizes, microbatches)


def paper_microbatch_s(problem: Problem, template: PipelineTemplate) -> float:
    """T of equation 6: T1 + T2 + T3 of a template for 4S microbatches, divided by 4S."""
    seconds = stage_seconds(problem.profile, template)
    stage_s = [sum(times_s) for times_s in zip(seconds.forward_s, seconds.backward_s, strict=True)]
    return max(_LEAST_S, paper_iteration_s(stage_s) / (4 * len(stage_s)))


def _paper_sets(
    problem: Problem, templates: Mapping[Counts, PipelineTemplate], _times: PlainTimes
) -> PaperSets:
    return PaperSets(problem, templates)


PAPER_METHOD: Final = Method(template=paper_template, sets=_paper_sets)
