"""A head that hears nobody may be cut off itself, so it judges nobody."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from helpers.coordinated import HALVES, LEASE_S, NOW_S, small_rules, training_halves
from helpers.tasks import TIMEOUT_S, settle
from planaria.coordinator.commands import LeaseExpired, Saving, Tick
from planaria.coordinator.contact import HeadContact, Heard
from planaria.coordinator.frozen import replace
from planaria.coordinator.leadership import Leadership, Queued
from planaria.coordinator.membership.missing_members import arrival_s
from planaria.coordinator.state import Phase
from planaria.coordinator.step import step
from planaria.core.messages import (
    Heartbeat,
    HeartbeatRequested,
    HeartbeatTaken,
    NodeLost,
    ToNode,
    Welcome,
)
from planaria.core.persistent_map import PersistentMap
from planaria.core.records import ToLauncher
from planaria.nodes.head.journal import Flusher
from planaria.protocol.agent_lease import TICKS_PER_LEASE
from planaria.store.embedded import EmbeddedStore
from planaria.store.logbook import open_logbook

PATIENCE_S = 20 * LEASE_S
BEAT_S = LEASE_S / TICKS_PER_LEASE
NODES = (0, 1, 2, 3)


@dataclass
class Clock:
    """A clock that the test moves."""

    now_s: float = NOW_S

    def read(self) -> float:
        """The time."""
        return self.now_s


@dataclass
class Line:
    """A connection that remembers what it was told."""

    told: list[ToNode] = field(default_factory=list)
    is_closed: bool = False

    def tell(self, message: ToNode) -> None:
        """See AgentConnection."""
        self.told.append(message)

    def close(self) -> None:
        """See AgentConnection."""
        self.is_closed = True


@dataclass
class Effects:
    """The events that a leader queues."""

    events: list[Queued] = field(default_factory=list)

    def queue(self, event: Queued) -> None:
        """See Effects of leadership.py."""
        self.events.append(event)

    def notify(self, message: ToLauncher) -> None:
        """See Effects of leadership.py."""

    def carry_out(self, command: Saving) -> None:
        """See Effects of leadership.py."""

    def on_place_reached(self, place: str, iteration: int) -> None:
        """See Effects of leadership.py."""


class Head:
    """A head with members 0 to 3 on other machines, all connected."""

    def __init__(
        self, leadership: Leadership[Line], effects: Effects, store: EmbeddedStore
    ) -> None:
        self.leadership = leadership
        self.lines: dict[int, Line] = {}
        self._effects = effects
        self._store = store

    async def connect(self, node: int) -> Line:
        """Has the agent of a node connect."""
        line = self.lines[node] = Line()
        assert await self.leadership.admit(node, line)
        return line

    async def beat(self, *nodes: int) -> None:
        """Has these nodes send heartbeats over their newest connections."""
        for node in nodes:
            await self.leadership.on_message(node, Heartbeat(node=node, sent_s=NOW_S))

    async def answer(self, *nodes: int) -> None:
        """Has these nodes answer the newest request that they got."""
        for node in nodes:
            requests = [m for m in self.lines[node].told if isinstance(m, HeartbeatRequested)]
            answer = Heartbeat(node=node, sent_s=NOW_S, request=requests[-1].number)
            await self.leadership.on_message(node, answer)

    def close(self, *nodes: int) -> None:
        """Closes the newest connections of these nodes."""
        for node in nodes:
            self.leadership.on_disconnect(node, self.lines[node])

    @property
    def events(self) -> list[Queued]:
        """The events that were queued so far."""
        return self._effects.events

    async def lost_nodes(self) -> list[int]:
        """The nodes that are taken for lost so far, once the leases were looked at."""
        await self._store.expire()
        await settle()
        return [
            event.node
            for event in self._effects.events
            if isinstance(event, NodeLost | LeaseExpired)
        ]


def play(
    run: Callable[[Head, Clock], Coroutine[Any, Any, None]],
    *,
    patience_s: float,
    nodes: tuple[int, ...] = NODES,
) -> None:
    """Runs a head, to which these nodes have connected, under a clock of the test's own."""

    async def main() -> None:
        clock, effects = Clock(), Effects()
        contact = HeadContact(lease_s=LEASE_S, patience_s=patience_s, now_s=clock.read)
        store = EmbeddedStore(Flusher(), now_s=lambda: contact.lease_now_s)
        logbook = await open_logbook(store, "job", lease_s=LEASE_S)
        rules = small_rules()
        leadership = Leadership[Line](rules, logbook, effects, contact=contact)
        await leadership.restore(HALVES, predicted_s=1.0, now_s=NOW_S)
        leadership.state = training_halves(rules)
        watch = asyncio.create_task(leadership.watch_leases())
        head = Head(leadership, effects, store)
        for node in nodes:
            await head.connect(node)
        await asyncio.wait_for(run(head, clock), TIMEOUT_S)
        watch.cancel()

    asyncio.run(main())


