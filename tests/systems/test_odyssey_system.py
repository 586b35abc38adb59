"""Odyssey: what it chooses by Equation 8, and what that costs."""

from math import inf

import pytest

from helpers.system_runs import committed_at, free_iteration_s, setting_with
from planaria.systems.equal_pipelines import fastest_equal_pipelines
from planaria.systems.odyssey import (
    Duration,
    Odyssey,
    distribute_batch,
    effective_iterations,
    execution_plan,
    integer_partitions,
    rerouted_microbatches,
    restart_s,
    scaled_losses,
    step_time,
)
from planaria.systems.system import RecoveryCosts

MEAN, ORACLE = Odyssey(), Odyssey(duration=Duration.ORACLE)


@pytest.mark.parametrize("system", [MEAN, ORACLE], ids=lambda system: system.name)
def test_without_losses_it_is_as_fast_as_the_estimator_says(system: Odyssey) -> None:
    """There is no overhead."""
    setting = setting_with(microbatches=16)
    pipelines = fastest_equal_pipelines(setting, 8, min_pipelines=2)

    assert pipelines is not None
    assert free_iteration_s(system, setting) == pytest.approx(pipelines.iteration_s, rel=1e-3)


def test_equations_9_and_13() -> None:
    """Four stages and pipelines, eight microbatches: 33, 41 and 65 units with a backward twice as
    long as a forward."""
    stage = 3.0
    for num_lost, more in (((0, 0, 0, 0), 0.0), ((1, 0, 0, 0), 8 / 3), ((1, 1, 1, 1), 32 / 3)):
        assert sum(rerouted_microbatches(8, 4, num_lost)) == pytest.approx(more)

    assert step_time(4, 8, stage) == 33.0
    assert step_time(4, 8, stage) + stage * 8 / 3 == pytest.approx(41.0)


def test_a_stage_without_nodes_cannot_be_rerouted() -> None:
    """F_i = N_dp, where the printed equation divides by zero: dynamic parallelism is demanded."""
    assert rerouted_microbatches(8, 2, (0, 2)) == [0.0, inf]
    assert scaled_losses((2, 3), [(1, 2), (0, 0), (1, 0)]) == [2, 1]


def test_equation_8_weighs_the_transition_against_the_rate() -> None:
    """A step of 8 s after 100 s is better than one of 10 s from 500 s on."""
    assert effective_iterations(10.0, 0.0, 499.0) > effective_iterations(8.0, 100.0, 499.0)
    assert effective_iterations(10.0, 0.0, 501.0) < effective_iterations(8.0, 100.0, 501.0)
    assert effective_iterations(8.0, 100.0, 50.0) == 0.0


def test_microbatches_are_distributed_as_printed() -> None:
    """In proportion, then one by one, and none is left idle."""
    assert distribute_batch(16, (4, 3)) == (10, 6)
    assert distribute_batch(3, (9, 1, 1)) == (1, 1, 1)
    assert list(integer_partitions(7, 2, (2, 3, 4))) == [[4, 3]]
    assert list(integer_partitions(9, 3, (2, 3, 4))) == [[4, 3, 2], [3, 3, 3]]
    assert list(integer_partitions(2001, 1000, (2, 3))) == [[3, *[2] * 999]]


def test_algorithm_1_uses_all_nodes_that_are_left() -> None:
    """Seven nodes: three pipelines, and one more or less than the four before."""
    catalog = setting_with(microbatches=16).catalog
    plan = execution_plan(catalog, 7, 4)

    assert plan is not None
    assert sum(template.num_nodes for template in plan.templates) == 7
    assert sum(plan.microbatches) == 16
    assert plan.step_s == max(
        catalog.times.makespan_s(template, count)
        for template, count in zip(plan.templates, plan.microbatches, strict=True)
    )


def test_the_restart_grows_with_the_scale() -> None:
    """It is what is left of section V-C's 11.2 s without the transfer, on 8 devices."""
    assert restart_s(8) == pytest.approx(11.2 - 3.0 / 0.3235, abs=0.01)
    assert restart_s(64) > restart_s(32) > restart_s(8)


@pytest.mark.parametrize("system", [MEAN, ORACLE], ids=lambda system: system.name)
def test_the_choice_depends_on_the_time_to_the_next_event(system: Odyssey) -> None:
    """After long durations pipelines are formed anew; if losses follow each other at once, only the
    oracle knows better."""
    run = system.begin(setting_with(microbatches=64))
    run.run_until(20_000.0)
    run.lose((1,), 20_000.0)
    run.run_until(20_002.0)
    soon = run.account.ledger.parts()["restart"]
    run.run_until(40_000.0)

    assert run.account.ledger.parts()["restart"] > 0.0
    assert (soon == 0.0) == (system is ORACLE)


def test_the_loss_of_a_whole_stage_costs_the_work_since_the_save() -> None:
    """No live node holds its layers, whatever policy is demanded."""
    run = MEAN.begin(setting_with(microbatches=64))
    run.run_until(20_000.0)
    run.lose((0, 2, 4, 6), 20_000.0)

    assert run.account.num_restarts == 1
    assert run.account.num_iterations % 100 == 0
    assert committed_at(run, 40_000.0) > run.account.num_redone


def test_a_loss_that_needs_no_answer_leaves_the_next_event_free() -> None:
    """A node that was lost again before it had started had the oracle leave it out when it came at
    last."""
    run = ORACLE.begin(setting_with(RecoveryCosts(startup_s=0.0, node_start_s=10.0)))
    rate = committed_at(run, 20_000.0) / 20_000.0
    run.lose((2,), 20_000.0)
    run.take_back((2,), 30_000.0)
    run.lose((2,), 30_005.0)
    run.take_back((2,), 31_000.0)
    before = committed_at(run, 32_000.0)

    assert (committed_at(run, 52_000.0) - before) / 20_000.0 == pytest.approx(rate, rel=0.02)


def test_a_node_that_comes_back_makes_the_job_as_fast_as_before() -> None:
    """It takes its place, or pipelines are formed anew."""
    run = MEAN.begin(setting_with(microbatches=64))
    rate = committed_at(run, 20_000.0) / 20_000.0
    run.lose((2,), 20_000.0)
    run.take_back((2,), 30_000.0)
    before = committed_at(run, 31_000.0)

    assert (committed_at(run, 51_000.0) - before) / 20_000.0 == pytest.approx(rate, rel=0.02)


def test_pipelines_are_formed_anew_when_more_nodes_are_missing_than_one_pipeline_has() -> None:
    """Eight pipelines of two: with 13 nodes neither eight nor seven fit, and the answer was gone
    until enough nodes came back."""
    run = MEAN.begin(setting_with(nodes=16, microbatches=64))
    run.run_until(50_000.0)
    run.lose((1, 4, 9), 50_000.0)
    run.run_until(51_000.0)

    assert run.account.ledger.parts()["restart"] > 0.0
    assert run.account.num_restarts == 0
