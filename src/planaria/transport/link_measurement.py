"""Measures the network between two machines: its latency and bandwidth, in half a second.

One machine serves a single peer at a port of its own for a while. The other sends it messages, each
of which it acknowledges with one byte: first small ones for the latency, then messages that double
in size, until one takes so long that the next would exceed the time.

    secret (32 bytes), then for each message its length (8 bytes, big-endian) and as many bytes

Nothing that is sent means anything, so nothing is encrypted.
"""

import hmac
import logging
import math
import socket
import statistics
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from planaria.core.machine_messages import (
    LINK_BUDGET_S,
    LinkMeasured,
    LinkMeasureRequested,
    LinkServed,
    LinkServeRequested,
)
from planaria.core.plan import Link
from planaria.transport.sockets import Address, address_text, bare_host, listening_socket

logger = logging.getLogger(__name__)

SECRET_BYTES: Final = 32
_WAIT_S: Final = 10.0  # Time for the peer to come.
_TIMEOUT_S: Final = 2.0  # Time without a byte, after which the link is given up.
_NUM_SMALL: Final = 20
_FIRST_BYTES: Final = 1 << 16
_LAST_BYTES: Final = 1 << 26
_READ_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct("!Q")
_ACKNOWLEDGEMENT: Final = b"!"


def serve_measurement(listener: socket.socket, secret: bytes) -> None:
    """Acknowledges the messages of one peer that knows the secret; closes the listener.

    Blocks until the peer has ended, or none has come for some seconds.
    """
    end_s = time.monotonic() + _WAIT_S
    with listener:
        while (wait_s := end_s - time.monotonic()) > 0.0:
            listener.settimeout(wait_s)
            try:
                peer, _ = listener.accept()
                with peer:
                    if _acknowledge_all(peer, secret):
                        return
            except OSError as error:
                logger.info("a link could not be measured: %s", error)


def _acknowledge_all(peer: socket.socket, secret: bytes) -> bool:
    """Acknowledges all messages of a peer; returns False if it does not know the secret."""
    _set_options(peer)
    end_s = time.monotonic() + _TIMEOUT_S  # A stranger may send a byte now and then.
    if not hmac.compare_digest(_read(peer, SECRET_BYTES, end_s=end_s), secret):
        return False
    while len(head := _read(peer, _LENGTH.size)) == _LENGTH.size:
        (num_bytes,) = _LENGTH.unpack(head)
        buffer = bytearray(_READ_BYTES)
        while num_bytes:
            num_read = peer.recv_into(buffer, min(num_bytes, _READ_BYTES))
            if not num_read:
                return True
            num_bytes -= num_read
        peer.sendall(_ACKNOWLEDGEMENT)
    return True


def measure_link(address: Address, secret: bytes, *, budget_s: float = LINK_BUDGET_S) -> Link:
    """Latency and bandwidth of the link to a machine that serves the measurement. Blocks.

    Args:
        budget_s: time for the bandwidth; 0.0: it is not measured, and the result has 0.0 of it.

    Raises:
        ConnectionError: the machine cannot be reached, or does not answer; the text has its
            address.
    """
    try:
        with socket.create_connection((bare_host(address[0]), address[1]), _TIMEOUT_S) as peer:
            _set_options(peer)
            peer.sendall(secret)
            small_s = [_round_trip_s(peer, b"!") for _ in range(_NUM_SMALL)]
            round_trip_s = statistics.median(small_s)
            bandwidth = _bandwidth(peer, round_trip_s, budget_s=budget_s) if budget_s else 0.0
            return Link(round_trip_s / 2, bandwidth)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a name.
        raise ConnectionError(f"{address_text(address)} cannot be reached: {error}") from error


def _bandwidth(peer: socket.socket, round_trip_s: float, *, budget_s: float) -> float:
    """The bytes per second of the largest message for which there is time."""
    num_bytes, begin_s = _FIRST_BYTES, time.monotonic()
    while True:
        took_s = _round_trip_s(peer, bytes(num_bytes))
        is_late = time.monotonic() - begin_s + 2.0 * took_s > budget_s
        if is_late or num_bytes >= _LAST_BYTES:
            return num_bytes / max(took_s - round_trip_s, 1e-6)
        num_bytes *= 2


def _round_trip_s(peer: socket.socket, message: bytes) -> float:
    begin_s = time.monotonic()
    peer.sendall(_LENGTH.pack(len(message)))
    peer.sendall(message)
    if _read(peer, 1) != _ACKNOWLEDGEMENT:
        raise ConnectionResetError("it has closed the connection")
    return time.monotonic() - begin_s


def _read(sock: socket.socket, num_bytes: int, *, end_s: float = math.inf) -> bytes:
    """So many bytes; fewer if the connection has ended, or not all have come by `end_s`."""
    data = b""
    while len(data) < num_bytes and time.monotonic() < end_s:
        if not (piece := sock.recv(num_bytes - len(data))):
            break
        data += piece
    return data


def _set_options(sock: socket.socket) -> None:
    sock.settimeout(_TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def serve_link(host: str, request: LinkServeRequested) -> tuple[LinkServed, Callable[[], None]]:
    """The port at which another machine can measure the link to this one.

    Returns:
        What the head is told, and what has to run in a thread meanwhile, up to some seconds.
    """
    try:
        listener = listening_socket(host)
    except OSError as error:
        logger.warning("no link can be measured: %s", error)
        return LinkServed(0, request.number), lambda: None
    served = LinkServed(listener.getsockname()[1], request.number)
    return served, partial(serve_measurement, listener, request.secret)


def measured_link(request: LinkMeasureRequested) -> LinkMeasured:
    """The link to a machine that serves the measurement. Blocks for about half a second."""
    try:
        link = measure_link(request.address, request.secret, budget_s=request.budget_s)
    except ConnectionError as error:
        return LinkMeasured(reason=str(error), number=request.number)
    return LinkMeasured(link=link, number=request.number)
