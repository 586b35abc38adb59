"""Morphing as transitions: the best grid for whoever is left, from the newest save."""

import pytest

from helpers.losses import (
    NUM_MICROBATCHES,
    check_transfers,
    example_catalog,
    plan_of,
    prices,
    shapes,
)
from planaria.core.cluster import ClusterState, Node, NodesChanged, NodesLost, SavePoint, survivors
from planaria.core.copies import Label
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.planner.plans import PlanCatalog
from planaria.policies.morph import Morph, grid_templates
from planaria.policies.unequal_nodes import STAY

SAVED = SavePoint(3, "3-0", 160)


def proposed(catalog: PlanCatalog, plan: Plan, *lost: int) -> tuple[Transition, ...]:
    """The answer to a loss, from a save."""
    cluster = survivors(plan, lost, epoch=1)
    return Morph(catalog).propose(plan, cluster, NodesLost(lost, 40, SAVED), prices(catalog))


def test_a_loss_is_answered_by_a_grid_from_the_save() -> None:
    """All pipelines are alike, nothing is sent, and all that was trained since is redone."""
    catalog = example_catalog(8, n0=2, f=1)
    (found,) = proposed(catalog, plan_of(catalog, (4, 4)), 2)

    sizes = shapes(found)
    assert len(set(sizes)) == 1
    assert len({pipeline.template for pipeline in found.after.pipelines}) == 1
    assert found.answer == f"grid {len(sizes)}x{sizes[0]}"
    assert 2 not in found.after.nodes
    assert found.goes_back
    assert found.rounds == ()
    assert found.redone_samples == SAVED.redone_samples
    assert found.downtime_s > prices(catalog).regroup_s


@pytest.mark.parametrize("num_nodes", range(2, 14))
def test_the_grid_is_the_fastest_of_all(num_nodes: int) -> None:
    """Against all depths, each run in virtual time; the search skips most of them."""
    catalog = example_catalog(14, n0=2, f=1)

    def iteration_s(depth: int) -> float:
        width = min(num_nodes // depth, NUM_MICROBATCHES)
        return catalog.distribution([catalog.templates[depth]] * width)[0]

    found = grid_templates(catalog, num_nodes)
    fastest_s = min(iteration_s(depth) for depth in catalog.templates if depth <= num_nodes)
    assert iteration_s(found[0].num_nodes) == fastest_s
    assert num_nodes // found[0].num_nodes == len(found)


def test_nodes_that_fit_no_grid_idle() -> None:
    """Seven nodes make no grid of pipelines of two; who idles is the one without work before."""
    catalog = example_catalog(8, n0=2, f=1)
    catalog = PlanCatalog(
        problem=catalog.problem, templates={2: catalog.templates[2]}, plans={}, times=catalog.times
    )
    plan = plan_of(catalog, (2, 2, 2, 2))
    (found,) = proposed(catalog, plan, 0)

    assert shapes(found) == [2, 2, 2]
    assert len(found.after.nodes) == 6


def test_layers_that_nobody_holds_are_on_disk() -> None:
    """Live holders do not matter."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    nodes = tuple(Node(node, (frozenset(),)) for node in (0, 1, 4))
    event = NodesLost((2, 3, 5, 6, 7), 0, SAVED)
    (found,) = Morph(catalog).propose(plan, ClusterState(1, nodes), event, prices(catalog))

    assert found.goes_back


def test_copies_that_nobody_has_any_more_are_no_answer() -> None:
    """All have gone back to them, and then somebody who kept some was lost."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    nodes = tuple(Node(node, (frozenset(),)) for node in (0, 1, 4))
    event = NodesLost((2,), 0, SavePoint(3, "", 160, Label(1, 1, 3)))

    assert Morph(catalog).propose(plan, ClusterState(1, nodes), event, prices(catalog)) == ()


def test_there_is_no_answer_where_nobody_may_go_back_or_no_grid_is_left() -> None:
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    cluster = survivors(plan, (2,), epoch=1)

    assert Morph(catalog).propose(plan, cluster, NodesLost((2,), 40), prices(catalog)) == ()
    assert proposed(catalog, plan, *range(7)) == ()


def test_who_comes_or_leaves_in_peace_undoes_nothing() -> None:
    """The layers of the new grid come from live holders."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (3, 3))
    before = survivors(plan, (), epoch=1)
    cluster = ClusterState(1, (*before.nodes, Node(6, (frozenset(),)), Node(7, (frozenset(),))))
    (found,) = Morph(catalog).propose(plan, cluster, NodesChanged((6, 7), ()), prices(catalog))

    assert not found.goes_back
    assert found.redone_samples == 0
    assert {6, 7} <= set(found.after.nodes)
    check_transfers(found, cluster, prices(catalog).layer_bytes)


def test_a_slow_node_may_idle() -> None:
    """Beside a grid without it, what there is has its price."""
    catalog = example_catalog(9, n0=2, f=1)
    plan = plan_of(catalog, (3, 3, 3))
    cluster = survivors(plan, (), epoch=1)
    slow = tuple(
        Node(node.node, node.held, NodeKind(0.25) if node.node == 8 else NodeKind())
        for node in cluster.nodes
    )
    stay, grid = Morph(catalog).propose(
        plan, ClusterState(1, slow), NodesChanged((), (), (8,)), prices(catalog)
    )

    assert stay.answer == STAY
    assert grid.iteration_s < stay.iteration_s
    assert 8 not in grid.after.nodes