def test_a_head_that_is_cut_off_for_a_minute_evicts_nobody() -> None:
    """Its members' leases have all run out, and each has a whole one to come back."""

    async def run(head: Head, clock: Clock) -> None:
        await head.beat(*NODES)
        for _ in range(10):
            clock.now_s += LEASE_S
            assert await head.lost_nodes() == []
        await head.beat(2)
        clock.now_s += LEASE_S - BEAT_S
        await head.beat(2)
        assert await head.lost_nodes() == []
        await head.beat(0, 1, 3)
        for _ in range(2 * TICKS_PER_LEASE):
            clock.now_s += BEAT_S
            await head.beat(*NODES)
        assert await head.lost_nodes() == []

    play(run, patience_s=PATIENCE_S)


def test_a_member_that_does_not_come_back_after_a_cut_is_lost_after_a_lease() -> None:
    """It was lost meanwhile, or it is cut off on its own."""

    async def run(head: Head, clock: Clock) -> None:
        await head.beat(*NODES)
        clock.now_s += 10 * LEASE_S
        await head.beat(0, 1, 2)
        for _ in range(TICKS_PER_LEASE + 1):
            clock.now_s += BEAT_S
            await head.beat(0, 1, 2)
        assert await head.lost_nodes() == [3]

    play(run, patience_s=PATIENCE_S)


def test_a_member_that_is_silent_is_lost_though_the_others_are_slow() -> None:
    """Else nobody would ever take its place where heartbeats take long: each is given a whole lease
    for the others' silence only once."""

    async def run(head: Head, clock: Clock) -> None:
        await head.beat(*NODES)
        for _ in range(2 * TICKS_PER_LEASE):
            clock.now_s += 3 * BEAT_S
            await head.beat(0, 1, 2)
        assert await head.lost_nodes() == [3]

    play(run, patience_s=PATIENCE_S)


def test_a_node_whose_connection_closed_is_lost_once_another_member_answers() -> None:
    """The head asks all others at once: that takes a round trip, not a beat."""

    async def run(head: Head, _clock: Clock) -> None:
        head.close(1)
        await head.beat(0, 2, 3)  # It may have been on its way before.
        before = await head.lost_nodes()
        await head.answer(3)

        assert before == []
        assert await head.lost_nodes() == [1]

    play(run, patience_s=PATIENCE_S)


def test_connections_that_close_for_all_members_say_nothing_of_any() -> None:
    """The network has failed, or the machine of the head. Who comes first is no proof of that."""

    async def run(head: Head, clock: Clock) -> None:
        head.close(*NODES)
        await head.connect(2)
        await head.answer(2)
        assert await head.lost_nodes() == []
        await head.connect(0)
        await head.connect(1)
        for _ in range(TICKS_PER_LEASE + 1):
            clock.now_s += BEAT_S
            await head.beat(0, 1, 2)
        assert await head.lost_nodes() == [3]

    play(run, patience_s=PATIENCE_S)


