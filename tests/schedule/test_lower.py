"""The passes over schedules and the rules that they keep."""

import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plan_examples import figure_9_plan, pipeline, plain_plans, random_plan, rerouted_plans
from planaria.core.plan import Hop, Plan, Route, TiedParameters, plain_plan
from planaria.errors import DeadlockError, ScheduleError
from planaria.schedule.action import Action, Bucket, Kind, Schedule, format_schedule, parse_schedule
from planaria.schedule.buckets import ReductionOrder, buckets_of
from planaria.schedule.lower import (
    execution_order,
    place_reductions,
    plan_schedule,
    rank_schedule,
    validate,
)
from planaria.schedule.routed import routed_1f1b

TWO_RANKS: tuple[Route, ...] = ((Hop(0, 0, 1), Hop(1, 1, 2)),)
TWO_RANKS_TEXT = """
0: 0F0 0SF0 0RB0 0B0
1: 1RF0 1F0 1B0 1SB0
"""


def test_figure_9_of_oobleck_lowered_letter_for_letter() -> None:
    """Transfers beside their compute, reductions by layer at the end, the tied one last."""
    plan = figure_9_plan()
    plan = plain_plan(0, plan.pipelines, (2, 1))

    schedule = plan_schedule(plan, tied=[TiedParameters((0, 5), 8)])

    assert format_schedule(schedule).splitlines() == [
        "0: 0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 R0 R4",
        "1: 1RF0 1F0 1SF0 1RF1 1F1 1SF1 1RB0 1B0 1SB0 1RB1 1B1 1SB1 R1 R2",
        "2: 2RF0 2F0 2B0 2SB0 2RF1 2F1 2B1 2SB1 R3 R4",
        "3: 0F2 0SF2 0RB2 0B2 R0 R2 R4",
        "4: 1RF2 1F2 1B2 1SB2 R1 R3 R4",
    ]
    assert (
        Bucket((0, 1), (0, 3), round_index=0),
        Bucket((3,), (1, 4), round_index=0),
        Bucket((2,), (1, 3), round_index=1),
        Bucket((4, 5), (2, 4), round_index=1),
        Bucket((0, 5), (0, 2, 3, 4), tied=0, round_index=2),
    ) == schedule.buckets


@given(rerouted_plans() | plain_plans())
@settings(max_examples=60)
def test_each_rank_by_itself_gets_what_it_has_in_the_schedule_of_all(plan: Plan) -> None:
    """Also a rank without work, and the buckets by the same numbers."""
    tied = [TiedParameters((0, plan.num_layers - 1), 8)]
    whole = plan_schedule(plan, tied=tied)

    for rank in plan.all_ranks:
        own = rank_schedule(plan, rank, tied=tied)
        assert own.actions[rank] == whole.actions[rank]
        assert (own.routes, own.buckets) == (whole.routes, whole.buckets)
    assert rank_schedule(plan, max(plan.all_ranks) + 1).actions == {max(plan.all_ranks) + 1: ()}


@given(rerouted_plans())
@settings(max_examples=60)
def test_buckets_cover_each_layer_with_several_holders_once(plan: Plan) -> None:
    """A layer in no bucket would not be summed, one in two would be summed twice."""
    tied = [TiedParameters((0, plan.num_layers - 1), 8)]

    buckets = plan_schedule(plan, tied=tied).buckets

    own = [layer for bucket in buckets if bucket.tied < 0 for layer in bucket.layers]
    assert sorted(own) == [n for n in range(plan.num_layers) if len(plan.holders(n)) > 1]
    for bucket in buckets:
        if bucket.tied < 0:
            assert all(plan.holders(layer) == bucket.ranks for layer in bucket.layers)
    holders = tuple(sorted({*plan.holders(0), *plan.holders(plan.num_layers - 1)}))
    assert [holders] * (len(holders) > 1) == [b.ranks for b in buckets if b.tied == 0]


