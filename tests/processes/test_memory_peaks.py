"""What ranks of a real job hold at most, beside Odyssey's equation 14."""

from pathlib import Path

import pytest

from planaria.core.inject import parse_injection
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.show.chrome_trace import chrome_trace
from planaria.show.pictures.gantt import compared_figure

EXAMPLE = Path(__file__).parents[2] / "examples" / "small.toml"
LOST = 2

# Measured was at most 0.9% more: outputs that wait between their forward and their backward, which
# autograd does not keep and nobody predicts. Up to 0.03% less: step counts of the optimizer.
REL = 0.02


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="deterministic"),
        pytest.param(False, id="fast", marks=pytest.mark.long),
    ],
)
def traced(
    request: pytest.FixtureRequest, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> TrainingResult:
    """Six nodes that share a GPT-2 by twos, one of which dies."""
    directory = tmp_path_factory.mktemp("peaks")
    overrides = [
        f'checkpoint.directory="{directory}"',
        "training.iterations=6",
        f"training.deterministic={str(request.param).lower()}",
        'resilience.policy="reinstantiate"',
    ]
    job = Job.from_file(EXAMPLE, overrides=overrides)
    injections = (parse_injection(f"kill:{LOST}@3"),)
    return job.train(trace=True, injections=injections, server=server)


def test_every_rank_holds_what_was_predicted_before_and_after_a_loss(
    traced: TrainingResult,
) -> None:
    """State, and activations of as many microbatches as its schedule keeps in flight; a rank that
    held one copy of the gradients more would be 8% off at least, as one was once."""
    told = {(record.epoch, record.rank): record for record in traced.report.memory}

    nodes = set(range(6))
    assert {(0, rank) for rank in nodes} | {(1, rank) for rank in nodes - {LOST}} == set(told)
    for key, record in told.items():
        assert record.tensor_bytes == pytest.approx(record.predicted_bytes, rel=REL), key
        # All of which is resident, with much else.
        assert record.measured_bytes > 0.9 * record.tensor_bytes, key


def test_the_peaks_of_each_iteration_are_in_both_pictures(traced: TrainingResult) -> None:
    """As counters of a trace, and as bars."""
    trace = chrome_trace(traced.compared, traced.report.events)
    drawn = compared_figure("small", traced.compared, picture="svg").decode()

    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    for one in traced.compared:
        assert [peak.rank for peak in one.peaks] == sorted({s.rank for s in one.measured.spans})
    assert len(counters) == 2 * sum(len(one.peaks) for one in traced.compared)
    assert "Peak memory" in drawn
    assert drawn.count("KiB predicted") == 5


@pytest.mark.long
def test_a_job_that_is_not_traced_does_not_count(server: ForkServer, tmp_path: Path) -> None:
    """It has resident memory alone to tell."""
    overrides = [f'checkpoint.directory="{tmp_path}"', "training.iterations=2"]
    report = Job.from_file(EXAMPLE, overrides=overrides).train(server=server).report

    assert len(report.memory) == 6
    assert all(record.tensor_bytes == 0 < record.measured_bytes for record in report.memory)
