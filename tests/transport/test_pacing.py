"""Paced links: nothing arrives before its virtual bytes have, flows share, and losses stay losses.

By the time of the work, which no machine makes late (timekeeping.py), an arrival is known to the
bit; by the machine's own it is never earlier, and later by as much as the machine is busy.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.linked_ranks import (
    TIMEOUT_S,
    TOKEN,
    begin_all,
    link_ranks,
    payload,
    tag,
    wait_until,
)
from planaria.core.plan import Link
from planaria.errors import PeerLostError
from planaria.transport.lanes import SLICE_S
from planaria.transport.links import Channel, Links
from planaria.transport.pacing import Pacer, Pacing, node_clocks

BANDWIDTH = 1e9
LATENCY_S = 0.02
SECOND = int(BANDWIDTH)
LATE_S = 10.0  # This machine may be.


@contextmanager
def paced(
    num_nodes: int, devices_per_node: int = 1, late_s: float = LATE_S
) -> Iterator[list[Links]]:
    """Links of the ranks of nodes; within a node they are ten times as fast."""
    clocks = [node_clocks(devices_per_node) for _ in range(num_nodes)]
    inter, intra = Link(LATENCY_S, BANDWIDTH), Link(LATENCY_S / 10, 10 * BANDWIDTH)
    pacing = [
        Pacing(fd, devices_per_node, inter, intra, late_s)
        for fd in clocks
        for _ in range(devices_per_node)
    ]
    try:
        with link_ranks(num_nodes * devices_per_node, pacing=pacing) as ranks:
            yield ranks
    finally:
        for descriptor in clocks:
            os.close(descriptor)


def arrival_s(links: Links, peer: int, index: int) -> float:
    """When the message was there, by the time of the work, and by the machine's clock."""
    received = links.receive(peer, tag(index), timeout_s=TIMEOUT_S)
    np.testing.assert_array_equal(received.view(np.float64), payload(index))
    due_s = links.timekeeper.now_s()
    assert time.monotonic() >= due_s
    return due_s


def send(links: Links, peer: int, index: int, seconds: float) -> None:
    """A message of 40 bytes that stands for so many seconds of the link between nodes."""
    links.send(peer, tag(index), payload(index), virtual_bytes=round(seconds * SECOND))


@pytest.mark.parametrize("seconds", [0.0005, 0.05, 0.2])
def test_a_message_arrives_after_its_latency_and_its_virtual_bytes(seconds: float) -> None:
    """By the time of the work exactly then; by the machine's clock never earlier."""
    with paced(2) as (left, right):
        start_s = left.timekeeper.now_s()
        send(left, 1, 0, seconds)
        due_s = arrival_s(right, 0, 0)

    assert due_s - start_s == pytest.approx(LATENCY_S + seconds, abs=1e-6)


