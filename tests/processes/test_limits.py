"""What a shell gives a job less of than it needs: files that it may have open, a directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command import PACED, Command, running, train_arguments

FILES = 40  # Fewer than each worker of so many nodes has links.
MANY = (
    "model.time_scale=0.01",
    "cluster.nodes=32",
    "training.global_batch_size=64",
    "training.iterations=2",
    "resilience.failures_ahead=0",
    "checkpoint.directory=checkpoints",
)


@pytest.mark.parametrize("kind", ["-Sn", "-n"])
def test_a_low_limit_of_open_files_ends_no_job(kind: str, tmp_path: Path) -> None:
    """A soft one is raised; with a hard one nothing is begun."""
    shell = ["bash", "-c", f'ulimit {kind} {FILES}; exec "$@"', "bash"]
    with running([*shell, *train_arguments(PACED, *MANY)], directory=tmp_path) as command:
        code = command.wait()

    if kind == "-Sn":
        assert code == 0, command.errors
        assert (tmp_path / "checkpoints" / "2-0").is_dir()
    else:
        assert code == 2
        told = "planaria: cluster.nodes = 32: a process may have 40 files"
        assert command.errors.startswith(told)
        assert not (tmp_path / "checkpoints").exists()


SHORT = (
    "model.time_scale=0.02",
    "cluster.nodes=6",
    "training.global_batch_size=12",
    "training.iterations=2",
)


@contextmanager
def running_nowhere(directory: Path, *settings: str) -> Iterator[Command]:
    """A job whose working directory was removed before it began."""
    shell = ["bash", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "bash"]
    with running([*shell, *train_arguments(PACED, *SHORT, *settings)], directory=directory) as one:
        yield one


def test_a_job_of_absolute_paths_needs_no_working_directory(tmp_path: Path) -> None:
    """Libraries of torch do, where they are loaded."""
    saves = tmp_path / "saves"
    with running_nowhere(tmp_path, f"checkpoint.directory={saves}") as command:
        assert command.wait() == 0, command.errors
    assert (saves / "2-0").is_dir()


def test_a_relative_path_without_a_working_directory_is_the_users_mistake(tmp_path: Path) -> None:
    with running_nowhere(tmp_path, "checkpoint.directory=saves") as command:
        assert command.wait() == 2, command.errors
    told = "planaria: saves is relative to the working directory, which is not there any more"
    assert command.errors.startswith(told)
    assert command.errors.count("\n") == 1
