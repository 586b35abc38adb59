"""Injects faults: the launcher's end of the probes (transport/probe.py).

A probe that reaches a step waits until the faults of that place have been injected. The injector
has signals sent to a node's whole process group, or to its workers (node_faults.py). The answer to
a probe tells the calling worker to flip a bit or to be slow. To cut a node off, the injector tells
the node's workers, over a connection that they keep to it, and a relay between the node's agent and
the coordinator. To make a disk slow it tells the workers and the coordinator, which keeps such a
connection too. The probes of other machines come to the head's port (`accept`).
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from planaria.core.inject import (
    AFTER_COMMIT,
    COORDINATOR_STEPS,
    DISKS,
    RECOVERY_STEPS,
    Injection,
    Place,
)
from planaria.errors import AuthenticationError
from planaria.nodes.faults.node_faults import NodeFaults
from planaria.nodes.faults.relay import Relay
from planaria.transport.acceptor import Handshakes, Purpose
from planaria.transport.frames import Role, message_of, shake_hands
from planaria.transport.probe import LISTENING, NO_NODE, Cut, LauncherMessage, Slowed, StepReached
from planaria.transport.sockets import Address, break_when_silent
from planaria.transport.strangers import RefusalLog

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 10
_decoder: msgspec.json.Decoder[StepReached] = msgspec.json.Decoder(StepReached)


def node_places(injections: Sequence[Injection], node: int) -> tuple[Place, ...]:
    """The places at which the probes of a node's workers are to call."""
    return tuple(
        injection.place
        for injection in injections
        if injection.place.step not in COORDINATOR_STEPS
        and (node in injection.nodes or not injection.nodes)
    )


def coordinator_places(injections: Sequence[Injection]) -> tuple[Place, ...]:
    """The places at which the coordinator's probe is to call."""
    return tuple(i.place for i in injections if i.place.step in COORDINATOR_STEPS)


@dataclass(frozen=True, slots=True)
class Targets:
    """What faults act on.

    Attributes:
        nodes: the job's nodes.
        leader: returns the coordinator's current pid.
        server: returns the fork server's current pid.
    """

    nodes: NodeFaults
    leader: Callable[[], int]
    server: Callable[[], int]


