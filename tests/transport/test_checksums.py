"""Messages with checksums: what was damaged on its way is never delivered, and ends its link."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random

import numpy as np
import pytest

from helpers.flipping_relay import flipping_relay
from helpers.linked_ranks import TIMEOUT_S, TOKEN, begin_all, tag, wait_until
from planaria.core.plan import Link
from planaria.errors import AuthenticationError, PeerLostError
from planaria.transport.connection import (
    MESSAGE_BYTES_MAX,
    Channel,
    Connection,
    LinkProtection,
    MessageHeader,
    OwnEnd,
    Tag,
    checked_header,
    header,
    header_size,
    parse_header,
)
from planaria.transport.links import Links
from planaria.transport.pacing import Pacing, node_clocks

NUM_BYTES_MAX = 1 << 20
HEAD_BYTES = header_size(is_checked=True)
LARGE_BYTES = 24 << 20  # More than any socket buffer.
NUM_FUZZED = 20_000


@contextmanager
def pair(*, is_checked: bool = True) -> Iterator[tuple[Links, Links]]:
    """Two ranks that are not linked yet."""
    left, right = (Links(rank, token=TOKEN, protection=_checks(is_checked)) for rank in range(2))
    try:
        yield left, right
    finally:
        left.close()
        right.close()


@contextmanager
def linked_over_wire(*, is_checked: bool, flipped_byte: int) -> Iterator[tuple[Links, Links]]:
    """Two ranks with a link on which one bit flips that the lower one sends."""
    with (
        pair(is_checked=is_checked) as (left, right),
        flipping_relay(right.address, flipped_byte=flipped_byte) as wire,
    ):
        left.enter(0, addresses={1: wire}, peers=(1,))
        right.begin(0, addresses={0: left.address}, peers=(0,), timeout_s=TIMEOUT_S)
        left.wait_linked(timeout_s=TIMEOUT_S)
        yield left, right
        left.close()  # The relay ends with its connection.


def test_messages_of_all_sizes_arrive_on_checked_links() -> None:
    """In several buffers, empty, in memory that is offered, and larger than the kernel takes."""
    content = np.random.default_rng(1).integers(0, 256, LARGE_BYTES, dtype=np.uint8)
    memory = np.zeros(LARGE_BYTES, dtype=np.uint8)
    with pair() as (left, right):
        begin_all([left, right], 0)
        right.offer_memory(0, tag(2), memory)
        left.send(1, tag(0))
        left.send(1, tag(1), content[:3], content[3:7], content[7:7])
        left.send(1, tag(2), content)
        left.send(1, tag(3), content)

        assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).size == 0
        assert right.receive(0, tag(1), timeout_s=TIMEOUT_S).tolist() == content[:7].tolist()
        assert right.receive(0, tag(2), timeout_s=TIMEOUT_S) is memory
        np.testing.assert_array_equal(memory, content)
        np.testing.assert_array_equal(right.receive(0, tag(3), timeout_s=TIMEOUT_S), content)


def test_paced_messages_are_checked_with_their_stamps() -> None:
    """Each slice is a message of its own."""
    clocks = [node_clocks(1) for _ in range(2)]
    link = Link(latency_s=0.001, bandwidth_bytes_per_s=1e9)
    left, right = (
        Links(
            rank, token=TOKEN, protection=_checks(True), pacing=Pacing(clocks[rank], 1, link, link)
        )
        for rank in range(2)
    )
    begin_all([left, right], 0)
    left.send(1, tag(0), np.arange(9, dtype=np.uint8), virtual_bytes=50_000_000)

    assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).tolist() == [*range(9)]
    for links in (left, right):
        links.close()
    for descriptor in clocks:
        os.close(descriptor)


@pytest.mark.parametrize("flipped_byte", [0, 4, 28, 29, HEAD_BYTES - 1])
def test_a_bit_that_flips_in_a_header_ends_the_link(flipped_byte: int) -> None:
    """In its epoch, channel, length, and in either checksum; nothing of the message arrives."""
    with linked_over_wire(is_checked=True, flipped_byte=flipped_byte) as (left, right):
        left.send(1, tag(0), np.zeros(10, dtype=np.uint8))
        with pytest.raises(PeerLostError, match="header was damaged") as lost:
            right.receive(0, tag(0), timeout_s=TIMEOUT_S)
        wait_until(lambda: not left._peers)

        assert lost.value.rank == 0
        assert not right._inbox


@pytest.mark.parametrize("flipped_byte", [0, LARGE_BYTES // 2, LARGE_BYTES - 1])
def test_a_bit_that_flips_in_a_payload_ends_the_link(flipped_byte: int) -> None:
    """What arrived before it counts; the message itself is never delivered, nor what follows."""
    first = np.arange(8, dtype=np.uint8)
    flipped_byte += HEAD_BYTES + first.size + HEAD_BYTES
    with linked_over_wire(is_checked=True, flipped_byte=flipped_byte) as (left, right):
        left.send(1, tag(0), first)
        left.send(1, tag(1), np.zeros(LARGE_BYTES, dtype=np.uint8))
        left.send(1, tag(2), first)
        with pytest.raises(PeerLostError, match=f"{LARGE_BYTES} bytes on channel FORWARD was dam"):
            right.receive(0, tag(1), timeout_s=TIMEOUT_S)

        assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).tolist() == first.tolist()
        assert not right._inbox


def test_a_message_of_an_aborted_epoch_may_change_while_it_leaves() -> None:
    """The sums that a rank still sends are cleared once all ranks have left the epoch: what is
    left of them differs from its checksum, and the links of the next epoch are the same ones."""
    sums = np.ones(LARGE_BYTES, dtype=np.uint8)
    with pair() as (left, right):
        begin_all([left, right], 0)
        leaving, arriving = left._peers[1], right._peers[0]
        with ExitStack() as stopping:
            with arriving._reading:
                left.send(1, tag(0, Channel.SCATTER), sums)
                stopping.enter_context(leaving.lock)
            for links in (left, right):
                links.abort("node 7 is gone", first_epoch=1)
            sums[:] = 0
            begin_all([left, right], 1)
            assert leaving._unsent
        left.send(1, tag(1), np.arange(5, dtype=np.uint8))

        assert right.receive(0, tag(1), timeout_s=TIMEOUT_S).tolist() == [*range(5)]
        assert not right.lost_peers
        assert right._peers[0] is arriving
        assert not right._inbox


def test_a_copy_may_change_while_it_leaves_and_its_link_stays() -> None:
    """A rank that leaves an epoch at its last commit reuses the memory of copies that it has begun
    to send, while the other one still receives them in that epoch. The copies have hashes of their
    own, by which they are asked for again."""
    content = np.ones(LARGE_BYTES, dtype=np.uint8)
    memory = np.zeros(LARGE_BYTES, dtype=np.uint8)
    with pair() as (left, right):
        begin_all([left, right], 0)
        leaving, arriving = left._peers[1], right._peers[0]
        right.offer_memory(0, tag(0, Channel.COPY), memory)
        with ExitStack() as stopping:
            with arriving._reading:
                left.send(1, tag(0, Channel.COPY), content)
                stopping.enter_context(leaving.lock)
            assert leaving._unsent
            content[:] = 2
        left.send(1, tag(1), np.arange(5, dtype=np.uint8))

        assert right.receive(0, tag(1), timeout_s=TIMEOUT_S).tolist() == [*range(5)]
        assert right.receive(0, tag(0, Channel.COPY), timeout_s=TIMEOUT_S) is memory
        assert memory[-1] == 2
        assert not right.lost_peers
        assert right._peers[0] is arriving


def test_without_checksums_the_same_flip_is_delivered() -> None:
    """Which is why links that leave the machine have them."""
    flipped_byte = header_size(is_checked=False) + 3
    with linked_over_wire(is_checked=False, flipped_byte=flipped_byte) as (left, right):
        left.send(1, tag(0), np.zeros(5, dtype=np.uint8))

        assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("checking", [0, 1])
def test_ranks_of_which_only_one_has_checksums_do_not_link(checking: int) -> None:
    """Each would take the other's checksums for bytes of messages, or wait for some."""
    left, right = (
        Links(rank, token=TOKEN, protection=_checks(rank == checking)) for rank in range(2)
    )
    right.enter(0, addresses={0: left.address}, peers=(0,))
    with pytest.raises(PeerLostError):
        left.begin(0, addresses={1: right.address}, peers=(1,), timeout_s=TIMEOUT_S)
    reason = left._lost[1]
    left.close()
    right.close()

    assert f"only rank {checking} sends checksums" in reason or "closed by peer" in reason
    assert not right._peers


