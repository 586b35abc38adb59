"""The compared systems: what holds of each, and what each is published to do."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.simulated_clusters import BACK, LOST, NOTICE, PLANARIA, outcome, small
from planaria.job.scenario_file import scenario_from_tables
from planaria.simulator.failures.occurrences import Occurrence
from planaria.systems.equal_pipelines import fastest_equal_pipelines, pipelines_of_depth
from planaria.systems.odyssey import Odyssey
from planaria.systems.oobleck import Oobleck
from planaria.systems.recycle import ReCycle
from planaria.systems.restart import KEEP_ALIVE_S, LAST_CALL_S, Restart, StaticRestart
from planaria.systems.system import RecoveryCosts, System
from planaria.systems.varuna import Varuna

SYSTEMS = (Oobleck(), Restart(), Varuna())
# Saves take no time, so that nothing but the plan decides the rate.
FREE = RecoveryCosts(startup_s=0.0, save_bytes_per_s=1e18)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_without_failures_every_system_is_as_fast_as_the_estimator_says(system: System) -> None:
    """Six nodes are no worse as a grid, so all have the same plan."""
    of = small()

    assert outcome(of, costs=FREE, system=system).samples_per_s == pytest.approx(
        of.setting.job.training.global_batch_size / of.setting.failure_free_s, rel=2e-3
    )


def test_varuna_loses_the_work_since_its_save() -> None:
    """The loss comes in the ninth iteration after a save, of which there is one every ten."""
    of = small(**{"checkpoint.persist_every": 10})
    at_s = 38.5 * of.setting.failure_free_s
    result = outcome(of, Occurrence(at_s, LOST, (2,)), costs=FREE, system=Varuna())

    assert result.num_redone == 8
    assert result.ledger["redo"] == pytest.approx(8.5 * of.setting.failure_free_s)
    assert result.ledger["restart"] == pytest.approx(FREE.restart_s, abs=0.1)


def test_varuna_saves_more_often_the_more_often_nodes_are_lost() -> None:
    """As Young's formula has it: after a loss at 30 min and another at an hour, each half hour's
    mean makes the interval sqrt(2 * save * mean); a day without a loss makes it longer again."""
    setting = replace(small(**{"checkpoint.persist_every": 100_000}).setting, costs=FREE)
    grid = fastest_equal_pipelines(setting, 6)
    assert grid is not None
    save_s = 30.0
    share_bytes = setting.node_bytes([grid.template]) / grid.num_pipelines  # Of each replica.
    costs = replace(FREE, save_bytes_per_s=share_bytes / save_s)
    job = Varuna().begin(replace(setting, costs=costs))
    intervals_s = []
    for number, node in enumerate((5, 4), start=1):
        job.lose((node,), 1800.0 * number)
        job.take_back((node,), 1800.0 * number + 1.0)
    for at_s in (3800.0, 100_000.0):
        job.run_until(at_s)
        intervals_s.append(job.saves.every * grid.iteration_s)

    assert intervals_s[0] == pytest.approx((2 * save_s * 1800.0) ** 0.5, rel=0.05)
    assert 4 * intervals_s[0] < intervals_s[1] < 7 * intervals_s[0]


@pytest.mark.parametrize("system", [Oobleck(), Varuna()], ids=lambda system: system.name)
def test_seconds_of_other_devices_are_not_charged(system: System) -> None:
    """Seconds that were measured with iterations many times as long have no meaning here: the model
    of the profile is a name, and changes nothing."""
    of = small()
    named = replace(of, setting=replace(of.setting, model="gpt3-6.7b"))
    lost = Occurrence(1000.0, LOST, (2,))

    assert outcome(named, lost, system=system) == outcome(of, lost, system=system)


def test_varuna_saves_within_a_notice_or_falls_back() -> None:
    """Two minutes are enough for a save of up to 50 s, and ten seconds are not."""
    of = small(**{"checkpoint.persist_every": 10})
    rank_bytes = sum(of.setting.layer_bytes) / 2
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=rank_bytes / 50.0)
    redone: dict[float, list[int]] = {120.0: [], 10.0: []}
    for at_s in range(1800, 1900, 20):
        for notice_s, numbers in redone.items():
            notice = Occurrence(at_s - notice_s, NOTICE, (2,), deadline_s=at_s)
            lost = Occurrence(at_s, LOST, (2,))
            result = outcome(of, notice, lost, costs=costs, system=Varuna())
            numbers.append(result.num_redone)

    assert sum(redone[120.0]) == 0
    assert 0 < max(redone[10.0]) <= 10


def test_varuna_heeds_a_notice_that_came_while_the_node_started() -> None:
    """It is still there once the node has started."""
    of = small(**{"checkpoint.persist_every": 100})
    rank_bytes = sum(of.setting.layer_bytes) / 2
    costs = RecoveryCosts(startup_s=0.0, node_start_s=60.0, save_bytes_per_s=rank_bytes / 50.0)
    before = (Occurrence(100.0, LOST, (2,)), Occurrence(200.0, BACK, (2,)))
    noticed = (Occurrence(230.0, NOTICE, (2,), deadline_s=1800.0), Occurrence(1800.0, LOST, (2,)))
    once = outcome(of, *before, costs=costs, system=Varuna())
    twice = outcome(of, *before, *noticed, costs=costs, system=Varuna())
    untold = outcome(of, *before, *noticed[1:], costs=costs, system=Varuna())

    assert twice.num_redone == once.num_redone < untold.num_redone


def test_a_longer_notice_makes_varuna_train_no_less() -> None:
    """It trains on until its save would be too late, however early it is told."""
    of = small(**{"checkpoint.persist_every": 100})
    rank_bytes = sum(of.setting.layer_bytes) / 2
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=rank_bytes / 50.0)
    lost = Occurrence(1800.0, LOST, (2,))
    without = outcome(of, lost, costs=costs, system=Varuna())
    results = []
    for notice_s in (120.0, 600.0, 1200.0):
        notice = Occurrence(1800.0 - notice_s, NOTICE, (2,), deadline_s=1800.0)
        results.append(outcome(of, notice, lost, costs=costs, system=Varuna()))

    assert results[0].num_redone == 0 < without.num_redone
    assert results[0].samples > without.samples
    assert {result.samples for result in results} == {results[0].samples}


def test_a_grid_leaves_nodes_idle() -> None:
    """Five nodes make two pipelines of two, and one node has no work."""
    grid = pipelines_of_depth(small().setting, 5, 2)
    result = outcome(small(), Occurrence(0.0, LOST, (2,)), costs=FREE, system=Restart())

    assert grid is not None
    assert grid.num_places == 4
    assert result.ledger["idle"] == pytest.approx(0.2 * 3600.0, rel=0.1)


def test_varuna_takes_the_fastest_grid_of_any_depth() -> None:
    """None of a single depth is faster."""
    setting = small().setting
    for num_nodes in range(2, 7):
        depths = [depth for depth in setting.catalog.templates if depth <= num_nodes]
        grids = [pipelines_of_depth(setting, num_nodes, depth) for depth in depths]
        best_s = min(grid.iteration_s for grid in grids if grid is not None)
        fastest = fastest_equal_pipelines(setting, num_nodes)
        assert fastest is not None
        assert fastest.iteration_s == best_s


def test_varuna_starts_anew_for_nodes_that_come_and_loses_nothing() -> None:
    """It saves before it does."""
    lost, back = Occurrence(600.0, LOST, (2,)), Occurrence(1800.0, BACK, (2,))
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=1e11)
    of = small()
    once = outcome(of, lost, costs=costs, system=Varuna())
    twice = outcome(of, lost, back, costs=costs, system=Varuna())

    assert (once.num_restarts, twice.num_restarts) == (1, 2)
    assert twice.num_redone == once.num_redone


def test_a_loss_costs_oobleck_an_iteration_and_the_move_of_a_stage() -> None:
    """Nothing that was committed is done again."""
    of = small()
    result = outcome(of, Occurrence(1000.0, LOST, (2,)), costs=FREE, system=Oobleck())
    templates = [pipeline.template for pipeline in of.setting.catalog.plans[5].pipelines]
    link = of.setting.catalog.problem.profile.links["inter_node"]

    assert result.num_redone == 0
    assert result.num_restarts == 0
    assert result.ledger["regroup"] == pytest.approx(FREE.regroup_s)
    assert result.ledger["transfer"] == pytest.approx(
        link.seconds(of.setting.node_bytes(templates))
    )
    assert result.ledger["redo"] == pytest.approx(1000.0 % of.setting.failure_free_s)


@pytest.mark.parametrize(
    "system",
    [Oobleck(), Odyssey(), ReCycle(), Restart(), Varuna(), PLANARIA],
    ids=lambda system: system.name,
)
def test_a_node_loads_the_layers_of_all_its_devices(system: System) -> None:
    """Speeds are those of nodes. Some systems loaded the layers of one device, eight times as
    quickly as others."""
    cluster = {"nodes": 4, "devices_per_node": 8, "profile": "llama2-7b"}
    job = {"checkpoint": {"persist_every": 1}, "resilience": {"policy": "morph"}}
    tables = {"cluster": cluster, "job": job, "run": {"hours": 1.0}}
    of = scenario_from_tables(tables, name="eight", directory=Path())
    setting = of.setting
    costs = replace(FREE, restart_s=0.0, save_bytes_per_s=sum(setting.layer_bytes) / 400.0)
    lost, back = Occurrence(2000.0, LOST, (0, 1, 2, 3)), Occurrence(2100.0, BACK, (0, 1, 2, 3))
    ledger = outcome(of, lost, back, costs=costs, system=system).ledger

    assert ledger["transfer"] + ledger["restart"] == pytest.approx(400.0, abs=1.0)


def test_oobleck_stops_below_f_plus_1_pipelines_until_nodes_are_back() -> None:
    """Of six nodes three are left, and two pipelines of two need four. It saves all."""
    lost, back = Occurrence(600.0, LOST, (0, 1, 2)), Occurrence(1800.0, BACK, (2,))
    result = outcome(small(), lost, back, costs=FREE, system=Oobleck())

    assert result.ledger["idle"] == pytest.approx(1200.0 + FREE.node_start_s)
    assert result.num_restarts == 1
    assert result.num_redone == 0


def test_oobleck_goes_back_to_a_save_if_all_holders_of_a_layer_are_lost() -> None:
    """It has saved every 20 iterations."""
    of = small(**{"checkpoint.persist_every": 20, "resilience.failures_tolerated": 0})
    holders = of.setting.catalog.plans[6].holders(0)
    result = outcome(of, Occurrence(1000.0, LOST, holders), costs=FREE, system=Oobleck())

    assert 0 < result.num_redone < 20
    assert result.num_restarts == 1


def test_torchrun_goes_back_to_its_save_when_nodes_go_and_when_they_come() -> None:
    """It notices a loss by missed keep-alives, and waits for late comers."""
    of = small(**{"checkpoint.persist_every": 100})
    lost, back = Occurrence(1000.0, LOST, (2,)), Occurrence(2500.0, BACK, (2,))
    once = outcome(of, lost, costs=FREE, system=Restart())
    twice = outcome(of, lost, back, costs=FREE, system=Restart())

    assert once.ledger["detect"] == pytest.approx(KEEP_ALIVE_S)
    assert once.ledger["restart"] == pytest.approx(LAST_CALL_S + FREE.restart_s, abs=0.1)
    assert 0 < once.num_redone < twice.num_redone
    assert twice.num_restarts == 2


def test_replicas_share_a_save_under_torchrun() -> None:
    """As torch.distributed.checkpoint has it; each wrote all that it held."""
    setting = replace(small(**{"checkpoint.persist_every": 10}).setting, costs=FREE)
    grid = fastest_equal_pipelines(setting, 6)
    assert grid is not None
    share_bytes = setting.node_bytes([grid.template]) / grid.num_pipelines
    costs = replace(FREE, save_bytes_per_s=share_bytes / 30.0)
    job = Restart().begin(replace(setting, costs=costs))
    job.run_until(2000.0)

    assert grid.num_pipelines > 1
    assert 10 * (job.iteration_s - grid.iteration_s) == pytest.approx(30.0)


def test_torchrun_waits_for_late_comers_only_while_some_may_come() -> None:
    """With as many nodes as there may be, and with a fixed number of them, the rendezvous is over
    at once."""
    costs = replace(FREE, node_start_s=0.0)
    setting = replace(small().setting, costs=costs)
    restart_s = []
    for system in (Restart(), StaticRestart(1), StaticRestart(0)):
        job = system.begin(setting)
        job.lose((2,), 1000.0)
        job.run_until(2000.0)
        restart_s.append(job.account.ledger.parts()["restart"])
        job.take_back((2,), 2000.0)
        job.run_until(3000.0)
        restart_s.append(job.account.ledger.parts()["restart"])

    some, all_of_them = LAST_CALL_S + costs.restart_s, costs.restart_s
    assert restart_s[:2] == pytest.approx([some, some + all_of_them], abs=0.1)
    assert restart_s[2:4] == pytest.approx([all_of_them, all_of_them], abs=0.1)
    assert restart_s[4:] == pytest.approx([0.0, all_of_them], abs=0.1)


def test_varuna_loses_nothing_when_a_node_comes() -> None:
    """At any time of an iteration and of a save."""
    of = small()
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=sum(of.setting.layer_bytes) / 100.0)
    for at_s in range(1800, 2000, 10):
        lost, back = Occurrence(0.0, LOST, (2,)), Occurrence(float(at_s), BACK, (2,))
        result = outcome(of, lost, back, costs=costs, system=Varuna())

        assert (result.num_redone, result.num_restarts) == (0, 1), at_s


def test_varuna_loses_nothing_when_a_node_comes_while_it_saves_for_another() -> None:
    """A save takes about 100 s, and the second node comes 10 to 140 s after the first."""
    of = small()
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=sum(of.setting.layer_bytes) / 200.0)
    lost, back = Occurrence(0.0, LOST, (1, 2)), Occurrence(1800.0, BACK, (2,))
    for after_s in range(10, 150, 10):
        other = Occurrence(1800.0 + after_s, BACK, (1,))
        result = outcome(of, lost, back, other, costs=costs, system=Varuna())

        assert result.num_redone == 0, after_s


def test_a_save_of_oobleck_before_it_stops_takes_time() -> None:
    """As long as any other; what it saves counts after the next start."""
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=1e8)
    lost, back = Occurrence(600.0, LOST, (0, 1, 2)), Occurrence(1800.0, BACK, (2,))
    result = outcome(small(), lost, back, costs=costs, system=Oobleck())

    write_s = sum(small().setting.layer_bytes) / 6 / 1e8
    assert result.ledger["checkpoint_stall"] == pytest.approx(write_s)
    assert result.num_redone == 0


@pytest.mark.parametrize("system", [Restart(), PLANARIA], ids=lambda system: system.name)
def test_a_notice_at_the_very_start_makes_no_loss_of_nodes_that_never_were_there(
    system: System,
) -> None:
    """Nodes under maintenance counted as lost at time 0 if a notice was due then."""
    notice = Occurrence(0.0, NOTICE, (1,), deadline_s=50.0)
    away, lost = Occurrence(0.0, LOST, (2,)), Occurrence(50.0, LOST, (1,))

    assert outcome(small(), notice, away, lost, system=system).num_failures == 1
