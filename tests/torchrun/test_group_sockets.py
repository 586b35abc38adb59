"""Connections of collectives are shut when a peer is lost, and no others."""

import socket
from typing import Any

import pytest

from helpers.linked_ranks import link_ranks, wait_until
from planaria.torchrun import group_sockets
from planaria.torchrun.group_sockets import LossWatch, shut


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def ends(sock: socket.socket) -> tuple[str, str]:
    """As they are named."""
    own, other = (f"{host} {port}" for host, port in (sock.getsockname(), sock.getpeername()))
    return own, other


def is_shut(sock: socket.socket) -> bool:
    """Whether who reads from it gets the end at once."""
    sock.settimeout(0.05)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False


def test_only_named_connections_are_shut() -> None:
    ours, theirs = connected()
    other, far = connected()
    with ours, theirs, other, far:
        shut({ends(ours)})

        assert is_shut(ours)
        assert not is_shut(other)


def test_a_number_that_belongs_to_another_socket_by_now_is_let_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's thread closes sockets and opens others while they are being shut."""
    ours, theirs = connected()
    other, far = connected()
    named = ends(ours)

    class Reused:
        """What the kernel said of a socket whose number another one has now."""

        laddr, raddr = ours.getsockname(), ours.getpeername()
        fd = other.fileno()

    def stale() -> list[Any]:
        return [Reused]

    monkeypatch.setattr(group_sockets, "_connections", stale)
    with ours, theirs, other, far:
        shut({named})

        assert not is_shut(other)


@pytest.mark.parametrize("says_farewell", [True, False])
def test_a_peer_that_is_done_is_not_taken_for_lost(says_farewell: bool) -> None:
    """Others may still compute without it, when it has closed its links."""
    ours, theirs = connected()
    with link_ranks(2) as (here, gone), ours, theirs:
        LossWatch(here, 2, {ends(ours)})
        if says_farewell:
            LossWatch(gone, 2, ()).say_farewell()
        gone.close()
        wait_until(lambda: 1 in here.lost_peers)

        if says_farewell:
            assert not is_shut(ours)
        else:
            wait_until(lambda: is_shut(ours))


def test_a_peer_of_which_nothing_is_heard_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine closes nothing; rank 2 alone listens to it."""
    monkeypatch.setattr(group_sockets, "SILENCE_S", 1.0)
    pairs = [connected() for _ in range(2)]
    with link_ranks(3) as (here, _, there):
        watches = [
            LossWatch(links, 3, {ends(ours)})
            for links, (ours, _) in zip((here, there), pairs, strict=True)
        ]

        wait_until(lambda: all(is_shut(ours) for ours, _ in pairs))
        for watch in watches:
            watch.say_farewell()
    for pair in pairs:
        for sock in pair:
            sock.close()
