"""Routes around empty places: whole, within memory, and as fast as ReCycle's idea lets them be."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf, nextafter
from random import Random
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.cases import every_nth
from helpers.lost_places import (
    CASES,
    DRAWN,
    GREEDY,
    Case,
    computed_s,
    drawn_case,
    grid,
    unit_problem,
)
from helpers.plan_examples import pipeline, plain_plans, random_plan, timed_s
from helpers.strategies import MEBIBYTE, layer_profile, model_profile
from planaria.core.plan import (
    Hop,
    NodeKind,
    Pipeline,
    PipelineTemplate,
    Plan,
    RecomputationCost,
    Stage,
    plain_plan,
)
from planaria.estimator.peak_memory import bytes_by_rank, kept_bytes, peak_bytes
from planaria.estimator.time import LeastTimes, least_times
from planaria.planner.plans import pipeline_microbatches, plan_of_templates
from planaria.planner.problem import Problem
from planaria.planner.reroute import reroutes
from planaria.planner.reroute.reroutes import (
    HOPS_MAX,
    TRIES_HOPS_MAX,
    best_reroute,
    even_work_s,
    num_without_work,
    simulated_s,
)
from planaria.schedule.lower import plan_schedule, rank_schedule


def problem_for(plan: Plan, *, device_memory_bytes: int = 0) -> Problem:
    """Unequal layers for a plan whose stages may have up to four devices."""
    layers = tuple(
        layer_profile(
            f"layer {i}",
            0.01 * (1 + i % 3),
            device_counts=(1, 2, 3, 4),
            activation_bytes=(1 + i % 2) * MEBIBYTE,
            output_bytes=MEBIBYTE,
        )
        for i in range(plan.num_layers)
    )
    return Problem(
        profile=model_profile(layers, device_memory_bytes=device_memory_bytes),
        devices_per_node=plan.pipelines[0].template.devices_per_node,
        num_microbatches=len(plan.routes),
        failures_tolerated=0,
    )


def with_losses(plan: Plan, rng: Random) -> Plan:
    """The plan without up to half of its nodes."""
    lost = rng.sample(plan.nodes, rng.randint(1, max(1, len(plan.nodes) // 2)))
    return replace(plan, gone=tuple(sorted(lost)))


broken_plans = st.randoms(use_true_random=False).map(lambda rng: with_losses(random_plan(rng), rng))


@given(broken_plans)
@settings(max_examples=25)
def test_every_microbatch_finds_its_way_around_what_is_lost(plan: Plan) -> None:
    """Over any losses in any pipelines; none only where a layer has no live place."""
    found = best_reroute(problem_for(plan), plan, hops_max=TRIES_HOPS_MAX)

    held = plan.layers_by_rank
    lost_layers = set(range(plan.num_layers)).difference(*held.values())
    if found is None:
        assert lost_layers
        return
    assert not lost_layers
    assert len(found.plan.routes) == len(plan.routes)
    assert (found.plan.pipelines, found.plan.gone) == (plan.pipelines, plan.gone)
    for route in found.plan.routes:
        assert route[0].first_layer == 0
        assert route[-1].end_layer == plan.num_layers
        assert all(a.end_layer == b.first_layer for a, b in pairwise(route))
        for hop in route:
            assert held[hop.rank].start <= hop.first_layer < hop.end_layer <= held[hop.rank].stop
    schedule = plan_schedule(found.plan)  # Valid.
    for rank in found.plan.ranks:
        assert rank_schedule(found.plan, rank).actions[rank] == schedule.actions[rank]
    assert found.iteration_s == timed_s(problem_for(plan), found.plan)


def test_a_lost_stage_is_visited_in_two_hops_where_boundaries_differ() -> None:
    """Layers [2, 4) were rank 3's; rank 0 has [0, 3), rank 1 [3, 6)."""
    pipelines = (pipeline((0, 3, 6), (0, 1)), pipeline((0, 2, 4, 6), (2, 3, 4)))
    plan = Plan(0, pipelines, (), gone=(3,))

    found = best_reroute(unit_problem(6, 8), plan)

    assert found is not None
    around = [route for route in found.plan.routes if route != pipelines[0].route()]
    ways = [[(hop.rank, hop.first_layer, hop.end_layer) for hop in route] for route in around]
    assert ways
    assert all(way == [(2, 0, 2), (0, 2, 3), (1, 3, 4), (4, 4, 6)] for way in ways)


