"""Sets of pipelines that may be the fastest with split backwards.

With split backwards pipelines have few bubbles, and what counts is how evenly their stages are cut.
So the fastest set may be far from the one that is the fastest with whole backwards, in the number
of pipelines and in their depths. (Example: GPT-2 on 31 nodes, with 128 microbatches. 31 pipelines
of one node take 2.5 s an iteration, because some get five microbatches. Four pipelines of seven
nodes and one of three take 2.2 s.)

A pipeline's schedule with split backwards has no closed form, but its time has a lower bound for
each number of microbatches (partition/split_times.py). To that the longest reduction of its stages
is added. Of each number of pipelines the set with the least of that is taken; whoever asks computes
the real times.

Source: Oobleck (SOSP '23), section 4.2.1, for sets of templates; ReCycle (SOSP '24) for decoupled
backwards.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from planaria.core.plan import PipelineTemplate
from planaria.estimator.reductions import equal_reduce_s
from planaria.planner.layout.depths import numbers_possible
from planaria.planner.layout.instantiate import PipelineRange, SizeSearch
from planaria.planner.partition.fewest_stages import rows_of
from planaria.planner.partition.split_times import least_split_s
from planaria.planner.problem import Problem, Seconds, stage_costs
from planaria.planner.templates import recomputes

NUMBERS_APART: Final = 8  # All larger numbers of pipelines are one range.


class SplitSets:
    """Sets of templates that may be the fastest with split backwards, for any number of nodes.

    Args:
        templates: templates by number of nodes; those that compute activations again are left out.
    """

    def __init__(self, problem: Problem, templates: Mapping[int, PipelineTemplate]) -> None:
        self._problem = problem
        self._templates = {
            size: template for size, template in templates.items() if not recomputes(template)
        }
        self._least_s: dict[int, Seconds] = {}
        self._searches: dict[PipelineRange, tuple[int, SizeSearch]] = {}

    def spreads(self, num_nodes: int) -> tuple[tuple[int, ...], ...]:
        """The depths of the sets, each ascending, the set with the least bound first."""
        sets = []
        for pipelines in self._ranges(num_nodes):
            fastest = self._search(num_nodes, pipelines).fastest((num_nodes,))
            if fastest is not None:
                least_s, sizes = fastest
                sets.append((least_s, tuple(sorted(size for (size,) in sizes))))
        return tuple(depths for _, depths in sorted(sets))

    def _ranges(self, num_nodes: int) -> Iterator[PipelineRange]:
        """The ranges of numbers of pipelines: each number alone, and all large ones together."""
        possible = numbers_possible(self._problem, num_nodes)
        if not (possible and self._templates):
            return
        last, would_fit = possible[-1], num_nodes // min(self._templates)
        many = max(possible[0], NUMBERS_APART + 1)
        if many <= last:
            yield PipelineRange(many, None if would_fit <= last else last)
        for number in range(possible[0], min(last, NUMBERS_APART) + 1):
            yield PipelineRange(number, number)

    def _search(self, num_nodes: int, pipelines: PipelineRange) -> SizeSearch:
        """A search that covers these nodes; it is kept, and serves fewer."""
        max_nodes, search = self._searches.get(pipelines, (0, None))
        if search is None or num_nodes > max_nodes:
            number = pipelines.min_pipelines
            search = SizeSearch(
                (num_nodes,),
                {(size,): self._ends_s(size, number) for size in self._templates},
                num_microbatches=self._problem.num_microbatches,
                pipelines=pipelines,
            )
            self._searches[pipelines] = num_nodes, search
        return search

    def _ends_s(self, size: int, num_pipelines: int) -> Seconds:
        """Lower bounds on a pipeline, entry n - 1 for n microbatches, with its longest
        reduction."""
        template, problem = self._templates[size], self._problem
        if size not in self._least_s:
            costs = stage_costs(problem)
            shape = tuple((s.end_layer, costs.group(0, s.num_devices)) for s in template.stages)
            numbers = np.arange(1, problem.num_microbatches + 1)[:, None, None]
            self._least_s[size] = least_split_s(costs, rows_of([shape]), numbers)[:, 0]
        reduce_s = equal_reduce_s(
            problem.profile,
            template,
            num_pipelines=num_pipelines,
            bytes_factor=problem.reduce_bytes_factor,
        )
        return self._least_s[size] + max(reduce_s)
