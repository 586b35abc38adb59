"""Every connection between processes of a job breaks in time if the other machine is gone."""

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from helpers.chaos import FAMILY, chaos_job, run_under_faults
from planaria.job.training_job import SilentDisplay
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord

pytestmark = pytest.mark.faults

_ESTABLISHED = "01"
_NO_TIMER = "00"


class Watch(SilentDisplay):
    """Looks at the connections in every iteration.

    Attributes:
        connections: those seen, by iteration; each with whether the kernel has a timer for it.
    """

    def __init__(self) -> None:
        self.connections: dict[int, dict[str, bool]] = {}

    def show_iteration(self, record: IterationRecord) -> None:
        self.connections[record.iteration] = _connections()


def _connections() -> dict[str, bool]:
    """The open TCP connections of this process and its descendants."""
    inodes = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(OSError):
            for descriptor in os.scandir(f"/proc/{process.pid}/fd"):
                with suppress(OSError):
                    inodes.add(os.readlink(descriptor.path))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        f"{line[1]} to {line[2]}": line[5][:2] != _NO_TIMER
        for line in lines
        if line[3] == _ESTABLISHED and f"socket:[{line[9]}]" in inodes
    }


def test_every_connection_of_a_job_is_kept_alive(server: ForkServer, tmp_path: Path) -> None:
    """Both ends of links, of agents' connections to the coordinator, and of probes. The kernel has
    no timer for an idle connection without keep-alive."""
    watch = Watch()
    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=2, f=0)
    result = run_under_faults(config, server, "disk=0.01:@1", display=watch)

    assert result.error is None
    # A link, the agents, and the probes of workers and coordinator; both ends of each.
    assert max(len(connections) for connections in watch.connections.values()) >= 2 * (1 + 2 + 3)
    # One that was made a moment ago may have no timer yet.
    unwatched = Counter(
        name
        for connections in watch.connections.values()
        for name, has_timer in connections.items()
        if not has_timer
    )
    assert [name for name, number in unwatched.items() if number > 1] == []
