"""Links that take their time: messages of a few bytes that stand for large ones.

A message of a paced job stands for so many virtual bytes, and arrives no earlier than these would
over the links of its profile. A node has one way out to other nodes and one way in, which all
flows of all its ranks share; within a node every rank has ways of its own (lanes.py). A message
takes bytes / bandwidth of its source's way out, in slices of a few milliseconds, by turns with
messages to other ranks. Each slice goes off when its time comes, and takes as much of its target's
way in, from the same moment on or from when that is free. A latency after the last one the message
is there. So one that meets no other is there after latency + bytes / bandwidth, and flows that meet
share what there is.

On the wire a paced message begins with a stamp: when its last slice began, and how long that lasts.
The slices before went ahead of it, as messages of a stamp alone.

Source: none; a way is a token bucket that saves no tokens.
Differs from TCP: a source never hears that a target's way in is full, so its own way out is taken
earlier, though for no longer.
"""

import contextlib
import heapq
import logging
import math
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from planaria.core.plan import Link
from planaria.errors import PeerLostError
from planaria.transport.connection import Channel, Connection, Received, Tag, header
from planaria.transport.lanes import Clock, Lane, shared_clocks
from planaria.transport.timekeeping import Timekeeper
from planaria.transport.traffic import Traffic, Use

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 2.0
_STAMP: Final = struct.Struct("=dd")
_SLICE_HEADER: Final = header(0, Tag(Channel.PACE, 0, 0), _STAMP.size)


@dataclass(frozen=True, slots=True)
class Pacing:
    """The links of a node, as they are to be.

    Attributes:
        clocks_fd: what `node_clocks` gave to all workers of the node.
        late_s_max: what is made up for where this machine is late (timekeeping.py).
    """

    clocks_fd: int
    devices_per_node: int
    inter_node: Link
    intra_node: Link
    late_s_max: float = 0.25


def node_clocks(devices_per_node: int) -> int:
    """The descriptor of the clocks of a node's ways, for its workers to inherit."""
    return shared_clocks(2 * (1 + devices_per_node))


class Leaving(NamedTuple):
    """A message that is to be sent, and how many bytes it stands for."""

    epoch: int
    tag: Tag
    views: Sequence[memoryview]
    virtual_bytes: int

    def header(self, num_bytes: int) -> memoryview:
        """What goes in front of so many bytes."""
        return memoryview(header(self.epoch, self.tag, num_bytes))

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.views))


@dataclass(frozen=True, slots=True)
class Ends:
    """What a rank's links do with messages.

    Attributes:
        lock: guards the links; held while the others are called.
        check: raises PeerLostError where no link to a peer stands or is on its way.
        transmit: writes to a peer; raises as `check`.
        deliver: takes a message that has arrived, and when it was to be there.
        fail: a thread dies of a mistake.
        traffic: is told of messages that leave, and of those that have come.
    """

    lock: "threading.RLock"
    check: Callable[[int], object]
    transmit: Callable[[int, list[memoryview]], None]
    deliver: Callable[[Connection, Received, float], None]
    fail: Callable[[Exception], None]
    traffic: Traffic


