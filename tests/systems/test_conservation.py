"""What holds of every system that is compared, whatever happens to the nodes."""

from dataclasses import replace

import pytest

from helpers.cases import every_nth
from helpers.simulated_clusters import BACK, LOST, Occurrences, small
from helpers.system_runs import check_conserves, committed_at, setting_with, two_deep
from planaria.cli.simulate.simulate_command import SYSTEMS
from planaria.observe.ledger import Category
from planaria.simulator.economics.compare import play
from planaria.simulator.economics.planaria_system import PlanariaSystem
from planaria.simulator.failures.occurrences import Occurrence
from planaria.systems.bamboo import Bamboo
from planaria.systems.gemini import Gemini
from planaria.systems.highfreq import HighFreq
from planaria.systems.odyssey import Odyssey
from planaria.systems.oobleck import Oobleck
from planaria.systems.recycle import ReCycle
from planaria.systems.replicas import Replicas
from planaria.systems.restart import Restart
from planaria.systems.strawman import Strawman
from planaria.systems.system import RecoveryCosts, System, SystemRun

COMPARED: list[System] = [s for s in SYSTEMS if not isinstance(s, PlanariaSystem)]
MEMORY_BYTES = 200_000_000_000  # Room for the neighbours' layers that Bamboo keeps.


def named(system: System) -> str:
    return system.name


@pytest.mark.parametrize("seed", every_nth(3, zip(range(6))))
@pytest.mark.parametrize("system", COMPARED, ids=named)
def test_seconds_and_samples_are_conserved(system: System, seed: int) -> None:
    """The ledger sums to the wall time, no sample counts twice, no failure makes a job faster."""
    check_conserves(system, seed, microbatches=16, memory_bytes=MEMORY_BYTES)


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_systems_conserve_too(seed: int) -> None:
    """ReCycle with every technique switched on and off, and Gemini with more copies."""
    recycle = ReCycle(
        decouples_backward=seed % 2 == 0, staggers_optimizer=seed % 3 == 0, normalises=seed > 2
    )
    check_conserves(recycle, seed, microbatches=16)
    check_conserves(Gemini(copies=3), seed, microbatches=16)


def test_seconds_before_a_pause_are_undone_with_their_iteration() -> None:
    """It is paused at 90%, goes on and is committed; then the job goes back. The part before the
    pause stayed useful."""
    run = ReCycle().begin(setting_with(microbatches=16))
    paused_s = 0.9 * run.iteration_s
    run.run_until(paused_s)
    run.pause(paused_s)
    run.go_on(paused_s, (Category.REGROUP, 1.0))
    assert committed_at(run, paused_s + 1.0 + 2.2 * run.iteration_s) == 3
    run.interrupt(run.account.now_s)
    run.go_back_to_save()

    parts = run.account.ledger.parts()
    assert run.account.num_iterations == 0
    assert parts[Category.USEFUL] == pytest.approx(0.0, abs=1e-9)
    assert parts[Category.REDO] == pytest.approx(run.account.now_s - 1.0)


def test_seconds_before_a_pause_are_spent_as_those_after_it() -> None:
    """One of nine nodes has no work, so a ninth of all training is idle. The part before a pause
    was useful as a whole."""
    run = ReCycle().begin(setting_with(nodes=9, microbatches=16))
    now_s = paused_s = 0.9 * run.iteration_s
    for _ in range(3):
        run.run_until(now_s)
        run.pause(now_s)
        run.go_on(now_s, (Category.REGROUP, 1.0))
        now_s += 1.0 + paused_s
    run.run_until(now_s + run.iteration_left_s(now_s))

    parts = run.account.ledger.parts()
    idle_s, useful_s = parts[Category.IDLE], parts[Category.USEFUL]
    assert idle_s / (idle_s + useful_s) == pytest.approx(1 / 9)


@pytest.mark.parametrize("share", [0.0, 1e-17, 0.5])
def test_each_iteration_after_a_pause_has_its_own_seconds(share: float) -> None:
    """Also where a pause comes right after a commit, and several iterations are booked at once."""
    run = ReCycle().begin(setting_with(microbatches=16))
    each_s = run.iteration_s
    run.run_until(each_s * (1.0 + share))
    run.pause(run.account.now_s)
    run.go_on(run.account.now_s, (Category.REGROUP, 1.0))
    run.run_until(1.0 + each_s * 4.5)
    run.account.go_back(1)

    assert run.account.num_redone == 3
    assert run.account.ledger.parts()[Category.USEFUL] == pytest.approx(each_s)


