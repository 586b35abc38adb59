"""`Job`: a training job as an object; the command line is a thin layer over it.

    import planaria

    if __name__ == "__main__":
        report = planaria.Job.from_file("job.toml").train()
        print(report.final.parameters_sha256)

The job runs in processes of its own; this one holds no part of the model.
"""

import importlib.metadata
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from planaria.checkpoint.digest import digests
from planaria.checkpoint.tiers import DiskTier, Manifest
from planaria.config import check_job, load_job
from planaria.coordinator.coordinator import Began, Committed, Discard, Ending, JobState
from planaria.core.job import JobConfig
from planaria.core.messages import MeasuredSpan, NodeSpec
from planaria.core.plan import ModelProfile, Plan
from planaria.errors import CheckpointError, ConfigError, InsufficientError, TrainingError
from planaria.estimator.time import Span, Timeline
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.launcher import Launcher, Outcome
from planaria.observe.metrics import FinalRecord, IterationRecord, Report
from planaria.observe.recorder import Recorder
from planaria.planning import Planned, cache_directory, fork_server, plan_job, prepare
from planaria.schedule.action import parse_action

_WORKER = "planaria.engine.worker:main"


class Display(Protocol):
    """Who shows a run while it runs."""

    def planned(self, planned: Planned) -> None:
        """The job is understood and planned; its nodes start now."""

    def began(self) -> None:
        """Training runs."""

    def committed(self, record: IterationRecord) -> None:
        """An iteration is committed."""

    def note(self, text: str) -> None:
        """Something else happened that a person should know."""


class Silent:
    """The display that shows nothing."""

    def planned(self, planned: Planned) -> None:
        """Shows nothing."""

    def began(self) -> None:
        """Shows nothing."""

    def committed(self, record: IterationRecord) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """A finished run: its report, and the timelines that --timeline writes."""

    report: Report
    planned: Planned
    spans: tuple[dict[int, tuple[MeasuredSpan, ...]], ...]
    stopped: bool

    def measured_timelines(self) -> tuple[Timeline, ...]:
        """One timeline per traced iteration; each rank's clock starts with its iteration."""
        return tuple(
            Timeline(
                tuple(
                    Span(rank, span.lane, parse_action(span.action), span.start_s, span.end_s)
                    for rank, spans in sorted(by_rank.items())
                    for span in spans
                ),
                record.seconds,
            )
            for by_rank, record in zip(self.spans, self.report.iterations, strict=True)
            if by_rank
        )


