"""The one thread of a rank that reads from its links and writes the bytes that had to be queued.

It calls the functions of `Handlers` with what happens on the links; these note it and return. Other
threads hand connections to it, through queues and a wake-up.
"""

import contextlib
import logging
import math
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
from planaria.transport.connection import Connection, IncomingMessage
from planaria.transport.cuts import READ_AND_WRITE, Cuts
from planaria.transport.strangers import RefusalLog, Unproven, num_unproven_max, source_of

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S: Final = 0.05
_CLOSE_TIMEOUT_S: Final = 2.0
# A failed accept is logged unless another one failed within this time before it.
_QUIET_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Handlers:
    """The functions that the thread calls when something happens on the links.

    Attributes:
        on_accept: takes the socket of a peer that connects; hands its connection to `Server.add`.
        on_link_up: takes a connection whose handshake is over.
        on_message: takes a message that has arrived, with its connection.
        on_lost: takes a connection that is over and about to be closed, and the reason.
        on_lack: takes the error where this machine has no memory for what a connection brings.
        on_failure: takes the error of which the thread dies.
        on_end: is called when the thread ends and all connections are closed.
    """

    on_accept: Callable[[socket.socket], None]
    on_link_up: Callable[[Connection], None]
    on_message: Callable[[Connection, IncomingMessage], None]
    on_lost: Callable[[Connection, str], None]
    on_lack: Callable[[MemoryError], None]
    on_failure: Callable[[Exception], None]
    on_end: Callable[[], None]


