"""A wire between two ranks that flips one bit of what one of them sends."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from helpers.linked_ranks import TIMEOUT_S
from planaria.transport.links import Address

HANDSHAKE_BYTES = 64  # A hello and a proof.
_HOST = "127.0.0.9"
_READ_BYTES = 1 << 16


@contextmanager
def flipping_relay(target: Address, *, flipped_byte: int) -> Iterator[Address]:
    """The address at which to connect instead of `target`; the port is the same.

    Args:
        flipped_byte: byte of the first connection's messages, counted after the handshake, whose
            lowest bit flips on its way to the target.
    """
    with socket.create_server((_HOST, target[1])) as listener:
        thread = threading.Thread(target=_relay, args=(listener, target, flipped_byte))
        thread.start()
        yield _HOST, target[1]
        thread.join(TIMEOUT_S)


def _relay(listener: socket.socket, target: Address, flipped_byte: int) -> None:
    near, _ = listener.accept()
    with near, socket.create_connection(target, timeout=TIMEOUT_S) as far:
        near.settimeout(TIMEOUT_S)
        back = threading.Thread(target=_forward, args=(far, near, -1))
        back.start()
        _forward(near, far, HANDSHAKE_BYTES + flipped_byte)
        back.join(TIMEOUT_S)


def _forward(source: socket.socket, target: socket.socket, flipped_byte: int) -> None:
    """Forwards bytes until either end closes, then closes both ways."""
    num_forwarded = 0
    try:
        while data := bytearray(source.recv(_READ_BYTES)):
            if num_forwarded <= flipped_byte < num_forwarded + len(data):
                data[flipped_byte - num_forwarded] ^= 1
            target.sendall(data)
            num_forwarded += len(data)
    except OSError:
        return
    finally:
        for sock in (source, target):
            _shut(sock)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