def test_peers_share_what_a_lost_node_did() -> None:
    """Odyssey's equation 13 would sum over stages; here nobody has more than a microbatch more."""
    plan = grid(4, 4, ((0, 1),))

    found = best_reroute(unit_problem(4, 32), plan, hops_max=0)

    assert found is not None
    visits = Counter(hop.rank for route in found.plan.routes for hop in route)
    assert sorted(visits[rank] for rank in (5, 9, 13)) == [10, 11, 11]
    assert min(visits[rank] for rank in plan.ranks) >= 7


def test_a_better_order_leaves_no_more_stages_without_work() -> None:
    """Around a slow stage two microbatches take half the time, and its node would do nothing."""
    plan = grid(2, 2, ((0, 0),))
    kinds = tuple(replace(kind, speed=0.2) for kind in plan.pipelines[0].template.node_kinds)
    slow = replace(plan.pipelines[0], template=replace(plan.pipelines[0].template, kinds=kinds))
    plan = replace(plan, pipelines=(slow, plan.pipelines[1]))
    problem = replace(unit_problem(2, 2), splits_backward=False)

    found = [best_reroute(problem, plan, hops_max=most) for most in (TRIES_HOPS_MAX, HOPS_MAX)]

    assert [num_without_work(one.plan) for one in found if one is not None] == [0, 0]


def test_a_slow_peer_takes_less_of_it() -> None:
    """Time is counted, not microbatches: with half the speed it is half of the others' at most."""
    plan = grid(4, 4, ((0, 1),))
    kinds = tuple(replace(kind, speed=0.5) for kind in plan.pipelines[1].template.node_kinds)
    slow = replace(plan.pipelines[1], template=replace(plan.pipelines[1].template, kinds=kinds))
    plan = replace(plan, pipelines=(plan.pipelines[0], slow, *plan.pipelines[2:]))

    found = best_reroute(unit_problem(4, 32), plan)

    assert found is not None
    visits = Counter(hop.rank for route in found.plan.routes for hop in route)
    assert 0 < visits[5] <= min(visits[9], visits[13]) // 2 + 1


def test_a_peer_that_computes_activations_again_takes_less_of_it() -> None:
    """As if it were slow: its backwards take longer."""
    plan, problem = grid(4, 4, ((0, 1),)), replace(unit_problem(4, 32), splits_backward=False)
    layers = tuple(
        replace(layer, recomputed={"full": RecomputationCost(0, {1: layer.forward_s[1] * 3})})
        for layer in problem.profile.layers
    )
    problem = replace(problem, profile=replace(problem.profile, layers=layers))
    again, *others = plan.pipelines[1:]
    stages = tuple(
        replace(
            stage, recomputation=tuple("full" for _ in range(stage.first_layer, stage.end_layer))
        )
        for stage in again.template.stages
    )
    again = replace(again, template=replace(again.template, stages=stages))
    plan = replace(plan, pipelines=(plan.pipelines[0], again, *others))

    found = best_reroute(problem, plan, hops_max=0)

    assert found is not None
    visits = Counter(hop.rank for route in found.plan.routes for hop in route)
    assert visits[5] <= 0.7 * min(visits[9], visits[13])


def test_without_losses_routes_are_the_planners() -> None:
    """So a search that begins at a whole plan begins at what is known to be good."""
    problem = unit_problem(4, 22)
    short = PipelineTemplate((Stage(0, 2, 1), Stage(2, 4, 1)), 2)
    long = PipelineTemplate(tuple(Stage(i, i + 1, 1) for i in range(4)), 4)
    known = plan_of_templates(problem, (long, long, short), range(10), epoch=0)

    found = best_reroute(problem, known)

    assert found is not None
    assert found.iteration_s <= simulated_s(problem, known)
    assert sum(pipeline_microbatches(found.plan)) == 22


@pytest.mark.parametrize("case", every_nth(6, zip(CASES)))
def test_within_5_percent_of_the_best_schedule(case: Case) -> None:
    """As benchmarks/optimum.py proves it; no schedule can be better."""
    found = best_reroute(case.problem(), case.plan())

    assert found is not None
    assert case.optimum_s <= computed_s(case.problem(), found) <= 1.05 * case.optimum_s


