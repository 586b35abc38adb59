"""Rerouting as transitions: nothing moves, several losses, nodes that come, and what is left."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.losses import (
    NUM_LAYERS,
    NUM_MICROBATCHES,
    NUM_SAMPLES,
    check_is_whole,
    check_transfers,
    example_catalog,
    jobs,
    plan_of,
    prices,
)
from helpers.strategies import equal_problem
from planaria.core.cluster import ClusterState, Node, NodesChanged, NodesLost, survivors
from planaria.core.plan import NodeKind, Pipeline, PipelineTemplate, Plan, Stage, Transition
from planaria.planner.plans import PlanCatalog, plan_of_templates
from planaria.planner.reroute import reroutes
from planaria.planner.reroute.reroutes import best_reroute, num_without_work
from planaria.policies import reroute
from planaria.policies.adaptive import Adaptive
from planaria.policies.policy import profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.reroute import NORMALISED, REROUTE, KnownReroutes, Reroute
from planaria.policies.unequal_nodes import UnequalNodes
from planaria.policies.value import Outlook, best_transition


def policy(catalog: PlanCatalog) -> Reroute:
    return Reroute(catalog.problem, UnequalNodes(Reinstantiate(catalog)))


def proposed(
    catalog: PlanCatalog, plan: Plan, lost: tuple[int, ...], *, redone_samples: int = 0
) -> tuple[Transition, ...]:
    """The answers to the loss of nodes that leaves the others with all that they had."""
    cluster = survivors(plan, lost, epoch=plan.epoch + 1)
    return policy(catalog).propose(plan, cluster, NodesLost(lost, redone_samples), prices(catalog))


def check_goes_around(transition: Transition, cluster: ClusterState, catalog: PlanCatalog) -> None:
    """Every survivor has a place, and every microbatch covers the model over places that live."""
    after = transition.after
    assert transition.policy == "reroute"
    assert after.epoch == cluster.epoch
    assert list(after.nodes) == [node.node for node in cluster.nodes]
    assert len(after.routes) == NUM_MICROBATCHES
    held = after.layers_by_rank
    for route in after.routes:
        layers = [x for hop in route for x in range(hop.first_layer, hop.end_layer)]
        assert layers == list(range(NUM_LAYERS))
        for hop in route:
            assert hop.rank in held
            assert set(range(hop.first_layer, hop.end_layer)) <= set(held[hop.rank])
    check_transfers(transition, cluster, prices(catalog).layer_bytes)


def test_a_loss_is_answered_without_moving_anything() -> None:
    """Pipelines keep their nodes and stages; the lost node's place is empty."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))

    first, *more = proposed(catalog, plan, (2,), redone_samples=NUM_SAMPLES)

    assert first.answer == REROUTE
    assert all(one.answer == NORMALISED for one in more)
    assert first.after.pipelines == plan.pipelines
    assert first.after.gone == (2,)
    assert first.rounds == ()
    assert first.downtime_s == prices(catalog).regroup_s
    assert first.redone_samples == NUM_SAMPLES
    check_goes_around(first, survivors(plan, (2,), epoch=1), catalog)


