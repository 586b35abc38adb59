"""The cost of a recovery, and of a switch, as this job has measured it.

From the time at which all are told an answer until every rank can go on, a recovery takes

    overhead_s + schedules_s + factor * transfer_s

`transfer_s` is the time of the bytes on the busiest link (policies/building.py), by the profile, or
by what links have carried (link_speeds.py). It takes longer in truth, because modules are built for
the layers, bytes are hashed, and links are shared. The factor is learned from the newest recoveries
in which layers moved:

    (0.02 s + sum of what they took) / (0.02 s + sum of their transfer_s)

The 0.02 s are a prior, so that a few bytes, which take as long as a message, hardly count.

`schedules_s` is the time in which each rank computes its schedule, from all hops of microbatches in
its pipeline: 32 hops in one of many short pipelines, a thousand where routes join all pipelines.
The processor time for each hop is measured in each epoch. Emulated nodes share few processors.

`overhead_s` is all the rest, whichever layers move: sending the order, making links, starting the
ranks. It depends on machines, nodes and model, so it is measured in each recovery, as the total
time less that of schedules and layers. The next recovery is priced at the median of the newest
ones. Before the first recovery a fixed prior is used for sending the order, and another for the
computing of each rank and its agent. The first recovery takes longer by a quarter of its schedules,
because no cache knows the plan yet; the larger the plan, the longer.

A change has no such overhead, but a pause at each of its switches, which is measured likewise.
Before the first switch the pause is expected to be 1.5 times the time of the schedules.

Differs: Odyssey prices transitions by bytes alone; its constant is not stated.
"""

from collections.abc import Collection
from statistics import median
from typing import Final

import msgspec

from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.link_speeds import measured_prices, with_link_speeds
from planaria.coordinator.state import JobState
from planaria.core.messages import EpochReady, StartEpoch
from planaria.core.plan import Link, Plan, Transition
from planaria.policies.building import scheduling_s, transfer_s
from planaria.policies.policy import Prices

NUM_NEWEST: Final = 5
PRIOR_TRANSFER_S: Final = 0.02
# These were measured on 8 and 32 nodes, see docs/LOG.md.
RANK_S: Final = 0.0023  # Computing of a rank and its agent besides its schedule.
FIRST_RECOVERY: Final = 1.25
FIRST_SWITCH: Final = 1.5


def prices_of(rules: Rules, state: JobState) -> Prices:
    """The prices of a recovery, as far as the job has measured them; else those of the profile."""
    findings, factor = state.learning.findings, _transfer_factor(state)
    overhead_s = rules.prices.regroup_s + RANK_S * _sharing(rules, state)
    if findings.overheads_s:
        overhead_s = median(findings.overheads_s)
    measured = measured_prices(rules, state)
    links = {
        kind: Link(link.latency_s * factor, link.bandwidth_bytes_per_s / factor)
        for kind, link in measured.links.items()
    }
    hop_s = findings.hop_s * _sharing(rules, state) * _at_first(state)
    return replace(measured, links=links, regroup_s=overhead_s, hop_s=hop_s)


def regroup_s(rules: Rules, state: JobState, plan: Plan) -> float:
    """The seconds of a recovery to a plan besides moving layers."""
    prices = prices_of(rules, state)
    return prices.regroup_s + scheduling_s(plan, prices.hop_s)


def _sharing(rules: Rules, state: JobState) -> float:
    """The number of ranks that share a processor; at least 1."""
    return max(1.0, len(state.ranks) / rules.processors) if rules.processors else 1.0


def _at_first(state: JobState) -> float:
    """The factor on the time of schedules in the next recovery; above 1 only for the first."""
    return 1.0 if state.learning.findings.overheads_s else FIRST_RECOVERY


def _transfer_factor(state: JobState) -> float:
    """The expected duration of transfers, as a multiple of what the profile says."""
    transfers_s = state.learning.findings.transfers_s
    priced_s = sum(priced_s for priced_s, _ in transfers_s)
    took_s = sum(took_s for _, took_s in transfers_s)
    return (PRIOR_TRANSFER_S + took_s) / (PRIOR_TRANSFER_S + priced_s)


