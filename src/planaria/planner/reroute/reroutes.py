"""Routes around empty places: which ranks compute what the lost nodes would have computed.

A microbatch begins in some pipeline, its home, and stays on its stages where their nodes live. The
layers of empty places are computed by other holders, each as far as its stage goes: in one hop
where a peer's stage has the same boundaries, in several hops where they differ. No parameter moves.

1. Microbatches are assigned one by one. Each takes the home and the detours with which the rank
   that ends last ends earliest. The end of a rank is the seconds of all its work, plus those that a
   microbatch needs to get to its stage and back. So detours go to ranks that have time, and fewer
   microbatches begin in pipelines with empty places.
2. Variants are made in which a few more or fewer microbatches begin in pipelines with empty places,
   or microbatches are numbered in reverse. Each is simulated in virtual time and the fastest is
   taken, because a schedule has gaps that loads do not show.
3. If the routes have few enough hops, other orders of actions are searched, starting from the
   fastest plans (planner/reroute/orders.py).

Source: ReCycle (SOSP '24), adaptive pipelining.
Differs: in ReCycle a microbatch stays in its pipeline, peers of the lost stage take equal parts,
and all pipelines have the same partition. Odyssey's equation 13 adds up times of stages that
overlap in fact; here the most loaded rank counts, and then the schedule itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf, nextafter
from typing import Final, NamedTuple

from planaria.core.plan import Plan, Route, Ticks, stage_layers
from planaria.estimator.peak_memory import WorkBytes, bytes_by_rank
from planaria.estimator.time import least_times, predicted_timeline
from planaria.estimator.work_times import WorkTimes
from planaria.planner.problem import Problem
from planaria.planner.reroute.detours import Detours
from planaria.planner.reroute.orders import PATIENCE, best_order
from planaria.schedule.action import SHADOW, Schedule
from planaria.schedule.lower import unchecked_schedule
from planaria.schedule.routed import RoutedWork, routed_work

TRIES_HOPS_MAX: Final = 1 << 10  # Bound on hops of all variants of step 2, some 50 ms.
HOPS_MAX: Final = 1 << 14  # Bound on hops with step 3, which takes half a second.
_STARTS_MAX: Final = 3  # Number of plans from which step 3 starts.


class PricedPlan(NamedTuple):
    """A plan and its predicted iteration time."""

    plan: Plan
    iteration_s: float


def best_reroute(
    problem: Problem,
    plan: Plan,
    *,
    hops_max: int = HOPS_MAX,
    below_s: float = inf,
    known: PricedPlan | None = None,
) -> PricedPlan | None:
    """The fastest plan with routes around its empty places, of those that leave the fewest stages
    without work.

    Where a device has no memory for as many microbatches in flight as its schedule would keep, it
    keeps fewer.

    Args:
        plan: plan with empty places; its own routes do not matter.
        hops_max: approximate bound on hops that are simulated, over all plans. The routes of step 1
            are always simulated; with 0 there are no others, and up to TRIES_HOPS_MAX no step 3.
        below_s: seconds of an iteration from which on a plan is of no use, so that it need not be
            simulated.
        known: result with hops_max = 0; None if it has to be found.

    Returns:
        None if a layer is in empty places only, some device has no memory for one microbatch, or a
        bound shows that no plan is faster than below_s.
    """
    detours = Detours(problem, plan)
    if not detours.covers_model():
        return None
    first = known.plan.routes if known else detours.routes(problem.num_microbatches, None)
    num_hops = sum(map(len, first))
    num_variants = max(1, min(hops_max, TRIES_HOPS_MAX) // num_hops)
    variants = [
        replace(plan, routes=routes)
        for routes in _route_variants(problem, detours, first, num_variants)
    ]
    pricing = _Pricing(problem, plan)
    num_runs = (hops_max - TRIES_HOPS_MAX) // num_hops
    if num_runs < PATIENCE:  # So few runs would find nothing better.
        return _fastest_variant(pricing, variants, below_s=below_s, known=known)
    prices = [price for variant in variants for price in pricing.prices(variant)]
    if not prices:
        return None
    prices.sort(
        key=lambda priced_plan: (num_without_work(priced_plan.plan), priced_plan.iteration_s)
    )
    num_idle = num_without_work(prices[0].plan)
    starts = [
        priced_plan.plan for priced_plan in prices if num_without_work(priced_plan.plan) == num_idle
    ]
    return _best_reordering(pricing, starts[:_STARTS_MAX], num_runs)


def simulates_more(plan: Plan, *, hops_max: int) -> bool:
    """Whether `best_reroute` simulates more routes or orders with hops_max than with 0, where plan
    has the routes of step 1."""
    num_hops = sum(map(len, plan.routes))
    has_variants = min(hops_max, TRIES_HOPS_MAX) // num_hops > 1
    return has_variants or (hops_max - TRIES_HOPS_MAX) // num_hops >= PATIENCE


def _fastest_variant(
    pricing: "_Pricing", variants: Sequence[Plan], *, below_s: float, known: PricedPlan | None
) -> PricedPlan | None:
    """The first of the fastest plans that leave the fewest stages without work.

    What a bound shows to be slower than a plan that was simulated before is not simulated.

    Args:
        known: price of the first variant, if that is known.
    """
    best = known
    fewest = num_without_work(known.plan) if known else 0
    for variant in variants[1:] if known else variants:
        num_idle = num_without_work(variant)
        if best is not None and num_idle > fewest:
            continue
        limit_s = best.iteration_s if best is not None and num_idle == fewest else below_s
        faster = pricing.fastest(variant, below_s=limit_s)
        is_first = best is None or num_idle < fewest
        if faster is not None and (is_first or faster.iteration_s < limit_s):
            best, fewest = faster, num_idle
    return best


def _route_variants(
    problem: Problem, detours: Detours, first: tuple[Route, ...], num_variants: int
) -> list[tuple[Route, ...]]:
    """The given routes, variants that begin in other pipelines, and each of them in reverse order;
    at most num_variants in all."""
    num_around = detours.num_around(first)
    nearest_numbers = [
        num_around + sign * step for step in range(1, num_variants) for sign in (-1, 1)
    ]
    possible = [
        number
        for number in nearest_numbers
        if detours.can_begin_around(problem.num_microbatches, number)
    ]
    others = [
        detours.routes(problem.num_microbatches, number) for number in possible[: num_variants - 1]
    ]
    variants = [first, first[::-1], *others, *(routes[::-1] for routes in others)]
    return list(dict.fromkeys(variants[:num_variants]))  # With few microbatches many are equal.


def _best_reordering(pricing: "_Pricing", starts: Sequence[Plan], num_runs: int) -> PricedPlan:
    def iteration_s(plan: Plan) -> float:
        work = routed_work(plan)
        return inf if pricing.ranks_short_of_memory(plan, work) else pricing.iteration_s(plan, work)

    plan = best_order(starts, num_runs=num_runs, iteration_s=iteration_s)
    return PricedPlan(plan, iteration_s(plan))


def num_without_work(plan: Plan) -> int:
    """How many stages in live places compute no microbatch."""
    visited = {hop.rank for route in plan.different_routes for hop in route}
    firsts = [ranks[0] for pipeline in plan.pipelines for ranks in pipeline.ranks_by_stage()]
    return sum(rank in plan.layers_by_rank and rank not in visited for rank in firsts)


def even_work_s(problem: Problem, plan: Plan) -> float:
    """Seconds until the last rank would end if all holders of a layer shared its work, each in
    proportion to its speed.

    Infinite if a layer has no holder. This is the aim of step 1 of `best_reroute`, computed in
    O(layers * pipelines).
    """
    # per_s: for each layer, how many microbatches all its holders together compute in a second.
    # leads: for each live stage, the seconds of a microbatch in the stages before it.
    per_s = [0.0] * plan.num_layers
    leads = []
    for pipeline in plan.pipelines:
        lead_s = 0.0
        stages, kinds = pipeline.template.stages, pipeline.template.stage_kinds()
        for stage, kind, ranks in zip(stages, kinds, pipeline.ranks_by_stage(), strict=True):
            is_live = ranks[0] in plan.layers_by_rank
            if is_live:
                leads.append((stage, lead_s))
            for layer, profile in enumerate(
                stage_layers(problem.profile, stage), start=stage.first_layer
            ):
                count = stage.num_devices
                once_s = (profile.forward_s[count] + profile.backward_s(count)) / kind.speed
                lead_s += once_s
                # A layer may take no time; its holders finish any number of microbatches.
                per_s[layer] += is_live and (1.0 / once_s if once_s else inf)
    if not all(per_s):
        return inf
    shares_s = (problem.num_microbatches / per_second for per_second in per_s)
    until_s = list(accumulate(shares_s, initial=0.0))
    return max(
        lead_s + until_s[stage.end_layer] - until_s[stage.first_layer] for stage, lead_s in leads
    )


class _Pricing:
    """Prices of plans that differ in their routes and in the order of their work alone.

    Args:
        plan: one of these plans.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._problem = problem
        self._times = WorkTimes(
            problem.profile,
            plan,
            order=problem.reduction_order,
            reduce_bytes_factor=problem.reduce_bytes_factor,
        )
        self._bytes = WorkBytes(problem.profile, plan)
        limits_bytes = _limits_bytes(problem, plan)
        bytes_of = bytes_by_rank(problem.profile, plan, gradient_copies=problem.gradient_copies)
        # By the first rank of each stage that has a limit: what is left for microbatches.
        self._free_bytes = {
            rank: limits_bytes[rank] - rank_bytes.state_bytes
            for rank, rank_bytes in bytes_of.items()
            if limits_bytes[rank]
        }

    def fastest(self, plan: Plan, *, below_s: float) -> PricedPlan | None:
        """The faster of `prices`; it may be None if no price is below below_s."""
        problem = self._problem
        plan = replace(plan, ticks=stage_ticks(problem, plan))
        split: PricedPlan | None = None
        least = least_times(problem.profile, plan)
        if least.split_s < below_s:
            split = self._price_with_split_backwards(plan)
        limit_s = below_s if split is None else min(below_s, nextafter(split.iteration_s, inf))
        if least.whole_s < limit_s:
            whole = self._price_with_whole_backwards(plan)
            if whole is not None and (split is None or whole.iteration_s <= split.iteration_s):
                return whole
        return split

    def prices(self, plan: Plan) -> list[PricedPlan]:
        """The plan with whole backwards and with split ones; those that do not fit are left out."""
        plan = replace(plan, ticks=stage_ticks(self._problem, plan))
        prices = (self._price_with_whole_backwards(plan), self._price_with_split_backwards(plan))
        return [priced_plan for priced_plan in prices if priced_plan is not None]

    def iteration_s(self, plan: Plan, work: RoutedWork) -> float:
        """Seconds of an iteration."""
        if not plan.shadows:
            return self._times.iteration_s(plan.routes, work)
        problem = self._problem
        return predicted_timeline(
            _schedule(problem, plan),
            problem.profile,
            plan=plan,
            reduce_bytes_factor=problem.reduce_bytes_factor,
        ).iteration_s

    def ranks_short_of_memory(self, plan: Plan, work: RoutedWork) -> list[int]:
        """The first ranks of the stages that would need more memory than they have."""
        if not self._free_bytes:
            return []
        kept_bytes = self._bytes.most_kept(plan.routes, work)
        return [rank for rank, free in self._free_bytes.items() if free < kept_bytes[rank]]

    def _price_with_whole_backwards(self, plan: Plan) -> PricedPlan | None:
        """The plan with whole backwards, or None if it does not fit.

        As many microbatches are in flight as in 1F1B, or fewer on ranks that lack the memory.
        """
        plan = replace(plan, splits_backward=False, in_flight={})
        work = routed_work(plan)
        if short := self.ranks_short_of_memory(plan, work):
            plan = replace(plan, in_flight=_max_in_flight(self._problem, plan, short))
            return self._price_if_it_fits(plan)
        return PricedPlan(plan, self.iteration_s(plan, work))

    def _price_with_split_backwards(self, plan: Plan) -> PricedPlan | None:
        """The plan with split backwards and as many microbatches in flight as there is memory for,
        or None if it does not fit."""
        if not self._problem.splits_backward or plan.recomputation_by_rank:
            return None
        return self._price_if_it_fits(with_split_backwards(self._problem, plan))

    def _price_if_it_fits(self, plan: Plan) -> PricedPlan | None:
        if min(plan.in_flight.values()) < 1:
            return None
        work = routed_work(plan)
        # Where routes visit two ranks in both orders, the schedule may exceed the limits in flight.
        if self.ranks_short_of_memory(plan, work):
            return None
        return PricedPlan(plan, self.iteration_s(plan, work))


