"""Paced links: messages of a few bytes that stand for large ones and take as long as those would.

A message of a paced job stands for a number of virtual bytes, and arrives no earlier than these
would over the links of its profile. A node has one link direction out to other nodes and one in,
which all flows of all its ranks share; within a node every rank has directions of its own
(lanes.py). A message occupies its source's direction out for bytes / bandwidth seconds, in slices
of at most 10 ms, in turns with messages to other ranks. Each slice is sent when its time comes, and
occupies its target's direction in for as long, from the same moment on or once that is free. The
message is delivered one latency after its last slice has ended. So a message that meets no other
takes latency + bytes / bandwidth, and flows that meet share the bandwidth.

On the wire a paced message begins with a stamp: the moment at which its last slice began, and the
seconds that the slice lasts. The earlier slices went ahead of it, as messages of a stamp alone.
Where the two ranks read different clocks, the moment says nothing to the receiver, and it counts a
slice from when it arrives.

Source: none; a link direction is a token bucket that saves no tokens.
Differs from TCP: a source never learns that a target's direction in is full, so its own direction
out is occupied earlier, though for no longer.
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
from planaria.transport.connection import (
    Channel,
    Connection,
    IncomingMessage,
    Tag,
    checked_header,
    header,
)
from planaria.transport.lanes import Clock, Lane, shared_clocks
from planaria.transport.timekeeping import Timekeeper
from planaria.transport.traffic import Traffic, Use

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 2.0
_STAMP: Final = struct.Struct("=dd")
_SLICE_TAG: Final = Tag(Channel.PACE, 0, 0)


@dataclass(frozen=True, slots=True)
class Pacing:
    """The modelled links of a node.

    Attributes:
        clocks_fd: descriptor from `node_clocks`, the same for all workers of the node.
        inter_node: a link direction of the node to or from other nodes.
        intra_node: a link direction of a rank to or from other ranks of its node.
        late_s_max: greatest lateness of this machine that is made up for (timekeeping.py).
    """

    clocks_fd: int
    devices_per_node: int
    inter_node: Link
    intra_node: Link
    late_s_max: float = 0.25


def node_clocks(devices_per_node: int) -> int:
    """The descriptor of the clocks of a node's link directions, which its workers inherit."""
    return shared_clocks(2 * (1 + devices_per_node))


class OutgoingMessage(NamedTuple):
    """A message that is to be sent.

    Attributes:
        views: the payload.
        virtual_bytes: number of bytes that the message stands for on paced links.
    """

    epoch: int
    tag: Tag
    views: Sequence[memoryview]
    virtual_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.views))

    def parts(self, *, is_checked: bool) -> list[memoryview]:
        """The header and the payload; with checksums if the link is checked."""
        if is_checked:
            head = checked_header(self.epoch, self.tag, self.views)
        else:
            head = header(self.epoch, self.tag, self.num_bytes)
        return [memoryview(head), *self.views]


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """The parts of a rank's links that a `Pacer` calls.

    Attributes:
        lock: guards the links.
        check: raises a PeerLostError if no link to a peer is up or being made.
        transmit: writes to a peer; raises as `check` does.
        deliver: takes a message that has arrived, and the moment at which it was due; 0.0: none.
        fail: takes the error of which a thread dies.
        traffic: record of the messages that leave and arrive.
    """

    lock: "threading.RLock"
    check: Callable[[int], object]
    transmit: Callable[[int, OutgoingMessage], None]
    deliver: Callable[[Connection, IncomingMessage, float], None]
    fail: Callable[[Exception], None]
    traffic: Traffic


class Unpaced:
    """Sends and delivers messages without delay, under the interface of `Pacer`."""

    def __init__(self, callbacks: LinkCallbacks) -> None:
        self._callbacks = callbacks
        self.timekeeper = Timekeeper()

    def send(self, peer: int, message: OutgoingMessage) -> None:
        """Sends a message at once."""
        start_s, traffic = time.monotonic(), self._callbacks.traffic
        end_s = start_s + traffic.seconds(message.num_bytes)
        traffic.note(Use(True, peer, message.tag, start_s, end_s))
        self._callbacks.transmit(peer, message)

    def receive(self, connection: Connection, message: IncomingMessage) -> None:
        """Delivers a message that has come."""
        end_s, traffic = time.monotonic(), self._callbacks.traffic
        start_s = end_s - traffic.seconds(len(message.payload))
        traffic.note(Use(False, connection.peer, message.tag, start_s, end_s))
        self._callbacks.deliver(connection, message, 0.0)

    def deliver_arrived(self, connection: Connection) -> None:
        """Does nothing: no message of a connection waits."""

    def forget(self, peer: int) -> None:
        """Does nothing: no message to a peer waits."""

    def close(self) -> None:
        """Does nothing: there is no thread to end."""