def test_what_one_policy_has_found_another_does_not_search_again() -> None:
    """Another loss, a hurry, a spare, a slow node or another epoch is another question; by which
    routes the plan went before does not matter."""
    catalog = example_catalog(8, n0=2, f=1)
    plan, known = plan_of(catalog, (4, 4)), KnownReroutes(catalog.problem)
    spare = Node(9, (frozenset[int](),))

    def answers(
        one: Reroute, lost: tuple[int, ...], *, before: Plan = plan, epoch: int = 1, more: str = ""
    ) -> tuple[Transition, ...]:
        cluster = survivors(before, lost, epoch=epoch)
        nodes = (*cluster.nodes, spare) if more == "spare" else cluster.nodes
        if more == "slow":
            nodes = (replace(nodes[0], kind=NodeKind(0.5)), *nodes[1:])
        return one.propose(
            before, replace(cluster, nodes=nodes), NodesLost(lost, 0), prices(catalog)
        )

    usual, hurried = (replace(policy(catalog), is_hurried=x, known=known) for x in (False, True))
    questions: list[Callable[[Reroute], tuple[Transition, ...]]] = [
        lambda one: answers(one, (2,)),
        lambda one: answers(one, (3,)),
        lambda one: answers(one, (2, 5)),
        lambda one: answers(one, (2,), epoch=2),
        lambda one: answers(one, (2,), more="spare"),
        lambda one: answers(one, (2,), more="slow"),
    ]
    for asked in (usual, hurried, replace(usual, hops_max=0)):
        for question in questions:
            alone = question(replace(asked, known=None))
            with mock.patch.object(reroute, "best_reroute", wraps=best_reroute) as search:
                assert question(asked) == alone
                assert search.called
            with mock.patch.object(reroute, "best_reroute") as search:
                assert question(replace(asked)) == alone
                assert not search.called
    changed = replace(
        plan,
        routes=plan.routes[::-1],
        splits_backward=True,
        in_flight=dict.fromkeys(plan.ranks, 1),
    )
    assert answers(usual, (2,), before=changed) == answers(
        replace(usual, known=None), (2,), before=changed
    )


def test_the_oldest_answers_are_forgotten() -> None:
    """However long a simulation runs, it keeps no more."""
    known = KnownReroutes(example_catalog(2, n0=1, f=0).problem)

    for number in range(KnownReroutes.KNOWN_MAX + 1):
        known.add(number, ())

    assert known.get(0) is None
    assert known.get(1) == known.get(KnownReroutes.KNOWN_MAX) == ()


@settings(max_examples=8)
@given(jobs(), st.data())
def test_losses_at_once_and_in_sequence_are_gone_around(
    job: tuple[PlanCatalog, Plan], data: st.DataObject
) -> None:
    """Until some layer has no live holder; the next loss strikes whichever answer was taken."""
    catalog, plan = job
    while True:
        lost = data.draw(st.sets(st.sampled_from(plan.nodes), min_size=1, max_size=3))
        cluster = survivors(plan, lost, epoch=plan.epoch + 1)

        found = proposed(catalog, plan, tuple(sorted(lost)))

        if cluster.lost_layers(NUM_LAYERS):
            assert found == ()
            return
        assert found
        assert all(not one.rounds for one in found if one.answer == REROUTE)
        leaves_idle = [num_without_work(one.after) > 0 for one in found]
        assert all(leaves_idle) or not any(leaves_idle)
        for transition in found:
            check_goes_around(transition, cluster, catalog)
        plan = data.draw(st.sampled_from(found)).after


@settings(max_examples=8)
@given(jobs(), st.data())
def test_a_rerouted_plan_can_be_made_anew(
    job: tuple[PlanCatalog, Plan], data: st.DataObject
) -> None:
    """Oobleck's steps see survivors of each pipeline, whatever its places were."""
    catalog, plan = job
    lost = (data.draw(st.sampled_from(plan.nodes)),)
    rerouted = next(iter(proposed(catalog, plan, lost)), None)
    if rerouted is None:
        return
    more = (data.draw(st.sampled_from(rerouted.after.nodes)),)
    cluster = survivors(rerouted.after, more, epoch=2)
    if cluster.lost_layers(NUM_LAYERS):
        return

    found = Reinstantiate(catalog).propose(
        rerouted.after, cluster, NodesLost(more, 0), prices(catalog)
    )

    assert found
    for transition in found:
        assert transition.after.gone == ()
        check_is_whole(transition, cluster, catalog)
        check_transfers(transition, cluster, prices(catalog).layer_bytes)


