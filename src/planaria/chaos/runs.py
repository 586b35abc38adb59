"""Runs a job under many drawn faults, and judges every run from outside.

First the job trains without faults (the baseline run), for its hashes and its duration. Then runs
follow until the time is over. Each has faults and surroundings drawn from the seed and the run's
number (chaos/draw.py), a directory of its own for checkpoints, and a bound on its time. verdict.py
judges its report. A run that had to end early is resumed with all nodes, and then has to reach the
same hashes. No process may be left over.
"""

import os
import secrets
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from planaria.chaos.draw import Draw, DrawLimits, Surroundings, draw_run
from planaria.chaos.processes import kill_left_over, mark_processes, worker_stacks
from planaria.chaos.surroundings import UnreadOutput, possible_temporaries, temporary_directory
from planaria.chaos.verdict import (
    BaselineRun,
    baseline_run,
    failure_justification,
    injected_events,
    justification,
    undecidable,
    violations,
    violations_until_end,
)
from planaria.core.agreement import SAMPLE_BYTES
from planaria.core.inject import KINDS, LOCAL_KINDS, parse_injection
from planaria.core.job import JobConfig
from planaria.core.plan import ModelProfile, Plan
from planaria.errors import ConfigError, InsufficientError, PlanariaError, TrainingError
from planaria.job.planning import Planned, fork_server, num_nodes_max
from planaria.job.training_job import Display, Job, SilentDisplay, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord, Report
from planaria.planner.templates import smallest_num_nodes
from planaria.profiles.profile_json import encode_profile

