"""A real Ray on test hosts: its head and its user on the first one, a raylet on each other.

Each of those gives two CPUs, so that Ray has room for two actors of a job on each.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from helpers.host_networks import TIMEOUT_S
from helpers.hosts import Host, Hosts, Process

_PORT: Final = 6379
_STORE_BYTES: Final = 100_000_000
_STARTED: Final = "This command will now block forever"


def has_ray() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("ray") is not None


class RayCluster:
    """A Ray on hosts.

    Attributes:
        machines: hosts on which actors may run.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._head, *self.machines = hosts
        self._address = f"{self._head.address}:{_PORT}"
        options = (f"--port={_PORT}", "--num-cpus=0", "--include-dashboard=false")
        self._start(self._head, "--head", *options).wait_for_line(_STARTED)
        started = [self.start_raylet(host) for host in self.machines]
        for process in started:
            process.wait_for_line(_STARTED, timeout_s=TIMEOUT_S)

    def start_raylet(self, host: Host) -> Process:
        """Starts Ray on a machine; for the first time, or after it was lost."""
        return self._start(host, f"--address={self._address}", "--num-cpus=2")

    def drain(self, host: Host) -> None:
        """Has Ray say that a machine will be taken away in ten minutes, which a test must do."""
        look = (
            "import ray; ray.init(log_to_driver=False); "
            f"[node] = [n for n in ray.nodes() if n['NodeManagerAddress'] == '{host.address}']; "
            "print('node', node['NodeID'])"
        )
        env = {"RAY_ADDRESS": self._address}
        told = self._head.run("python", "-c", look, env=env)
        self._head.run(
            *("python", "-m", "ray.scripts.scripts", "drain-node", f"--address={self._address}"),
            *("--node-id", told.split()[-1], "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "test", "--deadline-remaining-seconds", "600"),
        )

    def _start(self, host: Host, *options: str) -> Process:
        return host.start(
            *("python", "-m", "ray.scripts.scripts", "start", "--block", *options),
            *(f"--node-ip-address={host.address}", f"--object-store-memory={_STORE_BYTES}"),
            "--disable-usage-stats",
        )

    def start(self, *command: str, cwd: Path) -> Process:
        """Starts a command of a user."""
        return self._head.start(*command, cwd=cwd, env={"RAY_ADDRESS": self._address})


@contextmanager
def ray_cluster(directory: Path, *, num_machines: int) -> Iterator[RayCluster]:
    """A Ray of so many machines.

    Args:
        directory: directory that all hosts see.
    """
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parents[1]
    with Hosts(num_machines + 1, shared=[directory, package]) as hosts:
        yield RayCluster(hosts)
