"""The process of a node: forks the node's workers, watches them, and forwards their messages.

An agent leads a process group of its own, which its workers join, so that killing the group is the
same as losing the node. It is single-threaded and forks workers directly. It forwards the workers'
messages to the coordinator, and the coordinator's orders to all workers. A worker that ends, with
what it has forked, is replaced. One without progress is killed first, and its stacks are reported.

SIGTERM, SIGUSR1 or a source of notices (notices.py) tells the agent that the node will be taken
away. It reports that, and the node is planned out.

When the coordinator is gone, the agent connects to the next one, which listens at the same address
or at another one that the agent knows (known_heads.py), and repeats the facts that may have been
lost. Heartbeats renew the node's lease; while it has expired nothing is written to disk. The agent
and its workers end when the launcher's end of the lifeline pipe closes, when the node is not a
member any more, or when the coordinator says `Shutdown`.

If the coordinator is on another machine, the agent also leaves a connection over which nothing
comes, and connects again and again. It closes the connection that it left only when the coordinator
answers it over another one: to the coordinator, a closed connection is a lost node.

The agent's decisions are in protocol/agent_state.py and agent_lease.py.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Final

import msgspec

from planaria.checkpoint.memory.arena_file import arena_fd
from planaria.core.clock_offsets import ClockOffset
from planaria.core.messages import (
    Fact,
    FromWorker,
    Heartbeat,
    HeartbeatRequested,
    HeartbeatTaken,
    NodeArrived,
    NoticeTaken,
    PartSaved,
    SavePart,
    Shutdown,
    ToNode,
    WorkerExited,
    WorkerFailed,
)
from planaria.core.specs import NodeSpec
from planaria.errors import AuthenticationError
from planaria.nodes.child_answers import answer_of_child, kill_holders, wait_exit
from planaria.nodes.descriptors import raise_open_files
from planaria.nodes.forkserver import close_others, die_with_parent, leave_removed_directory
from planaria.nodes.health import EXAMINATION_S, health_problem
from planaria.nodes.known_heads import KnownHeads, endpoints_by_child, look_by_child
from planaria.nodes.notices import fork_watcher, parse_notice_source
from planaria.nodes.output import flush_own
from planaria.nodes.part_reports import STATUS_NOTICED, STATUS_SAVED, PartReports, end_group_with
from planaria.protocol.agent_lease import (
    TICKS_PER_LEASE,
    AgentLease,
    WatchedAction,
    can_judge_workers,
    connected_lease,
    first_lease,
    is_given_up,
    is_late,
    is_silent,
    lease_after_contact,
    lease_after_tick,
    meeting_s,
    offset_after,
    reconnect_s,
    refused_lease,
    renewed_lease,
    unconnected_lease,
    watched_action,
)
from planaria.protocol.agent_state import (
    AgentState,
    on_coordinator_message,
    on_report,
    repeated_reports,
    successor_order,
)
from planaria.transport.acceptor import Purpose
from planaria.transport.credentials import credentials_of
from planaria.transport.frames import (
    FROM_NODE_BYTES_MAX,
    NODES,
    FrameDecoder,
    Role,
    derive,
    frame,
    message_of,
    order_of,
    shake_hands,
)
from planaria.transport.head_search import connect_first
from planaria.transport.pacing import node_clocks
from planaria.transport.pulse import CpuSteal, Pulse
from planaria.transport.sockets import open_stream
from planaria.transport.timekeeping import clock_name

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 20
_NUM_SILENT_MAX: Final = 8  # Number of connections that were left and are still open.
_STACK_SETTLED_S: Final = 0.05
_WATCHER_PAUSE_S: Final = 1.0
_DYING_S: Final = 20.0  # A worker that is killed may give back hundreds of gigabytes first.
# Signals that say that the node will be taken away.
_NOTICES: Final = (signal.SIGTERM, signal.SIGUSR1)

_from_worker_decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
WorkerMain = Callable[[NodeSpec, int, int, Pulse], None]


def main(payload: bytes, lifeline_fd: int, *head_fds: int) -> None:
    """An agent's main function, called in a forked process; see MachineNode for `head_fds`."""
    spec = msgspec.json.decode(payload, type=NodeSpec)
    os.setsid()
    raise_open_files(spec.job.cluster)
    # Only the launcher handles Ctrl-C; the terminal's signal must not end some of the processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _NOTICES:  # They must not end any process.
        signal.signal(number, lambda *_: None)
    devices = spec.job.cluster.devices_per_node
    try:
        clocks_fd = node_clocks(devices) if spec.job.model.kind == "paced" else -1
        workers = [
            _Worker(_worker_spec(spec, device, clocks_fd), lifeline_fd) for device in range(devices)
        ]
        asyncio.run(_Agent(spec, workers, lifeline_fd, head_fds).run())
    except BaseException:
        # _end_group also ends this process, so the traceback must be printed before it.
        traceback.print_exc()
    finally:
        _end_group()