def test_a_rank_with_other_checksums_is_refused_in_words() -> None:
    """The end that hears of it first says which rank it is, and what to do."""
    left, right = (
        Connection(sock, _own_end(is_checked=is_checked, rank=rank), target=target, port=port)
        for sock, is_checked, rank, target, port in zip(
            _tcp_pair(), (True, False), (0, 1), (1, -1), (70, 0), strict=True
        )
    )
    with pytest.raises(AuthenticationError, match="only rank 0 sends checksums; give all nodes"):
        _shake(left, right)
    left.close()
    right.close()


def test_every_bit_of_a_header_counts() -> None:
    """A CRC of 32 bits finds every error of up to three bits in so few bytes."""
    head = checked_header(3, tag(7), [memoryview(b"payload")])
    for index in range(8 * len(head)):
        damaged = bytearray(head)
        damaged[index // 8] ^= 1 << index % 8
        with pytest.raises(ConnectionError, match="damaged"):
            parse_header(bytes(damaged), is_checked=True, num_bytes_max=NUM_BYTES_MAX)

    parsed = parse_header(head, is_checked=True, num_bytes_max=NUM_BYTES_MAX)
    assert parsed[:3] == MessageHeader(3, tag(7), 7)[:3]


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_message_that_is_larger_than_the_job_sends_is_refused_before_memory_is_taken(
    is_checked: bool,
) -> None:
    """Or a peer that has gone wrong could take all memory of a machine."""
    left = Links(0, token=TOKEN, protection=_checks(is_checked))
    right = Links(1, token=TOKEN, protection=_checks(is_checked, num_bytes_max=1000))
    begin_all([left, right], 0)
    left.send(1, tag(0), np.zeros(1000, dtype=np.uint8))
    left.send(1, tag(1), np.zeros(1001, dtype=np.uint8))

    assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).size == 1000
    with pytest.raises(PeerLostError, match="1001 bytes on channel 1 does not come from this job"):
        right.receive(0, tag(1), timeout_s=TIMEOUT_S)
    left.close()
    right.close()


