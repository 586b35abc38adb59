"""A single rank saves and restores what loops do, and tells what it cannot save."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from planaria.engine.memory_checkpointer import MemoryCheckpointer
from planaria.engine.shards import Stateful


class Savers:
    """Those of a test, each of the memory that the one before left."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._last: MemoryCheckpointer | None = None

    def next(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        others: Mapping[str, Stateful] | None = None,
    ) -> MemoryCheckpointer:
        """Another one, as if the rank had died and been started again."""
        if self._last is not None:
            self._last._kept.close()
        where = str(self._place)
        self._last = MemoryCheckpointer(model, optimizer, others=others, copies=1, directory=where)
        return self._last

    def close(self) -> None:
        """Gives the memory back."""
        if self._last is not None:
            self._last.close()


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[Savers]:
    """In a group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    made = Savers(tmp_path / "place")
    yield made
    made.close()
    dist.destroy_process_group()


def sharded(seed: int) -> tuple[nn.Module, AdamW]:
    """A model of FSDP2 whose root has parameters of its own, too."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[1])
    fully_shard(model)
    return model, AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: Optimizer) -> None:
    """Of training."""
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def validate(model: nn.Module) -> None:
    """After it FSDP2 leaves the root's parameters gathered, for a backward that never comes."""
    with torch.no_grad():
        model(torch.ones(5, 3))


def values(model: nn.Module, optimizer: Optimizer) -> dict[str, list[float]]:
    """Of all parameters and their first moments."""
    whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        whole[f"{name}'s moment"] = optimizer.state[parameter]["exp_avg"].full_tensor()
    return {name: one.flatten().tolist() for name, one in whole.items()}


def test_a_validation_before_a_save_takes_nothing_from_it(savers: Savers) -> None:
    """Moments of the root's parameters were not saved, and the next backward raised."""
    model, optimizer = sharded(1)
    saver = savers.next(model, optimizer)
    step(model, optimizer)
    validate(model)
    assert saver.save(1)
    saver.wait_ended()
    before = values(model, optimizer)
    step(model, optimizer)
    model, optimizer = sharded(2)

    assert savers.next(model, optimizer).restore() == 1

    assert values(model, optimizer) == before


def test_a_run_goes_back_after_a_validation(savers: Savers) -> None:
    """As it does where a loss has risen there; only the root's parameters did not."""
    model, optimizer = sharded(1)
    saver = savers.next(model, optimizer)
    step(model, optimizer)
    assert saver.save(1)
    before = values(model, optimizer)
    step(model, optimizer)
    validate(model)

    assert saver.restore() == 1

    assert values(model, optimizer) == before
    step(model, optimizer)