def test_a_message_counts_as_what_it_is_where_it_stands_for_nothing() -> None:
    """Commit vectors; and what is counted is what travels."""
    numbers = np.zeros(SECOND // 10 // 8)
    with paced(2) as (left, right):
        start_s = left.timekeeper.now_s()
        left.send(1, tag(0), numbers)
        right.receive(0, tag(0), timeout_s=TIMEOUT_S)

        took_s = right.timekeeper.now_s() - start_s
        assert took_s == pytest.approx(LATENCY_S + 0.1, abs=1e-3)
        assert left.sent_bytes[Channel.FORWARD] == numbers.nbytes
        assert right.received_bytes[Channel.FORWARD] == numbers.nbytes


def test_flows_out_of_a_node_share_its_way() -> None:
    """To two others: both are there after the time of both, and not one after the other."""
    with paced(3) as (source, *targets):
        start_s = source.timekeeper.now_s()
        for target in targets:
            send(source, target.rank, 0, 0.1)
        took_s = sorted(arrival_s(target, 0, 0) - start_s for target in targets)

    assert took_s[1] == pytest.approx(0.2 + LATENCY_S, abs=1e-3)
    assert took_s[1] - took_s[0] <= 4 * SLICE_S


def test_flows_into_a_node_share_its_way() -> None:
    """From two others, whose ways out are free."""
    with paced(3) as (target, *sources):
        start_s = [source.timekeeper.now_s() for source in sources]
        for source in sources:
            send(source, 0, 0, 0.1)
        took_s = sorted(arrival_s(target, source.rank, 0) - start_s[0] for source in sources)

    assert took_s[1] >= 0.2 + LATENCY_S - 1e-6
    assert took_s[0] >= 0.1 + LATENCY_S - 1e-6
    assert took_s[1] <= 0.4 + LATENCY_S + (start_s[1] - start_s[0])


def test_both_ways_of_a_link_are_used_at_once() -> None:
    """What a node sends does not hold up what it receives."""
    with paced(2) as ranks:
        start_s = [links.timekeeper.now_s() for links in ranks]
        for links in ranks:
            send(links, 1 - links.rank, 0, 0.1)
        took_s = [arrival_s(links, 1 - links.rank, 0) - start_s[0] for links in ranks]

    assert max(took_s) <= 0.1 + LATENCY_S + (start_s[1] - start_s[0]) + 0.05


def test_ranks_of_a_node_share_its_way_to_others_and_not_to_each_other() -> None:
    """Two devices a node: ranks 0 and 1 tell 2 and 3, and each other, at the same time."""
    with paced(2, devices_per_node=2) as ranks:
        start_s = min(links.timekeeper.now_s() for links in ranks)
        for rank in (0, 1):
            send(ranks[rank], rank + 2, 0, 0.1)
            send(ranks[rank], 1 - rank, 1, 0.1)
        far_s = max(arrival_s(ranks[rank + 2], rank, 0) - start_s for rank in (0, 1))
        near_s = max(arrival_s(ranks[rank], 1 - rank, 1) - start_s for rank in (0, 1))

    assert far_s >= 0.2 + LATENCY_S - 1e-6
    assert (0.1 + LATENCY_S) / 10 - 1e-6 <= near_s < 0.1


def test_messages_to_one_rank_keep_their_order() -> None:
    """A small one behind a large one waits for it, as on any connection."""
    with paced(2) as (left, right):
        send(left, 1, 0, 0.1)
        send(left, 1, 1, 0.0)
        after_s, before_s = arrival_s(right, 0, 1), arrival_s(right, 0, 0)

    assert after_s >= before_s


def test_a_message_of_an_older_epoch_is_not_delivered_in_a_newer_one() -> None:
    """It is still under way when the epoch begins; the link is kept."""
    with paced(2) as (left, right):
        send(left, 1, 0, 0.05)
        begin_all([left, right], 1)
        send(left, 1, 1, 0.001)
        arrival_s(right, 0, 1)

        assert not right.has_any({0: tag(0)})


def test_what_came_whole_outlives_its_sender_and_the_rest_does_not() -> None:
    """A message whose last slice has left is there, as what the kernel has is; one that waits for
    its way is lost with its sender's worker, and so is told whoever waits for it."""
    with paced(3) as (left, right, other):
        send(left, 1, 0, 0.0)
        send(left, 2, 1, 100.0)
        for connection in list(left._peers.values()):
            connection.sock.shutdown(2)
        arrival = right.receive(0, tag(0), timeout_s=TIMEOUT_S)
        with pytest.raises(PeerLostError):
            other.receive(0, tag(1), timeout_s=TIMEOUT_S)
        with pytest.raises(PeerLostError):
            right.receive(0, tag(2), timeout_s=TIMEOUT_S)
        wait_until(lambda: not left._peers)

        np.testing.assert_array_equal(arrival.view(np.float64), payload(0))
        with pytest.raises(PeerLostError):
            send(left, 1, 3, 0.0)


def test_a_stop_is_not_made_up_for() -> None:
    """Whoever sends after it was stopped for longer than this machine may be late sends then."""
    with paced(2, late_s=0.05) as (left, right):
        left.timekeeper.now_s()
        time.sleep(0.2)
        now_s = time.monotonic()
        send(left, 1, 0, 0.01)

        assert arrival_s(right, 0, 0) >= now_s + 0.01 + LATENCY_S - 1e-6


@pytest.mark.parametrize("shift_s", [-1e6, 1e6])
def test_stamps_of_another_clock_are_not_waited_for(
    shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node on another machine, whose clock tells this one nothing: slices count from arrival."""
    clocks = [node_clocks(1) for _ in range(2)]
    link = Link(LATENCY_S, BANDWIDTH)
    here = Links(1, token=TOKEN, pacing=Pacing(clocks[1], 1, link, link, LATE_S))
    there = Links(0, token=TOKEN, pacing=Pacing(clocks[0], 1, link, link, LATE_S))
    there._own = replace(there._own, clock="another clock")
    assert isinstance(there._pacer, Pacer)
    write = there._pacer._write

    def write_shifted(peer: int, message: Any, *, start_s: float, lasts_s: float) -> None:
        write(peer, message, start_s=start_s + shift_s, lasts_s=lasts_s)

    monkeypatch.setattr(there._pacer, "_write", write_shifted)
    begin_all([there, here], 0)
    there.send(1, tag(0), payload(3), virtual_bytes=SECOND // 50)
    there.send(1, tag(1), payload(3), virtual_bytes=SECOND // 50)

    start_s = time.monotonic()
    for index in range(2):
        assert here.receive(0, tag(index), timeout_s=TIMEOUT_S).view(np.float64)[0] == 3
    assert time.monotonic() - start_s < TIMEOUT_S / 2
    here.send(0, tag(0), payload(1))
    assert there.receive(1, tag(0), timeout_s=TIMEOUT_S).size
    for links in (here, there):
        links.close()
    for descriptor in clocks:
        os.close(descriptor)
