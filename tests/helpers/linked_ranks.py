"""Links for tests: any number of ranks in this process, each closed at the end."""

import faulthandler
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from planaria.errors import AbortedError, PeerLostError
from planaria.transport.links import Address, Channel, Links, Tag
from planaria.transport.pacing import Pacing

TOKEN = b"the job's token"
TIMEOUT_S = 20.0

Result = TypeVar("Result")


def tag(index: int, channel: Channel = Channel.FORWARD) -> Tag:
    return Tag(channel, 0, index)


def payload(index: int, size: int = 5) -> np.ndarray:
    return np.arange(index, index + size, dtype=np.float64)


def addresses(ranks: Sequence[Links]) -> dict[int, Address]:
    return {links.rank: links.address for links in ranks}


def begin_all(ranks: Sequence[Links], epoch: int) -> None:
    """Every rank enters the epoch, linked with all others, each from a thread of its own."""
    places = addresses(ranks)
    with ThreadPoolExecutor(len(ranks)) as pool:
        started = [
            pool.submit(
                links.begin,
                epoch,
                addresses=places,
                peers=places.keys() - {links.rank},
                timeout_s=TIMEOUT_S,
            )
            for links in ranks
        ]
        for one in started:
            one.result(timeout=TIMEOUT_S)


@contextmanager
def link_ranks(
    num_ranks: int, epoch: int = 0, pacing: Sequence[Pacing] = ()
) -> Iterator[list[Links]]:
    """That many ranks with links between all of them, paced as each of them is to be."""
    ranks = [
        Links(rank, token=TOKEN, pacing=pacing[rank] if pacing else None)
        for rank in range(num_ranks)
    ]
    try:
        begin_all(ranks, epoch)
        yield ranks
    finally:
        for links in ranks:
            links.close()


@contextmanager
def in_threads(*calls: Callable[[], Result]) -> Iterator[list[Future[Result]]]:
    """The calls, running; at the end they are waited for."""
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


def on_all(ranks: Collection[Links], call: Callable[[Links], Result]) -> list[Result]:
    """What the call gives on each rank, all at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks, timeout=TIMEOUT_S))


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds."""
    deadline_s = time.monotonic() + TIMEOUT_S
    waiting = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        waiting.wait(0.001)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def received(links: Links, peer: int, index: int) -> list[float]:
    data = links.receive(peer, tag(index), timeout_s=TIMEOUT_S)
    return [float(value) for value in data.view(np.float64)]


def is_blocked(thread: threading.Thread, *, where: str = "receive") -> Callable[[], bool]:
    """Whether the thread waits in a function; it is the only thing that it does."""

    def check() -> bool:
        # sys._current_frames would be read while the thread goes on: what a frame points to may be
        # freed by then. All threads wait until this has been written.
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(file=stacks)
            stacks.seek(0)
            threads = stacks.read().split("\n\n")
        mine = next((text for text in threads if f"0x{thread.ident or 0:016x}" in text), "")
        return " in wait_for\n" in mine and f" in {where}\n" in mine

    return check


def blocked_receive(links: Links, peer: int) -> tuple[threading.Thread, list[Exception]]:
    """A thread that is blocked in a receive, and where its error will be."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            links.receive(peer, tag(99), timeout_s=TIMEOUT_S)
        except (AbortedError, PeerLostError, AssertionError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(is_blocked(thread))
    return thread, errors


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
