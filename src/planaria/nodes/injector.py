"""Carries out faults: the launcher's end of the probes (transport/probe.py).

A probe that reaches a step is kept waiting until the faults of that place have happened. Signals
go from here to a node's whole process group, or to its workers; a bit is flipped by the worker
that calls, because it is told to in the answer, and so is a node slow. A node is cut off by its own
workers, who keep a line to here on which they are told, and by a relay between its agent and the
coordinator. Disks are slow in the workers and in the coordinator, which keeps such a line, too.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil

from planaria.core.inject import AFTER_COMMIT, COORDINATOR_STEPS, DISKS, Injection, Place
from planaria.errors import AuthenticationError
from planaria.nodes.relay import Address, Relay
from planaria.transport.frames import Role, shake_hands
from planaria.transport.probe import LISTENING, NO_NODE, Cut, Reached, Slowed, Told

logger = logging.getLogger(__name__)


def node_places(injections: Sequence[Injection], node: int) -> tuple[Place, ...]:
    """The places at which the workers of a node are to call."""
    return tuple(
        injection.place
        for injection in injections
        if injection.place.step not in COORDINATOR_STEPS
        and (node in injection.nodes or not injection.nodes)
    )


def coordinator_places(injections: Sequence[Injection]) -> tuple[Place, ...]:
    """The places at which the coordinator is to call."""
    return tuple(i.place for i in injections if i.place.step in COORDINATOR_STEPS)


class Injector:
    """Waits for probes to call, and for time to pass, and does what the specs say.

    Args:
        agents: the process of each node that is there.
        leader: the coordinator's process now.
        server: the fork server's process now.
        join: starts so many nodes more.
        fired: is told what has happened, in the order of the signals.

    Attributes:
        has_cuts: a node may be cut off.
        is_heeded: workers and the coordinator are to keep a line to here.
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        *,
        token: bytes,
        agents: Mapping[int, int],
        leader: Callable[[], int],
        server: Callable[[], int],
        join: Callable[[int], None],
        fired: Callable[[Injection], None],
    ) -> None:
        self._waiting = list(injections)
        self._has_ended = False
        self._to_flip: set[tuple[int, int]] = set()  # Node and iteration.
        self._slow: list[Injection] = []
        self._token = token
        self._agents = agents
        # Whom a fault kills that names no nodes.
        self._around = {"leader": leader, "forkserver": server}
        self._join = join
        self._fired = fired
        self._relay = Relay()
        self._lines: dict[int, list[asyncio.StreamWriter]] = {}
        # By disk, for processes that are still to come: what it is, and until when.
        self._slowed: dict[str, tuple[Slowed, float]] = {}
        self.has_cuts = any(injection.kind == "cut" for injection in injections)
        self.is_heeded = self.has_cuts or any(one.kind in DISKS for one in injections)

    async def listen(self) -> tuple[str, int]:
        """Serves probes from now on; where."""
        self._server = await asyncio.start_server(self._serve, host="127.0.0.1", port=0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    def front(self, node: int, coordinator: Address) -> Address:
        """Where the agent of a node is to find the coordinator."""
        return self._relay.front(node, coordinator) if self.has_cuts else coordinator

    def began(self) -> None:
        """Training has started: what is to happen after so many seconds is timed from now."""
        loop = asyncio.get_running_loop()
        for place in {injection.place for injection in self._waiting if injection.place.at_s >= 0}:
            loop.call_later(place.at_s, self._fire, place)

    def ended(self) -> None:
        """The job is over: what has not happened by now does not."""
        self._has_ended = True

    def close(self) -> tuple[Injection, ...]:
        """Serves no more; the faults whose place never came."""
        self.ended()
        self._server.close()
        self._relay.close()
        for line in itertools.chain(*self._lines.values()):
            line.close()
        return tuple(self._waiting)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            node = await shake_hands(
                reader, writer, token=self._token, role=Role.ACCEPT, identity=NO_NODE
            )
            reached = msgspec.json.decode(await reader.readuntil(), type=Reached)
            if reached.step == LISTENING:
                self._lines.setdefault(node, []).append(writer)
                self._tell_disks(writer)
                try:
                    await reader.read()  # Until the process is gone.
                finally:
                    self._lines[node].remove(writer)
                return
            for place in self._places_at(node, reached):
                self._fire(place)
            writer.write(self._own_fault(node, reached) + b"\n")
            await writer.drain()
        except (AuthenticationError, asyncio.IncompleteReadError, ConnectionError) as error:
            logger.info("a probe went away: %s", error)
        except msgspec.DecodeError as error:
            logger.warning("a probe said what none says: %s", error)
        finally:
            writer.close()

    def _own_fault(self, node: int, reached: Reached) -> bytes:
        """What the node that calls is to do to itself, the first of its workers that asks; each of
        them where it is slow."""
        for injection in reversed(self._slow):
            if node in injection.nodes and _is_at(injection.place, reached):
                return b"slow=%f" % injection.value
        flip = (node, reached.iteration)
        if reached.step != AFTER_COMMIT or flip not in self._to_flip:
            return b""
        self._to_flip.remove(flip)
        return b"flip"

    def _places_at(self, node: int, reached: Reached) -> list[Place]:
        """The places of waiting faults that this node, or any node, makes come."""
        places = []
        for injection in self._waiting:
            place = injection.place
            is_here = _is_at(place, reached)
            is_meant = node == NO_NODE or node in injection.nodes or not injection.nodes
            if is_here and is_meant and place.at_s < 0 and place not in places:
                places.append(place)
        return places

    def _fire(self, place: Place) -> None:
        """All faults of one place, at once."""
        if self._has_ended:
            return
        for injection in [i for i in self._waiting if i.place == place]:
            self._waiting.remove(injection)
            self._fired(injection)
            if injection.kind == "slow":
                self._slow.append(injection)
            if injection.kind in self._around:
                _kill(self._around[injection.kind](), signal.SIGKILL)
            if injection.kind in DISKS:
                self._slow_disk(injection.kind, injection.value)
            self._join(injection.num_nodes)
            for node in injection.nodes:
                self._strike(injection, node)

    def _slow_disk(self, disk: str, seconds: float) -> None:
        """Every process hears of it that has begun, or begins while it is so."""
        slowed = Slowed(disk, seconds)
        end_s = time.monotonic() + seconds if disk == "disk" else math.inf
        self._slowed[disk] = slowed, end_s
        for line in itertools.chain(*self._lines.values()):
            _tell(line, slowed)

    def _tell_disks(self, line: asyncio.StreamWriter) -> None:
        for slowed, end_s in self._slowed.values():
            left_s = end_s - time.monotonic()
            if left_s > 0.0:
                _tell(line, Slowed(slowed.disk, min(slowed.seconds, left_s)))

    def _strike(self, injection: Injection, node: int) -> None:
        pid = self._agents.get(node)
        if pid is None:  # It is gone already.
            return
        match injection.kind:
            case "kill":
                _kill_group(pid, signal.SIGKILL)
            case "hang":
                _kill_group(pid, signal.SIGSTOP)
                if injection.value:
                    loop = asyncio.get_running_loop()
                    loop.call_later(injection.value, _kill_group, pid, signal.SIGCONT)
            case "flip":
                self._to_flip.add((node, injection.place.iteration))
            case "cut":
                self._relay.cut(node, injection.value)
                for line in self._lines.get(node, ()):
                    _tell(line, Cut(nodes=injection.nodes, seconds=injection.value))
            case "preempt":
                _kill(pid, signal.SIGTERM)
                asyncio.get_running_loop().call_later(injection.value, self._take, node)
            case "stall" | "crash":
                number = signal.SIGSTOP if injection.kind == "stall" else signal.SIGKILL
                with contextlib.suppress(psutil.NoSuchProcess):
                    for worker in psutil.Process(pid).children():
                        _kill(worker.pid, number)

    def _take(self, node: int) -> None:
        """A node whose notice has run out is killed, unless it has left."""
        if node in self._agents:
            _kill_group(self._agents[node], signal.SIGKILL)


def _is_at(place: Place, reached: Reached) -> bool:
    is_then = place.iteration == reached.iteration
    if place.is_in_recovery:
        is_then = place.iteration <= reached.iteration
    return is_then and place.step == reached.step


def _tell(line: asyncio.StreamWriter, told: Told) -> None:
    line.write(msgspec.json.encode(told) + b"\n")


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