def test_a_member_that_has_not_come_does_not_hide_that_all_connections_have_closed() -> None:
    """It hangs, and this coordinator is newer than that: it has no connection that could close."""

    async def run(head: Head, _clock: Clock) -> None:
        head.close(0, 1, 2)
        await head.connect(2)
        await head.answer(2)
        assert await head.lost_nodes() == []

    play(run, patience_s=PATIENCE_S, nodes=(0, 1, 2))


def test_a_node_that_dies_while_the_only_other_one_is_cut_off_is_lost_after_it_comes_back() -> None:
    """The head cannot tell the two apart before that."""

    async def run(head: Head, clock: Clock) -> None:
        head.close(1, 2, 3)
        clock.now_s += 5 * LEASE_S
        assert await head.lost_nodes() == []
        await head.beat(0)
        assert await head.lost_nodes() == []
        for _ in range(TICKS_PER_LEASE + 1):
            clock.now_s += BEAT_S
            await head.beat(0)
        assert sorted(await head.lost_nodes()) == [1, 2, 3]

    play(run, patience_s=PATIENCE_S)


def test_only_members_show_that_the_head_is_not_cut_off() -> None:
    """A new node may be on the head's side of a cut that separates both from all members."""

    async def run(head: Head, clock: Clock) -> None:
        await head.beat(*NODES)
        await head.connect(4)
        for _ in range(5 * TICKS_PER_LEASE):
            clock.now_s += BEAT_S
            await head.beat(4)
        assert await head.lost_nodes() == []

    play(run, patience_s=PATIENCE_S)


def test_after_the_patience_of_all_members_they_are_lost() -> None:
    """They have ended themselves by then, whatever cut them off, but not a node that joins."""

    async def run(head: Head, clock: Clock) -> None:
        await head.beat(*NODES)
        clock.now_s += PATIENCE_S + LEASE_S
        assert await head.lost_nodes() == []
        await head.connect(4)
        for _ in range(TICKS_PER_LEASE + 1):
            clock.now_s += BEAT_S
            await head.beat(4)
        assert sorted(await head.lost_nodes()) == list(NODES)

    play(run, patience_s=PATIENCE_S)


def test_nodes_that_were_heard_before_they_became_members_are_not_lost_by_a_cut() -> None:
    """All members were lost for good, and the head was cut off as soon as others took their places:
    nobody had been heard as a member then, so their leases ran out in the cut."""
    clock = Clock()
    contact = HeadContact(lease_s=LEASE_S, patience_s=PATIENCE_S, now_s=clock.read)
    for _ in range(2 * round(PATIENCE_S / BEAT_S)):
        clock.now_s += BEAT_S
        contact.hear_other(4)
    before_s = contact.lease_now_s
    assert not contact.is_cut_off
    contact.add_members((4, 5).__contains__)
    assert contact.lease_now_s == pytest.approx(before_s)
    clock.now_s += PATIENCE_S

    assert contact.is_cut_off
    assert contact.lease_now_s - before_s < LEASE_S
    contact.add_members((4, 5).__contains__)
    clock.now_s += 2 * LEASE_S
    assert not contact.is_cut_off


def test_a_node_that_is_back_is_not_lost_if_another_one_answers_first() -> None:
    """It is asked as well, and its answer may be the slower one."""

    async def run(head: Head, _clock: Clock) -> None:
        head.close(1, 3)
        await head.connect(1)
        await head.answer(0)

        assert await head.lost_nodes() == [3]

    play(run, patience_s=PATIENCE_S)


def test_a_connection_that_closes_while_the_next_one_is_admitted_is_no_loss() -> None:
    """The agent left it because nothing came, and closed it because it was to be answered soon."""

    async def run(head: Head, _clock: Clock) -> None:
        leadership, new = head.leadership, Line()
        admission = asyncio.create_task(leadership.admit(1, new))
        await asyncio.sleep(0)
        head.close(1, 3)
        await head.answer(0)
        assert await admission
        assert await head.lost_nodes() == [3]
        await leadership.on_message(1, Heartbeat(node=1, sent_s=7.0))
        assert new.told[-1] == HeartbeatTaken(sent_s=7.0, taken_s=_clock.now_s)

    play(run, patience_s=PATIENCE_S)


