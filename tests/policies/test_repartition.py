"""Repartition as transitions: whole, bound by least bytes, and what it leaves to another policy."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cpu_time import quickest
from helpers.losses import (
    NUM_LAYERS,
    NUM_MICROBATCHES,
    check_transfers,
    example_catalog,
    jobs,
    plan_of,
    prices,
)
from planaria.core.cluster import ClusterState, Node, NodesChanged, NodesLost, survivors
from planaria.core.plan import (
    NodeKind,
    PipelineTemplate,
    Plan,
    Stage,
    Transition,
    plain_plan,
)
from planaria.planner.layout.depths import Ranges
from planaria.planner.layout.search import Layout, LayoutSearches, SearchResults
from planaria.planner.plans import PlanCatalog
from planaria.planner.reroute.reroutes import simulated_s
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.repartition import Repartition, layout_names
from planaria.policies.unequal_nodes import STAY, UnequalNodes


def policy(catalog: PlanCatalog) -> Repartition:
    searched = LayoutSearches(Ranges(), SearchResults(catalog.problem))
    return Repartition(catalog.problem, UnequalNodes(Reinstantiate(catalog)), searched)


def check_is_a_layout(transition: Transition, cluster: ClusterState, catalog: PlanCatalog) -> None:
    """Every survivor works, each pipeline is the model with some microbatches, and the price is
    that of the schedule."""
    after = transition.after
    assert transition.policy == "repartition"
    assert after.epoch == cluster.epoch
    assert list(after.nodes) == [node.node for node in cluster.nodes]
    routes = {pipeline.route() for pipeline in after.pipelines}
    assert set(after.routes) == routes
    assert len(after.routes) == NUM_MICROBATCHES
    assert transition.iteration_s == pytest.approx(simulated_s(catalog.problem, after), rel=1e-9)
    check_transfers(transition, cluster, prices(catalog).layer_bytes)


@settings(max_examples=5)
@given(jobs(), st.data())
def test_losses_one_after_the_other_are_answered_by_layouts(
    job: tuple[PlanCatalog, Plan], data: st.DataObject
) -> None:
    """Until some layer has no live holder; the next loss strikes whichever answer was taken."""
    catalog, plan = job
    while True:
        lost = tuple(sorted(data.draw(st.sets(st.sampled_from(plan.nodes), min_size=1))))
        cluster = survivors(plan, lost, epoch=plan.epoch + 1)

        found = policy(catalog).propose(plan, cluster, NodesLost(lost, 8), prices(catalog))

        if cluster.lost_layers(NUM_LAYERS):
            assert found == ()
            return
        assert found[0].answer == "repartition"
        assert len({transition.answer for transition in found}) == len(found)
        for transition in found:
            check_is_a_layout(transition, cluster, catalog)
            assert transition.redone_samples == 8
        assert found[0].iteration_s == min(transition.iteration_s for transition in found)
        plan = data.draw(st.sampled_from(found)).after


def test_many_microbatches_do_not_hold_up_a_decision() -> None:
    """Nodes on the coordinator's machine end after two leases in which nobody answers them.

    A step of the search simulates a pipeline with all its microbatches, 0.5 s with these; 64 steps
    take 20 s.
    """
    catalog = example_catalog(16, n0=2, f=1)
    problem = replace(catalog.problem, num_microbatches=8192)
    catalog = replace(catalog, problem=problem)
    plan = plain_plan(0, plan_of(catalog, (8, 8)).pipelines, (4096, 4096))
    cluster = survivors(plan, (5,), epoch=1)

    found, seconds = quickest(
        lambda: policy(catalog).propose(plan, cluster, NodesLost((5,), 0), prices(catalog)),
        limit_s=3.0,
    )

    assert found[0].answer == "repartition"
    assert seconds < 3.0


def test_what_keeps_more_pipelines_moves_less() -> None:
    """Slower layouts are proposed for that alone."""
    catalog = example_catalog(16, n0=2, f=1)
    plan = plan_of(catalog, (4, 4, 4, 4))
    cluster = survivors(plan, (5,), epoch=1)

    found = policy(catalog).propose(plan, cluster, NodesLost((5,), 0), prices(catalog))

    assert len(found) > 1
    assert found[-1].downtime_s < found[0].downtime_s
    kept = [pipeline for pipeline in plan.pipelines if 5 not in pipeline.nodes]
    assert set(kept) <= set(found[-1].after.pipelines)


def test_what_was_searched_before_is_not_searched_again() -> None:
    """The answer to a loss is then better than a search within the pause finds."""
    catalog = example_catalog(12, n0=1, f=1)
    plan = plan_of(catalog, (3, 3, 3, 3))
    cluster, event = survivors(plan, (4,), epoch=1), NodesLost((4,), 0)
    unaware, aware = policy(catalog), policy(catalog)
    for _ in aware.searched.steps(11, [pipeline.template for pipeline in plan.pipelines]):
        pass
    known = aware.searched.front(11, [pipeline.template for pipeline in plan.pipelines])

    at_once = unaware.propose(plan, cluster, event, prices(catalog))
    found = aware.propose(plan, cluster, event, prices(catalog))

    assert tuple(one.iteration_s for one in found) == tuple(one.iteration_s for one in known)
    assert found[0].iteration_s <= at_once[0].iteration_s


def test_answers_are_called_by_what_they_have_that_faster_ones_lack() -> None:
    """Each has a name of its own, also where the fastest holds layers once."""

    template = PipelineTemplate((Stage(0, 1, 1),), 1)

    def layout(num_pipelines: int, num_kept: int) -> Layout:
        templates = (template,) * num_pipelines
        return Layout(templates, (1,) * num_pipelines, False, 1.0, num_kept)

    assert layout_names([layout(2, 0), layout(3, 1), layout(1, 2), layout(1, 3)]) == [
        "repartition",
        "repartition-keeping-1",
        "repartition-once",
        "repartition-once-keeping-3",
    ]
    assert layout_names([layout(1, 0), layout(2, 0), layout(2, 1), layout(1, 1)]) == [
        "repartition",
        "repartition-doubled",
        "repartition-doubled-keeping-1",
        "repartition-keeping-1",
    ]


def test_a_node_that_joins_gets_work() -> None:
    """It holds nothing, and what it needs is sent."""
    catalog = example_catalog(9, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    held = survivors(plan, (), epoch=1).nodes
    cluster = ClusterState(1, (*held, Node(8, (frozenset(),))))

    found = policy(catalog).propose(plan, cluster, NodesChanged((8,), ()), prices(catalog))

    for transition in found:
        check_is_a_layout(transition, cluster, catalog)


def test_a_node_that_leaves_gives_what_it_holds() -> None:
    """It has no work afterwards."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    *others, leaving = survivors(plan, (), epoch=1).nodes
    cluster = ClusterState(1, tuple(others), (leaving,))

    found = policy(catalog).propose(plan, cluster, NodesChanged((), (7,)), prices(catalog))

    for transition in found:
        check_is_a_layout(transition, cluster, catalog)


