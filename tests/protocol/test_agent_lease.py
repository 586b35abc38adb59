"""How long a node keeps its lease, and when it gives up a coordinator that does not answer."""

from dataclasses import replace

import pytest

from planaria.protocol.agent_lease import (
    AgentLease,
    first_lease,
    is_given_up,
    is_silent,
    lease_after_contact,
    lease_after_tick,
    reconnect_s,
    renewed_lease,
    unconnected_lease,
)

LEASE_S = 3.0
PATIENCE_S = 60.0
LOCAL = first_lease(LEASE_S, 100.0)
ELSEWHERE = first_lease(LEASE_S, 100.0, patience_s=PATIENCE_S)


def at(lease: AgentLease, now_s: float) -> AgentLease:
    """The lease of an agent that has not been stopped until then."""
    return replace(lease, ticked_s=now_s)


def test_a_node_on_the_launchers_machine_ends_after_two_unanswered_leases() -> None:
    """Others have taken its place by then. Without a connection there is nobody to give up."""
    lease = at(LOCAL, 106.1)

    assert is_given_up(lease, 106.1, is_connected=True)
    assert not is_given_up(lease, 105.9, is_connected=True)
    assert not is_given_up(lease, 106.1, is_connected=False)


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_node_on_another_machine_ends_after_its_patience(is_connected: bool) -> None:
    """It may be cut off from a head that has given it up, and would compute for nobody."""
    lease = at(ELSEWHERE, 163.1)

    assert is_given_up(lease, 163.1, is_connected=is_connected)
    assert not is_given_up(lease, 162.9, is_connected=is_connected)


def test_a_node_on_another_machine_has_no_lease_while_it_is_not_connected() -> None:
    """On the launcher's machine it knows that there is no coordinator, and nobody is evicted. From
    elsewhere it cannot know that: it must not write what others see."""
    assert unconnected_lease(LOCAL, 102.0).end_s == 105.0
    assert unconnected_lease(ELSEWHERE, 102.0).end_s == 103.0
    assert unconnected_lease(LOCAL, 104.0).end_s == 103.0


def test_a_silent_connection_to_another_machine_is_left_after_a_lease() -> None:
    """The other end may be cut off: no packet says so."""
    heard = lease_after_contact(ELSEWHERE, 101.0)

    assert is_silent(heard, 104.1)
    assert not is_silent(heard, 103.9)
    assert not is_silent(lease_after_contact(heard, 104.0), 104.1)
    assert not is_silent(lease_after_contact(LOCAL, 101.0), 110.0)


def test_time_in_which_the_agent_was_stopped_counts_against_nobody() -> None:
    """What came meanwhile has not been read yet."""
    stopped = lease_after_tick(ELSEWHERE, 200.0)

    assert not is_silent(stopped, 202.9)
    assert is_silent(stopped, 203.1)
    assert not is_given_up(stopped, 259.9, is_connected=False)
    assert is_given_up(stopped, 260.1, is_connected=False)


def test_a_coordinator_that_is_heard_is_not_given_up() -> None:
    """It may admit the node only once its disk has written so."""
    heard = lease_after_contact(ELSEWHERE, 150.0)

    assert not is_given_up(heard, 209.9, is_connected=True)
    assert is_given_up(heard, 210.1, is_connected=True)
    assert is_given_up(lease_after_contact(LOCAL, 150.0), 150.1, is_connected=True)


def test_a_node_that_will_be_taken_away_does_not_wait_for_a_head() -> None:
    """It would be killed with what only it holds; a head that answers plans it out."""
    heard = lease_after_contact(ELSEWHERE, 105.0)

    assert not is_given_up(heard, 104.9, is_connected=False, is_leaving=True)
    assert is_given_up(heard, 105.1, is_connected=False, is_leaving=True)
    assert not is_given_up(heard, 105.1, is_connected=False)


def test_an_answer_ends_the_search_for_a_coordinator() -> None:
    """The patience begins anew with each answer."""
    answered = renewed_lease(ELSEWHERE, 160.0)

    assert not is_given_up(answered, 222.9, is_connected=True)
    assert is_given_up(answered, 223.1, is_connected=True)


@pytest.mark.parametrize(
    ("lease_s", "lost_s", "is_refused", "pause_s"),
    [
        (2.0, 0.0, False, 0.02),
        (2.0, 0.4, False, 0.04),
        (2.0, 300.0, False, 0.5),
        (60.0, 300.0, False, 1.0),
        (2.0, 0.0, True, 0.5),
        (60.0, 0.0, True, 1.0),
    ],
)
def test_an_agent_waits_longer_before_it_tries_again_the_longer_nobody_lets_it_in(
    lease_s: float, lost_s: float, is_refused: bool, pause_s: float
) -> None:
    """A head that plans for minutes, or that runs something else, would be asked fifty times a
    second by each node of an older run."""
    assert reconnect_s(lease_s, lost_s=lost_s, is_refused=is_refused) == pytest.approx(pause_s)