@pytest.mark.parametrize(("seed", "optimum_s"), every_nth(6, DRAWN.items()))
def test_orders_are_looked_for_where_the_rule_of_schedules_gives_a_bad_one(
    seed: int, optimum_s: int
) -> None:
    """Up to 13% above the best without that; what all nodes make of the plan is what was timed."""
    case = drawn_case(Random(seed))
    problem = case.problem()

    found = best_reroute(problem, case.plan())

    assert found is not None
    assert optimum_s <= computed_s(problem, found) <= 1.05 * optimum_s
    assert found.iteration_s == timed_s(problem, found.plan)
    schedule = plan_schedule(found.plan)  # Valid.
    for rank in found.plan.ranks:
        assert rank_schedule(found.plan, rank).actions[rank] == schedule.actions[rank]


def test_what_is_looked_for_at_random_is_the_same_each_time_and_never_slower() -> None:
    """The second of two coordinators may have to find what the first one did."""
    case = drawn_case(Random(192))
    problem, plan = case.problem(), case.plan()

    found, again = best_reroute(problem, plan), best_reroute(problem, plan)
    tries = best_reroute(problem, plan, hops_max=TRIES_HOPS_MAX)

    assert found == again
    assert found is not None
    assert tries is not None
    assert found.iteration_s < tries.iteration_s


def test_an_order_that_was_looked_for_stays_when_nodes_are_renamed() -> None:
    """So answers to losses that are alike keep their price: here pipelines change places."""
    case = drawn_case(Random(151))
    problem, num_places = case.problem(), len(case.ends[0])
    found = best_reroute(problem, case.plan())
    assert found is not None
    plan = found.plan
    num_nodes = num_places * len(plan.pipelines)

    def renamed(node: int) -> int:
        return (node + num_places) % num_nodes

    pipelines = [replace(one, nodes=tuple(map(renamed, one.nodes))) for one in plan.pipelines]
    other = replace(
        plan,
        pipelines=tuple(sorted(pipelines, key=lambda one: one.nodes)),
        routes=tuple(
            tuple(Hop(renamed(hop.rank), hop.first_layer, hop.end_layer) for hop in route)
            for route in plan.routes
        ),
        gone=tuple(sorted(map(renamed, plan.gone))),
        in_flight={renamed(rank): most for rank, most in plan.in_flight.items()},
        ticks={renamed(rank): ticks for rank, ticks in plan.ticks.items()},
    )

    assert simulated_s(problem, other) == found.iteration_s


@given(broken_plans, st.sampled_from((0, TRIES_HOPS_MAX)), st.integers(0, 3))
@settings(max_examples=10)
def test_only_what_a_bound_shows_to_be_slower_is_not_simulated(
    plan: Plan, hops_max: int, num_in_flight: int
) -> None:
    """The answer is the one without bounds, also with little memory; 0 microbatches: no limit."""
    problem = problem_for(plan)
    if num_in_flight:
        needs = bytes_by_rank(problem.profile, plan, gradient_copies=1).values()
        peaks = (x.state_bytes + num_in_flight * x.microbatch_bytes for x in needs)
        problem = problem_for(plan, device_memory_bytes=max(peaks, default=0))
    with mock.patch.object(reroutes, "least_times", return_value=LeastTimes(0.0, 0.0)):
        expected = best_reroute(problem, plan, hops_max=hops_max)
    assume(expected is not None)
    assert expected is not None

    found = best_reroute(problem, plan, hops_max=hops_max)
    found_below = best_reroute(
        problem, plan, hops_max=hops_max, below_s=nextafter(expected.iteration_s, inf)
    )

    assert found == expected
    assert found_below == expected
    known = best_reroute(problem, plan, hops_max=0)
    assert best_reroute(problem, plan, hops_max=hops_max, known=known) == expected
    least = least_times(problem.profile, expected.plan)
    for splits_backward, least_s in ((False, least.whole_s), (True, least.split_s)):
        same = replace(expected.plan, splits_backward=splits_backward)
        assert least_s <= simulated_s(problem, same)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_bound_holds_if_the_way_there_and_the_way_back_are_short_on_different_routes(
    is_reversed: bool,
) -> None:
    """Two ways to one rank take 7 s there and 11 s back, and 11 s there and 7 s back."""
    each_s = ((1.0, 5.0), (5.0, 1.0), (10.0, 10.0))  # Forward and backward of each layer.
    layers = tuple(
        replace(
            layer_profile(f"layer {i}", forward_s),
            backward_input_s={1: backward_s / 2},
            backward_weight_s={1: backward_s / 2},
        )
        for i, (forward_s, backward_s) in enumerate(each_s)
    )
    problem = Problem(
        profile=model_profile(layers), devices_per_node=1, num_microbatches=2, failures_tolerated=0
    )
    stages = tuple(Stage(i, i + 1, 1) for i in range(3))
    slow, normal = NodeKind(speed=0.5), NodeKind()
    slow_first = PipelineTemplate(stages, 3, kinds=(slow, normal, normal))
    slow_second = PipelineTemplate(stages, 3, kinds=(normal, slow, normal))
    pipelines = (Pipeline(slow_first, (0, 1, 2)), Pipeline(slow_second, (3, 4, 5)))
    routes = (pipelines[0].route(), (*pipelines[1].route()[:2], pipelines[0].route()[2]))
    plan = Plan(0, pipelines, routes[::-1] if is_reversed else routes, gone=(5,))

    least = least_times(problem.profile, plan)

    assert least.whole_s <= simulated_s(problem, plan)
    assert least.split_s <= simulated_s(problem, replace(plan, splits_backward=True))