def price_plan(problem: Problem, plan: Plan) -> PricedPlan | None:
    """The plan with its own routes, with whole or split backwards, whichever is faster.

    At most as many microbatches are in flight as there is memory for; None if some device has no
    memory for one.
    """
    prices = _Pricing(problem, plan).prices(plan)
    return min(prices, key=lambda priced_plan: priced_plan.iteration_s, default=None)


def simulated_s(problem: Problem, plan: Plan) -> float:
    """Iteration time of an unchanged plan, simulated in virtual time; memory limits and silent
    ranks are ignored."""
    plan = replace(plan, silent={})
    return _Pricing(problem, plan).iteration_s(plan, routed_work(plan))


class ExpectedTimes(NamedTuple):
    """The times of an iteration that are expected on the machines of the job.

    Attributes:
        iteration_s: seconds of the iteration.
        computing_s: seconds of the forwards and backwards of each rank, by rank, without eager
            forwards, as ranks report them. Empty where each rank has processors of its own, because
            there they follow from its layers.
    """

    iteration_s: float
    computing_s: Mapping[int, float]


def expected_times(problem: Problem, plan: Plan) -> ExpectedTimes:
    """Times of an iteration, simulated as by `simulated_s`, but with ranks that share the problem's
    processors if it has any."""
    if not problem.processors:
        return ExpectedTimes(simulated_s(problem, plan), {})
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
        if span.lane == "compute" and span.action.kind is not SHADOW:
            duration_s = span.end_s - span.start_s
            computing_s[span.rank] = computing_s.get(span.rank, 0.0) + duration_s
    return ExpectedTimes(timeline.iteration_s, computing_s)