TRAINING_S: Final = 3.0  # Duration without faults to which runs are shortened if they are longer.
ITERATIONS_MIN: Final = 6
_PROBE_ITERATIONS: Final = 10
_BOUND_S: Final = 60.0
_BASELINES_IN_BOUND: Final = 5
_LEASES_IN_BOUND: Final = 8
_STOP_TIMEOUT_S: Final = 5.0
_LINES_KEPT: Final = 200
# Number of the coordinator's requests to storage: lists, removals that wait, the last save.
_REQUESTS_IN_BOUND: Final = 250
_SAVE_WAIT_S: Final = 1.0  # This repeats a value of engine/saver.py, which imports torch.
_HUNG_UP: Final = "its terminal was closed (SIGHUP)"


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one run.

    Attributes:
        number: number of the run, counted from 0.
        specs: faults that were drawn, as --inject takes them.
        settings: settings besides the job's own, as --set takes them.
        surroundings: surroundings of the run, in words.
        seconds: duration of the run, with its judgement and resumption.
        injected_faults: number of faults of each kind that struck; `fired` in JSON.
        reason: why it ended early; "": it did not.
        justification: why it had to end early, as found from outside; "": it did not have to.
        undecidable: why nobody could tell that a bit had flipped, if so; then hashes are not
            judged.
        is_resumed: whether it was resumed after an early end, and reached the same hashes.
        violations: violations that were found, `wrongs` in JSON; empty if all is well.
        log: messages of the run and the output of its processes; empty if nothing is wrong.
    """

    number: int
    specs: tuple[str, ...]
    settings: tuple[str, ...]
    surroundings: tuple[str, ...]
    seconds: float
    injected_faults: Mapping[str, int] = msgspec.field(name="fired")
    reason: str = ""
    justification: str = ""
    undecidable: str = ""
    is_resumed: bool = False
    violations: tuple[str, ...] = msgspec.field(default=(), name="wrongs")
    log: tuple[str, ...] = ()
    report: Report | None = None


class Chaos:
    """Runs a job under faults again and again.

    Args:
        job: job to run; its own checkpoint directory is not used.
        seed: seed from which the faults of all runs are drawn.
        doing: function that is told what begins.
    """

    def __init__(self, job: Job, *, seed: int, doing: Callable[[str], None]) -> None:
        if not job.config.training.deterministic:
            remedy = "chaos compares bits, so it must be true"
            raise ConfigError("training.deterministic", False, remedy)
        self._job = job
        self._seed = seed
        self._doing = doing

    def outcomes(self, *, minutes: float) -> Generator[RunOutcome, None, None]:
        """The outcomes of runs that go on until the time is over; at least one.

        Raises:
            InsufficientError: no process can be started any more.
        """
        end_s = time.monotonic() + 60.0 * minutes
        mark = f"PLANARIA_CHAOS={secrets.token_hex(8)}"
        lines: deque[str] = deque(maxlen=_LINES_KEPT)
        with (
            mark_processes(mark),
            tempfile.TemporaryDirectory(
                prefix="planaria-chaos-", ignore_cleanup_errors=True
            ) as directory,
            _running_server(self._job, lines.append) as server,
        ):
            search_path = self._job.search_path
            place = _RunPlace(Path(directory), (server,), mark, lines, search_path)
            baseline, limits, config = self._baseline(place)
            number = 0
            while not number or time.monotonic() < end_s:
                draw = draw_run(limits, Random(f"{self._seed}:{number}"))
                self._doing(f"run {number}: {' '.join(draw.words)}")
                with (
                    tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as saves,
                    _open_place(self._job, draw.surroundings, place) as run_place,
                ):
                    run_config = _run_config(
                        config, draw, Path(saves) / "checkpoints", baseline=baseline
                    )
                    outcome = _outcome(
                        run_config, draw, number=number, baseline=baseline, place=run_place
                    )
                _renew_if_lost(server, outcome)
                yield outcome
                number += 1

    def _baseline(self, place: "_RunPlace") -> tuple[BaselineRun, DrawLimits, JobConfig]:
        """Trains the job without faults, with as many iterations as fit into TRAINING_S."""
        self._doing("measuring the job")
        config = self._job.config
        if not config.model.profile:
            path = place.directory / "profile.json"
            path.write_bytes(encode_profile(place.job(config).profile(server=place.server)))
            config = replace(config, model=replace(config.model, profile=str(path)))
        iterations_max = config.training.iterations
        config = _with_iterations(config, min(iterations_max, _PROBE_ITERATIONS))
        self._doing("training without faults")
        result = _train_baseline(config, place, "probe")
        seconds = sorted(record.seconds for record in result.report.iterations)
        fits = round(TRAINING_S / max(seconds[len(seconds) // 2], 1e-3))
        iterations = min(iterations_max, max(ITERATIONS_MIN, fits))
        if iterations != config.training.iterations:
            config = _with_iterations(config, iterations)
            result = _train_baseline(config, place, "baseline")
        num_needed = smallest_num_nodes(result.planned.problem)
        if config.resilience.when_below == "stop":
            num_needed *= config.resilience.failures_tolerated + 1
        baseline = baseline_run(
            result.report,
            num_needed=num_needed,
            num_nodes_max=num_nodes_max(result.planned.problem),
            num_layers=result.planned.plan.num_layers,
        )
        limits = DrawLimits(
            num_nodes=config.cluster.nodes,
            num_needed=num_needed,
            iterations=len(baseline.sample_digests),
            training_s=baseline.training_s,
            lease_s=config.cluster.lease_s,
            kinds=_possible_kinds(config, result.planned.problem.profile),
            temporaries=possible_temporaries(place.directory),
        )
        return baseline, limits, config


@dataclass(frozen=True, slots=True)
class _RunPlace:
    """The place in which runs happen.

    Attributes:
        directory: directory for their files.
        servers: fork servers that are running; the last one forks the processes of a run.
        mark: NAME=VALUE in the environment of all processes of the runs.
        lines: newest lines that these processes printed.
        search_path: directories in which modules that the job names are looked for first.
    """

    directory: Path
    servers: tuple[ForkServer, ...]
    mark: str
    lines: deque[str]
    search_path: tuple[str, ...] = ()

    @property
    def server(self) -> ForkServer:
        return self.servers[-1]

    def job(self, config: JobConfig) -> Job:
        """A job with these settings that finds the user's modules."""
        return Job(config, search_path=self.search_path)


