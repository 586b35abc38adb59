"""What the leader writes to agents that come back, for which it has little time each."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

from helpers.coordinated import HALVES, LEASE_S, NOW_S, small_rules, worker
from helpers.tasks import TIMEOUT_S
from planaria.coordinator.commands import Saving
from planaria.coordinator.contact import HeadContact
from planaria.coordinator.leadership import Leadership, Queued
from planaria.core.messages import Heartbeat, StartEpoch
from planaria.core.records import ToLauncher
from planaria.nodes.head.journal import Flusher
from planaria.nodes.head.leader import _AgentSocket, _Frames
from planaria.store.embedded import EmbeddedStore
from planaria.store.logbook import open_logbook
from planaria.transport.frames import FrameDecoder, order_of

NUM_RETURNS = 20


@dataclass
class FakeWriter:
    """A stream that keeps each frame as it was given."""

    frames: list[bytes] = field(default_factory=list)

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.frames.append(data)

    def close(self) -> None:
        pass


class FakeEffects:
    """Queues what the leader decides, and does nothing else."""

    def __init__(self) -> None:
        self.queued: list[Queued] = []

    def queue(self, event: Queued) -> None:
        self.queued.append(event)

    def notify(self, message: ToLauncher) -> None:
        pass

    def carry_out(self, command: Saving) -> None:
        pass

    def on_place_reached(self, place: str, iteration: int) -> None:
        pass


def agent_of(frames: _Frames) -> tuple[_AgentSocket, FakeWriter]:
    """The connection of an agent, and what is written to it."""
    writer = FakeWriter()
    return _AgentSocket(cast(asyncio.StreamWriter, writer), frames), writer


def orders_in(writer: FakeWriter) -> list[bytes]:
    """The frames of orders to begin an epoch, the very objects that were written."""
    return [
        data
        for data in writer.frames
        if any(isinstance(order_of(body), StartEpoch) for body in FrameDecoder().feed(data))
    ]


def test_the_order_to_begin_an_epoch_is_encoded_once_for_all_agents_that_come_back() -> None:
    """It names all ranks, and after a cut of the head's network each agent gets it. Each was
    welcomed first, and some had a heartbeat answered, so it was encoded each time."""
    asyncio.run(asyncio.wait_for(check_returns(), TIMEOUT_S))


async def check_returns() -> None:
    store, effects, frames = EmbeddedStore(Flusher(), now_s=lambda: NOW_S), FakeEffects(), _Frames()
    logbook = await open_logbook(store, "job", lease_s=LEASE_S)
    contact = HeadContact(lease_s=LEASE_S, patience_s=0.0, now_s=lambda: NOW_S)
    leadership = Leadership[_AgentSocket](small_rules(), logbook, effects, contact=contact)
    await leadership.restore(HALVES, predicted_s=1.0, now_s=NOW_S)
    first = [agent_of(frames) for _ in HALVES.nodes]
    for node, (agent, _) in zip(HALVES.nodes, first, strict=True):
        assert await leadership.admit(node, agent)
        effects.queue(worker(node))
    while effects.queued:
        await leadership.handle(effects.queued.pop(0), NOW_S)
    back = [(node, *agent_of(frames)) for node in (*HALVES.nodes,) * (NUM_RETURNS // 4)]
    for node, agent, _ in back:
        assert await leadership.admit(node, agent)
        await leadership.on_message(node, Heartbeat(node=node, sent_s=NOW_S))

    writers = [writer for _, writer in first] + [writer for _, _, writer in back]
    orders = [order for writer in writers for order in orders_in(writer)]
    assert len(orders) == len(first) + NUM_RETURNS
    assert len({id(order) for order in orders}) == 1