def test_on_the_heads_machine_a_closed_connection_is_a_lost_node_at_once() -> None:
    """No network can fail there, and leases run out by the clock."""

    async def run(head: Head, clock: Clock) -> None:
        head.close(1)
        assert await head.lost_nodes() == [1]
        clock.now_s += LEASE_S
        assert sorted(await head.lost_nodes()) == [0, 1, 1, 2, 3]

    play(run, patience_s=0.0)


def test_all_that_members_had_time_for_begins_anew_after_a_silence_without_a_tick() -> None:
    """A link to a lost node was broken for a whole lease before that node's lease ended, which had
    begun anew: a node in good health was taken for the one that others could not reach."""

    async def run(head: Head, clock: Clock) -> None:
        clock.now_s += 4 * BEAT_S
        await head.beat(0)

        assert Tick(is_cut_off=True) in head.events

    play(run, patience_s=PATIENCE_S)


@pytest.mark.parametrize(("silence_s", "is_cut_off"), [(BEAT_S, False), (3 * BEAT_S, True)])
def test_a_head_is_cut_off_when_no_member_is_heard_for_some_beats(
    silence_s: float, is_cut_off: bool
) -> None:
    """Two beats of every member may be late, no more."""
    clock = Clock()
    contact = HeadContact(lease_s=LEASE_S, patience_s=PATIENCE_S, now_s=clock.read)
    before = contact.hear(0, leased=NODES)
    clock.now_s += silence_s

    assert before == Heard()
    assert contact.is_cut_off == is_cut_off


def test_a_node_that_connects_is_asked_after_those_whose_connections_closed() -> None:
    """It may be the first that can answer."""

    async def run(head: Head, _clock: Clock) -> None:
        head.close(1)
        await head.connect(2)
        await head.answer(2)
        assert await head.lost_nodes() == [1]

    play(run, patience_s=PATIENCE_S)


def test_an_agent_that_waits_for_a_slow_disk_hears_that_the_head_lives() -> None:
    """Else it would leave the connection, and the disk would have one lease more to write."""

    async def run(head: Head, _clock: Clock) -> None:
        new = Line()
        admission = asyncio.create_task(head.leadership.admit(1, new))
        await asyncio.sleep(0)
        head.leadership.tick()
        assert new.told == [Welcome(term=0)] * 2
        assert await admission
        head.leadership.tick()
        assert new.told.count(Welcome(term=0)) == 2

    play(run, patience_s=PATIENCE_S)


def test_the_clock_of_the_leases_never_goes_back() -> None:
    """A lease that was renewed before would last for longer than it says."""
    clock = Clock()
    contact = HeadContact(lease_s=LEASE_S, patience_s=PATIENCE_S, now_s=clock.read)
    times_s = []
    for silence_s in (0.1, LEASE_S, PATIENCE_S, 2 * PATIENCE_S, 0.1):
        clock.now_s += silence_s
        times_s.append(contact.lease_now_s)
        contact.hear(0, leased=NODES)
        times_s.append(contact.lease_now_s)

    assert times_s == sorted(times_s)


def test_members_that_have_not_come_are_not_missed_while_the_head_is_cut_off() -> None:
    """They cannot reach it: a head that came back without its network had ended the job."""
    rules = small_rules()
    state = replace(training_halves(rules), workers=PersistentMap())
    for _ in range(2 * int(arrival_s(LEASE_S) / BEAT_S)):
        state, commands = step(rules, state, Tick(is_cut_off=True), NOW_S)
        assert commands == ()
    assert state.membership.missing_ticks == 0
    assert state.phase is Phase.TRAINING
    assert step(rules, state, Tick(), NOW_S)[0].membership.missing_ticks == 1
