"""FSDP2 ranks whose copies go between their collectives."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from helpers.forked_ranks import order, tell, told_by_ranks
from planaria.checkpoint.memory.version import Bytes
from planaria.errors import CheckpointError, ConfigError
from planaria.nodes.forkserver import ForkServer
from planaria.torchrun import arguments
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer

pytestmark = pytest.mark.faults

WATCHED = 3
ITERATIONS = 12


def rank(payload: bytes, answer_fd: int) -> None:
    """Trains, each rank as if on a node of its own."""
    told = order(payload)
    number, directory, backend = told["number"], told["directory"], told["backend"]
    dist.init_process_group(
        backend, init_method=f"file://{directory}/store", rank=number, world_size=2
    )
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    place = f"{directory}/{number}"
    saver = MemoryCheckpointer(model, optimizer, directory=place, profile_iterations=WATCHED)
    begun, states = [], {}
    first, backs = 0, []
    for last in (ITERATIONS, ITERATIONS + 2, ITERATIONS + 4):
        for iteration in range(first, last):
            model(torch.full((2, 16), 1.0 + iteration)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            begun.append(saver.save(iteration + 1))
            states[iteration + 1] = state_of(model, optimizer)
        if number == 1:  # Rank 0 has its own.
            saver.wait_ended()
            for label in saver._memory.arena.versions()[0]:
                flipped(saver._memory.arena.read(0, label).content)
        first = saver.restore()
        is_same = all(map(torch.equal, state_of(model, optimizer), states[first]))
        backs.append((first, is_same))
    idle_s = {peer: [span.lasts_s for span in spans] for peer, spans in saver.idle_spans.items()}
    saver.close()
    dist.destroy_process_group()
    tell(answer_fd, (begun[:ITERATIONS], list(idle_s.items()), backs))


def flipped(content: Bytes) -> None:
    """A bit is wrong from now on."""
    content[len(content) // 2] ^= 4


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's part of all tensors, as they are now."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [parameter.detach() for parameter in model.parameters()] + moments
    return [t.to_local().clone() if isinstance(t, DTensor) else t.clone() for t in tensors]


no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="two ranks cannot share it"
)
UNNAMED = pytest.param(None, marks=[pytest.mark.long, no_accelerator])


@pytest.mark.parametrize("backend", ["gloo", UNNAMED])
def test_fsdp_copies_go_between_collectives(
    backend: str | None, server: ForkServer, tmp_path: Path
) -> None:
    """The first versions go before anything is known of the network. Going back in the middle of a
    run ends in the state of the newest version, and copies go on from there; also where one of two
    copies of a shard is damaged. Without a named backend torch takes the one for the machine's
    devices."""
    told = told_by_ranks(server, f"{__name__}:rank", tmp_path, backend=backend)

    for number, (begun, idle_s, backs) in enumerate(told):
        assert begun[0]
        assert any(begun[WATCHED:])
        assert all(is_same for _, is_same in backs)
        ends = [first for first, _ in backs]
        assert WATCHED < ends[0] < ends[1] < ends[2]
        ((peer, lasts_s),) = idle_s
        assert peer == 1 - number
        assert lasts_s
        assert all(value > 0.0 for value in lasts_s)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[MemoryCheckpointer]:
    """That of a single rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = MemoryCheckpointer(model, optimizer, directory=str(tmp_path), copies=1)
    yield saver
    saver.close()
    dist.destroy_process_group()


def test_copies_that_a_node_has_no_memory_for_are_refused_with_the_figure(
    alone: MemoryCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any is made: two versions of what is kept there."""
    monkeypatch.setattr(arguments, "available_bytes", lambda: 100)
    with pytest.raises(ConfigError, match="has 100 bytes, and they take") as caught:
        alone.save(1)
    assert caught.value.field == "copies"


def test_an_iteration_is_saved_once(alone: MemoryCheckpointer) -> None:
    """Or two states would have one name."""
    assert alone.save(5)
    with pytest.raises(ConfigError, match="must be above 5, the iteration that was saved before"):
        alone.save(5)


def test_what_is_damaged_is_not_there_when_it_is_restored_again(alone: MemoryCheckpointer) -> None:
    """It is dropped when it is found, and the model is not taken for a new one."""
    assert alone.save(5)
    alone.wait_ended()
    for label in alone._memory.arena.versions()[0]:
        flipped(alone._memory.arena.read(0, label).content)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no version in memory is complete"):
            alone.restore()
