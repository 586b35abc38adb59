"""Machines whose speed is known before their nodes have computed anything."""

from dataclasses import replace

from helpers.coordinated import FIRST, NOW_S, Survivors, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import NUM_LAYERS, shaped_plan
from helpers.strategies import timed_profile
from planaria.coordinator.commands import RecordMembers
from planaria.coordinator.start import first_step
from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.findings import Findings
from planaria.core.plan import Link, NodeKind, Plan, Transition
from planaria.core.records import Changed
from planaria.policies.policy import Prices
from planaria.policies.unequal_nodes import with_kinds
from planaria.restorer.sources import balanced_transfers, transfer_rounds

HALVES = shaped_plan((2, 2), 6)
KNOWING = with_kinds(HALVES, {1: NodeKind(0.5)})


def test_a_job_begins_with_the_speeds_that_the_head_knows() -> None:
    """They are on record at once, for a coordinator that is started again."""
    rules = replace(small_rules(), speeds={1: 0.5})

    state, commands = first_step(rules, KNOWING, term=0, predicted_s=1.0)

    assert state.speeds == {1: 0.5}
    [record] = of_type(commands, RecordMembers)
    assert record.members.findings == Findings(speeds={1: 0.5})


def test_a_node_that_is_as_slow_as_its_machine_changes_nothing() -> None:
    """The plan knows it, and what the node takes is what was expected."""
    rules = replace(small_rules(), speeds={1: 0.5}, profile=timed_profile((0.1,) * NUM_LAYERS))
    cluster = FakeCluster(rules, KNOWING)
    cluster.begin()
    for node in cluster.nodes:
        cluster.nodes[node].computing_s = 2.0 if node == 1 else 1.0
    for iteration in range(FIRST, FIRST + 4):
        cluster.train(iteration)

    assert cluster.state.speeds == {1: 0.5}
    assert of_type(cluster.commands, Changed) == []


class Movers(Survivors):
    """As Survivors, with the transfers that its plans need, and with the speeds that it is told."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        kinds = {node.node: node.kind for node in cluster.nodes}

        def moved(transition: Transition) -> Transition:
            needed = balanced_transfers(transition.after, cluster, layer_bytes=prices.layer_bytes)
            after = with_kinds(transition.after, kinds)
            return replace(transition, after=after, rounds=transfer_rounds(needed))

        return tuple(map(moved, super().propose(plan, cluster, event, prices)))


def cluster_of_two() -> FakeCluster:
    """Two nodes, each of which holds all layers, in training."""
    rules = small_rules(n0=1, policy=Movers())
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    rules = replace(rules, prices=replace(rules.prices, links={"inter_node": link}))
    cluster = FakeCluster(rules, shaped_plan((1, 1), 6))
    cluster.begin()
    cluster.train(FIRST)
    return cluster


def test_a_node_joins_with_the_speed_of_its_machine() -> None:
    """Its first plan knows it, and nothing is left to be found out."""
    cluster = cluster_of_two()
    cluster.join_on(2, "slow machine", speed=0.5)
    for iteration in range(FIRST + 1, FIRST + 4):
        cluster.train(iteration)

    assert cluster.state.plan.slow_nodes == {2: 0.5}
    assert cluster.state.speeds == {2: 0.5}
    assert [notice.kinds for notice in of_type(cluster.commands, Changed)] == [{2: "join"}]


def test_a_node_that_is_needed_at_once_has_the_speed_of_its_machine() -> None:
    """After a loss that leaves too few for f failures, those who wait become members at once."""
    cluster = cluster_of_two()
    cluster.set_failures({"slow machine": (2, NOW_S)})  # So it waits.
    cluster.join_on(2, "slow machine", speed=0.5)
    assert cluster.state.nodes == (0, 1)
    cluster.lose(1)

    assert cluster.state.nodes == (0, 2)
    assert cluster.state.plan.slow_nodes == {2: 0.5}
    assert cluster.state.speeds == {2: 0.5}
