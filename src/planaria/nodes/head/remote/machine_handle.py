"""A machine as its head knows it, and the questions that the head asks it.

The head may ask a machine several things at once, such as to measure layers for the job and a path
for `planaria doctor`. So each question has a number, which the answer repeats.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from planaria.core.checkups import HEAD
from planaria.core.machine_messages import (
    LINK_BUDGET_S,
    PROTOCOL,
    ExaminationRequested,
    JobOffered,
    JobPrepared,
    LinkMeasured,
    LinkMeasureRequested,
    LinkServed,
    LinkServeRequested,
    MachineArrived,
    MachineExamined,
    MachineFacts,
    PrepareRequested,
    ToMachine,
)
from planaria.core.specs import PrepareRequest
from planaria.transport.frames import frame
from planaria.transport.link_measurement import SECRET_BYTES
from planaria.transport.sockets import break_when_silent, is_loopback

REJOINS_MAX: Final = 5  # Nodes that a machine may lose within an hour and still get another.
# A machine that has lost more gets another after this all the same while the job cannot go on. The
# pause is for one whose nodes end as soon as they start.
_NEEDED_PAUSE_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 15.0  # Time for an answer that needs no long work.
# Time to import torch, build the model, read the data and measure every layer. The largest models
# take minutes.
PREPARE_TIMEOUT_S: Final = 3600.0
_HOUR_S: Final = 3600.0
Question = PrepareRequested | LinkServeRequested | LinkMeasureRequested | ExaminationRequested
Answer = JobPrepared | LinkServed | LinkMeasured | MachineExamined
Kind = TypeVar("Kind", JobPrepared, LinkServed, LinkMeasured, MachineExamined)

Result = TypeVar("Result")


class MachineHandle:
    """A machine of a job, connected or not.

    Attributes:
        name: name that no other machine of the job has.
        facts: facts that it has reported of itself.
        machine_id: random name that it gave itself; "": none.
        writer: stream to it; None: its connection is broken.
        is_ready: whether it can run a node as soon as it is connected.
        is_refused: whether the head has refused it since it was connected.
        is_leaving: whether it takes no further node.
        is_unfit: whether its platform says that something is wrong with it, so that it gets no node
            until that is not so.
        has_code: whether it has the user's modules, and only their digests are to travel.
        run: run that it belonged to when it came.
        node: node that it runs; -1: none.
        missing_node: node that it was asked for and did not have when it came back; -1: none.
        ended_s: times at which its nodes have ended, the newest last.
        broken_s: time at which its connection broke, or at which it came; of use only while the
            connection is broken.
    """

    def __init__(self, name: str, facts: MachineFacts, *, machine_id: str = "") -> None:
        self.name = name
        self.facts = facts
        self.machine_id = machine_id
        self.run = ""
        self.writer: asyncio.StreamWriter | None = None
        self.is_ready = self.is_refused = False
        self.is_leaving = self.is_unfit = self.has_code = False
        self.node = self.missing_node = -1
        self.ended_s: deque[float] = deque(maxlen=REJOINS_MAX + 1)
        self.broken_s = time.monotonic()
        self._questions: dict[int, asyncio.Future[Answer | None]] = {}
        self._num_asked = 0

    @property
    def is_free(self) -> bool:
        """Whether it can be asked for a node now."""
        return self.is_ready and self.may_be_free

    @property
    def may_be_free(self) -> bool:
        """Whether it can be asked for a node now, or once it is ready."""
        is_barred = self.is_refused or self.is_leaving or self.is_unfit
        return self.writer is not None and self.node < 0 and not is_barred

    def may_run(self, now_s: float, *, is_needed: bool = False) -> bool:
        """Whether it is free, and has not lost too many nodes within an hour.

        Args:
            now_s: time by the clock of `ended_s`.
            is_needed: see `pause_s`.
        """
        return self.is_free and not self.pause_s(now_s, is_needed=is_needed)

    def on_node_end(self, node: int, now_s: float) -> None:
        """Notes the end of a node.

        Args:
            now_s: see `may_run`.
        """
        self.ended_s.append(now_s)
        if self.node == node:
            self.node = -1

    def pause_s(self, now_s: float, *, is_needed: bool = False) -> float:
        """The seconds for which it gets no node; 0.0: it may have one.

        Args:
            now_s: see `may_run`.
            is_needed: whether the job waits for any machine, because too few nodes are left.
        """
        if len(self.ended_s) <= REJOINS_MAX:
            return 0.0
        end_s = self.ended_s[0] + _HOUR_S
        if is_needed:
            end_s = min(end_s, self.ended_s[-1] + _NEEDED_PAUSE_S)
        return max(0.0, end_s - now_s)

    def is_missing(self, now_s: float, *, limit_s: float) -> bool:
        """Whether its connection has been broken for so long that its node may never have come."""
        return self.writer is None and now_s - self.broken_s >= limit_s

    def connect(self, writer: asyncio.StreamWriter, *, silent_s: float) -> None:
        """Takes a new connection, which breaks when the machine is silent for so long.

        A machine that loses its power closes no connection.

        Raises:
            OSError: the connection has ended already.
        """
        break_when_silent(writer.get_extra_info("socket"), silent_s=silent_s)
        if self.writer is not None:  # Nobody answers on the old one any more.
            self.writer.transport.abort()
            self.on_break()
        self.writer, self.is_refused = writer, False

    def tell(self, message: ToMachine) -> None:
        """Sends a message, unless the connection is broken."""
        self.tell_frame(frame(message))

    def tell_frame(self, data: bytes) -> None:
        """Sends a message that is encoded already, unless the connection is broken."""
        if self.writer is not None:
            self.writer.write(data)

    async def ask(self, question: Question, kind: type[Kind]) -> Kind | None:
        """The machine's answer; None: its connection is broken, or breaks before it answers."""
        if self.writer is None:
            return None
        self._num_asked += 1
        number = self._num_asked
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self.tell(msgspec.structs.replace(question, number=number))
        try:
            answer = await future
        finally:
            self._questions.pop(number, None)
        return answer if isinstance(answer, kind) else None

    async def prepare(self, request: PrepareRequest) -> JobPrepared | None:
        """What it finds out about the job; None: its connection is broken.

        Raises:
            TimeoutError: it has not answered for PREPARE_TIMEOUT_S; it hangs, or the job's code
                does.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                return await self.ask(PrepareRequested(request), JobPrepared)
        raise TimeoutError(
            f"it has examined the job for {PREPARE_TIMEOUT_S:.0f} s without an answer; look what "
            "its agent waits for, such as a file system, and start the agent again"
        )

    async def measure(self, question: LinkMeasureRequested) -> LinkMeasured | None:
        """Its answer to a question for the path to another machine; see `ask`."""
        return await self.ask(question, LinkMeasured)

    def on_answer(self, answer: Answer) -> None:
        """Gives an answer to who has asked; does nothing if nobody waits for it."""
        future = self._questions.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)

    def on_break(self) -> None:
        """Handles the end of the connection: no question will be answered."""
        self.writer = None
        self.broken_s = time.monotonic()
        for future in self._questions.values():
            if not future.done():
                future.set_result(None)


class OfferFrames:
    """The offer of a job as it is sent: encoded once, although hundreds of machines get it.

    The modules in it may have megabytes, and the event loop would stand still for seconds.
    """

    def __init__(self) -> None:
        self._frames: dict[bool, tuple[JobOffered, bytes]] = {}

    def of(self, offer: JobOffered, *, has_data: bool) -> bytes:
        """The frame of an offer.

        Args:
            has_data: whether the modules themselves are in it, and not only their digests.
        """
        kept = self._frames.get(has_data)
        if kept is None or kept[0] is not offer:
            bare = (msgspec.structs.replace(source, data=b"") for source in offer.sources)
            sources = offer.sources if has_data else tuple(bare)
            kept = offer, frame(msgspec.structs.replace(offer, sources=sources))
            self._frames[has_data] = kept
        return kept[1]


async def measured_path(
    source: str,
    measure: Callable[[LinkMeasureRequested], Awaitable[LinkMeasured | None]],
    target: MachineHandle,
    *,
    budget_s: float = LINK_BUDGET_S,
    end_s: float = math.inf,
) -> LinkMeasured:
    """The path to a machine, or why there is none, as another machine or the head measures it.

    Args:
        source: name of the one that measures.
        measure: function that has it answer the question; None: it does not.
        budget_s: time for the bandwidth; 0.0: only the latency is measured.
        end_s: time of the loop at which the measurement is given up; it is after a while anyway.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    served = await in_time(target.ask(LinkServeRequested(secret), LinkServed), end_s)
    if served is None or not served.port:
        return LinkMeasured(reason=f"{target.name} opens no port")
    address = (target.facts.host, served.port)
    question = LinkMeasureRequested(address=address, secret=secret, budget_s=budget_s)
    measured = await in_time(measure(question), end_s)
    return measured or LinkMeasured(reason=f"{source} did not answer")


