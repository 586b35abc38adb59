"""Padding in saved data sets is cut off or refused, never trained on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.saved_datasets import load, saved_dataset
from planaria.data.batches import microbatch, num_targets
from planaria.data.datasets import vocabulary_size
from planaria.data.text import IGNORED
from planaria.errors import ConfigError


def _mask(text: str) -> list[list[int]]:
    return [[int(letter) for letter in word] for word in text.split()]


def test_padding_at_the_end_of_saved_rows_is_cut_off(tmp_path: Path) -> None:
    """As `tok(text, padding="max_length")` writes it: a model would learn to predict it, and the
    loss would be divided by it.
    """
    rows = [[1, 2, 3, 9, 9, 9], [5, 6, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6], [7, 9, 9, 8, 9, 9]]
    columns = {"input_ids": rows, "attention_mask": _mask("111000 110000 111111 111100")}
    data = saved_dataset(tmp_path, columns | {"token_type_ids": [[0] * 6] * 4})
    dataset = load(data, tmp_path / "cache")

    inputs, targets = microbatch(dataset, np.array([0, 1]), seed=0)
    assert inputs.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert targets.tolist() == [[2, 3, IGNORED], [6, IGNORED, IGNORED]]
    inputs, targets = microbatch(dataset, np.array([2, 3]), seed=0)
    assert inputs.tolist() == [[1, 2, 3, 4], [7, 9, 9, 8]]
    assert targets.tolist() == [[2, 3, 4, IGNORED], [9, 9, 8, IGNORED]]
    assert num_targets(dataset, np.array([0, 1, 2, 3]), seed=0) == 2 + 1 + 3 + 3

    data = saved_dataset(tmp_path / "labelled", columns | {"labels": rows})
    labelled = load(data, tmp_path / "cache")
    inputs, targets = microbatch(labelled, np.array([1, 0]), seed=0)
    assert inputs.tolist() == [[5, 6, 0], [1, 2, 3]]
    assert targets.tolist() == [[6, IGNORED, IGNORED], [2, 3, IGNORED]]
    assert num_targets(labelled, np.array([0, 1]), seed=0) == 3

    whole = saved_dataset(tmp_path / "whole", {"input_ids": rows, "attention_mask": [[1] * 6] * 4})
    assert not getattr(load(whole, tmp_path / "cache"), "is_padded", True)
    later = _mask("111100 111111 111111 111110")  # Beyond the four tokens of a sample.
    data = saved_dataset(tmp_path / "later", {"input_ids": rows, "attention_mask": later})
    assert len(load(data, tmp_path / "cache", objective="masked")) == 4


def test_padding_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a job would read the whole column."""
    columns = {"input_ids": [[1, 2, 3, 4]] * 2, "attention_mask": _mask("1110 1100")}
    data = saved_dataset(tmp_path, columns)
    first = load(data, tmp_path / "cache")

    monkeypatch.delattr("planaria.data.datasets.lengths_without_padding")
    again = load(data, tmp_path / "cache")

    assert first.sample(1, seed=0)[0].tolist() == again.sample(1, seed=0)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("column", "rows", "objective", "message"),
    [
        ("attention_mask", _mask("1111 0011"), "causal", "row 1 of .*padding_side"),
        ("attention_mask", _mask("1101 1111"), "causal", "row 0 of .*a 0 before a 1"),
        ("attention_mask", _mask("1111 0000"), "causal", "has 0 tokens; drop rows"),
        ("attention_mask", _mask("1111 1110"), "masked", "row 1 .* a masked model would see"),
        ("attention_mask", _mask("0111 1111"), "supervised", "row 0 .* a supervised model"),
        ("attention_mask", _mask("1111 111"), "causal", "has not the length"),
        ("attention_mask", _mask("1111 1122"), "causal", "other than 0 and 1"),
        ("attention_mask", [1, 1], "causal", "attention_mask holds int8; planaria takes lists"),
        ("token_type_ids", _mask("0000 0011"), "causal", "token_type_ids holds"),
        ("token_type_ids", _mask("0000 0011"), "supervised", "give rows of one text each"),
    ],
)
def test_padding_that_a_model_would_take_for_text_is_refused(
    tmp_path: Path, column: str, rows: list[Any], objective: str, message: str
) -> None:
    """planaria gives a model the tokens alone; only padding after all text can be cut off."""
    columns = {"input_ids": [[1, 2, 3, 4]] * 2, "labels": [[1] * 4] * 2, column: rows}
    data = saved_dataset(tmp_path, columns)

    with pytest.raises(ConfigError, match=message):
        load(data, tmp_path / "cache", objective=objective)
    assert vocabulary_size(data, cache_directory=tmp_path / "cache") == 5
