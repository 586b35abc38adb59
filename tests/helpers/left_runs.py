"""A head that takes up the run of a killed head; the machine with its node is the test's."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from helpers.heads import CREDENTIALS
from helpers.jobs import tiny_job
from helpers.machine_lines import MachineLine, arrive
from helpers.strategies import layer_profile, model_profile
from planaria.core.job import JobConfig
from planaria.core.machine_messages import JobOffered, JobOver, ToMachine
from planaria.core.specs import Prepared
from planaria.job.on_machines import Listening
from planaria.job.training_job import SilentDisplay
from planaria.nodes.head.remote.machine_checks import MachineChecks
from planaria.nodes.head.remote.machines import Machines
from planaria.nodes.head.remote.open_head import OpenHead
from planaria.nodes.head.remote.run_record import NodeLog, RunRecord, write_run
from planaria.transport.acceptor import listen
from planaria.transport.sockets import Address

RUN: Final = "a lost run"
LISTENING: Final = Listening(
    address="127.0.0.1:0",
    credentials=CREDENTIALS,
    nodes_min=1,
    nodes_max=1,
    wait_s=60.0,
    reattaches=True,
)


def left_job(saves: Path) -> JobConfig:
    """A job of one node."""
    job = tiny_job("sequential", saves.parent)
    return replace(
        job,
        checkpoint=replace(job.checkpoint, directory=str(saves)),
        cluster=replace(job.cluster, nodes=1, device_memory_bytes=1 << 30),
        resilience=replace(job.resilience, failures_tolerated=0),
    )


def leave_run(directory: Path, job: JobConfig, *, num_nodes: int = 1) -> None:
    """Leaves the records that a killed head leaves, which had started so many nodes."""
    directory.mkdir(parents=True, exist_ok=True)
    write_run(directory, RunRecord(run=RUN, job=job, prepared=_prepared(), resumed=None))
    log = NodeLog(directory)
    for node in range(num_nodes):
        log.add(node)
    log.close()


def _prepared() -> Prepared:
    return Prepared(profile=model_profile((layer_profile("layer 0", 0.01),)))


@contextmanager
def open_left_head(saves: Path, *, run: str = RUN) -> Iterator[tuple[OpenHead, asyncio.Runner]]:
    """A head of a run that another head has left, and the runner of its event loop."""
    job = left_job(saves)
    listeners, address = listen("127.0.0.1:0")
    checks = MachineChecks(job, "", cache_directory="", note=lambda _: None)
    with asyncio.Runner() as runner:
        offer = JobOffered(run=run, job=job, mark="")
        machines = Machines(offer, CREDENTIALS, num_max=1, checks=checks, note=lambda _: None)
        yield OpenHead(runner, listeners, address, machines, keeps_run=True), runner


async def come_back(address: Address) -> MachineLine[ToMachine]:
    """The connection of a machine that has come back with the run's node 0."""
    line = await arrive(address, run=RUN, node=0)
    await line.wait(JobOffered)
    return line


async def is_told_the_end(line: MachineLine[ToMachine]) -> bool:
    """Whether a machine was told that the job is over, before its connection ended."""
    await line.wait_end()
    return any(isinstance(message, JobOver) for message in line.heard)


class NoteDisplay(SilentDisplay):
    """A display that keeps the notes, and acts on them.

    Args:
        on_note: called with each note.

    Attributes:
        notes: all notes so far.
        acts: what is done once a note has a text in it.
    """

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self.notes: list[str] = []
        self.acts: dict[str, Callable[[], object]] = {}
        self._on_note = on_note

    def note(self, text: str) -> None:
        """See Display."""
        self.notes.append(text)
        self._on_note(text)
        for part in [part for part in self.acts if part in text]:
            self.acts.pop(part)()


class ReturningMachine:
    """A machine with node 0, which comes to a head as soon as that says where it listens.

    Attributes:
        address: address of the head; None: it does not listen yet.
        is_told: whether it was told that the job is over; None: its connection has not ended.
        is_done: whether it was told that the job is done.
        display: display to give to the head's job.
    """

    def __init__(self) -> None:
        self.address: Address | None = None
        self.is_told: bool | None = None
        self.is_done = False
        self.display = NoteDisplay(self._on_note)
        self._thread: threading.Thread | None = None

    def _on_note(self, text: str) -> None:
        if "planaria agent --join " in text:
            host, _, port = text.split()[-1].rpartition(":")
            address = self.address = host, int(port)
            self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(address)))
            self._thread.start()

    async def _serve(self, address: Address) -> None:
        line = await come_back(address)
        self.is_told = await is_told_the_end(line)
        self.is_done = any(isinstance(each, JobOver) and each.is_done for each in line.heard)

    def join(self) -> None:
        """Waits until its connection has ended."""
        if self._thread is not None:
            self._thread.join()
