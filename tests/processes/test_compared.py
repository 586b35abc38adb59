"""What a job that lost nodes tells of its predictions: by action, transition and iteration."""

from pathlib import Path

import msgspec
import pytest

from helpers.chaos import recoveries
from helpers.command import PACED, command
from planaria.core.inject import parse_injection
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.show.pictures.gantt import compared_figure

LOST = (4, 7)
LOST_AT = (3, 6)
MOST_SHORTER = 2.0


@pytest.fixture(scope="module")
def traced(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """Nine nodes whose layers sleep, two of which die one after the other."""
    directory = tmp_path_factory.mktemp("traced")
    job = Job.from_file(
        PACED,
        overrides=[
            f'checkpoint.directory="{directory}"',
            "training.iterations=9",
            "model.time_scale=0.15",
            'resilience.policy="reinstantiate"',  # Its backwards are whole.
        ],
    )
    specs = tuple(parse_injection(f"kill:{LOST[i]}@{LOST_AT[i]}") for i in range(2))
    return job.train(trace=True, injections=specs, server=server)


@pytest.mark.long
def test_each_traced_iteration_stands_beside_the_prediction_of_its_own_plan(
    traced: TrainingResult,
) -> None:
    """A plan that a loss has replaced predicts nothing any more."""
    assert [one.iteration for one in traced.compared] == list(range(9))
    for one, record in zip(traced.compared, traced.report.iterations, strict=True):
        assert one.predicted.iteration_s == pytest.approx(record.predicted_s)
        assert one.measured.iteration_s == record.seconds
        assert one.clock_error_s == record.clock_error_s == 0.0  # All ranks have one clock.
        computing = [
            {(span.rank, span.action) for span in line.spans if span.lane == "compute"}
            for line in (one.predicted, one.measured)
        ]
        # Whoever is killed next may take what it was about to tell with it.
        next_lost = {rank for i, rank in enumerate(LOST) if LOST_AT[i] == one.iteration + 1}
        missing = {rank for rank, _ in computing[0] - computing[1]}
        assert missing <= next_lost  # Sends and receives are measured on this lane, too.
        assert not {rank for rank, _ in computing[0]}.intersection(LOST[: record.epoch])


def test_every_rank_tells_its_forwards_and_backwards_in_every_epoch(
    traced: TrainingResult,
) -> None:
    """Sleeps take what the profile says, or longer on a busy machine."""
    told = {(record.epoch, record.rank, record.kind) for record in traced.report.actions}

    nodes = set(range(9))
    assert told == {
        (epoch, rank, kind)
        for epoch in range(3)
        for rank in nodes.difference(LOST[:epoch])
        for kind in "FB"
    }
    for record in traced.report.actions:
        assert record.measured_s > 0.9 * record.predicted_s
    assert traced.report.memory == ()  # The profile tells the bytes of another model.


def test_the_second_recovery_is_priced_by_the_first(traced: TrainingResult) -> None:
    """Whatever machine this is: beside what layers took, as ranks tell, it is to take as long.

    Or less by schedules: fewer ranks compute them, and the first took a quarter longer for them.
    """
    first, second = recoveries(traced)

    predicted_s = second.predicted_downtime_s - second.predicted_transfer_s
    assert first.predicted_transfer_s > 0.0
    assert (first.transition_s - first.transfer_s) / MOST_SHORTER <= predicted_s + 1e-6
    assert predicted_s <= first.transition_s + 1e-6


def test_a_real_report_can_be_explained_and_drawn(traced: TrainingResult, tmp_path: Path) -> None:
    """From the file that --report writes, and from what --timeline has."""
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(traced.report))

    output = command("events", str(path)).output
    drawn = compared_figure("paced", traced.compared, traced.report.events, picture="svg")

    assert [f"node {node} was killed" in output for node in LOST] == [True, True]
    assert output.count("planaria chose") == 2
    assert output.count(" was predicted (") == 2
    assert drawn.count(b">Iteration ") == 3