def switch_s(rules: Rules, state: JobState, plan: Plan) -> float:
    """The expected pause of training when an epoch with this plan begins at a commit."""
    findings = state.learning.findings
    schedules_s = scheduling_s(plan, findings.hop_s * _sharing(rules, state))
    if findings.pauses_s:
        return median(findings.pauses_s) + schedules_s
    # Before the first epoch has begun, no hop was measured, and schedules_s is 0.
    return FIRST_SWITCH * schedules_s or rules.prices.regroup_s


def with_choice(rules: Rules, state: JobState, chosen: Transition, now_s: float) -> JobState:
    """The state after an answer was chosen: it is timed from now on.

    It also keeps the transfer time in the answer's price, to compare with the measured one.
    """
    transfer_s = chosen.downtime_s - regroup_s(rules, state, chosen.after)
    transfer_s = max(0.0, transfer_s) / _transfer_factor(state)
    learning = replace(state.learning, told_s=now_s, transfer_s=transfer_s, plan_s=0.0)
    return replace(state, learning=learning)


def with_order(state: JobState, now_s: float) -> JobState:
    """The state after all were told the answer: it is timed from now on."""
    if not state.learning.told_s:  # Another coordinator chose the answer.
        return state
    return replace(state, learning=replace(state.learning, told_s=now_s))


def with_start(rules: Rules, state: JobState, now_s: float) -> JobState:
    """The state that knows what it took until every rank could go on, or could begin at first."""
    state, schedules_s = _with_schedules(rules, state)
    before, state = state, with_link_speeds(rules, state, state.facts.ready.values())
    # The transfers are priced by what links carried in them, or the factor would count it twice.
    shift_s = 0.0 if state is before else _moved_s(rules, state) - _moved_s(rules, before)
    learning, findings = state.learning, state.learning.findings
    # A coordinator that began in the middle of a recovery has no told_s.
    if state.facts.loss is not None and learning.told_s:
        priced_s = learning.transfer_s + shift_s
        overhead_s = now_s - learning.told_s - schedules_s * _at_first(state)
        took_s = _transferred_s(state.facts.ready.values())
        if priced_s > 0.0 and took_s > 0.0:
            overhead_s -= took_s
            moved = (*findings.transfers_s, (priced_s, took_s))[-NUM_NEWEST:]
            findings = msgspec.structs.replace(findings, transfers_s=moved)
        newest_s = (*findings.overheads_s, max(0.0, overhead_s))[-NUM_NEWEST:]
        findings = msgspec.structs.replace(findings, overheads_s=newest_s)
    return replace(state, learning=replace(learning, findings=findings, told_s=0.0))


def _moved_s(rules: Rules, state: JobState) -> float:
    """Seconds of this epoch's transfers by the links as they are known, without the factor."""
    order = state.facts.decision.order if state.facts.decision else None
    if not isinstance(order, StartEpoch):
        return 0.0
    transfers = [transfer for transfers in order.rounds for transfer in transfers]
    prices, per_node = measured_prices(rules, state), state.devices_per_node
    return transfer_s(transfers, prices, devices_per_node=per_node)


def _with_schedules(rules: Rules, state: JobState) -> tuple[JobState, float]:
    """The state with the measured cost of a hop, and the seconds of this epoch's schedules."""
    took_s = median(event.scheduled_s for event in state.facts.ready.values())
    hop_s = took_s / scheduling_s(state.plan, 1.0) if took_s else 0.0
    findings = msgspec.structs.replace(state.learning.findings, hop_s=hop_s)
    state = replace(state, learning=replace(state.learning, findings=findings))
    return state, took_s * _sharing(rules, state)


def _transferred_s(ready: Collection[EpochReady]) -> float:
    """The seconds from the last rank's links to the last rank's layers; 0 without reports.

    A rank that has its links early waits for the links of others before layers can arrive.
    """
    linked_s = max((event.regroup_s for event in ready), default=0.0)
    return max((event.regroup_s + event.transfer_s for event in ready), default=0.0) - linked_s


def with_switch(rules: Rules, state: JobState, pause_s: float) -> JobState:
    """The state that knows that a switch has paused training for `pause_s`."""
    state, schedules_s = _with_schedules(rules, state)
    findings = state.learning.findings
    newest_s = (*findings.pauses_s, max(0.0, pause_s - schedules_s))[-NUM_NEWEST:]
    findings = msgspec.structs.replace(findings, pauses_s=newest_s)
    return replace(state, learning=replace(state.learning, findings=findings))
