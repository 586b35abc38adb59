"""Jobs that lose nodes: what they can be re-formed to, and what every answer must keep."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from hypothesis import strategies as st

from helpers.strategies import MEBIBYTE, layer_profile, model_profile
from planaria.core.cluster import ClusterState
from planaria.core.plan import NUM_CHUNKS, PipelineTemplate, Plan, Stage, Transition
from planaria.planner.plans import PlanCatalog, plan_catalog, plan_of_templates
from planaria.planner.problem import Problem
from planaria.policies.policy import Prices, profile_prices

NUM_LAYERS = 16
NUM_MICROBATCHES = 20
NUM_SAMPLES = 2 * NUM_MICROBATCHES


@cache
def example_catalog(num_nodes: int, *, n0: int, f: int, devices_per_node: int = 1) -> PlanCatalog:
    """All plans of a model of 16 unequal layers, with templates of n0 .. N - f * n0 nodes."""
    layers = tuple(
        layer_profile(f"layer {i}", 0.01, parameter_bytes=(1 + i % 3) * MEBIBYTE // 16)
        for i in range(NUM_LAYERS)
    )
    problem = Problem(
        profile=model_profile(layers),
        devices_per_node=devices_per_node,
        num_microbatches=NUM_MICROBATCHES,
        failures_tolerated=f,
    )
    most = min(num_nodes - f * n0, NUM_LAYERS // devices_per_node)
    sizes = range(n0, most + 1)
    return plan_catalog(problem, num_nodes, {n: even_template(n, devices_per_node) for n in sizes})


def even_template(num_nodes: int, devices_per_node: int = 1) -> PipelineTemplate:
    """The layers cut as evenly as can be, a stage for every device."""
    num_stages = num_nodes * devices_per_node
    ends = [NUM_LAYERS * (i + 1) // num_stages for i in range(num_stages)]
    stages = tuple(Stage(u, v, 1) for u, v in zip([0, *ends], ends, strict=False))
    return PipelineTemplate(stages, num_nodes)


def plan_of(
    catalog: PlanCatalog, sizes: tuple[int, ...], nodes: Sequence[int] | None = None
) -> Plan:
    """The plan of epoch 0 with pipelines of these sizes, on nodes 0, 1, .. or on those given."""
    templates = [catalog.templates.get(size) or even_template(size) for size in sizes]
    return plan_of_templates(catalog.problem, templates, nodes or range(sum(sizes)), epoch=0)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[PlanCatalog, Plan]:
    """Two to four pipelines of up to four nodes, that may lose any one."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    catalog = example_catalog(sum(sizes), n0=1, f=1)
    return catalog, plan_of(catalog, sizes, draw(st.permutations(range(sum(sizes)))))


def prices(catalog: PlanCatalog) -> Prices:
    return profile_prices(catalog.problem.profile, regroup_s=0.2)


def shapes(transition: Transition) -> list[int]:
    """The nodes of each pipeline after, in order."""
    return [len(pipeline.nodes) for pipeline in transition.after.pipelines]


def check_is_whole(transition: Transition, cluster: ClusterState, catalog: PlanCatalog) -> None:
    """Every survivor works, every pipeline is the model, every microbatch has one of them."""
    after = transition.after
    assert transition.after.epoch == cluster.epoch
    assert list(after.nodes) == [node.node for node in cluster.nodes]
    for pipeline in after.pipelines:
        ends = [(hop.first_layer, hop.end_layer) for hop in pipeline.route()]
        assert ends[0][0] == 0
        assert ends[-1][1] == NUM_LAYERS
        assert all(above[1] == below[0] for above, below in pairwise(ends))
    routes = [pipeline.route() for pipeline in after.pipelines]
    assert len(after.routes) == NUM_MICROBATCHES
    assert set(after.routes) == set(routes)
    assert len(set(routes)) == len(routes)
    iteration_s, microbatches = catalog.distribution([p.template for p in after.pipelines])
    assert transition.iteration_s == iteration_s
    assert [after.routes.count(route) for route in routes] == list(microbatches)


def check_transfers(
    transition: Transition, cluster: ClusterState, layer_bytes: tuple[int, ...]
) -> None:
    """Exactly what is missing moves, each chunk once, from where it lives, one at a time."""
    held = cluster.held_by_rank()
    moved = [transfer for transfers in transition.rounds for transfer in transfers]
    assert sorted(
        (transfer.layer, transfer.target, chunk)
        for transfer in moved
        for chunk in range(transfer.first_chunk, transfer.end_chunk)
    ) == sorted(
        (layer, rank, chunk)
        for rank, layers in transition.after.layers_by_rank.items()
        for layer in layers
        if layer not in held[rank]
        for chunk in range(NUM_CHUNKS)
    )
    assert all(transfer.layer in held[transfer.source] for transfer in moved)
    num_bytes: Counter[tuple[int, int]] = Counter()
    for transfer in moved:
        num_bytes[transfer.layer, transfer.target] += transfer.num_bytes
    assert all(size == layer_bytes[layer] for (layer, _), size in num_bytes.items())
    for transfers in transition.rounds:
        for ends in ([t.source for t in transfers], [t.target for t in transfers]):
            assert len(set(ends)) == len(ends)


def kept_pipelines(transition: Transition) -> list[int]:
    """The indices before of the pipelines that are the same after, in their order after."""
    before = transition.before.pipelines
    return [before.index(pipeline) for pipeline in transition.after.pipelines if pipeline in before]
