"""The coordinator's process: carries out what coordinator/ decides, from a journaled store.

It runs beside the launcher and is no node. It listens on a socket that the launcher keeps open, so
that agents find the next one at the same place when this one is killed. Before anybody is told
of it, whatever is decided is in the store; a coordinator that starts where another was reads the
newest records, and the agents tell it again what may have been lost.

Events are handled one at a time, in the order in which they came.

Source: DESIGN 4.5 and 6 (Coordination).
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from planaria.checkpoint.tiers import DiskTier
from planaria.coordinator.coordinator import Event, step
from planaria.coordinator.start import first_step, restored_step
from planaria.coordinator.state import (
    Command,
    DecisionRecorded,
    Discard,
    End,
    Ending,
    Evict,
    MembersRecorded,
    Notify,
    Phase,
    Publish,
    RecordDecision,
    RecordMembers,
    Tell,
    Tick,
)
from planaria.core.messages import (
    Abort,
    Acknowledged,
    FromNode,
    Heartbeat,
    HeartbeatTaken,
    Message,
    NodeLost,
    SaveLayers,
    Shutdown,
    StartEpoch,
    Stopped,
    StopRequested,
    Welcome,
)
from planaria.core.records import (
    AgentEnded,
    Committed,
    Ended,
    FromLauncher,
    Leading,
    Progress,
)
from planaria.errors import AuthenticationError, StoreError
from planaria.nodes.journal import open_store
from planaria.nodes.leader_spec import LeaderSpec, rules_of
from planaria.nodes.logbook import opened_logbook
from planaria.nodes.publisher import Publisher
from planaria.transport.frames import FrameDecoder, Role, frame, from_node_decoder, shake_hands
from planaria.transport.probe import NO_NODE, Probe

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 20
_TICKS_PER_LEASE: Final = 6
_CLOSE_TIMEOUT_S: Final = 1.0
_launcher_decoder: msgspec.json.Decoder[FromLauncher] = msgspec.json.Decoder(FromLauncher)


def main(payload: bytes, listener_fd: int, launcher_fd: int, lifeline_fd: int) -> None:
    """The main function of the coordinator's process, called in a forked process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(payload, type=LeaderSpec)
    asyncio.run(_Leader(spec).run(listener_fd, launcher_fd, lifeline_fd))


