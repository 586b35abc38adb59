"""Routes around empty places: who computes what nodes that are gone would have computed.

A microbatch begins in some pipeline, its home, and keeps to its stages where their nodes live.
The layers of empty places it visits at other holders, each as far as its stage goes: one hop where
a peer's stage has the same boundaries, several where they differ. No parameter moves.

1. Microbatches are dealt one by one. Each takes the home and the detours after which the rank that
   ends last ends earliest: what it has to do until then, behind what a microbatch needs to get to
   its stage and back. So detours go to who has time, and pipelines with empty places get fewer.
2. A few more or fewer of them begin in pipelines with empty places, and microbatches are numbered
   in the one direction or the other. What results is run in virtual time, and the fastest is taken:
   a schedule has gaps that loads do not show.
3. From the fastest of these on, where they are small, other orders of actions are looked for
   (planner/reroute/orders.py).

Source: ReCycle (SOSP '24), adaptive pipelining.
Differs: there a microbatch stays in its pipeline, peers of the lost stage take equal parts, and
all pipelines are cut alike. Odyssey's equation 13 sums over stages what in truth overlaps; here
it is the most loaded rank that counts, and then the schedule itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import Final, NamedTuple

from planaria.core.plan import Plan, Route, Ticks
from planaria.estimator.memory import bytes_by_rank, kept_bytes
from planaria.estimator.time import predicted_timeline
from planaria.planner.problem import Problem
from planaria.planner.reroute.detours import Detours
from planaria.planner.reroute.orders import PATIENCE, best_order
from planaria.schedule.action import Schedule
from planaria.schedule.lower import unchecked

TRIES_HOPS_MAX: Final = 1 << 10  # Of all tries of step 2 together; they take some 50 ms.
HOPS_MAX: Final = 1 << 14  # Of step 3 too, which takes half a second.
_STARTS_MAX: Final = 3  # Of step 3.


class Priced(NamedTuple):
    """A plan, and what an iteration of it takes."""

    plan: Plan
    iteration_s: float


def rerouted(problem: Problem, plan: Plan, *, hops_max: int = HOPS_MAX) -> Priced | None:
    """The fastest plan with routes around its empty places, of those that leave the fewest devices
    without work.

    Where a device has no memory for as many microbatches in flight as its schedule would keep, it
    keeps fewer.

    Args:
        plan: its routes are not looked at.
        hops_max: of all that is run; what step 1 finds always is, at 0 nothing else, and up to
            TRIES_HOPS_MAX nothing of step 3.

    Returns:
        None if a layer is in empty places only, or some device has no memory for one microbatch.
    """
    detours = Detours(problem, plan)
    if not detours.covers_model():
        return None
    first = detours.routes(problem.num_microbatches, None)
    num_hops = sum(map(len, first))
    num_tries = max(1, min(hops_max, TRIES_HOPS_MAX) // num_hops)
    tries = _tries(problem, detours, first, num_tries)
    found = [one for routes in tries for one in _priced(problem, replace(plan, routes=routes))]
    found.sort(key=lambda one: (num_without_work(one.plan), one.iteration_s))
    num_runs = (hops_max - TRIES_HOPS_MAX) // num_hops
    if not found or num_runs < PATIENCE:  # Fewer find nothing.
        return found[0] if found else None
    return _reordered(problem, [one.plan for one in found[:_STARTS_MAX]], num_runs)


def _tries(
    problem: Problem, detours: Detours, first: tuple[Route, ...], num_tries: int
) -> list[tuple[Route, ...]]:
    """These routes, and others that begin elsewhere or are numbered in the other direction."""
    around = detours.num_around(first)
    nearest = [around + sign * step for step in range(1, num_tries) for sign in (-1, 1)]
    can = [number for number in nearest if detours.can_deal(problem.num_microbatches, number)]
    others = [detours.routes(problem.num_microbatches, number) for number in can[: num_tries - 1]]
    tries = [first, first[::-1], *others, *(routes[::-1] for routes in others)]
    return list(dict.fromkeys(tries[:num_tries]))  # With few microbatches many are alike.


def _reordered(problem: Problem, starts: Sequence[Plan], num_runs: int) -> Priced:
    def iteration_s(plan: Plan) -> float:
        schedule = _schedule(problem, plan)
        is_short = bool(_short_of_memory(problem, plan, schedule))
        return inf if is_short else _iteration_s(problem, plan, schedule)

    plan = best_order(starts, num_runs=num_runs, iteration_s=iteration_s)
    return Priced(plan, iteration_s(plan))


def num_without_work(plan: Plan) -> int:
    """How many stages in live places compute no microbatch."""
    visited = {hop.rank for route in set(plan.routes) for hop in route}
    firsts = [ranks[0] for pipeline in plan.pipelines for ranks in pipeline.ranks_by_stage()]
    return sum(rank in plan.layers_by_rank and rank not in visited for rank in firsts)


def even_s(problem: Problem, plan: Plan) -> float:
    """When the rank that ends last would end, if all holders of each layer shared its work evenly.

    Infinite if a layer has none. It is what step 1 of `rerouted` aims at, in O(layers * pipelines).
    """
    # By layer how many of it all holders compute in a second, and by live stage the seconds that a
    # microbatch needs from the begin of the stage's pipeline.
    per_s = [0.0] * plan.num_layers
    leads = []
    for pipeline in plan.pipelines:
        lead_s = 0.0
        stages, kinds = pipeline.template.stages, pipeline.template.stage_kinds()
        for stage, kind, ranks in zip(stages, kinds, pipeline.ranks_by_stage(), strict=True):
            is_live = ranks[0] in plan.layers_by_rank
            if is_live:
                leads.append((stage, lead_s))
            for layer in range(stage.first_layer, stage.end_layer):
                profile, count = problem.profile.layers[layer], stage.num_devices
                once_s = (profile.forward_s[count] + profile.backward_s(count)) / kind.speed
                lead_s += once_s
                per_s[layer] += is_live / once_s
    if not all(per_s):
        return inf
    shares_s = (problem.num_microbatches / one for one in per_s)
    until_s = list(accumulate(shares_s, initial=0.0))
    return max(
        lead_s + until_s[stage.end_layer] - until_s[stage.first_layer] for stage, lead_s in leads
    )


def priced(problem: Problem, plan: Plan) -> Priced | None:
    """The plan with its routes, run in virtual time, with whole or with split backwards and as many
    microbatches in flight as there is memory for; None if some device has none for one."""
    return min(_priced(problem, plan), key=lambda one: one.iteration_s, default=None)


def _priced(problem: Problem, plan: Plan) -> list[Priced]:
    """With whole backwards and with split ones, where there is memory for it."""
    plan = replace(plan, ticks=stage_ticks(problem, plan))
    return [one for one in (_whole(problem, plan), _split(problem, plan)) if one is not None]


def simulated_s(problem: Problem, plan: Plan) -> float:
    """The iteration of a plan as it is, run in virtual time; memory is not looked at, nor who takes
    part silently."""
    plan = replace(plan, silent={})
    return _iteration_s(problem, plan, _schedule(problem, plan))


class Expected(NamedTuple):
    """What an iteration of a plan is expected to take where it runs.

    Attributes:
        computing_s: by rank, of its forwards and backwards; empty where each rank has processors of
            its own, for then it follows from its layers.
    """

    iteration_s: float
    computing_s: Mapping[int, float]


def expected(problem: Problem, plan: Plan) -> Expected:
    """As `simulated_s`, by ranks that share the problem's processors, if they do."""
    if not problem.processors:
        return Expected(simulated_s(problem, plan), {})
    plan = replace(plan, silent={})
    timeline = predicted_timeline(
        _schedule(problem, plan),
        problem.profile,
        plan=plan,
        reduce_bytes_factor=problem.reduce_bytes_factor,
        processors=problem.processors,
    )
    computing_s: dict[int, float] = {}
    for span in timeline.spans:
        if span.lane == "compute":
            lasts_s = span.end_s - span.start_s
            computing_s[span.rank] = computing_s.get(span.rank, 0.0) + lasts_s
    return Expected(timeline.iteration_s, computing_s)


