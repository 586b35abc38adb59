"""The pulse: what an agent sees of its worker, whatever either of them does."""

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from planaria.transport.pulse import FIRST_BEAT_S, Pulse


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse()
    yield made
    made.close()


def in_child(call: Callable[[], object]) -> None:
    """Runs the call in a forked process, to its end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            call()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_new_worker_is_neither_silent_nor_late_and_may_write(pulse: Pulse) -> None:
    """On a busy machine it takes seconds before it says anything, and it has a whole lease."""
    later_s = time.monotonic() + 0.9 * FIRST_BEAT_S

    assert pulse.silent_s(later_s) < 0.0
    assert pulse.deadline_s > later_s + 1e6
    assert pulse.lease_end_s == math.inf
    assert pulse.is_member


def test_nobody_sees_a_word_that_is_half_written(pulse: Pulse) -> None:
    """A worker that lost its processor in the middle of a word looked late, and was killed."""
    limit_s = 1234.5
    begun_s = time.monotonic()

    def toggle() -> None:
        while time.monotonic() < begun_s + 60.0 and pulse.layers != (0, 1):
            pulse.begin_action(limit_s)
            pulse.begin_wait()

    pid = os.fork()
    if pid == 0:
        try:
            toggle()
        finally:
            os._exit(0)
    deadlines_s: set[float] = set()
    while len(deadlines_s) < 1000 and time.monotonic() < begun_s + 60.0:
        deadlines_s |= {pulse.deadline_s for _ in range(100_000)}
    pulse.layers = (0, 1)
    os.waitpid(pid, 0)

    first_s, last_s = begun_s + limit_s, time.monotonic() + limit_s
    assert [s for s in deadlines_s - {math.inf} if not first_s <= s <= last_s] == []
    assert len(deadlines_s) >= 1000


def test_silence_counts_from_the_last_beat(pulse: Pulse) -> None:
    """The agent looks by the same clock."""
    before_s = time.monotonic()
    pulse.beat()
    after_s = time.monotonic()

    silent_s = pulse.silent_s(after_s + 5.0)
    assert 5.0 <= silent_s <= 5.0 + after_s - before_s


def test_a_worker_that_never_begins_is_silent_in_the_end(pulse: Pulse) -> None:
    """One that hangs between its fork and its first beat would be waited for without end."""
    far_s = time.monotonic() + 2.0 * FIRST_BEAT_S

    assert pulse.silent_s(far_s) > 0.9 * FIRST_BEAT_S


def test_an_action_is_late_after_its_limit_unless_it_waits_for_others(pulse: Pulse) -> None:
    """A worker that waits for a slow peer must not be killed for it."""
    pulse.begin_action(10.0)
    now_s = time.monotonic()

    assert pulse.deadline_s > now_s
    assert pulse.deadline_s < now_s + 10.1
    pulse.begin_wait()
    assert pulse.deadline_s > now_s + 10.1


def test_a_node_may_write_until_its_lease_ends(pulse: Pulse) -> None:
    """The worker looks by itself, also while its agent is stopped."""
    pulse.lease_end_s = time.monotonic() + 60.0
    assert pulse.is_member

    pulse.lease_end_s = time.monotonic() - 0.001
    assert not pulse.is_member


def test_a_worker_waits_for_a_lease_that_is_given_again(pulse: Pulse) -> None:
    """Its coordinator was lost, and the next one is about to answer; that spoils no save."""
    pulse.lease_end_s = time.monotonic() - 0.001
    assert not pulse.wait_member(timeout_s=0.05)

    def renew() -> None:
        time.sleep(0.05)
        pulse.lease_end_s = math.inf

    agent = threading.Thread(target=renew)
    agent.start()
    assert pulse.wait_member(timeout_s=60.0)
    agent.join()


def test_each_field_is_its_own(pulse: Pulse) -> None:
    """Agent and worker write at the same time."""
    pulse.lease_end_s = 1.0
    pulse.beat()
    pulse.begin_action(1e6)

    assert pulse.lease_end_s == 1.0
    assert pulse.silent_s(time.monotonic()) < 60.0
    assert pulse.deadline_s > time.monotonic()


def test_the_agent_sees_what_its_worker_does_and_the_other_way_round(pulse: Pulse) -> None:
    """One is forked from the other; there is no name by which a third could find it."""
    pulse.lease_end_s = 12.5

    def work() -> None:
        assert pulse.lease_end_s == 12.5
        pulse.beat()
        pulse.begin_action(0.0)

    in_child(work)

    assert pulse.silent_s(time.monotonic()) > 0.0
    assert pulse.deadline_s < time.monotonic() + 0.001


def test_two_workers_have_two_pulses(pulse: Pulse) -> None:
    """A node may have several devices."""
    other = Pulse()
    other.beat()
    other.begin_action(0.0)
    other.lease_end_s = 0.0
    later_s = time.monotonic() + 1.0

    assert pulse.is_member
    assert pulse.deadline_s > later_s
    assert pulse.silent_s(later_s) < 0.0
    other.close()


def stand_here(pulse: Pulse) -> None:
    faulthandler.dump_traceback(file=pulse.stack_fd)


def test_the_stacks_of_a_worker_can_be_read_again_and_again(pulse: Pulse) -> None:
    """Also after its end; reading does not move where it writes."""
    assert pulse.read_stack() == ""
    in_child(lambda: stand_here(pulse))
    first = pulse.read_stack()
    in_child(lambda: stand_here(pulse))
    second = pulse.read_stack()

    assert "in stand_here" in first
    assert second.startswith(first)
    assert second.count("in stand_here") == 2
    assert pulse.read_stack() == second


def test_bytes_that_are_no_text_are_shown_as_they_can_be(pulse: Pulse) -> None:
    """A stack is for people; half a character must not hide it."""
    os.write(pulse.stack_fd, b"frame \xff\n")

    assert pulse.read_stack() == "frame \N{REPLACEMENT CHARACTER}\n"


def test_the_end_of_one_view_leaves_the_other(pulse: Pulse) -> None:
    """A worker's end closes its own; the agent still wants to know where it stood."""

    def leave() -> None:
        pulse.beat()
        os.write(pulse.stack_fd, b"the end")
        pulse.close()

    in_child(leave)

    assert pulse.silent_s(time.monotonic()) > 0.0
    assert pulse.read_stack() == "the end"
