"""Runs a job under many drawn faults, and judges every run from outside.

First the job trains in peace, for its hashes and its seconds. Then runs follow until the time is
over, each with faults drawn from the seed and the run's number (core/chaos.py), checkpoints in a
directory of its own, and a bound on its time. verdict.py judges the report; a run that had to end
early is resumed with all nodes and has to reach the same hashes then. No process may be left over.
"""

import os
import secrets
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

from planaria.core.chaos import Draw, World, drawn
from planaria.core.inject import KINDS, parse_injection
from planaria.core.job import JobConfig
from planaria.core.plan import Plan
from planaria.core.profile_json import encode_profile
from planaria.errors import ConfigError, InsufficientError, PlanariaError
from planaria.library import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.observe.metrics import IterationRecord, Report
from planaria.planner.templates import smallest_num_nodes
from planaria.planning import Planned, fork_server
from planaria.processes import left_over, marked, worker_stacks
from planaria.verdict import Calm, calm_of, justification, undecidable, wrongs, wrongs_until_end

TRAINING_S: Final = 3.0  # A run in peace trains for about as long, if it has so many iterations.
ITERATIONS_MIN: Final = 6
_PROBE_ITERATIONS: Final = 10
_BOUND_S: Final = 60.0
_CALMS_IN_BOUND: Final = 5
_LEASES_IN_BOUND: Final = 8
_STOP_TIMEOUT_S: Final = 5.0
_LINES_KEPT: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one run.

    Attributes:
        settings: besides the job's own, as --set takes them.
        fired: how many faults of each kind.
        reason: why it ended early.
        justification: why it had to, as worked out from outside.
        undecidable: why nobody could tell that a bit had flipped; its hashes are not judged then.
        wrongs: what was not as it must be; none if all is well.
        log: what was told while it ran, and what its processes printed, if anything is wrong.
    """

    number: int
    specs: tuple[str, ...]
    settings: tuple[str, ...]
    seconds: float
    fired: Mapping[str, int]
    reason: str = ""
    justification: str = ""
    undecidable: str = ""
    is_resumed: bool = False
    wrongs: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    report: Report | None = None


class Chaos:
    """A job that is run under faults again and again.

    Args:
        job: its checkpoint directory is left alone.
        doing: is told what begins.
    """

    def __init__(self, job: Job, *, seed: int, doing: Callable[[str], None]) -> None:
        if not job.config.training.deterministic:
            remedy = "chaos compares bits: set it to true"
            raise ConfigError("training.deterministic", False, remedy)
        self._job = job
        self._seed = seed
        self._doing = doing

    def outcomes(self, *, minutes: float) -> Iterator[Outcome]:
        """Runs, one at least, until the time is over; what became of each.

        Raises:
            InsufficientError: no process can be started any more.
        """
        end_s = time.monotonic() + 60.0 * minutes
        mark = f"PLANARIA_CHAOS={secrets.token_hex(8)}"
        lines: deque[str] = deque(maxlen=_LINES_KEPT)
        with (
            marked(mark),
            tempfile.TemporaryDirectory(prefix="planaria-chaos-") as directory,
            _running_server(self._job, lines.append) as server,
        ):
            stand = _Stand(Path(directory), server, mark, lines)
            calm, world, config = self._calm(stand)
            number = 0
            while not number or time.monotonic() < end_s:
                draw = drawn(world, Random(f"{self._seed}:{number}"))
                self._doing(f"run {number}: {' '.join(draw.specs)}")
                with tempfile.TemporaryDirectory(dir=directory) as saves:
                    struck = _configured(config, draw, Path(saves) / "checkpoints")
                    outcome = _outcome(struck, draw, number=number, calm=calm, stand=stand)
                _renew_if_struck(server, outcome)
                yield outcome
                number += 1

    def _calm(self, stand: "_Stand") -> tuple[Calm, World, JobConfig]:
        """The job in peace, with as many iterations as fit."""
        self._doing("measuring the job")
        config = self._job.config
        if not config.model.profile:
            path = stand.directory / "profile.json"
            path.write_bytes(encode_profile(Job(config).profile(server=stand.server)))
            config = replace(config, model=replace(config.model, profile=str(path)))
        wanted = config.training.iterations
        config = _shortened(config, min(wanted, _PROBE_ITERATIONS))
        self._doing("training in peace")
        result = _in_peace(config, stand, "probe")
        seconds = sorted(record.seconds for record in result.report.iterations)
        fits = round(TRAINING_S / max(seconds[len(seconds) // 2], 1e-3))
        iterations = min(wanted, max(ITERATIONS_MIN, fits))
        if iterations != config.training.iterations:
            config = _shortened(config, iterations)
            result = _in_peace(config, stand, "calm")
        num_needed = smallest_num_nodes(result.planned.problem)
        if config.resilience.when_below == "stop":
            num_needed *= config.resilience.failures_tolerated + 1
        calm = calm_of(result.report, num_needed=num_needed)
        world = World(
            num_nodes=config.cluster.nodes,
            num_needed=num_needed,
            iterations=len(calm.sample_digests),
            training_s=calm.training_s,
            lease_s=config.cluster.lease_s,
        )
        return calm, world, config


@dataclass(frozen=True, slots=True)
class _Stand:
    """Where runs take place: a directory for their files, and the processes' origin and mark."""

    directory: Path
    server: ForkServer
    mark: str
    lines: deque[str]