def with_split_backwards(problem: Problem, plan: Plan) -> Plan:
    """The plan with split backwards. Its in_flight has, by the first rank of each live stage, the
    number of microbatches for which there is memory; below 1 if there is too little for one."""
    plan = replace(plan, splits_backward=True)
    firsts = plan.layers_by_rank.keys() & _limits_bytes(problem, plan).keys()
    return replace(plan, in_flight=_max_in_flight(problem, plan, sorted(firsts)))


def _schedule(problem: Problem, plan: Plan) -> Schedule:
    return unchecked_schedule(plan, tied=problem.profile.tied, order=problem.reduction_order)


def _max_in_flight(problem: Problem, plan: Plan, ranks: Iterable[int]) -> dict[int, int]:
    """The number of microbatches for which each of these ranks has memory, at most all.

    Every microbatch is counted as if the rank computed all layers of its stage for it.
    """
    limits_bytes = _limits_bytes(problem, plan)
    bytes_of = bytes_by_rank(problem.profile, plan, gradient_copies=problem.gradient_copies)
    limits = {}
    for rank in ranks:
        free_bytes = limits_bytes[rank] - bytes_of[rank].state_bytes
        num_that_fit = free_bytes // max(1, bytes_of[rank].microbatch_bytes)
        limits[rank] = (
            min(problem.num_microbatches, num_that_fit) if limits_bytes[rank] else len(plan.routes)
        )
    return limits


