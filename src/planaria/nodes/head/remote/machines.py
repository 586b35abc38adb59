"""The machines that have come to a head, and the nodes on them.

Each machine (nodes/machine.py) has one connection to the head. It gets the job, says when it is
ready, and runs one node at a time. A machine whose node has ended may run another one, which is a
new node with a new number. If the connection breaks, the machine keeps its node and comes back: the
coordinator alone decides whether the node is lost.

`Machines` begins to serve before the job is planned, because the first machine measures the job's
layers. It is given to the launcher afterwards, which starts nodes as on its own machine.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

import msgspec

from planaria.coordinator.membership.missing_members import arrival_s
from planaria.core.job import JobConfig
from planaria.core.machine_messages import (
    FaultInjected,
    FromMachine,
    JobOffered,
    JobOver,
    JobPrepared,
    LinkMeasured,
    LinkServed,
    MachineArrived,
    MachineExamined,
    MachineFacts,
    MachineLeaving,
    MachineReady,
    MachineRefused,
    MachineReleased,
    MachineUnfit,
    NodeDropped,
    NodeEnded,
    NodeRequested,
    ToMachine,
)
from planaria.core.plan import Link
from planaria.core.records import AgentEnded, Ended, Members
from planaria.core.specs import NodeSpec, Prepared, PrepareRequest
from planaria.errors import AuthenticationError, CheckpointError, InsufficientError
from planaria.nodes.head.node_handles import EXIT_TIMEOUT_S, KILL_TIMEOUT_S
from planaria.nodes.head.process_events import wait_until
from planaria.nodes.head.remote.kind_speeds import Kind, KindSpeeds, kind_of
from planaria.nodes.head.remote.link_classes import LinkClass, measured_links
from planaria.nodes.head.remote.machine_arrivals import MachineArrivals
from planaria.nodes.head.remote.machine_checks import MachineChecks
from planaria.nodes.head.remote.machine_handle import (
    MachineHandle,
    OfferFrames,
    add_machine,
    known_machine,
    loopback_problems,
    name_again,
    no_verdict,
    protocol_problem,
)
from planaria.nodes.head.remote.machine_places import MachinePlaces
from planaria.nodes.head.remote.run_nodes import RunNodes, agent_ended, job_over
from planaria.nodes.head.remote.run_record import NodeLog
from planaria.transport.acceptor import Handshakes, Purpose
from planaria.transport.credentials import Credentials
from planaria.transport.frames import FROM_NODE_BYTES_MAX, FrameDecoder, frame, message_of
from planaria.transport.strangers import RefusalLog

logger = logging.getLogger(__name__)

_HOUR_S: Final = 3600.0
_READ_BYTES: Final = 1 << 20
_decoder: msgspec.json.Decoder[FromMachine] = msgspec.json.Decoder(FromMachine)


class Machines:
    """The machines of one job.

    Args:
        offer: job as it is offered to machines; another run of it may begin before the job does.
        num_max: number of machines that may run nodes at once.
        checks: checks that a machine must pass.
        note: shows the user a text.

    Attributes:
        offer: see above.
        on_free: callback, called when a machine can run a node; set once the job has begun.
        ask_verdict: tells why a machine is unfit as its platform says; "": it does not say so.
        on_end: callback, called with the end of each node; set once the job has begun.
        on_injected: callback, called with the node that a machine has injected a fault into.
        node_log: numbers of the nodes that were started; set once the job has begun.
        kinds: kinds of the machines, and their speeds.
        checks: checks that a machine must pass.
        handshakes: handshakes with all that connect to the head; their number is bounded together.
    """

    def __init__(
        self,
        offer: JobOffered,
        credentials: Credentials,
        *,
        num_max: int,
        checks: MachineChecks,
        note: Callable[[str], None],
    ) -> None:
        self._is_stopped = self._is_closed = False
        self.on_free: Callable[[], None] = lambda: None
        self.ask_verdict: Callable[[MachineHandle], Awaitable[str]] = no_verdict
        self.on_end: Callable[[AgentEnded], None] = lambda _: None
        self.on_injected: Callable[[int], None] = lambda _: None
        self.node_log: NodeLog | None = None
        self._offer_frames = OfferFrames()
        self.offer = offer
        self.kinds = KindSpeeds(note)
        self.checks = checks
        lease_s = offer.job.cluster.lease_s
        self._missing_s = arrival_s(lease_s)
        self._leave_s = lease_s + EXIT_TIMEOUT_S  # It looks for the coordinator in each lease.
        self.handshakes = Handshakes(credentials)
        self._refusals = RefusalLog(logger)
        self._note = note
        self._machines: dict[str, MachineHandle] = {}
        self._arrivals = MachineArrivals(self._machines, note)
        self._nodes = RunNodes()
        self._places = MachinePlaces(
            self._machines, self._nodes, num_max=num_max, missing_s=self._missing_s
        )
        self._serving: set[asyncio.Task[None]] = set()
        self._over: JobOver | None = None  # The end of the job, once the machines are told.

    # -- before the job begins --------------------------------------------------------------------

    def accept(self, sock: socket.socket) -> None:
        """Serves a machine; for the acceptor."""
        self._start_task(self._serve(sock))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    @property
    def job(self) -> JobConfig:
        """The job as it is offered to machines."""
        return self.offer.job

    @property
    def connected(self) -> tuple[MachineHandle, ...]:
        """The machines whose connection is there, in the order of their arrival."""
        return tuple(each for each in self._machines.values() if each.writer is not None)

    @property
    def _free(self) -> list[MachineHandle]:
        """The machines that can be asked for a node now, in the order of their arrival."""
        return [machine for machine in self._machines.values() if machine.is_free]

    @property
    def num_ready(self) -> int:
        """The number of machines that can run a node now."""
        return len(self._free)

    @property
    def is_waiting(self) -> bool:
        """See MachineArrivals."""
        return self._arrivals.is_waiting

    @property
    def facts(self) -> tuple[MachineFacts, ...]:
        """What the machines that are ready have reported, in the order of their arrival."""
        return tuple(machine.facts for machine in self._free)

    async def wait_ready(self, num_machines: int, *, timeout_s: float) -> None:
        """See MachineArrivals."""
        await self._arrivals.wait_ready(num_machines, timeout_s=timeout_s)

    async def wait_living(self, nodes: Collection[int] | None, *, timeout_s: float) -> bool:
        """Waits until a machine is back with a living node of this run; returns whether one is.

        Then further machines get no node before the coordinator has told who else may come back.

        Args:
            nodes: nodes that may live; nobody is waited for once the ends of all are known. None:
                any may live.
        """

        def is_over() -> bool:
            have_ended = nodes is not None and all(map(self._nodes.has_ended, nodes))
            return have_ended or bool(self._nodes.live)

        self._nodes.knows_members = False
        await self._arrivals.wait_for(is_over, timeout_s=timeout_s)
        return bool(self._nodes.live)

    def begin_run(self, offer: JobOffered) -> None:
        """Begins another run: machines that still run a node of the one before drop it."""
        self.offer = offer
        self.checks.begin(offer.job)
        for machine in self._machines.values():
            machine.is_ready = machine.is_refused = False
            machine.node = machine.missing_node = -1
            self._offer_job(machine)
        self._places.begin()
        self._nodes.begin()

    async def prepare(
        self, request: PrepareRequest, known: Mapping[Kind, Prepared] | None = None
    ) -> dict[Kind, Prepared]:
        """The facts on the job that the first machine of each kind finds, one after the other.

        Only one machine looks if the job is wrong, or if its profile is given. One that hangs is
        refused, and another one looks.

        Args:
            known: facts that machines of some kinds have found before.

        Raises:
            InsufficientError: the process there was killed, or no machine is left that looks.
        """
        measured = dict(known or {})
        while True:
            if not measured:
                await self.wait_ready(1, timeout_s=_HOUR_S)
            others = [each for each in self._free if kind_of(each.facts) not in measured]
            if not others:
                return measured
            if request.profile is None:
                self._note(f"{others[0].name} builds the model and measures its layers ...")
            try:
                answer = await others[0].prepare(request)
            except TimeoutError as error:
                self._turn_away(others[0], str(error))
                continue
            if answer is None:
                continue  # Its connection is broken.
            if answer.prepared is None:
                raise InsufficientError(f"{others[0].name}: {answer.reason}")
            self.checks.is_planned = True
            measured[kind_of(others[0].facts)] = answer.prepared
            if request.profile is not None or answer.prepared.profile is None:
                return measured

    def compare_again(self) -> None:
        """Compares machines without nodes again that were ready before the job was planned.

        Those are left out that have measured the layers, or whose kind has, and that have enough
        memory.
        """
        for machine in self.connected:
            is_known = self.kinds.is_known(machine.facts) and self.checks.is_enough(machine.facts)
            if machine.is_ready and machine.node < 0 and not is_known:
                machine.is_ready = False
                self._offer_job(machine)

    async def measure_links(self) -> dict[LinkClass, Link]:
        """See measured_links."""
        return await measured_links(self._free, note=self._note)

    # -- nodes ------------------------------------------------------------------------------------

    @property
    def live_nodes(self) -> Collection[int]:
        """See NodeHandles."""
        return self._nodes.live.keys()

    @property
    def next_node(self) -> int:
        """See NodeHandles."""
        logged = self.node_log.next_node if self.node_log is not None else 0
        return max(max(self._nodes.machines, default=-1) + 1, logged)

    def machine_of(self, node: int) -> MachineHandle | None:
        """The machine that runs a node, or ran it; None: it is not known."""
        return self._nodes.machines.get(node)

    def host(self, node: int) -> str:
        """See NodeHandles."""
        return "" if (machine := self.machine_of(node)) is None else machine.facts.host

    def is_reachable(self, node: int) -> bool:
        """See NodeHandles."""
        return (machine := self.machine_of(node)) is not None and machine.writer is not None

    @property
    def has_room(self) -> bool:
        """Whether another node may be started, on a machine that is free."""
        return not self._is_stopped and self._places.has_room(time.monotonic())

    def reserve(self, nodes: Sequence[int]) -> dict[int, MachineFacts]:
        """See MachinePlaces."""
        return self._places.reserve(nodes, time.monotonic())

    def start(self, spec: NodeSpec, *, is_granted: bool) -> None:
        """See NodeHandles. If no machine is free, the node counts as ended at once."""
        del is_granted  # A machine that comes later is a new one by itself.
        machine = self._places.take(spec.node, time.monotonic())
        if machine is None:
            machine = MachineHandle("", MachineFacts(name="", host=""))
            self._nodes.add(spec.node, machine)
            self._on_node_end(machine, NodeEnded(node=spec.node, status=0))
            return
        if self.node_log is not None:
            self.node_log.add(spec.node)
        spec = msgspec.structs.replace(
            spec,
            machine=machine.name,
            domain=machine.facts.domain,
            speed=self.kinds.speed(machine.facts),
        )
        machine.tell(NodeRequested(spec))
        self._note(f"node {spec.node} starts on {machine.name} ({machine.facts.host})")

    def drop(self, node: int) -> None:
        """See NodeHandles."""
        if node in self._nodes.machines:
            self._nodes.dropped.add(node)
            self.tell(node, NodeDropped(node))

    def tell(self, node: int, message: ToMachine) -> None:
        """Sends a message to the machine of a node, unless the connection is broken."""
        self._nodes.machines[node].tell(message)

    def open_places(self, num_nodes: int) -> None:
        """Lets so many more machines run nodes at once."""
        self._places.num_max += num_nodes
        self.look_for_room()

    def note_shortage(self, *, is_short: bool) -> None:
        """Notes whether the job waits for any machine, also one that has lost too many nodes."""
        if is_short == self._places.is_short:
            return
        self._places.is_short = is_short
        for machine in self._machines.values():
            if machine.node < 0:
                self._note_pause(machine)
        self.look_for_room()

    def on_members(self, members: Members) -> None:
        """See NodeHandles. Other machines may take the places of nodes that are gone."""
        self._nodes.add_members(members)
        self._watch_leftovers()
        self.look_for_room()

    def on_candidates_lost(self, nodes: Collection[int]) -> None:
        """See NodeHandles. Other machines may take their places."""
        self._nodes.gone.update(nodes)
        self._watch_leftovers()
        self.look_for_room()

    def _watch_leftovers(self) -> None:
        """Has each node killed that is out of the job and does not end by itself, as it hangs."""
        for node in self._nodes.leftovers():
            asyncio.get_running_loop().call_later(self._leave_s, self._drop_leftover, node)

    def _drop_leftover(self, node: int) -> None:
        if node not in self._nodes.leftovers() or not self.is_reachable(node):
            return  # It has ended, or it is killed once its machine is back.
        if node not in self._nodes.dropped:
            name = self._nodes.machines[node].name
            self._note(f"node {node} on {name} is out of the job but does not end; it is killed")
        self.drop(node)

    def is_gone(self, node: int) -> bool:
        """Whether a node is out of the job, though it may live."""
        return node in self._nodes.gone

    def release(self, node: int) -> None:
        """See NodeHandles. The machine could run another node, which nobody wants."""
        machine = self._nodes.machines[node]
        machine.is_leaving = True
        machine.tell(MachineReleased(f"node {node} has left the job, as the user asked"))

    def ends(self) -> tuple[AgentEnded, ...]:
        """See NodeHandles."""
        return self._nodes.ends()

    def stop(self) -> None:
        """See NodeHandles."""
        self._is_stopped = True

    async def wait_left(self, members: Collection[int]) -> None:
        """See NodeHandles."""
        for node in set(self._nodes.live).difference(members):
            self.drop(node)
        await wait_until(lambda: not self._nodes.reachable(), timeout_s=EXIT_TIMEOUT_S)
        for node in self._nodes.reachable():
            logger.warning("node %s did not leave in %.0f s", node, EXIT_TIMEOUT_S)

    async def end_all(self, ended: Ended | None) -> None:
        """See NodeHandles. The machines are told how the job has ended, and leave."""
        self._is_closed, self._over = True, job_over(ended)
        for machine in self._machines.values():
            machine.tell(self._over)
        await wait_until(lambda: not self._nodes.reachable(), timeout_s=EXIT_TIMEOUT_S)
        await self.close()

    async def close(self) -> None:
        """Closes the connections. A machine that was told nothing looks for a head again."""
        self._is_closed = True
        for machine in self._machines.values():
            if machine.writer is not None and machine.node in self._nodes.gone:
                machine.writer.transport.abort()  # Nobody there may answer any more.
            elif machine.writer is not None:
                machine.writer.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=KILL_TIMEOUT_S)
        for task in self._serving:
            task.cancel()

    def exit_statuses(self) -> Collection[int]:
        """See NodeHandles."""
        return self._nodes.exit_statuses()

    def _on_node_end(self, machine: MachineHandle, ended: NodeEnded) -> None:
        """Notes the end of a node, unless another machine runs the node of that number.

        A node that nobody runs was started by the head before this one.
        """
        is_ours = machine.run == self.offer.run and ended.node >= 0
        runs_it = self._nodes.machines.get(ended.node, machine if is_ours else None)
        if self._nodes.has_ended(ended.node) or runs_it is not machine:
            return
        self._nodes.add_end(ended)
        machine.on_node_end(ended.node, time.monotonic())
        self._note_pause(machine)
        if not self._is_stopped:
            self.compare_again()  # It may have come with the node to a head that took the run up.
        self.on_end(agent_ended(ended))

    def _note_pause(self, machine: MachineHandle) -> None:
        """Tells that a machine gets no node for some time, and uses it afterwards."""
        if pause_s := self._places.pause_s(machine, time.monotonic()):
            self._note(f"{machine.name} lost too many nodes and gets none for {pause_s:.0f} s")
            asyncio.get_running_loop().call_later(pause_s + 0.1, self.look_for_room)

    # -- connections ------------------------------------------------------------------------------

    async def _serve(self, sock: socket.socket) -> None:
        """Serves the connection of a machine until it ends."""
        try:
            reader, writer, _ = await self.handshakes.accept(sock, Purpose.MACHINE)
        except AuthenticationError as error:
            self._refusals.add(error)
            return
        machine: MachineHandle | None = None
        decoder = FrameDecoder(bytes_max=FROM_NODE_BYTES_MAX)
        try:
            while data := await reader.read(_READ_BYTES):
                for body in decoder.feed(data):
                    message = message_of(body, _decoder)
                    if machine is not None:
                        self._on_message(machine, message)
                    elif isinstance(message, MachineArrived):
                        machine = self._admit(message, writer)
                    if machine is None:
                        return
                    await self._tell_change()
        except AuthenticationError as error:  # The machine breaks the protocol; the others go on.
            self._refusals.add(f"that of a machine: {error}")
        except OSError as error:
            logger.info("a machine's connection ended: %s", error)
        finally:
            writer.close()
            if machine is not None and machine.writer is writer:
                machine.on_break()
                self.checks.forget(machine.name)
                asyncio.get_running_loop().call_later(self._missing_s + 0.1, self.look_for_room)
                self._note(
                    f"the connection to {machine.name} is gone"
                    + (f"; node {machine.node} may go on" if machine.node >= 0 else "")
                )
                await self._tell_change()

    async def _tell_change(self) -> None:
        await self._arrivals.tell_change()
        self.look_for_room()

    def look_for_room(self) -> None:
        """Tells the launcher if another node may be started, because a machine may be free now."""
        if self.has_room:
            self.on_free()

    def _admit(self, arrived: MachineArrived, writer: asyncio.StreamWriter) -> MachineHandle | None:
        """The machine that has arrived, or come back; None: it is refused."""
        if self._is_closed:
            over = self._over if arrived.run == self.offer.run else None  # It was away meanwhile.
            writer.write(frame(over or MachineRefused(reason="the head ends", is_final=False)))
            return None
        if reason := protocol_problem(arrived):
            writer.write(frame(MachineRefused(reason=reason, is_final=True)))
            return None
        has_node = arrived.run == self.offer.run and arrived.node >= 0
        machine = (
            self._nodes.machines.get(arrived.node)
            if has_node
            else known_machine(arrived.machine_id, self._machines)
        )
        if machine is None:
            machine = add_machine(arrived, self._machines, gone=self._nodes.gone)
            self._note(f"{machine.name} ({arrived.facts.host}) has come")
            self._note_pause(machine)
            if has_node:  # The head before this one started it.
                machine.node = arrived.node
                self._nodes.add(arrived.node, machine)
                self._note(f"it runs node {arrived.node}")
        else:
            machine.missing_node = machine.node if arrived.node < 0 else -1
            machine.facts = arrived.facts  # Its address may be another one.
            name_again(machine, self._machines, gone=self._nodes.gone)
            self._note(f"{machine.name} is connected again")
        machine.connect(writer, silent_s=self.job.cluster.lease_s)
        machine.has_code, machine.run = arrived.has_code, arrived.run
        self._offer_job(machine)
        self._watch_leftovers()  # Nobody could have its node killed meanwhile.
        return machine

    def _offer_job(self, machine: MachineHandle) -> None:
        has_modules = machine.has_code or machine.run == self.offer.run  # Then it is back.
        machine.tell_frame(self._offer_frames.of(self.offer, has_data=not has_modules))

    def _on_message(self, machine: MachineHandle, message: FromMachine) -> None:
        match message:
            case MachineReady():
                # It has told the ends of its nodes before: the request for this one was lost.
                self._on_node_end(machine, NodeEnded(node=machine.missing_node, status=0))
                if machine.node < 0:
                    self._start_task(self._check(machine, message))
                elif message.run == self.offer.run:  # It was compared before it got the node.
                    machine.is_ready = True
            case MachineUnfit(reason):
                self._refuse(machine, reason)
            case MachineLeaving():
                machine.is_leaving = True
            case JobPrepared() | LinkServed() | LinkMeasured() | MachineExamined():
                machine.on_answer(message)
            case NodeEnded():
                self._on_node_end(machine, message)
            case FaultInjected(node):
                self.on_injected(node)

    async def _check(self, machine: MachineHandle, ready: MachineReady) -> None:
        """Lets a machine without a node take part if it is like the others."""
        problem, verdict, is_final, writer = "", "", True, machine.writer
        try:
            if not (problem := await self._problem(machine, ready)):
                verdict = await self.ask_verdict(machine)
        except InsufficientError as error:  # A process of it that is started anew may do better.
            verdict = str(error)
        except (CheckpointError, MemoryError, OSError) as error:  # It may pass until the next try.
            problem, is_final = f"the head could not look for its answer: {error}", False
        except Exception as error:  # A fault of the head, and the machine waits for a word.
            logger.exception("%s could not be compared", machine.name)
            problem = f"the head could not compare it with the others: {error!r}"
        if ready.run != self.offer.run or machine.writer is not writer:
            return  # Another run has begun, or it is gone or back: it says anew that it is ready.
        if verdict:
            machine.tell(MachineUnfit(verdict))  # It answers with the same.
        elif problem:
            self._turn_away(machine, problem, is_final=is_final)
        else:
            machine.is_ready = True
        await self._tell_change()

    async def _problem(self, machine: MachineHandle, ready: MachineReady) -> str:
        """Why a machine cannot take part, and what to do; "": it can."""
        writer = machine.writer
        problem = await self.checks.problem(ready)
        if ready.run != self.offer.run or machine.writer is not writer:
            return ""  # Its files do not count; see _check.
        problem = problem or self.checks.compare(machine.name, machine.facts, ready)
        problem = problem or self._address_problem(machine)
        return problem or await self.kinds.problem(machine)

    def _address_problem(self, machine: MachineHandle) -> str:
        """Why a machine's address, or that of another one, cannot be used; "": all can.

        While the head waits for machines, the one at a loopback address is refused, whichever came
        first.
        """
        others = [other for other in self.connected if other.is_ready and other is not machine]
        for other, problem in loopback_problems(machine, others):
            if other is machine:
                return problem
            if other.node >= 0 or not self.is_waiting:
                return f"{other.name}, which is in the job, cannot work with it: {problem}"
            self._turn_away(other, problem)
        return ""

    def _turn_away(self, machine: MachineHandle, reason: str, *, is_final: bool = True) -> None:
        """Tells a machine that it cannot take part."""
        machine.tell(MachineRefused(reason=reason, is_final=is_final))
        self._refuse(machine, reason)

    def _refuse(self, machine: MachineHandle, reason: str) -> None:
        machine.is_ready, machine.is_refused = False, True
        self.checks.forget(machine.name)
        self._arrivals.unfit_reason = f"{machine.name} cannot take part: {reason}"
        self._note(self._arrivals.unfit_reason)
