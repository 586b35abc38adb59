"""The end of a job, as its launcher hears of it; the test is the launcher, and one agent."""

import select
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from jobs import leader_spec
from planaria.core.messages import Message, Shutdown, WorkerFailed
from planaria.core.records import AgentEnded, Ended, ToLauncher
from planaria.nodes.forkserver import ForkServer
from planaria.transport.frames import FrameDecoder, Role, frame, handshake, order_of

TOKEN = b"the job's token"
TIMEOUT_S = 20.0
ROUNDS = 5


def greeted(address: tuple[str, int]) -> socket.socket:
    """The connection of the agent of node 0."""
    agent = socket.create_connection(address, timeout=TIMEOUT_S)
    steps = handshake(TOKEN, Role.CONNECT, identity=0)
    data, num_bytes = next(steps)
    try:
        while True:
            agent.sendall(data)
            data, num_bytes = steps.send(agent.recv(num_bytes, socket.MSG_WAITALL))
    except StopIteration:
        return agent


def heard(agent: socket.socket, kind: type[Message]) -> None:
    """Blocks until the agent is told a message of this kind."""
    decoder = FrameDecoder()
    while data := agent.recv(1 << 16):
        if any(isinstance(order_of(body), kind) for body in decoder.feed(data)):
            return
    raise AssertionError(f"the connection closed before any {kind.__name__}")


def told(launcher: socket.socket) -> list[type]:
    """The kinds of what has come to the launcher by now."""
    decoder, kinds = FrameDecoder(), []
    while select.select([launcher], [], [], 0)[0] and (data := launcher.recv(1 << 16)):
        kinds += [type(msgspec.json.decode(b, type=ToLauncher)) for b in decoder.feed(data)]
    return kinds


def wait_exit(server: ForkServer, pid: int) -> int:
    """The exit status of a child of the fork server."""
    end_s = time.monotonic() + TIMEOUT_S
    while (left_s := end_s - time.monotonic()) > 0:
        statuses = [status for child, status in server.exits() if child == pid]
        if statuses:
            return statuses[0]
        select.select([server], [], [], left_s)
    raise AssertionError("the coordinator does not leave")


def test_the_launcher_knows_the_end_before_any_agent_may_leave(
    server: ForkServer, tmp_path: Path
) -> None:
    """An agent that leaves too early looks lost to whoever has not heard of the end; and what the
    launcher still says must not break the connection before it has read of it."""
    for index in range(ROUNDS):
        check_end(server, tmp_path / str(index))


def test_a_coordinator_without_nodes_leaves_in_order(server: ForkServer, tmp_path: Path) -> None:
    """The only agent is gone before it has ever connected."""
    with coordinated(server, tmp_path) as (ours, _, pid):
        ours.sendall(frame(AgentEnded(node=0, reason="it was killed")))
        while Ended not in told(ours):
            assert select.select([ours], [], [], TIMEOUT_S)[0], "no end is told"
        ours.shutdown(socket.SHUT_RDWR)
        assert wait_exit(server, pid) == 0


def check_end(server: ForkServer, directory: Path) -> None:
    """One coordinator, from its start to the end of its job."""
    with coordinated(server, directory) as (ours, address, pid):
        with closing(greeted(address)) as agent:
            agent.sendall(frame(WorkerFailed(node=0, rank=0, traceback="raised")))
            heard(agent, Shutdown)
            assert Ended in told(ours)
            assert agent.recv(1) == b""
        ours.sendall(frame(AgentEnded(node=0, reason="its agent left")))
        ours.shutdown(socket.SHUT_RDWR)
        assert wait_exit(server, pid) == 0


@contextmanager
def coordinated(
    server: ForkServer, directory: Path
) -> Iterator[tuple[socket.socket, tuple[str, int], int]]:
    """A coordinator: the launcher's end of its connection, where agents find it, and its pid."""
    ours, theirs = socket.socketpair()
    lifeline, held = socket.socketpair()
    with closing(ours), closing(held), socket.create_server(("127.0.0.1", 0)) as listener:
        payload = msgspec.json.encode(leader_spec(directory, token=TOKEN))
        fds = (listener.fileno(), theirs.fileno(), lifeline.fileno())
        pid = server.spawn("planaria.nodes.leader:main", payload, fds)
        theirs.close()
        lifeline.close()
        yield ours, listener.getsockname()[:2], pid
