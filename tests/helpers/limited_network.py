"""A network between ranks whose links carry so many bytes a second and no more.

A rank has one way out and one way in, each of the same bandwidth, which all its links share: those
of a node's network card. What two ranks tell each other passes through a thread of this process,
which hands on as much as the ways of both have left and takes turns between links.

No rank knows of it: rank A finds rank B at 127.1.A.B, at the port at which B really listens; there
the thread listens and passes on what comes to 127.0.0.1.
"""

import fcntl
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.transport.links import Address

TIMEOUT_S: Final = 60.0

_TICK_S = 0.002
_SAVED_S = 0.02  # A way that nobody used may carry so much more afterwards.
_TURN_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
_AT_ONCE = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


@dataclass(slots=True)
class _Way:
    """What a rank may send, or receive, by now."""

    bytes_per_s: float
    left_bytes: float = 0.0
    seen_s: float = field(default_factory=time.monotonic)

    def refill(self) -> None:
        now_s = time.monotonic()
        passed_s = now_s - self.seen_s
        most = self.bytes_per_s * max(_SAVED_S, passed_s)
        self.left_bytes = min(most, self.left_bytes + self.bytes_per_s * passed_s)
        self.seen_s = now_s


@dataclass(slots=True)
class _Flow:
    """One direction of a link; `held_bytes` are taken from one end and not given to the other."""

    source: socket.socket
    target: socket.socket
    ways: tuple[_Way, _Way]
    pipe: tuple[int, int] = field(default_factory=os.pipe)
    held_bytes: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        fcntl.fcntl(self.pipe[0], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def moves(self) -> bool:
        """Hands on a turn's bytes, as far as both ways have them left; False if none."""
        try:
            return self._take() or self._give()
        except BlockingIOError:
            return False
        except OSError:
            self.is_over = True
            return False

    def _take(self) -> bool:
        most = int(min(_TURN_BYTES, *(way.left_bytes for way in self.ways)))
        if self.held_bytes or most <= 0:
            return False
        taken = os.splice(self.source.fileno(), self.pipe[1], most, flags=_AT_ONCE)
        if not taken:
            self.is_over = True
            self.target.shutdown(socket.SHUT_WR)
        self.held_bytes = taken
        for way in self.ways:
            way.left_bytes -= taken
        return taken > 0

    def _give(self) -> bool:
        if not self.held_bytes:
            return False
        self.held_bytes -= os.splice(
            self.pipe[0], self.target.fileno(), self.held_bytes, flags=_AT_ONCE
        )
        return True


class LimitedNetwork:
    """The thread between ranks that listen at these addresses.

    Args:
        late_s: by the higher rank of a pair, how long a link to it takes to come about.
    """

    def __init__(
        self,
        addresses: Mapping[int, Address],
        *,
        bytes_per_s: float,
        late_s: Mapping[int, float],
    ) -> None:
        self._addresses = addresses
        self._late_s = late_s
        self._out = {rank: _Way(bytes_per_s) for rank in addresses}
        self._into = {rank: _Way(bytes_per_s) for rank in addresses}
        self._listeners: dict[socket.socket, tuple[int, int]] = {}
        self._called: list[tuple[float, socket.socket, int, int]] = []
        self._flows: deque[_Flow] = deque()
        for low in addresses:
            for high in [rank for rank in addresses if rank > low]:
                listener = socket.create_server((_host(low, high), addresses[high][1]))
                self._listeners[listener] = (low, high)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def addresses_for(self, rank: int) -> dict[int, Address]:
        """Where this rank finds all of them."""
        return {
            other: (_host(rank, other) if rank < other else address[0], address[1])
            for other, address in self._addresses.items()
        }

    def close(self) -> None:
        """Ends the thread and all links."""
        self._is_over.set()
        self._thread.join(timeout=TIMEOUT_S)
        for flow in self._flows:
            flow.source.close()  # The other flow of the link has the other end as its source.
            for descriptor in flow.pipe:
                os.close(descriptor)
        for sock in (*self._listeners, *(called[1] for called in self._called)):
            sock.close()

    def _run(self) -> None:
        while not self._is_over.wait(_TICK_S):
            for listener in select.select(list(self._listeners), [], [], 0)[0]:
                low, high = self._listeners[listener]
                due_s = time.monotonic() + self._late_s.get(high, 0.0)
                self._called.append((due_s, listener.accept()[0], low, high))
            due = [called for called in self._called if called[0] <= time.monotonic()]
            self._called = [called for called in self._called if called not in due]
            for _, sock, low, high in due:
                self._connect(sock, low, high)
            for way in (*self._out.values(), *self._into.values()):
                way.refill()
            self._flows.rotate(1)
            moving = [flow for flow in self._flows if not flow.is_over]
            while moving:
                moving = [flow for flow in moving if flow.moves()]

    def _connect(self, near: socket.socket, low: int, high: int) -> None:
        far = socket.create_connection(self._addresses[high], timeout=TIMEOUT_S)
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._flows.append(_Flow(near, far, (self._out[low], self._into[high])))
        self._flows.append(_Flow(far, near, (self._out[high], self._into[low])))


def _host(low: int, high: int) -> str:
    return f"127.1.{low}.{high}"
