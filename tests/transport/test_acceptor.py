"""The public port of a head: who is let in, and what becomes of strangers."""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from typing import NoReturn

import msgspec
import pytest

from helpers.heads import CREDENTIALS, WELCOME, assert_open, head, joined, runs
from helpers.tasks import TIMEOUT_S, wait_until
from planaria.errors import AuthenticationError, ConfigError
from planaria.transport import acceptor as module
from planaria.transport.acceptor import (
    Acceptor,
    Handshakes,
    Purpose,
    accept,
    connect,
    listen,
    parse_address,
)
from planaria.transport.credentials import credentials_between, make_credentials
from planaria.transport.frames import Role
from planaria.transport.sockets import Address, address_text

OTHER = make_credentials()
DAY = timedelta(days=1)


@pytest.mark.parametrize("purpose", list(Purpose))
@runs
async def test_both_ends_talk_over_tls(purpose: Purpose) -> None:
    """The head learns the identity of who joins; both directions carry bytes."""
    async with head() as running:
        reader, writer, _ = await joined(running, purpose, identity=(1 << 64) - 1)
        writer.write(b"x" * (1 << 20))
        await wait_until(lambda: bool(running.accepted))
        its_reader, its_writer, identity = running.accepted[0]
        its_writer.write(b"answer")

        assert identity == (1 << 64) - 1
        assert await its_reader.readexactly(1 << 20) == b"x" * (1 << 20)
        assert await reader.readexactly(13) == WELCOME + b"answer"
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.close()
        await writer.wait_closed()
        assert await its_reader.read() == b""


@runs
async def test_a_silent_machine_is_noticed() -> None:
    """Both ends have keepalive and a limit for unacknowledged bytes."""
    async with head() as running:
        _, writer, _ = await joined(running)
        await wait_until(lambda: bool(running.accepted))

        for one in (writer, running.accepted[0][1]):
            sock = one.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        writer.close()


@runs
async def test_another_token_file_is_refused_by_both_ends() -> None:
    """Both say what to do."""
    async with head() as running:
        with pytest.raises(AuthenticationError, match="another token file: copy one file"):
            await connect(running.address, Purpose.NODE, OTHER, timeout_s=TIMEOUT_S)
        await wait_until(lambda: bool(running.refused))

        assert "127.0.0.1" in running.refused[0]
        assert (
            "answered too late and tries again, or it has another token file" in running.refused[0]
        )
        await assert_open(running)


@runs
async def test_the_right_certificate_without_the_secret_is_refused() -> None:
    """The certificate is shown to whoever connects with a key; the secret never travels."""
    thief = msgspec.structs.replace(CREDENTIALS, secret=b"?" * 32)
    async with head() as running:
        with pytest.raises(AuthenticationError, match="has another job token"):
            await connect(running.address, Purpose.NODE, thief, timeout_s=TIMEOUT_S)
        await wait_until(lambda: bool(running.refused))

        assert "has another job token" in running.refused[0]
        await assert_open(running)


@runs
async def test_a_proof_for_one_purpose_serves_no_other() -> None:
    """Whoever may only inject faults, say, must not become a node."""
    async with head() as running:
        sock = socket.create_connection(running.address)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, Purpose.NODE.value)
        streams = await asyncio.open_connection(
            sock=sock, ssl=CREDENTIALS.client_context(), server_hostname=""
        )
        key = CREDENTIALS.derive(Purpose.PROBE.key_name)
        with pytest.raises(AuthenticationError, match="has another job token"):
            await module._prove(streams, key, CREDENTIALS, role=Role.CONNECT, identity=0)
        await wait_until(lambda: bool(running.refused))
        assert not running.accepted


@runs
async def test_a_client_without_certificate_is_refused() -> None:
    """TLS is mutual."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with head() as running:
        sock = socket.create_connection(running.address)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(sock, Purpose.NODE.value)
        _, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname="")
        await wait_until(lambda: bool(running.refused))
        writer.transport.abort()

        assert not running.accepted
        await assert_open(running)


@runs
async def test_an_expired_certificate_is_refused_with_the_clock_that_says_so() -> None:
    """A clock may be wrong, or ten years may be over."""
    now = datetime.now(UTC)
    expired = credentials_between(now - 2 * DAY, now - DAY)
    async with head(expired) as running:
        with pytest.raises(AuthenticationError, match=r"this machine's clock says .*set the clock"):
            await connect(running.address, Purpose.NODE, expired, timeout_s=TIMEOUT_S)
        await wait_until(lambda: bool(running.refused))

        assert (
            "answered too late and tries again, or it has another token file" in running.refused[0]
        )


@runs
async def test_a_head_that_is_none_is_refused() -> None:
    """The port of a web server, say."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    with pytest.raises(AuthenticationError, match="does not speak planaria's TLS"):
        await connect(address, Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)
    server.close()


