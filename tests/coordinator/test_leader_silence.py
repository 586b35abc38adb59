"""When a launcher takes its coordinator for one that stands still: not for a pause, but before any
lease runs out."""

from hypothesis import given
from hypothesis import strategies as st

from planaria.coordinator.membership.missing_members import arrival_s
from planaria.coordinator.membership.standstill import is_standing_still
from planaria.protocol.agent_lease import TICKS_PER_LEASE, first_lease


@given(
    lease_s=st.floats(0.5, 100.0),
    beat=st.floats(0.0, 1.0, exclude_max=True),
    heartbeat=st.floats(0.0, 1.0, exclude_max=True),
)
def test_it_is_killed_before_the_lease_of_any_node_runs_out(
    lease_s: float, beat: float, heartbeat: float
) -> None:
    """However the ticks of coordinator and agents lie: nodes without a lease write no saves, and
    end when they get no answer for another one."""
    period_s = lease_s / TICKS_PER_LEASE
    # Its last beat, and the last heartbeat that it answered, before it stands still at 0.
    heard_s, answered_s = -beat * period_s, -heartbeat * period_s
    silent_ticks = 0
    while not is_standing_still(silent_ticks, has_begun=True, lease_s=lease_s):
        silent_ticks += 1
    killed_s = heard_s + silent_ticks * period_s

    assert killed_s < first_lease(lease_s, answered_s).end_s
    assert killed_s - heard_s > lease_s / 2


def test_one_that_has_yet_to_begin_has_as_long_as_a_node() -> None:
    """It reads its records, and nobody is connected whom it could leave unanswered."""
    num_ticks = round(arrival_s(3.0) * TICKS_PER_LEASE / 3.0)

    assert not is_standing_still(num_ticks - 1, has_begun=False, lease_s=3.0)
    assert is_standing_still(num_ticks, has_begun=False, lease_s=3.0)
