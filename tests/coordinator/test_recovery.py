"""Losses: who is left, what is written down before whom is told, and when the job has to end."""

from dataclasses import replace
from itertools import count

import pytest

from helpers.coordinated import (
    END,
    FIRST,
    LEASE_S,
    NOW_S,
    SOURCE,
    Survivors,
    iteration_report,
    node_loss,
    of_type,
    ready,
    save_report,
    small_rules,
    stop_report,
    worker,
    worker_exit,
)
from helpers.fake_cluster import FakeCluster
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.commands import (
    Command,
    DecisionRecorded,
    End,
    Evict,
    MembersRecorded,
    Notify,
    Published,
    RecordDecision,
    RecordMembers,
    Tell,
    Tick,
)
from planaria.coordinator.start import first_step
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event, step
from planaria.core.cluster import NodesLost, SavePoint
from planaria.core.findings import FailureHistory
from planaria.core.kinds import Ending
from planaria.core.messages import (
    Abort,
    PeerUnreachable,
    SaveLayers,
    StartEpoch,
    StopRequested,
)
from planaria.core.records import Decided, Forked, Members, Recovering

PLAN = shaped_plan((2, 2), 6)  # Ranks 0 and 2 hold layers 0 to 4, ranks 1 and 3 the others.
TOP_HEAVY = shaped_plan((3, 1), 6)  # Rank 3 holds all, rank 2 the last four.
LOWER, UPPER = range(5), range(5, 10)
NEXT = FIRST + 2  # The next to be committed in a cluster that has trained a while.
RULES = small_rules()


def after(events: tuple[Event, ...]) -> tuple[JobState, list[Command]]:
    state, _ = first_step(RULES, PLAN, term=3, predicted_s=1.0)
    commands: list[Command] = []
    for event in events:
        state, more = step(RULES, state, event, NOW_S)
        commands += more
    return state, commands


def trained(cluster: FakeCluster, num_iterations: int = 2) -> FakeCluster:
    """The cluster once it has trained a while."""
    cluster.begin()
    for iteration in range(FIRST, FIRST + num_iterations):
        cluster.train(iteration)
    assert cluster.state.phase is Phase.TRAINING
    assert cluster.state.commits.next_iteration == FIRST + num_iterations
    return cluster


