"""Scikit-learn's handwritten digits, 8 by 8 pixels each, and how many of them are told right."""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from torch import Tensor

NUM_HELD_OUT = 297


@cache
def _loaded() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    images, classes = load_digits(return_X_y=True)
    return (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8), classes.astype(np.int64)


class Digits:
    """Samples (image, class) from a number on."""

    def __init__(self, first: int, end: int) -> None:
        self._first, self._end = first, end

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, classes = _loaded()
        number = self._first + index
        return torch.from_numpy(images[number]), torch.tensor(classes[number])


def training() -> Digits:
    """The digits that are learned."""
    return Digits(0, len(_loaded()[1]) - NUM_HELD_OUT)


def held_out() -> Digits:
    """The others."""
    return Digits(len(_loaded()[1]) - NUM_HELD_OUT, len(_loaded()[1]))


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    """Number of digits that are told right."""
    return (logits.argmax(-1) == classes).sum()
