"""A disk that refuses: before training it is an error, while training it costs only the save."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers.jobs import tiny_job
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.job import JobConfig
from planaria.errors import CheckpointError, ConfigError
from planaria.job.training_job import Job, SilentDisplay
from planaria.nodes.forkserver import ForkServer


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of its own with the given options."""
    directory = tmp_path / "disk"
    directory.mkdir()

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("only root may mount")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip("mounting is not allowed here")
        return directory

    yield mount
    subprocess.run(["umount", str(directory)], check=False, capture_output=True)


def saving_job(directory: Path, *, iterations: int = 4, every: int = 1) -> JobConfig:
    """Saves in every so many iterations, and keeps all."""
    job = tiny_job("sequential", directory, iterations=iterations)
    checkpoint = replace(job.checkpoint, persist_every=every, keep=0)
    return replace(job, checkpoint=checkpoint, cluster=replace(job.cluster, nodes=2))


def leftovers(directory: Path) -> list[Path]:
    """What no complete version accounts for."""
    saves = directory / "checkpoints"
    whole = {v.name for v in tier_of(str(saves)).versions() if v.manifest is not None}
    entries = saves.glob("*")
    return [entry for entry in entries if entry.name not in whole] + [*saves.glob("*/*.partial")]


def test_a_read_only_disk_is_refused(disk: Callable[[str], Path]) -> None:
    """Before torch is imported, let alone anything computed that could not be saved."""
    job = Job(saving_job(disk("ro")))

    with pytest.raises(ConfigError, match=r"checkpoint\.directory.*cannot be written to"):
        job.train()


def test_a_disk_too_small_for_one_save_is_refused(
    disk: Callable[[str], Path], server: ForkServer
) -> None:
    """The profile tells what a save takes."""
    directory = disk("size=8k")

    with pytest.raises(ConfigError, match=r"one save takes \S+ bytes and \S+ are free"):
        Job(saving_job(directory)).train(server=server)

    assert not list(directory.iterdir())


class _Filling(SilentDisplay):
    """The disk fills up when training begins, and may have space again when someone reads of it."""

    def __init__(self, filler: Path, *, stays: bool = False) -> None:
        self._filler = filler
        self._stays = stays

    def show_training(self) -> None:
        space = os.statvfs(self._filler.parent)
        with suppress(OSError):  # A save may take some of it meanwhile.
            self._filler.write_bytes(bytes(space.f_bavail * space.f_frsize))

    def note(self, text: str) -> None:
        if "was not saved" in text and not self._stays:
            self._filler.unlink(missing_ok=True)


def test_a_full_disk_costs_the_save_and_not_the_training(
    disk: Callable[[str], Path], server: ForkServer
) -> None:
    """The next save that fits is made, and what failed is told and in the report."""
    directory = disk("size=4m")
    filler = directory / "filler"

    report = Job(saving_job(directory)).train(server=server, display=_Filling(filler)).report

    failed = [event for event in report.events if event.kind == "save_failed"]
    assert failed
    assert "No space left on device" in failed[0].reason
    assert [record.iteration for record in report.iterations] == [0, 1, 2, 3]
    assert report.final.parameters_sha256
    assert not leftovers(directory)


def test_a_last_save_that_fails_is_an_error_and_older_ones_stay(
    disk: Callable[[str], Path], server: ForkServer
) -> None:
    """Nobody should believe that the parameters are there. The journal is on that disk, too."""
    directory = disk("size=4m")
    Job(saving_job(directory, iterations=6)).train(server=server)
    filling = _Filling(directory / "filler", stays=True)

    job = saving_job(directory, iterations=24, every=100)
    checkpoint = replace(job.checkpoint, timeout_s=6.0)  # It is tried again for that long.
    result = Job(replace(job, checkpoint=checkpoint)).run(
        resume=True, server=server, display=filling
    )

    assert isinstance(result.error, CheckpointError)
    assert "the last save failed" in str(result.error)
    assert "No space left on device" in str(result.error)
    assert len(result.report.iterations) >= 17  # The last one's commit may not be told any more.
    assert result.report.final.parameters_sha256 == ""
    assert result.report.events[-1].kind == "unsaved"
    newest = tier_of(str(directory / "checkpoints")).newest()
    assert newest is not None
    assert newest.iteration == 6
    assert result.report.final.checkpoint.endswith("6-0")
    assert not leftovers(directory)
    assert not [p for p in psutil.Process(server.pid).children() if p.is_running()]
