"""What belongs to one process group begins whole, or leaves nothing behind."""

import resource
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from helpers.connections import number_in_child
from helpers.linked_ranks import wait_until
from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.filling import Filler
from planaria.errors import AbortedError, CheckpointError, ConfigError, PeerLostError
from planaria.torchrun import group_copies, group_sockets, memory_checkpointer
from planaria.torchrun.group_copies import GroupCopies
from planaria.torchrun.group_sockets import listeners
from planaria.torchrun.loop_state import RandomGenerators
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer
from planaria.transport.connection import LinkProtection
from planaria.transport.links import Links
from planaria.transport.strangers import Unproven, num_unproven_max


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[MemoryCheckpointer]:
    """That of a single rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place, saves = str(tmp_path / "place"), str(tmp_path / "saves")
    checkpointer = MemoryCheckpointer(model, optimizer, directory=place, persist_directory=saves)
    yield checkpointer
    checkpointer.close()
    dist.destroy_process_group()


def test_a_loss_while_ranks_meet_leaves_no_links(
    saver: MemoryCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that live try again, perhaps often."""
    state = saver._group._state
    before = threading.active_count()

    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(group_copies, "gather_records", fail)
        with pytest.raises(RuntimeError, match="closed by peer"):
            saver.use(state.model, state.optimizer)

    wait_until(lambda: threading.active_count() <= before)


