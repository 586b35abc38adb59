"""A training job as an object (`Job`); the command line is a thin layer over it.

    import planaria

    if __name__ == "__main__":
        result = planaria.Job.from_file("job.toml").train()
        print(result.report.final.parameters_sha256)

The job runs in processes of its own; the calling process holds no part of the model.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from planaria.checkpoint.disk.outgoing import save_as
from planaria.checkpoint.disk.storage import absolute_path
from planaria.checkpoint.disk.tiers import Start, Tier, tier_of
from planaria.checkpoint.disk.time_limits import with_short_limit
from planaria.core.copies import version_name
from planaria.core.inject import Injection, check_on_one_machine
from planaria.core.job import JobConfig
from planaria.core.kinds import Ending
from planaria.core.machine_messages import MachineFacts
from planaria.core.plan import ModelProfile, NodeKind, Plan
from planaria.core.records import Ended
from planaria.core.specs import NodeSpec, Prepared
from planaria.errors import ConfigError
from planaria.estimator.correction import Comparison
from planaria.estimator.time import Timeline
from planaria.job.checks import check_inputs, check_machine, warnings_of
from planaria.job.config import checked_job, load_job
from planaria.job.lost_heads import check_no_other_head, reachable_addresses, remove_parts
from planaria.job.machine_kinds import node_kinds
from planaria.job.on_machines import (
    LeftRun,
    Listening,
    begin_kinds,
    look_for_left_run,
    new_run,
    note_kept,
    open_head,
    take_up,
)
from planaria.job.places import find_start, open_journal, other_journal
from planaria.job.planning import (
    Planned,
    cache_directory,
    check_given_profile,
    fork_server,
    plan_job,
    prepare,
)
from planaria.job.predictions import predicted_peak_bytes
from planaria.job.report import (
    compared_iterations,
    explain_interrupts,
    failure_of,
    prefer_error,
    report_of,
)
from planaria.job.resources import check_room
from planaria.job.save_facts import save_facts
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.descriptors import raise_open_files
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.launcher import Launcher, LaunchSpec
from planaria.nodes.head.leader_spec import LeaderSpec, outlines_of
from planaria.nodes.head.process_events import interrupt_at_leave_signals, restore_handlers
from planaria.nodes.head.remote.open_head import OpenHead
from planaria.nodes.head.remote.run_record import NodeLog, RunRecord, give_up_run, write_run
from planaria.observe.metrics import IterationRecord, Report
from planaria.observe.recorder import Recorder
from planaria.planner.plans import PlanCatalog
from planaria.show.callbacks import Callbacks, CallbackThread, callbacks_of
from planaria.show.job_observer import JobObserver, TrainingDisplay
from planaria.transport.sockets import Address
from planaria.user_functions import refuse_while_importing

logger = logging.getLogger(__name__)

_WORKER = "planaria.engine.process:main"
# Without scipy here, the first decision that moves layers takes half a second to import it.
HEAD_PRELOAD = ("scipy.optimize", "scipy.sparse.csgraph", "planaria.nodes.head.leader")


class Display(TrainingDisplay, Protocol):
    """A display of a run, from its first second on."""

    def show_step(self, text: str) -> None:
        """Shows that a step begins that takes seconds, before there is a plan."""

    def show_plan(self, planned: Planned) -> None:
        """Shows that the job is planned; its nodes start now."""


class SilentDisplay:
    """A display that shows nothing."""

    def show_step(self, text: str) -> None:
        """Shows nothing."""

    def show_plan(self, planned: Planned) -> None:
        """Shows nothing."""

    def show_training(self) -> None:
        """Shows nothing."""

    def show_iteration(self, record: IterationRecord) -> None:
        """Shows nothing."""

    def show_next_plan(self, plan: Plan) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a run that is over.

    Attributes:
        report: report of everything that was done.
        planned: job with the plan that it began with.
        compared: predicted and measured timelines of the traced iterations.
        stopped: whether the user stopped the run before the last iteration; it is saved and ready
            to resume.
        error: exception that ended training early, such as one of a callback's; None: none did.
    """

    report: Report
    planned: Planned
    compared: tuple[Comparison, ...]
    stopped: bool
    error: Exception | None

    def measured_timelines(self) -> tuple[Timeline, ...]:
        """The measured timeline of each traced iteration; each rank's clock starts with it."""
        return tuple(iteration.measured for iteration in self.compared)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A run that is about to be planned.

    Attributes:
        config: the job; on machines, with as many nodes as machines have come.
        start: checkpoint to go on from, and the first epoch.
        journal: directory of the coordinator's journal.
        server: fork server of the coordinator, and of nodes on this machine.
        head: head at which machines arrive; None: all nodes are processes of this machine.
        machines: reports of the machines of the first nodes, by node.
        record: record of the run; None: all nodes are on this machine.
    """

    config: JobConfig
    prepared: Prepared
    start: Start
    journal: str
    server: ForkServer
    head: OpenHead | None = None
    machines: Mapping[int, MachineFacts] = field(default_factory=dict)
    record: RunRecord | None = None

    @property
    def parts(self) -> str:
        """See the field of this name in NodeSpec."""
        return "" if self.record is None else self.record.parts

    @property
    def kinds(self) -> dict[int, NodeKind] | None:
        """The kinds of the first nodes' machines; None: all nodes are on this machine."""
        return None if self.head is None else node_kinds(self.machines, self.head.machines.kinds)


