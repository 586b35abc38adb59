"""Links that are cut off from a peer: nothing closes, nothing comes, and nothing is lost after."""

import math
import time

import numpy as np
import pytest

from helpers.linked_ranks import (
    TIMEOUT_S,
    addresses,
    begin_all,
    in_threads,
    link_ranks,
    payload,
    received,
    tag,
    wait_until,
)
from planaria.errors import PeerLostError
from planaria.transport.links import Links

LARGE = 3 << 20  # float64 numbers: 24 MiB, more than any socket buffer


def _cut(links: Links, *peers: int) -> None:
    """Cuts a rank off from peers, for ever or until `_end_soon`."""
    links.cuts.add(lambda rank: rank in peers, end_s=math.inf)
    wait_until(lambda: len(links.cuts.severed) == len(peers))


def _end_soon(links: Links) -> float:
    """Has the cuts of a rank end in a moment; returns that moment.

    An end that is set before a test has done what it does during the cut may come too early.
    """
    cuts, end_s = links.cuts, time.monotonic() + 0.1
    with cuts._lock:
        cuts._cuts = [(end_s, is_beyond) for _, is_beyond in cuts._cuts]
    cuts._wake()
    return end_s


@pytest.mark.parametrize("size", [5, LARGE])
def test_what_both_ends_send_during_a_cut_comes_when_it_is_over(size: int) -> None:
    """Only one end knows of it; a third rank is heard all the time."""
    with link_ranks(3) as (left, right, third):
        _cut(left, 1)
        left.send(1, tag(0), payload(1, size))
        right.send(0, tag(0), payload(2, size))
        third.send(0, tag(0), payload(3))
        left.send(2, tag(0), payload(4))

        assert received(left, 2, 0) == list(payload(3))
        assert received(third, 0, 0) == list(payload(4))
        with pytest.raises(PeerLostError, match="nothing came"):
            right.receive(0, tag(0), timeout_s=0.3)
        end_s = _end_soon(left)
        with in_threads(
            lambda: left.receive(1, tag(0), timeout_s=TIMEOUT_S),
            lambda: right.receive(0, tag(0), timeout_s=TIMEOUT_S),
        ) as came:
            values = [one.result(timeout=TIMEOUT_S).view(np.float64) for one in came]
        assert time.monotonic() >= end_s
        np.testing.assert_array_equal(values[0], payload(2, size))
        np.testing.assert_array_equal(values[1], payload(1, size))
        assert not left.cuts.severed


def test_two_cuts_of_a_peer_last_until_the_later_one_ends() -> None:
    """Whichever came first."""
    with link_ranks(2) as (left, right):
        _cut(left, 1)
        left.cuts.add(lambda rank: rank == 1, end_s=time.monotonic() + 0.1)
        right.send(0, tag(0), payload(1))
        wait_until(lambda: not left.cuts.ends_s)
        with pytest.raises(PeerLostError, match="nothing came"):
            left.receive(1, tag(0), timeout_s=0.1)
        end_s = _end_soon(left)

        assert received(left, 1, 0) == list(payload(1))
        assert time.monotonic() >= end_s


def test_that_a_peer_is_gone_is_not_heard_either() -> None:
    """Until the cut is over; a rank that is cut off for ever can still be closed."""
    with link_ranks(3) as (left, right, third):
        _cut(left, 1)
        _cut(third, 1)
        right.close()
        with pytest.raises(PeerLostError, match="nothing came"):
            left.receive(1, tag(0), timeout_s=0.1)
        _end_soon(left)

        with pytest.raises(PeerLostError, match="closed by peer"):
            left.receive(1, tag(0), timeout_s=TIMEOUT_S)


def test_nobody_is_answered_while_anything_is_cut_off() -> None:
    """A rank that calls waits, as at a machine that cannot be reached."""
    with link_ranks(2) as (left, right):
        _cut(right, 0)
        late = Links(0, token=right._own.token)  # Of the worker that is forked anew in rank 0.
        places = {**addresses([right]), 0: late.address}
        with pytest.raises(PeerLostError, match="nothing came"):
            late.begin(1, addresses=places, peers={1}, timeout_s=0.1)
        left.close()
        _end_soon(right)

        begin_all([late, right], 2)
        late.close()
