"""The answers as transitions: whole, with the least to move, and the ones that may be given."""

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cpu_time import quickest
from helpers.losses import (
    NUM_LAYERS,
    NUM_SAMPLES,
    check_is_whole,
    check_transfers,
    even_template,
    example_catalog,
    kept_pipelines,
    plan_of,
    prices,
    shapes,
)
from planaria.core.cluster import ClusterState, Node, NodesLost, survivors
from planaria.core.plan import Plan, Transition
from planaria.planner.layout.instantiate import instantiations
from planaria.planner.plans import PlanCatalog
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.value import Outlook, best_transition


def proposed(
    catalog: PlanCatalog, plan: Plan, lost: tuple[int, ...], *, redone_samples: int = 0
) -> tuple[Transition, ...]:
    """The answers to the loss of nodes that leaves the others with all that they had."""
    cluster = survivors(plan, lost, epoch=plan.epoch + 1)
    event = NodesLost(lost, redone_samples)
    return Reinstantiate(catalog).propose(plan, cluster, event, prices(catalog))


def local_only(catalog: PlanCatalog) -> PlanCatalog:
    return replace(catalog, plans={})


def check(transitions: tuple[Transition, ...], cluster: ClusterState, catalog: PlanCatalog) -> None:
    """What holds for every answer to every loss."""
    f, n0 = catalog.problem.failures_tolerated, min(catalog.templates)
    assert transitions
    for transition in transitions:
        check_is_whole(transition, cluster, catalog)
        check_transfers(transition, cluster, prices(catalog).layer_bytes)
        assert len(transition.after.pipelines) >= min(f + 1, len(cluster.nodes) // n0)
        alive = {node.node for node in cluster.nodes}
        whole = [i for i, p in enumerate(transition.before.pipelines) if alive >= set(p.nodes)]
        kept = kept_pipelines(transition)
        if transition.answer == "simple":
            assert kept == whole


@st.composite
def jobs(draw: st.DrawFn) -> tuple[PlanCatalog, Plan]:
    """Any first plan with f + 1 pipelines or more, its nodes in any order."""
    n0, f = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    num_nodes = draw(st.integers((f + 1) * n0, 16))
    catalog = example_catalog(num_nodes, n0=n0, f=f)
    instantiated = instantiations(num_nodes, tuple(catalog.templates), min_pipelines=f + 1)
    sizes = draw(st.sampled_from(list(instantiated)))
    return catalog, plan_of(catalog, sizes, draw(st.permutations(range(num_nodes))))


@settings(max_examples=30)
@given(jobs(), st.data())
def test_every_sequence_of_losses_is_answered_whole(
    job: tuple[PlanCatalog, Plan], data: st.DataObject
) -> None:
    """While n0 nodes are left and every layer lives, every answer can be trained with; then none.

    The next loss strikes whichever answer was taken.
    """
    catalog, plan = job
    while True:
        most = min(len(plan.nodes), catalog.problem.failures_tolerated + 2)
        lost = data.draw(st.sets(st.sampled_from(plan.nodes), min_size=1, max_size=most))
        cluster = survivors(plan, lost, epoch=plan.epoch + 1)

        found = proposed(catalog, plan, tuple(sorted(lost)))

        if len(cluster.nodes) < min(catalog.templates) or cluster.lost_layers(NUM_LAYERS):
            assert not found
            return
        check(found, cluster, catalog)
        plan = data.draw(st.sampled_from(found)).after


@settings(max_examples=30)
@given(jobs(), st.data())
def test_a_loss_during_a_recovery_is_answered_from_what_each_node_holds(
    job: tuple[PlanCatalog, Plan], data: st.DataObject
) -> None:
    """Some layers have arrived, some workers are new: only what is missing moves, none twice."""
    catalog, plan = job
    held = st.frozensets(st.integers(0, NUM_LAYERS - 1))
    cluster = survivors(plan, data.draw(st.sets(st.sampled_from(plan.nodes))), epoch=3)
    nodes = tuple(Node(node.node, (data.draw(held),)) for node in cluster.nodes)
    cluster = ClusterState(4, nodes)

    found = Reinstantiate(catalog).propose(plan, cluster, NodesLost((), 0), prices(catalog))

    if len(nodes) < min(catalog.templates) or cluster.lost_layers(NUM_LAYERS):
        assert not found
    else:
        check(found, cluster, catalog)


def test_every_loss_of_up_to_f_nodes_is_answered_and_every_step_occurs() -> None:
    """All sets of at most f nodes, f = 1 and 2, from every small first plan, local and global."""
    answers = set()
    for num_nodes, n0, f in ((3, 1, 1), (5, 2, 1), (6, 2, 1), (6, 1, 2), (6, 2, 2), (7, 3, 1)):
        catalog = example_catalog(num_nodes, n0=n0, f=f)
        first = catalog.plans[num_nodes]
        for num_lost in range(1, f + 1):
            for lost in combinations(first.nodes, num_lost):
                cluster = survivors(first, lost, epoch=1)
                for policy in (catalog, local_only(catalog)):
                    found = proposed(policy, first, lost)
                    check(found, cluster, catalog)
                    answers |= {transition.answer for transition in found}
    assert answers == {"simple", "borrow", "merge", "global"}


@pytest.mark.parametrize(
    ("sizes", "lost", "answer", "after", "num_kept"),
    [
        ((4, 2), (0,), "simple", [3, 2], 1),
        ((3, 2), (4,), "borrow", [2, 2], 0),
        ((2, 2), (3,), "merge", [3], 0),
        ((2, 2, 2), (0, 1), "simple", [2, 2], 2),
    ],
)
def test_local_answers_of_oobleck_figure_8(
    sizes: tuple[int, ...], lost: tuple[int, ...], answer: str, after: list[int], num_kept: int
) -> None:
    """A template of three, a node lent, two pipelines made one, and one lost whole."""
    catalog = local_only(example_catalog(sum(sizes), n0=2, f=1))

    (found,) = proposed(catalog, plan_of(catalog, sizes), lost)

    assert (found.policy, found.answer, shapes(found)) == ("reinstantiate", answer, after)
    assert len(kept_pipelines(found)) == num_kept


def test_the_lender_gives_the_node_that_costs_the_fewest_bytes() -> None:
    """Node 4 of (3, 4) is lost: what the lender's three nodes and node 3 hold is used best."""
    catalog = local_only(example_catalog(5, n0=2, f=1))
    plan = plan_of(catalog, (3, 2))

    (found,) = proposed(catalog, plan, (4,))

    # Nodes 0, 1, 2 hold layers 0-4, 5-9, 10-15 and node 3 layers 0-7; each place is one half.
    assert [set(pipeline.nodes) for pipeline in found.after.pipelines] in (
        [{0, 2}, {3, 1}],
        [{0, 1}, {3, 2}],
    )
    moved = [transfer for transfers in found.rounds for transfer in transfers]
    assert not any(transfer.target == 3 for transfer in moved)


def test_a_local_answer_of_too_few_pipelines_is_refused_where_the_global_one_has_enough() -> None:
    """One pipeline of five survives as one of four; two of two would tolerate the next loss."""
    catalog = example_catalog(6, n0=2, f=1)
    plan = plan_of(catalog, (5,))
    left = survivors(plan, (2,), epoch=1).nodes
    cluster = ClusterState(1, (*left[:3], Node(4, (frozenset(range(NUM_LAYERS)),))))
    event = NodesLost((2,), 0)

    found = Reinstantiate(catalog).propose(plan, cluster, event, prices(catalog))
    without = Reinstantiate(local_only(catalog)).propose(plan, cluster, event, prices(catalog))

    assert [(t.answer, shapes(t)) for t in found] == [("global", [2, 2])]
    assert [(t.answer, shapes(t)) for t in without] == [("simple", [4])]


def test_answers_that_are_the_same_plan_are_proposed_once() -> None:
    """The report lists candidates; one under two names would look like a choice."""
    catalog = example_catalog(4, n0=1, f=1)
    plan = plan_of(catalog, (1, 1, 1, 1))

    found = proposed(catalog, plan, (1,))

    assert [(t.answer, shapes(t)) for t in found] == [("simple", [1, 1, 1])]
    assert [pipeline.nodes for pipeline in found[0].after.pipelines] == [(0,), (2,), (3,)]
    assert found[0].rounds == ()


def test_a_new_worker_gets_its_layers_from_peers_and_all_nodes_stay() -> None:
    """No node is lost when a worker ends, only what it held."""
    catalog = local_only(example_catalog(4, n0=2, f=1))
    plan = plan_of(catalog, (2, 2))
    whole = survivors(plan, (), epoch=1)
    nodes = tuple(Node(1, (frozenset(),)) if n.node == 1 else n for n in whole.nodes)

    (found,) = Reinstantiate(catalog).propose(
        plan, ClusterState(1, nodes), NodesLost((), NUM_SAMPLES), prices(catalog)
    )

    assert found.after.pipelines == plan.pipelines
    moved = [transfer for transfers in found.rounds for transfer in transfers]
    assert {(t.layer, t.source, t.target) for t in moved} == {(n, 3, 1) for n in range(8, 16)}
    assert found.redone_samples == NUM_SAMPLES


def test_a_node_without_work_takes_the_place_of_the_lost_one() -> None:
    """It holds nothing, so that all that the lost one held moves, and nobody else is touched."""
    catalog = local_only(example_catalog(4, n0=2, f=1))
    plan = plan_of(catalog, (2, 2))
    left = survivors(plan, (1,), epoch=1)
    cluster = ClusterState(1, (*left.nodes, Node(7, (frozenset(),))))

    (found,) = Reinstantiate(catalog).propose(plan, cluster, NodesLost((1,), 0), prices(catalog))

    assert [pipeline.nodes for pipeline in found.after.pipelines] == [(0, 7), (2, 3)]
    check_is_whole(found, cluster, catalog)
    check_transfers(found, cluster, prices(catalog).layer_bytes)


def test_a_node_that_came_just_before_a_loss_has_work_after_it() -> None:
    """The local answer knows no use for it, so it is refused where the global one does."""
    known = example_catalog(6, n0=2, f=1)
    plan = plan_of(known, (2, 2), nodes=(0, 1, 2, 3))
    left = survivors(plan, (3,), epoch=1)
    came = (Node(4, (frozenset(),)), Node(5, (frozenset(),)))
    cluster = ClusterState(1, (*left.nodes, *came))
    event = NodesLost((3,), 0)
    transitions = Reinstantiate(known).propose(plan, cluster, event, prices(known))

    assert transitions
    assert all(transition.after.nodes == (0, 1, 2, 4, 5) for transition in transitions)


def test_nodes_of_two_devices_are_re_formed_by_device() -> None:
    """A place is a node with the layers of each of its devices."""
    catalog = example_catalog(6, n0=2, f=1, devices_per_node=2)
    first = plan_of(catalog, (3, 3))
    assert first.pipelines[0].template == even_template(3, 2)
    for lost in first.nodes:
        cluster = survivors(first, (lost,), epoch=1)
        check(proposed(catalog, first, (lost,)), cluster, catalog)


def test_every_coordinator_proposes_the_same() -> None:
    """A new leader may have to finish what another one began."""
    catalog = example_catalog(12, n0=3, f=2)
    plan = catalog.plans[12]

    assert proposed(catalog, plan, (2, 7)) == proposed(catalog, plan, (7, 2))


def test_the_best_answer_depends_on_when_the_next_failure_is_expected() -> None:
    """If the next one comes before the slower transfer ends, only the quicker one makes samples."""
    catalog = example_catalog(12, n0=3, f=2)
    found = proposed(catalog, catalog.plans[12], (2,))
    downtimes_s = sorted(transition.downtime_s for transition in found)
    iterations_s = sorted(transition.iteration_s for transition in found)
    batch = NUM_SAMPLES

    soon, late = (
        best_transition(found, global_batch_size=batch, outlook=Outlook(failures_per_s=rate))
        for rate in (1e4 / downtimes_s[1], 1e-9)
    )

    assert [transition.answer for transition in found] == ["merge", "global"]
    assert (soon.answer, soon.downtime_s) == ("merge", downtimes_s[0])
    assert (late.answer, late.iteration_s) == ("global", iterations_s[0])


@pytest.mark.parametrize(("n0", "f"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_proposals_for_32_nodes_take_less_than_100_ms(n0: int, f: int) -> None:
    """The decision is in every downtime."""
    catalog = example_catalog(32, n0=n0, f=f)
    plan = catalog.plans[32]
    for lost in ((0,), (3, 30), (0, 9, 17)):
        found, cpu_s = quickest(partial(proposed, catalog, plan, lost), limit_s=0.1)

        assert found
        assert cpu_s < 0.1
