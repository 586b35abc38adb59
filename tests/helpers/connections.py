"""Connections over TCP within this process, for tests that have them shut."""

import os
import socket
from collections.abc import Callable


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def ends(sock: socket.socket) -> tuple[str, str]:
    """As they are named."""
    own, other = (f"{host} {port}" for host, port in (sock.getsockname(), sock.getpeername()))
    return own, other


def is_shut(sock: socket.socket) -> bool:
    """Whether who reads from it gets the end at once."""
    sock.settimeout(0.05)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False


def number_in_child(count: Callable[[], int]) -> int:
    """What a forked child of this process counts."""
    child = os.fork()
    if not child:
        number = 255
        try:
            number = count()
        finally:
            os._exit(number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
