"""TLS between ranks: what a connection sends is encrypted, and nobody can change it unnoticed.

A run has one certificate, which each of its processes derives from the run's token. The token comes
to a node over the authenticated connection of its head, and is another one in each run. Both ends
present the certificate and accept no other. Each connection agrees on keys of its own (TLS 1.3), so
one that is made in a later epoch has other keys. Inside TLS the ranks prove the key of their
purpose, as without it (frames.py).

`LinkTls` touches no socket but to read from it: bytes go in, and bytes to send come out. The end
that accepts makes its buffers when the other end has sent something, so that one who only connects
costs no memory. Time and number of handshakes are bounded as without TLS (serving.py).
"""

import ssl
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from socket import socket
from typing import Any, Final

from planaria.errors import AuthenticationError
from planaria.transport.credentials import run_credentials

_READ_BYTES: Final = 1 << 18
_TURN_BYTES: Final = 1 << 17  # More would wait encrypted for the kernel.


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """What all connections of a rank need for TLS.

    Attributes:
        certificate: certificate of the run, as DER.
        server, client: contexts of the end that accepts, and of the end that connects.
    """

    certificate: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext


def link_security(token: bytes) -> LinkSecurity:
    """TLS for the links of a run; it takes about 0.1 s.

    Args:
        token: token of the run, which nobody else knows.
    """
    credentials = run_credentials(token)
    return LinkSecurity(
        credentials.certificate_bytes(), credentials.server_context(), credentials.client_context()
    )


class LinkTls:
    """TLS of one connection. One thread reads, and one at a time writes.

    Attributes:
        unsent: encrypted bytes that the kernel has not taken yet; only the end that writes uses it.
    """

    def __init__(self, security: LinkSecurity, *, is_server: bool) -> None:
        self.unsent = memoryview(b"")
        self._security = security
        self._is_server = is_server
        self._lock = threading.Lock()  # Guards what follows: OpenSSL lets one thread in.
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None if is_server else self._open()
        self._is_proved = False

    def encrypt(self, plain: deque[memoryview]) -> bool:
        """Takes some of the bytes from a queue and encrypts them to `unsent`, which must be empty.

        Returns:
            Whether there is anything to send now. If not, the queue is empty, or the other end has
            to send something first.

        Raises:
            AuthenticationError: the other end is no process of this run.
            OSError: TLS broke.
        """
        assert not self.unsent
        with self._lock:
            if self._tls is not None:
                with suppress(ssl.SSLWantReadError):  # What is outgoing so far has to be sent.
                    self._shake_hands(self._tls)
                    room = _TURN_BYTES
                    while plain and room:
                        # All of what it is given is encrypted, however much that is.
                        num_written = self._tls.write(plain[0][:room])
                        room -= num_written
                        if num_written < len(plain[0]):
                            plain[0] = plain[0][num_written:]
                        else:
                            plain.popleft()
            self.unsent = memoryview(self._outgoing.read())
        return bool(self.unsent)

    def read_into(self, sock: socket, memory: memoryview, *, can_receive: bool) -> int:
        """Decrypts bytes into the memory; returns their number, 0 if the stream has ended.

        Args:
            can_receive: whether more may be received; if not, only what has been is decrypted.

        Raises:
            BlockingIOError: nothing more is there now.
            AuthenticationError: the other end is no process of this run.
            OSError: the connection broke, or what came was changed on its way.
        """
        with self._lock:
            while True:
                if self._tls is not None:
                    with suppress(ssl.SSLWantReadError):
                        self._shake_hands(self._tls)
                        return _decrypt_into(self._tls, memory)
                if not can_receive:
                    raise BlockingIOError
                data = sock.recv(_READ_BYTES)
                if not data:
                    return 0
                self._incoming.write(data)
                self._tls = self._tls or self._open()

    def _open(self) -> ssl.SSLObject:
        security = self._security
        context = security.server if self._is_server else security.client
        return context.wrap_bio(self._incoming, self._outgoing, server_side=self._is_server)

    def _shake_hands(self, tls: ssl.SSLObject) -> None:
        """Goes on with the handshake, and checks the other end's certificate at its end.

        Raises:
            SSLWantReadError: the other end has to send something first.
            AuthenticationError: the other end is no process of this run.
        """
        if self._is_proved:
            return
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            text = f"the other end is no rank of this run: it failed at TLS ({reason})"
            raise AuthenticationError(text) from error
        if tls.getpeercert(binary_form=True) != self._security.certificate:
            raise AuthenticationError("the other end has the certificate of another run")
        self._is_proved = True


def _decrypt_into(tls: ssl.SSLObject, memory: memoryview) -> int:
    """The number of bytes of all records that are there; 0: the stream has ended.

    Raises:
        SSLWantReadError: there is no whole record.
    """
    num_bytes = 0
    while num_bytes < len(memory):
        rest: Any = memory[num_bytes:]  # The stubs know bytearrays alone.
        try:
            num_read: Any = tls.read(len(rest), rest)
        except ssl.SSLZeroReturnError:
            break
        except ssl.SSLWantReadError:
            if num_bytes:
                break
            raise
        num_bytes += int(num_read)
    return num_bytes
