"""The messages between a head and the machines that run its nodes, each one a frozen record.

A machine is the process `planaria agent`, which keeps one connection to the head beside those of
its node to the coordinator. The head sends it the job and asks it for a node; it tells the head
what became of the node. What the node does then, its agent says to the coordinator (messages.py).
"""

from typing import Final

import msgspec

from planaria.core.checkups import CheckResult
from planaria.core.job import JobConfig
from planaria.core.messages import Message
from planaria.core.plan import Link
from planaria.core.specs import NodeSpec, Prepared, PrepareRequest

# The version of these messages and of all others between machines.
PROTOCOL: Final = 1
# The files of the user's modules have at most so many bytes together.
SOURCES_BYTES_MAX: Final = 16 << 20
# Time in which the bandwidth of a link is measured.
LINK_BUDGET_S: Final = 0.4


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine reports of itself.

    Attributes:
        name: its host name.
        host: address at which its node is reached by others.
        domain: name of its failure domain; "": none was given.
        processors: number of processors that its node may use.
        memory_bytes: memory of the machine.
        processor: model of its processor; bits may differ between models.
        devices: model of each of its accelerators; bits may differ between these models, too.
        versions: version by package name, of Python, torch and planaria.
    """

    name: str
    host: str
    domain: str = ""
    processors: int = 1
    memory_bytes: int = 0
    processor: str = ""
    devices: tuple[str, ...] = ()
    versions: dict[str, str] = {}


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the user's modules.

    Attributes:
        path: path below the directory in which modules are looked for, with forward slashes.
        data: contents; b"" where only the digest travels.
        sha256: digest of the contents, in hexadecimal digits.
    """

    path: str
    data: bytes
    sha256: str


# -- from a machine to the head --------------------------------------------------------------------


class MachineArrived(Message, frozen=True, kw_only=True):
    """A machine offers to run a node; the first message on each connection.

    Attributes:
        protocol: PROTOCOL of the machine.
        has_code: whether the user's modules are there already and are not to be sent
            (`--no-code`).
        run: run that the machine belonged to until it lost the head; "": none.
        node: node of that run that it runs; -1: none.
        machine_id: random name of its process, the same on each connection; "": it has none.
    """

    protocol: int
    facts: MachineFacts
    machine_id: str = ""
    has_code: bool = False
    run: str = ""
    node: int = -1


class MachineReady(Message, frozen=True, kw_only=True):
    """The machine has the job and can start a node; the head compares it with the others.

    A machine that runs a node was compared before, and has nothing here.

    Attributes:
        run: run of the job.
        digests: digest of each input of the job on this machine, by the key that names it.
        answer: name that the machine has written beside the head's mark at the place of saves.
    """

    run: str
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    answer: str = ""


class MachineUnfit(Message, frozen=True):
    """The machine cannot take part in the job, as it says itself, or its platform tells the head.

    Attributes:
        reason: fact that stands in the way, and what to do.
    """

    reason: str


class JobPrepared(Message, frozen=True):
    """The answer to a PrepareRequested.

    Attributes:
        prepared: result; None: there is none, for the process was killed.
        reason: description of how it ended then.
        number: number of the question.
    """

    prepared: Prepared | None
    reason: str = ""
    number: int = 0

    @property
    def failure(self) -> str:
        """Why there is no profile."""
        if self.prepared is None:
            return self.reason
        if self.prepared.mistake is not None:
            field, value, remedy = self.prepared.mistake
            return f"{field} = {value}: {remedy}"
        return self.prepared.traceback


class LinkServed(Message, frozen=True):
    """The answer to a LinkServeRequested.

    Attributes:
        port: port at which the machine waits for another to measure the link; 0: at none.
        number: number of the question.
    """

    port: int
    number: int = 0


class LinkMeasured(Message, frozen=True, kw_only=True):
    """The answer to a LinkMeasureRequested.

    Attributes:
        link: measured latency and bandwidth; None: the other machine cannot be reached.
        reason: description of why not.
        number: number of the question.
    """

    link: Link | None = None
    reason: str = ""
    number: int = 0


