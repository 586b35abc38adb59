"""Simulated jobs of planaria: what holds of every one, and what each event costs."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from unittest import mock

import pytest

from helpers.simulated_clusters import (
    BACK,
    LOST,
    NOTICE,
    Occurrences,
    Wild,
    conserve_seconds_and_samples,
    outcome,
    small,
)
from planaria.coordinator.commands import Command
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import JobState
from planaria.coordinator.step import Event, step
from planaria.core.job import POLICIES
from planaria.core.messages import StopRequested
from planaria.errors import ConfigError, FeasibleValue, InfeasibleError, Limit, PlanariaError
from planaria.observe.ledger import Category
from planaria.planner.reroute.reroutes import best_reroute
from planaria.policies import reroute
from planaria.simulator.economics import planaria_run, remembered, virtual_foresight
from planaria.simulator.economics.compare import (
    Interval,
    JobOutcome,
    Outcomes,
    compare,
    interval,
    play,
)
from planaria.simulator.economics.planaria_run import PlanariaRun
from planaria.simulator.economics.planaria_system import PlanariaSystem
from planaria.simulator.failures.occurrences import Occurrence, OccurrenceKind
from planaria.simulator.failures.random_losses import PoissonLosses
from planaria.simulator.failures.repair_times import RepairTime
from planaria.systems import account
from planaria.systems.system import RecoveryCosts

QUICK = (0, 1, 2, 3, 5, 6, 25)  # Seeds that take little time, of each policy one.


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if seed in QUICK else pytest.mark.long)
        for seed in (*range(2 * len(POLICIES)), 25)
    ],
)
def test_seconds_and_samples_are_conserved(seed: int) -> None:
    """Whatever happens, with every policy: the ledger sums to the wall time, no sample counts
    twice, and no job trains more than without failures, or than its devices compute without
    bubbles."""
    rng = Random(seed)
    of = small(
        **{
            "resilience.policy": POLICIES[seed % len(POLICIES)],
            "resilience.failures_tolerated": rng.choice((0, 1)),
            "checkpoint.copies": rng.choice((0, 0, 2)),
            "checkpoint.persist_every": rng.choice((0, 7, 50)),
        }
    )
    costs = RecoveryCosts(
        startup_s=rng.choice((0.0, 20.0)),
        node_start_s=rng.choice((0.0, 10.0)),
        detect_s=rng.choice((0.01, 3.0)),
        save_stall_s=rng.choice((0.0, 0.3)),
        save_bytes_per_s=rng.choice((1e7, 1e9)),
    )
    of = replace(of, failures=Wild(), setting=replace(of.setting, costs=costs))
    result = play(of, PlanariaSystem(), seed)
    calm = outcome(of)

    conserve_seconds_and_samples(of, result)
    assert result.samples <= calm.samples + of.setting.job.training.global_batch_size


def test_the_account_has_as_many_iterations_as_the_coordinator_committed() -> None:
    """Also after the job went back to a save and did iterations again."""
    of = small(**{"resilience.policy": "morph"})
    run = PlanariaSystem().begin(of.setting)
    committed = []
    for number in range(1, 6):
        run.lose((number,), 500.0 * number)
        run.run_until(500.0 * number + 100.0)
        committed.append((run.account.num_iterations, run.num_committed))

    assert run.account.num_redone > 0
    assert all(account == coordinator for account, coordinator in committed)


def test_without_failures_a_job_is_as_fast_as_the_estimator_says() -> None:
    """Every system has this rate to begin with."""
    of = small()
    result = outcome(of)

    assert result.samples_per_s == pytest.approx(
        of.setting.job.training.global_batch_size / of.setting.failure_free_s, rel=2e-3
    )
    assert result.node_hours == pytest.approx(6.0)


def test_a_loss_costs_the_iteration_in_flight_and_each_part_of_the_recovery() -> None:
    """The parts are those of `RecoveryCosts`, and the layers move as fast as the links are."""
    costs = RecoveryCosts(startup_s=0.0, detect_s=3.0, answer_s=0.5, decide_s=0.25, regroup_s=0.125)
    of = small()
    result = outcome(of, Occurrence(1000.0, LOST, (2,)), costs=costs)

    ledger = result.ledger
    assert ledger["detect"] == pytest.approx(3.5)
    assert ledger["decide"] == pytest.approx(0.25)
    assert ledger["regroup"] == pytest.approx(0.125)
    assert ledger["transfer"] > 0.0
    started_s = costs.decide_s + costs.regroup_s
    assert ledger["redo"] == pytest.approx(
        (1000.0 - started_s) % of.setting.failure_free_s, abs=1e-3
    )


def test_a_node_that_is_back_joins_without_any_iteration_being_redone() -> None:
    """A change at a commit costs pauses alone."""
    of = small()
    costs = RecoveryCosts(startup_s=0.0, node_start_s=30.0)
    lost = outcome(of, Occurrence(100.0, LOST, (2,)), costs=costs)
    back = outcome(of, Occurrence(100.0, LOST, (2,)), Occurrence(200.0, BACK, (2,)), costs=costs)

    assert back.samples > 1.05 * lost.samples
    assert back.ledger["redo"] == lost.ledger["redo"]
    assert back.node_hours == pytest.approx(5.0 + 3500.0 / 3600.0)


def test_a_noticed_node_leaves_at_a_commit() -> None:
    """So its loss costs nothing more."""
    notice = Occurrence(1000.0, NOTICE, (2,), deadline_s=1120.0)
    result = outcome(small(), notice, Occurrence(1120.0, LOST, (2,)))

    assert result.ledger["redo"] == 0.0
    assert result.ledger["detect"] == 0.0


def test_a_node_that_was_told_of_its_end_as_it_started_leaves_too() -> None:
    """The notice is still there once it has started; nobody heard of it again."""
    costs = RecoveryCosts(startup_s=0.0, node_start_s=60.0)
    before = (Occurrence(100.0, LOST, (2,)), Occurrence(200.0, BACK, (2,)))
    noticed = (Occurrence(230.0, NOTICE, (2,), deadline_s=900.0), Occurrence(900.0, LOST, (2,)))
    once = outcome(small(), *before[:1], costs=costs)
    twice = outcome(small(), *before, *noticed, costs=costs)

    assert twice.num_failures == 2
    for category in ("redo", "detect"):
        assert twice.ledger[category] == pytest.approx(once.ledger[category])


def test_ranks_that_begin_anew_forget_that_they_were_asked_to_stop() -> None:
    """As real ones do: whoever still wants it says so again."""
    run = PlanariaSystem().begin(small().setting)
    run.run_until(1000.0)
    before = run.account.num_iterations
    run._tell(StopRequested(), (), 1000.0)
    run.lose((1,), 1000.0)
    run.run_until(2000.0)

    assert run.account.num_restarts == 0
    assert run.account.num_iterations > before + 10


def test_a_job_that_loses_all_its_nodes_goes_on_from_its_newest_save() -> None:
    """It waits for nodes, is started again, and trains again what was not saved."""
    nodes = tuple(range(6))
    of = small(**{"checkpoint.persist_every": 20})
    result = outcome(of, Occurrence(1000.0, LOST, nodes), Occurrence(1500.0, BACK, nodes))

    assert 0 < result.num_redone <= 21
    assert result.ledger["idle"] >= 400.0
    assert result.samples > 0.8 * (3600.0 - 500.0 - 200.0) / 3600.0 * outcome(of).samples


def test_a_job_that_loses_all_its_nodes_pays_their_start() -> None:
    """As every system does: new nodes start, and then the job. It loads its save, if it has one."""
    nodes = tuple(range(6))
    costs = RecoveryCosts(startup_s=0.0, node_start_s=30.0, save_bytes_per_s=1e8)
    of = small(**{"checkpoint.persist_every": 0})
    lost, back = Occurrence(1000.0, LOST, nodes), Occurrence(1500.0, BACK, nodes)
    result = outcome(of, lost, back, costs=costs)

    assert result.ledger["idle"] == pytest.approx(530.0, abs=0.1)
    assert result.ledger["restart"] == pytest.approx(costs.restart_s, abs=1.0)
    assert result.ledger["transfer"] == 0.0
    assert result.num_restarts == 1


def test_a_loss_while_a_job_starts_again_makes_it_start_once_more() -> None:
    """As with other systems: 20 s of a start were in vain."""
    nodes = tuple(range(6))
    costs, of = RecoveryCosts(startup_s=0.0), small(**{"checkpoint.persist_every": 0})
    lost, back = Occurrence(1000.0, LOST, nodes), Occurrence(1500.0, BACK, nodes)
    other = Occurrence(1500.0 + costs.node_start_s + 20.0, LOST, (3,))
    result = outcome(of, lost, back, other, costs=costs)

    assert result.ledger["restart"] == pytest.approx(costs.restart_s + 20.0, abs=1.0)


def test_survivors_that_go_back_to_a_save_start_nothing_anew() -> None:
    """All holders of a layer are lost and come back; the processes of the others live on."""
    of = small(**{"checkpoint.persist_every": 20})
    holders = of.setting.catalog.plans[6].holders(0)
    lost, back = Occurrence(1000.0, LOST, holders), Occurrence(1500.0, BACK, holders)
    result = outcome(of, lost, back)

    assert result.num_redone > 0
    assert result.ledger["restart"] == 0.0
    assert result.ledger["transfer"] > 0.0


def test_copies_in_memory_save_what_the_disk_would_lose() -> None:
    """All nodes that hold a layer are lost at once, and another has a copy of it: that of the
    iteration before the last one, since the last one's was under way."""
    keys = {"resilience.failures_tolerated": 1, "checkpoint.persist_every": 1000}
    losses = (Occurrence(1800.0, LOST, small(**keys).setting.catalog.plans[6].holders(0)),)
    redone = [
        outcome(small(**keys, **{"checkpoint.copies": copies}), *losses).num_redone
        for copies in (2, 0)
    ]

    assert redone[0] == 1
    assert redone[1] > 100


