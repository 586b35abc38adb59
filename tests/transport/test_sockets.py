"""Addresses of either family, where ranks listen for others, and how long silence may last."""

import asyncio
import errno
import socket
import threading
from contextlib import ExitStack

import pytest

from helpers.linked_ranks import TIMEOUT_S, TOKEN, addresses, begin_all, payload, received, tag
from planaria.errors import PeerLostError
from planaria.transport import sockets
from planaria.transport.links import Links
from planaria.transport.sockets import (
    address_text,
    break_when_silent,
    can_be_host,
    connecting_socket,
    endpoints_of,
    listening_socket,
    open_stream,
)

ELSEWHERE = "203.0.113.7"  # An address of the documentation, which no machine has.


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("10.0.0.1", "10.0.0.1:70"),
        ("node-1.example", "node-1.example:70"),
        ("fd00::2", "[fd00::2]:70"),
        ("[fd00::2]", "[fd00::2]:70"),
    ],
)
def test_an_address_is_written_so_that_its_port_can_be_told(host: str, text: str) -> None:
    """The colons of an IPv6 address would hide where the port begins."""
    assert text == address_text((host, 70))


@pytest.mark.parametrize("text", ["10.0.0.1", "fd00::2", "[fd00::2]", "node-1", "a.example."])
def test_what_can_be_a_host(text: str) -> None:
    assert can_be_host(text)


@pytest.mark.parametrize("text", ["", "10.0.0.1:70", "[fd00::2]:70", "a..b", "a" * 64])
def test_what_can_be_no_host(text: str) -> None:
    """Other machines could not even look it up."""
    assert not can_be_host(text)
    with pytest.raises(OSError, match=r"can be no name|not known|failure"):
        endpoints_of((text or ".invalid", 70))


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "[::1]"])
def test_a_rank_listens_at_its_own_address_alone(host: str) -> None:
    """So that a machine with two networks offers its ports on one of them."""
    with listening_socket(host) as listener:
        assert listener.getsockname()[0] == host.strip("[]")


@pytest.mark.parametrize("host", [ELSEWHERE, "a-name-that-nobody-has.invalid", "localhost"])
def test_a_rank_listens_at_all_addresses_if_no_interface_has_its_own(host: str) -> None:
    """A router forwards what comes for that address, or a name means something else here."""
    with listening_socket(host) as listener:
        for near in ("127.0.0.1", "127.0.0.2", "::1"):
            with socket.create_connection((near, listener.getsockname()[1]), timeout=TIMEOUT_S):
                listener.accept()[0].close()


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "[::1]", "localhost"])
def test_ranks_link_at_addresses_of_either_family(host: str) -> None:
    """A bracketed address is told to the peers without its brackets."""
    ranks = [Links(rank, token=TOKEN, host=host) for rank in range(2)]
    begin_all(ranks, 0)
    ranks[0].send(1, tag(0), payload(4))

    assert received(ranks[1], 0, 0) == payload(4).tolist()
    assert {address[0] for address in addresses(ranks).values()} == {host.strip("[]")}
    for links in ranks:
        links.close()


def test_the_next_address_of_a_name_is_tried_if_one_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As IPv6 does on a machine that has no route for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoints = [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("255.255.255.255", 1)),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", listener.getsockname()),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: endpoints)
        left = endpoints_of(("a.name", 1))
        with connecting_socket(left) as sock:
            listener.accept()[0].close()
            assert sock.getpeername() == listener.getsockname()
        assert left == []


