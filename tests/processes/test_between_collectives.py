"""FSDP2 ranks whose copies go between their collectives."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from planaria.engine import memory_checkpointer
from planaria.engine.memory_checkpointer import MemoryCheckpointer
from planaria.errors import ConfigError

WATCHED = 3
ITERATIONS = 12
TIMEOUT_S = 120.0


def rank(number: int, answers: Connection, directory: str) -> None:
    """Trains, each rank as if on a node of its own."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=number, world_size=2
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
    begun = []
    for iteration in range(ITERATIONS):
        model(torch.full((2, 16), 1.0 + iteration)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        begun.append(saver.save(iteration + 1))
    saver.wait_ended()
    spans = saver.idle_spans
    last = max(i + 1 for i, begins in enumerate(begun) if begins)
    answers.send((number, begun, spans, last))
    saver.close()
    dist.destroy_process_group()


def test_fsdp_copies_go_between_collectives(tmp_path: Path) -> None:
    """The first versions go before anything is known of the network."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=rank, args=(number, theirs, str(tmp_path))) for number in range(2)
    ]
    for process in processes:
        process.start()
    found = {}
    for _ in processes:
        assert ours.poll(TIMEOUT_S)
        number, *told = ours.recv()
        found[number] = told
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0

    for number, (begun, spans, last) in found.items():
        assert begun[0]
        assert last > WATCHED
        assert spans.keys() == {1 - number}
        assert spans[1 - number]
        assert all(span.lasts_s > 0.0 for span in spans[1 - number])


def test_copies_that_a_node_has_no_memory_for_are_refused_with_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any is made: two versions of what is kept there."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        saver = MemoryCheckpointer(model, optimizer, directory=str(tmp_path), copies=1)
        monkeypatch.setattr(memory_checkpointer, "available_bytes", lambda: 100)
        with pytest.raises(ConfigError, match="has 100 bytes, and they take") as caught:
            saver.save(1)
        assert caught.value.field == "copies"
        monkeypatch.undo()
        assert saver.save(5)
        with pytest.raises(ConfigError, match="must be above 5, saved before"):
            saver.save(5)
        with pytest.raises(ConfigError, match="call it before the first save"):
            saver.restore()
        saver.close()
    finally:
        dist.destroy_process_group()
