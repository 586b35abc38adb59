"""A single rank saves and restores what loops do, and tells what it cannot save."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from helpers.keepers import keepers
from helpers.linked_ranks import wait_until
from planaria.checkpoint.memory.filling import Filler
from planaria.checkpoint.memory.version import Bytes
from planaria.errors import CheckpointError, ConfigError
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer
from planaria.torchrun.shards import Stateful

TIMEOUT_S = 30.0


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
            self._last._memory._slot.close()
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


class SlowFiller(Filler):
    """Copies when it is told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.may_copy = threading.Event()

    def __call__(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """See Fill."""
        assert self.may_copy.wait(TIMEOUT_S)
        super().__call__(pairs)


def test_any_optimizer_waits_for_a_copy_before_it_steps(savers: Savers) -> None:
    """As that of a discriminator does, which is saved beside the generator's: its parameters were
    changed under the copy, and came back as a mix."""
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(generator, discriminator)
    one, other = SGD(generator.parameters(), lr=1.0), SGD(discriminator.parameters(), lr=1.0)
    saver = savers.next(model, one, {"other": other})
    saver._memory.filler = SlowFiller()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = discriminator.weight.detach().clone()
    assert saver.save(1)

    stepping = threading.Thread(target=other.step, daemon=True)
    stepping.start()
    stepping.join(0.2)

    assert stepping.is_alive()
    assert torch.equal(discriminator.weight, before)
    saver._memory.filler.may_copy.set()
    stepping.join(TIMEOUT_S)
    assert torch.equal(discriminator.weight, before - 1.0)
    assert saver.restore() == 1
    assert torch.equal(discriminator.weight, before)


def test_what_a_first_step_adds_is_checked_as_well(savers: Savers) -> None:
    """Before it an optimizer has no state, and nothing of it to refuse."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    saver = savers.next(model, optimizer)
    assert saver.save(0)
    saver.wait_ended()
    optimizer.state[model.weight]["old_dirs"] = []  # As LBFGS does.

    for _ in range(2):
        with pytest.raises(ConfigError, match="optimizer/weight/old_dirs"):
            saver.save(1)


class Counter:
    """Takes over no count from another unit."""

    def __init__(self, unit: str, count: int) -> None:
        self.unit = unit
        self.state: dict[str, Any] = {"unit": unit, "count": count}

    def state_dict(self) -> dict[str, Any]:
        """The count itself, not a copy."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Half, where that raises."""
        self.state.update(state_dict)
        if state_dict["unit"] != self.unit:
            raise ValueError(state_dict["unit"])


def test_a_state_that_is_not_taken_over_changes_nothing(
    savers: Savers, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a scheduler of other parts; it raised after the model had been restored."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    saver = savers.next(model, optimizer, {"a": Counter("km", 3), "b": Counter("m", 4)})
    assert saver.save(1)
    saver.wait_ended()
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.2)
    before = model.weight.detach().clone()
    first, second = Counter("km", 5), Counter("ft", 6)

    again = savers.next(model, optimizer, {"a": first, "b": second})
    with pytest.raises(CheckpointError, match=r"iteration 1: others\.b does not accept"):
        again.restore()

    assert "others.b does not accept the state that was saved of it: ValueError: m" in caplog.text
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert (first.state["count"], second.state) == (5, {"unit": "ft", "count": 6})


@pytest.mark.parametrize(
    "use",
    [
        lambda saver: saver.save(2),
        MemoryCheckpointer.restore,
        MemoryCheckpointer.wait_copied,
        MemoryCheckpointer.wait_ended,
    ],
)
def test_what_is_closed_is_used_no_more(
    use: Callable[[MemoryCheckpointer], object], savers: Savers, tmp_path: Path
) -> None:
    """A save began another process, which stayed, and waiting for its end never ended."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    saver = savers.next(model, optimizer)
    assert saver.save(1)
    saver.close()

    with pytest.raises(ConfigError, match="it is closed; make another MemoryCheckpointer"):
        use(saver)

    saver.close()
    step(model, optimizer)
    wait_until(lambda: not keepers(tmp_path))


def odd_models() -> dict[str, nn.Module]:
    """By the tensor that is not plain numbers, and how it lies."""
    sparse, meta = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    sparse.register_buffer("edges", torch.eye(2).to_sparse())
    return {
        "buffer/edges = 'torch.sparse_coo'": sparse,
        "parameter/weight = 'meta'": meta,
        "parameter/weight = 'uninitialized'": nn.LazyLinear(2),
    }


@pytest.mark.parametrize("told", odd_models())
def test_what_has_no_plain_numbers_is_named(told: str, savers: Savers) -> None:
    """Before anything is saved of it, or restored; torch's own errors named no tensor."""
    model = odd_models()[told]
    saver = savers.next(model, SGD(model.parameters(), lr=0.1))

    with pytest.raises(ConfigError, match=told):
        saver.save(1)
    with pytest.raises(ConfigError, match=told):
        saver.restore()
