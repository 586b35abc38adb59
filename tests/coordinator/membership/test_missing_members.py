"""A member that never comes is lost in the end, and one that is only slow to come is not."""

import pytest

from helpers.coordinated import FIRST, LEASE_S, NOW_S, node_loss, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.commands import End, Evict, Tick
from planaria.coordinator.membership.missing_members import (
    ARRIVAL_LEASES_MIN,
    ARRIVAL_S_MIN,
    arrival_s,
)
from planaria.coordinator.state import Phase
from planaria.core.kinds import Ending
from planaria.core.records import Recovering
from planaria.protocol.agent_lease import TICKS_PER_LEASE

PLAN = shaped_plan((2, 2), 6)
NUM_TICKS = round(ARRIVAL_S_MIN / LEASE_S * TICKS_PER_LEASE)


def begun(*missing: int, n0: int = 2) -> FakeCluster:
    """A job that has begun, some of whose nodes have not come."""
    cluster = FakeCluster(small_rules(n0=n0), PLAN)
    for node in missing:
        del cluster.nodes[node]
    cluster.begin()
    return cluster


def wait(cluster: FakeCluster, num_ticks: int) -> None:
    """So much time passes."""
    for tick in range(1, num_ticks + 1):
        cluster.hear(Tick(), now_s=NOW_S + tick * LEASE_S / TICKS_PER_LEASE)


def losses(cluster: FakeCluster) -> list[Recovering]:
    """The losses that the launcher is told of."""
    return of_type(cluster.commands, Recovering)


@pytest.mark.parametrize("missing", [(3,), (1,), (0, 3)], ids=str)
def test_the_job_begins_without_nodes_that_never_come(missing: tuple[int, ...]) -> None:
    """Their agents hang before they connect, so no lease could run out; all are lost at once."""
    cluster = begun(*missing)
    wait(cluster, NUM_TICKS - 1)
    assert not losses(cluster)

    wait(cluster, 1)

    (loss,) = losses(cluster)
    assert loss.nodes == missing
    assert f"in {ARRIVAL_S_MIN:.0f} s" in loss.reason
    assert of_type(cluster.commands, Evict) == [Evict(missing)]
    assert cluster.state.nodes == tuple(node for node in PLAN.nodes if node not in missing)
    assert cluster.state.phase is Phase.TRAINING
    cluster.train(FIRST)
    assert cluster.state.commits.next_iteration == FIRST + 1


def test_the_job_ends_where_too_few_nodes_come() -> None:
    """The end is told, instead of waiting for ever."""
    cluster = begun(0, 1, n0=3)
    wait(cluster, NUM_TICKS)

    assert losses(cluster)[0].nodes == (0, 1)
    (end,) = of_type(cluster.commands, End)
    assert end.ending is Ending.LOST
    assert "2 nodes are left" in end.reason


def test_a_node_that_comes_late_is_waited_for() -> None:
    """A loaded machine takes its time; and once it has come its lease tells whether it is there."""
    cluster = begun(3)
    wait(cluster, NUM_TICKS - 1)
    cluster.join_on(3, "machine-3")
    wait(cluster, 10 * NUM_TICKS)

    assert not losses(cluster)
    assert cluster.state.phase is Phase.TRAINING
    assert cluster.state.nodes == PLAN.nodes


def test_time_in_which_the_coordinator_was_stopped_counts_as_one_tick() -> None:
    """Nobody could reach it meanwhile, so nobody may be given up for that."""
    cluster = begun(3)
    wait(cluster, NUM_TICKS // 2)
    cluster.hear(Tick(), now_s=NOW_S + 100.0 * ARRIVAL_S_MIN)

    assert not losses(cluster)


def test_a_loss_in_between_does_not_begin_the_time_anew() -> None:
    """Nodes that are lost one after the other must not keep the job from saying what is wrong."""
    cluster = begun(3)
    wait(cluster, NUM_TICKS - 1)
    cluster.nodes[2].is_alive = False
    cluster.hear(node_loss(2))

    wait(cluster, 1)

    assert cluster.state.nodes == (0, 1)
    assert cluster.state.phase is Phase.TRAINING


def test_long_leases_give_nodes_longer_to_come() -> None:
    """Whoever sets a long lease has a slow machine."""
    assert arrival_s(LEASE_S) == ARRIVAL_S_MIN
    assert arrival_s(60.0) == ARRIVAL_LEASES_MIN * 60.0
