"""A plain loop of one rank on a device, with and without MemoryCheckpointer.save after iterations.

Turns of iterations alternate: without saves, with one after each, without again. Prints one line
of JSON: the seconds of iterations by kind of turn, the bytes of the state, and how many of the
saves began a version. The state is copied to the memory of this machine alone: what is measured is
the copy from the device, which the loop must not wait for.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from planaria.torchrun.memory_checkpointer import MemoryCheckpointer

TURNS: Final = ("without", "saved", "again")


def main() -> int:
    """Trains and prints the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--iterations", type=int, default=6, help="of each turn")
    parser.add_argument("--rounds", type=int, default=2, help="of turns of all kinds")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="planaria-")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=0, world_size=1
        )
        print(json.dumps(_measure(options, directory)))
    finally:
        dist.destroy_process_group()
        shutil.rmtree(directory)
    return 0


def _measure(options: argparse.Namespace, directory: str) -> dict[str, object]:
    device = torch.device(options.device)
    blocks = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    model = nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type != "cpu")
    inputs = torch.randn(options.batch, options.width, device=device)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    checkpointer = MemoryCheckpointer(model, optimizer, copies=1, directory=directory)
    seconds: dict[str, list[float]] = {turn: [] for turn in TURNS}
    saves = []
    age = 0
    for round_number in range(options.rounds + 1):
        for turn in TURNS:
            for _ in range(options.iterations):
                begin_s = time.perf_counter()
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                age += 1
                if turn == "saved":
                    saves.append(checkpointer.save(age))
                if device.type != "cpu":
                    torch.accelerator.current_stream().synchronize()
                if round_number:  # The first round warms up, and pins memory.
                    seconds[turn].append(time.perf_counter() - begin_s)
            checkpointer.wait_ended()
    checkpointer.close()
    tensors = [*model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return {**seconds, "state_bytes": num_bytes, "begun": sum(saves), "saves": len(saves)}


if __name__ == "__main__":
    sys.exit(main())
