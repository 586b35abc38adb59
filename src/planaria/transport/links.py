"""Tagged, abortable point-to-point links between ranks over TCP.

`Links` holds a rank's connections to its peers. `send` never blocks: what the kernel does not
take at once is queued, and one thread per process writes it out (serving.py); what is for a peer
whose link is being made goes out when it stands. The same thread reads: a message is a header
(epoch, tag, length) and raw bytes, and waits in an inbox under (peer, epoch, tag) until `receive`
takes it. `abort` frees every blocked receive at once and keeps the connections: messages of an
older epoch are dropped on arrival, so a link needs no restart to enter the next epoch. A link
belongs to one worker: where a rank comes back with another address, the old link is closed, at
both ends, and what it still brings is dropped with it. Where a link breaks whose peer may not have
entered the epoch yet, the epoch is over: the peer would wait for what was lost with the link.

Differs from Gloo, which cannot be aborted and then sits in its timeout (10 s, measured).
"""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from planaria.errors import AbortedError, PeerLostError
from planaria.transport.connection import (
    Address,
    Channel,
    Connection,
    OwnEnd,
    Received,
    Tag,
    connecting_socket,
)
from planaria.transport.pacing import Ends, Leaving, Pacer, Pacing, Unpaced
from planaria.transport.serving import Handlers, Server
from planaria.transport.traffic import Traffic

__all__ = ["Address", "Buffer", "Channel", "Links", "Tag"]

logger = logging.getLogger(__name__)

Buffer = npt.NDArray[Any]

# Of waits that a lost link or an abort ends, and no clock: a peer may load its layers for hours.
# The kernel finds out a machine that is gone (connection.py), the coordinator who stands still.
PATIENT_S: Final = threading.TIMEOUT_MAX

_NEVER = 1 << 62  # An epoch that no job reaches.
_TELLS_S: Final = 600.0  # After so long, and whenever that has doubled, a wait is told of.


