"""The systems of torch that planaria is compared with, each on one rank.

All step a fused AdamW, which is torch's fastest on a processor.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from beside.shape import Shape
from peers.small_gpt import LEARNING_RATE, MICROBATCH_SIZE, Tokens, loss, model


def _samples(shape: Shape, iteration: int, pipeline: int) -> tuple[Tensor, Tensor]:
    """The samples that a pipeline trains in an iteration."""
    size = shape.microbatches_per_pipeline * MICROBATCH_SIZE
    data = Tokens()
    first = (iteration * shape.num_pipelines + pipeline) * size
    samples = [data[number % len(data)] for number in range(first, first + size)]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class DataParallelRank:
    """The plain loop on one rank; with several ranks DDP, which reduces once in an iteration."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self._shape, self._rank = shape, rank
        self._module: nn.Module = model()
        self._parallel = None
        if shape.num_ranks > 1:
            self._module = self._parallel = DistributedDataParallel(self._module)
        self._adam = torch.optim.AdamW(self._module.parameters(), lr=LEARNING_RATE, fused=True)

    def train(self, iteration: int) -> float:
        """Trains an iteration; returns the loss of this rank's samples."""
        inputs, targets = _samples(self._shape, iteration, self._rank)
        number = self._shape.microbatches_per_pipeline
        total = torch.zeros(())
        pairs = zip(
            torch.split(inputs, MICROBATCH_SIZE), torch.split(targets, MICROBATCH_SIZE), strict=True
        )
        for index, (some_inputs, some_targets) in enumerate(pairs):
            is_last = index + 1 == number
            parallel = self._parallel
            with parallel.no_sync() if parallel and not is_last else nullcontext():
                error = loss(self._module(some_inputs), some_targets) / number
                torch.autograd.backward(error)
            total += error.detach()
        self._adam.step()
        self._adam.zero_grad()
        return float(total)


class PipelineRank:
    """A stage of one pipeline, under 1F1B."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self._shape, self._rank = shape, rank
        layers = list(model())
        first, end = (len(layers) * i // shape.num_stages for i in (rank, rank + 1))
        module = nn.Sequential(*layers[first:end])
        self._is_last = rank + 1 == shape.num_stages
        stage = PipelineStage(module, rank, shape.num_stages, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, shape.num_microbatches, loss_fn=loss)
        self._adam = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def train(self, iteration: int) -> float:
        """Trains an iteration; returns the loss, on the last stage."""
        losses: list[Tensor] = []
        ends = self._rank == 0 or self._is_last
        inputs, targets = _samples(self._shape, iteration, 0) if ends else (None, None)
        if self._rank == 0:
            self._schedule.step(inputs)
        elif self._is_last:
            self._schedule.step(target=targets, losses=losses)
        else:
            self._schedule.step()
        self._adam.step()
        self._adam.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0


def join_group(port: int, rank: int, num_ranks: int) -> None:
    """Joins the default group, over gloo."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def torch_rank(shape: Shape, rank: int) -> DataParallelRank | PipelineRank:
    """The system of torch for the shape."""
    if shape.num_stages > 1:
        assert shape.num_pipelines == 1
        return PipelineRank(shape, rank)
    return DataParallelRank(shape, rank)
