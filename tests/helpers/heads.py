"""A head on this machine that lets clients in, for tests of the public port."""

import asyncio
import contextlib
import inspect
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from helpers.tasks import TIMEOUT_S
from planaria.errors import AuthenticationError
from planaria.transport.acceptor import Acceptor, Handshakes, Purpose, connect, listen
from planaria.transport.credentials import Credentials, make_credentials
from planaria.transport.sockets import Address

CREDENTIALS = make_credentials()
WELCOME = b"welcome"  # What a head sends to whom it has let in.
NUM_TRIES = 20
TEST_TIMEOUT_S = 90.0  # A machine that does other things serves a flood slowly.
Accepted = tuple[asyncio.StreamReader, asyncio.StreamWriter, int]


def runs(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Runs a test on an event loop that reports whatever goes wrong behind its back."""

    def run(**fixtures: object) -> None:
        async def watched() -> None:
            problems: list[object] = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: problems.append(context))
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await test(**fixtures)
            assert not problems, problems

        asyncio.run(watched())

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


@dataclass
class Head:
    """An acceptor that accepts every purpose, with what came of it."""

    address: Address
    acceptor: Acceptor
    accepted: list[Accepted] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@asynccontextmanager
async def head(
    credentials: Credentials = CREDENTIALS,
    *,
    num_half_open_max: int = 16,
    num_handshakes_max: int = 16,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[Head]:
    """A head on this machine."""
    sockets, address = listen("127.0.0.1:0")
    handshakes = Handshakes(credentials, num_max=num_handshakes_max)
    tasks = set()

    async def serve(purpose: Purpose, sock: socket.socket) -> None:
        try:
            streams = await handshakes.accept(sock, purpose)
            running.accepted.append(streams)
            streams[1].write(WELCOME)
        except AuthenticationError as error:
            running.refused.append(str(error))

    def start(purpose: Purpose, sock: socket.socket) -> None:
        tasks.add(asyncio.create_task(serve(purpose, sock)))

    handlers = {purpose: partial(start, purpose) for purpose in Purpose}
    acceptor = Acceptor(sockets, handlers, num_half_open_max=num_half_open_max, timeout_s=timeout_s)
    running = Head(address, acceptor)
    acceptor.start()
    try:
        yield running
    finally:
        acceptor.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, writer, _ in running.accepted:
            writer.transport.abort()


async def joined(running: Head, purpose: Purpose = Purpose.NODE, identity: int = 0) -> Accepted:
    """Streams of a client that is let in."""
    reader, writer = await connect(
        running.address, purpose, CREDENTIALS, timeout_s=TIMEOUT_S, identity=identity
    )
    return reader, writer, identity


async def assert_open(running: Head) -> None:
    """A client with the token file still gets in; it tries again like every client."""
    for number in range(NUM_TRIES):
        with contextlib.suppress(AuthenticationError, ConnectionError, EOFError):
            reader, writer, _ = await joined(running, identity=number)
            assert await reader.readexactly(len(WELCOME)) == WELCOME
            writer.transport.abort()
            return
    raise AssertionError(f"a client did not get in at {NUM_TRIES} tries")
