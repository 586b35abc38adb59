"""A modelled process of the coordinator around the real one: an inbox, connections, ticks.

Source: nodes/leader.py, whose order of things it keeps.
"""

from collections import deque
from collections.abc import Awaitable
from typing import Any, Final, Generic, Protocol, TypeVar

from planaria.coordinator.agent_lease import TICKS_PER_LEASE
from planaria.coordinator.coordinator import Event
from planaria.coordinator.embedded import EmbeddedStore
from planaria.coordinator.leadership import Leadership, may_expire
from planaria.coordinator.logbook import opened_logbook
from planaria.coordinator.state import Discard, Ending, Publish, Published, Saving, SetAside, Tick
from planaria.core.messages import NodeLost, Shutdown, ToNode
from planaria.core.records import Beat, Ended, Leading, Saved, ToLauncher, Unsaved
from planaria.errors import StoreError
from planaria.simulator.loop import Process, Waiting
from planaria.simulator.network import End
from planaria.simulator.scenario import LEASE_S, PlannedJob

CANNOT_RECORD: Final = "the coordinator cannot keep its records"
Item = TypeVar("Item")


class Launcher(Protocol):
    """Who started the coordinator; it writes to disk for it, too."""

    job: PlannedJob
    published: list[Published]
    damaged: set[str]
    set_aside: set[str]

    def hear(self, leader: "SimulatedLeader", message: ToLauncher) -> None:
        """The coordinator tells something."""

    def happened(self, what: str, *facts: object) -> None:
        """Something that a reader may want to know."""

    def publish(self, command: Publish) -> bool:
        """Creates the manifest of a save; False if a file of it is missing."""

    def reached_by_leader(self, place: str, iteration: int) -> None:
        """The coordinator is at a place at which a fault may strike."""


class _Line:
    """A connection to an agent."""

    def __init__(self, end: End) -> None:
        self.end = end

    def tell(self, message: ToNode) -> None:
        """See Line."""
        self.end.send(message)

    def close(self) -> None:
        """See Line."""
        self.end.close()


class SimulatedLeader:
    """One process of the coordinator.

    Args:
        piece_bytes: of a record, in one value of the store.

    Attributes:
        leadership: what it decides with, once it has read its records.
        is_serving: it takes connections.
    """

    def __init__(
        self, process: Process, store: EmbeddedStore, launcher: Launcher, *, piece_bytes: int
    ) -> None:
        self.process = process
        self.leadership: Leadership[_Line]
        self.is_serving = False
        self._store = store
        self._piece_bytes = piece_bytes
        self._launcher = launcher
        self._lines: list[_Line] = []
        self._events: _Inbox[Event] = _Inbox()
        self._progress: _Inbox[None] = _Inbox()

    async def run(self) -> None:
        """Goes on from the records, and handles events until the job ends."""
        await self._end_at_errors(self._lead())

    async def _end_at_errors(self, task: Awaitable[None]) -> None:
        """What the store refuses to any task ends the process."""
        try:
            await task
        except StoreError as error:
            reason = f"{CANNOT_RECORD}: {error}"
            self._end(
                Ended(ending=Ending.LOST.value, reason=reason, failure=None, nodes=(), epoch=0)
            )
            self.process.kill()

    async def _lead(self) -> None:
        job, name = self._launcher.job, self._launcher.job.rules.job.name
        logbook = await opened_logbook(
            self._store, name, lease_s=LEASE_S, piece_bytes=self._piece_bytes
        )
        self.leadership = Leadership(job.rules, logbook, self)
        self.process.spawn(self._beat())
        await self.leadership.restore(
            job.plan, predicted_s=job.predicted_s, now_s=self.process.now_s
        )
        for published in self._launcher.published:
            if published.source not in self._launcher.set_aside:
                self.queue(published)
        await self.leadership.begin_leases()
        self.is_serving = True
        self.notify(Leading(term=logbook.term, now_s=self.process.now_s))
        self.process.spawn(self._end_at_errors(self._tick()))
        self.process.spawn(self._end_at_errors(self.leadership.watch_leases()))
        self.process.spawn(self._end_at_errors(self._record_progress()))
        while self.leadership.ended is None:
            await self.leadership.handle(await self._events.get(), self.process.now_s)
            if self.leadership.has_progressed:
                self._progress.put(None)
        self._end(self.leadership.ended)

    def _end(self, ended: Ended) -> None:
        self.notify(ended)
        for line in self._lines:
            line.tell(Shutdown())

    async def _beat(self) -> None:
        while True:
            self.notify(Beat())
            await self.process.sleep(LEASE_S / TICKS_PER_LEASE)

    async def _tick(self) -> None:
        period_s = LEASE_S / TICKS_PER_LEASE
        last_s = self.process.now_s
        while True:
            await self.process.sleep(period_s)
            now_s = self.process.now_s
            if may_expire(now_s, last_s, period_s=period_s):
                await self._store.expire()
            last_s = now_s
            self.queue(Tick())

    async def _record_progress(self) -> None:
        while True:
            await self._progress.get()
            if self.leadership.has_progressed:
                await self.leadership.record_progress()

    # -- agents -----------------------------------------------------------------------------------

    def accept(self, node: int, end: End) -> None:
        """An agent has connected."""
        self.process.spawn(self._serve_agent(node, _Line(end)))

    async def _serve_agent(self, node: int, line: _Line) -> None:
        inbox: _Inbox[Any] = _Inbox()
        line.end.received = inbox.put
        line.end.closed = lambda: inbox.put(None)
        self._lines.append(line)
        try:
            if await self.leadership.admit(node, line):
                while (message := await inbox.get()) is not None:
                    await self.leadership.take(node, message)
        except StoreError as error:
            self._launcher.happened("gives up", node, repr(error))
        self._lines.remove(line)
        self.leadership.left(node, line)
        line.close()

    def lost(self, node: int, reason: str) -> None:
        """The launcher's word that the process of a node is gone."""
        self.queue(NodeLost(node=node, reason=reason))

    # -- hands ------------------------------------------------------------------------------------

    def queue(self, event: Event) -> None:
        """See Hands."""
        self._events.put(event)

    def notify(self, message: ToLauncher) -> None:
        """See Hands."""
        self._launcher.hear(self, message)

    def keep(self, command: Saving) -> None:
        """See Hands."""
        match command:
            case Publish(iteration, epoch):
                assert self._launcher.publish(command), command
                self.queue(Published(iteration, epoch))
                self.notify(Saved(iteration=iteration, epoch=epoch))
            case Discard(iteration, epoch, reason):
                self.notify(Unsaved(iteration=iteration, epoch=epoch, reason=reason))
            case SetAside(source):
                assert source in self._launcher.damaged, source
                self._launcher.set_aside.add(source)

    def reached(self, place: str, iteration: int) -> None:
        """See Hands."""
        self._launcher.reached_by_leader(place, iteration)


class _Inbox(Generic[Item]):
    """A queue, for which one task waits."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._waiting: Waiting[None] | None = None

    def put(self, item: Item) -> None:
        """Adds an item."""
        self._items.append(item)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.resolve(None)

    async def get(self) -> Item:
        """The first item, once there is one."""
        while not self._items:
            self._waiting = Waiting()
            await self._waiting
        return self._items.popleft()
