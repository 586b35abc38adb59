"""Links between ranks: every message once, in its epoch; what is blocked can be freed."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from helpers.connections import number_in_child
from helpers.linked_ranks import (
    TIMEOUT_S,
    TOKEN,
    addresses,
    begin_all,
    blocked_receive,
    in_threads,
    link_ranks,
    num_descriptors,
    on_all,
    payload,
    received,
    tag,
    wait_until,
)
from planaria.errors import AbortedError, PeerLostError
from planaria.transport.connection import Connection, IncomingMessage
from planaria.transport.links import Address, Buffer, Channel, Links, Tag

LARGE = 3 << 20  # float64 numbers: 24 MiB, more than any socket buffer


def test_a_message_waits_under_its_tag() -> None:
    """Whoever asks for a later one first gets it; channel, iteration and both numbers count."""
    tags = [Tag(c, i, a, b) for c in Channel for i in (0, 1) for a in (0, 1) for b in (0, 7)]
    with link_ranks(2) as (left, right):
        for index, name in enumerate(tags):
            left.send(1, name, payload(index))
        values = {
            name: right.receive(0, name, timeout_s=TIMEOUT_S).view(np.float64)
            for name in reversed(tags)
        }

    for index, name in enumerate(tags):
        np.testing.assert_array_equal(payload(index), values[name])


def test_a_forked_child_closes_the_links() -> None:
    """Or the peer would not see that the parent has died."""
    with link_ranks(2) as (left, _):
        link = left._peers[1].sock

        def num_open() -> int:
            left.leave_to_parent()
            return (link.fileno() >= 0) + (left._listener.fileno() >= 0)

        assert number_in_child(num_open) == 0
        left.cuts.add(lambda _: True, end_s=math.inf)
        wait_until(lambda: bool(left.cuts.severed))
        assert number_in_child(num_open) == 0
        assert link.fileno() >= 0


def test_several_buffers_are_one_message() -> None:
    """Of any dtype and shape, empty ones too; their bytes are laid end to end."""
    buffers: list[Buffer] = [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.empty((0, 4)),
        np.array(7.5),
        np.frombuffer(b"abc", dtype=np.uint8),
    ]
    with link_ranks(2) as (left, right):
        right.send(0, tag(0), *buffers)
        data = left.receive(1, tag(0), timeout_s=TIMEOUT_S)

        assert b"".join(array.tobytes() for array in buffers) == data.tobytes()
        assert right.sent_bytes[Channel.FORWARD] == data.size
        assert left.received_bytes[Channel.FORWARD] == data.size


def test_an_empty_message_arrives() -> None:
    """A segment of a small bucket is empty, and its receiver waits for it all the same."""
    with link_ranks(2) as (left, right):
        left.send(1, tag(0))
        left.send(1, tag(1), np.empty(0))
        left.send(1, tag(2), payload(2))

        assert right.receive(0, tag(1), timeout_s=TIMEOUT_S).size == 0
        assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).size == 0
        assert received(right, 0, 2) == payload(2).tolist()


def test_large_messages_both_ways_at_once_do_not_block() -> None:
    """Both ends send 100 MiB before either receives anything: no socket buffer holds that."""
    with link_ranks(2) as ranks:
        for links in ranks:
            for index in range(4):
                links.send(1 - links.rank, tag(index), payload(index, size=LARGE))
        for links in ranks:
            for index in range(4):
                data = links.receive(1 - links.rank, tag(index), timeout_s=TIMEOUT_S)
                assert np.array_equal(payload(index, size=LARGE), data.view(np.float64))


def test_what_is_sent_before_a_link_stands_goes_out_when_it_does() -> None:
    """Each in its turn, from either end; a recovery need not wait for its slowest link."""
    left, right = Links(0, token=TOKEN), Links(1, token=TOKEN)
    places = addresses([left, right])
    right.enter(1, addresses=places, peers=(0,))
    for index in range(3):
        right.send(0, tag(index), payload(index, size=LARGE // 8))
    left.enter(1, addresses=places, peers=(1,))
    for index in range(3):
        left.send(1, tag(index), payload(index + 3))
    for links in (left, right):
        links.wait_linked(timeout_s=TIMEOUT_S)
        assert links.linked_s > 0

    assert [received(right, 0, index)[0] for index in range(3)] == [3.0, 4.0, 5.0]
    for index in range(3):
        data = left.receive(1, tag(index), timeout_s=TIMEOUT_S)
        assert np.array_equal(payload(index, size=LARGE // 8), data.view(np.float64))
    for links in (left, right):
        links.close()


def test_what_was_for_a_link_of_an_older_epoch_is_dropped_with_it() -> None:
    """The epoch ended before the link stood: its words belong to nobody."""
    left, right = Links(0, token=TOKEN), Links(1, token=TOKEN)
    places = addresses([left, right])
    right.enter(1, addresses=places, peers=(0,))
    right.send(0, tag(0), payload(1))
    right.abort("node 7 is gone", first_epoch=2)
    right.enter(2, addresses=places, peers=(0,))
    right.send(0, tag(1), payload(2))
    left.begin(2, addresses=places, peers=(1,), timeout_s=TIMEOUT_S)

    assert received(left, 1, 1) == payload(2).tolist()
    assert right.sent_bytes[Channel.FORWARD] == 2 * left.received_bytes[Channel.FORWARD]
    for links in (left, right):
        links.close()


def test_abort_frees_who_waits_for_a_link_or_for_what_it_will_bring() -> None:
    """Both with the reason, as where all links stand."""
    links = Links(1, token=TOKEN)
    links.enter(1, addresses={0: links.address}, peers=(0,))
    waits = (
        lambda: links.wait_linked(timeout_s=TIMEOUT_S),
        lambda: links.receive_any({0: tag(0)}, timeout_s=TIMEOUT_S),
    )
    with in_threads(*waits) as waiting:
        links.abort("node 7 is gone", first_epoch=2)
        for one in waiting:
            with pytest.raises(AbortedError, match="node 7"):
                one.result(timeout=TIMEOUT_S / 2)
    links.close()


def test_the_first_of_several_messages_is_taken() -> None:
    """From whichever peer; the others wait."""
    with link_ranks(3) as (left, middle, right):
        wanted = {1: tag(4), 2: tag(5)}
        right.send(0, tag(5), payload(5))

        assert left.receive_any(wanted, timeout_s=TIMEOUT_S)[0] == 2
        assert not left.has_any(wanted)
        right.send(0, tag(5), payload(6))
        middle.send(0, tag(4), payload(7))
        assert received(left, 1, 4) == payload(7).tolist()
        assert received(left, 2, 5) == payload(6).tolist()


def test_many_threads_send_whole_messages() -> None:
    """The compute thread and the reduction thread share a link; their bytes do not mix."""
    sizes = (0, 1, 1000, 200_000)

    def send_all(links: Links, channel: Channel) -> None:
        for index in range(60):
            size = sizes[index % len(sizes)]
            links.send(1, tag(index, channel), payload(index, size=size))

    with link_ranks(2) as (left, right):
        channels = (Channel.FORWARD, Channel.SCATTER, Channel.GATHER)
        calls = [lambda channel=channel: send_all(left, channel) for channel in channels]
        with in_threads(*calls) as sending:
            for channel in channels:
                for index in range(60):
                    data = right.receive(0, tag(index, channel), timeout_s=TIMEOUT_S)
                    size = sizes[index % len(sizes)]
                    assert np.array_equal(payload(index, size=size), data.view(np.float64))
        assert all(sent.exception() is None for sent in sending)


def test_eight_ranks_begin_at_once() -> None:
    """Whoever comes first, each pair has one link, and it carries both ways."""
    with link_ranks(8) as ranks:

        def exchange(links: Links) -> list[list[float]]:
            others = [rank for rank in range(8) if rank != links.rank]
            for peer in others:
                links.send(peer, tag(0), payload(links.rank))
            return [received(links, peer, 0) for peer in others]

        results = on_all(ranks, exchange)

    for rank, values in enumerate(results):
        assert values == [payload(peer).tolist() for peer in range(8) if peer != rank]


def test_a_message_of_an_older_epoch_is_dropped() -> None:
    """The receiver has moved on: what the sender still says belongs to nobody."""
    with link_ranks(2) as (left, right):
        places = addresses([left, right])
        right.begin(1, addresses=places, peers=(0,), timeout_s=TIMEOUT_S)
        left.send(1, tag(0), payload(5))
        left.begin(1, addresses=places, peers=(1,), timeout_s=TIMEOUT_S)
        left.send(1, tag(1), payload(6))

        assert received(right, 0, 1) == payload(6).tolist()
        with pytest.raises(PeerLostError, match="nothing came"):
            right.receive(0, tag(0), timeout_s=0.0)
        assert not right._inbox


def test_what_waits_from_an_older_epoch_is_dropped_at_begin() -> None:
    """The same tag in the next epoch is another message."""
    with link_ranks(2) as ranks:
        left, right = ranks
        left.send(1, tag(0), payload(5))
        left.send(1, tag(1), payload(6))
        received(right, 0, 1)
        begin_all(ranks, 1)

        with pytest.raises(PeerLostError, match="nothing came"):
            right.receive(0, tag(0), timeout_s=0.0)
        left.send(1, tag(0), payload(7))
        assert received(right, 0, 0) == payload(7).tolist()


def test_a_message_of_a_newer_epoch_is_kept_until_begin() -> None:
    """A rank that is told later than its peer must not lose the peer's first words."""
    with link_ranks(2) as (left, right):
        places = addresses([left, right])
        left.begin(3, addresses=places, peers=(1,), timeout_s=TIMEOUT_S)
        left.send(1, tag(0), payload(5))
        wait_until(lambda: right.received_bytes[Channel.FORWARD] > 0)
        with pytest.raises(PeerLostError, match="nothing came"):
            right.receive(0, tag(0), timeout_s=0.0)
        right.begin(3, addresses=places, peers=(0,), timeout_s=TIMEOUT_S)

        assert received(right, 0, 0) == payload(5).tolist()


