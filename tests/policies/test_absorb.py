"""Absorbing as transitions: who stands in for whom, when nobody can, and what it is priced at."""

from dataclasses import replace

import pytest

from helpers.losses import NUM_LAYERS, example_catalog, plan_of, prices
from helpers.strategies import MEBIBYTE, equal_problem
from planaria.core.cluster import ClusterState, Node, NodesChanged, NodesLost
from planaria.core.plan import Plan, Transition
from planaria.errors import InfeasibleError
from planaria.estimator.peak_memory import bytes_by_rank
from planaria.planner.plans import PlanCatalog, best_plan
from planaria.planner.reroute.reroutes import simulated_s
from planaria.planner.reroute.shadows import first_plan_with_shadows, with_shadows
from planaria.planner.templates import pipeline_templates
from planaria.policies.absorb import ABSORB, Absorb
from planaria.policies.memory_checked import has_room
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.unequal_nodes import UnequalNodes


def policy(catalog: PlanCatalog) -> Absorb:
    return Absorb(catalog, UnequalNodes(Reinstantiate(catalog)))


def left_of(plan: Plan, lost: tuple[int, ...]) -> ClusterState:
    """The others, each with what it computes and what it keeps for a neighbour."""
    nodes = (Node(rank, (held,)) for rank, held in sorted(plan.held_by_rank.items()))
    return ClusterState(plan.epoch + 1, tuple(node for node in nodes if node.node not in lost))


def proposed(catalog: PlanCatalog, plan: Plan, *lost: int) -> tuple[Transition, ...]:
    return policy(catalog).propose(plan, left_of(plan, lost), NodesLost(lost, 40), prices(catalog))


def stages(transition: Transition, pipeline: int) -> list[tuple[int, int]]:
    template = transition.after.pipelines[pipeline].template
    return [(stage.first_layer, stage.end_layer) for stage in template.stages]


@pytest.mark.parametrize(
    ("lost", "ends"),
    [
        (0, [(0, 8), (8, 12), (12, 16)]),
        (1, [(0, 8), (8, 12), (12, 16)]),
        (2, [(0, 4), (4, 12), (12, 16)]),
        (3, [(0, 4), (4, 8), (8, 16)]),
    ],
)
def test_the_neighbour_computes_both_stages(lost: int, ends: list[tuple[int, int]]) -> None:
    """No parameter moves, and everyone works."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = with_shadows(plan_of(catalog, (4, 4)))
    (found,) = proposed(catalog, plan, lost)

    assert (found.policy, found.answer, found.rounds) == ("absorb", ABSORB, ())
    assert stages(found, 0) == ends
    assert found.after.pipelines[1] == plan.pipelines[1]
    assert lost not in found.after.nodes
    assert len(found.after.nodes) == 7
    held = plan.held_by_rank
    assert all(layers <= held[rank] for rank, layers in found.after.held_by_rank.items())
    assert found.iteration_s == simulated_s(catalog.problem, found.after)


def test_losses_that_are_no_neighbours_are_absorbed_together_and_in_turn() -> None:
    """At once in two pipelines and in one, then in what is left."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = with_shadows(plan_of(catalog, (4, 4)))
    (found,) = proposed(catalog, plan, 1, 3, 4)

    assert found.answer == ABSORB
    assert [len(pipeline.nodes) for pipeline in found.after.pipelines] == [2, 3]
    (again,) = proposed(catalog, found.after, 7)
    assert again.answer == ABSORB


def test_neighbours_are_left_to_the_other_policy_which_protects_its_plan() -> None:
    """The layers of both are nowhere in their pipeline."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = with_shadows(plan_of(catalog, (4, 4)))
    found = proposed(catalog, plan, 1, 2)

    assert {one.policy for one in found} == {"reinstantiate"}
    for one in found:
        assert one.after.shadows == with_shadows(one.after).shadows
        assert one.after.shadows
        held = left_of(plan, (1, 2)).held_by_rank()
        needed = {(rank, x) for rank, own in one.after.held_by_rank.items() for x in own}
        sent = {(t.target, t.layer) for transfers in one.rounds for t in transfers}
        assert sent == {(rank, x) for rank, x in needed if x not in held[rank]}


def test_a_worker_that_is_new_holds_nothing_and_cannot_stand_in() -> None:
    """Its node lives; its neighbour is lost."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = with_shadows(plan_of(catalog, (4, 4)))
    cluster = left_of(plan, (1,))
    nodes = (Node(0, (frozenset(),)), *cluster.nodes[1:])
    found = policy(catalog).propose(
        plan, ClusterState(1, nodes), NodesLost((1,), 40), prices(catalog)
    )

    assert found
    assert all(one.answer != ABSORB for one in found)


