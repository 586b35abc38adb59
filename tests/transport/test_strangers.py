"""What strangers cost: bounded connections, and a few lines of the log."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import linked_ranks
from helpers.heads import CREDENTIALS, WELCOME, Head, assert_open, head, joined, runs
from helpers.linked_ranks import TOKEN
from helpers.tasks import TIMEOUT_S, wait_until
from planaria.transport import strangers
from planaria.transport.acceptor import Acceptor, Handshakes, Purpose, listen
from planaria.transport.connection import LinkProtection
from planaria.transport.frames import Role, handshake
from planaria.transport.links import Links
from planaria.transport.strangers import RefusalLog, Unproven, source_of

NUM_KEPT = 500  # A stranger keeps so many connections open; the head has dropped older ones.


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_the_source_with_the_most_gives_way(arrivals: list[tuple[int, bool]]) -> None:
    """Its oldest; compared with a list in which all are counted."""
    unproven, model = Unproven[int](5), list[tuple[int, int]]()
    for item, (source, is_proved_at_once) in enumerate(arrivals):
        unproven.add(item, bytes([source]))
        model.append((item, source))
        if is_proved_at_once:
            unproven.remove(item)
            model.pop()
        surplus = unproven.surplus(0)
        assert (surplus is not None) == (len(model) > 5)
        if surplus is not None:
            counts = [sum(its == one for _, its in model) for one in range(4)]
            its_source = dict(model)[surplus]
            assert counts[its_source] == max(counts)
            assert surplus == next(one for one, its in model if its == its_source)
            unproven.remove(surplus)
            model.remove((surplus, its_source))

        assert list(unproven) == [one for one, _ in model]
    for one, _ in model:
        unproven.remove(one)
    assert unproven.oldest_of_most() is None


def test_an_ipv6_machine_is_one_source_whatever_address_it_takes() -> None:
    """It has 2^64 of them."""
    assert source_of(("10.0.0.1", 5)) == source_of(("10.0.0.1", 6)) != source_of(("10.0.0.2", 5))
    assert source_of(("fe80::1%3", 5, 0, 3)) == source_of(("fe80::2:1", 5, 0, 0))
    assert source_of(("fe80::1", 5, 0, 0)) != source_of(("fe81::1", 5, 0, 0))
    assert source_of(()) == b""


def test_ipv4_machines_are_different_sources_at_a_listener_of_both_families() -> None:
    """A rank listens so. All were one source, and the flood of one took the places of all."""
    assert source_of(("::ffff:10.0.0.1", 5, 0, 0)) == source_of(("10.0.0.1", 6))
    assert source_of(("::ffff:10.0.0.2", 5, 0, 0)) != source_of(("10.0.0.1", 6))


def test_a_flood_of_refusals_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The rest is counted."""
    now_s = 100.0
    refusals = RefusalLog(logging.getLogger("planaria"), now_s=lambda: now_s)
    for number in range(1000):
        refusals.add(f"stranger {number}")
    now_s = 111.0
    refusals.add("one more")
    now_s = 122.0
    refusals.add("another")

    assert [record.message for record in caplog.records] == [
        *(f"refused a connection: stranger {number}" for number in range(5)),
        "refused 995 more connections before that",
        "refused a connection: one more",
        "refused a connection: another",
    ]


class _Flood(threading.Thread):
    """Opens connections one after the other, sends the same bytes on each, and reads nothing."""

    def __init__(self, running: Head, num: int, sent: bytes, *, source: str) -> None:
        super().__init__(daemon=True)
        self._running, self._num, self._sent, self._source = running, num, sent, source
        self.num_opened = 0

    def run(self) -> None:
        kept = deque[socket.socket]()
        try:
            for _ in range(self._num):
                sock = socket.create_connection(
                    self._running.address, timeout=TIMEOUT_S, source_address=(self._source, 0)
                )
                self.num_opened += 1
                kept.append(sock)
                with contextlib.suppress(ConnectionError):
                    sock.sendall(self._sent)
                if len(kept) > NUM_KEPT:
                    kept.popleft().close()
        finally:
            for sock in kept:
                sock.close()


@contextlib.contextmanager
def open_files(num_files: int) -> Iterator[None]:
    """This process may open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(num_files, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("num_connections", "sent", "source"),
    [
        (3_000, b"", "127.0.0.1"),
        pytest.param(10_000, b"", "127.0.0.1", marks=pytest.mark.long),
        (1_000, Purpose.NODE.value, "127.0.0.2"),
        pytest.param(10_000, Purpose.NODE.value, "127.0.0.2", marks=pytest.mark.long),
        (300, Purpose.NODE.value + b"\x16\x03\x01", "127.0.0.1"),
    ],
)
@runs
async def test_a_flood_of_half_open_connections_keeps_nobody_out(
    num_connections: int, sent: bytes, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also not where it comes from the same machine; nor does it use up files, or fill the log."""
    num_clients = 0
    with open_files(4 * NUM_KEPT):
        async with head(num_half_open_max=256, num_handshakes_max=256) as running:
            flood = _Flood(running, num_connections, sent, source=source)
            flood.start()
            while flood.is_alive():
                await assert_open(running)
                num_clients += 1

    assert flood.num_opened == num_connections
    assert num_clients > 0
    assert "Too many open files" not in caplog.text
    assert len(caplog.records) < 30


