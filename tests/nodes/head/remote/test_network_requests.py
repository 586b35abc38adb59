"""Requests over a head's port: the same answers as on its machine, and nothing for strangers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from helpers.heads import CREDENTIALS, runs
from helpers.left_runs import open_left_head
from helpers.tasks import TIMEOUT_S, wait_until
from planaria.errors import AuthenticationError
from planaria.nodes.head.remote import machines
from planaria.nodes.head.remote.network_requests import NetworkRequests, ask_head, head_connection
from planaria.nodes.head.requests import Drain, Request, RequestReply, TellEvents
from planaria.transport.acceptor import Acceptor, Handshakes, Purpose, connect, listen
from planaria.transport.credentials import make_credentials
from planaria.transport.sockets import Address

LONG = "e" * (1 << 20)  # Much more than a stream's limit, and than a request may have.


async def echo(request: Request) -> RequestReply:
    return RequestReply(is_done=isinstance(request, Drain), text=str(request))


@contextlib.asynccontextmanager
async def serving(requests: NetworkRequests) -> AsyncIterator[Address]:
    """A port at which requests are answered."""
    sockets, address = listen("127.0.0.1:0")
    acceptor = Acceptor(sockets, {Purpose.REQUEST: requests.accept})
    acceptor.start()
    try:
        yield address
    finally:
        acceptor.close()
        await requests.close()


async def asked(address: Address, request: Request) -> RequestReply:
    """The answer of `ask_head`, which has a loop of its own."""
    return await asyncio.to_thread(ask_head, address, CREDENTIALS, request, timeout_s=TIMEOUT_S)


@runs
async def test_a_head_answers_who_has_the_token_file() -> None:
    async with serving(NetworkRequests(Handshakes(CREDENTIALS), echo)) as address:
        drained = await asked(address, Drain(3))
        events = await asked(address, TellEvents())

    assert drained == RequestReply(is_done=True, text="Drain(node=3)")
    assert not events.is_done


@runs
async def test_a_long_answer_arrives_whole() -> None:
    """The events of a long job have megabytes; a stream's lines end at 64 KiB."""

    async def answer(_: Request) -> RequestReply:
        return RequestReply(is_done=True, text=LONG)

    async with serving(NetworkRequests(Handshakes(CREDENTIALS), answer)) as address:
        assert (await asked(address, TellEvents())).text == LONG


@runs
async def test_a_request_that_raises_here_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The user read that the job had ended, and nobody was told of the error."""

    async def answer(_: Request) -> RequestReply:
        raise ValueError("a bug")

    async with serving(NetworkRequests(Handshakes(CREDENTIALS), answer)) as address:
        reply = await asked(address, TellEvents())

    assert not reply.is_done
    assert "could not answer" in reply.text
    assert "ValueError: a bug" in caplog.text


@runs
async def test_one_connection_takes_several_requests() -> None:
    """The way to a head is measured over one connection, without its handshakes."""
    async with (
        serving(NetworkRequests(Handshakes(CREDENTIALS), echo)) as address,
        head_connection(address, CREDENTIALS) as connection,
    ):
        texts = [(await connection.ask(Drain(n), timeout_s=TIMEOUT_S)).text for n in range(3)]

    assert texts == [f"Drain(node={node})" for node in range(3)]


@runs
async def test_another_token_file_and_no_head_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free: Address = listener.getsockname()[:2]
    async with serving(NetworkRequests(Handshakes(CREDENTIALS), echo)) as address:
        ask = asyncio.to_thread(
            ask_head, address, make_credentials(), TellEvents(), timeout_s=TIMEOUT_S
        )
        with pytest.raises(AuthenticationError, match="another token file"):
            await ask

    with pytest.raises(ConnectionError, match=r"cannot be reached from .*refused"):
        await asked(free, TellEvents())


MALFORMED = [
    b"\n",
    b"{}\n",
    b"\xff\xfe\n",
    b'{"type":"Drain","node":"x"}\n',
    b'{"type":"Other"}\n',
    b'{"type":"TellEvents","x":' + b"[" * 30_000 + b"]" * 30_000 + b"}\n",
    b'{"type":"TellEvents","x":"' + LONG.encode() + b'"}\n',
]


@runs
async def test_a_malformed_request_closes_its_own_connection_alone() -> None:
    """Deep nesting raises a RecursionError in the decoder, which is no ValueError."""
    async with (
        serving(NetworkRequests(Handshakes(CREDENTIALS), echo)) as address,
        head_connection(address, CREDENTIALS) as beside,
    ):
        for data in MALFORMED:
            reader, writer = await connect(
                address, Purpose.REQUEST, CREDENTIALS, timeout_s=TIMEOUT_S
            )
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", data[:40]
            writer.transport.abort()
            assert (await beside.ask(Drain(1), timeout_s=TIMEOUT_S)).is_done


@runs
async def test_a_head_that_ends_answers_nobody_and_a_silent_one_is_given_up() -> None:
    waiting = asyncio.Event()

    async def never(_: Request) -> RequestReply:
        waiting.set()
        await asyncio.Event().wait()
        raise AssertionError

    requests = NetworkRequests(Handshakes(CREDENTIALS), never)
    async with serving(requests) as address, head_connection(address, CREDENTIALS) as connection:
        with pytest.raises(ConnectionError, match="has not answered for 0 s"):
            await connection.ask(Drain(1), timeout_s=0.01)
        await waiting.wait()
        waiting.clear()
        ask = asyncio.create_task(asked(address, Drain(1)))
        await waiting.wait()
        await requests.close()

        assert await ask == RequestReply(is_done=False, text="the job has ended")


@runs
async def test_an_answer_of_another_version_is_an_error_in_one_line() -> None:
    async def answer(_: Request) -> RequestReply:
        return msgspec.structs.replace(RequestReply(True, ""), text=3)

    async with serving(NetworkRequests(Handshakes(CREDENTIALS), answer)) as address:
        with pytest.raises(ConnectionError, match="another version of planaria"):
            await asked(address, TellEvents())


def test_strangers_are_bounded_together_whatever_they_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each purpose had a bound of its own, and together they took all files of the head."""
    monkeypatch.setattr(machines, "Handshakes", partial(Handshakes, num_max=4))
    with open_left_head(tmp_path) as (head, runner), head, contextlib.ExitStack() as stack:
        strangers = []
        for purpose in 4 * (Purpose.MACHINE, Purpose.REQUEST):
            stranger = socket.create_connection(head.leader_sockets.address)
            strangers.append(stack.enter_context(stranger))
            stranger.sendall(purpose.value)

        runner.run(wait_until(lambda: sum(map(is_closed, strangers)) == 4))


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed a connection on which it has said nothing."""
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
