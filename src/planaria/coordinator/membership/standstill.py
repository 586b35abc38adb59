"""Whether the coordinator stands still, as its launcher sees it.

A running coordinator sends beats to its launcher, except in a long decision, in which it computes.
Nodes whose heartbeats it leaves unanswered write no saves after one lease, and end themselves after
two (agent_lease.py). So a coordinator that neither beats nor computes is killed before that, and
another one is started. Its connections close then, and the nodes keep their leases and wait for the
next coordinator.
"""

from math import ceil
from typing import Final

from planaria.coordinator.membership.missing_members import arrival_s
from planaria.protocol.agent_lease import TICKS_PER_LEASE

# Two thirds of a lease: the last heartbeat that the coordinator answered may be a tick older than
# its last beat.
SILENT_TICKS_MAX: Final = 4


def is_standing_still(silent_ticks: int, *, has_begun: bool, lease_s: float) -> bool:
    """Whether a coordinator has been silent for too long.

    Args:
        silent_ticks: number of the launcher's latest ticks in a row in which the coordinator
            neither said anything nor computed. These are not seconds, because a launcher that was
            itself stopped could receive nothing.
        has_begun: whether anything ever came from the coordinator. Until then it reads its records,
            from a disk that may be slow, and no agent is connected to it.
    """
    most = SILENT_TICKS_MAX
    if not has_begun:
        most = ceil(arrival_s(lease_s) * TICKS_PER_LEASE / lease_s)
    return silent_ticks >= most
