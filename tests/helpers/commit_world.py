"""A small job as a world of states: what can happen next, with the coordinator's real transitions.

Three ranks in one iteration, whose messages to and from the coordinator travel in order but at any
speed. Nodes may be lost, by death or by a lease that runs out while they go on; the coordinator
may be killed, to be restored from what was recorded. Ranks are modelled after engine/worker.py,
agents keep their facts by the real rules of agent_state.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from planaria.coordinator.commands import (
    Command,
    DecisionRecorded,
    MembersRecorded,
    RecordDecision,
    RecordMembers,
    Tell,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.start import first_step, restored_step
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event, step
from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.commit import CommitVector, Votes, encode_vector, vector_layout
from planaria.core.job import JobConfig, ResilienceConfig, TrainingConfig
from planaria.core.messages import (
    Abort,
    EpochReady,
    FromNode,
    NodeLost,
    StartEpoch,
    Stopped,
    ToNode,
    WorkerReady,
)
from planaria.core.plan import Pipeline, PipelineTemplate, Plan, Stage, Transition, plain_plan
from planaria.core.records import Decision, Members, Outcome
from planaria.policies.policy import Prices
from planaria.protocol.agent_state import AgentState, on_coordinator_message, on_report

ITERATION = 5
ONE = PipelineTemplate((Stage(0, 1, 1),), 1)
JOB = JobConfig(
    training=TrainingConfig(global_batch_size=3, microbatch_size=1, iterations=100),
    resilience=ResilienceConfig(failures_tolerated=0),
)
LAYOUT = vector_layout(JOB, 1)
VECTOR = encode_vector(CommitVector((1.0,), 3.0, 3, "00" * 16, Votes(0)))


class _Survivors:
    """The policy: everybody who is left goes on, each with all layers."""

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        del prices
        nodes = [node.node for node in cluster.nodes]
        pipelines = tuple(Pipeline(ONE, (node,)) for node in nodes)
        counts = tuple(3 // len(nodes) + (i < 3 % len(nodes)) for i in range(len(nodes)))
        after = plain_plan(cluster.epoch, pipelines, counts)
        return (
            Transition(
                before=plan,
                after=after,
                rounds=(),
                downtime_s=0.1,
                iteration_s=1.0,
                redone_samples=event.redone_samples,
                policy="all",
                answer="all",
            ),
        )


RULES = Rules(
    job=JOB,
    policy=_Survivors(),
    prices=Prices(links={}, layer_bytes=(8,), regroup_s=0.0),
    n0=1,
    max_nodes=8,
    num_layers=1,
    layout=LAYOUT,
    first_iteration=ITERATION - 1,
)
PLAN = plain_plan(0, tuple(Pipeline(ONE, (node,)) for node in range(3)), (1, 1, 1))


@dataclass(frozen=True)
class RecordOutcome:
    """The first half of RecordDecision: the coordinator may be killed in between."""

    outcome: Outcome


@dataclass(frozen=True)
class RecordPlan:
    """The second half."""

    decision: Decision


@dataclass(frozen=True)
class TellOne:
    """One node's part of a Tell."""

    node: int
    message: ToNode


Action = RecordMembers | RecordOutcome | RecordPlan | TellOne


class Rank(NamedTuple):
    """A rank that has computed its gradients of iteration 5; age -1 once it holds no layer.

    Attributes:
        epoch: of the newest order to leave what came before.
        started: the newest epoch that it has begun.
    """

    age: int = ITERATION
    is_complete: bool = True
    has_vector: bool = False
    in_reduction: bool = True
    epoch: int = 0
    started: int = 0


class Node(NamedTuple):
    """A node, and the messages on their way to it and from it."""

    rank: Rank
    agent: AgentState
    is_alive: bool = True
    inbox: tuple[ToNode, ...] = ()
    outbox: tuple[FromNode | NodeLost, ...] = ()


class World(NamedTuple):
    """`state` is None while there is no coordinator; `pending` is what it has yet to do."""

    nodes: tuple[Node, ...]
    state: JobState | None
    pending: tuple[Action, ...]
    recorded: tuple[MembersRecorded | DecisionRecorded, ...]
    records: tuple[Members | Outcome | Decision, ...]
    losses_left: int
    kills_left: int


@dataclass(frozen=True)
class Protocol:
    """The protocol, or what it would be without one of its rules."""

    records_members: bool = True
    leaves_first: bool = True
    keeps_outcomes: bool = True
    num_losses: int = 2
    num_kills: int = 1


def worker(node: int) -> WorkerReady:
    return WorkerReady(node=node, rank=node, pid=9, pid_start=0.0, host="h", port=node)