@pytest.mark.parametrize("system", COMPARED, ids=named)
def test_no_node_is_used_before_it_has_started(system: System) -> None:
    """A machine that is there again joins after `node_start_s`, and costs nothing before."""
    costs = RecoveryCosts(startup_s=0.0, node_start_s=5_000.0)
    setting = setting_with(costs, microbatches=16, memory_bytes=MEMORY_BYTES)
    jobs = [system.begin(setting) for _ in range(2)]
    for job in jobs:
        job.lose((2,), 20_000.0)
    jobs[0].take_back((2,), 30_000.0)
    for job in jobs:
        job.run_until(34_999.0)
    ledgers = [job.account.ledger.parts() for job in jobs]

    assert ledgers[0] == pytest.approx(ledgers[1])


@pytest.mark.parametrize("system", COMPARED, ids=named)
def test_a_node_is_slow_from_the_moment_when_it_becomes_slow(system: System) -> None:
    """The half of an iteration that is done stays done; the other half takes twice as long, but for
    what HighFreq stands still."""
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=1e18)
    setting = setting_with(costs, microbatches=16, memory_bytes=MEMORY_BYTES)
    whole_s = first_commit_s(system.begin(setting))
    job = system.begin(setting)
    job.set_speeds(dict.fromkeys(range(8), 0.5), whole_s / 2)

    slowed_s = whole_s if system != HighFreq() else setting.failure_free_s
    assert first_commit_s(job) == pytest.approx(whole_s + 0.5 * slowed_s, rel=0.05)


def test_a_slow_node_without_work_slows_nobody() -> None:
    """One of five does not fit into pipelines of two."""
    setting = replace(small().setting, costs=RecoveryCosts(startup_s=0.0))
    numbers = []
    for speed in (1.0, 0.5):
        job = Restart().begin(setting)
        job.lose((2,), 0.0)
        job.set_speeds({5: speed}, 1_000.0)
        numbers.append(committed_at(job, 20_000.0))

    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("system", COMPARED, ids=named)
def test_nothing_is_loaded_before_the_first_save(system: System) -> None:
    """A job that begins again from its start has nothing to read, however slow its storage is."""
    seconds = []
    for speed in (1e8, 1e12):
        costs = RecoveryCosts(startup_s=0.0, node_start_s=0.0, save_bytes_per_s=speed)
        job = system.begin(setting_with(costs, **{"checkpoint.persist_every": 0}))
        job.lose(tuple(range(8)), 100.0)
        job.take_back(tuple(range(8)), 200.0)
        job.run_until(1_000.0)
        parts = job.account.ledger.parts()
        seconds.append(parts[Category.RESTART] + parts[Category.TRANSFER])

    assert seconds[0] == pytest.approx(seconds[1])


@pytest.mark.parametrize("system", [ReCycle(), Odyssey(), Oobleck()], ids=named)
def test_a_loss_while_a_job_starts_again_makes_it_start_once_more(system: System) -> None:
    """Until its layers are loaded no node holds any, so there is nobody to take them from."""
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=1e9)
    setting = setting_with(costs, nodes=10, microbatches=64)
    stage: tuple[int, ...] = (0, 2, 4, 6, 8)
    if isinstance(system, Oobleck):
        stage = setting.catalog.plans[10].holders(0)
    other = next(node for node in range(10) if node not in stage)
    seconds = []
    for losses in ((stage,), (stage, (other,)), (tuple(sorted((other, *stage))),)):
        job = system.begin(setting)
        for number, nodes in enumerate(losses):
            job.lose(nodes, 20_000.0 + 10.0 * number)
        job.run_until(21_000.0)
        parts = job.account.ledger.parts()
        seconds.append(parts[Category.RESTART] + parts[Category.TRANSFER])

    assert seconds[0] > costs.restart_s + 1.0
    assert seconds[1] == pytest.approx(seconds[2] + 10.0, abs=0.1)


def test_a_neighbour_that_is_still_loading_takes_nothing_over() -> None:
    """Bamboo began its rendezvous anew in its authors' simulator; here the loss cost nothing."""
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=1e9)
    setting = setting_with(costs, nodes=6, microbatches=18, memory_bytes=200_000_000_000)
    seconds = []
    for losses in (((0, 1),), ((0, 1), (3,))):
        job = Bamboo().begin(setting)
        for number, nodes in enumerate(losses):
            job.lose(nodes, 20_000.0 + 10.0 * number)
        job.run_until(21_000.0)
        parts = job.account.ledger.parts()
        seconds.append(parts[Category.REGROUP] + parts[Category.TRANSFER])

    assert seconds[1] == pytest.approx(seconds[0] + 10.0, rel=0.25)


