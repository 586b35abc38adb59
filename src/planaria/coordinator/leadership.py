"""One coordinator's term: it admits agents, keeps leases, and records a decision before telling it.

`Leadership` joins the coordinator's function (step.py) with its records (store/logbook.py) and the
agents' connections. It knows no socket, task or clock, and awaits only the store. So
nodes/head/leader.py runs it on an event loop, and the simulator runs it under a virtual clock and
can kill it at every place at which it awaits.

Events are handled one at a time; agents are admitted, and leases renewed, in between.

Source: docs/protocol.md, "The coordinator".
"""

from collections.abc import Collection
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from planaria.coordinator.commands import (
    CheckSave,
    Command,
    DecisionRecorded,
    Discard,
    End,
    Evict,
    LeaseExpired,
    MembersRecorded,
    Notify,
    Publish,
    RecordDecision,
    RecordMembers,
    Saving,
    Tell,
    Tick,
)
from planaria.coordinator.contact import HeadContact
from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.start import first_step, restored_step
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event, step
from planaria.core.clock_offsets import NO_OFFSET, ClockOffset, ClockReading
from planaria.core.kinds import Ending
from planaria.core.messages import (
    Abort,
    Acknowledged,
    Fact,
    FromNode,
    Heartbeat,
    HeartbeatRequested,
    HeartbeatTaken,
    IterationDone,
    NodeArrived,
    NodeLost,
    SaveLayers,
    StartEpoch,
    Stopped,
    StopRequested,
    ToNode,
    Welcome,
)
from planaria.core.plan import Plan
from planaria.core.records import (
    Committed,
    Ended,
    Progress,
    Recorded,
    ToLauncher,
)
from planaria.store.logbook import Logbook

Queued = Event | LeaseExpired  # What waits to be handled.


class AgentConnection(Protocol):
    """A connection to an agent."""

    def tell(self, message: ToNode) -> None:
        """Sends a message, without waiting."""

    def close(self) -> None:
        """Closes the connection once all messages told so far are sent."""


class Effects(Protocol):
    """What a coordinator can do besides talking to agents; no method waits."""

    def queue(self, event: Queued) -> None:
        """Has an event handled after all events queued before it."""

    def notify(self, message: ToLauncher) -> None:
        """Sends a message to the launcher."""

    def carry_out(self, command: Saving) -> None:
        """Carries out a command that concerns saves on disk."""

    def on_place_reached(self, place: str, iteration: int) -> None:
        """Says that a recovery has reached a place at which a fault can be injected."""


Agent = TypeVar("Agent", bound=AgentConnection)

_CLOSED: Final = "its connection closed"


