"""Ways: reserved in order, shared fairly, and never blocked by the dead."""

import fcntl
import os
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.transport.lanes import SLICE_S, Clock, Lane, Slice, shared_clocks

FAR_S = 1e9


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = shared_clocks(4)
    yield made
    os.close(made)


class FreeAt:
    """A clock in this process alone."""

    def __init__(self) -> None:
        self.free_s = 0.0

    def reserve(self, ready_s: float, lasts_s: float) -> float:
        start_s = max(ready_s, self.free_s)
        self.free_s = start_s + lasts_s
        return start_s


def due_slices(lane: Lane[str, str], until_s: float = FAR_S) -> list[Slice[str, str]]:
    return list(lane.due_slices(until_s))


def ends_s(slices: Sequence[Slice[str, str]]) -> dict[str, float]:
    """When each message is over."""
    return {one.content: one.start_s + one.lasts_s for one in slices if one.content is not None}


# -- clocks ---------------------------------------------------------------------------------------


def test_a_clock_gives_out_its_way_once(descriptor: int) -> None:
    """Back to back while it is asked for; from when it is asked for where it was free before. Other
    clocks of the descriptor are other ways."""
    clock, again, other = Clock(descriptor, 1), Clock(descriptor, 1), Clock(descriptor, 2)

    assert [clock.reserve(10.0, 2.0), again.reserve(10.0, 3.0)] == [10.0, 12.0]
    assert clock.reserve(11.0, 1.0) == 15.0
    assert other.reserve(10.0, 1.0) == 10.0
    assert again.reserve(100.0, 1.0) == 100.0


def test_processes_never_take_the_same_time(descriptor: int) -> None:
    """Three of them and this one, as fast as they can: all of the way, and nothing of it twice."""
    count = 300
    readers = [_child(lambda write: _reserve_all(write, descriptor, count)) for _ in range(3)]
    starts_s = [Clock(descriptor, 0).reserve(0.0, 1.0) for _ in range(count)]
    for pid, read_fd in readers:
        with os.fdopen(read_fd) as lines:
            starts_s += [float(line) for line in lines]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    assert sorted(starts_s) == [float(index) for index in range(4 * count)]


def _reserve_all(write_fd: int, descriptor: int, count: int) -> None:
    clock = Clock(descriptor, 0)
    with os.fdopen(write_fd, "w") as lines:
        lines.write("\n".join(str(clock.reserve(0.0, 1.0)) for _ in range(count)))


def test_a_process_that_is_killed_while_it_reserves_blocks_nobody(descriptor: int) -> None:
    """It holds the lock when it dies, which the kernel takes back."""
    pid, read_fd = _child(lambda write: _hold_for_ever(write, descriptor))
    assert os.read(read_fd, 1) == b"!"
    with pytest.raises(BlockingIOError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 8, 0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read_fd)

    assert Clock(descriptor, 0).reserve(5.0, 1.0) == 5.0


def _hold_for_ever(write_fd: int, descriptor: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_EX, 8, 0)
    os.write(write_fd, b"!")
    signal.pause()


def _child(run: Callable[[int], None]) -> tuple[int, int]:
    """A forked process that runs this with a descriptor to write to; its pid, and the other end."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_fd)
            run(write_fd)
            status = 0
        finally:
            os._exit(status)
    os.close(write_fd)
    return pid, read_fd


# -- lanes ----------------------------------------------------------------------------------------


@given(st.floats(0.0, 10.0), st.floats(0.0, 1.0))
def test_a_message_alone_lasts_as_long_as_its_bytes(ready_s: float, lasts_s: float) -> None:
    """In slices one after the other; its content goes with the last one."""
    lane: Lane[str, str] = Lane(FreeAt().reserve)
    lane.put("a", "message", ready_s=ready_s, lasts_s=lasts_s)
    slices = due_slices(lane)

    assert ends_s(slices) == {"message": pytest.approx(ready_s + lasts_s)}
    assert [one.content for one in slices[:-1]] == [None] * (len(slices) - 1)
    assert all(one.lasts_s <= SLICE_S + 1e-12 for one in slices)
    assert slices[0].start_s == ready_s


def test_flows_take_turns_and_keep_their_order() -> None:
    """A short message to one rank does not wait for a long one to another, and two long ones are
    over at the same time."""
    lane: Lane[str, str] = Lane(FreeAt().reserve)
    lane.put("a", "long", ready_s=0.0, lasts_s=100 * SLICE_S)
    lane.put("b", "as long", ready_s=0.0, lasts_s=100 * SLICE_S)
    lane.put("c", "short", ready_s=0.0, lasts_s=SLICE_S)
    lane.put("c", "behind", ready_s=0.0, lasts_s=SLICE_S)
    found = ends_s(due_slices(lane))

    assert found["short"] == pytest.approx(3 * SLICE_S)
    assert found["behind"] == pytest.approx(6 * SLICE_S)
    assert found["long"] == pytest.approx(201 * SLICE_S)
    assert found["as long"] == pytest.approx(202 * SLICE_S)


@given(st.integers(1, 60), st.integers(1, 60))
def test_two_ranks_of_a_node_share_its_way(num_slices: int, num_others: int) -> None:
    """Two lanes on one clock, looked at by turns: neither is more than a turn ahead, and the way is
    never idle."""
    clock = FreeAt()
    lanes: list[Lane[str, str]] = [Lane(clock.reserve), Lane(clock.reserve)]
    for lane, count in zip(lanes, (num_slices, num_others), strict=True):
        lane.put("a", "message", ready_s=0.0, lasts_s=count * SLICE_S)
    found: list[list[Slice[str, str]]] = [[], []]
    now_s = 0.0
    while any(lane.next_s < FAR_S for lane in lanes) or now_s == 0.0:
        for lane, slices in zip(lanes, found, strict=True):
            slices += due_slices(lane, now_s)
        now_s += SLICE_S / 4

    ends = [ends_s(slices)["message"] for slices in found]
    assert max(ends) == pytest.approx((num_slices + num_others) * SLICE_S)
    assert min(ends) <= (2 * min(num_slices, num_others) + 2.5) * SLICE_S


def test_nothing_is_reserved_before_the_slice_ahead_of_it_begins() -> None:
    """What a killed process had still to send takes up one slice, whatever it was."""
    clock = FreeAt()
    lane: Lane[str, str] = Lane(clock.reserve)
    lane.put("a", "long", ready_s=0.0, lasts_s=1000 * SLICE_S)

    assert len(due_slices(lane, 0.0)) == 1
    assert clock.free_s == pytest.approx(2 * SLICE_S)
    assert lane.next_s == pytest.approx(SLICE_S)


def test_what_is_dropped_takes_no_more_time() -> None:
    """The slice that has its place, the messages behind it; not those of other flows."""
    lane: Lane[str, str] = Lane(FreeAt().reserve)
    for flow, content in (("a", "1"), ("a", "2"), ("b", "3")):
        lane.put(flow, content, ready_s=0.0, lasts_s=10 * SLICE_S)
    first = due_slices(lane, 0.0)

    assert lane.drop("a") == ["1", "2"]
    assert lane.drop("a") == []
    assert [one.flow for one in first] == ["a"]
    found = due_slices(lane)
    assert {one.flow for one in found} == {"b"}
    assert ends_s(found)["3"] <= 12 * SLICE_S + 1e-9
