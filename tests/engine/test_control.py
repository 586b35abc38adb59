"""A worker's line to its agent: orders in order, and the process ends with its agent or job."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

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
from planaria.transport.frames import FrameDecoder, fact_of, frame

TIMEOUT_S = 20.0

# Echoes the names of its orders, and says so when it is asked to stop. To an abort it answers how
# many epochs, of those up to the new one, cannot be begun any more; to a save, once it has beaten.
WORKER = """
import sys, threading, time
from planaria.core.messages import (
    Abort, EpochReady, LayersSaved, NoticeTaken, SaveLayers, Shutdown, WorkerFailed
)
from planaria.engine.control import Control
from planaria.errors import AbortedError
from planaria.transport.links import Links
from planaria.transport.pulse import Pulse

def is_freed(links, epoch):
    try:
        links.begin(epoch, addresses={}, peers=(), timeout_s=0.0)
    except AbortedError:
        return True
    return False

def last_beat_s():
    now_s = time.monotonic()
    return now_s - pulse.silent_s(now_s)

links, pulse = Links(0, token=b""), Pulse()
control = Control(
    int(sys.argv[1]),
    int(sys.argv[2]),
    links=links,
    pulse=pulse,
    beat_s=0.01,
    notice=NoticeTaken(node=0, rank=0, after_s=30.0),
)
class Comm:
    reasons = []
    def abort(self, reason):
        self.reasons.append(reason)

control.comm = Comm()
threads = [
    threading.Thread(
        target=lambda rank=rank: [
            control.send(LayersSaved(rank=rank, epoch=0, iteration=i, files=()))
            for i in range(50)
        ]
    )
    for rank in range(2)
]
for thread in threads:
    thread.start()
while True:
    order = control.wait_order()
    if isinstance(order, Abort):
        freed = sum(is_freed(links, epoch) for epoch in range(order.epoch + 1))
        assert Comm.reasons == ["a member is lost"], Comm.reasons
        control.send(EpochReady(rank=0, epoch=order.epoch, layers_materialised=freed))
        continue
    if isinstance(order, SaveLayers):
        first_s = last_beat_s()
        while last_beat_s() < first_s + 0.005:
            time.sleep(0.001)
    stop = control.line.stop_requested
    control.send(WorkerFailed(node=int(stop), rank=0, traceback=type(order).__name__))
    if isinstance(order, Shutdown):
        break
for thread in threads:
    thread.join()
threading.Event().wait() if "stay" in sys.argv else None
"""


class Agent:
    """A worker's process and our end of its line."""

    def __init__(self, *arguments: str) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(TIMEOUT_S)
        lifeline_fd, self.lifeline_write_fd = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(theirs.fileno()), str(lifeline_fd), *arguments],
            pass_fds=(theirs.fileno(), lifeline_fd),
            stderr=subprocess.PIPE,
        )
        theirs.close()
        os.close(lifeline_fd)

    def messages(self, number: int) -> list[FromNode]:
        decoder = FrameDecoder()
        messages: list[FromNode] = []
        while len(messages) < number:
            data = self.socket.recv(1 << 16)
            assert data
            messages += [fact_of(body) for body in decoder.feed(data)]
        return messages


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent("stay")
    yield made
    made.process.kill()
    made.process.communicate(timeout=TIMEOUT_S)
    made.socket.close()
    os.close(made.lifeline_write_fd)


def _start() -> StartEpoch:
    return StartEpoch(epoch=0, plan=shaped_plan((2,), 4), addresses={0: ("h", 1)}, iteration=0)


def test_orders_come_in_order_and_whole_however_the_stream_is_cut(agent: Agent) -> None:
    """A request to stop is no order: it is seen at the next commit. Messages of two threads
    do not mix."""
    data = frame(_start()) + frame(StopRequested()) + frame(Shutdown())
    for cut in range(0, len(data), 7):
        agent.socket.sendall(data[cut : cut + 7])
    messages = agent.messages(102)

    told = [m.traceback for m in messages if isinstance(m, WorkerFailed)]
    assert told == ["StartEpoch", "Shutdown"]
    assert [m.node for m in messages if isinstance(m, WorkerFailed)][-1] == 1
    for rank in range(2):
        saved = [m.iteration for m in messages if isinstance(m, LayersSaved) and m.rank == rank]
        assert saved == list(range(50))


@pytest.mark.parametrize("iteration", [0, AT_COMMIT])
def test_a_rank_that_begins_anew_forgets_a_stop(iteration: int, agent: Agent) -> None:
    """Whoever still wants it says so again; a change at a commit takes nothing back."""
    start = msgspec.structs.replace(_start(), iteration=iteration)
    agent.socket.sendall(frame(StopRequested()) + frame(start))
    messages = agent.messages(101)

    (told,) = [m for m in messages if isinstance(m, WorkerFailed)]
    assert bool(told.node) == (iteration == AT_COMMIT)


def test_an_abort_frees_the_epochs_before_it_and_no_other(agent: Agent) -> None:
    """Whatever the compute thread is blocked in; it is told in its turn, too."""
    agent.messages(100)  # They are sent once the comm is open.
    agent.socket.sendall(frame(Abort(epoch=3, nodes=(0, 1))))

    assert agent.messages(1) == [EpochReady(rank=0, epoch=3, layers_materialised=3)]


def test_a_sigterm_is_a_notice_that_the_node_will_be_taken_away(agent: Agent) -> None:
    """The worker lives on, and says so at once, whatever its main thread does."""
    agent.socket.sendall(frame(StopRequested()))
    agent.messages(100)
    agent.process.send_signal(signal.SIGTERM)

    assert agent.messages(1) == [NoticeTaken(node=0, rank=0, after_s=30.0)]
    assert agent.process.poll() is None


def test_a_worker_beats_while_nobody_says_anything(agent: Agent) -> None:
    """A silent line is no standstill."""
    agent.socket.sendall(frame(SaveLayers(epoch=0, iteration=1, layers={})))
    told = [m.traceback for m in agent.messages(101) if isinstance(m, WorkerFailed)]

    assert told == ["SaveLayers"]


def test_a_worker_ends_with_its_agent(agent: Agent) -> None:
    """Whatever its compute thread does; here it waits for ever."""
    agent.messages(100)
    agent.socket.shutdown(socket.SHUT_RDWR)

    assert agent.process.wait(TIMEOUT_S) == 1


def test_a_worker_ends_with_its_job(agent: Agent) -> None:
    """The launcher's end of the lifeline closes when it dies."""
    agent.messages(100)
    os.close(agent.lifeline_write_fd)
    status = agent.process.wait(TIMEOUT_S)
    agent.lifeline_write_fd = os.dup(0)

    assert status == 1


def test_a_worker_that_cannot_hear_any_more_ends_and_says_why(agent: Agent) -> None:
    """A message that nobody understands must not leave a process that no order reaches."""
    agent.messages(100)
    agent.socket.sendall(b"\0\0\0\2{}")

    assert agent.process.wait(TIMEOUT_S) == 1
    assert agent.process.stderr is not None
    assert b"ValidationError" in agent.process.stderr.read()