@runs
async def test_a_head_that_cannot_be_reached_is_named_with_both_addresses() -> None:
    """Nobody listens; nobody answers; the name does not resolve."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        closed = sock.getsockname()
    with pytest.raises(
        ConnectionError, match=r"cannot be reached from 127.0.0.1: .*refused"
    ) as error:
        await connect(closed, Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)
    assert "is the head running" in str(error.value)
    with pytest.raises(
        ConnectionError, match=r"reached at 127.0.0.1:\d+ from 127.0.0.1: .*refused"
    ):
        await connect(("127.1", closed[1]), Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConnectionError, match="no answer in time"),
    ):
        await connect(silent.getsockname(), Purpose.NODE, CREDENTIALS, timeout_s=0.05)
    with pytest.raises(ConnectionError, match="the name does not resolve"):
        await connect(("no.invalid", 1), Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)


@runs
async def test_a_head_is_reached_although_its_name_has_an_address_that_is_of_no_use_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel without IPv6 has no such sockets; the address of IPv4 was not tried then."""
    async with head() as running:
        of_no_use = (99, socket.SOCK_STREAM, 6, "", ("::1", 1, 0, 0))  # No kernel has this family.
        of_use = (socket.AF_INET, socket.SOCK_STREAM, 6, "", running.address)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [of_no_use, of_use])
        streams = await connect(("head", 1), Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)

        streams[1].close()


def test_a_resolver_that_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an event loop waits for the threads of its executor, however long they take."""
    is_over, answers = threading.Event(), []

    def resolve(*_: object, flags: int = 0, **__: object) -> NoReturn:
        if not flags:
            is_over.wait(TIMEOUT_S / 4)
            answers.append("none")
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ConnectionError, match="the name does not resolve"):
        asyncio.run(connect(("a-head", 1), Purpose.MACHINE, CREDENTIALS, timeout_s=0.01))
    told = tuple(answers)
    is_over.set()

    assert told == ()


@pytest.mark.parametrize("name", ["a..b", "a" * 64, "a-name-that-nobody-has.invalid"])
@runs
async def test_a_name_that_does_not_resolve_is_a_connection_that_fails(name: str) -> None:
    """That of another machine may come later. A text that can be no name ended the agent."""
    with pytest.raises(ConnectionError, match=r"the name does not resolve .*; name the head's IP"):
        await connect((name, 1), Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)


@runs
async def test_an_address_needs_no_thread_to_be_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be none: threads that look up names wait there for as long as no server answers.
    A name that cannot be looked up is a connection that fails."""

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    async with head() as running:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        await joined(running)
        with pytest.raises(ConnectionError, match="can't start new thread"):
            await connect(("localhost", 1), Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)


@runs
async def test_a_connection_that_gives_way_is_broken_at_once() -> None:
    """Whenever it does: else its client would wait for the whole handshake in vain."""
    sockets, address = listen("127.0.0.1:0")
    handed: list[socket.socket] = []
    acceptor = Acceptor(sockets, {Purpose.NODE: handed.append})
    acceptor.start()
    for num_turns in range(1, 8):
        client = asyncio.create_task(
            connect(address, Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S)
        )
        await wait_until(lambda: bool(handed))
        accepting = asyncio.create_task(accept(handed.pop(), Purpose.NODE, CREDENTIALS))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        accepting.cancel()
        with pytest.raises((ConnectionError, AuthenticationError)):
            await client
    acceptor.close()


@runs
async def test_a_socket_is_accepted_once_alone() -> None:
    """As in a process to which an acceptor of another one hands a socket."""
    sockets, address = listen("127.0.0.1:0")
    handed: list[socket.socket] = []
    acceptor = Acceptor(sockets, {Purpose.NODE: handed.append})
    acceptor.start()
    client = asyncio.create_task(
        connect(address, Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S, identity=3)
    )
    await wait_until(lambda: bool(handed))
    _, writer, identity = await accept(handed[0], Purpose.NODE, CREDENTIALS)
    _, client_writer = await client
    acceptor.close()

    assert identity == 3
    writer.transport.abort()
    client_writer.transport.abort()


