"""A worker's line to its agent: orders in order, and the process ends with its agent or job."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from helpers.control_worker import NUM_SAVED, NUM_THREADS
from helpers.forked_ranks import wait_exit
from helpers.jobs import shaped_plan
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    EpochReady,
    FromNode,
    LayersSaved,
    NoticeTaken,
    SaveLayers,
    Shutdown,
    StartEpoch,
    StopRequested,
    WorkerFailed,
)
from planaria.errors import PeerLostError
from planaria.nodes.forkserver import ForkServer
from planaria.transport.frames import FrameDecoder, fact_of, frame
from planaria.transport.links import Channel, Links, Tag

TIMEOUT_S = 20.0

NUM_TOLD = NUM_THREADS * NUM_SAVED


class Agent:
    """A worker's process and our end of its line."""

    def __init__(self, server: ForkServer, *, target: str = "serve", payload: bytes = b"") -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(TIMEOUT_S)
        lifeline_fd, self.lifeline_write_fd = os.pipe()
        self.stderr_fd, stderr_fd = os.pipe()
        self._server = server
        fds = (theirs.fileno(), lifeline_fd, stderr_fd)
        self.pid = server.spawn(f"helpers.control_worker:{target}", payload, fds)
        theirs.close()
        os.close(lifeline_fd)
        os.close(stderr_fd)
        self._status: int | None = None

    def messages(self, number: int) -> list[FromNode]:
        """The next messages, of which there are so many."""
        decoder = FrameDecoder()
        messages: list[FromNode] = []
        while len(messages) < number:
            data = self.socket.recv(1 << 16)
            assert data, self.errors()
            messages += [fact_of(body) for body in decoder.feed(data)]
        return messages

    def errors(self) -> str:
        """What the worker has written to stderr; blocks until it has ended."""
        self.wait()
        return os.read(self.stderr_fd, 1 << 16).decode()

    def wait(self) -> int:
        """The worker's exit status, once it has ended."""
        if self._status is None:
            self._status = wait_exit(self._server, self.pid)
        return self._status

    def close(self) -> None:
        """Kills the worker if it has not ended."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self.socket.close()
        os.close(self.lifeline_write_fd)
        os.close(self.stderr_fd)


@pytest.fixture
def agent(server: ForkServer) -> Iterator[Agent]:
    made = Agent(server)
    yield made
    made.close()


@pytest.fixture
def peer() -> Iterator[Links]:
    """Rank 1, to which a worker that has forked children has a link."""
    with closing(Links(1, token=b"")) as links:
        yield links


@pytest.fixture
def parent(server: ForkServer, peer: Links) -> Iterator[Agent]:
    """The agent of a worker that has forked children."""
    made = Agent(server, target="serve_parent", payload=str(peer.address[1]).encode())
    yield made
    made.close()


def _start() -> StartEpoch:
    return StartEpoch(epoch=0, plan=shaped_plan((2,), 4), addresses={0: ("h", 1)}, iteration=0)


def test_orders_come_in_order_and_whole_however_the_stream_is_cut(agent: Agent) -> None:
    """A request to stop is no order: it is seen at the next commit. Messages of two threads
    do not mix."""
    data = frame(_start()) + frame(StopRequested()) + frame(Shutdown())
    for cut in range(0, len(data), 7):
        agent.socket.sendall(data[cut : cut + 7])
    messages = agent.messages(NUM_TOLD + 2)

    told = [m.traceback for m in messages if isinstance(m, WorkerFailed)]
    assert told == ["StartEpoch", "Shutdown"]
    assert [m.node for m in messages if isinstance(m, WorkerFailed)][-1] == 1
    for rank in range(NUM_THREADS):
        saved = [m.iteration for m in messages if isinstance(m, LayersSaved) and m.rank == rank]
        assert saved == list(range(NUM_SAVED))


@pytest.mark.parametrize("iteration", [0, AT_COMMIT])
def test_a_rank_that_begins_anew_forgets_a_stop(iteration: int, agent: Agent) -> None:
    """Whoever still wants it says so again; a change at a commit takes nothing back."""
    start = msgspec.structs.replace(_start(), iteration=iteration)
    agent.socket.sendall(frame(StopRequested()) + frame(start))
    messages = agent.messages(NUM_TOLD + 1)

    (told,) = [m for m in messages if isinstance(m, WorkerFailed)]
    assert bool(told.node) == (iteration == AT_COMMIT)


def test_an_abort_frees_the_epochs_before_it_and_no_other(agent: Agent) -> None:
    """Whatever the compute thread is blocked in; it is told in its turn, too."""
    agent.messages(NUM_TOLD)  # They are sent once the comm is open.
    agent.socket.sendall(frame(Abort(epoch=3, nodes=(0, 1))))

    assert agent.messages(1) == [EpochReady(rank=0, epoch=3, layers_materialised=3)]


def test_a_sigterm_is_a_notice_that_the_node_will_be_taken_away(agent: Agent) -> None:
    """The worker lives on, and says so at once, whatever its main thread does."""
    agent.socket.sendall(frame(StopRequested()))
    agent.messages(NUM_TOLD)
    os.kill(agent.pid, signal.SIGTERM)

    assert agent.messages(1) == [NoticeTaken(node=0, rank=0, after_s=30.0)]
    agent.socket.sendall(frame(SaveLayers(epoch=0, iteration=1, layers={})))
    (told,) = agent.messages(1)
    assert isinstance(told, WorkerFailed), told
    assert told.blame == "node"


def test_a_sigterm_to_a_child_of_the_job_ends_it_and_is_no_notice(parent: Agent) -> None:
    """Code of a job may end a process of multiprocessing that it has started, and wait for it."""
    (told,) = parent.messages(1)

    assert isinstance(told, WorkerFailed), told
    assert told.traceback == str(-signal.SIGTERM)


def test_a_worker_beats_while_nobody_says_anything(agent: Agent) -> None:
    """A silent line is no standstill."""
    agent.socket.sendall(frame(SaveLayers(epoch=0, iteration=1, layers={})))
    told = [m.traceback for m in agent.messages(NUM_TOLD + 1) if isinstance(m, WorkerFailed)]

    assert told == ["SaveLayers"]


def test_the_loss_of_a_worker_is_seen_while_a_child_of_the_job_lives(parent: Agent) -> None:
    """The agent waits for the end of the line; a pool of multiprocessing outlives a killed rank."""
    parent.messages(1)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    assert not parent.socket.recv(1)


def test_peers_see_the_loss_of_a_worker_while_a_child_of_the_job_lives(
    parent: Agent, peer: Links
) -> None:
    """The kernel closes a link once no process has it open."""
    parent.messages(1)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    with pytest.raises(PeerLostError, match="by peer"):
        peer.receive(0, Tag(Channel.FORWARD, 0, 0), timeout_s=TIMEOUT_S)


def test_a_worker_ends_with_its_agent(agent: Agent) -> None:
    """Whatever its compute thread does; here it waits for ever."""
    agent.messages(NUM_TOLD)
    agent.socket.shutdown(socket.SHUT_RDWR)

    assert agent.wait() == 1


def test_a_worker_ends_with_its_job(agent: Agent) -> None:
    """The launcher's end of the lifeline closes when it dies."""
    agent.messages(NUM_TOLD)
    os.close(agent.lifeline_write_fd)
    status = agent.wait()
    agent.lifeline_write_fd = os.dup(0)

    assert status == 1


def test_a_worker_that_cannot_hear_any_more_ends_and_says_why(agent: Agent) -> None:
    """A message that nobody understands must not leave a process that no order reaches."""
    agent.messages(NUM_TOLD)
    agent.socket.sendall(b"\0\0\0\2{}")

    assert agent.wait() == 1
    assert "ValidationError" in agent.errors()