@given(plain_plans())
@settings(max_examples=60)
def test_buckets_of_one_round_share_no_rank_and_tied_ones_come_last(plan: Plan) -> None:
    """Then the buckets of a round run side by side (Odyssey, section IV-B)."""
    tied = [TiedParameters((0, plan.num_layers - 1), 8), TiedParameters((0,), 8)]

    buckets = plan_schedule(plan, tied=tied).buckets

    for index, bucket in enumerate(buckets):
        for other in buckets[:index]:
            assert (other.round_index, other.tied >= 0) <= (bucket.round_index, bucket.tied >= 0)
            if other.round_index == bucket.round_index:
                assert set(other.ranks).isdisjoint(bucket.ranks)
    own = {bucket.round_index for bucket in buckets if bucket.tied < 0}
    assert own.isdisjoint(bucket.round_index for bucket in buckets if bucket.tied >= 0)


def test_no_colouring_has_fewer_rounds() -> None:
    """Of the layers' own buckets, against every colouring; and as few as the most of one rank."""
    seed, num_many = 20_261_121, 0
    for index in range(400):
        plan = random_plan(random.Random(f"{seed} {index}"), num_layers_max=10)
        buckets = buckets_of(plan)
        where = f"seed {seed}, plan {index}"
        rounds = len({bucket.round_index for bucket in buckets})

        assert rounds == fewest_rounds([set(bucket.ranks) for bucket in buckets]), where
        by_rank = Counter(rank for bucket in buckets for rank in bucket.ranks)
        assert rounds == max(by_rank.values(), default=0), where
        num_many += rounds > 3
    assert num_many > 20


def test_uncoloured_buckets_go_in_layer_order_each_in_a_round_of_its_own() -> None:
    """What Odyssey compares with (figure 11): the reductions of figure 9 follow each other."""
    plan = figure_9_plan()

    buckets = buckets_of(plan, tied=[TiedParameters((0, 5), 8)], order=ReductionOrder.UNCOLOURED)

    assert (
        Bucket((0, 1), (0, 3), round_index=0),
        Bucket((2,), (1, 3), round_index=1),
        Bucket((3,), (1, 4), round_index=2),
        Bucket((4, 5), (2, 4), round_index=3),
        Bucket((0, 5), (0, 2, 3, 4), tied=0, round_index=4),
    ) == buckets


@given(rerouted_plans())
@settings(max_examples=40)
def test_both_orders_sum_the_same_buckets(plan: Plan) -> None:
    """Only when each is summed differs, so that the bits are the same; `plan_schedule` validates
    both."""
    tied = [TiedParameters((0, plan.num_layers - 1), 8)]

    summed = [
        sorted(
            (bucket.layers, bucket.ranks, bucket.tied)
            for bucket in plan_schedule(plan, tied=tied, order=order).buckets
        )
        for order in ReductionOrder
    ]

    assert summed[0] == summed[1]


def fewest_rounds(buckets: list[set[int]]) -> int:
    """The fewest groups of buckets that share no rank, by trying all."""

    def fits(index: int, groups: list[set[int]], most: int) -> bool:
        if index == len(buckets):
            return True
        for group in groups:
            if not group & buckets[index]:
                group |= buckets[index]
                if fits(index + 1, groups, most):
                    return True
                group -= buckets[index]
        return len(groups) < most and fits(index + 1, [*groups, set(buckets[index])], most)

    return next(most for most in range(len(buckets) + 1) if fits(0, [], most))


@given(rerouted_plans())
@settings(max_examples=60)
def test_reductions_ascend_and_follow_their_last_backward(plan: Plan) -> None:
    """One order on all ranks, as early as that order allows."""
    schedule = plan_schedule(plan)

    for rank, actions in schedule.actions.items():
        order = [action.bucket for action in actions if action.kind is Kind.REDUCE]
        assert order == [k for k, bucket in enumerate(schedule.buckets) if rank in bucket.ranks]
        layers: set[int] = set()
        for action in actions:
            if action.kind is Kind.REDUCE:
                layers.update(schedule.buckets[action.bucket].layers)
            elif action.kind is Kind.BACKWARD:
                hop = schedule.routes[action.microbatch][action.hop]
                assert layers.isdisjoint(range(hop.first_layer, hop.end_layer))