def test_evenly_shared_work_is_a_bound_of_what_the_schedule_takes() -> None:
    """The most loaded rank, without gaps and with one fill and drain: no deal is better."""
    for num_pipelines, num_places, each, lost, _ in GREEDY:
        plan = grid(num_pipelines, num_places, lost)
        problem = unit_problem(num_places, each * num_pipelines)
        problem = replace(problem, splits_backward=False)

        found = best_reroute(problem, plan, hops_max=0)

        assert found is not None
        assert 0.7 * found.iteration_s <= even_work_s(problem, plan) <= found.iteration_s


@pytest.mark.parametrize("is_reversed", [False, True])
def test_evenly_shared_work_counts_what_each_holder_takes(is_reversed: bool) -> None:
    """Stages of one device beside those of two, one of them half as fast: rates add up, and the
    order of pipelines does not matter."""
    layers = tuple(layer_profile(f"layer {i}", 1.0, device_counts=(1, 2)) for i in range(4))
    deep = PipelineTemplate((Stage(0, 2, 1), Stage(2, 4, 1)), 1)
    wide = PipelineTemplate((Stage(0, 4, 2),), 1)
    slow = replace(wide, kinds=(NodeKind(speed=0.5),))
    pipelines = [Pipeline(one, (node,)) for node, one in enumerate((deep, wide, slow))]
    plan = Plan(0, tuple(reversed(pipelines) if is_reversed else pipelines), ())
    problem = Problem(
        profile=model_profile(layers), devices_per_node=2, num_microbatches=8, failures_tolerated=0
    )

    found_s = even_work_s(problem, plan)

    # On one device a layer takes 3 s, on two 3 / 2 ** 0.8, on slow ones twice that.
    layers_per_s = (1.0 + 2**0.8 + 2**0.8 / 2) / 3.0
    whole_s, behind_s = 4 * 8 / layers_per_s, 2 * 3.0 + 2 * 8 / layers_per_s
    assert found_s == pytest.approx(max(whole_s, behind_s))


def test_a_layer_that_takes_no_time_has_no_share_of_the_work() -> None:
    """A profile may say 0 s, and the coordinator must answer a loss all the same."""
    layers = tuple(layer_profile(f"layer {i}", float(i > 0)) for i in range(3))
    template = PipelineTemplate((Stage(0, 1, 1), Stage(1, 3, 1)), 2)
    pipelines = (Pipeline(template, (0, 1)), Pipeline(template, (2, 3)))
    problem = Problem(
        profile=model_profile(layers), devices_per_node=1, num_microbatches=4, failures_tolerated=1
    )

    # Two holders share four microbatches of two layers, of 3 s each.
    assert even_work_s(problem, Plan(0, pipelines, ())) == 4 / 2 * 2 * 3.0
    assert even_work_s(problem, Plan(0, pipelines, (), gone=(0, 2))) == inf