def first_world(protocol: Protocol) -> World:
    """All three ranks wait for the vector of their iteration."""
    state, commands = first_step(RULES, PLAN, term=0, predicted_s=1.0)
    records: list[Members | Outcome | Decision] = []
    for command in commands:
        if isinstance(command, RecordMembers):
            records.append(command.members)
        if isinstance(command, RecordDecision):
            records += [command.outcome, command.decision]
    events: list[Event] = [DecisionRecorded(0), *map(worker, range(3)), *map(ready, range(3))]
    for event in events:
        state, _ = step(RULES, state, event, 0.0)
    assert state.phase is Phase.TRAINING
    agents = [
        on_report(on_report(AgentState(node=n), worker(n), 0.0), ready(n), 0.0) for n in range(3)
    ]
    nodes = tuple(Node(Rank(), agent) for agent in agents)
    return World(nodes, state, (), (), tuple(records), protocol.num_losses, protocol.num_kills)


def ready(rank: int) -> EpochReady:
    return EpochReady(rank=rank, epoch=0, layers_materialised=1)


# -- what can happen next -------------------------------------------------------------------------


def moves(world: World, protocol: Protocol) -> Iterator[tuple[str, World]]:
    """Every single thing that can happen next.

    What a coordinator has yet to do, and the start of one, commute with what nodes do: to do it
    first leaves out no outcome, only orders. Being killed in the middle does not.
    """
    if world.state is None:
        yield "a coordinator starts", restore_coordinator(world)
        return
    if world.pending:
        yield f"it does {world.pending[0]}", act(world, protocol)
    elif world.recorded:
        event, *rest = world.recorded
        yield f"{event}", handle(world._replace(recorded=tuple(rest)), event, protocol)
    else:
        for number, node in enumerate(world.nodes):
            yield from node_moves(world, number, node, protocol)
    if world.kills_left:
        nodes = tuple(node._replace(outbox=()) for node in world.nodes)
        left = world.kills_left - 1
        yield (
            "the coordinator is killed",
            world._replace(nodes=nodes, state=None, pending=(), recorded=(), kills_left=left),
        )


def node_moves(
    world: World, number: int, node: Node, protocol: Protocol
) -> Iterator[tuple[str, World]]:
    state, rank = world.state, node.rank
    is_idle = state is not None and not world.pending and not world.recorded
    if node.outbox and is_idle:
        rest = put(world, number, node._replace(outbox=node.outbox[1:]))
        yield f"{number} is heard: {node.outbox[0]}", handle(rest, node.outbox[0], protocol)
    if not node.is_alive:
        return
    if rank.in_reduction and rank.is_complete:
        # Nothing can be asked of it before it has applied what it holds.
        applied = rank._replace(
            age=ITERATION + 1, is_complete=False, has_vector=True, in_reduction=False
        )
        yield (
            f"{number} holds the vector, and applies",
            put(world, number, node._replace(rank=applied)),
        )
    if node.inbox:
        obeyed = obey(node._replace(inbox=node.inbox[1:]), node.inbox[0], protocol)
        yield f"{number} obeys {node.inbox[0]}", put(world, number, obeyed)
    if world.losses_left:
        fewer = world._replace(losses_left=world.losses_left - 1)
        gone = NodeLost(node=number, reason="closed")
        dead = node._replace(is_alive=False, inbox=(), outbox=(*node.outbox, gone))
        yield f"{number} dies", put(fewer, number, dead)
        if is_idle and state is not None and number in state.nodes:
            # It goes on, but nobody hears it any more.
            cut_off = put(fewer, number, node._replace(outbox=()))
            lease = NodeLost(node=number, reason="lease")
            yield f"the lease of {number} runs out", handle(cut_off, lease, protocol)


def put(world: World, number: int, node: Node) -> World:
    return world._replace(nodes=(*world.nodes[:number], node, *world.nodes[number + 1 :]))


def obey(node: Node, order: ToNode, protocol: Protocol) -> Node:
    """As the agent and then the worker take an order."""
    result = on_coordinator_message(node.agent, order)
    node = node._replace(agent=result.state)
    if result.ends:
        return node._replace(is_alive=False, inbox=())
    rank = node.rank
    if isinstance(order, Abort) and order.epoch >= rank.epoch:
        in_reduction = rank.in_reduction and not protocol.leaves_first
        node = node._replace(rank=rank._replace(epoch=order.epoch, in_reduction=in_reduction))
        stopped = Stopped(
            rank=node.agent.node,
            epoch=order.epoch,
            ages={} if rank.age < 0 else {0: rank.age},
            complete=(0,) if rank.is_complete else (),
            vector_iteration=ITERATION if rank.has_vector else ITERATION - 1,
            vector=VECTOR,
        )
        return node._replace(
            agent=on_report(node.agent, stopped, 0.0), outbox=(*node.outbox, stopped)
        )
    if isinstance(order, StartEpoch) and order.epoch == rank.epoch > rank.started:
        return node._replace(rank=settle(rank, order.iteration))
    return node


