"""A small job for tests of the coordinator: its rules, what its ranks say, and a fake cluster."""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from jobs import NUM_LAYERS, template
from planaria.coordinator.agent_state import AgentState, heard, said
from planaria.coordinator.coordinator import Event, step
from planaria.coordinator.start import first_step, restored_step
from planaria.coordinator.state import (
    Command,
    DecisionRecorded,
    Evict,
    JobState,
    MembersRecorded,
    Notify,
    Publish,
    Published,
    RecordDecision,
    RecordMembers,
    Rules,
    Tell,
)
from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.commit import CommitVector, encode_vector, vector_layout
from planaria.core.job import JobConfig, ResilienceConfig, TrainingConfig
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    Corrupted,
    EpochReady,
    IterationDone,
    LayerFile,
    LayersSaved,
    NodeArrived,
    NodeLost,
    NoticeTaken,
    SaveFailed,
    SaveLayers,
    StartEpoch,
    Stopped,
    ToNode,
    WorkerExited,
    WorkerReady,
)
from planaria.core.plan import Pipeline, Plan, Transfer, Transition, plain_plan
from planaria.core.records import Decision, Members, Outcome, Progress
from planaria.policies.policy import Prices

FIRST, END = 10, 15  # The run goes on from ten committed iterations and does five.
NUM_MICROBATCHES = 6
LEASE_S = 3.0
SOURCE = "10-3"
NOW_S = 100.0

Kind = TypeVar("Kind")
Report = IterationDone | Corrupted | LayersSaved | SaveFailed
Word = NodeArrived | NoticeTaken | WorkerReady | Stopped | EpochReady | WorkerExited | Report


@dataclass
class Survivors:
    """A policy: each who is left holds all layers, at two prices of which the second is better.

    Attributes:
        seen: what it was asked.
        num_idle: the last nodes get no work.
        rounds: that it asks for.
    """

    seen: list[tuple[ClusterState, ClusterEvent]] = field(default_factory=list)
    knows_an_answer: bool = True
    num_idle: int = 0
    rounds: tuple[tuple[Transfer, ...], ...] = ()

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        self.seen.append((cluster, event))
        if not self.knows_an_answer:
            return ()
        at_work = cluster.nodes[: len(cluster.nodes) - self.num_idle]
        pipelines = tuple(Pipeline(template(1), (node.node,)) for node in at_work)
        share, rest = divmod(len(plan.routes), len(pipelines))
        counts = tuple(share + (index < rest) for index in range(len(pipelines)))
        slow = Transition(
            before=plan,
            after=plain_plan(cluster.epoch, pipelines, counts),
            rounds=self.rounds,
            downtime_s=prices.regroup_s,
            iteration_s=2.0,
            redone_samples=event.redone_samples,
            policy="survivors",
            answer="slow",
        )
        return slow, replace(slow, iteration_s=1.0, answer="fast")


def small_rules(
    *,
    n0: int = 2,
    max_nodes: int = 8,
    failures_tolerated: int = 1,
    policy: Survivors | None = None,
    **keys: Any,
) -> Rules:
    """A job of ten layers and six microbatches; `keys` are of its resilience."""
    resilience = ResilienceConfig(failures_tolerated=failures_tolerated, **keys)
    job = JobConfig(
        training=TrainingConfig(
            iterations=END, global_batch_size=NUM_MICROBATCHES, microbatch_size=1
        ),
        resilience=resilience,
    )
    return Rules(
        job=job,
        policy=policy or Survivors(),
        prices=Prices(links={}, layer_bytes=(8,) * NUM_LAYERS, regroup_s=0.1),
        n0=n0,
        max_nodes=max_nodes,
        num_layers=NUM_LAYERS,
        layout=vector_layout(job, NUM_LAYERS),
        first_iteration=FIRST,
        source=SOURCE,
    )


# -- what ranks say -------------------------------------------------------------------------------


def worker(rank: int, *, pid: int = 0) -> WorkerReady:
    pid = pid or 50 + rank
    return WorkerReady(node=rank, rank=rank, pid=pid, pid_start=1.0, host="h", port=rank)


def exited(rank: int, *, status: int = -9, stalled: bool = False, stack: str = "") -> WorkerExited:
    pid = 50 + rank
    return WorkerExited(node=rank, rank=rank, pid=pid, status=status, stalled=stalled, stack=stack)


def gone(node: int) -> NodeLost:
    return NodeLost(node=node, reason="closed")


def ready(rank: int, epoch: int) -> EpochReady:
    return EpochReady(rank=rank, epoch=epoch, layers_materialised=rank + 1)


def done(rank: int, iteration: int, *, epoch: int, ends: bool = False) -> IterationDone:
    return IterationDone(
        rank=rank,
        epoch=epoch,
        iteration=iteration,
        loss=float(iteration),
        num_samples=NUM_MICROBATCHES,
        sample_digest="digest",
        seconds=0.1,
        stall_s=0.0,
        peak_bytes=0,
        ends=ends,
    )