class Pacer:
    """Paces the messages that a rank sends and receives; a thread handles those that have to wait.

    Attributes:
        timekeeper: time of the work of the threads that send and receive.
    """

    def __init__(self, rank: int, pacing: Pacing, callbacks: LinkCallbacks) -> None:
        self.timekeeper = Timekeeper(pacing.late_s_max)
        self._pacing = pacing
        self._node, device = divmod(rank, pacing.devices_per_node)
        self._callbacks = callbacks
        # The first clocks of two directions (out, in): between nodes, and within this node.
        indices = (0, 2 * (1 + device))
        clocks = [(Clock(pacing.clocks_fd, i), Clock(pacing.clocks_fd, i + 1)) for i in indices]
        self._links = (pacing.inter_node, pacing.intra_node)
        self._lanes_out: list[Lane[int, OutgoingMessage]] = [Lane(out.reserve) for out, _ in clocks]
        self._lanes_in: list[Lane[Connection, IncomingMessage]] = [
            Lane(into.reserve) for _, into in clocks
        ]
        self._arriving: list[
            tuple[float, int, Connection, IncomingMessage]
        ] = []  # A heap by moment due.
        # By flow, the seconds that the slices of its unfinished message have taken so far.
        self._sliced_s: defaultdict[int | Connection, float] = defaultdict(float)
        self._order = count()
        self._changed = threading.Condition(callbacks.lock)
        self._wakes_s = -math.inf
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pacing", daemon=True)
        self._thread.start()

    def send(self, peer: int, message: OutgoingMessage) -> None:
        """Queues a message, whose slices are sent as their times come; never blocks.

        Raises:
            PeerLostError: no link to the peer is up or being made.
        """
        self._callbacks.check(peer)
        kind = self._kind(peer)
        lasts_s = message.virtual_bytes / self._links[kind].bandwidth_bytes_per_s
        with self._changed:
            self._lanes_out[kind].put(
                peer, message, ready_s=self.timekeeper.now_s(), lasts_s=lasts_s
            )
            self._advance()

    def receive(self, connection: Connection, message: IncomingMessage) -> None:
        """Queues a slice that has come over a connection; it begins with a stamp."""
        start_s, lasts_s = _STAMP.unpack_from(message.payload.data)
        if not connection.has_own_clock:
            start_s = time.monotonic()
        is_last_slice = message.tag.channel is not Channel.PACE
        content = (
            message._replace(payload=message.payload[_STAMP.size :]) if is_last_slice else None
        )
        with self._changed:
            lane = self._lanes_in[self._kind(connection.peer)]
            lane.put(connection, content, ready_s=start_s, lasts_s=lasts_s)
            self._advance()

    def deliver_arrived(self, connection: Connection) -> None:
        """Delivers at once all messages that came completely over a connection that is over."""
        with self._changed:
            self._sliced_s.pop(connection, None)
            waiting = [message for lane in self._lanes_in for message in lane.drop(connection)]
            own = sorted(entry for entry in self._arriving if entry[2] is connection)
            self._arriving = [entry for entry in self._arriving if entry[2] is not connection]
            heapq.heapify(self._arriving)
            for message in [*(entry[3] for entry in own), *waiting]:
                self._callbacks.deliver(connection, message, 0.0)

    def forget(self, peer: int) -> None:
        """Drops the messages that still wait to be sent to a peer."""
        with self._changed:
            self._sliced_s.pop(peer, None)
            for lane in self._lanes_out:
                lane.drop(peer)

    def close(self) -> None:
        """Ends the thread; messages that still wait to be sent are sent at once."""
        with self._changed:
            self._is_closed = True
            for lane in self._lanes_out:
                for peer, message in lane.drop_all():
                    self._write(peer, message, start_s=time.monotonic(), lasts_s=0.0)
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
            # A bug of planaria. Unless a thread that waits raises it, all ranks wait in vain.
            logger.exception("the thread that paces the links died")
            self._callbacks.fail(error)

    def _next_s(self) -> float:
        out_s = min(lane.next_s for lane in self._lanes_out)
        into_s = min(lane.next_s for lane in self._lanes_in)
        return min(out_s, into_s, self._arriving[0][0] if self._arriving else math.inf)

    def _advance(self) -> None:
        """Sends the slices and delivers the messages that are due; has the thread do the next."""
        now_s = time.monotonic()
        for out in self._lanes_out:
            for peer, leaving, start_s, lasts_s in out.due_slices(now_s):
                self._write(peer, leaving, start_s=start_s, lasts_s=lasts_s)
                self._sliced_s[peer] += lasts_s
                if leaving is not None:
                    self._note(True, peer, peer, leaving.tag, end_s=start_s + lasts_s)
        for link, into in zip(self._links, self._lanes_in, strict=True):
            for connection, arrived, start_s, lasts_s in into.due_slices(now_s):
                self._sliced_s[connection] += lasts_s
                if arrived is not None:
                    peer, end_s = connection.peer, start_s + lasts_s
                    self._note(False, connection, peer, arrived.tag, end_s=end_s)
                    due_s = end_s + link.latency_s
                    heapq.heappush(self._arriving, (due_s, next(self._order), connection, arrived))
        while self._arriving and self._arriving[0][0] <= now_s:
            due_s, _, connection, arrived = heapq.heappop(self._arriving)
            self._callbacks.deliver(connection, arrived, due_s)
        if self._next_s() < self._wakes_s:
            self._changed.notify()

    def _note(
        self, is_out: bool, flow: int | Connection, peer: int, tag: Tag, *, end_s: float
    ) -> None:
        """Records a message of training whose last slice ends at `end_s`."""
        start_s = end_s - self._sliced_s.pop(flow, 0.0)
        self._callbacks.traffic.note(Use(is_out, peer, tag, start_s, end_s))

    def _write(
        self, peer: int, message: OutgoingMessage | None, *, start_s: float, lasts_s: float
    ) -> None:
        stamp = memoryview(_STAMP.pack(start_s, lasts_s))
        if message is None:
            message = OutgoingMessage(0, _SLICE_TAG, (), 0)
        stamped = message._replace(views=(stamp, *message.views))
        with contextlib.suppress(PeerLostError):  # `send` has checked; the peer was lost since.
            self._callbacks.transmit(peer, stamped)
