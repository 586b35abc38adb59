"""The coordinator as a function: (state, event, now) -> (state, commands).

It starts the epoch when every worker of the plan has reported, takes an iteration for committed
when every member has reported the age after it, has a save published when every layer of it is
on disk, and ends the job. It decides; who calls it (nodes/launcher.py) acts.

Reports of ranks come in any order. What a rank says twice, or says of another epoch, or says
though the plan has no such rank, changes nothing.

Source: DESIGN 4.5 and 6 (Coordination).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from planaria.core.messages import (
    EpochReady,
    FromNode,
    IterationDone,
    LayerFile,
    LayersSaved,
    NodeLost,
    SaveFailed,
    Shutdown,
    StartEpoch,
    StopRequested,
    ToNode,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.plan import Plan


class Phase(Enum):
    """What the coordinator waits for."""

    JOINING = "workers to report"
    STARTING = "workers to hold their layers"
    TRAINING = "iterations"
    SAVING = "the last save"
    ENDED = "nothing"


class Ending(Enum):
    """How a job ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"
    UNSAVED = "unsaved"


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to every node."""

    message: ToNode


@dataclass(frozen=True, slots=True)
class Began:
    """Every rank holds its layers and its links are up: training runs."""

    materialised: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Committed:
    """Every member has applied the iteration; `reports` are by rank."""

    iteration: int
    reports: tuple[IterationDone, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Every layer of (iteration, epoch) is on disk: create its manifest."""

    iteration: int
    epoch: int
    files: tuple[LayerFile, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """A save failed: remove what there is of it, and say so."""

    iteration: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The job is over; `failure` says what ended it, `reason` in words."""

    ending: Ending
    reason: str = ""
    failure: WorkerFailed | None = None


Command = Tell | Began | Committed | Publish | Discard | End


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """All that the coordinator knows.

    Attributes:
        plan: of the current epoch.
        first_iteration: where this run starts.
        end_iteration: how many iterations the job is to have.
        source: version of the disk tier to start from, "" for the seed.
        workers: who has reported, by rank.
        materialised: how many layers each ready rank has materialised.
        num_committed: iterations that this run has committed.
        reports: of iterations not yet committed, by iteration, then rank.
        saves: files so far by (iteration, epoch), then layer, of saves not yet published.
        published: number of iterations in the newest save of this run that is published.
        unsaved: why a save of this epoch failed, by its number of iterations.
        last: the iteration that all ranks agreed to be the last, -1 while none is.
    """

    plan: Plan
    first_iteration: int
    end_iteration: int
    source: str = ""
    phase: Phase = Phase.JOINING
    workers: Mapping[int, WorkerReady] = field(default_factory=dict)
    materialised: Mapping[int, int] = field(default_factory=dict)
    num_committed: int = 0
    reports: Mapping[int, Mapping[int, IterationDone]] = field(default_factory=dict)
    saves: Mapping[tuple[int, int], Mapping[int, LayerFile]] = field(default_factory=dict)
    published: int = -1
    unsaved: Mapping[int, str] = field(default_factory=dict)
    last: int = -1
    stop_requested: bool = False


Step = tuple[JobState, tuple[Command, ...]]


def step(state: JobState, event: FromNode) -> Step:
    """The state after an event, and what is to be done about it."""
    if state.phase is Phase.ENDED:
        return state, ()
    match event:
        case WorkerReady():
            return _worker_ready(state, event)
        case EpochReady():
            return _epoch_ready(state, event)
        case IterationDone():
            return _iteration_done(state, event)
        case LayersSaved():
            return _layers_saved(state, event)
        case SaveFailed():
            return _save_failed(state, event)
        case StopRequested():
            return _stop_requested(state, event)
        case WorkerFailed():
            return _end(state, End(Ending.FAILED, "the code in a worker raised", event))
        case WorkerExited():
            reason = f"the worker of rank {event.rank} on node {event.node} " + _told(event.status)
            return _end(state, End(Ending.LOST, reason))
        case NodeLost():
            return _end(state, End(Ending.LOST, f"node {event.node} is gone"))


def _worker_ready(state: JobState, event: WorkerReady) -> Step:
    if state.phase is not Phase.JOINING or event.rank not in state.plan.ranks:
        return state, ()
    state = replace(state, workers={**state.workers, event.rank: event})
    if len(state.workers) < len(state.plan.ranks):
        return state, ()
    start = StartEpoch(
        epoch=state.plan.epoch,
        plan=state.plan,
        addresses={rank: (w.host, w.port) for rank, w in state.workers.items()},
        iteration=state.first_iteration,
        source=state.source,
    )
    state = replace(state, phase=Phase.STARTING)
    # A node that connected after the user's request has not heard of it.
    return state, (Tell(start), *((Tell(StopRequested()),) if state.stop_requested else ()))


def _stop_requested(state: JobState, event: StopRequested) -> Step:
    if state.stop_requested:
        return state, ()
    return replace(state, stop_requested=True), (Tell(event),)


def _is_of_epoch(state: JobState, event: EpochReady | IterationDone) -> bool:
    return event.epoch == state.plan.epoch and event.rank in state.plan.ranks


def _epoch_ready(state: JobState, event: EpochReady) -> Step:
    if state.phase is not Phase.STARTING or not _is_of_epoch(state, event):
        return state, ()
    materialised = {**state.materialised, event.rank: event.layers_materialised}
    state = replace(state, materialised=materialised)
    if len(materialised) < len(state.plan.ranks):
        return state, ()
    began = Began(materialised)
    state, commands = _committed(replace(state, phase=Phase.TRAINING))
    return state, (began, *commands)


def _iteration_done(state: JobState, event: IterationDone) -> Step:
    is_open = state.phase in (Phase.STARTING, Phase.TRAINING)
    is_new = event.iteration >= state.first_iteration + state.num_committed
    if not is_open or not is_new or not _is_of_epoch(state, event):
        return state, ()
    reports = {**state.reports.get(event.iteration, {}), event.rank: event}
    return _committed(replace(state, reports={**state.reports, event.iteration: reports}))


def _committed(state: JobState) -> Step:
    """Commits what every member has reported, in the order of iterations."""
    commands: list[Command] = []
    while state.phase is Phase.TRAINING:
        iteration = state.first_iteration + state.num_committed
        reports = state.reports.get(iteration, {})
        if len(reports) < len(state.plan.ranks):
            break
        commands.append(Committed(iteration, tuple(reports[rank] for rank in sorted(reports))))
        rest = {i: r for i, r in state.reports.items() if i != iteration}
        state = replace(state, reports=rest, num_committed=state.num_committed + 1)
        if any(report.ends for report in reports.values()):
            state = replace(state, last=iteration, phase=Phase.SAVING)
    state, ending = _maybe_end(state)
    return state, (*commands, *ending)


def _layers_saved(state: JobState, event: LayersSaved) -> Step:
    is_settled = event.iteration <= state.published or event.iteration in state.unsaved
    if event.epoch != state.plan.epoch or is_settled:
        return state, ()
    key = (event.iteration, event.epoch)
    files = {**state.saves.get(key, {}), **{file.layer: file for file in event.files}}
    assert all(0 <= layer < state.plan.num_layers for layer in files), event
    if len(files) < state.plan.num_layers:
        return replace(state, saves={**state.saves, key: files}), ()
    # An older save that is not complete by now would be of no use any more.
    newer = {k: v for k, v in state.saves.items() if k > key}
    state = replace(state, saves=newer, published=event.iteration)
    publish = Publish(event.iteration, event.epoch, tuple(files[layer] for layer in sorted(files)))
    state, commands = _maybe_end(state)
    return state, (publish, *commands)


def _save_failed(state: JobState, event: SaveFailed) -> Step:
    if event.epoch != state.plan.epoch or event.iteration <= state.published:
        return state, ()
    discard = Discard(event.iteration, event.epoch, event.reason)
    rest = {k: v for k, v in state.saves.items() if k != (event.iteration, event.epoch)}
    unsaved = {event.iteration: event.reason, **state.unsaved}
    state, commands = _maybe_end(replace(state, saves=rest, unsaved=unsaved))
    return state, (discard, *commands)


def _maybe_end(state: JobState) -> Step:
    """Ends the job if the last iteration is committed everywhere and saved, or cannot be."""
    if state.phase is not Phase.SAVING:
        return state, ()
    if state.last + 1 in state.unsaved:
        return _end(state, End(Ending.UNSAVED, state.unsaved[state.last + 1]))
    if state.published <= state.last:
        return state, ()
    is_cut_short = state.stop_requested and state.last + 1 < state.end_iteration
    return _end(state, End(Ending.STOPPED if is_cut_short else Ending.FINISHED))


def _end(state: JobState, end: End) -> Step:
    return replace(state, phase=Phase.ENDED), (Tell(Shutdown()), end)


def _told(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"left with status {status}"