def test_copies_are_those_of_the_epoch_in_which_they_were_begun() -> None:
    """An epoch that has not trained has made none, however many iterations there were before. Else
    nodes would keep states that they never got."""
    run = PlanariaSystem().begin(small(**{"checkpoint.copies": 2}).setting)
    labels = []
    for number, at_s in enumerate((1000.0, 1001.0, 1500.0), start=1):
        run.lose((number,), at_s)
        run.run_until(at_s + 1.0)
        labels.append([version.label for version in run._nodes.versions])
        num_committed = run.account.num_iterations

    assert labels[0] == labels[1]
    assert [label.epoch for label in labels[0]] == [0]
    assert labels[2][0] == labels[0][0]
    assert labels[2][1].epoch > labels[0][0].epoch
    assert labels[2][1].age == num_committed - 1


def test_a_slow_node_gets_less_work_for_as_long_as_it_is_slow() -> None:
    """At half the speed everybody would wait for it; it is found by its reports, and again when it
    is fast."""
    slow = Occurrence(900.0, OccurrenceKind.SLOWED, (1,), speed=0.5)
    fast = Occurrence(2700.0, OccurrenceKind.RESTORED, (1,))
    of = small()
    usual = outcome(of).samples
    share = outcome(of, slow, fast).samples / usual

    assert 0.92 < share < 1.0
    assert outcome(of, slow).samples / usual == pytest.approx(1 - (1 - share) * 1.5, abs=0.02)


