"""The hook for fault injection: a process reports that it reached a step, and waits there.

A probe without places does nothing. Otherwise it calls the launcher when the process reaches the
step of one of its places, and waits until the launcher has injected the faults, which may mean that
it kills this very process. So a fault happens exactly at that step, not a little later. The answer
is a line with the faults that only the process can inject into itself, each KIND or KIND=VALUE; for
each kind the probe was given a function that does so.

A process that is to be cut off from others, or whose disk is to be slow, learns of it at any time:
it keeps a connection to the launcher open, over which it is told (`listen`).
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
from planaria.errors import AuthenticationError
from planaria.transport.acceptor import Purpose, tls_socket
from planaria.transport.credentials import Credentials
from planaria.transport.frames import Role, handshake
from planaria.transport.sockets import break_when_silent

logger = logging.getLogger(__name__)

_WAIT_TIMEOUT_S = 60.0
NO_NODE = 1 << 40  # The identity of the coordinator when it calls.
LISTENING = "listening"  # The step that a process reports to be told of cuts and slow disks.


class StepReached(msgspec.Struct, frozen=True):
    """A probe's report to the launcher: the step that its process has reached."""

    step: str
    iteration: int


class Cut(msgspec.Struct, frozen=True, tag=True):
    """A message of the launcher: the network between these nodes and all others is down.

    Attributes:
        seconds: length of the cut, counted from when the message arrives; 0: it never ends.
    """

    nodes: tuple[int, ...]
    seconds: float


class Slowed(msgspec.Struct, frozen=True, tag=True):
    """A message of the launcher: a disk is slow, or refuses requests, from now on.

    Attributes:
        disk: one of DISKS.
        seconds: value of the fault.
    """

    disk: str
    seconds: float


LauncherMessage = Cut | Slowed
_launcher_decoder: msgspec.json.Decoder[LauncherMessage] = msgspec.json.Decoder(LauncherMessage)


class Probe:
    """The hook of one process.

    Args:
        node: node of the process; NO_NODE: the coordinator.
        places: steps at which the probe calls the launcher.
        address: host and port at which the launcher listens.
        token: key of the job's probes, which the handshake with the launcher proves.
        credentials: contents of the token file, if the launcher is the head of a job on several
            machines; they stand in for the token.
        faults: functions by kind, each of which injects its fault into this process; it takes the
            iteration and the fault's value.
    """

    def __init__(
        self,
        node: int,
        *,
        places: Collection[Place],
        address: tuple[str, int],
        token: bytes,
        credentials: Credentials | None = None,
        faults: Mapping[str, Callable[[int, float], None]],
    ) -> None:
        self._node = node
        self._faults = faults
        self._places = places
        self._address = address
        self._credentials = credentials
        self._token = token if credentials is None else credentials.derive(Purpose.PROBE.key_name)

    def report_step(self, step: str, iteration: int) -> None:
        """Reports that a step begins; returns when all faults for that step have been injected."""
        if not any(_is_at(place, step, iteration) for place in self._places):
            return
        for fault in self._call_launcher(StepReached(step, iteration)):
            kind, _, value = fault.partition("=")
            self._faults[kind](iteration, float(value or 0.0))

    def listen(
        self, *, cut: Callable[[Cut, float], None], slow: Mapping[str, Callable[[float], None]]
    ) -> None:
        """Starts a thread that passes on what the launcher tells this process.

        Args:
            cut: takes a cut and its end, by the monotonic clock; inf: it never ends.
            slow: functions by disk, each of which slows its disk; it takes the seconds.
        """
        threading.Thread(target=self._serve, args=(cut, slow), name="probe", daemon=True).start()

    def _serve(
        self, cut: Callable[[Cut, float], None], slow: Mapping[str, Callable[[float], None]]
    ) -> None:
        with contextlib.suppress(AuthenticationError, OSError), self._connect() as sock:
            sock.sendall(msgspec.json.encode(StepReached(LISTENING, -1)) + b"\n")
            sock.settimeout(None)  # The connection stays for as long as both processes live.
            for line in sock.makefile("rb"):
                match _launcher_decoder.decode(line):
                    case Cut() as cut_message:
                        cut(cut_message, time.monotonic() + (cut_message.seconds or math.inf))
                    case Slowed(disk, seconds) if disk in slow:
                        slow[disk](seconds)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=_WAIT_TIMEOUT_S)
        try:
            break_when_silent(sock)
            if self._credentials is not None:
                sock = tls_socket(sock, Purpose.PROBE, self._credentials)
            self._shake_hands(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def _call_launcher(self, reached: StepReached) -> list[str]:
        """The faults that this process has to inject, once the launcher has injected all others."""
        answer = b""
        try:
            with self._connect() as sock:
                sock.sendall(msgspec.json.encode(reached) + b"\n")
                while not answer.endswith(b"\n"):
                    answer += _read(sock, 1)
        except (AuthenticationError, OSError) as error:
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
    # Only the launcher knows at which iteration a recovery began.
    return place.is_in_recovery or place.iteration == iteration


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        received = sock.recv(num_bytes - len(data))
        if not received:
            raise ConnectionError("the launcher has gone")
        data += received
    return data
