"""Objects that are restored beside a sharded model: their states travel once, however large."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from helpers.forked_ranks import order, tell, told_by_ranks
from helpers.keepers import keepers
from planaria.nodes.forkserver import ForkServer
from planaria.torchrun import gathering
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer

pytestmark = pytest.mark.faults

NUM_BYTES = 1 << 18


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where keepers of the test have their sockets; they end with it."""
    yield tmp_path
    for process in keepers(tmp_path):
        process.kill()


class Table:
    """An object with a large state, the same on all ranks."""

    def __init__(self) -> None:
        self.values = torch.arange(NUM_BYTES, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.values = state_dict["values"]


def rank(payload: bytes, answer_fd: int) -> None:
    """Tells what it restored, whether the table is as it was, and the most bytes it gathered."""
    called = order(payload)
    number, directory = called["number"], called["directory"]
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=number, world_size=2
    )
    model, table = nn.Linear(4, 4), Table()
    fully_shard(model)
    saver = MemoryCheckpointer(
        model,
        SGD(model.parameters()),
        others={"table": table},
        directory=f"{directory}/node{number}",
        copies=1,
    )
    saver.save(3)
    saver.wait_ended()
    table.values = torch.zeros(1, dtype=torch.uint8)
    sizes: list[int] = []
    gather_bytes = gathering.gather_bytes

    def watched(content: bytes) -> list[bytes]:
        sizes.append(len(content))
        return gather_bytes(content)

    with patch.object(gathering, "gather_bytes", watched):
        first = saver.restore()
    tell(answer_fd, [first, torch.equal(table.values, Table().values), max(sizes)])
    dist.barrier()
    saver.close()
    dist.destroy_process_group()


def test_a_large_object_is_not_gathered_with_each_shard(server: ForkServer, place: Path) -> None:
    """All ranks would hold it as often as there are shards, in one message of all."""
    told = told_by_ranks(server, f"{__name__}:rank", place)

    assert [answer[:2] for answer in told] == [[3, True]] * 2
    assert all(answer[2] < NUM_BYTES // 8 for answer in told)
