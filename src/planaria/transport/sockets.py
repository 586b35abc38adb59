"""Sockets between machines: addresses, a listener for links, and limits on silence.

A host is a name, an IPv4 address or an IPv6 address, which may stand in brackets.
"""

import asyncio
import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final

Address = tuple[str, int]
Endpoint = tuple[int, tuple[Any, ...]]  # Family of a socket, and what it connects to.
# Returns where an address may be reached, without blocking the event loop.
Resolve = Callable[[Address], Awaitable[list[Endpoint]]]

CONNECT_TIMEOUT_S: Final = 10.0
# TCP keepalive probes the kernel of a silent peer, but not while unacknowledged bytes are on their
# way to it: for these TCP_USER_TIMEOUT sets the same limit. So a connection breaks after two
# minutes if the peer's machine is gone or a middlebox has dropped the connection. It also breaks if
# a live peer takes no bytes for so long, which cannot happen while that peer serves its sockets.
_LOST_S: Final = 120.0
_NUM_PROBES: Final = 6  # In the second half of that time.
_BACKLOG: Final = 1024
_OWN_LACKS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def bare_host(host: str) -> str:
    """The host without the brackets of an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def can_be_host(text: str) -> bool:
    """Whether a text is an address, in brackets or not, or can be the name of a machine."""
    try:
        return is_literal(bare_host(text)) or (bool(text.encode("idna")) and ":" not in text)
    except UnicodeError:
        return False


def is_literal(host: str) -> bool:
    """Whether the host is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def address_text(address: Address) -> str:
    """The address as HOST:PORT; an IPv6 address stands in brackets."""
    host, port = bare_host(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether the host is this machine's own loopback, by its address or as localhost."""
    host = bare_host(host)
    return ipaddress.ip_address(host).is_loopback if is_literal(host) else host == "localhost"


def is_link_local(host: str) -> bool:
    """Whether the host is an IPv6 address that means another machine on each interface."""
    host = bare_host(host)
    return ":" in host and is_literal(host) and ipaddress.ip_address(host).is_link_local


def is_own_lack(error: OSError) -> bool:
    """Whether a connection failed for a lack of descriptors or memory on this machine."""
    return error.errno in _OWN_LACKS


def no_link_text(peer: Address, own: Address, reason: str) -> str:
    """Why a peer cannot be linked with this process, with both addresses and a remedy."""
    text = f"no link between {address_text(peer)} and {address_text(own)}: {reason}"
    if is_loopback(peer[0]) and is_loopback(own[0]):
        return text
    return (
        f"{text}; let machines reach each other at all ports above 1023 (firewall), or give "
        "the agent of one of them another address with --advertise or --interface"
    )


def break_when_silent(sock: socket.socket, *, silent_s: float | None = None) -> None:
    """Has a TCP connection break once its peer's machine has been silent for so long.

    The peer's kernel answers however busy its processes are. Small writes leave at once from now
    on, too.

    Args:
        silent_s: seconds of silence, two minutes if it is None; the kernel probes once a second at
            most.
    """
    silent_s = _LOST_S if silent_s is None else silent_s
    probe_s = max(1, round(silent_s / (2 * _NUM_PROBES)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silent_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silent_s * 1000))


def listening_socket(host: str) -> socket.socket:
    """A listener at a free port of the host's address.

    It listens at all addresses of this machine if the host is a name, which may stand for another
    address here than elsewhere, or if no interface here has the address: it may be that of a router
    that forwards connections to this machine.

    Raises:
        OSError: no socket can be made, or no port is free.
    """
    host = bare_host(host)
    try:
        if is_literal(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), backlog=_BACKLOG)
    return socket.create_server(
        ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
    )


def endpoints_of(address: Address) -> list[Endpoint]:
    """Where a host and port may be reached; a name may have several addresses. It may block.

    Raises:
        OSError: the host does not resolve.
    """
    host, port = bare_host(address[0]), address[1]
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{address[0]!r} can be no name of a machine") from error
    return [(family, endpoint) for family, _, _, _, endpoint in resolved]


def literal_endpoints(address: Address) -> list[Endpoint]:
    """Where a host and port may be reached; []: the host is a name. It never blocks.

    Raises:
        UnicodeError: the host can be no name.
    """
    try:
        resolved = socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        return []
    return [(family, endpoint) for family, _, _, _, endpoint in resolved]


async def endpoints_by_thread(address: Address) -> list[Endpoint]:
    """Resolves an address by a thread, for which no end of an event loop waits; see Resolve.

    Raises:
        RuntimeError: no thread can be started.
    """
    if literal := literal_endpoints(address):
        return literal
    answer: Future[list[Endpoint]] = Future()
    answer.set_running_or_notify_cancel()  # Nobody can cancel it from now on.

    def look_up() -> None:
        try:
            answer.set_result(endpoints_of(address))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=look_up, name="resolver", daemon=True).start()
    return await asyncio.wrap_future(answer)


def connecting_socket(endpoints: list[Endpoint]) -> socket.socket:
    """A non-blocking socket whose connection is under way; a later write reports its failure.

    Args:
        endpoints: endpoints to try; those that were tried are removed.

    Raises:
        OSError: the connection failed at once at each of them.
    """
    status = errno.EADDRNOTAVAIL
    while endpoints:
        family, endpoint = endpoints.pop(0)
        try:  # A kernel without IPv6 still resolves names to its addresses.
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            status = error.errno or status
            continue
        sock.setblocking(False)
        status = sock.connect_ex(endpoint)
        if status in (0, errno.EINPROGRESS):
            return sock
        sock.close()
    raise OSError(status, os.strerror(status))


async def open_stream(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the address, which breaks once its other end has been silent for long.

    Raises:
        ConnectionError: nothing answers there within CONNECT_TIMEOUT_S; the text has the address.
    """
    host, port = bare_host(address[0]), address[1]
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        reason = str(error) or f"nothing answered for {CONNECT_TIMEOUT_S:.0f} s"
        raise ConnectionError(f"{address_text(address)} cannot be reached: {reason}") from error
    break_when_silent(writer.get_extra_info("socket"))
    return reader, writer
