"""A rank that lacks what links need says so itself; its peers are not taken for lost."""

import socket
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from helpers.linked_ranks import (
    TIMEOUT_S,
    TOKEN,
    addresses,
    begin_all,
    no_descriptors,
    payload,
    received,
    tag,
)
from planaria.transport.connection import LinkProtection
from planaria.transport.links import Links


def test_a_rank_that_can_open_nothing_blames_no_peer() -> None:
    """Nor firewalls; and it may be able to later."""
    with closing(Links(0, token=TOKEN)) as left, closing(Links(1, token=TOKEN)) as right:
        places = addresses([left, right])
        with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
            left.enter(0, addresses=places, peers=(1,))
        begin_all([left, right], 1)
        left.send(1, tag(0), payload(1))

        assert received(right, 0, 0) == payload(1).tolist()


def test_a_rank_that_can_open_nothing_blames_no_peer_at_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread connects to those."""
    of_system: Any = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **__: of_system("::1", *rest))
    with closing(Links(0, token=TOKEN)) as links, no_descriptors():
        links.enter(0, addresses={0: links.address, 1: ("a-rank", 1)}, peers=(1,))
        with pytest.raises(AssertionError) as died:
            links.wait_linked(timeout_s=TIMEOUT_S)

    assert "Too many open files" in str(died.value.__cause__)


def test_a_rank_without_memory_for_what_the_job_sends_blames_no_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the job has a profile, a message that is not longer than its messages is one."""
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
        monkeypatch.setattr(np, "empty", empty)
        left.send(1, tag(0), payload(1))
        with pytest.raises(AssertionError) as died:
            right.receive(0, tag(0), timeout_s=TIMEOUT_S)

    assert isinstance(died.value.__cause__, MemoryError)
