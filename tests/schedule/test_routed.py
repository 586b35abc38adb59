"""1F1B over routes, against textbook 1F1B and the bounds that it promises."""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plan_examples import figure_9_plan, pipeline, plain_plans, rerouted_plans
from planaria.core.plan import Hop, Plan, Route, Ticks, plain_plan
from planaria.schedule.action import Action, Kind, format_schedule
from planaria.schedule.lower import execution_order, num_connected_hops, place_transfers, validate
from planaria.schedule.routed import routed_1f1b


def textbook_1f1b(stage: int, num_stages: int, microbatches: list[int]) -> list[str]:
    """Narayanan et al. (SC '21), figure 4: warmup, steady, cooldown of one stage, as text."""
    num_warmup = min(num_stages - stage, len(microbatches))
    warmup = [f"{stage}F{m}" for m in microbatches[:num_warmup]]
    steady = []
    for backward, forward in zip(microbatches, microbatches[num_warmup:], strict=False):
        steady += [f"{stage}B{backward}", f"{stage}F{forward}"]
    cooldown = [f"{stage}B{m}" for m in microbatches[len(microbatches) - num_warmup :]]
    return warmup + steady + cooldown


def texts(actions: Iterable[Action]) -> list[str]:
    return [str(action) for action in actions]


def test_figure_9_of_oobleck_letter_for_letter() -> None:
    """A pipeline of three stages and one of two, side by side."""
    schedule = routed_1f1b(figure_9_plan())

    assert format_schedule(schedule).splitlines() == [
        "0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
        "3: 0F4 0F5 0B4 0F6 0B5 0B6",
        "4: 1F4 1B4 1F5 1B5 1F6 1B6",
    ]


@given(plain_plans())
@settings(max_examples=80)
def test_every_stage_of_a_plain_plan_runs_textbook_1f1b(plan: Plan) -> None:
    """Whatever the depths, cuts and numbers of microbatches, unequal stages included."""
    schedule = routed_1f1b(plan)

    for one in plan.pipelines:
        route = one.route()
        own = [m for m, other in enumerate(plan.routes) if other == route]
        for stage, hop in enumerate(route):
            expected = textbook_1f1b(stage, len(route), own)
            assert expected == texts(schedule.actions[hop.rank])


@given(st.integers(1, 40), st.integers(1, 60))
@settings(max_examples=15)
def test_deep_pipelines_run_textbook_1f1b(num_stages: int, num_microbatches: int) -> None:
    """Fewer microbatches than stages, and many more."""
    plan = plain_plan(0, (pipeline(range(num_stages + 1), range(num_stages)),), (num_microbatches,))

    schedule = routed_1f1b(plan)

    for stage in range(num_stages):
        expected = textbook_1f1b(stage, num_stages, list(range(num_microbatches)))
        assert expected == texts(schedule.actions[stage])


def test_what_stages_take_decides_what_is_ready_first() -> None:
    """Two stages, letter for letter. Where the first takes four times as long, a microbatch is back
    from the second when the next one's forward is over; where messages take their time, too, when
    that after next is."""
    plan = plain_plan(0, (pipeline((0, 1, 2), (0, 1)),), (4,))
    plan = replace(plan, in_flight={0: 4, 1: 4})
    equal, far = Ticks(1, 1, 1, 0), Ticks(1, 1, 1, 1)

    def first_rank(ticks: dict[int, Ticks]) -> str:
        return " ".join(texts(routed_1f1b(replace(plan, ticks=ticks)).actions[0]))

    assert first_rank({}) == first_rank({0: equal, 1: equal})
    assert first_rank({0: equal, 1: equal}) == "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert first_rank({0: Ticks(4, 4, 4, 0), 1: equal}) == "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3"
    assert first_rank({0: Ticks(4, 4, 4, 0), 1: far}) == "0F0 0F1 0F2 0B0 0B1 0B2 0F3 0B3"


def test_weight_gradients_go_where_a_rank_would_wait() -> None:
    """Two stages, letter for letter: rank 0's backwards are whole, for nobody waits for them."""
    plan = plain_plan(0, (pipeline((0, 1, 2), (0, 1)),), (3,))
    split = replace(plan, splits_backward=True, in_flight={0: 3, 1: 3})

    assert format_schedule(routed_1f1b(split)).splitlines() == [
        "0: 0F0 0F1 0F2 0B0 0B1 0B2",
        "1: 1F0 1BI0 1F1 1BI1 1F2 1BI2 1BW0 1BW1 1BW2",
    ]


@given(rerouted_plans())
@settings(max_examples=60)
def test_split_schedules_are_valid_and_do_all_that_whole_ones_do(plan: Plan) -> None:
    """A backward of a first hop is whole, any other one in two parts."""
    whole, split = routed_1f1b(plan), routed_1f1b(replace(plan, splits_backward=True))

    validate(place_transfers(split), plan.num_layers)

    def parts(action: Action) -> list[str]:
        if action.kind is Kind.BACKWARD and action.hop:
            return [f"{action.hop}{part}{action.microbatch}" for part in ("BI", "BW")]
        return [str(action)]

    for rank, actions in whole.actions.items():
        wanted = sorted(text for action in actions for text in parts(action))
        assert wanted == sorted(map(str, split.actions[rank]))


