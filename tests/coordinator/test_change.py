"""Nodes come and leave while training goes on: nothing is done again, and a loss may strike."""

from dataclasses import dataclass

import pytest

from helpers.coordinated import (
    END,
    FIRST,
    NOW_S,
    Survivors,
    node_loss,
    of_type,
    small_rules,
    worker,
)
from helpers.fake_cluster import FakeCluster
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.commands import Evict, RecordMembers, Tell, Tick
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.membership.candidates import rejoin_delay_s
from planaria.coordinator.membership.standby import nodes_to_replace
from planaria.coordinator.state import Phase
from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged
from planaria.core.messages import (
    AT_COMMIT,
    DrainRequested,
    EpochReady,
    NodeArrived,
    NoticeTaken,
    Shutdown,
    StartEpoch,
    StopRequested,
    WorkerFailed,
)
from planaria.core.plan import Link, Plan, Transition
from planaria.core.records import Changed, Committed, Decision, Progress, Recovering, Warned
from planaria.policies.policy import Prices
from planaria.protocol.agent_state import AgentState, on_report, repeated_reports
from planaria.restorer.sources import balanced_transfers, transfer_rounds

PLAN = shaped_plan((1, 1), 6)  # Two nodes, each of which holds all ten layers.


@dataclass
class Movers(Survivors):
    """As Survivors, with the transfers that its plans need."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        def moved(transition: Transition) -> Transition:
            needed = balanced_transfers(transition.after, cluster, layer_bytes=prices.layer_bytes)
            return replace(transition, rounds=transfer_rounds(needed))

        found = super().propose(plan, cluster, event, prices)
        return tuple(moved(transition) for transition in found)


def rules(*, bandwidth_bytes_per_s: float = 1e9, **keys: int) -> Rules:
    made = small_rules(n0=1, failures_tolerated=1, policy=Movers(), **keys)
    link = Link(0.0, bandwidth_bytes_per_s)
    return replace(made, prices=replace(made.prices, links={"inter_node": link}))


def training(made: Rules, plan: Plan = PLAN) -> FakeCluster:
    cluster = FakeCluster(made, plan)
    cluster.begin()
    cluster.train(FIRST)
    assert cluster.state.phase is Phase.TRAINING
    return cluster


def stopping_below(made: Rules) -> Rules:
    """The rules of a job that ends where f failures are not tolerated any more."""
    resilience = replace(made.job.resilience, when_below="stop")
    return replace(made, job=replace(made.job, resilience=resilience))


def joins(cluster: FakeCluster) -> list[StartEpoch]:
    """The orders to begin an epoch at a commit."""
    found = of_type(cluster.commands, StartEpoch)
    return [order for order in found if order.iteration == AT_COMMIT]


def committed(cluster: FakeCluster) -> list[int]:
    return [notice.iteration for notice in of_type(cluster.commands, Committed)]


def test_a_node_joins_silently_and_then_at_a_commit() -> None:
    """It steps its layers for an iteration before it has work; every iteration is done once."""
    cluster = training(rules())
    cluster.join(2)
    (silent,) = joins(cluster)
    cluster.train(FIRST + 1)
    assert cluster.state.nodes == (0, 1, 2)
    assert cluster.state.plan.ranks == (0, 1)
    cluster.train(FIRST + 2)
    cluster.train(FIRST + 3)

    assert silent.plan.silent == {2: tuple(range(NUM_LAYERS))}
    assert {t.target for transfers in silent.rounds for t in transfers} == {2}
    last = joins(cluster)[-1]
    assert (last.plan.ranks, last.plan.silent, last.rounds) == ((0, 1, 2), {}, ())
    assert cluster.state.plan == last.plan
    (notice,) = of_type(cluster.commands, Changed)
    assert notice.kinds == {2: "join"}
    assert committed(cluster) == list(range(FIRST, FIRST + 4))
    assert of_type(cluster.commands, Recovering) == []


def test_a_switch_pauses_training_while_groups_are_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else tells how long that takes, and the next switch is priced by it."""

    def report(rank: int, epoch: int) -> EpochReady:
        return EpochReady(
            rank=rank,
            epoch=epoch,
            layers_materialised=1,
            regroup_s=0.25,
            transfer_s=0.5,
            comm_s=4.0,
        )

    monkeypatch.setattr("helpers.fake_cluster.ready", report)
    cluster = training(rules())
    cluster.join(2)
    for iteration in range(FIRST + 1, FIRST + 4):
        cluster.train(iteration)

    (changed,) = of_type(cluster.commands, Changed)
    assert changed.pause_s == 2 * 4.75  # Once for the layers that come, and once to train them.


