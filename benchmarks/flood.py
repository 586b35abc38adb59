"""Measures what floods of connections at a head cost the training of its job.

The head and the agents are real (`planaria train --listen`, `planaria agent`), and the layers are
paced: an iteration takes as long as they sleep, so all that is added to it is what the head and the
nodes wait for. Windows of some seconds follow one another, in an order drawn anew in every round:

    calm, calm again   nothing happens.
    half-open          connections that are opened as fast as one process can, and say nothing.
    handshakes         the same, from another address, and each begins a handshake of a node.
    other tokens       connections with the certificate of another token file, half of them
                       expired, which take the head's certificate for what it is.
    replayed           what a client with the token file has sent, recorded, and sent again.
    malformed          connections that prove to have the token file, one after the other, and then
                       send bytes that are no message.

The cost is the median seconds of an iteration in a window over those of the calm window of its
round; the A/A ratio is that of the other calm one. The goal: with the median over the rounds, no
flood takes training GOAL times as long. All the floods together open 10,000 connections that say
nothing and 1,000 of each other kind, or more. They come from a process of a low priority, because
who floods a head does not compute on it; what the head has to do for them it does on the processors
that the nodes share. Exits 1 if a goal is missed.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Final

from light.head import Head
from planaria.transport.acceptor import Purpose, connect
from planaria.transport.credentials import (
    Credentials,
    credentials_between,
    make_credentials,
)
from planaria.transport.sockets import Address

GOAL: Final = 1.05
WINDOWS: Final = (
    *("calm", "calm again", "half-open", "handshakes"),
    *("other tokens", "replayed", "malformed"),
)
NUM_NODES: Final = 6
NUM_OPENED_GOAL: Final = {
    "half-open": 10_000,
    "handshakes": 10_000,
    "other tokens": 1_000,
    "replayed": 1_000,
    "malformed": 1_000,
}
_NUM_KEPT: Final = 400
_TIMEOUT_S: Final = 120.0
_SETTLE_S: Final = 1.0
_RATE: Final = re.compile(r"^iteration \d+ .* ([\d.]+) samples/s", re.MULTILINE)
_NICE: Final = 10
_TERMINATED: Final = 143

Count = Synchronized  # The number of connections that a flood has opened so far.


def main() -> int:
    """Does the rounds and prints the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the windows")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # The job must end, too.
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as opened:
        head = Head(Path(name), num_nodes=NUM_NODES)
        opened.callback(head.close)
        address = head.address(timeout_s=_TIMEOUT_S)
        for _ in range(NUM_NODES):
            opened.callback(_end, _agent(Path(name), address))
        _wait(lambda: len(_RATE.findall(head.output)) >= 2, head)
        rounds = [
            {
                window: _window_s(window, head, address, options.window)
                for window in rng.sample(WINDOWS, k=len(WINDOWS))
            }
            for _ in range(options.rounds)
        ]
    return _print_results(rounds)


def _agent(directory: Path, address: Address) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        (
            *(sys.executable, "-m", "planaria", "agent", "--join", f"{address[0]}:{address[1]}"),
            *("--token-file", str(directory / "token")),
        ),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(agent: "subprocess.Popen[bytes]") -> None:
    """Ends an agent and its node; a second signal ends it at once."""
    for _ in range(2):
        agent.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=5.0)
    agent.kill()
    agent.wait()


def _wait(condition: Callable[[], bool], head: Head) -> None:
    end_s = time.monotonic() + _TIMEOUT_S
    while not condition():
        head.check()
        assert time.monotonic() < end_s, head.output
        time.sleep(0.1)


# -- a window ---------------------------------------------------------------------------------


def _window_s(window: str, head: Head, address: Address, window_s: float) -> tuple[float, int]:
    """Median relative seconds of an iteration in a window, and the connections opened in it."""
    flood = {
        "half-open": _open_halves,
        "handshakes": _begin_handshakes,
        "other tokens": _show_other_tokens,
        "replayed": _replay,
        "malformed": _send_nonsense,
    }.get(window)
    spawning = multiprocessing.get_context("spawn")
    count: Count[int] = spawning.Value("q", 0)
    process = None
    if flood is not None:
        process = spawning.Process(
            target=flood, args=(address, head.credentials, count), daemon=True
        )
        process.start()
        _wait(lambda: count.value > 0, head)
    time.sleep(_SETTLE_S)
    num_before = len(_RATE.findall(head.output))
    time.sleep(window_s)
    rates = [float(rate) for rate in _RATE.findall(head.output)[num_before:]]
    if process is not None:
        process.kill()
        process.join()
    head.check()
    return 1.0 / statistics.median(rates), count.value


