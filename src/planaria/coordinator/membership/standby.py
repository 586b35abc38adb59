"""Standby nodes, and machines granted for lost ones: which are taken, and which are waited for.

While the job has as many members as `cluster.nodes`, `cluster.standby` candidates wait with their
workers started. A loss makes them members at once; a node that leaves on request is replaced by one
while training goes on. The job waits for a machine that was asked for only if too few nodes are
left to go on without it.

Source: Gemini (SOSP '23), section 6.2 (standby machines).
"""

from dataclasses import replace
from typing import Final

from planaria.coordinator.commands import Notify
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.membership.trust import trusted_first
from planaria.coordinator.state import JobState, Step
from planaria.core.kinds import ChangeKind, LossKind
from planaria.core.records import AwaitingMachine, Changed, Recovering, ToLauncher, Warned

_PATIENCE: Final = 2.0  # Multiple of cluster.grant_s that a machine is waited for.
_START_S: Final = 10.0  # Time that a node takes to start, on a machine that many nodes share.


def able_candidates(state: JobState, now_s: float) -> list[int]:
    """The candidates that can become members now: fewest failures first, then by arrival."""
    able = [
        node
        for node, candidate in state.membership.candidates.items()
        if candidate.not_before_s <= now_s and state.has_workers(node)
    ]
    return trusted_first(state, able, now_s)


def num_joining(rules: Rules, *, num_staying: int, num_able: int) -> int:
    """The number of candidates that become members while training goes on."""
    cluster = rules.job.cluster
    beyond_standby = max(num_able - cluster.standby, cluster.nodes - num_staying)
    return max(0, min(num_able, beyond_standby, rules.max_nodes - num_staying))


def replacements_at_loss(
    rules: Rules, state: JobState, num_left: int, now_s: float
) -> tuple[int, ...]:
    """The candidates that become members at once, after a loss.

    If fewer than (f + 1) * n0 nodes are left, any candidates with workers fill the gap, even those
    that are to be taken back later. Then standby nodes take the places of lost ones.
    """
    needed = (rules.job.resilience.failures_tolerated + 1) * rules.n0 - num_left
    anyone = trusted_first(state, filter(state.has_workers, state.membership.candidates), now_s)
    replacements = anyone[: max(0, needed)]
    if rules.job.cluster.standby:
        able = [node for node in able_candidates(state, now_s) if node not in replacements]
        replacements += able[: max(0, rules.job.cluster.nodes - num_left - len(replacements))]
    return tuple(replacements)


def is_granted_soon(rules: Rules, state: JobState, now_s: float) -> bool:
    """Whether a machine that replaces a lost one may still be granted in time."""
    grant_s, loss = rules.job.cluster.grant_s, state.facts.loss
    if not grant_s or loss is None or state.stop.is_requested:
        return False
    return now_s < loss.lost_s + _longest_s(rules)


def _longest_s(rules: Rules) -> float:
    """The longest time that a machine is waited for, which includes the start of its node."""
    return _PATIENCE * rules.job.cluster.grant_s + _START_S


def await_machine(rules: Rules, state: JobState, shortage: str, now_s: float) -> Step:
    """All members wait for a machine; the launcher is told once."""
    loss = state.facts.loss
    assert loss is not None
    if loss.is_waiting:
        return state, ()
    text = (
        f"{shortage}; the job has asked for a machine and waits for it, "
        f"{_longest_s(rules):.0f} s at most"
    )
    notice = AwaitingMachine(text=text, now_s=now_s)
    facts = replace(state.facts, loss=replace(loss, is_waiting=True))
    return replace(state, facts=facts), (Notify(notice),)


def nodes_to_replace(message: ToLauncher) -> tuple[int, ...]:
    """The nodes to ask replacements for: those that the message says are lost or preempted.

    A drained node is not replaced.
    """
    match message:
        case Warned(gone=nodes):
            return nodes
        case Recovering(nodes=nodes) if message.kind is LossKind.LOST:
            return nodes
        case Changed(kinds=kinds):
            return tuple(node for node, kind in kinds.items() if kind is ChangeKind.PREEMPT)
    return ()
