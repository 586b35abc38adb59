"""Runs systems through the same failures, for many seeds, and compares what they trained.

Every system gets the same occurrences: they depend on the scenario and the seed alone. A run is a
function of scenario, system and seed, so the same seeds give the same bytes of output, on however
many processes they are spread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf, sqrt
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from statistics import fmean, stdev
from typing import Final, TypeVar

from planaria.core.garbage import no_collection
from planaria.errors import ConfigError, InfeasibleError
from planaria.observe.ledger import Category
from planaria.simulator.failures.occurrences import FailureSource, Occurrence, OccurrenceKind
from planaria.systems.system import Setting, System, SystemRun

_S_PER_HOUR: Final = 3600.0
LEVEL: Final = 0.95
PLANARIA: Final = "planaria"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterScenario:
    """A job on a cluster whose nodes fail.

    Attributes:
        failures: source of what happens to the nodes.
        price_per_node_hour: dollars for each hour of each node that is there.
        horizon_s: seconds that are simulated, at most.
        iterations: number of iterations after which a run ends; 0: it ends at the horizon.
    """

    name: str
    setting: Setting
    failures: FailureSource
    price_per_node_hour: float
    horizon_s: float
    iterations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """What one system did with one seed.

    Attributes:
        wall_s: simulated seconds.
        samples: samples that count.
        num_failures: number of times that nodes were lost.
        num_redone: number of committed iterations that were undone.
        num_restarts: number of times that the job ended and was started again.
        node_hours: hours of all nodes that were there.
        ledger: seconds by category, and their sum as `wall`.
        wasted: number and seconds of recoveries, by tier (observe/recoveries.py).
        curve: samples that count, as points (time, samples).
        lost_at_s: times at which nodes were lost, at most as many as a picture shows.
    """

    seed: int
    wall_s: float
    samples: int
    num_failures: int
    num_redone: int
    num_restarts: int
    node_hours: float
    ledger: Mapping[str, float]
    wasted: Mapping[str, Mapping[str, float]]
    curve: tuple[tuple[float, int], ...]
    lost_at_s: tuple[float, ...]

    @property
    def samples_per_s(self) -> float:
        """The goodput."""
        return self.samples / self.wall_s


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its 95% interval; without one (None) if there is a single seed."""

    mean: float
    low: float | None
    high: float | None


LOSSES_MAX: Final = 1000


@no_collection()  # A simulated job leaves no cycles behind.
def play(scenario: ClusterScenario, system: System, seed: int) -> JobOutcome:
    """The outcome of one system with one seed."""
    num_nodes = scenario.setting.num_machines
    absent, stream = _absent_and_rest(
        scenario.failures.occurrences(
            num_nodes, horizon_s=scenario.horizon_s, rng=Random(f"{scenario.name} {seed}")
        )
    )
    run = system.begin(scenario.setting, absent=absent)
    # No plan is twice as fast as that of all nodes.
    least_s = scenario.setting.failure_free_s / 2
    complete_by = partial(is_complete, run, iterations=scenario.iterations, iteration_s_min=least_s)
    num_there, node_s, since_s = num_nodes - len(absent), 0.0, 0.0
    lost_at_s: list[float] = []
    end_s = inf
    for occurrence in _until(stream, scenario.horizon_s):
        if complete_by(occurrence.at_s, since_s=since_s):
            end_s = run.account.now_s
            break
        node_s, since_s = node_s + num_there * (occurrence.at_s - since_s), occurrence.at_s
        if occurrence.kind is OccurrenceKind.LOST:
            num_there -= len(occurrence.nodes)
            if len(lost_at_s) < LOSSES_MAX:
                lost_at_s.append(occurrence.at_s)
        elif occurrence.kind is OccurrenceKind.BACK:
            num_there += len(occurrence.nodes)
        _apply(run, occurrence)
    if end_s == inf:
        has_ended = complete_by(scenario.horizon_s, since_s=since_s)
        end_s = run.account.now_s if has_ended else scenario.horizon_s
    account = run.account
    account.spend(Category.USEFUL, end_s)  # The computed part of an iteration in flight.
    node_s += num_there * max(0.0, end_s - since_s)
    return JobOutcome(
        seed=seed,
        wall_s=end_s,
        samples=account.samples,
        num_failures=account.num_failures,
        num_redone=account.num_redone,
        num_restarts=account.num_restarts,
        node_hours=node_s / _S_PER_HOUR,
        ledger=account.ledger.parts(),
        wasted=account.ledger.wasted_parts(),
        curve=account.curve,
        lost_at_s=tuple(lost_at_s),
    )


def _absent_and_rest(
    stream: Iterator[Occurrence],
) -> tuple[frozenset[int], Iterator[Occurrence]]:
    """The nodes that a stream loses at time 0, and all else that it has, in its order."""
    absent, others = frozenset[int](), list[Occurrence]()
    for occurrence in stream:
        if occurrence.at_s > 0.0:
            return absent, chain(others, (occurrence,), stream)
        if occurrence.kind is OccurrenceKind.LOST:
            absent |= frozenset(occurrence.nodes)
        else:
            others.append(occurrence)
    return absent, iter(others)


