"""Nodes that fail often hold no layer alone, in whatever answer, where that can be had."""

import random
from collections import Counter
from dataclasses import replace

from helpers.losses import (
    NUM_LAYERS,
    check_is_whole,
    check_transfers,
    example_catalog,
    plan_of,
    prices,
)
from planaria.core.cluster import ClusterState, Node, NodesChanged, NodesLost, survivors
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.planner.layout.instantiate import instantiations
from planaria.planner.plans import PlanCatalog
from planaria.policies.adaptive import Adaptive
from planaria.policies.building import num_exposed
from planaria.policies.reinstantiate import GLOBAL, TRUSTED, Reinstantiate
from planaria.policies.reroute import Reroute
from planaria.policies.unequal_nodes import RECUT, UNEQUAL, UnequalNodes
from planaria.restorer.strategies import NAIVE

SEED = 20_270_310
NUM_JOBS = 60
JOBS = (
    *((3, 1, 1, 1), (4, 1, 0, 1), (5, 2, 1, 1), (6, 2, 1, 1), (6, 1, 2, 1), (7, 1, 1, 1)),
    *((7, 2, 1, 1), (7, 3, 1, 1), (7, 2, 2, 1), (8, 2, 1, 1), (4, 1, 1, 2), (6, 2, 1, 2)),
)  # Nodes, n0, f, devices of a node.


def first_plan(rng: random.Random) -> tuple[PlanCatalog, Plan]:
    """A plan of any shape that the job allows, its nodes in any order."""
    num_nodes, n0, f, devices_per_node = rng.choice(JOBS)
    catalog = example_catalog(num_nodes, n0=n0, f=f, devices_per_node=devices_per_node)
    sets = instantiations(num_nodes, tuple(catalog.templates), min_pipelines=f + 1)
    return catalog, plan_of(
        catalog, rng.choice(list(sets)), rng.sample(range(num_nodes), num_nodes)
    )


def exposed(transition: Transition, cluster: ClusterState) -> int:
    """Layers that distrusted nodes alone hold."""
    after = transition.after
    per_node = after.pipelines[0].template.devices_per_node
    safe: set[int] = set()
    for node in cluster.nodes:
        for device in range(per_node):
            layers = after.layers_by_rank.get(node.node * per_node + device, ())
            safe.update(layers if node.is_trusted else ())
    return NUM_LAYERS - len(safe)


