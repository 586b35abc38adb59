"""Cuts a rank off from some of its peers for a time, as a network partition does: nothing closes.

A connection that is cut off is neither read nor written. What either end sends meanwhile stays in
the kernel's buffers and in the connection's queue, and goes on when the cut ends. So it is enough
that one end knows of the cut.
"""

import math
import selectors
import threading
import time
from collections.abc import Callable

from planaria.transport.connection import Connection

READ_AND_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE


class Cuts:
    """The cuts of a rank's links that are in force.

    Any thread may call `add`; only the thread that serves the links calls the other methods.

    Args:
        wake: wakes that thread up, so that it calls `apply`.

    Attributes:
        is_deaf: whether incoming connections stay unaccepted. That is so while any cut lasts,
            since the rank that connects is known only after the connection was accepted.
        severed: the connections that are cut off now.
    """

    def __init__(self, selector: selectors.BaseSelector, *, wake: Callable[[], None]) -> None:
        self._selector = selector
        self._wake = wake
        self._lock = threading.Lock()
        # Each with its end, by the monotonic clock.
        self._cuts: list[tuple[float, Callable[[int], bool]]] = []
        self.is_deaf = False
        self.severed: set[Connection] = set()

    def add(self, is_beyond: Callable[[int], bool], *, end_s: float) -> None:
        """Cuts this rank off from some ranks; incoming connections wait until the cut ends.

        Args:
            is_beyond: whether a rank is cut off.
            end_s: end of the cut, by the monotonic clock; inf: it never ends.
        """
        with self._lock:
            self._cuts.append((end_s, is_beyond))
        self._wake()

    @property
    def ends_s(self) -> list[float]:
        """The ends of the cuts that have one, by the monotonic clock."""
        with self._lock:
            return [end_s for end_s, _ in self._cuts if end_s < math.inf]

    def apply(self) -> None:
        """Severs the connections that a cut now covers, and resumes those that none covers."""
        with self._lock:
            if not self._cuts:
                return
            now_s = time.monotonic()
            self._cuts = [cut for cut in self._cuts if cut[0] > now_s]
            cuts = [is_beyond for _, is_beyond in self._cuts]
        for connection in [key.data for key in self._selector.get_map().values() if key.data]:
            rank = max(connection.peer, connection.target)
            if any(is_beyond(rank) for is_beyond in cuts):
                self._sever(connection)
        for connection in list(self.severed):
            rank = max(connection.peer, connection.target)
            if not any(is_beyond(rank) for is_beyond in cuts):
                self._resume(connection)
        self.is_deaf = bool(cuts)

    def forget(self, connection: Connection) -> None:
        """Drops a connection that is about to be closed from the severed ones or the selector."""
        if connection in self.severed:
            self.severed.remove(connection)
        else:
            self._selector.unregister(connection.sock)

    def _sever(self, connection: Connection) -> None:
        with connection.lock:
            connection.is_severed = True
        self._selector.unregister(connection.sock)
        self.severed.add(connection)

    def _resume(self, connection: Connection) -> None:
        with connection.lock:
            connection.is_severed = False
        self._selector.register(connection.sock, READ_AND_WRITE, connection)
        self.severed.remove(connection)