async def in_time(work: Awaitable[Result | None], end_s: float = math.inf) -> Result | None:
    """The result of the work; None: there is none in some seconds, or by `end_s` of the loop."""
    last_s = min(asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S, end_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(last_s):
            return await work
    return None


def add_machine(
    arrived: MachineArrived, machines: dict[str, MachineHandle], *, gone: Collection[int]
) -> MachineHandle:
    """The machine that has come, added to the others under a name that none of them holds.

    One whose agent was started again is known by its name alone. So the nodes that it has lost
    before count, here and with the coordinator, to which the name is the machine.

    Args:
        gone: nodes that are out of the job.
    """
    name = _unused_name(arrived.facts.name, machines, gone)
    machine = MachineHandle(name, arrived.facts, machine_id=arrived.machine_id)
    if (before := machines.get(name)) is not None:
        machine.ended_s.extend(before.ended_s)
        if before.node >= 0:  # Its end was never told.
            machine.ended_s.append(before.broken_s)
    machines[name] = machine
    return machine


async def no_verdict(machine: MachineHandle) -> str:
    """Nobody says that a machine is unfit; see Machines.ask_verdict."""
    del machine
    return ""


def protocol_problem(arrived: MachineArrived) -> str:
    """Why a machine that has come does not understand the head; "": it does."""
    if arrived.protocol == PROTOCOL:
        return ""
    return (
        f"it has planaria {arrived.facts.versions.get('planaria')} with protocol "
        f"{arrived.protocol}, and the head's is {PROTOCOL}: install one version everywhere"
    )


def known_machine(machine_id: str, machines: Mapping[str, MachineHandle]) -> MachineHandle | None:
    """The machine that has come back without a node; None: it was not here before."""
    for machine in machines.values():
        if machine_id and machine.machine_id == machine_id:
            machine.is_ready = False  # It is compared anew.
            return machine
    return None


def name_again(
    machine: MachineHandle, machines: dict[str, MachineHandle], *, gone: Collection[int]
) -> None:
    """Gives a machine that is back another name if one has come meanwhile that holds its own."""
    if machines.get(machine.name) is not machine:
        machine.name = _unused_name(machine.name, machines, gone)
        machines[machine.name] = machine


def _unused_name(name: str, machines: Mapping[str, MachineHandle], gone: Collection[int]) -> str:
    """The name, or it with a number if the head or another machine that may come back has it."""
    taken = {HEAD} | {
        other
        for other, machine in machines.items()
        if machine.writer is not None or (machine.node >= 0 and machine.node not in gone)
    }
    number, unused = 1, name
    while unused in taken:
        number += 1
        unused = f"{name}-{number}"
    return unused


def loopback_problems(
    machine: MachineHandle, others: Sequence[MachineHandle]
) -> list[tuple[MachineHandle, str]]:
    """Those of some machines that cannot be reached because of a loopback address, each with why.

    A loopback address means another machine wherever it is read.
    """
    if not is_loopback(machine.facts.host):
        near = [other for other in others if is_loopback(other.facts.host)]
        return [(other, _loopback_problem(other, machine)) for other in near]
    far = next((other for other in others if not is_loopback(other.facts.host)), None)
    return [] if far is None else [(machine, _loopback_problem(machine, far))]


def _loopback_problem(machine: MachineHandle, far: MachineHandle) -> str:
    """Why others cannot reach a machine that has come by the head's loopback, and what to do.

    Args:
        far: machine that is not the head's.
    """
    address = "HOST"
    if far.writer is not None:  # It reaches the head there, and so this machine, too.
        address = str(far.writer.get_extra_info("sockname")[0])
    return (
        f"it is at {machine.facts.host}, where {far.name} ({far.facts.host}) would find itself; "
        f"start its agent again with --advertise {address}, or join the head at an address that "
        "other machines reach it by"
    )
