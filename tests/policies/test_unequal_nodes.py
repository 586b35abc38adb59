"""Answers where nodes differ in speed: whole, truly priced, and each node where its kind is due."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.losses import (
    NUM_LAYERS,
    check_is_whole,
    check_transfers,
    example_catalog,
    plan_of,
    prices,
)
from planaria.core.cluster import ClusterEvent, ClusterState, Node, NodesChanged, NodesLost
from planaria.core.cluster import survivors as alike_survivors
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.planner.layout.instantiate import instantiations
from planaria.planner.layout.unequal import EFFORT_MAX, UnequalPlanner, planning_effort
from planaria.planner.plans import PlanCatalog, plan_iteration_s
from planaria.policies import unequal_nodes
from planaria.policies.policy import Prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.unequal_nodes import RECUT, STAY, UNEQUAL, WITHOUT, UnequalNodes


def survivors(
    plan: Plan, speeds: dict[int, float], *, epoch: int = 1, lost: tuple[int, ...] = ()
) -> ClusterState:
    """The nodes of the plan but the lost ones, as fast as that."""
    cluster = alike_survivors(plan, lost, epoch=epoch)
    nodes = (replace(n, kind=NodeKind(speeds.get(n.node, 1.0))) for n in cluster.nodes)
    return ClusterState(epoch, tuple(nodes))


def proposed(
    catalog: PlanCatalog, plan: Plan, cluster: ClusterState, event: ClusterEvent
) -> dict[str, Transition]:
    """The answers by name; each node in them has its own kind, and each price is true."""
    found = UnequalNodes(Reinstantiate(catalog)).propose(plan, cluster, event, prices(catalog))
    kinds = {node.node: node.kind for node in cluster.nodes}
    for transition in found:
        after = transition.after
        assert transition.before == plan
        for pipeline in after.pipelines:
            of_nodes = tuple(kinds[node] for node in pipeline.nodes)
            assert pipeline.template.node_kinds == of_nodes
        assert transition.iteration_s == pytest.approx(plan_iteration_s(after, catalog.times))
        check_transfers(transition, cluster, prices(catalog).layer_bytes)
        if transition.answer not in (STAY, WITHOUT):
            check_is_whole(transition, cluster, catalog)
    return {transition.answer: transition for transition in found}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[PlanCatalog, Plan, dict[int, float]]:
    """Any first plan, and up to three slow nodes."""
    n0, f = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    num_nodes = draw(st.integers((f + 1) * n0, 9))
    catalog = example_catalog(num_nodes, n0=n0, f=f)
    sizes = list(instantiations(num_nodes, tuple(catalog.templates), min_pipelines=f + 1))
    plan = plan_of(catalog, draw(st.sampled_from(sizes)))
    slow = draw(st.sets(st.sampled_from(plan.nodes), max_size=3))
    speeds = {node: draw(st.sampled_from((0.5, 0.25, 0.8))) for node in slow}
    return catalog, plan, speeds


@settings(max_examples=12)
@given(jobs(), st.data())
def test_every_sequence_of_losses_and_speeds_is_answered_whole(
    job: tuple[PlanCatalog, Plan, dict[int, float]], data: st.DataObject
) -> None:
    """Nodes are slow, a node is lost, nodes are fast again; whichever answer is taken each time."""
    catalog, plan, speeds = job
    slow = tuple(sorted(speeds))
    for event_speeds, lost in ((speeds, False), (speeds, True), ({}, False)):
        nodes = (data.draw(st.sampled_from(plan.nodes)),) if lost else ()
        cluster = survivors(plan, event_speeds, epoch=plan.epoch + 1, lost=nodes)
        event = NodesLost(nodes, 0) if lost else NodesChanged((), (), slow)
        found = proposed(catalog, plan, cluster, event)

        if len(cluster.nodes) < min(catalog.templates):
            return  # The coordinator asks nobody then, though a smaller pipeline may be there.
        assert bool(found) != bool(cluster.lost_layers(NUM_LAYERS))
        if not found:
            return
        assert lost or STAY in found or not (event_speeds or plan.slow_nodes)
        plan = data.draw(st.sampled_from(sorted(found.items())))[1].after


def test_a_slow_node_is_answered_by_the_best_of_all_plans_for_it() -> None:
    """The three ways side by side, from six nodes in two pipelines; the planner's is the best."""
    catalog = example_catalog(6, n0=3, f=1)
    plan = plan_of(catalog, (3, 3))
    found = proposed(catalog, plan, survivors(plan, {1: 0.5}), NodesChanged((), (), (1,)))

    assert set(found) == {STAY, "simple", RECUT, UNEQUAL}
    kinds = {node: NodeKind(0.5 if node == 1 else 1.0) for node in range(6)}
    best = UnequalPlanner(catalog.problem, kinds).plan(range(6), min_pipelines=2, epoch=0)
    assert found[UNEQUAL].iteration_s == pytest.approx(plan_iteration_s(best, catalog.times))
    as_is_s = plan_iteration_s(plan, catalog.times)
    assert found[STAY].iteration_s > 1.4 * as_is_s
    ordered = [found[answer].iteration_s for answer in (STAY, "simple", RECUT, UNEQUAL)]
    assert ordered == sorted(ordered, reverse=True)
    assert ordered[0] > ordered[1] > ordered[2]