class Injector:
    """Injects each fault when a probe reaches its place or its time has come.

    Args:
        token: key of the job's probes.
        handshakes: handshakes with probes of other machines; None: there are none.
        join: starts a number of additional nodes.
        on_fire: callback, called with each fault right before it is injected.

    Attributes:
        has_cuts: whether a node may be cut off.
        keeps_connections: whether workers and the coordinator are to keep a connection to the
            injector.
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        targets: Targets,
        *,
        token: bytes,
        handshakes: Handshakes | None = None,
        join: Callable[[int], None],
        on_fire: Callable[[Injection], None],
    ) -> None:
        self._waiting = list(injections)
        self._has_ended = False
        self._furthest = -1  # The newest iteration that a probe has reported.
        self._to_flip: set[tuple[int, int]] = set()  # Node and iteration of flips still to do.
        self._slow: list[Injection] = []
        self._token = token
        self._handshakes = handshakes
        self._serving: set[asyncio.Task[None]] = set()
        self._nodes = targets.nodes
        # The process that a fault of this kind kills.
        self._pids = {"leader": targets.leader, "forkserver": targets.server, "head": os.getpid}
        self._join = join
        self._on_fire = on_fire
        self._relay = Relay()
        self._refusals = RefusalLog(logger)
        self._connections: dict[int, list[asyncio.StreamWriter]] = {}
        # By disk, for processes that connect later: the slowness, and when it ends.
        self._slow_disks: dict[str, tuple[Slowed, float]] = {}
        self.has_cuts = any(injection.kind == "cut" for injection in injections)
        self.keeps_connections = self.has_cuts or any(
            injection.kind in DISKS for injection in injections
        )

    async def listen(self) -> tuple[str, int]:
        """Starts to serve the probes of this machine; returns the address."""
        self._server = await asyncio.start_server(self._serve, host="127.0.0.1", port=0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    def accept(self, sock: socket.socket) -> None:
        """Serves a probe of another machine; for the acceptor of the head."""
        self._start_task(self._serve_machine(sock))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def coordinator_address(self, node: int, coordinator: Address) -> Address:
        """The address at which the agent of a node is to connect to the coordinator."""
        return self._relay.start_listener(node, coordinator) if self.has_cuts else coordinator

    def on_training_start(self) -> None:
        """Starts the clock of faults at a time; must be called when training starts."""
        loop = asyncio.get_running_loop()
        for place in {injection.place for injection in self._waiting if injection.place.at_s >= 0}:
            loop.call_later(place.at_s, self._fire, place)

    def on_job_end(self) -> None:
        """Injects no fault from now on; must be called when the job is over."""
        self._has_ended = True

    def close(self) -> tuple[Injection, ...]:
        """Stops serving; returns the faults whose place was never reached."""
        self.on_job_end()
        self._server.close()
        self._relay.close()
        for task in self._serving:
            task.cancel()
        for connection in itertools.chain(*self._connections.values()):
            connection.close()
        return tuple(self._waiting)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        break_when_silent(writer.get_extra_info("socket"))
        try:
            node = await shake_hands(
                reader, writer, token=self._token, role=Role.ACCEPT, identity=NO_NODE
            )
        except (asyncio.IncompleteReadError, OSError) as error:
            logger.info("a probe has closed its connection: %s", error)
            writer.close()
        except AuthenticationError as error:
            self._refusals.add(error)
            writer.close()
        else:
            await self._answer(node, reader, writer)

    async def _serve_machine(self, sock: socket.socket) -> None:
        assert self._handshakes is not None
        try:
            reader, writer, node = await self._handshakes.accept(sock, Purpose.PROBE)
        except AuthenticationError as error:
            self._refusals.add(f"a probe: {error}")
        else:
            await self._answer(node, reader, writer)

    async def _answer(
        self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Injects the faults of a step that a process of the node has reached, then answers it."""
        try:
            reached = message_of(await reader.readuntil(), _decoder)
            if reached.step == LISTENING:
                self._connections.setdefault(node, []).append(writer)
                self._tell_slow_disks(writer)
                try:
                    while await reader.read(_READ_BYTES):  # It ends when the process is gone.
                        continue
                finally:
                    self._connections[node].remove(writer)
                return
            reached = self._with_beginning(reached)
            for place in self._places_at(node, reached):
                self._fire(place)
            await self._nodes.wait_injected()
            writer.write(self._own_fault(node, reached) + b"\n")
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError) as error:
            logger.info("a probe has closed its connection: %s", error)
        except (AuthenticationError, asyncio.LimitOverrunError) as error:
            self._refusals.add(error)
        finally:
            writer.close()

    def _with_beginning(self, reached: StepReached) -> StepReached:
        """The report; that of a recovery has the iteration at which the recovery began.

        Processes that were forked anew since the loss know alone to which iteration the job goes
        back.
        """
        if reached.step in RECOVERY_STEPS:
            begun_at = max(reached.iteration, self._furthest)
            return msgspec.structs.replace(reached, iteration=begun_at)
        self._furthest = max(reached.iteration, self._furthest)
        return reached

    def _own_fault(self, node: int, reached: StepReached) -> bytes:
        """The fault that the calling worker is to inject into itself; b"": none.

        All workers of a slow node are told so; only the first worker that calls flips a bit.
        """
        for injection in reversed(self._slow):
            if node in injection.nodes and _is_at(injection.place, reached):
                return b"slow=%f" % injection.value
        flip = (node, reached.iteration)
        if reached.step != AFTER_COMMIT or flip not in self._to_flip:
            return b""
        self._to_flip.remove(flip)
        return b"flip"

    def _places_at(self, node: int, reached: StepReached) -> list[Place]:
        """The places of waiting faults that are reached by this call of a node."""
        places = []
        for injection in self._waiting:
            place = injection.place
            is_here = _is_at(place, reached)
            is_meant = node == NO_NODE or node in injection.nodes or not injection.nodes
            if is_here and is_meant and place.at_s < 0 and place not in places:
                places.append(place)
        return places

    def _fire(self, place: Place) -> None:
        """Injects all faults of one place at once."""
        if self._has_ended:
            return
        injections = [injection for injection in self._waiting if injection.place == place]
        for injection in sorted(injections, key=lambda injection: injection.kind == "head"):
            self._waiting.remove(injection)
            self._on_fire(injection)
            if injection.kind == "slow":
                self._slow.append(injection)
            if injection.kind == "head":  # Nobody on its machine is left of it.
                self._kill("leader")
                self._kill("forkserver")
            if injection.kind in self._pids:
                self._kill(injection.kind)
            if injection.kind in DISKS:
                self._make_disk_slow(injection.kind, injection.value)
            self._join(injection.num_nodes)
            for node in injection.nodes:
                self._inject_into(injection, node)

    def _kill(self, kind: str) -> None:
        if pid := self._pids[kind]():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _make_disk_slow(self, disk: str, seconds: float) -> None:
        """Makes a disk slow, or full, in all processes, also in those that start meanwhile."""
        slowed = Slowed(disk, seconds)
        end_s = math.inf if disk == "store" else time.monotonic() + seconds
        self._slow_disks[disk] = slowed, end_s
        for connection in itertools.chain(*self._connections.values()):
            _tell(connection, slowed)

    def _tell_slow_disks(self, connection: asyncio.StreamWriter) -> None:
        for slowed, end_s in self._slow_disks.values():
            left_s = end_s - time.monotonic()
            if left_s > 0.0:
                _tell(connection, Slowed(slowed.disk, min(slowed.seconds, left_s)))

    def _inject_into(self, injection: Injection, node: int) -> None:
        if node not in self._nodes.live_nodes:  # The node is gone already.
            return
        match injection.kind:
            case "flip":
                self._to_flip.add((node, injection.place.iteration))
            case "cut":
                self._relay.cut(node, injection.value)
                for connection in self._connections.get(node, ()):
                    _tell(connection, Cut(nodes=injection.nodes, seconds=injection.value))
            case "kill" | "hang" | "stall" | "crash" | "preempt":
                self._nodes.inject(injection.kind, node, value=injection.value)


def _is_at(place: Place, reached: StepReached) -> bool:
    is_then = place.iteration == reached.iteration
    if place.is_in_recovery:
        is_then = place.iteration <= reached.iteration
    return is_then and place.step == reached.step


def _tell(connection: asyncio.StreamWriter, message: LauncherMessage) -> None:
    connection.write(msgspec.json.encode(message) + b"\n")
