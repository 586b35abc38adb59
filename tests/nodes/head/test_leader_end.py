"""The end of a job, as its launcher hears of it; the test is the launcher, and one agent."""

import asyncio
import os
import random
import select
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import msgspec
import pytest

from helpers.forked_ranks import wait_exit
from helpers.heads import CREDENTIALS
from helpers.jobs import leader_spec
from helpers.random_json import damaged_body, random_body
from helpers.tasks import wait_until
from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.state import Phase
from planaria.core.messages import (
    FromNode,
    Heartbeat,
    HeartbeatTaken,
    Message,
    Shutdown,
    Welcome,
    WorkerFailed,
)
from planaria.core.records import (
    AgentEnded,
    Beat,
    Ended,
    Leading,
    Progress,
    ToLauncher,
    Unrecorded,
)
from planaria.errors import AuthenticationError
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.leader import _Leader
from planaria.nodes.head.leader_spec import LeaderSpec
from planaria.nodes.head.publisher import Unfinished
from planaria.nodes.head.remote.open_head import LocalSockets
from planaria.nodes.head.remote.run_record import JournalHold
from planaria.nodes.head.searcher import Searcher
from planaria.policies.ahead import ForeseenAnswers
from planaria.store.logbook import open_logbook
from planaria.transport.acceptor import Purpose, connect
from planaria.transport.frames import (
    LINKS,
    NODES,
    PROBES,
    FrameDecoder,
    Role,
    derive,
    fact_of,
    frame,
    handshake,
    order_of,
)

TOKEN = b"the job's token"
NODE_KEY = derive(TOKEN, NODES)
TIMEOUT_S = 20.0
ROUNDS = 5


def connect_agent(
    address: tuple[str, int], *, node: int = 0, key: bytes = NODE_KEY
) -> socket.socket:
    """The connection of a node's agent."""
    agent = socket.create_connection(address, timeout=TIMEOUT_S)
    steps = handshake(key, Role.CONNECT, identity=node)
    data, num_bytes = next(steps)
    try:
        while True:
            agent.sendall(data)
            data, num_bytes = steps.send(agent.recv(num_bytes, socket.MSG_WAITALL))
    except StopIteration:
        return agent


def wait_heard(agent: socket.socket, kind: type[Message]) -> None:
    """Blocks until the agent is told a message of this kind."""
    decoder = FrameDecoder()
    while data := agent.recv(1 << 16):
        if any(isinstance(order_of(body), kind) for body in decoder.feed(data)):
            return
    raise AssertionError(f"the connection closed before any {kind.__name__}")


def messages_so_far(launcher: socket.socket) -> list[type]:
    """The kinds of what has come to the launcher by now."""
    decoder, kinds = FrameDecoder(), []
    while select.select([launcher], [], [], 0)[0] and (data := launcher.recv(1 << 16)):
        kinds += [type(msgspec.json.decode(b, type=ToLauncher)) for b in decoder.feed(data)]
    return kinds


def wait_told(launcher: socket.socket, kind: type, kinds: list[type]) -> None:
    """Blocks until this kind has come to the launcher; adds what comes to the kinds."""
    while kind not in kinds:
        assert select.select([launcher], [], [], TIMEOUT_S)[0], f"no {kind} after {kinds}"
        kinds += messages_so_far(launcher)


def test_the_launcher_knows_the_end_before_any_agent_may_leave(
    server: ForkServer, tmp_path: Path
) -> None:
    """An agent that leaves too early looks lost to whoever has not heard of the end; and what the
    launcher still says must not break the connection before it has read of it."""
    for index in range(ROUNDS):
        check_end(server, tmp_path / str(index))


def test_a_coordinator_without_nodes_leaves_in_order(server: ForkServer, tmp_path: Path) -> None:
    """The only agent is gone before it has ever connected."""
    with start_coordinator(server, leader_spec(tmp_path, token=TOKEN)) as (ours, _, pid):
        ours.sendall(frame(AgentEnded(node=0, reason="it was killed")))
        wait_told(ours, Ended, [])
        ours.shutdown(socket.SHUT_RDWR)
        assert wait_exit(server, pid) == 0