def test_layers_come_in_waves_that_a_link_carries_in_an_iteration() -> None:
    """Seventeen bytes in the seven seconds that one takes now: two layers of eight."""
    cluster = training(rules(bandwidth_bytes_per_s=2.5))
    assert cluster.state.facts.decision is not None
    as_it_is = Decision(order=cluster.state.facts.decision.order, predicted_s=7.0)
    cluster.state = replace(cluster.state, facts=replace(cluster.state.facts, decision=as_it_is))
    cluster.join(2)
    for iteration in range(FIRST + 1, END - 1):
        cluster.train(iteration)
        assert cluster.state.facts.decision
        assert cluster.state.facts.decision.predicted_s == 7.0  # Of the plan that they train by.

    silent = [len(order.plan.silent.get(2, ())) for order in joins(cluster)]
    assert silent[:2] == [2, 4]


def test_members_are_recorded_before_anybody_is_told() -> None:
    """Who is told to begin an epoch is a member of it, on record."""
    cluster = training(rules())
    cluster.join(2)

    (record,) = [c for c in cluster.commands[-3:] if isinstance(c, RecordMembers)]
    assert record.members.is_planned
    assert record.members.nodes == (0, 1, 2)
    at = cluster.commands.index(record)
    tells = [c for c in cluster.commands[:at] if isinstance(c, Tell)]
    assert all(tell.message != joins(cluster)[0] for tell in tells)


@pytest.mark.parametrize("word", ["drain", "preempt"])
def test_a_node_leaves_at_a_commit_and_only_then(word: str) -> None:
    """Whoever stays holds all that it held, so one switch is all."""
    cluster = training(rules(), shaped_plan((1, 1, 1), 6))
    request = DrainRequested(node=1)
    notice = NoticeTaken(node=1, rank=1, after_s=30.0)
    cluster.hear(request if word == "drain" else notice)
    assert not any(isinstance(c, Tell) and c.nodes == (1,) for c in cluster.commands)
    cluster.train(FIRST + 1)
    cluster.train(FIRST + 2)

    assert cluster.state.nodes == (0, 2)
    (leave,) = [c for c in cluster.commands if isinstance(c, Tell) and c.nodes == (1,)]
    assert isinstance(leave.message, Shutdown)
    (order,) = joins(cluster)
    assert 0.0 < order.put_off_s < 15.0  # It may wait for saves.
    (changed,) = of_type(cluster.commands, Changed)
    assert changed.kinds == {1: word}
    assert committed(cluster) == [FIRST, FIRST + 1, FIRST + 2]
    assert of_type(cluster.commands, Recovering) == []


def test_a_job_that_nodes_leave_saves_where_it_gets_less_safe() -> None:
    """It saved after losses alone. Machines that are taken away with a notice shrank it, and the
    next loss cost all that was trained."""
    cluster = training(rules(), shaped_plan((1, 1, 1), 6))
    for node in (0, 1):
        cluster.hear(NoticeTaken(node=node, rank=node, after_s=30.0))
        cluster.train(cluster.state.commits.next_iteration)
        cluster.train(cluster.state.commits.next_iteration)

    changed = of_type(cluster.commands, Changed)
    assert [notice.is_newly_degraded for notice in changed] == [False, True]
    assert "only f' = 0 failures" in changed[1].degraded
    assert [order.persists for order in joins(cluster)] == [False, True]


