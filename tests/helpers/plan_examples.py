"""Plans for tests of schedules: by hand, as in the papers' figures, and random ones."""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice, pairwise
from random import Random

from hypothesis import strategies as st

from planaria.core.plan import (
    Hop,
    NodeKind,
    Pipeline,
    PipelineTemplate,
    Plan,
    Route,
    Stage,
    plain_plan,
)
from planaria.estimator.time import predicted_timeline
from planaria.planner.problem import Problem
from planaria.schedule.lower import plan_schedule


def pipeline(boundaries: Sequence[int], nodes: Sequence[int]) -> Pipeline:
    """A pipeline of nodes of one device, cut at the boundaries: (0, 3, 6) has two stages."""
    stages = tuple(Stage(first, end, 1) for first, end in pairwise(boundaries))
    return Pipeline(PipelineTemplate(stages, len(stages)), tuple(nodes))


def figure_9_plan() -> Plan:
    """Oobleck, figure 9: six layers on a pipeline of three stages and one of two."""
    pipelines = (pipeline((0, 2, 4, 6), (0, 1, 2)), pipeline((0, 3, 6), (3, 4)))
    return plain_plan(0, pipelines, (4, 3))


def timed_s(problem: Problem, plan: Plan) -> float:
    """Seconds of an iteration by the schedule that all ranks run."""
    schedule = plan_schedule(plan, tied=problem.profile.tied, order=problem.reduction_order)
    factor = problem.reduce_bytes_factor
    return predicted_timeline(
        schedule, problem.profile, plan=plan, reduce_bytes_factor=factor
    ).iteration_s


def plain_plans() -> st.SearchStrategy[Plan]:
    """Plans as `random_plan` makes them."""
    return st.randoms(use_true_random=False).map(random_plan)


def rerouted_plans() -> st.SearchStrategy[Plan]:
    """Plans as `random_plan` makes them, with losses as in `rerouted`."""
    return st.randoms(use_true_random=False).map(lambda rng: rerouted_plan(random_plan(rng), rng))


def random_plan(rng: Random, *, num_layers_max: int = 8) -> Plan:
    """One to four pipelines of up to three templates, each on its own routes.

    Nodes have one to four devices, and one stage or more.
    """
    num_layers = rng.randint(1, num_layers_max)
    per_node = rng.choice((1, 2, 3, 4))
    templates = [_random_template(rng, num_layers, per_node) for _ in range(3)]
    chosen = [rng.choice(templates) for _ in range(rng.randint(1, 4))]
    num_nodes = sum(template.num_nodes for template in chosen)
    nodes = iter(rng.sample(range(num_nodes + 3), num_nodes))
    pipelines = tuple(Pipeline(one, tuple(islice(nodes, one.num_nodes))) for one in chosen)
    return plain_plan(0, pipelines, tuple(rng.randint(1, 9) for _ in pipelines))


def _random_template(rng: Random, num_layers: int, per_node: int) -> PipelineTemplate:
    num_stages = rng.randint(1, num_layers)
    num_nodes = rng.randint(-(-num_stages // per_node), num_stages)
    num_devices = num_nodes * per_node
    within = [device for device in range(num_devices) if device % per_node]
    cuts = rng.sample(within, num_stages - num_nodes)
    devices = sorted([*range(0, num_devices + 1, per_node), *cuts])
    layers = (0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers)
    stages = tuple(
        Stage(*layer_range, end - first)
        for layer_range, (first, end) in zip(pairwise(layers), pairwise(devices), strict=True)
    )
    kinds = [NodeKind(rng.choice((0.5, 1.0, 1.0, 3.0))) for _ in range(num_nodes)]
    return PipelineTemplate(stages, num_nodes, tuple(kinds) if rng.random() < 0.3 else ())


def rerouted_plan(plan: Plan, rng: Random) -> Plan:
    """The plan after one to three nodes are lost: microbatches take any way around them.

    A microbatch keeps each hop of its plain route or has it cut into parts on other ranks, so
    it may visit a rank twice, at once or later, and two microbatches may visit two ranks in
    opposite orders. What no other node holds stays where it is.
    """
    held = {
        hop.rank: range(hop.first_layer, hop.end_layer)
        for one in plan.pipelines
        for hop in one.route()
    }
    nodes = rng.sample(plan.nodes, rng.randint(1, min(3, len(plan.nodes))))
    per_node = plan.pipelines[0].template.devices_per_node
    lost = {rank for rank in held if rank // per_node in nodes}
    routes = tuple(_around(route, rng, held=held, lost=lost) for route in plan.routes)
    return Plan(1, plan.pipelines, routes)


def _around(
    route: Route, rng: Random, *, held: Mapping[int, range], lost: Collection[int]
) -> Route:
    hops: list[Hop] = []
    for hop in route:
        first = hop.first_layer
        while first < hop.end_layer:
            others = [rank for rank in held if rank not in lost and first in held[rank]]
            rank = rng.choice(others) if hop.rank in lost and others else hop.rank
            end = min(hop.end_layer, held[rank].stop)
            end = rng.randint(first + 1, end) if rank != hop.rank else end
            hops.append(Hop(rank, first, end))
            first = end
    return tuple(hops)
