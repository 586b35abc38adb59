"""The vocabulary of plans: who holds what follows from pipelines, and from nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given

from helpers.strategies import layer_profile, model_profile, planned_problems
from planaria.core.plan import (
    Hop,
    Link,
    Pipeline,
    PipelineTemplate,
    Plan,
    Stage,
    plain_plan,
    scaled_profile,
)
from planaria.planner.problem import Problem

TWO = PipelineTemplate((Stage(0, 2, 1), Stage(2, 5, 1)), num_nodes=2)
THREE = PipelineTemplate((Stage(0, 1, 1), Stage(1, 3, 1), Stage(3, 5, 1)), num_nodes=3)
# Two nodes of two devices: one stage of both devices of a node, two stages that share a node.
WIDE = PipelineTemplate((Stage(0, 2, 2), Stage(2, 4, 1), Stage(4, 5, 1)), num_nodes=2)


def plan() -> Plan:
    return plain_plan(3, (Pipeline(TWO, (4, 1)), Pipeline(THREE, (0, 7, 2))), (1, 2))


def test_stages_take_the_devices_of_the_nodes_in_order() -> None:
    """The rank of device d of node n is n * devices_per_node + d."""
    pipeline = Pipeline(WIDE, (5, 2))

    assert [pipeline.stage_ranks(index) for index in range(3)] == [(10, 11), (4,), (5,)]
    assert pipeline.route() == (Hop(10, 0, 2), Hop(4, 2, 4), Hop(5, 4, 5))


def test_holders_are_the_ranks_of_all_pipelines_ascending() -> None:
    """The first of them owns the layer: it saves it and contributes its norm."""
    assert [plan().holders(layer) for layer in range(5)] == [
        (0, 4),
        (4, 7),
        (1, 7),
        (1, 2),
        (1, 2),
    ]
    assert plan().layers_by_rank[7] == range(1, 3)
    assert (plan().nodes, plan().ranks, plan().num_layers) == ((0, 1, 2, 4, 7),) * 2 + (5,)


def test_a_stage_of_several_devices_is_held_by_each() -> None:
    """Every rank of the stage has its part of the same layers."""
    wide = plain_plan(0, (Pipeline(WIDE, (0, 1)),), (1,))

    assert wide.layers_by_rank == {0: range(2), 1: range(2), 2: range(2, 4), 3: range(4, 5)}
    assert wide.holders(1) == (0, 1)


def test_a_node_that_is_gone_holds_nothing() -> None:
    """Its pipeline still names it, so that what it lacks can be told."""
    whole = plain_plan(0, (Pipeline(WIDE, (5, 2)),), (1,))
    broken = replace(whole, gone=(2,))

    assert broken.layers_by_rank == {10: range(2), 11: range(2)}
    assert (broken.nodes, broken.ranks) == ((5,), (10, 11))
    assert (broken.holders(1), broken.holders(2)) == ((10, 11), ())


def test_microbatches_are_dealt_to_pipelines_in_order() -> None:
    """Which samples a microbatch is made of depends on its number alone."""
    first, second = (pipeline.route() for pipeline in plan().pipelines)

    assert plan().routes == (first, second, second)


@given(planned_problems())
def test_every_route_covers_the_model_once_on_holders(
    case: tuple[Problem, dict[int, PipelineTemplate], Plan],
) -> None:
    """Any plan that the planner makes."""
    _, _, made = case
    for route in made.routes:
        layers = [layer for hop in route for layer in range(hop.first_layer, hop.end_layer)]
        assert layers == list(range(made.num_layers))
        for hop in route:
            held = made.layers_by_rank[hop.rank]
            assert (held.start, held.stop) == (hop.first_layer, hop.end_layer)


@pytest.mark.parametrize("nodes", [(1,), (1, 2, 3), (1, 1)])
def test_a_pipeline_has_a_node_for_each_of_its_template(nodes: tuple[int, ...]) -> None:
    """And no node twice."""
    with pytest.raises(AssertionError):
        Pipeline(TWO, nodes)


def test_a_link_takes_its_latency_and_its_bytes() -> None:
    """An empty message takes the latency alone."""
    assert Link(0.5, 100.0).seconds(50) == 1.0
    assert Link(0.5, 100.0).seconds(0) == 0.5


def test_scaling_a_profile_changes_all_its_seconds_and_nothing_else() -> None:
    """Those on links too: so every plan takes as many times longer."""
    profile = model_profile((layer_profile("a", 0.01, device_counts=(1, 2)),))
    slow = scaled_profile(profile, 3.0)
    before, after = profile.layers[0], slow.layers[0]

    assert after.forward_s == {1: 3 * before.forward_s[1], 2: 3 * before.forward_s[2]}
    assert after.backward_s(2) == pytest.approx(3 * before.backward_s(2))
    assert scaled_profile(slow, 1 / 3.0).layers[0].forward_s[1] == pytest.approx(
        before.forward_s[1]
    )
    assert after.activation_bytes == before.activation_bytes
    for kind, link in profile.links.items():
        assert slow.links[kind].seconds(1000) == pytest.approx(3 * link.seconds(1000))
        assert slow.links[kind].seconds(0) == pytest.approx(3 * link.seconds(0))