def test_a_node_that_comes_gets_a_place_and_shadows() -> None:
    catalog = example_catalog(8, n0=2, f=1)
    plan = with_shadows(plan_of(catalog, (4, 3)))
    nodes = (*left_of(plan, ()).nodes, Node(7, (frozenset(),)))
    found = policy(catalog).propose(
        plan, ClusterState(1, nodes), NodesChanged((7,), ()), prices(catalog)
    )

    assert found
    assert all(7 in one.after.held_by_rank and 7 in one.after.shadows for one in found)


def test_a_job_that_does_not_fit_is_refused_with_what_it_needs() -> None:
    """Twice the state, as the memory of a device is planned with."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))

    def most_bytes(one: Plan) -> int:
        held = bytes_by_rank(catalog.problem.profile, one, gradient_copies=1)
        return max(rank.state_bytes + rank.microbatch_bytes for rank in held.values())

    needed = most_bytes(with_shadows(plan))
    assert needed > 1.5 * most_bytes(plan)
    small = replace(catalog.problem.profile, device_memory_bytes=needed - 1)
    with pytest.raises(InfeasibleError, match=str(needed)):
        first_plan_with_shadows(replace(catalog.problem, profile=small), plan)
    enough = replace(catalog.problem.profile, device_memory_bytes=needed)
    found = first_plan_with_shadows(replace(catalog.problem, profile=enough), plan)
    assert found.plan.shadows
    assert sum(len(kept) for kept in found.plan.shadows.values()) == 2 * NUM_LAYERS


@pytest.mark.parametrize("num_nodes", [8, 16])
def test_a_job_begins_with_deeper_pipelines_where_only_those_have_room_for_shadows(
    num_nodes: int,
) -> None:
    """Without shadows pipelines of two fit, which are the fastest; with them those of four do."""
    problem = equal_problem(num_layers=8, device_memory_bytes=110 * MEBIBYTE)
    templates = pipeline_templates(problem, num_nodes)
    fastest = best_plan(problem, range(num_nodes), templates, epoch=3)
    assert min(len(pipeline.nodes) for pipeline in fastest.pipelines) < 4

    with pytest.raises(InfeasibleError, match="more nodes or another policy"):
        first_plan_with_shadows(problem, fastest)
    found = first_plan_with_shadows(problem, fastest, templates=templates).plan
    assert found.epoch == 3
    assert found.nodes == tuple(range(num_nodes))
    assert found.shadows
    assert has_room(problem, found)


def test_more_nodes_are_no_way_out_where_not_even_a_layer_each_fits() -> None:
    """A node keeps two layers at least, and the second of a pipeline three."""
    problem = equal_problem(num_layers=8, device_memory_bytes=45 * MEBIBYTE)
    templates = pipeline_templates(problem, 16)
    fastest = best_plan(problem, range(16), templates, epoch=0)

    with pytest.raises(InfeasibleError, match="more than a device has; another policy would work"):
        first_plan_with_shadows(problem, fastest, templates=templates)


@pytest.mark.parametrize(
    ("lost", "modes"),
    [
        (0, ["none"] * 4 + ["full"] * 4),
        (1, ["none"] * 4 + ["full"] * 4),
        (2, ["full"] * 4 + ["none"] * 4),
    ],
)
def test_a_joined_stage_computes_again_what_its_parts_did(lost: int, modes: list[str]) -> None:
    """The planner has chosen recomputation for the second stage alone."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    first, *others = plan.pipelines
    stages = list(first.template.stages)
    stages[1] = replace(stages[1], recomputation=("full",) * 4)
    template = replace(first.template, stages=tuple(stages))
    plan = replace(plan, pipelines=(replace(first, template=template), *others))
    (found,) = proposed(catalog, with_shadows(plan), lost)

    joined = [stage.recomputation for stage in found.after.pipelines[0].template.stages]
    assert found.answer == ABSORB
    assert [list(modes_) for modes_ in joined if len(modes_) == 8] == [modes]
