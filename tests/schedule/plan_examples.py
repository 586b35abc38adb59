"""Plans for tests of schedules: by hand, as in the papers' figures, and random ones."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from planaria.core.plan import Hop, Pipeline, PipelineTemplate, Plan, Route, Stage, plain_plan


def pipeline(boundaries: Sequence[int], nodes: Sequence[int]) -> Pipeline:
    """A pipeline of nodes of one device, cut at the boundaries: (0, 3, 6) has two stages."""
    stages = tuple(Stage(first, end, 1) for first, end in pairwise(boundaries))
    return Pipeline(PipelineTemplate(stages, len(stages)), tuple(nodes))


def figure_9_plan() -> Plan:
    """Oobleck, figure 9: six layers on a pipeline of three stages and one of two."""
    pipelines = (pipeline((0, 2, 4, 6), (0, 1, 2)), pipeline((0, 3, 6), (3, 4)))
    return plain_plan(0, pipelines, (4, 3))


@st.composite
def plain_plans(draw: st.DrawFn) -> Plan:
    """One to four pipelines of different depths and cuts, each on its own routes."""
    num_layers = draw(st.integers(1, 8))
    pipelines: list[Pipeline] = []
    for _ in range(draw(st.integers(1, 4))):
        inner = range(1, num_layers)
        cuts = draw(st.sets(st.sampled_from(inner))) if inner else set()
        first_node = sum(len(before.nodes) for before in pipelines)
        nodes = range(first_node, first_node + len(cuts) + 1)
        pipelines.append(pipeline((0, *sorted(cuts), num_layers), nodes))
    microbatches = [draw(st.integers(1, 9)) for _ in pipelines]
    return plain_plan(0, tuple(pipelines), tuple(microbatches))


@st.composite
def rerouted_plans(draw: st.DrawFn) -> Plan:
    """Plans whose microbatches take any way through holders of their layers.

    A microbatch keeps each hop of its plain route or has it cut into parts on other ranks, so
    it may visit a rank twice, and two microbatches may visit two ranks in opposite orders.
    """
    plan = draw(plain_plans())
    layers = plan.layers_by_rank()
    lost = draw(st.sets(st.sampled_from(plan.ranks), max_size=2))
    routes: list[Route] = []
    for route in plan.routes:
        hops: list[Hop] = []
        for hop in route:
            first = hop.first_layer
            while first < hop.end_layer:
                holders = [rank for rank in plan.holders(first) if rank not in lost]
                rank = draw(st.sampled_from(holders)) if hop.rank in lost and holders else hop.rank
                end = min(hop.end_layer, layers[rank].stop)
                end = draw(st.integers(first + 1, end)) if rank != hop.rank else end
                if hops and hops[-1].rank == rank:
                    hops[-1] = Hop(rank, hops[-1].first_layer, end)
                else:
                    hops.append(Hop(rank, first, end))
                first = end
        routes.append(tuple(hops))
    return Plan(1, plan.pipelines, tuple(routes))