def test_a_reduction_stands_before_backwards_of_other_layers() -> None:
    """Rank 0 ends layer 0 first, so that its reduction runs beside the rest of the compute."""
    pipelines = (pipeline((0, 2), (0,)), pipeline((0, 1, 2), (1, 2)))
    routes: tuple[Route, ...] = (
        (Hop(0, 0, 1), Hop(2, 1, 2)),
        (Hop(1, 0, 1), Hop(0, 1, 2)),
    )
    text = "0: 0F0 0B0 1F1 1B1\n1: 0F1 0B1\n2: 1F0 1B0"

    placed = place_reductions(parse_schedule(text, routes), Plan(1, pipelines, routes))

    assert format_schedule(placed).splitlines() == [
        "0: 0F0 0B0 R0 1F1 1B1 R1",
        "1: 0F1 0B1 R0",
        "2: 1F0 1B0 R1",
    ]


def test_a_rank_that_has_nothing_to_add_reduces_first_of_all() -> None:
    """Ranks 1 and 3 compute nothing, rank 0 only layer 1; all need the sums all the same."""
    pipelines = (pipeline((0, 2, 3), (0, 1)), pipeline((0, 1, 2, 3), (2, 3, 4)))
    around: Route = (Hop(2, 0, 1), Hop(0, 1, 2), Hop(4, 2, 3))
    plan = Plan(1, pipelines, (around,))

    placed = place_reductions(routed_1f1b(plan), plan)

    assert format_schedule(placed).splitlines() == [
        "0: R0 1F0 1B0 R2",
        "1: R1",
        "2: 0F0 0B0 R0",
        "3: R2",
        "4: 2F0 2B0 R1",
    ]


def test_one_rank_alone_reduces_nothing() -> None:
    """It has every gradient already, also that of a parameter tied within it."""
    plan = plain_plan(0, (pipeline((0, 2), (0,)),), (2,))

    schedule = plan_schedule(plan, tied=[TiedParameters((0, 1), 8)])

    assert schedule.buckets == ()
    assert format_schedule(schedule) == "0: 0F0 0B0 0F1 0B1"


@given(rerouted_plans())
@settings(max_examples=60)
def test_the_execution_order_respects_every_dependency(plan: Plan) -> None:
    """Checked by place in the order: sends before receives, forwards before backwards."""
    schedule = plan_schedule(plan)

    order = list(execution_order(schedule))

    place = {(rank, str(action)): index for index, (rank, action) in enumerate(order)}
    assert len(place) == len(order) == sum(map(len, schedule.actions.values()))
    for rank, actions in schedule.actions.items():
        places = [place[rank, str(action)] for action in actions]
        assert places == sorted(places)
    for m, route in enumerate(plan.routes):
        for i, (source, target) in enumerate(pairwise(route)):
            assert place[source.rank, f"{i}F{m}"] < place[target.rank, f"{i + 1}F{m}"]
            assert place[target.rank, f"{i + 1}B{m}"] < place[source.rank, f"{i}B{m}"]
            if source.rank != target.rank:
                assert place[source.rank, f"{i}SF{m}"] < place[target.rank, f"{i + 1}RF{m}"]
                assert place[target.rank, f"{i + 1}SB{m}"] < place[source.rank, f"{i}RB{m}"]
        last = len(route) - 1
        assert place[route[-1].rank, f"{last}F{m}"] < place[route[-1].rank, f"{last}B{m}"]