def distrusting(cluster: ClusterState, distrusted: set[int]) -> ClusterState:
    nodes = (replace(node, is_trusted=node.node not in distrusted) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def could_be_covered(catalog: PlanCatalog, cluster: ClusterState) -> bool:
    """Some plan has a pipeline that trusted nodes can fill, beside pipelines for all others.

    With fewer trusted nodes than n0 nothing is covered here: templates cut alike, so that no
    fewer places than those of the smallest one hold the model.
    """
    num_trusted = sum(node.is_trusted for node in cluster.nodes)
    num_nodes, n0 = len(cluster.nodes), min(catalog.templates)
    wanted = min(catalog.problem.failures_tolerated + 1, num_nodes // n0)
    sets = instantiations(num_nodes, tuple(catalog.templates), min_pipelines=max(1, wanted))
    return any(min(sizes) <= num_trusted for sizes in sets)


def test_losses_leave_no_layer_to_distrusted_nodes_alone_where_a_plan_can() -> None:
    """Losses in a row, some of the survivors distrusted; held against all sets of templates."""
    met: Counter[tuple[str, bool]] = Counter()
    for index in range(NUM_JOBS):
        rng = random.Random(f"{SEED} {index}")
        catalog, plan = first_plan(rng)
        distrusted = set(rng.sample(plan.nodes, rng.randint(1, len(plan.nodes) - 1)))
        while True:
            lost = tuple(rng.sample(plan.nodes, 1))
            cluster = distrusting(survivors(plan, lost, epoch=plan.epoch + 1), distrusted)
            found = Reinstantiate(catalog).propose(
                plan, cluster, NodesLost(lost, 0), prices(catalog)
            )
            if not found:
                break
            where = f"seed {SEED}, job {index}, epoch {cluster.epoch}"
            can = could_be_covered(catalog, cluster)
            for transition in found:
                left = exposed(transition, cluster)
                assert (left == 0) == can, f"{where}, {transition.answer}: {left} layers"
                check_is_whole(transition, cluster, catalog)
                check_transfers(transition, cluster, prices(catalog).layer_bytes)
                met[transition.answer, can] += 1
            plan = rng.choice(found).after
    assert min(met[answer, True] for answer in ("simple", "borrow", "merge", GLOBAL, TRUSTED)) > 0
    assert min(met[answer, False] for answer in ("simple", GLOBAL)) > 0


def test_slow_nodes_change_nothing_of_that() -> None:
    """Two are slow, one may leave; what there is may be left as it is, which begins nothing."""
    met: Counter[str] = Counter()
    for index in range(NUM_JOBS // 4):  # Unequal plans take long.
        rng = random.Random(f"{SEED} slow {index}")
        catalog, plan = first_plan(rng)
        if len(catalog.plans) < 3:
            continue
        leaving = tuple(rng.sample(plan.nodes, rng.randint(0, 1)))
        slow = tuple(sorted(rng.sample(plan.nodes, 2)))
        distrusted = set(rng.sample(plan.nodes, rng.randint(1, len(plan.nodes) - 1)))
        speeds = {node: rng.choice((0.3, 0.5, 0.8)) for node in slow}
        staying = distrusting(survivors(plan, leaving, epoch=1), distrusted).nodes
        nodes = tuple(replace(n, kind=NodeKind(speeds.get(n.node, 1.0))) for n in staying)
        left = survivors(plan, [node.node for node in nodes], epoch=1).nodes
        cluster = ClusterState(1, nodes, left)
        event = NodesChanged((), leaving, tuple(n for n in slow if n not in leaving))

        found = UnequalNodes(Reinstantiate(catalog)).propose(plan, cluster, event, prices(catalog))

        for transition in found:
            if transition.keeps_plan or not could_be_covered(catalog, cluster):
                continue
            where = f"seed {SEED}, job {index}, {transition.answer}"
            assert exposed(transition, cluster) == 0, where
            met[transition.answer] += 1
    assert {RECUT, UNEQUAL, GLOBAL} <= met.keys()


def test_what_would_be_left_to_distrusted_nodes_alone_is_not() -> None:
    """Nodes 1 and 3 would hold layers alone once node 5 is lost, were they trusted."""
    catalog = example_catalog(6, n0=2, f=1)
    plan = plan_of(catalog, (2, 2, 2))
    cluster = distrusting(survivors(plan, (5,), epoch=1), {1, 3})
    trusting = survivors(plan, (5,), epoch=1)

    found = Reinstantiate(catalog).propose(plan, cluster, NodesLost((5,), 0), prices(catalog))
    others = Reinstantiate(catalog).propose(plan, trusting, NodesLost((5,), 0), prices(catalog))

    assert [exposed(transition, cluster) for transition in found] == [0] * len(found)
    assert min(exposed(transition, cluster) for transition in others) > 0


def test_beside_a_pipeline_of_trusted_nodes_nothing_is_chosen_otherwise() -> None:
    """It covers the model, so that the others may be wherever the fewest bytes move."""
    catalog = example_catalog(6, n0=2, f=1)
    plan = plan_of(catalog, (2, 4))
    for lost in range(2, 6):
        trusting = survivors(plan, (lost,), epoch=1)
        event = NodesLost((lost,), 0)
        others = Reinstantiate(catalog).propose(plan, trusting, event, prices(catalog))
        for distrusted in {2, 3, 4, 5} - {lost}:
            cluster = distrusting(trusting, {distrusted})
            found = Reinstantiate(catalog).propose(plan, cluster, event, prices(catalog))

            assert found == others


def test_the_naive_way_knows_no_trust() -> None:
    """It is there to be measured against: nodes take places in the order of their numbers."""
    catalog = replace(example_catalog(4, n0=2, f=1), plans={})
    plan = plan_of(catalog, (2, 2))
    came = (Node(4, (frozenset(),)), Node(5, (frozenset(),)))
    nodes = (*survivors(plan, (1, 2), epoch=1).nodes, *came)
    cluster = distrusting(ClusterState(1, nodes), {0, 4})

    (naive,) = Reinstantiate(catalog, NAIVE).propose(
        plan, cluster, NodesLost((), 0), prices(catalog)
    )
    (chosen,) = Reinstantiate(catalog).propose(plan, cluster, NodesLost((), 0), prices(catalog))

    assert [pipeline.nodes for pipeline in naive.after.pipelines] == [(0, 3), (4, 5)]
    assert exposed(naive, cluster) == NUM_LAYERS // 2
    assert exposed(chosen, cluster) == 0


def test_an_empty_place_covers_nothing() -> None:
    """Once node 1 is lost, only node 4 has its layers, unless another takes the place: a node that
    is gone is not distrusted, for it is no part of the cluster."""
    catalog = example_catalog(6, n0=2, f=1)
    plan = plan_of(catalog, (3, 3))
    trusting = survivors(plan, (1,), epoch=1)
    cluster = distrusting(trusting, {4})
    around = Reroute(catalog.problem, Adaptive(()))
    event = NodesLost((1,), 0)

    others = around.propose(plan, trusting, event, prices(catalog))
    found = around.propose(plan, cluster, event, prices(catalog))

    assert [num_exposed(one.after, cluster) for one in others] == [
        exposed(one, cluster) for one in others
    ]
    assert max(exposed(one, cluster) for one in others) > 0
    assert [exposed(one, cluster) for one in found] == [0] * len(found)
    assert found
