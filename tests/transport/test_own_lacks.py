"""A rank that lacks what links need says so itself; its peers are not taken for lost."""

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from helpers.linked_ranks import (
    TIMEOUT_S,
    TOKEN,
    addresses,
    begin_all,
    in_threads,
    no_descriptors,
    payload,
    received,
    tag,
    wait_until,
)
from planaria.transport.connection import LinkProtection
from planaria.transport.links import Links
from planaria.transport.sockets import connecting_socket


def test_a_rank_that_can_open_nothing_blames_no_peer() -> None:
    """Nor firewalls; and it may be able to later."""
    with closing(Links(0, token=TOKEN)) as left, closing(Links(1, token=TOKEN)) as right:
        places = addresses([left, right])
        with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
            left.enter(0, addresses=places, peers=(1,))
        begin_all([left, right], 1)
        left.send(1, tag(0), payload(1))

        assert received(right, 0, 0) == payload(1).tolist()


@pytest.fixture
def named_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Links, Links]]:
    """Ranks 0 and 1, where every name has two addresses; nobody answers at the first of them."""
    of_system: Any = socket.getaddrinfo

    def resolve(_: str, port: int, **options: Any) -> Any:
        return [of_system("127.0.0.1", place, **options)[0] for place in (1, port)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with closing(Links(0, token=TOKEN)) as left, closing(Links(1, token=TOKEN)) as right:
        yield left, right


def assert_lacks_descriptors(left: Links) -> None:
    """Its waits raise that, and it has lost nobody."""
    with pytest.raises(OSError, match="Too many open files"):
        left.wait_linked(timeout_s=TIMEOUT_S)
    left.send(1, tag(0), payload(1))  # Threads that only send live on.
    with pytest.raises(OSError, match="Too many open files"):
        left.receive(1, tag(0), timeout_s=TIMEOUT_S)
    assert not left.wait_for(lambda: False)
    assert not left.lost_peers


def assert_linked_in_epoch_1(left: Links, right: Links) -> None:
    """Links are as good as ever."""
    places = {0: left.address, 1: ("a-rank", right.address[1])}
    with in_threads(lambda: left.begin(1, addresses=places, peers=(1,), timeout_s=TIMEOUT_S)):
        right.begin(1, addresses=places, peers=(0,), timeout_s=TIMEOUT_S)
    left.send(1, tag(0), payload(1))

    assert received(right, 0, 0) == payload(1).tolist()


def test_a_rank_that_can_open_nothing_blames_no_peer_at_a_name(
    named_ranks: tuple[Links, Links],
) -> None:
    """A thread connects to those. The rank could link to nobody any more, in any later epoch."""
    left, right = named_ranks
    with no_descriptors():
        left.enter(0, addresses={0: left.address, 1: ("a-rank", 1)}, peers=(1,))
        assert_lacks_descriptors(left)

    assert_linked_in_epoch_1(left, right)


def test_a_rank_that_can_open_nothing_for_a_further_address_blames_no_peer(
    named_ranks: tuple[Links, Links], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that serves the links finds that the first one is of no use."""
    left, right = named_ranks
    connect: Callable[..., Any] = connecting_socket
    num_calls = 0

    def connect_once(endpoints: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return connect(endpoints)

    monkeypatch.setattr("planaria.transport.links.connecting_socket", connect_once)
    left.enter(0, addresses={0: left.address, 1: ("a-rank", right.address[1])}, peers=(1,))
    assert_lacks_descriptors(left)

    assert_linked_in_epoch_1(left, right)


def test_a_rank_without_memory_for_what_the_job_sends_blames_no_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the job has a profile, a message that is not longer than its messages is one. No link
    could be used any more, in any later epoch."""
    make: Any = np.empty

    def empty(shape: Any, **options: Any) -> Any:
        if shape == payload(1).nbytes:
            raise MemoryError
        return make(shape, **options)

    bounded = LinkProtection(num_bytes_max=payload(1).nbytes)
    with (
        closing(Links(0, token=TOKEN)) as left,
        closing(Links(1, token=TOKEN, protection=bounded)) as right,
    ):
        begin_all([left, right], 0)
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", empty)
            left.send(1, tag(0), payload(1))
            with pytest.raises(MemoryError):
                right.receive(0, tag(0), timeout_s=TIMEOUT_S)
        assert not right.lost_peers
        wait_until(lambda: 1 in left.lost_peers)
        begin_all([left, right], 1)
        left.send(1, tag(0), payload(1))

        assert received(right, 0, 0) == payload(1).tolist()
