"""Too few would stay after a notice: the job stops at the next commit, if that is still so then."""

import pytest
from msgspec import structs

from helpers.coordinated import (
    END,
    FIRST,
    Survivors,
    after,
    iteration_report,
    of_type,
    save_failure,
    save_report,
    small_rules,
    stop_report,
    training_of_four_ranks,
    worker_exit,
    worker_failure,
    worker_of_four,
)
from helpers.fake_cluster import FakeCluster
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.commands import (
    DecisionRecorded,
    End,
    Evict,
    MembersRecorded,
    MustEnd,
    RecordDecision,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.leadership import progress_of
from planaria.coordinator.state import Crash, Phase
from planaria.coordinator.step import Event
from planaria.core.kinds import Ending
from planaria.core.messages import (
    Acknowledged,
    NoticeTaken,
    Raised,
    SaveLayers,
    StopRequested,
    WorkerFailed,
)
from planaria.core.plan import Plan
from planaria.core.records import Committed, Decision, Progress, Warned
from planaria.protocol.agent_state import on_coordinator_message


def rules(*, grant_s: float = 0.0, target_loss: float = 0.0) -> Rules:
    """Two nodes hold the model."""
    made = small_rules(n0=2, failures_tolerated=0, policy=Survivors())
    cluster = replace(made.job.cluster, grant_s=grant_s)
    target = replace(made.job.training, target_loss=target_loss)
    return replace(made, job=replace(made.job, cluster=cluster, training=target))


def training(made: Rules) -> FakeCluster:
    cluster = FakeCluster(made, shaped_plan((1, 1), 6))
    cluster.begin()
    cluster.train(FIRST)
    return cluster


def test_no_job_stops_for_want_of_nodes_that_have_come() -> None:
    """Too few would stay after a notice; before the commit at which all were to stop another node
    came and that one was lost: there are enough, and the job goes on to its end."""
    cluster = training(rules())
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    assert cluster.state.stop.shortage
    cluster.join(2)
    cluster.lose(1)
    for iteration in range(FIRST + 1, END):
        cluster.train(iteration)

    assert cluster.state.nodes == (0, 2)
    assert not cluster.state.stop.shortage
    assert [one.iteration for one in of_type(cluster.commands, Committed) if one.ends] == [END - 1]


GPU_LOST = Raised(error="RuntimeError: CUDA error", first_layer=0, end_layer=1)
UNFIT = NoticeTaken(node=1, rank=1, after_s=30.0, reason="GPU 0 does not answer")


@pytest.mark.parametrize("is_needed", [False, True])
def test_an_unfit_machine_is_told_to_the_user_and_its_crashes_are_not_the_jobs(
    *, is_needed: bool
) -> None:
    """The same error on a second node would end the job as failed."""
    cluster = training(rules())
    if not is_needed:
        cluster.join(2)
    crashes = tuple(Crash(1, 1, pid, 0, GPU_LOST) for pid in (10, 11))
    state = cluster.state
    cluster.state = replace(state, troubles=replace(state.troubles, crashes=crashes))
    cluster.hear(UNFIT, UNFIT)
    cluster.fail(0, GPU_LOST)

    warnings = [one.text for one in of_type(cluster.commands, Warned)]
    told = "node 1 leaves the job, because its machine is unfit: GPU 0 does not answer"
    assert warnings.count(told) == 1
    members = cluster.state.membership
    assert (1 in members.leaving, 1 in members.postponed) == (not is_needed, is_needed)
    assert cluster.state.stop.failure is None
    assert not of_type(cluster.commands, End)


@pytest.mark.parametrize("is_alike_elsewhere", [False, True])
def test_a_job_that_needs_an_unfit_machine_ends_saved_at_the_third_crash_there(
    *, is_alike_elsewhere: bool
) -> None:
    """Each was forgiven when the machine was examined after it, so epoch followed epoch."""
    cluster = training(rules())
    if is_alike_elsewhere:
        cluster.fail(0, GPU_LOST)
    for _ in range(2):
        cluster.fail(1, GPU_LOST)
        cluster.hear(UNFIT)
        assert not of_type(cluster.commands, SaveLayers)
    cluster.fail(1, GPU_LOST)

    order = of_type(cluster.commands, SaveLayers)[-1]
    assert order.iteration == FIRST + 1
    assert {layer for layers in order.layers.values() for layer in layers} == {*range(NUM_LAYERS)}
    (end,) = of_type(cluster.commands, End)
    assert end.ending is Ending.LOST
    assert "the 3rd time in a row; without that node 1 node is left" in end.reason
    assert end.reason.endswith("its machine is unfit: GPU 0 does not answer")


def saved_layers(cluster: FakeCluster) -> set[int]:
    """The layers of the newest order to save, which only node 0 obeys."""
    order = of_type(cluster.commands, SaveLayers)[-1]
    assert order.iteration == FIRST + 1
    assert set(order.layers) == {0}
    return {*order.layers[0]}


def test_a_job_is_saved_by_others_if_new_workers_of_its_unfit_machine_raise_at_once() -> None:
    """A GPU is gone. The rank was asked for what it held, and its fourth crash ended the job
    unsaved, though the rank held nothing and others held all."""
    cluster = training(rules())
    cluster.fail(1, GPU_LOST)
    cluster.hear(UNFIT)
    cluster.nodes[1].is_alive = False  # Its workers answer nothing.
    for pid in (91, 92, 93):
        cluster.hear(worker_failure(1, GPU_LOST, epoch=-1, pid=pid))

    assert saved_layers(cluster) == {*range(NUM_LAYERS)}
    (end,) = of_type(cluster.commands, End)
    assert end.ending is Ending.LOST
    assert end.reason.endswith("its machine is unfit: GPU 0 does not answer")


@pytest.mark.parametrize("stalled", [False, True])
def test_a_job_is_saved_by_others_if_all_workers_of_its_unfit_machine_end_at_once(
    *, stalled: bool
) -> None:
    """The third time in a row. The end of the second worker ended the job, unsaved."""
    made = rules()
    state = training_of_four_ranks(made)
    raised = Raised(error="stall" if stalled else "SIGKILL")
    crashes = tuple(
        Crash(1, rank, pid, -1, raised, UNFIT.reason) for rank in (4, 5) for pid in (10, 11)
    )
    state = replace(state, troubles=replace(state.troubles, crashes=crashes))
    exits = [
        structs.replace(worker_exit(rank, stalled=stalled, stack="in forward"), node=1)
        for rank in (4, 5)
    ]
    held = {rank: tuple(state.plan.layers_by_rank[rank]) for rank in range(4)}
    answers = [
        stop_report(rank, 1, layers=layers, age=FIRST + 1, last=FIRST)
        for rank, layers in held.items()
    ]
    state, commands = after(state, [*exits, MembersRecorded(1), *answers], made)

    assert not of_type(commands, End)
    (record,) = of_type(commands, RecordDecision)
    assert isinstance(record.decision.order, SaveLayers)
    assert record.decision.order.layers == held
    assert record.decision.ending == Ending.LOST


def test_an_unfit_machine_stays_if_the_only_other_holder_of_a_layer_was_replaced() -> None:
    """Its worker had raised, and a holder on the unfit machine was sound. The new worker counted as
    a holder, so that one left with its node, and nothing was saved."""
    made = small_rules(n0=1, when_below="stop")
    state = training_of_four_ranks(made)
    crashes = tuple(Crash(1, 4, pid, -1, Raised(error="SIGKILL"), UNFIT.reason) for pid in (10, 11))
    state = replace(state, troubles=replace(state.troubles, crashes=crashes))
    raised = structs.replace(worker_failure(1, GPU_LOST, epoch=0), node=0)
    state, _ = after(state, [raised, MembersRecorded(1)], made)
    assert state.troubles.replaced == {1: raised.pid}
    state, commands = after(state, [structs.replace(worker_exit(4), node=1)], made)

    assert not of_type(commands, Evict)
    assert state.nodes == (0, 1)
    assert state.stop.must_end


def test_an_unfit_machine_saves_what_its_sound_workers_hold_though_another_one_raises() -> None:
    """Each new worker of rank 4 raises at its start, and rank 0 holds what that rank had. The node
    left at the fourth time, and with it rank 5, the only holder of its layers."""
    made = small_rules(n0=1, when_below="stop")
    state = training_of_four_ranks(made)
    crashes = (Crash(1, 4, 10, -1, GPU_LOST, UNFIT.reason),)
    state = replace(state, troubles=replace(state.troubles, crashes=crashes))
    exits = [worker_exit(1), worker_exit(4)]
    events: list[Event] = [structs.replace(word, node=word.rank // 4) for word in exits]
    state, _ = after(state, [*events, worker_of_four(1, pid=90)], made)

    def crash(pid: int) -> WorkerFailed:
        return structs.replace(worker_failure(4, GPU_LOST, epoch=-1, pid=pid), node=1)

    state, _ = after(state, [crash(91), crash(92)], made)
    assert state.stop.must_end
    epoch = state.epoch
    held = {rank: tuple(state.plan.layers_by_rank[rank]) for rank in (0, 2, 3, 5, 6, 7)}
    answers = [
        stop_report(rank, epoch, layers=held.get(rank, ()), age=FIRST + 1, last=FIRST)
        for rank in (*held, 1)
    ]
    events = [MembersRecorded(epoch), crash(93), *answers, crash(94), DecisionRecorded(epoch)]
    state, commands = after(state, [*events, crash(95)], made)

    assert state.phase is Phase.SAVING
    assert not of_type(commands, Evict)
    (order,) = of_type(commands, SaveLayers)
    assert 4 not in order.layers
    assert {layer for layers in order.layers.values() for layer in layers} == {*range(NUM_LAYERS)}


def test_a_job_that_must_end_anyway_is_saved_by_others_than_its_unfit_machine() -> None:
    """No save had begun yet, and the third crash ended the job unsaved."""
    cluster = training(rules())
    for _ in range(2):
        cluster.fail(1, GPU_LOST)
        cluster.hear(UNFIT)
    cluster.hear(MustEnd("the disk is full"))
    cluster.fail(1, GPU_LOST)

    assert saved_layers(cluster) == {*range(NUM_LAYERS)}
    (end,) = of_type(cluster.commands, End)
    assert (end.ending, end.reason) == (Ending.LOST, "the disk is full")


@pytest.mark.parametrize(
    ("plan", "unsaved"),
    [
        (shaped_plan((2,), 6), "no live node holds layer 5, so nothing was saved"),
        (shaped_plan((1,), 6), "no node is left"),
    ],
)
def test_a_job_ends_unsaved_if_its_unfit_machine_crashes_in_the_last_save_of_its_layers(
    plan: Plan, unsaved: str
) -> None:
    """Nobody else holds them, so it is asked for them once; it began the save again and again."""
    made, last = rules(), plan.nodes[-1]
    cluster = FakeCluster(replace(made, n0=len(plan.nodes)), plan)
    cluster.begin()
    cluster.train(FIRST)
    cluster.is_saving_slow = True
    crashes = tuple(Crash(last, last, pid, 0, GPU_LOST, UNFIT.reason) for pid in (10, 11))
    state = cluster.state
    cluster.state = replace(state, troubles=replace(state.troubles, crashes=crashes))
    cluster.fail(last, GPU_LOST)
    assert cluster.state.phase is Phase.SAVING
    assert last in of_type(cluster.commands, SaveLayers)[-1].layers
    cluster.fail(last, GPU_LOST)

    (end,) = of_type(cluster.commands, End)
    assert end.ending is Ending.LOST
    assert end.reason.endswith(f"its machine is unfit: GPU 0 does not answer; {unsaved}")


@pytest.mark.parametrize("target_loss", [0.0, 0.001])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_goes_on_if_a_node_comes_during_its_last_save(
    restarts: bool, target_loss: float
) -> None:
    """All have agreed to end, for want of nodes, and one is lost before all layers are saved.

    A coordinator that has no record of why all end knows that nobody else has asked for it, and
    that no loss was low enough.
    """
    cluster = training(rules(target_loss=target_loss))
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    cluster.train(FIRST + 1)
    if restarts:
        cluster.progress = Progress(num_committed=FIRST + 1, ends=False)
        cluster.restart()
    assert cluster.state.phase is Phase.SAVING
    cluster.join(2)
    cluster.lose(1)
    for iteration in range(FIRST + 2, END):
        cluster.train(iteration)

    assert cluster.state.nodes == (0, 2)
    assert of_type(cluster.commands, Committed)[-1].iteration == END - 1
    assert of_type(cluster.commands, End) == []


@pytest.mark.parametrize("is_in_last_save", [False, True])
def test_a_new_coordinator_does_not_ask_again_for_a_stop_that_was_revoked(
    is_in_last_save: bool,
) -> None:
    """The newest commit on record is of the epoch before: it asks for the stop, or is the last."""
    cluster = training(rules())
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    if is_in_last_save:
        cluster.train(FIRST + 1)
        assert cluster.state.phase is Phase.SAVING
    cluster.progress = progress_of(cluster.state, of_type(cluster.commands, Committed)[-1])
    assert cluster.progress.stop_reason
    cluster.join(2)
    cluster.lose(1)
    cluster.restart()
    assert not cluster.state.stop.is_requested
    assert cluster.state.phase is Phase.TRAINING
    for iteration in range(cluster.state.commits.next_iteration, END):
        cluster.train(iteration)

    assert of_type(cluster.commands, Committed)[-1].iteration == END - 1
    assert of_type(cluster.commands, End) == []


def test_a_job_whose_last_save_is_complete_goes_on_with_a_node_that_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too few were left after a loss, and nobody was to be waited for."""
    cluster = training(rules())
    node = cluster.nodes[0]
    obey = node.obey
    monkeypatch.setattr(node, "obey", lambda o: [] if isinstance(o, SaveLayers) else obey(o))
    cluster.lose(1)
    assert cluster.state.phase is Phase.SAVING
    cluster.join(2)
    number = cluster.state.commits.next_iteration
    cluster.hear(save_report(0, number, epoch=1, layers=range(NUM_LAYERS)))
    for iteration in range(number, END):
        cluster.train(iteration)

    assert cluster.state.nodes == (0, 2)
    assert of_type(cluster.commands, Committed)[-1].iteration == END - 1
    assert of_type(cluster.commands, End) == []


def test_the_users_own_stop_stays_where_too_few_nodes_would_have_made_one() -> None:
    cluster = training(rules())
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0), StopRequested())
    cluster.join(2)
    cluster.lose(1)
    assert cluster.state.stop.is_requested
    number = cluster.state.commits.next_iteration
    cluster.train(number)
    cluster.hear(*(save_report(n, number + 1, epoch=1, layers=range(NUM_LAYERS)) for n in (0, 2)))

    (end,) = of_type(cluster.commands, End)
    assert end.ending is Ending.STOPPED


def test_a_machine_may_come_where_a_notice_made_the_job_stop() -> None:
    """Too few are left all at once, so it is waited for, as after any loss."""
    cluster = training(rules(grant_s=60.0))
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    cluster.lose(1)
    assert of_type(cluster.commands, End) == []
    cluster.join(2)

    assert cluster.state.nodes == (0, 2)
    assert cluster.state.phase is Phase.TRAINING


def test_a_new_coordinator_asks_again_for_the_stop_that_a_notice_made() -> None:
    """What it tells ranks to begin takes back that they were asked for one."""
    cluster = training(rules())
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    reason = cluster.state.stop.shortage
    cluster.progress = Progress(num_committed=FIRST + 1, ends=False, stop_reason=reason)
    cluster.restart()

    assert cluster.state.stop.is_requested
    assert all(cluster.nodes[node].stops for node in (0, 1))


def test_a_new_coordinator_knows_that_a_notice_made_the_job_stop() -> None:
    """It awaits the last save, and does not call that the job's end: the exit code says so."""
    cluster = training(rules())
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    reason = cluster.state.stop.shortage
    number = FIRST + 2
    cluster.progress = Progress(num_committed=number, ends=True, stop_reason=reason)
    cluster.restart()
    cluster.hear(save_report(0, number, epoch=0, layers=range(NUM_LAYERS)))

    (end,) = of_type(cluster.commands, End)
    assert (end.ending, end.reason) == (Ending.LOST, reason)


@pytest.mark.parametrize("target_loss", [0.0, 0.001])
def test_a_new_coordinator_without_a_record_of_the_stop_does_not_call_it_finished(
    target_loss: float,
) -> None:
    """That the job may end early is no sign that it has."""
    cluster = training(rules(target_loss=target_loss))
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    cluster.train(FIRST + 1)
    cluster.progress = Progress(num_committed=FIRST + 1, ends=False)
    cluster.restart()
    cluster.hear(save_report(0, FIRST + 2, epoch=0, layers=range(NUM_LAYERS)))

    (end,) = of_type(cluster.commands, End)
    assert (end.ending, end.reason) == (Ending.LOST, "nodes were too few to go on")


@pytest.mark.parametrize("is_early", [False, True])
def test_a_new_head_knows_that_a_stop_was_asked_for(is_early: bool) -> None:
    """Nobody asks it again. It said that nodes were too few, though all were there."""
    cluster = training(rules())
    cluster.hear(StopRequested(is_early=is_early))
    cluster.train(FIRST + 1)
    cluster.progress = progress_of(cluster.state, of_type(cluster.commands, Committed)[-1])
    cluster.is_saving_slow = True
    cluster.restart()
    assert cluster.state.phase is Phase.SAVING
    cluster.hear(save_report(0, FIRST + 2, epoch=0, layers=range(NUM_LAYERS)))

    assert of_type(cluster.commands, End) == [End(Ending.STOPPED)]
    assert cluster.state.stop.is_early == is_early


def test_a_job_that_must_end_stops_at_its_next_commit_saved() -> None:
    """Whatever else is asked for meanwhile; the reason is the one that came first."""
    cluster = training(rules())
    cluster.hear(MustEnd("the disk is full"), StopRequested(), MustEnd("another"))
    assert all(cluster.nodes[node].stops for node in (0, 1))
    cluster.train(FIRST + 1)
    assert cluster.state.phase is Phase.SAVING
    cluster.hear(save_report(0, FIRST + 2, epoch=0, layers=range(NUM_LAYERS)))

    (end,) = of_type(cluster.commands, End)
    assert (end.ending, end.reason) == (Ending.LOST, "the disk is full")


def test_a_job_that_must_end_has_finished_if_that_was_its_last_iteration() -> None:
    cluster = training(rules())
    for iteration in range(FIRST + 1, END):
        cluster.train(iteration)
    cluster.hear(MustEnd("the disk is full"))
    cluster.hear(save_report(0, END, epoch=0, layers=range(NUM_LAYERS)))

    (end,) = of_type(cluster.commands, End)
    assert end.ending is Ending.FINISHED


@pytest.mark.parametrize("word", [NoticeTaken(node=1, rank=1, after_s=30.0), StopRequested()])
def test_a_job_has_finished_if_it_was_to_stop_at_its_last_iteration(word: Event) -> None:
    """It was lost if that was for want of nodes, though all was trained and saved."""
    cluster = training(rules())
    for iteration in range(FIRST + 1, END - 1):
        cluster.train(iteration)
    cluster.hear(word)
    cluster.train(END - 1)
    cluster.hear(save_report(0, END, epoch=0, layers=range(NUM_LAYERS)))

    assert of_type(cluster.commands, End) == [End(Ending.FINISHED)]


@pytest.mark.parametrize(
    "word",
    [NoticeTaken(node=1, rank=1, after_s=30.0), StopRequested(), MustEnd("the disk is full")],
)
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    "why", ["the loss is low", "it is zero", "the loss of held-out data rises"]
)
def test_a_job_has_finished_if_training_ends_where_it_was_to_stop(
    word: Event, restarts: bool, why: str
) -> None:
    """What is trained ends it before its last iteration, also if a coordinator is lost then."""
    is_low = why in ("the loss is low", "it is zero")
    cluster = training(rules(target_loss=FIRST + 1.0 if is_low else 0.0))
    cluster.hear(word)
    for node in (0, 1):
        report = iteration_report(node, FIRST + 1, epoch=0, ends=True)
        loss = 0.0 if why == "it is zero" else report.loss
        report = structs.replace(report, early=not is_low, loss=loss)
        cluster.hear(*cluster.nodes[node].say(report))
    assert cluster.state.phase is Phase.SAVING
    if restarts:
        committed = of_type(cluster.commands, Committed)[-1]
        cluster.progress = progress_of(cluster.state, committed)
        for one in cluster.nodes.values():
            message = Acknowledged(num_committed=FIRST + 2)
            one.agent = on_coordinator_message(one.agent, message).state
        cluster.restart()
    cluster.hear(save_report(0, FIRST + 2, epoch=0, layers=range(NUM_LAYERS)))

    assert of_type(cluster.commands, End) == [End(Ending.FINISHED)]


def test_a_job_that_must_end_is_saved_after_a_loss_and_trains_no_more() -> None:
    """Also where nodes enough are left: no answer is asked for that might fail."""
    cluster = FakeCluster(replace(rules(), n0=1), shaped_plan((1, 1), 6))
    cluster.begin()
    cluster.train(FIRST)
    cluster.hear(MustEnd("the disk is full"))
    cluster.lose(1)

    (end,) = of_type(cluster.commands, End)
    decision = cluster.records[-1]
    assert isinstance(decision, Decision)
    assert isinstance(decision.order, SaveLayers)
    assert decision.order.iteration == FIRST + 1
    assert (end.ending, end.reason) == (Ending.LOST, "the disk is full")


def test_a_job_that_must_end_says_what_is_not_saved() -> None:
    """The disk of the records may be that of the saves."""
    cluster = training(rules())
    cluster.hear(MustEnd("the disk is full"))
    cluster.train(FIRST + 1)
    cluster.hear(save_failure(0, FIRST + 2, epoch=0))

    (end,) = of_type(cluster.commands, End)
    assert end.ending is Ending.LOST
    assert end.reason.startswith("the disk is full; the live layers were not saved: ")
