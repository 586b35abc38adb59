"""Requests to a job over the port of its head, from any machine that has the token file.

`NetworkRequests` is the head's end, `ask_head` and `HeadConnection` are the user's.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from planaria.errors import AuthenticationError
from planaria.nodes.head.requests import Answer, Request, RequestReply, answer_requests
from planaria.transport.acceptor import Handshakes, Purpose, Streams, connect
from planaria.transport.credentials import Credentials
from planaria.transport.sockets import Address, address_text
from planaria.transport.strangers import RefusalLog

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 10.0
_REPLY_BYTES_MAX: Final = 1 << 28
_READ_BYTES: Final = 1 << 20


class NetworkRequests:
    """Answers the requests that come to the port of a head.

    Args:
        handshakes: handshakes with all that connect to the head.
        answer: function that answers requests.
    """

    def __init__(self, handshakes: Handshakes, answer: Answer) -> None:
        self._answer = answer
        self._handshakes = handshakes
        self._refusals = RefusalLog(logger)
        self._serving: set[asyncio.Task[None]] = set()

    def accept(self, sock: socket.socket) -> None:
        """Answers the requests of a connection; for the acceptor."""
        task = asyncio.create_task(self._serve(sock))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def close(self) -> None:
        """Closes all connections; requests that are under way get no answer."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            reader, writer, _ = await self._handshakes.accept(sock, Purpose.REQUEST)
        except AuthenticationError as error:
            self._refusals.add(f"a request: {error}")
            return
        await answer_requests(reader, writer, self._answer)


class HeadConnection:
    """A connection to a head, over which requests are sent one after the other.

    Attributes:
        streams: streams of the connection.
    """

    def __init__(self, address: Address, streams: Streams) -> None:
        self._address = address
        self.streams = streams

    async def ask(self, request: Request, *, timeout_s: float) -> RequestReply:
        """The reply to a request.

        Raises:
            ConnectionError: the connection broke, or no reply came in time.
        """
        reader, writer = self.streams
        writer.write(msgspec.json.encode(request) + b"\n")
        where = address_text(self._address)
        try:
            async with asyncio.timeout(timeout_s):
                line = await _read_line(reader)
        except TimeoutError as error:
            text = f"the head at {where} has not answered for {timeout_s:.0f} s"
            raise ConnectionError(text) from error
        except OSError as error:
            raise ConnectionError(f"the connection to {where} broke: {error}") from error
        if not line:
            return RequestReply(is_done=False, text="the job has ended")
        try:
            return msgspec.json.decode(line, type=RequestReply)
        except (RecursionError, ValueError) as error:
            text = f"the head at {where} has another version of planaria: {error}"
            raise ConnectionError(text) from error


@asynccontextmanager
async def head_connection(
    address: Address, credentials: Credentials, *, timeout_s: float = _CONNECT_TIMEOUT_S
) -> AsyncIterator[HeadConnection]:
    """A connection to a head for requests.

    Raises:
        AuthenticationError: the head has another token file, or is none.
        ConnectionError: there is no head at that address, or it cannot be reached.
    """
    streams = await connect(address, Purpose.REQUEST, credentials, timeout_s=timeout_s)
    try:
        yield HeadConnection(address, streams)
    finally:
        streams[1].transport.abort()


def ask_head(
    address: Address, credentials: Credentials, request: Request, *, timeout_s: float
) -> RequestReply:
    """The reply of a head to a request.

    Args:
        timeout_s: maximum time to wait for the reply, once there is a connection.

    Raises:
        AuthenticationError: the head has another token file, or is none.
        ConnectionError: there is no head at that address, it cannot be reached, or it does not
            answer in time.
    """

    async def ask() -> RequestReply:
        async with head_connection(address, credentials) as connection:
            return await connection.ask(request, timeout_s=timeout_s)

    return asyncio.run(ask())


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """The next line, which may be longer than the reader's limit; what came of it before the end.

    Raises:
        ConnectionError: it is longer than any reply.
        OSError: the connection broke.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        data = await reader.read(_READ_BYTES)
        if not data:
            break
        line += data
        if len(line) > _REPLY_BYTES_MAX:
            raise ConnectionError("the reply does not end")
    return bytes(line)