def vector(iteration: int, *, stop_votes: int = 0) -> bytes:
    """The commit vector of an iteration, whose loss is the iteration's number."""
    losses = (float(iteration), *(0.0,) * (NUM_MICROBATCHES - 1))
    samples = tuple(range(NUM_MICROBATCHES))
    return encode_vector(CommitVector((1.0,) * NUM_LAYERS, losses, samples, stop_votes))


def stopped(
    rank: int,
    epoch: int,
    *,
    layers: Iterable[int] = (),
    age: int = FIRST,
    complete: bool = False,
    last: int = -1,
) -> Stopped:
    """What a rank holds: layers of one age, and the vector of iteration `last` if it has one."""
    held = tuple(layers)
    return Stopped(
        rank=rank,
        epoch=epoch,
        ages=dict.fromkeys(held, age),
        complete=held if complete else (),
        vector_iteration=last,
        vector=vector(last) if last >= 0 else b"",
    )


def file(layer: int) -> LayerFile:
    return LayerFile(layer, f"{layer}.safetensors", 7, "hash")


def saved(rank: int, iteration: int, *, epoch: int, layers: Iterable[int]) -> LayersSaved:
    files = tuple(file(layer) for layer in layers)
    return LayersSaved(rank=rank, epoch=epoch, iteration=iteration, files=files)


def unsaved(rank: int, iteration: int, *, epoch: int) -> SaveFailed:
    return SaveFailed(rank=rank, epoch=epoch, iteration=iteration, reason="disk full")


def of_type(commands: Sequence[object], kind: type[Kind]) -> list[Kind]:
    """The commands of a kind, or what is told or notified of that kind."""
    inner = [c.message if isinstance(c, Tell | Notify) else c for c in commands]
    return [one for one in (*inner,) if isinstance(one, kind)]


# -- a fake cluster -------------------------------------------------------------------------------


@dataclass
class FakeNode:
    """A node of one rank: a real agent's memory, and a worker that holds what it is told to."""

    agent: AgentState
    epoch: int = -1
    started: int = -1
    takes_part: bool = False
    age: int = FIRST
    layers: tuple[int, ...] = ()
    next_order: StartEpoch | None = None
    is_alive: bool = True
    is_disk_full: bool = False

    def take(self, message: ToNode) -> list[Word]:
        """What the node says to a message."""
        result = heard(self.agent, message)
        self.agent = result.state
        self.is_alive = self.is_alive and not result.ends
        return self.obey(message) if self.is_alive and result.forwards else []

    def obey(self, order: ToNode) -> list[Word]:
        """What the worker says."""
        node = self.agent.node
        match order:
            case Abort():
                self.epoch = order.epoch
                last = self.age - 1 if self.age > FIRST else -1
                answer = stopped(node, order.epoch, layers=self.layers, age=self.age, last=last)
                return self.say(answer)
            case StartEpoch() if order.epoch >= self.epoch and order.epoch > self.started:
                assert order.addresses[node] == ("h", node)
                if order.iteration == AT_COMMIT and self.takes_part:
                    self.next_order = order
                    return []
                return self.begin(order, order.iteration)
            case SaveLayers() if order.layers.get(node):
                layers = order.layers[node]
                if self.is_disk_full:
                    return self.say(unsaved(node, order.iteration, epoch=order.epoch))
                assert set(layers) <= set(self.layers)
                return self.say(saved(node, order.iteration, epoch=order.epoch, layers=layers))
        return []

    def begin(self, order: StartEpoch, iteration: int) -> list[Word]:
        """The worker begins an epoch, with the layers that it is to have."""
        node = self.agent.node
        self.epoch = self.started = order.epoch
        self.next_order = None
        self.age = iteration
        self.layers = tuple(sorted(order.plan.held_by_rank().get(node, ())))
        self.takes_part = node in order.plan.all_ranks
        return self.say(ready(node, order.epoch)) if self.takes_part else []

    def trains(self, iteration: int, *, switches: bool = False) -> list[Word]:
        """The worker has applied an iteration, and maybe agreed to begin the next epoch."""
        self.age = iteration + 1
        is_last = iteration + 1 == END
        word = done(self.agent.node, iteration, epoch=self.epoch, ends=is_last)
        words = self.say(msgspec.structs.replace(word, switches=switches and not is_last))
        if switches and not is_last:
            assert self.next_order is not None
            words += self.begin(self.next_order, iteration + 1)
        return words

    def say(self, message: Word) -> list[Word]:
        self.agent = said(self.agent, message)
        return [message]