@given(plain_plans(), st.sampled_from((1, 3)))
@settings(max_examples=30)
def test_bytes_of_plain_routes_are_equation_14(plan: Plan, copies: int) -> None:
    """Two ways to the same peaks: read off the schedule, and in closed form."""
    profile = problem_for(plan).profile

    found = bytes_by_rank(profile, plan, gradient_copies=copies)
    schedule = plan_schedule(plan)

    for one, count in zip(plan.pipelines, pipeline_microbatches(plan), strict=True):
        expected = peak_bytes(profile, one.template, num_microbatches=count, gradient_copies=copies)
        ranks = [stage_ranks[0] for stage_ranks in one.ranks_by_stage()]
        kept = [kept_bytes(profile, schedule, rank) for rank in ranks]
        states = [found[rank].state_bytes for rank in ranks]
        assert expected == tuple(map(sum, zip(states, kept, strict=True)))


@given(broken_plans, st.integers(1, 6))
@settings(max_examples=5)
def test_no_device_gets_more_than_it_can_hold(plan: Plan, num_in_flight: int) -> None:
    """With room for few microbatches in flight, fewer are; never more, and never a wrong plan."""
    free = problem_for(plan)
    assume(best_reroute(free, plan, hops_max=0) is not None)
    needs = bytes_by_rank(free.profile, plan, gradient_copies=1)
    limit_bytes = max(x.state_bytes + num_in_flight * x.microbatch_bytes for x in needs.values())
    problem = problem_for(plan, device_memory_bytes=limit_bytes)

    found = best_reroute(problem, plan)

    if found is not None:
        schedule = plan_schedule(found.plan)
        held = bytes_by_rank(problem.profile, found.plan, gradient_copies=1)
        for rank, of_rank in held.items():
            most = of_rank.state_bytes + kept_bytes(problem.profile, schedule, rank)
            assert most <= limit_bytes


def test_a_split_backward_keeps_activations_and_gradients_until_its_second_part() -> None:
    """By hand: layer 1 keeps 1 MiB of activations, and 4 MiB of its output's gradient."""
    plan = plain_plan(0, (pipeline((0, 1, 2), (0, 1)),), (3,))
    split = replace(plan, splits_backward=True, in_flight={0: 3, 1: 3})
    layers = tuple(layer_profile(f"{i}", 0.01, output_bytes=4 * MEBIBYTE) for i in range(2))
    profile = model_profile(layers)

    schedule = plan_schedule(split)  # Rank 1: F0 BI0 F1 BI1 F2 BI2 BW0 BW1 BW2.

    assert kept_bytes(profile, schedule, 0) == 3 * MEBIBYTE
    assert kept_bytes(profile, schedule, 1) == 3 * (1 + 4) * MEBIBYTE
    held = bytes_by_rank(profile, split, gradient_copies=1)
    assert [of_rank.microbatch_bytes for of_rank in held.values()] == [5 * MEBIBYTE] * 2


def test_a_job_that_recomputes_activations_keeps_its_backwards_whole() -> None:
    """Both parts would run the forward again."""
    problem = replace(unit_problem(4, 32), splits_backward=False)

    found = best_reroute(problem, grid(4, 4, ((0, 1),)))

    assert found is not None
    assert not found.plan.splits_backward


def test_less_memory_keeps_fewer_in_flight_and_takes_longer() -> None:
    """Each place holds a microbatch of 1 MiB at a time, or none of them can wait for another."""
    plan = grid(4, 4, ((0, 0), (1, 1)))
    problem = unit_problem(4, 32)
    tight = replace(problem, profile=replace(problem.profile, device_memory_bytes=MEBIBYTE))

    with_plenty, with_one = best_reroute(problem, plan), best_reroute(tight, plan)

    assert with_plenty is not None
    assert with_one is not None
    assert set(with_one.plan.in_flight.values()) == {1}
    assert with_plenty.plan.splits_backward
    assert with_one.iteration_s > with_plenty.iteration_s
    none = replace(problem, profile=replace(problem.profile, device_memory_bytes=MEBIBYTE - 1))
    assert best_reroute(none, plan) is None