# -- strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "b'GET / HTTP/1.1\\r\\n', which is no preface"),
        (b"\x16\x03\x01", "which is no preface"),
        (b"planaria2node   ", "which is no preface"),
        (b"planaria1n", "it ended before its preface did"),
        (b"", "it ended before its preface did"),
    ],
)
@runs
async def test_a_stranger_is_a_line_in_the_log(
    sent: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage is refused at its first wrong byte; half a preface when it ends."""
    async with head() as running:
        with socket.create_connection(running.address) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            await wait_until(lambda: bool(caplog.records))
        await assert_open(running)

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "refused a connection: 127.0.0.1:" in record.message
    assert reason in record.message


@pytest.mark.parametrize("sent", [b"x" * 100, b"\x16\x03\x01\x00\x05hello", b"\x00" * 5000, b""])
@runs
async def test_garbage_after_a_preface_is_refused(sent: bytes) -> None:
    """TLS has no use for it, nor for a connection that ends there."""
    async with head() as running:
        with socket.create_connection(running.address) as sock:
            sock.sendall(Purpose.NODE.value + sent)
            sock.shutdown(socket.SHUT_WR)
            await wait_until(lambda: bool(running.refused))
        await assert_open(running)

    assert len(running.refused) == 1


@runs
async def test_a_connection_that_says_nothing_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would hold a descriptor for ever."""
    async with head(timeout_s=0.01) as running:
        with socket.create_connection(running.address) as sock:
            await wait_until(lambda: bool(caplog.records))
            assert await asyncio.to_thread(sock.recv, 1) == b""

    assert "no preface came" in caplog.text


@runs
async def test_a_purpose_that_nobody_serves_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A head that serves no requests, say."""
    sockets, address = listen("127.0.0.1:0")
    acceptor = Acceptor(sockets, {})
    acceptor.start()
    with pytest.raises(ConnectionError):
        await connect(address, Purpose.REQUEST, CREDENTIALS, timeout_s=TIMEOUT_S)
    acceptor.close()

    assert "nothing here serves the purpose REQUEST" in caplog.text


@pytest.mark.parametrize("preface", [b"", b"planaria1", Purpose.NODE.value])
@runs
async def test_of_too_many_connections_the_oldest_gives_way(preface: bytes) -> None:
    """Before the preface, and in the handshake after it."""
    async with head(num_half_open_max=4, num_handshakes_max=4) as running:
        with contextlib.ExitStack() as stack:
            strangers = [
                stack.enter_context(socket.create_connection(running.address)) for _ in range(6)
            ]
            for stranger in strangers:
                stranger.sendall(preface)
            await assert_open(running)
            for stranger in strangers[:3]:
                assert await asyncio.to_thread(stranger.recv, 1) == b""
            await assert_open(running)


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("head:29500", ("head", 29500)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
        (":1", ("", 1)),
    ],
)
def test_addresses_are_parsed_and_written_alike(text: str, address: Address) -> None:
    """IPv6 addresses are in brackets."""
    assert parse_address(text, field="--join") == address
    assert address_text(address) == text


@pytest.mark.parametrize(
    "text", ["", "head", "29500", "::1:5", "h:", "h:65536", "h:-1", "h:\u0663"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """With the forms that would do."""
    with pytest.raises(ConfigError, match=r"--join = .*HOST:PORT, \[IPv6\]:PORT or :PORT"):
        parse_address(text, field="--join")


def test_all_addresses_are_listened_at_with_one_port() -> None:
    """IPv4 and, where there is one, IPv6."""
    sockets, (host, port) = listen(":0")

    assert host == "0.0.0.0"
    assert {sock.getsockname()[1] for sock in sockets} == {port}
    for sock in sockets:
        sock.close()


def test_where_nobody_can_listen_is_refused() -> None:
    """With what would do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = address_text(taken.getsockname()[:2])
        with pytest.raises(ConfigError, match="another process listens there"):
            listen(address)
    with pytest.raises(ConfigError, match="this machine has no such address"):
        listen("192.0.2.1:0")
    with pytest.raises(ConfigError, match="the name does not resolve"):
        listen("no.invalid:0")


@runs
async def test_whoever_has_another_key_is_refused_though_it_has_the_token_file() -> None:
    """A node of an older run of the job was taken for the node of the new run with its number."""
    listener = socket.create_server(("127.0.0.1", 0))
    handshakes, loop = Handshakes(CREDENTIALS), asyncio.get_running_loop()
    listener.setblocking(False)
    address = listener.getsockname()[:2]
    for key in (b"this run", b"the run before", b""):
        joining = asyncio.create_task(
            connect(address, Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S, key=key)
        )
        sock, _ = await loop.sock_accept(listener)
        assert await loop.sock_recv(sock, len(Purpose.NODE.value)) == Purpose.NODE.value
        accepting = handshakes.accept(sock, Purpose.NODE, key=b"this run")
        if key == b"this run":
            _, writer, _ = await accepting
            (await joining)[1].transport.abort()
            writer.transport.abort()
        else:
            with pytest.raises(AuthenticationError):
                await accepting
            with pytest.raises((AuthenticationError, ConnectionError)):
                await joining
    listener.close()
