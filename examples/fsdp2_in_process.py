"""Your own training loop with FSDP2 or DDP, whose ranks go on without a restart after a loss.

    torchrun --nnodes 4 --node-rank N --master-addr HOST examples/fsdp2_in_process.py

Run it on four machines and take the power from one: the ranks that live make a new process group,
cut the newest version in memory for as many ranks, and go on. With --saves, a place that all
machines share, the state survives the loss of all of them: start the command again.

A torchrun ends all ranks of its own machine when one of them dies, so give each rank a torchrun of
its own (--nproc-per-node 1), or start the ranks by Slurm.
"""

import argparse
import hashlib
import logging
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import planaria

WIDTH, BATCH = 64, 24


def main() -> None:
    """Trains a small network to copy its input's sign."""
    options = _options()
    logging.basicConfig(format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    number = dist.get_rank()
    model, optimizer = build(is_ddp=options.ddp)
    checkpointer = planaria.MemoryCheckpointer(
        model,
        optimizer,
        copies=options.copies,
        can_reform=True,
        persist_directory=options.saves,
        persist_every=options.persist_every,
        directory=options.directory,
    )
    lost_s = 0.0
    while True:
        try:
            if lost_s:
                model = optimizer = None  # Or the old ones take memory beside the new ones.
                checkpointer.reform()
                model, optimizer = build(is_ddp=options.ddp)
                checkpointer.use(model, optimizer)
            first = checkpointer.restore()
            note(f"from {first} {digest(model)}")
            for iteration in range(first, options.iterations):
                train(model, optimizer, iteration)
                checkpointer.save(iteration + 1)
                if lost_s:
                    note(f"recovered {time.monotonic() - lost_s:.3f} s")
                    lost_s = 0.0
                note(f"iteration {iteration + 1} {digest(model)}")
                if f"{number}@{iteration + 1}" in options.dies.split(","):
                    os.kill(os.getpid(), signal.SIGKILL)
            break
        except RuntimeError:  # A rank is gone, and a collective with it.
            lost_s = time.monotonic()
    note(f"survival {' '.join(f'{p:.4f}' for p in checkpointer.survival)}")
    if options.saves:
        note(f"saved {checkpointer.persist()}")
    checkpointer.close()
    dist.destroy_process_group()


def build(*, is_ddp: bool) -> tuple[Any, Any]:
    """Model and optimizer, for the ranks of the moment."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    if is_ddp:
        parallel = DistributedDataParallel(model)
        return parallel, AdamW(parallel.parameters(), lr=1e-3)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model, AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: Optimizer, iteration: int) -> None:
    """Trains on this rank's share of an iteration's samples, which depend on its number only."""
    generator = torch.Generator().manual_seed(iteration)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)[
        dist.get_rank() :: dist.get_world_size()
    ]
    (model(inputs) - inputs.sign()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: nn.Module) -> str:
    """A hash of all parameters, the same on all ranks; a collective, so every rank must call it."""
    hashed = hashlib.sha256()
    for parameter in model.state_dict().values():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        hashed.update(whole.numpy().tobytes())
    return hashed.hexdigest()


def note(text: str) -> None:
    """Prints a line from the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An FSDP2 loop that goes on without a restart.")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--ddp", action="store_true", help="every rank holds all of the model")
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--saves", default="", help="directory or URL of a store for all machines")
    parser.add_argument("--persist-every", type=int, default=50, metavar="ITERATIONS")
    parser.add_argument("--directory", default="", help="of the process that owns the memory")
    parser.add_argument("--dies", default="", help="RANK@ITERATION,..: ranks kill themselves there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
