"""A head and machines as the commands have them, on a test's event loop, without processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast

import msgspec

from helpers.fake_fork_server import FakeForkServer
from helpers.heads import CREDENTIALS
from planaria.core.job import JobConfig
from planaria.core.machine_messages import JobOffered
from planaria.core.specs import NodeSpec, Prepared
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.process_events import restore_handlers
from planaria.nodes.head.remote.machine_checks import MachineChecks
from planaria.nodes.head.remote.machines import Machines
from planaria.nodes.machine import serve_machine
from planaria.nodes.machine_spec import MachineSpec
from planaria.nodes.shared_saves import place_mark
from planaria.transport.acceptor import Acceptor, Purpose, listen
from planaria.transport.sockets import Address

TIMEOUT_S: Final = 60.0
_NOTHING: Final = Prepared()


class SpecForkServer(FakeForkServer):
    """A fork server that keeps the specs of nodes that it was asked for, and ends them at once.

    Args:
        specs: list that gets the specs.
        prepared: facts on the job that are found by whoever looks for them; None: it is killed.
    """

    def __init__(self, specs: list[NodeSpec], prepared: Prepared | None) -> None:
        super().__init__()
        self._specs = specs
        self._prepared = prepared

    def ask(self, target: str, payload: bytes, fds: Sequence[int] = ()) -> int:
        """See FakeForkServer."""
        if "prepare" in target and self._prepared is not None:
            os.write(fds[0], msgspec.json.encode(self._prepared))
        if "agent" in target:
            self._specs.append(msgspec.json.decode(payload, type=NodeSpec))
        pid = super().ask(target, payload, fds)
        self.end(pid, 0)
        return pid


@dataclass
class Cluster:
    """A head and its machines.

    Attributes:
        notes: what the head has shown.
        told: what the machines have shown.
        ends: the machines, each with the exit code that it ends with.
        specs: specs of the nodes that machines were asked for.
    """

    address: Address
    machines: Machines
    directory: Path
    notes: list[str]
    told: list[str] = field(default_factory=list)
    ends: list[asyncio.Task[int]] = field(default_factory=list)
    specs: list[NodeSpec] = field(default_factory=list)

    def join(
        self, *, domain: str = "", host: str = "", prepared: Prepared | None = _NOTHING
    ) -> asyncio.Task[int]:
        """Starts another machine."""
        spec = MachineSpec(
            heads=(self.address,),
            credentials=CREDENTIALS,
            host=host,
            domain=domain,
            has_code=False,
            notice="",
            stays=False,
            cache_directory=str(self.directory / f"cache-{len(self.ends)}"),
            server=lambda _job, _paths: cast(ForkServer, SpecForkServer(self.specs, prepared)),
            note=self.told.append,
        )
        self.ends.append(asyncio.create_task(serve_machine(spec)))
        return self.ends[-1]

    async def wait_ready(self, num_machines: int) -> None:
        await self.machines.wait_ready(num_machines, timeout_s=TIMEOUT_S)


@asynccontextmanager
async def cluster(tmp_path: Path, job: JobConfig) -> AsyncIterator[Cluster]:
    """A head for the length of the context, and whatever joins it."""
    notes: list[str] = []
    saves = str(tmp_path / "saves")
    job = replace(job, checkpoint=replace(job.checkpoint, directory=saves))
    on_sigint = signal.getsignal(signal.SIGINT)  # Each machine restores the one before it.
    with restore_handlers(), place_mark(saves) as mark:
        checks = MachineChecks(
            job, mark, cache_directory=str(tmp_path / "cache"), note=notes.append
        )
        offer = JobOffered(run="run", job=job, mark=mark)
        machines = Machines(offer, CREDENTIALS, num_max=9, checks=checks, note=notes.append)
        sockets, address = listen("127.0.0.1:0")
        acceptor = Acceptor(sockets, {Purpose.MACHINE: machines.accept})
        acceptor.start()
        made = Cluster(address, machines, tmp_path, notes)
        try:
            yield made
        finally:
            await machines.end_all(None)
            await asyncio.gather(*made.ends, return_exceptions=True)
            acceptor.close()
            signal.signal(signal.SIGINT, on_sigint)