@dataclass(frozen=True, slots=True)
class _RunOptions:
    """What the user says of how a run begins; see `Job.run`."""

    resume: bool
    state: str
    injections: tuple[Injection, ...]
    server: ForkServer | None
    output: Callable[[str], None] | None
    listening: Listening | None


class Job:
    """A training job.

    Args:
        config: tables of a job file.
        search_path: directories in which modules that the job names are looked for first.

    Raises:
        ConfigError: a value is wrong, or several values do not fit together.
    """

    def __init__(self, config: JobConfig, *, search_path: Sequence[str] = ()) -> None:
        self.config = checked_job(config)
        self._search_path = tuple(search_path)

    @classmethod
    def from_file(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> "Job":
        """The job of a job file.

        Modules that the job names are looked for beside the file first.

        Args:
            path: TOML file.
            overrides: texts "TABLE.KEY=VALUE".

        Raises:
            ConfigError: the file or an override is wrong.
        """
        config = load_job(Path(path), overrides=overrides)
        return cls(config, search_path=[str(absolute_path(Path(path)).parent)])

    @property
    def search_path(self) -> tuple[str, ...]:
        """The directories in which modules that the job names are looked for first."""
        return self._search_path

    def profile(self, *, server: ForkServer | None = None) -> ModelProfile:
        """Measures the job's layers and links on this machine.

        Raises:
            ConfigError: the job is wrong.
            TrainingError: the user's model or data raised.
            InsufficientError: a process of the job was killed.
        """
        refuse_while_importing()
        check_inputs(self.config)
        with self._server(server, None) as running:
            profile = prepare(self.config, running).profile
        assert profile is not None
        return profile

    def save(self, name: str) -> str:
        """Keeps the newest saved version of the job under a name, and returns its directory.

        Planaria never removes it. With `resume`, a job whose checkpoint.directory is that directory
        goes on from it. The job may be running meanwhile.

        Raises:
            ConfigError: the name is not allowed, taken or just being taken, or nothing was saved.
            CheckpointError: the version is damaged, or the storage refuses.
        """
        return save_as(self.config.checkpoint.directory, name)

    def train(
        self,
        *,
        resume: bool = False,
        trace: bool = False,
        plan: Plan | None = None,
        catalog: PlanCatalog | None = None,
        injections: Sequence[Injection] = (),
        display: Display | None = None,
        server: ForkServer | None = None,
        state: str = "",
        callbacks: Sequence[Callbacks] = (),
    ) -> TrainingResult:
        """Trains the job on emulated nodes of this machine, and saves it at the end.

        Args:
            resume: whether to go on from the newest checkpoint in checkpoint.directory.
            trace: whether to gather the spans of every action of every iteration.
            plan: plan to begin with, instead of the planner's; a better one may replace it later.
            catalog: plans for all numbers of nodes that may be left, instead of the planner's.
            injections: faults that are to happen.
            display: display of the run; None: nothing is shown.
            server: fork server to share between jobs; None: one is started for this job. It is
                renewed if it is lost while the job trains.
            state: directory for the coordinator's journal; "": beside the saves, or in the user's
                state directory if the saves are in an object store.
            callbacks: functions to call while the job trains, beside training.callbacks.

        Raises:
            ConfigError: the job is wrong, or does not fit the checkpoint or the cluster; or its
                loss or gradient is no longer a number.
            TrainingError: the user's code raised.
            InsufficientError: too few nodes are left, or a layer has no live holder.
            CheckpointError: the last save failed.
            KeyboardInterrupt: the user ended the job at once, and nothing was saved; or the user
                interrupted the work after training, and all was saved. Its text says which.
        """
        result = self.run(
            resume=resume,
            trace=trace,
            plan=plan,
            catalog=catalog,
            injections=injections,
            display=display,
            server=server,
            state=state,
            callbacks=callbacks,
        )
        if result.error is not None:
            raise result.error
        return result

    def run(
        self,
        *,
        resume: bool = False,
        trace: bool = False,
        plan: Plan | None = None,
        catalog: PlanCatalog | None = None,
        injections: Sequence[Injection] = (),
        display: Display | None = None,
        server: ForkServer | None = None,
        state: str = "",
        output: Callable[[str], None] | None = None,
        listening: Listening | None = None,
        callbacks: Sequence[Callbacks] = (),
    ) -> TrainingResult:
        """Trains like `train`, but returns an error that ends training in the result.

        Args:
            listening: address at which machines arrive that run the nodes; None: all nodes are
                processes of this machine.
            output: function that is called, in a thread of its own, with each line that the job's
                processes print; None: they print to this process's own output.

        Raises:
            ConfigError, TrainingError, InsufficientError, KeyboardInterrupt: the same as in
                `train`, except for errors that the result has.
        """
        start_s = time.monotonic()
        options = _RunOptions(resume, state, tuple(injections), server, output, listening)
        config, display = self.config, display or SilentDisplay()
        tier = tier_of(config.checkpoint.directory)
        _make_ready(config, injections, display, is_here=listening is None)
        calls = [*callbacks, *callbacks_of(config, search_path=self._search_path)]
        early = nullcontext() if listening is None else interrupt_at_leave_signals()
        with restore_handlers(), ExitStack() as held:
            thread = held.enter_context(CallbackThread(calls))
            with early:  # Machines that wait must be told.
                begun = self._begin(held, display, options)
                planned = _plan_of(begun, display, plan=plan, catalog=catalog)
            display.show_plan(planned)
            left = with_short_limit(tier, begun.config.checkpoint)
            recorder = _recorder(planned, start_s)
            observer = _job_observer(planned, recorder, display, thread)
            launch_spec = _launch_spec(planned, injections, begun, trace, listening)
            launcher = Launcher(
                launch_spec,
                server=begun.server,
                observer=observer,
                tier=left,
                other_journal=partial(_other_journal, held, begun, state),
                head=begun.head,
            )
            with explain_interrupts(launcher, left):
                ended = launcher.run()
                held.close()
                return _result(
                    planned, launcher, ended, left, begun.parts, recorder, observer=observer
                )

    def _begin(self, held: ExitStack, display: Display, options: _RunOptions) -> _Begun:
        """Does what precedes planning; `held` holds what is opened for the run."""
        config, listening, state = self.config, options.listening, options.state
        look = partial(look_for_left_run, config, listening, state=state, note=display.note)
        left_run = look(resume=options.resume, injections=options.injections)
        if listening is not None:
            return self._begin_on_machines(held, display, options, listening, left_run)
        journal = open_journal(held, config, state=state, note=display.note)
        start = find_start(config, resume=options.resume, note=display.note)
        check_given_profile(config)
        running = held.enter_context(self._server(options.server, options.output))
        prepared = _prepared_here(config, running, display)
        return _Begun(config, prepared, start, journal, running)

    def _begin_on_machines(
        self,
        held: ExitStack,
        display: Display,
        options: _RunOptions,
        listening: Listening,
        left_run: LeftRun | None,
    ) -> _Begun:
        """See `_begin`; machines are waited for, or those of the run that a lost head has left."""
        if left_run is None:  # No machine waits for an answer while this plans.
            check_given_profile(self.config)
        config, state, resume = self.config, options.state, options.resume
        left = None if left_run is None else left_run.record
        path, note = self._search_path, display.note
        head = held.enter_context(
            open_head(config, listening, search_path=path, left=left, note=note)
        )
        name, parts = head.name, "" if left is None else left.parts
        head.runner.run(check_no_other_head(config, listening.credentials, run=parts))
        running = ForkServer(HEAD_PRELOAD)
        held.callback(running.close)
        open_own = partial(open_journal, held, config, state=state, note=note, holder=name)
        if left_run is not None and take_up(head, left_run, resume=resume, note=note):
            journal = open_own(taken_up=str(left_run.directory), keeps=lambda: head.keeps_run)
            record = left_run.record
            note_kept(head, config, record, note=note)
            begin_kinds(head, record.job, record.prepared, {})
        else:
            journal = open_own()
            record = new_run(head, config, listening, display.show_step, resume=resume, note=note)
            write_run(Path(journal), record, holder=name)
            if left_run is not None and left_run.directory != Path(journal):
                give_up_run(left_run.directory)
        log = head.machines.node_log = NodeLog(Path(journal), holder=name)
        held.callback(log.close)
        head.run_place = record.parts
        return _Begun(
            *(record.job, record.prepared, Start(record.resumed, record.epoch), journal, running),
            *(head, head.machines.reserve(range(record.job.cluster.nodes)), record),
        )

    @contextmanager
    def _server(
        self, server: ForkServer | None, output: Callable[[str], None] | None
    ) -> Iterator[ForkServer]:
        """The given server, or a server for the length of this context."""
        if server is not None:
            yield server
            return
        own = fork_server(self.config, search_path=self._search_path, output=output)
        try:
            yield own
        finally:
            own.close()


def _other_journal(held: ExitStack, begun: _Begun, state: str) -> str:
    """Another directory for the journal, with the records of the run; "": there is none."""
    holder = "" if begun.head is None else begun.head.name
    directory = other_journal(held, begun.config, begun.journal, state=state, holder=holder)
    if not directory or begun.head is None or begun.record is None:
        return directory
    try:
        write_run(Path(directory), begun.record, holder=holder)
        if begun.head.machines.node_log is not None:
            begun.head.machines.node_log.move(Path(directory))
    except (ConfigError, OSError) as error:
        logger.warning("%s", error)
        return ""
    return directory


def _plan_of(
    begun: _Begun, display: Display, *, plan: Plan | None, catalog: PlanCatalog | None
) -> Planned:
    display.show_step("planning")
    work = partial(
        plan_job,
        begun.config,
        begun.prepared,
        plan=plan,
        catalog=catalog,
        start=begun.start,
        kinds=begun.kinds,
    )
    if begun.head is None:
        planned = work()
    else:  # Machines that come meanwhile, and users that ask, are answered.
        planned = begun.head.runner.run(answer_of_thread(work, name="planning"))
    check_room(planned, is_here=begun.head is None)
    return planned


def _make_ready(
    config: JobConfig, injections: Sequence[Injection], display: Display, *, is_here: bool
) -> None:
    """Warns of what a user should know, and makes room for the job's open files.

    Args:
        is_here: whether all nodes run on this machine; else each machine is examined as it comes.
    """
    if is_here:
        check_machine(config)
        check_on_one_machine(injections)
    refuse_while_importing()
    num_joining = sum(injection.num_nodes for injection in injections)
    for warning in warnings_of(config, num_joining=num_joining):
        display.note(warning)
    raise_open_files(config.cluster, num_joining=num_joining)


def _recorder(planned: Planned, start_s: float) -> Recorder:
    return Recorder(
        start_s=start_s,
        predicted_s=planned.predicted.iteration_s,
        predicted_peak_bytes=planned.predicted_peak_bytes,
        first_iteration=planned.resumed.iteration if planned.resumed else 0,
    )


def _job_observer(
    planned: Planned, recorder: Recorder, display: Display, callbacks: CallbackThread
) -> JobObserver:
    problem, buffers_bytes = planned.problem, planned.config.chunk_buffers_bytes
    return JobObserver(
        recorder,
        display,
        plan=planned.plan,
        predicted_peak_bytes=lambda plan: predicted_peak_bytes(problem, plan) + buffers_bytes,
        evaluates=planned.config.evaluation.every > 0,
        callbacks=callbacks,
    )


def _prepared_here(config: JobConfig, server: ForkServer, display: Display) -> Prepared:
    """The facts on the job, found out on this machine."""
    display.show_step("importing torch")
    server.wait_ready()
    display.show_step("building the model and measuring its layers")
    return prepare(config, server, keeps_tokenizer=True)


def _launch_spec(
    planned: Planned,
    injections: Sequence[Injection],
    begun: _Begun,
    trace: bool,
    listening: Listening | None,
) -> LaunchSpec:
    config, known, manifest = planned.config, planned.prepared, planned.resumed
    checking = ("on",) if listening is None else ("on", "auto")
    token, addresses = b"", tuple[Address, ...]()
    if begun.head is not None and listening is not None:
        token = listening.credentials.derive(f"run {begun.head.run}")
        addresses = reachable_addresses(begun.head.leader_sockets.address)
    node = NodeSpec(
        job=config,
        node=0,
        token=token,
        coordinator=("", 0),
        worker=_WORKER,
        cache_directory=cache_directory(),
        profile=known.profile,
        num_samples=known.num_samples,
        trace=trace,
        patience_s=0.0 if listening is None else config.cluster.patience_s,
        parts=begun.parts,
        checks_links=config.cluster.checksums in checking,
    )
    has_state = manifest is not None and bool(manifest.layers)
    leader = LeaderSpec(
        job=config,
        plan=planned.plan,
        predicted_s=planned.predicted.iteration_s,
        problem=planned.problem,
        templates=dict(planned.catalog.templates),
        outlines=outlines_of(planned.catalog),
        first_iteration=manifest.iteration if manifest else 0,
        source=version_name(manifest.iteration, manifest.epoch) if manifest and has_state else "",
        fingerprint=save_facts(config, known),
        directory=begun.journal,
        holder="" if begun.head is None else begun.head.name,
        token=token,
        domains={node: facts.domain for node, facts in begun.machines.items() if facts.domain},
        speeds=dict(planned.plan.slow_nodes),
        credentials=None if listening is None else listening.credentials,
        patience_s=node.patience_s,
        parts=begun.parts,
        addresses=addresses,
        wait_s=0.0 if listening is None else config.cluster.wait_s,
    )
    return LaunchSpec(node, leader, tuple(injections))


def _result(
    planned: Planned,
    launcher: Launcher,
    ended: Ended,
    tier: Tier,
    run: str,
    recorder: Recorder,
    *,
    observer: JobObserver,
) -> TrainingResult:
    with prefer_error(launcher.error):
        observer.record_end(launcher.unfired_injections)
        failure = failure_of(ended, tier)
        error = launcher.error or failure
        if failure is not None:
            observer.record_failure(str(failure), ended)
        if error is None:
            remove_parts(tier, run)
        return TrainingResult(
            report=report_of(planned, tier, recorder, observer, ended),
            planned=planned,
            compared=tuple(compared_iterations(planned, recorder)),
            stopped=ended.ending == Ending.STOPPED and not ended.is_early,
            error=error,
        )
