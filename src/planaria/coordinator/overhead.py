"""What a recovery takes, and a switch, as this job has measured it.

From the choice of an answer until every rank can go on a job takes

    overhead_s + factor * transfer_s

The last is what the bytes take on the busiest link as the profile has it (policies/policy.py). In
truth modules are built for the layers, bytes are hashed, and links shared: by which factor that
takes longer is learned from the newest recoveries in which layers moved,

    (0.02 s + what they took) / (0.02 s + transfer_s of each)

so that a few bytes, which take as long as a message, tell next to nothing.

The overhead is all the rest, whatever moves: records on disk, the order's way, links made anew,
ranks that get going. It depends on machines, nodes and model, so it is measured, in each recovery,
as the time that there was less what the layers took. The price of the next is the median of the
newest. The first recovery of a job is priced by how it began: as a fixed prior for the order's way,
and what the schedules took, which all ranks compute again; and a sixteenth of what the links took,
which were all new then, where most of them stand in a recovery.

A change has no such overhead, but a pause at each of its switches, which is measured likewise.
Before the first it is expected to take half of that, for ranks compute schedules there as they
come, where in a recovery, as at the start, all do at once.

Differs: Odyssey prices transitions by bytes alone; its constant is not stated.
"""

from collections.abc import Collection
from dataclasses import replace
from statistics import median
from typing import Final

import msgspec

from planaria.coordinator.state import JobState, Rules
from planaria.core.findings import Findings
from planaria.core.messages import EpochReady
from planaria.core.plan import Link, Transition
from planaria.policies.policy import Prices

NUM_NEWEST: Final = 5
PRIOR_TRANSFER_S: Final = 0.02
# Measured on 8 and 32 nodes, see docs/LOG.md.
NEW_LINKS: Final = 1 / 16
AT_A_SWITCH: Final = 0.5


def prices_of(rules: Rules, state: JobState) -> Prices:
    """What recovery costs, as far as the job has told."""
    findings, factor = state.learning.findings, _transfer_factor(state)
    regroup_s = rules.prices.regroup_s + _begun_s(findings)
    if findings.overheads_s:
        regroup_s = median(findings.overheads_s)
    links = {
        kind: Link(link.latency_s * factor, link.bandwidth_bytes_per_s / factor)
        for kind, link in rules.prices.links.items()
    }
    return replace(rules.prices, links=links, regroup_s=regroup_s)


def _begun_s(findings: Findings) -> float:
    """What an epoch takes to begin, as far as the start of the job has told."""
    return findings.scheduled_s + NEW_LINKS * (findings.linked_s - findings.scheduled_s)


def _transfer_factor(state: JobState) -> float:
    """How many times as long as the profile says transfers are expected to take."""
    told = state.learning.findings.transfers_s
    priced_s, took_s = sum(priced_s for priced_s, _ in told), sum(took_s for _, took_s in told)
    return (PRIOR_TRANSFER_S + took_s) / (PRIOR_TRANSFER_S + priced_s)


def switch_s(rules: Rules, state: JobState) -> float:
    """For how long ranks are expected not to train when an epoch begins at a commit."""
    findings = state.learning.findings
    if findings.pauses_s:
        return median(findings.pauses_s)
    return AT_A_SWITCH * _begun_s(findings) or rules.prices.regroup_s


def with_choice(rules: Rules, state: JobState, chosen: Transition, now_s: float) -> JobState:
    """The state once an answer is chosen: what follows is timed, and predicted by its price."""
    transfer_s = chosen.downtime_s - prices_of(rules, state).regroup_s
    transfer_s /= _transfer_factor(state)
    learning = replace(state.learning, decided_s=now_s, transfer_s=transfer_s, plan_s=0.0)
    return replace(state, learning=learning)


def with_start(state: JobState, now_s: float) -> JobState:
    """The state once every rank can go on, after a loss or for the first time."""
    learning, findings = state.learning, state.learning.findings
    if state.loss is None:
        findings = msgspec.structs.replace(
            findings,
            scheduled_s=max(event.scheduled_s for event in state.ready.values()),
            linked_s=max(event.regroup_s for event in state.ready.values()),
        )
    elif learning.decided_s:  # Or the coordinator began in the middle of it.
        overhead_s = now_s - learning.decided_s
        took_s = _transferred_s(state.ready.values())
        if learning.transfer_s > 0.0 and took_s > 0.0:
            overhead_s = max(0.0, overhead_s - took_s)
            moved = (*findings.transfers_s, (learning.transfer_s, took_s))[-NUM_NEWEST:]
            findings = msgspec.structs.replace(findings, transfers_s=moved)
        newest_s = (*findings.overheads_s, overhead_s)[-NUM_NEWEST:]
        findings = msgspec.structs.replace(findings, overheads_s=newest_s)
    return replace(state, learning=replace(learning, findings=findings, decided_s=0.0))


def _transferred_s(ready: Collection[EpochReady]) -> float:
    """From when the last rank had its links until the last one had its layers; 0 if nobody tells.

    Who is linked early waits for others' links before their layers can come.
    """
    linked_s = max((event.regroup_s for event in ready), default=0.0)
    return max((event.regroup_s + event.transfer_s for event in ready), default=0.0) - linked_s


def with_switch(state: JobState, pause_s: float) -> JobState:
    """The state once a switch has paused its ranks for so long."""
    findings = state.learning.findings
    newest_s = (*findings.pauses_s, pause_s)[-NUM_NEWEST:]
    findings = msgspec.structs.replace(findings, pauses_s=newest_s)
    return replace(state, learning=replace(state.learning, findings=findings))