def test_in_a_hurry_few_plans_are_run() -> None:
    """As it is, before a move, after it, and three moves of a node; none is faster than the best of
    all tries, and a large plan is left to others."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    cluster, event = survivors(plan, (2,), epoch=1), NodesLost((2,), 0)
    all_tries = Reroute(catalog.problem, Adaptive(()))
    hurried = replace(all_tries, is_hurried=True)

    with mock.patch.object(reroute, "best_reroute", wraps=reroutes.best_reroute) as run:
        found = hurried.propose(plan, cluster, event, prices(catalog))
    best = all_tries.propose(plan, cluster, event, prices(catalog))

    assert 0 < run.call_count <= 6
    assert all(call.kwargs["hops_max"] == 0 for call in run.call_args_list)
    assert [one.answer for one in found] == [one.answer for one in best]
    for one, other in zip(found, best, strict=True):
        check_goes_around(one, cluster, catalog)
        assert other.iteration_s <= one.iteration_s <= 1.02 * other.iteration_s
    with mock.patch.object(reroute, "_HURRIED_HOPS_MAX", sum(map(len, plan.routes)) - 1):
        assert hurried.propose(plan, cluster, event, prices(catalog)) == ()


def test_in_a_hurry_nobody_is_without_work() -> None:
    """All eight microbatches begin in the halves that are left of the second pipeline, which are
    faster, and end in the first; another deal has work for its other node."""
    problem = equal_problem(num_layers=4, num_microbatches=8)
    two = PipelineTemplate((Stage(0, 2, 1), Stage(2, 4, 1)), 2)
    three = PipelineTemplate((Stage(0, 1, 1), Stage(1, 2, 1), Stage(2, 4, 1)), 3)
    plan = plan_of_templates(problem, [two, three], range(5), epoch=0)
    around = replace(plan, epoch=1, gone=(4,))
    first = reroutes.best_reroute(problem, around, hops_max=0)
    assert first is not None
    assert num_without_work(first.plan) > 0

    cluster, event = survivors(plan, (4,), epoch=1), NodesLost((4,), 0)
    hurried = Reroute(problem, Adaptive(()), is_hurried=True)
    prices = profile_prices(problem.profile, regroup_s=0.02)
    found = hurried.propose(plan, cluster, event, prices)

    assert found
    assert not any(num_without_work(one.after) for one in found)


def test_a_node_that_joins_takes_the_empty_place() -> None:
    """Re-joining is the inverse: the pipelines are whole again, one place was sent."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    broken = proposed(catalog, plan, (2,))[0].after
    nodes = (*survivors(broken, (), epoch=2).nodes, Node(8, (frozenset[int](),)))
    cluster = ClusterState(2, nodes)

    (found,) = policy(catalog).propose(broken, cluster, NodesChanged((8,), ()), prices(catalog))

    assert found.answer == NORMALISED
    assert found.after.gone == ()
    assert found.after.pipelines[0].nodes == (0, 1, 8, 3)
    assert {t.target for transfers in found.rounds for t in transfers} == {8}
    check_goes_around(found, cluster, catalog)
    iteration_s, _ = catalog.distribution([one.template for one in plan.pipelines])
    assert found.iteration_s <= iteration_s + 1e-9


@pytest.mark.parametrize(("slow", "fast"), [(4, 6), (6, 4)])
def test_of_two_idle_nodes_the_faster_takes_the_empty_place(slow: int, fast: int) -> None:
    """The lower number got it, and the job went on at a quarter of its speed."""
    catalog = example_catalog(4, n0=2, f=1)
    plan = plan_of(catalog, (2, 2))
    idle = (
        Node(slow, (frozenset[int](),), NodeKind(0.25)),
        Node(fast, (frozenset[int](),)),
    )
    nodes = (*survivors(plan, (1,), epoch=1).nodes, *sorted(idle, key=lambda node: node.node))
    reroute = Reroute(catalog.problem, Adaptive(()))

    found = reroute.propose(plan, ClusterState(1, nodes), NodesLost((1,), 0), prices(catalog))

    (filled,) = [transition for transition in found if transition.answer == NORMALISED]
    assert filled.after.pipelines[0].nodes == (0, fast)
    assert filled.after.slow_nodes == {}


