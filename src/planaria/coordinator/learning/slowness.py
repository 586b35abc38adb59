"""Which nodes are slow: the seconds that they compute, normalised by their work.

The work of a rank is what the profile says of its layers, times its microbatches; its ratio is what
it took over that. A node is so many times slower than usual as its ratio is above what is usual:
the median of all ranks, or that of those that hold the same layers, if that is more. So a profile
that is wrong, for all layers or for some, makes nobody slow; nor does it tell if all holders of a
layer are slow, while most others are not.

It is believed when it lasts:
- WINDOW iterations in a row are beyond SLOW_FACTOR, or back by BACK_FACTOR. A stall, of whatever
  length, is one iteration. The first iteration of an epoch does not count: its caches are cold.
- COMPUTING_S_MIN, for ranks that share cores wait for slices of some milliseconds.
- What is believed is a step of 2 ** (1 / 16), the noise of a few percent: nodes that are nearly
  alike are of one kind, and the same seconds measured again are no news.

A slow node that has no work tells nothing of its speed. It is taken for as fast as any after
RETRY_S, doubled each time: if it is, it gets work and keeps it, else it is found slow once more.

Source: DESIGN 3 (node kinds); thresholds from the runs in docs/LOG.md.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from statistics import median, median_low
from typing import Final

import msgspec

from planaria.coordinator.state import JobState, Rules
from planaria.core.plan import Plan

WINDOW: Final = 5
SLOW_FACTOR: Final = 1.3  # Six processes on two busy cores differ by up to 1.2 now and then.
BACK_FACTOR: Final = 1.2
COMPUTING_S_MIN: Final = 0.05
RETRY_S: Final = 300.0  # Finding out takes half a dozen slow iterations.
_DOUBLINGS_MAX: Final = 20
_STEPS: Final = 16  # From one speed to its half.


def observed(rules: Rules, state: JobState, now_s: float) -> JobState:
    """The state with what the reports of the iteration that is about to be committed tell."""
    outcome = state.outcome
    assert outcome is not None
    if not rules.layer_s:
        return state
    state = _retried(state, now_s)
    if state.next_iteration <= outcome.iteration:
        return replace(state, ratios={})
    reports = state.reports_of(state.next_iteration)
    computing_s = {rank: report.computing_s for rank, report in reports.items()}
    found = slowness_by_node(state.plan, computing_s, layer_s=rules.layer_s, speeds=state.speeds)
    ratios = {node: (*state.ratios.get(node, ()), ratio)[-WINDOW:] for node, ratio in found.items()}
    speeds = dict(state.speeds)
    for node, window in ratios.items():
        slowness = believed_slowness(1.0 / speeds.pop(node, 1.0), window)
        if slowness > 1.0:
            speeds[node] = 1.0 / slowness
    return _with(replace(state, ratios=ratios), speeds, dict(state.idle))


def _retried(state: JobState, now_s: float) -> JobState:
    """The state without the speeds of nodes that have waited for work long enough."""
    waiting = [node for node in state.speeds if node not in state.plan.nodes]
    idle, speeds = dict(state.idle), dict(state.speeds)
    for node in waiting:
        times, since_s = idle.get(node, (0, 0.0))
        idle[node] = (times, since_s or now_s)
        if since_s and now_s - since_s >= RETRY_S * 2.0 ** min(times, _DOUBLINGS_MAX):
            idle[node] = (times + 1, 0.0)
            del speeds[node]
    return _with(state, speeds, idle) if waiting else state


def of_members(state: JobState) -> JobState:
    """The state in which nothing is known of nodes that are gone."""
    speeds = {node: speed for node, speed in state.speeds.items() if node in state.nodes}
    idle = {node: tried for node, tried in state.idle.items() if node in state.nodes}
    return _with(state, speeds, idle)


def _with(
    state: JobState, speeds: dict[int, float], idle: dict[int, tuple[int, float]]
) -> JobState:
    """The state in which nodes are as fast, and have been without work as long."""
    findings = msgspec.structs.replace(state.learning.findings, speeds=speeds, idle=idle)
    return replace(state, learning=replace(state.learning, findings=findings))


def slowness_by_node(
    plan: Plan,
    computing_s: Mapping[int, float],
    *,
    layer_s: Sequence[float],
    speeds: Mapping[int, float],
) -> dict[int, float]:
    """How many times as long as usual each node took that computed; empty if that was too short.

    Args:
        computing_s: by rank, in one iteration.
        layer_s: of each layer, for one microbatch, as the profile says.
        speeds: of nodes that are known to be slow, to whom nobody is compared as they are.
    """
    work_s = work_s_by_rank(plan, layer_s)
    ratios = {r: computing_s[r] / s for r, s in work_s.items() if s > 0.0 and r in computing_s}
    if not ratios or median_low(computing_s[rank] for rank in ratios) < COMPUTING_S_MIN:
        return {}
    per_node = plan.pipelines[0].template.devices_per_node
    known = _without_slowness(ratios, {rank: speeds.get(rank // per_node, 1.0) for rank in ratios})
    usual = median_low(known.values())
    took_s: defaultdict[int, float] = defaultdict(float)
    usual_s: defaultdict[int, float] = defaultdict(float)
    layers_of = plan.layers_by_rank
    of_holders: list[list[float]] = [[] for _ in layer_s]
    for rank, ratio in sorted(known.items(), key=lambda item: item[1]):
        for layer in layers_of[rank]:
            of_holders[layer].append(ratio)
    for rank in ratios:
        in_seconds = {layer: layer_s[layer] for layer in layers_of[rank]}
        peers = _usual_of_peers(known[rank], in_seconds, of_holders, usual=usual)
        took_s[rank // per_node] += computing_s[rank]
        usual_s[rank // per_node] += max(usual, peers) * work_s[rank]
    return {node: took / usual_s[node] for node, took in took_s.items() if usual_s[node] > 0.0}


def believed_slowness(before: float, window: Sequence[float]) -> float:
    """How many times as long as usual a node takes, 1 or more, if so it was before."""
    has_changed = min(window) >= before * SLOW_FACTOR or max(window) * BACK_FACTOR <= before
    if len(window) < WINDOW or not has_changed:
        return before
    steps = round(_STEPS * log2(max(1.0, median(window))))
    slowness = float(2.0 ** (steps / _STEPS))
    return slowness if slowness >= BACK_FACTOR else 1.0


def work_s_by_rank(plan: Plan, layer_s: Sequence[float]) -> dict[int, float]:
    """Of each rank, in one iteration."""
    work_s: defaultdict[int, float] = defaultdict(float)
    for route, count in Counter(plan.routes).items():
        for hop in route:
            work_s[hop.rank] += count * sum(layer_s[hop.first_layer : hop.end_layer])
    return work_s


def _without_slowness(ratios: Mapping[int, float], speeds: Mapping[int, float]) -> dict[int, float]:
    """The ratios as if all were as fast; who was slow may not be any more."""
    fast = [ratio for rank, ratio in ratios.items() if speeds[rank] >= 1.0]
    usual = median_low(fast or [ratio * speeds[rank] for rank, ratio in ratios.items()])
    return {r: max(ratio * speeds[r], min(ratio, usual)) for r, ratio in ratios.items()}


def _usual_of_peers(
    ratio: float,
    seconds: Mapping[int, float],
    of_holders: Sequence[Sequence[float]],
    *,
    usual: float,
) -> float:
    """The ratio that other holders of a rank's layers have, each layer by its seconds.

    Args:
        ratio: of the rank itself.
        seconds: of its layers.
        of_holders: by layer the ratios of all holders, ascending.
    """
    total_s = sum(seconds.values())
    if not total_s:
        return usual
    weighted_s = 0.0
    for layer, layer_s in seconds.items():
        ratios = of_holders[layer]
        middle = (len(ratios) - 2) // 2  # The low median of those that are left without this one.
        middle += middle >= bisect_left(ratios, ratio)
        weighted_s += layer_s * (ratios[middle] if len(ratios) > 1 else usual)
    return weighted_s / total_s
