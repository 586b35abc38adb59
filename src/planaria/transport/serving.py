"""The one thread of a rank that reads from its links, and writes what could not go out at once.

What it finds it tells the functions of `Handlers`, on this thread: they note it and return. Other
threads hand it connections, each through a queue and a wake-up.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from planaria.errors import AuthenticationError
from planaria.transport.connection import Connection, Received
from planaria.transport.cuts import READ_AND_WRITE, Cuts

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S: Final = 0.05
_CLOSE_TIMEOUT_S: Final = 2.0
_QUIET_S: Final = 10.0  # Without a call that was not accepted, before the next one is told.


@dataclass(frozen=True, slots=True)
class Handlers:
    """What happens on links, and who is told.

    Attributes:
        accept: somebody connects; gives the connection to `Server.add`.
        welcome: the handshake is over.
        deliver: a message has arrived.
        lose: a connection is over, and will be closed; the reason.
        fail: the thread dies of a mistake.
        end: the thread is over, and all connections are closed.
    """

    accept: Callable[[socket.socket], None]
    welcome: Callable[[Connection], None]
    deliver: Callable[[Connection, Received], None]
    lose: Callable[[Connection, str], None]
    fail: Callable[[Exception], None]
    end: Callable[[], None]


class Server:
    """The thread, from its start until `close`.

    Attributes:
        cuts: who is neither read nor written for now.
    """

    def __init__(self, rank: int, listener: socket.socket, handlers: Handlers) -> None:
        self._rank = rank
        self._listener = listener
        self._handlers = handlers
        self._closing = False
        self._new: deque[Connection] = deque()
        self._retired: deque[Connection] = deque()
        self._blocked: set[Connection] = set()
        self._unproven: set[Connection] = set()  # Of the thread alone, as what follows.
        self._is_heard = True  # Who calls.
        self._paused_end_s = 0.0  # Until when no link is accepted; 0.0: links are.
        self._quiet_end_s = 0.0  # Until when it is not told again that a link is not accepted.
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()  # Against a wake-up of a descriptor that is closed.
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.cuts = Cuts(self._selector, wake=self._wake)
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def add(self, connection: Connection) -> None:
        """Serves a connection from now on."""
        self._new.append(connection)
        self._wake()

    def retire(self, connection: Connection) -> None:
        """Closes a connection that nobody uses any more."""
        self._retired.append(connection)
        self._wake()

    def write(self, connection: Connection) -> None:
        """Writes what is queued on a connection whenever the kernel takes some."""
        self._blocked.add(connection)
        self._wake()

    def close(self) -> None:
        """Writes out what the kernel takes now, then closes every socket; nothing if closed."""
        self._closing = True
        self._wake()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("rank %s: the links' thread did not end", self._rank)
            return
        with self._waking:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _wake(self) -> None:
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # Our mistake. Unless it is raised where somebody waits, all ranks wait in vain.
            logger.exception("rank %s: the thread that serves the links died", self._rank)
            self._handlers.fail(error)
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
            self._selector.register(connection.sock, READ_AND_WRITE, connection)
        while self._retired:
            self._drop(self._retired.popleft(), "an older epoch's")
        while self._blocked:
            self._watch(self._blocked.pop(), READ_AND_WRITE)
        for connection in [c for c in self._unproven if c.deadline_s <= time.monotonic()]:
            self._drop(connection, "no handshake")
        self.cuts.apply()
        self._hear()

    def _patience_s(self) -> float | None:
        """How long to wait at most for anything to happen."""
        ends_s = [c.deadline_s for c in self._unproven] + self.cuts.ends_s
        if self._paused_end_s:
            ends_s.append(self._paused_end_s)
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # Whoever called has left.
            return
        except OSError as error:
            # EMFILE, say. Whoever calls waits in the kernel's queue meanwhile. At the limit every
            # other call may be accepted.
            now_s = time.monotonic()
            self._paused_end_s = now_s + ACCEPT_PAUSE_S
            if now_s >= self._quiet_end_s:
                what = "a link is not accepted for now, and it is tried again and again"
                remedy = "where descriptors are too few, raise the limit (ulimit -n)"
                logger.warning("rank %s: %s: %s; %s", self._rank, what, error, remedy)
            self._quiet_end_s = now_s + _QUIET_S
            return
        self._handlers.accept(sock)

    def _hear(self) -> None:
        """Has the selector tell of whoever calls, or not: it would do so all the time."""
        if self._paused_end_s <= time.monotonic():
            self._paused_end_s = 0.0
        hears = not self.cuts.is_deaf and not self._paused_end_s
        if hears and not self._is_heard:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif not hears and self._is_heard:
            self._selector.unregister(self._listener)
        self._is_heard = hears

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.sock.fileno() >= 0 and not connection.is_severed:
            self._selector.modify(connection.sock, events, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for message in connection.read():
                    if message is None:
                        self._unproven.discard(connection)
                        self._handlers.welcome(connection)
                    else:
                        self._handlers.deliver(connection, message)
            with connection.lock:
                is_done = connection.flush()
                self._watch(connection, selectors.EVENT_READ if is_done else READ_AND_WRITE)
        except (OSError, AuthenticationError) as error:
            self._drop(connection, str(error))

    def _drop(self, connection: Connection, reason: str) -> None:
        if connection.sock.fileno() < 0:
            return
        self.cuts.forget(connection)
        self._unproven.discard(connection)
        self._handlers.lose(connection, reason)
        connection.close()
        if connection.peer < 0:
            logger.warning("rank %s: gave up a link: %s", self._rank, reason)

    def _close_all(self) -> None:
        connections = {key.data for key in self._selector.get_map().values() if key.data}
        for connection in connections | set(self._new) | self.cuts.severed:
            with contextlib.suppress(OSError), connection.lock:
                connection.flush()
            connection.close()
        self._listener.close()
        self._selector.close()
        self._handlers.end()
