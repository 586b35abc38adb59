"""The length of a user's data set, by which all samples are numbered."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from helpers.saved_datasets import load
from planaria.core.job import DataConfig
from planaria.errors import ConfigError


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