class Leadership(Generic[Agent]):
    """Serves agents, and handles events, from `restore` to the end of the job.

    Args:
        contact: contact with the nodes; the clock of the store's leases must be its `lease_now_s`.

    Attributes:
        state: everything that the coordinator knows.
        ended: the end of the job; None while it goes on.
    """

    def __init__(
        self, rules: Rules, logbook: Logbook, effects: Effects, *, contact: HeadContact
    ) -> None:
        self.state: JobState
        self.ended: Ended | None = None
        self._rules = rules
        self._logbook = logbook
        self._effects = effects
        self._contact = contact
        self._arriving: dict[int, Agent] = {}  # Connections that are being admitted.
        self._connections: dict[int, Agent] = {}
        self._order: Tell | None = None
        self._progress: Progress | None = None
        self._is_restored = False
        self._loss_iteration = 0  # The job may go back further.
        self._offsets: dict[int, ClockOffset] = {}  # Of this clock from each node's.
        self._renewed_s: dict[int, float] = {}  # When the lease of each node began anew.

    @property
    def term(self) -> int:
        return self._logbook.term

    # -- records ----------------------------------------------------------------------------------

    async def restore(self, plan: Plan, *, predicted_s: float, now_s: float) -> None:
        """Goes on from the records, or begins the job with this plan if there are none.

        Which saves exist is not known yet: events say so afterwards.
        """
        records = await self._logbook.read()
        if records is not None:  # The launcher may be another one than that which heard of them.
            self._effects.notify(Recorded(members=records.members, outcome=records.outcome))
        if records is None:
            self.state, commands = first_step(
                self._rules, plan, term=self.term, predicted_s=predicted_s
            )
        else:
            self.state, commands = restored_step(
                self._rules,
                records.plan or plan,
                term=self.term,
                members=records.members,
                outcome=records.outcome,
                decision=records.decision,
                progress=records.progress,
                predicted_s=predicted_s,
                now_s=now_s,
            )
        self.state = replace(self.state, saves=replace(self.state.saves, is_listing=True))
        await self._carry_out(commands, now_s)
        self._is_restored = records is not None

    async def begin_leases(self) -> None:
        """Gives each member on record a whole lease to find this coordinator.

        Call it when agents are about to be served. Nobody can renew a lease before that, and on a
        slow disk the restoration can take longer than a lease.
        """
        if self._is_restored:
            await self._logbook.grant(self.state.nodes)
            self._note_renewed(*self.state.nodes)

    @property
    def has_progressed(self) -> bool:
        """Whether some progress is not recorded yet."""
        return self._progress is not None

    async def record_progress(self) -> None:
        """Records how far the job has come, and lets agents forget all facts before that."""
        assert self._progress is not None
        progress, self._progress = self._progress, None
        await self._logbook.record_progress(progress)
        if progress.since != self.state.commits.origin.epoch:
            return  # The job has gone back since this commit.
        self._tell(Acknowledged(num_committed=progress.num_committed), self._connections.keys())

    # -- agents -----------------------------------------------------------------------------------

    async def admit(self, node: int, connection: Agent) -> bool:
        """Admits the agent of a member, or of a node that wants to join; returns whether it did.

        An agent whose node is out for good is told so, and False is returned.
        """
        connection.tell(Welcome(term=self.term))
        if node not in self.state.membership.gone:
            self._arriving[node] = connection
            await self._logbook.grant((node,))
            self._note_renewed(node)
            if self._arriving.get(node) is connection:
                del self._arriving[node]
        # Its older connection may have closed while the lease began.
        if node in self.state.membership.gone:
            await self._logbook.revoke(node)
            connection.tell(Abort(epoch=self.state.epoch, nodes=self.state.nodes))
            return False
        if self._order is not None and self._concerns(node, self._order):
            connection.tell(self._order.message)
        # Last, because an order to begin an epoch revokes a stop. A node that joins later must not
        # ask for a stop that was revoked meanwhile.
        if self.state.stop.is_requested and self.state.is_member(node):
            connection.tell(StopRequested())
        self._connections[node] = connection
        self._contact.forget(node)  # It has come since its older connection closed.
        if number := self._contact.open_request:
            connection.tell(HeartbeatRequested(number=number))
        return True

    def _concerns(self, node: int, order: Tell) -> bool:
        """Whether the newest order is for a node that connects, and did not join after it."""
        if isinstance(order.message, Abort):
            return node in order.message.nodes
        return node in (order.nodes or self.state.nodes)

    async def on_message(self, node: int, message: FromNode) -> None:
        """Renews the lease on a heartbeat; queues any other message of an agent as an event."""
        await self._hear(node, request=message.request if isinstance(message, Heartbeat) else 0)
        if not isinstance(message, Heartbeat):
            self._effects.queue(self._on_own_clock(node, message))
            return
        if message.offset is not None and self._offsets.get(node) is not NO_OFFSET:
            self._offsets[node] = message.offset
        is_renewed = await self._logbook.renew(node)
        if is_renewed:
            self._note_renewed(node)
        if is_renewed and node in self._connections:
            answer = HeartbeatTaken(sent_s=message.sent_s, taken_s=self._contact.now_s)
            self._connections[node].tell(answer)

    def _on_own_clock(self, node: int, message: Fact) -> Fact:
        """The message with its moments, if it has any, by the clock of this coordinator."""
        match message:
            case NodeArrived() if message.clock and message.clock == self._rules.clock:
                self._offsets[node] = NO_OFFSET
            case IterationDone(began_s=float(began_s)):
                offset = self._offsets.get(node)
                return msgspec.structs.replace(
                    message,
                    began_s=began_s + offset.offset_s if offset else None,
                    clock_error_s=offset.error_at(began_s) if offset else 0.0,
                )
        return message

    async def _hear(self, node: int, *, request: int) -> None:
        """Notes that a node on another machine was heard, and judges others by that."""
        if not self._contact.is_remote:
            return
        if self.state.nodes and not self.state.is_member(node):
            self._contact.hear_other(node)
            return
        heard = self._contact.hear(node, leased=self._logbook.leased_nodes, request=request)
        if heard.pardoned:  # No tick may have come in the silence, which excuses more than leases.
            self._effects.queue(Tick(is_cut_off=True))
        for other in heard.pardoned:
            await self._logbook.renew(other)
            self._note_renewed(other)
        for other in heard.lost:
            self._effects.queue(NodeLost(node=other, reason=_CLOSED))

    def on_disconnect(self, node: int, connection: Agent) -> None:
        """Reports a node whose connection has closed as lost, unless it has a newer connection.

        If nodes are on other machines, the head may have lost all of them: others must be heard.
        """
        if self._connections.get(node) is not connection:
            return
        del self._connections[node]
        if not self._contact.is_remote:
            self._effects.queue(NodeLost(node=node, reason=_CLOSED))
        elif node not in self._arriving:
            members = self.state.all_nodes
            is_last = not any(n in self._connections or n in self._arriving for n in members)
            number = self._contact.close(node, is_last=is_last)
            self._tell(HeartbeatRequested(number=number), members)

    def tick(self) -> None:
        """Queues a tick; tells agents that wait for a slow disk that they are being admitted."""
        is_cut_off, is_lease_overdue = self._contact.is_cut_off, self._is_lease_overdue()
        self._effects.queue(Tick(is_cut_off=is_cut_off, is_lease_overdue=is_lease_overdue))
        for connection in self._arriving.values() if self._contact.is_remote else ():
            connection.tell(Welcome(term=self.term))

    def _note_renewed(self, *nodes: int) -> None:
        self._renewed_s.update(dict.fromkeys(nodes, self._contact.lease_now_s))

    def _is_lease_overdue(self) -> bool:
        """Whether a member's lease has run out, which is not told before that is recorded."""
        limit_s = self._contact.lease_now_s - self._rules.job.cluster.lease_s
        return any(self._renewed_s.get(node, limit_s) < limit_s for node in self.state.nodes)

    async def watch_leases(self) -> None:
        """Reports nodes whose leases have run out as lost; never returns."""
        async for node in self._logbook.ended_leases():
            self._effects.queue(LeaseExpired(node))

    # -- events -----------------------------------------------------------------------------------

    async def handle(self, event: Queued, now_s: float) -> None:
        """Handles one event, and carries out the commands that follow from it."""
        if isinstance(event, LeaseExpired):
            if event.node in self._arriving or await self._logbook.is_leased(event.node):
                return  # It has come back since.
            event = NodeLost(node=event.node, reason="its lease ran out")
        if isinstance(event, Stopped):  # Its commit vector may be newer than all reports.
            self._loss_iteration = max(self._loss_iteration, event.vector_iteration + 1)
            self._report_place("detect")
        self.state, commands = step(self._rules, self.state, event, now_s)
        self._contact.add_members(self.state.is_member)
        await self._carry_out(commands, now_s)

    async def _carry_out(self, commands: tuple[Command, ...], now_s: float) -> None:
        for command in commands:
            match command:
                case Tell(message, nodes):
                    if isinstance(message, Abort | StartEpoch | SaveLayers):
                        self._order = command
                    self._tell(message, nodes or self.state.nodes)
                case Evict(nodes):
                    await self._evict(nodes)
                case RecordMembers(members):
                    if self.state.phase is Phase.RECORDING:
                        self._loss_iteration = self.state.commits.next_iteration
                        self._report_place("detect")
                    recorded = ClockReading(self._rules.clock, now_s)
                    members = msgspec.structs.replace(members, recorded=recorded)
                    await self._logbook.record_members(members)
                    self._effects.notify(Recorded(members=members))
                    self._effects.queue(MembersRecorded(members.epoch))
                case RecordDecision(outcome, decision):
                    if self.state.phase is Phase.DECIDING:
                        self._loss_iteration = max(self._loss_iteration, outcome.iteration)
                        self._report_place("decide")
                    await self._logbook.record_decision(outcome, decision)
                    self._effects.notify(Recorded(outcome=outcome))
                    self._effects.queue(DecisionRecorded(outcome.epoch))
                case Notify(message):
                    self._effects.notify(message)
                    if isinstance(message, Committed):
                        self._progress = progress_of(self.state, message, clock=self._rules.clock)
                case Publish() | Discard() | CheckSave():
                    self._effects.carry_out(command)
                case End():
                    self.ended = _ended_notice(self.state, command)

    def _report_place(self, place: str) -> None:
        if self.state.facts.loss is not None:
            self._effects.on_place_reached(place, self._loss_iteration)

    def _tell(self, message: ToNode, nodes: Collection[int]) -> None:
        recipients = set(nodes)
        for node, connection in self._connections.items():
            if node in recipients:
                connection.tell(message)

    async def _evict(self, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            self._contact.forget(node)
            self._offsets.pop(node, None)
            connection = self._connections.pop(node, None)
            if connection is not None:
                connection.close()
            await self._logbook.revoke(node)


def progress_of(state: JobState, committed: Committed, *, clock: str = "") -> Progress:
    """The record of a commit.

    Args:
        clock: name of the coordinator's clock.
    """
    stop = state.stop
    return Progress(
        num_committed=committed.iteration + 1,
        ends=committed.ends,
        is_trained=committed.is_trained,
        stop_reason=stop.shortage,
        is_stopping=stop.is_requested and not (stop.shortage or stop.must_end),
        is_early=stop.is_early,
        since=committed.since,
        epoch=state.epoch,
        findings=state.learning.findings,
        recorded=ClockReading(clock, committed.now_s),
    )


def may_expire(now_s: float, last_s: float, *, period_s: float) -> bool:
    """Whether overdue leases may end at this tick, if the tick before it was at `last_s`.

    They may not after a gap of three periods: the coordinator itself stood still, and so
    received nothing meanwhile.
    """
    return now_s - last_s < 3 * period_s


def _ended_notice(state: JobState, end: End) -> Ended:
    return Ended(
        ending=end.ending,
        reason=end.reason,
        failure=end.failure,
        nodes=state.nodes,
        epoch=state.epoch,
        is_early=state.stop.is_early,
    )


def is_lost(ended: Ended) -> bool:
    """Whether a job ended because too few nodes, or not all layers, were left."""
    return ended.ending is Ending.LOST
