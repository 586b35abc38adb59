"""Nodes die under resilience.policy = "repartition"; layouts searched anew have the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    baseline_digests,
    chaos_job,
    check_survived,
    only_recovery,
    recoveries,
    run_under_faults,
)
from planaria.job.training_job import TrainingResult
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.timed

ITERATIONS = 60  # So many that it has not ended before a node has left.

Run = Callable[..., TrainingResult]


@pytest.fixture
def calm(server: ForkServer) -> tuple[str, str]:
    """The digests of the job without failures."""
    return baseline_digests(server, ITERATIONS)


@pytest.fixture
def repartition(server: ForkServer, tmp_path: Path, calm: tuple[str, str]) -> Run:
    """Runs a job on three pipelines of two nodes with faults, to the bits of the baseline run."""

    def run(*specs: str) -> TrainingResult:
        config = chaos_job(
            FAMILY, tmp_path / "run", server, policy="repartition", iterations=ITERATIONS
        )
        result = run_under_faults(config, server, *specs, sizes=(2, 2, 2))
        check_survived(result, specs, calm)
        return result

    return run


def test_a_kill_is_answered_by_a_layout_that_was_searched(repartition: Run) -> None:
    """All survivors work, and of the layouts proposed the best was taken."""
    result = repartition("kill:1@3.backward")

    event = only_recovery(result)
    assert event.policy == "repartition"
    scores = {str(c["answer"]): float(str(c["score"])) for c in event.candidates}
    assert "repartition" in scores
    assert scores[event.answer] == max(scores.values())
    assert len(result.report.final.nodes) == 5


def test_a_loss_a_join_and_a_notice_are_answered_by_layouts(repartition: Run) -> None:
    """A join and a leave begin at commits, and nothing is done again for them.

    Where the machine is so busy that a node seems slow by then, templates for unequal nodes answer.
    """
    result = repartition("kill:0@2", "join:1@4", "preempt=60:3@9")

    lost, *others = recoveries(result)
    told = [(event.kind, event.policy, event.reason) for event in result.report.events]
    assert lost.policy == "repartition", told
    assert {event.policy for event in others} <= {"repartition", "reinstantiate"}, told
    assert {event.kind for event in others} == {"join", "preempt"}
    assert all(event.redone_samples == 0 for event in others)
    assert len(result.report.final.nodes) == 5
