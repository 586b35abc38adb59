"""The coordinator as a function: whatever the order of reports, each thing happens once."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from helpers.coordinated import (
    END,
    FIRST,
    NOW_S,
    SOURCE,
    file,
    iteration_report,
    of_type,
    ready,
    save_report,
    small_rules,
    worker,
)
from helpers.jobs import NUM_LAYERS, shaped_plan, template
from planaria.coordinator.commands import (
    Command,
    DecisionRecorded,
    Discard,
    End,
    MembersRecorded,
    Notify,
    Publish,
    Published,
    RecordDecision,
    RecordMembers,
    Tell,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.start import first_step
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event, step
from planaria.core.kinds import Ending
from planaria.core.messages import (
    IterationDone,
    LayersSaved,
    NodeLost,
    SaveFailed,
    StartEpoch,
    StopRequested,
    WorkerFailed,
)
from planaria.core.plan import Pipeline, plain_plan
from planaria.core.records import Committed, Running, Starting

EPOCH = 4
SAVE_EVERY = 2
PLAN = replace(shaped_plan((3, 1), 6), epoch=EPOCH)  # Rank 3 holds all and owns nothing.
RULES = small_rules()
RECORDED: tuple[Event, ...] = (MembersRecorded(EPOCH), DecisionRecorded(EPOCH))


def report(rank: int, iteration: int, *, ends: bool = False, epoch: int = EPOCH) -> IterationDone:
    return iteration_report(rank, iteration, epoch=epoch, ends=ends)


def owned(rank: int, iteration: int, epoch: int = EPOCH) -> LayersSaved:
    """The rank has written the layers that it owns."""
    layers = [layer for layer in range(NUM_LAYERS) if PLAN.holders(layer)[0] == rank]
    return save_report(rank, iteration, epoch=epoch, layers=layers)


def failed(rank: int, iteration: int, epoch: int = EPOCH) -> SaveFailed:
    return SaveFailed(rank=rank, epoch=epoch, iteration=iteration, reason="disk full")


def begin_state() -> JobState:
    return first_step(RULES, PLAN, term=0, predicted_s=0.5)[0]


def after(state: JobState, events: Iterable[Event]) -> tuple[JobState, list[Command]]:
    """What events lead to, when every manifest that is asked for is created at once."""
    commands: list[Command] = []
    waiting = list(events)
    while waiting:
        state, more = step(RULES, state, waiting.pop(0), NOW_S)
        commands += more
        waiting[:0] = [Published(c.iteration, c.epoch) for c in more if isinstance(c, Publish)]
    return state, commands


HELD: tuple[Event, ...] = (
    *RECORDED,
    *map(worker, PLAN.ranks),
    *(ready(rank, EPOCH) for rank in PLAN.ranks),
)


def training() -> JobState:
    """Every rank has reported and holds its layers."""
    return after(begin_state(), HELD)[0]


def all_done(iteration: int, *, ends: bool = False) -> list[Event]:
    return [report(rank, iteration, ends=ends) for rank in PLAN.ranks]


def all_saved(iteration: int) -> list[Event]:
    return [owned(rank, iteration) for rank in PLAN.ranks]


def words_of(rank: int, end: int) -> list[Event]:
    """All that a rank says in a run that ends before iteration `end`."""
    words: list[Event] = [worker(rank), ready(rank, EPOCH)]
    for iteration in range(FIRST, end):
        ends = iteration + 1 == end
        words.append(report(rank, iteration, ends=ends))
        if ends or (iteration + 1) % SAVE_EVERY == 0:
            words.append(owned(rank, iteration + 1))
    return words


NOISE: tuple[Event, ...] = (
    ready(0, EPOCH - 1),
    ready(7, EPOCH),
    worker(7),
    *(report(rank, FIRST, ends=True, epoch=EPOCH - 1) for rank in PLAN.ranks),
    report(7, FIRST, ends=True),
    *(owned(rank, END, epoch=EPOCH - 1) for rank in PLAN.ranks),
    failed(0, END, epoch=EPOCH + 1),
    NodeLost(node=7, reason="closed"),
    MembersRecorded(EPOCH - 1),
    DecisionRecorded(EPOCH - 1),
)


def arrivals(seed: int) -> list[Event]:
    """The words of all ranks and of the store in any order of arrival that keeps each one's own
    order, some of them twice or again later, between words that belong to nothing here."""
    rng = random.Random(seed)
    end = rng.choice((END, END - 2))
    left = {rank: words_of(rank, end) for rank in PLAN.ranks}
    left[-1] = list(RECORDED)
    events: list[Event] = []
    while left:
        kind = rng.randrange(6)
        if kind == 0 and events:
            events.append(rng.choice(events))
        elif kind == 1:
            events.append(rng.choice(NOISE))
        else:
            who = rng.choice(sorted(left))
            events.append(left[who].pop(0))
            left = {who: words for who, words in left.items() if words}
    return events


@settings(max_examples=300)
@given(st.integers(0, 1 << 32))
def test_each_thing_happens_once_and_in_order(seed: int) -> None:
    """Starts once, runs once, commits every iteration, publishes every save, ends: whoever is
    first, whatever comes twice, of another epoch or of a rank without work."""
    state, events = begin_state(), arrivals(seed)
    is_stopped = not any(isinstance(e, IterationDone) and e.iteration == END - 1 for e in events)
    state = replace(state, stop=replace(state.stop, is_requested=is_stopped))
    state, commands = after(state, events)

    committed = of_type(commands, Committed)
    end = FIRST + len(committed)
    assert end == (END - 2 if is_stopped else END)
    others = [c.message if isinstance(c, Tell | Notify) else c for c in commands]
    often = Committed | Publish | StopRequested
    once = [type(one) for one in others if not isinstance(one, often)]
    assert once == [Starting, StartEpoch, Running, End]
    assert commands[-1] == End(Ending.STOPPED if is_stopped else Ending.FINISHED)
    assert [c.iteration for c in committed] == list(range(FIRST, end))
    for one in committed:
        assert [told.rank for told in one.reports] == list(PLAN.ranks)
        assert {told.iteration for told in one.reports} == {one.iteration}
        assert (one.loss, one.ends) == (float(one.iteration), one.iteration + 1 == end)
    expected = sorted({i for i in range(FIRST + 1, end + 1) if i % SAVE_EVERY == 0} | {end})
    published = of_type(commands, Publish)
    assert [(c.iteration, c.epoch) for c in published] == [(i, EPOCH) for i in expected]
    files = tuple(file(layer) for layer in range(NUM_LAYERS))
    assert all(c.files == files for c in published)
    assert state.phase is Phase.ENDED
    assert (state.commits.reports, state.saves.files) == ({}, {})


EVENTS: tuple[Event, ...] = (
    *RECORDED,
    worker(0),
    ready(0, EPOCH),
    report(0, FIRST),
    owned(0, FIRST + 2),
    failed(0, FIRST + 2),
    StopRequested(),
    *NOISE,
)


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_one_rank_alone_never_moves_the_job(events: list[Event]) -> None:
    """Whatever one of four ranks says, how often and in which order."""
    state, commands = after(begin_state(), [*RECORDED, *events])

    assert state.phase is Phase.JOINING
    assert not of_type(commands, Running)
    assert not of_type(commands, Committed)
    assert not of_type(commands, Publish)
    assert not of_type(commands, End)


@given(st.integers(0, 1 << 32))
def test_nobody_is_told_of_a_job_that_is_not_on_record(seed: int) -> None:
    """A coordinator that starts after this one would not know what the ranks are doing."""
    events = [event for event in arrivals(seed) if not isinstance(event, DecisionRecorded)]
    state, commands = after(begin_state(), events)

    assert state.phase is Phase.DECIDING
    assert not of_type(commands, StartEpoch)
    assert not of_type(commands, Committed)


def test_a_job_begins_with_its_records() -> None:
    """Members, and where to go on with which plan; addresses are not known yet."""
    _, commands = first_step(RULES, PLAN, term=2, predicted_s=0.5)

    members, decision = commands
    assert isinstance(members, RecordMembers)
    assert (members.members.epoch, members.members.term) == (EPOCH, 2)
    assert members.members.nodes == (0, 1, 2, 3)
    assert isinstance(decision, RecordDecision)
    assert (decision.outcome.epoch, decision.outcome.iteration) == (EPOCH, FIRST)
    order = decision.decision.order
    assert isinstance(order, StartEpoch)
    assert (order.plan, order.iteration, order.addresses) == (PLAN, FIRST, {})
    assert decision.decision.predicted_s == 0.5


def test_the_epoch_starts_with_every_workers_address() -> None:
    """The order holds the plan, where to go on from, and where each rank listens."""
    events = [*RECORDED, *map(worker, (2, 0, 7, 3, 1))]
    _, commands = after(begin_state(), events)

    start = StartEpoch(
        epoch=EPOCH,
        plan=PLAN,
        addresses={rank: ("h", rank) for rank in PLAN.ranks},
        iteration=FIRST,
        source=SOURCE,
    )
    assert [c.message for c in commands if isinstance(c, Tell)] == [start]


def test_the_ranks_of_all_nodes_are_listed_once_while_their_workers_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were listed at each report: the work of a restart grew with the square of the ranks."""
    num_nodes, per_node, num_listed = 64, 8, 0
    of_node = replace(template(per_node), num_nodes=1)
    pipelines = tuple(Pipeline(of_node, (node,)) for node in range(num_nodes))
    plan = replace(plain_plan(0, pipelines, (1,) * num_nodes), epoch=EPOCH)
    workers = [structs.replace(worker(rank), node=rank // per_node) for rank in plan.ranks]
    ranks_of = JobState.ranks_of

    def counted(state: JobState, nodes: Iterable[int]) -> tuple[int, ...]:
        nonlocal num_listed
        ranks = ranks_of(state, nodes)
        num_listed += len(ranks)
        return ranks

    monkeypatch.setattr(JobState, "ranks_of", counted)
    state = first_step(RULES, plan, term=0, predicted_s=0.5)[0]
    _, commands = after(state, [*RECORDED, *workers])

    assert len(of_type(commands, StartEpoch)) == 1
    assert num_listed <= 2 * num_nodes * per_node


def test_training_runs_once_every_rank_is_ready() -> None:
    """What the ranks say of their start is gathered: the slowest counts, bytes add up."""
    events: list[Event] = [*RECORDED, *map(worker, PLAN.ranks)]
    for rank in PLAN.ranks:
        times = {"regroup_s": 0.1 * rank, "transfer_s": 0.5 - 0.1 * rank}
        events.append(structs.replace(ready(rank, EPOCH), received_bytes=10 * rank, **times))
    state, commands = after(begin_state(), events)

    (running,) = of_type(commands, Running)
    assert state.phase is Phase.TRAINING
    assert (running.epoch, running.plan, running.now_s) == (EPOCH, PLAN, NOW_S)
    assert running.workers == {rank: worker(rank) for rank in PLAN.ranks}
    assert running.materialised == {rank: rank + 1 for rank in PLAN.ranks}
    assert running.received_bytes == 60
    assert (running.regroup_s, running.transfer_s) == pytest.approx((0.3, 0.5))
    assert running.predicted_s == 0.5  # Of a run that a new head takes up, it knows no other.


def test_a_stop_before_the_start_is_told_after_it() -> None:
    """Nodes that connected after Ctrl-C have not heard of it and would train to the end."""
    _, commands = after(begin_state(), [StopRequested(), *RECORDED, *map(worker, PLAN.ranks)])

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
    assert commands[-1] == End(Ending.STOPPED)


def test_a_stop_at_the_last_iteration_changes_nothing() -> None:
    """The job is as complete as without it."""
    events: list[Event] = [StopRequested()]
    for iteration in range(FIRST, END):
        events += all_done(iteration, ends=iteration + 1 == END)
    _, commands = after(training(), [*events, *all_saved(END)])

    assert commands[-1] == End(Ending.FINISHED)


def test_a_save_may_be_complete_before_its_iteration_is_committed() -> None:
    """The fast ranks' files and the slow rank's report travel apart."""
    _, commands = after(training(), [*all_saved(FIRST + 1), *all_done(FIRST, ends=True)])

    assert [type(c) for c in commands] == [Publish, type(commands[1]), End]
    assert len(of_type(commands, Committed)) == 1


def test_a_job_ends_only_when_its_manifest_exists() -> None:
    """All files are there, but nobody would find them."""
    state, commands = training(), []
    for event in (*all_done(FIRST, ends=True), *all_saved(FIRST + 1)):
        state, more = step(RULES, state, event, NOW_S)
        commands += of_type(more, Publish)
    assert state.phase is Phase.SAVING
    assert len(commands) == 1

    state, _ = step(RULES, state, Published(FIRST + 1, EPOCH), NOW_S)
    assert state.phase is Phase.ENDED


@pytest.mark.parametrize("early", [True, False], ids=["before the commit", "after it"])
@pytest.mark.parametrize("end", [END, END - 2], ids=["at the end", "cut short"])
def test_a_job_whose_last_save_failed_ends_unsaved(end: int, early: bool) -> None:
    """It must not wait for files that will never come, and its last iteration still counts."""
    events: list[Event] = []
    for iteration in range(FIRST, end):
        events += all_done(iteration, ends=iteration + 1 == end)
    failures: list[Event] = [owned(1, end), failed(0, end)]
    events = failures + events if early else events + failures
    state, commands = after(training(), events)

    assert len(of_type(commands, Committed)) == end - FIRST
    assert of_type(commands, Discard) == [Discard(end, EPOCH, "disk full")]
    assert commands[-1] == End(Ending.UNSAVED, "disk full")
    assert state.phase is Phase.ENDED


def test_training_goes_on_after_a_save_that_failed() -> None:
    """It is discarded, also where other ranks write their part later; the next one counts."""
    save = FIRST + 2
    events: list[Event] = [owned(0, save), failed(1, save), owned(2, save), owned(1, save)]
    state, commands = after(training(), events)

    late = Discard(save, EPOCH, "")
    assert commands == [Discard(save, EPOCH, "disk full"), late, late]
    assert state.saves.files == {}
    _, commands = after(state, all_saved(FIRST + 4))
    assert [type(command) for command in commands] == [Publish]


def test_a_slow_save_is_published_although_the_next_has_begun() -> None:
    """One rank is done with the next save before another has written this one."""
    late = [owned(rank, iteration) for iteration in (FIRST + 2, FIRST + 4) for rank in (1, 2)]
    events = [owned(0, FIRST + 2), owned(0, FIRST + 4), *late]
    _, commands = after(training(), events)

    assert [c.iteration for c in of_type(commands, Publish)] == [FIRST + 2, FIRST + 4]


def test_a_published_save_stays_published() -> None:
    """Whoever says afterwards that it failed is wrong: it would be removed from under a reader."""
    state, _ = after(training(), all_saved(FIRST + 2))

    assert step(RULES, state, failed(1, FIRST + 2), NOW_S) == (state, ())


PHASES: dict[Phase, list[Event]] = {
    Phase.DECIDING: [worker(0)],
    Phase.JOINING: [*RECORDED, worker(0)],
    Phase.STARTING: [*RECORDED, *map(worker, PLAN.ranks), ready(1, EPOCH)],
    Phase.TRAINING: [*HELD, report(0, FIRST)],
    Phase.SAVING: [*HELD, *all_done(FIRST, ends=True), owned(0, FIRST + 1)],
}
RAISED = WorkerFailed(node=1, rank=1, traceback="the user's traceback")


@pytest.mark.parametrize("phase", [Phase.DECIDING, Phase.JOINING, Phase.STARTING])
def test_what_the_jobs_code_raises_before_it_has_trained_ends_it_at_once(phase: Phase) -> None:
    """There is nothing to save, and what follows (other workers fail, nodes leave) is no news."""
    state, _ = after(begin_state(), PHASES[phase])
    assert state.phase is phase

    state, commands = after(state, [RAISED])
    assert commands == [End(Ending.FAILED, "the code in a worker raised", RAISED)]
    lost = NodeLost(node=2, reason="closed")
    for other in (*EVENTS, RAISED, lost):
        assert step(RULES, state, other, NOW_S) == (state, ())
