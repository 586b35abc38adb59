"""Tagged, abortable point-to-point links between ranks over TCP.

`Links` holds a rank's connections to its peers. `send` never blocks: what the kernel does not
take at once is queued, and one thread per process writes it out. The same thread reads: a
message is a header (epoch, tag, length) and raw bytes, and waits in an inbox under (peer,
epoch, tag) until `receive` takes it. `abort` frees every blocked receive at once and keeps the
connections: messages of an older epoch are dropped on arrival, so a link needs no restart to
enter the next epoch. A link belongs to one worker: where a rank comes back with another address,
the old link is closed, at both ends, and what it still brings is dropped with it.

Differs from Gloo, which cannot be aborted and then sits in its timeout (10 s, measured).
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.errors import AbortedError, AuthenticationError, PeerLostError
from planaria.transport.connection import (
    Address,
    Channel,
    Connection,
    Received,
    Tag,
    connecting_socket,
    header,
)

__all__ = ["Address", "Buffer", "Channel", "Links", "Tag"]

logger = logging.getLogger(__name__)

Buffer = npt.NDArray[Any]

_READ_AND_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE
_CLOSE_TIMEOUT_S = 2.0
_NEVER = 1 << 62  # An epoch that no job reaches.


class Links:
    """A rank's links to its peers.

    Attributes:
        address: where this rank accepts links.
        sent_bytes, received_bytes: payload, by channel.
        state_bytes: payload of state received, by epoch.
    """

    def __init__(self, rank: int, *, token: bytes, host: str = "127.0.0.1") -> None:
        self.rank = rank
        self.epoch = 0
        self.sent_bytes: Counter[Channel] = Counter()
        self.received_bytes: Counter[Channel] = Counter()
        self.state_bytes: Counter[int] = Counter()
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()[:2]
        # Guards all that follows up to the queues, which threads hand over by wake-ups.
        self._changed = threading.Condition()
        self._inbox: dict[tuple[int, int, Tag], npt.NDArray[np.uint8]] = {}
        self._peers: dict[int, Connection] = {}
        self._calling: dict[int, Connection] = {}
        self._lost: dict[int, str] = {}
        self._first_epoch = 0
        self._abort_reason = ""
        self._failure: Exception | None = None
        self._closing = False
        self._new: deque[Connection] = deque()
        self._retired: deque[Connection] = deque()
        self._blocked: set[Connection] = set()
        self._unproven: set[Connection] = set()  # Of the serving thread alone.
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    # -- what the rank calls -----------------------------------------------------------------

    def begin(
        self,
        epoch: int,
        *,
        addresses: Mapping[int, Address],
        peers: Collection[int],
        timeout_s: float,
    ) -> None:
        """Enters an epoch with links to `peers`; links that stand are kept.

        The lower rank of a pair connects, the higher one accepts.

        Args:
            addresses: of all ranks of the epoch. An older link to a rank that is not among them,
                or now listens elsewhere, is closed.

        Raises:
            PeerLostError: a peer could not be reached within timeout_s.
            AbortedError: the epoch was aborted, maybe before it began.
        """
        assert self.rank not in peers
        assert not self._closing
        assert epoch >= self.epoch, (epoch, self.epoch)
        with self._changed:
            self._check_epoch(epoch)
            self.epoch = epoch
            self._lost.clear()
            self._inbox = {key: value for key, value in self._inbox.items() if key[1] >= epoch}
            self._retire({rank: address[1] for rank, address in addresses.items()})
            missing = [p for p in peers if p > self.rank and not self._has(p, addresses[p])]
            # Whoever still waits in an older epoch is freed, also if abort came just before.
            self._changed.notify_all()
        for peer in sorted(set(missing) - self._calling.keys()):
            self._call(peer, addresses[peer])

        def is_linked() -> bool:
            return all(self._has(peer, addresses[peer]) for peer in peers)

        with self._changed:
            self._wait(is_linked, epoch=epoch, peers=peers, timeout_s=timeout_s)
            for peer in peers:
                self._peers[peer].is_used = True

    def send(self, peer: int, tag: Tag, *buffers: Buffer) -> None:
        """Sends contiguous arrays as one message; never blocks. They must not change until the
        peer has them.

        Raises:
            PeerLostError: there is no link to the peer, or not any more.
        """
        connection = self._peers.get(peer)
        if connection is None:
            self._check_alive()
            raise PeerLostError(peer, self._lost.get(peer, "no link"))
        views = [array.reshape(-1).view(np.uint8).data for array in buffers if array.size]
        num_bytes = sum(len(view) for view in views)
        self.sent_bytes[tag.channel] += num_bytes
        message = [memoryview(header(self.epoch, tag, num_bytes)), *views]
        with connection.lock:
            try:
                is_done = connection.append(message)
            except OSError:
                is_done = True  # The reader thread sees the same error and reports the loss.
        if not is_done:
            self._blocked.add(connection)
            self._wake()

    def receive(self, peer: int, tag: Tag, *, timeout_s: float) -> npt.NDArray[np.uint8]:
        """The bytes that the peer sent under the tag in this epoch; blocks until they are here.

        What arrived before the peer was lost or the epoch aborted can still be taken.

        Raises:
            PeerLostError: the link broke, or nothing came within timeout_s.
            AbortedError: `abort` was called, or another thread began a newer epoch.
        """
        with self._changed:
            epoch = self.epoch
            key = (peer, epoch, tag)
            self._wait(lambda: key in self._inbox, epoch=epoch, peers=(peer,), timeout_s=timeout_s)
            return self._inbox.pop(key)

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
        """Writes out what is queued as far as the kernel takes it now, then closes every socket;
        nothing if closed already."""
        self.abort("links closed", first_epoch=_NEVER)
        self._closing = True
        self._wake()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("rank %s: the links' thread did not end", self.rank)
            return
        with self._changed:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    # -- helpers ------------------------------------------------------------------------------

    def _has(self, peer: int, address: Address) -> bool:
        """A link to this very worker stands. The condition must be held."""
        connection = self._peers.get(peer)
        return connection is not None and connection.port == address[1]

    def _retire(self, ports: Mapping[int, int]) -> None:
        """Takes links out of use whose peer is gone or listens elsewhere by now.

        One that no epoch has used yet may belong to an epoch after this one, so it stays.
        """
        for links in (self._peers, self._calling):
            for rank, connection in list(links.items()):
                is_old = connection.is_used or connection.target >= 0
                if is_old and ports.get(rank) != connection.port:
                    del links[rank]
                    self._retired.append(connection)
        self._wake()

    def _wait(
        self, condition: Callable[[], bool], *, epoch: int, peers: Collection[int], timeout_s: float
    ) -> None:
        """Returns once the condition is true, which counts even where all else is lost; the
        condition variable must be held."""

        def has_ended() -> bool:
            return bool(self._failure) or epoch < max(self._first_epoch, self.epoch)

        def is_over() -> bool:
            return condition() or has_ended() or not self._lost.keys().isdisjoint(peers)

        self._changed.wait_for(is_over, timeout=timeout_s)
        if condition():
            return
        self._check_alive()
        self._check_epoch(epoch)
        for peer in peers:
            if peer in self._lost:
                raise PeerLostError(peer, self._lost[peer])
        silent = [peer for peer in peers if peer not in self._peers] or list(peers)
        raise PeerLostError(min(silent), f"nothing came for {timeout_s:.1f} s")

    def _check_epoch(self, epoch: int) -> None:
        """Raises if the epoch is over. The condition must be held."""
        if epoch >= max(self._first_epoch, self.epoch):
            return
        reason = f"epoch {self.epoch} has begun"
        if epoch < self._first_epoch:
            reason = self._abort_reason
        raise AbortedError(f"rank {self.rank}, epoch {epoch}: {reason}")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise AssertionError("the thread that serves the links died") from self._failure

    def _call(self, peer: int, address: Address) -> None:
        try:
            sock = connecting_socket(address)
        except OSError as error:
            raise PeerLostError(peer, f"{address[0]}:{address[1]}: {error}") from error
        with self._changed:
            self._calling[peer] = self._adopt(sock, target=peer, port=address[1])

    def _adopt(self, sock: socket.socket, *, target: int, port: int) -> Connection:
        identity = (self.rank, self.address[1])
        connection = Connection(
            sock, token=self._token, identity=identity, target=target, port=port
        )
        self._new.append(connection)
        self._wake()
        return connection

    def _wake(self) -> None:
        with self._changed:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # -- the thread that reads, and writes what send could not ---------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # Our mistake. Unless it is raised where somebody waits, all ranks wait in vain.
            logger.exception("rank %s: the thread that serves the links died", self.rank)
            with self._changed:
                self._failure = error
                self._peers.clear()  # So that send finds the failure too.
                self._changed.notify_all()
        finally:
            self._close_all()

    def _turn(self) -> None:
        """Serves what is ready, then does what other threads asked for."""
        for key, events in self._selector.select(self._patience_s()):
            if key.fileobj == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._serve(key.data, events)
        while self._new:
            connection = self._new.popleft()
            self._unproven.add(connection)
            self._selector.register(connection.sock, _READ_AND_WRITE, connection)
        while self._retired:
            self._drop(self._retired.popleft(), "an older epoch's")
        while self._blocked:
            self._watch(self._blocked.pop(), _READ_AND_WRITE)
        for connection in [c for c in self._unproven if c.deadline_s <= time.monotonic()]:
            self._drop(connection, "no handshake")

    def _patience_s(self) -> float | None:
        """How long to wait at most for anything to happen."""
        if not self._unproven:
            return None
        return max(0.0, min(c.deadline_s for c in self._unproven) - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            logger.warning("rank %s: a link was not accepted: %s", self.rank, error)
            return
        self._adopt(sock, target=-1, port=0)

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.sock.fileno() >= 0:
            self._selector.modify(connection.sock, events, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for message in connection.read():
                    if message is None:
                        self._welcome(connection)
                    else:
                        self._deliver(connection, message)
            with connection.lock:
                is_done = connection.flush()
                self._watch(connection, selectors.EVENT_READ if is_done else _READ_AND_WRITE)
        except (OSError, AuthenticationError) as error:
            self._drop(connection, str(error))

    def _welcome(self, connection: Connection) -> None:
        """The handshake is over: the connection is the link to its peer."""
        self._unproven.discard(connection)
        with self._changed:
            self._calling.pop(connection.peer, None)
            older = self._peers.get(connection.peer)
            self._peers[connection.peer] = connection
            if older is not None:
                # The peer's worker was forked anew.
                self._retired.append(older)
                if older.is_used:  # This epoch knows another one.
                    self._lost[connection.peer] = "it came back on a new link"
            self._changed.notify_all()

    def _deliver(self, connection: Connection, message: Received) -> None:
        self.received_bytes[message.tag.channel] += len(message.payload)
        if message.tag.channel is Channel.STATE:
            self.state_bytes[message.epoch] += len(message.payload)
        with self._changed:
            is_current = self._peers.get(connection.peer) is connection
            if message.epoch >= self.epoch and is_current:
                self._inbox[connection.peer, message.epoch, message.tag] = message.payload
                self._changed.notify_all()

    def _drop(self, connection: Connection, reason: str) -> None:
        if connection.sock.fileno() < 0:
            return
        self._selector.unregister(connection.sock)
        self._unproven.discard(connection)
        with self._changed:
            for links in (self._peers, self._calling):
                for rank in [r for r, link in links.items() if link is connection]:
                    del links[rank]
                    self._lost[rank] = reason
            self._changed.notify_all()
        connection.close()
        if connection.peer < 0:
            logger.warning("rank %s: gave up a link: %s", self.rank, reason)

    def _close_all(self) -> None:
        connections = {key.data for key in self._selector.get_map().values() if key.data}
        for connection in connections | set(self._new):
            with contextlib.suppress(OSError), connection.lock:
                connection.flush()
            connection.close()
        self._listener.close()
        self._selector.close()
        with self._changed:
            self._lost.update(dict.fromkeys(self._peers, "links closed"))
            self._peers.clear()