def test_all_ranks_of_a_large_group_may_connect_to_one_at_the_same_time(
    saver: MemoryCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that had not proved themselves yet, all but 512 were refused; or 256, by the limit
    of files that many systems have."""
    state, limits = saver._group._state, [(1024, resource.RLIM_INFINITY)]
    unproven: list[Unproven[int]] = []

    def listen(*_: object, protection: LinkProtection, **__: object) -> None:
        unproven.append(Unproven(num_unproven_max(protection.num_ranks)))
        raise RuntimeError("it is known by now")

    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: limits[-1])
        patch.setattr(resource, "setrlimit", lambda _, changed: limits.append(changed))
        patch.setattr(group_copies, "Links", listen)
        patch.setattr(group_copies, "gather_bytes", lambda own: [own])
        patch.setattr(dist, "get_world_size", lambda: 800)
        with pytest.raises(RuntimeError, match="known by now"):
            saver.use(state.model, state.optimizer)
        for peer in range(799):
            unproven[0].add(peer, bytes([peer % 100]))
        surplus = unproven[0].surplus(0)

    assert surplus is None


@pytest.mark.parametrize("error", [PeerLostError(1, "gone"), AbortedError("links closed")])
@pytest.mark.parametrize("call", ["restore", "save", "persist"])
def test_a_loss_is_an_error_for_which_scripts_look(
    call: str, error: Exception, saver: MemoryCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their loops catch a RuntimeError and begin anew."""
    assert saver.save(1)
    saver.wait_ended()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(group_copies, "true_on_all", fail)
        with pytest.raises(RuntimeError, match=str(error)):
            getattr(saver, call)(*((2,) if call == "save" else ()))


def test_a_save_of_what_was_copied_anew_leaves_that_version_as_it_is(
    saver: MemoryCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same label would take the place of the only complete one before it is whole."""
    state = saver._group._state
    assert saver.save(1)
    saver.wait_ended()
    saver._group.end()
    saver._group.links.close()
    saver.use(state.model, state.optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(saver._memory, "versions", dict)  # As if those nodes were lost that had it.
        assert saver.restore() == 1
    saver.wait_ended()
    versions = saver._memory.versions()
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "begin", Mock(side_effect=AssertionError))
        assert saver.save(1)
        saver.wait_ended()

    with pytest.raises(ConfigError, match="must be above 1"):
        saver.save(1)
    assert saver._memory.versions() == versions
    assert saver.persist()
    assert saver.save(2)
    saver.wait_ended()
    assert saver.restore() == 2


def begin_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the group of one rank, which may call `reform`."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


def test_a_reform_aborts_groups_of_nccl_before_it_waits_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy waits for its device, and that for a rank which is lost, until the abort."""
    begin_alone(tmp_path, monkeypatch)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = str(tmp_path / "place")
    saver = MemoryCheckpointer(model, optimizer, can_reform=True, directory=place)
    is_aborted = threading.Event()
    group = Mock(abort=is_aborted.set)
    monkeypatch.setattr(group_sockets, "nccl_groups", lambda: [group])
    were_aborted: list[bool] = []

    def wait_for_device(*_: object) -> None:
        were_aborted.append(is_aborted.wait(5.0))

    monkeypatch.setattr(Filler, "__call__", wait_for_device)
    assert saver.save(1)

    with pytest.raises(CheckpointError, match="no rank was lost"):
        saver.reform()

    assert were_aborted == [True]
    assert saver._memory.versions() == {}
    saver.close()
    dist.destroy_process_group()


def test_a_rank_closes_its_links_when_the_others_have_all_that_it_sent(
    saver: MemoryCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its farewell is the last of that, and they would take it for lost."""
    calls: list[str] = []
    for place, name in ((GroupCopies, "end"), (Links, "drain"), (Links, "close")):
        original = getattr(place, name)

        def noted(*arguments: Any, name: str = name, original: Any = original, **keys: Any) -> None:
            calls.append(name)
            original(*arguments, **keys)

        monkeypatch.setattr(place, name, noted)
    saver.close()

    assert calls == ["end", "drain", "close"]


@pytest.mark.parametrize("field", ["others", "per_rank"])
def test_objects_that_are_left_out_after_a_reform_are_named(field: str, tmp_path: Path) -> None:
    """They would be neither restored nor saved any more, without a word."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: Any = {field: {"random": RandomGenerators(), "more": RandomGenerators()}}
    saver = MemoryCheckpointer(model, optimizer, directory=str(tmp_path / "place"), **given)
    saver._group.end()
    saver._group.links.close()
    less: Any = {field: {"random": RandomGenerators()}}
    try:
        wrong: Any
        for wrong in ({}, less):
            with pytest.raises(ConfigError, match="the constructor had more, random") as caught:
                saver.use(model, optimizer, **wrong)
            assert caught.value.field == field

        saver.use(model, optimizer, **given)
        assert saver.restore() == 0
    finally:
        saver.close()
        dist.destroy_process_group()


def test_objects_of_each_rank_that_were_not_saved_are_told_as_such(
    saver: MemoryCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """Not as those of a version that other numbers of ranks have saved."""
    assert saver.save(1)
    saver.wait_ended()
    saver._group.end()
    saver._group.links.close()
    model = nn.Linear(4, 1)
    saver._names["per_rank"] = frozenset({"random"})  # As another start of the script.
    given = {"random": RandomGenerators()}
    saver.use(model, torch.optim.SGD(model.parameters(), lr=0.1), per_rank=given)

    assert saver.restore() == 1
    assert "(random) stay as they are: the version has no per_rank objects" in caplog.text


def test_a_version_that_is_copied_while_groups_of_nccl_are_aborted_is_given_up(
    saver: MemoryCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a device computes after that is anything, and a restore would take it."""
    assert saver.save(1)
    saver.wait_ended()
    saver._group._watch = watch = Mock(has_aborted=False)
    fill = Filler.__call__

    def lose_a_rank(*arguments: Any) -> None:
        watch.has_aborted = True
        fill(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Filler, "__call__", lose_a_rank)
        assert saver.save(2)
        saver.wait_ended()

    assert [label.age for label in saver._memory.versions()[0]] == [1]


def test_a_forked_child_does_not_keep_the_links_of_a_rank(tmp_path: Path) -> None:
    """Others see at once that a rank is lost, whatever workers of its data loader live."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = MemoryCheckpointer(model, optimizer, directory=str(tmp_path / "place"))
    port = saver._group.links.address[1]

    assert listeners(port)
    assert number_in_child(lambda: len(listeners(port))) == 0
    saver.close()
    dist.destroy_process_group()


def test_a_reform_lets_go_of_the_old_model_and_sees_that_no_rank_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models may not fit into the memory of a device, and the loop would try again for ever."""
    begin_alone(tmp_path, monkeypatch)
    model = nn.Linear(4, 1)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = str(tmp_path / "place")
    saver = MemoryCheckpointer(model, optimizer, can_reform=True, directory=place)
    assert saver.save(1)
    old = weakref.ref(model)
    del model, optimizer

    for _ in range(2):  # The second time because the script could not make a model.
        with pytest.raises(CheckpointError, match="no rank was lost"):
            saver.reform()
        assert old() is None
        with pytest.raises(ConfigError, match="call `use`"):
            saver.save(2)
    saver.close()
    dist.destroy_process_group()


def test_halves_of_ranks_of_which_one_has_begun_anew_claim_the_same(
    saver: MemoryCheckpointer,
) -> None:
    """A network that splits while ranks begin anew would have both halves go on."""
    state = saver._group._state
    assert saver._claim()
    saver._group.end()
    saver._group.links.close()

    saver.use(state.model, state.optimizer)

    saver._rank = 1
    assert not saver._claim()


def test_a_rank_keeps_its_address_when_the_machine_of_the_first_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines could not reach it at a loopback address."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(memory_checkpointer, "own_host", lambda: "127.0.0.2")
    saver = MemoryCheckpointer(model, optimizer, can_reform=True, directory=str(tmp_path / "place"))
    monkeypatch.undo()
    saver._group.end()
    saver._group.links.close()
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")

    saver.use(model, optimizer)

    assert saver._group.links.address[0] == "127.0.0.2"
    saver.close()
    dist.destroy_process_group()
