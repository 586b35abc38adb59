"""The length of a user's data set, by which all samples are numbered."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from helpers.jobs import tiny_job
from helpers.saved_datasets import load, saved_dataset
from planaria.core.job import DataConfig
from planaria.data.datasets import load_dataset
from planaria.engine.prepare import load_model
from planaria.errors import ConfigError
from planaria.transport.timekeeping import Timekeeper


class _OfLength:
    """A user's dataset whose length is no length, or an error."""

    def __init__(self, length: Callable[[], object]) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length()  # type: ignore[return-value]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.zeros(1)


@pytest.mark.parametrize(
    ("length", "reason"),
    [(-1, "should return >= 0"), (2.5, "'float' object"), (1 << 70, "index-sized integer")],
)
def test_user_datasets_without_a_length_are_refused(
    length: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python says so in a frame of planaria's; a user saw twenty of these."""
    module, lengths = ModuleType("user_lengths"), [lambda: length, lambda: int("no number")]
    module.make = lambda: _OfLength(lengths.pop(0))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_lengths", module)
    data = DataConfig(kind="python", target="user_lengths:make")
    with pytest.raises(ConfigError, match=f"__len__ of the _OfLength.*{reason}") as caught:
        load(data, tmp_path, objective="supervised")

    assert caught.value.field == "data.target"
    with pytest.raises(ValueError, match="no number"):
        load(data, tmp_path, objective="supervised")


def test_what_builds_a_data_set_always_runs_with_the_jobs_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it draws may be kept for the held-out part. A rank ran it with seed 0 for the size of
    the vocabulary first, its loaders with the job's seed, so the two had different parts. Own
    layers need no size."""
    drawn: list[float] = []

    def make() -> list[tuple[Tensor, Tensor]]:
        drawn.append(float(torch.rand(1)))
        return [(torch.zeros(1), torch.zeros(1))]

    module = ModuleType("user_lengths")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_lengths", module)
    data = DataConfig(kind="python", target="user_lengths:make", sequence_length=16)
    of_own_layers, of_transformers = (
        replace(job, data=data, training=replace(job.training, seed=7))
        for job in (tiny_job("sequential", tmp_path), tiny_job("gpt2", tmp_path))
    )
    build = partial(load_model, cache_directory=tmp_path, profile=None, timekeeper=Timekeeper())
    build(of_own_layers)
    assert drawn == []

    build(of_transformers)
    for seed in (7, 0):
        load_dataset(data, objective="supervised", seed=seed, cache_directory=tmp_path)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"input_ids": [[1, 2, None, 4]]}, "input_ids has nulls, 1 in all"),
        ({"input_ids": [[1, 2], None]}, "input_ids has nulls, 1 in all"),
        ({"input_ids": [[1, 2]] * 2, "labels": [[1, 2], [None, 2]]}, "labels has nulls, 1"),
    ],
)
def test_nulls_in_a_saved_data_set_are_refused(
    columns: dict[str, list[object]], words: str, tmp_path: Path
) -> None:
    """They were read as the least number that there is."""
    data = replace(saved_dataset(tmp_path, columns), sequence_length=2)
    with pytest.raises(ConfigError, match=words):
        load(data, tmp_path)
