"""Workers that stand still: their agent asks for their stacks, and goes on beating meanwhile."""

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.specs import NodeSpec
from planaria.nodes import agent
from planaria.nodes.part_reports import PartReports
from planaria.transport import pulse

LEASE_S = 12.0
SPEC = NodeSpec(
    job=JobConfig(cluster=ClusterConfig(lease_s=LEASE_S)),
    node=0,
    token=b"",
    coordinator=("", 0),
    worker="",
    cache_directory="",
)


@pytest.fixture
def deaf() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that write no stack when they are asked to."""
    processes = [
        subprocess.Popen(
            ["sleep", "1000"], preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        )
        for _ in range(2)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_heartbeats_go_on_while_the_stacks_of_all_stalled_workers_are_awaited(
    deaf: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node is lost with its good workers. A worker here writes its stack once there was a
    heartbeat after both were asked."""
    happened: list[str] = []
    pids = iter([process.pid for process in deaf])
    monkeypatch.setattr(agent, "TICKS_PER_LEASE", 600)
    monkeypatch.setattr(os, "fork", lambda: next(pids))
    workers = [agent._Worker(msgspec.structs.replace(SPEC, device=n), -1) for n in range(2)]

    def kill(pid: int, number: int) -> None:
        assert pid in {process.pid for process in deaf}
        happened.append(signal.Signals(number).name)

    def stack(_: object) -> str:
        return "a stack" if "beat" in happened[_last(happened, "SIGUSR1") :] else ""

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(pulse.Pulse, "read_stack", stack)

    class Line:
        """To the coordinator."""

        def write(self, data: bytes) -> None:
            assert b"Heartbeat" in data
            happened.append("beat")

    async def watch() -> None:
        made = agent._Agent(SPEC, workers, -1)
        made._lease = replace(made._lease, awake_since_s=-1e9)
        line: Any = Line()
        made._to_coordinator = line
        for worker in workers:
            worker.pulse._times_s[pulse._BEAT] = -1e9
        ticks = asyncio.create_task(made._run_ticks())
        async with asyncio.timeout(2 * LEASE_S):
            while happened.count("SIGKILL") < 2:
                await asyncio.sleep(0.01)
        ticks.cancel()

    asyncio.run(watch())

    signals = [what for what in happened if what != "beat"]
    assert signals == ["SIGUSR1", "SIGCONT"] * 2 + ["SIGKILL"] * 2
    asked, killed = _last(happened, "SIGUSR1"), happened.index("SIGKILL")
    assert "beat" in happened[asked:killed]


def _last(happened: list[str], what: str) -> int:
    return len(happened) - 1 - happened[::-1].index(what)