@pytest.mark.parametrize("system", [ReCycle(), Odyssey(), Oobleck(), Replicas()], ids=named)
def test_a_loss_does_not_make_a_job_start_sooner(system: System) -> None:
    """What is left of its start is not skipped."""
    job = system.begin(setting_with(RecoveryCosts(startup_s=500.0), microbatches=16))
    job.lose((2,), 100.0)

    assert committed_at(job, 500.0) == 0
    assert job.account.ledger.parts()[Category.STARTUP] == pytest.approx(500.0)


def test_a_group_that_loads_the_save_is_not_done_when_another_one_is_lost() -> None:
    """Two groups start again, one of them is lost, and the other still loads."""
    costs = RecoveryCosts(startup_s=0.0, save_bytes_per_s=1e8)
    job = Replicas().begin(setting_with(costs))
    job.lose((0, 2, 4, 6), 20_000.0)
    job.take_back((0, 2), 21_000.0)
    job.run_until(21_100.0)
    loading = job.account.ledger.parts()[Category.TRANSFER]
    job.lose((2,), 21_100.0)
    job.run_until(22_000.0)

    assert 0.0 < loading < 100.0
    assert job.account.ledger.parts()[Category.TRANSFER] > loading + 100.0


@pytest.mark.parametrize("system", SYSTEMS, ids=named)
def test_a_node_that_is_not_there_at_the_start_is_no_loss(system: System) -> None:
    """A job begins on the others, without a restart; those with fixed places wait for it."""
    costs = RecoveryCosts(startup_s=20.0, node_start_s=0.0)
    has_fixed_places = isinstance(system, Gemini | Strawman | HighFreq)
    comes = [Occurrence(3000.0, BACK, (2,))] if has_fixed_places else []
    of = two_deep(microbatches=16, memory_bytes=MEMORY_BYTES)
    of = replace(
        of,
        failures=Occurrences(Occurrence(0.0, LOST, (2,)), *comes),
        setting=replace(of.setting, costs=costs),
    )
    result = play(of, system, 0)

    assert result.num_failures == 0
    assert result.num_redone == 0
    assert result.ledger["detect"] == 0.0
    assert result.ledger["startup"] == pytest.approx(20.0, abs=0.1)
    if has_fixed_places:
        assert result.ledger["restart"] == 0.0
        assert result.ledger["idle"] == pytest.approx(3000.0)
    else:
        rate = of.setting.job.training.global_batch_size / of.setting.failure_free_s
        assert result.samples > 0.5 * 3600.0 * rate


@pytest.mark.parametrize("system", [s for s in SYSTEMS if s != Bamboo()], ids=named)
def test_a_job_starts_once_enough_nodes_are_there(system: System) -> None:
    """With a single node none can; what is lost before is no restart. (Bamboo lacks memory.)"""
    costs = RecoveryCosts(startup_s=20.0, node_start_s=10.0)
    setting = setting_with(costs, microbatches=16)
    job = system.begin(setting, absent=range(1, 8))
    job.take_back((1,), 50.0)
    job.lose((1,), 55.0)

    assert committed_at(job, 500.0) == 0
    job.take_back(tuple(range(1, 8)), 500.0)
    assert committed_at(job, 1000.0) > 0
    assert job.account.num_restarts == 0
    assert job.account.ledger.parts()[Category.STARTUP] == pytest.approx(20.0, abs=0.1)


@pytest.mark.parametrize("system", [Gemini(), Strawman(), HighFreq()], ids=named)
def test_a_job_that_waits_is_started_once(system: System) -> None:
    """Further losses while it waits are no restarts of their own."""
    job = system.begin(setting_with())
    for node, at_s in ((5, 20_000.0), (4, 21_000.0), (6, 22_000.0)):
        job.lose((node,), at_s)
    job.take_back((4, 5, 6), 23_000.0)

    assert committed_at(job, 40_000.0) > 0
    assert job.account.num_restarts == 1


def test_what_a_pause_keeps_of_an_iteration_a_loss_takes() -> None:
    """ReCycle pauses for a node that comes; if one is lost then, the iteration is done again."""
    setting = setting_with(microbatches=64)
    whole_s, job = setting.failure_free_s, ReCycle().begin(setting)
    job.lose((2,), 0.0)
    job.take_back((2,), 0.8 * whole_s)
    job.run_until(0.8 * whole_s)
    job.lose((4,), 0.8 * whole_s)

    assert committed_at(job, 1.7 * whole_s) == 0
    parts = job.account.ledger.parts()
    assert parts[Category.REDO] == pytest.approx(0.8 * whole_s, abs=0.2)
    assert committed_at(job, 2.3 * whole_s) == 1


def first_commit_s(job: SystemRun) -> float:
    """The time of the first commit, to 50 ms."""
    now_s = 0.0
    while not job.account.num_iterations:
        now_s += 0.05
        job.run_until(now_s)
    return now_s