@runs
async def test_a_recorded_connection_is_worth_nothing() -> None:
    """Whoever could listen on the network sends again what a client of the job has sent."""
    recorded = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*running.address)
        back = asyncio.create_task(_forward(far_reader, writer, bytearray()))
        await _forward(reader, far_writer, recorded)
        await back

    async with head() as running:
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        spied = Head(server.sockets[0].getsockname(), running.acceptor)
        reader, writer, _ = await joined(spied, identity=5)
        assert await reader.readexactly(len(WELCOME)) == WELCOME
        writer.transport.abort()
        server.close()
        await wait_until(lambda: len(recorded) > 500)
        with socket.create_connection(running.address) as sock:
            sock.sendall(recorded)
            await wait_until(lambda: bool(running.refused))

        assert len(running.accepted) == 1
        await assert_open(running)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: bytearray
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            copy += data
            writer.write(data)
    writer.close()


@runs
async def test_where_few_files_may_be_open_few_connections_are_kept() -> None:
    """The process needs the others."""
    with open_files(400):
        acceptor, handshakes = Acceptor([], {}), Handshakes(CREDENTIALS)

    for connections in (acceptor._half_open, handshakes._limits):
        assert connections._num_max == 100


@runs
async def test_where_files_run_out_half_open_connections_give_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody else could connect until they are given up, ten seconds later."""
    handed: list[socket.socket] = []
    listeners, address = listen("127.0.0.1:0")
    acceptor = Acceptor(listeners, {Purpose.NODE: handed.append})
    acceptor.start()
    with socket.create_connection(address) as stranger, socket.socket() as client:
        await wait_until(lambda: len(acceptor._half_open) > 0)
        with open_files(_lowest_free()):
            client.connect(address)
            client.sendall(Purpose.NODE.value)
            await wait_until(lambda: bool(handed))
        assert stranger.recv(1) == b""
    acceptor.close()
    handed[0].close()

    assert "Too many open files; it is tried again; raise the limit" in caplog.text
    assert "its descriptor is needed" in caplog.text


@runs
async def test_where_files_have_run_out_clients_wait_until_there_are_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are in the queue of the kernel meanwhile, and the event loop does not spin."""
    async with head() as running:
        with socket.socket() as client:
            with open_files(_lowest_free()):
                client.connect(running.address)
                client.sendall(Purpose.NODE.value + b"x" * 100)
                await wait_until(lambda: len(caplog.records) > 2)
            await wait_until(lambda: bool(running.refused))
        await assert_open(running)


def _lowest_free() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def test_no_peer_of_a_large_job_has_to_give_way_however_late_their_proofs_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread may be busy with its other links. The rank dropped peers as strangers, and nodes
    were lost whose links were refused."""
    monkeypatch.setattr(strangers, "NUM_UNPROVEN_MAX", 4)
    links = Links(6, token=TOKEN, protection=LinkProtection(num_ranks=7))
    late = []
    with contextlib.closing(links), contextlib.ExitStack() as stack:
        for rank in range(6):
            sock = socket.create_connection(links.address, timeout=TIMEOUT_S)
            stack.enter_context(sock)
            steps = handshake(TOKEN, Role.CONNECT, identity=(7000 + rank) << 32 | rank)
            hello, num_bytes = next(steps)
            sock.sendall(hello)
            late.append((sock, steps.send(sock.recv(num_bytes, socket.MSG_WAITALL))))
        for sock, (proof, _) in late:
            sock.sendall(proof)
        linked_ranks.wait_until(lambda: len(links._peers) == 6)


def test_strangers_give_way_where_descriptors_are_scarce_but_a_few_are_always_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They could take those that the job's own connections need. One of the few may be a machine
    of the job that has not proved itself yet."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    unproven = Unproven[int]()
    for item in range(20):
        unproven.add(item, b"")
    assert unproven.surplus(500) is None
    num_refused = 0
    while (surplus := unproven.surplus(900)) is not None:
        unproven.remove(surplus)
        num_refused += 1

    assert (num_refused, len(unproven)) == (12, 8)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    unproven.add(20, b"")
    assert unproven.surplus(900) is None
