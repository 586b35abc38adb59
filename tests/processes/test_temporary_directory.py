"""A temporary directory that is full, or gone, is no part of a job."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import PACED, running, train_arguments
from planaria.checkpoint.tiers import tier_of

ENDLESS = (
    "model.time_scale=0.1",
    "cluster.nodes=6",
    "training.global_batch_size=12",
    "training.iterations=1_000_000_000",
    "checkpoint.directory=checkpoints",
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of a command, a small disk; nothing else of its user's is there."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=False)


def fill(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


@pytest.mark.parametrize("moment", ["before", pytest.param("meanwhile", marks=pytest.mark.long)])
def test_a_full_temporary_directory_ends_no_job(
    moment: str, temporary: Path, tmp_path: Path
) -> None:
    """It held the journal, and whatever was forked went through it."""
    if moment == "before":
        fill(temporary)
    with running(train_arguments(PACED, *ENDLESS), directory=tmp_path) as command:
        command.wait_output("iteration 1 ")
        fill(temporary)
        reached = command.output.count("iteration ") + 20
        command.wait_output(f"iteration {reached} ")
        command.process.send_signal(signal.SIGTERM)

        assert command.wait() == 130, command.errors
    newest = tier_of(str(tmp_path / "checkpoints")).newest()
    assert newest is not None
    assert newest.iteration > reached


def test_a_temporary_directory_that_is_not_there_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be removed while the job trains, too."""
    directory = tmp_path / "gone"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with running(train_arguments(PACED, *ENDLESS), directory=tmp_path) as command:
        command.wait_output("iteration 1 ")
        shutil.rmtree(directory)
        command.process.send_signal(signal.SIGTERM)

        assert command.wait() == 130, command.errors
    assert tier_of(str(tmp_path / "checkpoints")).newest() is not None