class Server:
    """The thread that serves the links, from `start` until `close`.

    Args:
        num_ranks: number of ranks of the job.

    Attributes:
        cuts: the cuts between this rank and its peers.
    """

    def __init__(
        self, rank: int, listener: socket.socket, handlers: Handlers, *, num_ranks: int
    ) -> None:
        self._rank = rank
        self._listener = listener
        listener.setblocking(False)
        self._handlers = handlers
        self._closing = False
        self._new: deque[Connection] = deque()
        self._retired: deque[Connection] = deque()
        self._blocked: set[Connection] = set()
        # Only the thread uses this and what follows, up to the selector.
        self._unproven: set[Connection] = set()
        # Those of them that peers or strangers opened.
        self._accepted = Unproven[Connection](num_unproven_max(num_ranks))
        self._refusals = RefusalLog(logger)
        self._is_listening = True  # Whether the selector watches the listener.
        self._paused_end_s = 0.0  # End of a pause without accepting links; 0.0: there is none.
        self._quiet_end_s = 0.0  # Until then, failed accepts are not logged.
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()  # Prevents a wake-up through a closed descriptor.
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.cuts = Cuts(self._selector, wake=self._wake)
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, connection: Connection) -> None:
        """Has a connection served from now on."""
        self._new.append(connection)
        self._wake()

    def retire(self, connection: Connection) -> None:
        """Has a connection closed that nobody uses any more."""
        self._retired.append(connection)
        self._wake()

    def write(self, connection: Connection) -> None:
        """Has the bytes that are queued on a connection written as the kernel takes them."""
        self._blocked.add(connection)
        self._wake()

    def close(self) -> None:
        """Writes what the kernel takes now, then closes every socket. Idempotent."""
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

    def leave_to_parent(self) -> None:
        """Closes the sockets in a forked child, where the thread is not."""
        for connection in self._connections():
            connection.sock.close()
        self._listener.close()

    def _wake(self) -> None:
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # A bug of planaria. Unless a thread that waits raises it, all ranks wait in vain.
            logger.exception("rank %s: the thread that serves the links died", self._rank)
            self._handlers.on_failure(error)
        finally:
            self._close_all()

    def _turn(self) -> None:
        """Serves the sockets that are ready, then does what other threads asked for."""
        for key, events in self._selector.select(self._patience_s()):
            if key.fileobj == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._serve(key.data, events)
        while self._retired:
            self._take_new()  # A link may be new and retired by now.
            self._drop(self._retired.popleft(), "an older epoch's")
        self._take_new()
        while self._blocked:
            self._watch(self._blocked.pop(), READ_AND_WRITE)
        for connection in [c for c in self._unproven if c.deadline_s <= time.monotonic()]:
            self._drop(connection, "no handshake")
        self.cuts.apply()
        self._update_listening()

    def _take_new(self) -> None:
        while self._new:
            connection = self._new.popleft()
            self._unproven.add(connection)
            if connection.target < 0:
                self._keep(connection)
            self._selector.register(connection.sock, READ_AND_WRITE, connection)

    def _keep(self, connection: Connection) -> None:
        """Keeps a connection that was accepted; has another one closed if there are too many."""
        try:
            source = source_of(connection.sock.getpeername())
        except OSError:  # Whoever connected has left.
            source = b""
        self._accepted.add(connection, source)
        if (surplus := self._accepted.surplus(connection.sock.fileno())) is not None:
            self._drop(surplus, "it proved nothing, and too many others came after it")

    def _patience_s(self) -> float | None:
        """Seconds after which a deadline, cut or pause ends first; None: there is none."""
        ends_s = [c.deadline_s for c in self._unproven] + self.cuts.ends_s
        if self._paused_end_s:
            ends_s.append(self._paused_end_s)
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # The peer that connected has left.
            return
        except OSError as error:
            # EMFILE, say. The peer that connects waits in the kernel's queue meanwhile. Near the
            # limit of descriptors every second connection may be accepted, hence the quiet time.
            now_s = time.monotonic()
            self._paused_end_s = now_s + ACCEPT_PAUSE_S
            if now_s >= self._quiet_end_s:
                what = "a link cannot be accepted now; it is tried again and again"
                remedy = "if there are too few file descriptors, raise the limit (ulimit -n)"
                logger.warning("rank %s: %s: %s; %s", self._rank, what, error, remedy)
            self._quiet_end_s = now_s + _QUIET_S
            if (oldest := self._accepted.oldest_of_most()) is not None:
                self._drop(oldest, "it proved nothing, and its descriptor is needed")
            return
        self._handlers.on_accept(sock)

    def _update_listening(self) -> None:
        """Has the selector watch the listener only while links are accepted: it would spin else."""
        if self._paused_end_s <= time.monotonic():
            self._paused_end_s = 0.0
        should_listen = not self.cuts.is_deaf and not self._paused_end_s
        if should_listen and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif not should_listen and self._is_listening:
            self._selector.unregister(self._listener)
        self._is_listening = should_listen

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.sock.fileno() >= 0 and not connection.is_severed:
            self._selector.modify(connection.sock, events, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(connection)
            self._write(connection)
        except (OSError, AuthenticationError) as error:
            self._drop(connection, str(error))
        except MemoryError as error:
            self._handlers.on_lack(error)
            self._drop(connection, f"rank {self._rank} has no memory for what came")

    def _read(self, connection: Connection) -> None:
        for message in connection.read():
            if message is None:
                self._unproven.discard(connection)
                self._accepted.remove(connection)
                self._handlers.on_link_up(connection)
            else:
                self._handlers.on_message(connection, message)

    def _write(self, connection: Connection) -> None:
        try:
            with connection.lock:
                is_done = connection.flush()
                self._watch(connection, selectors.EVENT_READ if is_done else READ_AND_WRITE)
        except OSError:
            # A peer that has closed its end may have sent its last messages before, which are here.
            if connection.peer >= 0:
                with contextlib.suppress(OSError, AuthenticationError):
                    self._read_rest(connection)
            raise

    def _read_rest(self, connection: Connection) -> None:
        """Reads all that has arrived."""
        heard_s = -math.inf
        while heard_s < connection.heard_s:
            heard_s = connection.heard_s
            self._read(connection)

    def _drop(self, connection: Connection, reason: str) -> None:
        if connection.sock.fileno() < 0:
            return
        self.cuts.forget(connection)
        self._unproven.discard(connection)
        self._accepted.remove(connection)
        self._handlers.on_lost(connection, reason)
        connection.close()
        if connection.peer < 0 and connection.target < 0:
            self._refusals.add(f"that to rank {self._rank}: {reason}")
        elif connection.peer < 0:
            logger.warning("rank %s: gave up a link: %s", self._rank, reason)

    def _close_all(self) -> None:
        for connection in self._connections():
            with contextlib.suppress(OSError, AuthenticationError), connection.lock:
                connection.flush()
            connection.close()
        self._listener.close()
        self._selector.close()
        self._handlers.on_end()

    def _connections(self) -> set[Connection]:
        """The connections that are open, the new ones and those that are cut off included."""
        served = {key.data for key in (self._selector.get_map() or {}).values() if key.data}
        return served | set(self._new) | self.cuts.severed
