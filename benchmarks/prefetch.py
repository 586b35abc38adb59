"""Measures what a slow data set costs an iteration, with and without processes that load ahead.

A sample takes 20 ms to load, in which it uses no processor. A layer takes 10 ms for each sample
forward and 20 ms backward, in which it uses none either, so a core is free for whoever loads. Jobs
of one rank take turns: samples that take no time, slow ones that the rank loads itself, slow ones
that two processes load ahead (`data.workers`), and samples that take no time again (A/A).

The goal is that slow samples that are loaded ahead cost at most 3%.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import planaria

SAMPLE_S: Final = 0.02
FORWARD_S, BACKWARD_S = 0.01, 0.02
MICROBATCH: Final = 4
GOAL: Final = 0.03
KINDS: Final = {
    "no time": ("Fast", 0),
    "20 ms each, loaded by the rank": ("Slow", 0),
    "20 ms each, loaded ahead": ("Slow", 2),
    "no time again": ("Fast", 0),
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S * len(x))
        return x.clone()

    @staticmethod
    def backward(_context: Any, *grads: Tensor) -> Tensor:
        time.sleep(BACKWARD_S * len(grads[0]))
        return grads[0].clone()


class Layer(nn.Module):
    """A linear layer that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        slow: Tensor = _Sleep.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return slow


def layers() -> list[type[nn.Module]]:
    """The model."""
    return [Layer]


class Fast:
    """Samples that take no time."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((8,), index / 4096.0), torch.tensor(index % 8)


class Slow(Fast):
    """Samples that take 20 ms."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SAMPLE_S)
        return super().__getitem__(index)


def main() -> int:
    """Prints a line for each kind of job; returns 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=20)
    iterations = parser.parse_args().iterations
    medians = {}
    for name, (data, workers) in KINDS.items():
        seconds = _seconds(data, workers, iterations)
        medians[name] = statistics.median(seconds)
        first = medians["no time"]
        print(f"{name:32s} {medians[name]:.4f} s  {100 * (medians[name] / first - 1):+.1f}%")
    cost = medians["20 ms each, loaded ahead"] / medians["no time"] - 1.0
    print(f"loaded ahead: {100 * cost:+.1f}%, goal at most {100 * GOAL:.0f}%")
    return 0 if cost <= GOAL else 1


def _seconds(data: str, workers: int, iterations: int) -> list[float]:
    """The seconds of a job's iterations, but for the first two."""
    with tempfile.TemporaryDirectory(prefix="planaria-") as directory:
        job = planaria.Job(
            planaria.JobConfig(
                name="prefetch",
                model=planaria.ModelConfig(kind="python", target="prefetch:layers"),
                data=planaria.DataConfig(kind="python", target=f"prefetch:{data}", workers=workers),
                training=planaria.TrainingConfig(
                    iterations=iterations,
                    global_batch_size=4 * MICROBATCH,
                    microbatch_size=MICROBATCH,
                ),
                cluster=planaria.ClusterConfig(nodes=1),
                resilience=planaria.ResilienceConfig(failures_tolerated=0),
                checkpoint=planaria.CheckpointConfig(directory=str(Path(directory) / "saves")),
            )
        )
        report = job.train().report
    return [record.seconds for record in report.iterations[2:]]


if __name__ == "__main__":
    sys.exit(main())
