"""In which spans of an iteration copies may go, as the plan's timeline predicts them."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from planaria.core.copies import IdleSpans, LayerCopy
from planaria.core.plan import Plan
from planaria.estimator.time import Timeline, predicted_timeline
from planaria.planner.interleave import Interval, anchored, idle_spans
from planaria.planner.problem import Problem
from planaria.schedule.action import SEND_BACKWARD, SEND_FORWARD, SHADOW, Schedule
from planaria.schedule.lower import lowered


def predicted_idle(
    problem: Problem, plan: Plan, copies: Collection[LayerCopy]
) -> tuple[IdleSpans, ...]:
    """For each node that sends copies to another: when both ways are idle. O(actions).

    Source: Gemini (SOSP '23), section 5.4, which measures them.
    Differs: known before the first iteration of a plan; and the receiver's way in counts.
    """
    profile = problem.profile
    plan = replace(
        plan, silent={}
    )  # Who is silent waits for nothing that copies could be late for.
    schedule = lowered(plan, tied=profile.tied, order=problem.reduction_order)
    timeline = predicted_timeline(
        schedule, profile, plan=plan, reduce_bytes_factor=problem.reduce_bytes_factor
    )
    devices_per_node = plan.pipelines[0].template.devices_per_node
    out, into, ends_s = _taken(schedule, timeline, devices_per_node)
    pairs = sorted({(copy.source, target) for copy in copies for target in copy.targets})
    return tuple(
        IdleSpans(source, target, anchored(idle, sorted(ends_s[source])))
        for source, target in pairs
        for idle in [idle_spans([*out[source], *into[target]], end_s=timeline.iteration_s)]
    )


_ByRank = defaultdict[int, list[Interval]]


def _taken(
    schedule: Schedule, timeline: Timeline, devices_per_node: int
) -> tuple[_ByRank, _ByRank, defaultdict[int, list[float]]]:
    """By rank: when its way out and its way in are taken, and when what it computes ends."""
    out: _ByRank = defaultdict(list)
    into: _ByRank = defaultdict(list)
    ends_s: defaultdict[int, list[float]] = defaultdict(list)

    def is_far(ranks: Sequence[int]) -> bool:
        return len({rank // devices_per_node for rank in ranks}) > 1

    for rank, lane, action, start_s, end_s in timeline.spans:
        if lane == "compute":
            if action.kind is not SHADOW:
                ends_s[rank].append(end_s)
        elif lane == "send" and action.kind in (SEND_FORWARD, SEND_BACKWARD):
            onward = 1 if action.kind is SEND_FORWARD else -1
            target = schedule.routes[action.microbatch][action.hop + onward].rank
            if is_far([rank, target]):
                out[rank].append((start_s, end_s))
                into[target].append((start_s, end_s))
        elif lane == "reduce" and is_far(schedule.buckets[action.bucket].ranks):
            out[rank].append((start_s, end_s))
            into[rank].append((start_s, end_s))
    return out, into, ends_s
