"""The coordinator's process: carries out the decisions of coordinator/, with a journaled store.

It runs beside the launcher and is not a node. It listens on a socket that the launcher keeps open,
so that agents reach the next coordinator at the same address when this one is killed. Each decision
is recorded in the store before anybody is told of it. A new coordinator reads the newest records,
and the agents repeat the facts that may have been lost.

What is done with records and facts, and which agents are admitted, is in coordinator/leadership.py.
Events are handled one at a time, in the order of their arrival.

If the disk refuses a record, the coordinator reports that, goes on in memory, and makes the job
save and stop at its next commit. If another head has taken the run up, it records nothing more,
and ends. If a coordinator cannot go on from the records, the launcher starts one that only saves
(`Rescue`). That one has no plans and no policy, goes on from the newest records that the launcher
knows, and asks the agents what they hold, as after any loss.

Source: docs/protocol.md, "The outcome" and "The coordinator".
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from planaria.checkpoint.disk.gate import Gate, behind_gate
from planaria.checkpoint.disk.parts import HeadMark, RunPlace
from planaria.checkpoint.disk.tiers import tier_of
from planaria.coordinator.commands import (
    AnswersFound,
    CheckSave,
    Discard,
    MustEnd,
    Publish,
    Saving,
)
from planaria.coordinator.contact import HeadContact
from planaria.coordinator.leadership import Leadership, Queued, is_lost, may_expire
from planaria.coordinator.learning.overhead import prices_of
from planaria.coordinator.state import Phase
from planaria.core.messages import NodeLost, Shutdown, ToNode
from planaria.core.records import (
    AgentEnded,
    Beat,
    Ended,
    FromLauncher,
    Leading,
    ToLauncher,
    Unrecorded,
    Warned,
)
from planaria.errors import AuthenticationError, ConflictError, StoreError
from planaria.nodes.descriptors import raise_open_files
from planaria.nodes.head.journal import Flusher, open_store
from planaria.nodes.head.leader_spec import LeaderSpec, rules_of, saving_rules_of
from planaria.nodes.head.publisher import MarkedRun, Publisher, PublisherThread, Unfinished
from planaria.nodes.head.remote.open_head import BACKLOG, take_sockets
from planaria.nodes.head.remote.run_record import JournalHold
from planaria.nodes.head.searcher import Searcher
from planaria.policies.ahead import ForeseenAnswers
from planaria.protocol.agent_lease import TICKS_PER_LEASE
from planaria.store.embedded import EmbeddedStore
from planaria.store.logbook import Logbook, open_logbook
from planaria.transport.acceptor import Handshakes, Purpose
from planaria.transport.frames import (
    FROM_NODE_BYTES_MAX,
    NODES,
    PROBES,
    FrameDecoder,
    Role,
    derive,
    fact_of,
    frame,
    message_of,
    shake_hands,
)
from planaria.transport.probe import NO_NODE, Probe
from planaria.transport.sockets import break_when_silent
from planaria.transport.strangers import RefusalLog

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 20
_CLOSE_TIMEOUT_S: Final = 1.0
_REMOVAL_TIMEOUT_S: Final = 10.0  # Wait for removals of saves when the job has ended.
AcceptedStreams = tuple[asyncio.StreamReader, asyncio.StreamWriter, int]

_launcher_decoder: msgspec.json.Decoder[FromLauncher] = msgspec.json.Decoder(FromLauncher)


def main(payload: bytes, listener_fd: int, launcher_fd: int, lifeline_fd: int) -> None:
    """The main function of the coordinator's process, called in a forked process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(payload, type=LeaderSpec)
    raise_open_files(spec.job.cluster)
    asyncio.run(_Leader(spec).run(listener_fd, launcher_fd, lifeline_fd))