class Links:
    """A rank's links to its peers.

    Args:
        pacing: the links on which messages are to take as long; None: they take what they take.

    Attributes:
        address: where this rank accepts links.
        sent_bytes, received_bytes: payload, by channel; state_bytes: of state received, by epoch.
        linked_s: by the monotonic clock, when the epoch's last link stood; 0.0 before.
        cuts: what this rank is cut off from.
        timekeeper: the time of threads that send and receive.
        traffic: what takes the ways to and from other nodes.
    """

    def __init__(
        self, rank: int, *, token: bytes, host: str = "127.0.0.1", pacing: Pacing | None = None
    ) -> None:
        self.rank = rank
        self.epoch = 0
        self.sent_bytes: Counter[Channel] = Counter()
        self.received_bytes: Counter[Channel] = Counter()
        self.state_bytes: Counter[int] = Counter()
        self.linked_s = 0.0
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()[:2]
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # Guards all that follows.
        self._inbox = Inbox()
        self._own = OwnEnd(token, (rank, self.address[1]), self._inbox.placed)
        self._peers: dict[int, Connection] = {}
        self._calling: dict[int, Connection] = {}
        self._lost: dict[int, str] = {}
        self._ports: dict[int, int] = {}  # Of the epoch's peers.
        self._awaited: set[int] = set()  # Those of them to whom no link stands.
        self._heard: set[int] = set()  # Those who are in the epoch, as what they sent shows.
        self._early: dict[int, list[list[memoryview]]] = {}  # Messages for links to come.
        self._first_epoch = 0
        self._abort_reason = ""
        self._failure: Exception | None = None
        self.traffic = Traffic()
        flow = Ends(lock, self._way, self._transmit, self._put, self._fail, self.traffic)
        self._flow = Pacer(rank, pacing, flow) if pacing else Unpaced(flow)
        self.timekeeper = self._flow.timekeeper
        self._server = Server(
            rank,
            self._listener,
            Handlers(
                accept=lambda s: self._server.add(Connection(s, self._own, target=-1, port=0)),
                welcome=self._welcome,
                deliver=self._flow.receive,
                lose=self._lose,
                fail=self._fail,
                end=self._end,
            ),
        )
        self.cuts = self._server.cuts
        self._server.start()

    # -- what the rank calls -----------------------------------------------------------------

    def begin(
        self,
        epoch: int,
        *,
        addresses: Mapping[int, Address],
        peers: Collection[int],
        timeout_s: float,
    ) -> None:
        """Enters an epoch and waits for its links: `enter`, then `wait_linked`."""
        self.enter(epoch, addresses=addresses, peers=peers)
        self.wait_linked(timeout_s=timeout_s)

    def enter(
        self, epoch: int, *, addresses: Mapping[int, Address], peers: Collection[int]
    ) -> None:
        """Enters an epoch, whose links to `peers` are on their way; links that stand are kept.

        The lower rank of a pair connects, the higher one accepts.

        Args:
            addresses: of all ranks of the epoch. An older link to a rank that is not among them,
                or now listens elsewhere, is closed.

        Raises:
            PeerLostError: a peer cannot be reached.
            AbortedError: the epoch was aborted before it began.
        """
        assert self.rank not in peers
        assert epoch >= self.epoch, (epoch, self.epoch)
        with self._changed:
            self._check_epoch(epoch)
            standing = tuple(self._peers.values())
            self.epoch = epoch
            self.linked_s = 0.0
            self._lost.clear()
            self._early.clear()
            self._heard = self._inbox.begin(epoch)
            self._retire({rank: address[1] for rank, address in addresses.items()})
            self._ports = {peer: addresses[peer][1] for peer in peers}
            self._awaited = set()
            self._note_links(peers)
            for peer in self._ports.keys() - self._awaited:
                self._peers[peer].is_used = True
            missing = {peer for peer in self._awaited if peer > self.rank}
            self._changed.notify_all()  # Frees whoever still waits in an older epoch.
        for connection in standing:  # Outside of the condition, which its thread may wait for.
            connection.displace()
        for peer in sorted(missing - self._calling.keys()):
            self._call(peer, addresses[peer])

    def wait_linked(self, *, timeout_s: float) -> None:
        """Blocks until the links to all peers of the epoch stand.

        Raises:
            PeerLostError: a peer could not be reached within timeout_s.
            AbortedError: the epoch was aborted.
        """
        with self._changed:
            epoch, peers = self.epoch, self._ports.keys()
            self._wait(lambda: not self._awaited, epoch=epoch, peers=peers, timeout_s=timeout_s)

    def send(self, peer: int, tag: Tag, *buffers: Buffer, virtual_bytes: int = 0) -> None:
        """Sends contiguous arrays as one message; never blocks. They must not change until the
        peer has them.

        Args:
            virtual_bytes: what the message counts as where links are paced; 0: what it is.

        Raises:
            PeerLostError: there is no link to the peer, or not any more, and none on its way.
        """
        views = [array.reshape(-1).view(np.uint8).data for array in buffers if array.size]
        num_bytes = sum(len(view) for view in views)
        self._flow.send(peer, Leaving(self.epoch, tag, views, virtual_bytes or num_bytes))
        self.sent_bytes[tag.channel] += num_bytes

    def receive(self, peer: int, tag: Tag, *, timeout_s: float) -> npt.NDArray[np.uint8]:
        """The bytes that the peer sent under the tag in this epoch; blocks until they are here.

        What arrived before the peer was lost or the epoch aborted can still be taken.

        Raises:
            PeerLostError: the link broke, or nothing came within timeout_s.
            AbortedError: `abort` was called, or another thread began a newer epoch.
        """
        return self.receive_any({peer: tag}, timeout_s=timeout_s)[1]

    def receive_any(
        self, wanted: Mapping[int, Tag], *, timeout_s: float
    ) -> tuple[int, npt.NDArray[np.uint8]]:
        """Of the messages wanted, one by peer, the first that is here; as `receive` does.

        Returns:
            the peer, and the bytes that it sent.
        """
        with self._changed:
            epoch = self.epoch
            self._wait(lambda: self.has_any(wanted), epoch=epoch, peers=wanted, timeout_s=timeout_s)
            found = self._inbox.first(wanted, epoch)
            assert found is not None
            payload, due_s = self._inbox.take(found[0], epoch, found[1])
            self.timekeeper.reach(due_s)
            return found[0], payload

    def has_any(self, wanted: Mapping[int, Tag]) -> bool:
        """Whether one of these messages, by peer, is here."""
        return self._inbox.first(wanted, self.epoch) is not None

    def place(self, peer: int, tag: Tag, memory: npt.NDArray[np.uint8]) -> None:
        """Has a message of this epoch arrive in this memory, if it has not begun to arrive, and has
        as many bytes. Nothing gets there once a newer epoch has begun."""
        self._inbox.place(peer, self.epoch, tag, memory)

    def abort(self, reason: str, *, first_epoch: int) -> None:
        """Frees every blocked operation of epochs before this one; none of them begins again."""
        with self._changed:
            if first_epoch > self._first_epoch:
                self._first_epoch = first_epoch
                self._abort_reason = reason
            self._changed.notify_all()

    def check_epoch(self) -> None:
        """Raises an AbortedError if the epoch has been aborted."""
        with self._changed:
            self._check_epoch(self.epoch)

    def close(self) -> None:
        """Writes out what the kernel takes now, then closes every socket; nothing if closed."""
        self.abort("links closed", first_epoch=_NEVER)
        self._flow.close()
        self._server.close()

    # -- helpers ------------------------------------------------------------------------------

    def _transmit(self, peer: int, message: list[memoryview]) -> None:
        """Writes what the kernel takes of a message at once, and has the rest written."""
        connection = self._link(peer)
        if connection is None:
            with self._changed:
                connection = self._way(peer)
                if connection is None:
                    self._early.setdefault(peer, []).append(message)
                    return
        is_done = True
        with connection.lock, suppress(OSError):  # The reader sees it, too, and tells of the loss.
            is_done = connection.append(message)
        if not is_done:
            self._server.write(connection)

    def _way(self, peer: int) -> Connection | None:
        """The link to the peer, None if it is on its way.

        Raises:
            PeerLostError: as `send`.
        """
        with self._changed:
            connection = self._link(peer)
            if connection is None:
                self._check_alive()
                if peer not in self._ports or peer in self._lost:
                    raise PeerLostError(peer, self._lost.get(peer, "no link"))
            return connection

    def _link(self, peer: int) -> Connection | None:
        """The link to the peer, unless it is to another worker than the epoch's."""
        connection = self._peers.get(peer)
        if connection is None or self._ports.get(peer, connection.port) != connection.port:
            return None
        return connection

    def _note_links(self, peers: Iterable[int]) -> None:
        """Links to these have come or gone. The condition must be held."""
        self._awaited.difference_update(peers)
        self._awaited.update(p for p in self._ports.keys() & peers if self._link(p) is None)
        if not self.linked_s and not self._awaited:
            self.linked_s = time.monotonic()

    def _retire(self, ports: Mapping[int, int]) -> None:
        """Takes links out of use whose peer is gone or listens elsewhere by now, but for those that
        no epoch has used yet: they may belong to a later one."""
        for links in (self._peers, self._calling):
            for rank, connection in list(links.items()):
                is_old = connection.is_used or connection.target >= 0
                if is_old and ports.get(rank) != connection.port:
                    del links[rank]
                    self._flow.forget(rank)
                    self._server.retire(connection)

    def _wait(
        self, condition: Callable[[], bool], *, epoch: int, peers: Collection[int], timeout_s: float
    ) -> None:
        """Returns once the condition is true, which counts even where all else is lost; the
        condition variable must be held."""

        def lost() -> list[int]:
            unheard = self._ports.keys() - self._heard
            return [peer for peer in self._lost if peer in peers or peer in unheard]

        def is_over() -> bool:
            has_ended = bool(self._failure) or epoch < max(self._first_epoch, self.epoch)
            return condition() or has_ended or bool(self._lost and lost())

        begin_s = time.monotonic()
        waits_s = min(timeout_s, _TELLS_S)
        while not self._changed.wait_for(is_over, timeout=begin_s + waits_s - time.monotonic()):
            if waits_s >= timeout_s:
                break
            waited_s = time.monotonic() - begin_s
            text = "rank %s has waited for ranks %s for %.0f s; they are not lost, so it goes on"
            logger.warning(text, self.rank, sorted(peers), waited_s)
            waits_s = min(timeout_s, 2 * waited_s)
        if condition():
            return
        self._check_alive()
        self._check_epoch(epoch)
        for peer in lost():
            raise PeerLostError(peer, self._lost[peer])
        silent = set(peers) - self._peers.keys() or peers
        raise PeerLostError(min(silent), f"nothing came for {timeout_s:.1f} s")

    def _check_epoch(self, epoch: int) -> None:
        """Raises if the epoch is over. The condition must be held."""
        if epoch >= max(self._first_epoch, self.epoch):
            return
        begun = f"epoch {self.epoch} has begun"
        reason = self._abort_reason if epoch < self._first_epoch else begun
        raise AbortedError(f"rank {self.rank}, epoch {epoch}: {reason}")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise AssertionError("the links' thread died") from self._failure

    def _call(self, peer: int, address: Address) -> None:
        sock = connecting_socket(peer, address)
        with self._changed:
            connection = Connection(sock, self._own, target=peer, port=address[1])
            self._calling[peer] = connection
            self._server.add(connection)

    # -- what the thread that serves the links tells --------------------------------------------

    def _welcome(self, connection: Connection) -> None:
        """The connection is the link to its peer; what is for the peer already goes out."""
        peer = connection.peer
        with self._changed:
            self._calling.pop(peer, None)
            older = self._peers.get(peer)
            with connection.lock:  # Which later messages wait for.
                self._peers[peer] = connection
                if self._ports.get(peer) == connection.port:
                    connection.is_used = True
                    for message in self._early.pop(peer, ()):
                        connection.append(message)
            if older is not None:
                older.displace()
                # The peer's worker was forked anew.
                self._server.retire(older)
                if older.is_used:  # This epoch knows another one.
                    self._lost[peer] = "it came back on a new link"
            self._note_links([peer])
            if peer in self._lost or not self._awaited:
                self._changed.notify_all()

    def _put(self, connection: Connection, message: Received, due_s: float) -> None:
        """A message has arrived: whoever waits for it finds it."""
        self.received_bytes[message.tag.channel] += len(message.payload)
        if message.tag.channel is Channel.STATE:
            self.state_bytes[message.epoch] += len(message.payload)
        with self._changed:
            is_current = self._peers.get(connection.peer) is connection
            if message.epoch >= self.epoch and is_current:
                if message.epoch == self.epoch:
                    self._heard.add(connection.peer)
                self._inbox.put(connection.peer, message, due_s)
                self._changed.notify_all()

    def _lose(self, connection: Connection, reason: str) -> None:
        with self._changed:
            self._flow.end(connection)
            for links in (self._peers, self._calling):
                for rank in [r for r, link in links.items() if link is connection]:
                    del links[rank]
                    self._lost[rank] = reason
                    self._flow.forget(rank)
                    self._note_links([rank])
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._peers.clear()  # So that send finds the failure too.
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._lost.update(dict.fromkeys((*self._peers, *self._ports), "links closed"))
            self._peers.clear()
            self._early.clear()


