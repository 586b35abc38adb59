"""Workers that end though their nodes live, links that break between live nodes, spoilt copies.

All end the epoch, and the first two after a few times with no iteration committed in between
something more: a worker that always ends alike ends the job, a node that others cannot reach is
left out.
"""

from collections import Counter
from dataclasses import replace
from typing import Final

from planaria.coordinator.recovery import lost
from planaria.coordinator.saves import without_spoilt
from planaria.coordinator.state import (
    Command,
    End,
    Ending,
    JobState,
    Notify,
    Phase,
    Rules,
    SetAside,
    Step,
)
from planaria.core.growing import Growing
from planaria.core.messages import CopySpoilt, WorkerExited, WorkerFailed
from planaria.core.records import Warned

CRASHES_MAX: Final = 3  # Of one rank, with the same status.
BROKEN_LINKS_MAX: Final = 3  # Epochs.


def link_broken(rules: Rules, state: JobState, now_s: float) -> Step:
    """Live nodes cannot reach each other: once more, then without whom most cannot reach."""
    broken_links = state.broken_links + 1
    state = replace(state, broken_links=broken_links)
    if broken_links < BROKEN_LINKS_MAX:
        reason = "a link broke between live nodes"
        return lost(rules, state, "lost", (), reason=reason, now_s=now_s)
    counts = Counter(state.unreached)
    rank = max(counts, key=lambda rank: (counts[rank], rank))
    node = rank // (len(state.ranks) // len(state.nodes))
    reason = f"others cannot reach its rank {rank}, {broken_links} times in a row"
    return lost(rules, state, "lost", (node,), reason=reason, now_s=now_s)


def copy_spoilt(rules: Rules, state: JobState, event: CopySpoilt, now_s: float) -> Step:
    """A copy in memory, or a save, is of no use: once more, without it."""
    node = event.rank // state.devices_per_node
    first: Command = Notify(Warned(text=f"node {node}: {event.reason}; it is not used"))
    if event.source:
        state = without_spoilt(state, event.source)
        first = SetAside(event.source) if event.is_damaged else first
    state, commands = lost(rules, state, "copy", (), reason=event.reason, now_s=now_s, node=node)
    return state, (first, *commands)


def worker_exited(rules: Rules, state: JobState, event: WorkerExited, now_s: float) -> Step:
    """A worker is gone and its node is not: the epoch ends, unless that happens in a loop."""
    worker = state.workers.get(event.rank)
    if worker is not None and worker.pid != event.pid:  # Its successor has reported already.
        return state, ()
    crash = (event.rank, event.status)
    crashes = (*state.crashes, crash)
    told = f"the worker of rank {event.rank} on node {event.node} {_told(event.status)}"
    if crashes.count(crash) >= CRASHES_MAX:
        reason = f"{told}, the {CRASHES_MAX}rd time in a row"
        text = f"{event.stack.rstrip()}\n{reason}" if event.stack else reason
        failure = WorkerFailed(node=event.node, rank=event.rank, traceback=text)
        return ended(state, End(Ending.FAILED, reason, failure))
    workers = {rank: worker for rank, worker in state.workers.items() if rank != event.rank}
    state = replace(state, crashes=crashes, workers=Growing(workers))
    kind, reason = "crash", told
    if event.stalled:
        kind, reason = "stall", f"rank {event.rank} made no progress:\n{event.stack.rstrip()}"
    return lost(rules, state, kind, (), reason=reason, now_s=now_s, node=event.node)


def ended(state: JobState, end: End) -> Step:
    """The job is over."""
    return replace(state, phase=Phase.ENDED), (end,)


def _told(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"left with status {status}"
