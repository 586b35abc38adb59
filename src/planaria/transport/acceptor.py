"""The one public port of a head, and connections to it.

Each connection begins with a preface of 16 bytes that names its purpose, in plain. The `Acceptor`
reads it and hands the socket to the handler of that purpose, perhaps in another process. `accept`
and `connect` go on from there: TLS with the certificate of the token file, then the handshake of
frames.py with the key of that purpose.

Connections that have not yet sent their preface, and those whose handshakes are under way
(`Handshakes`), are bounded in number and in time; see strangers.py. TLS begins only when the other
end has sent something, because its buffers take 256 KiB.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any, Final

from planaria.errors import AuthenticationError, ConfigError, StrangerError
from planaria.transport.credentials import Credentials, certificate_problem
from planaria.transport.frames import HANDSHAKE_TIMEOUT_S, Role, shake_hands
from planaria.transport.serving import ACCEPT_PAUSE_S
from planaria.transport.sockets import (
    Address,
    Resolve,
    address_text,
    break_when_silent,
    endpoints_by_thread,
)
from planaria.transport.strangers import NUM_UNPROVEN_MAX, RefusalLog, Unproven, source_of

logger = logging.getLogger(__name__)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_BACKLOG: Final = 4096
_PORT_MAX: Final = (1 << 16) - 1
_NUM_PORT_TRIES: Final = 20
_ACCEPTS_PER_TURN: Final = 16
_CLOSE_TIMEOUT_S: Final = 1.0


class Purpose(Enum):
    """The purpose of a connection to a head; the value is its preface."""

    NODE = b"planaria1node   "
    MACHINE = b"planaria1machine"
    REQUEST = b"planaria1request"
    PROBE = b"planaria1probe  "

    @property
    def key_name(self) -> str:
        """The name under which the key of this purpose is derived from the job's secret."""
        return self.name.lower()


_PREFACE_BYTES: Final = 16
_TLS_HANDSHAKE: Final = b"\x16"  # The first byte that a client of TLS sends.
_PURPOSES: Final = {purpose.value: purpose for purpose in Purpose}


def parse_address(text: str, *, field: str) -> Address:
    """Host and port of "HOST:PORT", "[IPv6]:PORT" or ":PORT"; the host may be "".

    Args:
        field: name of the option, for the error.

    Raises:
        ConfigError: the text is no such address.
    """
    host, colon, port_text = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port_text.isascii() and port_text.isdigit() and int(port_text[:6]) <= _PORT_MAX
    if not colon or not is_port or len(port_text) > 5 or (":" in host and not is_bracketed):
        remedy = "write HOST:PORT, [IPv6]:PORT or :PORT, the port from 0 to 65535"
        raise ConfigError(field, text, remedy)
    return host[1:-1] if is_bracketed else host, int(port_text)


# -- listening ------------------------------------------------------------------------------------


def listen(address: str) -> tuple[list[socket.socket], Address]:
    """Sockets that listen at "ADDR:PORT", and the host and port of the first.

    A name may have several addresses, and ":PORT" means all addresses of this machine. Port 0 is
    any free port, the same for all sockets.

    Raises:
        ConfigError: the address is none of this machine, or cannot be listened at.
    """
    host, port = parse_address(address, field="--listen")
    for _ in range(_NUM_PORT_TRIES):
        try:
            sockets = _listeners(host, port)
        except OSError as error:
            # The port that was free at the first address is not at the second.
            if error.errno == errno.EADDRINUSE and port == 0:
                continue
            raise ConfigError("--listen", address, _listen_problem(error)) from error
        first_host, first_port = sockets[0].getsockname()[:2]
        return sockets, (host or first_host, first_port)
    raise ConfigError("--listen", address, "no port is free at all of its addresses; name one")


def _listeners(host: str, port: int) -> list[socket.socket]:
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # IPv4 first: it is what a peer can most probably reach.
    endpoints = sorted(
        {(family, endpoint) for family, _, _, _, endpoint in infos},
        key=lambda item: (item[0] != socket.AF_INET, item[1]),
    )
    sockets: list[socket.socket] = []
    for family, endpoint in endpoints:
        shared_port = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listener(family, (endpoint[0], shared_port, *endpoint[2:])))
        except OSError as error:
            # A kernel without IPv6 still resolves names to its addresses.
            if sockets and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue
            for sock in sockets:
                sock.close()
            raise
    return sockets


def _listener(family: int, endpoint: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(endpoint)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_problem(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror}); :PORT listens at all addresses"
    match error.errno:
        case errno.EADDRINUSE:
            return "another process listens there; name another port, or 0 for any free one"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address; :PORT listens at all that it has"
        case errno.EACCES:
            return "this user may not listen there; name a port from 1024 on"
    return f"cannot be listened at: {error.strerror}"


