"""A model that a head sends to its machines, and that trains slowly until it is told to hurry.

So a test has the time that it needs while a job trains, and none passes afterwards.
"""

import os
import time

import torch
from torch import Tensor, nn

HURRY = "PLANARIA_TEST_HURRY"  # Names the file that, once it is there, ends the slowness.
WIDTH = 32
SLOW_S = 0.04


class _Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if not os.path.exists(os.environ.get(HURRY, "/")):
            time.sleep(SLOW_S)
        update: Tensor = self.dropout(torch.tanh(self.linear(x)))
        return x + update


def layers() -> nn.Sequential:
    """A classifier of six layers."""
    return nn.Sequential(nn.Linear(8, WIDTH), *[_Slow() for _ in range(4)], nn.Linear(WIDTH, 5))


class _Points:
    """Random points with random classes; a sample is a function of its number."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x, (x.sum() > 0).long() + 2 * (x[0] > 0).long()


def points() -> _Points:
    """The samples."""
    return _Points()
