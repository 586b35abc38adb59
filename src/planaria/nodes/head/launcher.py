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
signal that tells a process to leave (process_events.py) acts like the first, however often it is
sent. Before training has begun, any of these signals ends the job at once.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from planaria.checkpoint.disk.tiers import Tier, newest_checkpoint_text
from planaria.checkpoint.disk.time_limits import discard
from planaria.core.inject import Injection
from planaria.core.kinds import Ending
from planaria.core.messages import Message, StopRequested
from planaria.core.records import (
    Beat,
    Committed,
    Ended,
    Leading,
    Members,
    Recorded,
    Running,
    ToLauncher,
    Unrecorded,
    Unsaved,
    Warned,
)
from planaria.core.specs import NodeSpec
from planaria.errors import InsufficientError
from planaria.nodes.forking import SHORTAGE_PAUSE_S, Forker
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.cloud import LocalOperator
from planaria.nodes.head.job_processes import JobProcesses
from planaria.nodes.head.leader_spec import LeaderSpec
from planaria.nodes.head.observer import Observer
from planaria.nodes.head.process_events import (
    coordinator_data,
    handle_signals,
    kill_group,
    wait_last_exit,
    wait_until,
    with_agent_exits,
)
from planaria.nodes.head.request_socket import Drains, reply_function, serve_requests
from planaria.nodes.injector import Injector, Targets, coordinator_places, node_places
from planaria.protocol.newest_records import NewestRecords
from planaria.transport.frames import FrameDecoder, frame

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0  # Time for agents to end by themselves before their groups are killed.
KILL_TIMEOUT_S = 5.0  # Time for the kernel to end killed processes.
RESTARTS_MAX = 5  # Restarts of the coordinator without a commit in between.
SHORT_TRIES_MAX = 60  # Tries to start a coordinator, one second apart, if resources are short.
RESCUES_MAX = 3  # Number of coordinators that only save.

