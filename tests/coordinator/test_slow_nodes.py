"""Slow nodes in a job: they get less work while it trains, and all of it back."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest

from helpers import fake_cluster
from helpers.cases import every_nth
from helpers.coordinated import FIRST, NOW_S, NUM_MICROBATCHES, node_loss, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import template
from helpers.strategies import layer_profile, model_profile
from planaria.coordinator.leadership import progress_of
from planaria.coordinator.learning.slowness import RETRY_S, WINDOW
from planaria.coordinator.state import Phase
from planaria.core.messages import DrainRequested
from planaria.core.records import Changed, Committed, Recovering, Warned
from planaria.planner.plans import PlanCatalog, plan_catalog, plan_of_templates
from planaria.planner.problem import Problem
from planaria.planner.templates import smallest_num_nodes
from planaria.policies.policy import profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.unequal_nodes import UnequalNodes

END = 200


@pytest.fixture(autouse=True)
def _long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cluster, "END", END)


def example_catalog(num_nodes: int, *, n0: int) -> PlanCatalog:
    """Plans of a job of ten equal layers, n0 nodes of which hold them."""
    layers = tuple(
        layer_profile(f"layer {i}", 0.05, parameter_bytes=1024, activation_bytes=0)
        for i in range(10)
    )
    unlimited = Problem(
        profile=model_profile(layers),
        devices_per_node=1,
        num_microbatches=NUM_MICROBATCHES,
        failures_tolerated=1,
    )
    memory_bytes, problem = 1 << 20, unlimited
    while smallest_num_nodes(problem) < n0:
        memory_bytes = memory_bytes * 9 // 10
        profile = replace(unlimited.profile, device_memory_bytes=memory_bytes)
        problem = replace(unlimited, profile=profile)
    return plan_catalog(problem, num_nodes, {n: template(n) for n in range(n0, num_nodes - n0 + 1)})


def training(num_nodes: int = 4, sizes: tuple[int, ...] = (2, 2), *, n0: int = 2) -> FakeCluster:
    """A job of nodes that take what the profile says."""
    catalog = example_catalog(num_nodes, n0=n0)
    profile = catalog.problem.profile
    made = small_rules(n0=n0)
    made = replace(
        made,
        job=replace(made.job, training=replace(made.job.training, iterations=END)),
        policy=UnequalNodes(Reinstantiate(catalog)),
        prices=profile_prices(profile, regroup_s=0.05),
        profile=profile,
    )
    templates = [catalog.templates[size] for size in sizes]
    cluster = FakeCluster(
        made, plan_of_templates(catalog.problem, templates, range(num_nodes), epoch=0)
    )
    cluster.begin()
    assert cluster.state.phase is Phase.TRAINING
    return cluster


def train(
    cluster: FakeCluster, number: int, *, slowness: Mapping[int, float], now_s: float = NOW_S
) -> None:
    """So many iterations in which nodes take that much longer for their work."""
    for _ in range(number):
        assert cluster.rules.profile is not None
        layer_s, state = cluster.rules.profile.layer_s, cluster.state
        for rank in state.plan.ranks:
            hops = [hop for route in state.plan.routes for hop in route if hop.rank == rank]
            work_s = sum(sum(layer_s[hop.first_layer : hop.end_layer]) for hop in hops)
            cluster.nodes[rank].computing_s = slowness.get(rank, 1.0) * work_s
        cluster.train_at(state.commits.next_iteration, now_s)


def layers_of(cluster: FakeCluster, node: int) -> int:
    """How much work a node has: layers times microbatches."""
    hops = [hop for route in cluster.state.plan.routes for hop in route if hop.rank == node]
    return sum(hop.end_layer - hop.first_layer for hop in hops)


def committed(cluster: FakeCluster) -> list[int]:
    return [notice.iteration for notice in of_type(cluster.commands, Committed)]


def test_a_slow_node_gets_less_work_and_all_of_it_back() -> None:
    """In changes that redo nothing, with the price of each candidate; twice as fast as before."""
    cluster = training()
    before = layers_of(cluster, 1)
    train(cluster, WINDOW + 4, slowness={1: 2.0})
    (slow,) = of_type(cluster.commands, Changed)

    assert slow.kinds == {1: "slow"}
    assert "node 1 takes 2.00 times as long" in slow.reason
    prices = {candidate.answer: candidate.iteration_s for candidate in slow.candidates}
    assert slow.predicted_s == min(prices.values()) == prices[slow.answer]
    assert slow.predicted_s < 0.85 * prices["stay"]
    assert layers_of(cluster, 1) < before
    assert cluster.state.plan.slow_nodes == {1: 0.5}
    assert cluster.state.nodes == (0, 1, 2, 3)
    train(cluster, WINDOW + 6, slowness={})
    (_, fast) = of_type(cluster.commands, Changed)
    assert (fast.kinds, fast.reason) == ({1: "fast"}, "")
    assert layers_of(cluster, 1) == before
    assert cluster.state.speeds == cluster.state.plan.slow_nodes == {}
    assert committed(cluster) == list(range(FIRST, cluster.state.commits.next_iteration))
    assert of_type(cluster.commands, Recovering) == []
    number = len(cluster.commands)
    train(cluster, 20, slowness={})
    assert of_type(cluster.commands[number:], Changed) == []


def test_stalls_and_short_slow_spells_change_nothing() -> None:
    """A window is never full of them."""
    cluster = training()
    for _ in range(5):
        train(cluster, WINDOW - 1, slowness={1: 3.0})
        train(cluster, 1, slowness={})
        train(cluster, 1, slowness={2: 100.0})

    assert of_type(cluster.commands, Changed) == []
    assert cluster.state.plan.epoch == 0


def test_where_no_plan_pays_it_is_told_once() -> None:
    """Pipelines of a node each: a third more time moves no microbatch of three."""
    cluster = training(2, (1, 1), n0=1)
    for later_s in (0.0, 3600.0):  # Failures become rare, so it is looked at again.
        train(cluster, 3 * WINDOW, slowness={1: 1.34}, now_s=NOW_S + later_s)

    assert of_type(cluster.commands, Changed) == []
    (warning,) = of_type(cluster.commands, Warned)
    assert "node 1 takes 1.3" in warning.text


@pytest.mark.parametrize(
    ("later", "node"), every_nth(2, product(range(WINDOW, WINDOW + 5), (0, 1, 3)))
)
def test_a_loss_at_any_moment_leaves_a_plan_for_the_speeds(node: int, later: int) -> None:
    """Before, during and after the change; the slow one itself, its peer, or another one."""
    cluster = training(5, (3, 2))
    train(cluster, later, slowness={1: 2.0})
    cluster.hear(node_loss(node))
    cluster.nodes[node].is_alive = False
    cluster.lose()
    train(cluster, 2 * WINDOW + 6, slowness={1: 2.0})

    left = {0, 1, 2, 3, 4} - {node}
    assert set(cluster.state.plan.nodes) == left
    assert cluster.state.plan.slow_nodes == ({1: 0.5} if node != 1 else {})
    assert committed(cluster) == list(range(FIRST, cluster.state.commits.next_iteration))


@pytest.mark.parametrize("word", ["lost", "drained", "drained, and told by the next"])
def test_a_slow_node_that_is_gone_is_told_of_no_more(word: str) -> None:
    """No plan is faster for its sake, and no next coordinator hears of it."""
    cluster = training(5, (3, 2))
    train(cluster, WINDOW + 5, slowness={1: 2.0})
    number = len(cluster.commands)
    if word == "lost":
        cluster.lose(1)
    else:
        cluster.hear(DrainRequested(node=1))
        while 1 in cluster.state.nodes:
            train(cluster, 1, slowness={1: 2.0})
    if word.endswith("next"):
        cluster.restart()
    speeds = cluster.state.speeds
    train(cluster, 3, slowness={})

    assert cluster.state.nodes == (0, 2, 3, 4)
    assert (speeds, cluster.state.idle) == ({}, {})
    warnings = of_type(cluster.commands[number:], Warned)
    assert [warning.text for warning in warnings if not warning.left] == []
    reasons = [changed.reason for changed in of_type(cluster.commands[number:], Changed)]
    assert not any("node 1" in reason for reason in reasons)


def test_nodes_join_and_leave_a_job_with_a_slow_node() -> None:
    """Each plan is made for the speeds."""
    cluster = training(5, (3, 2))
    train(cluster, WINDOW + 5, slowness={1: 2.0})
    cluster.hear(DrainRequested(node=0))
    train(cluster, 4, slowness={1: 2.0})
    assert cluster.state.nodes == (1, 2, 3, 4)
    cluster.join(5)
    train(cluster, 6, slowness={1: 2.0})

    assert [*cluster.state.plan.nodes] == [1, 2, 3, 4, 5]
    assert cluster.state.plan.slow_nodes == {1: 0.5}
    kinds = [set(notice.kinds.values()) for notice in of_type(cluster.commands, Changed)]
    assert kinds[:3] == [{"slow"}, {"drain"}, {"join"}]


def test_a_node_that_is_left_out_is_tried_again_later() -> None:
    """Forty times slower it is better left out; nobody sees when it is fast again."""
    cluster = training(3, (1, 1, 1), n0=1)
    train(cluster, WINDOW + 5, slowness={1: 40.0})
    assert [*cluster.state.plan.nodes] == [0, 2]
    assert cluster.state.nodes == (0, 1, 2)
    train(cluster, 5, slowness={}, now_s=NOW_S + RETRY_S / 2)
    assert [*cluster.state.plan.nodes] == [0, 2]
    train(cluster, 5, slowness={}, now_s=NOW_S + 2 * RETRY_S)

    assert [*cluster.state.plan.nodes] == [0, 1, 2]
    assert of_type(cluster.commands, Changed)[-1].kinds == {1: "fast"}
    train(cluster, WINDOW + 5, slowness={1: 40.0}, now_s=NOW_S + 2 * RETRY_S)
    assert [*cluster.state.plan.nodes] == [0, 2]
    train(cluster, 5, slowness={}, now_s=NOW_S + 3.5 * RETRY_S)
    assert [*cluster.state.plan.nodes] == [0, 2]


@pytest.mark.parametrize(("sizes", "slowness"), [((1, 1), 1.34), ((1, 1, 1), 40.0)])
def test_a_new_coordinator_knows_slow_nodes_that_the_plan_does_not_tell_of(
    sizes: tuple[int, ...], slowness: float
) -> None:
    """One for which no plan is faster, and one that is left out and was tried again: with all of
    its work it would hold up the others until it is found slow once more."""
    cluster = training(len(sizes), sizes, n0=1)
    for now_s in (NOW_S, NOW_S + 2 * RETRY_S):
        train(cluster, 2 * WINDOW + 5, slowness={1: slowness}, now_s=now_s)
    before = cluster.state
    assert [*before.speeds] == [1]
    cluster.progress = progress_of(before, of_type(cluster.commands, Committed)[-1])
    cluster.restart()
    assert (cluster.state.speeds, cluster.state.idle) == (before.speeds, before.idle)
    train(cluster, 5, slowness={}, now_s=NOW_S + 3.5 * RETRY_S)

    assert cluster.state.plan.nodes == before.plan.nodes


def test_a_new_coordinator_knows_the_speeds() -> None:
    """Else the first change after it would give a slow node everything."""
    cluster = training()
    train(cluster, WINDOW + 5, slowness={1: 2.0})
    cluster.restart()

    assert cluster.state.speeds == {1: 0.5}
