"""Standby nodes in the places of lost ones: the plan stays, and nothing else moves."""

from dataclasses import replace

import pytest

from helpers.losses import check_is_whole, check_transfers, example_catalog, plan_of, prices
from planaria.core.cluster import ClusterState, Node, NodesChanged, NodesLost, survivors
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.planner.plans import PlanCatalog
from planaria.policies.adaptive import Adaptive
from planaria.policies.policy import Policy
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.rollback import STANDBY, Rollback

NOTHING = (frozenset[int](),)


def with_standby(plan: Plan, lost: tuple[int, ...], *standby: Node) -> ClusterState:
    cluster = survivors(plan, lost, epoch=1)
    return ClusterState(1, (*cluster.nodes, *standby))


def proposed(
    catalog: PlanCatalog,
    plan: Plan,
    cluster: ClusterState,
    *lost: int,
    fallback: Policy | None = None,
) -> tuple[Transition, ...]:
    policy = Rollback(catalog, fallback or Adaptive(()))
    return policy.propose(plan, cluster, NodesLost(lost, 40), prices(catalog))


@pytest.mark.parametrize("lost", [(0,), (1,), (4, 6), (0, 5)])
def test_standby_nodes_take_the_places_of_lost_ones(lost: tuple[int, ...]) -> None:
    """Pipelines are as they were, and only those who came receive anything."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    came = tuple(Node(8 + place, NOTHING) for place in range(len(lost)))
    cluster = with_standby(plan, lost, *came)
    (found,) = proposed(catalog, plan, cluster, *lost)

    check_is_whole(found, cluster, catalog)
    check_transfers(found, cluster, prices(catalog).layer_bytes)
    names = (found.policy, found.answer, found.redone_samples)
    assert names == ("rollback", STANDBY, 40)
    assert [p.template for p in found.after.pipelines] == [p.template for p in plan.pipelines]
    for before, after in zip(plan.pipelines, found.after.pipelines, strict=True):
        stayed = [a == b for a, b in zip(before.nodes, after.nodes, strict=True)]
        assert stayed == [node not in lost for node in before.nodes]
    assert {t.target for one in found.rounds for t in one} == {node.node for node in came}


def test_places_that_microbatches_went_around_are_taken_too() -> None:
    catalog = example_catalog(8, n0=2, f=1)
    plan = replace(plan_of(catalog, (4, 4)), gone=(2,))
    cluster = with_standby(plan_of(catalog, (4, 4)), (2, 5), Node(8, NOTHING), Node(9, NOTHING))
    (found,) = proposed(catalog, plan, cluster, 5)

    check_is_whole(found, cluster, catalog)
    assert found.after.gone == ()


@pytest.mark.parametrize("num_standby", [1, 3])
def test_where_places_and_nodes_do_not_match_another_policy_answers(num_standby: int) -> None:
    """With fewer nodes a pipeline would have a gap, with more some would have no work."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    came = (Node(8 + place, NOTHING) for place in range(num_standby))
    cluster = with_standby(plan, (0, 5), *came)

    assert proposed(catalog, plan, cluster, 0, 5) == ()
    anew = Reinstantiate(catalog)
    found = proposed(catalog, plan, cluster, 0, 5, fallback=anew)
    assert found == anew.propose(plan, cluster, NodesLost((0, 5), 40), prices(catalog))
    assert found


def test_no_place_is_empty_after_a_crash_or_while_training_goes_on() -> None:
    """A worker that is new holds nothing, but its node has its place."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    cluster = with_standby(plan, (), Node(8, NOTHING))

    assert proposed(catalog, plan, cluster) == ()
    changed = NodesChanged((8,), ())
    assert Rollback(catalog, Adaptive(())).propose(plan, cluster, changed, prices(catalog)) == ()


def test_layers_that_nobody_holds_are_no_answers() -> None:
    """The coordinator goes back first; then whoever keeps copies holds them."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    cluster = with_standby(plan, (0, 4), Node(8, NOTHING), Node(9, NOTHING))

    assert cluster.lost_layers(plan.num_layers)
    assert proposed(catalog, plan, cluster, 0, 4) == ()


def test_a_slow_node_that_stands_by_is_known_to_be_slow() -> None:
    """Its pipeline gets fewer microbatches."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    slow = Node(8, NOTHING, NodeKind(0.5))
    (found,) = proposed(catalog, plan, with_standby(plan, (3,), slow), 3)

    assert found.after.slow_nodes == {8: 0.5}
    routes = [found.after.routes.count(p.route()) for p in found.after.pipelines]
    assert routes[0] < routes[1]


def test_it_is_refused_where_distrusted_nodes_alone_would_hold_layers() -> None:
    """Both pipelines have a distrusted node at the same place then; made anew they need not."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    nodes = tuple(
        replace(node, is_trusted=node.node != 0) for node in survivors(plan, (4,), epoch=1).nodes
    )
    cluster = ClusterState(1, (*nodes, Node(8, NOTHING, is_trusted=False)))
    anew = Reinstantiate(catalog)
    found = proposed(catalog, plan, cluster, 4, fallback=anew)

    assert found
    trusted = [layers for r, layers in found[0].after.layers_by_rank.items() if r not in (0, 8)]
    assert len(set().union(*trusted)) == plan.num_layers