@pytest.mark.parametrize("is_checked", [False, True])
def test_random_headers_end_a_link_or_announce_a_message_that_fits(is_checked: bool) -> None:
    """No other exception, and no memory beyond the bound. Half of the headers have a true CRC, a
    channel that exists, or a size near the bound, or hardly any would be let through."""
    seed = 20261201
    print(f"seed {seed}")
    rng = Random(seed)
    sender, receiver = _tcp_pair()
    end = Connection(receiver, _own_end(is_checked=is_checked, rank=1), target=-1, port=0)
    other = Connection(sender, _own_end(is_checked=is_checked, rank=0), target=1, port=71)
    _shake(other, end)
    num_let_through = 0
    for _ in range(NUM_FUZZED):
        sender.sendall(_random_head(rng, is_checked=is_checked))
        try:
            assert not list(end.read())
            assert end._header is not None
            assert end._payload.nbytes == end._header.num_bytes <= NUM_BYTES_MAX
            num_let_through += 1
        except (AuthenticationError, ConnectionError):
            assert end._header is None or not end._payload.size  # A message without payload.
        end._expect_header()
    end.close()
    other.close()

    assert num_let_through > NUM_FUZZED // 100


def _random_head(rng: Random, *, is_checked: bool) -> bytes:
    """A header of random bytes, of which some are made likelier to be let through."""
    if rng.random() < 0.5:
        return rng.randbytes(header_size(is_checked=is_checked))
    channel = rng.choice(list(Channel))
    a_tag = Tag(channel, *(rng.getrandbits(32) for _ in range(3)))
    num_bytes = rng.choice((rng.getrandbits(64), NUM_BYTES_MAX + rng.randrange(-9, 9), 1))
    head = header(rng.getrandbits(32), a_tag, num_bytes)
    if not is_checked:
        return head
    plain_bytes = header_size(is_checked=False)
    checked = bytearray(checked_header(0, a_tag, [memoryview(b"x")]))
    checked[:plain_bytes] = head
    checked[-4:] = _crc_of(bytes(checked[:-4]))
    return bytes(checked)


def _crc_of(data: bytes) -> bytes:
    """The CRC-32 of IEEE 802.3, computed bit by bit as an oracle."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "big")


def _checks(is_checked: bool, num_bytes_max: int = MESSAGE_BYTES_MAX) -> LinkProtection:
    return LinkProtection(is_checked=is_checked, num_bytes_max=num_bytes_max)


def _own_end(*, is_checked: bool, rank: int) -> OwnEnd:
    identity = rank, 70 + rank
    protection = _checks(is_checked, NUM_BYTES_MAX)
    return OwnEnd(TOKEN, identity, lambda *_: None, lambda _: False, protection)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname(), timeout=TIMEOUT_S)
        return sock, listener.accept()[0]


def _shake(left: Connection, right: Connection) -> None:
    """Does the handshake of two connections."""
    while left.peer < 0 or right.peer < 0:
        for connection in (left, right):
            with connection.lock:
                connection.flush()
            list(connection.read())
