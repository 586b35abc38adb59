"""When a worker's action is late: not for what the host of the machine has taken meanwhile."""

from math import inf
from unittest.mock import patch

from planaria.protocol.agent_lease import WatchedAction, is_late, watched_action
from planaria.transport.pulse import CpuSteal


def test_an_action_is_late_after_its_limit() -> None:
    """Seen again it is the same action, with the same limit."""
    action = watched_action(WatchedAction(), 13.0, 5.0)

    assert watched_action(action, 13.0, 5.0) is action
    assert not is_late(action, 12.9, 5.0)
    assert is_late(action, 13.1, 5.0)


def test_time_that_was_taken_is_given_back() -> None:
    """A processor was gone for two seconds of the three that the action had."""
    action = watched_action(WatchedAction(), 13.0, 5.0)

    assert not is_late(action, 14.9, 7.0)
    assert is_late(action, 15.1, 7.0)


def test_what_was_taken_before_an_action_does_not_count() -> None:
    """Nor while it waited for others, which takes as long as it takes."""
    waiting = watched_action(watched_action(WatchedAction(), 13.0, 5.0), inf, 6.0)
    action = watched_action(waiting, 40.0, 20.0)

    assert not is_late(waiting, 1e9, 5.0)
    assert is_late(action, 40.1, 20.0)


def test_the_processor_that_lost_most_tells() -> None:
    """Between two looks; whoever computes is on one of them."""
    looks = iter([[1.0, 2.0], [1.5, 2.0], [1.5, 4.0], [1.5, 4.0], [1.25, 4.0]])
    with patch("planaria.transport.pulse._steal_by_processor", lambda: next(looks)):
        steal = CpuSteal(2)
        found = []
        for _ in range(4):
            steal.measure()
            found.append((steal.total_s, steal.recent_s))

    assert found == [(0.5, 0.5), (2.5, 2.5), (2.5, 2.0), (2.5, 0.0)]


def test_this_machine_tells() -> None:
    """Whatever it is that it tells."""
    steal = CpuSteal(1)
    steal.measure()
    assert steal.total_s >= 0.0
