"""Crashes during the last save of a job that ends."""

from typing import TypeVar

import pytest
from msgspec import structs

from helpers.coordinated import (
    FIRST,
    after,
    iteration_report,
    of_type,
    save_report,
    small_rules,
    stop_report,
    training_of_four_ranks,
    worker_exit,
    worker_failure,
    worker_of_four,
)
from helpers.fake_cluster import FakeCluster
from helpers.jobs import shaped_plan
from planaria.coordinator.commands import (
    Command,
    DecisionRecorded,
    End,
    Evict,
    MembersRecorded,
    MustEnd,
    Published,
    RecordDecision,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.state import Crash, JobState, Phase
from planaria.coordinator.step import Event
from planaria.core.kinds import Ending
from planaria.core.messages import Abort, Raised, SaveLayers, WorkerExited, WorkerFailed
from planaria.core.records import Warned

RULES = small_rules(n0=1, when_below="stop")
GPU_LOST = Raised(error="RuntimeError: CUDA error", first_layer=0, end_layer=1)


Crashed = TypeVar("Crashed", WorkerExited, WorkerFailed)


def on_node_1(crash: Crashed) -> Crashed:
    return structs.replace(crash, node=1)


NEW_WORKER_CRASHES = [
    on_node_1(worker_failure(4, GPU_LOST, epoch=-1, pid=90)),
    on_node_1(worker_failure(4, GPU_LOST, epoch=1, pid=90)),
    on_node_1(worker_exit(4, pid=90)),
    on_node_1(worker_exit(4, pid=90, stalled=True)),
]


def answers(state: JobState, *, without: int) -> list[Event]:
    """All ranks hold what the plan gives them, but for one that holds nothing."""
    held = {rank: tuple(layers) for rank, layers in state.plan.layers_by_rank.items()}
    held[without] = ()
    return [
        stop_report(rank, state.epoch, layers=layers, age=FIRST + 1, last=FIRST)
        for rank, layers in held.items()
    ]


def until_decided(state: JobState) -> JobState:
    """A job that must end has lost the worker of rank 4, and has decided to save its layers."""
    exited = on_node_1(worker_exit(4))
    events: list[Event] = [MustEnd("the disk is full"), exited, worker_of_four(4, pid=90)]
    state, _ = after(state, events, RULES)
    state, _ = after(state, [MembersRecorded(state.epoch)], RULES)
    state, _ = after(state, answers(state, without=4), RULES)
    assert state.phase is Phase.DECIDING
    return state


def saved(commands: list[Command], epoch: int) -> list[Event]:
    """All that the ranks and the disk say of the last save."""
    (order,) = of_type(commands, SaveLayers)
    reports: list[Event] = [
        save_report(rank, order.iteration, epoch=epoch, layers=layers)
        for rank, layers in order.layers.items()
    ]
    return [*reports, Published(order.iteration, epoch)]


@pytest.mark.parametrize("crash", NEW_WORKER_CRASHES)
@pytest.mark.parametrize("is_told", [False, True])
def test_a_crash_of_a_rank_that_writes_nothing_does_not_disturb_the_last_save(
    crash: WorkerFailed | WorkerExited, *, is_told: bool
) -> None:
    """The save began again in another epoch."""
    state = until_decided(training_of_four_ranks(RULES))
    events: list[Event] = [DecisionRecorded(1), crash] if is_told else [crash, DecisionRecorded(1)]
    state, commands = after(state, events, RULES)
    assert (state.phase, state.epoch) == (Phase.SAVING, 1)
    (warning,) = of_type(commands, Warned)
    assert warning.text.endswith("; the last save needs nothing of that rank")
    assert not of_type(after(state, [crash], RULES)[1], Warned)  # Its agent repeats it.
    state, commands = after(state, saved(commands, 1), RULES)

    (end,) = of_type(commands, End)
    assert end == End(Ending.LOST, "the disk is full")


def test_a_rank_that_raises_in_the_last_save_after_training_makes_way_at_once() -> None:
    """Its device is broken, so it would only raise once more when it is asked what it holds."""
    state = training_of_four_ranks(RULES)
    reports = [iteration_report(rank, FIRST, epoch=0, ends=True) for rank in range(8)]
    state, _ = after(state, reports, RULES)
    assert state.phase is Phase.SAVING
    raised = structs.replace(worker_failure(1, GPU_LOST, epoch=0), node=0)
    _, commands = after(state, [raised, MembersRecorded(1)], RULES)

    (abort,) = of_type(commands, Abort)
    assert abort.replaced == {1: raised.pid}


def test_a_rank_that_still_has_a_step_to_take_counts_for_nobody_in_the_last_save() -> None:
    """Its optimizer step may raise, and then the rank that has made way was the only holder."""
    state = until_decided(training_of_four_ranks(RULES))
    assert state.facts.holding == set(range(8)) - {4}
    state = training_of_four_ranks(RULES)
    exited = on_node_1(worker_exit(4))
    state, _ = after(state, [MustEnd("the disk is full"), exited, MembersRecorded(1)], RULES)
    told = answers(state, without=4)
    layers = tuple(state.plan.layers_by_rank[5])
    told[5] = stop_report(5, 1, layers=layers, age=FIRST, complete=True, last=FIRST)
    state, _ = after(state, told, RULES)

    assert state.phase is Phase.DECIDING
    assert state.facts.holding == set(range(8)) - {4, 5}


@pytest.mark.parametrize("has_failed", [False, True])
def test_crashes_that_the_last_save_went_on_without_count_against_nobody(
    *, has_failed: bool
) -> None:
    """The first crash of another rank of that node ended the job as failed, unsaved."""
    state = training_of_four_ranks(RULES)
    events: list[Event] = [iteration_report(0, FIRST, epoch=0)]
    if has_failed:
        failure = worker_failure(1, GPU_LOST, epoch=0, blame="job")
        events.append(structs.replace(failure, node=0))
    state = until_decided(after(state, events, RULES)[0])
    kills: list[Event] = [on_node_1(worker_exit(4, pid=pid)) for pid in range(90, 99)]
    epoch = state.epoch
    state, commands = after(state, [*kills, DecisionRecorded(epoch)], RULES)
    assert state.phase is Phase.SAVING
    assert len(of_type(commands, Warned)) == 1  # New workers may end at once, without a pause.
    state, commands = after(state, [on_node_1(worker_exit(5))], RULES)

    assert not of_type(commands, End)
    assert (state.epoch, state.nodes) == (epoch + 1, (0, 1))
    assert (state.stop.failure is not None) == has_failed


def test_what_a_worker_raised_is_over_once_its_successor_is_there() -> None:
    """Its agent repeats it on a new connection. The successor was taken for the worker that has to
    make way, and a job that went on waited for ever for one more."""
    state = until_decided(training_of_four_ranks(RULES))
    raised = on_node_1(worker_failure(4, GPU_LOST, epoch=1, pid=90))
    events: list[Event] = [DecisionRecorded(1), raised, on_node_1(worker_exit(4, pid=90))]
    state, _ = after(state, [*events, worker_of_four(4, pid=91)], RULES)
    state = replace(state, troubles=replace(state.troubles, crashes=()))
    again, commands = after(state, [raised], RULES)

    assert not commands
    assert again == state


@pytest.mark.parametrize("crash", NEW_WORKER_CRASHES)
def test_a_job_with_nothing_to_save_ends_though_a_worker_crashes(
    crash: WorkerFailed | WorkerExited,
) -> None:
    """All is on disk already."""
    state = training_of_four_ranks(RULES)
    state = replace(state, saves=replace(state.saves, versions=((FIRST + 1, "a save"),)))
    state, commands = after(until_decided(state), [crash, DecisionRecorded(1)], RULES)

    (order,) = of_type(commands, SaveLayers)
    assert not order.layers
    assert of_type(commands, End) == [End(Ending.LOST, "the disk is full")]


def test_a_failed_job_is_saved_though_the_error_comes_again_in_a_rank_that_writes_nothing() -> None:
    """Its new worker ran the same code, and the job ended unsaved."""
    state = training_of_four_ranks(RULES)
    failure = structs.replace(worker_failure(1, GPU_LOST, epoch=0, blame="job"), node=0)
    events: list[Event] = [iteration_report(0, FIRST, epoch=0), on_node_1(worker_exit(4))]
    events += [worker_of_four(4, pid=90), failure, MembersRecorded(1)]
    state, _ = after(state, events, RULES)
    state, _ = after(state, answers(state, without=4), RULES)
    again: list[Event] = [
        on_node_1(worker_failure(4, GPU_LOST, epoch=epoch, pid=90, blame="job"))
        for epoch in (-1, 1)
    ]
    state, commands = after(state, [again[0], DecisionRecorded(1), again[1]], RULES)
    assert state.phase is Phase.SAVING
    state, commands = after(state, saved(commands, 1), RULES)

    (end,) = of_type(commands, End)
    assert end.ending is Ending.FAILED
    assert "not saved" not in end.reason


def test_a_mistake_that_a_new_worker_makes_fails_a_job_that_would_wait_for_machines() -> None:
    """The rank has no worker from then on, so that the job could not go on with a machine that
    comes, and hung. A job that must end anyway is not disturbed."""
    waiting = replace(RULES, n0=3, wait_s=600.0)
    state = training_of_four_ranks(waiting)
    exited = on_node_1(worker_exit(4))
    events: list[Event] = [exited, worker_of_four(4, pid=90), MembersRecorded(1)]
    state, _ = after(state, events, waiting)
    state, commands = after(state, answers(state, without=4), waiting)
    assert of_type(commands, RecordDecision)[0].decision.ending == Ending.LOST
    mistake = on_node_1(worker_failure(4, GPU_LOST, epoch=-1, pid=91, blame="job"))
    failed, _ = after(state, [DecisionRecorded(1), mistake], waiting)
    assert failed.stop.failure is not None
    ending = replace(state, stop=replace(state.stop, must_end="the disk is full"))
    saving, _ = after(ending, [DecisionRecorded(1), mistake], waiting)

    assert saving.stop.failure is None
    assert (saving.phase, saving.epoch) == (Phase.SAVING, 1)


def test_of_two_ranks_that_have_crashed_the_one_writes_that_did_so_less_often() -> None:
    """The other one was asked again and again if both had."""
    state = training_of_four_ranks(RULES)
    crashes = tuple(Crash(1, rank, pid, -1, GPU_LOST) for rank, pid in ((4, 9), (0, 10), (0, 11)))
    state = replace(state, troubles=replace(state.troubles, crashes=crashes))
    exited = structs.replace(worker_exit(1), node=0)
    events: list[Event] = [MustEnd("the disk is full"), exited, worker_of_four(1, pid=90)]
    state, _ = after(state, [*events, MembersRecorded(1)], RULES)
    _, commands = after(state, answers(state, without=1), RULES)

    (record,) = of_type(commands, RecordDecision)
    assert isinstance(record.decision.order, SaveLayers)
    assert 0 not in record.decision.order.layers
    assert record.decision.order.layers[4] == tuple(state.plan.layers_by_rank[4])


@pytest.mark.parametrize("has_failed", [False, True])
def test_ranks_that_have_crashed_write_only_what_no_other_rank_holds(*, has_failed: bool) -> None:
    """One without memory raises whenever it writes, and holds all when it is asked. After the third
    time a failed job ended unsaved."""
    state = training_of_four_ranks(RULES)
    events: list[Event] = [iteration_report(0, FIRST, epoch=0), MustEnd("the disk is full")]
    if has_failed:
        failure = worker_failure(1, GPU_LOST, epoch=0, blame="job")
        events.append(structs.replace(failure, node=0))
    events += [on_node_1(worker_failure(rank, GPU_LOST, epoch=0)) for rank in (4, 5)]
    state, _ = after(state, events, RULES)
    epoch = state.epoch
    state, _ = after(state, [MembersRecorded(epoch)], RULES)
    # Rank 1 holds nothing, so that rank 5 alone has its layers.
    decided = [*answers(state, without=1), DecisionRecorded(epoch)]
    ready = [worker_of_four(4, pid=90), worker_of_four(5, pid=91)]
    state, commands = after(state, [*decided, *ready], RULES)

    (order,) = of_type(commands, SaveLayers)
    assert order.layers[5] == tuple(state.plan.layers_by_rank[5])
    assert 4 not in order.layers
    assert {layer for layers in order.layers.values() for layer in layers} == set(
        range(RULES.num_layers)
    )


def test_a_failed_job_is_saved_by_others_if_new_workers_of_a_rank_end_at_once() -> None:
    """The third of them ended the job, unsaved."""
    state = training_of_four_ranks(RULES)
    failure = structs.replace(worker_failure(1, GPU_LOST, epoch=0, blame="job"), node=0)
    events: list[Event] = [iteration_report(0, FIRST, epoch=0), failure]
    events += [on_node_1(worker_exit(4, pid=pid)) for pid in (54, 91, 92)]
    state, commands = after(state, events, RULES)
    assert not of_type(commands, End)
    epoch = state.epoch
    told = answers(state, without=4)
    state, commands = after(state, [MembersRecorded(epoch), *told[:4], *told[5:]], RULES)
    assert state.phase is Phase.DECIDING
    state, commands = after(state, [DecisionRecorded(epoch)], RULES)
    state, commands = after(state, saved(commands, epoch), RULES)

    (end,) = of_type(commands, End)
    assert end.ending is Ending.FAILED
    assert "not saved" not in end.reason


def test_an_unfit_machine_stays_for_its_sound_workers_if_another_one_crashes_in_a_save() -> None:
    """The new worker of rank 1 holds nothing, so that rank 5 alone has its layers. Rank 4 wrote
    some of what rank 0 holds, too. When it crashed, the node left, and nothing was saved."""
    state = training_of_four_ranks(RULES)
    crashes = tuple(Crash(1, 4, pid, -1, Raised(error="SIGKILL"), "hot") for pid in (10, 11))
    state = replace(state, troubles=replace(state.troubles, crashes=crashes))
    exits = [worker_exit(1), worker_exit(4)]
    events: list[Event] = [structs.replace(word, node=word.rank // 4) for word in exits]
    events += [worker_of_four(1, pid=90), worker_of_four(4, pid=91)]
    state, _ = after(state, events, RULES)
    assert state.stop.must_end
    epoch = state.epoch
    state, _ = after(state, [MembersRecorded(epoch)], RULES)
    # The copies of the agent on node 1 gave rank 4 its layers again.
    decided = [*answers(state, without=1), DecisionRecorded(epoch)]
    state, commands = after(state, decided, RULES)
    state, more = after(state, [on_node_1(worker_exit(4, pid=91))], RULES)

    assert not of_type(more, Evict)
    assert (state.phase, state.epoch, state.nodes) == (Phase.SAVING, epoch, (0, 1))
    state, commands = after(state, saved(commands, epoch), RULES)
    (end,) = of_type(commands, End)
    assert "not saved" not in end.reason


def test_a_failed_job_that_loses_its_last_node_has_failed() -> None:
    """It ended as lost, so whoever starts lost jobs again ran the same mistake again."""
    made = small_rules(n0=1)
    cluster = FakeCluster(made, shaped_plan((1,), 6))
    cluster.begin()
    cluster.train(FIRST)
    cluster.is_saving_slow = True
    cluster.fail(0, Raised(error="ValueError"), blame="job")
    assert cluster.state.phase is Phase.SAVING
    cluster.lose(0)

    (end,) = of_type(cluster.commands, End)
    reason = "no node is left; what was not saved yet is lost"
    assert (end.ending, end.reason) == (Ending.FAILED, reason)
    assert end.failure is not None