def _until(stream: Iterator[Occurrence], horizon_s: float) -> Iterator[Occurrence]:
    """The occurrences up to the horizon."""
    for occurrence in stream:
        if occurrence.at_s > horizon_s:
            return
        yield occurrence


def is_complete(
    run: SystemRun, now_s: float, *, since_s: float, iterations: int, iteration_s_min: float
) -> bool:
    """Has a job go on until a time, or until so many iterations are committed; whether they are.

    Args:
        since_s: time until which the job has gone on already.
        iterations: number of iterations; 0: it goes on until the time, and is never complete.
        iteration_s_min: lower bound on the seconds of an iteration, so that no step commits more
            than are missing.
    """
    if not iterations:
        run.run_until(now_s)
        return False
    while (missing := iterations - run.account.num_iterations) > 0:
        if since_s >= now_s:
            return False
        since_s = min(now_s, since_s + missing * iteration_s_min)
        run.run_until(since_s)
    return True


def _apply(run: SystemRun, occurrence: Occurrence) -> None:
    """Tells a job what happens to nodes."""
    at_s, nodes = occurrence.at_s, occurrence.nodes
    match occurrence.kind:
        case OccurrenceKind.LOST:
            run.lose(nodes, at_s)
        case OccurrenceKind.BACK:
            run.take_back(nodes, at_s)
        case OccurrenceKind.NOTICE:
            assert occurrence.deadline_s is not None
            run.give_notice(nodes, at_s, deadline_s=occurrence.deadline_s)
        case OccurrenceKind.SLOWED | OccurrenceKind.RESTORED:
            run.set_speeds(dict.fromkeys(nodes, occurrence.speed), at_s)


# -- many seeds -----------------------------------------------------------------------------------

Outcomes = Mapping[str, Sequence[JobOutcome]]  # Outcomes by system, in the order of the seeds.


def compare(
    scenario: ClusterScenario,
    systems: Sequence[System],
    *,
    num_seeds: int,
    num_processes: int,
    on_done: Callable[[], None],
) -> Outcomes:
    """The outcomes of all systems with seeds 0 to num_seeds - 1.

    Args:
        num_processes: number of processes that share the work; 1: it is done in this one.
        on_done: callback after each run.

    Raises:
        ConfigError: there are standby nodes, which the other systems do not have.
    """
    num_standby = scenario.setting.job.cluster.standby
    if num_standby and any(system.name != PLANARIA for system in systems):
        remedy = "other systems have no standby nodes; leave it out to compare with them"
        raise ConfigError("job.cluster.standby", num_standby, remedy)
    tasks = [(index, seed) for seed in range(num_seeds) for index in range(len(systems))]
    outcomes: dict[str, list[JobOutcome]] = {system.name: [] for system in systems}
    play_one = partial(_play_task, scenario, systems)
    for (index, _), outcome in zip(tasks, spread(play_one, tasks, num_processes), strict=True):
        outcomes[systems[index].name].append(outcome)
        on_done()
    return outcomes


Task = TypeVar("Task")
Result = TypeVar("Result")
_Task = tuple[int, int]  # (index of the system, seed)


def _play_task(scenario: ClusterScenario, systems: Sequence[System], task: _Task) -> JobOutcome:
    index, seed = task
    return play(scenario, systems[index], seed)


def spread(
    do: Callable[[Task], Result], tasks: Sequence[Task], num_processes: int
) -> Iterator[Result]:
    """The results of tasks, in their order; each process does every num_processes-th task.

    Processes are forked, so they have the scenario with all its plans, and nothing is sent to them.
    """
    number = min(num_processes, len(tasks))
    if number < 2:
        yield from map(do, tasks)
        return
    context = get_context("fork")
    ends, processes = [], []
    for index in range(number):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(do, tasks[index::number], sender), daemon=True
        )
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        for index in range(len(tasks)):
            result = ends[index % number].recv()
            if isinstance(result, BaseException):
                raise result
            yield result
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(do: Callable[[Task], Result], tasks: Sequence[Task], sender: Connection) -> None:
    """Does tasks one after the other and sends their results, or the error that ends it."""
    try:
        for task in tasks:
            sender.send(do(task))
    except (ConfigError, InfeasibleError) as error:  # The user's mistake needs no traceback.
        sender.send(error)
    except Exception as error:
        sender.send(error)
        raise


def interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """The mean of values of independent seeds, with its interval by Student's t.

    Args:
        level: confidence of the interval, 0 to 1.
    """
    mean, number = fmean(values), len(values)
    if number < 2:
        return Interval(mean, None, None)
    from scipy.special import stdtrit  # An eighth of what the command line takes to import.

    half = float(stdtrit(number - 1, 0.5 + level / 2)) * stdev(values) / sqrt(number)
    return Interval(mean, mean - half, mean + half)


def ratios(outcomes: Sequence[JobOutcome], others: Sequence[JobOutcome]) -> Interval | None:
    """The goodput of a system over that of another, paired by seed; None if the other trained
    nothing with some seed."""
    pairs = list(zip(outcomes, others, strict=True))
    if not all(other.samples for _, other in pairs):
        return None
    return interval([outcome.samples_per_s / other.samples_per_s for outcome, other in pairs])
