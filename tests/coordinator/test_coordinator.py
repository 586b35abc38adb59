"""The coordinator as a function: whatever the order of reports, each thing happens once."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.coordinator import (
    Began,
    Command,
    Committed,
    Discard,
    End,
    Ending,
    JobState,
    Phase,
    Publish,
    Tell,
    step,
)
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
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)

EPOCH = 4
FIRST, END = 10, 15  # The run goes on from ten committed iterations and does five.
SAVE_EVERY = 2
PLAN = replace(shaped_plan((3, 1), 6), epoch=EPOCH)  # Rank 3 holds all and owns nothing.


def begin_state(stop_requested: bool = False) -> JobState:
    return JobState(
        plan=PLAN, first_iteration=FIRST, end_iteration=END, stop_requested=stop_requested
    )


def worker(rank: int) -> WorkerReady:
    return WorkerReady(node=rank, rank=rank, pid=50 + rank, pid_start=1.0, host="h", port=rank)


def ready(rank: int, epoch: int = EPOCH) -> EpochReady:
    return EpochReady(rank=rank, epoch=epoch, layers_materialised=rank + 1)


def done(rank: int, iteration: int, *, ends: bool = False, epoch: int = EPOCH) -> IterationDone:
    return IterationDone(
        rank=rank,
        epoch=epoch,
        iteration=iteration,
        loss=1.0,
        samples=(),
        seconds=0.1,
        stall_s=0.0,
        peak_bytes=0,
        ends=ends,
    )


def file(layer: int) -> LayerFile:
    return LayerFile(layer, f"{layer}.safetensors", 7, "hash")


def saved(rank: int, iteration: int, epoch: int = EPOCH) -> LayersSaved:
    """The rank has written the layers that it owns."""
    owned = [layer for layer in range(NUM_LAYERS) if PLAN.holders(layer)[0] == rank]
    files = tuple(file(layer) for layer in owned)
    return LayersSaved(rank=rank, epoch=epoch, iteration=iteration, files=files)


def failed(rank: int, iteration: int, epoch: int = EPOCH) -> SaveFailed:
    return SaveFailed(rank=rank, epoch=epoch, iteration=iteration, reason="disk full")


def after(state: JobState, events: Iterable[FromNode]) -> tuple[JobState, list[Command]]:
    commands: list[Command] = []
    for event in events:
        state, more = step(state, event)
        commands += more
    return state, commands


def training() -> JobState:
    """Every rank has reported and holds its layers."""
    return after(begin_state(), HELD)[0]


HELD: tuple[FromNode, ...] = (*map(worker, PLAN.ranks), *map(ready, PLAN.ranks))


def all_done(iteration: int, *, ends: bool = False) -> list[FromNode]:
    return [done(rank, iteration, ends=ends) for rank in PLAN.ranks]


def all_saved(iteration: int) -> list[FromNode]:
    return [saved(rank, iteration) for rank in PLAN.ranks]


def words_of(rank: int, end: int) -> list[FromNode]:
    """All that a rank says in a run that ends before iteration `end`."""
    words: list[FromNode] = [ready(rank)]
    for iteration in range(FIRST, end):
        ends = iteration + 1 == end
        words.append(done(rank, iteration, ends=ends))
        if ends or (iteration + 1) % SAVE_EVERY == 0:
            words.append(saved(rank, iteration + 1))
    return words


NOISE: tuple[FromNode, ...] = (
    ready(0, epoch=EPOCH - 1),
    ready(7),
    *(done(rank, FIRST, ends=True, epoch=EPOCH - 1) for rank in PLAN.ranks),
    done(7, FIRST, ends=True),
    *(saved(rank, END, epoch=EPOCH - 1) for rank in PLAN.ranks),
    failed(0, END, epoch=EPOCH + 1),
)


def arrivals(seed: int) -> list[FromNode]:
    """The words of all ranks in any order of arrival that keeps each rank's own order, some of
    them twice or again later, between words that belong to nothing here."""
    rng = random.Random(seed)
    end = rng.choice((END, END - 2))
    left = {rank: words_of(rank, end) for rank in PLAN.ranks}
    events: list[FromNode] = [worker(rank) for rank in PLAN.ranks]
    rng.shuffle(events)
    while left:
        kind = rng.randrange(6)
        if kind == 0:
            events.append(rng.choice(events))
        elif kind == 1:
            events.append(rng.choice(NOISE))
        else:
            rank = rng.choice(sorted(left))
            events.append(left[rank].pop(0))
            left = {rank: words for rank, words in left.items() if words}
    return events


def of_type(commands: Sequence[Command], *kinds: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kinds)]


@settings(max_examples=300)
@given(st.integers(0, 1 << 32))
def test_each_thing_happens_once_and_in_order(seed: int) -> None:
    """Starts once, begins once, commits every iteration, publishes every save, ends: whoever is
    first, whatever comes twice or from another epoch."""
    state, commands = after(begin_state(), arrivals(seed))

    end = FIRST + len(of_type(commands, Committed))
    assert end in (END, END - 2)
    told = [command.message for command in commands if isinstance(command, Tell)]
    assert [type(message) for message in told] == [StartEpoch, Shutdown]
    others = [type(command) for command in commands if not isinstance(command, Publish)]
    assert others[:2] == [Tell, Began]
    assert others.count(Began) == 1
    assert isinstance(commands[-1], End)
    assert commands[-1].ending is Ending.FINISHED
    assert len(of_type(commands, End)) == 1
    committed = [c for c in commands if isinstance(c, Committed)]
    assert [c.iteration for c in committed] == list(range(FIRST, end))
    for command in committed:
        assert [report.rank for report in command.reports] == list(PLAN.ranks)
        assert {report.iteration for report in command.reports} == {command.iteration}
    expected = sorted({i for i in range(FIRST + 1, end + 1) if i % SAVE_EVERY == 0} | {end})
    published = [c for c in commands if isinstance(c, Publish)]
    assert [(c.iteration, c.epoch) for c in published] == [(i, EPOCH) for i in expected]
    files = tuple(file(layer) for layer in range(NUM_LAYERS))
    assert all(c.files == files for c in published)
    assert state.phase is Phase.ENDED
    assert (state.reports, state.saves) == ({}, {})


EVENTS: tuple[FromNode, ...] = (
    worker(0),
    ready(0),
    done(0, FIRST),
    saved(0, FIRST + 2),
    failed(0, FIRST + 2),
    StopRequested(),
    *NOISE,
)


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_one_rank_alone_never_moves_the_job(events: list[FromNode]) -> None:
    """Whatever one of four ranks says, how often and in which order."""
    state, commands = after(begin_state(), events)

    assert state.phase is Phase.JOINING
    assert not of_type(commands, Began, Committed, Publish, End)


def test_the_epoch_starts_with_every_workers_address() -> None:
    """The order holds the plan, where to go on from, and where each rank listens."""
    state = replace(begin_state(), source="10-3")
    _, commands = after(state, [worker(2), worker(0), worker(7), worker(3), worker(1)])

    start = StartEpoch(
        epoch=EPOCH,
        plan=PLAN,
        addresses={rank: ("h", rank) for rank in PLAN.ranks},
        iteration=FIRST,
        source="10-3",
    )
    assert commands == [Tell(start)]


def test_a_stop_before_the_start_is_told_after_it() -> None:
    """Nodes that connected after Ctrl-C have not heard of it and would train to the end."""
    _, commands = after(begin_state(), [StopRequested(), *map(worker, PLAN.ranks)])

    told = [command.message for command in commands if isinstance(command, Tell)]
    assert [type(message) for message in told] == [StopRequested, StartEpoch, StopRequested]


def test_a_stop_is_told_once() -> None:
    """The user may be impatient."""
    _, commands = after(training(), [StopRequested(), StopRequested()])

    assert commands == [Tell(StopRequested())]


def test_a_stopped_job_ends_once_its_last_state_is_saved() -> None:
    """The ranks agree on the last iteration; it counts as stopped only if it was cut short."""
    state, _ = after(training(), [StopRequested(), *all_done(FIRST, ends=True)])
    assert state.phase is Phase.SAVING

    _, commands = after(state, all_saved(FIRST + 1))
    assert commands[-2:] == [Tell(Shutdown()), End(Ending.STOPPED)]


def test_a_stop_at_the_last_iteration_changes_nothing() -> None:
    """The job is as complete as without it."""
    events: list[FromNode] = [StopRequested()]
    for iteration in range(FIRST, END):
        events += all_done(iteration, ends=iteration + 1 == END)
    _, commands = after(training(), [*events, *all_saved(END)])

    assert commands[-1] == End(Ending.FINISHED)


def test_a_save_may_be_complete_before_its_iteration_is_committed() -> None:
    """The fast ranks' files and the slow rank's report travel apart."""
    _, commands = after(training(), [*all_saved(FIRST + 1), *all_done(FIRST, ends=True)])

    assert [type(command) for command in commands] == [Publish, Committed, Tell, End]


@pytest.mark.parametrize("early", [True, False], ids=["before the commit", "after it"])
@pytest.mark.parametrize("end", [END, END - 2], ids=["at the end", "cut short"])
def test_a_job_whose_last_save_failed_ends_unsaved(end: int, early: bool) -> None:
    """It must not wait for files that will never come, and its last iteration still counts."""
    events: list[FromNode] = []
    for iteration in range(FIRST, end):
        events += all_done(iteration, ends=iteration + 1 == end)
    failures: list[FromNode] = [saved(1, end), failed(0, end)]
    events = failures + events if early else events + failures
    state, commands = after(training(), events)

    assert len(of_type(commands, Committed)) == end - FIRST
    assert of_type(commands, Discard) == [Discard(end, EPOCH, "disk full")]
    assert commands[-2:] == [Tell(Shutdown()), End(Ending.UNSAVED, "disk full")]
    assert state.phase is Phase.ENDED


def test_training_goes_on_after_a_save_that_failed() -> None:
    """It is discarded, also where other ranks write their part later; the next one counts."""
    save = FIRST + 2
    events: list[FromNode] = [saved(0, save), failed(1, save), saved(2, save), saved(1, save)]
    state, commands = after(training(), events)

    assert commands == [Discard(save, EPOCH, "disk full")]
    assert state.saves == {}
    _, commands = after(state, all_saved(FIRST + 4))
    assert [type(command) for command in commands] == [Publish]


def test_a_slow_save_is_published_although_the_next_has_begun() -> None:
    """One rank is done with the next save before another has written this one."""
    late = [saved(rank, iteration) for iteration in (FIRST + 2, FIRST + 4) for rank in (1, 2)]
    events = [saved(0, FIRST + 2), saved(0, FIRST + 4), *late]
    _, commands = after(training(), events)

    assert [c.iteration for c in commands if isinstance(c, Publish)] == [FIRST + 2, FIRST + 4]


def test_a_published_save_stays_published() -> None:
    """Whoever says afterwards that it failed is wrong: it would be removed from under a reader."""
    state, _ = after(training(), all_saved(FIRST + 2))

    assert step(state, failed(1, FIRST + 2)) == (state, ())


PHASES: dict[Phase, list[FromNode]] = {
    Phase.JOINING: [worker(0)],
    Phase.STARTING: [*map(worker, PLAN.ranks), ready(1)],
    Phase.TRAINING: [*HELD, done(0, FIRST)],
    Phase.SAVING: [*HELD, *all_done(FIRST, ends=True), saved(0, FIRST + 1)],
}
RAISED = WorkerFailed(node=1, rank=1, traceback="the user's traceback")
FATAL: tuple[tuple[FromNode, End], ...] = (
    (RAISED, End(Ending.FAILED, "the code in a worker raised", RAISED)),
    (
        WorkerExited(node=1, rank=1, status=-9),
        End(Ending.LOST, "the worker of rank 1 on node 1 was killed by signal 9"),
    ),
    (
        WorkerExited(node=1, rank=1, status=3),
        End(Ending.LOST, "the worker of rank 1 on node 1 left with status 3"),
    ),
    (NodeLost(node=2), End(Ending.LOST, "node 2 is gone")),
)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
@pytest.mark.parametrize(("event", "end"), FATAL, ids=["raised", "killed", "left", "lost"])
def test_a_loss_ends_the_job_once_in_every_phase(phase: Phase, event: FromNode, end: End) -> None:
    """Its consequences (other workers fail, nodes leave) are no events of their own."""
    state, _ = after(begin_state(), PHASES[phase])
    assert state.phase is phase

    state, commands = after(state, [event])
    assert commands == [Tell(Shutdown()), end]
    for other in (*EVENTS, *(fatal for fatal, _ in FATAL)):
        assert step(state, other) == (state, ())
