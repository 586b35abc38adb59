"""Messages that arrive where they are to lie, and never once that is somebody else's."""

from bisect import bisect_left
from select import select
from threading import Event

import numpy as np
import pytest

from helpers.linked_ranks import TIMEOUT_S, begin_all, in_threads, link_ranks, tag, wait_until
from planaria.transport.connection import header

NUM_BYTES = 24 << 20  # More than any socket buffer.


def test_a_message_arrives_in_the_memory_that_is_given_for_it() -> None:
    """Not copied: what is received is that memory. Those before and after lie elsewhere."""
    content = np.random.default_rng(1).integers(0, 256, NUM_BYTES, dtype=np.uint8)
    memory = np.zeros(NUM_BYTES, dtype=np.uint8)
    with link_ranks(2) as (left, right):
        right.offer_memory(0, tag(1), memory)
        for index in range(3):
            left.send(1, tag(index), content)
        found = [right.receive(0, tag(index), timeout_s=TIMEOUT_S) for index in range(3)]

        assert found[1] is memory
        for one in found:
            np.testing.assert_array_equal(one, content)
        assert right.received_bytes[tag(1).channel] == 3 * NUM_BYTES


@pytest.mark.parametrize("num_bytes", [0, 99, 101])
def test_a_message_of_another_size_lies_elsewhere(num_bytes: int) -> None:
    memory = np.zeros(num_bytes, dtype=np.uint8)
    with link_ranks(2) as (left, right):
        right.offer_memory(0, tag(0), memory)
        left.send(1, tag(0), np.ones(100, dtype=np.uint8))
        found = right.receive(0, tag(0), timeout_s=TIMEOUT_S)

        assert found.sum() == 100
        assert not memory.any()


def test_one_that_has_arrived_before_lies_elsewhere() -> None:
    memory = np.zeros(100, dtype=np.uint8)
    with link_ranks(2) as (left, right):
        left.send(1, tag(0), np.ones(100, dtype=np.uint8))
        wait_until(lambda: right.has_any({0: tag(0)}))
        right.offer_memory(0, tag(0), memory)

        assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).sum() == 100
        assert not memory.any()


def test_memory_is_free_once_its_message_is_taken_wherever_that_lay() -> None:
    """A later message of that tag is another one."""
    memory = np.zeros(100, dtype=np.uint8)
    with link_ranks(2) as (left, right):
        left.send(1, tag(0), np.ones(100, dtype=np.uint8))
        wait_until(lambda: right.has_any({0: tag(0)}))
        right.offer_memory(0, tag(0), memory)
        right.receive(0, tag(0), timeout_s=TIMEOUT_S)
        left.send(1, tag(0), np.ones(100, dtype=np.uint8))

        assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).sum() == 100
        assert not memory.any()


def test_nothing_comes_by_a_link_that_is_retired_in_a_newer_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its peer is no member any more, and still sends: a part of the message is being read."""
    memory = np.zeros(NUM_BYTES, dtype=np.uint8)

    def num_arrived() -> int:
        return bisect_left(memory, 1, key=lambda byte: not byte)  # Those that have are ones.

    def enter() -> int:
        right.enter(1, addresses={}, peers=())
        return num_arrived()

    is_reading, may_read = Event(), Event()
    with link_ranks(2) as (left, right):
        arriving = right._peers[0]
        receive = arriving._receive

        def wait_and_receive(*, can_receive: bool) -> int:
            if memory[0] and can_receive:
                is_reading.set()
                assert may_read.wait(TIMEOUT_S)
            return receive(can_receive=can_receive)

        monkeypatch.setattr(arriving, "_receive", wait_and_receive)
        right.offer_memory(0, tag(0), memory)
        left.send(1, tag(0), np.ones(NUM_BYTES, dtype=np.uint8))
        assert is_reading.wait(TIMEOUT_S)
        assert select([arriving.sock], [], [], TIMEOUT_S)[0]  # More of it is there to be read.
        with in_threads(enter) as (entering,):
            wait_until(lambda: not right._peers)
            may_read.set()
        wait_until(lambda: arriving.sock.fileno() < 0)

        assert 0 < entering.result() < NUM_BYTES
        assert num_arrived() == entering.result()


def test_what_is_still_to_arrive_in_a_newer_epoch_gets_nowhere() -> None:
    """By then the memory may be of another version; the link serves on."""
    memory = np.zeros(100, dtype=np.uint8)
    with link_ranks(2) as ranks:
        left, right = ranks
        right.offer_memory(0, tag(0), memory)
        right.offer_memory(0, tag(1), memory)
        raw = left._peers[1].sock
        raw.send(header(0, tag(0), 100) + bytes([1] * 60))
        wait_until(lambda: bool(memory[:60].all()))
        begin_all(ranks, 1)
        raw.send(bytes([2] * 40))
        raw.send(header(1, tag(1), 100) + bytes([3] * 100))

        assert right.receive(0, tag(1), timeout_s=TIMEOUT_S).tolist() == [3] * 100
        assert memory.tolist() == [1] * 60 + [0] * 40
