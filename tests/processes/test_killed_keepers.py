"""The process that owns a machine's copies is killed, or its socket removed: the next save finds
another one."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.keepers import keepers
from helpers.linked_ranks import wait_until
from planaria.checkpoint.memory.arena import Arena
from planaria.errors import CheckpointError
from planaria.torchrun import keeper
from planaria.torchrun.keeper import attach
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer

SAVED = torch.arange(4.0)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[MemoryCheckpointer]:
    """That of a single rank, which has saved one iteration."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(SAVED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = MemoryCheckpointer(model, optimizer, directory=str(tmp_path / "place"))
    assert made.save(1)
    made.wait_ended()
    yield made
    made.close()
    dist.destroy_process_group()


def kill_keeper(place: Path) -> None:
    """Whoever is connected finds it out at once."""
    (process,) = keepers(place)
    process.kill()
    process.wait()


def remove_socket(place: Path) -> None:
    """As what cleans /tmp does, or the end of a login session."""
    (path,) = place.iterdir()
    (path / "socket").unlink()


@pytest.mark.parametrize("lose", [kill_keeper, remove_socket])
def test_a_save_hands_the_copies_of_a_lost_keeper_to_another_one(
    lose: Callable[[Path], None],
    saver: MemoryCheckpointer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It outlives the rank as the one before did, and is told of once; one that nobody finds any
    more ends."""
    place = tmp_path / "place"
    lose(place)
    with caplog.at_level(logging.WARNING):
        begun = []
        for iteration in (2, 3):
            begun.append(saver.save(iteration))
            saver.wait_ended()
    saver._memory._slot.close()  # As if the rank were dead.

    (own,) = place.iterdir()  # Of this machine.
    next_one = attach(own, 0, num_slots=1, idle_s=60.0)

    assert begun == [True, True]
    assert [record.message for record in caplog.records] == [
        (
            "rank 0: the process that owned copies on this machine is gone; another process owns "
            "them now"
        )
    ]
    assert [label.age for label in Arena(next_one.fd).versions()[0]] == [2, 3]
    wait_until(lambda: len(keepers(place)) == 1)
    next_one.end()


def test_nothing_is_saved_where_no_other_keeper_starts(
    saver: MemoryCheckpointer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save that says that it has begun would be lost with the rank. What is there can still be
    restored by whoever lives."""

    def fails(directory: Path, idle_s: float) -> None:
        raise CheckpointError(f"no process in {directory} for {idle_s} s")

    monkeypatch.setattr(keeper, "_start_keeper", fails)
    kill_keeper(tmp_path / "place")
    with caplog.at_level(logging.WARNING):
        begun = [saver.save(2), saver.save(3)]
    weight = next(saver._group._state.model.parameters())
    weight.data.zero_()

    assert begun == [False, False]
    (record,) = caplog.records
    assert "nothing is saved any more" in record.message
    assert saver.restore() == 1
    assert torch.equal(weight[0], SAVED)


def test_a_place_is_free_while_a_fork_of_its_process_lives(tmp_path: Path) -> None:
    """A worker that loads data, say, may outlive its rank."""
    kept = attach(tmp_path, 0, num_slots=1, idle_s=60.0)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(theirs)
        os.read(ours, 1)  # Until the test is over.
        os._exit(0)
    kept.close()
    try:
        again = attach(tmp_path, 0, num_slots=1, idle_s=60.0)
        assert not again.is_gone
        again.end()
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


def test_another_keeper_is_asked_where_one_was_about_to_end(tmp_path: Path) -> None:
    """It had stopped to listen to those who had connected already."""
    with socket.socket(socket.AF_UNIX) as ending:
        ending.bind(str(tmp_path / "socket"))
        ending.listen()
        with patch.object(keeper, "_ask", side_effect=_after(ending, keeper._ask)):
            kept = attach(tmp_path, 0, num_slots=1, idle_s=60.0)
    assert not kept.is_gone
    kept.end()


def _after(ending: socket.socket, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Ends a keeper before anything is said to it."""

    def answered(*args: Any) -> Any:
        ending.close()
        return answer(*args)

    return answered


def test_what_others_left_is_handed_to_another_keeper_too(tmp_path: Path) -> None:
    """Slots of more processes than there are now, which one of these reads."""
    for slot, said in enumerate((b"own", b"more", b"left")):
        kept = attach(tmp_path, slot, num_slots=3, idle_s=60.0)
        os.pwrite(kept.fd, said, 128)
        kept.close()
    first = attach(tmp_path, 0, num_slots=1, idle_s=60.0)
    kill_keeper(tmp_path)

    assert first.is_gone
    first.renew()

    assert not first.is_gone
    first.close()
    again = attach(tmp_path, 0, num_slots=1, idle_s=60.0)
    fds = (again.fd, *again.further_fds)
    assert [os.pread(fd, 4, 128).rstrip(b"\0") for fd in fds] == [b"own", b"more", b"left"]
    again.end()
