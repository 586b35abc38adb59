"""Starts the nodes of a job on this machine, and the process of its coordinator.

The launcher forks one agent per node and the coordinator beside them, from the job's fork server.
It passes on what the user wants and what becomes of the agents' processes, and takes what the
coordinator tells to an observer. A coordinator that ends before the job does is started again, on
the same listening socket and the same journal; one that stands still is killed first. Faults are
injected from here.

It holds the only write end of the lifeline pipe: when it dies, by whatever signal, every process
of the job sees the pipe close and leaves. They hold all its read ends, too: the launcher sees its
own end break when the last process of the job is gone, and waits for that.

Ctrl-C and SIGTERM stop the job at its next commit, once its state is saved; a second one, or one
before the first iteration has begun, ends it at once. A terminal that is gone (SIGHUP) stops it as
the first one does and is never the second: a shell and the kernel may both tell of it.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import msgspec

from planaria.checkpoint.tiers import standing, tier_of
from planaria.core.inject import Injection
from planaria.core.messages import Message, StopRequested
from planaria.core.records import (
    AgentEnded,
    Beat,
    Committed,
    Ended,
    Leading,
    Running,
    ToLauncher,
    Unsaved,
    Warned,
)
from planaria.core.specs import NodeSpec
from planaria.errors import CheckpointError, InsufficientError
from planaria.nodes.cloud import LocalOperator
from planaria.nodes.desk import Drains, answering, open_desk
from planaria.nodes.forkserver import ForkServer, told
from planaria.nodes.injector import Injector, coordinator_places, node_places
from planaria.nodes.leader_spec import LeaderSpec
from planaria.nodes.observer import Observer
from planaria.nodes.waiting import (
    explained,
    heard_while_running,
    interrupts,
    is_left_alone,
    kill_group,
)
from planaria.transport.frames import FrameDecoder, frame

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0  # For agents to leave by themselves before their groups are killed.
KILL_TIMEOUT_S = 5.0  # For the kernel to end what was killed.
RESTARTS_MAX = 5  # Of the coordinator, without a commit in between.

_decoder: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)


class Launcher:
    """Runs one job.

    Args:
        spec: what every node is told; `node` and all addresses are filled in here.
        leader: what the coordinator is told, likewise.
    """

    def __init__(
        self,
        spec: NodeSpec,
        leader: LeaderSpec,
        *,
        server: ForkServer,
        observer: Observer,
        injections: Sequence[Injection] = (),
    ) -> None:
        token = secrets.token_bytes(32)
        self._spec = msgspec.structs.replace(spec, token=token)
        self._leader_spec = msgspec.structs.replace(leader, token=token)
        self._server = server
        self._observer = observer
        self._injections = injections
        self._agents: dict[int, int] = {}
        self._there: dict[int, int] = {}  # Those that have not ended.
        self._machines: dict[int, str] = {}
        self._injector = Injector(
            injections,
            token=token,
            agents=self._there,
            join=self._join,
            leader=lambda: self._leader_pid,
            fired=self._fire,
        )
        self._drains = Drains(self._say, self._there.keys())
        self._operator = LocalOperator(
            spec.job.cluster.grant_s, give_back=self._give_back, granted=self._grant
        )
        self._exits: dict[int, int] = {}
        self._fenced: set[int] = set()  # Killed from here, before they had ended.
        self._leader_pid = 0
        self._leader_pids: set[int] = set()
        self._to_leader: asyncio.StreamWriter | None = None
        self._lost_leader_s = 0.0  # Since when there is no coordinator; 0 while there is one.
        self._restarts = 0
        self._committed = (-1, 0)
        self._is_training = False
        self._stop_requested = False
        self._is_interrupted = False
        self._interruption = ""
        self._is_server_lost = False
        self._tier = tier_of(spec.job.checkpoint.directory)
        self._unsaved: set[tuple[int, int]] = set()
        self._unfired: tuple[Injection, ...] = ()
        self._ended: asyncio.Future[Ended]

    def run(self) -> Ended:
        """Runs the job to its end; no process of it is left afterwards.

        Raises:
            KeyboardInterrupt: the user ended the job at once; it says what that cost.
            InsufficientError: the fork server is gone before the nodes were started.
        """
        with tempfile.TemporaryDirectory(prefix="planaria-") as directory:
            self._leader_spec = msgspec.structs.replace(self._leader_spec, directory=directory)
            ended = asyncio.run(self._run())
        self._discard_unsaved()
        if self._interruption:
            raise KeyboardInterrupt(self._interruption)
        return ended

    def _discard_unsaved(self) -> None:
        """What a rank wrote after another had failed to is no checkpoint."""
        for iteration, epoch in sorted(self._unsaved):
            try:
                self._tier.discard(iteration, epoch)
            except CheckpointError as error:
                self._warn(str(error))

    @property
    def unfired(self) -> tuple[Injection, ...]:
        """The faults whose place never came."""
        return self._unfired

    async def _run(self) -> Ended:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        lifeline_read_fd, lifeline_write_fd = os.pipe()
        injector = await self._injector.listen() if self._injections else ("", 0)
        with (
            interrupts(loop, self._interrupt, hung_up=self._hang_up),
            socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
        ):
            self._listener = listener
            self._lifeline_fd = lifeline_read_fd
            leading: asyncio.Task[None] | None = None
            try:
                self._injector_address = injector
                for node in self._leader_spec.plan.nodes:
                    self._start_agent(node)
                self._join(self._spec.job.cluster.standby)
                self._leader_spec = msgspec.structs.replace(
                    self._leader_spec,
                    places=coordinator_places(self._injections),
                    injector=injector,
                )
                leading = asyncio.create_task(self._lead())
                loop.add_reader(self._server.fileno(), self._watch_processes)
                self._watch_processes()
                leading.add_done_callback(self._pass_on)
                answer = answering(self._drains, self._observer.events_json)
                async with open_desk(self._spec.job.name, answer, note=self._warn):
                    ended = await self._ended
                self._operator.close()
                self._injector.ended()
                os.close(self._lifeline_fd)
                self._lifeline_fd = -1
                if ended.ending not in ("failed", "lost"):
                    self._kill_evicted(ended)
                    await self._wait_left(lifeline_write_fd)
            finally:
                self._operator.close()
                if leading is not None:
                    leading.cancel()
                if self._lifeline_fd >= 0:
                    os.close(self._lifeline_fd)
                self._kill_all()
                if not await is_left_alone(lifeline_write_fd, timeout_s=KILL_TIMEOUT_S):
                    logger.warning("a process of the job is still there after it was killed")
                await self._wait_exits()
                loop.remove_reader(self._server.fileno())
                os.close(lifeline_write_fd)
                self._unfired = self._injector.close() if self._injections else ()
        agents = set(self._agents.values()) & set(self._exits)
        return explained(ended, {self._exits[pid] for pid in agents - self._fenced})

    # -- processes --------------------------------------------------------------------------------

    def _start_agent(self, node: int, *, is_granted: bool = False) -> None:
        """Starts a node, on the machine of one that has ended unless another one was granted."""
        taken = {self._machines[other] for other in (self._agents if is_granted else self._there)}
        self._machines[node] = next(n for n in map("machine-{}".format, count()) if n not in taken)
        spec = msgspec.structs.replace(
            self._spec,
            node=node,
            machine=self._machines[node],
            coordinator=self._injector.front(node, self._listener.getsockname()[:2]),
            places=node_places(self._injections, node),
            injector=self._injector_address,
            heeds=self._injector.has_cuts,
        )
        pid = self._server.spawn(
            "planaria.nodes.agent:main", msgspec.json.encode(spec), (self._lifeline_fd,)
        )
        self._agents[node] = self._there[node] = pid

    def _join(self, num_nodes: int) -> None:
        """More nodes come; their numbers were never used before."""
        for _ in range(num_nodes):
            self._start_agent(max(self._agents) + 1)

    def _grant(self, stead: int) -> None:
        """Another machine is there in the stead of a lost node's."""
        if not (self._stop_requested or self._is_server_lost):
            node = max(self._agents) + 1
            self._start_agent(node, is_granted=True)
            self._observer.granted(node, stead=stead)

    def _give_back(self, node: int) -> None:
        """The machine of a lost node runs nothing any more, whatever that node thinks."""
        self._fence(self._agents[node])

    async def _lead(self) -> None:
        """Runs the coordinator, again whenever it ends before the job does."""
        payload = msgspec.json.encode(self._leader_spec)
        while not self._ended.done():
            ours, theirs = socket.socketpair()
            with theirs:
                fds = (self._listener.fileno(), theirs.fileno(), self._lifeline_fd)
                self._leader_pid = self._server.spawn("planaria.nodes.leader:main", payload, fds)
            self._leader_pids.add(self._leader_pid)
            self._watch_processes()  # The fork server may have told of exits in between.
            reader, self._to_leader = await asyncio.open_connection(sock=ours)
            self._brief()
            with contextlib.suppress(ConnectionError):
                await self._hear(reader)
            self._lost_leader_s = self._lost_leader_s or time.monotonic()
            self._to_leader.close()
            self._to_leader = None
            self._restarts += 1
            if self._restarts > RESTARTS_MAX:
                self._end(f"the coordinator ended {self._restarts} times without a commit")

    def _pass_on(self, leading: asyncio.Task[None]) -> None:
        """What ended the task that runs the coordinator ends the job."""
        if not leading.cancelled() and (error := leading.exception()) and not self._ended.done():
            self._ended.set_exception(error)

    def _brief(self) -> None:
        """Tells a new coordinator what it may not have heard."""
        for node, pid in self._agents.items():
            if pid in self._exits:
                self._say(AgentEnded(node=node, reason=f"its agent {told(self._exits[pid])}"))
        self._drains.repeat()
        if self._stop_requested:
            self._say(StopRequested())

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Takes in what the coordinator says until it is gone."""
        decoder = FrameDecoder()
        lease_s = self._spec.job.cluster.lease_s
        async for data in heard_while_running(
            reader, self._leader_pid, lease_s=lease_s, stopped=self._kill_leader
        ):
            for body in decoder.feed(data):
                message = _decoder.decode(body)
                match message:
                    case Beat():
                        continue
                    case Committed() if (message.since, message.iteration) < self._committed:
                        continue  # The coordinator before this one has told it.
                    case Committed():
                        self._committed = (message.since, message.iteration + 1)
                        self._restarts = 0
                    case Running() if not self._is_training:
                        self._is_training = True
                        if self._injections:
                            self._injector.began()
                    case Leading() if self._lost_leader_s:
                        self._observer.restarted(lost_s=self._lost_leader_s, now_s=message.now_s)
                        self._lost_leader_s = 0.0
                    case Warned():
                        self._drains.refused(message.undrained, message.text)
                    case Unsaved():
                        self._unsaved.add((message.iteration, message.epoch))
                    case Ended() if not self._ended.done():
                        self._ended.set_result(message)
                        return
                self._operator.heard(message)
                self._observer.noticed(message)

    def _kill_leader(self, since_s: float) -> None:
        """The coordinator stands still; if it can be killed at all its connection closes."""
        if not self._lost_leader_s:
            silent_s = time.monotonic() - since_s
            logger.warning("the coordinator stands still for %.1f s and is killed", silent_s)
            self._lost_leader_s = since_s
        kill_group(self._leader_pid)

    def _say(self, message: Message) -> None:
        if self._to_leader is not None and not self._ended.done():
            self._to_leader.write(frame(message))

    def _watch_processes(self) -> None:
        try:
            exits = self._server.exits()
        except InsufficientError as error:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._is_server_lost = True
            self._end(str(error))
            return
        for pid, status in exits:
            self._exits[pid] = status
            for node, agent in self._agents.items():
                if agent == pid:
                    self._there.pop(node, None)
                    self._drains.left(node)
                    self._say(AgentEnded(node=node, reason=f"its agent {told(status)}"))

    async def _wait_left(self, lifeline_fd: int) -> None:
        """Lets the job's processes leave by themselves, for a while."""
        if await is_left_alone(lifeline_fd, timeout_s=EXIT_TIMEOUT_S):
            return
        for node in (node for node, pid in self._agents.items() if pid not in self._exits):
            logger.warning(
                "node %s did not leave within %.0f s and is killed", node, EXIT_TIMEOUT_S
            )

    def _kill_evicted(self, ended: Ended) -> None:
        """A node that was evicted may hang, and would never leave."""
        for node in self._agents.keys() - set(ended.nodes):
            self._fence(self._agents[node])

    def _kill_all(self) -> None:
        self._watch_processes()  # Who has ended by now was not killed here.
        for pid in {*self._agents.values(), *self._leader_pids}:
            self._fence(pid)

    def _fence(self, pid: int) -> None:
        """Kills an agent or the coordinator with its processes, unless it has ended."""
        if pid not in self._exits:
            self._fenced.add(pid)
            kill_group(pid)

    async def _wait_exits(self) -> None:
        """Waits until the fork server has told how all ended, who are gone by now."""
        deadline_s = time.monotonic() + KILL_TIMEOUT_S
        expected = {*self._agents.values(), *self._leader_pids}
        while not (self._is_server_lost or expected <= set(self._exits)):
            if time.monotonic() > deadline_s:
                return
            await asyncio.sleep(0.002)

    # -- the user, and faults ---------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        self._observer.noticed(Warned(text=text))

    def _fire(self, injection: Injection) -> None:
        first = max(self._agents) + 1
        nodes = injection.nodes or tuple(range(first, first + injection.num_nodes))
        self._observer.fired(replace(injection, nodes=nodes), now_s=time.monotonic())

    def _interrupt(self) -> None:
        """The first Ctrl-C stops at the next commit and saves; the second ends the job at once."""
        if self._ended.done():
            return
        if not self._is_training:
            self._interruption = "interrupted before training began"
        elif self._is_interrupted:
            left = standing(self._tier)
            self._interruption = f"interrupted again, so nothing was saved; {left}"
        else:
            self._is_interrupted = True
            self._request_stop()
            return
        self._end(self._interruption)

    def _hang_up(self) -> None:
        """The job stops as by the first Ctrl-C, whatever came before."""
        if self._is_training and not self._ended.done():
            self._request_stop()
        else:
            self._interrupt()

    def _request_stop(self) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            self._observer.stopping()
            self._say(StopRequested())

    def _end(self, reason: str) -> None:
        """Ends the job for a reason that the coordinator does not know."""
        if not self._ended.done():
            ended = Ended(ending="lost", reason=reason, failure=None, nodes=(), epoch=0)
            self._ended.set_result(ended)
