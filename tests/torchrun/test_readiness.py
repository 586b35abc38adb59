"""Ranks that wait for each other over links, whatever the timeout of their group."""

import threading
from functools import partial
from typing import Any

import pytest

from helpers.linked_ranks import TIMEOUT_S, in_threads, is_blocked, link_ranks, wait_until
from planaria.errors import PeerLostError
from planaria.torchrun.persisting import Readiness


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
    """Also where another one is not ready yet, and of those that wait for rank 0 once it leaves."""
    with link_ranks(4) as ranks:
        first, second, third, _ = (Readiness(links, 4) for links in ranks)

        def leave(part: Readiness) -> Any:
            with pytest.raises(PeerLostError) as caught:
                part.do_with_all(int)
            if part is first:
                ranks[0].close()
            return caught.value

        with in_threads(partial(leave, first), partial(leave, second)) as waits:
            ranks[3].close()
            assert all(wait.result(TIMEOUT_S) for wait in waits)
        leave(third)
