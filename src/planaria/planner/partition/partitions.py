"""The partition that a search over layouts uses for a pipeline of n nodes and m microbatches.

With whole backwards it is the fastest template (templates.py), or a faster even partition. In an
even partition the numbers of layers of two stages differ by one at most; all such partitions are
tried. With split backwards the search first simulates the partition for whole backwards. Then it
simulates the even partitions, and those that differ from the best so far by a small change, in
ascending order of their lower bounds.

A partition must have memory for all microbatches of the job, as every template must: the next
failure may leave them to a single pipeline.

Source: Odyssey, section IV-A, layer distribution.
Differs: Odyssey tries even partitions alone, which seldom suit a model with an embedding and a
head.
"""

from collections.abc import Generator
from itertools import accumulate, combinations, repeat
from math import comb
from typing import Final

from planaria.core.plan import PipelineTemplate
from planaria.estimator.makespan import makespans_of_each
from planaria.planner.partition.fewest_stages import can_fit, rows_of
from planaria.planner.partition.refine import neighbours, table_of
from planaria.planner.partition.split_times import SplitTimes, least_split_s
from planaria.planner.problem import Problem, Shape, stage_costs
from planaria.planner.templates import fastest_templates, recomputes, template_of

# Bound on even partitions; 34 layers over 16 stages have 120. Where there are more, none is tried.
EVEN_MAX: Final = 2000
RUNS_MAX: Final = 48  # Bound on simulations for one size; a simulation takes a few ms.

Size = tuple[int, int]  # Number of nodes of a pipeline, and of its microbatches.


class Partitions:
    """Partitions for nodes that are all as the profile says; each is computed only once.

    Attributes:
        split_times: end times of the pipelines that were simulated with split backwards.
    """

    def __init__(self, problem: Problem) -> None:
        self._costs = stage_costs(problem)
        self._whole_templates: dict[Size, PipelineTemplate | None] = {}
        # The improved partition, and how many others were simulated for it.
        self._split_templates: dict[Size, tuple[PipelineTemplate, int]] = {}
        self.split_times = SplitTimes(problem)

    def whole_template(self, size: Size) -> PipelineTemplate | None:
        """The fastest partition with whole backwards; None if none fits."""
        if size not in self._whole_templates:
            self._whole_templates[size] = self._fastest_whole(size)
        return self._whole_templates[size]

    def split_template(self, size: Size) -> Generator[None, None, PipelineTemplate | None]:
        """Looks for a faster partition for split backwards than `whole_template`; returns the
        fastest one, None if none fits.

        It yields once for each one that it simulates, also if that was done before.
        """
        known_template = self._split_templates.get(size)
        if known_template is not None:
            yield from repeat(None, known_template[1])
            return known_template[0]
        template = self.whole_template(size)
        if template is None:
            return None
        num_runs_left = RUNS_MAX
        best_s, best = self._split_s(template, size), template
        seen_shapes = {self._shape(template)}
        start = self._shape(template)
        shapes_to_try = [*self._even(start), *neighbours(self._costs, start)]
        while shapes_to_try:
            new_shapes = [
                shape for shape in dict.fromkeys(shapes_to_try) if shape not in seen_shapes
            ]
            seen_shapes.update(new_shapes)
            shapes_to_try = []
            for least_s, shape in self._promising(new_shapes, size[1]):
                if least_s >= best_s or not num_runs_left:
                    break
                num_runs_left -= 1
                candidate = template_of(self._costs, shape)
                candidate_s = self._split_s(candidate, size)
                if candidate_s < best_s:
                    best_s, best = candidate_s, candidate
                    shapes_to_try = neighbours(self._costs, shape)
                yield
        self._split_templates[size] = best, RUNS_MAX - num_runs_left
        return best

    def _fastest_whole(self, size: Size) -> PipelineTemplate | None:
        num_nodes, count = size
        ranked = fastest_templates(self._costs, {(num_nodes,): count}).get((num_nodes,))
        if ranked is None:
            return None
        shape = self._shape(ranked.template)
        if recomputes(ranked.template):  # The table below knows nothing of what that takes.
            return ranked.template
        shapes = [shape, *(even for even in self._even(shape) if even != shape)]
        shapes = [even for even in shapes if not recomputes(template_of(self._costs, even))]
        seconds = makespans_of_each(table_of(self._costs, rows_of(shapes)), count)
        return template_of(self._costs, shapes[int(seconds.argmin())])

    def _even(self, shape: Shape) -> list[Shape]:
        """The even partitions on the devices of a given one that fit; none if there are more than
        EVEN_MAX."""
        num_stages = len(shape)
        each, num_more = divmod(self._costs.num_layers, num_stages)
        if comb(num_stages, num_more) > EVEN_MAX:
            return []
        groups = [group for _, group in shape]
        shapes = []
        for larger in combinations(range(num_stages), num_more):
            ends = accumulate(each + (index in larger) for index in range(num_stages))
            shapes.append(tuple(zip(ends, groups, strict=True)))
        fits = can_fit(self._costs, rows_of(shapes)).tolist()
        return [shape for shape, does_fit in zip(shapes, fits, strict=True) if does_fit]

    def _promising(self, shapes: list[Shape], count: int) -> list[tuple[float, Shape]]:
        """Pairs of a lower bound in seconds and a partition that fits, in ascending order."""
        if not shapes:
            return []
        rows = rows_of(shapes)
        fits = can_fit(self._costs, rows).tolist()
        least_s = least_split_s(self._costs, rows, count).tolist()
        return sorted(
            (bound_s, shape)
            for bound_s, shape, does_fit in zip(least_s, shapes, fits, strict=True)
            if does_fit
        )

    def _split_s(self, template: PipelineTemplate, size: Size) -> float:
        ends_s = self.split_times.ends_s(template, size[1])
        return max(ends_s) if ends_s is not None else float("inf")

    def _shape(self, template: PipelineTemplate) -> Shape:
        return tuple((s.end_layer, self._costs.group(0, s.num_devices)) for s in template.stages)