def test_a_node_is_left_out_only_where_that_is_faster_and_f_losses_are_survived() -> None:
    """Forty times slower than others it holds up any pipeline, and a layer is the least it gets."""
    speeds, event = {1: 0.025}, NodesChanged((), (), (1,))
    catalog = example_catalog(4, n0=1, f=1)
    plan = plan_of(catalog, (1, 1, 1, 1))
    found = proposed(catalog, plan, survivors(plan, speeds), event)
    without = found[WITHOUT]

    assert without.after.nodes == (0, 2, 3)
    assert without.iteration_s < min(t.iteration_s for a, t in found.items() if a != WITHOUT)
    needed = example_catalog(2, n0=1, f=1)
    plan = plan_of(needed, (1, 1))
    assert WITHOUT not in proposed(needed, plan, survivors(plan, speeds), event)
    slow = replace(event, slow=(0,))
    plan = plan_of(catalog, (1, 1, 1, 1))
    assert WITHOUT not in proposed(catalog, plan, survivors(plan, {0: 0.9}), slow)


def test_nodes_of_different_low_speeds_are_left_out_together() -> None:
    """Without the slowest alone, the next one would hold up its pipeline nearly as much."""
    catalog = example_catalog(24, n0=8, f=1)
    plan = plan_of(catalog, (8, 8, 8))
    speeds, event = {0: 0.1, 8: 0.11}, NodesChanged((), (), (0, 8))
    found = proposed(catalog, plan, survivors(plan, speeds), event)

    assert set(plan.nodes).difference(found[WITHOUT].after.nodes) == {0, 8}
    assert found[WITHOUT].iteration_s < 0.85 * found[RECUT].iteration_s
    needed = example_catalog(17, n0=8, f=1)
    plan = plan_of(needed, (8, 9))
    found = proposed(needed, plan, survivors(plan, speeds), event)
    assert all(8 in transition.after.nodes for transition in found.values())


