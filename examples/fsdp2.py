"""Your own training loop, under torchrun with FSDP2, with state that survives its ranks.

    until torchrun --standalone --nproc-per-node 2 examples/fsdp2.py; do :; done

Only the lines with "planaria" or "checkpointer" were added to the loop. Kill a rank (kill -9 PID):
all ranks are started again and go on where they were, from memory. With --nnodes there are copies
on other nodes, so a whole node may be lost. (With NCCL torchrun's --max-restarts does the same;
gloo, which is used here, does not reconnect ranks that torchrun restarts.)
"""

import argparse
import hashlib
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import planaria

WIDTH = 64


def main() -> None:
    """Trains a small network to copy its input's sign."""
    options = _options()
    torch.set_num_threads(1)
    # Ranks that wait for a lost rank give up soon, and all are started again.
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = planaria.MemoryCheckpointer(model, optimizer, directory=options.directory)

    first = checkpointer.restore()
    _note(options.hashes, f"from {first} {_digest(model)}")
    for iteration in range(first, options.iterations):
        # The samples of an iteration depend only on its number and the rank.
        generator = torch.Generator().manual_seed(1000 * iteration + dist.get_rank())
        inputs = torch.randn(8, WIDTH, generator=generator)
        loss = (model(inputs) - inputs.sign()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save(iteration + 1)
        _note(options.hashes, f"iteration {iteration + 1} {_digest(model)}")
        if options.dies == f"{dist.get_rank()}@{iteration + 1}" and not first:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An FSDP2 loop with checkpoints in memory.")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--directory", default="", help="of the process that owns the memory")
    parser.add_argument("--dies", default="", help="RANK@ITERATION: a rank kills itself there")
    parser.add_argument("--hashes", default="", help="a file for a hash of each iteration's model")
    return parser.parse_args()


def _digest(model: nn.Module) -> str:
    """A hash of all parameters, the same on all ranks; a collective, so every rank must call it."""
    digest = hashlib.sha256()
    for parameter in model.state_dict().values():
        digest.update(parameter.full_tensor().numpy().tobytes())
    return digest.hexdigest()


def _note(path: str, text: str) -> None:
    if path and dist.get_rank() == 0:
        with Path(path).open("a") as file:
            file.write(f"{text}\n")


if __name__ == "__main__":
    main()
