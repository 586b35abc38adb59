"""Connections of collectives are shut when a peer is lost, and no others."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim import SGD

from helpers.connections import connected, ends, is_shut
from helpers.linked_ranks import TIMEOUT_S, blocked_receive, link_ranks, tag, wait_until
from planaria.errors import ConfigError
from planaria.torchrun import group_sockets, survivors
from planaria.torchrun.group_copies import GroupCopies
from planaria.torchrun.group_sockets import LossWatch, check_errors_stay, shut
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer
from planaria.transport.connection import Tag, header


def test_only_named_connections_are_shut() -> None:
    ours, theirs = connected()
    other, far = connected()
    with ours, theirs, other, far:
        shut({ends(ours)})

        assert is_shut(ours)
        assert not is_shut(other)


def test_a_number_that_belongs_to_another_socket_by_now_is_let_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's thread closes sockets and opens others while they are being shut."""
    ours, theirs = connected()
    other, far = connected()
    named = ends(ours)

    class Reused:
        """What the kernel said of a socket whose number another one has now."""

        laddr, raddr = ours.getsockname(), ours.getpeername()
        fd = other.fileno()

    def stale() -> list[Any]:
        return [Reused]

    monkeypatch.setattr(group_sockets, "_connections", stale)
    with ours, theirs, other, far:
        shut({named})

        assert not is_shut(other)


@pytest.mark.parametrize("says_farewell", [True, False])
def test_a_peer_that_is_done_is_not_taken_for_lost(says_farewell: bool) -> None:
    """Others may still compute without it, when it has closed its links. Much may wait in them
    before the farewell, and bytes that it has not read have its kernel drop what is on the way."""
    ours, theirs = connected()
    much = np.zeros(64 << 20, dtype=np.uint8)
    with link_ranks(2) as (here, gone), ours, theirs:
        LossWatch(here, 2, {ends(ours)})
        if says_farewell:
            gone.send(0, tag(0), much)
            LossWatch(gone, 2, ()).say_farewell()
            here.send(1, tag(0), much)
            gone.drain(timeout_s=TIMEOUT_S)
        gone.close()
        wait_until(lambda: 1 in here.lost_peers)

        if says_farewell:
            assert len(here.receive(1, tag(0), timeout_s=TIMEOUT_S)) == len(much)
            assert not is_shut(ours)
        else:
            wait_until(lambda: is_shut(ours))


class FakeNccl:
    """A group of NCCL, whose abort waits until all others are being aborted, too."""

    def __init__(self, all_begun: threading.Barrier) -> None:
        self._all_begun = all_begun

    def abort(self) -> None:
        self._all_begun.wait(TIMEOUT_S)