def _whole(problem: Problem, plan: Plan) -> Priced | None:
    """With whole backwards, and what 1F1B keeps in flight where there is memory for that."""
    plan = replace(plan, splits_backward=False, in_flight={})
    schedule = _schedule(problem, plan)
    if short := _short_of_memory(problem, plan, schedule):
        plan = replace(plan, in_flight=_room(problem, plan, short))
        return _if_it_fits(problem, plan)
    return Priced(plan, _iteration_s(problem, plan, schedule))


def _split(problem: Problem, plan: Plan) -> Priced | None:
    """With split backwards, and as many microbatches in flight as there is memory for."""
    if not problem.splits_backward:
        return None
    return _if_it_fits(problem, with_split_backwards(problem, plan))


def with_split_backwards(problem: Problem, plan: Plan) -> Plan:
    """The plan with backwards in two parts, and by rank the microbatches for which it has memory
    then: none where it has too little."""
    plan = replace(plan, splits_backward=True)
    firsts = plan.layers_by_rank.keys() & _limits_bytes(problem, plan).keys()
    return replace(plan, in_flight=_room(problem, plan, sorted(firsts)))


def _if_it_fits(problem: Problem, plan: Plan) -> Priced | None:
    schedule = _schedule(problem, plan)
    # Routes that visit ranks in both orders may have been let in over the limit.
    if min(plan.in_flight.values()) < 1 or _short_of_memory(problem, plan, schedule):
        return None
    return Priced(plan, _iteration_s(problem, plan, schedule))