def test_a_cycle_is_refused_with_the_table_and_both_steps_marked() -> None:
    """Rank 0 wants the gradient before it sends what that gradient depends on."""
    text = TWO_RANKS_TEXT.replace("0SF0 0RB0 0B0", "0RB0 0B0 0SF0")

    with pytest.raises(DeadlockError) as caught:
        validate(parse_schedule(text, TWO_RANKS), 2)

    assert caught.value.waiting == {0: "0RB0", 1: "1RF0"}
    assert str(caught.value).splitlines() == [
        "the schedule cannot finish: rank 0 in 0RB0, rank 1 in 1RF0",
        "        rank 0    rank 1",
        "step 0  0F0       >>1RF0<<",
        "step 1  >>0RB0<<  1F0",
        "step 2  0B0       1B0",
        "step 3  0SF0      1SB0",
    ]


def test_reductions_in_different_orders_are_refused_as_a_deadlock() -> None:
    """Each of the two ranks would wait for the other in its first reduction."""
    buckets = (Bucket((0,), (0, 1)), Bucket((1,), (0, 1), round_index=1))
    routes: tuple[Route, ...] = ((Hop(0, 0, 2),), (Hop(1, 0, 2),))
    text = "0: 0F0 0B0 R0 R1\n1: 0F1 0B1 R1 R0"

    with pytest.raises(DeadlockError) as caught:
        validate(parse_schedule(text, routes, buckets), 2)

    assert caught.value.waiting == {0: "R0", 1: "R1"}


def test_a_reduction_that_a_rank_never_joins_leaves_the_others_waiting() -> None:
    """The walker finds it without the validator: the rank that came says where it waits."""
    schedule = parse_schedule("0: R0\n1:", (), (Bucket((0,), (0, 1)),))

    with pytest.raises(DeadlockError) as caught:
        list(execution_order(schedule))

    assert caught.value.waiting == {0: "R0"}


@given(st.data())
@settings(max_examples=80)
def test_a_schedule_without_one_of_its_actions_is_refused(data: st.DataObject) -> None:
    """Whichever action it is: the message names it, or what needed it."""
    schedule = plan_schedule(figure_9_plan(), tied=[TiedParameters((0, 5), 8)])
    rank = data.draw(st.sampled_from(sorted(schedule.actions)))
    step = data.draw(st.integers(0, len(schedule.actions[rank]) - 1))
    actions = list(schedule.actions[rank])
    removed = actions.pop(step)

    with pytest.raises(ScheduleError, match=re.escape(str(removed))):
        validate(with_rank(schedule, rank, actions), 6)


