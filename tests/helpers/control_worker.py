"""A worker that has only its line to its agent, which the session's fork server forks."""

import os
import signal
import threading
import time
from typing import cast

import msgspec

from planaria.core.messages import (
    Abort,
    Blame,
    EpochReady,
    LayersSaved,
    NoticeTaken,
    SaveLayers,
    Shutdown,
    WorkerFailed,
)
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.control import Control
from planaria.errors import AbortedError
from planaria.transport.links import Links
from planaria.transport.pulse import Pulse

NUM_THREADS = 2
NUM_SAVED = 50  # What each thread tells.
_WAIT_S = 20.0


class _Comm:
    """A comm that remembers why it was aborted."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def abort(self, reason: str) -> None:
        """See DeviceComm."""
        self.reasons.append(reason)


def serve(_: bytes, agent_fd: int, lifeline_fd: int, stderr_fd: int) -> None:
    """Sends what its threads have to tell, once its comm is open; then echoes orders.

    It sends the name of each order, whether it is asked to stop, and as the blame whether it has
    been told that its node will be taken away. To an abort it answers how
    many epochs, of those up to the new one, cannot be begun any more; to a save, once it has beat.
    It ends with its agent or its job.
    """
    os.dup2(stderr_fd, 2)
    links, pulse, comm = Links(0, token=b""), Pulse(), _Comm()
    control = _control(agent_fd, lifeline_fd, links=links, pulse=pulse)
    control.comm = cast(DeviceComm, comm)

    def tell(rank: int) -> None:
        for iteration in range(NUM_SAVED):
            control.send(LayersSaved(rank=rank, epoch=0, iteration=iteration, files=()))

    for rank in range(NUM_THREADS):
        threading.Thread(target=tell, args=(rank,)).start()
    order = None
    while not isinstance(order, Shutdown):
        order = control.wait_order()
        if isinstance(order, Abort):
            assert comm.reasons == ["a member is lost"], comm.reasons
            freed = sum(_is_freed(links, epoch) for epoch in range(order.epoch + 1))
            control.send(EpochReady(rank=0, epoch=order.epoch, layers_materialised=freed))
            continue
        if isinstance(order, SaveLayers):
            _wait_beat(pulse)
        stop = control.line.stop_requested
        failed = WorkerFailed(node=int(stop), rank=0, traceback=type(order).__name__)
        blame: Blame = "node" if control.is_noticed else "job"
        control.send(msgspec.structs.replace(failed, blame=blame))
    threading.Event().wait()


def serve_parent(peer_port: bytes, agent_fd: int, lifeline_fd: int, stderr_fd: int) -> None:
    """Forks two children, as code of a job may, and ends the first of them by SIGTERM.

    It has a link to rank 1, which listens at that port. It sends the exit status of the first
    child; the other lives until the job ends.
    """
    os.dup2(stderr_fd, 2)
    links = Links(0, token=b"")
    control = _control(agent_fd, lifeline_fd, links=links, pulse=Pulse())
    addresses = {1: ("127.0.0.1", int(peer_port))}
    links.begin(0, addresses=addresses, peers=(1,), timeout_s=_WAIT_S)
    ended = _fork_child(lifeline_fd)
    _fork_child(lifeline_fd)
    os.kill(ended, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1])
    control.send(WorkerFailed(node=0, rank=0, traceback=str(status)))
    threading.Event().wait()


def _control(agent_fd: int, lifeline_fd: int, *, links: Links, pulse: Pulse) -> Control:
    notice = NoticeTaken(node=0, rank=0, after_s=30.0)
    return Control(agent_fd, lifeline_fd, links=links, pulse=pulse, beat_s=0.01, notice=notice)


def _fork_child(lifeline_fd: int) -> int:
    """Pid of a child process that lives until the job ends."""
    if pid := os.fork():
        return pid
    os.read(lifeline_fd, 1)
    os._exit(0)


def _is_freed(links: Links, epoch: int) -> bool:
    try:
        links.begin(epoch, addresses={}, peers=(), timeout_s=0.0)
    except AbortedError:
        return True
    return False


def _wait_beat(pulse: Pulse) -> None:
    first_s = _last_beat_s(pulse)
    while _last_beat_s(pulse) < first_s + 0.005:
        time.sleep(0.001)


def _last_beat_s(pulse: Pulse) -> float:
    now_s = time.monotonic()
    return now_s - pulse.silent_s(now_s)