class MachineExamined(Message, frozen=True, kw_only=True):
    """The answer to an ExaminationRequested.

    Attributes:
        checks: results of its checks.
        received_s: time of its clock (seconds since 1970) when the question came.
        sent_s: time of its clock when the answer went.
        number: number of the question.
    """

    checks: tuple[CheckResult, ...]
    received_s: float
    sent_s: float
    number: int = 0


class NodeEnded(Message, frozen=True, kw_only=True):
    """The node's agent has ended, and with it all its processes.

    Attributes:
        status: exit status; negative: the signal that killed it.
    """

    node: int
    status: int


class FaultInjected(Message, frozen=True):
    """The machine has injected the fault that it was asked for, or its node was gone before."""

    node: int


class MachineLeaving(Message, frozen=True):
    """The machine takes no further node: it has been told to leave."""


# -- from the head to a machine --------------------------------------------------------------------


class JobOffered(Message, frozen=True, kw_only=True):
    """The job in which the machine is to take part.

    Attributes:
        run: random name of this run of the job.
        mark: name that the head has written at the place of saves; see nodes/shared_saves.py.
        sources: files of the user's modules.
    """

    run: str
    job: JobConfig
    mark: str
    sources: tuple[SourceFile, ...] = ()

    def is_same_job(self, other: "JobOffered") -> bool:
        """Whether another offer is of the same job, maybe of another run: it saves there, too."""
        places = (each.job.checkpoint.directory.rstrip("/") for each in (self, other))
        return self.run == other.run or len({*places}) == 1


class PrepareRequested(Message, frozen=True):
    """Asks for the facts on model, data and profile; the machine measures what is missing.

    Attributes:
        number: number of the question.
    """

    request: PrepareRequest
    number: int = 0


class LinkServeRequested(Message, frozen=True):
    """Asks to wait for another machine that measures the link to this one.

    Attributes:
        secret: bytes by which the two know each other; see transport/link_measurement.py.
        number: number of the question.
    """

    secret: bytes
    number: int = 0


class LinkMeasureRequested(Message, frozen=True, kw_only=True):
    """Asks to measure the link to a machine that waits for that.

    Attributes:
        address: host and port at which it waits.
        secret: the bytes that it was given.
        budget_s: time for the bandwidth; 0.0: only the latency is measured.
        number: number of the question.
    """

    address: tuple[str, int]
    secret: bytes
    budget_s: float = LINK_BUDGET_S
    number: int = 0


class ExaminationRequested(Message, frozen=True):
    """Asks what the machine is like, for `planaria doctor`.

    Attributes:
        number: number of the question.
    """

    number: int = 0


class NodeRequested(Message, frozen=True):
    """Asks for a node; the machine fills in addresses, credentials and directories."""

    spec: NodeSpec


class NodeDropped(Message, frozen=True):
    """Has all processes of a node killed, if it is there."""

    node: int


class FaultRequested(Message, frozen=True, kw_only=True):
    """Asks to inject a fault into a node, if it is there.

    Attributes:
        kind: kill, hang, stall, crash or preempt; see core/inject.py.
        value: value of the fault, in seconds.
    """

    kind: str
    node: int
    value: float


class MachineReleased(Message, frozen=True):
    """The user has drained the machine's node, so the machine leaves; it may come again later."""

    text: str


class JobOver(Message, frozen=True, kw_only=True):
    """The job is over; the node leaves by itself, or is killed after a while.

    Attributes:
        is_done: whether all of its iterations are done, or the machine leaves in peace.
        text: description of the end.
    """

    is_done: bool
    text: str


class MachineRefused(Message, frozen=True, kw_only=True):
    """The head does not take the machine.

    Attributes:
        is_final: whether another try can succeed only after somebody has changed something.
    """

    reason: str
    is_final: bool


FromMachine = (
    MachineArrived
    | MachineReady
    | MachineUnfit
    | JobPrepared
    | LinkServed
    | LinkMeasured
    | MachineExamined
    | NodeEnded
    | FaultInjected
    | MachineLeaving
)
ToMachine = (
    JobOffered
    | PrepareRequested
    | LinkServeRequested
    | LinkMeasureRequested
    | ExaminationRequested
    | NodeRequested
    | NodeDropped
    | FaultRequested
    | MachineReleased
    | MachineUnfit
    | JobOver
    | MachineRefused
)