class _Leader:
    def __init__(self, spec: LeaderSpec) -> None:
        self._spec = spec
        foreseen = ForeseenAnswers()
        self._rules = saving_rules_of(spec) if spec.rescue else rules_of(spec, foreseen)
        self._contact = HeadContact(
            lease_s=spec.job.cluster.lease_s, patience_s=spec.patience_s, now_s=time.monotonic
        )
        self._searcher: Searcher | None = None
        if self._rules.looks_ahead:
            self._searcher = Searcher(spec, foreseen, on_found=self._on_answers_found)
        self._probe = Probe(
            NO_NODE,
            places=spec.places,
            address=spec.injector,
            token=derive(spec.token, PROBES),
            faults={},
        )
        self._disk, self._store_of_saves = Gate(), Gate()
        if spec.heeds:
            saves = self._store_of_saves
            slow = {"disk": self._disk.shut, "store": saves.slow, "refuse": saves.refuse}
            self._probe.listen(cut=lambda *_: None, slow=slow)
        self._events: asyncio.Queue[Queued] = asyncio.Queue()
        self._agents: set[_AgentSocket] = set()
        self._frames = _Frames()
        self._refusals = RefusalLog(logger)
        self._node_key = derive(spec.token, NODES)
        self._has_progressed = asyncio.Event()
        self._marked: tuple[int, tuple[int, ...]] = (-1, ())  # The epoch that was marked last.
        self._hold = JournalHold(Path(spec.directory), spec.holder) if spec.holder else None
        self._is_taken = False  # Whether another head has taken the run up.
        timeout_s = spec.job.checkpoint.timeout_s
        removal_timeout_s = min(_REMOVAL_TIMEOUT_S, timeout_s)
        self._patience_s = {"timeout_s": timeout_s, "removal_timeout_s": removal_timeout_s}

    async def run(self, listener_fd: int, launcher_fd: int, lifeline_fd: int) -> None:
        """Coordinates until the job or its launcher ends."""
        self._serving: set[asyncio.Task[None]] = set()
        self._overtaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._publishing = self._publisher_thread()
        asyncio.get_running_loop().add_reader(lifeline_fd, os._exit, 1)
        reader, self._launcher = await asyncio.open_connection(
            sock=socket.socket(fileno=launcher_fd)
        )
        self._launcher.transport.set_write_buffer_limits(high=0)  # drain() waits until all is sent.
        try:
            async with self._open_store() as store:
                self._store = store
                await self._lead(reader, listener_fd)
        except ConflictError as error:  # The records are intact, and the next coordinator has them.
            logger.warning("another coordinator has taken over: %s", error)
            return
        except StoreError as error:  # A new coordinator would end in the same way.
            await self._report_unrecorded(error)
            return
        await self._close_agents()
        # Read until the launcher closes: closing with unread data here would discard what the
        # launcher has not read yet.
        with contextlib.suppress(ConnectionError):
            while await reader.read(_READ_BYTES):
                continue

    @contextlib.asynccontextmanager
    async def _open_store(self) -> AsyncIterator[EmbeddedStore]:
        """The journaled store, or one in memory for a coordinator that only saves.

        Raises:
            StoreError: the journal cannot be used, or another head has taken the run up.
        """
        self._check_hold()
        if self._spec.rescue is not None:
            yield EmbeddedStore(Flusher(), now_s=self._lease_now_s)
            return
        directory = Path(self._spec.directory)
        opened_store = open_store(
            directory,
            now_s=self._lease_now_s,
            timeout_s=self._spec.job.checkpoint.timeout_s,
            on_refusal=self._on_disk_refusal,
            note=lambda text: self.notify(Warned(text=text)),
            before_write=self._before_record,
        )
        async with opened_store as store:
            yield store

    def _before_record(self) -> None:
        """Is called before each write of records, in the thread that writes."""
        self._disk.wait_passed()
        self._check_hold()

    def _check_hold(self) -> None:
        """Raises a StoreError if another head has taken the run up.

        Not if the disk refuses to say: then it refuses the records, too.
        """
        with contextlib.suppress(OSError):
            if self._hold is not None and self._hold.is_lost():
                self._is_taken = True
                raise StoreError("another head has taken this run up")

    def _lease_now_s(self) -> float:
        return self._contact.lease_now_s

    async def _on_disk_refusal(self, error: StoreError) -> None:
        """Tells the launcher that the disk keeps no records any more, then makes the job end.

        Raises:
            StoreError: another head has the records now, so that nothing is decided here any more.
        """
        if self._is_taken:
            raise error
        await self._report_unrecorded(error)
        self.queue(MustEnd(_reason(error)))

    async def _report_unrecorded(self, error: StoreError) -> None:
        self.notify(Unrecorded(reason=_reason(error), is_taken=self._is_taken))
        with contextlib.suppress(ConnectionError):
            await self._launcher.drain()

    async def _open_logbook(self) -> Logbook:
        """The records from which this coordinator goes on.

        Raises:
            StoreError: the records of the coordinator before it are missing.
        """
        job, lease_s, rescue = self._spec.job, self._rules.job.cluster.lease_s, self._spec.rescue
        if rescue is None:
            logbook = await open_logbook(self._store, job.name, lease_s=lease_s)
            if logbook.term <= self._spec.led_term:
                raise StoreError(
                    f"{self._spec.directory} no longer holds the coordinator's records: "
                    "somebody has removed the journal; with --state name a place that "
                    "nobody cleans"
                )
            if self._spec.is_taken_up and not await logbook.has_members():
                raise StoreError(
                    f"{self._spec.directory} holds no records of the run; put back its journal, or "
                    "remove the directory and go on with --resume: then nodes that live save what "
                    "they hold"
                )
            return logbook
        logbook = await open_logbook(self._store, job.name, lease_s=lease_s, first_term=rescue.term)
        await logbook.adopt(rescue.members, rescue.outcome, rescue.progress)
        self.queue(MustEnd(rescue.reason))
        return logbook

    async def _lead(self, reader: asyncio.StreamReader, listener_fd: int) -> None:
        """Goes on from the records, and serves agents until the job ends."""
        logbook = await self._open_logbook()
        self._leadership = Leadership[_AgentSocket](
            self._rules, logbook, self, contact=self._contact
        )
        beats = asyncio.create_task(
            self._send_beats()
        )  # Early, because the first records may take long.
        await self._leadership.restore(
            self._spec.plan, predicted_s=self._spec.predicted_s, now_s=time.monotonic()
        )
        self._publishing.tell_saves(source=self._spec.source)
        await self._leadership.begin_leases()
        stop_listening = await self._listen(socket.socket(fileno=listener_fd))
        self.notify(Leading(term=logbook.term, now_s=time.monotonic()))
        tasks = [
            beats,
            *(
                asyncio.create_task(job)
                for job in (
                    self._queue_launcher_messages(reader),
                    self._tick(),
                    self._leadership.watch_leases(),
                    self._record_progress(),
                )
            ),
        ]
        if self._searcher is not None:
            await self._searcher.open()
            tasks.append(asyncio.create_task(self._searcher.receive_answers()))
        try:
            await self._handle_events((*tasks, self._publisher_error, self._overtaken))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stop_listening()

    async def _handle_events(self, tasks: Sequence[asyncio.Future[None]]) -> None:
        """Handles events until the job ends; raises what a task raises."""
        while self._leadership.ended is None:
            event = asyncio.create_task(self._events.get())
            waits: tuple[asyncio.Future[Any], ...] = (event, *tasks)
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if event.done():
                await self._leadership.handle(event.result(), time.monotonic())
                self._look_ahead()
                self._mark_epoch()
                if self._leadership.has_progressed:
                    self._has_progressed.set()
            else:
                event.cancel()
        ended = self._leadership.ended
        if is_lost(ended):
            self._publishing.publish_start(ended.epoch)
        await self._finish_saves()
        await self._tell_end(ended)

    async def _finish_saves(self) -> None:
        """Waits up to the timeouts until the disk has carried out all requests; reports the rest.

        Agents are answered meanwhile.
        """
        where = self._rules.job.checkpoint.directory
        unfinished = await asyncio.to_thread(partial(self._publishing.finish, **self._patience_s))
        text = {
            Unfinished.NOTHING: "",
            Unfinished.REMOVALS: (
                "the job does not wait until files that it no longer needs are removed "
                f"from {where}; planaria checkpoint prune removes or names them"
            ),
            Unfinished.SAVES: (
                f"{where} does not answer, and the job does not wait for it; planaria "
                "checkpoint ls shows which saves are complete there"
            ),
        }[unfinished]
        if self._publisher_error.done():
            # A bug here, but the job has ended, and another coordinator would have the same bug.
            error = self._publisher_error.exception()
            logger.error("the publisher of saves raised", exc_info=error)
            text = (
                f"the publisher of saves raised {error!r}; planaria checkpoint ls shows which "
                "saves are complete, and planaria checkpoint prune removes or names the others"
            )
        if text:
            self.notify(Warned(text=text))

    async def _close_agents(self) -> None:
        """Closes the connections to the agents; waits briefly until written data is sent."""
        for agent in self._agents:
            agent.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSE_TIMEOUT_S)

    def _look_ahead(self) -> None:
        """Requests a search for answers to the next losses, if training goes on."""
        state = self._leadership.state
        if self._searcher is not None and state.is_training:
            prices = partial(prices_of, self._rules, state)
            self._searcher.request(state.plan, state.learning, prices)

    def _mark_epoch(self) -> None:
        """Marks an epoch whose members are on record, for nodes that lose their head."""
        state = self._leadership.state
        if not self._spec.parts or state.phase is Phase.RECORDING:
            return
        if (mark := (state.epoch, state.nodes)) != self._marked:
            self._marked = mark
            self._publishing.mark_epoch(*mark)

    def _on_answers_found(self, epoch: int) -> None:
        self.queue(AnswersFound(epoch))

    async def _record_progress(self) -> None:
        while True:
            await self._has_progressed.wait()
            self._has_progressed.clear()
            await self._leadership.record_progress()

    # -- events -----------------------------------------------------------------------------------

    async def _listen(self, sock: socket.socket) -> Callable[[], object]:
        """Begins to serve agents; returns a function that ends it.

        Args:
            sock: socket that listens on this machine, or the one over which the launcher passes the
                sockets of agents on other machines.
        """
        if self._spec.credentials is None:
            server = await asyncio.start_server(
                lambda reader, writer: self._serve(self._shake_hands(reader, writer)),
                sock=sock,
                backlog=BACKLOG,
            )
            return server.close
        handshakes, loop = Handshakes(self._spec.credentials), asyncio.get_running_loop()
        sock.setblocking(False)

        def take() -> None:
            for agent_socket in take_sockets(sock):
                self._serve(handshakes.accept(agent_socket, Purpose.NODE, key=self._node_key))

        loop.add_reader(sock, take)
        return partial(loop.remove_reader, sock)

    def _serve(self, accepting: Coroutine[Any, Any, AcceptedStreams]) -> None:
        task = asyncio.create_task(self._serve_agent(accepting))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> AcceptedStreams:
        """The streams of an agent on this machine, and its node."""
        break_when_silent(writer.get_extra_info("socket"))
        try:
            node = await shake_hands(
                reader, writer, token=self._node_key, role=Role.ACCEPT, identity=NO_NODE
            )
        except BaseException:
            writer.close()
            raise
        return reader, writer, node

    async def _serve_agent(self, accepting: Coroutine[Any, Any, AcceptedStreams]) -> None:
        try:
            reader, writer, node = await accepting
        except (AuthenticationError, asyncio.IncompleteReadError, OSError) as error:
            self._refusals.add(error)
            return
        agent = _AgentSocket(writer, self._frames)
        self._agents.add(agent)
        try:
            if await self._leadership.admit(node, agent):
                await self._take_facts(node, reader)
        except AuthenticationError as error:  # The node breaks the protocol; the others go on.
            self._refusals.add(f"that of node {node}: {error}")
        except ConflictError as error:  # Another coordinator has taken over.
            if not self._overtaken.done():
                self._overtaken.set_exception(error)
        except (OSError, StoreError) as error:
            logger.info("node %s: %s", node, error)
        finally:
            self._agents.discard(agent)
            self._leadership.on_disconnect(node, agent)
            agent.close()

    async def _take_facts(self, node: int, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder(bytes_max=FROM_NODE_BYTES_MAX)
        while data := await reader.read(_READ_BYTES):
            for body in decoder.feed(data):
                await self._leadership.on_message(node, fact_of(body))

    async def _queue_launcher_messages(self, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        while data := await reader.read(_READ_BYTES):
            for body in decoder.feed(data):
                message = message_of(body, _launcher_decoder)
                if isinstance(message, AgentEnded):
                    self.queue(NodeLost(node=message.node, reason=message.reason))
                else:
                    self.queue(message)
        os._exit(1)

    async def _send_beats(self) -> None:
        """Tells the launcher again and again that this process runs, even if the disk is slow."""
        while True:
            self.notify(Beat())
            await asyncio.sleep(self._rules.job.cluster.lease_s / TICKS_PER_LEASE)

    async def _tick(self) -> None:
        """Queues ticks, and expires leases that are due, also while the journal's disk is slow.

        Expires none after a period in which this process itself was stopped.
        """
        period_s = self._rules.job.cluster.lease_s / TICKS_PER_LEASE
        last_s = time.monotonic()
        expiring: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(period_s)
                if self._leadership.state.phase is Phase.SAVING:
                    self._publishing.end_training(**self._patience_s)
                elif self._leadership.state.phase is Phase.TRAINING:
                    self._publishing.continue_training()
                self._publishing.tick()
                self._leadership.tick()
                last_s, before_s = time.monotonic(), last_s
                if expiring is not None and expiring.done():
                    expiring.result()
                    expiring = None
                if expiring is None and may_expire(last_s, before_s, period_s=period_s):
                    expiring = asyncio.create_task(self._store.expire())
        finally:
            if expiring is not None:
                expiring.cancel()

    # -- saves ------------------------------------------------------------------------------------

    def _publisher_thread(self) -> PublisherThread:
        """The thread that acts on saves; its messages are handled on this event loop."""
        loop, checkpoint = asyncio.get_running_loop(), self._spec.job.checkpoint
        self._publisher_error: asyncio.Future[None] = loop.create_future()
        tier = behind_gate(tier_of(checkpoint.directory), self._store_of_saves)
        parts, addresses = self._spec.parts, self._spec.addresses
        head = HeadMark(addresses=addresses) if addresses else None
        publisher = Publisher(
            tier,
            run=MarkedRun(RunPlace(tier.storage, parts), head, self._hold) if parts else None,
            fingerprint=self._spec.fingerprint,
            keep=checkpoint.keep,
            queue=lambda event: _call(loop, lambda: self.queue(event)),
            notify=lambda message: _call(loop, lambda: self.notify(message)),
        )
        return PublisherThread(
            publisher,
            where=checkpoint.directory,
            notify=self.notify,
            on_error=lambda error: _call(loop, lambda: self._publisher_error.set_exception(error)),
        )

    # -- effects ----------------------------------------------------------------------------------

    def queue(self, event: Queued) -> None:
        """See Effects."""
        self._events.put_nowait(event)

    def notify(self, message: ToLauncher) -> None:
        """See Effects."""
        self._launcher.write(frame(message))

    def carry_out(self, command: Saving) -> None:
        """See Effects."""
        match command:
            case Publish():
                self._publishing.publish(command)
            case Discard():
                self._publishing.discard(command)
            case CheckSave(source, layer):
                self._publishing.check_save(source, layer)

    def on_place_reached(self, place: str, iteration: int) -> None:
        """See Effects."""
        self._probe.report_step(place, iteration)

    async def _tell_end(self, ended: Ended) -> None:
        """Tells the launcher, then the agents, that the job has ended.

        The launcher must know first, so that no agent that ends is taken for lost.
        """
        self.notify(ended)
        await self._launcher.drain()
        shutdown = Shutdown()
        for agent in self._agents:
            agent.tell(shutdown)


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Makes an event loop call `callback`, from any thread; does nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _reason(error: StoreError) -> str:
    return f"the coordinator cannot keep its records: {error}"


class _Frames:
    """Encodes messages as frames; the newest of each kind is encoded once for all agents.

    An agent that comes back is welcomed before it is told the order to begin an epoch, which names
    all ranks and takes long to encode.
    """

    def __init__(self) -> None:
        self._newest: dict[type[ToNode], tuple[ToNode, bytes]] = {}

    def of(self, message: ToNode) -> bytes:
        kept = self._newest.get(type(message))
        if kept is None or kept[0] is not message:
            kept = self._newest[type(message)] = message, frame(message)
        return kept[1]


class _AgentSocket:
    """A connection to an agent."""

    def __init__(self, writer: asyncio.StreamWriter, frames: _Frames) -> None:
        self._writer = writer
        self._frames = frames

    def tell(self, message: ToNode) -> None:
        """See AgentConnection."""
        if not self._writer.is_closing():
            self._writer.write(self._frames.of(message))

    def close(self) -> None:
        """See AgentConnection."""
        self._writer.close()
