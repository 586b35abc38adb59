"""Raises the limit of open files and sockets (RLIMIT_NOFILE) of the processes of a job.

Each process that needs more descriptors raises its soft limit (`ulimit -n`), up to the hard limit.
The number that it needs grows with the job: a link to every rank, a connection to every node. To
these come the connections that have not proved themselves (transport/strangers.py): so many fit in
beside the job's own, and fewer where the hard limit is low. A machine that comes is one of them.
"""

import resource
from typing import Final

from planaria.core.job import ClusterConfig
from planaria.errors import ConfigError
from planaria.transport.strangers import NUM_UNPROVEN_MAX, num_files_for, raise_soft_limit

_OWN: Final = 96  # Descriptors needed for any size of the job, including the user's code.
_PER_RANK: Final = 2  # The link to a rank, and the link of the epoch before.
_PER_DEVICE: Final = 6  # Descriptors that an agent needs for each of its workers.
# A head has as many that are to send their preface, and as many whose handshake is under way.
_STRANGERS: Final = 2 * NUM_UNPROVEN_MAX
_STRANGERS_MIN: Final = 32


def raise_open_files(cluster: ClusterConfig, *, num_joining: int = 0) -> None:
    """Raises the soft limit of this process, and of those it starts, to what the job needs.

    Args:
        num_joining: number of nodes that join in addition to those of the job file.

    Raises:
        ConfigError: the hard limit is too low.
    """
    num_ranks = cluster.num_ranks_max + num_joining * cluster.devices_per_node
    num_nodes = num_ranks // cluster.devices_per_node
    needed = _OWN + _PER_RANK * num_ranks
    needed += _PER_DEVICE * cluster.devices_per_node + _STRANGERS_MIN
    wanted = needed + _STRANGERS - _STRANGERS_MIN
    wanted = max(wanted, num_files_for(num_ranks))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        remedy = (
            f"a process may have {hard} files and sockets open (the hard limit RLIMIT_NOFILE, "
            f"ulimit -Hn), and a job of {num_nodes} nodes needs {needed}: raise that limit (as "
            "root: ulimit -n, /etc/security/limits.conf, or LimitNOFILE of the service), or train "
            "on fewer nodes"
        )
        raise ConfigError("cluster.nodes", cluster.nodes, remedy)
    raise_soft_limit(wanted)