@pytest.mark.parametrize("says_farewell", [True, False])
def test_groups_of_nccl_are_aborted_when_a_peer_is_lost(
    says_farewell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their loop waits for its device, and nothing else ends that; groups that are new stay."""
    all_begun = threading.Barrier(3)
    groups = [FakeNccl(all_begun) for _ in range(2)]
    monkeypatch.setattr(group_sockets, "nccl_groups", lambda: groups)
    with link_ranks(2) as (here, gone):
        watch = LossWatch(here, 2, ())
        copies = GroupCopies.__new__(GroupCopies)
        copies._saved, copies._watch = -1, watch
        if says_farewell:
            watch.say_farewell()
        gone.close()
        if says_farewell:
            wait_until(lambda: watch.is_alarmed)
        else:
            all_begun.wait(TIMEOUT_S)
            with pytest.raises(dist.DistBackendError, match="were aborted"):
                copies.save(0)

    assert watch.has_aborted is not says_farewell


def test_groups_of_nccl_are_aborted_though_a_loop_that_wakes_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says farewell in `reform`, and then nobody aborted them. It wakes while an abort takes
    long, too, because it may wait for gloo."""
    is_woken, is_aborted = threading.Event(), threading.Event()

    def abort() -> None:
        if is_woken.wait(TIMEOUT_S):
            is_aborted.set()

    monkeypatch.setattr(group_sockets, "nccl_groups", lambda: [Mock(abort=abort)])
    ours, theirs = connected()
    named = frozenset({ends(ours)})
    with link_ranks(2) as (here, gone), ours, theirs:
        watch = LossWatch(here, 2, named)

        def wake(connections: frozenset[object]) -> None:
            if connections == named:  # Watches of other tests may still shut theirs.
                watch.say_farewell()
                is_woken.set()

        monkeypatch.setattr(group_sockets, "shut", wake)
        gone.close()

        assert is_aborted.wait(TIMEOUT_S)
        assert watch.has_aborted


def test_a_peer_that_leaves_the_group_ends_all_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had an error of its own, or one link was broken. Others would wait for ever with NCCL, and
    over links. They have lost nobody, or an error of the script would come again and again."""
    all_begun = threading.Barrier(2)  # Here and there.
    monkeypatch.setattr(group_sockets, "nccl_groups", lambda: [FakeNccl(all_begun)])
    ours, theirs = connected()
    with link_ranks(2) as (here, there), ours, theirs:
        watch = LossWatch(here, 2, {ends(ours)})
        thread, errors = blocked_receive(here, 1)
        LossWatch(there, 2, ()).leave()
        thread.join(TIMEOUT_S)
        wait_until(lambda: is_shut(ours))
        there.close()
        wait_until(lambda: 1 in here.lost_peers)

    assert not all_begun.broken
    assert [str(error) for error in errors] == ["rank 0, epoch 0: ranks [1] have left the group"]
    assert watch.has_aborted
    assert not watch.is_alarmed


@pytest.mark.parametrize("made", ["ProcessGroupNCCL", "ProcessGroupNCCL2"])
def test_groups_of_all_classes_for_nccl_are_known(
    made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since 2.15 torch may make another one for the backend nccl, which is no subclass."""
    classes: dict[str, type] = {
        name: type(name, (), {}) for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2")
    }
    for name, each in classes.items():
        monkeypatch.setattr(dist, name, each, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    backends = {"cpu": object(), "cuda": classes[made]()}
    group = Mock(_device_types=list(backends), _get_backend=backends.get)
    world: Any = dist.distributed_c10d
    monkeypatch.setitem(world._world.pg_map, group, ("cpu:gloo,cuda:nccl", None))

    assert group_sockets.nccl_groups() == [backends["cuda"]]


def test_whoever_leaves_a_group_aborts_all_groups_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of a mesh would wait for its lost rank at its end."""
    all_begun = threading.Barrier(2)
    groups = [FakeNccl(all_begun) for _ in range(2)]
    monkeypatch.setattr(survivors, "nccl_groups", lambda: groups)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    survivors.leave_group()

    assert not dist.is_initialized()
    assert not all_begun.broken
    assert all_begun.n_waiting == 0


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_process_that_nccl_would_end_is_refused(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training, and not once a rank is lost, also where parameters are offloaded, or have
    no values yet."""
    model = nn.Linear(4, 1, device=device)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with pytest.raises(ConfigError, match="would end this process"):
        MemoryCheckpointer(model, SGD(model.parameters()), can_reform=True, directory=str(tmp_path))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    check_errors_stay()

    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    check_errors_stay()


def test_a_peer_of_which_nothing_is_heard_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine closes nothing; rank 2 alone listens to it."""
    monkeypatch.setattr(group_sockets, "SILENCE_S", 1.0)
    pairs = [connected() for _ in range(2)]
    with link_ranks(3) as (here, _, there):
        watches = [
            LossWatch(links, 3, {ends(ours)})
            for links, (ours, _) in zip((here, there), pairs, strict=True)
        ]

        wait_until(lambda: all(is_shut(ours) for ours, _ in pairs))
        for watch in watches:
            watch.say_farewell()
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_a_peer_of_which_a_large_message_still_arrives_is_not_taken_for_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its beats wait behind a shard that is restored, which may take minutes."""
    monkeypatch.setattr(group_sockets, "SILENCE_S", 1.0)
    with link_ranks(2) as (here, busy):
        waits: list[int] = []
        receive = here.receive

        def counted_receive(peer: int, wanted: Tag, *, timeout_s: float) -> Any:
            waits.append(peer)
            return receive(peer, wanted, timeout_s=timeout_s)

        monkeypatch.setattr(here, "receive", counted_receive)
        watch = LossWatch(here, 2, ())
        link = busy._link(0)
        assert link is not None

        def send(content: bytes) -> None:
            with link.lock:
                link.append([memoryview(content)])

        send(header(0, tag(0), 1 << 20))

        def goes_on() -> bool:
            send(b"part")
            return watch.is_alarmed or len(waits) > 3

        wait_until(goes_on)
        assert not watch.is_alarmed
        wait_until(lambda: watch.is_alarmed)  # No more comes.
