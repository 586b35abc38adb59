"""A temporary directory that is full, or gone, is no part of a job."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.command import PACED, Command, running, train_arguments
from planaria.checkpoint.disk.tiers import tier_of

pytestmark = pytest.mark.faults

ENDLESS = (
    "model.time_scale=0.1",
    "cluster.nodes=3",
    "resilience.failures_tolerated=0",
    "training.global_batch_size=12",
    "training.iterations=1_000_000_000",
    "checkpoint.directory=checkpoints",
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of a command, a small disk where mounting is allowed; nothing else
    of its user's is there."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    if os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
        subprocess.run(command, check=False)
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    yield directory
    unmount(directory)


def unmount(directory: Path) -> None:
    """Whoever still has it open keeps it."""
    if directory.is_mount():
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> None:
    """If it is a disk of its own."""
    if not directory.is_mount():
        return
    with (directory / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_temporary_directory_that_is_full_and_then_gone_ends_no_job(
    moment: str, temporary: Path, tmp_path: Path
) -> None:
    """It held the journal, and whatever was forked went through it. One that is of no use before
    the job begins is in test_surroundings.py, too."""
    if moment == "before":
        if not temporary.is_mount():
            pytest.skip("mounting is not allowed here")
        fill(temporary)
    with running(train_arguments(PACED, *ENDLESS), directory=tmp_path) as command:
        command.wait_output("iteration 1 ")
        fill(temporary)
        wait_more_iterations(command)
        unmount(temporary)
        shutil.rmtree(temporary)
        reached = wait_more_iterations(command)
        command.process.send_signal(signal.SIGTERM)

        assert command.wait() == 130, command.errors
    newest = tier_of(str(tmp_path / "checkpoints")).newest()
    assert newest is not None
    assert newest.iteration > reached


def wait_more_iterations(command: Command) -> int:
    """Blocks until five more are committed; the number of the last of them."""
    reached = command.output.count("iteration ") + 5
    command.wait_output(f"iteration {reached} ")
    return reached