def test_a_node_that_leaves_is_kept_for_others_that_are_about_to_join() -> None:
    """For half of its notice: two nodes tolerate a failure, and one would tolerate none."""
    for later_s, is_waiting in ((14.0, True), (16.0, False)):
        cluster = training(rules())
        cluster.hear(NodeArrived(node=2, rank=2, machine="m"))
        cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
        assert cluster.state.change is None
        cluster.hear(Tick(), now_s=NOW_S + later_s)

        assert (cluster.state.change is None) == is_waiting
    cluster = training(rules())
    cluster.hear(NodeArrived(node=2, rank=2, machine="m"))
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))
    cluster.join_on(2, "m")
    assert cluster.state.change is not None
    assert cluster.state.change.kinds == {2: "join", 1: "preempt"}


def test_a_node_is_kept_for_others_no_longer_than_its_shortest_notice_says() -> None:
    """A cloud's notice of two minutes is often followed by a last one of seconds, which was taken
    for the same: the node was gone before it was planned out."""
    cluster = training(rules())
    cluster.hear(NodeArrived(node=2, rank=2, machine="m"))
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=120.0))
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=10.0), now_s=NOW_S + 5.0)
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=120.0), now_s=NOW_S + 6.0)
    cluster.hear(Tick(), now_s=NOW_S + 9.5)
    assert cluster.state.change is None
    cluster.hear(Tick(), now_s=NOW_S + 10.0)

    assert cluster.state.change is not None
    assert cluster.state.change.kinds == {1: "preempt"}


def test_a_node_that_leaves_is_kept_though_another_was_lost_before_it_could_leave() -> None:
    """The short notice of the lost one made the job stop at once, with time and help on its way."""
    cluster = training(replace(rules(), n0=2), shaped_plan((1, 1, 1), 6))
    cluster.hear(NodeArrived(node=5, rank=5, machine="m"))
    cluster.hear(NoticeTaken(node=2, rank=2, after_s=10.0))
    cluster.lose(2)
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=120.0), now_s=NOW_S + 20.0)

    assert (cluster.state.phase, cluster.state.nodes) == (Phase.TRAINING, (0, 1))
    assert cluster.state.stop.shortage == ""
    assert set(cluster.state.membership.leaving) == {1}
    cluster.join(5)
    assert cluster.state.change is not None
    assert cluster.state.change.kinds == {5: "join", 1: "preempt"}


def test_a_new_coordinator_keeps_a_node_no_longer_than_it_is_there() -> None:
    """It is told after 25 seconds of the notice's thirty."""
    agent = on_report(AgentState(node=1), NoticeTaken(node=1, rank=1, after_s=30.0), NOW_S)
    cluster = training(rules())
    cluster.hear(NodeArrived(node=2, rank=2, machine="m"))
    cluster.hear(*repeated_reports(agent, NOW_S + 25.0), now_s=NOW_S + 25.0)
    assert cluster.state.change is None
    cluster.hear(Tick(), now_s=NOW_S + 29.0)

    assert cluster.state.change is not None


def test_a_node_that_cannot_be_spared_is_not_drained_but_saved_before_it_is_taken() -> None:
    """With one node fewer nothing holds the model."""
    made = replace(rules(), n0=2)
    cluster = training(made)
    cluster.hear(DrainRequested(node=1))
    (warning,) = of_type(cluster.commands, Warned)
    assert "cannot be drained" in warning.text
    cluster.hear(NoticeTaken(node=1, rank=1, after_s=30.0))

    assert any(isinstance(c, Tell) and c.message == StopRequested() for c in cluster.commands)
    assert "fewer than the n0 = 2" in cluster.state.stop.shortage


