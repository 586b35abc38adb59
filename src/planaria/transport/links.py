"""Tagged, abortable point-to-point links between ranks over TCP.

`Links` holds a rank's connections to its peers. `send` never blocks: what the kernel does not
take at once is queued, and one thread per process writes it out. The same thread reads: a
message is a header (epoch, tag, length) and raw bytes, and waits in an inbox under (peer,
epoch, tag) until `receive` takes it. `abort` frees every blocked receive at once and keeps the
connections: messages of an older epoch are dropped on arrival, so a link needs no restart to
enter the next epoch.

Differs from Gloo, which cannot be aborted and then sits in its timeout (10 s, measured).
"""

import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Generator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planaria.errors import AbortedError, AuthenticationError, PeerLostError
from planaria.transport.frames import Role, handshake

logger = logging.getLogger(__name__)

Address = tuple[str, int]
Buffer = npt.NDArray[Any]

_HEADER = struct.Struct("!IBIIIQ")
_READ_BYTES_MAX = 1 << 22  # per wake-up and connection, so that no peer starves the others
_IOV_MAX = 64


class Channel(IntEnum):
    """What a message is for; the first part of its tag."""

    FORWARD = 1
    BACKWARD = 2
    SCATTER = 3
    GATHER = 4
    COMMIT = 5


class Tag(NamedTuple):
    """Names a message between two ranks: never used twice within an epoch."""

    channel: Channel
    iteration: int
    a: int
    b: int = 0


class _Connection:
    """One socket: what is to be written, and the message that is being read."""

    def __init__(
        self, sock: socket.socket, steps: Generator[tuple[bytes, int], bytes, int]
    ) -> None:
        self.sock = sock
        self.steps: Generator[tuple[bytes, int], bytes, int] | None = steps
        self.peer = -1
        self.lock = threading.Lock()
        self.unsent: deque[memoryview] = deque()
        hello, num_bytes = next(steps)
        self.unsent.append(memoryview(hello))
        self.expect(num_bytes)

    def expect(self, num_bytes: int) -> None:
        """Reads the next num_bytes as handshake or header."""
        self.head = bytearray(num_bytes)
        self.payload: npt.NDArray[np.uint8] | None = None
        self.view = memoryview(self.head)

    def flush(self) -> bool:
        """Writes what the kernel takes now; True if nothing is left. The lock must be held."""
        while self.unsent:
            views = [self.unsent[i] for i in range(min(len(self.unsent), _IOV_MAX))]
            try:
                sent = self.sock.sendmsg(views)
            except (BlockingIOError, InterruptedError):
                return False
            while sent:
                if sent < len(self.unsent[0]):
                    self.unsent[0] = self.unsent[0][sent:]
                    break
                sent -= len(self.unsent.popleft())
        return True


