"""What the restorer is measured against: it moves all that is missing, only more of it."""

from itertools import combinations

from helpers.losses import check_is_whole, check_transfers, example_catalog, prices
from planaria.core.cluster import ClusterState, Node, NodesLost, survivors
from planaria.core.plan import Pipeline, Stage, Transfer, Transition, plain_plan
from planaria.policies.reinstantiate import Reinstantiate
from planaria.restorer.assignment import UnboundPipeline
from planaria.restorer.strategies import LEAST_BYTES, NAIVE, assign_nodes_in_order, whole_transfers
from restorer.test_assignment import plan_of, template_of


def test_nodes_take_the_places_in_order_whatever_they_hold() -> None:
    """Node 5 holds what the first place needs, and gets the last one."""
    two, one = template_of(2, 4), template_of(4)
    before = plan_of(Pipeline(two, (5, 1)), Pipeline(one, (3,)))
    nodes = survivors(before, (), epoch=1).nodes

    pipelines = assign_nodes_in_order(
        [UnboundPipeline(two, 0), UnboundPipeline(one, 1)],
        nodes,
        before=before,
        layer_bytes=(1,) * 4,
    )

    assert [pipeline.nodes for pipeline in pipelines] == [(1, 3), (5,)]


def test_the_first_holder_sends_the_whole_layer() -> None:
    """Ranks 1 and 2 could share it."""
    both = frozenset({0, 1})
    nodes = (Node(0, (frozenset(),)), Node(1, (frozenset({1}),)), Node(2, (both,)))
    plan = plain_plan(1, (Pipeline(template_of(2), (0,)), Pipeline(template_of(2), (2,))), (1, 1))

    moved = whole_transfers(plan, ClusterState(1, nodes), layer_bytes=(10**9, 10**8))

    assert plan.pipelines[0].template.stages == (Stage(0, 2, 1),)
    assert moved == (Transfer(0, 2, 0, 10**9), Transfer(1, 1, 0, 10**8))


def test_naive_answers_are_whole_and_never_move_fewer_bytes() -> None:
    """All losses of one or two nodes of seven; in some of them far more moves."""
    catalog = example_catalog(7, n0=2, f=1)
    plan = catalog.plans[7]
    ratios = []
    for lost in (*combinations(plan.nodes, 1), *combinations(plan.nodes, 2)):
        cluster = survivors(plan, lost, epoch=1)
        event = NodesLost(lost, 0)
        least = Reinstantiate(catalog, LEAST_BYTES).propose(plan, cluster, event, prices(catalog))
        naive = Reinstantiate(catalog, NAIVE).propose(plan, cluster, event, prices(catalog))

        assert bool(least) == bool(naive)
        by_answer = {transition.answer: moved_bytes(transition) for transition in least}
        for transition in naive:
            check_is_whole(transition, cluster, catalog)
            check_transfers(transition, cluster, prices(catalog).layer_bytes)
            if transition.answer in by_answer:
                assert moved_bytes(transition) >= by_answer[transition.answer]
                ratios.append(moved_bytes(transition) / max(1, by_answer[transition.answer]))
    assert max(ratios) > 2


def moved_bytes(transition: Transition) -> int:
    return sum(t.num_bytes for moved in transition.rounds for t in moved)
