"""Measures what checksums and encryption of messages cost on links over loopback.

Four pairs of processes send messages of three sizes, in batches that end with an answer: two plain
pairs, one with checksums, and one with TLS. The pairs take turns, in an order drawn anew in every
round. The cost is the median over the rounds of the seconds of a pair over those of a plain one;
the A/A ratio is that of the two plain pairs. Loopback moves more bytes per second than most
networks, so the cost over a network is smaller, as long as processors are free. There is no goal:
the price is the reason why processes of one machine have no checksums (`cluster.checksums`), and
why links are not encrypted unless asked (`cluster.encryption`).
"""

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection as Pipe

import numpy as np

from planaria.errors import PeerLostError
from planaria.transport.connection import LinkProtection
from planaria.transport.link_tls import link_security
from planaria.transport.links import Channel, Links, Tag

SIZES = (64 << 10, 1 << 20, 16 << 20)
BATCH_BYTES = 64 << 20
TIMEOUT_S = 60.0
TOKEN = b"checksums"
PAIRS = ("plain", "plain again", "checked", "encrypted")


def main() -> None:
    """Measures every size and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each size")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the pairs")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with ExitStack() as opened:
        pairs = {name: opened.enter_context(_linked_pair(name)) for name in PAIRS}
        for size in SIZES:
            _measure_size(pairs, size, num_rounds=options.rounds, rng=rng)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} in the last five minutes")


def _measure_size(
    pairs: dict[str, "_Sender"], size: int, *, num_rounds: int, rng: random.Random
) -> None:
    payload = np.frombuffer(rng.randbytes(size), dtype=np.uint8)
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for index in range(1 + num_rounds):
        for name in rng.sample(sorted(pairs), k=len(pairs)):
            taken_s = pairs[name].batch_s(payload, BATCH_BYTES // size)
            if index:  # The first round fills buffers and caches.
                seconds[name].append(taken_s)

    def ratio(name: str) -> float:
        ratios = [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
        return statistics.median(ratios)

    bytes_per_s = BATCH_BYTES / statistics.median(seconds["plain"])
    print(
        f"{size >> 10:6} KiB: {bytes_per_s / 1e9:.2f} GB/s plain; "
        f"with checksums {ratio('checked'):.3f} times as long, "
        f"encrypted {ratio('encrypted'):.3f}; A/A {ratio('plain again'):.3f}",
        flush=True,
    )


class _Sender:
    """The end of a pair in this process."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._num_sent = 0

    def batch_s(self, payload: np.ndarray, num_messages: int) -> float:
        """Seconds from the first message until the receiver has answered the empty last one."""
        start_s = time.perf_counter()
        for _ in range(num_messages):
            self._send(payload)
        answer = self._send(payload[:0])
        self._links.receive(1, answer, timeout_s=TIMEOUT_S)
        return time.perf_counter() - start_s

    def _send(self, payload: np.ndarray) -> Tag:
        tag = Tag(Channel.FORWARD, 0, self._num_sent)
        self._links.send(1, tag, payload)
        self._num_sent += 1
        return tag


@contextmanager
def _linked_pair(name: str) -> Iterator[_Sender]:
    """A sender that is linked with a receiver in another process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_answer, args=(theirs, name))
    receiver.start()
    with closing(_links(0, name)) as links:
        ours.send(links.address)
        links.begin(0, addresses={1: ours.recv()}, peers=(1,), timeout_s=TIMEOUT_S)
        yield _Sender(links)
    receiver.join()


def _links(rank: int, name: str) -> Links:
    """A rank of a pair."""
    security = link_security(TOKEN) if name == "encrypted" else None
    protection = LinkProtection(is_checked=name == "checked", security=security)
    return Links(rank, token=TOKEN, protection=protection)


def _answer(pipe: Pipe, name: str) -> None:
    """Receives messages and answers the empty ones, until the sender is gone."""
    with closing(_links(1, name)) as links:
        pipe.send(links.address)
        links.begin(0, addresses={0: pipe.recv()}, peers=(0,), timeout_s=TIMEOUT_S)
        num_received = 0
        while True:
            tag = Tag(Channel.FORWARD, 0, num_received)
            try:
                received = links.receive(0, tag, timeout_s=TIMEOUT_S)
            except PeerLostError:
                return
            if not received.size:
                links.send(0, tag)
            num_received += 1


if __name__ == "__main__":
    main()