class Job:
    """A training job.

    Args:
        config: the tables of a job file.
        search_path: directories in which modules that the job names are looked for first.

    Raises:
        ConfigError: a value, or what several of them ask for together, is wrong.
    """

    def __init__(self, config: JobConfig, *, search_path: Sequence[str] = ()) -> None:
        check_job(config)
        self.config = config
        self._search_path = tuple(search_path)

    @classmethod
    def from_file(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> "Job":
        """The job of a job file; overrides are "TABLE.KEY=VALUE".

        Modules that it names are looked for beside the file first.

        Raises:
            ConfigError: the file or an override is wrong.
        """
        config = load_job(Path(path), overrides=overrides)
        return cls(config, search_path=[str(Path(path).absolute().parent)])

    def profile(self, *, server: ForkServer | None = None) -> ModelProfile:
        """Measures the job's layers and links on this machine.

        Raises:
            ConfigError: the job is wrong.
            TrainingError: the user's model or data raised.
        """
        with self._server(server) as running:
            profile = prepare(self.config, running).profile
        assert profile is not None
        return profile

    def train(
        self,
        *,
        resume: bool = False,
        trace: bool = False,
        plan: Plan | None = None,
        display: Display | None = None,
        server: ForkServer | None = None,
    ) -> TrainingResult:
        """Trains the job on emulated nodes of this machine, and saves it at the end.

        Args:
            resume: go on from the newest checkpoint in checkpoint.directory.
            trace: gather the spans of every action of every iteration.
            plan: instead of the planner's.
            server: a fork server to share between jobs; one is started otherwise.

        Raises:
            ConfigError: the job is wrong, or does not fit the checkpoint or the cluster.
            TrainingError: the user's code raised.
            InsufficientError: a node was lost.
            CheckpointError: the last save failed.
        """
        start_s = time.monotonic()
        tier = DiskTier(Path(self.config.checkpoint.directory))
        manifest = _manifest(self.config, tier, resume=resume)
        with self._server(server) as running:
            prepared = prepare(self.config, running)
            planned = plan_job(self.config, prepared, plan=plan, manifest=manifest)
            display = display or Silent()
            display.planned(planned)
            recorder = Recorder(
                start_s=start_s,
                predicted_s=planned.predicted.iteration_s,
                predicted_peak_bytes=planned.predicted_peak_bytes,
            )
            outcome = _launch(planned, tier, running, _Watcher(recorder, display), trace=trace)
        _raise_failure(outcome)
        return TrainingResult(
            report=_report(planned, tier, recorder, outcome),
            planned=planned,
            spans=tuple(recorder.spans),
            stopped=outcome.end.ending is Ending.STOPPED,
        )

    @contextmanager
    def _server(self, server: ForkServer | None) -> Iterator[ForkServer]:
        """The given server, or one for this call alone."""
        if server is not None:
            yield server
            return
        own = fork_server(self.config, search_path=self._search_path)
        try:
            yield own
        finally:
            own.close()


def _fingerprint(config: JobConfig) -> dict[str, Any]:
    """What must not change between the run that saved and the one that resumes."""
    training = config.training
    return {
        "name": config.name,
        "model": {"kind": config.model.kind, "config": dict(config.model.config)},
        "data": asdict(config.data) | {"path": Path(config.data.path).name},
        "global_batch_size": training.global_batch_size,
        "microbatch_size": training.microbatch_size,
        "optimizer": dict(training.optimizer),
        "dtype": training.dtype,
        "seed": training.seed,
    }


def _manifest(config: JobConfig, tier: DiskTier, *, resume: bool) -> Manifest | None:
    """The checkpoint to go on from, None for a fresh start.

    Raises:
        ConfigError: there is none, it is another job's, or a fresh start would mix with it.
    """
    manifest = tier.newest()
    directory = config.checkpoint.directory
    if not resume:
        if manifest is not None:
            raise ConfigError(
                "checkpoint.directory",
                directory,
                f"it holds a checkpoint of iteration {manifest.iteration}: go on from it with "
                "--resume, or name another directory",
            )
        return None
    if manifest is None:
        remedy = "it holds no complete checkpoint to resume from; leave --resume out"
        raise ConfigError("checkpoint.directory", directory, remedy)
    saved, wanted = manifest.job, msgspec.to_builtins(_fingerprint(config))
    for key, value in wanted.items():
        if key != "name" and saved.get(key) != value:
            raise ConfigError(
                key, value, f"the checkpoint in {directory} was saved with {saved.get(key)!r}"
            )
    if manifest.iteration >= config.training.iterations:
        raise ConfigError(
            "training.iterations",
            config.training.iterations,
            f"the checkpoint has {manifest.iteration} already; ask for more to train on",
        )
    return manifest


def _launch(
    planned: Planned, tier: DiskTier, server: ForkServer, watcher: "_Watcher", *, trace: bool
) -> Outcome:
    config, manifest = planned.config, planned.resumed
    spec = NodeSpec(
        job=config,
        node=0,
        token=b"",
        coordinator=("", 0),
        worker=_WORKER,
        cache_directory=cache_directory(),
        profile=planned.prepared.profile if config.model.kind == "paced" else None,
        trace=trace,
    )
    state = JobState(
        plan=planned.plan,
        first_iteration=manifest.iteration if manifest else 0,
        end_iteration=config.training.iterations,
        source=f"{manifest.iteration}-{manifest.epoch}" if manifest else "",
    )
    launcher = Launcher(
        spec,
        state,
        server=server,
        observer=watcher,
        tier=tier,
        fingerprint=_fingerprint(config),
        keep=config.checkpoint.keep,
    )
    return launcher.run()


def _raise_failure(outcome: Outcome) -> None:
    end = outcome.end
    match end.ending:
        case Ending.FAILED:
            assert end.failure is not None
            if end.failure.mistake is not None:
                raise ConfigError(*end.failure.mistake)
            raise TrainingError(end.failure.rank, end.failure.traceback)
        case Ending.LOST:
            raise InsufficientError(end.reason)
        case Ending.UNSAVED:
            raise CheckpointError(end.reason)
        case Ending.FINISHED | Ending.STOPPED:
            return


class _Watcher:
    """Takes what the launcher tells to the recorder and the display."""

    def __init__(self, recorder: Recorder, display: Display) -> None:
        self._recorder = recorder
        self._display = display

    def began(self, state: JobState, event: Began) -> None:
        self._recorder.began(
            dict(state.workers),
            dict(event.materialised),
            epoch=state.plan.epoch,
            now_s=time.monotonic(),
        )
        self._display.began()

    def committed(self, state: JobState, event: Committed) -> None:
        assert event.reports[0].epoch == state.plan.epoch
        record = self._recorder.committed(event.reports, now_s=time.monotonic())
        self._display.committed(record)

    def saved(self, manifest: Manifest) -> None:
        self._display.note(f"saved iteration {manifest.iteration}")

    def unsaved(self, event: Discard) -> None:
        self._recorder.noted("save_failed", iteration=event.iteration, reason=event.reason)
        self._display.note(f"iteration {event.iteration} was not saved: {event.reason}")

    def stopping(self) -> None:
        self._display.note("stopping at the next commit; Ctrl-C again stops at once, unsaved")


def _report(planned: Planned, tier: DiskTier, recorder: Recorder, outcome: Outcome) -> Report:
    config, plan = planned.config, planned.plan
    manifest = tier.newest()
    assert manifest is not None
    parameters, optimizer = digests(tier, manifest, parameters=planned.prepared.parameters)
    packages = ("planaria", "torch", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions["python"] = platform.python_version()
    now_s = time.monotonic()
    return Report(
        job=asdict(config),
        seed=config.training.seed,
        versions=versions,
        workers=recorder.workers(),
        iterations=tuple(recorder.iterations),
        events=tuple(recorder.events),
        checkpoints={"every": float(config.checkpoint.persist_every)},
        ledger=recorder.ledger.enter(recorder.ledger.category, now_s).parts(),
        final=FinalRecord(
            iteration=outcome.state.last + 1,
            loss=recorder.iterations[-1].loss,
            parameters_sha256=parameters,
            optimizer_sha256=optimizer,
            nodes=plan.nodes,
            epoch=plan.epoch,
            checkpoint=str(tier.directory / f"{manifest.iteration}-{manifest.epoch}"),
        ),
        plan=msgspec.to_builtins(plan),
    )
