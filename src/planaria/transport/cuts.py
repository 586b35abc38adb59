"""Cuts off some of a rank's peers for a time, as a network partition does: nothing closes.

What is cut off is neither read nor written. What either end sends meanwhile stays in the kernel's
buffers and in the queue of its connection, and goes on its way when the cut ends. So it is enough
that one end knows of it.
"""

import math
import selectors
import threading
import time
from collections.abc import Callable

from planaria.transport.connection import Connection

READ_AND_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE


class Cuts:
    """The peers from which a rank's links are cut off.

    Any thread may `add`; the rest belongs to the one thread that serves the links.

    Args:
        wake: has that thread take a turn.

    Attributes:
        is_deaf: whether nobody who calls is to be answered: who calls is known only then, so nobody
            is while anything is cut off.
    """

    def __init__(self, selector: selectors.BaseSelector, *, wake: Callable[[], None]) -> None:
        self._selector = selector
        self._wake = wake
        self._lock = threading.Lock()
        self._cuts: list[tuple[float, Callable[[int], bool]]] = []  # With their ends.
        self.is_deaf = False
        self.severed: set[Connection] = set()

    def add(self, is_beyond: Callable[[int], bool], *, end_s: float) -> None:
        """From now on and until end_s nothing comes from the ranks beyond, and nothing goes there.
        Whoever calls waits."""
        with self._lock:
            self._cuts.append((end_s, is_beyond))
        self._wake()

    @property
    def ends_s(self) -> list[float]:
        """When cuts end that do."""
        with self._lock:
            return [end_s for end_s, _ in self._cuts if end_s < math.inf]

    def apply(self) -> None:
        """Severs what is beyond a cut by now, and takes up again what is not any more."""
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
                self._take_up(connection)
        self.is_deaf = bool(cuts)

    def forget(self, connection: Connection) -> None:
        """A connection is going to be closed."""
        if connection in self.severed:
            self.severed.remove(connection)
        else:
            self._selector.unregister(connection.sock)

    def _sever(self, connection: Connection) -> None:
        with connection.lock:
            connection.is_severed = True
        self._selector.unregister(connection.sock)
        self.severed.add(connection)

    def _take_up(self, connection: Connection) -> None:
        with connection.lock:
            connection.is_severed = False
        self._selector.register(connection.sock, READ_AND_WRITE, connection)
        self.severed.remove(connection)
