"""Two jobs that were told to save in one place."""

from pathlib import Path

import pytest

from helpers.command import PACED, command, running, train_arguments
from planaria.checkpoint.disk.tiers import tier_of
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer

SMALL = (
    "model.time_scale=0.1",
    "cluster.nodes=3",
    "resilience.failures_tolerated=0",
    "training.global_batch_size=12",
    "checkpoint.persist_every=1",
)
SETTINGS = (*SMALL, "checkpoint.directory=checkpoints", "training.iterations=1_000_000_000")


@pytest.mark.long
def test_the_second_job_in_a_directory_is_refused_and_the_first_goes_on(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would write the same files; killed, the first keeps nobody out, nor itself."""
    monkeypatch.chdir(tmp_path)
    arguments = train_arguments(PACED, *SETTINGS)
    with running(arguments, directory=tmp_path) as first:
        first.wait_output("importing torch")
        for options in ((), ("--resume",)):
            second = command(*arguments[3:], *options)
            assert second.exit_code == 2
            assert f"job 'paced' (process {first.process.pid} on " in second.stderr
            assert "checkpoint.directory = " in second.stderr
            assert second.stderr.count("\n") == 1
        first.wait_output("saved iteration 2")
        first.process.kill()
        first.wait()

    saves = tmp_path / "checkpoints"
    before = tier_of(str(saves)).newest()
    assert before is not None
    overrides = [
        *SMALL,
        f"training.iterations={before.iteration + 1}",
        f"checkpoint.directory={saves}",
    ]
    Job.from_file(PACED, overrides=overrides).train(resume=True, server=server)
    newest = tier_of(str(saves)).newest()
    assert newest is not None
    assert newest.epoch > before.epoch
    assert not (saves / ".job.lock").exists()
