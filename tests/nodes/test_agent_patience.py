"""An agent on another machine looks for its coordinator when it is lost."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from helpers.heads import CREDENTIALS
from helpers.offered_machines import Clock
from planaria.checkpoint.disk.parts import HeadMark, RunPlace
from planaria.checkpoint.disk.storage import Directory
from planaria.core.job import CheckpointConfig, ClusterConfig, JobConfig
from planaria.core.messages import (
    Heartbeat,
    HeartbeatTaken,
    NodeArrived,
    Shutdown,
    ToNode,
    Welcome,
)
from planaria.core.specs import NodeSpec
from planaria.nodes import agent as agent_module
from planaria.nodes import known_heads
from planaria.nodes.agent import _Agent
from planaria.nodes.known_heads import endpoints_by_child
from planaria.nodes.part_reports import PartReports
from planaria.transport.frames import (
    NODES,
    FrameDecoder,
    Role,
    derive,
    fact_of,
    frame,
    shake_hands,
)
from planaria.transport.probe import NO_NODE
from planaria.transport.sockets import Address, Resolve
from planaria.transport.timekeeping import clock_name

TOKEN = b"a token of 32 bytes for this test"
LEASE_S = 0.5
TIMEOUT_S = 20.0


class Line:
    """The coordinator's end of a connection to the agent.

    Attributes:
        messages: what the agent says.
        is_closed: whether the agent has closed the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.messages: asyncio.Queue[object] = asyncio.Queue()
        self.is_closed = asyncio.Event()
        self._reader, self._writer = reader, writer

    def tell(self, message: ToNode) -> None:
        """Sends a message to the agent."""
        self.tell_bytes(frame(message))

    def tell_bytes(self, data: bytes) -> None:
        """Sends bytes to the agent."""
        self._writer.write(data)

    def close(self) -> None:
        """Closes the connection, as the coordinator's end does when its process ends."""
        self._writer.close()

    async def read(self) -> None:
        """Reads what the agent says until it closes the connection."""
        decoder = FrameDecoder()
        with contextlib.suppress(ConnectionError):  # A connection that was left is aborted.
            while data := await self._reader.read(1 << 16):
                for body in decoder.feed(data):
                    self.messages.put_nowait(fact_of(body))
        self.is_closed.set()
        self._writer.close()


@pytest.fixture
def lifeline_fd() -> Iterator[int]:
    """The end of a lifeline that stays open."""
    near, far = os.pipe()
    yield near
    os.close(near)
    os.close(far)


def with_agent(
    play: Callable[[asyncio.Queue[Line]], Awaitable[None]],
    lifeline_fd: int,
    *,
    patience_s: float,
    parts: str = "",
    head_fds: Sequence[int] = (),
) -> None:
    """Runs an agent without workers against a coordinator that `play` plays, and then ends."""

    async def run() -> None:
        lines: asyncio.Queue[Line] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            key = derive(TOKEN, NODES)
            await shake_hands(reader, writer, token=key, role=Role.ACCEPT, identity=NO_NODE)
            lines.put_nowait(line := Line(reader, writer))
            await line.read()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        spec = NodeSpec(
            job=JobConfig(cluster=ClusterConfig(lease_s=LEASE_S)),
            node=4,
            token=TOKEN,
            coordinator=server.sockets[0].getsockname(),
            worker="",
            cache_directory="",
            patience_s=patience_s,
            parts=parts,
        )
        agent = asyncio.create_task(_Agent(spec, [], lifeline_fd, head_fds).run())
        async with asyncio.timeout(TIMEOUT_S), server:
            await play(lines)
            server.close()
            await agent

    asyncio.run(run())


async def first_heartbeat(line: Line) -> Heartbeat:
    """The next heartbeat on a connection."""
    while True:
        if isinstance(message := await line.messages.get(), Heartbeat):
            return message


def test_a_silent_connection_is_left_and_closed_only_when_another_is_answered(
    lifeline_fd: int,
) -> None:
    """A coordinator takes a closed connection for a lost node, so the agent, which may be the one
    that is cut off, closes none before it is heard elsewhere."""

    async def play(lines: asyncio.Queue[Line]) -> None:
        silent = await lines.get()
        silent.tell(Welcome(term=0))
        line = await lines.get()
        first = await line.messages.get()
        heartbeat = await first_heartbeat(line)
        was_closed = silent.is_closed.is_set()
        line.tell(HeartbeatTaken(sent_s=heartbeat.sent_s))
        await silent.is_closed.wait()
        line.tell(Shutdown())

        assert isinstance(first, NodeArrived)  # What it said before may never have arrived.
        assert not was_closed

    with_agent(play, lifeline_fd, patience_s=60.0)


