"""A fake cluster for tests of the coordinator: nodes that answer at once, and its records."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass

import msgspec

from helpers.coordinated import (
    END,
    FIRST,
    NOW_S,
    Word,
    iteration_report,
    ready,
    save_failure,
    save_report,
    stop_report,
    worker,
    worker_exit,
    worker_failure,
)
from planaria.coordinator.commands import (
    Command,
    DecisionRecorded,
    Evict,
    MembersRecorded,
    Publish,
    Published,
    RecordDecision,
    RecordMembers,
    Tell,
)
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.start import first_step, restored_step
from planaria.coordinator.state import JobState
from planaria.coordinator.step import Event, step
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    Blame,
    NodeArrived,
    NodeLost,
    Raised,
    SaveLayers,
    StartEpoch,
    StopRequested,
    ToNode,
)
from planaria.core.plan import Plan
from planaria.core.records import Decision, Members, Outcome, Progress
from planaria.protocol.agent_state import (
    AgentState,
    on_coordinator_message,
    on_report,
    repeated_reports,
    successor_order,
)


@dataclass
class FakeNode:
    """A node of one rank: a real agent's memory, and a worker that holds what it is told to.

    Attributes:
        is_linked: whether its links of a plan hold; if not, it begins nothing and receives nothing.
    """

    agent: AgentState
    epoch: int = -1
    started: int = -1
    takes_part: bool = False
    age: int = FIRST
    layers: tuple[int, ...] = ()
    next_order: StartEpoch | None = None
    is_alive: bool = True
    is_disk_full: bool = False
    stops: bool = False
    computing_s: float = 0.0
    seconds: float = 0.1
    pid: int = 0
    is_linked: Callable[[Plan], bool] = lambda _: True

    def take(self, message: ToNode) -> list[Word]:
        """What the node says to a message."""
        result = on_coordinator_message(self.agent, message)
        self.agent = result.state
        self.is_alive = self.is_alive and not result.ends
        return self.obey(message) if self.is_alive and result.forwards else []

    def obey(self, order: ToNode) -> list[Word]:
        """What the worker says."""
        node = self.agent.node
        match order:
            case Abort() if order.replaced.get(node) == self.pid:
                words = self.say(worker_exit(node, status=0, pid=self.pid))
                self.pid += 1000
                self.layers, self.age, self.started = (), FIRST, -1
                assert successor_order(self.agent, node, self.pid - 1000) == order
                answer = stop_report(node, order.epoch)
                return [*words, *self.say(worker(node, pid=self.pid)), *self.say(answer)]
            case Abort():
                self.epoch = order.epoch
                last = self.age - 1 if self.age > FIRST else -1
                answer = stop_report(node, order.epoch, layers=self.layers, age=self.age, last=last)
                return self.say(answer)
            case StartEpoch() if order.epoch >= self.epoch and order.epoch > self.started:
                assert order.addresses[node] == ("h", node)
                if order.iteration == AT_COMMIT and self.takes_part:
                    self.next_order = order
                    return []
                self.stops = False
                return self.begin(order, order.iteration)
            case SaveLayers() if order.layers.get(node):
                layers = order.layers[node]
                if self.is_disk_full:
                    return self.say(save_failure(node, order.iteration, epoch=order.epoch))
                assert set(layers) <= set(self.layers)
                return self.say(
                    save_report(node, order.iteration, epoch=order.epoch, layers=layers)
                )
            case StopRequested():
                self.stops = True
        return []

    def begin(self, order: StartEpoch, iteration: int) -> list[Word]:
        """The worker begins an epoch, with the layers that it is to have."""
        node = self.agent.node
        self.epoch = self.started = order.epoch
        self.next_order = None
        if not self.is_linked(order.plan):
            return []
        self.age = iteration
        self.layers = tuple(sorted(order.plan.held_by_rank.get(node, ())))
        self.takes_part = node in order.plan.all_ranks
        return self.say(ready(node, order.epoch)) if self.takes_part else []

    def trains(self, iteration: int, *, switches: bool = False) -> list[Word]:
        """The worker has applied an iteration, and maybe agreed to begin the next epoch."""
        self.age = iteration + 1
        is_last = self.stops or iteration + 1 == END
        word = iteration_report(self.agent.node, iteration, epoch=self.epoch, ends=is_last)
        word = msgspec.structs.replace(word, action_s={"F": self.computing_s}, seconds=self.seconds)
        words = self.say(msgspec.structs.replace(word, switches=switches and not is_last))
        if switches and not is_last:
            assert self.next_order is not None
            words += self.begin(self.next_order, iteration + 1)
        return words

    def say(self, message: Word) -> list[Word]:
        self.agent = on_report(self.agent, message, NOW_S)
        return [message]


class FakeCluster:
    """Carries out what the coordinator asks for, on nodes that answer at once.

    Attributes:
        state: of the coordinator.
        commands: all that it has asked for, in order.
        records: what is written down, in order.
        moments: a copy of the cluster after each command, from which a coordinator can restart.
        last_command: in such a copy, the one it was made after.
        is_saving_slow: what is saved stays unsaid.
    """

    def __init__(self, rules: Rules, plan: Plan) -> None:
        self.rules = rules
        self.plan = plan
        self.nodes = {
            node: FakeNode(
                on_report(AgentState(node=node), worker(node), NOW_S), pid=worker(node).pid
            )
            for node in plan.nodes
        }
        self.state: JobState
        self.commands: list[Command] = []
        self.records: list[Members | Outcome | Decision] = []
        self.progress: Progress | None = None
        self.moments: list[FakeCluster] = []
        self.last_command: Command | None = None
        self.is_saving_slow = False
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

    def set_failures(self, failures: Mapping[str, tuple[int, float]]) -> None:
        """The coordinator knows that machines failed so often, and when they did last."""
        membership = replace(self.state.membership, failures=failures)
        self.state = replace(self.state, membership=membership)

    def train(self, iteration: int) -> None:
        """Every rank of the plan applies an iteration."""
        self.train_at(iteration, NOW_S)

    def train_at(self, iteration: int, now_s: float) -> None:
        """As `train`, at a time."""
        nodes = [self.nodes[rank] for rank in self.state.plan.all_ranks]
        switches = all(node.next_order is not None for node in nodes)
        words = [node.trains(iteration, switches=switches) for node in nodes]
        self.hear(*(event for told in words for event in told), now_s=now_s)

    def join(self, number: int) -> None:
        """A node arrives on a machine of its own, with a worker."""
        self.join_on(number, f"machine-{number}")

    def join_on(self, number: int, machine: str, *, speed: float = 1.0) -> None:
        """A node arrives on a machine, with a worker."""
        node = self.nodes[number] = FakeNode(AgentState(node=number))
        self._connected.add(number)
        arrived = NodeArrived(node=number, rank=number, machine=machine, speed=speed)
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
            pid = self.nodes[number].pid
            self.nodes[number] = FakeNode(self.nodes[number].agent, pid=pid + 1000)
            word = worker_exit(number, status=status, stack="in forward\n", pid=pid)
            events += self.nodes[number].say(word)
        for number in numbers:
            events += self.nodes[number].say(worker(number, pid=self.nodes[number].pid))
        self.hear(*events)

    def fail(self, number: int, raised: Raised, *, blame: Blame = "node") -> None:
        """The code in a worker raises; it keeps what it holds."""
        node = self.nodes[number]
        self.hear(
            *node.say(worker_failure(number, raised, epoch=node.epoch, pid=node.pid, blame=blame))
        )

    def restart_epoch(self) -> None:
        """The members of the epoch are on record, and what follows from that."""
        self.hear(MembersRecorded(self.state.epoch))

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
            if number not in self.state.membership.gone:
                self._connected.add(number)
                self.hear(*repeated_reports(node.agent, NOW_S))
                told = self._order
                if told is not None and number in (told.nodes or self.state.nodes):
                    self.hear(*node.take(told.message))
                if self.state.stop.is_requested:
                    self.hear(*node.take(StopRequested()))

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
                            words = node.take(message)
                            is_slow = self.is_saving_slow and isinstance(message, SaveLayers)
                            self._events += () if is_slow else words
                case Evict(numbers):
                    self._connected -= set(numbers)
                case Publish(iteration, epoch):
                    self._events.append(Published(iteration, epoch))
            self._note_moment(command)

    def _note_moment(self, command: Command) -> None:
        moment = FakeCluster(self.rules, self.plan)
        moment.nodes = {number: copy(node) for number, node in self.nodes.items()}
        moment.records = list(self.records)
        moment.state = self.state
        moment.progress = self.progress
        moment.last_command = command
        self.moments.append(moment)