def settle(rank: Rank, iteration: int) -> Rank:
    """Applies what it has not, drops all other gradients, and layers of another age."""
    age = rank.age
    if age == iteration - 1 and rank.is_complete:
        age = iteration
    return Rank(
        age=age if age == iteration else -1,
        is_complete=False,
        has_vector=rank.has_vector or iteration == ITERATION + 1,
        in_reduction=False,
        epoch=rank.epoch,
        started=rank.epoch,
    )


# -- the coordinator ------------------------------------------------------------------------------


def handle(
    world: World,
    event: FromNode | NodeLost | MembersRecorded | DecisionRecorded,
    protocol: Protocol,
) -> World:
    assert world.state is not None
    before = world.state
    if not protocol.keeps_outcomes and before.phase is Phase.STOPPING:
        before = replace(before, commits=replace(before.commits, outcome=None))
    state, commands = step(RULES, before, event, 0.0)  # type: ignore[arg-type]
    actions = [action for command in commands for action in split(command, state)]
    return world._replace(state=state, pending=tuple(actions))


def split(command: Command, state: JobState) -> Iterator[Action]:
    """The smallest parts of a command, between which the coordinator may be killed."""
    match command:
        case RecordMembers():
            yield command
        case RecordDecision(outcome, decision):
            yield RecordOutcome(outcome)
            yield RecordPlan(decision)
        case Tell(message) if isinstance(message, Abort | StartEpoch):
            for node in state.nodes:
                yield TellOne(node, message)


def act(world: World, protocol: Protocol) -> World:
    """Carries out the first of the pending parts."""
    action, *rest = world.pending
    world = world._replace(pending=tuple(rest))
    match action:
        case RecordMembers(members):
            recorded = (*world.recorded, MembersRecorded(members.epoch))
            if not protocol.records_members:
                return world._replace(recorded=recorded)
            return world._replace(records=(*world.records, members), recorded=recorded)
        case RecordOutcome(outcome):
            known = [r for r in world.records if isinstance(r, Outcome)]
            if any(record.epoch == outcome.epoch for record in known):
                return world
            return world._replace(records=(*world.records, outcome))
        case RecordPlan(decision):
            recorded = (*world.recorded, DecisionRecorded(decision.order.epoch))
            return world._replace(records=(*world.records, decision), recorded=recorded)
        case TellOne(number, message):
            node = world.nodes[number]
            if not node.is_alive:
                return world
            return put(world, number, node._replace(inbox=(*node.inbox, message)))


def restore_coordinator(world: World) -> World:
    """A new coordinator reads the records, and agents say again what they know."""
    members = [r for r in world.records if isinstance(r, Members)][-1]
    outcomes = [r for r in world.records if isinstance(r, Outcome)]
    decisions = [r for r in world.records if isinstance(r, Decision)]
    order = decisions[-1].order
    assert isinstance(order, StartEpoch)
    state, commands = restored_step(
        RULES,
        order.plan,
        term=1,
        members=members,
        outcome=outcomes[-1],
        decision=decisions[-1],
        progress=None,
        predicted_s=1.0,
        now_s=0.0,
    )
    actions = tuple(action for command in commands for action in split(command, state))
    # That workers are there is heard at once, but for the last: whether all are there or not
    # makes a difference, in which order they were heard does not.
    last = max(members.nodes)
    for number in members.nodes:
        if number != last and world.nodes[number].is_alive:
            state, more = step(RULES, state, worker(number), 0.0)
            assert not more
    nodes = tuple(again(node, members, last=last) for node in world.nodes)
    return world._replace(nodes=nodes, state=state, pending=actions)


def again(node: Node, members: Members, *, last: int) -> Node:
    number = node.agent.node
    if not node.is_alive:
        return node._replace(outbox=(NodeLost(node=number, reason="ended"),))
    if number not in members.nodes:
        turned_away = Abort(epoch=members.epoch, nodes=members.nodes)
        return node._replace(inbox=(*node.inbox, turned_away))
    facts = tuple(
        fact
        for fact in node.agent.facts.values()
        if isinstance(fact, Stopped) or (isinstance(fact, WorkerReady) and number == last)
    )
    return node._replace(outbox=facts)
