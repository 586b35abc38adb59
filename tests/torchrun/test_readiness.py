"""Ranks that wait for each other over links, whatever the timeout of their group."""

import threading
from functools import partial

import pytest

from helpers.linked_ranks import (
    TIMEOUT_S,
    in_threads,
    is_blocked,
    link_ranks,
    payload,
    received,
    tag,
    wait_until,
)
from planaria.errors import AbortedError, PeerLostError
from planaria.torchrun.group_sockets import LossWatch
from planaria.torchrun.persisting import Readiness
from planaria.transport.links import Links


def test_no_rank_goes_on_before_all_are_ready() -> None:
    """Time and again, whoever is last."""
    with link_ranks(3) as ranks:
        parts = [Readiness(links, 3) for links in ranks]
        for last in (0, 1, 2):
            first = [part for rank, part in enumerate(parts) if rank != last]
            threads = [threading.Thread(target=part.do_with_all, args=(int,)) for part in first]
            for thread in threads:
                thread.start()
            for thread in threads:
                wait_until(is_blocked(thread, where="do_with_all"))
            assert parts[last].do_with_all(partial(int, last)) == last
            for thread in threads:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()


def test_a_rank_that_is_lost_ends_the_wait_of_all() -> None:
    """Also of a rank that has heard from the lost one, waits for another one, and so is not told by
    its links. Ranks that live would wait for it in vain, and go on without it."""
    with link_ranks(4) as ranks:
        for links in ranks[:3]:
            LossWatch(links, 4, ())
        ranks[3].send(2, tag(0), payload(0))
        assert received(ranks[2], 3, 0)

        def wait_with_all(links: Links) -> str:
            with pytest.raises((AbortedError, PeerLostError)) as caught:
                Readiness(links, 4).do_with_all(int)
            return str(caught.value)

        with in_threads(*(partial(wait_with_all, links) for links in ranks[:3])) as waits:
            ranks[3].close()
            try:
                reasons = [wait.result(TIMEOUT_S) for wait in waits]
            finally:
                for links in ranks:  # Or a wait that nothing else ends would have this one hang.
                    links.close()
        assert reasons[2] == "rank 2, epoch 0: a rank was lost"