class FakeCluster:
    """Carries out what the coordinator asks for, on nodes that answer at once.

    Attributes:
        state: of the coordinator.
        commands: all that it has asked for, in order.
        records: what is written down, in order.
        moments: a copy of the cluster after each command, from which a coordinator can restart.
        last_command: in such a copy, the one it was made after.
    """

    def __init__(self, rules: Rules, plan: Plan) -> None:
        self.rules = rules
        self.plan = plan
        self.nodes = {
            node: FakeNode(said(AgentState(node=node), worker(node))) for node in plan.nodes
        }
        self.state: JobState
        self.commands: list[Command] = []
        self.records: list[Members | Outcome | Decision] = []
        self.progress: Progress | None = None
        self.moments: list[FakeCluster] = []
        self.last_command: Command | None = None
        self._events: deque[Event] = deque()
        self._connected: set[int] = set()
        self._order: Tell | None = None

    def begin(self) -> None:
        """The job begins, and every node reports."""
        self.state, commands = first_step(self.rules, self.plan, term=0, predicted_s=1.0)
        self._carry_out(commands)
        self._connect_all()

    def hear(self, *events: Event, now_s: float = NOW_S) -> None:
        """Events, and all that follows from them."""
        self._events += events
        while self._events:
            event = self._events.popleft()
            self.state, commands = step(self.rules, self.state, event, now_s)
            self._carry_out(commands)

    def train(self, iteration: int) -> None:
        """Every rank of the plan applies an iteration."""
        nodes = [self.nodes[rank] for rank in self.state.plan.all_ranks]
        switches = all(node.next_order is not None for node in nodes)
        words = [node.trains(iteration, switches=switches) for node in nodes]
        self.hear(*(event for told in words for event in told))

    def join(self, number: int) -> None:
        """A node arrives on a machine of its own, with a worker."""
        self.join_on(number, f"machine-{number}")

    def join_on(self, number: int, machine: str) -> None:
        """A node arrives on a machine, with a worker."""
        node = self.nodes[number] = FakeNode(AgentState(node=number))
        self._connected.add(number)
        arrived = NodeArrived(node=number, rank=number, machine=machine)
        self.hear(*node.say(arrived), *node.say(worker(number)))

    def lose(self, *numbers: int) -> None:
        """Nodes are gone, which is noticed one after the other."""
        for number in numbers:
            self.nodes[number].is_alive = False
        self.hear(*(NodeLost(node=number, reason="closed") for number in numbers))

    def crash(self, *numbers: int, status: int = -9) -> None:
        """Workers crash at the same time, and others take their places."""
        events: list[Event] = []
        for number in numbers:
            self.nodes[number] = FakeNode(self.nodes[number].agent)
            events += self.nodes[number].say(exited(number, status=status, stack="in forward\n"))
        for number in numbers:
            events += self.nodes[number].say(worker(number))
        self.hear(*events)

    def restart(self) -> None:
        """Another coordinator goes on from the records, and everybody tells it all again."""
        self._events.clear()
        self._connected.clear()
        self._order = None
        newest = {type(record): record for record in self.records}
        members = newest.get(Members)
        if not isinstance(members, Members):
            self.begin()
            return
        outcome, decision = newest.get(Outcome), newest.get(Decision)
        starts = [r.order for r in self.records if isinstance(r, Decision)]
        plans = [order.plan for order in starts if isinstance(order, StartEpoch)]
        self.state, commands = restored_step(
            self.rules,
            plans[-1] if plans else self.plan,
            term=self.state.term + 1,
            members=members,
            outcome=outcome if isinstance(outcome, Outcome) else None,
            decision=decision if isinstance(decision, Decision) else None,
            progress=self.progress,
            predicted_s=1.0,
            now_s=NOW_S,
        )
        self._carry_out(commands)
        gone = [number for number, node in self.nodes.items() if not node.is_alive]
        self.hear(*(NodeLost(node=number, reason="its agent ended") for number in gone))
        self._connect_all()

    def _connect_all(self) -> None:
        """Every member says all that nobody has acknowledged, then hears the newest order."""
        for number, node in list(self.nodes.items()):
            if number not in self.state.gone:
                self._connected.add(number)
                self.hear(*node.agent.facts.values())
                told = self._order
                if told is not None and number in (told.nodes or self.state.nodes):
                    self.hear(*node.take(told.message))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self.commands.append(command)
            match command:
                case RecordMembers(members):
                    self.records.append(members)
                    self._events.append(MembersRecorded(members.epoch))
                case RecordDecision(outcome, decision):
                    self.records.append(outcome)
                    self._note_moment(command)
                    self.records.append(decision)
                    self._events.append(DecisionRecorded(outcome.epoch))
                case Tell(message, numbers):
                    if isinstance(message, Abort | StartEpoch | SaveLayers):
                        self._order = command
                    for node in list(self.nodes.values()):
                        is_told = node.agent.node in (numbers or self.state.nodes)
                        if is_told and node.is_alive and node.agent.node in self._connected:
                            self._events += node.take(message)
                case Evict(numbers):
                    self._connected -= set(numbers)
                case Publish(iteration, epoch):
                    self._events.append(Published(iteration, epoch))
            self._note_moment(command)

    def _note_moment(self, command: Command) -> None:
        moment = FakeCluster(self.rules, self.plan)
        moment.nodes = deepcopy(self.nodes)
        moment.records = list(self.records)
        moment.state = self.state
        moment.progress = self.progress
        moment.last_command = command
        self.moments.append(moment)
