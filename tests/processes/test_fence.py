"""A node that was taken for dead and is not does no harm when it goes on."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from helpers.chaos import chaos_job, run_under_faults
from helpers.command import wait_for
from planaria.checkpoint.disk.tiers import tier_of
from planaria.errors import CheckpointError
from planaria.job.planning import fork_server
from planaria.job.training_job import SilentDisplay
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord

pytestmark = pytest.mark.faults

LEASE_S = 1.0
TESTS = str(Path(__file__).parents[1])


def contents(directory: Path) -> dict[str, int]:
    """Every file of the checkpoints and when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_node_that_goes_on_after_its_eviction_ends_itself_and_says_so(
    server: ForkServer, tmp_path: Path
) -> None:
    """It hangs for longer than its lease, while the others train on, and then wakes up."""
    config = chaos_job("sequential", tmp_path / "run", server, nodes=4, iterations=1000)
    config = replace(config, cluster=replace(config.cluster, lease_s=LEASE_S))
    printed: list[str] = []
    own = fork_server(config, search_path=[TESTS], output=printed.append)
    display = _StopsOnceAlone(own, num_left=4)
    try:
        result = run_under_faults(config, own, "hang=2:3@3.forward", display=display)
    finally:
        own.close()

    assert display.num_after_wake == 4  # Three nodes and the coordinator.
    assert 3 not in result.report.final.nodes
    assert [line for line in printed if line.startswith("node 3 ends itself: ")]


class _StopsOnceAlone(SilentDisplay):
    """Interrupts the job once the node that hung is gone."""

    def __init__(self, server: ForkServer, *, num_left: int) -> None:
        self._server = server
        self._num_left = num_left
        self.num_after_wake = -1

    def show_iteration(self, record: IterationRecord) -> None:
        children = psutil.Process(self._server.pid).children()
        if record.iteration > 5 and self.num_after_wake < 0 and len(children) == self._num_left:
            self.num_after_wake = len(children)
            os.kill(os.getpid(), signal.SIGINT)


def test_a_save_under_way_is_not_finished_without_a_lease(tmp_path: Path) -> None:
    """Asked before each step, so that whoever was stopped in the middle stops there."""
    tier = tier_of(str(tmp_path))
    state = {"parameter/w": np.zeros(4, np.float32)}
    calls = iter([True, False])
    lapsed_s = time.monotonic() - 1.0

    with pytest.raises(CheckpointError, match="lease has run out"):
        tier.write_layer(3, 0, 0, state, may_write=lambda: next(calls))
    with pytest.raises(CheckpointError, match="lease has run out"):
        tier.write_layer(3, 0, 1, state, may_write=lambda: time.monotonic() < lapsed_s)

    wait_for(lambda: not contents(tmp_path), what="nothing is left")
