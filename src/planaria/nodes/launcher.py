"""Starts the nodes of a job on this machine, and the process of its coordinator.

The launcher forks one agent per node and the coordinator beside them, from the job's fork server.
It passes on what the user wants and what becomes of the agents' processes, and takes what the
coordinator tells to an observer. A coordinator that ends before the job does is started again, on
the same listening socket and the same journal; one that stands still is killed first. Faults are
injected from here.

Nothing that stands around the training ends it unsaved while a node lives. A fork server that is
gone is renewed, and what is to be forked waits for it. Where the coordinator cannot go on (its
records are lost, it ends again and again, or this process fails to listen to it) the next one only
saves what is live (leader.py). What cannot be saved so either is said to be lost.

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
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import msgspec

from planaria.checkpoint.patience import LOOK_TIMEOUT_S
from planaria.checkpoint.tiers import Tier, standing
from planaria.core.inject import Injection
from planaria.core.messages import Message, StopRequested
from planaria.core.records import (
    AgentEnded,
    Beat,
    Committed,
    Ended,
    Leading,
    Members,
    Outcome,
    Progress,
    Recorded,
    Rescue,
    Running,
    ToLauncher,
    Unrecorded,
    Unsaved,
    Warned,
)
from planaria.core.specs import NodeSpec
from planaria.errors import CheckpointError, InsufficientError
from planaria.nodes.cloud import LocalOperator
from planaria.nodes.desk import Drains, answering, open_desk
from planaria.nodes.forkserver import UNKNOWN, ForkServer, told
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
RESTARTS_MAX = 5  # Of the coordinator, or of the fork server, without a commit in between.
RESCUES_MAX = 3  # Coordinators that only save.

_decoder: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)


class Launcher:
    """Runs one job.

    Args:
        spec: what every node is told; `node` and all addresses are filled in here.
        leader: what the coordinator is told, likewise.
        tier: where the job saves, one that answers in time.
    """

    def __init__(
        self,
        spec: NodeSpec,
        leader: LeaderSpec,
        *,
        server: ForkServer,
        observer: Observer,
        tier: Tier,
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
            server=lambda: self._server.pid,
            fired=self._fire,
        )
        self._unforked: list[tuple[int, bytes]] = []  # Nodes that wait for a fork server.
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
        self._restarts = self._renewals = self._rescues = 0
        self._must_end = ""  # Why no coordinator can go on; the next one only saves.
        self._error: BaseException | None = None  # Of this process, which makes the job end.
        self._members = Members(
            epoch=leader.plan.epoch, term=leader.led_term, nodes=leader.plan.nodes
        )
        self._outcome: Outcome | None = None
        self._progress: Progress | None = None
        self._committed = (-1, 0)
        self._is_training = False
        self._stop_requested = False
        self._is_interrupted = False
        self._interruption = ""
        self._tier = tier
        self._unsaved: set[tuple[int, int]] = set()
        self._unfired: tuple[Injection, ...] = ()
        self._ended: asyncio.Future[Ended]

    def run(self) -> Ended:
        """Runs the job to its end; no process of it is left afterwards.

        Raises:
            KeyboardInterrupt: the user ended the job at once; it says what that cost.
            Exception: what is told to the observer made it raise; what was live is saved.
        """
        ended = asyncio.run(self._run())
        self._discard_unsaved()
        if self._interruption:
            left = f"; {standing(self._tier)}" if self._stop_requested else ""
            raise KeyboardInterrupt(f"{self._interruption}{left}")
        return ended

    def _discard_unsaved(self) -> None:
        """What a rank wrote after another had failed to is no checkpoint."""
        end_s = time.monotonic() + LOOK_TIMEOUT_S
        for iteration, epoch in sorted(self._unsaved):
            if time.monotonic() > end_s:
                where = self._tier.storage.where("")
                text = f"{where} is slow, so parts of failed saves stay: planaria checkpoint prune"
                self._observer.noticed(Warned(text=text))
                return
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
            self._can_fork = asyncio.Event()
            self._leading: asyncio.Task[None] | None = None
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
                loop.add_reader(self._server.fileno(), self._watch_processes)
                self._watch_processes()
                self._start_leading()
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
                if self._leading is not None:
                    self._leading.cancel()
                if self._lifeline_fd >= 0:
                    os.close(self._lifeline_fd)
                self._kill_all()
                if not await is_left_alone(lifeline_write_fd, timeout_s=KILL_TIMEOUT_S):
                    logger.warning("a process of the job is still there after it was killed")
                await self._wait_exits()
                loop.remove_reader(self._server.fileno())
                os.close(lifeline_write_fd)
                self._unfired = self._injector.close() if self._injections else ()
        if self._error is not None:
            logger.warning("the job has ended, %s; %s", ended.reason, standing(self._tier))
            raise self._error
        agents = set(self._agents.values()) & set(self._exits)
        statuses = {self._exits[pid] for pid in agents - self._fenced}
        return explained(ended, statuses - {UNKNOWN})

    # -- processes --------------------------------------------------------------------------------

    def _start_agent(self, node: int, *, is_granted: bool = False) -> None:
        """Starts a node, on the machine of one that has ended unless another one was granted."""
        there = {*self._there, *(other for other, _ in self._unforked)}
        taken = {self._machines[other] for other in (self._machines if is_granted else there)}
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
        self._unforked.append((node, msgspec.json.encode(spec)))
        self._fork_agents()

    def _fork_agents(self) -> None:
        """Forks the nodes that wait, if there is a fork server."""
        while self._unforked and self._server.is_ready and not self._ended.done():
            node, payload = self._unforked[0]
            # The fork server may tell of exits meanwhile, or end.
            asyncio.get_running_loop().call_soon(self._watch_processes)
            with contextlib.suppress(InsufficientError):
                fds = (self._lifeline_fd,)
                pid = self._server.spawn("planaria.nodes.agent:main", payload, fds)
                del self._unforked[0]
                self._agents[node] = self._there[node] = pid

    def _join(self, num_nodes: int) -> None:
        """More nodes come; their numbers were never used before."""
        for _ in range(num_nodes):
            self._start_agent(max(self._machines) + 1)

    def _grant(self, stead: int) -> None:
        """Another machine is there in the stead of a lost node's."""
        if not (self._stop_requested or self._must_end):
            node = max(self._machines) + 1
            self._start_agent(node, is_granted=True)
            self._observer.granted(node, stead=stead)

    def _give_back(self, node: int) -> None:
        """The machine of a lost node runs nothing any more, whatever that node thinks."""
        self._unforked = [one for one in self._unforked if one[0] != node]
        if node in self._agents:
            self._fence(self._agents[node])

    # -- the coordinator --------------------------------------------------------------------------

    def _start_leading(self) -> None:
        self._leading = asyncio.create_task(self._lead())
        self._leading.add_done_callback(self._lead_on)

    async def _lead(self) -> None:
        """Runs the coordinator, again whenever it ends before the job does; where it cannot go on,
        one that only saves."""
        while not self._ended.done():
            spec = self._leader_spec
            if self._must_end:
                self._rescues += 1
                if self._rescues > RESCUES_MAX:
                    self._end(
                        f"{self._must_end}; {RESCUES_MAX} more ended before they had it saved"
                    )
                    return
                if not any(node in self._there for node in self._members.nodes):
                    self._end(f"{self._must_end}; no node is left to save")
                    return
                spec = msgspec.structs.replace(spec, rescue=self._rescue())
            if not await self._is_forking():
                if self._must_end:
                    self._end(f"{self._must_end}; no process could be started to save")
                    return
                self._must_end = f"{self._server.loss}, as those before it, and the coordinator"
                self._renewals = 0
                continue
            with contextlib.suppress(InsufficientError):  # The fork server ends meanwhile.
                await self._run_leader(spec)
                self._restarts += 1
            if self._restarts > RESTARTS_MAX and not self._must_end:
                times = f"{self._restarts} times without a commit"
                self._must_end = f"the coordinator ended {times}"

    async def _run_leader(self, spec: LeaderSpec) -> None:
        """Runs one coordinator, and hears it until it is gone."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                payload = msgspec.json.encode(spec)
                fds = (self._listener.fileno(), theirs.fileno(), self._lifeline_fd)
                self._leader_pid = self._server.spawn("planaria.nodes.leader:main", payload, fds)
            self._leader_pids.add(self._leader_pid)
            self._watch_processes()  # The fork server may have told of exits in between.
            reader, self._to_leader = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        try:
            self._brief()
            with contextlib.suppress(ConnectionError):
                await self._hear(reader)
        finally:
            self._lost_leader_s = self._lost_leader_s or time.monotonic()
            self._to_leader.close()
            self._to_leader = None

    def _rescue(self) -> Rescue:
        """What a coordinator that only saves is to go on from; its epoch is one that no node knows
        yet, for all epochs were on record before any node knew of them."""
        left = tuple(node for node in self._members.nodes if node in self._there)
        gone = {*self._members.gone, *self._members.nodes}.difference(left)
        epoch = self._members.epoch + 1
        self._members = Members(
            epoch=epoch, term=self._members.term + 1, nodes=left, gone=tuple(sorted(gone))
        )
        return Rescue(
            reason=self._must_end,
            term=self._leader_spec.led_term + 1,
            members=self._members,
            outcome=self._outcome,
            progress=self._progress,
        )

    def _lead_on(self, leading: asyncio.Task[None]) -> None:
        """What this process cannot cope with ends the job, but what is live is saved first."""
        if leading.cancelled() or self._ended.done() or not (error := leading.exception()):
            return
        if self._error is not None or not isinstance(error, Exception):
            self._ended.set_exception(error)
            return
        self._error, self._must_end = error, f"the launcher raised {error!r}"
        self._fence(self._leader_pid)  # It may stand still, and go on later.
        self._start_leading()

    async def _is_forking(self) -> bool:
        """Waits for a fork server; False if none stays."""
        while not self._server.is_ready:
            if self._server.loss and self._renewals > RESTARTS_MAX:
                return False
            if self._server.loss:
                self._renew_server()
                continue
            self._can_fork.clear()
            await self._can_fork.wait()
        return True

    def _renew_server(self) -> None:
        """Starts another fork server, unless too many have ended, none of which was there when an
        iteration was committed."""
        self._renewals += 1
        if self._renewals > RESTARTS_MAX:
            text = f"{self._server.loss}, as those before it: no node can be started any more"
        else:
            text = f"{self._server.loss}: another one is started, and training goes on meanwhile"
            self._server.renew()
        self._notice(Warned(text=text))

    def _notice(self, message: ToLauncher) -> None:
        """Tells the observer; one that has raised before may do so again."""
        try:
            self._observer.noticed(message)
        except Exception as error:
            if self._error is None:
                raise
            logger.warning("the observer raised %r", error)

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
                        self._progress = Progress(
                            num_committed=message.iteration + 1,
                            ends=message.ends,
                            since=message.since,
                        )
                        self._restarts = 0
                        self._renewals = 0 if self._server.is_ready else self._renewals
                    case Recorded():
                        self._members = message.members or self._members
                        self._outcome = message.outcome or self._outcome
                        continue
                    case Unrecorded():
                        self._must_end = self._must_end or message.reason
                        self._notice(Warned(text=f"{message.reason}; the job saves and ends"))
                        continue
                    case Leading():
                        self._led(message)
                    case Running() if not self._is_training:
                        self._is_training = True
                        if self._injections:
                            self._injector.began()
                    case Warned():
                        self._drains.refused(message.undrained, message.text)
                    case Unsaved():
                        self._unsaved.add((message.iteration, message.epoch))
                    case Ended() if not self._ended.done():
                        self._ended.set_result(message)
                        return
                self._operator.heard(message)
                self._notice(message)

    def _led(self, message: Leading) -> None:
        """A coordinator runs; the next one is to find its records."""
        self._leader_spec = msgspec.structs.replace(self._leader_spec, led_term=message.term)
        if self._lost_leader_s and self._error is None:
            self._observer.restarted(lost_s=self._lost_leader_s, now_s=message.now_s)
        self._lost_leader_s = 0.0

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
        for pid, status in self._server.exits():
            self._exits[pid] = status
            for node, agent in self._agents.items():
                if agent == pid:
                    self._there.pop(node, None)
                    self._drains.left(node)
                    self._say(AgentEnded(node=node, reason=f"its agent {told(status)}"))
        if self._server.loss and self._renewals <= RESTARTS_MAX and not self._ended.done():
            self._renew_server()
        self._fork_agents()
        self._can_fork.set()  # Or nobody ever can; who waits looks again.

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
        while not expected <= set(self._exits):
            if time.monotonic() > deadline_s:
                return
            await asyncio.sleep(0.002)

    # -- the user, and faults ---------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        self._observer.noticed(Warned(text=text))

    def _fire(self, injection: Injection) -> None:
        first = max(self._machines) + 1
        nodes = injection.nodes or tuple(range(first, first + injection.num_nodes))
        self._observer.fired(replace(injection, nodes=nodes), now_s=time.monotonic())

    def _interrupt(self) -> None:
        """The first Ctrl-C stops at the next commit and saves; the second ends the job at once."""
        if self._ended.done():
            return
        if not self._is_training:
            self._interruption = "interrupted before training began"
        elif self._is_interrupted:
            self._interruption = "interrupted again, so nothing was saved"
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
