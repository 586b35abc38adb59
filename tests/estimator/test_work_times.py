"""What searches compute from the work alone equals what the schedule itself gives, to the bit."""

from dataclasses import replace
from random import Random

import pytest

from helpers.plan_examples import pipeline, random_plan, rerouted_plan
from helpers.strategies import model_profile
from planaria.core.plan import (
    LayerProfile,
    Link,
    ModelProfile,
    Pipeline,
    Plan,
    Recomputation,
    RecomputationCost,
    Ticks,
    TiedParameters,
    plain_plan,
    profile_on,
)
from planaria.estimator.peak_memory import WorkBytes, kept_bytes
from planaria.estimator.time import predicted_timeline
from planaria.estimator.work_times import WorkTimes
from planaria.schedule.buckets import ReductionOrder
from planaria.schedule.lower import unchecked_schedule
from planaria.schedule.routed import routed_work

SEED = 20_261_130


def pipelines_of_search(rng: Random) -> Plan:
    """Pipelines as a search has them: with empty places that no route visits, or none, and stages
    that compute activations again, or none."""
    plan = random_plan(rng, num_layers_max=rng.choice((4, 8, 20)))
    if rng.random() < 0.7:
        plan = rerouted_plan(plan, rng)
        visited = {hop.rank // plan.devices_per_node for route in plan.routes for hop in route}
        plan = replace(plan, gone=tuple(node for node in plan.nodes if node not in visited))
    if rng.random() < 0.3:
        plan = replace(plan, pipelines=tuple(recomputing(one, rng) for one in plan.pipelines))
    return plan


def recomputing(pipeline: Pipeline, rng: Random) -> Pipeline:
    """The pipeline with stages of which some compute activations again."""
    modes: tuple[Recomputation, ...] = ("none", "selective", "full")
    stages = tuple(
        replace(
            stage,
            recomputation=tuple(
                rng.choice(modes) for _ in range(stage.first_layer, stage.end_layer)
            ),
        )
        if rng.random() < 0.5
        else stage
        for stage in pipeline.template.stages
    )
    return replace(pipeline, template=replace(pipeline.template, stages=stages))


def in_other_order(plan: Plan, rng: Random) -> Plan:
    """The plan with other limits in flight, ticks, and parts of backwards."""
    limited = [rank for rank in plan.ranks if rng.random() < 0.3]
    ticks = {rank: Ticks(*(rng.randint(0, 3) for _ in range(4))) for rank in plan.ranks}
    return replace(
        plan,
        splits_backward=rng.random() < 0.5,
        in_flight={rank: rng.randint(1, 4) for rank in limited},
        ticks=ticks if rng.random() < 0.5 else {},
    )


def profile_of(plan: Plan, rng: Random) -> ModelProfile:
    """Unequal layers, of which some take no time, and up to one tied parameter."""

    def seconds() -> dict[int, float]:
        return {count: rng.choice((0.0, rng.random())) for count in (1, 2, 3, 4)}

    layers = tuple(
        LayerProfile(
            name=f"layer {index}",
            forward_s=seconds(),
            backward_input_s=seconds(),
            backward_weight_s=seconds(),
            parameter_bytes=rng.randint(6, 20),
            optimizer_bytes=0,
            activation_bytes=rng.randint(0, 9),
            output_bytes=rng.randint(0, 9),
            recomputed={
                mode: RecomputationCost(activation_bytes=rng.randint(0, 4), additional_s=seconds())
                for mode in ("selective", "full")
            },
        )
        for index in range(plan.num_layers)
    )
    tied = (TiedParameters((0, plan.num_layers - 1), 3),) if plan.num_layers > 1 else ()
    links = {
        "intra_node": Link(rng.random(), rng.choice((1.0, 64.0))),
        "inter_node": Link(rng.random(), rng.choice((1.0, 8.0))),
    }
    tied = tied if rng.random() < 0.5 else ()
    return replace(model_profile(layers), links=links, tied=tied)


@pytest.mark.parametrize("number", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_work_takes_and_keeps_what_its_schedule_does(number: int) -> None:
    """Iterations, the ends of ranks and peak bytes; of several plans with the same pipelines."""
    for seed in range(SEED, SEED + number):
        rng = Random(seed)
        first = pipelines_of_search(rng)
        profile, order = profile_of(first, rng), rng.choice(list(ReductionOrder))
        times = WorkTimes(profile, first, order=order, reduce_bytes_factor=1.5)
        sizes = WorkBytes(profile, first)
        for routes in (first.routes, first.routes[::-1], first.routes):
            plan = in_other_order(replace(first, routes=routes), rng)
            schedule = unchecked_schedule(plan, tied=profile.tied, order=order)
            timeline = predicted_timeline(schedule, profile, plan=plan, reduce_bytes_factor=1.5)
            ends_s = dict.fromkeys(plan.ranks, 0.0)
            for span in timeline.spans:
                if span.lane == "compute":
                    ends_s[span.rank] = max(ends_s[span.rank], span.end_s)
            work = routed_work(plan)

            assert times.iteration_s(plan.routes, work) == timeline.iteration_s, f"seed {seed}"
            assert times.computed_s(plan.routes, work) == ends_s, f"seed {seed}"
            assert sizes.most_kept(plan.routes, work) == {
                rank: kept_bytes(profile_on(profile, plan, rank), schedule, rank)
                for rank in plan.ranks
            }, f"seed {seed}"


def test_a_rank_that_holds_layers_silently_takes_part_in_their_reductions() -> None:
    """It has nothing to wait for, but the reductions before."""
    plan = plain_plan(0, (pipeline((0, 1, 2), (0, 1)), pipeline((0, 1, 2), (2, 3))), (3, 2))
    profile = profile_of(plan, Random(SEED))
    silent = replace(plan, silent={0: (1,)})
    schedule = unchecked_schedule(silent, tied=profile.tied)

    found_s = WorkTimes(profile, silent).iteration_s(silent.routes, routed_work(silent))

    assert found_s == predicted_timeline(schedule, profile, plan=silent).iteration_s
    assert any(0 in bucket.ranks and 1 in bucket.layers for bucket in schedule.buckets)
