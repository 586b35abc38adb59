"""What a shell gives a job less of than it needs: files that it may have open, a directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.command import PACED, Command, running, train_arguments

FILES = 24  # Fewer than a worker of so many nodes has open.
MANY = (
    "model.time_scale=0.01",
    "cluster.nodes=12",
    "training.global_batch_size=24",
    "training.iterations=2",
    "resilience.failures_ahead=0",
)
# The working directory of a job is removed before it begins.
NOWHERE = "mkdir gone; cd gone; rmdir ../gone"


@contextmanager
def running_after(first: str, directory: Path, saves: Path | str) -> Iterator[Command]:
    """A job that a shell starts after it has done something."""
    shell = ["bash", "-c", f'{first}; exec "$@"', "bash"]
    arguments = train_arguments(PACED, *MANY, f"checkpoint.directory={saves}")
    with running([*shell, *arguments], directory=directory) as command:
        yield command


def test_a_job_needs_neither_a_working_directory_nor_a_high_limit_of_open_files(
    tmp_path: Path,
) -> None:
    """A soft limit is raised. Libraries of torch want a directory where they are loaded; a job of
    absolute paths needs none."""
    saves = tmp_path / "saves"
    with running_after(f"ulimit -Sn {FILES}; {NOWHERE}", tmp_path, saves) as command:
        assert command.wait() == 0, command.errors
    assert (saves / "2-0").is_dir()


def test_with_a_hard_limit_of_open_files_that_is_too_low_nothing_is_begun(tmp_path: Path) -> None:
    with running_after(f"ulimit -n {FILES}", tmp_path, "saves") as command:
        assert command.wait() == 2
    told = f"planaria: cluster.nodes = 12: a process may have {FILES} files"
    assert command.errors.startswith(told)
    assert not (tmp_path / "saves").exists()


def test_a_relative_path_without_a_working_directory_is_the_users_mistake(tmp_path: Path) -> None:
    with running_after(NOWHERE, tmp_path, "saves") as command:
        assert command.wait() == 2, command.errors
    told = "planaria: saves is relative to the current directory, which no longer exists"
    assert command.errors.startswith(told)
    assert command.errors.count("\n") == 1