def test_a_node_is_not_drained_where_another_that_is_taken_away_leaves_too_few() -> None:
    """The job goes on with it. Both are asked for while a third node leaves."""
    cluster = training(stopping_below(rules()), shaped_plan((1, 1, 1, 1), 6))
    cluster.hear(DrainRequested(node=3))
    cluster.hear(DrainRequested(node=2), NoticeTaken(node=1, rank=1, after_s=30.0))
    for iteration in range(FIRST + 1, END - 1):
        cluster.train(iteration)

    assert not cluster.state.stop.is_requested
    assert cluster.state.nodes == (0, 2)
    (warning,) = [one for one in of_type(cluster.commands, Warned) if one.undrained]
    assert warning.undrained == (2,)
    assert "node 2 cannot be drained: 1 node is left" in warning.text


def undrained(cluster: FakeCluster) -> list[tuple[int, ...]]:
    """The nodes of which users were told that they stay."""
    return [one.undrained for one in of_type(cluster.commands, Warned) if one.undrained]


def test_a_drain_of_a_node_that_has_not_arrived_is_answered() -> None:
    """Its agent lives, so whoever asks waits for the coordinator's answer."""
    cluster = training(rules())
    cluster.hear(DrainRequested(node=5))
    cluster.join(5)

    assert undrained(cluster) == [(5,)]
    assert cluster.state.change is not None
    assert cluster.state.change.kinds == {5: "join"}


def test_a_drain_of_a_node_without_work_or_of_one_that_has_left_is_answered() -> None:
    """Their machines may be gone, so that nobody tells of their ends."""
    cluster = training(rules(max_nodes=2))
    cluster.join(5)
    cluster.hear(DrainRequested(node=5))
    cluster.lose(1)
    cluster.hear(DrainRequested(node=1))

    assert [one.left for one in of_type(cluster.commands, Warned) if one.left] == [(5,), (1,)]
    assert undrained(cluster) == []


@pytest.mark.parametrize(
    ("request_to_leave", "replaced"),
    [
        (NoticeTaken(node=5, rank=5, after_s=30.0), (5,)),
        (NoticeTaken(node=5, rank=5, after_s=0.0, reason="its GPU is lost"), (5,)),
        (DrainRequested(node=5), ()),
    ],
)
def test_a_standby_node_whose_machine_is_taken_away_is_replaced_once(
    request_to_leave: NoticeTaken | DrainRequested, replaced: tuple[int, ...]
) -> None:
    """It left in peace, and the job was without a standby node from then on."""
    cluster = training(rules(max_nodes=2))
    cluster.join(5)
    cluster.hear(request_to_leave)
    cluster.hear(request_to_leave)
    messages = of_type(cluster.commands, Warned)

    assert tuple(node for message in messages for node in nodes_to_replace(message)) == replaced


@pytest.mark.parametrize("is_unfit", [False, True])
def test_a_node_that_cannot_be_drained_stays_unless_its_machine_is_unfit(*, is_unfit: bool) -> None:
    """Whoever asked was told that it stays, and it left when another node came."""
    policy = Movers()
    cluster = training(replace(rules(), policy=policy), shaped_plan((1, 1, 1), 6))
    policy.knows_an_answer = False
    unfit = NoticeTaken(node=1, rank=1, after_s=0.0, reason="its GPU is lost")
    cluster.hear(unfit if is_unfit else DrainRequested(node=1))
    assert undrained(cluster) == [(1,)]
    policy.knows_an_answer = True
    cluster.join(3)
    for iteration in range(FIRST + 1, END - 1):
        cluster.train(iteration)

    assert cluster.state.change is None
    assert cluster.state.nodes == ((0, 2, 3) if is_unfit else (0, 1, 2, 3))
    assert undrained(cluster) == [(1,)]


UNFIT = NoticeTaken(node=1, rank=1, after_s=0.0, reason="its GPU is lost")


