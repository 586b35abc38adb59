"""What a machine forks: one node at a time, and a process that examines the job."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import psutil
import pytest

from helpers.command import is_alive
from helpers.fake_fork_server import LOSS, NO_PID, FakeForkServer
from helpers.heads import runs
from helpers.offered_machines import node_spec
from helpers.tasks import is_readable, settle, wait_until
from planaria.core.job import JobConfig
from planaria.nodes import forking, machine_node
from planaria.nodes.forking import RENEWALS_MAX
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.machine_node import MachineNode
from planaria.nodes.part_reports import STATUS_SAVED

SPEC = node_spec(JobConfig(), 3)


class Machine:
    """A machine's node, and what is told of it.

    Attributes:
        ends: the nodes that have ended, each with its exit status.
        failures: reasons why nothing can be forked.
    """

    def __init__(self, server: FakeForkServer) -> None:
        self.server = server
        self.ends: list[tuple[int, int]] = []
        self.failures: list[str] = []
        self.node = MachineNode(
            lambda node, status: self.ends.append((node, status)),
            on_failure=self.failures.append,
            on_given_up=pytest.fail,
        )
        self.node.open(cast(ForkServer, server), lambda _: None)


@asynccontextmanager
async def machine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machine]:
    """A machine for the length of the context."""
    server = FakeForkServer()
    for module in (machine_node, forking):
        monkeypatch.setattr(module, "kill_group", server.kill_group)
    for name in ("PAUSE_S", "PAUSE_S_MAX"):
        monkeypatch.setattr(forking, name, 0.001)
    made = Machine(server)
    yield made
    await made.node.close()


def has_happened(count: Callable[[], int], num_times: int) -> bool:
    return count() == num_times


@runs
async def test_a_process_that_had_the_pid_of_the_node_before_it_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node was taken for ended, ran on without anybody, and the machine got another one."""
    async with machine(monkeypatch) as made:
        made.server.end(NO_PID + 1, 0)
        await wait_until(lambda: not made.server.exits())
        await settle()
        made.node.start(SPEC)
        await wait_until(lambda: made.server.targets == ["agent"])
        await settle()

        assert made.ends == []
        assert made.node.number == SPEC.node


@runs
async def test_a_node_that_is_not_forked_yet_is_given_up_at_a_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal to one that has just been forked is ignored there."""
    async with machine(monkeypatch) as made:
        made.server.is_still = True
        made.node.start(SPEC)
        await wait_until(lambda: made.server.targets == ["agent"])
        made.node.notify()

        assert made.ends == [(SPEC.node, 0)]
        assert made.node.number < 0


@runs
async def test_a_notice_is_repeated_until_the_node_heeds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent that was forked a moment ago ignores signals."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(machine_node, "_NOTICE_PERIOD_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    async with machine(monkeypatch) as made:
        made.node.start(SPEC)
        await wait_until(lambda: made.server.targets == ["agent"])
        await settle()
        made.node.notify()
        await wait_until(lambda: len(signals) > 1)
        made.server.end(signals[0][0], 0)
        await wait_until(lambda: made.ends == [(SPEC.node, 0)])

        assert set(signals) == {(NO_PID + 1, signal.SIGTERM)}


@runs
async def test_a_node_whose_head_was_replaced_saves_what_it_holds_before_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its state may be newer than any save, and it was killed at once."""
    spec = msgspec.structs.replace(SPEC, parts="run-000001-a1")
    async with machine(monkeypatch) as made:
        made.node.start(spec)
        await wait_until(lambda: made.server.targets == ["agent"])
        await settle()
        *_, head_lost_fd = made.server.fds
        assert not is_readable(head_lost_fd)
        ending = asyncio.create_task(made.node.save_and_end())
        await wait_until(lambda: is_readable(head_lost_fd))
        assert not ending.done()
        made.server.end(NO_PID + 1, STATUS_SAVED)
        await ending

        assert made.ends == [(SPEC.node, STATUS_SAVED)]
        assert not made.server.kills
        made.node.start(spec)
        assert not is_readable(head_lost_fd)  # The next node has another head.


@runs
async def test_a_node_that_has_given_its_head_up_saves_when_its_job_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had heard of no coordinator, and its machine of the end of the job: then it was killed."""
    monkeypatch.setattr(machine_node, "_LEAVE_TIMEOUT_S", 0.0)
    async with machine(monkeypatch) as made:
        made.node.start(msgspec.structs.replace(SPEC, parts="run-000001-a1"))
        await wait_until(lambda: made.server.targets == ["agent"])
        await settle()
        made.node.has_given_up = True
        leaving = asyncio.create_task(made.node.leave())
        await settle()
        assert not leaving.done()
        made.server.end(NO_PID + 1, STATUS_SAVED)
        await leaving

        assert not made.server.kills


@runs
async def test_a_node_ends_where_no_fork_server_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head waited for it for ever."""
    monkeypatch.setattr(machine_node, "_LOOK_PERIOD_S", 0.0)
    async with machine(monkeypatch) as made:
        made.server.renewals.extend([LOSS] * 3 * RENEWALS_MAX)
        made.server.is_still = True
        made.node.start(SPEC)
        await wait_until(lambda: made.server.targets == ["agent"])
        made.server.lose(LOSS)
        await wait_until(lambda: bool(made.failures))

        assert made.ends == [(SPEC.node, 1)]
        assert made.failures == [f"{LOSS}, like the fork servers before it"]


@runs
async def test_a_fork_server_that_has_forked_a_node_is_renewed_however_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a machine that serves for weeks some are killed, say for memory."""
    async with machine(monkeypatch) as made:
        for num in range(RENEWALS_MAX + 2):
            made.node.start(SPEC)
            await wait_until(partial(has_happened, made.server.targets.__len__, num + 1))
            await settle()
            made.server.end(NO_PID + 1 + num, 0)
            await wait_until(lambda: made.node.number < 0)
            made.server.lose(LOSS)
            await wait_until(partial(has_happened, lambda: made.server.num_renewals, num + 1))

        assert made.failures == []


async def node_that_examines_by(function: str, patch: pytest.MonkeyPatch) -> MachineNode:
    """A machine's node whose process that examines the job calls a function of hanging_prepare."""
    patch.setattr(machine_node, "_PREPARE", f"helpers.hanging_prepare:{function}")
    node = MachineNode(lambda *_: None, on_failure=pytest.fail, on_given_up=pytest.fail)
    node.open(ForkServer(("planaria.nodes.machine_node",)), lambda _: None)
    assert await node.wait_ready() == ""
    return node


@runs
async def test_a_process_that_examines_the_job_ends_with_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran on, and the agent waited for it before it ended."""
    node = await node_that_examines_by("main", monkeypatch)
    pid_path = tmp_path / "pid"
    preparing = asyncio.create_task(node.prepare(str(pid_path).encode()))
    await wait_until(lambda: pid_path.is_file() and bool(pid_path.read_text()))
    process = psutil.Process(int(pid_path.read_text()))
    preparing.cancel()

    await wait_until(lambda: not process.is_running())
    await node.close()


@runs
async def test_what_a_process_has_found_does_not_wait_for_one_that_it_leaves_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pool of the user's data set: the machine never answered, and the job never began."""
    node = await node_that_examines_by("leave_another", monkeypatch)
    pid_path = tmp_path / "pid"

    async with asyncio.timeout(15.0):  # The process lives for 20 s, and is killed.
        assert await node.prepare(str(pid_path).encode()) == b"found"

    await wait_until(lambda: not is_alive(int(pid_path.read_text())))
    await node.close()
