"""Gemini, Strawman and HighFreq: what they pay, and what a loss costs."""

from dataclasses import replace

import pytest

from helpers.system_runs import committed_at, free_iteration_s, setting_with
from planaria.observe.ledger import Category
from planaria.systems.gemini import Gemini
from planaria.systems.highfreq import HighFreq, interval_s
from planaria.systems.remote_saves import WARM_UP_S, serialise_s
from planaria.systems.strawman import STRAWMAN_INTERVAL_S, Strawman
from planaria.systems.system import RecoveryCosts

SYSTEMS = (Gemini(), Strawman(), HighFreq())
DAY_S = 86_400.0


def test_gemini_trains_as_fast_as_the_estimator_says() -> None:
    """Copies travel in idle spans of the network (figure 7)."""
    setting = setting_with()

    assert free_iteration_s(Gemini(), setting) == pytest.approx(setting.failure_free_s, rel=1e-3)


@pytest.mark.parametrize("system", [Strawman(), HighFreq()], ids=lambda one: one.name)
def test_serialising_is_all_that_remote_saves_cost(system: HighFreq | Strawman) -> None:
    """Without it an iteration takes what the estimator says."""
    setting = setting_with()
    run = system.begin(setting)
    run.run_until(DAY_S)
    parts = run.account.ledger.parts()
    stalled_s = parts[Category.CHECKPOINT_STALL]

    took_s = (run.account.now_s - stalled_s) / run.account.num_iterations
    assert took_s == pytest.approx(setting.failure_free_s, rel=1e-6)
    assert stalled_s > 0.0


def test_high_freq_loses_a_seventh_as_in_the_paper() -> None:
    """Section 7.3 prints 14.5% for 128 devices that share 20 Gb/s: 81 s after each 480 s."""
    setting = setting_with()
    storage_bytes_per_s = 2.5e9 / 128  # For each device.
    of_paper = replace(
        setting, costs=RecoveryCosts(startup_s=0.0, save_bytes_per_s=storage_bytes_per_s)
    )
    run = HighFreq().begin(of_paper)
    run.run_until(30 * DAY_S)
    stalled_s = run.account.ledger.parts()[Category.CHECKPOINT_STALL]

    assert interval_s(of_paper) / serialise_s(of_paper) == pytest.approx(480 / 81)
    assert stalled_s / run.account.now_s == pytest.approx(0.144, abs=0.001)


def test_faster_storage_makes_high_freq_no_slower() -> None:
    """It saves no more often than is useful: it stands still for a seventh of the time at most."""
    samples = []
    for speed in (1e7, 3e7, 1e8, 1e9, 1e10):
        run = HighFreq().begin(setting_with(RecoveryCosts(startup_s=0.0, save_bytes_per_s=speed)))
        samples.append(committed_at(run, DAY_S))

    assert samples[-1] == pytest.approx(samples[0], rel=0.15)
    assert samples[1:] == sorted(samples[1:])


def test_high_freq_goes_back_to_its_newest_complete_save() -> None:
    """A save that is being written is lost: two intervals back at most, and at least as long as one
    is written, which is the interval without the time to serialise."""
    setting = setting_with(RecoveryCosts(startup_s=0.0, save_bytes_per_s=3e7))
    run = HighFreq().begin(setting)
    every = run.saves.every
    before = committed_at(run, 20_000.0)
    run.lose((3,), 20_000.0)

    kept = run.account.num_iterations
    assert kept % every == 0
    assert 0.9 * every <= before - kept <= 2 * every
    assert every * setting.failure_free_s >= interval_s(setting) - 1e-6


def test_strawman_saves_every_three_hours() -> None:
    """So a loss just before the next save costs three hours."""
    setting = setting_with()
    run = Strawman().begin(setting)
    before = committed_at(run, 2 * STRAWMAN_INTERVAL_S - 60.0)
    run.lose((0,), 2 * STRAWMAN_INTERVAL_S - 60.0)

    lost_s = (before - run.account.num_iterations) * setting.failure_free_s
    assert lost_s == pytest.approx(STRAWMAN_INTERVAL_S, rel=0.03)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_the_job_waits_until_the_lost_node_is_replaced(
    system: Gemini | Strawman | HighFreq,
) -> None:
    """None of the three trains on fewer nodes."""
    run = system.begin(setting_with())
    run.run_until(40_000.0)
    run.lose((5,), 40_000.0)
    kept = run.account.num_iterations

    assert committed_at(run, 60_000.0) == kept
    run.take_back((5,), 60_000.0)
    assert committed_at(run, 60_000.0 + WARM_UP_S) == kept
    assert committed_at(run, 61_000.0) > kept


def test_gemini_loses_one_iteration_besides_the_one_in_flight() -> None:
    """The copy of an iteration travels during the next one, so it is not complete yet (equation
    1)."""
    run = Gemini().begin(setting_with())
    before = committed_at(run, 40_000.0)
    run.lose((5,), 40_000.0)

    assert run.account.num_iterations == before - 1
    assert not run.account.num_restarts


def test_gemini_copies_less_often_where_links_are_slow() -> None:
    """Then a loss costs more iterations."""
    setting = setting_with()
    problem = setting.catalog.problem
    link = problem.profile.links["inter_node"]
    slow = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 400)
    profile = replace(problem.profile, links={**problem.profile.links, "inter_node": slow})
    catalog = replace(setting.catalog, problem=replace(problem, profile=profile))
    run = Gemini().begin(replace(setting, catalog=catalog))
    before = committed_at(run, 40_000.0)
    run.lose((5,), 40_000.0)

    assert run.account.num_iterations < before - 1


def test_gemini_recovers_from_memory_unless_a_whole_group_is_lost() -> None:
    """Nodes 2 and 3 are a group, 1 and 2 are not (algorithm 1)."""
    after = {}
    for nodes in ((1, 2), (2, 3)):
        run = Gemini().begin(setting_with())
        before = committed_at(run, 20_000.0)
        run.lose(nodes, 20_000.0)
        after[nodes] = before - run.account.num_iterations

    assert after[1, 2] == 1
    assert after[2, 3] * setting_with().failure_free_s == pytest.approx(9_200.0, rel=0.05)


def test_a_group_is_lost_one_by_one_only_within_a_recovery() -> None:
    """A node that is new keeps no copies until training has gone on."""
    lost = {}
    for pause_s in (10.0, 3_000.0):
        run = Gemini().begin(setting_with())
        run.lose((2,), 20_000.0)
        run.take_back((2,), 20_000.0)
        run.run_until(20_000.0 + pause_s)
        run.lose((3,), 20_000.0 + pause_s)
        lost[pause_s] = run.account.num_restarts

    assert lost == {10.0: 1, 3_000.0: 0}


def test_a_standby_node_takes_the_place_of_a_lost_one() -> None:
    """Section 6.2; here the plan for all nodes leaves none, so it comes back first."""
    run = Gemini().begin(setting_with())
    run.lose((2,), 10_000.0)
    run.lose((6,), 10_000.0)
    run.take_back((2,), 11_000.0)
    kept = committed_at(run, 12_000.0)
    run.take_back((6,), 12_000.0)

    assert committed_at(run, 14_000.0) > kept


def test_a_save_that_is_newer_than_the_copies_is_loaded() -> None:
    """One that is written within the iteration after it is complete before the copy of that."""
    setting = setting_with(RecoveryCosts(startup_s=0.0, save_bytes_per_s=1e12))
    run = Gemini().begin(setting)
    every = run.saves.every
    run.lose((5,), (every + 0.5) * setting.failure_free_s)

    assert run.account.num_iterations == every
