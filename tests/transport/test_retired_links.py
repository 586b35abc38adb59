"""Links of an older epoch, which are closed while those of the next one are made."""

import socket
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from helpers.linked_ranks import TIMEOUT_S, TOKEN, wait_until
from planaria.transport.connection import Connection
from planaria.transport.frames import Role, handshake
from planaria.transport.links import Links


def test_a_link_may_be_retired_before_its_thread_has_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes are lost one after the other while the thread closes a link. It died, and with it
    a healthy rank."""
    is_closing, may_close = threading.Event(), threading.Event()
    with (
        closing(Links(0, token=TOKEN)) as links,
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        server, connect = links._server, links._connect
        of_links = server._handlers.on_lost

        def on_lost(link: Connection, reason: str) -> None:
            is_closing.set()
            may_close.wait(TIMEOUT_S)
            of_links(link, reason)

        def late_connect(*arguments: Any) -> None:
            assert is_closing.wait(TIMEOUT_S)
            connect(*arguments)

        monkeypatch.setattr(server, "_handlers", replace(server._handlers, on_lost=on_lost))
        links.enter(1, addresses={1: first.getsockname()}, peers=(1,))
        wait_until(lambda: bool(server._unproven))
        monkeypatch.setattr(links, "_connect", late_connect)
        links.enter(2, addresses={2: second.getsockname()}, peers=(2,))
        links.enter(3, addresses={}, peers=())
        may_close.set()
        waiting = server._new, server._retired, server._unproven
        wait_until(lambda: links._failure is not None or not any(waiting))

        assert links._failure is None
        assert not server._connections()
        links.wait_linked(timeout_s=TIMEOUT_S)


def test_the_late_proof_of_an_older_worker_does_not_lose_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes between the entry into the next epoch and the end of the old link."""
    retired: list[Connection] = []
    with (
        closing(Links(0, token=TOKEN)) as links,
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        server = links._server
        monkeypatch.setattr(server, "retire", retired.append)
        links.enter(1, addresses={1: first.getsockname()}, peers=(1,))
        older_worker, older_proof = _worker_before_its_proof(first)
        wait_until(lambda: bool(server._unproven))
        (older,) = server._unproven
        links.enter(2, addresses={1: second.getsockname()}, peers=(1,))
        worker, proof = _worker_before_its_proof(second)
        with older_worker, worker:
            older_worker.sendall(older_proof)
            wait_until(lambda: older.peer == 1 and older not in server._unproven)
            monkeypatch.undo()
            for link in retired:
                server.retire(link)
            wait_until(lambda: older.sock.fileno() < 0)
            worker.sendall(proof)
            links.wait_linked(timeout_s=TIMEOUT_S)

            assert links._peers[1].port == second.getsockname()[1]


def _worker_before_its_proof(listener: socket.socket) -> tuple[socket.socket, bytes]:
    """The end of a worker of rank 1 that is about to prove itself, and its proof."""
    sock, _ = listener.accept()
    sock.settimeout(TIMEOUT_S)
    steps = handshake(TOKEN, Role.ACCEPT, identity=listener.getsockname()[1] << 32 | 1)
    hello, num_bytes = next(steps)
    sock.sendall(hello)
    proof, _ = steps.send(sock.recv(num_bytes, socket.MSG_WAITALL))
    return sock, proof
