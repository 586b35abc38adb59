"""What a rank asks of the processes that load samples ahead, and in which order they get it."""

import pickle
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe

import pytest

from helpers.command import wait_for
from helpers.offered_machines import node_spec
from planaria.core.job import JobConfig
from planaria.data.prefetch import Key, LoaderStart, Prefetch

MANY = range(600)  # More than a socket takes that nobody reads.


class Loader:
    """A loader in a thread, which answers a key with itself once it may.

    Attributes:
        rank_end: the rank's end of the connection.
        keys: what it was handed.
        may_answer: number of keys that it may answer; it waits before each other one.
        has_ended: whether the rank has closed the connection.
    """

    def __init__(self) -> None:
        self.rank_end, self._own_end = Pipe()
        self.keys: list[Key] = []
        self.may_answer = threading.Semaphore(0)
        self.has_ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._own_end as rank:
            try:
                rank.recv()
                while True:
                    self.keys.append(rank.recv())
                    self.may_answer.acquire()
                    rank.send_bytes(self._answer(self.keys[-1]))
            except (EOFError, OSError):
                self.has_ended = True

    def _answer(self, key: Key) -> bytes:
        return pickle.dumps((key, key))


class BrokenLoader(Loader):
    """A loader whose answers nobody can read."""

    def _answer(self, _: Key) -> bytes:
        return b"?"


def _prefetch(*rank_ends: Connection) -> Prefetch:
    return Prefetch(rank_ends, LoaderStart(node_spec(JobConfig(), 0), "supervised"))


@pytest.fixture
def loader() -> Iterator[Loader]:
    """A loader that may answer nothing yet."""
    running = Loader()
    yield running
    running.may_answer.release(10_000)


def test_a_rank_does_not_wait_to_ask(loader: Loader) -> None:
    """It asked for the next iteration before it computed this one, and waited until all but some
    270 microbatches were loaded. Nothing could end that, as where a peer was lost."""
    prefetch = _prefetch(loader.rank_end)
    asking = threading.Thread(target=prefetch.ask, args=(0, MANY), daemon=True)

    asking.start()

    wait_for(lambda: not asking.is_alive(), what="it has asked")


def test_what_is_needed_no_more_is_not_loaded(loader: Loader) -> None:
    """After a change of the plan a rank waited for microbatches of the plan before it."""
    prefetch = _prefetch(loader.rank_end)
    prefetch.ask(0, range(100))
    wait_for(lambda: bool(loader.keys), what="the loader loads")

    prefetch.ask(1, [200])
    loader.may_answer.release(10_000)

    assert prefetch.take(1, 200) == (1, 200)
    assert prefetch.take(2, 200) == (2, 200)
    assert prefetch.take(0, 99) is None
    assert loader.keys == [(0, 0), (0, 1), (1, 200), (2, 200)]


def test_microbatches_are_loaded_in_the_order_in_which_they_are_needed(loader: Loader) -> None:
    """One that a change of the plan adds comes before those of the next iteration."""
    prefetch = _prefetch(loader.rank_end)
    prefetch.ask(0, range(3))

    prefetch.ask(0, range(4))
    loader.may_answer.release(10_000)

    assert prefetch.take(1, 3) == (1, 3)
    assert loader.keys == [(n, index) for n in (0, 1) for index in range(4)]


def test_a_loader_that_cannot_be_understood_is_asked_for_nothing_more(
    loader: Loader,
) -> None:
    """The rank loads what it was asked for; others go on. It ends, because nobody hears it."""
    broken = BrokenLoader()
    broken.may_answer.release(10_000)
    prefetch = _prefetch(broken.rank_end, loader.rank_end)
    loader.may_answer.release(10_000)
    prefetch.ask(0, range(4))

    taken = [prefetch.take(0, index) for index in range(4)]  # Odd ones are of the first loader.
    wait_for(lambda: broken.has_ended, what="it ends")
    prefetch.ask(1, MANY)

    assert taken == [(0, 0), None, (0, 2), None]
    assert prefetch.take(1, 1) is None
    assert prefetch.take(1, 598) == (1, 598)
    assert len(broken.keys) <= 2