def _open_halves(address: Address, _: Credentials, count: "Count[int]") -> None:
    _open_many(address, count, sent=b"", source="127.0.0.1")


def _begin_handshakes(address: Address, _: Credentials, count: "Count[int]") -> None:
    _open_many(address, count, sent=Purpose.NODE.value, source="127.0.0.2")


def _open_many(address: Address, count: "Count[int]", *, sent: bytes, source: str) -> None:
    """Opens connections one after the other, and reads nothing; never returns."""
    os.nice(_NICE)
    kept = deque[socket.socket]()
    while True:
        with contextlib.suppress(OSError):
            sock = socket.create_connection(address, timeout=5.0, source_address=(source, 0))
            kept.append(sock)
            count.value += 1
            sock.sendall(sent)
        if len(kept) > _NUM_KEPT:
            kept.popleft().close()


def _show_other_tokens(address: Address, _: Credentials, count: "Count[int]") -> None:
    """Begins TLS as a node with a certificate that is not the job's; never returns."""
    os.nice(_NICE)
    long_ago = datetime(1970, 1, 1, tzinfo=UTC)
    others = (make_credentials(), credentials_between(long_ago, long_ago + timedelta(days=1)))
    contexts = [other.client_context() for other in others]
    for context in contexts:
        context.verify_mode = ssl.CERT_NONE
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5.0) as sock:
            count.value += 1
            sock.sendall(Purpose.NODE.value)
            with contexts[count.value % len(contexts)].wrap_socket(sock) as stream:
                stream.recv(1)


def _replay(address: Address, credentials: Credentials, count: "Count[int]") -> None:
    """Sends what a client has sent again and again; never returns."""
    os.nice(_NICE)
    recorded = asyncio.run(_recorded(address, credentials))
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5.0) as sock:
            count.value += 1
            sock.sendall(recorded)
            while sock.recv(1 << 16):
                pass


async def _recorded(address: Address, credentials: Credentials) -> bytes:
    """What a client sends that proves to have the token file, and says nothing then."""
    recorded, is_over = bytearray(), asyncio.Event()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*address)
        back = asyncio.create_task(forward(far_reader, writer))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                recorded.extend(data)
                far_writer.write(data)
        far_writer.close()
        await back
        is_over.set()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        spied = server.sockets[0].getsockname()
        _, writer = await connect(spied, Purpose.REQUEST, credentials, timeout_s=_TIMEOUT_S)
        writer.close()
        await is_over.wait()
    return bytes(recorded)


def _send_nonsense(address: Address, credentials: Credentials, count: "Count[int]") -> None:
    asyncio.run(_send_nonsense_for_ever(address, credentials, count))


async def _send_nonsense_for_ever(
    address: Address, credentials: Credentials, count: "Count[int]"
) -> None:
    os.nice(_NICE)
    rng = random.Random(0)
    while True:
        purpose = rng.choice((Purpose.MACHINE, Purpose.REQUEST))  # A node has a key of the run.
        with contextlib.suppress(ConnectionError):
            _, writer = await connect(
                address, purpose, credentials, timeout_s=5.0, identity=1_000_000 + count.value
            )
            count.value += 1
            writer.write(rng.randbytes(rng.randrange(1, 2000)))
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.transport.abort()


# -- results ----------------------------------------------------------------------------------


def _print_results(rounds: list[dict[str, tuple[float, int]]]) -> int:
    are_met = True
    for window in WINDOWS[1:]:
        ratio = statistics.median(each[window][0] / each["calm"][0] for each in rounds)
        if window == "calm again":
            print(f"A/A: {ratio:.3f}")
            continue
        num_opened = sum(each[window][1] for each in rounds)
        is_met = ratio <= GOAL and num_opened >= NUM_OPENED_GOAL[window]
        are_met &= is_met
        print(
            f"{window}: {num_opened} connections, iterations {ratio:.3f} times as long, goal "
            f"{GOAL}: {'met' if is_met else 'MISSED'}"
        )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} in the last five minutes")
    return 0 if are_met else 1


if __name__ == "__main__":
    sys.exit(main())
