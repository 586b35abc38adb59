"""Standby nodes, and machines that are granted for lost ones: who is taken, and who is waited for.

Of the candidates so many wait as the job keeps on standby, their workers started, as long as there
are as many members as it began with. A loss takes them at once, a node that leaves in peace while
training goes on. Nobody waits for a machine that is asked for but where too few nodes are left to
go on without it.

Source: Gemini (SOSP '23), section 6.2 (standby machines); DESIGN 6 (Nodes).
"""

from dataclasses import replace
from typing import Final

from planaria.coordinator.state import JobState, Notify, Rules, Step
from planaria.coordinator.trust import trusted_first
from planaria.core.records import AwaitingMachine, Changed, Recovering, ToLauncher, Warned

_PATIENCE: Final = 2.0  # Times what a machine is said to take.
_START_S: Final = 10.0  # What a node takes to start, on a machine that many share.


def able_candidates(state: JobState, now_s: float) -> list[int]:
    """Those that can be taken now: who failed least first, of equals who came first."""
    able = [
        node
        for node, candidate in state.candidates.items()
        if candidate.not_before_s <= now_s and state.has_workers(node)
    ]
    return trusted_first(state, able, now_s)


def num_taken(rules: Rules, *, num_staying: int, num_able: int) -> int:
    """How many candidates are to be members, while training goes on."""
    cluster = rules.job.cluster
    beyond_standby = max(num_able - cluster.standby, cluster.nodes - num_staying)
    return max(0, min(num_able, beyond_standby, rules.max_nodes - num_staying))


def taken_at_loss(rules: Rules, state: JobState, num_left: int, now_s: float) -> tuple[int, ...]:
    """Candidates that become members at once: standby nodes in place of lost ones; any at all, if
    the others tolerate no more failures."""
    needed = (rules.job.resilience.failures_tolerated + 1) * rules.n0 - num_left
    anyone = trusted_first(state, filter(state.has_workers, state.candidates), now_s)
    taken = anyone[: max(0, needed)]
    if rules.job.cluster.standby:
        able = [node for node in able_candidates(state, now_s) if node not in taken]
        taken += able[: max(0, rules.job.cluster.nodes - num_left - len(taken))]
    return tuple(taken)


def is_granted_soon(rules: Rules, state: JobState, now_s: float) -> bool:
    """Whether a machine may still come for one that was lost."""
    grant_s, loss = rules.job.cluster.grant_s, state.loss
    if not grant_s or loss is None or state.stop_requested:
        return False
    return now_s < loss.lost_s + _longest_s(rules)


def _longest_s(rules: Rules) -> float:
    """How long a machine is waited for, until its node has started."""
    return _PATIENCE * rules.job.cluster.grant_s + _START_S


def waiting(rules: Rules, state: JobState, shortage: str, now_s: float) -> Step:
    """All wait for a machine; that is said once."""
    loss = state.loss
    assert loss is not None
    if loss.is_waiting:
        return state, ()
    text = f"{shortage}: waiting for a machine that is asked for, {_longest_s(rules):.0f} s at most"
    notice = AwaitingMachine(text=text, now_s=now_s)
    return replace(state, loss=replace(loss, is_waiting=True)), (Notify(notice),)


def nodes_to_replace(message: ToLauncher) -> tuple[int, ...]:
    """The nodes that are lost, or were taken away, by this; those that a user drains are not
    replaced."""
    match message:
        case Warned(gone=nodes):
            return nodes
        case Recovering(nodes=nodes) if message.kind == "lost":
            return nodes
        case Changed(kinds=kinds):
            return tuple(node for node, kind in kinds.items() if kind == "preempt")
    return ()
