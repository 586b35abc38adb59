"""Schedules in virtual time, against closed forms and a simulation by events."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from math import isclose
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cpu_time import quickest
from helpers.event_simulation import simulated_times
from helpers.plan_examples import figure_9_plan, pipeline, random_plan, rerouted_plan
from planaria.core.plan import (
    LayerProfile,
    Link,
    ModelProfile,
    Pipeline,
    PipelineTemplate,
    Plan,
    Route,
    Stage,
    TiedParameters,
    plain_plan,
)
from planaria.errors import DeadlockError
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.schedule.action import Kind, parse_schedule
from planaria.schedule.lower import place_transfers, plan_schedule
from planaria.schedule.routed import routed_1f1b

SEED = 20_261_121
FREE = Link(0.0, float("inf"))
RANKS_S_MAX = 6.0  # Three times the goal of benchmarks/planner.py.


def layer(
    forward_s: float, backward_s: float, *, parameter_bytes: int = 0, output_bytes: int = 0
) -> LayerProfile:
    """A layer for one device or two, twice as fast on two."""
    return LayerProfile(
        name="layer",
        forward_s={1: forward_s, 2: forward_s / 2},
        backward_input_s={1: backward_s / 4, 2: backward_s / 8},
        backward_weight_s={1: backward_s * 3 / 4, 2: backward_s * 3 / 8},
        parameter_bytes=parameter_bytes,
        optimizer_bytes=0,
        activation_bytes=0,
        output_bytes=output_bytes,
    )


def model(
    layers: tuple[LayerProfile, ...],
    *,
    intra_node: Link = FREE,
    inter_node: Link = FREE,
    tied: tuple[TiedParameters, ...] = (),
) -> ModelProfile:
    return ModelProfile(
        model="test",
        microbatch_size=1,
        dtype="float32",
        device="cpu",
        device_memory_bytes=0,
        layers=layers,
        links={"intra_node": intra_node, "inter_node": inter_node},
        tied=tied,
    )


@given(
    num_stages=st.integers(1, 9),
    num_microbatches=st.integers(1, 20),
    forward_s=st.floats(0.001, 10),
    backward_s=st.floats(0.001, 10),
)
@settings(max_examples=50)
def test_equal_stages_without_communication_take_the_closed_form(
    num_stages: int, num_microbatches: int, forward_s: float, backward_s: float
) -> None:
    """(N_b + S - 1)(F + B), for any ratio of forward to backward."""
    plan = plain_plan(0, (pipeline(range(num_stages + 1), range(num_stages)),), (num_microbatches,))
    profile = model((layer(forward_s, backward_s),) * num_stages)

    timeline = predicted_timeline(plan_schedule(plan), profile, plan=plan)

    unit_s = forward_s + backward_s
    assert timeline.iteration_s == pytest.approx((num_microbatches + num_stages - 1) * unit_s)
    bubble = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert timeline.bubble_share == pytest.approx(bubble)
    for rank in range(num_stages):
        assert timeline.busy_s(rank) == pytest.approx(num_microbatches * unit_s)


def random_profile(rng: Random, num_layers: int) -> ModelProfile:
    """Unequal layers, whose times on several devices are any; up to two tied parameters."""

    def seconds() -> dict[int, float]:
        return {count: rng.randint(0, 48) / 16 for count in (1, 2, 3, 4)}

    def link() -> Link:
        return Link(rng.choice((0.0, 0.125, 2.0)), rng.choice((1.0, 8.0, 64.0)))

    tied = tuple(
        TiedParameters(
            tuple(sorted(rng.sample(range(num_layers), rng.randint(1, min(3, num_layers))))),
            rng.randint(1, 3),
        )
        for _ in range(rng.randint(0, 2))
    )
    layers = tuple(
        LayerProfile(
            name=f"layer {index}",
            forward_s=seconds(),
            backward_input_s=seconds(),
            backward_weight_s=seconds(),
            parameter_bytes=rng.randint(6, 20),
            optimizer_bytes=0,
            activation_bytes=0,
            output_bytes=rng.randint(0, 9),
        )
        for index in range(num_layers)
    )
    return model(layers, intra_node=link(), inter_node=link(), tied=tied)


def routed_plan(rng: Random, *, num_layers_max: int) -> Plan:
    """A random plan of unequal pipelines, some of whose microbatches go around lost nodes."""
    while True:
        plan = rerouted_plan(random_plan(rng, num_layers_max=num_layers_max), rng)
        own = {pipeline.route() for pipeline in plan.pipelines}
        if len({pipeline.template for pipeline in plan.pipelines}) > 1 and not own.issuperset(
            plan.routes
        ):
            return plan


def variety(plan: Plan) -> Iterator[str]:
    """What else is in a plan."""
    templates = {pipeline.template for pipeline in plan.pipelines}
    if any(stage.num_devices > 1 for template in templates for stage in template.stages):
        yield "stages of several devices"
    if any(len(template.stages) > template.num_nodes for template in templates):
        yield "nodes of several stages"
    if any(
        0 < plan.routes.count(pipeline.route()) < len(pipeline.route())
        for pipeline in plan.pipelines
    ):
        yield "fewer microbatches than stages"
    if any(a.rank == b.rank for route in plan.routes for a, b in pairwise(route)):
        yield "ranks visited twice at once"
    if any(map(comes_back, plan.routes)):
        yield "ranks visited again"
    if len(plan.ranks) > 24:
        yield "dozens of ranks"


def comes_back(route: Route) -> bool:
    """Whether a microbatch comes to a rank once more from another one."""
    ranks = [rank for rank, _ in groupby(hop.rank for hop in route)]
    return len(set(ranks)) < len(ranks)


def assert_timeline_is_simulated(plan: Plan, rng: Random, seed: int) -> None:
    """Of a random profile: every start and end, and the iteration, but for rounding."""
    profile = random_profile(rng, plan.num_layers)
    schedule = plan_schedule(plan, tied=profile.tied)
    factor = rng.choice((1.0, 1.5))

    timeline = predicted_timeline(schedule, profile, plan=plan, reduce_bytes_factor=factor)

    expected, iteration_s = simulated_times(
        schedule, profile, plan=plan, reduce_bytes_factor=factor
    )
    times = {(span.rank, span.lane, span.action): span[3:] for span in timeline.spans}
    assert len(expected) == len(timeline.spans), f"seed {seed}"
    assert expected.keys() == times.keys(), f"seed {seed}"
    wrong = [key for key in expected if not all(map(isclose, expected[key], times[key]))]
    assert not wrong, f"seed {seed}: {wrong}"
    assert isclose(iteration_s, timeline.iteration_s), f"seed {seed}"


@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_timelines_of_rerouted_plans_equal_a_simulation_by_events(number: int) -> None:
    """Links that queue, reductions that wait for each other, dozens of ranks."""
    varieties: Counter[str] = Counter()
    for seed in range(SEED, SEED + number):
        rng = Random(seed)
        plan = routed_plan(rng, num_layers_max=40 if seed % 25 == 0 else 8)
        varieties.update(variety(plan))
        assert_timeline_is_simulated(plan, rng, seed)

    assert len(varieties) == 6
    assert min(varieties.values()) > number / 20, varieties


def test_timelines_of_split_backwards_equal_a_simulation_by_events() -> None:
    """Each part with its own seconds, and reductions behind the second."""
    for seed in range(SEED, SEED + 100):
        rng = Random(seed)
        plan = replace(routed_plan(rng, num_layers_max=8), splits_backward=True)
        assert_timeline_is_simulated(plan, rng, seed)


def test_timelines_of_plain_plans_equal_a_simulation_by_events() -> None:
    """Also of a lone pipeline, whose stages of several devices have nothing to sum."""
    for seed in range(SEED, SEED + 100):
        rng = Random(seed)
        assert_timeline_is_simulated(random_plan(rng), rng, seed)


def test_sends_do_not_hold_up_compute_and_queue_on_their_link() -> None:
    """Two outputs of 3 s each, made 1 s apart, then 0.5 s on the way; traced by hand."""
    plan = plain_plan(0, (pipeline((0, 1, 2), (0, 1)),), (2,))
    layers = (layer(1.0, 2.0, output_bytes=3), layer(1.0, 2.0))
    profile = model(layers, inter_node=Link(0.5, 1.0))
    schedule = place_transfers(routed_1f1b(plan))

    timeline = predicted_timeline(schedule, profile, plan=plan)

    assert [(rank, lane, str(a), start, end) for rank, lane, a, start, end in timeline.spans] == [
        (0, "compute", "0F0", 0.0, 1.0),
        (0, "send", "0SF0", 1.0, 4.0),
        (0, "compute", "0F1", 1.0, 2.0),
        (0, "send", "0SF1", 4.0, 7.0),
        (0, "compute", "0B0", 11.0, 13.0),
        (0, "compute", "0B1", 14.0, 16.0),
        (1, "compute", "1F0", 4.5, 5.5),
        (1, "compute", "1B0", 5.5, 7.5),
        (1, "send", "1SB0", 7.5, 10.5),
        (1, "compute", "1F1", 7.5, 8.5),
        (1, "compute", "1B1", 8.5, 10.5),
        (1, "send", "1SB1", 10.5, 13.5),
    ]
    assert timeline.iteration_s == 16.0 + 2 * 0.5


def test_stages_of_one_node_use_its_inner_link_and_all_their_devices() -> None:
    """Node 0 has stages of two devices and of one and another of one: ranks 0, 2 and 3."""
    stages = (Stage(0, 1, 2), Stage(1, 2, 1), Stage(2, 3, 1))
    plan = plain_plan(0, (Pipeline(PipelineTemplate(stages, 1), (0,)),), (1,))
    layers = (layer(2.0, 4.0, output_bytes=8),) * 3
    profile = model(layers, intra_node=Link(1.0, 8.0), inter_node=Link(100.0, 1.0))
    schedule = place_transfers(routed_1f1b(plan))

    timeline = predicted_timeline(schedule, profile, plan=plan)

    assert timeline.busy_s(0) == 1.0 + 2.0
    assert timeline.busy_s(2) == timeline.busy_s(3) == 2.0 + 4.0
    # Compute of all stages, four messages of 2 s, and the commit among the four ranks.
    assert timeline.iteration_s == 3.0 + 6.0 + 6.0 + 4 * 2.0 + 2 * 2 * 1.0


def test_a_layer_needs_times_only_for_the_devices_of_its_own_stage() -> None:
    """The first layer has no times for two devices, the second none for one."""
    first, second = layer(1.0, 2.0), layer(4.0, 8.0)
    first = replace(
        first, forward_s={1: 1.0}, backward_input_s={1: 0.5}, backward_weight_s={1: 1.5}
    )
    second = replace(
        second, forward_s={2: 2.0}, backward_input_s={2: 1.0}, backward_weight_s={2: 3.0}
    )
    stages = (Stage(0, 1, 1), Stage(1, 2, 2))
    plan = plain_plan(0, (Pipeline(PipelineTemplate(stages, 1), (0,)),), (1,))

    timeline = predicted_timeline(
        place_transfers(routed_1f1b(plan)), model((first, second)), plan=plan
    )

    assert timeline.iteration_s == 1.0 + 2.0 + 2.0 + 4.0


@pytest.mark.parametrize(("factor", "seconds"), [(1.0, 2.0 + 12.0), (1.5, 2.0 + 18.0)])
def test_a_reduction_starts_with_its_last_rank(factor: float, seconds: float) -> None:
    """Two ranks, 12 bytes at 1 byte a second: 2 * (k - 1) / k * 12, and two latencies."""
    plan = plain_plan(0, (pipeline((0, 1), (0,)), pipeline((0, 1), (1,))), (1, 3))
    profile = model((layer(1.0, 2.0, parameter_bytes=12),), inter_node=Link(1.0, 1.0))

    timeline = predicted_timeline(
        plan_schedule(plan), profile, plan=plan, reduce_bytes_factor=factor
    )

    reductions = [span for span in timeline.spans if span.lane == "reduce"]
    assert {9.0} == {span.start_s for span in reductions}
    assert {9.0 + seconds} == {span.end_s for span in reductions}
    assert timeline.iteration_s == 9.0 + seconds + 2.0


def test_reductions_run_beside_the_compute_of_other_ranks() -> None:
    """Layer 1 is summed in the two seconds in which layer 0 still goes backward: for nothing."""
    stages = (0, 1, 2)
    plan = plain_plan(0, (pipeline(stages, (0, 1)), pipeline(stages, (2, 3))), (1, 1))
    layers = (layer(1.0, 2.0), layer(1.0, 2.0, parameter_bytes=2))
    profile = model(layers, inter_node=Link(0.0, 1.0))

    timeline = predicted_timeline(plan_schedule(plan), profile, plan=plan)

    spans = {(span.rank, str(span.action)): (span.start_s, span.end_s) for span in timeline.spans}
    assert (4.0, 6.0) == spans[1, "R1"] == spans[3, "R1"] == spans[0, "0B0"]
    assert timeline.iteration_s == 6.0


def test_a_thousand_ranks_are_timed_while_one_waits() -> None:
    """768,000 actions of 1,000 stages and 128 microbatches, which take the closed form."""
    plan = plain_plan(0, (pipeline(range(1001), range(1000)),), (128,))
    profile = model((layer(1.0, 2.0),) * 1000)
    schedule = place_transfers(routed_1f1b(plan))

    timeline, cpu_s = quickest(
        lambda: predicted_timeline(schedule, profile, plan=plan), limit_s=RANKS_S_MAX
    )

    assert cpu_s < RANKS_S_MAX
    assert timeline.iteration_s == (128 + 1000 - 1) * (1.0 + 2.0)


def test_a_timeline_can_be_read_again_and_indexed() -> None:
    """Its spans are made when they are asked for; they must be there the second time too."""
    plan = figure_9_plan()
    schedule = plan_schedule(plan)
    profile = model((layer(1.0, 2.0),) * 6)

    timeline = predicted_timeline(schedule, profile, plan=plan)

    again = Timeline(tuple(timeline.spans), timeline.iteration_s)
    assert list(timeline.spans) == list(timeline.spans) == list(again.spans)
    assert timeline.spans[-1] == again.spans[-1]
    assert tuple(timeline.spans[2:5]) == again.spans[2:5]
    assert len(timeline.spans) == len(again.spans)
    receives = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
    assert len(again.spans) == sum(
        action.kind not in receives for actions in schedule.actions.values() for action in actions
    )


def test_a_schedule_that_cannot_finish_has_no_timeline() -> None:
    """The estimator walks as the validator does, so it cannot price what would hang."""
    plan = plain_plan(0, (pipeline((0, 1, 2), (0, 1)),), (1,))
    schedule = parse_schedule("0: 0F0 0RB0 0B0 0SF0\n1: 1RF0 1F0 1B0 1SB0", plan.routes)

    with pytest.raises(DeadlockError):
        predicted_timeline(schedule, model((layer(1.0, 2.0),) * 2), plan=plan)
