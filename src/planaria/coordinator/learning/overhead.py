"""What a recovery takes, and a switch, as this job has measured it.

From when all are told an answer until every rank can go on a job takes

    overhead_s + schedules_s + factor * transfer_s

The last is what the bytes take on the busiest link as the profile has it (policies/policy.py). In
truth modules are built for the layers, bytes are hashed, and links shared: by which factor that
takes longer is learned from the newest recoveries in which layers moved,

    (0.02 s + what they took) / (0.02 s + transfer_s of each)

so that a few bytes, which take as long as a message, tell next to nothing.

Each rank computes its schedule, from as many hops of microbatches as meet in its pipeline: 32 in
one of many short ones, a thousand where routes join all. What a hop takes of a processor is
measured in each epoch; where nodes are emulated, their ranks share few processors.

The overhead is all the rest, whatever moves: the order's way, links made anew, ranks that get
going. It depends on machines, nodes and model, so it is measured, in each recovery, as the time
that there was less what schedules and layers took. The price of the next is the median of the
newest. Before the first recovery it is a fixed prior for the order's way and one for what each rank
and its agent compute. The first recovery takes longer by a quarter of its schedules: what is done
with a plan for the first time is in no cache, and the larger the plan, the more there is of it.

A change has no such overhead, but a pause at each of its switches, which is measured likewise.
Before the first it is expected to take half as long again as the schedules.

Differs: Odyssey prices transitions by bytes alone; its constant is not stated.
"""

from collections.abc import Collection
from dataclasses import replace
from statistics import median
from typing import Final

import msgspec

from planaria.coordinator.state import JobState, Rules
from planaria.core.messages import EpochReady
from planaria.core.plan import Link, Plan, Transition
from planaria.policies.policy import Prices, scheduling_s

NUM_NEWEST: Final = 5
PRIOR_TRANSFER_S: Final = 0.02
# Measured on 8 and 32 nodes, see docs/LOG.md.
RANK_S: Final = 0.0023  # That a rank and its agent compute beside its schedule.
FIRST_RECOVERY: Final = 1.25
FIRST_SWITCH: Final = 1.5


def prices_of(rules: Rules, state: JobState) -> Prices:
    """What recovery costs, as far as the job has told."""
    findings, factor = state.learning.findings, _transfer_factor(state)
    overhead_s = rules.prices.regroup_s + RANK_S * _sharing(rules, state)
    if findings.overheads_s:
        overhead_s = median(findings.overheads_s)
    links = {
        kind: Link(link.latency_s * factor, link.bandwidth_bytes_per_s / factor)
        for kind, link in rules.prices.links.items()
    }
    hop_s = findings.hop_s * _sharing(rules, state) * _at_first(state)
    return replace(rules.prices, links=links, regroup_s=overhead_s, hop_s=hop_s)


def regroup_s(rules: Rules, state: JobState, plan: Plan) -> float:
    """What a recovery to a plan costs beside moving layers."""
    prices = prices_of(rules, state)
    return prices.regroup_s + scheduling_s(plan, prices.hop_s)


def _sharing(rules: Rules, state: JobState) -> float:
    """How many ranks share a processor."""
    return max(1.0, len(state.ranks) / rules.processors) if rules.processors else 1.0


def _at_first(state: JobState) -> float:
    """How many times its schedules the next recovery takes for them and what grows with them."""
    return 1.0 if state.learning.findings.overheads_s else FIRST_RECOVERY


def _transfer_factor(state: JobState) -> float:
    """How many times as long as the profile says transfers are expected to take."""
    told = state.learning.findings.transfers_s
    priced_s, took_s = sum(priced_s for priced_s, _ in told), sum(took_s for _, took_s in told)
    return (PRIOR_TRANSFER_S + took_s) / (PRIOR_TRANSFER_S + priced_s)


def switch_s(rules: Rules, state: JobState, plan: Plan) -> float:
    """For how long ranks are expected not to train when an epoch with a plan begins at a commit."""
    findings = state.learning.findings
    schedules_s = scheduling_s(plan, findings.hop_s * _sharing(rules, state))
    if findings.pauses_s:
        return median(findings.pauses_s) + schedules_s
    return FIRST_SWITCH * schedules_s or rules.prices.regroup_s  # Nobody has told what it takes.


def with_choice(rules: Rules, state: JobState, chosen: Transition, now_s: float) -> JobState:
    """The state once an answer is chosen: what follows is timed, and predicted by its price."""
    transfer_s = chosen.downtime_s - regroup_s(rules, state, chosen.after)
    transfer_s = max(0.0, transfer_s) / _transfer_factor(state)
    learning = replace(state.learning, told_s=now_s, transfer_s=transfer_s, plan_s=0.0)
    return replace(state, learning=learning)


def with_order(state: JobState, now_s: float) -> JobState:
    """The state once all are told what was chosen."""
    if not state.learning.told_s:  # It was another coordinator that chose it.
        return state
    return replace(state, learning=replace(state.learning, told_s=now_s))


def with_start(rules: Rules, state: JobState, now_s: float) -> JobState:
    """The state once every rank can go on, after a loss or for the first time."""
    state, schedules_s = _with_schedules(rules, state)
    learning, findings = state.learning, state.learning.findings
    if state.loss is not None and learning.told_s:  # Or this coordinator began in the middle of it.
        overhead_s = now_s - learning.told_s - schedules_s * _at_first(state)
        took_s = _transferred_s(state.ready.values())
        if learning.transfer_s > 0.0 and took_s > 0.0:
            overhead_s -= took_s
            moved = (*findings.transfers_s, (learning.transfer_s, took_s))[-NUM_NEWEST:]
            findings = msgspec.structs.replace(findings, transfers_s=moved)
        newest_s = (*findings.overheads_s, max(0.0, overhead_s))[-NUM_NEWEST:]
        findings = msgspec.structs.replace(findings, overheads_s=newest_s)
    return replace(state, learning=replace(learning, findings=findings, told_s=0.0))


def _with_schedules(rules: Rules, state: JobState) -> tuple[JobState, float]:
    """The state with what a hop takes in the epoch that begins, and what its schedules took."""
    took_s = median(event.scheduled_s for event in state.ready.values())
    hop_s = took_s / scheduling_s(state.plan, 1.0)
    findings = msgspec.structs.replace(state.learning.findings, hop_s=hop_s)
    state = replace(state, learning=replace(state.learning, findings=findings))
    return state, took_s * _sharing(rules, state)


def _transferred_s(ready: Collection[EpochReady]) -> float:
    """From when the last rank had its links until the last one had its layers; 0 if nobody tells.

    Who is linked early waits for others' links before their layers can come.
    """
    linked_s = max((event.regroup_s for event in ready), default=0.0)
    return max((event.regroup_s + event.transfer_s for event in ready), default=0.0) - linked_s


def with_switch(rules: Rules, state: JobState, pause_s: float) -> JobState:
    """The state once a switch has paused its ranks for so long."""
    state, schedules_s = _with_schedules(rules, state)
    findings = state.learning.findings
    newest_s = (*findings.pauses_s, max(0.0, pause_s - schedules_s))[-NUM_NEWEST:]
    findings = msgspec.structs.replace(findings, pauses_s=newest_s)
    return replace(state, learning=replace(state.learning, findings=findings))