def test_with_many_different_speeds_only_some_limits_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator waits for these answers; the lowest and the highest limit are among them."""
    catalog = example_catalog(24, n0=2, f=1)
    plan = plan_of(catalog, (2,) * 12)
    speeds = {node: 0.2 + node / 50 for node in range(14)}
    sizes = []
    propose = Reinstantiate.propose

    def counted(
        policy: Reinstantiate,
        plan: Plan,
        cluster: ClusterState,
        event: ClusterEvent,
        prices: Prices,
    ) -> tuple[Transition, ...]:
        sizes.append(len(cluster.nodes))
        return propose(policy, plan, cluster, event, prices)

    monkeypatch.setattr(Reinstantiate, "propose", counted)
    proposed(catalog, plan, survivors(plan, speeds), NodesChanged((), (), tuple(speeds)))

    without = [size for size in sizes if size < 24]
    assert (without[0], without[-1]) == (23, 10)
    assert len(without) == 8


def test_a_loss_gives_work_to_every_survivor_however_slow() -> None:
    """Also to one that had none, and at once: what takes a planner is for later."""
    catalog = example_catalog(7, n0=2, f=1)
    plan = plan_of(catalog, (2, 2, 2))
    cluster = survivors(plan, {}, lost=(5,))
    held = Node(6, (frozenset(),), NodeKind(0.025))
    cluster = ClusterState(1, (*cluster.nodes, held))
    found = proposed(catalog, plan, cluster, NodesLost((5,), 0))

    assert set(found) <= {"simple", "borrow", "merge", "global"}
    assert all(6 in transition.after.nodes for transition in found.values())


@pytest.mark.parametrize(("slow", "fast"), [(4, 6), (6, 4)])
@pytest.mark.parametrize("num_planned", [4, 5])
def test_a_fast_node_has_the_place_of_a_lost_one_and_a_slow_one_waits(
    slow: int, fast: int, num_planned: int
) -> None:
    """Where there are more nodes than places; the lower number got it.

    Args:
        num_planned: largest number of nodes that there is a plan for; beyond it the answer is the
            local one.
    """
    catalog = example_catalog(4, n0=2, f=1)
    plans = catalog.plans if num_planned == 4 else {**catalog.plans, 5: catalog.plans[4]}
    catalog = replace(catalog, plans=plans)
    plan = plan_of(catalog, (2, 2))
    idle = (Node(slow, (frozenset(),), NodeKind(0.25)), Node(fast, (frozenset(),)))
    cluster = survivors(plan, {}, lost=(1,))
    nodes = (*cluster.nodes, *sorted(idle, key=lambda node: node.node))
    event, policy = NodesLost((1,), 0), UnequalNodes(Reinstantiate(catalog))

    found = policy.propose(plan, ClusterState(1, nodes), event, prices(catalog))

    assert {transition.answer for transition in found} <= {"borrow", "global"}
    for transition in found:
        assert [pipeline.nodes for pipeline in transition.after.pipelines] == [(0, fast), (2, 3)]


def test_where_there_are_too_many_to_plan_for_the_pipelines_are_recut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator has other things to do than to plan for a minute."""
    many = {node: NodeKind(0.5 if node < 3 else 1.0) for node in range(40)}
    catalog = example_catalog(6, n0=3, f=1)
    assert planning_effort(catalog.problem, many) > EFFORT_MAX
    monkeypatch.setattr(unequal_nodes, "EFFORT_MAX", 1)
    plan = plan_of(catalog, (3, 3))
    found = proposed(catalog, plan, survivors(plan, {1: 0.5}), NodesChanged((), (), (1,)))

    assert set(found) == {STAY, "simple", RECUT}


def test_a_slow_node_is_answered_also_where_no_pipeline_seems_to_fit_any_more() -> None:
    """Out of memory raises what layers are estimated to need; a coordinator that then planned for
    unequal nodes raised what the planner refuses, and so did the next one."""
    catalog = example_catalog(4, n0=1, f=1)
    plan = plan_of(catalog, (2, 2))
    profile = replace(catalog.problem.profile, device_memory_bytes=1)
    full = replace(catalog, problem=replace(catalog.problem, profile=profile))
    cluster = survivors(plan, {0: 0.5})
    event = NodesChanged((), (), slow=(0,))

    found = UnequalNodes(Reinstantiate(full)).propose(plan, cluster, event, prices(full))

    assert STAY in {one.answer for one in found}
