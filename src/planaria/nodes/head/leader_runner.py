"""Runs the coordinator's process of a job, and another one whenever it ends before the job does.

Each coordinator takes over from the one before it, with the same journal. One that stands still is
killed first. If the coordinator cannot go on (its records are lost, it ends again and again, or the
launcher itself raises), the next one only saves the live state (leader.py). If that fails too, the
job ends as lost.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import msgspec

from planaria.core.inject import Place
from planaria.core.messages import Message
from planaria.core.records import (
    Beat,
    Committed,
    Ended,
    Leading,
    Members,
    Recorded,
    ToLauncher,
    Unrecorded,
    Warned,
)
from planaria.errors import AuthenticationError, InsufficientError
from planaria.nodes.forking import SHORTAGE_PAUSE_S, Forker
from planaria.nodes.head.job_processes import JobProcesses
from planaria.nodes.head.leader_spec import LeaderSpec
from planaria.nodes.head.process_events import coordinator_data, kill_group
from planaria.protocol.newest_records import NewestRecords
from planaria.transport.frames import FrameDecoder, frame, message_of

logger = logging.getLogger(__name__)

RESTARTS_MAX: Final = 5  # Restarts of the coordinator without a commit in between.
SHORT_TRIES_MAX: Final = 60  # Tries to start a coordinator, one second apart, if resources lack.
RESCUES_MAX: Final = 3  # Number of coordinators that only save.

_LEADER: Final = "planaria.nodes.head.leader:main"
_decoder: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderCallbacks:
    """What a runner calls.

    Attributes:
        on_connect: called when a coordinator can be sent messages; it knows nothing of what those
            before it were told.
        on_message: called with each message that concerns more than this runner.
        on_members: called with the members on record, and the nodes that are out of the job for
            good.
        on_restart: called with the time at which a coordinator was lost, and the time at which the
            next one leads.
        end: ends the job for a reason that no coordinator knows.
        pass_on: shows the user a message.
        on_error: called with what this process raises here; returns whether the live state is to be
            saved, after it has called `save_and_end`.
        other_journal: returns another directory for the journal, or "" if there is none.
        on_taken: called when another head has taken the run up; it ends the job here.
    """

    on_connect: Callable[[], None]
    on_message: Callable[[ToLauncher], None]
    on_members: Callable[[Members], None]
    on_restart: Callable[[float, float], None]
    end: Callable[[str], None]
    pass_on: Callable[[ToLauncher], None]
    on_error: Callable[[Exception], bool]
    other_journal: Callable[[], str]
    on_taken: Callable[[], None]


class LeaderRunner:
    """Runs the coordinators of one job.

    Args:
        spec: spec of the first coordinator.
        live_nodes: nodes whose agents live; changes during the job.

    Attributes:
        pid: pid of the newest coordinator; 0: there was none.
        save_only_reason: reason why the next coordinator only saves; "": the job goes on.
    """

    def __init__(
        self,
        spec: LeaderSpec,
        *,
        forker: Forker,
        processes: JobProcesses,
        live_nodes: Collection[int],
        callbacks: LeaderCallbacks,
    ) -> None:
        self.pid = 0
        self.save_only_reason = ""
        self._spec = spec
        self._forker = forker
        self._processes = processes
        self._live_nodes = live_nodes
        self._callbacks = callbacks
        self._ended: asyncio.Future[Ended]
        self._writer: asyncio.StreamWriter | None = None
        self._lost_s = 0.0  # Time at which the coordinator was lost; 0: it is there.
        self._restarts = self._rescues = 0
        self._has_led = False  # Whether any coordinator has led.
        self._records = NewestRecords(
            Members(epoch=spec.plan.epoch, term=spec.led_term, nodes=spec.plan.nodes)
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a coordinator to which messages can be sent."""
        return self._writer is not None

    def set_faults(
        self, places: tuple[Place, ...], *, heeds: bool, injector: tuple[str, int]
    ) -> None:
        """Sets where faults are injected into coordinators; see LeaderSpec."""
        self._spec = msgspec.structs.replace(
            self._spec, places=places, heeds=heeds, injector=injector
        )

    def start(
        self, ended: asyncio.Future[Ended], *, listener_fd: Callable[[], int], lifeline_fd: int
    ) -> None:
        """Begins to run coordinators.

        Args:
            ended: future that has a result once the job is over.
            listener_fd: returns the descriptor from which the next coordinator gets the connections
                of agents.
            lifeline_fd: read end of the lifeline.
        """
        self._ended = ended
        self._descriptors = listener_fd, lifeline_fd
        self._start_task()

    def stop(self) -> None:
        """Runs no more coordinators; one that runs goes on."""
        if self._task is not None:
            self._task.cancel()

    def send(self, message: Message) -> None:
        """Sends a message to the coordinator; it is dropped if there is none."""
        if self._writer is not None and not self._ended.done():
            self._writer.write(frame(message))

    def save_and_end(self, reason: str) -> None:
        """Makes the next coordinator only save, and kills this one, which may stand still."""
        self.save_only_reason = reason
        if self.pid:
            self._processes.kill_coordinator(self.pid)

    def _start_task(self) -> None:
        self._task = asyncio.create_task(self._run_leaders())
        self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Handles an exception in this process: the job saves the live state and ends."""
        if task.cancelled() or self._ended.done() or not (error := task.exception()):
            return
        if isinstance(error, Exception) and self._callbacks.on_error(error):
            self._start_task()
        else:
            self._ended.set_exception(error)

    async def _run_leaders(self) -> None:
        """Runs coordinators until the job ends; one that only saves, if none can go on."""
        while not self._ended.done():
            save_only_reason = self.save_only_reason
            if save_only_reason and (why := self._no_save_reason()):
                self._callbacks.end(f"{save_only_reason}; {why}")
            elif not (shortage := await self._run_next_leader()):
                self._restarts += 1
                if self._restarts > RESTARTS_MAX and not self.save_only_reason:
                    times = f"{self._restarts} times without a commit"
                    self.save_only_reason = f"the coordinator ended {times}"
            elif save_only_reason:
                self._callbacks.end(f"{save_only_reason}; no process could be started to save")
            elif not self.save_only_reason:  # If it was just set, first try one that saves.
                self.save_only_reason = f"no coordinator could be started: {shortage}"
                self._warn(f"{self.save_only_reason}; the job saves and ends")

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
                if self.save_only_reason:
                    rescue = self._records.rescue(
                        self.save_only_reason,
                        term=self._spec.led_term + 1,
                        live_nodes=self._live_nodes,
                    )
                await self._run_leader(msgspec.structs.replace(self._spec, rescue=rescue))
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
        if self._spec.is_taken_up and not self._has_led:
            return "no coordinator has read the records, and nothing was done to the nodes"
        if self._rescues == RESCUES_MAX:
            return f"{RESCUES_MAX} more coordinators ended before they had saved it"
        if not any(node in self._live_nodes for node in self._records.nodes):
            return "no node is left to save"
        return ""

    async def _run_leader(self, spec: LeaderSpec) -> None:
        """Runs one coordinator and handles its messages until it is gone."""
        own_socket, leader_socket = socket.socketpair()
        listener_fd, lifeline_fd = self._descriptors
        try:
            with leader_socket:
                payload = msgspec.json.encode(spec)
                fds = (listener_fd(), leader_socket.fileno(), lifeline_fd)
                pid = await self._forker.spawn(_LEADER, payload, fds)
            self.pid = pid
            self._processes.add_coordinator(pid)
            self._rescues += spec.rescue is not None
            if self.save_only_reason and spec.rescue is None:  # It was set during the fork.
                self._processes.kill_coordinator(pid)
            reader, self._writer = await asyncio.open_connection(sock=own_socket)
        except BaseException:
            own_socket.close()
            raise
        try:
            self._callbacks.on_connect()
            with contextlib.suppress(ConnectionError):
                await self._handle_messages(reader)
        except AuthenticationError as error:
            logger.warning("the coordinator breaks the protocol and is killed: %s", error)
            kill_group(self.pid)
        finally:
            self._lost_s = self._lost_s or time.monotonic()
            self._writer.close()
            self._writer = None

    async def _handle_messages(self, reader: asyncio.StreamReader) -> None:
        """Handles the coordinator's messages until it is gone."""
        decoder = FrameDecoder()
        lease_s = self._spec.job.cluster.lease_s
        async for data in coordinator_data(
            reader, self.pid, lease_s=lease_s, on_standstill=self._kill_leader
        ):
            for body in decoder.feed(data):
                message = message_of(body, _decoder)
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
                        if message.members is not None:
                            self._callbacks.on_members(message.members)
                        continue
                    case Unrecorded(is_taken=True):
                        self._callbacks.on_taken()
                        return
                    case Unrecorded() if not self._has_led:
                        self._move_journal(message.reason)
                        return
                    case Unrecorded():
                        self.save_only_reason = self.save_only_reason or message.reason
                        self._warn(f"{message.reason}; the job saves and ends")
                        continue
                    case Leading():
                        self._on_leading(message)
                    case Ended() if not self._ended.done():
                        self._ended.set_result(message)
                        return
                self._callbacks.on_message(message)

    def _on_leading(self, message: Leading) -> None:
        """Notes that a coordinator leads; the next one must find this one's records."""
        self._spec = msgspec.structs.replace(self._spec, led_term=message.term)
        if self._lost_s and self._has_led:
            self._callbacks.on_restart(self._lost_s, message.now_s)
        self._lost_s = 0.0
        self._has_led = True

    def _move_journal(self, reason: str) -> None:
        """Moves the journal to another place if there is one, else ends the job.

        It is called if the disk refuses the very first records.
        """
        self._processes.kill_coordinator(self.pid)
        directory = "" if self._spec.is_taken_up else self._callbacks.other_journal()
        if not directory:
            self._callbacks.end(f"{reason}; nothing was trained, and nothing is lost")
            return
        self._spec = msgspec.structs.replace(self._spec, directory=directory)
        self._warn(f"{reason}; they are kept in {directory} instead")

    def _kill_leader(self, since_s: float) -> None:
        """Kills a coordinator that stands still; its connection closes when it has ended.

        Args:
            since_s: time of its last message.
        """
        if not self._lost_s:
            silent_s = time.monotonic() - since_s
            logger.warning("the coordinator stands still for %.1f s and is killed", silent_s)
            self._lost_s = since_s
        kill_group(self.pid)

    def _warn(self, text: str) -> None:
        self._callbacks.pass_on(Warned(text=text))
