"""How many files and sockets a process of a job has open, and the limit that its user's shell sets.

The soft limit (`ulimit -n`) is raised by each process that needs more, as far as the hard one lets
it. What a process has open grows with the job: a link to every rank, a connection to every node.
"""

import resource
from typing import Final

from planaria.core.job import ClusterConfig
from planaria.errors import ConfigError

_OWN: Final = 96  # What a process has open whatever the size of its job, and the user's code.
_PER_RANK: Final = 2  # A link, and that of the epoch before.
_PER_DEVICE: Final = 6  # Of an agent, for each of its workers.


def raise_open_files(cluster: ClusterConfig, *, num_joining: int = 0) -> None:
    """Lets this process, and those that it starts, have as much open as a job needs.

    Args:
        num_joining: nodes that come besides.

    Raises:
        ConfigError: the hard limit is too low.
    """
    num_nodes = max(cluster.nodes + cluster.standby, cluster.max_nodes) + num_joining
    needed = _OWN + _PER_RANK * num_nodes * cluster.devices_per_node
    needed += _PER_DEVICE * cluster.devices_per_node
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        remedy = (
            f"a process may have {hard} files and sockets open (the hard limit RLIMIT_NOFILE, "
            f"ulimit -Hn), and a job of {num_nodes} nodes needs {needed}: raise that limit (as "
            "root: ulimit -n, /etc/security/limits.conf, or LimitNOFILE of the service), or train "
            "on fewer nodes"
        )
        raise ConfigError("cluster.nodes", cluster.nodes, remedy)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
