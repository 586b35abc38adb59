"""The grids and saves of systems that start anew from a save after each change of nodes."""

from dataclasses import dataclass

from planaria.core.plan import PipelineTemplate
from planaria.policies.morph import grid_templates
from planaria.systems.system import Setting


@dataclass(frozen=True, slots=True)
class Grid:
    """Pipelines of one template, as wide as there are nodes for.

    Attributes:
        iteration_s: seconds of an iteration; 0: the nodes are too few for any grid.
        idle: share of the nodes that have no work.
        rank_bytes: largest state of a rank.
    """

    iteration_s: float
    idle: float
    rank_bytes: int


NO_GRID = Grid(0.0, 0.0, 0)


def fastest_grid(setting: Setting, num_nodes: int) -> Grid:
    """The fastest grid of any depth; nodes beyond width x depth idle."""
    return _grid(setting, grid_templates(setting.catalog, num_nodes), num_nodes)


def grid_of_depth(setting: Setting, num_nodes: int, depth: int) -> Grid:
    """The grid of pipelines of `depth` nodes."""
    width = min(num_nodes // depth, setting.catalog.problem.num_microbatches)
    return _grid(setting, (setting.catalog.templates[depth],) * width, num_nodes)


def _grid(setting: Setting, templates: tuple[PipelineTemplate, ...], num_nodes: int) -> Grid:
    if not templates:
        return NO_GRID
    catalog, width = setting.catalog, len(templates)
    share, remainder = divmod(catalog.problem.num_microbatches, width)
    microbatches = [share + (index < remainder) for index in range(width)]
    iteration_s = catalog.times.iteration_s(templates, microbatches)
    at_work = width * templates[0].num_nodes
    layer_bytes = setting.layer_bytes
    rank_bytes = max(
        sum(layer_bytes[stage.first_layer : stage.end_layer]) for stage in templates[0].stages
    )
    return Grid(iteration_s, 1.0 - at_work / num_nodes, rank_bytes)
