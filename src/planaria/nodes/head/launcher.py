"""Starts the nodes of a job on this machine, and the process of its coordinator.

The launcher forks one agent per node, and the coordinator, from the job's fork server. It tells the
coordinator what the user requests and which agents have ended, and passes the coordinator's
messages to an observer. A coordinator that ends before the job does is started again, with the
same listening socket and the same journal; one that stands still is killed first. Faults are
injected from here.

A failure outside the nodes does not end training without a save while a node lives. A fork server
that is gone is renewed, and forks wait for it. If the coordinator cannot go on (its records are
lost, it ends again and again, or the launcher itself raises), the next coordinator only saves the
live state (leader.py). If that fails too, the job ends as lost.

The launcher holds the only write end of the lifeline pipe: when it dies, by whatever signal, every
process of the job sees the pipe close and ends. The job's processes hold all read ends: when the
last of them is gone, the launcher's end breaks, and the launcher waits for that.

Ctrl-C stops the job at its next commit, after a save; a second Ctrl-C ends it at once. Any other
signal that tells a process to leave (waiting.py) acts like the first, however often it is sent.
Before training has begun, any of these signals ends the job at once.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import msgspec

from planaria.checkpoint.disk.patience import discard
from planaria.checkpoint.disk.tiers import Tier, standing
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
from planaria.errors import InsufficientError
from planaria.nodes.forking import SHORTAGE_PAUSE_S, Forker
from planaria.nodes.forkserver import UNKNOWN, ForkServer, told
from planaria.nodes.head.cloud import LocalOperator
from planaria.nodes.head.desk import Drains, answering, open_desk
from planaria.nodes.head.leader_spec import LeaderSpec, saving_members
from planaria.nodes.head.observer import Observer
from planaria.nodes.head.waiting import (
    explained,
    heard_while_running,
    interrupts,
    is_left_alone,
    kill_group,
    wait_until,
)
from planaria.nodes.injector import Injector, coordinator_places, node_places
from planaria.transport.frames import FrameDecoder, frame

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0  # Time for agents to end by themselves before their groups are killed.
KILL_TIMEOUT_S = 5.0  # Time for the kernel to end killed processes.
RESTARTS_MAX = 5  # Restarts of the coordinator without a commit in between.
SHORT_TRIES_MAX = 60  # Tries to start a coordinator, one second apart, if resources are short.
RESCUES_MAX = 3  # Number of coordinators that only save.

_decoder: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)


class Launcher:
    """Runs one job.

    Args:
        spec: spec of every node; the launcher fills in `node` and all addresses.
        leader: spec of the coordinator; the launcher fills in the token, addresses and places.
        tier: disk tier to which the job saves; must answer or raise in bounded time.
        other_journal: returns another directory for the journal, or "" if there is none.
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
        other_journal: Callable[[], str] = str,
    ) -> None:
        token = secrets.token_bytes(32)
        self._spec = msgspec.structs.replace(spec, token=token)
        self._leader_spec = msgspec.structs.replace(leader, token=token)
        self._server = server
        self._observer = observer
        self._injections = injections
        self._other_journal = other_journal
        self._agents: dict[int, int] = {}
        self._there: dict[int, int] = {}  # The agents that have not ended, by node.
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
        self._forker = self._forker_of(server)
        self._drains = Drains(self._say, self._there.keys())
        self._operator = LocalOperator(
            spec.job.cluster.grant_s, give_back=self._give_back, granted=self._grant
        )
        self._exits: dict[int, int] = {}
        self._fenced: set[int] = set()  # Processes that the launcher has killed.
        self._leader_pid = 0
        self._leader_pids: set[int] = set()
        self._to_leader: asyncio.StreamWriter | None = None
        self._lost_leader_s = 0.0  # Time at which the coordinator was lost; 0: it is there.
        self._restarts = self._rescues = 0
        self._must_end = ""  # Why the next coordinator only saves; "": the job goes on.
        self._error: Exception | None = None  # Raised in this process; makes the job end.
        self._members = Members(
            epoch=leader.plan.epoch, term=leader.led_term, nodes=leader.plan.nodes
        )
        self._outcome: Outcome | None = None
        self._progress: Progress | None = None
        self._committed = (-1, 0)
        self._has_led = False  # Whether any coordinator has led.
        self._is_training = False
        self._stop_requested = False
        self._is_interrupted = False
        self._interruption = ""
        self._tier = tier
        self._unsaved: set[tuple[int, int]] = set()
        self._unfired: tuple[Injection, ...] = ()
        self._ended: asyncio.Future[Ended]
        self._is_over = False

    def _forker_of(self, server: ForkServer) -> Forker:
        return Forker(
            server,
            forked=self._on_forked,
            exited=self._on_exited,
            note=self._warn,
            meanwhile=self._meanwhile,
            failed=self._save_and_raise,
        )

    def run(self) -> Ended:
        """Runs the job to its end, and ends all its processes.

        Raises:
            KeyboardInterrupt: the user ended the job at once; the text says what that cost.
            Exception: the observer or the launcher raised; the live state was saved if possible.
        """
        ended = asyncio.run(self._run())
        for text in discard(self._tier, sorted(self._unsaved)):
            self._warn(text)
        if self._error is not None:
            logger.warning("the job has ended, %s; %s", ended.reason, standing(self._tier))
            raise self._error
        if self._interruption:
            left = f"; {standing(self._tier)}" if self._stop_requested else ""
            raise KeyboardInterrupt(f"{self._interruption}{left}")
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether training has ended in any way other than the user ending it at once."""
        return self._is_over and not self._interruption

    @property
    def unfired(self) -> tuple[Injection, ...]:
        """The faults whose place was never reached."""
        return self._unfired

    async def _run(self) -> Ended:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        lifeline_read_fd, lifeline_write_fd = os.pipe()
        injector = await self._injector.listen() if self._injections else ("", 0)
        with (
            interrupts(loop, self._interrupt, told_to_leave=self._leave),
            socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
        ):
            self._listener = listener
            self._lifeline_fd = lifeline_read_fd
            self._leading: asyncio.Task[None] | None = None
            try:
                self._injector_address = injector
                for node in self._leader_spec.plan.nodes:
                    self._start_agent(node)
                self._join(self._spec.job.cluster.standby)
                self._leader_spec = msgspec.structs.replace(
                    self._leader_spec,
                    places=coordinator_places(self._injections),
                    heeds=self._injector.is_heeded,
                    injector=injector,
                )
                self._forker.begin()
                self._start_leading()
                answer = answering(self._drains, self._observer.events_json)
                async with open_desk(self._spec.job.name, answer, note=self._warn):
                    ended = await self._ended
                self._is_over = True
                self._injector.ended()
                self._start_no_more()
                if ended.ending not in ("failed", "lost"):
                    self._kill_evicted(ended)
                    await self._wait_left(lifeline_write_fd)
            finally:
                if self._leading is not None:
                    self._leading.cancel()
                self._start_no_more()
                self._kill_all()
                if not await is_left_alone(lifeline_write_fd, timeout_s=KILL_TIMEOUT_S):
                    logger.warning("a process of the job is still there after it was killed")
                await wait_until(self._has_exits, timeout_s=KILL_TIMEOUT_S)
                self._forker.close()
                os.close(lifeline_write_fd)
                self._unfired = self._injector.close() if self._injections else ()
        agents = set(self._agents.values()) & set(self._exits)
        statuses = {self._exits[pid] for pid in agents - self._fenced}
        return explained(ended, statuses - {UNKNOWN})

    # -- processes --------------------------------------------------------------------------------

    def _start_agent(self, node: int, *, is_granted: bool = False) -> None:
        """Starts a node on a machine without a live node, or on a new one that was granted."""
        there = {*self._there, *self._forker.nodes}
        taken = {self._machines[other] for other in (self._machines if is_granted else there)}
        self._machines[node] = next(n for n in map("machine-{}".format, count()) if n not in taken)
        spec = msgspec.structs.replace(
            self._spec,
            node=node,
            machine=self._machines[node],
            coordinator=self._injector.front(node, self._listener.getsockname()[:2]),
            places=node_places(self._injections, node),
            injector=self._injector_address,
            heeds=self._injector.is_heeded,
        )
        self._forker.add(node, msgspec.json.encode(spec), (self._lifeline_fd,))

    def _on_forked(self, node: int, pid: int) -> None:
        self._agents[node] = self._there[node] = pid
        if pid in self._exits:  # It ended before its pid was known here.
            self._on_agent_exited(node)

    def _on_exited(self, pid: int, status: int) -> None:
        self._exits[pid] = status
        for node, agent in self._agents.items():
            if agent == pid:
                self._on_agent_exited(node)

    def _on_agent_exited(self, node: int) -> None:
        self._there.pop(node, None)
        self._drains.left(node)
        self._say(self._agent_ended(node))

    def _agent_ended(self, node: int) -> AgentEnded:
        return AgentEnded(node=node, reason=f"its agent {told(self._exits[self._agents[node]])}")

    def _start_no_more(self) -> None:
        """Stops forking; then only the job's processes have read ends of the lifeline."""
        self._operator.close()
        self._forker.stop()
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1

    def _join(self, num_nodes: int) -> None:
        """Starts nodes with numbers that were never used before."""
        for _ in range(num_nodes):
            self._start_agent(max(self._machines) + 1)

    def _grant(self, stead: int) -> None:
        """Starts a node on a machine that was granted in place of the lost node's."""
        if not (self._stop_requested or self._must_end):
            node = max(self._machines) + 1
            self._start_agent(node, is_granted=True)
            self._tell(partial(self._observer.granted, node, stead=stead))

    def _give_back(self, node: int) -> None:
        """Ends all processes of a lost node, which may still run."""
        self._forker.drop(node)
        if node in self._agents:
            self._fence(self._agents[node])

    # -- the coordinator --------------------------------------------------------------------------

    def _start_leading(self) -> None:
        self._leading = asyncio.create_task(self._lead())
        self._leading.add_done_callback(self._lead_on)

    async def _lead(self) -> None:
        """Runs coordinators until the job ends; one that only saves, if none can go on."""
        while not self._ended.done():
            must_end = self._must_end
            if must_end and (why := self._unsavable()):
                self._end(f"{must_end}; {why}")
            elif not (shortage := await self._run_next_leader()):
                self._restarts += 1
                if self._restarts > RESTARTS_MAX and not self._must_end:
                    times = f"{self._restarts} times without a commit"
                    self._must_end = f"the coordinator ended {times}"
            elif must_end:
                self._end(f"{must_end}; no process could be started to save")
            elif not self._must_end:  # If it was just set, first try one that saves.
                self._must_end = f"no coordinator could be started: {shortage}"
                self._warn(f"{self._must_end}; the job saves and ends")

    async def _run_next_leader(self) -> str:
        """Runs a coordinator until it is gone; returns why none could be started, or "".

        Tries for about a minute.
        """
        shortage = ""
        for _ in range(SHORT_TRIES_MAX):
            if not await self._forker.wait_ready():
                return self._forker.failure
            try:
                rescue = self._rescue() if self._must_end else None
                await self._run_leader(msgspec.structs.replace(self._leader_spec, rescue=rescue))
            except InsufficientError as error:  # The fork server has ended meanwhile.
                shortage = str(error)
            except OSError as error:
                shortage = str(error.strerror)
                logger.warning("the coordinator could not be started (%s)", shortage)
                await asyncio.sleep(SHORTAGE_PAUSE_S)
            else:
                return ""
        return shortage

    def _unsavable(self) -> str:
        """Why another coordinator that only saves would be of no use; "": it may be."""
        if self._rescues == RESCUES_MAX:
            return f"{RESCUES_MAX} more ended before they had it saved"
        if not any(node in self._there for node in self._members.nodes):
            return "no node is left to save"
        return ""

    async def _run_leader(self, spec: LeaderSpec) -> None:
        """Runs one coordinator and handles its messages until it is gone."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                payload = msgspec.json.encode(spec)
                fds = (self._listener.fileno(), theirs.fileno(), self._lifeline_fd)
                pid = await self._forker.spawn("planaria.nodes.head.leader:main", payload, fds)
            self._leader_pid = pid
            self._leader_pids.add(pid)
            self._rescues += spec.rescue is not None
            if self._must_end and spec.rescue is None:  # _must_end was set during the fork.
                self._fence(pid)
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
        """The state from which a coordinator that only saves goes on."""
        self._members = saving_members(self._members, self._there)
        return Rescue(
            reason=self._must_end,
            term=self._leader_spec.led_term + 1,
            members=self._members,
            outcome=self._outcome,
            progress=self._progress,
        )

    def _lead_on(self, leading: asyncio.Task[None]) -> None:
        """Handles an exception in this process: the job saves the live state and ends."""
        if leading.cancelled() or self._ended.done() or not (error := leading.exception()):
            return
        if self._error is not None or not isinstance(error, Exception):
            self._ended.set_exception(error)
            return
        self._save_and_raise(error)
        self._start_leading()

    def _save_and_raise(self, error: Exception) -> None:
        """Makes the job save and end; `run` raises the first error that was given here."""
        if self._error is not None:
            logger.warning("the launcher raised %r", error)
            return
        self._error, self._must_end = error, f"the launcher raised {error!r}"
        if self._leader_pid:
            self._fence(self._leader_pid)  # A coordinator that stands still might go on later.

    def _tell(self, call: Callable[[], None]) -> None:
        """Calls the observer; if it raises, the job saves and ends."""
        try:
            call()
        except Exception as error:
            self._save_and_raise(error)

    def _notice(self, message: ToLauncher) -> None:
        self._tell(partial(self._observer.noticed, message))

    def _warn(self, text: str) -> None:
        self._notice(Warned(text=text))

    def _meanwhile(self) -> str:
        """Text about the job to show while a fork server is renewed."""
        if self._must_end:
            return ", to save what is live"
        is_led = self._is_training and self._to_leader is not None
        return ", and training goes on meanwhile" if is_led else ""

    def _brief(self) -> None:
        """Tells a new coordinator what the one before it may not have heard or recorded."""
        for node, pid in self._agents.items():
            if pid in self._exits:
                self._say(self._agent_ended(node))
        self._drains.repeat()
        if self._stop_requested:
            self._say(StopRequested())

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Handles the coordinator's messages until it is gone."""
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
                        continue  # An earlier coordinator has reported it.
                    case Committed():
                        self._committed = (message.since, message.iteration + 1)
                        self._progress = Progress(
                            num_committed=message.iteration + 1,
                            ends=message.ends,
                            since=message.since,
                        )
                        self._restarts = 0
                        self._forker.committed()
                    case Recorded():
                        self._members = message.members or self._members
                        self._outcome = message.outcome or self._outcome
                        continue
                    case Unrecorded() if not self._has_led:
                        self._begin_elsewhere(message.reason)
                        return
                    case Unrecorded():
                        self._must_end = self._must_end or message.reason
                        self._warn(f"{message.reason}; the job saves and ends")
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
        """Notes that a coordinator leads; the next one must find this one's records."""
        self._leader_spec = msgspec.structs.replace(self._leader_spec, led_term=message.term)
        if self._lost_leader_s and self._has_led and self._error is None:
            lost_s, now_s = self._lost_leader_s, message.now_s
            self._tell(partial(self._observer.restarted, lost_s=lost_s, now_s=now_s))
        self._lost_leader_s = 0.0
        self._has_led = True

    def _begin_elsewhere(self, reason: str) -> None:
        """Moves the journal to another place if there is one, else ends the job.

        It is called if the disk refuses the very first records.
        """
        self._fence(self._leader_pid)
        directory = self._other_journal()
        if not directory:
            self._end(f"{reason}; nothing was trained, and nothing is lost")
            return
        self._leader_spec = msgspec.structs.replace(self._leader_spec, directory=directory)
        self._notice(Warned(text=f"{reason}; they are kept in {directory} instead"))

    def _kill_leader(self, since_s: float) -> None:
        """Kills a coordinator that stands still; its connection closes when it has ended.

        Args:
            since_s: time of its last message.
        """
        if not self._lost_leader_s:
            silent_s = time.monotonic() - since_s
            logger.warning("the coordinator stands still for %.1f s and is killed", silent_s)
            self._lost_leader_s = since_s
        kill_group(self._leader_pid)

    def _say(self, message: Message) -> None:
        if self._to_leader is not None and not self._ended.done():
            self._to_leader.write(frame(message))

    async def _wait_left(self, lifeline_fd: int) -> None:
        """Waits up to EXIT_TIMEOUT_S for the job's processes to end by themselves."""
        if await is_left_alone(lifeline_fd, timeout_s=EXIT_TIMEOUT_S):
            return
        for node in (node for node, pid in self._agents.items() if pid not in self._exits):
            logger.warning("node %s did not leave in %.0f s and is killed", node, EXIT_TIMEOUT_S)

    def _kill_evicted(self, ended: Ended) -> None:
        """Kills the nodes that are not members at the end; an evicted node may hang for ever."""
        for node in self._agents.keys() - set(ended.nodes):
            self._fence(self._agents[node])

    def _kill_all(self) -> None:
        self._forker.look()  # A process that has ended by now must not count as killed here.
        for pid in {*self._agents.values(), *self._leader_pids}:
            self._fence(pid)

    def _fence(self, pid: int) -> None:
        """Kills an agent or a coordinator with its process group, unless it has ended."""
        if pid not in self._exits:
            self._fenced.add(pid)
            kill_group(pid)

    def _has_exits(self) -> bool:
        return {*self._agents.values(), *self._leader_pids} <= set(self._exits)

    # -- the user, and faults ---------------------------------------------------------------------

    def _fire(self, injection: Injection) -> None:
        first = max(self._machines) + 1
        nodes = injection.nodes or tuple(range(first, first + injection.num_nodes))
        injection = replace(injection, nodes=nodes)
        self._tell(partial(self._observer.fired, injection, now_s=time.monotonic()))

    def _interrupt(self) -> None:
        """Handles Ctrl-C."""
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

    def _leave(self) -> None:
        """Handles a signal that tells the process to leave."""
        if self._is_training and not self._ended.done():
            self._request_stop()
        else:
            self._interrupt()

    def _request_stop(self) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            self._say(StopRequested())
            self._tell(self._observer.stopping)

    def _end(self, reason: str) -> None:
        """Ends the job for a reason that the coordinator does not know."""
        if not self._ended.done():
            ended = Ended(ending="lost", reason=reason, failure=None, nodes=(), epoch=0)
            self._ended.set_result(ended)
