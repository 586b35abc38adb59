"""Starts the nodes of a job on this machine and runs its coordinator until the job ends.

The launcher forks one agent per node, serves their connections, feeds what they say to the
coordinator (a pure function) one event at a time, and carries out its commands. It holds the
only write end of the lifeline pipe: when it dies, by whatever signal, every agent and worker
sees the pipe close and leaves.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from planaria.checkpoint.tiers import DiskTier, Manifest
from planaria.coordinator.coordinator import (
    Began,
    Command,
    Committed,
    Discard,
    End,
    Ending,
    JobState,
    Publish,
    Tell,
    step,
)
from planaria.core.messages import FromNode, NodeLost, NodeSpec, StopRequested
from planaria.errors import AuthenticationError, CheckpointError
from planaria.nodes.forkserver import ForkServer
from planaria.transport.frames import FrameDecoder, Role, frame, from_node_decoder, shake_hands

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0  # For agents to leave by themselves before their groups are killed.


class Observer(Protocol):
    """Who watches a job: the live display and the report."""

    def began(self, state: JobState, event: Began) -> None:
        """Training has begun."""

    def committed(self, state: JobState, event: Committed) -> None:
        """An iteration is committed."""

    def saved(self, manifest: Manifest) -> None:
        """A checkpoint is complete on disk."""

    def unsaved(self, event: Discard) -> None:
        """A save failed; training goes on unless it was the last."""

    def stopping(self) -> None:
        """The user asked to stop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended, and the coordinator's state at that moment."""

    end: End
    state: JobState


class Launcher:
    """Runs one job.

    Args:
        spec: what every node is told; `node` and `coordinator` are filled in here.
        fingerprint: what a checkpoint says of the job that wrote it.
        keep: newest checkpoints kept, 0 for all.
    """

    def __init__(
        self,
        spec: NodeSpec,
        state: JobState,
        *,
        server: ForkServer,
        observer: Observer,
        tier: DiskTier,
        fingerprint: dict[str, Any],
        keep: int,
    ) -> None:
        self._spec = msgspec.structs.replace(spec, token=secrets.token_bytes(32))
        self._state = state
        self._server = server
        self._observer = observer
        self._tier = tier
        self._fingerprint = fingerprint
        self._keep = keep
        self._agents: dict[int, int] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._events: asyncio.Queue[FromNode] = asyncio.Queue()
        self._outcome: Outcome | None = None
        self._exited: set[int] = set()

    def run(self) -> Outcome:
        """Runs the job to its end; no process of it is left afterwards."""
        return asyncio.run(self._run())

    async def _run(self) -> Outcome:
        lifeline_read_fd, lifeline_write_fd = os.pipe()
        tcp = await asyncio.start_server(self._serve_agent, host="127.0.0.1", port=0)
        loop = asyncio.get_running_loop()
        try:
            with _interrupts(loop, self._interrupt):
                self._start_agents(tcp.sockets[0].getsockname()[:2], lifeline_read_fd)
                loop.add_reader(self._server.fileno(), self._watch_agents)
                while self._outcome is None:
                    self._handle(await self._events.get())
                await self._wait_agents(self._outcome.end)
        finally:
            loop.remove_reader(self._server.fileno())
            self._kill_agents()
            os.close(lifeline_write_fd)
            os.close(lifeline_read_fd)
            tcp.close()
        return self._outcome

    # -- nodes ------------------------------------------------------------------------------------

    def _start_agents(self, address: tuple[str, int], lifeline_fd: int) -> None:
        for node in self._state.plan.nodes:
            spec = msgspec.structs.replace(self._spec, node=node, coordinator=address)
            pid = self._server.spawn(
                "planaria.nodes.agent:main", msgspec.json.encode(spec), (lifeline_fd,)
            )
            self._agents[pid] = node

    async def _serve_agent(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            node = await shake_hands(
                reader, writer, token=self._spec.token, role=Role.ACCEPT, identity=0
            )
        except (AuthenticationError, asyncio.IncompleteReadError, ConnectionError) as error:
            logger.warning("refused a connection: %s", error)
            writer.close()
            return
        self._writers[node] = writer
        decoder = FrameDecoder()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                for body in decoder.feed(data):
                    self._events.put_nowait(from_node_decoder.decode(body))
        self._events.put_nowait(NodeLost(node=node))
        writer.close()

    def _watch_agents(self) -> None:
        """An agent that ends before it has connected is seen here alone."""
        for pid, _ in self._server.exits():
            self._exited.add(pid)
            if pid in self._agents:
                self._events.put_nowait(NodeLost(node=self._agents[pid]))

    async def _wait_agents(self, end: End) -> None:
        """Lets agents leave by themselves, unless something is wrong."""
        if end.ending in (Ending.FAILED, Ending.LOST):
            self._kill_agents()
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        while not self._exited >= set(self._agents) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.005)
        for pid in set(self._agents) - self._exited:
            logger.warning(
                "node %s did not leave within %.0f s and is killed",
                self._agents[pid],
                EXIT_TIMEOUT_S,
            )

    def _kill_agents(self) -> None:
        for pid in set(self._agents) - self._exited:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    # -- events and commands ---

    def _interrupt(self) -> None:
        """The first Ctrl-C stops at the next commit and saves; the second ends the job at once."""
        if self._state.stop_requested:
            self._outcome = Outcome(End(Ending.LOST, "interrupted twice"), self._state)
            self._events.put_nowait(StopRequested())
            return
        self._observer.stopping()
        self._handle(StopRequested())

    def _handle(self, event: FromNode) -> None:
        if self._outcome is not None:
            return
        self._state, commands = step(self._state, event)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Tell():
                for writer in self._writers.values():
                    writer.write(frame(command.message))
            case Began():
                self._observer.began(self._state, command)
            case Committed():
                self._observer.committed(self._state, command)
            case Publish():
                self._publish(command)
            case Discard():
                self._tier.discard(command.iteration, command.epoch)
                self._observer.unsaved(command)
            case End():
                self._outcome = Outcome(command, self._state)

    def _publish(self, command: Publish) -> None:
        manifest = Manifest(
            iteration=command.iteration,
            epoch=command.epoch,
            job=self._fingerprint,
            layers=command.files,
        )
        try:
            self._tier.publish(manifest)
            if self._keep:
                self._tier.prune(self._keep)
        except CheckpointError as error:
            self._carry_out(Discard(command.iteration, command.epoch, str(error)))
            return
        self._observer.saved(manifest)


@contextlib.contextmanager
def _interrupts(loop: asyncio.AbstractEventLoop, handler: Callable[[], None]) -> Any:
    """Ctrl-C calls the handler while inside; only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop.add_signal_handler(signal.SIGINT, handler)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
