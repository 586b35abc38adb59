"""ReCycle: what a loss costs with and without its three techniques."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from helpers.system_runs import committed_at, free_iteration_s, setting_with
from planaria.job.scenario_file import scenario_from_tables
from planaria.observe.ledger import Category
from planaria.planner.reroute.reroutes import price_plan, simulated_s, with_split_backwards
from planaria.systems.equal_pipelines import EqualPipelines, fastest_equal_pipelines
from planaria.systems.modelled_job import ModelledJob
from planaria.systems.recycle import ReCycle
from planaria.systems.rerouting import ReroutedTimes
from planaria.systems.system import Setting

ROOT = Path(__file__).parents[2]
PLAIN = ReCycle(decouples_backward=False, staggers_optimizer=False, normalises=False)


def pipelines_of(setting: Setting) -> EqualPipelines:
    """Four pipelines of two nodes."""
    pipelines = fastest_equal_pipelines(setting, 8, min_pipelines=2)
    assert pipelines is not None
    assert (pipelines.depth, pipelines.num_pipelines) == (2, 4)
    return pipelines


def test_without_losses_it_is_as_fast_as_the_estimator_says() -> None:
    """There is no overhead (Odyssey, table I)."""
    setting = setting_with(microbatches=16)

    assert free_iteration_s(PLAIN, setting) == pytest.approx(
        pipelines_of(setting).iteration_s, rel=1e-3
    )


@pytest.mark.parametrize("staggers", [False, True])
def test_decoupled_backwards_help_without_losses_too(staggers: bool) -> None:
    """The same planner makes the schedules, whether nodes are lost or not."""
    setting = setting_with(microbatches=16)
    problem, pipelines = setting.catalog.problem, pipelines_of(setting)
    split_s = simulated_s(problem, with_split_backwards(problem, pipelines.plan(setting)))
    system = ReCycle(staggers_optimizer=staggers)

    assert split_s < 0.95 * pipelines.iteration_s
    assert free_iteration_s(system, setting) <= split_s * (1.0 + 1e-3)


def test_the_page_says_what_split_backwards_give() -> None:
    """Of one plan, with the sums of the default."""
    tables = {"cluster": {"nodes": 16, "profile": "gpt3-6.7b"}}
    setting = scenario_from_tables(tables, name="page").setting
    priced = price_plan(setting.catalog.problem, setting.catalog.plans[16])
    page = " ".join((ROOT / "docs" / "SIMULATE.md").read_text("utf-8").split())

    assert priced is not None
    assert priced.plan.splits_backward
    assert (
        f"of `gpt3-6.7b` on 16 nodes takes {setting.failure_free_s:.2f} s an iteration with whole "
        f"backwards, {priced.iteration_s:.2f} s with split ones."
    ) in page


def test_losses_make_no_job_faster() -> None:
    """Not with few microbatches either, most of whose time are bubbles."""
    for microbatches in (8, 12, 16, 40):
        setting = setting_with(microbatches=microbatches)
        pipelines = pipelines_of(setting)
        for decouples, staggers in product((False, True), repeat=2):
            times = ReroutedTimes(setting, pipelines, decouples=decouples, staggers=staggers)
            slower = [times.iteration_s(lost) for lost in product(range(4), repeat=2)]

            assert min(slower) == slower[0], (microbatches, decouples, staggers)


def test_peers_of_a_lost_node_compute_its_microbatches() -> None:
    """Three nodes do the work of four at that stage, so the job is slower, but by less than that of
    a whole pipeline; and nothing is undone."""
    setting = setting_with(microbatches=64)
    run = PLAIN.begin(setting)
    rate = committed_at(run, 20_000.0) / 20_000.0
    run.lose((2,), 20_000.0)
    before = run.account.num_iterations
    slower = (committed_at(run, 60_000.0) - before) / 40_000.0

    assert 3 / 4 * rate * 0.93 < slower < rate * 0.95
    assert not run.account.num_redone


def test_decoupled_backwards_hide_work_in_bubbles() -> None:
    """With few microbatches, of which bubbles are a large part."""
    setting = setting_with(microbatches=16)
    pipelines = pipelines_of(setting)
    times = {
        decouples: ReroutedTimes(setting, pipelines, decouples=decouples, staggers=False)
        for decouples in (False, True)
    }

    assert times[True].iteration_s((1, 0)) < times[False].iteration_s((1, 0))


def test_a_staggered_optimizer_takes_no_longer() -> None:
    """Late stages do not wait for the first one between iterations."""
    setting = setting_with(microbatches=16)
    pipelines = pipelines_of(setting)
    seconds = [
        ReroutedTimes(setting, pipelines, decouples=True, staggers=staggers).iteration_s((0, 1))
        for staggers in (False, True)
    ]

    assert seconds[1] < seconds[0]


def test_normalisation_moves_nodes_where_one_stage_lacks_most() -> None:
    """Two nodes of one stage are lost: one survivor of the other moves, and gets its layers."""
    after: dict[bool, tuple[float, float]] = {}
    for normalises in (False, True):
        system = replace(PLAIN, normalises=normalises)
        run = system.begin(setting_with(microbatches=64))
        run.run_until(1_000.0)
        run.lose((0, 2), 1_000.0)
        before = run.account.num_iterations
        number = committed_at(run, 100_000.0) - before
        after[normalises] = number, run.account.ledger.parts()[Category.TRANSFER]

    assert after[True][0] > 1.2 * after[False][0]
    assert after[True][1] > 0.0 == after[False][1]


def test_a_node_that_comes_takes_an_empty_place() -> None:
    """The inverse of a loss: it gets its layers, and the job is as fast as before."""
    run: ModelledJob = ReCycle().begin(setting_with(microbatches=64))
    rate = committed_at(run, 20_000.0) / 20_000.0
    run.lose((2,), 20_000.0)
    run.take_back((2,), 30_000.0)
    before = committed_at(run, 31_000.0)

    assert (committed_at(run, 51_000.0) - before) / 20_000.0 == pytest.approx(rate, rel=0.01)
    assert not run.account.num_restarts


def test_the_loss_of_a_whole_stage_costs_the_work_since_the_save() -> None:
    """No peer holds its layers any more."""
    run = ReCycle().begin(setting_with(microbatches=64))
    run.run_until(20_000.0)
    run.lose((0, 2, 4, 6), 20_000.0)

    assert run.account.num_restarts == 1
    assert run.account.num_iterations % 100 == 0
    assert committed_at(run, 40_000.0) > run.account.num_redone


def test_waiting_nodes_get_larger_pipelines() -> None:
    """After a start on four nodes four more come."""
    run = ReCycle().begin(setting_with(microbatches=64))
    rate = committed_at(run, 20_000.0) / 20_000.0
    run.lose((0, 2, 4, 6), 20_000.0)
    run.take_back((0, 2, 4, 6), 30_000.0)
    before = committed_at(run, 31_000.0)

    assert (committed_at(run, 51_000.0) - before) / 20_000.0 == pytest.approx(rate, rel=0.02)


def test_nodes_that_come_while_the_job_starts_anew_get_larger_pipelines_too() -> None:
    """Two of four nodes come during the restart with the other two, and were left out for good."""
    run = ReCycle().begin(setting_with(microbatches=64))
    rate = committed_at(run, 20_000.0) / 20_000.0
    run.lose((0, 2, 4, 6), 20_000.0)
    run.take_back((0, 2), 30_000.0)
    run.take_back((4, 6), 30_030.0)
    before = committed_at(run, 32_000.0)

    assert (committed_at(run, 52_000.0) - before) / 20_000.0 == pytest.approx(rate, rel=0.02)


def test_nodes_that_come_are_spread_over_the_stages() -> None:
    """Each stage lacks two nodes, and the two lowest empty places are of one stage."""
    settings = setting_with(microbatches=64)
    both, one = ReCycle().begin(settings), ReCycle().begin(settings)
    both.lose((0, 2, 5, 7), 20_000.0)
    both.take_back((0, 2), 21_000.0)
    one.lose((0, 3), 20_000.0)
    numbers = [
        committed_at(run, 50_000.0) - before
        for run in (both, one)
        for before in [committed_at(run, 30_000.0)]
    ]

    assert numbers[0] == pytest.approx(numbers[1], rel=0.01)


def test_larger_pipelines_wait_for_the_commit() -> None:
    """The iteration in flight is not lost for them."""
    run = ReCycle().begin(setting_with(microbatches=64))
    run.lose((0, 2, 4, 6), 20_000.0)
    run.run_until(30_000.0)
    redo_s = run.account.ledger.parts()[Category.REDO]
    run.take_back((0, 2, 4, 6), 30_000.0)
    run.run_until(40_000.0)

    assert run.account.num_restarts == 2
    assert run.account.ledger.parts()[Category.REDO] == pytest.approx(redo_s)