def _worker_spec(spec: NodeSpec, device: int, clocks_fd: int) -> NodeSpec:
    """The spec of one worker, with memory for copies that outlives the worker."""
    copies_fd = arena_fd() if spec.job.checkpoint.copies else -1
    return msgspec.structs.replace(spec, device=device, clocks_fd=clocks_fd, copies_fd=copies_fd)


def _end_group() -> None:
    """Ends the whole process group, this process included."""
    flush_own()
    os.killpg(0, signal.SIGKILL)


class _Worker:
    """The agent's handle on a worker; `fork` replaces the process by a new one."""

    def __init__(self, spec: NodeSpec, lifeline_fd: int) -> None:
        self.rank = spec.rank
        self._spec = spec
        self._lifeline_fd = lifeline_fd
        self.fork()

    def fork(self) -> None:
        """Forks a worker, with a pulse and a socket of its own."""
        self.is_stalled, self.killed_s = False, inf
        self.ending: asyncio.Task[None] | None = None  # Ends a worker that is stalled.
        self.action = WatchedAction()
        self.writer: asyncio.StreamWriter | None = None
        self._waiting_orders: list[bytes] = []  # Orders that arrived before `connect`.
        self.pulse = Pulse()
        self.sock, worker_socket = socket.socketpair()
        agent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            # A worker must not outlive an agent that was killed alone.
            die_with_parent(agent_pid)
            open_fds = {0, 1, 2, worker_socket.fileno(), self._lifeline_fd, self.pulse.stack_fd}
            close_others(open_fds | {self._spec.clocks_fd, self._spec.copies_fd})
            _become_worker(self._spec, worker_socket.detach(), self._lifeline_fd, self.pulse)
        worker_socket.close()

    async def connect(self) -> asyncio.StreamReader:
        """Connects to the worker and sends it the orders since its fork; returns what it says."""
        reader, self.writer = await asyncio.open_connection(sock=self.sock)
        self.writer.write(b"".join(self._waiting_orders))
        return reader

    def tell(self, data: bytes) -> None:
        """Sends an order to the worker, which may still be starting."""
        if self.writer is None:
            self._waiting_orders.append(data)
        else:
            self.writer.write(data)

    async def end_stalled(self, *, timeout_s: float) -> None:
        """Kills the worker after it has written its stacks, or after `timeout_s`."""
        await self._write_stacks(timeout_s=timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.killed_s = time.monotonic()

    async def _write_stacks(self, *, timeout_s: float) -> None:
        """Makes a worker, which may be stopped, write its Python stacks; waits up to timeout_s."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)
        text, settled_s = "", time.monotonic()
        end_s = settled_s + timeout_s
        while (now_s := time.monotonic()) < end_s:
            if (newer := self.pulse.read_stack()) != text:
                text, settled_s = newer, now_s
            if text and now_s - settled_s > _STACK_SETTLED_S:
                break
            await asyncio.sleep(0.005)


class _Agent:
    def __init__(
        self, spec: NodeSpec, workers: list[_Worker], lifeline_fd: int, head_fds: Sequence[int] = ()
    ) -> None:
        self._spec, self._workers = spec, workers
        self._lifeline_fd, self._head_fds = lifeline_fd, head_fds
        self._state = AgentState(node=spec.node, is_elsewhere=spec.patience_s > 0.0)
        self._to_coordinator: asyncio.StreamWriter | None = None
        self._session: asyncio.Task[None]
        self._silent_writers: list[asyncio.StreamWriter] = []
        self._lease_s = spec.job.cluster.lease_s
        self._lease = first_lease(self._lease_s, time.monotonic(), patience_s=spec.patience_s)
        self._offset: ClockOffset | None = None  # Of the coordinator's clock from this one.
        self._cpu_steal = CpuSteal(TICKS_PER_LEASE)
        self._is_shut_down = self._is_leaving = self._is_noticed = False  # Noticed: its machine.
        self._examining: asyncio.Task[None] | None = None
        self._parts: PartReports | None = None  # There are some once the head is given up.
        addresses = (spec.coordinator, *spec.other_coordinators)
        place = spec.job.checkpoint.directory if spec.parts else ""
        self._heads = KnownHeads(addresses, look_by_child, place=place)
        self._head = spec.coordinator

    async def run(self) -> None:
        """Forwards messages until the coordinator says `Shutdown`."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._lifeline_fd, _end_group)
        for number in _NOTICES:
            loop.add_signal_handler(number, self._on_notice, self._spec.job.cluster.notice_s)
        for head_lost_fd in self._head_fds[1:]:
            loop.add_reader(head_lost_fd, self._give_up, "its head was replaced by another")
        self._report(
            NodeArrived(
                node=self._spec.node,
                rank=self._spec.rank,
                machine=self._spec.machine,
                clock=clock_name(),
                domain=self._spec.domain,
                speed=self._spec.speed,
            )
        )
        forwarders = [asyncio.create_task(self._forward_messages(each)) for each in self._workers]
        on_end = partial(self._end_on_error, "a worker of it cannot be replaced")
        for forwarder in forwarders:
            forwarder.add_done_callback(on_end)
        ticks = asyncio.create_task(self._run_ticks())
        ticks.add_done_callback(partial(self._end_on_error, "its ticks failed"))
        watch = asyncio.create_task(self._watch_notices())
        since_s = time.monotonic()
        while not self._is_shut_down and self._parts is None:
            begin_s = time.monotonic()
            self._session = asyncio.create_task(self._serve())
            await asyncio.wait((self._session,))
            is_refused = False
            try:
                self._session.result()
            except (OSError, asyncio.IncompleteReadError, AuthenticationError) as error:
                logger.info("node %s: no coordinator: %s", self._spec.node, error)
                is_refused = isinstance(error, AuthenticationError)
            except asyncio.CancelledError:
                logger.info("node %s: the coordinator is silent", self._spec.node)
            now_s = time.monotonic()
            if self._to_coordinator is not None:
                begin_s = since_s = now_s
            self._to_coordinator = None
            self._send_heartbeat()  # The lease may be about to expire.
            if not self._is_shut_down:
                lost_s = now_s - since_s
                pause_s = reconnect_s(self._lease_s, lost_s=lost_s, is_refused=is_refused)
                # Tries may be so frequent; one at silent addresses has taken half a lease itself.
                await asyncio.sleep(max(0.0, pause_s - (now_s - begin_s)))
        if self._parts is not None:
            self._close_silent(num_kept=0)  # For good: a head must not wait for this node.
            await self._save_parts(self._parts)
        ticks.cancel()
        watch.cancel()
        await asyncio.gather(*forwarders)
        if self._is_noticed:
            end_group_with(STATUS_NOTICED)

    # -- the coordinator --------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Serves one connection to a coordinator, until either end closes it.

        It is cancelled if the coordinator is silent.
        """
        reader, writer = await self._connect()
        try:
            # No await until _to_coordinator is set, so that no fact is said twice or left out.
            now_s = time.monotonic()
            writer.write(b"".join(frame(fact) for fact in repeated_reports(self._state, now_s)))
            self._to_coordinator = writer
            self._offset = None
            self._lease = connected_lease(self._lease, now_s)
            self._send_heartbeat()
            decoder = FrameDecoder()
            while not self._is_shut_down and (data := await reader.read(_READ_BYTES)):
                for body in decoder.feed(data):
                    self._on_message(order_of(body))
        except asyncio.CancelledError:
            self._silent_writers.append(writer)
            self._close_silent(num_kept=_NUM_SILENT_MAX)
            raise
        finally:
            if writer not in self._silent_writers:
                writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Streams to a coordinator that has proved who it is.

        On the way to another machine, packets may vanish without an error. Half a lease is short
        enough to be back in time, since after a cut each node is given a whole one. All addresses
        are tried in it, however many are dead.
        """
        spec, key = self._spec, derive(self._spec.token, NODES)
        credentials = credentials_of(spec.credentials)
        if credentials is not None:
            self._head, streams = await connect_first(
                self._heads.next_addresses(),
                Purpose.NODE,
                credentials,
                timeout_s=self._lease_s / 2,
                identity=spec.node,
                key=key,  # The node of another run has the same number.
                resolve=endpoints_by_child,
            )
            self._heads.leave_out(self._head)
            return streams
        reader, writer = await open_stream(spec.coordinator)
        try:
            await shake_hands(reader, writer, token=key, role=Role.CONNECT, identity=spec.node)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def _close_silent(self, *, num_kept: int) -> None:
        """Closes connections that the agent has left, the oldest first."""
        while len(self._silent_writers) > num_kept:
            self._silent_writers.pop(0).transport.abort()

    def _on_message(self, message: ToNode) -> None:
        now_s, offset = time.monotonic(), self._offset
        self._lease = lease_after_contact(self._lease, now_s)
        self._offset = offset_after(offset, message, now_s)
        result = on_coordinator_message(self._state, message)
        self._state = result.state
        if result.leaves:
            self._lease = refused_lease(self._lease)
            raise ConnectionRefusedError(result.leaves)
        self._heads.keep(self._head)
        if result.ends:
            self._end_node(result.ends)
        if isinstance(message, HeartbeatTaken):
            self._set_lease(renewed_lease(self._lease, message.sent_s))
            self._close_silent(num_kept=0)
        if isinstance(message, HeartbeatRequested):
            self._send_heartbeat(request=message.number)
        elif offset is None and self._offset is not None:
            self._send_heartbeat()
        if result.forwards:
            for worker in self._workers:
                worker.tell(frame(message))
        if isinstance(message, Shutdown):
            self._is_shut_down = True

    def _report(self, message: Fact) -> None:
        self._state = on_report(self._state, message, time.monotonic())
        if self._to_coordinator is not None:
            self._to_coordinator.write(frame(message))

    def _on_notice(self, after_s: float, *, reason: str = "") -> None:
        """Reports that the node will be taken away in `after_s` seconds, or that it is unfit."""
        self._is_leaving |= not reason  # One that is unfit stays if the job needs it.
        node, rank = self._spec.node, self._spec.rank
        self._report(NoticeTaken(node=node, rank=rank, after_s=after_s, reason=reason))

    def _on_crash(self) -> None:
        """Has the machine examined, if it is one of several: a worker has failed here."""
        is_examining = self._examining is not None and not self._examining.done()
        if self._spec.patience_s > 0.0 and not is_examining:
            self._examining = asyncio.create_task(self._examine())

    async def _examine(self) -> None:
        """Reports that the machine is unfit for a node, if it is, or if its examination hangs."""
        find = partial(health_problem, self._spec.job, notice=self._spec.notice, has_node=True)
        began_s, verdict = time.monotonic(), b""
        answer = answer_of_child(lambda: b"!" + find().encode(), timeout_s=EXAMINATION_S)
        # OSError: no process can be forked, and so no worker either. TimeoutError is one: the child
        # hangs in the kernel, and does not even end when it is killed.
        with contextlib.suppress(OSError):
            async with asyncio.timeout(EXAMINATION_S + 1.0):
                verdict = await answer
        if not verdict and time.monotonic() - began_s >= EXAMINATION_S:
            verdict = b"!it was examined for %g s, and something there hangs" % EXAMINATION_S
        reason = verdict[1:].decode(errors="replace")
        if reason and not self._is_leaving:
            self._on_notice(self._spec.job.cluster.notice_s, reason=reason)

    async def _watch_notices(self) -> None:
        """Reports the notice of the node's source, if it has one; replaces a watcher that dies."""
        cluster, node = self._spec.job.cluster, self._spec.node
        text = (self._spec.notice or cluster.notice).replace("{node}", str(node))
        if not text:
            return
        source = parse_notice_source(text, default_s=cluster.notice_s)
        while True:
            try:
                pid, sock = fork_watcher(source)
            except OSError as error:
                logger.warning("node %s: no process can watch for notices: %s", node, error)
            else:
                reader, writer = await asyncio.open_connection(sock=sock)
                line = await reader.readline()
                writer.close()
                await wait_exit(pid)
                if line:
                    self._is_noticed = "{node}" not in (self._spec.notice or cluster.notice)
                    self._on_notice(float(line))
                    return
            await asyncio.sleep(_WATCHER_PAUSE_S)

    def _end_node(self, reason: str) -> None:
        """Ends the node, which is not a member any more."""
        with contextlib.suppress(OSError):  # If the launcher was killed, nobody reads stderr.
            sys.stderr.write(f"node {self._spec.node} ends itself: {reason}\n")
        _end_group()

    def _give_up(self, reason: str) -> None:
        """Ends the node, for which there is no head any more, once it has saved what it holds."""
        if not self._spec.parts:
            self._end_node(reason)
        elif self._parts is None:
            if self._head_fds:
                os.eventfd_write(self._head_fds[0], 1)
                asyncio.get_running_loop().remove_reader(self._head_fds[1])
            self._parts = PartReports([worker.rank for worker in self._workers])
            self._session.cancel()

    async def _save_parts(self, parts: PartReports) -> None:
        """Has the workers save what they hold, then ends the node."""
        for worker in self._workers:
            worker.tell(frame(SavePart()))
        job = self._spec.job
        silent_s_max = meeting_s(job.cluster.lease_s) + job.checkpoint.timeout_s
        await parts.wait_done(silent_s_max=silent_s_max)
        with contextlib.suppress(OSError):
            text = parts.text(job.checkpoint.directory)
            sys.stderr.write(f"node {self._spec.node} {text}\n")
        if parts.has_saved:
            end_group_with(STATUS_SAVED)
        _end_group()

    def _on_worker_message(self, message: FromWorker) -> None:
        if self._parts is not None and isinstance(message, PartSaved | WorkerFailed):
            self._parts.add(message)
        elif not isinstance(message, PartSaved):
            self._report(message)
            if isinstance(message, WorkerFailed) and message.blame == "node":
                self._on_crash()

    def _end_on_error(self, what: str, task: asyncio.Task[None]) -> None:
        """Ends the node if one of its tasks has failed: others would wait for it for ever."""
        if not task.cancelled() and (error := task.exception()):
            self._end_node(f"{what}: {error}")

    # -- the lease and the workers' pulses --------------------------------------------------------

    async def _run_ticks(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / TICKS_PER_LEASE)
            now_s = time.monotonic()
            self._lease = lease_after_tick(self._lease, now_s)
            self._send_heartbeat()
            self._cpu_steal.measure()
            if can_judge_workers(self._lease, now_s):
                for worker in self._workers:
                    self._check_pulse(worker, now_s)

    def _send_heartbeat(self, *, request: int = 0) -> None:
        node, now_s, to_coordinator = self._spec.node, time.monotonic(), self._to_coordinator
        if to_coordinator is None:
            self._set_lease(unconnected_lease(self._lease, now_s))
        else:
            heartbeat = Heartbeat(node=node, sent_s=now_s, offset=self._offset, request=request)
            to_coordinator.write(frame(heartbeat))
        is_connected, is_leaving = to_coordinator is not None, self._is_leaving
        if is_given_up(self._lease, now_s, is_connected=is_connected, is_leaving=is_leaving):
            self._give_up(f"its lease ran out {now_s - self._lease.end_s:.1f} s ago, unanswered")
        if to_coordinator is not None and is_silent(self._lease, now_s):
            self._session.cancel()

    def _set_lease(self, lease: AgentLease) -> None:
        self._lease = lease
        for worker in self._workers:
            worker.pulse.lease_end_s = lease.end_s

    def _check_pulse(self, worker: _Worker, now_s: float) -> None:
        """Kills a worker that makes no progress, to replace it; ends the node if it lives on."""
        if worker.is_stalled:
            # It hangs in the kernel, and all others wait for its answer.
            if now_s > worker.killed_s + _DYING_S and self._parts is None:
                self._end_node(f"a worker of it, rank {worker.rank}, cannot be killed")
            return
        steal_s, pulse = self._cpu_steal.total_s, worker.pulse
        worker.action = watched_action(worker.action, pulse.deadline_s, steal_s)
        silent_s = pulse.silent_s(now_s) - self._cpu_steal.recent_s
        if silent_s > self._lease_s or is_late(worker.action, now_s, steal_s):
            worker.is_stalled = True
            # A separate task, because heartbeats must go on and other workers may be stalled too.
            worker.ending = asyncio.create_task(worker.end_stalled(timeout_s=self._lease_s / 3))

    # -- the workers ------------------------------------------------------------------------------

    async def _forward_messages(self, worker: _Worker) -> None:
        """Forwards the messages of a worker, and of those that replace it, to the coordinator."""
        while True:
            decoder = FrameDecoder(bytes_max=FROM_NODE_BYTES_MAX)
            reader = await worker.connect()
            try:
                while data := await reader.read(_READ_BYTES):
                    for body in decoder.feed(data):
                        self._on_worker_message(message_of(body, _from_worker_decoder))
            except ConnectionError as error:
                logger.info("the worker of rank %s is gone: %s", worker.rank, error)
            except AuthenticationError as error:
                logger.warning("the worker of rank %s is killed: %s", worker.rank, error)
                os.kill(worker.pid, signal.SIGKILL)
            pid, status = worker.pid, await wait_exit(worker.pid)
            if worker.ending is not None:
                worker.ending.cancel()  # Another process may get the same pid from now on.
            exited = WorkerExited(
                node=self._spec.node,
                rank=worker.rank,
                pid=pid,
                status=status,
                stalled=worker.is_stalled,
                stack=worker.pulse.read_stack(),
                layers=worker.pulse.layers,
            )
            if worker.writer is not None:
                worker.writer.close()
            kill_holders(worker.pulse.stack_fd)
            worker.pulse.close()
            if self._parts is not None:
                self._parts.add_exit(worker.rank)
            if self._is_shut_down or self._parts is not None:
                self._workers.remove(worker)
                return
            # The new worker must exist before the coordinator, told of the loss, can send orders.
            worker.fork()
            worker.pulse.lease_end_s = self._lease.end_s
            if order := successor_order(self._state, worker.rank, pid):
                worker.tell(frame(order))
            self._report(exited)
            self._on_crash()


def _become_worker(spec: NodeSpec, agent_fd: int, lifeline_fd: int, pulse: Pulse) -> None:
    """Runs the worker in the forked child process, then exits; never returns."""
    status = 1
    try:
        # The agent's handlers must not run here; a worker sets its own.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        leave_removed_directory()
        module, _, function = spec.worker.partition(":")
        worker_main: WorkerMain = getattr(importlib.import_module(module), function)
        worker_main(spec, agent_fd, lifeline_fd, pulse)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        flush_own()
        os._exit(status)