def test_a_lost_stage_is_taken_over_by_peers_letter_for_letter() -> None:
    """Rank 3 is lost; its layers [2, 4) lie on rank 0, [2, 3), and rank 1, [3, 4)."""
    pipelines = (pipeline((0, 3, 6), (0, 1)), pipeline((0, 2, 4, 6), (2, 3, 4)))
    around: Route = (Hop(2, 0, 2), Hop(0, 2, 3), Hop(1, 3, 4), Hop(4, 4, 6))
    plan = Plan(1, pipelines, (pipelines[0].route(),) * 2 + (around,) * 2)

    schedule = routed_1f1b(plan)

    assert format_schedule(schedule).splitlines() == [
        "0: 0F0 1F2 0F1 1F3 0B0 0B1 1B2 1B3",
        "1: 1F0 1B0 2F2 1F1 1B1 2B2 2F3 2B3",
        "2: 0F2 0F3 0B2 0B3",
        "3:",
        "4: 3F2 3B2 3F3 3B3",
    ]


def test_a_rank_serves_the_microbatches_of_two_pipelines_evenly() -> None:
    """If it did its own first, the other pipeline would stand still until they are done."""
    two = (pipeline((0, 1, 2), (0, 1)), pipeline((0, 1, 2), (2, 3)))
    shared: Route = (Hop(0, 0, 1), Hop(3, 1, 2))
    plan = Plan(1, two, (two[0].route(),) * 4 + (shared,) * 2)
    forwards = [a.microbatch for a in routed_1f1b(plan).actions[0] if a.kind is Kind.FORWARD]

    assert forwards == [0, 4, 1, 2, 5, 3]


@given(rerouted_plans())
@settings(max_examples=80)
def test_rerouted_schedules_are_valid_and_finish(plan: Plan) -> None:
    """Also where microbatches visit ranks twice, or two ranks in opposite orders."""
    schedule = place_transfers(routed_1f1b(plan))

    validate(schedule, plan.num_layers)

    assert set(plan.ranks) == set(schedule.actions)


@given(rerouted_plans())
@settings(max_examples=80)
def test_in_flight_microbatches_stay_within_what_1f1b_allows(plan: Plan) -> None:
    """Twice that for routes that meet others; only routes in opposite orders may need more."""
    routes = set(plan.routes)
    visitors = {rank: {r for r in routes for h in r if h.rank == rank} for rank in plan.ranks}
    limits = dict.fromkeys(plan.ranks, 1)
    for route in routes:
        factor = 2 if any(len(visitors[hop.rank]) > 1 for hop in route) else 1
        for index, hop in enumerate(route):
            limits[hop.rank] = max(limits[hop.rank], factor * (len(route) - index))

    if not can_be_sorted(plan.routes):
        limits = dict.fromkeys(plan.ranks, len(plan.routes))

    schedule = routed_1f1b(plan)

    for rank, actions in schedule.actions.items():
        assert peak_in_flight(actions) <= limits[rank]


def peak_in_flight(actions: Iterable[Action]) -> int:
    """The most microbatches that have a forward done and a backward still to do."""
    hops: dict[int, int] = {}
    peak = 0
    for action in actions:
        change = 1 if action.kind is Kind.FORWARD else -1
        hops[action.microbatch] = hops.get(action.microbatch, 0) + change
        peak = max(peak, sum(count > 0 for count in hops.values()))
    return peak


def can_be_sorted(routes: Iterable[Route]) -> bool:
    """Whether the ranks have an order in which every route visits them."""
    after: dict[int, set[int]] = {}
    for route in set(routes):
        for index, hop in enumerate(route):
            after.setdefault(hop.rank, set()).update(later.rank for later in route[index + 1 :])
    while after:
        last = [rank for rank, others in after.items() if not others & after.keys()]
        if not last:
            return False
        for rank in last:
            del after[rank]
    return True


def test_routes_in_opposite_orders_finish() -> None:
    """Ranks of limit 1 that wait for each other: the oldest microbatch is let in."""
    both = (pipeline((0, 2), (0,)), pipeline((0, 2), (1,)))
    there: Route = (Hop(0, 0, 1), Hop(1, 1, 2))
    back: Route = (Hop(1, 0, 1), Hop(0, 1, 2))
    plan = Plan(1, both, (there, back) * 5)

    schedule = place_transfers(routed_1f1b(plan))

    num_actions = 10 * (2 * 2 + 4)  # Two hops forward and backward, and four transfers each.
    assert num_actions == sum(1 for _ in execution_order(schedule))


@given(rerouted_plans() | plain_plans())
@settings(max_examples=60)
def test_a_schedule_is_computed_from_all_microbatches_that_meet(plan: Plan) -> None:
    """Against spreading from each rank over routes and pipelines until nothing more is met."""
    groups = [
        *({hop.rank for hop in route} for route in plan.routes),
        *({rank for ranks in one.ranks_by_stage() for rank in ranks} for one in plan.pipelines),
    ]
    most = 0
    for rank in plan.ranks:
        met: set[int] = {rank}
        while more := set[int]().union(*(g for g in groups if g & met and not g <= met)):
            met |= more
        most = max(most, sum(len(route) for route in plan.routes if route[0].rank in met))

    assert num_connected_hops(plan) == most