def test_a_node_for_which_there_is_no_place_is_left_to_the_other_policy() -> None:
    """Who joins a whole plan makes a pipeline longer."""
    catalog = example_catalog(9, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    nodes = (*survivors(plan, (), epoch=1).nodes, Node(8, (frozenset[int](),)))
    event = NodesChanged((8,), ())

    found = policy(catalog).propose(plan, ClusterState(1, nodes), event, prices(catalog))

    rare = Outlook(failures_per_s=1e-9)
    best = best_transition(found, global_batch_size=NUM_SAMPLES, outlook=rare)
    assert best.policy == "reinstantiate"
    assert 8 in best.after.nodes


def test_one_that_leaves_with_the_only_copy_gives_it_to_one_that_stays() -> None:
    """Nobody could go around it otherwise, and it can still send."""
    catalog = example_catalog(5, n0=1, f=1)
    plan = plan_of(catalog, (3, 2))
    broken = proposed(catalog, plan, (0,))[0].after
    state = survivors(broken, (), epoch=2)
    leaving = next(n for n in state.nodes if n.node == 3)
    staying = tuple(node for node in state.nodes if node != leaving)
    cluster = ClusterState(2, staying, (leaving,))

    (found,) = policy(catalog).propose(broken, cluster, NodesChanged((), (3,)), prices(catalog))

    assert found.answer == NORMALISED
    moved = [transfer for transfers in found.rounds for transfer in transfers]
    assert {transfer.source for transfer in moved} >= {3}
    check_goes_around(found, cluster, catalog)


def test_a_new_worker_gets_the_layers_of_its_place() -> None:
    """Its node lives and holds nothing: routes stay as they are."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    held = survivors(plan, (), epoch=1).nodes
    nodes = tuple(replace(n, held=(frozenset[int](),)) if n.node == 5 else n for n in held)

    (found,) = policy(catalog).propose(
        plan, ClusterState(1, nodes), NodesLost((), 0), prices(catalog)
    )

    assert found.after == replace(plan, epoch=1)
    assert {t.target for transfers in found.rounds for t in transfers} == {5}


def test_one_that_is_no_use_in_its_place_finds_work_elsewhere() -> None:
    """Taken from the only pipeline that is cut in two, the other half could do nothing alone."""
    catalog = example_catalog(3, n0=1, f=1)
    plan = plan_of(catalog, (2, 1))

    found = proposed(catalog, plan, (2,))

    assert found[0].answer == REROUTE
    assert set(found[0].after.routes) == {plan.pipelines[0].route()}


def test_two_losses_in_one_stage_are_normalised() -> None:
    """Four pipelines of four lack two of the same stage: a survivor of another goes there."""
    catalog = example_catalog(16, n0=4, f=2)
    plan = plan_of(catalog, (4, 4, 4, 4))

    around, normalised = proposed(catalog, plan, (1, 5))

    assert (around.answer, normalised.answer) == (REROUTE, NORMALISED)
    assert normalised.iteration_s < 0.95 * around.iteration_s
    moved = [transfer for transfers in normalised.rounds for transfer in transfers]
    assert 1 <= len({transfer.target for transfer in moved}) <= 2
    lacking = [
        position
        for pipeline in normalised.after.pipelines
        for position, node in enumerate(pipeline.nodes)
        if node in normalised.after.gone
    ]
    assert len(lacking) == len(set(lacking)) == 2
    check_goes_around(normalised, survivors(plan, (1, 5), epoch=1), catalog)


def test_large_plans_with_many_empty_places_try_few_moves() -> None:
    """Three lost in one stage: one move in place of two, each of which simulates three plans."""
    catalog = example_catalog(16, n0=4, f=2)
    plan = plan_of(catalog, (4, 4, 4, 4))
    lost = (1, 5, 9)

    with mock.patch.object(reroute, "best_reroute", wraps=reroutes.best_reroute) as run:
        all_moves = proposed(catalog, plan, lost)
        num_of_all = run.call_count
        with mock.patch.object(reroute, "_ALL_HOPS_MAX", 1):
            one_move = proposed(catalog, plan, lost)
        num_of_one = run.call_count - num_of_all

    assert [one.answer for one in one_move] == [one.answer for one in all_moves]
    assert num_of_one <= 6 < num_of_all  # As it is, before a move, three moves, and after them.
    for transition in one_move:
        check_goes_around(transition, survivors(plan, lost, epoch=1), catalog)


def test_a_pipeline_that_is_lost_whole_is_done_without() -> None:
    """All its microbatches begin elsewhere."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 2, 2))

    found = proposed(catalog, plan, (4, 5))

    assert found[0].answer == REROUTE
    check_goes_around(found[0], survivors(plan, (4, 5), epoch=1), catalog)


def test_slow_survivors_are_priced_and_dealt_as_they_are() -> None:
    """Node 6 is the lost one's only peer. The plan says who is slow, so it can be read there."""
    catalog = example_catalog(8, n0=2, f=1)
    plan = plan_of(catalog, (4, 4))
    state = survivors(plan, (2,), epoch=1)
    nodes = tuple(replace(n, kind=NodeKind(0.25)) if n.node == 6 else n for n in state.nodes)
    event = NodesLost((2,), 0)

    for_equal_nodes = policy(catalog).propose(plan, state, event, prices(catalog))[0]
    found = policy(catalog).propose(plan, replace(state, nodes=nodes), event, prices(catalog))[0]

    assert found.after.slow_nodes == {6: 0.25}
    assert found.iteration_s > for_equal_nodes.iteration_s


def test_a_lost_slow_node_is_slow_no_more() -> None:
    """Else a change would be looked for on its behalf for ever."""
    catalog = example_catalog(4, n0=2, f=1)
    plan = plan_of(catalog, (2, 2))
    template = replace(plan.pipelines[0].template, kinds=(NodeKind(0.5), NodeKind()))
    slow = replace(plan, pipelines=(Pipeline(template, (0, 1)), plan.pipelines[1]))
    assert slow.slow_nodes == {0: 0.5}

    found = proposed(catalog, slow, (0,))[0]

    assert found.after.slow_nodes == {}


def test_a_plan_with_an_empty_pipeline_is_priced_alike_when_it_is_looked_at_again() -> None:
    """Its routes are those of whole pipelines, but the empty one reduces nothing; counted as if it
    did, one made anew looked better, and was none. Found by the simulation."""
    catalog = example_catalog(3, n0=1, f=1)
    plan = plan_of(catalog, (1, 1))
    (around,) = proposed(catalog, plan, (1,))
    cluster = survivors(around.after, (), epoch=2)

    found = UnequalNodes(Reinstantiate(catalog)).propose(
        around.after, cluster, NodesChanged((), ()), prices(catalog)
    )

    (stay,) = (transition for transition in found if transition.keeps_plan)
    assert stay.after.gone == (1,)
    assert stay.iteration_s == around.iteration_s


def test_a_member_for_which_there_is_no_place_gets_work_from_the_other_policy() -> None:
    """A coordinator was lost while node 4 joined: to leave all as it is would leave it idle. Found
    by the simulation."""
    catalog = example_catalog(5, n0=2, f=1)
    plan = plan_of(catalog, (2, 2))
    members = survivors(plan, (), epoch=1)
    cluster = ClusterState(1, (*members.nodes, Node(4, (frozenset(),))))

    found = policy(catalog).propose(plan, cluster, NodesLost((), 0), prices(catalog))

    assert found
    assert {transition.after.nodes for transition in found} == {(0, 1, 2, 3, 4)}