HELD: tuple[Event, ...] = (
    DecisionRecorded(0),
    *map(worker, PLAN.ranks),
    *(ready(rank, 0) for rank in PLAN.ranks),
)
LAST: tuple[Event, ...] = tuple(
    iteration_report(rank, FIRST, epoch=0, ends=True) for rank in PLAN.ranks
)
ONE_LOST: tuple[Event, ...] = (*HELD, node_loss(3))
ALL_ANSWER: tuple[Event, ...] = (
    MembersRecorded(1),
    stop_report(0, 1, layers=LOWER),
    stop_report(1, 1, layers=UPPER),
    stop_report(2, 1, layers=LOWER),
)
PHASES: dict[str, tuple[Phase, tuple[Event, ...]]] = {
    "deciding first": (Phase.DECIDING, ()),
    "joining": (Phase.JOINING, HELD[:4]),
    "starting": (Phase.STARTING, HELD[:7]),
    "training": (Phase.TRAINING, (*HELD, iteration_report(1, FIRST, epoch=0))),
    "saving": (Phase.SAVING, (*HELD, *LAST, save_report(0, FIRST + 1, epoch=0, layers=LOWER))),
    "recording": (Phase.RECORDING, ONE_LOST),
    "stopping": (Phase.STOPPING, (*ONE_LOST, *ALL_ANSWER[:-1])),
    "deciding": (Phase.DECIDING, (*ONE_LOST, *ALL_ANSWER)),
}
LOSSES: dict[str, tuple[Event, tuple[int, ...]]] = {
    "lost": (node_loss(2), (2,)),
    "crash": (worker_exit(2, status=1), ()),
    "stall": (worker_exit(2, stalled=True, stack="in forward"), ()),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_in_every_phase_leads_to_the_next_epoch(phase: str, kind: str) -> None:
    """It is told of, its node is shut out, and the members are written down before anyone else
    hears of it."""
    (expected, events), (loss, evicted) = PHASES[phase], LOSSES[kind]
    before, _ = after(events)
    assert before.phase is expected
    state, commands = step(RULES, before, loss, NOW_S)

    left = tuple(node for node in before.nodes if node not in evicted)
    assert (state.phase, state.epoch, state.nodes) == (Phase.RECORDING, before.epoch + 1, left)
    notify, *evict, record = commands
    assert isinstance(notify, Notify)
    notice = notify.message
    assert isinstance(notice, Recovering)
    assert (notice.kind, notice.nodes, notice.epoch) == (kind, (2,), state.epoch)
    assert (notice.iteration, notice.lost_s) == (before.commits.next_iteration, NOW_S)
    gone_so_far = tuple(sorted({*before.membership.gone, *evicted}))
    assert evict == ([Evict(evicted)] if evicted else [])
    struck = tuple(sorted({*before.membership.history.struck, 2}))
    history = FailureHistory(
        since_s=NOW_S, weight=1.0, last_s=NOW_S, nodes=len(struck), struck=struck
    )
    assert record == RecordMembers(
        Members(epoch=state.epoch, term=3, nodes=left, gone=gone_so_far, history=history)
    )


@pytest.mark.parametrize("phase", PHASES)
def test_members_are_recorded_before_anyone_is_told(phase: str) -> None:
    """Whatever comes in between, also the record of an epoch before."""
    before, _ = after(PHASES[phase][1])
    epoch = before.epoch + 1
    early: list[Event] = [node_loss(2), *(stop_report(rank, epoch) for rank in before.ranks)]
    state = before
    told: list[Command] = []
    for event in (*early, MembersRecorded(epoch - 1), DecisionRecorded(epoch), Tick()):
        state, more = step(RULES, state, event, NOW_S)
        told += of_type(more, Tell)
    assert told == []

    _, commands = step(RULES, state, MembersRecorded(epoch), NOW_S)
    assert commands[0] == Tell(Abort(epoch=epoch, nodes=state.nodes))


def test_the_decision_is_recorded_before_anyone_is_told() -> None:
    """Once it is, the order goes out at once, with the addresses of all members."""
    state, before = after((*ONE_LOST, *ALL_ANSWER, *map(worker, (0, 1, 2))))
    (record,) = of_type(before, RecordDecision)
    assert before[-1] == record
    state, commands = step(RULES, state, DecisionRecorded(1), NOW_S)

    assert state.phase is Phase.STARTING
    (order,) = of_type(commands, StartEpoch)
    assert order.epoch == record.decision.order.epoch == 1
    assert order.addresses == {rank: ("h", rank) for rank in (0, 1, 2)}


def test_a_new_worker_is_waited_for() -> None:
    """The address of the one that is gone leads nowhere."""
    crash = (*HELD, worker_exit(3, status=1), MembersRecorded(1))
    answers = (stop_report(0, 1, layers=LOWER), stop_report(1, 1, layers=UPPER), stop_report(2, 1))
    state, _ = after((*crash, *answers, stop_report(3, 1), DecisionRecorded(1)))
    assert state.phase is Phase.JOINING

    state, commands = step(RULES, state, worker(3, pid=99), NOW_S)
    assert state.phase is Phase.STARTING
    assert len(of_type(commands, StartEpoch)) == 1


def test_the_end_of_a_worker_that_has_been_replaced_is_no_loss() -> None:
    """Its successor has reported, so this epoch knows nothing of it."""
    state, _ = after((*HELD, worker(3, pid=99)))

    assert step(RULES, state, worker_exit(3), NOW_S) == (state, ())


def test_a_stop_is_told_to_those_who_go_on() -> None:
    """A worker that was forked after the user's request has not heard of it."""
    cluster = trained(FakeCluster(RULES, PLAN))
    cluster.hear(StopRequested())
    cluster.lose(3)

    told = [type(c.message) for c in cluster.commands if isinstance(c, Tell)]
    assert told[-2:] == [StartEpoch, StopRequested]


def test_the_best_of_all_answers_is_taken_and_all_are_told_of() -> None:
    """The fast one of two; a score for each."""
    cluster = trained(FakeCluster(RULES, PLAN))
    cluster.lose(3)

    (notice,) = of_type(cluster.commands, Decided)
    assert [candidate.answer for candidate in notice.candidates] == ["slow", "fast"]
    assert (notice.answer, notice.predicted_s) == ("fast", 1.0)
    scores = {candidate.answer: candidate.score for candidate in notice.candidates}
    assert scores["fast"] > scores["slow"]
    assert cluster.state.plan == notice.plan
    assert cluster.state.phase is Phase.TRAINING


def test_a_policy_is_told_of_lost_nodes_only() -> None:
    """The node of a worker that crashed lives, and holds nothing."""
    policy = Survivors()
    state, _ = first_step(rules := small_rules(policy=policy), PLAN, term=0, predicted_s=1.0)
    answers = [stop_report(0, 1), stop_report(1, 1), stop_report(2, 1), stop_report(3, 1)]
    for fact in (*HELD, worker_exit(3), MembersRecorded(1), *answers):
        state, _ = step(rules, state, fact, NOW_S)

    ((cluster, event),) = policy.seen
    assert [node.node for node in cluster.nodes] == [0, 1, 2, 3]
    assert event == NodesLost((), redone_samples=6, saved=SavePoint(FIRST, SOURCE, 6))


def test_the_job_ends_without_a_save_when_no_live_node_holds_a_layer() -> None:
    """Ranks 1 and 3 held the upper half; what is left is of no use alone."""
    cluster = trained(FakeCluster(replace(RULES, source=""), PLAN))
    cluster.lose(1, 3)

    reason = "no live node holds layer 5, and no copy of it is left"
    assert cluster.commands[-1] == End(Ending.LOST, reason)
    assert not of_type(cluster.commands, SaveLayers)


def test_the_job_ends_when_no_node_is_left() -> None:
    """There is nobody to tell."""
    cluster = trained(FakeCluster(RULES, PLAN))
    cluster.lose(0, 1, 2, 3)

    assert cluster.commands[-1] == End(Ending.LOST, "no node is left")


ENDS: dict[str, tuple[FakeCluster, tuple[int, ...], str]] = {
    "fewer than the n0": (
        FakeCluster(small_rules(), TOP_HEAVY),
        (0, 1, 2),
        "fewer than the n0 = 2",
    ),
    "when_below": (
        FakeCluster(small_rules(when_below="stop"), PLAN),
        (3,),
        'fewer than (f + 1) * n0 = 4, and resilience.when_below = "stop"',
    ),
    "no answer": (
        FakeCluster(small_rules(policy=Survivors(knows_an_answer=False)), PLAN),
        (3,),
        "no policy knows an answer",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_job_that_cannot_go_on_saves_what_is_whole_then_ends(case: str) -> None:
    """Every layer is written by one of its holders, at the age at which all stand."""
    cluster, nodes, reason = ENDS[case]
    trained(cluster).lose(*nodes)

    (order,) = of_type(cluster.commands, SaveLayers)
    assert order.iteration == FIRST + 2
    written = [layer for layers in order.layers.values() for layer in layers]
    assert sorted(written) == list(range(NUM_LAYERS))
    end = cluster.commands[-1]
    assert isinstance(end, End)
    assert end.ending is Ending.LOST
    assert reason in end.reason
    assert cluster.state.saves.newest_iteration == FIRST + 2


def test_the_holders_share_the_last_save() -> None:
    """The one that writes fewest so far takes the next layer; nobody writes what it lacks."""
    cluster = trained(FakeCluster(small_rules(when_below="stop"), PLAN))
    cluster.lose(3)

    (order,) = of_type(cluster.commands, SaveLayers)
    assert order.layers == {0: (0, 2, 4), 1: tuple(UPPER), 2: (1, 3)}


def test_a_job_that_stops_and_cannot_be_saved_says_both() -> None:
    """It ends for want of nodes, and the disk that was full says so."""
    cluster = trained(FakeCluster(small_rules(when_below="stop"), PLAN))
    cluster.nodes[1].is_disk_full = True
    cluster.lose(3)

    end = cluster.commands[-1]
    assert isinstance(end, End)
    assert end.ending is Ending.LOST
    assert "3 nodes are left" in end.reason
    assert "disk full" in end.reason


def test_nothing_is_saved_before_the_first_iteration() -> None:
    """What there is was there before: the seed, given weights, or the checkpoint resumed from."""
    cluster = trained(FakeCluster(small_rules(when_below="stop"), PLAN), num_iterations=0)
    cluster.lose(3)

    assert not of_type(cluster.commands, SaveLayers)
    end = cluster.commands[-1]
    assert isinstance(end, End)
    assert end.ending is Ending.LOST


def test_too_few_nodes_for_f_failures_are_warned_of_and_saved_at_each_step_down() -> None:
    """The job goes on. Only the first step was told and saved: a job that had shrunk further lost
    all that was trained since."""
    cluster = trained(FakeCluster(small_rules(n0=1, failures_tolerated=2), TOP_HEAVY))
    cluster.lose(0)
    cluster.lose(1)
    cluster.lose(2)

    decided = of_type(cluster.commands, Decided)
    notices = [notice.degraded for notice in decided]
    orders = of_type(cluster.commands, StartEpoch)
    assert [notice.is_newly_degraded for notice in decided] == [False, True, True]
    assert notices[0] == ""
    assert "2 nodes are left, fewer than (f + 1) * n0 = 3" in notices[1]
    assert "only f' = 1 failures" in notices[1]
    assert "only f' = 0 failures" in notices[2]
    assert [order.persists for order in orders] == [False, False, True, True]


def test_a_loss_that_leaves_a_job_as_safe_as_it_was_is_no_news() -> None:
    """The standing warning is told with each message, so that status has it; nothing is saved."""
    policy = Survivors(num_idle=2)
    cluster = trained(FakeCluster(small_rules(n0=1, policy=policy), TOP_HEAVY))
    cluster.lose(0)
    cluster.hear(Published(NEXT, epoch=1))
    cluster.train(NEXT)
    policy.num_idle = 1
    cluster.lose(3)  # It had no work, so that there is an iteration that is not saved.

    first, second = of_type(cluster.commands, Decided)
    assert (first.is_newly_degraded, second.is_newly_degraded) == (True, False)
    assert "only f' = 0 failures" in second.degraded
    assert [order.persists for order in of_type(cluster.commands, StartEpoch)][-1] is False


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_the_save_of_a_job_that_is_less_safe_is_owed_until_it_is_complete(
    begins: bool, restarts: bool
) -> None:
    """A crash while ranks got ready for it, or wrote it, dropped it for good: whoever decided next,
    also after a restart, found the job as safe as it was."""
    policy = Survivors(num_idle=2)
    cluster = trained(FakeCluster(small_rules(n0=1, policy=policy), TOP_HEAVY))
    for node in cluster.nodes.values():
        node.is_linked = lambda _: begins
    cluster.lose(0)
    assert cluster.state.phase is (Phase.TRAINING if begins else Phase.STARTING)
    if restarts:
        cluster.restart()
    for node in cluster.nodes.values():
        node.is_linked = lambda _: True
    cluster.crash(2)
    assert of_type(cluster.commands, StartEpoch)[-1].persists
    assert not of_type(cluster.commands, Decided)[-1].is_newly_degraded

    epoch = cluster.state.epoch
    cluster.hear(Published(NEXT, epoch=epoch))
    cluster.train(NEXT)
    cluster.crash(2)
    order = of_type(cluster.commands, StartEpoch)[-1]
    assert (order.epoch, order.persists) == (epoch + 1, False)


def test_an_owed_save_that_ends_its_rank_each_time_is_tried_twice() -> None:
    """A save copies the state in host memory, and the kernel may kill the rank for that: with a
    save in each next epoch the third signal in a row evicted a node of a job that was short."""
    policy = Survivors(num_idle=2)
    cluster = trained(FakeCluster(small_rules(n0=1, policy=policy), TOP_HEAVY))
    cluster.lose(0)
    cluster.crash(2)
    cluster.crash(2)

    orders = of_type(cluster.commands, StartEpoch)
    assert [order.persists for order in orders] == [False, True, True, False]
    assert cluster.state.nodes == (1, 2, 3)


@pytest.mark.parametrize(("ended", "persists"), [(2, False), (3, True)])
def test_an_owed_save_is_tried_where_all_are_ready_or_one_that_was_ready_ends(
    ended: int, persists: bool
) -> None:
    """Two epochs that nobody had entered, as where links stay down, used up both tries, and the
    save was dropped for good. But a rank that is ready begins it before others are."""
    rules = small_rules(n0=1, failures_tolerated=2, policy=Survivors(num_idle=1))
    cluster = trained(FakeCluster(rules, shaped_plan((1, 2, 1), 6)))
    cluster.nodes[0].is_linked = lambda _: False
    cluster.lose(1)
    for _ in range(2):
        assert [*cluster.state.facts.ready] == [2]
        cluster.crash(ended)

    orders = of_type(cluster.commands, StartEpoch)
    assert [order.persists for order in orders] == [False, True, True, persists]


def test_a_layer_that_is_left_on_too_few_nodes_is_warned_of() -> None:
    """There are nodes for f failures, but a rerouted plan may have all copies on one of them."""
    policy = Survivors(num_idle=2)
    cluster = trained(FakeCluster(small_rules(n0=1, policy=policy), TOP_HEAVY))
    cluster.lose(0)

    (notice,) = of_type(cluster.commands, Decided)
    assert "a layer is on only 1 of 3 nodes" in notice.degraded
    assert "only f' = 0 failures" in notice.degraded


def test_crashes_with_an_iteration_between_them_are_answered() -> None:
    """The job moves on, however often."""
    cluster = trained(FakeCluster(RULES, PLAN))
    for iteration in range(FIRST + 2, END - 1):
        cluster.crash(1)
        cluster.crash(1)
        cluster.train(iteration)

    assert cluster.state.phase is Phase.TRAINING
    assert cluster.state.epoch == 2 * (END - 1 - FIRST - 2)


def test_crashes_of_different_kinds_are_answered() -> None:
    """A signal, a status and another status are no loop."""
    cluster = trained(FakeCluster(RULES, PLAN))
    for status in (-9, 1, 2):
        cluster.crash(1, status=status)

    assert cluster.state.phase is Phase.TRAINING


def test_it_is_told_as_long_as_a_worker_is_forked_anew() -> None:
    """The ledger counts that as a restart. Two crash, and the node of one is lost before its new
    worker is there."""
    state, _ = after(HELD)
    seconds = count(NOW_S)
    told: list[tuple[str, float]] = []
    for event in (
        worker_exit(1),
        worker_exit(2),
        node_loss(2),
        worker(3, pid=83),
        worker(1, pid=81),
        node_loss(3),
    ):
        now_s = next(seconds)
        state, commands = step(RULES, state, event, now_s)
        losses, forked = of_type(commands, Recovering), of_type(commands, Forked)
        told += [(f"loss, is forking {loss.is_forking}", loss.lost_s) for loss in losses]
        told += [("forked", one.now_s) for one in forked]

    assert told == [
        ("loss, is forking True", NOW_S),
        ("loss, is forking True", NOW_S + 1.0),
        ("loss, is forking True", NOW_S + 2.0),
        ("forked", NOW_S + 4.0),
        ("loss, is forking False", NOW_S + 5.0),
    ]


def unreachable(epoch: int = 0) -> PeerUnreachable:
    return PeerUnreachable(rank=1, epoch=epoch, peer=2, reason="lost rank 2: nothing came")


@pytest.mark.parametrize("event", [unreachable(epoch=-1), Tick()], ids=["older epoch", "no word"])
def test_a_job_whose_links_hold_is_left_alone(event: Event) -> None:
    """However much time passes."""
    state, _ = after((*HELD, event))

    assert step(RULES, state, Tick(), NOW_S + 10 * LEASE_S) == (state, ())


def test_a_link_that_breaks_between_live_nodes_begins_an_epoch_after_a_lease() -> None:
    """Mostly the peer is lost, and then that is found sooner: that loss is answered alone."""
    state, _ = after((*HELD, unreachable()))
    assert step(RULES, state, Tick(), NOW_S + LEASE_S) == (state, ())
    overdue = Tick(is_lease_overdue=True)
    assert step(RULES, state, overdue, NOW_S + LEASE_S + 0.1) == (state, ())
    broken, commands = step(RULES, state, Tick(), NOW_S + LEASE_S + 0.1)
    lost, _ = step(RULES, state, node_loss(2), NOW_S)

    assert (broken.epoch, broken.nodes, broken.phase) == (1, PLAN.nodes, Phase.RECORDING)
    assert not of_type(commands, Evict)
    assert broken.facts.loss is not None
    expected = "a link broke between live nodes: rank 1 lost rank 2: nothing came"
    assert broken.facts.loss.reason == expected
    assert step(RULES, lost, Tick(), NOW_S + 10 * LEASE_S) == (lost, ())


def test_workers_that_crash_together_are_no_loop() -> None:
    """Nor are the four of one node; the third crash of the same worker is."""
    cluster = trained(FakeCluster(RULES, TOP_HEAVY))
    cluster.crash(0, 1, 2)

    assert cluster.state.phase is Phase.TRAINING
