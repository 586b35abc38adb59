"""Encrypted links: nobody reads or changes what they carry, and nobody else gets one."""

import os
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from helpers.flipping_relay import flipping_relay
from helpers.linked_ranks import TIMEOUT_S, TOKEN, addresses, begin_all, tag, wait_until
from planaria.errors import PeerLostError
from planaria.transport import connection
from planaria.transport.connection import LinkProtection
from planaria.transport.credentials import run_credentials
from planaria.transport.link_tls import LinkSecurity, link_security
from planaria.transport.links import Links
from planaria.transport.strangers import Unproven

SECURITY = link_security(TOKEN)
SIZES = (1, 1000, 16 << 10, (1 << 20) + 1, 9 << 20)


def link(rank: int, security: LinkSecurity | None = SECURITY, token: bytes = TOKEN) -> Links:
    return Links(rank, token=token, protection=LinkProtection(security=security))


@contextmanager
def pair(
    first: LinkSecurity | None = SECURITY, second: LinkSecurity | None = SECURITY
) -> Iterator[tuple[Links, Links]]:
    """Two ranks; the first one connects."""
    with closing(link(0, first)) as left, closing(link(1, second)) as right:
        yield left, right


def begin(links: Links, peer: Links) -> None:
    links.begin(0, addresses=addresses([peer]), peers=(peer.rank,), timeout_s=TIMEOUT_S)


def test_messages_of_all_sizes_arrive_both_ways_in_their_order() -> None:
    """Larger than a record, than what is read at once, and than the kernel takes."""
    rng = np.random.default_rng(7)
    sent = [rng.integers(0, 256, size, dtype=np.uint8) for size in SIZES]
    with pair() as ranks:
        begin_all(ranks, 0)
        for source in ranks:
            for index, data in enumerate(sent):
                source.send(1 - source.rank, tag(index), data)

        for target in ranks:
            for index, data in enumerate(sent):
                got = target.receive(1 - target.rank, tag(index), timeout_s=TIMEOUT_S)
                assert np.array_equal(got, data), (target.rank, index)


def test_a_message_arrives_in_the_memory_that_was_offered() -> None:
    data = np.arange(100_000, dtype=np.uint8)
    memory = np.zeros_like(data)
    with pair() as (left, right):
        begin_all((left, right), 0)
        right.offer_memory(0, tag(0), memory)
        left.send(1, tag(0), data)
        right.receive(0, tag(0), timeout_s=TIMEOUT_S)

    assert np.array_equal(memory, data)


def test_only_a_few_records_are_encrypted_before_the_kernel_takes_them() -> None:
    """Of one large array, too: all of it would be in memory twice, and reads would wait for it."""
    with pair() as (left, right):
        begin_all((left, right), 0)
        tls, plain = left._peers[1]._tls, deque([memoryview(bytes(8 << 20))])
        assert tls is not None
        with left._peers[1].lock:
            tls.encrypt(plain)
            num_encrypted, tls.unsent = len(tls.unsent), memoryview(b"")

    assert 0 < num_encrypted < 9 * (16 << 10)
    assert (8 << 20) - num_encrypted <= len(plain[0]) < 8 << 20