def test_a_coordinator_of_an_older_term_is_left(lifeline_fd: int) -> None:
    """An old head may go on, out of reach of the new one. The node is still a member there."""

    async def play(lines: asyncio.Queue[Line]) -> None:
        (await lines.get()).tell(Welcome(term=7))
        old = await lines.get()
        old.tell(Welcome(term=6))
        await old.is_closed.wait()
        new = await lines.get()
        new.tell(Welcome(term=7))
        new.tell(Shutdown())

    with_agent(play, lifeline_fd, patience_s=60.0)


def test_coordinators_of_an_older_term_alone_do_not_keep_a_node_from_giving_up(
    lifeline_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new head was lost for good, and the old one was back. Nodes connected to that again and
    again, left it each time, and never saved what they held."""
    ends: list[str] = []

    async def play(lines: asyncio.Queue[Line]) -> None:
        monkeypatch.setattr(_Agent, "_end_node", lambda *args: end_agent(ends, *args))
        new = await lines.get()
        new.tell(Welcome(term=7))
        new.close()
        while not ends:
            with contextlib.suppress(TimeoutError):  # Nobody connects any more.
                (await asyncio.wait_for(lines.get(), LEASE_S)).tell(Welcome(term=6))

    with_agent(play, lifeline_fd, patience_s=2 * LEASE_S)

    assert "unanswered" in ends[0]


def end_agent(ends: list[str], agent: _Agent, reason: str) -> None:
    """Ends an agent that would end its process, and notes the reason."""
    ends.append(reason)
    agent._is_shut_down = True
    agent._session.cancel()


def test_a_coordinator_that_breaks_the_protocol_is_left(lifeline_fd: int) -> None:
    """The node connects again; nothing else happens to it."""

    async def play(lines: asyncio.Queue[Line]) -> None:
        for nonsense in (b"\x00\x00\x00\x02{}", b"\xff" * 4, b"\x00\x00\x00\x01["):
            line = await lines.get()
            line.tell_bytes(nonsense)
            await line.is_closed.wait()
        (await lines.get()).tell(Shutdown())

    with_agent(play, lifeline_fd, patience_s=60.0)


def test_a_node_ends_itself_when_nobody_answered_in_its_patience(
    lifeline_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for the head on several connections before that, and then there is none."""
    ends: list[str] = []

    async def play(lines: asyncio.Queue[Line]) -> None:
        monkeypatch.setattr(_Agent, "_end_node", lambda *args: end_agent(ends, *args))
        for _ in range(3):
            await lines.get()

    with_agent(play, lifeline_fd, patience_s=2 * LEASE_S)

    assert "unanswered" in ends[0]


@pytest.mark.parametrize(
    ("patience_s", "is_leaving"),
    [(2 * LEASE_S, False), (3600.0, True)],
    ids=["no head for long", "taken away"],
)
def test_a_node_that_saves_by_itself_leaves_the_head_for_good_first(
    patience_s: float, is_leaving: bool, lifeline_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a head that comes back meanwhile would wait for its answer. Its machine is told, or it
    would name the node to such a head. A node that will be taken away does not wait for one: it
    would be killed with what only it holds."""
    saves: list[int] = []
    given_up_fd, head_lost_fd = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))

    async def save(agent: _Agent, _: PartReports) -> None:
        session = agent._session
        await asyncio.sleep(LEASE_S)  # Time to connect again, if it would.
        assert agent._to_coordinator is None
        assert agent._session is session
        assert not agent._silent_writers
        assert os.eventfd_read(given_up_fd) == 1
        saves.append(agent._spec.node)

    async def play(lines: asyncio.Queue[Line]) -> None:
        await lines.get()
        if is_leaving:
            os.kill(os.getpid(), signal.SIGTERM)  # The agent handles it.
            return
        for _ in range(2):
            await lines.get()

    monkeypatch.setattr(_Agent, "_save_parts", save)
    parts, head_fds = "run-000001-00", (given_up_fd, head_lost_fd)
    with_agent(play, lifeline_fd, patience_s=patience_s, parts=parts, head_fds=head_fds)
    for descriptor in head_fds:
        os.close(descriptor)

    assert saves == [4]


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_an_agent_measures_how_far_the_head_s_clock_is_from_its_own(
    patience_s: float, lifeline_fd: int
) -> None:
    """It tells so with its heartbeats, from the first answer on. Another head has another clock."""
    shifts_s = (1e6, -7e5)

    async def play(lines: asyncio.Queue[Line]) -> None:
        for shift_s in shifts_s:
            line = await lines.get()
            arrived = await line.messages.get()
            assert isinstance(arrived, NodeArrived)
            assert arrived.clock == clock_name()
            line.tell(Welcome(term=0))
            heartbeat = await first_heartbeat(line)
            assert heartbeat.offset is None
            now_s = time.monotonic()
            line.tell(HeartbeatTaken(sent_s=heartbeat.sent_s, taken_s=now_s + shift_s))
            heartbeat = await first_heartbeat(line)
            while heartbeat.offset is None:  # One that was on its way when it heard the answer.
                heartbeat = await first_heartbeat(line)
            assert heartbeat.offset.offset_s == pytest.approx(shift_s, abs=heartbeat.offset.error_s)
            assert 0.0 < heartbeat.offset.error_s <= time.monotonic() - now_s + LEASE_S
            if shift_s == shifts_s[-1]:
                line.tell(Shutdown())
            else:
                line.close()

    with_agent(play, lifeline_fd, patience_s=patience_s)


def test_a_node_finds_a_head_at_an_address_that_it_was_not_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It reads it at the place of saves. All addresses are tried in half a lease then, too."""
    given, named = ("10.0.0.1", 7320), ("10.0.0.2", 7320)
    tries: list[tuple[tuple[Address, ...], float]] = []

    async def refuse(
        addresses: tuple[Address, ...],
        *_: object,
        timeout_s: float,
        identity: int,
        key: bytes,
        resolve: Resolve,
    ) -> None:
        assert (identity, key) == (0, derive(TOKEN, NODES))
        assert resolve is endpoints_by_child
        tries.append((addresses, timeout_s))
        raise ConnectionError("no answer in time")

    async def look(agent: _Agent) -> None:
        while tries[-1:] != [((named, given), LEASE_S / 2)]:
            with pytest.raises(ConnectionError):
                await agent._connect()
            await asyncio.sleep(0.01)

    monkeypatch.setattr(agent_module, "connect_first", refuse)
    monkeypatch.setattr(known_heads, "LOOK_PERIOD_S", 0.0)
    RunPlace(Directory(tmp_path), "run-000001-a1").write_head(HeadMark(addresses=(named,)))
    spec = NodeSpec(
        job=JobConfig(
            cluster=ClusterConfig(lease_s=LEASE_S),
            checkpoint=CheckpointConfig(directory=str(tmp_path)),
        ),
        node=0,
        token=TOKEN,
        coordinator=given,
        worker="",
        cache_directory="",
        credentials=msgspec.json.encode(CREDENTIALS),
        parts="run-000001-a1",
    )
    asyncio.run(asyncio.wait_for(look(_Agent(spec, [], -1)), TIMEOUT_S))

    assert tries[0] == ((given,), LEASE_S / 2)


def test_a_head_that_was_replaced_gives_way_to_the_others(
    lifeline_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was replaced may be the first that answers each time. So the others are tried
    before it is again."""
    heads = tuple((f"10.0.0.{number}", 7320) for number in range(3))
    tries: list[tuple[Address, ...]] = []
    spec = NodeSpec(
        job=JobConfig(cluster=ClusterConfig(lease_s=LEASE_S)),
        node=0,
        token=TOKEN,
        coordinator=heads[0],
        other_coordinators=heads[1:],
        worker="",
        cache_directory="",
        credentials=msgspec.json.encode(CREDENTIALS),
        patience_s=60.0,
    )
    agent = _Agent(spec, [], lifeline_fd)

    async def answer(addresses: tuple[Address, ...], *_: object, **__: object) -> object:
        tries.append(addresses)
        return addresses[0], (None, None)

    async def play() -> None:
        for term in (7, 6, 7):
            await agent._connect()
            with contextlib.suppress(ConnectionRefusedError):
                agent._on_message(Welcome(term=term))
        await agent._connect()

    monkeypatch.setattr(agent_module, "connect_first", answer)
    asyncio.run(play())

    assert tries == [heads, heads, heads[1:], (heads[1], heads[0], heads[2])]


def test_a_try_that_has_taken_longer_than_a_pause_is_followed_by_the_next_one(
    lifeline_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pause after half a lease at silent addresses a node hardly came back in time."""
    num_tries = 0
    clock = Clock()
    spec = NodeSpec(
        job=JobConfig(cluster=ClusterConfig(lease_s=LEASE_S)),
        node=0,
        token=TOKEN,
        coordinator=("10.0.0.1", 7320),
        worker="",
        cache_directory="",
        credentials=msgspec.json.encode(CREDENTIALS),
        patience_s=1e9,
    )

    async def play() -> None:
        agent = _Agent(spec, [], lifeline_fd)

        async def fail(*_: object, **__: object) -> None:
            nonlocal num_tries
            num_tries += 1
            clock.ahead_s += 2000.0
            agent._is_shut_down = num_tries == 3
            raise ConnectionError("no answer in time")

        monkeypatch.setattr(agent_module, "connect_first", fail)
        async with asyncio.timeout(TIMEOUT_S):
            await agent.run()

    monkeypatch.setattr(agent_module, "time", clock)
    monkeypatch.setattr(agent_module, "reconnect_s", lambda *_, **__: 1000.0)
    asyncio.run(play())

    assert num_tries == 3