# -- the acceptor ---------------------------------------------------------------------------------


class _HalfOpen:
    """A connection that has not sent its whole preface yet."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.sock = sock
        self.descriptor = sock.fileno()  # The event loop is slower with sockets: it formats them.
        self.address = address
        self.preface = b""
        self.deadline: asyncio.TimerHandle


class Acceptor:
    """Accepts connections, reads their prefaces, and hands the sockets on.

    All is done on the event loop that calls `start`. A handler is called with a non-blocking socket
    of which only the preface has been read; it owns the socket and returns at once.

    Args:
        listeners: sockets that listen; `close` closes them.
        handlers: functions by purpose; a connection for another purpose is refused.
        num_half_open_max: number of connections without preface that are kept at once; fewer where
            the process may open few files.
        timeout_s: time for which a preface is waited for.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        handlers: Mapping[Purpose, Callable[[socket.socket], None]],
        *,
        num_half_open_max: int = NUM_UNPROVEN_MAX,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._listeners = listeners
        self._handlers = handlers
        self._timeout_s = timeout_s
        self._half_open = Unproven[_HalfOpen](num_half_open_max)
        self._refusals = RefusalLog(logger)
        self._is_closed = False

    def start(self) -> None:
        """Begins to accept."""
        self._loop = asyncio.get_running_loop()
        self._watch_listeners()

    def close(self) -> None:
        """Closes the listeners, and the connections that were not handed on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        for half_open in list(self._half_open):
            self._release(half_open).close()

    def _watch_listeners(self) -> None:
        if not self._is_closed:
            for listener in self._listeners:
                self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._begin(sock, peer)

    def _pause(self, error: OSError) -> None:
        """Stops to accept for a moment, while there are too few descriptors, say."""
        self._refusals.add(f"{error}; it is tried again; raise the limit of files (ulimit -n)")
        oldest = self._half_open.oldest_of_most()
        if oldest is not None:
            self._refuse(oldest, "its descriptor is needed")
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        self._loop.call_later(ACCEPT_PAUSE_S, self._watch_listeners)

    def _begin(self, sock: socket.socket, peer: tuple[Any, ...]) -> None:
        sock.setblocking(False)
        half_open = _HalfOpen(sock, peer[:2])
        half_open.deadline = self._loop.call_later(self._timeout_s, self._expire, half_open)
        self._half_open.add(half_open, source_of(peer))
        self._loop.add_reader(half_open.descriptor, self._read, half_open)
        self._read(half_open)  # The preface of a client that knows planaria is there mostly.
        surplus = self._half_open.surplus(half_open.descriptor)
        if surplus is not None:
            self._refuse(surplus, "it sent no preface, and too many others came after it")

    def _expire(self, half_open: _HalfOpen) -> None:
        self._refuse(half_open, f"no preface came for {self._timeout_s:.0f} s")

    def _read(self, half_open: _HalfOpen) -> None:
        num_missing = _PREFACE_BYTES - len(half_open.preface)
        try:
            data = half_open.sock.recv(num_missing)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._refuse(half_open, str(error))
            return
        half_open.preface += data
        if not data:
            self._refuse(half_open, "it ended before its preface did")
        elif not any(preface.startswith(half_open.preface) for preface in _PURPOSES):
            self._refuse(half_open, f"it begins with {half_open.preface!r}, which is no preface")
        elif len(data) == num_missing:
            self._hand_on(half_open, _PURPOSES[half_open.preface])

    def _hand_on(self, half_open: _HalfOpen, purpose: Purpose) -> None:
        handler = self._handlers.get(purpose)
        if handler is None:
            self._refuse(half_open, f"nothing here serves the purpose {purpose.name}")
        else:
            handler(self._release(half_open))

    def _refuse(self, half_open: _HalfOpen, reason: str) -> None:
        self._release(half_open).close()
        self._refusals.add(f"{address_text(half_open.address)}: {reason}")

    def _release(self, half_open: _HalfOpen) -> socket.socket:
        self._half_open.remove(half_open)
        self._loop.remove_reader(half_open.descriptor)
        half_open.deadline.cancel()
        return half_open.sock


# -- both ends of a connection --------------------------------------------------------------------


class Handshakes:
    """The handshakes that are under way with connections which an acceptor has handed on.

    Args:
        credentials: contents of this end's token file.
        num_max: number of handshakes at once; fewer where the process may open few files.
    """

    def __init__(self, credentials: Credentials, *, num_max: int = NUM_UNPROVEN_MAX) -> None:
        self._credentials = credentials
        self._context = credentials.server_context()
        self._limits = Unproven[asyncio.Timeout](num_max)

    async def accept(
        self, sock: socket.socket, purpose: Purpose, *, key: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        """Streams over the connection, and the identity of its other end.

        The socket belongs to the streams, and is closed if the connection is refused.

        Args:
            key: the key that the other end must have, too; b"": that of the purpose.

        Raises:
            AuthenticationError: the other end has another token file, ended the connection, took
                more than HANDSHAKE_TIMEOUT_S, or had to give way; the message has its address.
        """
        peer = _peer(sock)
        peer_text = address_text(peer[:2]) if peer else "an address unknown"
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S) as limit:
                self._limits.add(limit, source_of(peer))
                try:
                    self._make_room(sock.fileno())
                    return await self._accept(sock, purpose, key)
                finally:
                    self._limits.remove(limit)
        except TimeoutError as error:
            reason = f"{peer_text}: it was slow to prove itself, or too many others came after it"
            raise AuthenticationError(reason) from error
        except (AuthenticationError, EOFError, OSError) as error:
            raise AuthenticationError(f"{peer_text}: {_refusal_text(error)}") from error

    def _make_room(self, descriptor: int) -> None:
        limit = self._limits.surplus(descriptor)
        if limit is not None:
            self._limits.remove(limit)
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def _accept(
        self, sock: socket.socket, purpose: Purpose, key: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        with _closing_on_error(sock):
            sock.setblocking(False)
            break_when_silent(sock)
            await _wait_tls(sock)
        with _tls_errors(self._credentials):
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=_CLOSE_TIMEOUT_S,
            )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        key = key or self._credentials.derive(purpose.key_name)
        identity = await _prove(
            (reader, writer), key, self._credentials, role=Role.ACCEPT, identity=0
        )
        return reader, writer, identity


async def accept(
    sock: socket.socket, purpose: Purpose, credentials: Credentials
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """One connection as `Handshakes.accept` does it, without a bound on their number."""
    return await Handshakes(credentials).accept(sock, purpose)


async def connect(
    address: Address,
    purpose: Purpose,
    credentials: Credentials,
    *,
    timeout_s: float,
    identity: int = 0,
    key: bytes = b"",
    turn: asyncio.Lock | None = None,
    resolve: Resolve = endpoints_by_thread,
) -> Streams:
    """Streams to a head that has proved that it has the same token file.

    Args:
        address: host and port of the head; a name is resolved anew at each call.
        timeout_s: time for all of it, in which each address that the name has is tried.
        identity: number of this end that the head is told, below 2^64.
        key: the key that the head must have, too; b"": that of the purpose.
        turn: held while the head is told who connects, and for good once it is proved. Of several
            connections that share it, one head at most learns of one; it has half of the time.
        resolve: see Resolve.

    Raises:
        AuthenticationError: the head has another token file or key; a StrangerError: it is none.
        ConnectionError: the head cannot be reached, or ended the connection before it was proved.
    """
    loop = asyncio.get_running_loop()
    end_s, turn_s = loop.time() + timeout_s, timeout_s / 2 if turn else timeout_s
    key, turn = key or credentials.derive(purpose.key_name), turn or asyncio.Lock()
    where, problem = address_text(address), ": the name has no address"
    remedy = "is the head running, and may this machine reach that port?"
    try:
        async with asyncio.timeout_at(end_s):
            endpoints = await resolve(address)
    # UnicodeError: it cannot be a name. RuntimeError: no thread can be started.
    except (OSError, RuntimeError, UnicodeError) as error:
        problem = f": the name does not resolve ({error})"
        remedy = "name the head's IP address instead, or add the name to /etc/hosts"
        endpoints = []
    for index, (family, endpoint) in enumerate(endpoints):
        own_end_s = loop.time() + (end_s - loop.time()) / (len(endpoints) - index)
        try:  # A kernel without IPv6 still resolves names to its addresses.
            sock = socket.socket(family, socket.SOCK_STREAM)
            async with asyncio.timeout_at(own_end_s):
                streams = await _open(sock, endpoint, purpose, credentials)
                prove = partial(_prove, streams, key, credentials, identity=identity)
                await _prove_in_turn(turn, streams, prove, limit_s=turn_s)
                return streams
        except AuthenticationError as error:
            raise type(error)(f"{where}: {error}") from error
        except (EOFError, OSError) as error:  # TimeoutError is an OSError.
            reason = _refusal_text(error) or "no answer in time"
            problem = f"{_route_text(endpoint, where)}: {reason}"
    raise ConnectionError(f"{where} cannot be reached{problem}; {remedy}")


async def _open(
    sock: socket.socket, endpoint: tuple[object, ...], purpose: Purpose, credentials: Credentials
) -> Streams:
    with _closing_on_error(sock):
        sock.setblocking(False)
        break_when_silent(sock)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, endpoint)
        await loop.sock_sendall(sock, purpose.value)
        context = credentials.client_context()
    with _tls_errors(credentials):
        return await asyncio.open_connection(
            sock=sock,
            ssl=context,
            server_hostname="",
            ssl_shutdown_timeout=_CLOSE_TIMEOUT_S,
        )


async def _prove_in_turn(
    turn: asyncio.Lock, streams: Streams, prove: Callable[..., Awaitable[int]], *, limit_s: float
) -> None:
    try:
        await turn.acquire()
    except BaseException:
        streams[1].transport.abort()
        raise
    try:
        async with asyncio.timeout(limit_s):
            await prove(role=Role.CONNECT)
    except BaseException:
        turn.release()
        raise


def tls_socket(sock: socket.socket, purpose: Purpose, credentials: Credentials) -> ssl.SSLSocket:
    """TLS over a blocking socket that is connected to a head; the handshake of frames.py follows.

    Raises:
        AuthenticationError: the head has another token file, or is none; the socket is closed.
        OSError: the connection broke.
    """
    with _closing_on_error(sock), _tls_errors(credentials):
        sock.sendall(purpose.value)
        wrapped = credentials.client_context().wrap_socket(sock)
    if wrapped.getpeercert(binary_form=True) != credentials.certificate_bytes():
        wrapped.close()
        raise AuthenticationError("the other end has a certificate of another token file")
    return wrapped


async def _prove(
    streams: Streams, key: bytes, credentials: Credentials, *, role: Role, identity: int
) -> int:
    """The other end's identity, once its certificate and the handshake of frames.py are right.

    The streams are closed otherwise.
    """
    reader, writer = streams
    try:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if certificate != credentials.certificate_bytes():
            raise AuthenticationError("the other end has a certificate of another token file")
        with _tls_errors(credentials):
            return await shake_hands(reader, writer, token=key, role=role, identity=identity)
    except BaseException:
        writer.transport.abort()
        raise


def _peer(sock: socket.socket) -> tuple[Any, ...]:
    """The endpoint of the other end; () if it has left."""
    try:
        endpoint: tuple[Any, ...] = sock.getpeername()
    except OSError:
        return ()
    return endpoint


async def _wait_tls(sock: socket.socket) -> None:
    """Waits until TLS begins to arrive, and leaves it there.

    Raises:
        AuthenticationError: something else arrives.
        EOFError: the stream ended.
        OSError: the connection broke.
    """
    loop, descriptor = asyncio.get_running_loop(), sock.fileno()
    arrived = asyncio.Event()
    loop.add_reader(descriptor, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(descriptor)
    first = sock.recv(1, socket.MSG_PEEK)
    if not first:
        raise EOFError
    if first != _TLS_HANDSHAKE:
        raise AuthenticationError("the other end does not speak TLS")


@contextmanager
def _closing_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


@contextmanager
def _tls_errors(credentials: Credentials) -> Iterator[None]:
    """Turns errors of TLS into AuthenticationErrors that say what to do."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise AuthenticationError(certificate_problem(credentials, error)) from error
    except ssl.SSLEOFError:
        raise
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        if "CERTIFICATE_EXPIRED" in reason or "BAD_CERTIFICATE" in reason:
            text = "the other end does not accept the certificate of the token file by its clock"
        elif "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
            text = "the other end has a certificate of another token file: copy one file to both"
        else:
            text = f"the other end does not speak planaria's TLS ({reason})"
            raise StrangerError(text) from error
        raise AuthenticationError(text) from error


def _refusal_text(error: Exception) -> str:
    if isinstance(error, AuthenticationError | TimeoutError):
        return str(error)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return (
        "the other end closed the connection during the handshake: either it was answered too "
        "late and tries again, or it has another token file"
    )


def _route_text(endpoint: tuple[object, ...], asked: str) -> str:
    """The address, unless that is what was asked for, and that from which the kernel goes there."""
    there = address_text((str(endpoint[0]), int(str(endpoint[1]))))
    text = "" if there == asked else f" at {there}"
    family = socket.AF_INET6 if len(endpoint) > 2 else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(endpoint)  # A datagram socket sends nothing by it.
        return f"{text} from {sock.getsockname()[0]}"
    return text
