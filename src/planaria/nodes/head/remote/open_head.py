"""The open port of a head, the machines that come to it, and how agents reach the coordinator.

Agents on this machine connect to a socket at 127.0.0.1, on which each coordinator listens in turn
(`LocalSockets`). Those on other machines connect to the head's one port. The launcher, which holds
that port, passes their sockets on to the coordinator's process (`PassedSockets`).
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Final

import msgspec

from planaria.checkpoint.disk.storage import may_pass
from planaria.core.kinds import Ending
from planaria.core.records import AgentEnded, Ended
from planaria.errors import ConfigError, DoneError
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.head.remote.cluster_examination import examine_machines
from planaria.nodes.head.remote.machine_operator import MachineOperator
from planaria.nodes.head.remote.machines import Machines
from planaria.nodes.head.remote.network_requests import NetworkRequests
from planaria.nodes.head.remote.run_record import TOUCH_PERIOD_S
from planaria.nodes.head.requests import (
    Answer,
    Examine,
    Request,
    RequestReply,
    TellRun,
    TellStatus,
    json_reply,
)
from planaria.observe.status import Standing, job_status
from planaria.transport.acceptor import Acceptor, Purpose
from planaria.transport.sockets import Address

BACKLOG: Final = 1024
_LOOK_TIMEOUT_S: Final = 5.0  # Maximum wait, at the end, for the disk of the journal.


class LocalSockets:
    """A socket at 127.0.0.1 on which the coordinator listens.

    Attributes:
        address: its host and port.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.address: Address = self._listener.getsockname()[:2]

    def leader_fd(self) -> int:
        """The descriptor that the next coordinator gets."""
        return self._listener.fileno()

    def close(self) -> None:
        """Closes the socket."""
        self._listener.close()