class _RunDisplay:
    """A display that remembers what it is told.

    Args:
        output: output on which the run is shown too; None: it is shown nowhere.
    """

    def __init__(self, output: UnreadOutput | None) -> None:
        self.plans: list[Plan] = []
        self.log: list[str] = []
        self._start_s = time.monotonic()
        self._output = output
        self._shown: Display = output.display if output else SilentDisplay()

    def show_step(self, text: str) -> None:
        self._remember(text)
        self._shown.show_step(text)

    def show_plan(self, planned: Planned) -> None:
        self.plans.append(planned.plan)
        self._shown.show_plan(planned)

    def show_training(self) -> None:
        self._remember("training")
        self._shown.show_training()

    def show_iteration(self, record: IterationRecord) -> None:
        self._remember(f"iteration {record.iteration} in epoch {record.epoch}")
        self._shown.show_iteration(record)
        if self._output is not None:
            self._output.on_commit(record)

    def show_next_plan(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._remember(f"epoch {plan.epoch}: {[list(p.nodes) for p in plan.pipelines]}")
        self._shown.show_next_plan(plan)

    def note(self, text: str) -> None:
        self._remember(text)
        self._shown.note(text)

    def _remember(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self._start_s:7.3f} {text}")


@dataclass(slots=True)
class _Bound:
    """Interrupts a run that takes too long, as Ctrl-C does; once more if it does not stop.

    Attributes:
        stacks: Python stacks of the workers when the time was over.
    """

    seconds: float
    place: _RunPlace
    stacks: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    is_expired: bool = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, name="bound", daemon=True)
        try:
            thread.start()
            yield
        finally:
            self.is_over.set()
            thread.join()

    def _watch(self) -> None:
        if self.is_over.wait(self.seconds):
            return
        self.is_expired = True
        self.stacks += worker_stacks(self.place.server.pid)
        os.kill(os.getpid(), signal.SIGINT)
        if not self.is_over.wait(_STOP_TIMEOUT_S):
            os.kill(os.getpid(), signal.SIGINT)


@dataclass(slots=True)
class _Judgement:
    """The judgement of a run so far; see `RunOutcome` for its fields."""

    justification: str = ""
    undecidable: str = ""
    is_resumed: bool = False
    violations: list[str] = field(default_factory=list)


def _outcome(
    config: JobConfig, draw: Draw, *, number: int, baseline: BaselineRun, place: _RunPlace
) -> RunOutcome:
    """Executes one run and judges it."""
    place.lines.clear()
    start_s = time.monotonic()
    judgement = _Judgement()
    output = UnreadOutput(draw.surroundings) if draw.surroundings.output else None
    display, bound = _RunDisplay(output), _Bound(_bound_s(config, draw, baseline), place)
    with output() if output else nullcontext():
        result = _execute(config, bound, judgement.violations, display, specs=draw.specs)
    report, reason = result.report if result else None, ""
    if result is not None:
        has_hung_up = output is not None and output.has_hung_up
        if result.stopped and not bound.is_expired and not has_hung_up:
            raise KeyboardInterrupt("stopped")
        reason = "stopped" if result.stopped else str(result.error or "")
        if not bound.is_expired:
            _judge(
                result, judgement, config=config, baseline=baseline, place=place, display=display
            )
    judgement.violations += kill_left_over(
        place.mark, except_pids={server.pid for server in place.servers}
    )
    events = injected_events(report) if report else ()
    is_wrong = bool(judgement.violations)
    return RunOutcome(
        number=number,
        specs=draw.specs,
        settings=_settings(config),
        surroundings=draw.surroundings.words,
        seconds=time.monotonic() - start_s,
        injected_faults=Counter(event.kind for event in events if event.kind in KINDS),
        reason=reason,
        justification=judgement.justification,
        undecidable=judgement.undecidable,
        is_resumed=judgement.is_resumed,
        violations=tuple(judgement.violations),
        log=(*display.log, *place.lines, *bound.stacks) if is_wrong else (),
        report=report,
    )


