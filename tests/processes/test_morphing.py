"""Nodes die under resilience.policy = "morph": all go back to the newest save, to the same bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    baseline_digests,
    chaos_job,
    check_survived,
    long_but_the_first,
    only_recovery,
    recoveries,
    run_under_faults,
)
from planaria.job.training_job import TrainingResult
from planaria.nodes.forkserver import ForkServer

pytestmark = pytest.mark.faults

Run = Callable[..., TrainingResult]

EVERY = 3
ITERATIONS = 16
# Late: on a busy machine the first save is not complete two iterations after it began.
KILLS = [("kill:1@14",), ("kill:0@13.backward",)] + [
    (f"kill:{node}@13.{step}",)
    for node in (2, 5)
    for step in ("forward", "reduce", "commit", "optimizer")
]


@pytest.fixture
def morph(server: ForkServer, tmp_path: Path) -> Run:
    """Runs a job on six nodes with faults, to the bits of the baseline run."""

    def run(
        *specs: str, every: int = EVERY, f: int = 1, iterations: int = ITERATIONS
    ) -> TrainingResult:
        baseline = baseline_digests(server, iterations)
        config = chaos_job(
            FAMILY, tmp_path / "run", server, f=f, policy="morph", iterations=iterations
        )
        config = replace(config, checkpoint=replace(config.checkpoint, persist_every=every))
        result = run_under_faults(config, server, *specs)
        check_survived(result, specs, baseline)
        return result

    return run


@pytest.mark.parametrize("specs", long_but_the_first(KILLS), ids=" ".join)
def test_all_go_back_to_the_newest_save(specs: tuple[str, ...], morph: Run) -> None:
    """No layer comes from a peer, every process lives on, and what was redone is accounted for."""
    result = morph(*specs)

    event = only_recovery(result)
    assert event.policy == "morph"
    assert event.source_tier == "disk"
    assert event.received_bytes == 0
    batch = result.planned.config.training.global_batch_size
    assert event.redone_samples % batch == 0
    assert batch <= event.redone_samples <= (event.iteration - EVERY) * batch
    assert result.report.ledger["redo"] > 0.0
    pids = {worker.pid for worker in result.report.workers}
    assert len(pids) == 6


@pytest.mark.long
def test_without_a_save_all_begin_anew(morph: Run) -> None:
    """The seed tells the first state, so the job redoes all that it has done, and loses nothing."""
    result = morph("kill:3@2", every=0)

    event = only_recovery(result)
    assert event.redone_samples >= 2 * result.planned.config.training.global_batch_size
    assert event.source_tier == ""


def test_a_layer_without_a_live_holder_is_on_disk(morph: Run) -> None:
    """Four of six nodes at once, where only two failures are tolerated: two nodes hold no model."""
    result = morph("kill:0,2,3,4@14", f=1)

    event = only_recovery(result)
    assert event.source_tier == "disk"
    assert len(result.report.final.nodes) == 2


@pytest.mark.long
@pytest.mark.parametrize("step", ["decide", "transfer"])
def test_losses_in_a_recovery_and_after_it(step: str, morph: Run) -> None:
    """The second loss strikes in the recovery of iteration 4, which goes back to 3; the third in
    what is redone."""
    result = morph("kill:1@4", f"kill:2@4.{step}", "kill:5@5")

    assert {event.policy for event in recoveries(result)} == {"morph"}
    assert len(result.report.final.nodes) == 3


def test_nodes_that_come_or_leave_in_peace_undo_nothing(morph: Run) -> None:
    """Layers come from live holders while training goes on. The job outlasts the start of a node,
    which takes a second where both processors are busy."""
    result = morph("kill:4@3", "join:1@4", iterations=6 * ITERATIONS)

    loss, join = recoveries(result)
    assert loss.redone_samples
    assert join.policy == "morph"
    assert join.redone_samples == 0