def _schedule(problem: Problem, plan: Plan) -> Schedule:
    return unchecked(plan, tied=problem.profile.tied, order=problem.reduction_order)


def _iteration_s(problem: Problem, plan: Plan, schedule: Schedule) -> float:
    factor = problem.reduce_bytes_factor
    timeline = predicted_timeline(schedule, problem.profile, plan=plan, reduce_bytes_factor=factor)
    return timeline.iteration_s


def _short_of_memory(problem: Problem, plan: Plan, schedule: Schedule) -> list[int]:
    """The ranks to which the schedule gives more than they can hold."""
    limits_bytes = _limits_bytes(problem, plan)
    if not any(limits_bytes.values()):
        return []
    profile, copies = problem.profile, problem.gradient_copies
    held = bytes_by_rank(profile, plan, gradient_copies=copies)
    return [
        rank
        for rank, of_rank in held.items()
        if 0 < limits_bytes[rank] < of_rank.state_bytes + kept_bytes(profile, schedule, rank)
    ]


def _room(problem: Problem, plan: Plan, ranks: Iterable[int]) -> dict[int, int]:
    """For how many microbatches each of these ranks has memory, at most all.

    Of equal bytes, that is: as if each had all layers of the rank's stage.
    """
    limits_bytes = _limits_bytes(problem, plan)
    held = bytes_by_rank(problem.profile, plan, gradient_copies=problem.gradient_copies)
    room = {}
    for rank in ranks:
        free_bytes = limits_bytes[rank] - held[rank].state_bytes
        fit = free_bytes // max(1, held[rank].microbatch_bytes)
        room[rank] = min(problem.num_microbatches, fit) if limits_bytes[rank] else len(plan.routes)
    return room


def _limits_bytes(problem: Problem, plan: Plan) -> dict[int, int]:
    """What the devices of each stage may hold, by its first rank; 0 where there is no limit."""
    return {
        ranks[0]: kind.device_memory_bytes or problem.profile.device_memory_bytes
        for pipeline in plan.pipelines
        for kind, ranks in zip(
            pipeline.template.stage_kinds(), pipeline.ranks_by_stage(), strict=True
        )
    }


# -- what stages take in the virtual time in which a schedule is put into order --------------------
# Pipelines that the planner cuts have stages that take about as long as each other, and count as
# equal. Around empty places that is not so: a rank does the work of others besides its own, and
# what it takes first decides who waits for it. (Two pipelines of three stages, the second of which
# takes half as long forward, and one rank that does it for both: 136 s an iteration, 160 s if all
# stages count as equal.)
#
# Not modelled: links within a node, which are taken for those between nodes, and links that are
# busy.

_TICKS_MAX: Final = 1000


def stage_ticks(problem: Problem, plan: Plan) -> dict[int, Ticks]:
    """By rank, what its stage takes in multiples of a thousandth of the longest of its parts."""
    at_work = plan.layers_by_rank
    all_layers, link = problem.profile.layers, problem.profile.links["inter_node"]
    seconds = {}
    for pipeline in plan.pipelines:
        stages, kinds = pipeline.template.stages, pipeline.template.stage_kinds()
        for stage, kind, ranks in zip(stages, kinds, pipeline.ranks_by_stage(), strict=True):
            layers = all_layers[stage.first_layer : stage.end_layer]
            count = stage.num_devices
            input_bytes = all_layers[stage.first_layer - 1].output_bytes if stage.first_layer else 0
            of_stage = (
                sum(layer.forward_s[count] for layer in layers) / kind.speed,
                sum(layer.backward_input_s[count] for layer in layers) / kind.speed,
                sum(layer.backward_weight_s[count] for layer in layers) / kind.speed,
                link.seconds(input_bytes),
            )
            seconds.update(dict.fromkeys((r for r in ranks if r in at_work), of_stage))
    tick_s = max(max(of_stage[:3]) for of_stage in seconds.values()) / _TICKS_MAX or 1.0
    return {
        rank: Ticks(*(round(s / tick_s) for s in of_stage)) for rank, of_stage in seconds.items()
    }
