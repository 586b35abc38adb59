"""What a report says of the save that its job has left."""

import importlib.metadata
import math
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planaria.checkpoint.disk.storage import Directory
from planaria.checkpoint.disk.tiers import Manifest, Tier, tier_of
from planaria.checkpoint.disk.time_limits import with_time_limit
from planaria.core.kinds import Ending
from planaria.core.records import Ended, ToLauncher, Warned
from planaria.job import report
from planaria.job.report import final_record
from planaria.observe.metrics import FinalRecord

ITERATION = 4
LAYERS = 3
ENDED = Ended(ending=Ending.FINISHED, reason="", failure=None, nodes=(0,), epoch=0)


class Told:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, message: ToLauncher) -> None:
        assert isinstance(message, Warned)
        self.texts.append(message.text)


def final(tier: Tier, *, resumed: int = ITERATION) -> tuple[FinalRecord, list[str]]:
    """The record of a job that was resumed and had nothing to train, and what it told."""
    planned: Any = SimpleNamespace(
        resumed=SimpleNamespace(iteration=resumed),
        prepared=SimpleNamespace(parameters=(("w",),) * LAYERS),
    )
    told: Any = Told()
    return final_record(planned, tier, (), told, ENDED), told.texts


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    """With one save."""
    made = tier_of(str(tmp_path))
    content = {"parameter/w": np.zeros(3, np.float32)}
    files = tuple(made.write_layer(ITERATION, 0, layer, content) for layer in range(LAYERS))
    made.publish(Manifest(iteration=ITERATION, epoch=0, job={}, layers=files))
    return made


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has contents of a name never read, as from a file server that is gone."""
    is_over, read = threading.Event(), Directory.read
    hanging: set[str] = set()

    def late(storage: Directory, name: str) -> bytes:
        if Path(name).name in hanging:
            is_over.wait(20.0)
        return read(storage, name)

    monkeypatch.setattr(Directory, "read", late)
    yield hanging.add
    is_over.set()


def test_a_save_that_is_not_read_in_time_costs_its_hashes(
    tier: Tier, hang: Callable[[str], None]
) -> None:
    """It is there all the same, and where is told."""
    hang("layer-00001.safetensors")
    found, texts = final(with_time_limit(tier, timeout_s=0.05))

    assert (found.checkpoint, found.parameters_sha256) == (tier.where(ITERATION, 0), "")
    (text,) = texts
    assert text.startswith("the report has no hashes of the last save: ")
    assert "did not answer within 0.05 s" in text


def test_a_save_whose_manifest_is_not_read_in_time_is_not_taken_for_none(
    tier: Tier, hang: Callable[[str], None]
) -> None:
    """Nobody is to read that nothing was saved."""
    hang("manifest.json")
    found, texts = final(with_time_limit(tier, timeout_s=0.05))

    assert found.checkpoint == ""
    assert "did not answer within 0.05 s" in texts[0]


def test_a_head_that_takes_up_a_job_whose_iterations_are_all_committed_reports_their_end(
    tier: Tier,
) -> None:
    """It said that the job ended where the head before it had begun, and gave no hashes."""
    found, _ = final(tier, resumed=0)

    assert found.iteration == ITERATION
    assert len(found.parameters_sha256) == 64


@pytest.mark.parametrize(
    ("slow_s", "told"),
    [
        (0.0, [f"the job reads its last save for the hashes: 1 of {LAYERS} layers so far"]),
        (math.inf, []),
    ],
)
def test_that_a_save_is_read_is_told_once_where_it_takes_long(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, slow_s: float, told: list[str]
) -> None:
    """The job has ended, and nothing else is said meanwhile."""
    monkeypatch.setattr("planaria.job.report._SLOW_S", slow_s)
    found, texts = final(tier)

    assert len(found.parameters_sha256) == 64
    assert texts == told


def test_a_report_is_made_where_planaria_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run from its source, and a finished job has a report."""

    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)

    assert report.job_versions() == {
        "planaria": "",
        "torch": "",
        "numpy": "",
        "python": platform.python_version(),
    }
