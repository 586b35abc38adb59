"""The estimator is held against a clock: layers that sleep, on real nodes and links."""

import statistics
from pathlib import Path

import pytest

from planaria.library import Job
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import Report

EXAMPLE = Path(__file__).parents[2] / "examples" / "paced.toml"
GOAL = 0.03  # Asserted by benchmarks/prediction.py on an idle machine; here at three times that.


@pytest.mark.parametrize("nodes", [6, 8])
def test_predicted_iteration_time_is_the_measured_one(
    nodes: int, server: ForkServer, tmp_path: Path
) -> None:
    """Two equal pipelines, and two unequal ones. The same job with layers that take no time, run
    before it, tells what the machine itself adds; the best of all iterations but the first."""
    nothing = _report(nodes, server, tmp_path / "nothing", "model.time_scale=1e-6")
    report = _report(nodes, server, tmp_path / "paced")

    predicted_s = report.iterations[0].predicted_s
    added_s = statistics.median(_seconds(nothing))
    measured_s = min(_seconds(report))
    assert (1 - 3 * GOAL) * predicted_s < measured_s < (1 + 3 * GOAL) * predicted_s + added_s
    assert len(report.workers) == nodes


def _report(nodes: int, server: ForkServer, directory: Path, *settings: str) -> Report:
    overrides = [
        f"cluster.nodes={nodes}",
        f'checkpoint.directory="{directory}"',
        "training.iterations=4",
        "training.global_batch_size=12",
        *settings,
    ]
    return Job.from_file(EXAMPLE, overrides=overrides).train(server=server).report


def _seconds(report: Report) -> list[float]:
    return [record.seconds for record in report.iterations[1:]]