@pytest.mark.parametrize("max_nodes", [2, 4])
@pytest.mark.parametrize("later", [UNFIT, DrainRequested(node=1), None])
def test_a_node_on_an_unfit_machine_leaves_once_another_can_take_its_place(
    max_nodes: int, later: NoticeTaken | DrainRequested | None
) -> None:
    """It stayed for good if nodes were short when its machine was found unfit."""
    cluster = training(replace(rules(), n0=2, max_nodes=max_nodes))
    cluster.hear(UNFIT, *((later,) if later else ()))
    assert undrained(cluster) == [(1,)] * (2 if isinstance(later, DrainRequested) else 1)
    cluster.join(2)
    for iteration in range(FIRST + 1, END - 1):
        cluster.train(iteration)

    assert cluster.state.nodes == (0, 2)
    assert cluster.state.membership.gone == (1,)
    assert not cluster.state.stop.is_requested


def test_a_node_on_an_unfit_machine_that_is_taken_away_leaves_as_any_other() -> None:
    """The job saves, and stops for want of nodes."""
    cluster = training(replace(rules(), n0=2))
    cluster.hear(UNFIT, NoticeTaken(node=1, rank=1, after_s=30.0))

    assert cluster.state.stop.shortage


@pytest.mark.parametrize("number", [3, 4])
def test_a_drain_ends_no_job_that_can_go_on_without_it(number: int) -> None:
    """A loss in the middle of it leaves too few of three nodes to spare one more, not of four."""
    cluster = training(stopping_below(rules()), shaped_plan((1,) * number, 6))
    cluster.hear(DrainRequested(node=2))
    cluster.lose(0)
    for iteration in range(cluster.state.commits.next_iteration, END - 1):
        cluster.train(iteration)

    assert cluster.state.phase is Phase.TRAINING
    stays = number == 3
    assert (2 in cluster.state.nodes) == (2 in cluster.state.plan.nodes) == stays
    assert undrained(cluster) == ([(2,)] if stays else [])


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("later", [0, 1, 2])
def test_a_loss_while_a_node_joins_leads_to_the_survivors(number: int, later: int) -> None:
    """Whichever of the three it is, and however far the change is."""
    cluster = training(rules())
    cluster.join(2)
    for iteration in range(FIRST + 1, FIRST + 1 + later):
        cluster.train(iteration)
    cluster.lose(number)

    assert cluster.state.phase is Phase.TRAINING
    left = {0, 1, 2} - {number}
    assert set(cluster.state.nodes) == left
    assert cluster.state.change is None
    assert set(cluster.state.plan.nodes) == left
    for iteration in range(cluster.state.commits.next_iteration, END):
        cluster.train(iteration)
    assert committed(cluster) == list(range(FIRST, END))


def test_a_new_coordinator_finds_its_way_at_any_moment_of_a_change() -> None:
    """At most the iteration in flight is done again; no node is forgotten."""
    cluster = training(rules())
    before = len(cluster.moments)
    cluster.join(2)
    for iteration in (FIRST + 1, FIRST + 2, FIRST + 3):
        cluster.train(iteration)
    moments = cluster.moments[before:]
    assert len(moments) > 10

    for moment in moments:
        moment.restart()
        assert moment.state.phase in (Phase.TRAINING, Phase.STARTING), moment.last_command
        assert set(moment.state.nodes) >= {0, 1}
        assert moment.state.membership.gone == ()


def test_the_end_of_a_candidates_worker_is_over_once_its_node_has_joined() -> None:
    """No epoch is there to answer it, and a later coordinator took it for the end of a member's."""
    cluster = training(rules(max_nodes=2))
    cluster.join(2)
    cluster.crash(2)
    cluster.hear(DrainRequested(node=1))
    for iteration in (FIRST + 1, FIRST + 2, FIRST + 3):
        cluster.train(iteration)
    assert cluster.state.plan.nodes == (0, 2)
    assert cluster.state.change is None
    cluster.progress = Progress(num_committed=FIRST + 4, ends=False)
    epoch = cluster.state.epoch
    cluster.restart()

    assert (cluster.state.phase, cluster.state.epoch) == (Phase.TRAINING, epoch)


