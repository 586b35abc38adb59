"""Starts the nodes of a job on this machine and runs its coordinator until the job ends.

The launcher forks one agent per node, serves their connections, feeds what they say to the
coordinator (a pure function) one event at a time, and carries out its commands. It holds the
only write end of the lifeline pipe: when it dies, by whatever signal, every agent and worker
sees the pipe close and leaves. They hold all its read ends, too: the launcher sees its own end
break when the last process of the job is gone, and waits for that.

Ctrl-C and SIGTERM stop the job at its next commit, once its state is saved; a second one, or one
before the first iteration has begun, ends it at once.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    Phase,
    Publish,
    Tell,
    step,
)
from planaria.core.messages import FromNode, NodeLost, NodeSpec, StartEpoch, StopRequested
from planaria.errors import AuthenticationError, CheckpointError, InsufficientError
from planaria.nodes.forkserver import ForkServer, told
from planaria.transport.frames import FrameDecoder, Role, frame, from_node_decoder, shake_hands

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0  # For agents to leave by themselves before their groups are killed.
KILL_TIMEOUT_S = 5.0  # For the kernel to end what was killed.


class Observer(Protocol):
    """Who watches a job: the live display and the report."""

    def starting(self, state: JobState) -> None:
        """Every worker has reported; they take their layers and connect."""

    def began(self, state: JobState, event: Began) -> None:
        """Training has begun."""

    def committed(self, state: JobState, event: Committed) -> None:
        """An iteration is committed."""

    def saved(self, manifest: Manifest) -> None:
        """A checkpoint is complete on disk."""

    def unsaved(self, event: Discard) -> None:
        """A save failed; training goes on unless it was the last."""

    def warned(self, text: str) -> None:
        """Something else went wrong that does not stop the job."""

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
        self._interruption = ""
        self._lost_node: int | None = None
        self._exits: dict[int, int] = {}
        self._is_server_lost = False
        self._unsaved: dict[tuple[int, int], str] = {}

    def run(self) -> Outcome:
        """Runs the job to its end; no process of it is left afterwards.

        Raises:
            KeyboardInterrupt: the user ended the job at once; it says what that cost.
            InsufficientError: the fork server is gone before the nodes were started.
        """
        outcome = asyncio.run(self._run())
        # What a rank wrote after another had failed to is no checkpoint.
        for iteration, epoch in self._unsaved:
            self._discard(iteration, epoch)
        if self._interruption:
            raise KeyboardInterrupt(self._interruption)
        return outcome

    async def _run(self) -> Outcome:
        loop = asyncio.get_running_loop()
        tcp = await asyncio.start_server(self._serve_agent, host="127.0.0.1", port=0)
        lifeline_read_fd, lifeline_write_fd = os.pipe()
        with _interrupts(loop, self._interrupt):
            try:
                try:
                    self._start_agents(tcp.sockets[0].getsockname()[:2], lifeline_read_fd)
                finally:
                    os.close(lifeline_read_fd)
                loop.add_reader(self._server.fileno(), self._watch_agents)
                self._watch_agents()
                while self._outcome is None:
                    self._handle(await self._events.get())
                if self._outcome.end.ending not in (Ending.FAILED, Ending.LOST):
                    await self._wait_left(lifeline_write_fd)
            finally:
                self._kill_agents()
                if not await _is_left_alone(lifeline_write_fd, timeout_s=KILL_TIMEOUT_S):
                    logger.warning("a process of the job is still there after it was killed")
                await self._wait_exits()
                loop.remove_reader(self._server.fileno())
                os.close(lifeline_write_fd)
                tcp.close()
        return self._explained(self._outcome)

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
        try:
            while data := await reader.read(1 << 20):
                for body in decoder.feed(data):
                    self._events.put_nowait(from_node_decoder.decode(body))
        except ConnectionError as error:
            logger.info("node %s: %s", node, error)
        finally:
            self._events.put_nowait(NodeLost(node=node))
            writer.close()

    def _watch_agents(self) -> None:
        """An agent that ends before it has connected is seen here alone."""
        try:
            exits = self._server.exits()
        except InsufficientError as error:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._is_server_lost = True
            self._end(End(Ending.LOST, str(error)))
            return
        for pid, status in exits:
            self._exits[pid] = status
            if pid in self._agents:
                self._events.put_nowait(NodeLost(node=self._agents[pid]))

    async def _wait_left(self, lifeline_fd: int) -> None:
        """Lets agents leave by themselves, for a while."""
        if await _is_left_alone(lifeline_fd, timeout_s=EXIT_TIMEOUT_S):
            return
        for pid in set(self._agents) - set(self._exits):
            logger.warning(
                "node %s did not leave within %.0f s and is killed",
                self._agents[pid],
                EXIT_TIMEOUT_S,
            )

    def _kill_agents(self) -> None:
        for pid in set(self._agents) - set(self._exits):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def _wait_exits(self) -> None:
        """Waits until the fork server has told how the agents ended, which are gone by now."""
        deadline_s = time.monotonic() + KILL_TIMEOUT_S
        while not (self._is_server_lost or set(self._agents) <= set(self._exits)):
            if time.monotonic() > deadline_s:
                return
            await asyncio.sleep(0.002)

    def _explained(self, outcome: Outcome | None) -> Outcome:
        """The outcome, with how the agent ended whose loss ended the job."""
        assert outcome is not None
        for pid, node in self._agents.items():
            if node == self._lost_node and pid in self._exits:
                reason = f"{outcome.end.reason}: its agent {told(self._exits[pid])}"
                return replace(outcome, end=replace(outcome.end, reason=reason))
        return outcome

    # -- events and commands ----------------------------------------------------------------------

    def _interrupt(self) -> None:
        """The first Ctrl-C stops at the next commit and saves; the second ends the job at once."""
        if self._outcome is not None:
            return
        if self._state.phase in (Phase.JOINING, Phase.STARTING):
            self._interruption = "interrupted before training began"
        elif self._state.stop_requested:
            self._interruption = f"interrupted again, so nothing was saved; {standing(self._tier)}"
        else:
            self._observer.stopping()
            self._handle(StopRequested())
            return
        self._end(End(Ending.LOST, self._interruption))

    def _end(self, end: End) -> None:
        """Ends the job for a reason that the coordinator does not know."""
        if self._outcome is None:
            self._outcome = Outcome(end, self._state)
            self._events.put_nowait(StopRequested())  # Wakes whoever waits for an event.

    def _handle(self, event: FromNode) -> None:
        if self._outcome is not None:
            return
        self._state, commands = step(self._state, event)
        for command in commands:
            self._carry_out(command)
        if self._outcome is not None and isinstance(event, NodeLost):
            self._lost_node = event.node

    def _carry_out(self, command: Command) -> None:
        match command:
            case Tell():
                if isinstance(command.message, StartEpoch):
                    self._observer.starting(self._state)
                for writer in self._writers.values():
                    writer.write(frame(command.message))
            case Began():
                self._observer.began(self._state, command)
            case Committed():
                self._observer.committed(self._state, command)
            case Publish():
                self._publish(command)
            case Discard():
                self._give_up(command)
            case End():
                self._outcome = Outcome(self._true_end(command), self._state)

    def _true_end(self, end: End) -> End:
        """The end; a job whose last save could not be published has not been saved."""
        reason = self._unsaved.get((self._state.last + 1, self._state.plan.epoch))
        if reason is not None and end.ending in (Ending.FINISHED, Ending.STOPPED):
            return End(Ending.UNSAVED, reason)
        return end

    def _publish(self, command: Publish) -> None:
        manifest = Manifest(
            iteration=command.iteration,
            epoch=command.epoch,
            job=self._fingerprint,
            layers=command.files,
        )
        try:
            self._tier.publish(manifest)
        except CheckpointError as error:
            self._give_up(Discard(command.iteration, command.epoch, str(error)))
            return
        self._observer.saved(manifest)
        try:
            if self._keep:
                self._tier.prune(self._keep)
        except CheckpointError as error:
            self._observer.warned(f"old checkpoints stay: {error}")

    def _give_up(self, command: Discard) -> None:
        """Removes what there is of a failed save; each rank that failed says so, once is told."""
        key = (command.iteration, command.epoch)
        self._discard(*key)
        if key not in self._unsaved:
            self._unsaved[key] = command.reason
            self._observer.unsaved(command)

    def _discard(self, iteration: int, epoch: int) -> None:
        try:
            self._tier.discard(iteration, epoch)
        except CheckpointError as error:
            self._observer.warned(str(error))


def standing(tier: DiskTier) -> str:
    """What a job that ended early has left, in words."""
    newest = tier.newest()
    if newest is None:
        return "there is no checkpoint"
    return f"the newest checkpoint is of iteration {newest.iteration}, go on from it with --resume"


async def _is_left_alone(lifeline_fd: int, *, timeout_s: float) -> bool:
    """Whether the last reader of the lifeline leaves in time; this is its write end."""
    loop = asyncio.get_running_loop()
    broken = asyncio.Event()
    loop.add_reader(lifeline_fd, broken.set)  # Nothing to read, but an error when it breaks.
    try:
        await asyncio.wait_for(broken.wait(), timeout_s)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(lifeline_fd)
    return True


@contextlib.contextmanager
def _interrupts(loop: asyncio.AbstractEventLoop, handler: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call the handler while inside; only a main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, old)
