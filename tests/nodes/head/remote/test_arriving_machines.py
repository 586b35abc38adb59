"""What a head knows of the machines that come to it, whatever becomes of their connections."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from helpers.arriving_machines import arriving_machines
from helpers.heads import runs
from helpers.machine_lines import arrive
from helpers.tasks import TIMEOUT_S, wait_until
from planaria.core.kinds import Ending
from planaria.core.machine_messages import (
    JobOffered,
    JobOver,
    MachineFacts,
    MachineReady,
    MachineRefused,
    NodeEnded,
    NodeRequested,
    SourceFile,
)
from planaria.core.records import Ended, Members
from planaria.nodes.head.remote import machine_handle, machines
from planaria.nodes.head.remote.machine_handle import REJOINS_MAX, MachineHandle
from planaria.transport.frames import frame


@runs
async def test_a_machine_ends_no_node_of_another_one(tmp_path: Path) -> None:
    """One that comes back from an earlier run had a node of the same number."""
    async with arriving_machines(tmp_path) as head:
        first = await head.join("first")
        head.start(0)
        await first.wait(NodeRequested)
        second = await head.arrive("second", run="an earlier run", node=0)
        second.tell(NodeEnded(node=0, status=-9), head.ready())
        await wait_until(lambda: head.machines.num_ready == 1)

        assert list(head.machines.live_nodes) == [0]
        assert head.ends == []
        first.tell(NodeEnded(node=0, status=1))
        await wait_until(lambda: [ended.node for ended in head.ends] == [0])


@runs
async def test_a_node_whose_request_was_lost_with_the_connection_counts_as_ended(
    tmp_path: Path,
) -> None:
    """It counted as live, and no machine got another node in its place."""
    async with arriving_machines(tmp_path, num_max=1) as head:
        first = await head.join("first", machine_id="a")
        head.start(0)
        first.reset()
        await wait_until(lambda: not head.machines.is_reachable(0))
        await head.join("first", run="run", machine_id="a")

        assert [ended.node for ended in head.ends] == [0]
        assert list(head.machines.live_nodes) == []
        assert head.machines.has_room
        assert "first is connected again" in head.notes


@runs
async def test_a_machine_is_the_same_one_however_often_it_comes_back(tmp_path: Path) -> None:
    """The count of the nodes that it had lost within the hour began anew each time. It may join
    so many times again, as the pages say: it was one less."""
    async with arriving_machines(tmp_path) as head:
        for node in range(1 + REJOINS_MAX):
            line = await head.join(run="run", machine_id="a")
            assert head.machines.has_room
            head.start(node)
            line.tell(NodeEnded(node=node, status=1))
            await wait_until(lambda num=node + 1: len(head.ends) == num)  # type: ignore[misc]
            line.reset()
            await wait_until(lambda: head.machines.num_ready == 0)
        await head.join(run="run", machine_id="a")

        assert not head.machines.has_room


@runs
async def test_a_machine_that_has_lost_too_many_nodes_gets_another_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got none until something else happened, and nobody was told why."""
    now_s, waiting = 0.0, list[Callable[[], object]]()
    loop = asyncio.get_running_loop()
    really_call_later = loop.call_later

    def call_later(delay_s: float, call: Callable[..., object], *arguments: object) -> object:
        if delay_s < 1000.0:
            return really_call_later(delay_s, call, *arguments)
        waiting.append(call)
        return None

    monkeypatch.setattr(machines, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(loop, "call_later", call_later)
    async with arriving_machines(tmp_path) as head:
        line = await head.join()
        for node in range(1 + REJOINS_MAX):
            head.start(node)
            line.tell(NodeEnded(node=node, status=1))
            await wait_until(lambda num=node + 1: len(head.ends) == num)  # type: ignore[misc]
        assert not head.machines.has_room
        freed: list[bool] = []
        head.machines.on_free = lambda: freed.append(True)
        now_s = 3601.0
        waiting[0]()

        assert freed
        assert "m lost too many nodes and gets none for 3600 s" in head.notes


@runs
async def test_a_machine_that_has_lost_too_many_nodes_gets_another_while_the_job_waits_for_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job waited in vain, and ended beside it. It gets one each ten seconds, and only where
    no other machine can."""
    now_s = 0.0
    monkeypatch.setattr(machines, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with arriving_machines(tmp_path) as head:
        line = await head.join()
        for node in range(1 + REJOINS_MAX):
            head.start(node)
            line.tell(NodeEnded(node=node, status=1))
            await wait_until(lambda num=node + 1: len(head.ends) == num)  # type: ignore[misc]
        head.machines.note_shortage(is_short=True)
        assert not head.machines.has_room
        now_s = 11.0
        assert head.machines.has_room
        head.machines.note_shortage(is_short=False)
        assert not head.machines.has_room
        head.machines.note_shortage(is_short=True)
        await head.join("other")
        head.start(6)

        assert "node 6 starts on other (127.0.0.1)" in head.notes
        assert "m lost too many nodes and gets none for 10 s" in head.notes
        assert "m lost too many nodes and gets none for 3589 s" in head.notes


@runs
async def test_a_machine_that_comes_back_before_its_connection_breaks_is_the_same_one(
    tmp_path: Path,
) -> None:
    """A broken path is seen at one end first."""
    async with arriving_machines(tmp_path) as head:
        old = await head.join(machine_id="a")
        new = await head.arrive(run="run", machine_id="a")
        await old.wait_end()
        new.tell(head.ready())
        await wait_until(lambda: head.machines.num_ready == 1)

        assert len(head.machines.connected) == 1


@runs
async def test_another_run_has_its_own_nodes(tmp_path: Path) -> None:
    """The end of its node 0 was taken for one that was known, and nobody was told of it."""
    async with arriving_machines(tmp_path) as head:
        line = await head.join()
        head.start(0)
        head.machines.on_members(Members(epoch=1, term=0, nodes=(), gone=(0,)))
        line.tell(NodeEnded(node=0, status=1))
        await wait_until(lambda: len(head.ends) == 1)
        head.machines.begin_run(msgspec.structs.replace(head.machines.offer, run="next"))
        assert head.machines.ends() == ()
        await line.wait(JobOffered)
        line.tell(head.ready("next"))
        await wait_until(lambda: head.machines.num_ready == 1)
        head.start(0)
        line.tell(NodeEnded(node=0, status=1))
        await wait_until(lambda: len(head.ends) == 2)

        assert [ended.node for ended in head.machines.ends()] == [0]


@runs
async def test_no_machine_is_taken_for_the_head(tmp_path: Path) -> None:
    """Its host may be called so. What planaria doctor found of its paths was not told."""
    async with arriving_machines(tmp_path) as head:
        await head.join("head")

        assert [machine.name for machine in head.machines.connected] == ["head-2"]


@runs
async def test_a_machine_that_has_the_modules_is_never_sent_them(tmp_path: Path) -> None:
    """When another run began, it was."""
    source = SourceFile(path="models.py", data=b"import torch", sha256="0")
    async with arriving_machines(tmp_path) as head:
        head.machines.offer = msgspec.structs.replace(head.machines.offer, sources=(source,))
        lines = [await arrive(head.address, has_code=has_code) for has_code in (True, False)]
        await wait_until(lambda: len(head.machines.connected) == 2)
        head.machines.begin_run(msgspec.structs.replace(head.machines.offer, run="next"))
        offers = [[await line.wait(JobOffered) for _ in range(2)] for line in lines]

    sent = [[source.data for offer in of_one for source in offer.sources] for of_one in offers]
    assert sent == [[b"", b""], [source.data, source.data]]


@runs
async def test_modules_are_encoded_once_and_not_sent_to_a_machine_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes of them stopped the head for minutes when hundreds of machines came."""
    encoded: list[bytes] = []

    def encode(message: Any) -> bytes:
        encoded.extend(source.data for source in getattr(message, "sources", ()))
        return frame(message)

    source = SourceFile(path="models.py", data=b"import torch", sha256="0")
    async with arriving_machines(tmp_path) as head:
        head.machines.offer = msgspec.structs.replace(head.machines.offer, sources=(source,))
        monkeypatch.setattr(machine_handle, "frame", encode)
        for run in ("", "", "an earlier run", "run", "run"):
            line = await arrive(head.address, run=run)
            (sent,) = (await line.wait(JobOffered)).sources
            assert sent.data == (b"" if run == "run" else source.data)

    assert encoded == [source.data, b""]


def test_a_connection_that_has_ended_by_then_is_not_taken_for_one_that_is_there() -> None:
    """The machine counted as connected until it came again."""
    machine = MachineHandle("m", MachineFacts(name="m", host=""))
    sock = socket.socket()
    sock.close()
    ended: Any = SimpleNamespace(get_extra_info=lambda _: sock)

    with pytest.raises(OSError, match="Bad file descriptor"):
        machine.connect(ended, silent_s=1.0)
    assert machine.writer is None


@runs
async def test_a_head_that_ends_takes_no_machine(tmp_path: Path) -> None:
    """One that was told the end came back at once, and was offered the same job."""
    async with arriving_machines(tmp_path) as head:
        await head.machines.end_all(None)
        line = await arrive(head.address)

        assert not (await line.wait(MachineRefused)).is_final
        await line.wait_end()
        assert not any(isinstance(message, JobOffered) for message in line.heard)


@runs
async def test_a_machine_that_was_away_when_its_job_ended_is_told_so_when_it_is_back(
    tmp_path: Path,
) -> None:
    """It was refused, and then looked for a head for ten minutes."""
    async with arriving_machines(tmp_path) as head:
        (await head.join(machine_id="a")).reset()
        await head.machines.end_all(ended(Ending.FINISHED))
        line = await arrive(head.address, run="run", machine_id="a")

        assert (await line.wait(JobOver)).is_done


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("ending", list(Ending))
@runs
async def test_an_agent_succeeds_if_its_job_is_finished(
    tmp_path: Path, ending: Ending, is_early: bool
) -> None:
    """Its exit code is 0 then, and 3 else: it was 0, too, where the user had stopped the job, and 3
    where a callback had, which ended the head with 0."""
    async with arriving_machines(tmp_path) as head:
        line = await head.join()
        await head.machines.end_all(ended(ending, is_early=is_early))

        is_done = (await line.wait(JobOver)).is_done
        assert is_done == (ending is Ending.FINISHED or (is_early and ending is Ending.STOPPED))


def ended(ending: Ending, *, is_early: bool = False) -> Ended:
    """The end of a job."""
    return Ended(ending=ending, reason="", failure=None, nodes=(), epoch=0, is_early=is_early)


@runs
async def test_a_machine_that_comes_back_at_another_address_is_reached_there(
    tmp_path: Path,
) -> None:
    """The head told users and other machines the old one."""
    async with arriving_machines(tmp_path) as head:
        line = await head.join(host="127.0.0.2", machine_id="a")
        line.reset()
        await wait_until(lambda: head.machines.num_ready == 0)
        await head.join(host="127.0.0.3", run="run", machine_id="a")
        head.start(0)

        assert head.machines.host(0) == "127.0.0.3"


@runs
async def test_a_machine_at_a_loopback_address_is_refused_where_others_are_far(
    tmp_path: Path,
) -> None:
    """Its node would be announced to them as themselves. It is told which address would do."""
    async with arriving_machines(tmp_path) as head:
        far = await head.join("far", host="10.0.0.2")
        refused = await head.refusal("near", host="127.0.0.1")

        assert not [message for message in far.heard if isinstance(message, MachineRefused)]
        assert refused.is_final
        assert "far (10.0.0.2)" in refused.reason
        assert "--advertise 127.0.0.1," in refused.reason  # Where the far one reaches this head.
        assert head.machines.num_ready == 1


@runs
async def test_machines_that_are_all_at_loopback_addresses_are_on_one_machine(
    tmp_path: Path,
) -> None:
    async with arriving_machines(tmp_path) as head:
        lines = [await head.join(host, host=host) for host in ("127.0.0.1", "127.0.0.2")]

        assert head.machines.num_ready == len(lines)


@runs
async def test_a_far_machine_takes_the_place_of_one_at_a_loopback_address_that_has_no_node(
    tmp_path: Path,
) -> None:
    """While the head waits for machines, the one that is at fault has to go, whoever came first."""
    async with arriving_machines(tmp_path) as head:
        near = await head.join("near", host="127.0.0.1")
        waiting = asyncio.create_task(head.machines.wait_ready(2, timeout_s=TIMEOUT_S))
        await wait_until(lambda: head.machines.is_waiting)
        far = await head.arrive("far", host="10.0.0.2")
        far.tell(head.ready())
        refused = await near.wait(MachineRefused)
        third = await head.join("third", host="10.0.0.3")
        await waiting

        assert not [message for message in third.heard if isinstance(message, MachineRefused)]
        assert refused.is_final
        assert any("near cannot take part" in note for note in head.notes)


@runs
async def test_a_far_machine_is_refused_while_one_at_a_loopback_address_is_in_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the agent there that has to be started again."""
    monkeypatch.setattr(machines, "EXIT_TIMEOUT_S", 0.2)  # The machine has no process that leaves.
    async with arriving_machines(tmp_path) as head:
        near = await head.join("near", host="127.0.0.1")
        head.start(0)
        await near.wait(NodeRequested)
        refused = await head.refusal("far", host="10.0.0.2")

        assert "near, which is in the job" in refused.reason
        assert "--advertise" in refused.reason
        assert list(head.machines.live_nodes) == [0]


@runs
async def test_a_node_whose_machine_is_lost_before_it_arrives_keeps_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator never heard of it, so nobody said that it was gone: no machine got a node in
    its place."""
    monkeypatch.setattr(machines, "arrival_s", lambda _: 0.05)
    calls: list[bool] = []
    async with arriving_machines(tmp_path, num_max=1) as head:
        first = await head.join("first")
        second = await head.join("second")
        head.start(0)
        assert not head.machines.has_room
        head.machines.on_free = lambda: calls.append(head.machines.has_room)
        first.reset()
        await wait_until(lambda: bool(calls))

        assert list(head.machines.live_nodes) == [0]
        assert head.ends == []
        second.close()


@runs
async def test_nodes_of_a_run_that_are_not_back_yet_keep_their_places(tmp_path: Path) -> None:
    """Fresh machines took them, or stood for nodes of others: one too many was there then."""
    async with arriving_machines(tmp_path, num_max=2) as head:
        fresh = await head.join("fresh")
        await head.arrive("back", run="run", node=0)
        assert await head.machines.wait_living((0, 1), timeout_s=TIMEOUT_S)
        assert list(head.machines.reserve((0, 1))) == [0]
        assert not head.machines.has_room
        head.machines.on_members(Members(epoch=3, term=1, nodes=(0, 1)))
        assert not head.machines.has_room
        head.machines.on_members(Members(epoch=4, term=2, nodes=(0,), gone=(1,)))

        assert head.machines.has_room
        fresh.close()


@runs
async def test_the_next_head_hears_how_nodes_of_the_one_before_have_ended(tmp_path: Path) -> None:
    """It waited for them, and then for their leases."""
    async with arriving_machines(tmp_path) as head:
        line = await head.arrive("m", run="run")
        line.tell(NodeEnded(node=1, status=-9))
        await wait_until(lambda: bool(head.ends))
        other = await head.arrive("other", run="an earlier run")
        other.tell(NodeEnded(node=0, status=-9), head.ready())
        await wait_until(lambda: head.machines.num_ready == 1)

        assert [ended.node for ended in head.ends] == [1]
        assert not await head.machines.wait_living((1,), timeout_s=TIMEOUT_S)


@runs
async def test_a_machine_whose_node_ends_as_soon_as_it_is_back_may_take_another(
    tmp_path: Path,
) -> None:
    """It has no answer for the place of saves, since it had a node; it was refused for good, as one
    that saves to another place."""
    async with arriving_machines(tmp_path) as head:
        line = await head.arrive(run="run", node=0)
        line.tell(MachineReady(run="run", answer=""), NodeEnded(node=0, status=-9))
        await wait_until(lambda: head.machines.num_ready == 1)
        head.start(1)

        assert (await line.wait(NodeRequested)).spec.node == 1


@runs
async def test_a_machine_that_is_away_for_a_moment_keeps_its_place(tmp_path: Path) -> None:
    async with arriving_machines(tmp_path, num_max=1) as head:
        first = await head.join("first")
        second = await head.join("second")
        head.start(0)
        first.reset()
        await wait_until(lambda: not head.machines.is_reachable(0))

        assert not head.machines.has_room
        second.close()


@runs
async def test_a_machine_that_breaks_off_while_it_is_admitted_keeps_the_place_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as away since the clock began, and another machine got a node too many."""

    def raise_error(*_: object, **__: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    async with arriving_machines(tmp_path, num_max=1) as head:
        fresh = await head.join("fresh")
        head.machines.on_members(Members(epoch=3, term=1, nodes=(0,)))
        assert not head.machines.has_room
        monkeypatch.setattr(machine_handle, "break_when_silent", raise_error)
        line = await arrive(head.address, name="back", run="run", node=0)
        await line.wait_end()
        line.close()

        assert list(head.machines.live_nodes) == [0]
        assert not head.machines.has_room
        fresh.close()


@runs
async def test_a_machine_whose_agent_was_started_again_keeps_its_name(tmp_path: Path) -> None:
    """It came back as m-2, m-3, ..., so neither the head nor the coordinator, which counts by name,
    ever knew that it was the same machine that had lost all those nodes."""
    async with arriving_machines(tmp_path) as head:
        for node in range(1 + REJOINS_MAX):
            line = await head.join(run="run", machine_id=f"agent {node}")
            assert head.machines.has_room
            head.start(node)
            await line.wait(NodeRequested)
            line.reset()
            await wait_until(lambda: not head.machines.connected)
            head.machines.on_members(Members(epoch=node + 1, term=0, nodes=(), gone=(node,)))
        await head.join(run="run", machine_id="the last agent")

        assert [machine.name for machine in head.machines.connected] == ["m"]
        assert not head.machines.has_room
        assert any(note.startswith("m lost too many nodes and gets none") for note in head.notes)


@runs
async def test_a_machine_whose_name_another_one_has_taken_meanwhile_gets_another_name(
    tmp_path: Path,
) -> None:
    """Two containers may call themselves the same. A node that was cut off may come back."""
    async with arriving_machines(tmp_path) as head:
        old = await head.join(machine_id="a")
        head.start(0)
        old.reset()
        await wait_until(lambda: not head.machines.is_reachable(0))
        head.machines.on_members(Members(epoch=1, term=0, nodes=(), gone=(0,)))
        await head.join(machine_id="b")
        back = await head.arrive(run="run", node=0, machine_id="a")
        back.tell(NodeEnded(node=0, status=1), head.ready())
        await wait_until(lambda: head.machines.num_ready == 2)

        assert [machine.name for machine in head.machines.connected] == ["m", "m-2"]
        assert [ended.node for ended in head.ends] == [0]
