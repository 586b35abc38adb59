"""The spans in which copies may go, as predicted."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.jobs import NUM_LAYERS, shaped_plan
from helpers.strategies import layer_profile, model_profile
from planaria.core.copies import IdleSpans, LayerCopy
from planaria.core.plan import Link, Pipeline, PipelineTemplate, Plan, Stage, plain_plan
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.placement.idle import (
    Sending,
    predicted_idle,
    predicted_idle_of_sources,
    predicted_sending,
)
from planaria.placement.layer_copies import layer_copies
from planaria.placement.placement import paper_placement
from planaria.planner.problem import Problem
from planaria.planner.reroute.shadows import with_shadows
from planaria.schedule.action import SEND_FORWARD, Schedule
from planaria.schedule.lower import plan_schedule

BYTES = 1_000_000
PROFILE = model_profile(
    tuple(
        layer_profile(f"layer {i}", 0.01, parameter_bytes=BYTES, output_bytes=BYTES)
        for i in range(NUM_LAYERS)
    )
)


def idle_of(plan: Plan) -> tuple[Problem, tuple[IdleSpans, ...]]:
    problem = Problem(profile=PROFILE, devices_per_node=1, num_microbatches=8, failures_tolerated=0)
    num_nodes = len(plan.nodes)
    placement = paper_placement(num_nodes, min(2, num_nodes), "mixed")
    copies = layer_copies(
        plan, copies=2, placement=placement, layer_bytes=(BYTES,) * plan.num_layers
    )
    return problem, predicted_idle(problem, plan, copies)


def test_a_stage_is_idle_but_for_what_it_sends_and_its_neighbour_gets() -> None:
    """Two stages, two microbatches: whatever either sends takes both ways of the pair."""
    plan = shaped_plan((2,), 2)
    _, found = idle_of(plan)

    assert [(one.source, one.target) for one in found] == [(0, 1), (1, 0)]
    # 0 sends an output when a forward is done, which takes a millisecond at 1 GB/s.
    spans = found[0].spans
    assert [span.after for span in spans][:3] == [0, 1, 2]
    assert [span.offset_s for span in spans][:3] == pytest.approx([0.0, 0.001, 0.001])


def test_who_holds_layers_silently_takes_part_in_nothing() -> None:
    """Layers that come while training goes on are not computed with yet."""
    plan = shaped_plan((2, 2), 4)
    found = idle_of(replace(plan, silent={0: (NUM_LAYERS - 1,), 9: (0, 1)}))[1]

    assert [one for one in found if 9 not in (one.source, one.target)]


def test_shadows_are_no_work_that_spans_are_known_by() -> None:
    """The ranks count forwards and backwards; a span behind what they never do would never come."""
    plan = with_shadows(shaped_plan((4,), 4))
    _, found = idle_of(plan)

    assert any(one.source in plan.shadows for one in found)
    for one in found:
        passes = sum(hop.rank == one.source for route in plan.routes for hop in route)
        assert max(span.after for span in one.spans) <= 2 * passes


shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: sum(s) > 1)


@given(shapes)
def test_no_span_meets_what_its_source_sends_or_its_target_gets(shape: list[int]) -> None:
    """Each lies where its source's own work says, and together they are all that is left."""
    plan = shaped_plan(tuple(shape), 8)
    problem, found = idle_of(plan)
    schedule = plan_schedule(plan, order=problem.reduction_order)
    timeline = predicted_timeline(
        schedule, PROFILE, plan=plan, reduce_bytes_factor=problem.reduce_bytes_factor
    )
    for one in found:
        ends_s = [s.end_s for s in timeline.spans if (s.rank, s.lane) == (one.source, "compute")]
        starts_s = [0.0, *sorted(ends_s)]
        busy = [
            *_taken(schedule, timeline, one.source, is_out=True),
            *_taken(schedule, timeline, one.target, is_out=False),
        ]
        idle = [(starts_s[s.after] + s.offset_s, s.lasts_s) for s in one.spans]
        for start_s, lasts_s in idle:
            for from_s, until_s in busy:
                assert until_s <= start_s + 1e-9 or from_s >= start_s + lasts_s - 1e-9
        covered_s = sum(lasts_s for _, lasts_s in idle) + _union_s(busy)
        assert covered_s == pytest.approx(timeline.iteration_s)


@given(shapes)
def test_a_source_is_idle_while_it_neither_sends_nor_gets(shape: list[int]) -> None:
    """Whatever its receivers do; so its spans to all of them are the same, and all that is left."""
    plan = shaped_plan(tuple(shape), 8)
    problem = Problem(profile=PROFILE, devices_per_node=1, num_microbatches=8, failures_tolerated=0)
    others = len(plan.nodes) - 1
    copies = [LayerCopy(0, 0, tuple(range(1, 1 + min(2, others))))]
    found = predicted_idle_of_sources(problem, plan, copies)
    schedule = plan_schedule(plan, order=problem.reduction_order)
    timeline = predicted_timeline(
        schedule, PROFILE, plan=plan, reduce_bytes_factor=problem.reduce_bytes_factor
    )
    busy = [
        *_taken(schedule, timeline, 0, is_out=True),
        *_taken(schedule, timeline, 0, is_out=False),
    ]

    assert [(one.source, one.target) for one in found] == [(0, n) for n in copies[0].targets]
    assert {one.spans for one in found} == {found[0].spans}
    covered_s = sum(span.lasts_s for span in found[0].spans) + _union_s(busy)
    assert covered_s == pytest.approx(timeline.iteration_s)


