"""Bamboo: what redundancy costs, who takes over, and when nodes change places."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from helpers.system_runs import committed_at, free_iteration_s, setting_with
from planaria.observe.ledger import Category
from planaria.planner.plans import plan_of_templates
from planaria.planner.reroute.shadows import first_plan_with_shadows
from planaria.systems.bamboo import (
    DEPTH_FACTOR,
    FALLBACK_SLOWDOWN,
    LOCAL_RENDEZVOUS_S,
    Bamboo,
    RedundantTimes,
    keeper_of,
)
from planaria.systems.equal_pipelines import fastest_equal_pipelines
from planaria.systems.system import Setting

MEMORY_BYTES = 200_000_000_000


def bamboo_setting(nodes: int = 6) -> Setting:
    """Nodes with room for their neighbours' layers: pipelines of two or three."""
    return setting_with(nodes=nodes, microbatches=3 * nodes, memory_bytes=MEMORY_BYTES)


def test_redundant_forwards_are_paid_while_nothing_is_lost() -> None:
    """An iteration takes what the estimator says of the plan with shadows, and part of it is booked
    as redundant."""
    setting = bamboo_setting()
    depth = RedundantTimes(setting).depth
    problem = replace(setting.catalog.problem, splits_backward=False)
    templates = (setting.catalog.templates[depth],) * (6 // depth)
    nodes = range(depth * len(templates))
    plan = plan_of_templates(problem, templates, nodes, epoch=0)
    with_shadows = first_plan_with_shadows(problem, plan)
    run = Bamboo().begin(setting)
    run.run_until(10_000.0)

    took_s = free_iteration_s(Bamboo(), setting)
    assert took_s == pytest.approx(with_shadows.iteration_s, rel=1e-3)
    assert took_s > setting.catalog.distribution(templates)[0] * 1.02
    assert run.account.ledger.parts()[Category.REDUNDANT] > 1_000.0


def test_a_neighbour_takes_over_without_going_back() -> None:
    """Without a rendezvous, in an iteration that takes longer. With 42 nodes one pair of stages is
    no reason to change places."""
    setting = bamboo_setting(nodes=42)
    depth = RedundantTimes(setting).depth
    run = Bamboo().begin(setting)
    before = committed_at(run, 10_000.0)
    at_work = 42 // depth * depth
    run.lose((1,), 10_000.0)
    run.run_until(10_010.0)
    parts = run.account.ledger.parts()

    assert at_work >= 40
    assert run.account.num_iterations >= before
    assert not run.account.num_redone
    assert parts[Category.REGROUP] == 0.0
    assert committed_at(run, 20_000.0) > before


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_what_is_left_of_the_iteration_in_flight_takes_half_as_long_again(share: float) -> None:
    """The neighbour computes forwards and backwards of the lost node that it had not computed."""
    setting = bamboo_setting(nodes=42)
    run = Bamboo().begin(setting)
    iteration_s = free_iteration_s(Bamboo(), setting)
    run.lose((1,), (1000.0 + share) * iteration_s)
    run.run_until(20_000.0)

    redone_s = run.account.ledger.parts()[Category.REDO]
    left_s = (1.0 - share) * iteration_s
    assert redone_s == pytest.approx((FALLBACK_SLOWDOWN - 1.0) * left_s, rel=0.05)


@pytest.mark.parametrize(("nodes", "depth"), [(6, 2), (9, 3)])
def test_pipelines_are_the_fastest_from_half_as_long_again_on(nodes: int, depth: int) -> None:
    """Each node holds twice the layers; four pipelines of two would leave one of nine over."""
    setting = bamboo_setting(nodes)
    plain = fastest_equal_pipelines(setting, setting.num_nodes)
    times = RedundantTimes(setting)

    assert plain is not None
    assert times.depth == depth >= ceil(DEPTH_FACTOR * plain.depth)
    took_s = free_iteration_s(Bamboo(), setting)
    for times.depth in (2, 3, 4):
        assert times.iteration_s(((),) * (nodes // times.depth)) >= took_s * (1.0 - 1e-9)


def test_two_adjacent_losses_cost_the_work_since_the_save() -> None:
    """Neither has a neighbour that could take over for it."""
    for nodes, num_restarts in (((0, 1), 1), ((0, RedundantTimes(bamboo_setting()).depth), 0)):
        run = Bamboo().begin(bamboo_setting())
        run.run_until(20_000.0)
        run.lose(nodes, 20_000.0)

        assert run.account.num_restarts == num_restarts


def test_a_node_with_two_stages_cannot_be_lost() -> None:
    """Its neighbour keeps only one of them."""
    run = Bamboo().begin(bamboo_setting())
    run.run_until(20_000.0)
    num_restarts = []
    for node, at_s in ((0, 20_000.0), (keeper_of(0), 20_001.0)):
        run.lose((node,), at_s)
        num_restarts.append(run.account.num_restarts)

    assert num_restarts == [0, 1]


def test_nodes_change_places_after_the_iteration_if_few_are_left() -> None:
    """One of six nodes with two stages is more than 5%: the others form whole pipelines, and the
    rest waits."""
    setting = bamboo_setting()
    depth = RedundantTimes(setting).depth
    run = Bamboo().begin(setting)
    rate = committed_at(run, 10_000.0) / 10_000.0
    run.lose((0,), 10_000.0)
    before = committed_at(run, 11_000.0)
    parts = run.account.ledger.parts()
    slower = (committed_at(run, 31_000.0) - before) / 20_000.0

    assert parts[Category.REGROUP] == pytest.approx(LOCAL_RENDEZVOUS_S)
    assert slower == pytest.approx(rate * (5 // depth) / (6 // depth), rel=0.1)
    run.take_back((0,), 31_000.0)
    before = committed_at(run, 32_000.0)
    assert (committed_at(run, 42_000.0) - before) / 10_000.0 == pytest.approx(rate, rel=0.01)


def test_without_memory_for_redundancy_nothing_is_trained() -> None:
    """As the paper's table 2 of Oobleck has it for larger models."""
    job: dict[str, Any] = {"resilience.failures_tolerated": 0}
    run = Bamboo().begin(setting_with(nodes=2, microbatches=24, **job))

    assert committed_at(run, 10_000.0) == 0
