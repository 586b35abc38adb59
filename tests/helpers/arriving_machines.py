"""The machines of a head, where the machines are the test's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from helpers.heads import CREDENTIALS
from helpers.machine_lines import MachineLine, arrive
from helpers.offered_machines import node_spec
from helpers.tasks import wait_until
from planaria.core.job import CheckpointConfig, ClusterConfig, JobConfig
from planaria.core.machine_messages import (
    JobOffered,
    MachineReady,
    MachineRefused,
    ToMachine,
)
from planaria.core.records import AgentEnded
from planaria.nodes.head.remote.machine_checks import MachineChecks
from planaria.nodes.head.remote.machines import Machines
from planaria.nodes.shared_saves import answer_mark, place_mark
from planaria.transport.acceptor import Acceptor, Purpose, listen
from planaria.transport.sockets import Address


class ArrivingMachines:
    """A head's machines, and what the launcher is told of them.

    Attributes:
        notes: what the user is shown.
        ends: ends of nodes that the launcher is told of.
        address: address at which it listens.
    """

    def __init__(self, job: JobConfig, mark: str, address: Address, *, num_max: int) -> None:
        self.notes: list[str] = []
        self.ends: list[AgentEnded] = []
        self._job, self._mark, self.address = job, mark, address
        checks = MachineChecks(job, mark, cache_directory="", note=self.notes.append)
        self.machines = Machines(
            JobOffered(run="run", job=job, mark=mark),
            CREDENTIALS,
            num_max=num_max,
            checks=checks,
            note=self.notes.append,
        )
        self.machines.on_end = self.ends.append
        self._lines: list[MachineLine[ToMachine]] = []

    async def arrive(
        self,
        name: str = "m",
        *,
        host: str = "127.0.0.1",
        run: str = "",
        node: int = -1,
        machine_id: str = "",
    ) -> MachineLine[ToMachine]:
        """A machine that has been offered the job."""
        line = await arrive(
            self.address, name=name, host=host, run=run, node=node, machine_id=machine_id
        )
        self._lines.append(line)
        await line.wait(JobOffered)
        return line

    async def refusal(self, name: str, *, host: str) -> MachineRefused:
        """What a machine is told that is refused once it is ready."""
        line = await self.arrive(name, host=host)
        line.tell(self.ready())
        return await line.wait(MachineRefused)

    def ready(self, run: str = "run") -> MachineReady:
        """What a machine says when it can run a node."""
        answer = answer_mark(self._job.checkpoint.directory, self._mark)
        return MachineReady(run=run, answer=answer)

    async def join(
        self, name: str = "m", *, host: str = "127.0.0.1", run: str = "", machine_id: str = ""
    ) -> MachineLine[ToMachine]:
        """A machine that is ready."""
        num_ready = self.machines.num_ready
        line = await self.arrive(name, host=host, run=run, machine_id=machine_id)
        line.tell(self.ready())
        await wait_until(lambda: self.machines.num_ready == num_ready + 1)
        return line

    def leave(self) -> None:
        """Has all machines leave without a word."""
        for line in self._lines:
            line.close()

    def start(self, node: int) -> None:
        """Starts a node, as the launcher does."""
        self.machines.start(node_spec(self._job, node), is_granted=False)


@asynccontextmanager
async def arriving_machines(
    tmp_path: Path, *, num_max: int = 9, cluster: ClusterConfig | None = None
) -> AsyncIterator[ArrivingMachines]:
    """The machines of a head for the length of the context."""
    saves = str(tmp_path / "saves")
    job = JobConfig(
        checkpoint=CheckpointConfig(directory=saves), cluster=cluster or ClusterConfig()
    )
    listeners, address = listen("127.0.0.1:0")
    with place_mark(saves) as mark:
        made = ArrivingMachines(job, mark, address, num_max=num_max)
        acceptor = Acceptor(listeners, {Purpose.MACHINE: made.machines.accept})
        acceptor.start()
        try:
            yield made
        finally:
            made.leave()
            await made.machines.end_all(None)
            acceptor.close()