@given(st.data())
@settings(max_examples=80)
def test_an_action_that_stands_twice_or_on_a_wrong_rank_is_refused(data: st.DataObject) -> None:
    """A gradient would be added twice, or a rank would compute layers that it does not hold."""
    schedule = plan_schedule(figure_9_plan(), tied=[TiedParameters((0, 5), 8)])
    source, target = (data.draw(st.sampled_from(sorted(schedule.actions))) for _ in range(2))
    added = data.draw(st.sampled_from(schedule.actions[source]))
    step = data.draw(st.integers(0, len(schedule.actions[target])))
    actions = list(schedule.actions[target])
    actions.insert(step, added)
    fault = "twice|belongs to rank|no bucket of this rank|needs|already reduced"
    if added.kind is Kind.REDUCE and added not in schedule.actions[target]:
        fault = "no bucket of this rank"

    with pytest.raises(ScheduleError, match=fault):
        validate(with_rank(schedule, target, actions), 6)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0: 0F0 0SF0 0RB0 0B0\n1: 1F0 1RF0 1B0 1SB0", "rank 1, step 0: 1F0 needs 1RF0"),
        ("0: 0F0 0SF0 0RB0 0B0\n1: 1RF0 1F0 1SB0 1B0", "rank 1, step 2: 1SB0 needs 1B0"),
        ("0: 0SF0 0F0 0RB0 0B0\n1: 1RF0 1F0 1B0 1SB0", "rank 0, step 0: 0SF0 needs 0F0"),
        ("0: 0F0 0SF0 0RB0 0B0\n1: 1RF0 1B0 1F0 1SB0", "rank 1, step 1: 1B0 needs 1F0"),
        ("0: 0F0 0SF0 0RB0 0B0\n1: 1RF0 1F0 1BW0 1BI0 1SB0", "rank 1, step 2: 1BW0 needs 1BI0"),
        ("0: 0F0 0SF0 0RB0 0B0\n1: 1RF0 1F0 1BI0 1SB0", "rank 1 lacks 1BW0"),
        ("0: 0F0 0SF0 0RB0 0B0\n1: 1RF0 1F0 1BI0 1SB0 1B0", "rank 1, step 4: 1B0 stands twice"),
        ("0: 0F0 0SF0 0RB0 0BI0 0BW0\n1: 1RF0 1F0 1B0 1SB0", "0BI0 is a part of a backward that"),
        ("0: 0RF0 0F0 0SF0 0RB0 0B0\n1: 1RF0 1F0 1B0 1SB0", "0RF0 has no other rank to talk to"),
        ("0: 0F0 0SF0 0RB0 0B0\n1: 1RF0 1F0 1B0 1SB0 2F0", "2F0 is no hop of a route"),
        ("0: 0F0 0SF0 0RB0 0B0 0F1\n1: 1RF0 1F0 1B0 1SB0", "0F1 is no hop of a route"),
        ("0: 0F0 0SF0 0RB0 0B0 R0\n1: 1RF0 1F0 1B0 1SB0", "R0 is no bucket of this rank"),
        ("0: 0F0 0SF0 0RB0 0B0", "rank 1 lacks 1F0"),
    ],
)
def test_a_broken_rule_is_named_with_its_step(text: str, fault: str) -> None:
    """The message begins with the rank, the step and the action."""
    with pytest.raises(ScheduleError, match=fault):
        validate(parse_schedule(text, TWO_RANKS), 2)


@pytest.mark.parametrize(
    ("buckets", "fault"),
    [
        ((Bucket((0,), (0,)),), "two ranks or more"),
        ((Bucket((0,), (1, 0)),), "ascending"),
        ((Bucket((2,), (0, 1)),), "layers"),
        ((Bucket((0,), (0, 1)), Bucket((1,), (0, 1))), "shares a rank"),
        ((Bucket((0,), (0, 1), round_index=1), Bucket((1,), (0, 1))), "follows one of round 1"),
    ],
)
def test_malformed_buckets_are_refused(buckets: tuple[Bucket, ...], fault: str) -> None:
    """Reductions rely on them: each would hang or sum the wrong gradients."""
    with pytest.raises(ScheduleError, match=fault):
        validate(parse_schedule(TWO_RANKS_TEXT, TWO_RANKS, buckets), 2)


@pytest.mark.parametrize(
    "route",
    [
        (Hop(0, 0, 1),),
        (Hop(0, 1, 2),),
        (Hop(0, 0, 1), Hop(1, 0, 2)),
        (Hop(0, 0, 3),),
        (Hop(0, 0, 1), Hop(1, 1, 1), Hop(0, 1, 2)),
    ],
)
def test_a_route_that_does_not_cover_the_model_once_is_refused(route: Route) -> None:
    """A layer left out or computed twice would train a different model."""
    with pytest.raises(ScheduleError, match="route of microbatch 0 does not cover layers"):
        validate(Schedule((route,), {0: (), 1: ()}), 2)


def test_a_backward_behind_its_reduction_is_refused() -> None:
    """Its gradient would be lost."""
    routes: tuple[Route, ...] = ((Hop(0, 0, 1),), (Hop(1, 0, 1),))
    text = "0: 0F0 R0 0B0\n1: 0F1 0B1 R0"

    with pytest.raises(ScheduleError, match="0B0 adds to gradients that are already reduced"):
        validate(parse_schedule(text, routes, (Bucket((0,), (0, 1)),)), 1)


def with_rank(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    return replace(schedule, actions={**schedule.actions, rank: tuple(actions)})
