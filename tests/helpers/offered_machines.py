"""A machine that offers itself to a head of the test's, and forks nothing."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest

from helpers.fake_fork_server import FakeForkServer
from helpers.heads import CREDENTIALS
from helpers.machine_lines import FakeHead, MachineLine, fake_head
from helpers.tasks import TIMEOUT_S, settle, wait_until
from planaria.core.job import CheckpointConfig, JobConfig
from planaria.core.machine_messages import (
    FromMachine,
    JobOffered,
    MachineReady,
    NodeRequested,
    SourceFile,
)
from planaria.core.specs import NodeSpec
from planaria.nodes import forking, machine, machine_node
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.process_events import restore_handlers
from planaria.nodes.machine import serve_machine
from planaria.nodes.machine_spec import MachineSpec
from planaria.nodes.shared_saves import place_mark
from planaria.transport.sockets import Address


class Clock:
    """The module `time` as a machine sees it; `ahead_s` is added to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    time = monotonic


class OfferedMachine:
    """A machine that runs, and its head.

    Attributes:
        notes: what its user is shown.
        servers: its fork servers, the newest last.
        clock: its clock.
        are_servers_ready: whether further fork servers have imported torch at once.
        server_error: why no fork server can be started; None: one can.
        other_heads: addresses that are named before that of the head.
    """

    def __init__(
        self, head: FakeHead, job: JobConfig, mark: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.head = head
        self._mark = mark
        self.notes: list[str] = []
        self.servers: list[FakeForkServer] = []
        self.clock = Clock()
        self.are_servers_ready = True
        self.server_error: OSError | None = None
        self.other_heads: tuple[Address, ...] = ()
        self._job = job
        monkeypatch.setattr(machine, "time", self.clock)
        for module in (machine_node, forking):
            monkeypatch.setattr(module, "kill_group", lambda pid: self.server.kill_group(pid))

    @property
    def server(self) -> FakeForkServer:
        """The newest fork server."""
        return self.servers[-1]

    def spec(self, cache: str, *, stays: bool = False, has_code: bool = False) -> MachineSpec:
        """What the machine is told by its user."""

        def server(*_: object) -> ForkServer:
            if self.server_error is not None:
                raise self.server_error
            self.servers.append(FakeForkServer())
            self.server.is_ready = self.are_servers_ready
            return cast(ForkServer, self.server)

        return MachineSpec(
            heads=(*self.other_heads, self.head.address),
            credentials=CREDENTIALS,
            host="",
            domain="",
            notice="",
            has_code=has_code,
            stays=stays,
            cache_directory=cache,
            server=server,
            note=self.notes.append,
        )

    def offer(self, run: str = "run", *, sources: tuple[SourceFile, ...] = ()) -> JobOffered:
        """The job, as a run of the head."""
        return JobOffered(run=run, job=self._job, mark=self._mark, sources=sources)

    async def join(self, run: str = "run") -> MachineLine[FromMachine]:
        """The connection of the machine once it is ready for a run."""
        line = await self.head.next_line()
        line.tell(self.offer(run))
        await line.wait(MachineReady)
        return line

    async def run_node(self, *, parts: str = "") -> MachineLine[FromMachine]:
        """The connection of the machine once it runs node 0.

        Args:
            parts: place of the parts that the node can save; "": it can save none.
        """
        line = await self.join()
        line.tell(NodeRequested(msgspec.structs.replace(node_spec(self._job, 0), parts=parts)))
        await wait_until(lambda: "runs node 0" in self.notes)
        await settle()
        return line

    def request(self, node: int) -> NodeRequested:
        """The request for a node."""
        return NodeRequested(node_spec(self._job, node))


def node_spec(job: JobConfig, node: int) -> NodeSpec:
    """What a node is told."""
    return NodeSpec(
        job=job, node=node, token=b"", coordinator=("", 0), worker="", cache_directory=""
    )


@asynccontextmanager
async def offered_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    job: JobConfig,
    stays: bool = False,
    has_code: bool = False,
    other_heads: tuple[Address, ...] = (),
) -> AsyncIterator[tuple[OfferedMachine, asyncio.Task[int]]]:
    """A machine, and the task that returns its exit code."""
    saves = str(tmp_path / "saves")
    job = replace(job, checkpoint=CheckpointConfig(directory=saves))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with restore_handlers(), place_mark(saves) as mark:
        async with fake_head() as head, asyncio.timeout(TIMEOUT_S):
            made = OfferedMachine(head, job, mark, monkeypatch)
            made.other_heads = other_heads
            spec = made.spec(str(tmp_path / "cache"), stays=stays, has_code=has_code)
            running = asyncio.create_task(serve_machine(spec))
            try:
                yield made, running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