class _Leader:
    def __init__(self, spec: LeaderSpec) -> None:
        self._spec = spec
        self._rules = rules_of(spec)
        self._probe = Probe(
            NO_NODE, places=spec.places, address=spec.injector, token=spec.token, faults={}
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._publisher = Publisher(
            DiskTier(Path(spec.job.checkpoint.directory)),
            fingerprint=spec.fingerprint,
            keep=spec.job.checkpoint.keep,
            say=self._events.put_nowait,
            notify=self._notify,
        )
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._order: Tell | None = None
        self._progress: Progress | None = None
        self._has_progressed = asyncio.Event()
        self._ended: Ended | None = None

    async def run(self, listener_fd: int, launcher_fd: int, lifeline_fd: int) -> None:
        """Coordinates until the job ends, or its launcher does."""
        self._serving: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(lifeline_fd, os._exit, 1)
        reader, self._launcher = await asyncio.open_connection(
            sock=socket.socket(fileno=launcher_fd)
        )
        self._launcher.transport.set_write_buffer_limits(high=0)  # Drained is sent.
        try:
            async with open_store(Path(self._spec.directory), now_s=time.monotonic) as store:
                self._store = store
                await self._lead(reader, listener_fd)
        except StoreError as error:  # To start again would end the same way.
            reason = f"the coordinator cannot keep its records: {error}"
            ended = Ended(ending=Ending.LOST.value, reason=reason, failure=None, nodes=(), epoch=0)
            await self._tell_end(ended)
        await self._close_agents()
        # Whatever the launcher still says must find a reader, or what it has not read yet is lost.
        with contextlib.suppress(ConnectionError):
            while await reader.read(_READ_BYTES):
                continue

    async def _lead(self, reader: asyncio.StreamReader, listener_fd: int) -> None:
        """Goes on from the records, and serves agents until the job ends."""
        lease_s = self._rules.job.cluster.lease_s
        self._logbook = await opened_logbook(self._store, self._spec.job.name, lease_s=lease_s)
        await self._restore()
        listener = socket.socket(fileno=listener_fd)
        server = await asyncio.start_server(self._accept, sock=listener)
        self._notify(Leading(term=self._logbook.term, now_s=time.monotonic()))
        tasks = [
            asyncio.create_task(job)
            for job in (
                self._hear_launcher(reader),
                self._tick(),
                self._watch_leases(),
                self._record_progress(),
            )
        ]
        try:
            await self._serve(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            server.close()

    async def _serve(self, tasks: list[asyncio.Task[None]]) -> None:
        """Handles events until the job ends; what a task raises ends it here."""
        while self._ended is None:
            event = asyncio.create_task(self._events.get())
            done, _ = await asyncio.wait({event, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {event}:
                task.result()
            if event in done:
                await self._handle(event.result())
            else:
                event.cancel()

    async def _close_agents(self) -> None:
        """Closes the connections once what was written is sent; one that hangs is left behind."""
        for writer in self._writers.values():
            writer.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSE_TIMEOUT_S)

    # -- records ----------------------------------------------------------------------------------

    async def _restore(self) -> None:
        """Goes on from the records, or begins the job if there are none."""
        found = await self._logbook.read()
        if found is None:
            self._state, commands = first_step(
                self._rules,
                self._spec.plan,
                term=self._logbook.term,
                predicted_s=self._spec.predicted_s,
            )
        else:
            self._state, commands = restored_step(
                self._rules,
                found.plan or self._spec.plan,
                term=self._logbook.term,
                members=found.members,
                outcome=found.outcome,
                decision=found.decision,
                progress=found.progress,
                predicted_s=self._spec.predicted_s,
                now_s=time.monotonic(),
            )
            # Members have a whole lease to find this coordinator.
            for node in self._state.nodes:
                await self._logbook.grant(node)
        await self._carry_out(commands)

    async def _record_progress(self) -> None:
        """Records how far the job has come, and lets agents forget what came before."""
        while True:
            await self._has_progressed.wait()
            self._has_progressed.clear()
            assert self._progress is not None
            progress = self._progress
            await self._logbook.record_progress(progress)
            self._tell(Acknowledged(num_committed=progress.num_committed), self._writers.keys())

    # -- events -----------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve_agent(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve_agent(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            node = await shake_hands(
                reader, writer, token=self._spec.token, role=Role.ACCEPT, identity=NO_NODE
            )
        except (AuthenticationError, asyncio.IncompleteReadError, ConnectionError) as error:
            logger.warning("refused a connection: %s", error)
            writer.close()
            return
        if not await self._admit(node, writer):
            return
        decoder = FrameDecoder()
        try:
            while data := await reader.read(_READ_BYTES):
                for body in decoder.feed(data):
                    await self._take(node, from_node_decoder.decode(body))
        except ConnectionError as error:
            logger.info("node %s: %s", node, error)
        finally:
            if self._writers.get(node) is writer:
                del self._writers[node]
                self._events.put_nowait(NodeLost(node=node, reason="its connection closed"))
            writer.close()

    async def _admit(self, node: int, writer: asyncio.StreamWriter) -> bool:
        """Greets an agent, of a member or of a node that would be one; one whose node is no member
        any more is told so."""
        writer.write(frame(Welcome(term=self._logbook.term)))
        if node in self._state.gone:
            writer.write(frame(Abort(epoch=self._state.epoch, nodes=self._state.nodes)))
            await writer.drain()
            writer.close()
            return False
        await self._logbook.grant(node)
        if self._state.stop_requested:
            writer.write(frame(StopRequested()))
        if self._order is not None and node in (self._order.nodes or self._state.nodes):
            writer.write(frame(self._order.message))
        self._writers[node] = writer
        return True

    async def _take(self, node: int, message: FromNode) -> None:
        if not isinstance(message, Heartbeat):
            self._events.put_nowait(message)
            return
        if await self._logbook.renew(node) and node in self._writers:
            self._writers[node].write(frame(HeartbeatTaken(sent_s=message.sent_s)))

    async def _hear_launcher(self, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        while data := await reader.read(_READ_BYTES):
            for body in decoder.feed(data):
                message = _launcher_decoder.decode(body)
                if isinstance(message, AgentEnded):
                    lost = NodeLost(node=message.node, reason=message.reason)
                    self._events.put_nowait(lost)
                else:
                    self._events.put_nowait(message)
        os._exit(1)

    async def _tick(self) -> None:
        """Ends leases that are due, unless this process itself was stopped a while."""
        period_s = self._rules.job.cluster.lease_s / _TICKS_PER_LEASE
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(period_s)
            now_s = time.monotonic()
            if now_s - last_s < 3 * period_s:
                await self._store.expire()
            last_s = now_s
            self._events.put_nowait(Tick())

    async def _watch_leases(self) -> None:
        async for node in self._logbook.ended_leases():
            self._events.put_nowait(NodeLost(node=node, reason="its lease ran out"))

    async def _handle(self, event: Event) -> None:
        if isinstance(event, Stopped):  # It knows better than the reports how far the job was.
            self._reached("detect", event.vector_iteration + 1)
        self._state, commands = step(self._rules, self._state, event, time.monotonic())
        await self._carry_out(commands)

    # -- commands ---------------------------------------------------------------------------------

    async def _carry_out(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            match command:
                case Tell(message, nodes):
                    if isinstance(message, Abort | StartEpoch | SaveLayers):
                        self._order = command
                    self._tell(message, nodes or self._state.nodes)
                case Evict(nodes):
                    await self._evict(nodes)
                case RecordMembers(members):
                    if self._state.phase is Phase.RECORDING:
                        self._reached("detect", self._state.next_iteration)
                    await self._logbook.record_members(members)
                    self._events.put_nowait(MembersRecorded(members.epoch))
                case RecordDecision(outcome, decision):
                    if self._state.phase is Phase.DECIDING:
                        self._reached("decide", outcome.iteration)
                    await self._logbook.record_decision(outcome, decision)
                    self._events.put_nowait(DecisionRecorded(outcome.epoch))
                case Notify(message):
                    self._notify(message)
                    if isinstance(message, Committed):
                        number = message.iteration + 1
                        self._progress = Progress(num_committed=number, ends=message.ends)
                        self._has_progressed.set()
                case Publish():
                    self._publisher.publish(command)
                case Discard():
                    self._publisher.discard(command)
                case End():
                    await self._end(command)

    def _reached(self, place: str, iteration: int) -> None:
        if self._state.loss is not None:
            self._probe.reached(place, iteration)

    def _tell(self, message: Message, nodes: Collection[int]) -> None:
        data = frame(message)
        for node, writer in self._writers.items():
            if node in nodes:
                writer.write(data)

    def _notify(self, message: Message) -> None:
        self._launcher.write(frame(message))

    async def _evict(self, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            writer = self._writers.pop(node, None)
            if writer is not None:
                writer.close()
            await self._logbook.revoke(node)

    async def _end(self, end: End) -> None:
        if end.ending is Ending.LOST:
            self._publisher.publish_start(self._state.epoch)
        ended = Ended(
            ending=end.ending.value,
            reason=end.reason,
            failure=end.failure,
            nodes=self._state.nodes,
            epoch=self._state.epoch,
        )
        await self._tell_end(ended)

    async def _tell_end(self, ended: Ended) -> None:
        """The launcher knows before anybody may leave, so that none is taken for lost."""
        self._ended = ended
        self._notify(ended)
        await self._launcher.drain()
        self._tell(Shutdown(), self._writers.keys())