def test_slow_nodes_are_left_to_the_other_policy() -> None:
    """Layouts are for nodes that are as the profile says."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    slow, *others = survivors(plan, (), epoch=1).nodes
    cluster = ClusterState(1, (replace(slow, kind=NodeKind(0.5)), *others))
    event = NodesChanged((), (), (0,))

    found = policy(catalog).propose(plan, cluster, event, prices(catalog))

    assert found == UnequalNodes(Reinstantiate(catalog)).propose(
        plan, cluster, event, prices(catalog)
    )
    assert found[0].answer == STAY


def test_a_better_plan_is_compared_with_the_one_that_there_is() -> None:
    """Where nothing happened: the plan as it is, then layouts."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (3, 5))
    cluster = survivors(plan, (), epoch=1)

    stay, *found = policy(catalog).propose(plan, cluster, NodesChanged((), ()), prices(catalog))

    assert stay.answer == STAY
    assert found[0].answer == "repartition"
    assert found[0].iteration_s < stay.iteration_s


def test_layers_are_not_left_to_distrusted_nodes_alone() -> None:
    """Where every layout would, the other policy's answers are there, too."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    nodes = survivors(plan, (7,), epoch=1).nodes
    distrusted = tuple(replace(node, is_trusted=node.node not in (1, 5)) for node in nodes)
    cluster = ClusterState(1, distrusted)

    found = policy(catalog).propose(plan, cluster, NodesLost((7,), 0), prices(catalog))

    assert found
    for transition in found:
        trusted = {
            layer
            for rank, layers in transition.after.layers_by_rank.items()
            if rank not in (1, 5)
            for layer in layers
        }
        assert trusted == set(range(NUM_LAYERS))
