"""Who is admitted, while the coordinator waits for its records."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinated import LEASE_S, NOW_S, gone, small_rules
from jobs import shaped_plan
from planaria.coordinator.coordinator import Event
from planaria.coordinator.leadership import Leadership
from planaria.coordinator.logbook import opened_logbook
from planaria.coordinator.state import Discard, Publish
from planaria.coordinator.store import Change, StoreState
from planaria.core.messages import Abort, ToNode
from planaria.core.records import ToLauncher
from planaria.nodes.journal import MemoryStore
from tasks import TIMEOUT_S, settle

NODE = 3


@dataclass
class FakeLine:
    """A connection that remembers what it was told."""

    told: list[ToNode] = field(default_factory=list)

    def tell(self, message: ToNode) -> None:
        self.told.append(message)

    def close(self) -> None:
        pass


@dataclass
class FakeHands:
    """What a leader does, written down."""

    queued: list[Event] = field(default_factory=list)

    def queue(self, event: Event) -> None:
        self.queued.append(event)

    def notify(self, message: ToLauncher) -> None:
        pass

    def keep(self, command: Publish | Discard) -> None:
        pass

    def reached(self, place: str, iteration: int) -> None:
        pass


def test_a_node_that_is_lost_while_it_is_admitted_is_told_so() -> None:
    """Its old connection closes while the lease for the new one is written down.

    It had been renewing that lease for good, member of nothing.
    """

    async def run() -> None:
        gate = asyncio.Event()
        gate.set()

        async def make_durable(_changes: Sequence[Change], _state: StoreState) -> None:
            await gate.wait()

        store = MemoryStore(now_s=lambda: NOW_S, make_durable=make_durable)
        logbook = await opened_logbook(store, "job", lease_s=LEASE_S)
        leadership = Leadership[FakeLine](small_rules(), logbook, FakeHands())
        await leadership.restore(shaped_plan((2, 2), 6), predicted_s=1.0, now_s=NOW_S)
        old, new = FakeLine(), FakeLine()
        assert await leadership.admit(NODE, old)

        gate.clear()
        admission = asyncio.create_task(leadership.admit(NODE, new))
        await settle()
        leadership.left(NODE, old)
        loss = asyncio.create_task(leadership.handle(gone(NODE), NOW_S))
        await settle()
        gate.set()
        await loss

        assert not await admission
        assert isinstance(new.told[-1], Abort)
        assert NODE not in new.told[-1].nodes
        assert not await logbook.renew(NODE)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