def _limits_bytes(problem: Problem, plan: Plan) -> dict[int, int]:
    """Memory limit of each device of a stage, by the stage's first rank; 0 where there is none."""
    return {
        ranks[0]: kind.device_memory_bytes or problem.profile.device_memory_bytes
        for pipeline in plan.pipelines
        for kind, ranks in zip(
            pipeline.template.stage_kinds(), pipeline.ranks_by_stage(), strict=True
        )
    }


# -- times of stages in the virtual time in which a schedule is put into order ---------------------
# The stages of a pipeline that the planner has cut take about the same time, so the schedule may
# count them as equal. Around empty places that is not so: a rank does the work of others besides
# its own, and what it does first decides which ranks wait for it. (Example: two pipelines of three
# stages, of which the second takes half as long forward, and one rank that computes it for both. An
# iteration takes 136 s, and 160 s if all stages count as equal.)
#
# Not modelled: links within a node, which are counted as links between nodes, and busy links.

_TICKS_MAX: Final = 1000


def stage_ticks(problem: Problem, plan: Plan) -> dict[int, Ticks]:
    """Times of the stage of each rank, by rank; the unit is a thousandth of the longest forward or
    part of a backward of all stages."""
    at_work = plan.layers_by_rank
    all_layers, link = problem.profile.layers, problem.profile.links["inter_node"]
    seconds = {}
    for pipeline in plan.pipelines:
        stages, kinds = pipeline.template.stages, pipeline.template.stage_kinds()
        for stage, kind, ranks in zip(stages, kinds, pipeline.ranks_by_stage(), strict=True):
            layers = stage_layers(problem.profile, stage)
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
