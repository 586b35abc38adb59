"""Two jobs that were told to save in one place."""

import signal
from pathlib import Path

from command import PACED, running, train_arguments
from planaria.checkpoint.tiers import tier_of

SETTINGS = (
    "model.time_scale=0.1",
    "checkpoint.directory=checkpoints",
    "checkpoint.persist_every=1",
    "training.iterations=1_000_000_000",
)


def test_the_second_job_in_a_directory_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """Both would write the same files; killed, the first keeps nobody out, nor itself."""
    arguments = train_arguments(PACED, *SETTINGS)
    with running(arguments, directory=tmp_path) as first:
        first.wait_output("importing torch")
        for options in ((), ("--resume",)):
            with running([*arguments, *options], directory=tmp_path) as second:
                assert second.wait() == 2
            assert f"job 'paced' (process {first.process.pid} on " in second.errors
            assert "checkpoint.directory = " in second.errors
            assert second.errors.count("\n") == 1
        first.wait_output("saved iteration 2")
        first.process.kill()
        first.wait()

    with running([*arguments, "--resume"], directory=tmp_path) as resumed:
        resumed.wait_output("training\n")
        resumed.process.send_signal(signal.SIGINT)
        assert resumed.wait() == 130, resumed.errors
    newest = tier_of(str(tmp_path / "checkpoints")).newest()
    assert newest is not None
    assert newest.epoch > 0
    assert not (tmp_path / "checkpoints" / ".job.lock").exists()
