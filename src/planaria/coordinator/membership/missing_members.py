"""Members that never arrive: one that does not reach the coordinator in time counts as lost.

A lease begins when a node connects. A node whose agent hangs before that has no lease that could
run out, so its absence is found here.
"""

from math import ceil
from typing import Final

from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.recovery import begin_recovery
from planaria.coordinator.state import JobState, Step
from planaria.core.kinds import LossKind
from planaria.protocol.agent_lease import TICKS_PER_LEASE

# A node arrives within a second, or within ten on a machine that many nodes share. A long wait
# costs nothing, because nothing has been trained yet.
ARRIVAL_S_MIN: Final = 60.0
ARRIVAL_LEASES_MIN: Final = 10


def arrival_s(lease_s: float) -> float:
    """The time that a member has to reach the coordinator for the first time."""
    return max(ARRIVAL_S_MIN, ARRIVAL_LEASES_MIN * lease_s)


def check_missing(rules: Rules, state: JobState, now_s: float) -> Step:
    """Counts a tick if members are missing; after too many such ticks they are lost.

    Ticks are counted instead of seconds because nobody can reach a coordinator that stands still.
    """
    arrived = {*state.membership.machines, *(worker.node for worker in state.workers.values())}
    missing = tuple(node for node in state.nodes if node not in arrived)
    if not missing:
        return state, ()
    lease_s = rules.job.cluster.lease_s
    limit_s = arrival_s(lease_s)
    missing_ticks = state.membership.missing_ticks + 1
    state = replace(state, membership=replace(state.membership, missing_ticks=missing_ticks))
    if missing_ticks < ceil(limit_s * TICKS_PER_LEASE / lease_s):
        return state, ()
    reason = (
        f"its agent has not reached the coordinator in {limit_s:.0f} s; check whether its "
        "process still runs, and what it has printed"
    )
    return begin_recovery(rules, state, LossKind.LOST, missing, reason=reason, now_s=now_s)
