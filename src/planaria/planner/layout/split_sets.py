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

from collections.abc import Mapping

import numpy as np

from planaria.core.plan import PipelineTemplate
from planaria.estimator.reductions import equal_reduce_s
from planaria.planner.layout.depths import numbers_possible
from planaria.planner.layout.instantiate import SizeSearches, pipeline_ranges
from planaria.planner.partition.fewest_stages import rows_of
from planaria.planner.partition.split_times import least_split_s
from planaria.planner.problem import Counts, Problem, Seconds, stage_costs
from planaria.planner.templates import recomputes


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
        self._searches = SizeSearches(problem.num_microbatches, self._times_of)

    def spreads(self, num_nodes: int) -> tuple[tuple[int, ...], ...]:
        """The depths of the sets, each ascending, the set with the least bound first."""
        if not self._templates:
            return ()
        sets = []
        would_fit = num_nodes // min(self._templates)
        numbers = numbers_possible(self._problem, num_nodes)
        for pipelines in pipeline_ranges(numbers, would_fit=would_fit):
            fastest = self._searches.search((num_nodes,), pipelines).fastest((num_nodes,))
            if fastest is not None:
                least_s, sizes = fastest
                sets.append((least_s, tuple(sorted(size for (size,) in sizes))))
        return tuple(depths for _, depths in sorted(sets))

    def _times_of(self, num_pipelines: int) -> Mapping[Counts, Seconds]:
        return {(size,): self._ends_s(size, num_pipelines) for size in self._templates}

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