def test_a_node_that_is_hardly_slow_slows_the_job() -> None:
    """Nothing is done about less than a fifth, so the iteration is as long as it makes it."""
    run = PlanariaSystem().begin(small().setting)
    run.run_until(900.0)
    usual = run.account.num_iterations
    run.set_speeds({1: 0.9}, 900.0)
    run.run_until(1800.0)
    slow = run.account.num_iterations - usual
    run.set_speeds({1: 1.0}, 1800.0)
    run.run_until(2700.0)

    assert slow / (run.account.num_iterations - usual - slow) == pytest.approx(0.91, abs=0.02)


def test_a_slow_node_without_work_is_tried_again() -> None:
    """Nobody measures how fast it is: morphing leaves it out, and has it back when it is fast."""

    def num_iterations_until(end_s: float) -> int:
        """The number of iterations in the 900 s before a time."""
        run.run_until(end_s - 900.0)
        before = run.account.num_iterations
        run.run_until(end_s)
        return run.account.num_iterations - before

    run = PlanariaSystem().begin(small(**{"resilience.policy": "morph"}).setting)
    usual = num_iterations_until(1000.0)
    run.set_speeds({1: 0.05}, 1000.0)
    without_it = num_iterations_until(7000.0)
    run.set_speeds({1: 1.0}, 7000.0)

    assert without_it < 0.8 * usual
    assert num_iterations_until(13_000.0) == pytest.approx(usual, abs=1)


