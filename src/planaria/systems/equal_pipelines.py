"""Equal pipelines with a place for each node, for systems whose pipelines cannot differ.

Nodes that do not fill another pipeline stay idle.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from planaria.core.plan import PipelineTemplate, Plan
from planaria.planner.plans import plan_of_templates
from planaria.systems.modelled_job import Pace
from planaria.systems.system import Setting


@dataclass(frozen=True, slots=True)
class EqualPipelines:
    """Equal pipelines. Place p is that of stage node p % depth of pipeline p // depth.

    Attributes:
        microbatches: number of microbatches of each pipeline.
        iteration_s: seconds of an iteration, by the estimator.
    """

    template: PipelineTemplate
    microbatches: tuple[int, ...]
    iteration_s: float

    @property
    def depth(self) -> int:
        """The number of nodes of a pipeline."""
        return self.template.num_nodes

    @property
    def num_pipelines(self) -> int:
        """The number of pipelines."""
        return len(self.microbatches)

    @property
    def num_places(self) -> int:
        """The number of nodes at work."""
        return self.depth * self.num_pipelines

    def pace(self, members: Collection[int], *, stall_s: float) -> Pace:
        """How fast a job trains on the first of these nodes.

        Args:
            stall_s: see `Pace`.
        """
        nodes = frozenset(sorted(members)[: self.num_places])
        return Pace(iteration_s=self.iteration_s, nodes=nodes, stall_s=stall_s)

    def plan(self, setting: Setting) -> Plan:
        """The plan, whose node p is at place p."""
        templates = (self.template,) * self.num_pipelines
        return plan_of_templates(
            setting.catalog.problem, templates, range(self.num_places), epoch=0
        )


def fastest_equal_pipelines(
    setting: Setting, num_nodes: int, *, min_pipelines: int = 1, depths: range | None = None
) -> EqualPipelines | None:
    """The fastest ones on at most so many nodes; None if there are none.

    Sizes whose slowest pipeline alone takes longer than the best iteration so far are skipped.

    Args:
        min_pipelines: lower bound on pipelines, as far as there are enough nodes for so many.
        depths: numbers of nodes that a pipeline may have; None: all.
    """
    templates, times = setting.catalog.templates, setting.catalog.times
    sizes = [size for size in templates if depths is None or size in depths]
    min_pipelines = min(min_pipelines, num_nodes // min(sizes, default=num_nodes + 1))
    num_microbatches = setting.catalog.problem.num_microbatches
    bounds = []
    for size in sizes:
        num_pipelines = min(num_nodes // size, num_microbatches)
        if num_pipelines >= max(1, min_pipelines):
            most = ceil(num_microbatches / num_pipelines)
            bounds.append((times.makespan_s(templates[size], most), size, num_pipelines))
    best: EqualPipelines | None = None
    for bound_s, size, num_pipelines in sorted(bounds):
        if best is not None and bound_s > best.iteration_s:
            break
        row = (templates[size],) * num_pipelines
        iteration_s, microbatches = setting.catalog.distribution(row)
        pipelines = EqualPipelines(templates[size], microbatches, iteration_s)
        if best is None or _rank(pipelines) < _rank(best):
            best = pipelines
    return best


def _rank(pipelines: EqualPipelines) -> tuple[float, int]:
    return pipelines.iteration_s, pipelines.num_places


def pipelines_of_depth(setting: Setting, num_nodes: int, depth: int) -> EqualPipelines | None:
    """The pipelines of `depth` nodes that so many nodes fill; None if they fill none."""
    return fastest_equal_pipelines(setting, num_nodes, depths=range(depth, depth + 1))