class _Watch:
    """A display that remembers what it is told."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.log: list[str] = []
        self._start_s = time.monotonic()

    def doing(self, text: str) -> None:
        self.note(text)

    def planned(self, planned: Planned) -> None:
        self.plans.append(planned.plan)

    def began(self) -> None:
        self.note("training")

    def committed(self, record: IterationRecord) -> None:
        self.note(f"iteration {record.iteration} in epoch {record.epoch}")

    def replanned(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.note(f"epoch {plan.epoch}: {[list(p.nodes) for p in plan.pipelines]}")

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self._start_s:7.3f} {text}")


@dataclass(slots=True)
class _Bound:
    """Interrupts a run that takes too long, as Ctrl-C twice does; `stacks` is where its workers
    stood."""

    seconds: float
    stand: _Stand
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
        self.stacks += worker_stacks(self.stand.server.pid)
        os.kill(os.getpid(), signal.SIGINT)
        if not self.is_over.wait(_STOP_TIMEOUT_S):
            os.kill(os.getpid(), signal.SIGINT)


def _outcome(config: JobConfig, draw: Draw, *, number: int, calm: Calm, stand: _Stand) -> Outcome:
    """One run, judged."""
    stand.lines.clear()
    start_s = time.monotonic()
    watch, found = _Watch(), list[str]()
    num_leases = _LEASES_IN_BOUND * (len(draw.specs) + 1)
    seconds = _CALMS_IN_BOUND * calm.wall_s + num_leases * config.cluster.lease_s
    bound = _Bound(_BOUND_S + seconds, stand)
    result = _run(config, bound, found, watch, specs=draw.specs)
    report = result.report if result else None
    why, hidden, is_resumed = "", "", False
    if result is not None and report is not None:
        if result.stopped and not bound.is_expired:
            raise KeyboardInterrupt("stopped")
        if result.error is None and not result.stopped:
            hidden = undecidable(report, watch.plans)
            found += wrongs_until_end(report, calm) if hidden else wrongs(report, calm)
        elif isinstance(result.error, InsufficientError):
            found += wrongs_until_end(report, calm)
            why = justification(report, watch.plans, num_needed=calm.num_needed)
            if not why:
                found.append(f"exit 3 without need: {result.error}")
            is_resumed = _resume(config, stand, calm, found, watch)
        elif result.error is not None:
            found.append(f"{type(result.error).__name__}: {result.error}")
    found += left_over(stand.mark, but={stand.server.pid})
    events = report.events if report else ()
    return Outcome(
        number=number,
        specs=draw.specs,
        settings=_settings(config),
        seconds=time.monotonic() - start_s,
        fired=Counter(event.kind for event in events if event.kind in KINDS and event.fired),
        reason=str(result.error or "") if result else "",
        justification=why,
        undecidable=hidden,
        is_resumed=is_resumed,
        wrongs=tuple(found),
        log=(*watch.log, *stand.lines, *bound.stacks) if found else (),
        report=report,
    )


def _run(
    config: JobConfig,
    bound: _Bound,
    found: list[str],
    watch: _Watch,
    *,
    specs: Sequence[str] = (),
    resume: bool = False,
) -> TrainingResult | None:
    """A run, None if it did not come to an end by itself; what is wrong then goes to `found`."""
    result = None
    try:
        with bound():
            result = Job(config).run(
                resume=resume,
                injections=tuple(parse_injection(spec) for spec in specs),
                display=watch,
                server=bound.stand.server,
            )
    except KeyboardInterrupt:
        if not bound.is_expired:
            raise
    except (PlanariaError, AssertionError, OSError) as error:
        found.append(f"{type(error).__name__}: {error}")
    if bound.is_expired:
        found.append(f"not over after {bound.seconds:.0f} s")
    return result


def _resume(config: JobConfig, stand: _Stand, calm: Calm, found: list[str], watch: _Watch) -> bool:
    """Goes on with all nodes from what a run has left; whether that reached the same bits."""
    watch.note("resuming")
    wrong: list[str] = []
    bound = _Bound(_BOUND_S + _CALMS_IN_BOUND * calm.wall_s, stand)
    result = _run(config, bound, wrong, watch, resume=True)
    if result is not None:
        first = result.planned.resumed.iteration if result.planned.resumed else 0
        wrong += wrongs(result.report, calm, first=first)
        if result.error is not None:
            wrong.append(f"{type(result.error).__name__}: {result.error}")
    found += [f"resumed: {text}" for text in wrong]
    return not wrong


def _in_peace(config: JobConfig, stand: _Stand, name: str) -> TrainingResult:
    return Job(_saving_to(config, stand.directory / name)).train(server=stand.server)


def _configured(config: JobConfig, draw: Draw, directory: Path) -> JobConfig:
    """The job as a run has it, with an empty directory of its own."""
    config = _saving_to(config, directory)
    num_nodes = config.cluster.nodes + draw.num_joins
    max_nodes = max(config.cluster.max_nodes, num_nodes) if draw.num_joins else 0
    return replace(
        config,
        checkpoint=replace(config.checkpoint, persist_every=draw.persist_every),
        cluster=replace(config.cluster, max_nodes=max_nodes or config.cluster.max_nodes),
    )


def _saving_to(config: JobConfig, directory: Path) -> JobConfig:
    return replace(config, checkpoint=replace(config.checkpoint, directory=str(directory)))


def _shortened(config: JobConfig, iterations: int) -> JobConfig:
    return replace(config, training=replace(config.training, iterations=iterations))


def _settings(config: JobConfig) -> tuple[str, ...]:
    """What a run has that the job has not, as --set takes it."""
    return (
        f"training.iterations={config.training.iterations}",
        f"checkpoint.persist_every={config.checkpoint.persist_every}",
        f"cluster.max_nodes={config.cluster.max_nodes}",
    )


def _renew_if_struck(server: ForkServer, outcome: Outcome) -> None:
    """A fork server that is gone for no fault of the run's: the run is not to blame, and there is
    no other."""
    server.exits()
    if server.loss and outcome.fired.get("forkserver"):
        server.renew()
    server.wait_ready()


@contextmanager
def _running_server(job: Job, output: Callable[[str], None]) -> Iterator[ForkServer]:
    server = fork_server(job.config, search_path=job.search_path, output=output)
    try:
        yield server
    finally:
        server.close()