def test_a_node_ends_whose_worker_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a user's processes are limited. The others waited for that worker for ever."""
    ends: list[str] = []

    async def raise_error(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def wait(_: object) -> None:
        await asyncio.get_running_loop().create_future()

    async def run() -> None:
        running = asyncio.create_task(agent._Agent(SPEC, [worker], lifeline_fd).run())
        async with asyncio.timeout(2 * LEASE_S):
            while not ends:
                await asyncio.sleep(0.01)
        running.cancel()

    worker: Any = SimpleNamespace(rank=0)
    lifeline_fd, write_fd = os.pipe()
    monkeypatch.setattr(agent._Agent, "_serve", wait)
    monkeypatch.setattr(agent._Agent, "_forward_messages", raise_error)
    monkeypatch.setattr(agent._Agent, "_end_node", lambda _, reason: ends.append(reason))
    asyncio.run(run())
    os.close(write_fd)
    os.close(lifeline_fd)

    assert ends == [
        "a worker of it cannot be replaced: [Errno 11] Resource temporarily unavailable"
    ]


def test_a_node_ends_whose_ticks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing renewed its lease, and nobody watched its workers any more."""
    ends: list[str] = []

    async def raise_error(_: object) -> None:
        raise ValueError("a bug")

    async def wait(_: object) -> None:
        await asyncio.get_running_loop().create_future()

    async def run() -> None:
        running = asyncio.create_task(agent._Agent(SPEC, [], lifeline_fd).run())
        async with asyncio.timeout(2 * LEASE_S):
            while not ends:
                await asyncio.sleep(0.01)
        running.cancel()

    lifeline_fd, write_fd = os.pipe()
    monkeypatch.setattr(agent._Agent, "_serve", wait)
    monkeypatch.setattr(agent._Agent, "_run_ticks", raise_error)
    monkeypatch.setattr(agent._Agent, "_end_node", lambda _, reason: ends.append(reason))
    asyncio.run(run())
    os.close(write_fd)
    os.close(lifeline_fd)

    assert ends == ["its ticks failed: a bug"]


def test_a_node_without_a_head_watches_a_worker_that_saves_when_another_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of the other was closed, of which the ticks died: a worker that hung on the store
    was waited for for ten minutes."""
    kills: list[tuple[int, int]] = []
    pids = iter((1234567, 1234568))
    monkeypatch.setattr(agent, "TICKS_PER_LEASE", 600)
    monkeypatch.setattr(os, "fork", lambda: next(pids))
    monkeypatch.setattr(os, "kill", lambda *arguments: kills.append(arguments))
    monkeypatch.setattr(pulse.Pulse, "read_stack", lambda _: "a stack")
    workers = [agent._Worker(msgspec.structs.replace(SPEC, device=n), -1) for n in range(2)]
    ended, hanging = workers

    async def wait_exit(_: int) -> int:
        return 0

    async def watch() -> None:
        made = agent._Agent(SPEC, workers, -1)
        made._lease = replace(made._lease, awake_since_s=-1e9)
        made._parts = PartReports([0, 1])
        await made._forward_messages(ended)
        hanging.pulse._times_s[pulse._BEAT] = -1e9
        ticks = asyncio.create_task(made._run_ticks())
        async with asyncio.timeout(2 * LEASE_S):
            while not ticks.done() and (hanging.pid, signal.SIGKILL) not in kills:
                await asyncio.sleep(0.01)
        assert not ticks.done()
        ticks.cancel()

    monkeypatch.setattr(agent, "wait_exit", wait_exit)
    asyncio.run(watch())

    assert ended.pid not in [pid for pid, _ in kills]


def test_a_worker_that_breaks_the_protocol_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user's code runs there, and may write where it should not. A new worker follows."""
    kills: list[tuple[int, int]] = []

    class Worker:
        """A worker that has written nonsense."""

        rank, pid = 0, 1234567

        async def connect(self) -> asyncio.StreamReader:
            reader = asyncio.StreamReader()
            reader.feed_data(b"\x00\x00\x00\x02{}")
            return reader

    async def wait_exit(_: int) -> int:
        raise asyncio.CancelledError

    monkeypatch.setattr(os, "kill", lambda *arguments: kills.append(arguments))
    monkeypatch.setattr(agent, "wait_exit", wait_exit)
    worker: Any = Worker()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(agent._Agent(SPEC, [worker], -1)._forward_messages(worker))

    assert kills == [(1234567, signal.SIGKILL)]
    assert "does not come from planaria" in caplog.text


def test_a_node_ends_whose_worker_outlives_its_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that waits in a driver of a GPU. Its agent went on beating, and the others waited
    for the answer of that worker for ever. What a worker is given to die is more than nothing: one
    that gives back hundreds of gigabytes takes seconds."""
    ends: list[str] = []
    kills: list[float] = []
    monkeypatch.setattr(agent, "TICKS_PER_LEASE", 600)
    monkeypatch.setattr(agent, "_DYING_S", 0.2)
    monkeypatch.setattr(os, "fork", lambda: 1234567)
    monkeypatch.setattr(pulse.Pulse, "read_stack", lambda _: "a stack")
    monkeypatch.setattr(agent._Agent, "_end_node", lambda _, reason: ends.append(reason))
    worker = agent._Worker(SPEC, -1)

    def kill(pid: int, number: int) -> None:
        assert pid == 1234567
        if number == signal.SIGKILL:
            kills.append(time.monotonic())

    monkeypatch.setattr(os, "kill", kill)

    async def watch() -> float:
        made = agent._Agent(SPEC, [worker], -1)
        made._lease = replace(made._lease, awake_since_s=-1e9)
        worker.pulse._times_s[pulse._BEAT] = -1e9
        ticks = asyncio.create_task(made._run_ticks())
        async with asyncio.timeout(2 * LEASE_S):
            while not ends:
                await asyncio.sleep(0.01)
        ticks.cancel()
        return time.monotonic()

    ended_s = asyncio.run(watch())

    assert len(kills) == 1
    assert ended_s - kills[0] > 0.2
    assert ends[0] == "a worker of it, rank 0, cannot be killed"
