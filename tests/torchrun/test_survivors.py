"""Who leads, who is awaited, and who may go on after a loss."""

import socket
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.constants import default_pg_timeout

from helpers.connections import connected, ends, is_shut, number_in_child
from planaria.torchrun import survivors
from planaria.torchrun.group_sockets import listeners
from planaria.torchrun.survivors import (
    GroupSettings,
    MeetingStore,
    Ranks,
    _answers,
    _make_group,
    _reason_to_end,
    group_settings,
    leave_group,
)
from planaria.transport.links import Address

SILENT: Address = ("192.0.2.1", 9)  # Of a machine that is gone: nothing comes back from it.


@pytest.fixture(autouse=True)
def _silence(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection

    def time_out(address: Address, timeout: float | None = None) -> socket.socket:
        if address == SILENT:
            raise TimeoutError
        return connect(address, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", time_out)
    monkeypatch.setattr(survivors, "_PROBE_S", 0.1)


def refusing() -> Address:
    """Of a process that has ended, on a machine that lives."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address: Address = sock.getsockname()
        return address


def ranks(stores: dict[int, Address], *, lost: Collection[int] = (), claims: bool = False) -> Ranks:
    """As rank 0 knows them."""
    return Ranks(rank=0, stores=stores, generation=1, lost=lambda: lost, claim=lambda: claims)


def test_a_store_answers_while_its_process_lives_whatever_that_does() -> None:
    store = MeetingStore()

    assert _answers(("127.0.0.1", store.port))
    assert not _answers(refusing())


def test_a_machine_that_is_gone_does_not_answer() -> None:
    """A connection that is not made in time is no store that says nothing."""
    assert not _answers(SILENT)


def test_a_port_that_a_child_of_a_dead_rank_keeps_is_no_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel accepts connections to it."""
    monkeypatch.setattr(survivors, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not _answers(listener.getsockname())


def test_a_forked_child_does_not_keep_the_port_of_a_store() -> None:
    """Such as a worker of a data loader, which may outlive its rank."""
    store = MeetingStore()

    assert listeners(store.port)
    assert number_in_child(lambda: len(listeners(store.port))) == 0


def test_the_leader_waits_for_none_whose_machine_is_gone() -> None:
    """Links do not say so for a long time."""
    store = MeetingStore()
    own = ("127.0.0.1", store.port)
    begin_s = time.monotonic()

    members = store._choose_members(ranks({0: own, 1: SILENT}, claims=True), [1], 600.0)

    assert members == (0,)
    assert time.monotonic() - begin_s < 60.0


def test_a_rank_that_came_and_was_lost_is_no_member() -> None:
    """While the leader waited for another one."""
    store = MeetingStore()
    store._store.set("1/1", "here")
    own = ("127.0.0.1", store.port)

    assert store._choose_members(ranks({0: own, 1: refusing()}), [], 600.0) == (0,)


def test_a_member_that_was_lost_does_not_have_the_others_wait_for_the_timeout_of_the_group() -> (
    None
):
    """It could not know that none would come."""
    store = MeetingStore()
    own = ("127.0.0.1", store.port)
    settings = GroupSettings("cpu:gloo", timedelta(seconds=600), None)
    begin_s = time.monotonic()

    with pytest.raises(RuntimeError):
        _make_group(store._store, ranks({0: own, 1: refusing()}), (0, 1), settings, patience_s=0.5)

    assert time.monotonic() - begin_s < 60.0


@pytest.mark.parametrize("timeout", [timedelta(seconds=1234), None])
def test_a_group_that_was_made_has_the_timeout_of_the_one_before(
    timeout: timedelta | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    store = MeetingStore()
    settings = GroupSettings("cpu:gloo", timeout, None)

    members = store.meet(ranks({0: ("127.0.0.1", store.port)}), settings, timeout_s=60.0)

    assert members == (0,)
    assert group_settings() == GroupSettings("cpu:gloo", timeout or default_pg_timeout, None)
    leave_group()


@pytest.mark.parametrize("device", [torch.device("cuda", 1), None])
def test_a_group_that_was_made_is_bound_to_the_device_of_the_one_before(
    device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a barrier guesses the device, and meshes form their groups in another way."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    init, devices = dist.init_process_group, []

    def note(*arguments: Any, device_id: torch.device | None = None, **others: Any) -> None:
        devices.append(device_id)
        init(*arguments, **others)  # There is no such device.

    init("cpu:gloo", store=HashStore(), rank=0, world_size=1)
    world: Any = dist.group.WORLD
    world.bound_device_id = device
    settings = group_settings()
    leave_group()
    monkeypatch.setattr(dist, "init_process_group", note)
    store = MeetingStore()
    store.meet(ranks({0: ("127.0.0.1", store.port)}), settings, timeout_s=60.0)
    leave_group()

    assert devices == [device]


def test_a_rank_that_leaves_its_group_shuts_the_connections_of_it() -> None:
    """A model may refer to the group, and peers wait for this rank."""
    ours, theirs = connected()
    with ours, theirs:
        leave_group({ends(ours)})

        assert is_shut(theirs)


@pytest.mark.parametrize(
    ("others", "members", "claims", "may_go_on"),
    [
        ([SILENT], [0, 1, 2], False, True),  # More than half.
        ([SILENT, SILENT], [0, 1], False, False),  # They may be the other half, and go on.
        ([SILENT, SILENT], [0, 1], True, True),  # One half alone has claimed it.
        ([SILENT, SILENT, SILENT], [0, 1], True, False),  # More than half claim nothing.
        ([SILENT, SILENT, "over"], [0, 1], True, False),  # One may have ended after all went on.
        (["over", "over", "over"], [0], False, True),  # Their machines say that they have ended.
        (["over", SILENT], [0, 1], False, False),
    ],
)
def test_two_halves_do_not_both_go_on(
    others: list[Address | str],
    members: list[int],
    claims: bool,
    may_go_on: bool,
) -> None:
    stores: dict[int, Address] = dict.fromkeys(members, ("127.0.0.1", 9))
    for number, other in enumerate(others, start=len(members)):
        stores[number] = refusing() if isinstance(other, str) else other

    reason = _reason_to_end(ranks(stores, claims=claims), members)

    assert (reason == "") is may_go_on, reason
