"""One replica under torchft: DDP over gloo, every timeout at its default."""

import os

import torch
from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from peers.small_gpt import LEARNING_RATE, local_batch, loss, model
from peers.telling import tell


def main() -> None:
    """Trains until it is killed."""
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
    module = model()
    adam = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)

    def load(state: dict[str, dict[str, object]]) -> None:
        module.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": adam.state_dict()},
        replica_id=f"replica_{rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    distributed = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, adam)
    while True:
        iteration = manager.current_step()
        before = manager.num_participants()
        tell("start", rank=rank, iteration=iteration, workers=before)
        inputs, targets = local_batch(iteration, rank, num_ranks)
        optimizer.zero_grad()
        error = loss(distributed(inputs), targets)
        tell("backward", rank=rank, iteration=iteration, workers=before)
        torch.autograd.backward(error)
        workers = manager.num_participants()
        if manager.errored() is not None or workers < before:
            tell("notice", rank=rank, iteration=iteration, workers=workers)
        optimizer.step()
        if manager.current_step() > iteration:
            tell("end", rank=rank, iteration=manager.current_step() - 1, workers=workers)


if __name__ == "__main__":
    main()
