"""A job as a script: your own layers, your own data, no job file.

    planaria train examples/script.py
    planaria train examples/script.py --nodes 4 --set training.iterations=50

planaria uses the module-level name `job`. The training processes import this file as the module
"script" and call the functions that `target` names, so a layer is built only where it is needed. To
run the file itself with `python examples/script.py`, train under the guard at its end.
"""

from functools import partial

import torch
from torch import Tensor, nn

import planaria

WIDTH = 64


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = torch.relu(self.linear(self.norm(x)))
        return x + update


def layers() -> list[object]:
    """The model: each entry builds one layer. An nn.Sequential would work as well."""
    first, last = partial(nn.Linear, 2, WIDTH), partial(nn.Linear, WIDTH, 3)
    return [first, *[partial(Block, WIDTH)] * 4, last]


class Spirals:
    """Points on three spirals; a sample is a function of its number."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        arm, step = index % 3, torch.tensor(index / len(self))
        angle = 4 * step + arm * 2 * torch.pi / 3
        return step * torch.stack((angle.cos(), angle.sin())), torch.tensor(arm)


job = planaria.Job(
    planaria.JobConfig(
        name="spirals",
        model=planaria.ModelConfig(kind="python", target="script:layers"),
        data=planaria.DataConfig(kind="python", target="script:Spirals"),
        training=planaria.TrainingConfig(
            iterations=20, global_batch_size=96, microbatch_size=12, learning_rate=1e-2
        ),
        cluster=planaria.ClusterConfig(nodes=3),
        checkpoint=planaria.CheckpointConfig(directory="checkpoints/spirals"),
    )
)

if __name__ == "__main__":
    print(job.train().report.final)
