"""Schedules in virtual time, against closed forms and a brute-force simulation."""

from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.plan import (
    LayerProfile,
    Link,
    ModelProfile,
    Pipeline,
    PipelineTemplate,
    Plan,
    Stage,
    TiedParameters,
    plain_plan,
)
from planaria.errors import DeadlockError
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.schedule.action import Bucket, Kind, Schedule, parse_schedule
from planaria.schedule.lower import lowered, place_transfers
from planaria.schedule.routed import routed_1f1b
from schedule.plan_examples import figure_9_plan, pipeline, rerouted_plans

FREE = Link(0.0, float("inf"))


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
@settings(max_examples=50, deadline=None)
def test_equal_stages_without_communication_take_the_closed_form(
    num_stages: int, num_microbatches: int, forward_s: float, backward_s: float
) -> None:
    """(N_b + S - 1)(F + B), for any ratio of forward to backward."""
    plan = plain_plan(0, (pipeline(range(num_stages + 1), range(num_stages)),), (num_microbatches,))
    profile = model((layer(forward_s, backward_s),) * num_stages)

    timeline = predicted_timeline(lowered(plan), profile, plan=plan)

    unit_s = forward_s + backward_s
    assert timeline.iteration_s == pytest.approx((num_microbatches + num_stages - 1) * unit_s)
    bubble = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert timeline.bubble_share == pytest.approx(bubble)
    for rank in range(num_stages):
        assert timeline.busy_s(rank) == pytest.approx(num_microbatches * unit_s)


SECONDS = st.sampled_from([0.25, 0.5, 1.0, 1.75, 3.0])


@given(
    plan=rerouted_plans(),
    data=st.data(),
    latency_s=st.sampled_from([0.0, 0.125, 2.0]),
    bandwidth=st.sampled_from([1.0, 8.0]),
)
@settings(max_examples=50, deadline=None)
def test_the_timeline_equals_a_brute_force_simulation(
    plan: Plan, data: st.DataObject, latency_s: float, bandwidth: float
) -> None:
    """Any plan, unequal layers, links that queue, reductions that wait for each other."""
    layers = tuple(
        layer(
            data.draw(SECONDS),
            data.draw(SECONDS),
            parameter_bytes=data.draw(st.integers(4, 9)),
            output_bytes=data.draw(st.integers(0, 9)),
        )
        for _ in range(plan.num_layers)
    )
    tied = (TiedParameters((0, plan.num_layers - 1), 3),)
    profile = model(layers, inter_node=Link(latency_s, bandwidth), tied=tied)
    schedule = lowered(plan, tied=tied)

    timeline = predicted_timeline(schedule, profile, plan=plan, reduce_bytes_factor=1.5)

    expected, end_s = brute_force(schedule, profile, reduce_bytes_factor=1.5)
    found = {(span.rank, str(span.action)): (span.start_s, span.end_s) for span in timeline.spans}
    assert set(expected) == set(found)
    for key, times in expected.items():
        assert found[key] == pytest.approx(times)
    num_ranks = len(schedule.actions)
    commit_s = 2 * ceil(log2(num_ranks)) * latency_s
    assert timeline.iteration_s == pytest.approx(end_s + commit_s)


Times = dict[tuple[int, str], tuple[float, float]]


def brute_force(
    schedule: Schedule, profile: ModelProfile, *, reduce_bytes_factor: float
) -> tuple[Times, float]:
    """Start and end of every span on nodes of one device, by sweeping until none moves.

    It knows no execution order: every action starts at the latest of what it waits for, as the
    sweep before left it, and whoever moved moves the others in the next sweep.
    """
    times: Times = {}
    moved = True
    while moved:
        before = dict(times)
        handed: dict[int, list[float]] = {}
        for rank in schedule.actions:
            sweep_rank(schedule, profile, rank, times=times, handed=handed)
        for index, bucket in enumerate(schedule.buckets):
            lanes = [
                times[rank, f"R{other}"][1]
                for rank in bucket.ranks
                for other in range(index)
                if rank in schedule.buckets[other].ranks
            ]
            start = max(*handed[index], *lanes, 0.0)
            lasts = reduce_bytes_factor * moved_bytes(bucket, profile)
            link = profile.links["inter_node"]
            end = start + 2 * link.latency_s + lasts / link.bandwidth_bytes_per_s
            times.update({(rank, f"R{index}"): (start, end) for rank in bucket.ranks})
        moved = times != before
    return times, max(end for _, end in times.values())


