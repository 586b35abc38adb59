"""One rank under torchrun: DDP over gloo, and a checkpoint every few iterations."""

import os
from pathlib import Path

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from peers.small_gpt import LEARNING_RATE, local_batch, loss, model
from peers.telling import tell


def main() -> None:
    """Trains from the newest checkpoint until it is killed."""
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    every = int(os.environ["CHECKPOINT_EVERY"])
    path = Path(os.environ["CHECKPOINT"])
    distributed.init_process_group("gloo", store=_store(), rank=rank, world_size=num_ranks)
    module = model()
    adam = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    iteration = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        module.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])
        iteration = state["iteration"]
    parallel = DistributedDataParallel(module)
    while True:
        tell("start", rank=rank, iteration=iteration, workers=num_ranks)
        inputs, targets = local_batch(iteration, rank, num_ranks)
        adam.zero_grad()
        try:
            error = loss(parallel(inputs), targets)
            tell("backward", rank=rank, iteration=iteration, workers=num_ranks)
            torch.autograd.backward(error)
        except RuntimeError:
            tell("notice", rank=rank, iteration=iteration, workers=0)
            raise
        adam.step()
        tell("end", rank=rank, iteration=iteration, workers=num_ranks)
        iteration += 1
        if rank == 0 and iteration % every == 0:
            state = {"model": module.state_dict(), "optimizer": adam.state_dict()}
            torch.save(state | {"iteration": iteration}, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)


def _store() -> PrefixStore:
    """The agent's store, under a prefix that is unique to this restart.

    torchrun's store outlives its workers. With the default (env://) the new workers read the gloo
    addresses of the dead ones there, and every restart ends in "Connection refused".
    """
    server = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", server)


if __name__ == "__main__":
    main()
