"""Which nodes are slow, found by the seconds that they compute, normalised by their work.

The work of a rank is the profile's seconds of its layers, with what it computes again to save
memory, times its microbatches. Its ratio is the seconds that it computed, divided by its work. A
node's slowness is its ratio divided by the usual ratio, which is the median of all ranks, or the
median of the holders of the same layers if that is larger. So a profile that is wrong, for all
layers or for some, makes no node slow. In turn, nodes are not found slow if all holders of a layer
are slow and most other ranks are not.

A slowness is believed only under these conditions:
- It lasts: WINDOW iterations in a row are above the believed slowness by SLOW_FACTOR, or below it
  by BACK_FACTOR. A stall, of whatever length, is in one iteration. The first iteration of an epoch
  does not count, because its caches are cold.
- The median rank computes for at least COMPUTING_S_MIN, because ranks that share cores wait for
  time slices of some milliseconds.
- It is rounded to steps of 2 ** (1 / 16), the noise of a few percent. So nodes that are nearly
  alike are of one kind, and the same seconds measured again change nothing.

The speed of a slow node without work cannot be measured. After RETRY_S, doubled each time, it is
assumed to be fast. If it is, it gets work and keeps it; if not, it is found slow once more.

Source: the thresholds are from the runs in docs/LOG.md.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import log2
from statistics import median, median_low
from typing import Final

import msgspec

from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import JobState
from planaria.core.plan import ModelProfile, Plan

WINDOW: Final = 5
SLOW_FACTOR: Final = 1.3  # Six processes on two busy cores differ by up to 1.2 now and then.
BACK_FACTOR: Final = 1.2
COMPUTING_S_MIN: Final = 0.05
RETRY_S: Final = 300.0  # A retry costs half a dozen slow iterations.
_DOUBLINGS_MAX: Final = 20
_STEPS: Final = 16  # Number of steps from one speed to half of it.


def with_speeds(rules: Rules, state: JobState, now_s: float) -> JobState:
    """The state with the speeds that follow from the reports of the iteration to be committed."""
    commits, outcome = state.commits, state.commits.outcome
    assert outcome is not None
    if rules.profile is None:
        return state
    state = _with_retries(state, now_s)
    if commits.next_iteration <= outcome.iteration:
        return state
    reports = commits.reports_of(commits.next_iteration)
    computing_s = {rank: report.computing_s for rank, report in reports.items()}
    newest = slowness_by_node(state.plan, computing_s, profile=rules.profile, speeds=state.speeds)
    before = state.facts.ratios
    ratios = {node: (*before.get(node, ()), ratio)[-WINDOW:] for node, ratio in newest.items()}
    speeds = dict(state.speeds)
    for node, window in ratios.items():
        slowness = believed_slowness(1.0 / speeds.pop(node, 1.0), window)
        if slowness > 1.0:
            speeds[node] = 1.0 / slowness
    state = replace(state, facts=replace(state.facts, ratios=ratios))
    return _with_slow_nodes(state, speeds, dict(state.idle))


def _with_retries(state: JobState, now_s: float) -> JobState:
    """The state that has forgotten the speeds of nodes without work that are due for a retry."""
    waiting = [node for node in state.speeds if node not in state.plan.nodes]
    idle, speeds = dict(state.idle), dict(state.speeds)
    for node in waiting:
        times, since_s = idle.get(node, (0, 0.0))
        idle[node] = (times, since_s or now_s)
        if since_s and now_s - since_s >= RETRY_S * 2.0 ** min(times, _DOUBLINGS_MAX):
            idle[node] = (times + 1, 0.0)
            del speeds[node]
    return _with_slow_nodes(state, speeds, idle) if waiting else state


def with_joining_speeds(state: JobState, nodes: Collection[int]) -> JobState:
    """The state with the speeds of those candidates that are among `nodes` and become members."""
    candidates = state.membership.candidates
    joining = {n: waits.speed for n, waits in candidates.items() if n in nodes}
    slow = {node: speed for node, speed in joining.items() if speed < 1.0}
    return _with_slow_nodes(state, {**state.speeds, **slow}, dict(state.idle)) if slow else state


def without_former_members(state: JobState) -> JobState:
    """The state that has forgotten the findings on nodes that are no members."""
    speeds = {node: speed for node, speed in state.speeds.items() if node in state.nodes}
    idle = {node: tried for node, tried in state.idle.items() if node in state.nodes}
    return _with_slow_nodes(state, speeds, idle)


def _with_slow_nodes(
    state: JobState, speeds: dict[int, float], idle: dict[int, tuple[int, float]]
) -> JobState:
    """The state with these speeds, and these times without work, of slow nodes."""
    findings = msgspec.structs.replace(state.learning.findings, speeds=speeds, idle=idle)
    return replace(state, learning=replace(state.learning, findings=findings))


def slowness_by_node(
    plan: Plan,
    computing_s: Mapping[int, float],
    *,
    profile: ModelProfile,
    speeds: Mapping[int, float],
) -> dict[int, float]:
    """The slowness of each node that computed, 1 being usual; empty if they computed too shortly.

    Args:
        computing_s: seconds that each rank computed in one iteration.
        speeds: speeds of nodes known to be slow. Their ratios are corrected by the speed before
            other nodes are compared with them.
    """
    layer_s = _layer_s_by_rank(plan, profile)
    work_s = _work_s(plan, layer_s)
    ratios = {r: computing_s[r] / s for r, s in work_s.items() if s > 0.0 and r in computing_s}
    if not ratios or median_low(computing_s[rank] for rank in ratios) < COMPUTING_S_MIN:
        return {}
    per_node = plan.devices_per_node
    corrected = _without_slowness(
        ratios, {rank: speeds.get(rank // per_node, 1.0) for rank in ratios}
    )
    usual = median_low(corrected.values())
    took_s: defaultdict[int, float] = defaultdict(float)
    usual_s: defaultdict[int, float] = defaultdict(float)
    layers_of = plan.layers_by_rank
    of_holders: list[list[float]] = [[] for _ in profile.layers]
    for rank, ratio in sorted(corrected.items(), key=lambda item: item[1]):
        for layer in layers_of[rank]:
            of_holders[layer].append(ratio)
    for rank in ratios:
        in_seconds = {layer: layer_s[rank][layer] for layer in layers_of[rank]}
        peers = _usual_of_peers(corrected[rank], in_seconds, of_holders, usual=usual)
        took_s[rank // per_node] += computing_s[rank]
        usual_s[rank // per_node] += max(usual, peers) * work_s[rank]
    return {node: took / usual_s[node] for node, took in took_s.items() if usual_s[node] > 0.0}


def believed_slowness(before: float, window: Sequence[float]) -> float:
    """The slowness to believe of a node, at least 1.

    Args:
        before: slowness believed so far.
        window: measured slowness in the newest iterations.
    """
    has_changed = min(window) >= before * SLOW_FACTOR or max(window) * BACK_FACTOR <= before
    if len(window) < WINDOW or not has_changed:
        return before
    return known_slowness(median(window))


def known_slowness(slowness: float) -> float:
    """A measured slowness in the steps in which slowness is known; 1 if the node is hardly slow."""
    steps = round(_STEPS * log2(max(1.0, slowness)))
    stepped = float(2.0 ** (steps / _STEPS))
    return stepped if stepped >= BACK_FACTOR else 1.0


def work_s_by_rank(plan: Plan, profile: ModelProfile) -> dict[int, float]:
    """The work of each rank in one iteration, in seconds by the profile."""
    return _work_s(plan, _layer_s_by_rank(plan, profile))


def _work_s(plan: Plan, layer_s: Mapping[int, Sequence[float]]) -> dict[int, float]:
    work_s: defaultdict[int, float] = defaultdict(float)
    for route, count in Counter(plan.routes).items():
        for hop in route:
            work_s[hop.rank] += count * sum(layer_s[hop.rank][hop.first_layer : hop.end_layer])
    return work_s


def _layer_s_by_rank(plan: Plan, profile: ModelProfile) -> dict[int, Sequence[float]]:
    """The seconds of each layer for a microbatch, with what a rank computes again, by rank."""
    usual_s = profile.layer_s
    by_rank: dict[int, Sequence[float]] = dict.fromkeys(plan.all_ranks, usual_s)
    for rank, modes in plan.recomputation_by_rank.items():
        own_s = list(usual_s)
        for layer, mode in modes.items():
            again = profile.layers[layer].recomputing(mode)
            own_s[layer] = again.forward_s[1] + again.backward_s(1)
        by_rank[rank] = own_s
    return by_rank


def _without_slowness(ratios: Mapping[int, float], speeds: Mapping[int, float]) -> dict[int, float]:
    """The ratios that ranks would have if no node were slow.

    A node that was slow may be fast again, so no ratio is lowered below the usual one.
    """
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
    """The median ratio of other holders of a rank's layers, averaged over layers by their seconds.

    Args:
        ratio: ratio of the rank itself.
        seconds: seconds of each of its layers.
        of_holders: ratios of all holders of each layer, ascending.
        usual: ratio that is used for a layer without other holders.
    """
    total_s = sum(seconds.values())
    if not total_s:
        return usual
    weighted_s = 0.0
    for layer, layer_s in seconds.items():
        ratios = of_holders[layer]
        middle = (len(ratios) - 2) // 2  # The low median of the others, in their own numbering.
        middle += middle >= bisect_left(ratios, ratio)
        weighted_s += layer_s * (ratios[middle] if len(ratios) > 1 else usual)
    return weighted_s / total_s