def test_a_link_on_which_tls_breaks_as_a_message_is_sent_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its socket is well, so nothing else tells of it: both ends would wait for ever."""

    def refuse(plain: deque[memoryview]) -> bool:
        if plain:  # The thread that serves the links looks for some after each event.
            raise ssl.SSLError(f"no memory for {len(plain)} arrays")
        return False

    with pair() as (left, right):
        begin_all((left, right), 0)
        monkeypatch.setattr(left._peers[1]._tls, "encrypt", refuse)
        left.send(1, tag(0), np.ones(5, dtype=np.uint8))

        with pytest.raises(PeerLostError, match="by peer"):
            right.receive(0, tag(0), timeout_s=TIMEOUT_S)
        with pytest.raises(PeerLostError, match="no memory for 2 arrays"):
            left.receive(1, tag(0), timeout_s=TIMEOUT_S)


def test_links_go_on_in_later_epochs() -> None:
    with pair() as (left, right):
        begin_all((left, right), 0)
        before = left._peers[1]
        begin_all((left, right), 1)
        left.send(1, tag(0), np.ones(5, dtype=np.uint8))

        assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).sum() == 5
        assert left._peers[1] is before


@contextmanager
def tapped(target: Links) -> Iterator[tuple[dict[int, tuple[str, int]], bytearray]]:
    """Addresses that lead to a rank by way of one who listens, and what that one hears."""
    heard = bytearray()
    with socket.create_server(("127.0.0.9", target.address[1])) as listener:

        def relay() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(target.address) as far:
                back = threading.Thread(target=forward, args=(far, near))
                back.start()
                forward(near, far)
                back.join(TIMEOUT_S)

        def forward(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(1 << 16):
                    heard.extend(data)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

        thread = threading.Thread(target=relay)
        thread.start()
        yield {target.rank: ("127.0.0.9", target.address[1])}, heard
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize("security", [SECURITY, None], ids=["encrypted", "plain"])
def test_one_who_listens_hears_no_message_of_encrypted_links(
    security: LinkSecurity | None,
) -> None:
    """And all of plain ones, so that the test would notice."""
    secret = b"the parameters of a model " * 40
    with pair(security, security) as (left, right), tapped(right) as (places, heard):
        right.enter(0, addresses=addresses([left]), peers=(0,))
        left.begin(0, addresses=places, peers=(1,), timeout_s=TIMEOUT_S)
        left.send(1, tag(0), np.frombuffer(secret, dtype=np.uint8))
        right.receive(0, tag(0), timeout_s=TIMEOUT_S)
        left.close()

    assert (secret in heard) == (security is None)


def test_a_message_that_is_changed_on_its_way_is_never_delivered() -> None:
    """Without checksums, too. One bit of the connection flips, somewhere in the message."""
    with pair() as (left, right), flipping_relay(right.address, flipped_byte=50_000) as address:
        right.enter(0, addresses=addresses([left]), peers=(0,))
        left.begin(0, addresses={1: address}, peers=(1,), timeout_s=TIMEOUT_S)
        left.send(1, tag(0), np.zeros(1 << 20, dtype=np.uint8))

        with pytest.raises(PeerLostError, match=r"(?i)mac|decryption|record"):
            right.receive(0, tag(0), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(None, SECURITY, id="a plain one connects"),
        pytest.param(SECURITY, None, id="a plain one accepts"),
        pytest.param(link_security(b"another run"), SECURITY, id="another certificate connects"),
        pytest.param(SECURITY, link_security(b"another run"), id="another certificate accepts"),
    ],
)
def test_who_has_the_token_but_not_the_tls_of_the_run_gets_no_link(
    first: LinkSecurity | None, second: LinkSecurity | None
) -> None:
    with pair(first, second) as (left, right):
        right.enter(0, addresses=addresses([left]), peers=(0,))
        with pytest.raises(PeerLostError):
            begin(left, right)

        assert not right._peers
        assert not left._peers


def test_who_has_the_certificate_but_not_the_key_of_links_gets_no_link() -> None:
    """TLS does not take the place of the proof: it tells processes of a run, and not ranks."""
    with closing(link(0, token=b"another")) as stranger, closing(link(1)) as rank:
        with pytest.raises(PeerLostError):
            begin(stranger, rank)

        assert not rank._peers


def test_strangers_are_given_up_in_time_and_the_ranks_of_the_run_get_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One who sends nothing, one who sends half a TLS hello, and one who sends something else."""
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT_S", 1.0)
    with pair() as (left, right):
        hellos = (b"", tls_hello()[:60], b"GET / HTTP/1.1\r\n\r\n", os.urandom(100))
        strangers = [socket.create_connection(right.address) for _ in hellos]
        for stranger, hello in zip(strangers, hellos, strict=True):
            stranger.settimeout(TIMEOUT_S)
            stranger.sendall(hello)
        begin_all((left, right), 0)

        for stranger in strangers:
            with closing(stranger):
                assert is_closed(stranger)


def test_only_so_many_handshakes_are_under_way_at_once() -> None:
    """The oldest gives way, and a rank gets in among them."""
    with pair() as (left, right):
        right._server._accepted = Unproven(4)
        strangers = []
        for _ in range(8):
            stranger = socket.create_connection(right.address)
            stranger.settimeout(TIMEOUT_S)
            stranger.sendall(tls_hello()[:60])
            strangers.append(stranger)
        for stranger in strangers[:4]:
            with closing(stranger):
                assert is_closed(stranger)
        assert len(right._server._accepted) == 4
        begin_all((left, right), 0)

        for stranger in strangers[4:]:
            stranger.close()


def test_a_stranger_with_tls_of_its_own_is_refused_at_once() -> None:
    """Its certificate is none of the run."""
    context = run_credentials(b"its own").client_context()
    context.verify_mode = ssl.CERT_NONE
    with closing(link(1)) as rank, socket.create_connection(rank.address) as sock:
        sock.settimeout(TIMEOUT_S)
        with pytest.raises(OSError), context.wrap_socket(sock) as stranger:  # noqa: PT011, PT012
            stranger.sendall(bytes(100))
            assert not stranger.recv(1)
            raise ConnectionError("closed")

        wait_until(lambda: not len(rank._server._accepted))
        assert not rank._peers


def test_all_that_know_the_token_of_a_run_derive_one_certificate() -> None:
    """And no two runs have the same."""
    again = run_credentials(TOKEN)

    assert again == run_credentials(TOKEN)
    assert again.certificate_bytes() == SECURITY.certificate
    assert again.certificate_bytes() != run_credentials(b"another run").certificate_bytes()
    assert again.key not in repr(again)


def tls_hello() -> bytes:
    """What a client of TLS sends first."""
    outgoing = ssl.MemoryBIO()
    client = SECURITY.client.wrap_bio(ssl.MemoryBIO(), outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()
    assert struct.unpack_from("!BHH", hello)[2] == len(hello) - 5
    return hello


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes the connection; what it sends before is dropped."""
    try:
        while sock.recv(1 << 16):
            continue
    except ConnectionResetError:
        return True
    return True
