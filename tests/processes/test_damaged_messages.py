"""A message that is damaged on its way costs its link, and never the bits of a job."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    ITERATIONS,
    baseline_digests,
    chaos_job,
    events_besides_load,
    run_under_faults,
)
from helpers.flipping_sender import ITERATION
from helpers.jobs import digests
from planaria.job import training_job as library
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.faults


def test_a_job_goes_on_to_the_same_bits_after_a_message_was_damaged(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is lost by it: all nodes are members afterwards."""
    expected = baseline_digests(server, ITERATIONS)
    monkeypatch.setattr(library, "_WORKER", "helpers.flipping_sender:main")
    config = chaos_job(FAMILY, tmp_path / "run", server, nodes=2, f=0)
    config = replace(config, cluster=replace(config.cluster, checksums="on"))
    result = run_under_faults(config, server)

    assert result.error is None
    assert digests(result) == expected
    assert result.report.final.nodes == (0, 1)
    (event,) = events_besides_load(result)
    assert (event.nodes, event.iteration) == ((), ITERATION)
    assert "a link broke between live nodes" in event.reason
    assert "bytes on channel FORWARD was damaged on its way" in event.reason
