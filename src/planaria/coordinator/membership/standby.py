"""Standby nodes, and machines granted for lost ones: which are taken, and which are waited for.

While the job has as many members as `cluster.nodes`, `cluster.standby` candidates wait with their
workers started. A loss makes them members at once; a node that leaves on request is replaced by one
while training goes on. The job waits for a machine only if too few nodes are left to go on without
it: for one that was asked for (`cluster.grant_s`), or, if nodes are on several machines and fewer
than n0 of them are left, for any that joins (`Rules.wait_s`).

Source: Gemini (SOSP '23), section 6.2 (standby machines).
"""

from typing import Final

from planaria.coordinator.commands import Notify
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.membership.shortage import shortage_text
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
        if candidate.not_before_s <= now_s
        and state.has_workers(node)
        and not state.is_member(node)  # Until a switch begins, its new nodes are candidates, too.
    ]
    return trusted_first(state, able, now_s)


def num_joining(rules: Rules, *, num_staying: int, num_able: int) -> int:
    """The number of candidates that become members while training goes on."""
    cluster = rules.job.cluster
    beyond_standby = max(num_able - cluster.standby, cluster.nodes - num_staying)
    return max(0, min(num_able, beyond_standby, rules.max_nodes - num_staying))


def with_postponed(rules: Rules, state: JobState, now_s: float) -> JobState:
    """The state in which nodes on unfit machines are to leave again, as many as can be spared."""
    num_able = len(able_candidates(state, now_s))
    num_staying = sum(node not in state.membership.leaving for node in state.nodes)
    for node, leave in sorted(state.membership.postponed.items()):
        num_staying -= 1
        num_coming = num_joining(rules, num_staying=num_staying, num_able=num_able)
        if shortage_text(rules, num_staying + num_coming):
            break
        members = state.membership
        postponed = {n: other for n, other in members.postponed.items() if n != node}
        leaving = {**members.leaving, node: leave}
        members = replace(members, leaving=leaving, postponed=postponed)
        state = replace(state, membership=members)
    return state


def replacements_at_loss(
    rules: Rules, state: JobState, num_left: int, now_s: float
) -> tuple[int, ...]:
    """The candidates that become members at once, after a loss.

    If fewer than (f + 1) * n0 nodes are left, any candidates with workers fill the gap, even those
    that are to be taken back later; but no more than `max_nodes`. Then standby nodes take the
    places of lost ones.

    While links break between live nodes, only as many are filled up as the job goes on with, and
    only after a commit the rest: the candidates may be cut off, too, and each would cost another
    epoch.
    """
    resilience, is_cut = rules.job.resilience, state.troubles.broken_links > 0
    goes_on_with_n0 = is_cut and resilience.when_below == "continue"
    num_pipelines = 1 if goes_on_with_n0 else resilience.failures_tolerated + 1
    needed = min(num_pipelines * rules.n0, rules.max_nodes) - num_left
    waiting = [n for n in state.membership.candidates if not state.is_member(n)]
    anyone = trusted_first(state, filter(state.has_workers, waiting), now_s)
    replacements = anyone[: max(0, needed)]
    if rules.job.cluster.standby and not is_cut:
        able = [node for node in able_candidates(state, now_s) if node not in replacements]
        replacements += able[: max(0, rules.job.cluster.nodes - num_left - len(replacements))]
    return tuple(replacements)


def can_await(rules: Rules, state: JobState) -> bool:
    """Whether the job, once it is saved, waits for machines because fewer than n0 nodes stay."""
    num_staying = sum(node not in state.membership.leaving for node in state.nodes)
    return rules.wait_s > 0.0 and not is_ending(state) and num_staying < rules.n0


def is_ending(state: JobState) -> bool:
    """Whether the job ends for another reason than that nodes are short."""
    stop = state.stop
    return bool(stop.must_end or stop.failure) or (stop.is_requested and not stop.shortage)


def may_return(state: JobState) -> bool:
    """Whether nodes that had waited to join may come back to this coordinator, the next one."""
    return state.membership.returning_ticks > 0 and not is_ending(state)


def is_granted_soon(rules: Rules, state: JobState, now_s: float) -> bool:
    """Whether a machine that is asked for or waited for may still come in time."""
    loss, awaits = state.facts.loss, can_await(rules, state)
    if loss is None or is_ending(state) or (state.stop.is_requested and not awaits):
        return False
    if may_return(state):
        return True
    # A slow disk may have kept the losses before this one waiting; that time does not count.
    has_to_begin = awaits and not loss.is_waiting
    return has_to_begin or now_s < loss.lost_s + _longest_s(rules, state)


def _longest_s(rules: Rules, state: JobState) -> float:
    """The longest time that a machine is waited for, which includes the start of its node."""
    grant_s = rules.job.cluster.grant_s
    granted_s = _PATIENCE * grant_s + _START_S if grant_s else 0.0
    returning_s = rules.job.cluster.lease_s if may_return(state) else 0.0
    return max(granted_s, returning_s, rules.wait_s if can_await(rules, state) else 0.0)


def await_machine(rules: Rules, state: JobState, shortage: str, now_s: float) -> Step:
    """All members wait for a machine; the launcher is told once."""
    loss = state.facts.loss
    assert loss is not None
    if loss.is_waiting:
        return state, ()
    is_asked_for = rules.job.cluster.grant_s > 0.0
    wait = "has asked for a machine and waits for it" if is_asked_for else "waits for machines"
    text = f"{shortage}; the job {wait}, {_longest_s(rules, state):.0f} s at most"
    notice = AwaitingMachine(text=text, now_s=now_s)
    since_s = now_s if can_await(rules, state) else loss.lost_s
    facts = replace(state.facts, loss=replace(loss, is_waiting=True, lost_s=since_s))
    return replace(state, facts=facts), (Notify(notice),)


def nodes_to_replace(message: ToLauncher) -> tuple[int, ...]:
    """The nodes to ask replacements for: those that the message says are lost, preempted or unfit.

    A drained node is not replaced.
    """
    match message:
        case Warned():
            return (*message.gone, *message.preempted, *message.unfit)
        case Recovering(nodes=nodes) if message.kind is LossKind.LOST:
            return nodes
        case Changed(kinds=kinds):
            return tuple(node for node, kind in kinds.items() if kind is ChangeKind.PREEMPT)
    return ()


def names_leaving_nodes(message: ToLauncher) -> bool:
    """Whether the nodes to replace leave by themselves, and may still run; else they are lost."""
    match message:
        case Warned():
            return bool(message.preempted or message.unfit)
        case Changed():
            return True
    return False
