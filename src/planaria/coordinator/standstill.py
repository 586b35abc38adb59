"""Whether the coordinator stands still, as its launcher sees it.

A coordinator beats while it runs, but for a long decision, in which it computes. Nodes whose
heartbeats it leaves unanswered write no saves after a lease, and end themselves after two
(agent_lease.py), so one that does neither is killed, and another started, before that. Once its
connections are closed nodes keep their leases and wait for the next one.
"""

from math import ceil
from typing import Final

from planaria.coordinator.arrivals import arrival_s
from planaria.protocol.agent_lease import TICKS_PER_LEASE

# Two thirds of a lease: the last heartbeat that it answered may be a tick older than its last beat.
SILENT_TICKS_MAX: Final = 4


def stands_still(silent_ticks: int, *, has_begun: bool, lease_s: float) -> bool:
    """Whether a coordinator has been silent for too long.

    Args:
        silent_ticks: of the launcher, in a row, in which the coordinator neither said anything nor
            computed. Not seconds: while the launcher itself was stopped it could hear nobody.
        has_begun: it was heard at all. Before, it reads its records, from a disk that may be slow,
            and no agent is connected to it.
    """
    most = SILENT_TICKS_MAX
    if not has_begun:
        most = ceil(arrival_s(lease_s) * TICKS_PER_LEASE / lease_s)
    return silent_ticks >= most
