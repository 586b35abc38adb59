"""Data sets as `save_to_disk` of datasets writes them."""

from pathlib import Path
from typing import Any

import pytest

from planaria.core.job import DataConfig, ModelConfig
from planaria.data.datasets import Dataset, load_dataset

_LAYERS = ModelConfig(kind="python", target="mine:layers")
_ENCODER = ModelConfig(config={"model_type": "bert"})


def load(
    data: DataConfig, cache: Path, *, objective: str = "causal", model: ModelConfig | None = None
) -> Dataset:
    """The data set of a job with seed 1, by default with layers of the user's if "supervised"."""
    model = model or (_LAYERS if objective == "supervised" else _ENCODER)
    return load_dataset(data, objective=objective, seed=1, cache_directory=cache, model=model)


def saved_dataset(directory: Path, columns: dict[str, list[Any]], *, split: str = "") -> DataConfig:
    """Saves columns as a data set, or as a split of one; samples have four tokens."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_dict(columns)
    if split:
        saved = datasets.DatasetDict({split: saved})
    saved.save_to_disk(directory / "saved")
    return DataConfig(kind="hf", path=str(directory / "saved"), sequence_length=4)