class Links:
    """A rank's links to its peers.

    Attributes:
        address: where this rank accepts links.
        sent_bytes, received_bytes: payload, by channel.
    """

    def __init__(self, rank: int, *, token: bytes, host: str = "127.0.0.1") -> None:
        self.rank = rank
        self.epoch = 0
        self.sent_bytes: Counter[Channel] = Counter()
        self.received_bytes: Counter[Channel] = Counter()
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()[:2]
        self._changed = threading.Condition()
        self._inbox: dict[tuple[int, int, Tag], npt.NDArray[np.uint8]] = {}
        self._peers: dict[int, _Connection] = {}
        self._lost: dict[int, str] = {}
        self._aborted = ""
        self._closing = False
        self._new: deque[_Connection] = deque()
        self._blocked: set[_Connection] = set()
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

        Raises:
            PeerLostError: a peer could not be reached within timeout_s.
        """
        assert self.rank not in peers
        with self._changed:
            self.epoch = epoch
            self._aborted = ""
            self._inbox = {key: value for key, value in self._inbox.items() if key[1] >= epoch}
            for peer in peers:
                self._lost.pop(peer, None)
            missing = [peer for peer in peers if peer > self.rank and peer not in self._peers]
        deadline_s = time.monotonic() + timeout_s
        for peer in sorted(missing):
            self._connect(peer, addresses[peer], timeout_s=deadline_s - time.monotonic())
        self._wait(
            lambda: all(peer in self._peers for peer in peers),
            peers=tuple(peers),
            timeout_s=max(0.0, deadline_s - time.monotonic()),
        )

    def send(self, peer: int, tag: Tag, *buffers: Buffer) -> None:
        """Sends contiguous arrays as one message; never blocks. They must not change until the
        peer has them."""
        connection = self._peers.get(peer)
        if connection is None:
            raise PeerLostError(peer, self._lost.get(peer, "no link"))
        views = [array.reshape(-1).view(np.uint8).data for array in buffers if array.size]
        num_bytes = sum(len(view) for view in views)
        header = _HEADER.pack(self.epoch, tag.channel, tag.iteration, tag.a, tag.b, num_bytes)
        self.sent_bytes[tag.channel] += num_bytes
        with connection.lock:
            waiting = bool(connection.unsent)
            connection.unsent.append(memoryview(header))
            connection.unsent.extend(views)
            try:
                done = waiting or connection.flush()
            except OSError:
                done = True  # The reader thread sees the same error and reports the loss.
        if not done:
            self._blocked.add(connection)
            self._wake()

    def receive(self, peer: int, tag: Tag, *, timeout_s: float) -> npt.NDArray[np.uint8]:
        """The bytes that the peer sent under the tag in this epoch; blocks until they are here.

        Raises:
            PeerLostError: the link broke, or nothing came within timeout_s.
            AbortedError: `abort` was called.
        """
        key = (peer, self.epoch, tag)
        self._wait(lambda: key in self._inbox, peers=(peer,), timeout_s=timeout_s)
        with self._changed:
            return self._inbox.pop(key)

    def abort(self, reason: str) -> None:
        """Frees every blocked operation of the epoch; `begin` starts the next."""
        with self._changed:
            self._aborted = reason
            self._changed.notify_all()

    def close(self) -> None:
        """Writes out what is queued as far as peers take it now, then closes every socket."""
        self.abort("links closed")
        self._closing = True
        self._wake()
        self._thread.join(timeout=10.0)

    # -- helpers ------------------------------------------------------------------------------

    def _wait(self, condition: Any, *, peers: tuple[int, ...], timeout_s: float) -> None:
        def is_over() -> bool:
            return bool(condition() or self._aborted or any(peer in self._lost for peer in peers))

        with self._changed:
            self._changed.wait_for(is_over, timeout=timeout_s)
            if condition():
                return
            if self._aborted:
                raise AbortedError(f"rank {self.rank}, epoch {self.epoch}: {self._aborted}")
            for peer in peers:
                if peer in self._lost:
                    raise PeerLostError(peer, self._lost[peer])
            silent = next((p for p in peers if p not in self._peers), peers[0] if peers else -1)
            raise PeerLostError(silent, f"nothing came for {timeout_s:.1f} s")

    def _connect(self, peer: int, address: Address, *, timeout_s: float) -> None:
        try:
            sock = socket.create_connection(address, timeout=max(timeout_s, 0.001))
        except OSError as error:
            raise PeerLostError(peer, f"{address[0]}:{address[1]}: {error}") from error
        self._adopt(sock, Role.CONNECT)

    def _adopt(self, sock: socket.socket, role: Role) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._new.append(_Connection(sock, handshake(self._token, role, identity=self.rank)))
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # -- the thread that reads, and writes what send could not ---------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                if key.fileobj == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data, events)
            self._register()
        for connection in {key.data for key in self._selector.get_map().values() if key.data}:
            with connection.lock:
                self._drop(connection, "links closed")
        self._listener.close()
        self._selector.close()
        os.close(self._wake_fd)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            logger.warning("rank %s: a link was not accepted: %s", self.rank, error)
            return
        self._adopt(sock, Role.ACCEPT)

    def _register(self) -> None:
        while self._new:
            connection = self._new.popleft()
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.register(connection.sock, both, connection)
        while self._blocked:
            connection = self._blocked.pop()
            if connection.sock.fileno() >= 0:
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(connection.sock, both, connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                with connection.lock:
                    if connection.flush():
                        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except (OSError, AuthenticationError) as error:
            self._drop(connection, str(error))

    def _read(self, connection: _Connection) -> None:
        taken = 0
        while taken < _READ_BYTES_MAX:
            try:
                count = connection.sock.recv_into(connection.view)
            except (BlockingIOError, InterruptedError):
                return
            if count == 0:
                raise ConnectionError("closed by peer")
            taken += count
            connection.view = connection.view[count:]
            while not connection.view:
                self._advance(connection)

    def _advance(self, connection: _Connection) -> None:
        """The bytes that the connection waited for are complete: what comes next."""
        if connection.steps is not None:
            self._step_handshake(connection)
            return
        epoch, channel, iteration, a, b, num_bytes = _HEADER.unpack(connection.head)
        if connection.payload is None and num_bytes:
            connection.payload = np.empty(num_bytes, dtype=np.uint8)
            connection.view = connection.payload.data
            return
        payload = connection.payload
        if payload is None:
            payload = np.empty(0, dtype=np.uint8)
        connection.expect(_HEADER.size)
        tag = Tag(Channel(channel), iteration, a, b)
        self.received_bytes[tag.channel] += len(payload)
        with self._changed:
            if epoch >= self.epoch:
                self._inbox[connection.peer, epoch, tag] = payload
                self._changed.notify_all()

    def _step_handshake(self, connection: _Connection) -> None:
        assert connection.steps is not None
        try:
            answer, num_bytes = connection.steps.send(bytes(connection.head))
        except StopIteration as end:
            connection.steps = None
            connection.peer = int(end.value)
            connection.expect(_HEADER.size)
            with self._changed:
                self._peers[connection.peer] = connection
                self._changed.notify_all()
            return
        connection.expect(num_bytes)
        with connection.lock:
            connection.unsent.append(memoryview(answer))
            if not connection.flush():
                self._blocked.add(connection)

    def _drop(self, connection: _Connection, reason: str) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.peer < 0:
            logger.warning("rank %s: refused a link: %s", self.rank, reason)
            return
        with self._changed:
            if self._peers.get(connection.peer) is connection:
                del self._peers[connection.peer]
                self._lost[connection.peer] = reason
            self._changed.notify_all()