def test_a_save_inside_a_jump_is_known_before_what_is_decided_after_it() -> None:
    """Else the coordinator holds the disk for full, and takes a slower plan that loses less."""
    run = PlanariaSystem().begin(small().setting)
    run.set_speeds({1: 0.2}, 600.0)
    numbers = []
    for at_s in (1000.0, 1400.0, 7000.0, 7400.0):
        run.run_until(at_s)
        numbers.append(run.account.num_iterations)

    assert numbers[3] - numbers[2] == pytest.approx(numbers[1] - numbers[0], abs=1)


def test_a_run_of_so_many_iterations_ends_with_the_last() -> None:
    """`[run] iterations` stops at the commit, not at the next event."""
    of = replace(small(), iterations=123)
    result = outcome(of, Occurrence(100.0, LOST, (2,)), Occurrence(700.0, BACK, (2,)))

    assert result.samples == 123 * of.setting.job.training.global_batch_size
    assert result.wall_s < of.horizon_s


def test_the_same_seeds_give_the_same_outcomes_in_any_number_of_processes() -> None:
    """A result that nobody can repeat is no result."""
    of = replace(small(), failures=Wild())

    def outcomes(num_processes: int) -> Outcomes:
        return compare(
            of,
            (PlanariaSystem(),),
            num_seeds=5,
            num_processes=num_processes,
            on_done=lambda: None,
        )

    assert outcomes(1) == outcomes(3)


def test_what_other_runs_have_found_changes_no_outcome() -> None:
    """Runs of one scenario look up what each other's searches found."""
    of = replace(small(**{"resilience.policy": "adaptive"}), failures=Wild())

    def outcomes(*seeds: int) -> list[JobOutcome]:
        virtual_foresight.common_results.cache_clear()
        return [play(of, PlanariaSystem(), seed) for seed in seeds]

    with mock.patch.object(reroute, "best_reroute", wraps=best_reroute) as search:
        first, second = (outcomes(seed)[0] for seed in (1, 2))
        num_alone = search.call_count
        assert outcomes(2, 1, 2) == [second, first, second]
        assert 0 < search.call_count - num_alone <= num_alone


def test_an_error_of_a_process_reaches_the_caller() -> None:
    """And no process is left."""
    of = replace(
        small(), failures=Occurrences(Occurrence(5.0, BACK, (99,)), Occurrence(1.0, LOST, (77,)))
    )
    with pytest.raises(KeyError):
        compare(of, (PlanariaSystem(),), num_seeds=2, num_processes=2, on_done=lambda: None)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("failures.window", "start", "is wrong"),
        InfeasibleError(Limit.NODES, 2, "is small", FeasibleValue(Limit.NODES, 4, or_more=True)),
    ],
)
def test_a_mistake_of_the_user_reaches_the_caller_as_it_is(
    error: PlanariaError, capfd: pytest.CaptureFixture[str]
) -> None:
    """It could not be read from the process, and ended the command with a traceback."""
    of = replace(small(), failures=mock.Mock(occurrences=mock.Mock(side_effect=error)))
    with pytest.raises(type(error)) as caught:
        compare(of, (PlanariaSystem(),), num_seeds=2, num_processes=2, on_done=lambda: None)

    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    assert "Traceback" not in capfd.readouterr().err


def test_an_interval_is_that_of_student() -> None:
    """Of 1, 2, 3 and 4 it is 2.5 +- 3.182 * 1.291 / 2."""
    result = interval([1.0, 2.0, 3.0, 4.0])

    assert result.mean == 2.5
    assert result.low == pytest.approx(2.5 - 3.1824 * 1.29099 / 2, abs=1e-4)
    assert interval([7.0]) == Interval(7.0, None, None)