def sweep_rank(
    schedule: Schedule,
    profile: ModelProfile,
    rank: int,
    *,
    times: Times,
    handed: dict[int, list[float]],
) -> None:
    """One pass over a rank's actions with the arrivals that are known so far."""
    link = profile.links["inter_node"]
    now = 0.0
    link_free: dict[int, float] = {}
    for action in schedule.actions[rank]:
        if action.kind is Kind.REDUCE:
            handed.setdefault(action.bucket, []).append(now)
            continue
        route = schedule.routes[action.microbatch]
        step = 1 if action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD) else -1
        hop, peer = route[action.hop], route[(action.hop + step) % len(route)].rank
        layers = profile.layers[hop.first_layer : hop.end_layer]
        if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            sent = f"{action.hop + step}S{action.kind.value[1]}{action.microbatch}"
            now = max(now, times.get((peer, sent), (0.0, 0.0))[1] + link.latency_s)
        elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            cut = hop.end_layer if action.kind is Kind.SEND_FORWARD else hop.first_layer
            start = max(now, link_free.get(peer, 0.0))
            seconds = profile.layers[cut - 1].output_bytes / link.bandwidth_bytes_per_s
            link_free[peer] = start + seconds
            times[rank, str(action)] = (start, start + seconds)
        else:
            forward = action.kind is Kind.FORWARD
            start = now
            now += sum(one.forward_s[1] if forward else one.backward_s(1) for one in layers)
            times[rank, str(action)] = (start, now)


def moved_bytes(bucket: Bucket, profile: ModelProfile) -> float:
    """What a rank sends in a reduce-scatter and an all-gather: 2 (k - 1) / k of the bucket."""
    num_bytes = sum(profile.layers[n].parameter_bytes for n in bucket.layers)
    for parameter in profile.tied:
        num_bytes -= parameter.parameter_bytes * len({*parameter.layers} & {*bucket.layers})
    if bucket.tied >= 0:
        num_bytes = profile.tied[bucket.tied].parameter_bytes
    return 2 * (len(bucket.ranks) - 1) / len(bucket.ranks) * num_bytes


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


@pytest.mark.parametrize(("factor", "seconds"), [(1.0, 2.0 + 12.0), (1.5, 2.0 + 18.0)])
def test_a_reduction_starts_with_its_last_rank(factor: float, seconds: float) -> None:
    """Two ranks, 12 bytes at 1 byte a second: 2 * (k - 1) / k * 12, and two latencies."""
    plan = plain_plan(0, (pipeline((0, 1), (0,)), pipeline((0, 1), (1,))), (1, 3))
    profile = model((layer(1.0, 2.0, parameter_bytes=12),), inter_node=Link(1.0, 1.0))

    timeline = predicted_timeline(lowered(plan), profile, plan=plan, reduce_bytes_factor=factor)

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

    timeline = predicted_timeline(lowered(plan), profile, plan=plan)

    spans = {(span.rank, str(span.action)): (span.start_s, span.end_s) for span in timeline.spans}
    assert (4.0, 6.0) == spans[1, "R1"] == spans[3, "R1"] == spans[0, "0B0"]
    assert timeline.iteration_s == 6.0


def test_a_timeline_can_be_read_again_and_indexed() -> None:
    """Its spans are made when they are asked for; they must be there the second time too."""
    plan = figure_9_plan()
    schedule = lowered(plan)
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
