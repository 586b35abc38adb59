"""Of several heads the first that answers is taken, and only one of them hears of it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from helpers.heads import CREDENTIALS, Head, head, runs
from helpers.tasks import TIMEOUT_S, wait_until
from planaria.errors import AuthenticationError, StrangerError
from planaria.transport import acceptor, head_search
from planaria.transport.acceptor import Purpose, Streams, connect
from planaria.transport.credentials import make_credentials
from planaria.transport.frames import NODES, Role, derive
from planaria.transport.head_search import connect_first
from planaria.transport.sockets import Address

OTHERS = make_credentials()
NUM_REFUSED = 2


@pytest.fixture
def silent() -> Iterator[Address]:
    """An address at which the kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@pytest.fixture
def closed() -> Address:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: Address = listener.getsockname()
    return address


async def found(*addresses: Address, timeout_s: float = TIMEOUT_S, key: bytes = b"") -> Address:
    """The address of the head that is found; the connection is closed."""
    address, (_, writer) = await connect_first(
        addresses, Purpose.NODE, CREDENTIALS, timeout_s=timeout_s, identity=7, key=key
    )
    writer.transport.abort()
    return address


@runs
async def test_addresses_that_are_silent_take_no_time_from_the_one_that_answers(
    silent: Address,
) -> None:
    """With all of the time shared out, each of them cost a node a part of its lease."""
    loop = asyncio.get_running_loop()
    async with head() as running:
        began_s = loop.time()
        assert await found(*(silent,) * 4, running.address) == running.address
        took_s = loop.time() - began_s
        identities = [identity for _, _, identity in running.accepted]

    assert identities == [7]
    assert took_s < TIMEOUT_S / 2


@runs
async def test_a_head_that_stops_before_it_has_proved_itself_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had its turn, and the others waited for that until all of the time was over."""
    num_proofs = 0

    async def prove(*args: Any, **options: Any) -> int:
        nonlocal num_proofs
        num_proofs += options["role"] is Role.CONNECT
        if options["role"] is Role.CONNECT and num_proofs == 1:
            await asyncio.Event().wait()
        return await real_prove(*args, **options)

    real_prove = acceptor._prove
    monkeypatch.setattr(acceptor, "_prove", prove)
    async with head() as first, head() as second:
        address = await found(first.address, second.address, timeout_s=4.0)
        assert address == second.address
        assert [len(each.accepted) for each in (first, second)] == [0, 1]


@runs
async def test_a_head_that_has_several_addresses_hears_of_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator takes the end of the newest one for the loss of the node."""
    monkeypatch.setattr(head_search, "_HEAD_START_S", 0.0)

    async def connect_slowly(*args: Any, **options: Any) -> Streams:
        """Connects, and lets the other tries go on before that is known."""
        streams = await connect(*args, **options)
        for _ in range(NUM_REFUSED):
            with pytest.raises(ConnectionError):
                await connect(*args, **options | {"timeout_s": 0.05})
        return streams

    monkeypatch.setattr(head_search, "connect", connect_slowly)
    async with head() as running:
        assert await found(*(running.address,) * 4) == running.address
        assert len(running.accepted) == 1


@runs
async def test_a_head_that_refuses_gives_way_to_the_next(closed: Address) -> None:
    """One of another token file, or of another job, which has another key."""
    async with head(OTHERS) as other, head() as running:
        addresses = other.address, closed, running.address
        assert await found(*addresses) == running.address
        with pytest.raises(AuthenticationError):
            await found(running.address, key=derive(b"another job", NODES))


@runs
async def test_the_token_file_is_at_fault_only_if_all_addresses_refuse(
    closed: Address, silent: Address
) -> None:
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(head(OTHERS)) for _ in range(2)]
        addresses = [other.address for other in others]
        with pytest.raises(AuthenticationError) as refused:
            await found(*addresses)
        with pytest.raises(ConnectionError) as unreachable:
            await found(*addresses, closed)
        with pytest.raises(ConnectionError, match=r"no answer in time.*Connection refused"):
            await found(silent, *addresses, closed, timeout_s=2.0)  # The order does not change.

    assert all(str(port) in str(refused.value) for _, port in addresses)
    assert all(str(port) in str(unreachable.value) for _, port in (*addresses, closed))


@runs
async def test_what_is_no_head_is_told_from_a_head_of_another_token_file() -> None:
    """The token file is right then, and the address is not."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with head(OTHERS) as other, await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        service: Address = server.sockets[0].getsockname()
        with pytest.raises(StrangerError, match=str(service[1])):
            await found(service)
        with pytest.raises(AuthenticationError) as refused:
            await found(service, other.address)

    assert not isinstance(refused.value, StrangerError)


@runs
async def test_nothing_is_left_open_when_a_search_is_cancelled(silent: Address) -> None:
    async with head() as running:
        search = asyncio.create_task(found(silent, running.address))
        await asyncio.sleep(0)
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        assert await _is_idle(running)


async def _is_idle(running: Head) -> bool:
    """Whether a head has let nobody in before a client that comes now."""
    _, writer = await connect(running.address, Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)
    await wait_until(lambda: bool(running.accepted))
    writer.transport.abort()
    return len(running.accepted) == 1
