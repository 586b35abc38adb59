"""The coordinator as a function: (state, event, now) -> (state, commands).

It starts the epoch when every worker of the plan has reported, takes an iteration for committed
when every member has reported the age after it, has a save published when every layer of it is
on disk, and ends the job. It decides; who calls it (nodes/launcher.py) acts.

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
        reports: of iterations not yet committed, by iteration, then rank.
        saves: files and ranks that are still awaited, by (iteration, epoch).
        last: the iteration that all ranks agreed to be the last, -1 while none is.
    """

    plan: Plan
    first_iteration: int
    end_iteration: int
    source: str = ""
    phase: Phase = Phase.JOINING
    workers: Mapping[int, WorkerReady] = field(default_factory=dict)
    materialised: Mapping[int, int] = field(default_factory=dict)
    reports: Mapping[int, Mapping[int, IterationDone]] = field(default_factory=dict)
    saves: Mapping[tuple[int, int], tuple[LayerFile, ...]] = field(default_factory=dict)
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
            return replace(state, stop_requested=True), (Tell(event),)
        case WorkerFailed():
            return _end(state, End(Ending.FAILED, "the code in a worker raised", event))
        case WorkerExited():
            reason = f"the worker of rank {event.rank} on node {event.node} " + _told(event.status)
            return _end(state, End(Ending.LOST, reason))
        case NodeLost():
            return _end(state, End(Ending.LOST, f"node {event.node} is gone"))


def _worker_ready(state: JobState, event: WorkerReady) -> Step:
    state = replace(state, workers={**state.workers, event.rank: event})
    if state.phase is not Phase.JOINING or set(state.workers) != set(state.plan.ranks):
        return state, ()
    start = StartEpoch(
        epoch=state.plan.epoch,
        plan=state.plan,
        addresses={rank: (w.host, w.port) for rank, w in state.workers.items()},
        iteration=state.first_iteration,
        source=state.source,
    )
    return replace(state, phase=Phase.STARTING), (Tell(start),)


def _epoch_ready(state: JobState, event: EpochReady) -> Step:
    if event.epoch != state.plan.epoch:
        return state, ()
    materialised = {**state.materialised, event.rank: event.layers_materialised}
    state = replace(state, materialised=materialised)
    if set(materialised) != set(state.plan.ranks):
        return state, ()
    phase = Phase.TRAINING if state.phase is Phase.STARTING else state.phase
    return replace(state, phase=phase), (Began(materialised),)


def _iteration_done(state: JobState, event: IterationDone) -> Step:
    if event.epoch != state.plan.epoch:
        return state, ()
    reports = {**state.reports.get(event.iteration, {}), event.rank: event}
    if set(reports) != set(state.plan.ranks):
        return replace(state, reports={**state.reports, event.iteration: reports}), ()
    rest = {i: r for i, r in state.reports.items() if i != event.iteration}
    state = replace(state, reports=rest)
    committed = Committed(event.iteration, tuple(reports[rank] for rank in sorted(reports)))
    if not event.ends:
        return state, (committed,)
    state, commands = _maybe_end(replace(state, last=event.iteration, phase=Phase.SAVING))
    return state, (committed, *commands)


def _layers_saved(state: JobState, event: LayersSaved) -> Step:
    key = (event.iteration, event.epoch)
    files = (*state.saves.get(key, ()), *event.files)
    newer = {k: v for k, v in state.saves.items() if k >= key}
    saves = {**newer, key: files}
    if len(files) < state.plan.num_layers:
        return replace(state, saves=saves), ()
    assert sorted(file.layer for file in files) == list(range(state.plan.num_layers))
    publish = Publish(event.iteration, event.epoch, tuple(sorted(files, key=lambda f: f.layer)))
    state, commands = _maybe_end(replace(state, saves=saves))
    return state, (publish, *commands)


def _save_failed(state: JobState, event: SaveFailed) -> Step:
    discard = Discard(event.iteration, event.epoch, event.reason)
    if event.iteration == state.end_iteration or event.iteration == state.last + 1:
        state, commands = _end(state, End(Ending.UNSAVED, event.reason))
        return state, (discard, *commands)
    return state, (discard,)


def _maybe_end(state: JobState) -> Step:
    """Ends the job if the last iteration is committed everywhere and saved."""
    saved = state.saves.get((state.last + 1, state.plan.epoch), ())
    if state.phase is not Phase.SAVING or len(saved) < state.plan.num_layers:
        return state, ()
    is_cut_short = state.stop_requested and state.last + 1 < state.end_iteration
    return _end(state, End(Ending.STOPPED if is_cut_short else Ending.FINISHED))


def _end(state: JobState, end: End) -> Step:
    return replace(state, phase=Phase.ENDED), (Tell(Shutdown()), end)


def _told(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"left with status {status}"
