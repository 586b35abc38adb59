"""Who leads, and who is admitted, while the coordinator waits for its records."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from helpers.coordinated import (
    HALVES,
    LEASE_S,
    LOWER,
    NEXT,
    NOW_S,
    UPPER,
    iteration_report,
    node_loss,
    small_rules,
    stop_report,
    training_halves,
)
from helpers.jobs import shaped_plan
from helpers.tasks import TIMEOUT_S, settle
from planaria.coordinator.commands import LeaseExpired, MembersRecorded, Saving, Tick
from planaria.coordinator.contact import HeadContact
from planaria.coordinator.leadership import Leadership, Queued
from planaria.coordinator.step import Event
from planaria.core.clock_offsets import ClockOffset, ClockReading
from planaria.core.messages import (
    Abort,
    Heartbeat,
    HeartbeatTaken,
    IterationDone,
    NodeArrived,
    ToNode,
)
from planaria.core.records import Members, Progress, Recorded, ToLauncher
from planaria.errors import ConflictError
from planaria.nodes.head.journal import Flusher
from planaria.store.embedded import EmbeddedStore
from planaria.store.logbook import open_logbook
from planaria.store.store import Change, StoreState

NODE = 3
LOCAL = HeadContact(lease_s=LEASE_S, patience_s=0.0, now_s=lambda: NOW_S)


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

    queued: list[Queued] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    notices: list[ToLauncher] = field(default_factory=list)

    def queue(self, event: Queued) -> None:
        self.queued.append(event)

    def notify(self, message: ToLauncher) -> None:
        self.notices.append(message)

    def carry_out(self, command: Saving) -> None:
        pass

    def on_place_reached(self, place: str, iteration: int) -> None:
        self.places.append((place, iteration))


def gated(run: Callable[[EmbeddedStore, asyncio.Event], Awaitable[None]]) -> None:
    """Runs with a store whose writes are durable only while the gate is open."""

    async def main() -> None:
        gate = asyncio.Event()
        gate.set()

        async def make_durable(_changes: Sequence[Change], _state: StoreState) -> None:
            await gate.wait()

        store = EmbeddedStore(Flusher(make_durable=make_durable), now_s=lambda: NOW_S)
        await asyncio.wait_for(run(store, gate), TIMEOUT_S)

    asyncio.run(main())


def test_of_two_that_become_leaders_at_once_the_second_is_one_and_the_first_writes_no_more() -> (
    None
):
    """The second had given up, and with it the job, though it is the one who is to lead."""

    async def run(store: EmbeddedStore, gate: asyncio.Event) -> None:
        gate.clear()
        opened = [
            asyncio.create_task(open_logbook(store, "job", lease_s=LEASE_S)) for _ in range(2)
        ]
        await settle()
        gate.set()
        first, second = [await task for task in opened]
        assert (first.term, second.term) == (0, 1)
        await second.record_progress(Progress(num_committed=1, ends=False))
        with pytest.raises(ConflictError):
            await first.record_progress(Progress(num_committed=2, ends=False))

    gated(run)


def test_each_record_names_the_clock_of_its_moments() -> None:
    """So that the next coordinator knows whether it reads the same one."""

    async def run(store: EmbeddedStore, _gate: asyncio.Event) -> None:
        rules = replace(small_rules(), clock="this boot's")
        logbook = await open_logbook(store, "job", lease_s=LEASE_S)
        leadership = Leadership[FakeLine](rules, logbook, FakeHands(), contact=LOCAL)
        await leadership.restore(shaped_plan((2, 2), 6), predicted_s=1.0, now_s=NOW_S)
        records = await (await open_logbook(store, "job", lease_s=LEASE_S)).read()
        assert records is not None
        assert records.members.recorded == ClockReading("this boot's", NOW_S)

    gated(run)


def test_the_launcher_hears_of_the_records_from_which_a_coordinator_goes_on() -> None:
    """That of a head which takes a run up took the first members for the newest: a rescue began
    with them, and others got the places of those who had not come back yet."""

    async def run(store: EmbeddedStore, _gate: asyncio.Event) -> None:
        recorded: list[list[Members]] = []
        for _ in range(2):
            logbook, hands = await open_logbook(store, "job", lease_s=LEASE_S), FakeHands()
            leadership = Leadership[FakeLine](small_rules(), logbook, hands, contact=LOCAL)
            await leadership.restore(shaped_plan((2, 2), 6), predicted_s=1.0, now_s=NOW_S)
            notices = [each for each in hands.notices if isinstance(each, Recorded)]
            recorded.append([each.members for each in notices if each.members is not None])
            await leadership.handle(node_loss(NODE), NOW_S)

        assert recorded[1][0].epoch == 1
        assert NODE in recorded[1][0].gone

    gated(run)


def test_a_node_that_is_lost_while_it_is_admitted_is_told_so() -> None:
    """Its old connection closes while the lease for the new one is written down.

    It had been renewing that lease for good, member of nothing.
    """

    async def run(store: EmbeddedStore, gate: asyncio.Event) -> None:
        logbook = await open_logbook(store, "job", lease_s=LEASE_S)
        leadership = Leadership[FakeLine](small_rules(), logbook, FakeHands(), contact=LOCAL)
        await leadership.restore(shaped_plan((2, 2), 6), predicted_s=1.0, now_s=NOW_S)
        old, new = FakeLine(), FakeLine()
        assert await leadership.admit(NODE, old)

        gate.clear()
        admission = asyncio.create_task(leadership.admit(NODE, new))
        await settle()
        leadership.on_disconnect(NODE, old)
        loss = asyncio.create_task(leadership.handle(node_loss(NODE), NOW_S))
        await settle()
        gate.set()
        await loss

        assert not await admission
        assert isinstance(new.told[-1], Abort)
        assert NODE not in new.told[-1].nodes
        assert not await logbook.renew(NODE)

    gated(run)


def test_a_node_that_came_back_before_the_end_of_its_lease_was_handled_is_not_lost() -> None:
    """The leader wrote a record meanwhile, and evicted the node for the end of its older lease."""

    async def run(store: EmbeddedStore, gate: asyncio.Event) -> None:
        logbook = await open_logbook(store, "job", lease_s=LEASE_S)
        leadership = Leadership[FakeLine](small_rules(), logbook, FakeHands(), contact=LOCAL)
        await leadership.restore(shaped_plan((2, 2), 6), predicted_s=1.0, now_s=NOW_S)
        ended = LeaseExpired(NODE)

        for node in range(NODE + 1):
            assert await leadership.admit(node, FakeLine())
        await leadership.handle(ended, NOW_S)
        assert NODE not in leadership.state.membership.gone

        await logbook.revoke(NODE)
        gate.clear()
        admission = asyncio.create_task(leadership.admit(NODE, FakeLine()))
        await settle()
        await leadership.handle(ended, NOW_S)
        gate.set()
        assert await admission
        assert NODE not in leadership.state.membership.gone

        await logbook.revoke(NODE)
        await leadership.handle(ended, NOW_S)
        assert NODE in leadership.state.membership.gone

    gated(run)


def test_a_tick_tells_that_a_member_is_about_to_be_lost() -> None:
    """Its survivor, which complains of a broken link, was evicted before its lease had ended."""
    now_s = NOW_S

    async def run(store: EmbeddedStore, _gate: asyncio.Event) -> None:
        nonlocal now_s
        contact = HeadContact(lease_s=LEASE_S, patience_s=0.0, now_s=lambda: now_s)
        logbook, hands = await open_logbook(store, "job", lease_s=LEASE_S), FakeHands()
        leadership = Leadership[FakeLine](small_rules(), logbook, hands, contact=contact)
        await leadership.restore(shaped_plan((2, 2), 6), predicted_s=1.0, now_s=NOW_S)
        for node in range(NODE + 1):
            assert await leadership.admit(node, FakeLine())
        now_s += LEASE_S - 0.1
        for node in range(NODE):
            await leadership.on_message(node, Heartbeat(node=node, sent_s=now_s))
        for later_s in (0.0, 0.2):
            now_s += later_s
            leadership.tick()
        await leadership.on_message(NODE, Heartbeat(node=NODE, sent_s=now_s))
        leadership.tick()

        ticks = [event for event in hands.queued if isinstance(event, Tick)]
        assert [tick.is_lease_overdue for tick in ticks] == [False, True, False]

    gated(run)


def test_a_recovery_is_that_of_the_newest_iteration_that_anyone_answers_from() -> None:
    """One who has not heard of the last commit may answer after one who has.

    A coordinator that was to be killed in that recovery lived where all went back, once in dozens.
    """

    async def run(store: EmbeddedStore, _gate: asyncio.Event) -> None:
        rules, hands = small_rules(), FakeHands()
        logbook = await open_logbook(store, "job", lease_s=LEASE_S)
        leadership = Leadership[FakeLine](rules, logbook, hands, contact=LOCAL)
        await leadership.restore(HALVES, predicted_s=1.0, now_s=NOW_S)
        leadership.state = training_halves(rules)
        events: list[Event] = [
            node_loss(3),
            MembersRecorded(1),
            stop_report(0, 1, layers=LOWER, age=NEXT + 1, last=NEXT),
            stop_report(1, 1, layers=UPPER, age=NEXT, last=NEXT - 1),
        ]
        for event in events:
            await leadership.handle(event, NOW_S)

        assert hands.places == [("detect", NEXT), ("detect", NEXT + 1), ("detect", NEXT + 1)]

    gated(run)


def _report(began_s: float) -> IterationDone:
    return msgspec.structs.replace(iteration_report(0, 0, epoch=0), began_s=began_s)


def test_a_node_s_moments_are_placed_on_the_clock_of_the_head() -> None:
    """Not before its offset is known; exactly if it reads the same clock, whatever it measured."""

    async def run(store: EmbeddedStore, _gate: asyncio.Event) -> None:
        rules = replace(small_rules(), clock="this boot's")
        logbook = await open_logbook(store, "job", lease_s=LEASE_S)
        hands = FakeHands()
        leadership = Leadership[FakeLine](rules, logbook, hands, contact=LOCAL)
        await leadership.restore(shaped_plan((2, 2), 6), predicted_s=1.0, now_s=NOW_S)
        lines = {node: FakeLine() for node in (0, 1)}
        for node, line in lines.items():
            assert await leadership.admit(node, line)
        hands.queued.clear()
        arrived = NodeArrived(node=1, rank=1, machine="m", clock="this boot's")
        offset = ClockOffset(1e6, 0.25, measured_s=50.0, drift=0.001)
        await leadership.on_message(0, _report(7.0))
        await leadership.on_message(1, arrived)
        for node in lines:
            await leadership.on_message(node, Heartbeat(node=node, sent_s=40.0, offset=offset))
            await leadership.on_message(node, _report(40.0))

        placed = [
            (message.began_s, message.clock_error_s)
            for message in hands.queued
            if isinstance(message, IterationDone)
        ]
        assert placed == [(None, 0.0), (1e6 + 40.0, 0.26), (40.0, 0.0)]
        assert lines[0].told[-1] == HeartbeatTaken(sent_s=40.0, taken_s=NOW_S)

    gated(run)
