"""The user's own code may stand still; the node lives, and says where."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import only_recovery
from helpers.jobs import tiny_job
from planaria.job.training_job import Job, SilentDisplay
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord

pytestmark = pytest.mark.faults

LEASE_S = 1.0


class _Hanging(SilentDisplay):
    """Has the next forward hang once two iterations are committed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def show_iteration(self, record: IterationRecord) -> None:
        if record.iteration == 1:
            self._path.touch()


def test_a_forward_that_never_returns_is_found_by_its_stack(
    server: ForkServer, hang_file: Path, tmp_path: Path
) -> None:
    """Its action takes ten times as long as the longest before; then its worker is replaced."""
    config = tiny_job("sequential", tmp_path, iterations=6)
    config = replace(
        config,
        model=replace(config.model, target="helpers.user_models:hanging"),
        resilience=replace(config.resilience, policy="reinstantiate"),
        cluster=replace(config.cluster, nodes=3, lease_s=LEASE_S),
    )

    result = Job(config).run(server=server, display=_Hanging(hang_file))

    assert result.error is None
    event = only_recovery(result)
    assert event.kind == "stall"
    assert "user_models.py" in event.reason
    assert event.downtime_s < 3 * (LEASE_S + 1.0)
    assert len(result.report.final.nodes) == 3