def test_a_node_that_was_a_member_is_no_candidate() -> None:
    """Numbers are never used again."""
    cluster = training(rules(), shaped_plan((1, 1, 1), 6))
    cluster.lose(2)
    cluster.hear(NodeArrived(node=2, rank=2, machine="m"), worker(2))

    assert cluster.state.membership.candidates == {}
    assert cluster.state.nodes == (0, 1)


def test_a_candidate_whose_code_raises_does_not_end_the_job() -> None:
    """Its machine may lack what the others have."""
    cluster = training(rules())
    cluster.hear(NodeArrived(node=7, rank=7, machine="m"))
    cluster.hear(WorkerFailed(node=7, rank=7, traceback="FileNotFoundError: data"))

    assert cluster.state.phase is Phase.TRAINING
    assert of_type(cluster.commands, Evict) == [Evict((7,))]
    (warning,) = of_type(cluster.commands, Warned)
    assert "node 7 cannot join" in warning.text


def test_beyond_max_nodes_nodes_wait_until_one_is_lost() -> None:
    """They are the standby."""
    cluster = training(rules(max_nodes=2))
    cluster.join(2)
    assert joins(cluster) == []
    cluster.lose(1)

    assert cluster.state.nodes == (0, 2)  # It was needed, so it did not even wait for a commit.


def test_a_machine_that_fails_often_is_taken_back_later_each_time() -> None:
    """At once after its first failure; then after ten seconds, doubled."""
    assert [rejoin_delay_s(n, 10.0) for n in range(6)] == [0, 0, 10, 30, 70, 150]
    assert rejoin_delay_s(1000, 10.0) == 3600.0
    made = rules()
    cluster = training(made, shaped_plan((1, 1, 1), 6))
    for node in (2, 3):
        cluster.hear(NodeArrived(node=node, rank=node, machine="flaky"))
        if node == 3:
            cluster.join_on(3, "flaky")
            assert cluster.state.change is not None
            cluster.train(FIRST + 1)
            cluster.train(FIRST + 2)
            assert 3 in cluster.state.nodes
        cluster.hear(node_loss(node))
    cluster.join_on(4, "flaky")

    assert cluster.state.membership.candidates[4].not_before_s == NOW_S + 10.0
    assert cluster.state.change is None


def test_a_new_coordinator_knows_which_machines_failed_before_a_change() -> None:
    """The record of the members of a change is the newest, and has to say it too."""
    cluster = training(rules(), shaped_plan((1, 1, 1), 6))
    cluster.hear(NodeArrived(node=2, rank=2, machine="flaky"))
    cluster.lose(2)
    cluster.join(3)
    cluster.train(FIRST + 1)
    cluster.train(FIRST + 2)
    assert cluster.state.nodes == (0, 1, 3)
    cluster.restart()

    assert cluster.state.membership.failures == {"flaky": (1, NOW_S)}


def test_a_stop_goes_before_a_change() -> None:
    """A job that ends needs no more nodes."""
    cluster = training(rules())
    cluster.hear(StopRequested())
    cluster.join(2)

    assert joins(cluster) == []


def test_a_change_tells_what_it_was_made_from() -> None:
    """The nodes that join, and the seconds of an iteration with the plan as it was."""
    cluster = training(rules())
    cluster.join(2)
    for iteration in range(FIRST + 1, FIRST + 4):
        cluster.train(iteration)

    (notice,) = of_type(cluster.commands, Changed)
    assert notice.inputs is not None
    assert notice.inputs.changed == NodesChanged((2,), ())
    assert notice.inputs.lost is None
    assert notice.inputs.iteration_s > 0.0
    assert notice.inputs.cluster.held_by_rank()[2] == frozenset()