class Unpaced:
    """Messages that take what they take. What is public is that of `Pacer`."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self.timekeeper = Timekeeper()

    def send(self, peer: int, leaving: Leaving) -> None:
        """Sends a message at once."""
        start_s, traffic = time.monotonic(), self._ends.traffic
        end_s = start_s + traffic.seconds(leaving.num_bytes)
        traffic.note(Use(True, peer, leaving.tag, start_s, end_s))
        self._ends.transmit(peer, [leaving.header(leaving.num_bytes), *leaving.views])

    def receive(self, connection: Connection, message: Received) -> None:
        """A message has come, so it is here."""
        end_s, traffic = time.monotonic(), self._ends.traffic
        start_s = end_s - traffic.seconds(len(message.payload))
        traffic.note(Use(False, connection.peer, message.tag, start_s, end_s))
        self._ends.deliver(connection, message, 0.0)

    def end(self, connection: Connection) -> None:
        """Nothing is left of a connection."""

    def forget(self, peer: int) -> None:
        """Nothing waits to be sent."""

    def close(self) -> None:
        """There is nothing to end."""


class Pacer:
    """Paces what a rank sends and receives, with a thread for what has to wait.

    Attributes:
        timekeeper: of the threads that send and receive.
    """

    def __init__(self, rank: int, pacing: Pacing, ends: Ends) -> None:
        self.timekeeper = Timekeeper(pacing.late_s_max)
        self._pacing = pacing
        self._node, device = divmod(rank, pacing.devices_per_node)
        self._ends = ends
        # Between nodes, and within this one.
        indices = (0, 2 * (1 + device))
        clocks = [(Clock(pacing.clocks_fd, i), Clock(pacing.clocks_fd, i + 1)) for i in indices]
        self._links = (pacing.inter_node, pacing.intra_node)
        self._out: list[Lane[int, Leaving]] = [Lane(out.reserve) for out, _ in clocks]
        self._into: list[Lane[Connection, Received]] = [Lane(into.reserve) for _, into in clocks]
        self._arriving: list[tuple[float, int, Connection, Received]] = []  # A heap, by time.
        # What slices of a message that is not whole yet took, by its flow.
        self._taken_s: defaultdict[int | Connection, float] = defaultdict(float)
        self._order = count()
        self._changed = threading.Condition(ends.lock)
        self._wakes_s = -math.inf
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pacing", daemon=True)
        self._thread.start()

    def send(self, peer: int, leaving: Leaving) -> None:
        """Sends a message that takes its time; never blocks.

        Raises:
            PeerLostError: no link to the peer stands, or is on its way.
        """
        self._ends.check(peer)
        kind = self._kind(peer)
        lasts_s = leaving.virtual_bytes / self._links[kind].bandwidth_bytes_per_s
        with self._changed:
            self._out[kind].put(peer, leaving, ready_s=self.timekeeper.now_s(), lasts_s=lasts_s)
            self._advance()

    def receive(self, connection: Connection, message: Received) -> None:
        """Something has come over a connection that begins with a stamp."""
        start_s, lasts_s = _STAMP.unpack_from(message.payload.data)
        is_whole = message.tag.channel is not Channel.PACE
        content = message._replace(payload=message.payload[_STAMP.size :]) if is_whole else None
        with self._changed:
            lane = self._into[self._kind(connection.peer)]
            lane.put(connection, content, ready_s=start_s, lasts_s=lasts_s)
            self._advance()

    def end(self, connection: Connection) -> None:
        """A connection is over: what came over it whole is delivered, whatever is its time."""
        with self._changed:
            self._taken_s.pop(connection, None)
            waiting = [message for lane in self._into for message in lane.drop(connection)]
            own = sorted(entry for entry in self._arriving if entry[2] is connection)
            self._arriving = [entry for entry in self._arriving if entry[2] is not connection]
            heapq.heapify(self._arriving)
            for message in [*(entry[3] for entry in own), *waiting]:
                self._ends.deliver(connection, message, 0.0)

    def forget(self, peer: int) -> None:
        """Nothing goes to this peer any more that is still to be sent."""
        with self._changed:
            self._taken_s.pop(peer, None)
            for lane in self._out:
                lane.drop(peer)

    def close(self) -> None:
        """Ends the thread; what is still to be sent goes at once."""
        with self._changed:
            self._is_closed = True
            for lane in self._out:
                for peer, leaving in lane.drop_all():
                    self._write(peer, leaving, start_s=time.monotonic(), lasts_s=0.0)
            self._changed.notify()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _kind(self, peer: int) -> int:
        return int(peer // self._pacing.devices_per_node == self._node)

    def _run(self) -> None:
        try:
            with self._changed:
                while not self._is_closed:
                    self._advance()
                    self._wakes_s = self._next_s()
                    patience_s = self._wakes_s - time.monotonic()
                    self._changed.wait(max(0.0, patience_s) if patience_s < math.inf else None)
        except Exception as error:
            # Our mistake. Unless it is raised where somebody waits, all ranks wait in vain.
            logger.exception("the thread that paces the links died")
            self._ends.fail(error)

    def _next_s(self) -> float:
        out_s = min(lane.next_s for lane in self._out)
        into_s = min(lane.next_s for lane in self._into)
        return min(out_s, into_s, self._arriving[0][0] if self._arriving else math.inf)

    def _advance(self) -> None:
        """Sends and delivers what its time has come for; the thread sees to what comes next."""
        now_s = time.monotonic()
        for out in self._out:
            for peer, leaving, start_s, lasts_s in out.begun(now_s):
                self._write(peer, leaving, start_s=start_s, lasts_s=lasts_s)
                self._taken_s[peer] += lasts_s
                if leaving is not None:
                    self._note(True, peer, peer, leaving.tag, end_s=start_s + lasts_s)
        for link, into in zip(self._links, self._into, strict=True):
            for connection, message, start_s, lasts_s in into.begun(now_s):
                self._taken_s[connection] += lasts_s
                if message is not None:
                    peer, end_s = connection.peer, start_s + lasts_s
                    self._note(False, connection, peer, message.tag, end_s=end_s)
                    due_s = end_s + link.latency_s
                    heapq.heappush(self._arriving, (due_s, next(self._order), connection, message))
        while self._arriving and self._arriving[0][0] <= now_s:
            due_s, _, connection, message = heapq.heappop(self._arriving)
            self._ends.deliver(connection, message, due_s)
        if self._next_s() < self._wakes_s:
            self._changed.notify()

    def _note(
        self, is_out: bool, flow: int | Connection, peer: int, tag: Tag, *, end_s: float
    ) -> None:
        """The last slice of a message ends then."""
        start_s = end_s - self._taken_s.pop(flow, 0.0)
        self._ends.traffic.note(Use(is_out, peer, tag, start_s, end_s))

    def _write(self, peer: int, leaving: Leaving | None, *, start_s: float, lasts_s: float) -> None:
        stamp = memoryview(_STAMP.pack(start_s, lasts_s))
        message = [memoryview(_SLICE_HEADER), stamp]
        if leaving is not None:
            message = [leaving.header(_STAMP.size + leaving.num_bytes), stamp, *leaving.views]
        with contextlib.suppress(PeerLostError):  # It was there when this was to be sent.
            self._ends.transmit(peer, message)
