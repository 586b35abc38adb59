"""Measures the host's comm between two ranks beside a plain socket that moves the same bytes.

Two processes exchange tensors in two ways: a gigabyte of state from one to the other, and sums of
gradients over both, where each sends half of its sums and half of the rounded totals. The plain
socket is one TCP connection over loopback, as the links have one between two ranks: a thread sends
from memory that is there, another one receives into memory that is there, and nothing is added up.
Comm and socket take turns, in an order drawn anew in every round. The share is the rate of the comm
over that of the socket, by the median of the rounds; the A/A ratio is that of the socket with
itself. The goal is a share of at least 0.8, with exit code 1 where it is missed.

The device is the processor (`cpu`: the links send from the tensors), the processor with copies as a
device has (`late`: its copies to and from pinned memory take the time of processors, while a GPU
makes them itself), or a GPU, which both ranks share (`cuda`).
"""

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection as Pipe
from typing import Final

import torch
from torch import Tensor

from planaria.engine.comm.host import HostComm
from planaria.engine.devices import find_device
from planaria.transport.links import Channel, Links, Tag

TIMEOUT_S: Final = 120.0
GOAL: Final = 0.8
STATE_TENSOR_BYTES: Final = 32 << 20
TOKEN: Final = b"host comm"
WAYS: Final = ("comm", "socket", "socket again")
WORKS: Final = ("state", "float32 sums", "float64 sums")


class Rank:
    """One of the two processes: its comm, its socket, and the memory of both."""

    def __init__(self, rank: int, pipe: Pipe, *, kind: str, num_bytes: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self._pipe = pipe
        self._num_bytes = num_bytes
        self._num_done = 0
        self._links = Links(rank, token=TOKEN)
        self._device = find_device(kind, rank=0)
        pipe.send(self._links.address)
        addresses = {1 - rank: pipe.recv()}
        self._links.begin(0, addresses=addresses, peers=(1 - rank,), timeout_s=TIMEOUT_S)
        self._comm = HostComm(self._links, self._device)
        self._socket = self._connect()
        self._outgoing = memoryview(bytearray(num_bytes))
        self._incoming = memoryview(bytearray(num_bytes))
        place = self._device.place
        self._sums = {
            dtype: torch.ones(num_bytes // 2 // dtype.itemsize, dtype=dtype, device=place)
            for dtype in (torch.float32, torch.float64)
        }
        self._results = torch.ones(num_bytes // 8, device=place)

    def _connect(self) -> socket.socket:
        if self.rank:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._pipe.send(server.getsockname())
                sock = server.accept()[0]
        else:
            sock = socket.create_connection(self._pipe.recv())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def seconds(self, way: str, work: str) -> float:
        """Seconds that both ranks need for a piece of work, from when both begin."""
        call = self._work(way, work)
        self._meet()
        begin_s = time.perf_counter()
        call()
        self._device.finish()
        self._meet()
        return time.perf_counter() - begin_s

    def _meet(self) -> None:
        self._pipe.send(None)
        self._pipe.recv()

    def _work(self, way: str, work: str) -> Callable[[], None]:
        dtype = torch.float64 if work == "float64 sums" else torch.float32
        if way == "comm":
            return self._state if work == "state" else lambda: self._sum(dtype)
        sent, received = moved_bytes(work, self.rank, self._num_bytes)
        return lambda: self._exchange(sent, received)

    def _state(self) -> None:
        """Sends, or receives, all of the state as tensors."""
        flat = self._sums[torch.float32]
        tensors: Sequence[Tensor] = torch.split(flat, STATE_TENSOR_BYTES // 4)
        tensors = [*tensors, *tensors]  # The sums have half of the bytes.
        for tensor in tensors:
            tag = Tag(Channel.FORWARD, 0, self._num_done)
            self._num_done += 1
            if self.rank:
                self._comm.receive(0, tag)
            else:
                self._comm.send(1, tag, tensor, virtual_bytes=0)

    def _sum(self, dtype: torch.dtype) -> None:
        self._num_done += 1
        sums = self._sums[dtype]
        results = sums if dtype is torch.float32 else self._results[: len(sums)]
        self._comm.sum_over(
            (0, 1), [sums], [results], iteration=1, bucket=self._num_done, virtual_bytes=0
        )

    def _exchange(self, sent: int, received: int) -> None:
        sender = threading.Thread(target=self._socket.sendall, args=(self._outgoing[:sent],))
        sender.start()
        view = self._incoming[:received]
        while view:
            view = view[self._socket.recv_into(view) :]
        sender.join()

    def close(self) -> None:
        self._comm.close()
        self._links.close()
        self._socket.close()


def moved_bytes(work: str, rank: int, num_bytes: int) -> tuple[int, int]:
    """The bytes that a rank sends and receives."""
    if work == "state":
        return (0, num_bytes) if rank else (num_bytes, 0)
    size = num_bytes // 2  # Of the sums; half of them go, then half of the rounded totals.
    moved = size // 2 + (size // 2 if work == "float32 sums" else size // 4)
    return moved, moved


def serve(pipe: Pipe, kind: str, num_bytes: int) -> None:
    """Does the second rank's part of what the first one measures, until it says "end"."""
    with closing(Rank(1, pipe, kind=kind, num_bytes=num_bytes)) as rank:
        while (order := pipe.recv()) != "end":
            rank.seconds(*order)


def measure(kind: str, *, num_bytes: int, num_rounds: int, rng: random.Random) -> bool:
    """Prints a line for each kind of work; returns whether all meet the goal."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=serve, args=(theirs, kind, num_bytes))
    other.start()
    is_met = True
    with closing(Rank(0, ours, kind=kind, num_bytes=num_bytes)) as rank:
        for work in WORKS:
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for index in range(1 + num_rounds):
                for way in rng.sample(WAYS, k=len(WAYS)):
                    ours.send((way, work))
                    taken_s = rank.seconds(way, work)
                    if index:  # The first round takes memory.
                        seconds[way].append(taken_s)
            middle = {way: statistics.median(seconds[way]) for way in WAYS}
            share = middle["socket"] / middle["comm"]
            moved = max(moved_bytes(work, 0, num_bytes))
            print(
                f"{kind:>5} {work:>12}: {moved / middle['comm'] / 1e9:.2f} GB/s each way in use, "
                f"plain socket {moved / middle['socket'] / 1e9:.2f}; share {share:.2f} "
                f"(goal {GOAL}), A/A {middle['socket'] / middle['socket again']:.2f}",
                flush=True,
            )
            is_met = is_met and share >= GOAL
        ours.send("end")
    other.join(TIMEOUT_S)
    return is_met


def main() -> int:
    """Measures on each device; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", default=["cpu", "late"])
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    num_bytes = options.megabytes << 20
    are_met = [
        measure(kind, num_bytes=num_bytes, num_rounds=options.rounds, rng=rng)
        for kind in options.devices
    ]
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, load {os.getloadavg()[1]:.1f} in the last five minutes")
    return 0 if all(are_met) else 1


if __name__ == "__main__":
    sys.exit(main())
