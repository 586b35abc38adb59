"""Measures the cost of a message and of a link with the code that a job runs.

The coordinator reads and writes on one event loop, so its time per message is CPU time: here of a
server with CONNECTIONS connections, which gets each message on another connection than the one
before. A worker makes the links of an epoch in parallel, so its time per link is CPU time, too: the
CPU time of its process for many links, divided by their number. In a real job the other ends of the
links are on other nodes; here they are in one process, for which this one has to wait. Each figure
is the minimum of several tries, to leave out the load of other processes.
"""

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from planaria.core.messages import FromNode
from planaria.transport.frames import FrameDecoder, fact_of, frame
from planaria.transport.links import Links

CONNECTIONS = 200
TRIES = 5
FEW_LINKS, MANY_LINKS = 20, 220
TOKEN = b"benchmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs in seconds.

    Attributes:
        receive_s: CPU time in which the coordinator reads and decodes a message of a rank.
        send_s: CPU time in which the coordinator writes a short frame that is already encoded.
        hop_s: latency of a short message between two processes, including the wake-up.
        link_s: CPU time of a worker for one more link.
    """

    receive_s: float
    send_s: float
    hop_s: float
    link_s: float


def measured_costs(message: FromNode) -> Costs:
    """Costs on this machine, for messages as large as the given one."""
    receive_s, send_s = asyncio.run(_loop_costs(frame(message)))
    return Costs(
        receive_s=receive_s,
        send_s=send_s,
        hop_s=_least(_round_trip_s) / 2.0,
        link_s=_least(_links_s) / (MANY_LINKS - FEW_LINKS),
    )


def _least(measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(TRIES))


async def _loop_costs(data: bytes) -> tuple[float, float]:
    """CPU seconds per message received, and per message sent, on one event loop."""
    num_heard = 0
    has_all = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_heard
        writers.append(writer)
        serving.append(asyncio.current_task())
        decoder = FrameDecoder()
        while received := await reader.read(1 << 20):
            for body in decoder.feed(received):
                fact_of(body)
                num_heard += 1
                if num_heard % CONNECTIONS == 0:
                    has_all.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=CONNECTIONS)
    address = server.sockets[0].getsockname()
    clients = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    while len(writers) < CONNECTIONS:
        await asyncio.sleep(0)
    received_s, sent_s = [], []
    for _ in range(TRIES):
        for client in clients:
            client.sendall(data)
        begin_s = time.process_time()
        await has_all.wait()
        received_s.append(time.process_time() - begin_s)
        has_all.clear()
        begin_s = time.process_time()
        for writer in writers:
            writer.write(data)
        sent_s.append(time.process_time() - begin_s)
        for client in clients:
            client.recv(1 << 16)
    for client in clients:
        client.close()
    await asyncio.gather(*filter(None, serving))
    for writer in writers:
        writer.close()
    server.close()
    return min(received_s) / CONNECTIONS, min(sent_s) / CONNECTIONS


def _round_trip_s() -> float:
    """Seconds of a byte to another process and back, median of 100 tries."""
    near, far = multiprocessing.Pipe()
    echo = multiprocessing.get_context("fork").Process(target=_echo, args=(far,))
    echo.start()
    times_s = []
    for _ in range(100):
        begin_s = time.perf_counter()
        near.send_bytes(b"x")
        near.recv_bytes()
        times_s.append(time.perf_counter() - begin_s)
    near.send_bytes(b"")
    echo.join()
    return sorted(times_s)[len(times_s) // 2]


def _echo(end: Connection) -> None:
    while data := end.recv_bytes():
        end.send_bytes(data)


def _links_s() -> float:
    """CPU seconds of a rank for MANY_LINKS links minus those for FEW_LINKS links."""
    return _begun_s(MANY_LINKS) - _begun_s(FEW_LINKS)


def _begun_s(num_peers: int) -> float:
    """CPU seconds to begin an epoch with num_peers peers, which are in another process."""
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_listen, args=(num_peers, far))
    process.start()
    addresses = near.recv()
    links = Links(0, token=TOKEN)
    begin_s = time.process_time()
    links.begin(0, addresses={0: links.address, **addresses}, peers=addresses, timeout_s=60.0)
    seconds = time.process_time() - begin_s
    links.close()
    near.send(None)
    process.join()
    return seconds


def _listen(num_peers: int, end: Connection) -> None:
    """Serves num_peers ranks that only accept links, with one listener each."""
    links = [Links(1 + index, token=TOKEN) for index in range(num_peers)]
    end.send({one.rank: one.address for one in links})
    end.recv()
    os._exit(0)