@pytest.mark.parametrize("num_strangers", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_nodes_that_break_the_protocol_are_cut_off_and_the_others_go_on(
    num_strangers: int, server: ForkServer, tmp_path: Path
) -> None:
    """A node of another version, say. The job of the others ends as it would have."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with start_coordinator(server, leader_spec(tmp_path, token=TOKEN)) as (ours, address, pid):
        with closing(connect_agent(address)) as agent:
            wait_heard(agent, Welcome)
            for number in range(num_strangers):
                agent.sendall(frame(Heartbeat(node=0, sent_s=0.5)))  # Its lease is short.
                wait_heard(agent, HeartbeatTaken)
                with closing(connect_agent(address, node=1 + number)) as stranger:
                    stranger.sendall(malformed_frame(rng))
                    with suppress(ConnectionError):
                        while stranger.recv(1 << 16):
                            continue
            agent.sendall(frame(WorkerFailed(node=0, rank=0, traceback="raised")))
            wait_heard(agent, Shutdown)
        ours.sendall(frame(AgentEnded(node=0, reason="its agent left")))
        ours.shutdown(socket.SHUT_RDWR)
        assert wait_exit(server, pid) == 0


@pytest.mark.parametrize("key", [TOKEN, derive(TOKEN, LINKS), derive(TOKEN, PROBES)])
def test_a_proof_for_another_purpose_makes_nobody_a_node(
    key: bytes, server: ForkServer, tmp_path: Path
) -> None:
    """Nor does the token itself, which every purpose could share by mistake."""
    with start_coordinator(server, leader_spec(tmp_path, token=TOKEN)) as (ours, address, pid):
        with pytest.raises(AuthenticationError, match="has another job token"):
            connect_agent(address, key=key)
        ours.sendall(frame(AgentEnded(node=0, reason="it was killed")))
        wait_told(ours, Ended, [])
        ours.shutdown(socket.SHUT_RDWR)
        assert wait_exit(server, pid) == 0


def malformed_frame(rng: random.Random) -> bytes:
    """A frame whose body is no message of a node."""
    while True:
        body = damaged_body(random_body(FromNode, rng), rng)
        try:
            fact_of(body)
        except AuthenticationError:
            return struct.pack("!I", len(body)) + body


def check_end(server: ForkServer, directory: Path) -> None:
    """One coordinator, from its start to the end of its job."""
    with start_coordinator(server, leader_spec(directory, token=TOKEN)) as (ours, address, pid):
        with closing(connect_agent(address)) as agent:
            agent.sendall(frame(WorkerFailed(node=0, rank=0, traceback="raised")))
            wait_heard(agent, Shutdown)
            assert Ended in messages_so_far(ours)
            assert agent.recv(1) == b""
        ours.sendall(frame(AgentEnded(node=0, reason="its agent left")))
        ours.shutdown(socket.SHUT_RDWR)
        assert wait_exit(server, pid) == 0


def test_a_journal_whose_disk_hangs_is_told_and_holds_up_no_end(tmp_path: Path) -> None:
    """The coordinator goes on as if the disk had refused, for it waited for it without end; and
    leaves, though a thread of it still hangs there."""
    spec = leader_spec(tmp_path, token=TOKEN)
    checkpoint = replace(spec.job.checkpoint, timeout_s=0.5)
    spec = msgspec.structs.replace(spec, job=replace(spec.job, checkpoint=checkpoint))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HANGING", str(tmp_path / "hangs"))
        server = ForkServer(["helpers.hanging_leader"], path=[str(Path(__file__).parents[2])])
    with (
        closing(server),
        start_coordinator(server, spec, main="helpers.hanging_leader:main") as found,
    ):
        ours, address, pid = found
        kinds: list[type] = []
        wait_told(ours, Leading, kinds)
        (tmp_path / "hangs").touch()
        with closing(connect_agent(address)):  # A lease is granted to it, on record.
            wait_told(ours, Unrecorded, kinds)
            ours.sendall(frame(AgentEnded(node=0, reason="it was killed")))
            wait_told(ours, Ended, kinds)
        ours.shutdown(socket.SHUT_RDWR)
        assert wait_exit(server, pid) == 0


@asynccontextmanager
async def leading_here(
    spec: LeaderSpec,
) -> AsyncIterator[tuple[_Leader, socket.socket, tuple[str, int], asyncio.Task[None]]]:
    """A coordinator in this process, the launcher's end of its connection, the address at which it
    listens, and the task that ends with it."""
    ours, theirs = socket.socketpair()
    lifeline, held = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    leader = _Leader(spec)
    with closing(ours), closing(lifeline), closing(held):
        yield (
            leader,
            ours,
            address,
            asyncio.create_task(leader.run(listener.detach(), theirs.detach(), lifeline.fileno())),
        )


@pytest.mark.parametrize("is_agent", [False, True])
def test_a_coordinator_that_another_has_succeeded_only_leaves(
    tmp_path: Path, is_agent: bool
) -> None:
    """The records are there, for the next one to go on from: the job need not end.

    It had gone on with agents that asked for admission, who then never looked for the next one.
    """
    kinds: list[type] = []

    async def run() -> None:
        spec = leader_spec(tmp_path, token=TOKEN)
        async with leading_here(spec) as (leader, ours, address, leading):
            await asyncio.to_thread(wait_told, ours, Leading, kinds)
            lease_s = spec.job.cluster.lease_s
            await open_logbook(leader._store, spec.job.name, lease_s=lease_s)
            if is_agent:
                agent = await asyncio.to_thread(connect_agent, address)
            else:
                leader._leadership._progress = Progress(num_committed=1, ends=False)
                leader._has_progressed.set()
            await asyncio.wait_for(leading, TIMEOUT_S)
            if is_agent:
                agent.close()
            kinds.extend(messages_so_far(ours))
        assert not {Unrecorded, Ended}.intersection(kinds), kinds

    asyncio.run(run())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_coordinator_whose_run_another_head_has_taken_up_records_nothing(
    tmp_path: Path, is_late: bool
) -> None:
    """Its records would be read by the other head's next coordinator. Nor does it go on without
    records, as where a disk refuses them, and have nodes save and end."""
    kinds: list[type] = []
    first, second = (JournalHold(tmp_path / "journal", name) for name in ("first", "second"))
    spec = msgspec.structs.replace(
        leader_spec(tmp_path, token=TOKEN), directory=str(first.directory), holder=first.holder
    )

    async def run() -> None:
        async with leading_here(spec) as (_, ours, address, leading):
            if is_late:
                await asyncio.to_thread(wait_told, ours, Leading, kinds)
                second.take()
                before = (second.directory / "journal").read_bytes()
                agent = await asyncio.to_thread(connect_agent, address)  # It is to get a lease.
            await asyncio.wait_for(leading, TIMEOUT_S)
            if is_late:
                agent.close()
                assert (second.directory / "journal").read_bytes() == before
            kinds.extend(messages_so_far(ours))

    first.directory.mkdir()
    (first if is_late else second).take()
    asyncio.run(run())

    assert Unrecorded in kinds
    assert Ended not in kinds
    assert (Leading in kinds) == is_late


def test_a_coordinator_begins_no_run_anew_that_was_taken_up(tmp_path: Path) -> None:
    """Its journal was moved away, as a message asked for. The nodes that lived were of another term
    or epoch: none could be told anything, and the job ended as lost, and they with it."""
    kinds: list[type] = []
    spec = msgspec.structs.replace(leader_spec(tmp_path, token=TOKEN), is_taken_up=True)

    async def run() -> None:
        async with leading_here(spec) as (_, ours, _, leading):
            await asyncio.wait_for(leading, TIMEOUT_S)
            kinds.extend(messages_so_far(ours))

    for _ in range(2):  # The first one leaves a journal, in which is nothing.
        asyncio.run(run())

    assert [kind for kind in kinds if kind is not Beat] == [Unrecorded, Unrecorded]


def test_as_many_agents_may_wait_for_the_next_coordinator_as_for_the_first(tmp_path: Path) -> None:
    """The launcher keeps their listener, and asyncio shrank its queue to 100."""

    async def run() -> None:
        leader, sockets = _Leader(leader_spec(tmp_path, token=TOKEN)), LocalSockets()
        with closing(sockets), socket.socket(fileno=os.dup(sockets.leader_fd())) as shared:
            length = _queue_length(shared)
            stop_listening = await leader._listen(shared)
            stop_listening()

            assert _queue_length(sockets._listener) == length

    asyncio.run(run())


def _queue_length(listener: socket.socket) -> int:
    """The number of connections that may wait at a listener; `tcpi_sacked` of the kernel."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    return int(struct.unpack_from("I", info, 28)[0])


def test_a_node_of_another_run_is_refused_though_it_has_the_token_file(tmp_path: Path) -> None:
    """Its number is that of a node of this run."""

    async def run() -> None:
        spec = leader_spec(tmp_path, token=TOKEN)
        leader = _Leader(msgspec.structs.replace(spec, credentials=CREDENTIALS))
        accepted: list[asyncio.Task[object]] = []
        channel, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loop, listener = asyncio.get_running_loop(), socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        with closing(channel), closing(passed), closing(listener):
            with patch.object(leader, "_serve", lambda c: accepted.append(loop.create_task(c))):
                stop_listening = await leader._listen(passed)
                for token in (TOKEN, b"the token of another run"):
                    address, key = listener.getsockname()[:2], derive(token, NODES)
                    joining = loop.create_task(
                        connect(address, Purpose.NODE, CREDENTIALS, timeout_s=TIMEOUT_S, key=key)
                    )
                    sock, _ = await loop.sock_accept(listener)
                    await loop.sock_recv(sock, len(Purpose.NODE.value))
                    with sock:
                        socket.send_fds(channel, [b"!"], [sock.fileno()])
                    await asyncio.wait((joining,), timeout=TIMEOUT_S)
                    await wait_until(lambda: bool(accepted) and accepted[-1].done())
                    if token == TOKEN:
                        joining.result()[1].transport.abort()
                        accepted.pop().result()
                stop_listening()
            with pytest.raises(AuthenticationError):
                accepted[-1].result()
            assert joining.exception() is not None

    asyncio.run(run())


def test_time_goes_on_while_the_journals_disk_hangs(tmp_path: Path) -> None:
    """What is awaited, and that saves are slow, is told of by the clock; leases end once the disk
    has kept that the ones before have."""
    spec = leader_spec(tmp_path, token=TOKEN)
    job = replace(spec.job, cluster=replace(spec.job.cluster, lease_s=0.05))
    num_expired = 0

    async def expire() -> None:
        nonlocal num_expired
        num_expired += 1
        await asyncio.Event().wait()

    async def run() -> None:
        leader = _Leader(msgspec.structs.replace(spec, job=job))
        leader._leadership = leadership = Mock(state=Mock(phase=Phase.TRAINING))
        leader._publishing, leader._store = Mock(), Mock(expire=expire)
        ticking = asyncio.create_task(leader._tick())
        await wait_until(lambda: num_expired > 0)
        num_ticks = leadership.tick.call_count
        await wait_until(lambda: leadership.tick.call_count >= num_ticks + 5)
        ticking.cancel()
        assert leader._publishing.tick.call_count >= 5
        assert not leader._publishing.end_training.called

    asyncio.run(run())

    assert num_expired == 1


def test_prices_are_computed_for_a_new_search_and_not_for_each_event(tmp_path: Path) -> None:
    """They contain the domain of each node: at 1,000 nodes half a millisecond for each event."""

    async def run() -> int:
        spec = leader_spec(tmp_path, token=TOKEN)
        leader = _Leader(spec)
        with patch("planaria.nodes.head.searcher.os.fork", return_value=1):  # Nobody searches.
            leader._searcher = Searcher(spec, ForeseenAnswers(), on_found=Mock())
        await leader._searcher.open()
        state = Mock(is_training=True, plan=spec.plan, learning=Learning())
        leader._leadership = Mock(state=state)
        with patch(
            "planaria.nodes.head.leader.prices_of", return_value=leader._rules.prices
        ) as prices_of:
            for _ in range(100):
                leader._look_ahead()
        return prices_of.call_count

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize(
    ("left", "error", "expected"),
    [
        (Unfinished.NOTHING, None, []),
        (Unfinished.REMOVALS, None, ["planaria checkpoint prune removes or names them"]),
        (Unfinished.SAVES, None, ["does not answer"]),
        (Unfinished.SAVES, RuntimeError("ours"), ["raised RuntimeError('ours')"]),
        (Unfinished.NOTHING, RuntimeError("ours"), ["raised RuntimeError('ours')"]),
    ],
)
def test_what_was_left_undone_at_the_end_is_told_as_it_is(
    tmp_path: Path, left: Unfinished, error: Exception | None, expected: list[str]
) -> None:
    """Old saves that stay are no fault of a store that answers, nor is a mistake of ours."""
    texts: list[str] = []

    async def run() -> None:
        leader = _Leader(leader_spec(tmp_path, token=TOKEN))
        leader._publishing = Mock(finish=Mock(return_value=left))
        leader._publisher_error = asyncio.get_running_loop().create_future()
        if error is not None:
            leader._publisher_error.set_exception(error)
        with patch.object(leader, "notify", lambda message: texts.append(message.text)):
            await leader._finish_saves()

    asyncio.run(run())

    assert len(texts) == len(expected)
    assert all(part in text for part, text in zip(expected, texts, strict=True))


@contextmanager
def start_coordinator(
    server: ForkServer, spec: LeaderSpec, *, main: str = "planaria.nodes.head.leader:main"
) -> Iterator[tuple[socket.socket, tuple[str, int], int]]:
    """A coordinator: the launcher's end of its connection, where agents find it, and its pid."""
    ours, theirs = socket.socketpair()
    lifeline, held = socket.socketpair()
    with closing(ours), closing(held), socket.create_server(("127.0.0.1", 0)) as listener:
        payload = msgspec.json.encode(spec)
        fds = (listener.fileno(), theirs.fileno(), lifeline.fileno())
        pid = server.spawn(main, payload, fds)
        theirs.close()
        lifeline.close()
        yield ours, listener.getsockname()[:2], pid