def _bound_s(config: JobConfig, draw: Draw, baseline: BaselineRun) -> float:
    """The time after which a run counts as hanging; a slow store adds its delay per request."""
    num_leases = _LEASES_IN_BOUND * (len(draw.specs) + 1)
    injections = [parse_injection(spec) for spec in draw.specs]
    disk_s = sum(injection.value for injection in injections if injection.kind == "disk")
    store_s = max(
        (injection.value for injection in injections if injection.kind == "store"), default=0.0
    )
    num_saves = config.training.iterations // draw.persist_every if draw.persist_every else 0
    # A save waits for the one before for a second at most. One rank alone may have to write the
    # last save, and the save that is under way then.
    waits_s = num_saves * _SAVE_WAIT_S if store_s else 0.0
    requests_s = store_s * (_REQUESTS_IN_BOUND + 4 * baseline.num_layers)
    baseline_s = _BASELINES_IN_BOUND * baseline.wall_s
    return (
        _BOUND_S + baseline_s + num_leases * config.cluster.lease_s + disk_s + waits_s + requests_s
    )


def _judge(
    result: TrainingResult,
    judgement: _Judgement,
    *,
    config: JobConfig,
    baseline: BaselineRun,
    place: _RunPlace,
    display: _RunDisplay,
) -> None:
    """Judges whether a run ended as it should, and resumes it if it ended early.

    A run that was stopped, or that failed, has saved its state at that time.
    """
    report, error, plans = result.report, result.error, display.plans
    undecidable_reason = "" if isinstance(error, InsufficientError) else undecidable(report, plans)
    judgement.undecidable = undecidable_reason
    if error is None and not result.stopped:
        judgement.violations += (
            violations_until_end(report, baseline)
            if undecidable_reason
            else violations(report, baseline)
        )
        return
    judgement.violations += violations_until_end(report, baseline)
    match error:
        case None:
            why = _HUNG_UP
        case InsufficientError():
            why = justification(report, plans, num_needed=baseline.num_needed)
        case TrainingError():
            why = failure_justification(report, plans, num_needed=baseline.num_needed)
            if not error.traceback.strip():
                judgement.violations.append("the job failed, and does not say where")
        case _:
            judgement.violations.append(f"{type(error).__name__}: {error}")
            return
    judgement.justification = why
    if not why:
        judgement.violations.append(f"ended without need: {type(error).__name__}: {error}")
    is_saved = bool(report.iterations) or not isinstance(error, TrainingError)
    num_saved = len(report.iterations) if result.stopped else -1
    violations_found = _violations_after_resume(
        config,
        place,
        baseline,
        display,
        is_saved=is_saved,
        num_saved=num_saved,
        is_hidden=bool(undecidable_reason),
    )
    judgement.is_resumed = not violations_found
    judgement.violations += [f"resumed: {text}" for text in violations_found]


def _execute(
    config: JobConfig,
    bound: _Bound,
    violations_found: list[str],
    display: Display,
    *,
    specs: Sequence[str] = (),
    resume: bool = False,
) -> TrainingResult | None:
    """Executes a run; None if it did not end by itself; adds to `violations_found`."""
    result = None
    try:
        with bound():
            result = bound.place.job(config).run(
                resume=resume,
                injections=tuple(parse_injection(spec) for spec in specs),
                display=display,
                server=bound.place.server,
            )
    except KeyboardInterrupt:
        if not bound.is_expired:
            raise
    except (PlanariaError, AssertionError, OSError) as error:
        violations_found.append(f"{type(error).__name__}: {error}")
    if bound.is_expired:
        violations_found.append(f"not over after {bound.seconds:.0f} s")
    return result


