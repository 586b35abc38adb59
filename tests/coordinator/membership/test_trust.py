"""Machines that fail often: their nodes join last, and hold no layer alone."""

from dataclasses import replace
from functools import cache

import pytest

from helpers.coordinated import FIRST, NOW_S, NUM_MICROBATCHES, node_loss, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import NUM_LAYERS, shaped_plan, template
from helpers.strategies import layer_profile, model_profile
from planaria.coordinator.commands import Tick
from planaria.coordinator.frozen import replace as replace_record
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.membership.trust import (
    FORGIVEN_S,
    is_trusted,
    num_failures,
    with_failures,
)
from planaria.coordinator.state import Phase
from planaria.core.messages import NodeArrived
from planaria.core.plan import Link, Plan
from planaria.planner.plans import plan_catalog
from planaria.planner.problem import Problem
from planaria.policies.reinstantiate import Reinstantiate

PLAN = shaped_plan((2, 2), NUM_MICROBATCHES)  # Nodes 1 and 3 hold the second half.
FLAKY = {1: "a", 3: "b"}


@cache
def policy() -> Reinstantiate:
    layers = tuple(layer_profile(f"layer {i}", 0.01) for i in range(NUM_LAYERS))
    problem = Problem(
        profile=model_profile(layers),
        devices_per_node=1,
        num_microbatches=NUM_MICROBATCHES,
        failures_tolerated=1,
    )
    return Reinstantiate(plan_catalog(problem, 6, {size: template(size) for size in (2, 3, 4)}))


def rules(*, n0: int = 2, max_nodes: int = 6) -> Rules:
    made = small_rules(n0=n0, max_nodes=max_nodes)
    prices = replace(made.prices, links={"inter_node": Link(0.0, 1e9)})
    return replace(made, policy=policy(), prices=prices)


def training(made: Rules, plan: Plan = PLAN) -> FakeCluster:
    cluster = FakeCluster(made, plan)
    cluster.begin()
    for node in plan.nodes:
        machine = FLAKY.get(node, f"machine-{node}")
        cluster.hear(NodeArrived(node=node, rank=node, machine=machine))
    cluster.train(FIRST)
    return cluster


def holders(plan: Plan) -> list[set[int]]:
    """Of each layer."""
    layers = plan.layers_by_rank
    return [{rank for rank in plan.ranks if n in layers[rank]} for n in range(NUM_LAYERS)]


def fail(cluster: FakeCluster, first: int) -> None:
    """Both flaky machines fail, one after the other; two nodes on them were waiting."""
    lost = [node for node in cluster.state.nodes if node not in (0, 2)]
    cluster.join_on(first, "a")
    cluster.join_on(first + 1, "b")
    assert cluster.state.change is None
    for node in lost:
        cluster.lose(node)
    assert cluster.state.phase is Phase.TRAINING


def test_what_fails_twice_holds_no_layer_alone() -> None:
    """After its first failure a machine gets back the place it had; after its second, both
    machines hold the second half once more, but never without a third."""
    cluster = training(rules(max_nodes=4))
    for first, is_trusting in ((4, True), (6, False)):
        fail(cluster, first)

        assert cluster.state.plan.nodes == (0, 2, first, first + 1)
        alone = [one for one in holders(cluster.state.plan) if one <= {first, first + 1}]
        assert bool(alone) == is_trusting


@pytest.mark.parametrize("count", [1, 2])
def test_a_node_that_joins_is_placed_such_that_distrusted_ones_hold_no_layer_alone(
    count: int,
) -> None:
    """The plan for five nodes; if they were trusted, nodes 1 and 3 would stay where they are."""
    cluster = training(rules())
    failures = dict.fromkeys(FLAKY.values(), (count, NOW_S))
    cluster.set_failures(failures)
    cluster.join(4)

    assert cluster.state.change is not None
    after = cluster.state.change.transition.after
    assert after.nodes == (0, 1, 2, 3, 4)
    assert any(one <= FLAKY.keys() for one in holders(after)) == (count == 1)


def test_a_new_coordinator_distrusts_the_same_machines() -> None:
    """It finds the failures on record, and hears from the agents which machine is whose."""
    cluster = training(rules(max_nodes=4))
    fail(cluster, 4)
    fail(cluster, 6)
    cluster.restart()

    assert cluster.state.nodes == (0, 2, 6, 7)
    trusted = [node for node in cluster.state.nodes if is_trusted(cluster.state, node, NOW_S)]
    assert trusted == [0, 2]


def test_of_nodes_that_wait_those_that_failed_least_replace_a_lost_one() -> None:
    """Node 4 came first, but its machine failed before."""
    cluster = training(rules(max_nodes=4))
    cluster.set_failures({"bad": (2, NOW_S), "worse": (3, NOW_S)})
    for node, machine in ((4, "worse"), (5, "bad"), (6, "good"), (7, "better")):
        cluster.join_on(node, machine)
    cluster.lose(0)
    assert cluster.state.nodes == (1, 2, 3, 6)
    cluster.lose(1, 2)

    assert cluster.state.nodes == (3, 5, 6, 7)


def test_of_nodes_that_wait_those_that_failed_least_join_first() -> None:
    """Three come while a node is joining, and then there is room for one."""
    cluster = training(rules(max_nodes=6))
    cluster.set_failures({"bad": (1, NOW_S)})
    cluster.join(4)
    assert cluster.state.change is not None
    cluster.join_on(5, "bad")
    cluster.join_on(6, "good")
    for iteration in (FIRST + 1, FIRST + 2, FIRST + 3):
        cluster.train(iteration)

    assert cluster.state.change is not None
    assert cluster.state.change.kinds == {6: "join"}


def test_a_machine_that_has_not_failed_for_an_hour_is_trusted_again() -> None:
    """What it did before then does not count with a failure after it, either."""
    cluster = training(rules())
    cluster.set_failures({"a": (2, NOW_S)})
    later_s = NOW_S + FORGIVEN_S

    assert not is_trusted(cluster.state, 1, later_s)
    assert is_trusted(cluster.state, 1, later_s + 1.0)
    assert is_trusted(cluster.state, 0, NOW_S)
    cluster.hear(Tick(), now_s=later_s + 1.0)
    cluster.hear(node_loss(1), now_s=later_s + 1.0)
    assert cluster.state.membership.failures == {"a": (1, later_s + 1.0)}


def test_the_record_of_failures_forgets_what_does_not_count_any_more() -> None:
    """Each spot machine has a name of its own, and each record of members had all of them."""
    state = training(rules()).state
    for later in range(1000):
        node, now_s = 10 + later, NOW_S + 7200.0 * later
        members = state.membership
        machines = members.machines.plus(node, f"spot-{later}")
        state = replace_record(state, membership=replace_record(members, machines=machines))
        state = with_failures(state, (node,), now_s)

    assert state.membership.failures == {"spot-999": (1, now_s)}


def test_a_lost_node_leaves_its_failure_behind_and_nothing_else() -> None:
    """Its number is never used again; its machine may come back, as another node."""
    cluster = training(rules())
    cluster.hear(NodeArrived(node=3, rank=3, machine="b", domain="rack"))
    cluster.lose(3)

    members = cluster.state.membership
    assert members.failures == {"b": (1, NOW_S)}
    assert sorted(members.machines) == [0, 1, 2]
    assert not members.domains
    cluster.join_on(4, "b")
    assert num_failures(cluster.state, 4, NOW_S) == 1