@pytest.mark.parametrize("is_found", [True, False], ids=["found", "not found"])
def test_the_next_address_of_a_name_is_tried_if_no_rank_answers_at_one(
    is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer was lost, although the head had measured that its machine is reached."""
    ranks = [Links(rank, token=TOKEN, host="127.0.0.1") for rank in range(2)]
    port = ranks[1].address[1]
    with ExitStack() as stack:
        wrong = []
        for host in ("127.0.0.2", "127.0.0.3"):
            listener = stack.enter_context(socket.create_server((host, port)))
            thread = threading.Thread(target=close_first, args=(listener,))
            thread.start()
            stack.callback(thread.join)
            wrong.append((host, port))
        where = [*wrong, ranks[1].address] if is_found else wrong
        endpoints = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each) for each in where]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: endpoints)
        names = {0: ranks[0].address, 1: ("a.name", port)}
        for rank in range(2) if is_found else range(1):
            ranks[rank].enter(0, addresses=names, peers=[1 - rank])
        if is_found:
            ranks[0].wait_linked(timeout_s=TIMEOUT_S)
        else:
            with pytest.raises(PeerLostError, match=r"a\.name"):
                ranks[0].wait_linked(timeout_s=TIMEOUT_S)
    for links in ranks:
        links.close()


def close_first(listener: socket.socket) -> None:
    """Closes the first connection that comes, as a service does that knows no such protocol."""
    listener.accept()[0].close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_silent_machine_breaks_a_connection_after_two_minutes(host: str) -> None:
    """Whether or not bytes are on their way to it."""
    with listening_socket(host) as listener, socket.socket(listener.family) as sock:
        break_when_silent(sock)

        def option(name: int) -> int:
            return sock.getsockopt(socket.IPPROTO_TCP, name)

        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probing_s = option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
        assert option(socket.TCP_KEEPIDLE) + probing_s == 120
        assert option(socket.TCP_USER_TIMEOUT) == 120_000


def test_a_stream_tells_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, the name means nothing, or what is sent vanishes."""
    with listening_socket("::1") as listener:
        closed = listener.getsockname()[:2]
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    monkeypatch.setattr(sockets, "CONNECT_TIMEOUT_S", 0.1)

    for address, why in (
        (closed, rf"\[::1\]:{closed[1]} cannot be reached: .*{errno.ECONNREFUSED}"),
        (("no.invalid", 7), "no.invalid:7 cannot be reached"),
        (full.getsockname(), "nothing answered for 0 s"),
    ):
        with pytest.raises(ConnectionError, match=why):
            asyncio.run(open_stream(address))
    for sock in (*fillers, full):
        sock.close()


@pytest.mark.parametrize("fails", ["at once", "later"])
def test_a_peer_that_cannot_be_reached_is_named_with_both_addresses_and_a_remedy(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads it has to find out which of two machines, or what between them, is to be mended."""
    links = Links(1, token=TOKEN, host=ELSEWHERE)
    peer = (ELSEWHERE, 9) if fails == "at once" else ("127.0.0.1", 1)
    if fails == "at once":

        def refuse(*_: object) -> int:
            return errno.ENETUNREACH

        monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    with pytest.raises(PeerLostError) as lost:
        links.begin(0, addresses={2: peer}, peers=(2,), timeout_s=TIMEOUT_S)
    links.close()

    text = str(lost.value)
    assert f"no link between {address_text(peer)} and {address_text(links.address)}" in text
    assert "firewall" in text
    assert "--advertise or --interface" in text


def test_a_peer_that_does_not_call_is_named_with_both_addresses() -> None:
    """The higher rank waits for the lower one; nothing else tells it what to look at."""
    links = Links(1, token=TOKEN, host=ELSEWHERE)
    with pytest.raises(PeerLostError) as lost:
        links.begin(0, addresses={0: ("fd00::9", 70)}, peers=(0,), timeout_s=0.05)
    links.close()

    assert "nothing came" in str(lost.value)
    assert f"no link between [fd00::9]:70 and {address_text(links.address)}" in str(lost.value)


def test_processes_of_one_machine_are_not_asked_about_firewalls() -> None:
    """There is none between them: the peer has died."""
    links, gone = Links(1, token=TOKEN), Links(2, token=TOKEN)
    gone.close()
    with pytest.raises(PeerLostError) as lost:
        links.begin(0, addresses={2: gone.address}, peers=(2,), timeout_s=TIMEOUT_S)
    links.close()

    assert "firewall" not in str(lost.value)
