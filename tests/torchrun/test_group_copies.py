"""What belongs to one process group begins whole, or leaves nothing behind."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.linked_ranks import wait_until
from planaria.torchrun import group_copies
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer


def test_a_loss_while_ranks_meet_leaves_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that live try again, perhaps often."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = MemoryCheckpointer(model, optimizer, directory=str(tmp_path / "place"))
    before = threading.active_count()

    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(group_copies, "gather_records", fail)
        with pytest.raises(RuntimeError, match="closed by peer"):
            saver.use(model, optimizer)

    wait_until(lambda: threading.active_count() <= before)
    saver.close()
    dist.destroy_process_group()
