"""A loop under torchrun in which every rank holds all of the model, with a scheduler beside."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

import planaria

ITERATIONS = 8
DIES_AFTER = 4


def main(directory: str, log: str) -> None:
    """Trains; the first time it is started, rank 0 kills itself."""
    torch.set_num_threads(1)
    # Who waits for a rank that is gone gives up soon, and all are started again.
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    checkpointer = planaria.MemoryCheckpointer(
        model, optimizer, others={"scheduler": scheduler}, directory=directory
    )
    first = checkpointer.restore()
    note(log, f"from {first}", model, optimizer)
    for iteration in range(first, ITERATIONS):
        generator = torch.Generator().manual_seed(100 * iteration + dist.get_rank())
        inputs = torch.randn(8, 4, generator=generator)
        model(inputs).sub(inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        checkpointer.save(iteration + 1)
        note(log, f"iteration {iteration + 1}", model, optimizer)
        if iteration + 1 == DIES_AFTER and not first and not dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()


def note(log: str, text: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What rank 0 has."""
    if dist.get_rank() == 0:
        numbers = [float(p.detach().double().sum()) for p in model.parameters()]
        rate = optimizer.param_groups[0]["lr"]
        with Path(log).open("a") as file:
            file.write(f"{text} {[*numbers, rate]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