class PassedSockets:
    """Passes the sockets of agents to the coordinator's process.

    A socket that comes while there is no coordinator waits for the next one; so does one that the
    coordinator had not taken when it ended, unless it is the very one that it was about to take.

    Attributes:
        address: the head's port, to which agents connect.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._own, self._leaders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.setblocking(False)

    def leader_fd(self) -> int:
        """The descriptor that the next coordinator gets; see `take_sockets`."""
        return self._leaders.fileno()

    def pass_on(self, sock: socket.socket) -> None:
        """Passes a socket on; closes it if too many wait, so that its agent tries again."""
        with sock, contextlib.suppress(OSError):
            socket.send_fds(self._own, [b"!"], [sock.fileno()])

    def close(self) -> None:
        """Closes both ends, and the sockets that wait."""
        self._own.close()
        self._leaders.close()


def take_sockets(channel: socket.socket) -> list[socket.socket]:
    """The sockets that were passed to a coordinator and not taken.

    Args:
        channel: non-blocking socket of the descriptor that the coordinator got.
    """
    sockets = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, fds, _, _ = socket.recv_fds(channel, 1, 1)
            if not data:
                break
            sockets += [socket.socket(fileno=fd) for fd in fds]
    return sockets


class OpenHead:
    """The port of a head while a job runs; a context that ends with the job.

    Args:
        runner: runs what concerns the port, before and during the job.
        address: host and port at which the head listens.
        keeps_run: whether the run is that of a head before this one.
        operator: asks for machines in place of lost ones; None: nobody is asked.

    Attributes:
        is_taken_up: whether nodes of the run live on, so that the launcher starts none at first.
        name: random name of this head.
        keeps_run: whether nodes of a head before this one may live with which this one has not gone
            on yet, or another head has taken the run up. They and their journal are left as they
            are if this head ends.
        is_taken: whether another head has taken the run up.
        new_offer: job as it is offered to machines if the run of the head before this one is given
            up.
        run_place: name of the directory of a run in which nodes read where this head listens
            (checkpoint/disk/parts.py); "": in none yet.
        answer_job: function that answers what users ask about the job; until the job begins only
            its status is told.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        listeners: list[socket.socket],
        address: Address,
        machines: Machines,
        *,
        keeps_run: bool = False,
        operator: MachineOperator | None = None,
    ) -> None:
        self.runner = runner
        self.operator = operator
        self.name = secrets.token_hex(8)
        self.is_taken_up = self.is_taken = False
        self.keeps_run = keeps_run
        self.run_place = ""
        self._touching: asyncio.Task[None] | None = None
        self.machines = machines
        self.new_offer = machines.offer
        self.leader_sockets = PassedSockets(address)
        self.answer_job: Answer = self._answer_early
        self._requests = NetworkRequests(machines.handshakes, self._answer)
        self._is_examining = False
        self._handlers: dict[Purpose, Callable[[socket.socket], None]] = {
            Purpose.MACHINE: machines.accept,
            Purpose.NODE: self.leader_sockets.pass_on,
            Purpose.REQUEST: self._requests.accept,
        }
        self._acceptor = Acceptor(listeners, self._handlers)

    def __enter__(self) -> "OpenHead":
        self.runner.run(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tells the machines that the job is over, unless the launcher has, or the run is kept."""
        self.runner.run(self._close_after(error))
        self.leader_sockets.close()

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.machines.offer.run

    async def _start(self) -> None:
        self._acceptor.start()

    def begin_run(self, run: str) -> None:
        """Gives up the nodes of the head before this one, and begins another run."""
        self.keeps_run = False
        self.machines.begin_run(msgspec.structs.replace(self.new_offer, run=run))

    def begin(
        self,
        on_end: Callable[[AgentEnded], None],
        on_free: Callable[[], None],
        *,
        on_taken: Callable[[], None],
    ) -> None:
        """Has the launcher told of ends of nodes, and of machines that are free.

        Args:
            on_taken: callback, called when another head has taken the run up.
        """
        self.machines.on_end, self.machines.on_free = on_end, on_free
        self._touching = asyncio.create_task(self._keep_touching(on_taken))
        on_free()

    def serve_probes(self, accept: Callable[[socket.socket], None]) -> None:
        """Has the sockets of probes handed to a function; without it they are refused."""
        self._handlers[Purpose.PROBE] = accept

    async def _keep_touching(self, on_taken: Callable[[], None]) -> None:
        """Notes again and again that this head runs; the disk may hang or refuse."""
        while (log := self.machines.node_log) is not None:
            with contextlib.suppress(OSError):
                if await answer_of_thread(log.is_taken, name="journal"):
                    on_taken()
                    return
                await answer_of_thread(log.touch, name="journal")
            await asyncio.sleep(TOUCH_PERIOD_S)

    async def _look_for_successor(self) -> None:
        """Notes whether another head has taken the run up, if the disk says so in time."""
        if (log := self.machines.node_log) is None:
            return
        with contextlib.suppress(OSError):  # TimeoutError is an OSError.
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                if await answer_of_thread(log.is_taken, name="journal"):
                    self.is_taken = self.keeps_run = True

    async def _close_after(self, error: BaseException | None) -> None:
        """Closes the port; a job that turned out to be done is so for the machines, too.

        If the place of saves is away, the next head finds the machines still looking for one.
        """
        ended, is_away = None, isinstance(error, ConfigError) and may_pass(error)
        if isinstance(error, DoneError):
            ended = asyncio.get_running_loop().create_future()
            text = str(error)
            done = Ended(ending=Ending.FINISHED, reason=text, failure=None, nodes=(), epoch=0)
            ended.set_result(done)
        await self.close(ended, is_away=is_away)

    async def close(self, ended: asyncio.Future[Ended] | None, *, is_away: bool = False) -> None:
        """Tells the machines how the job has ended, and closes the port. Idempotent.

        Machines of a run that is kept are told nothing, and look for the next head.

        Args:
            is_away: whether the next head begins what this one could not, on the same machines.
        """
        if self._touching is not None:
            self._touching.cancel()
        await self._look_for_successor()
        if self.keeps_run or is_away:
            await self.machines.close()
        else:
            await self.machines.end_all(_result_of(ended))
            if self.operator is not None:
                await self.operator.cancel_requests()
        self._acceptor.close()
        await self._requests.close()

    async def _answer(self, request: Request) -> RequestReply:
        """The answer to any request."""
        if isinstance(request, TellRun):
            return RequestReply(is_done=bool(self.run_place), text=self.run_place)
        if not isinstance(request, Examine):
            return await self.answer_job(request)
        if self._is_examining:
            text = "the machines are being examined already; ask again in a minute"
            return RequestReply(is_done=False, text=text)
        self._is_examining = True
        try:
            checkup = await examine_machines(
                self.machines.connected,
                can_load=lambda: request.has_bandwidth or self.machines.is_waiting,
            )
            return json_reply(checkup)
        finally:
            self._is_examining = False

    async def _answer_early(self, request: Request) -> RequestReply:
        """The answer to a request before the job begins."""
        if isinstance(request, TellStatus):
            return json_reply(job_status(self.machines.job, Standing(), hosts={}))
        text = "the job has not begun yet: it waits for machines, or is being planned"
        return RequestReply(is_done=False, text=text)


def _result_of(ended: asyncio.Future[Ended] | None) -> Ended | None:
    """How the job has ended, if that is known."""
    if ended is None or not ended.done() or ended.cancelled() or ended.exception():
        return None
    return ended.result()
