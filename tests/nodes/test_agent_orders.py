"""Orders reach a worker that was forked a moment ago, before its agent can write to it."""

import asyncio
import socket

import pytest

from planaria.core.job import JobConfig
from planaria.core.specs import NodeSpec
from planaria.nodes.agent import _Worker

SPEC = NodeSpec(
    job=JobConfig(), node=0, token=b"", coordinator=("", 0), worker="", cache_directory=""
)


def test_an_order_that_comes_before_a_new_worker_is_connected_reaches_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would wait for ever for what it was told while its predecessor's line was closed.
    The predecessor heard what came before."""
    theirs: list[socket.socket] = []  # Of the event loop, too.
    real_pair = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        ours, other = real_pair()
        theirs.append(other.dup())
        return ours, other

    monkeypatch.setattr("planaria.nodes.agent.socket.socketpair", pair)
    monkeypatch.setattr("planaria.nodes.agent.os.fork", lambda: 1)

    async def told() -> None:
        worker = _Worker(SPEC, -1)
        await worker.connect()
        worker.tell(b"the predecessor hears this, ")
        worker.fork()
        worker.tell(b"first, ")
        await worker.connect()
        worker.tell(b"second")
        assert worker.writer is not None
        await worker.writer.drain()

    asyncio.run(told())

    assert theirs[-1].recv(100) == b"first, second"
