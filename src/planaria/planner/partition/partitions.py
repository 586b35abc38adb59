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

from collections.abc import Iterator
from itertools import accumulate, combinations
from math import comb
from typing import Final

from planaria.core.plan import PipelineTemplate
from planaria.estimator.makespan import makespans_of_each
from planaria.planner.partition.fitting import fitting, rows_of
from planaria.planner.partition.refine import changed, table_of
from planaria.planner.partition.split_times import SplitTimes, least_split_s
from planaria.planner.problem import Problem, Shape, stage_costs
from planaria.planner.templates import fastest_templates, template_of

# Bound on even partitions; 34 layers over 16 stages have 120. Where there are more, none is tried.
EVEN_MAX: Final = 2000
RUNS_MAX: Final = 48  # Bound on simulations for one size; a simulation takes a few ms.

Size = tuple[int, int]  # Number of nodes of a pipeline, and of its microbatches.


class Partitions:
    """Partitions for nodes that are all as the profile says; each search is made only once.

    Attributes:
        split_times: end times of the pipelines that were simulated with split backwards.
    """

    def __init__(self, problem: Problem) -> None:
        self._costs = stage_costs(problem)
        self._whole: dict[Size, PipelineTemplate | None] = {}
        self._split: dict[Size, PipelineTemplate] = {}
        self.split_times = SplitTimes(problem)

    def knows(self, size: Size) -> bool:
        """Whether `whole` has its answer for this size already."""
        return size in self._whole

    def whole(self, size: Size) -> PipelineTemplate | None:
        """The fastest partition with whole backwards; None if none fits."""
        if size not in self._whole:
            self._whole[size] = self._fastest_whole(size)
        return self._whole[size]

    def split(self, size: Size) -> PipelineTemplate | None:
        """The fastest partition with split backwards that is known so far; `whole` before
        `improve_split` has ended. None if none fits."""
        return self._split.get(size) or self.whole(size)

    def improve_split(self, size: Size) -> Iterator[None]:
        """Looks for a faster partition for split backwards; yields after each one it simulates."""
        template = self.whole(size)
        if template is None or size in self._split:
            return
        num_left = RUNS_MAX
        best_s, best = self._split_s(template, size), template
        seen = {self._shape(template)}
        around = self._shape(template)
        near = [*self._even(around), *changed(self._costs, around)]
        while near:
            new = [shape for shape in dict.fromkeys(near) if shape not in seen]
            seen.update(new)
            near = []
            for least_s, shape in self._promising(new, size[1]):
                if least_s >= best_s or not num_left:
                    break
                num_left -= 1
                option = template_of(self._costs, shape)
                option_s = self._split_s(option, size)
                if option_s < best_s:
                    best_s, best = option_s, option
                    near = changed(self._costs, shape)
                yield
        self._split[size] = best

    def _fastest_whole(self, size: Size) -> PipelineTemplate | None:
        num_nodes, count = size
        found = fastest_templates(self._costs, {(num_nodes,): count}).get((num_nodes,))
        if found is None:
            return None
        shape = self._shape(found.template)
        shapes = [shape, *(one for one in self._even(shape) if one != shape)]
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
        fits = fitting(self._costs, rows_of(shapes)).tolist()
        return [shape for shape, does in zip(shapes, fits, strict=True) if does]

    def _promising(self, shapes: list[Shape], count: int) -> list[tuple[float, Shape]]:
        """Pairs of a lower bound in seconds and a partition that fits, in ascending order."""
        if not shapes:
            return []
        rows = rows_of(shapes)
        fits = fitting(self._costs, rows).tolist()
        least_s = least_split_s(self._costs, rows, count).tolist()
        return sorted((s, one) for s, one, does in zip(least_s, shapes, fits, strict=True) if does)

    def _split_s(self, template: PipelineTemplate, size: Size) -> float:
        ends_s = self.split_times.ends_s(template, size[1])
        return max(ends_s) if ends_s is not None else float("inf")

    def _shape(self, template: PipelineTemplate) -> Shape:
        return tuple((s.end_layer, self._costs.group(0, s.num_devices)) for s in template.stages)
