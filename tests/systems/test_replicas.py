"""Replica groups as torchft has them: what a loss takes out, and when it is back."""

import pytest

from helpers.system_runs import committed_at, free_iteration_s, setting_with
from planaria.observe.ledger import Category
from planaria.systems.equal_pipelines import fastest_equal_pipelines
from planaria.systems.replicas import HEARTBEAT_TIMEOUT_S, Replicas
from planaria.systems.system import RecoveryCosts


def test_replicas_train_as_fast_as_the_estimator_says() -> None:
    """With all groups a step is an iteration."""
    setting = setting_with()
    grid = fastest_equal_pipelines(setting, setting.num_nodes, min_pipelines=2)

    assert grid is not None
    assert free_iteration_s(Replicas(), setting) == pytest.approx(grid.iteration_s, rel=1e-3)


def test_a_lost_node_takes_its_group_out_until_it_is_back() -> None:
    """The others train on with what they had, so at three quarters of the rate."""
    setting = setting_with()
    grid = fastest_equal_pipelines(setting, 8, min_pipelines=2)
    assert grid is not None
    share = 1 - 1 / grid.num_pipelines
    run = Replicas().begin(setting)
    rate = committed_at(run, 20_000.0) / 20_000.0
    run.lose((1,), 20_000.0)
    before = committed_at(run, 30_000.0)
    with_fewer = committed_at(run, 50_000.0) - before
    run.take_back((1,), 50_000.0)
    after = committed_at(run, 60_000.0)

    assert with_fewer / 20_000.0 == pytest.approx(share * rate, rel=0.02)
    assert committed_at(run, 80_000.0) - after == pytest.approx(20_000.0 * rate, rel=0.01)
    assert not run.account.num_redone


def test_a_loss_costs_a_step_at_most_and_the_missed_heartbeats() -> None:
    """Nothing that was committed is undone."""
    run = Replicas().begin(setting_with())
    before = committed_at(run, 20_000.0)
    run.lose((1,), 20_000.0)
    run.run_until(20_100.0)
    parts = run.account.ledger.parts()

    assert run.account.num_iterations >= before
    assert parts[Category.DETECT] == pytest.approx(HEARTBEAT_TIMEOUT_S)
    assert 0.0 < parts[Category.REDO] <= setting_with().failure_free_s * 1.1


def test_a_step_that_a_slow_node_makes_longer_is_lost_as_a_whole() -> None:
    """What was lost was taken modulo the step of nodes that are not slow."""
    setting = setting_with()
    step_s = setting.failure_free_s / 0.25
    run = Replicas().begin(setting)
    run.set_speeds({2: 0.25}, 0.0)
    run.lose((1,), 20.8 * step_s)
    run.run_until(30 * step_s)

    redone_s = run.account.ledger.parts()[Category.REDO]
    assert redone_s == pytest.approx(0.8 * step_s, rel=0.1)


def test_a_group_joins_as_soon_as_its_node_has_started() -> None:
    """Its processes start beside those of the node; then it gets its state. No job starts again."""
    costs = RecoveryCosts(startup_s=0.0, node_start_s=10.0)
    run = Replicas().begin(setting_with(costs))
    run.lose((1,), 20_000.0)
    run.run_until(30_000.0)
    before = run.account.ledger.parts()[Category.TRANSFER]
    run.take_back((1,), 30_000.0)
    run.run_until(30_009.0)
    waits = run.account.ledger.parts()[Category.TRANSFER]
    run.run_until(30_020.0)

    assert waits == before < run.account.ledger.parts()[Category.TRANSFER]
    assert run.account.ledger.parts()[Category.RESTART] == 0.0


def test_a_job_without_any_group_starts_again_as_every_other_one_does() -> None:
    """It had ended, so it pays `restart_s`."""
    costs = RecoveryCosts(startup_s=0.0)
    run = Replicas().begin(setting_with(costs))
    run.lose(tuple(range(8)), 20_000.0)
    run.take_back(tuple(range(8)), 21_000.0)
    run.run_until(22_000.0)

    assert run.account.ledger.parts()[Category.RESTART] == pytest.approx(costs.restart_s)


def test_without_any_group_the_job_goes_back_to_its_save() -> None:
    """And goes on once one group is complete."""
    setting = setting_with()
    grid = fastest_equal_pipelines(setting, 8, min_pipelines=2)
    assert grid is not None
    run = Replicas().begin(setting)
    run.run_until(20_000.0)
    run.lose(tuple(range(0, 8, grid.depth)), 20_000.0)
    kept = run.account.num_iterations

    assert kept % 100 == 0
    assert run.account.num_restarts == 1
    assert committed_at(run, 30_000.0) == kept
    run.take_back((0,), 30_000.0)
    assert committed_at(run, 31_000.0) > kept