def test_a_later_epoch_keeps_the_connections() -> None:
    """Going on after a loss costs no reconnects between survivors, and no descriptors."""
    with link_ranks(3) as ranks:
        before = [dict(links._peers) for links in ranks]
        descriptors = num_descriptors()
        for epoch in range(1, 5):
            for links in ranks:
                links.abort("next epoch", first_epoch=epoch)
            begin_all(ranks, epoch)

        assert before == [links._peers for links in ranks]
        assert descriptors == num_descriptors()


def test_a_link_that_comes_up_while_the_next_epoch_begins_is_the_only_one_to_its_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second one would replace it, and both ends would take the peer for lost. The order is
    forced: the link stands once the epoch has begun, as the memory of another one is withdrawn."""
    is_begun = threading.Event()
    with link_ranks(2) as (left, right), closing(Links(2, token=TOKEN)) as third:
        ranks = (left, right, third)
        places, server, linked = addresses(ranks), left._server, left._peers[1]

        def wait_for_link() -> None:
            is_begun.set()
            wait_until(lambda: 2 in left._peers)

        def link_up_late(link: Connection) -> None:
            assert is_begun.wait(TIMEOUT_S)
            left._on_link_up(link)

        monkeypatch.setattr(server, "_handlers", replace(server._handlers, on_link_up=link_up_late))
        left.enter(1, addresses=places, peers=(1, 2))
        first = left._connecting[2]
        left.abort("node 7 is gone", first_epoch=2)
        monkeypatch.setattr(linked, "withdraw_memory", wait_for_link)
        left.enter(2, addresses=places, peers=(1, 2))

        assert not left._connecting
        for links in (right, third):
            links.enter(2, addresses=places, peers=places.keys() - {links.rank})
        for links in ranks:
            links.wait_linked(timeout_s=TIMEOUT_S)
        third.send(0, tag(0), payload(1))
        left.send(2, tag(0), payload(2))
        assert received(left, 2, 0) == payload(1).tolist()
        assert received(third, 0, 0) == payload(2).tolist()
        assert left._peers[2] is first
        assert not left.lost_peers
        assert not third.lost_peers


def test_abort_frees_a_blocked_receive_long_before_its_timeout() -> None:
    """Within milliseconds on an idle machine; Gloo needs 10 s. The links work again after the next
    begin."""
    with link_ranks(2) as ranks:
        thread, errors = blocked_receive(ranks[1], 0)
        start_s = time.monotonic()
        ranks[1].abort("node 7 is gone", first_epoch=1)
        thread.join(TIMEOUT_S)
        seconds = time.monotonic() - start_s

        assert isinstance(errors[0], AbortedError)
        assert "node 7 is gone" in str(errors[0])
        assert seconds < TIMEOUT_S / 4
        begin_all(ranks, 1)
        ranks[0].send(1, tag(0), payload(1))
        assert received(ranks[1], 0, 0) == payload(1).tolist()


def test_an_abort_with_a_begin_right_behind_frees_whoever_waited() -> None:
    """The waiting thread may wake up only when the next epoch has begun already."""
    with link_ranks(2) as ranks:
        left, right = ranks
        for epoch in range(1, 11):
            thread, errors = blocked_receive(right, 0)
            right.abort("next epoch", first_epoch=epoch)
            right.begin(epoch, addresses=addresses(ranks), peers=(0,), timeout_s=TIMEOUT_S)
            thread.join(TIMEOUT_S)

            left.abort("", first_epoch=epoch + 1)
            assert not thread.is_alive()
            assert isinstance(errors[0], AbortedError)


def test_abort_frees_a_begin_that_waits_for_a_peer() -> None:
    """A peer that never comes must not hold up the answer to the next failure."""
    links = Links(1, token=TOKEN)
    places = {0: links.address}
    with in_threads(lambda: links.begin(1, addresses=places, peers=(0,), timeout_s=TIMEOUT_S)) as (
        begun,
    ):
        wait_until(lambda: links.epoch == 1)
        links.abort("again", first_epoch=links.epoch + 1)
        with pytest.raises(AbortedError):
            begun.result(timeout=TIMEOUT_S / 2)
    links.close()


def test_an_epoch_that_was_aborted_before_it_began_does_not_begin() -> None:
    """The order to leave it may overtake the order to enter it: two threads take them."""
    with link_ranks(2) as (left, right):
        left.abort("node 7 is gone", first_epoch=5)

        with pytest.raises(AbortedError, match="node 7"):
            left.begin(4, addresses=addresses([left, right]), peers=(1,), timeout_s=TIMEOUT_S)


def _aborted_begin(links: Links, epoch: int, places: dict[int, Address]) -> None:
    """A begin that waits for its peers and is aborted."""
    with in_threads(
        lambda: links.begin(epoch, addresses=places, peers=places.keys(), timeout_s=TIMEOUT_S)
    ) as (begun,):
        wait_until(lambda: links._connecting.keys() == places.keys())
        wait_until(lambda: links.epoch == epoch)
        links.abort("again", first_epoch=links.epoch + 1)
        with pytest.raises(AbortedError):
            begun.result(timeout=TIMEOUT_S / 2)


def test_abort_frees_a_begin_that_connects_into_the_void() -> None:
    """A node that is cut off answers no connect: the kernel would try for minutes. The next begin
    goes on with the same attempt."""
    backlog = socket.create_server(("127.0.0.1", 0), backlog=0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(backlog.getsockname())
    links = Links(0, token=TOKEN)
    places = {1: backlog.getsockname()}
    _aborted_begin(links, 1, places)
    descriptors = num_descriptors()
    _aborted_begin(links, 2, places)

    assert descriptors == num_descriptors()
    for sock in (*fillers, backlog):
        sock.close()
    links.close()


def test_a_link_that_breaks_before_its_peer_is_in_the_epoch_frees_who_waits_for_others() -> None:
    """The peer would enter it with a new link, and wait for what was sent over the old one."""
    with link_ranks(3) as ranks:
        left, middle, _ = ranks
        places = addresses(ranks)
        for links in (left, middle):
            links.enter(1, addresses=places, peers=places.keys() - {links.rank})
        middle.send(2, tag(0), payload(1))
        thread, errors = blocked_receive(middle, 0)
        middle._peers[2].sock.shutdown(socket.SHUT_RDWR)
        thread.join(TIMEOUT_S / 2)

        assert isinstance(errors[0], PeerLostError)
        assert errors[0].rank == 2


def test_large_messages_from_another_machine_measure_the_link() -> None:
    """Bytes that a rank reads after it had read all that was there came in the time between."""
    ranks = [Links(rank, token=TOKEN, host=f"127.0.0.{1 + rank}") for rank in range(2)]
    try:
        begin_all(ranks, 0)
        left, right = ranks
        small = payload(0, size=1000)
        sums: dict[int, tuple[int, float]] = {}
        num_sent = 0

        def is_measured() -> bool:
            nonlocal num_sent
            left.send(1, tag(num_sent), payload(0, size=LARGE))
            right.receive(0, tag(num_sent), timeout_s=TIMEOUT_S)
            num_sent += 1
            sums.update(right.take_receptions())
            return bool(sums)

        wait_until(is_measured)
        right.send(0, tag(0), small)
        left.receive(1, tag(0), timeout_s=TIMEOUT_S)

        (num_bytes, seconds) = sums[0]
        assert 0 < num_bytes <= num_sent * 8 * LARGE
        assert 0.0 < seconds < TIMEOUT_S
        assert right.take_receptions() == left.take_receptions() == {}
    finally:
        for links in ranks:
            links.close()


def test_the_last_bytes_of_a_large_message_measure_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """They came in hardly any time, or in that of a thread that waited for its processor."""
    monkeypatch.setattr("planaria.transport.connection._AWAITED_BYTES_MIN", 8 * LARGE + 1)
    ranks = [Links(rank, token=TOKEN, host=f"127.0.0.{1 + rank}") for rank in range(2)]
    try:
        begin_all(ranks, 0)
        left, right = ranks
        for index in range(10):
            left.send(1, tag(index), payload(0, size=LARGE))
            right.receive(0, tag(index), timeout_s=TIMEOUT_S)

        assert right.take_receptions() == {}
    finally:
        for links in ranks:
            links.close()


def test_messages_within_a_machine_measure_no_link() -> None:
    """No job on one machine reports traffic."""
    with link_ranks(2) as (left, right):
        for index in range(3):
            left.send(1, tag(index), payload(0, size=LARGE))
            right.receive(0, tag(index), timeout_s=TIMEOUT_S)

        assert right.take_receptions() == {}


def test_whoever_closes_links_can_wait_until_a_peer_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which may be never, or not soon enough; of a peer that closes first nothing is awaited."""
    may_read, read = threading.Event(), Connection.read

    def wait_and_read(connection: Connection) -> Iterator[IncomingMessage | None]:
        may_read.wait(TIMEOUT_S)
        return read(connection)

    with link_ranks(2) as (left, right):
        monkeypatch.setattr(Connection, "read", wait_and_read)
        left.send(1, tag(0), np.zeros(LARGE))
        left.drain(timeout_s=0.0)
        (link,) = left._peers.values()
        assert not link.is_drained()

        may_read.set()
        left.drain(timeout_s=math.inf)
        assert link.is_drained()

        left.send(1, tag(1), np.zeros(LARGE))
        right.close()
        left.drain(timeout_s=math.inf)
        wait_until(lambda: 1 in left.lost_peers)
