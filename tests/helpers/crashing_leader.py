"""A coordinator that ends as soon as it has told the nodes to stop, or at once, whenever it starts;
one that only saves lives, unless it is told to end too.

CRASHING names a file: while it is there coordinators end. CRASHING_RESCUES ends the others, too.
"""

import os

import msgspec

from planaria.nodes.head import leader
from planaria.nodes.head.leader_spec import LeaderSpec


def main(payload: bytes, *fds: int) -> None:
    """As that of nodes/head/leader.py."""
    spec = msgspec.json.decode(payload, type=LeaderSpec)
    is_ending = os.path.exists(os.environ["CRASHING"])
    if spec.rescue is None and is_ending:
        os._exit(7)
    if spec.rescue is not None and os.path.exists(os.environ["CRASHING"] + "-rescues"):
        os._exit(8)
    leader.main(payload, *fds)