def _taken(
    schedule: Schedule, timeline: Timeline, rank: int, *, is_out: bool
) -> Iterator[tuple[float, float]]:
    """When a rank's way out, or in, is taken."""
    for source, lane, action, start_s, end_s in timeline.spans:
        ends = {source}
        if lane == "send":
            step = 1 if action.kind is SEND_FORWARD else -1
            target = schedule.routes[action.microbatch][action.hop + step].rank
            ends = {source if is_out else target}
        elif lane == "compute" or len(schedule.buckets[action.bucket].ranks) == 1:
            continue
        if rank in ends:
            yield start_s, end_s


def _union_s(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    total_s = until_s = 0.0
    for start_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def sending_of(plan: Plan, *, layer_bytes: int, chunk_bytes: int = BYTES) -> dict[int, Sending]:
    """With a link of 1 GB/s, of whose spans half is used."""
    problem = Problem(profile=PROFILE, devices_per_node=1, num_microbatches=8, failures_tolerated=0)
    copies = [LayerCopy(layer, plan.holders(layer)[0], (1,)) for layer in (0, 1)]
    return predicted_sending(
        problem,
        plan,
        [*copies, LayerCopy(NUM_LAYERS - 1, 1, ())],
        layer_bytes=(layer_bytes,) * NUM_LAYERS,
        chunk_bytes=chunk_bytes,
        gamma=0.5,
    )


def test_a_version_that_fits_takes_one_iteration_and_no_time() -> None:
    """Who has nobody to send to does not send."""
    (sent,) = sending_of(shaped_plan((2,), 2), layer_bytes=BYTES).values()

    assert sent.num_bytes == 2 * BYTES
    assert sent.sends_s == pytest.approx(2 * PROFILE.links["inter_node"].seconds(BYTES))
    assert (sent.iterations, sent.longer_s) == (1, 0.0)


def test_a_version_that_does_not_fit_takes_more_iterations_or_makes_one_longer() -> None:
    """Half of the spans' time is used, less what is lost where the last chunk does not fit."""
    plan = shaped_plan((2,), 2)
    (_, found) = idle_of(plan)
    idle_s = sum(span.lasts_s for span in found[0].spans)
    last_s = found[0].spans[-1].lasts_s

    (sent,) = sending_of(plan, layer_bytes=round(idle_s * 1e9)).values()

    assert sent.idle_s == pytest.approx(idle_s)
    assert sent.iterations == 5  # Twice the spans' time and latencies, by half of it in each.
    least_s = sent.sends_s - 0.5 * (idle_s - last_s) - last_s
    assert least_s - 1e-9 <= sent.longer_s <= least_s + 0.001 * len(found[0].spans)


def test_of_a_version_whose_chunks_fit_nowhere_one_goes_in_each_iteration() -> None:
    """As the ranks do."""
    plan = shaped_plan((2,), 2)
    (sent,) = sending_of(plan, layer_bytes=10**10, chunk_bytes=10**10).values()

    assert sent.iterations == 2


def test_iterations_may_take_no_time_at_all() -> None:
    """By the profile; then whatever is sent makes one of them longer."""
    nothing = dict.fromkeys((1, 2), 0.0)
    layers = tuple(
        replace(
            layer,
            forward_s=nothing,
            backward_input_s=nothing,
            backward_weight_s=nothing,
            output_bytes=0,
        )
        for layer in PROFILE.layers
    )
    free = {kind: Link(0.0, link.bandwidth_bytes_per_s) for kind, link in PROFILE.links.items()}
    problem = Problem(
        profile=replace(PROFILE, layers=layers, links=free),
        devices_per_node=1,
        num_microbatches=8,
        failures_tolerated=0,
    )

    (sent,) = predicted_sending(
        problem,
        shaped_plan((2,), 2),
        [LayerCopy(0, 0, (1,))],
        layer_bytes=(BYTES,) * NUM_LAYERS,
        chunk_bytes=BYTES,
        gamma=0.5,
    ).values()

    assert sent.endless_iterations == 1
    assert sent.longer_s == pytest.approx(sent.sends_s)


def test_the_devices_of_a_node_share_its_ways() -> None:
    """Two ranks of a node send as much as one of two such nodes, and twice the time."""
    template = PipelineTemplate(tuple(Stage(i, i + 1, 1) for i in range(4)), 2)
    plan = plain_plan(0, (Pipeline(template, (0, 1)),), (4,))
    profile = replace(PROFILE, layers=PROFILE.layers[:4])
    problem = Problem(profile=profile, devices_per_node=2, num_microbatches=4, failures_tolerated=0)
    copies = [LayerCopy(layer, layer, ((layer + 2) % 4,)) for layer in range(4)]

    found = predicted_sending(
        problem, plan, copies, layer_bytes=(BYTES,) * 4, chunk_bytes=BYTES, gamma=0.5
    )
    idle = {one.source: one.spans for one in predicted_idle(problem, plan, copies)}

    assert {node: sent.num_bytes for node, sent in found.items()} == {0: 2 * BYTES, 1: 2 * BYTES}
    # What rank 1 sends to the other node takes rank 0's way, too, and is known by rank 0's work.
    assert sum(span.lasts_s for span in idle[0]) == pytest.approx(found[0].idle_s)
    assert sum(span.lasts_s for span in idle[1]) == pytest.approx(found[0].idle_s)
