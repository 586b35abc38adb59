"""Who takes which place."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.cluster import ClusterState, Node, survivors
from planaria.core.plan import NodeKind, Pipeline, PipelineTemplate, Plan, Stage, plain_plan
from planaria.restorer import assignment
from planaria.restorer.assignment import UnboundPipeline, assign_nodes


def template_of(*ends: int, num_nodes: int | None = None) -> PipelineTemplate:
    """Stages of one device each that end before these layers."""
    stages = tuple(Stage(u, v, 1) for u, v in zip((0, *ends), ends, strict=False))
    return PipelineTemplate(stages, num_nodes or len(stages))


def plan_of(*pipelines: Pipeline) -> Plan:
    return plain_plan(0, pipelines, (1,) * len(pipelines))


@st.composite
def templates(
    draw: st.DrawFn, *, num_nodes: int, num_layers: int, per_node: int
) -> PipelineTemplate:
    num_stages = num_nodes * per_node
    cuts = draw(
        st.lists(
            st.integers(1, num_layers - 1),
            min_size=num_stages - 1,
            max_size=num_stages - 1,
            unique=True,
        )
    )
    return template_of(*sorted(cuts), num_layers, num_nodes=num_nodes)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[tuple[int, ...], Plan, ClusterState, list[UnboundPipeline]]:
    """Bytes of layers; a plan; nodes that hold anything; and places for some of them or all."""
    num_layers, per_node = 12, draw(st.integers(1, 2))
    layer_bytes = tuple(draw(st.sampled_from((0, 1, 5, 10**12))) for _ in range(num_layers))
    num_nodes = draw(st.integers(1, 6))
    before = draw(templates(num_nodes=num_nodes, num_layers=num_layers, per_node=per_node))
    plan = plan_of(Pipeline(before, tuple(draw(st.permutations(range(num_nodes))))))
    left = draw(st.integers(1, num_nodes))
    unbound: list[UnboundPipeline] = []
    while left:
        size = draw(st.integers(1, left))
        template = draw(templates(num_nodes=size, num_layers=num_layers, per_node=per_node))
        replaces = -1 if unbound else draw(st.integers(-1, 0))
        unbound.append(UnboundPipeline(template, replaces))
        left -= size
    # A node holds anything, or exactly what a place needs, its own one or another.
    held = st.frozensets(st.integers(0, num_layers - 1))
    needs = [needs for pipeline_to_bind in unbound for needs in needs_of(pipeline_to_bind.template)]
    of_a_node = st.tuples(*(held,) * per_node) | st.sampled_from(needs)
    nodes = tuple(Node(node, draw(of_a_node)) for node in range(num_nodes))
    return layer_bytes, plan, ClusterState(1, nodes), unbound


def needs_of(template: PipelineTemplate) -> list[tuple[frozenset[int], ...]]:
    """For every node of a template with stages of one device the layers of its devices."""
    per_node = template.devices_per_node
    layers = [frozenset(range(s.first_layer, s.end_layer)) for s in template.stages]
    return [tuple(layers[i : i + per_node]) for i in range(0, len(layers), per_node)]


def missing_bytes(plan: Plan, cluster: ClusterState, layer_bytes: tuple[int, ...]) -> int:
    held = cluster.held_by_rank()
    return sum(
        layer_bytes[layer]
        for rank, layers in plan.layers_by_rank.items()
        for layer in layers
        if layer not in held[rank]
    )


def num_steps(plan: Plan, pipelines: Sequence[Pipeline], unbound: Sequence[UnboundPipeline]) -> int:
    """How far all nodes are from home: one to another place, two to another pipeline."""
    (home,) = plan.pipelines
    steps = 0
    for pipeline, pipeline_to_bind in zip(pipelines, unbound, strict=True):
        for position, node in enumerate(pipeline.nodes):
            is_there = pipeline_to_bind.replaces == 0 and home.nodes[position : position + 1] == (
                node,
            )
            steps += 0 if is_there else 1 if pipeline_to_bind.replaces == 0 else 2
    return steps


@settings(max_examples=80)
@given(clusters())
def test_no_other_assignment_moves_fewer_bytes_or_as_many_and_nodes_less_far(
    drawn: tuple[tuple[int, ...], Plan, ClusterState, list[UnboundPipeline]],
) -> None:
    """Against every way to give up to six nodes to the places, also with nodes left over."""
    layer_bytes, plan, cluster, unbound = drawn
    num_places = sum(pipeline_to_bind.template.num_nodes for pipeline_to_bind in unbound)

    def cost(pipelines: tuple[Pipeline, ...]) -> tuple[int, int]:
        lacking = missing_bytes(plan_of(*pipelines), cluster, layer_bytes)
        return lacking, num_steps(plan, pipelines, unbound)

    pipelines = assign_nodes(unbound, cluster.nodes, before=plan, layer_bytes=layer_bytes)

    everything = permutations(range(len(cluster.nodes)), num_places)
    assert cost(pipelines) == min(cost(bound(unbound, nodes).pipelines) for nodes in everything)


def bound(unbound: list[UnboundPipeline], nodes: tuple[int, ...]) -> Plan:
    """The pipelines on these nodes, in order."""
    rest = iter(nodes)
    return plan_of(
        *(
            Pipeline(o.template, tuple(next(rest) for _ in range(o.template.num_nodes)))
            for o in unbound
        )
    )


def exposed(plan: Plan, cluster: ClusterState, covered: frozenset[int]) -> int:
    """How many layers distrusted nodes alone hold."""
    per_node = len(cluster.nodes[0].held)
    trusted = {node.node for node in cluster.nodes if node.is_trusted}
    safe = set(covered)
    for rank, layers in plan.layers_by_rank.items():
        if rank // per_node in trusted:
            safe.update(layers)
    return plan.num_layers - len(safe)


@settings(max_examples=80)
@given(clusters(), st.data())
def test_no_other_assignment_leaves_fewer_layers_to_distrusted_nodes_alone(
    drawn: tuple[tuple[int, ...], Plan, ClusterState, list[UnboundPipeline]], data: st.DataObject
) -> None:
    """Against all assignments; none that fills a pipeline with trusted nodes moves fewer bytes.

    Other pipelines that stay may hold some of the layers on trusted nodes.
    """
    layer_bytes, plan, cluster, unbound = drawn
    distrusted = data.draw(st.sets(st.sampled_from([node.node for node in cluster.nodes])))
    nodes = (replace(node, is_trusted=node.node not in distrusted) for node in cluster.nodes)
    cluster = ClusterState(1, tuple(nodes))
    covered = data.draw(st.frozensets(st.integers(0, 11), max_size=8))

    pipelines = assign_nodes(
        unbound, cluster.nodes, before=plan, layer_bytes=layer_bytes, covered=covered
    )

    made = plan_of(*pipelines)
    num_places = sum(pipeline_to_bind.template.num_nodes for pipeline_to_bind in unbound)
    ways = [bound(unbound, way) for way in permutations(range(len(cluster.nodes)), num_places)]
    fewest = min(exposed(way, cluster, covered) for way in ways)
    assert exposed(made, cluster, covered) == fewest
    filled = [
        way for way in ways if any(not distrusted.intersection(p.nodes) for p in way.pipelines)
    ]
    if filled:
        fewest_bytes = min(missing_bytes(way, cluster, layer_bytes) for way in filled)
        assert missing_bytes(made, cluster, layer_bytes) <= fewest_bytes


def test_two_trusted_nodes_cover_the_model_from_two_pipelines() -> None:
    """Each pipeline has three places, so that no two nodes fill one; the largest of both do it."""
    first, second = template_of(4, 5, 6), template_of(1, 2, 6)
    plan = plan_of(Pipeline(first, (0, 1, 2)), Pipeline(second, (3, 4, 5)))
    nodes = tuple(
        replace(node, is_trusted=node.node in (1, 2)) for node in survivors(plan, (), epoch=1).nodes
    )
    unbound = [UnboundPipeline(first, 0), UnboundPipeline(second, 1)]

    one, two = assign_nodes(unbound, nodes, before=plan, layer_bytes=(1,) * 6)

    assert {one.nodes[0], two.nodes[2]} == {1, 2}


def test_a_pipeline_is_filled_with_trusted_nodes_where_that_moves_less() -> None:
    """Nodes 1 and 5 hold layer 4. To give 1's place to node 4 moves two layers; for 5's, five."""
    first, second = template_of(4, 5, 6), template_of(1, 2, 6)
    plan = plan_of(Pipeline(first, (0, 1, 2)), Pipeline(second, (3, 4, 5)))
    nodes = tuple(
        replace(node, is_trusted=node.node not in (1, 5))
        for node in survivors(plan, (), epoch=1).nodes
    )
    unbound = [UnboundPipeline(first, 0), UnboundPipeline(second, 1)]

    pipelines = assign_nodes(unbound, nodes, before=plan, layer_bytes=(1,) * 6)

    cluster = ClusterState(1, nodes)
    assert exposed(plan, cluster, frozenset()) == 1
    assert exposed(plan_of(*pipelines), cluster, frozenset()) == 0
    assert missing_bytes(plan_of(*pipelines), cluster, (1,) * 6) == 2


def test_a_trusted_node_takes_the_place_for_its_kind() -> None:
    """A slow node that is trusted covers what a template has for slow nodes, and nothing else."""
    slow = NodeKind(0.5)
    template = replace(template_of(1, 6), kinds=(slow, NodeKind()))
    plain = template_of(6)
    plan = plan_of(Pipeline(template, (0, 1)), Pipeline(plain, (2,)))
    held = (frozenset(range(6)),)
    nodes = tuple(
        Node(node, held, kind, is_trusted=node in (0, 3))
        for node, kind in enumerate((slow, NodeKind(), NodeKind(), NodeKind(), slow))
    )
    unbound = [UnboundPipeline(template, 0), UnboundPipeline(plain, 1)]

    one, two = assign_nodes(unbound, nodes, before=plan, layer_bytes=(1,) * 6)

    assert one.nodes[0] in (0, 4)
    assert 3 in (one.nodes[1], *two.nodes)
    assert exposed(plan_of(one, two), ClusterState(1, nodes), frozenset()) == 0


def test_nothing_moves_where_it_would_not_help() -> None:
    """One pipeline with a distrusted node leaves it something, wherever it is; it stays there."""
    template = template_of(2, 4, 6)
    plan = plan_of(Pipeline(template, (0, 1, 2)))
    cluster = survivors(plan, (), epoch=1)
    nodes = tuple(replace(node, is_trusted=node.node != 1) for node in cluster.nodes)

    (one,) = assign_nodes([UnboundPipeline(template, 0)], nodes, before=plan, layer_bytes=(1,) * 6)

    assert one.nodes == (0, 1, 2)


@settings(max_examples=60)
@given(clusters())
def test_places_that_are_alike_are_given_out_together_for_as_few_bytes(
    drawn: tuple[tuple[int, ...], Plan, ClusterState, list[UnboundPipeline]],
) -> None:
    """As where there are hundreds of them; against one by one."""
    sizes, plan, cluster, unbound = drawn
    layer_bytes = tuple(min(size, 1000) for size in sizes)

    def lacking() -> int:
        pipelines = assign_nodes(unbound, cluster.nodes, before=plan, layer_bytes=layer_bytes)
        return missing_bytes(plan_of(*pipelines), cluster, layer_bytes)

    one_by_one = lacking()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "STEPS_COUNT_MAX", 0)
        assert lacking() == one_by_one


def test_nodes_stay_at_their_place_where_bytes_allow() -> None:
    """Peers hold the same, so that any exchange of them moves nothing, and is for nothing."""
    template = template_of(2, 4)
    plan = plan_of(
        Pipeline(template, (3, 1)), Pipeline(template, (0, 5)), Pipeline(template, (2, 4))
    )
    cluster = survivors(plan, (), epoch=1)
    unbound = [UnboundPipeline(template, index) for index in (2, 0, 1)]

    pipelines = assign_nodes(unbound, cluster.nodes, before=plan, layer_bytes=(1,) * 4)

    assert [pipeline.nodes for pipeline in pipelines] == [(2, 4), (3, 1), (0, 5)]


def test_layers_too_large_to_weigh_steps_beside_them_are_assigned_by_bytes() -> None:
    """4.5 TB on each of 1,000 nodes, for instance; that ended the coordinator."""
    two, one = template_of(2, 4), template_of(4)
    plan = plan_of(Pipeline(two, (0, 1)), Pipeline(two, (2, 3)))
    cluster = survivors(plan, (2,), epoch=1)
    layer_bytes = (2**50, 2**50, 2**49, 2**49)

    pipelines = assign_nodes(
        [UnboundPipeline(one, 0)], cluster.nodes, before=plan, layer_bytes=layer_bytes
    )

    assert [pipeline.nodes for pipeline in pipelines] == [(0,)]  # The others lack layers 0 and 1.


def test_nodes_stay_in_their_pipeline_where_their_place_is_gone() -> None:
    """Node 3 moves up to the only place of its pipeline, which node 1 would fill as cheaply."""
    two, one = template_of(2, 4), template_of(4)
    plan = plan_of(Pipeline(two, (0, 1)), Pipeline(two, (2, 3)))
    cluster = survivors(plan, (2,), epoch=1)
    unbound = [UnboundPipeline(one, 0), UnboundPipeline(one, 1)]

    pipelines = assign_nodes(unbound, cluster.nodes, before=plan, layer_bytes=(0,) * 4)

    assert [pipeline.nodes for pipeline in pipelines] == [(0,), (3,)]


def test_a_layer_without_a_live_holder_is_named() -> None:
    """Then the state has to come from a checkpoint, whoever is left."""
    two = template_of(2, 5)
    plan = plan_of(Pipeline(two, (0, 1)), Pipeline(two, (2, 3)))

    assert survivors(plan, (0, 3), epoch=1).lost_layers(plan.num_layers) == ()
    assert survivors(plan, (0, 2), epoch=1).lost_layers(plan.num_layers) == (0, 1)
    assert survivors(plan, range(4), epoch=1).lost_layers(plan.num_layers) == (0, 1, 2, 3, 4)