def _violations_after_resume(
    config: JobConfig,
    place: _RunPlace,
    baseline: BaselineRun,
    display: _RunDisplay,
    *,
    is_saved: bool,
    num_saved: int,
    is_hidden: bool,
) -> list[str]:
    """Resumes a run with all nodes; returns what is wrong with the resumed run.

    Args:
        is_saved: whether the run has left a save; if not, the job begins anew.
        num_saved: number of iterations that the save must have; -1: any.
        is_hidden: whether the save may contain a flipped bit that nobody could notice.
    """
    violations_found: list[str] = []
    bound = _Bound(_BOUND_S + _BASELINES_IN_BOUND * baseline.wall_s, place)
    resume_display = _RunDisplay(None)
    result = _execute(config, bound, violations_found, resume_display, resume=is_saved)
    display.log += ["resuming", *resume_display.log]
    if result is not None:
        resumed = result.planned.resumed
        first = resumed.iteration if resumed else 0
        judge = violations_until_end if is_hidden else violations
        violations_found += judge(result.report, baseline, first=first)
        if num_saved not in (-1, first):
            violations_found.append(f"of {num_saved} iterations {first} were saved")
        if result.error is not None:
            violations_found.append(f"{type(result.error).__name__}: {result.error}")
    return violations_found


def _train_baseline(config: JobConfig, place: _RunPlace, name: str) -> TrainingResult:
    return place.job(_saving_to(config, place.directory / name)).train(server=place.server)


def _possible_kinds(config: JobConfig, profile: ModelProfile) -> tuple[str, ...]:
    """The kinds of faults that the job promises to survive with the right bits.

    A flipped bit spoils gradients first if nothing is compared, or if layers are compared by turns.
    The profile of a paced job has sizes that its layers do not have: these are small.
    """
    sizes_bytes = [layer.parameter_bytes + layer.working_bytes for layer in profile.layers]
    is_small = config.model.kind == "paced" or max(sizes_bytes) <= SAMPLE_BYTES
    if config.resilience.corruption_guard and is_small:
        return LOCAL_KINDS
    return tuple(kind for kind in LOCAL_KINDS if kind != "flip")


def _run_config(
    config: JobConfig, draw: Draw, directory: Path, *, baseline: BaselineRun
) -> JobConfig:
    """The settings of a run, with a directory of its own for saves.

    Nodes for which there is no work join all the same, and wait.
    """
    config = _saving_to(config, directory)
    num_nodes = min(config.cluster.nodes + draw.num_joins, baseline.num_nodes_max)
    max_nodes = max(config.cluster.max_nodes, num_nodes) if draw.num_joins else 0
    return replace(
        config,
        checkpoint=replace(config.checkpoint, persist_every=draw.persist_every),
        cluster=replace(config.cluster, max_nodes=max_nodes or config.cluster.max_nodes),
    )


def _saving_to(config: JobConfig, directory: Path) -> JobConfig:
    return replace(config, checkpoint=replace(config.checkpoint, directory=str(directory)))


def _with_iterations(config: JobConfig, iterations: int) -> JobConfig:
    return replace(config, training=replace(config.training, iterations=iterations))


def _settings(config: JobConfig) -> tuple[str, ...]:
    """The settings in which a run differs from its job, as --set takes them."""
    return (
        f"training.iterations={config.training.iterations}",
        f"checkpoint.persist_every={config.checkpoint.persist_every}",
        f"cluster.max_nodes={config.cluster.max_nodes}",
    )


def _renew_if_lost(server: ForkServer, outcome: RunOutcome) -> None:
    """Renews the fork server, which later runs need, if an injected fault has ended it."""
    server.exits()
    if server.loss and outcome.injected_faults.get("forkserver"):
        server.renew()
    server.wait_ready()


@contextmanager
def _open_place(job: Job, surroundings: Surroundings, place: _RunPlace) -> Iterator[_RunPlace]:
    """The place of a run; with a bad temporary directory it has a fork server of its own."""
    if not surroundings.temporary:
        yield place
        return
    with (
        temporary_directory(surroundings.temporary, place.directory),
        _running_server(job, place.lines.append) as server,
    ):
        yield replace(place, servers=(*place.servers, server))


@contextmanager
def _running_server(job: Job, output: Callable[[str], None]) -> Iterator[ForkServer]:
    server = fork_server(job.config, search_path=job.search_path, output=output)
    try:
        yield server
    finally:
        server.close()
