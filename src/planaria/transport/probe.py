"""The hook at which faults are injected: a process says that it reached a step, and waits there.

Without specs for it a probe does nothing. Else it calls the launcher when a step of a spec is
reached, and waits until the launcher has done what the spec says, which may be to kill this very
process. So a fault happens exactly there, not a little later. The answer is a line that names the
faults which only the process can plant in itself, KIND or KIND=VALUE; the probe was given what does
that.

A process that is to be cut off from others, or whose disk is to be slow, hears of it at any time:
it keeps a line to the launcher on which it is told (`heed`).
"""

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from planaria.core.inject import Place
from planaria.transport.frames import Role, handshake

logger = logging.getLogger(__name__)

_WAIT_TIMEOUT_S = 60.0
NO_NODE = 1 << 40  # As whom the coordinator calls.
LISTENING = "listening"  # The step of a process that wants to be told.


class Reached(msgspec.Struct, frozen=True):
    """What a probe says: where it stands."""

    step: str
    iteration: int


class Cut(msgspec.Struct, frozen=True, tag=True):
    """What a process hears on its line: the network between these nodes and all others is down.

    Attributes:
        seconds: from when this was written; 0: for ever.
    """

    nodes: tuple[int, ...]
    seconds: float


class Slowed(msgspec.Struct, frozen=True, tag=True):
    """What a process hears on its line: a disk is slow from now on.

    Attributes:
        disk: one of DISKS.
        seconds: as the fault's value says.
    """

    disk: str
    seconds: float


Told = Cut | Slowed
_told_decoder: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)


class Probe:
    """The hook of one process.

    Args:
        node: whose process this is.
        places: at which it is to call.
        address: where the launcher listens.
        faults: by kind, what plants a fault in this process, given the iteration and the value.
    """

    def __init__(
        self,
        node: int,
        *,
        places: Collection[Place],
        address: tuple[str, int],
        token: bytes,
        faults: Mapping[str, Callable[[int, float], None]],
    ) -> None:
        self._node = node
        self._faults = faults
        self._places = places
        self._address = address
        self._token = token

    def reached(self, step: str, iteration: int) -> None:
        """A step begins; returns when whatever is to happen there has happened."""
        if not any(_is_at(place, step, iteration) for place in self._places):
            return
        for fault in self._answer(Reached(step, iteration)):
            kind, _, value = fault.partition("=")
            self._faults[kind](iteration, float(value or 0.0))

    def heed(
        self, *, cut: Callable[[Cut, float], None], slow: Mapping[str, Callable[[float], None]]
    ) -> None:
        """Has a thread call `cut` with what is to be cut, and when that ends; and what slows a disk
        with its seconds, by disk."""
        threading.Thread(target=self._heed, args=(cut, slow), name="probe", daemon=True).start()

    def _heed(
        self, cut: Callable[[Cut, float], None], slow: Mapping[str, Callable[[float], None]]
    ) -> None:
        with contextlib.suppress(OSError), self._line() as sock:
            sock.sendall(msgspec.json.encode(Reached(LISTENING, -1)) + b"\n")
            sock.settimeout(None)  # The line is there for as long as both processes are.
            for line in sock.makefile("rb"):
                match _told_decoder.decode(line):
                    case Cut() as heard:
                        cut(heard, time.monotonic() + (heard.seconds or math.inf))
                    case Slowed(disk, seconds) if disk in slow:
                        slow[disk](seconds)

    def _line(self) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=_WAIT_TIMEOUT_S)
        self._shake_hands(sock)
        return sock

    def _answer(self, reached: Reached) -> list[str]:
        """The faults to plant here, once all others have happened."""
        answer = b""
        try:
            with self._line() as sock:
                sock.sendall(msgspec.json.encode(reached) + b"\n")
                while not answer.endswith(b"\n"):
                    answer += _read(sock, 1)
        except OSError as error:
            logger.warning("a fault cannot be injected at %s: %s", reached, error)
        return answer.decode().split()

    def _shake_hands(self, sock: socket.socket) -> None:
        steps = handshake(self._token, Role.CONNECT, identity=self._node)
        answer: Any = None
        try:
            while True:
                data, num_bytes = steps.send(answer)
                sock.sendall(data)
                answer = _read(sock, num_bytes)
        except StopIteration:
            return


def _is_at(place: Place, step: str, iteration: int) -> bool:
    if place.at_s >= 0 or place.step != step:
        return False
    return place.iteration <= iteration if place.is_in_recovery else place.iteration == iteration


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        received = sock.recv(num_bytes - len(data))
        if not received:
            raise ConnectionError("the launcher has gone")
        data += received
    return data