_decoder: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a launcher starts.

    Attributes:
        node: spec of every node; the launcher fills in `node`, the token and all addresses.
        leader: spec of the coordinator; the launcher fills in the token, addresses and places.
        injections: faults to inject.
    """

    node: NodeSpec
    leader: LeaderSpec
    injections: tuple[Injection, ...] = ()


class Launcher:
    """Runs one job.

    Args:
        tier: disk tier to which the job saves; must answer or raise in bounded time.
        other_journal: returns another directory for the journal, or "" if there is none.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        server: ForkServer,
        observer: Observer,
        tier: Tier,
        other_journal: Callable[[], str] = str,
    ) -> None:
        token = secrets.token_bytes(32)
        self._node_spec = msgspec.structs.replace(spec.node, token=token)
        self._leader_spec = msgspec.structs.replace(spec.leader, token=token)
        self._injections = spec.injections
        self._server = server
        self._observer = observer
        self._other_journal = other_journal
        self._processes = JobProcesses()
        targets = Targets(
            agents=self._processes.live_agents,
            leader=lambda: self._leader_pid,
            server=lambda: self._server.pid,
        )
        self._injector = Injector(
            spec.injections, targets, token=token, join=self._join, on_fire=self._on_fire
        )
        self._forker = self._forker_of(server)
        self._drains = Drains(self._send, self._processes.live_agents.keys())
        self._operator = LocalOperator(
            spec.node.job.cluster.grant_s, give_back=self._give_back, start_node=self._on_grant
        )
        self._leader_pid = 0
        self._to_leader: asyncio.StreamWriter | None = None
        self._lost_leader_s = 0.0  # Time at which the coordinator was lost; 0: it is there.
        self._restarts = self._rescues = 0
        self._save_only_reason = ""  # Why the next coordinator only saves; "": the job goes on.
        self._error: Exception | None = None  # Raised in this process; makes the job end.
        plan = spec.leader.plan
        self._records = NewestRecords(
            Members(epoch=plan.epoch, term=spec.leader.led_term, nodes=plan.nodes)
        )
        self._has_led = False  # Whether any coordinator has led.
        self._is_training = False
        self._stop_requested = False
        self._is_interrupted = False
        self._interruption = ""
        self._tier = tier
        self._unsaved: set[tuple[int, int]] = set()
        self._unfired_injections: tuple[Injection, ...] = ()
        self._ended: asyncio.Future[Ended]
        self._is_over = False

    def _forker_of(self, server: ForkServer) -> Forker:
        return Forker(
            server,
            on_fork=self._on_fork,
            on_exit=self._on_exit,
            note=self._warn,
            meanwhile=self._training_text,
            on_error=self._save_and_raise,
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
            logger.warning(
                "the job has ended, %s; %s", ended.reason, newest_checkpoint_text(self._tier)
            )
            raise self._error
        if self._interruption:
            saved_text = f"; {newest_checkpoint_text(self._tier)}" if self._stop_requested else ""
            raise KeyboardInterrupt(f"{self._interruption}{saved_text}")
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether training has ended in any way other than the user ending it at once."""
        return self._is_over and not self._interruption

    @property
    def unfired_injections(self) -> tuple[Injection, ...]:
        """The faults whose place was never reached."""
        return self._unfired_injections

    async def _run(self) -> Ended:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        lifeline_read_fd, lifeline_write_fd = os.pipe()
        injector = await self._injector.listen() if self._injections else ("", 0)
        with (
            handle_signals(loop, self._on_interrupt, on_leave_signal=self._on_leave_signal),
            socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
        ):
            self._listener = listener
            self._lifeline_fd = lifeline_read_fd
            self._leaders: asyncio.Task[None] | None = None
            try:
                self._injector_address = injector
                for node in self._leader_spec.plan.nodes:
                    self._start_agent(node)
                self._join(self._node_spec.job.cluster.standby)
                self._leader_spec = msgspec.structs.replace(
                    self._leader_spec,
                    places=coordinator_places(self._injections),
                    heeds=self._injector.keeps_connections,
                    injector=injector,
                )
                self._forker.begin()
                self._start_leaders()
                answer = reply_function(self._drains, self._observer.events_json)
                async with serve_requests(self._node_spec.job.name, answer, note=self._warn):
                    ended = await self._ended
                self._is_over = True
                self._injector.on_job_end()
                self._stop_forking()
                if ended.ending not in (Ending.FAILED, Ending.LOST):
                    self._processes.kill_other_nodes(ended.nodes)
                    await self._wait_agents_left(lifeline_write_fd)
            finally:
                if self._leaders is not None:
                    self._leaders.cancel()
                self._stop_forking()
                self._kill_all()
                if not await wait_last_exit(lifeline_write_fd, timeout_s=KILL_TIMEOUT_S):
                    logger.warning("a process of the job is still there after it was killed")
                await wait_until(self._processes.have_ended, timeout_s=KILL_TIMEOUT_S)
                self._forker.close()
                os.close(lifeline_write_fd)
                self._unfired_injections = self._injector.close() if self._injections else ()
        return with_agent_exits(ended, self._processes.agent_statuses())

    # -- processes --------------------------------------------------------------------------------

    def _start_agent(self, node: int, *, is_granted: bool = False) -> None:
        """Starts a node on a machine without a live node, or on a new one that was granted."""
        machine = self._processes.assign_machine(
            node, starting=self._forker.nodes, is_new=is_granted
        )
        spec = msgspec.structs.replace(
            self._node_spec,
            node=node,
            machine=machine,
            coordinator=self._injector.coordinator_address(node, self._listener.getsockname()[:2]),
            places=node_places(self._injections, node),
            injector=self._injector_address,
            heeds=self._injector.keeps_connections,
        )
        self._forker.add(node, msgspec.json.encode(spec), (self._lifeline_fd,))

    def _on_fork(self, node: int, pid: int) -> None:
        self._processes.add_agent(node, pid)
        if self._processes.has_ended(node):  # It ended before its pid was known here.
            self._on_agent_exit(node)

    def _on_exit(self, pid: int, status: int) -> None:
        for node in self._processes.add_exit(pid, status):
            self._on_agent_exit(node)

    def _on_agent_exit(self, node: int) -> None:
        self._drains.on_node_left(node)
        self._send(self._processes.agent_end(node))

    def _stop_forking(self) -> None:
        """Stops forking; then only the job's processes have read ends of the lifeline."""
        self._operator.close()
        self._forker.stop()
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1

    def _join(self, num_nodes: int) -> None:
        """Starts nodes with numbers that were never used before."""
        for _ in range(num_nodes):
            self._start_agent(self._processes.next_node)

    def _on_grant(self, replaced_node: int) -> None:
        """Starts a node on a machine that was granted in place of the lost node's."""
        if not (self._stop_requested or self._save_only_reason):
            node = self._processes.next_node
            self._start_agent(node, is_granted=True)
            self._call_observer(partial(self._observer.on_grant, node, replaced_node=replaced_node))

    def _give_back(self, node: int) -> None:
        """Ends all processes of a lost node, which may still run."""
        self._forker.drop(node)
        self._processes.kill_node(node)

    # -- the coordinator --------------------------------------------------------------------------

    def _start_leaders(self) -> None:
        self._leaders = asyncio.create_task(self._run_leaders())
        self._leaders.add_done_callback(self._on_leaders_done)

    async def _run_leaders(self) -> None:
        """Runs coordinators until the job ends; one that only saves, if none can go on."""
        while not self._ended.done():
            save_only_reason = self._save_only_reason
            if save_only_reason and (why := self._no_save_reason()):
                self._end(f"{save_only_reason}; {why}")
            elif not (shortage := await self._run_next_leader()):
                self._restarts += 1
                if self._restarts > RESTARTS_MAX and not self._save_only_reason:
                    times = f"{self._restarts} times without a commit"
                    self._save_only_reason = f"the coordinator ended {times}"
            elif save_only_reason:
                self._end(f"{save_only_reason}; no process could be started to save")
            elif not self._save_only_reason:  # If it was just set, first try one that saves.
                self._save_only_reason = f"no coordinator could be started: {shortage}"
                self._warn(f"{self._save_only_reason}; the job saves and ends")

    async def _run_next_leader(self) -> str:
        """Runs a coordinator until it is gone; returns why none could be started, or "".

        Tries for about a minute.
        """
        shortage = ""
        for _ in range(SHORT_TRIES_MAX):
            if not await self._forker.wait_ready():
                return self._forker.failure
            try:
                rescue = None
                if self._save_only_reason:
                    rescue = self._records.rescue(
                        self._save_only_reason,
                        term=self._leader_spec.led_term + 1,
                        live_nodes=self._processes.live_agents,
                    )
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

    def _no_save_reason(self) -> str:
        """Why another coordinator that only saves would be of no use; "": it may be."""
        if self._rescues == RESCUES_MAX:
            return f"{RESCUES_MAX} more coordinators ended before they had saved it"
        if not any(node in self._processes.live_agents for node in self._records.nodes):
            return "no node is left to save"
        return ""

    async def _run_leader(self, spec: LeaderSpec) -> None:
        """Runs one coordinator and handles its messages until it is gone."""
        own_socket, leader_socket = socket.socketpair()
        try:
            with leader_socket:
                payload = msgspec.json.encode(spec)
                fds = (self._listener.fileno(), leader_socket.fileno(), self._lifeline_fd)
                pid = await self._forker.spawn("planaria.nodes.head.leader:main", payload, fds)
            self._leader_pid = pid
            self._processes.add_coordinator(pid)
            self._rescues += spec.rescue is not None
            if self._save_only_reason and spec.rescue is None:  # It was set during the fork.
                self._processes.kill(pid)
            reader, self._to_leader = await asyncio.open_connection(sock=own_socket)
        except BaseException:
            own_socket.close()
            raise
        try:
            self._repeat_messages()
            with contextlib.suppress(ConnectionError):
                await self._handle_messages(reader)
        finally:
            self._lost_leader_s = self._lost_leader_s or time.monotonic()
            self._to_leader.close()
            self._to_leader = None

    def _on_leaders_done(self, task: asyncio.Task[None]) -> None:
        """Handles an exception in this process: the job saves the live state and ends."""
        if task.cancelled() or self._ended.done() or not (error := task.exception()):
            return
        if self._error is not None or not isinstance(error, Exception):
            self._ended.set_exception(error)
            return
        self._save_and_raise(error)
        self._start_leaders()

    def _save_and_raise(self, error: Exception) -> None:
        """Makes the job save and end; `run` raises the first error that was given here."""
        if self._error is not None:
            logger.warning("the launcher raised %r", error)
            return
        self._error, self._save_only_reason = error, f"the launcher raised {error!r}"
        if self._leader_pid:
            # A coordinator that stands still might go on later.
            self._processes.kill(self._leader_pid)

    def _call_observer(self, call: Callable[[], None]) -> None:
        """Calls the observer; if it raises, the job saves and ends."""
        try:
            call()
        except Exception as error:
            self._save_and_raise(error)

    def _pass_to_observer(self, message: ToLauncher) -> None:
        self._call_observer(partial(self._observer.on_message, message))

    def _warn(self, text: str) -> None:
        self._pass_to_observer(Warned(text=text))

    def _training_text(self) -> str:
        """Text about the job to show while a fork server is renewed."""
        if self._save_only_reason:
            return ", to save the live layers"
        is_led = self._is_training and self._to_leader is not None
        return ", and training goes on meanwhile" if is_led else ""

    def _repeat_messages(self) -> None:
        """Tells a new coordinator what the one before it may not have heard or recorded."""
        for message in self._processes.agent_ends():
            self._send(message)
        self._drains.repeat()
        if self._stop_requested:
            self._send(StopRequested())

    async def _handle_messages(self, reader: asyncio.StreamReader) -> None:
        """Handles the coordinator's messages until it is gone."""
        decoder = FrameDecoder()
        lease_s = self._node_spec.job.cluster.lease_s
        async for data in coordinator_data(
            reader, self._leader_pid, lease_s=lease_s, on_standstill=self._kill_leader
        ):
            for body in decoder.feed(data):
                message = _decoder.decode(body)
                match message:
                    case Beat():
                        continue
                    case Committed():
                        if not self._records.add_commit(message):
                            continue  # An earlier coordinator has reported it.
                        self._restarts = 0
                        self._forker.on_commit()
                    case Recorded():
                        self._records.add_records(message)
                        continue
                    case Unrecorded() if not self._has_led:
                        self._move_journal(message.reason)
                        return
                    case Unrecorded():
                        self._save_only_reason = self._save_only_reason or message.reason
                        self._warn(f"{message.reason}; the job saves and ends")
                        continue
                    case Leading():
                        self._on_leading(message)
                    case Running() if not self._is_training:
                        self._is_training = True
                        if self._injections:
                            self._injector.on_training_start()
                    case Warned():
                        self._drains.on_refusal(message.undrained, message.text)
                    case Unsaved():
                        self._unsaved.add((message.iteration, message.epoch))
                    case Ended() if not self._ended.done():
                        self._ended.set_result(message)
                        return
                self._operator.on_coordinator_message(message)
                self._pass_to_observer(message)

    def _on_leading(self, message: Leading) -> None:
        """Notes that a coordinator leads; the next one must find this one's records."""
        self._leader_spec = msgspec.structs.replace(self._leader_spec, led_term=message.term)
        if self._lost_leader_s and self._has_led and self._error is None:
            lost_s, now_s = self._lost_leader_s, message.now_s
            self._call_observer(
                partial(self._observer.on_coordinator_restart, lost_s=lost_s, now_s=now_s)
            )
        self._lost_leader_s = 0.0
        self._has_led = True

    def _move_journal(self, reason: str) -> None:
        """Moves the journal to another place if there is one, else ends the job.

        It is called if the disk refuses the very first records.
        """
        self._processes.kill(self._leader_pid)
        directory = self._other_journal()
        if not directory:
            self._end(f"{reason}; nothing was trained, and nothing is lost")
            return
        self._leader_spec = msgspec.structs.replace(self._leader_spec, directory=directory)
        self._pass_to_observer(Warned(text=f"{reason}; they are kept in {directory} instead"))

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

    def _send(self, message: Message) -> None:
        if self._to_leader is not None and not self._ended.done():
            self._to_leader.write(frame(message))

    async def _wait_agents_left(self, lifeline_fd: int) -> None:
        """Waits up to EXIT_TIMEOUT_S for the job's processes to end by themselves."""
        if await wait_last_exit(lifeline_fd, timeout_s=EXIT_TIMEOUT_S):
            return
        for node in self._processes.live_agents:
            logger.warning("node %s did not leave in %.0f s and is killed", node, EXIT_TIMEOUT_S)

    def _kill_all(self) -> None:
        self._forker.report_exits()  # A process that has ended must not count as killed here.
        self._processes.kill_all()

    # -- the user, and faults ---------------------------------------------------------------------

    def _on_fire(self, injection: Injection) -> None:
        first = self._processes.next_node
        nodes = injection.nodes or tuple(range(first, first + injection.num_nodes))
        injection = replace(injection, nodes=nodes)
        self._call_observer(partial(self._observer.on_fault, injection, now_s=time.monotonic()))

    def _on_interrupt(self) -> None:
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

    def _on_leave_signal(self) -> None:
        """Handles a signal that tells the process to leave."""
        if self._is_training and not self._ended.done():
            self._request_stop()
        else:
            self._on_interrupt()

    def _request_stop(self) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            self._send(StopRequested())
            self._call_observer(self._observer.on_stop_request)

    def _end(self, reason: str) -> None:
        """Ends the job for a reason that the coordinator does not know."""
        if not self._ended.done():
            ended = Ended(ending=Ending.LOST, reason=reason, failure=None, nodes=(), epoch=0)
            self._ended.set_result(ended)
