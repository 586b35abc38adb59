"""A modelled process that runs the real coordinator: it has an inbox, connections and ticks.

Source: nodes/head/leader.py; the steps come in the same order.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from planaria.coordinator.commands import (
    CheckSave,
    Discard,
    MustEnd,
    Publish,
    Published,
    SaveChecked,
    SavesListed,
    Saving,
)
from planaria.coordinator.contact import HeadContact
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.leadership import Leadership, Queued, may_expire
from planaria.core.messages import BY_PUBLISHER, NodeLost, SaveFailed, Shutdown, ToNode
from planaria.core.records import (
    Beat,
    Ended,
    Leading,
    Rescue,
    Saved,
    ToLauncher,
    Unrecorded,
    Unsaved,
)
from planaria.errors import CheckpointError, ConflictError, StoreError
from planaria.protocol.agent_lease import TICKS_PER_LEASE
from planaria.simulator.loop import Future, Loop, Process
from planaria.simulator.modelled.saver import SimulatedSaves
from planaria.simulator.modelled.store import SimulatedDisk
from planaria.simulator.network import Endpoint
from planaria.simulator.scenario import LEASE_S, TIMEOUT_S, PlannedJob
from planaria.store.logbook import Logbook, open_logbook

Item = TypeVar("Item")

_POLL_S = 0.02
_LIST_AGAIN_S = 5.0  # The real publisher waits longer each time.


class CoordinatorSurroundings(Protocol):
    """The launcher of the coordinator, and the saves on which the coordinator acts."""

    job: PlannedJob
    published: list[Published]
    discarded: set[tuple[int, int]]
    damaged: set[str]
    set_aside: set[str]
    saves: SimulatedSaves
    loop: Loop

    def on_coordinator_message(self, leader: "SimulatedCoordinator", message: ToLauncher) -> None:
        """Takes a message of the coordinator."""

    def log_event(self, what: str, *facts: object) -> None:
        """Adds an entry to the log."""

    def publish(self, command: Publish) -> bool:
        """Creates the manifest of a save; returns False if one of its files is missing."""

    def discard(self, command: Discard) -> None:
        """Removes the files of a save, unless it is complete."""

    def on_coordinator_place(self, place: str, iteration: int) -> None:
        """Called when the coordinator is at a place at which a fault may strike."""


class _AgentEndpoint:
    """A connection to an agent."""

    def __init__(self, end: Endpoint) -> None:
        self.end = end

    def tell(self, message: ToNode) -> None:
        """See AgentConnection."""
        self.end.send(message)

    def close(self) -> None:
        """See AgentConnection."""
        self.end.close()


class SimulatedCoordinator:
    """One process of the coordinator.

    Args:
        piece_bytes: size above which a record is cut into pieces.
        rescue: state from which it goes on, only to save the live state; None: it goes on from the
            records in its store.

    Attributes:
        leadership: the real coordinator's logic; set once its logbook is open.
        is_serving: whether it accepts connections.
        has_adopted: whether its store contains the rescue, if there is one.
        admitted: nodes whose heartbeats it answers.
        known_since_s: time at which it heard of each save, by source.
        spoilt: sources of saves that it or an earlier coordinator knows to be damaged.
    """

    def __init__(
        self,
        process: Process,
        disk: SimulatedDisk,
        launcher: CoordinatorSurroundings,
        *,
        piece_bytes: int,
        rescue: Rescue | None,
    ) -> None:
        self.process = process
        self.leadership: Leadership[_AgentEndpoint]
        self.is_serving = False
        self.has_adopted = rescue is None
        self._rescue = rescue
        self._is_restored = False
        self.admitted: set[int] = set()
        self.known_since_s: dict[str, float] = {}
        self.spoilt: set[str] = set()
        self._requests: _Queue[Saving | None] = _Queue()  # None: list the saves again.
        self._num_requests = 0
        self._since_s = math.inf
        self._is_refused = self._is_unlisted = self._is_listed = False
        self._is_expiring = False
        self._disk = disk
        self._contact = HeadContact(
            lease_s=LEASE_S,
            patience_s=launcher.job.scenario.patience_s,
            now_s=lambda: process.now_s,
        )
        self._store = disk.open(
            process, self._on_disk_refusal, lease_now_s=lambda: self._contact.lease_now_s
        )
        self._piece_bytes = piece_bytes
        self._launcher = launcher
        self._agents: list[_AgentEndpoint] = []
        self._events: _Queue[Queued] = _Queue()
        self._progress: _Queue[None] = _Queue()

    async def run(self) -> None:
        """Goes on from the records, and handles events until the job ends."""
        await self._end_at_errors(self._lead())

    async def _end_at_errors(self, task: Awaitable[None]) -> None:
        """Runs a task; an error of the store ends the process."""
        try:
            await task
        except ConflictError:  # Another coordinator has taken over.
            self.process.kill()
        except StoreError as error:
            self.notify(Unrecorded(reason=_reason(error)))
            self.process.kill()

    def _on_disk_refusal(self, error: StoreError) -> None:
        """Tells the launcher, before anything else happens, that the disk keeps no records any
        more."""
        self.notify(Unrecorded(reason=_reason(error)))
        self.queue(MustEnd(_reason(error)))

    async def _open_logbook(self) -> Logbook:
        """The logbook with the records that this coordinator goes on from."""
        name, rescue = self._launcher.job.rules.job.name, self._rescue
        logbook = await open_logbook(
            self._store,
            name,
            lease_s=LEASE_S,
            first_term=rescue.term if rescue else 0,
            piece_bytes=self._piece_bytes,
        )
        if rescue is not None:
            await logbook.adopt(rescue.members, rescue.outcome, rescue.progress)
            self.has_adopted = True
            self.queue(MustEnd(rescue.reason))
        return logbook

    async def _lead(self) -> None:
        job = self._launcher.job
        rules = job.rules if self._rescue is None else job.saving_rules
        logbook = await self._open_logbook()
        self.leadership = Leadership(rules, logbook, self, contact=self._contact)
        self.process.spawn(self._send_beats())
        await self.leadership.restore(
            job.plan, predicted_s=job.predicted_s, now_s=self.process.now_s
        )
        self.spoilt |= self.leadership.state.saves.spoilt
        self._is_restored = True
        self.process.spawn(self._serve_saves())
        await self.leadership.begin_leases()
        self.is_serving = True
        self.notify(Leading(term=logbook.term, now_s=self.process.now_s))
        self.process.spawn(self._end_at_errors(self._run_ticks()))
        self.process.spawn(self._end_at_errors(self.leadership.watch_leases()))
        self.process.spawn(self._end_at_errors(self._record_progress()))
        while self.leadership.ended is None:
            await self.leadership.handle(await self._events.get(), self.process.now_s)
            if self.leadership.has_progressed:
                self._progress.put(None)
        end_s = self.process.now_s + TIMEOUT_S
        while self._num_requests and self.process.now_s < end_s:
            await self.process.sleep(_POLL_S)
        self._tell_end(self.leadership.ended)

    def _tell_end(self, ended: Ended) -> None:
        self.notify(ended)
        for line in self._agents:
            line.tell(Shutdown())

    async def _send_beats(self) -> None:
        while True:
            self.notify(Beat())
            await self.process.sleep(LEASE_S / TICKS_PER_LEASE)

    async def _run_ticks(self) -> None:
        period_s = LEASE_S / TICKS_PER_LEASE
        last_s = self.process.now_s
        while True:
            await self.process.sleep(period_s)
            self.leadership.tick()
            last_s, before_s = self.process.now_s, last_s
            if not self._is_expiring and may_expire(last_s, before_s, period_s=period_s):
                self._is_expiring = True
                self.process.spawn(self._end_at_errors(self._expire()))

    async def _expire(self) -> None:
        await self._store.expire()
        self._is_expiring = False

    async def _record_progress(self) -> None:
        while True:
            await self._progress.get()
            if self.leadership.has_progressed:
                await self.leadership.record_progress()

    # -- agents -----------------------------------------------------------------------------------

    def accept(self, node: int, end: Endpoint) -> None:
        """Accepts the connection of an agent."""
        self.process.spawn(self._serve_agent(node, _AgentEndpoint(end)))

    async def _serve_agent(self, node: int, line: _AgentEndpoint) -> None:
        inbox: _Queue[Any] = _Queue()
        line.end.on_message = inbox.put
        line.end.on_close = lambda: inbox.put(None)
        self._agents.append(line)
        try:
            if await self.leadership.admit(node, line):
                self.admitted.add(node)
                while (message := await inbox.get()) is not None:
                    await self.leadership.on_message(node, message)
        except ConflictError:  # Another coordinator has taken over.
            self.process.kill()
        except StoreError as error:
            self._launcher.log_event("gives up", node, repr(error))
        self._agents.remove(line)
        self.admitted.discard(node)
        self.leadership.on_disconnect(node, line)
        line.close()

    @property
    def fitted_rules(self) -> Rules | None:
        """The rules with raised memory estimates; None: none were raised, or the records have not
        been read yet."""
        return self.leadership.state.learning.fitted if self._is_restored else None

    @property
    def is_writing(self) -> bool:
        """Whether a record is not on the disk yet."""
        return self._disk.is_writing

    def on_agent_loss(self, node: int, reason: str) -> None:
        """Takes the launcher's message that the agent of a node is gone."""
        self.queue(NodeLost(node=node, reason=reason))

    # -- effects ----------------------------------------------------------------------------------

    def queue(self, event: Queued) -> None:
        """See Effects."""
        self._events.put(event)

    def notify(self, message: ToLauncher) -> None:
        """See Effects."""
        self._launcher.on_coordinator_message(self, message)

    def carry_out(self, command: Saving) -> None:
        """See Effects."""
        if isinstance(command, Discard) and command.reason:
            iteration, epoch, reason = command.iteration, command.epoch, command.reason
            self.notify(Unsaved(iteration=iteration, epoch=epoch, reason=reason))
        if isinstance(command, CheckSave):
            self.spoilt.add(command.source)
        self._num_requests += 1
        self._requests.put(command)

    # -- saves, as nodes/head/publisher.py has it --------------------------------------------------

    @property
    def may_miss_saves(self) -> bool:
        """Whether there may be saves that it cannot know of: the store has refused a request or
        does not answer; or a delayed request of an earlier coordinator may have published one after
        the saves were listed."""
        is_waiting = self.process.now_s - self._since_s >= TIMEOUT_S
        return self._is_refused or self._is_listed or is_waiting

    async def _serve_saves(self) -> None:
        """Sends requests to the store, one at a time."""
        await self._list_saves()
        while True:
            command = await self._requests.get()
            if self._is_unlisted:
                await self._list_saves()
            if command is not None:
                await self._carry_out(command)
                self._num_requests -= 1

    async def _list_saves(self) -> None:
        listed: list[Published] = []
        self._is_unlisted = not await self._request(lambda: listed.extend(self._launcher.published))
        if self._is_unlisted:
            self.process.spawn(self._list_again())
            return
        for published in listed:
            if published.source not in self._launcher.set_aside:
                self._announce(published)
        self._is_listed = True
        self.queue(SavesListed())

    async def _list_again(self) -> None:
        await self.process.sleep(_LIST_AGAIN_S)
        self._requests.put(None)

    async def _carry_out(self, command: Saving) -> None:
        match command:
            case Publish(iteration, epoch):
                is_complete = False

                def publish() -> None:
                    nonlocal is_complete
                    is_complete = self._launcher.publish(command)

                reason = "" if await self._request(publish) else "the store refuses"
                if not (reason or is_complete):  # An earlier coordinator gave the save up.
                    assert (iteration, epoch) in self._launcher.discarded, command
                    reason = "a layer is missing"
                if reason:
                    self.queue(
                        SaveFailed(
                            rank=BY_PUBLISHER, iteration=iteration, epoch=epoch, reason=reason
                        )
                    )
                else:
                    self._announce(Published(iteration, epoch))
                    self.notify(Saved(iteration=iteration, epoch=epoch))
            case Discard():
                await self._request(lambda: self._launcher.discard(command))
            case CheckSave(source):
                is_damaged = source in self._launcher.damaged

                def check() -> None:
                    if is_damaged:
                        self._launcher.set_aside.add(source)

                is_sound = await self._request(check) and not is_damaged
                if is_sound:
                    self.spoilt.discard(source)
                self.queue(SaveChecked(source, is_sound))

    async def _request(self, act: Callable[[], None]) -> bool:
        """Sends a request to the store; returns whether the store confirmed it."""
        self._since_s = self.process.now_s
        try:
            await self._launcher.saves.request(self.process, act)
        except CheckpointError:
            self._is_refused = True
            return False
        finally:
            self._since_s = math.inf
        return True

    def _announce(self, published: Published) -> None:
        self.known_since_s.setdefault(published.source, self._launcher.loop.now_s)
        self.queue(published)

    def on_place_reached(self, place: str, iteration: int) -> None:
        """See Effects."""
        self._launcher.on_coordinator_place(place, iteration)


def _reason(error: StoreError) -> str:
    return f"the coordinator cannot keep its records: {error}"


class _Queue(Generic[Item]):
    """A queue on which at most one task waits."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._getter: Future[None] | None = None

    def put(self, item: Item) -> None:
        """Adds an item."""
        self._items.append(item)
        waiting, self._getter = self._getter, None
        if waiting is not None:
            waiting.resolve(None)

    async def get(self) -> Item:
        """Removes and returns the first item, once there is one."""
        while not self._items:
            self._getter = Future()
            await self._getter
        return self._items.popleft()