def test_reports_that_are_noted_together_have_the_effect_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the same coordinator, only faster."""

    def one_by_one(
        rules: Rules, state: JobState, events: Sequence[Event], now_s: float
    ) -> tuple[JobState, tuple[Command, ...]]:
        commands: list[Command] = []
        for event in events:
            state, new_commands = step(rules, state, event, now_s)
            commands += new_commands
        return state, tuple(commands)

    scenarios = [
        replace(
            small(**{"resilience.policy": policy, "checkpoint.copies": copies}), failures=Wild()
        )
        for policy, copies in (("reinstantiate", 2), ("rollback", 0), ("morph", 2))
    ]
    together = [play(of, PlanariaSystem(), 7) for of in scenarios]
    monkeypatch.setattr(planaria_run, "step_together", one_by_one)

    assert [play(of, PlanariaSystem(), 7) for of in scenarios] == together


def test_a_loss_before_the_search_ahead_is_over_is_answered_in_a_hurry() -> None:
    """With the answers of the search the job is no slower, and changes to a better plan."""
    losses = tuple(Occurrence(600.0 * number, LOST, (number,)) for number in range(1, 3))
    of = small(**{"resilience.policy": "adaptive"})
    never, soon = (
        outcome(of, *losses, costs=RecoveryCosts(startup_s=0.0, look_ahead_s=seconds))
        for seconds in (1e9, 1.0)
    )

    assert never.samples < soon.samples


def test_a_pause_without_a_loss_takes_as_long_as_it_is_told() -> None:
    """In a replay a worker that crashed has no node that is lost; the iteration in flight is."""
    of = small()
    calm, paused = (PlanariaSystem().begin(of.setting) for _ in range(2))
    paused.stand_still(500.0, until_s=560.0)
    for run in (calm, paused):
        run.run_until(5000.0)

    assert paused.account.ledger.seconds[Category.RESTART] == 60.0
    lost_s = 60.0 + paused.account.ledger.seconds[Category.REDO]
    each_s = of.setting.failure_free_s
    missing = calm.account.num_iterations - paused.account.num_iterations
    assert missing == pytest.approx(lost_s / each_s, abs=1.0)


@pytest.mark.parametrize("kind", [LOST, NOTICE])
def test_a_save_that_an_epoch_begins_with_counts_once_it_is_written(kind: OccurrenceKind) -> None:
    """A job that has fewer copies afterwards is saved at once; a better plan, which is weighed by
    what is unsaved, is looked for before the next commit."""
    setting = small(**{"resilience.failures_tolerated": 2, "checkpoint.persist_every": 0}).setting
    run = PlanariaSystem().begin(replace(setting, costs=RecoveryCosts(save_bytes_per_s=1e12)))
    run.run_until(1000.0)
    if kind is LOST:
        run.lose((0,), 1000.0)
    else:
        run.give_notice((0,), 1000.0, deadline_s=1120.0)
    for hundredths in range(1, 10_000):
        run.run_until(1000.0 + hundredths / 100.0)
        if run._state.saves.newest_iteration >= 0:
            break

    assert run._state.saves.newest_iteration == run.num_committed > 0


def test_memory_does_not_grow_with_the_length_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of the past has bounds, which the first losses reach here."""
    monkeypatch.setattr(account, "POINTS_MAX", 32)
    monkeypatch.setattr(remembered, "ANSWERS_MAX", 8)
    of = replace(small(), failures=PoissonLosses(0.25, RepairTime(600.0)), horizon_s=576_000.0)
    num_objects: list[int] = []
    lose = PlanariaRun.lose

    def count_and_lose(self: PlanariaRun, nodes: tuple[int, ...], now_s: float) -> None:
        gc.collect()
        num_objects.append(len(gc.get_objects()))
        lose(self, nodes, now_s)

    monkeypatch.setattr(PlanariaRun, "lose", count_and_lose)
    gc.freeze()  # What other tests left is not counted.
    play(of, PlanariaSystem(), 0)
    gc.unfreeze()

    assert len(num_objects) > 200
    assert max(num_objects[-40:]) < max(num_objects[40:80]) + 60