# -- what has arrived for a rank and was not taken yet, and memory for what is to arrive -----------

Payload = npt.NDArray[np.uint8]


class Inbox:
    """Messages by peer, epoch and tag. Whoever uses it sees to it that one thread at a time does;
    memory for them is given by one thread, and taken by another."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int, Tag], tuple[Payload, float]] = {}  # And when due.
        self._lock = threading.Lock()
        self._places: dict[tuple[int, int, Tag], Payload] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def begin(self, epoch: int) -> set[int]:
        """Drops what is of older epochs; the peers that have sent something of this one."""
        self._messages = {key: one for key, one in self._messages.items() if key[1] >= epoch}
        with self._lock:
            self._places.clear()
        return {peer for peer, of, _ in self._messages if of == epoch}

    def put(self, peer: int, message: Received, due_s: float) -> None:
        """A message has arrived."""
        self._messages[peer, message.epoch, message.tag] = message.payload, due_s

    def first(self, wanted: Mapping[int, Tag], epoch: int) -> tuple[int, Tag] | None:
        """Of the messages wanted, by peer, one that is here."""
        here = (want for want in wanted.items() if (want[0], epoch, want[1]) in self._messages)
        return next(here, None)

    def take(self, peer: int, epoch: int, tag: Tag) -> tuple[Payload, float]:
        """A message that is here, and when it is due; memory that it did not lie in is free."""
        with self._lock:
            self._places.pop((peer, epoch, tag), None)
        return self._messages.pop((peer, epoch, tag))

    def place(self, peer: int, epoch: int, tag: Tag, memory: Payload) -> None:
        """Memory for a message that may be about to arrive."""
        with self._lock:
            self._places[peer, epoch, tag] = memory

    def placed(self, peer: int, epoch: int, tag: Tag, num_bytes: int) -> Payload | None:
        """The memory for a message that begins to arrive, if it fills that."""
        with self._lock:
            memory = self._places.pop((peer, epoch, tag), None)
        return memory if memory is not None and len(memory) == num_bytes else None
