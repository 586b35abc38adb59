"""The process `planaria agent`: offers this machine to the head of a job, and runs a node for it.

It connects to the head, gets the job and the user's modules, starts a fork server, and has a node
forked when the head asks for one. The node's agent has a connection of its own to the coordinator.
So losing the head here costs the node nothing: this process keeps it, and looks for the head again
and again, for `cluster.patience_s`. When the node ends, the head is told, and may ask for another.

The node's processes hold the read end of this process's lifeline pipe: they end when it ends, by
whatever signal. SIGTERM, SIGUSR1 and other signals to leave, Ctrl-C and the machine's source of
notices say that the machine will be taken away: the node leaves the job in peace, then this process
ends. A second Ctrl-C ends everything at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final

import msgspec

from planaria.core.job import JobConfig
from planaria.core.machine_messages import (
    PROTOCOL,
    SOURCES_BYTES_MAX,
    FromMachine,
    JobOffered,
    JobOver,
    JobPrepared,
    MachineArrived,
    MachineLeaving,
    MachineReady,
    MachineRefused,
    MachineReleased,
    MachineUnfit,
    NodeDropped,
    NodeEnded,
    NodeRequested,
    PrepareRequested,
    ToMachine,
)
from planaria.core.specs import NodeSpec, Prepared, PrepareRequest
from planaria.errors import AuthenticationError, ConfigError, InsufficientError
from planaria.nodes.examination import facts_of_this_machine
from planaria.nodes.forking import Forker
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.process_events import handle_signals, kill_group, wait_until
from planaria.nodes.machine_files import MachineFiles, unpack_sources
from planaria.nodes.notices import parse_notice_source, wait_notice
from planaria.transport.acceptor import Purpose, connect
from planaria.transport.credentials import Credentials
from planaria.transport.frames import FrameDecoder, frame, message_of
from planaria.transport.sockets import Address, address_text

logger = logging.getLogger(__name__)

EXIT_DONE: Final = 0
EXIT_UNFINISHED: Final = 3  # The job ended before its last iteration, or the node was evicted.
EXIT_AGAIN: Final = 75  # The head was lost for too long; start this again.

_CONNECT_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 0.5
_LEAVE_TIMEOUT_S: Final = 10.0  # Time for a node to end by itself once the job is over.
_KILL_TIMEOUT_S: Final = 5.0
_READ_BYTES: Final = 1 << 20
_FRAME_BYTES_MAX: Final = 4 * SOURCES_BYTES_MAX  # The modules take 4/3 of their size, in base64.
_PREPARE: Final = "planaria.engine.prepare:main"
_decoder: msgspec.json.Decoder[ToMachine] = msgspec.json.Decoder(ToMachine)

ServerOf = Callable[[JobConfig, Sequence[str]], ForkServer]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """What a machine is told by its user.

    Attributes:
        heads: addresses at which the head may be, tried in turn.
        host: address at which others reach this machine; "": that of its route to the head.
        domain: name of its failure domain.
        notice: source of preemption notices (notices.py); "": that of the job, if it has one.
        has_code: whether the user's modules are here already, in the current directory or on
            Python's path, and those of the head must be the same.
        stays: whether it waits for the next job when one is over, and for the first one, without
            end.
        cache_directory: directory in which tokens and profiles are kept between jobs.
        server: returns a fork server for a job whose modules are also looked for in directories.
        note: shows the user a text.
    """

    heads: tuple[Address, ...]
    credentials: Credentials
    host: str
    domain: str
    notice: str
    has_code: bool
    stays: bool
    cache_directory: str
    server: ServerOf
    note: Callable[[str], None]


def run_machine(spec: MachineSpec) -> int:
    """Offers this machine until the job is over or the user ends it; returns the exit code.

    Raises:
        ConfigError: the head does not take this machine, or has another token file.
        KeyboardInterrupt: a second Ctrl-C ended everything at once.
    """
    return asyncio.run(serve_machine(spec))


async def serve_machine(spec: MachineSpec) -> int:
    """See run_machine."""
    return await _Machine(spec).run()


class _Machine:
    def __init__(self, spec: MachineSpec) -> None:
        self._spec = spec
        self._head: Address = spec.heads[0]
        self._writer: asyncio.StreamWriter | None = None
        self._host = spec.host
        self._offer: JobOffered | None = None
        self._node = _Node(self._on_node_end)
        self._ends: list[NodeEnded] = []  # The ends of the nodes of this run.
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking: asyncio.Task[None] | None = None
        self._files = MachineFiles(Path(spec.cache_directory), spec.note)
        self._refusal = ""  # Why this machine cannot take part.
        self._over: JobOver | None = None
        self._has_offer = False  # Whether the head has offered its job over this connection.
        # Model and modules of the user that the fork server has imported; None: there is no server.
        self._imports: tuple[str, str, tuple[tuple[str, str], ...]] | None = None
        self._is_leaving = False
        self._is_watching = False  # Whether a source of notices is polled.
        self._has_been_taken = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._interrupted: asyncio.Future[None] = loop.create_future()
        with (
            handle_signals(loop, self._on_interrupt, on_leave_signal=self._leave),
            TemporaryDirectory(prefix="planaria-modules-", ignore_cleanup_errors=True) as modules,
        ):
            self._modules = Path(modules)
            self._watch_notices(self._spec.notice)
            serving = asyncio.create_task(self._serve())
            try:
                await asyncio.wait(
                    (serving, self._interrupted), return_when=asyncio.FIRST_COMPLETED
                )
                if self._interrupted.done():
                    self._interrupted.result()
                    raise KeyboardInterrupt("interrupted again, so the node was killed")
                return serving.result()
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                self._drop_connection()
                await self._node.close()
                await self._files.close()

    # -- the head ---------------------------------------------------------------------------------

    async def _serve(self) -> int:
        """Connects to the head again and again; returns the exit code once all is over."""
        lost_s, shown = time.monotonic(), ""
        tries = 0
        while True:
            self._head = self._spec.heads[tries % len(self._spec.heads)]
            tries += 1
            try:
                reader, self._writer = await connect(
                    self._head,
                    Purpose.MACHINE,
                    self._spec.credentials,
                    timeout_s=_CONNECT_TIMEOUT_S,
                )
                await self._talk(reader, self._writer)
                problem = "the head closed the connection"
            except AuthenticationError as error:
                if not self._has_been_taken:
                    raise ConfigError("--token-file", "", str(error)) from error
                problem = str(error)
            except (ConnectionError, asyncio.IncompleteReadError, OSError) as error:
                problem = str(error)
            self._drop_connection()
            if self._has_offer:
                self._has_offer, lost_s = False, time.monotonic()
            if self._over is not None:
                code = await self._end(self._over)
                if not self._spec.stays or self._is_leaving:
                    return code
                self._offer = self._over = None
                lost_s = time.monotonic()
                continue
            if self._refusal:
                raise ConfigError("", "", self._refusal)
            if self._is_leaving and self._node.number < 0:
                return EXIT_DONE
            patience_s = self._patience_s()
            if time.monotonic() - lost_s > patience_s:
                self._spec.note(f"there was no head for {patience_s:.0f} s: {problem}")
                return EXIT_AGAIN
            if problem != shown:
                until = "" if patience_s == inf else f" for up to {patience_s:.0f} s"
                self._spec.note(f"{problem}; trying again{until}")
                shown = problem
            await asyncio.sleep(_RETRY_S)

    def _patience_s(self) -> float:
        """The seconds for which the head is looked for."""
        if self._offer is None and self._spec.stays:
            return inf
        job = JobConfig() if self._offer is None else self._offer.job
        return job.cluster.patience_s

    def _drop_connection(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talks to the head until the connection ends or the job is over."""
        self._host = self._spec.host or str(writer.get_extra_info("sockname")[0])
        run = "" if self._offer is None else self._offer.run
        self._tell(
            MachineArrived(
                protocol=PROTOCOL,
                facts=facts_of_this_machine(self._host, self._spec.domain),
                has_code=self._spec.has_code,
                run=run,
                node=self._node.number,
            )
        )
        decoder = FrameDecoder(bytes_max=_FRAME_BYTES_MAX)
        while self._over is None and (data := await reader.read(_READ_BYTES)):
            for body in decoder.feed(data):
                self._on_message(message_of(body, _decoder))

    def _tell(self, message: FromMachine) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._interrupted.done():
            self._interrupted.set_exception(error)

    def _on_message(self, message: ToMachine) -> None:
        match message:
            case JobOffered():
                self._has_offer = True
                if self._taking is not None:
                    self._taking.cancel()
                self._taking = self._start_task(self._take_job(message))
            case PrepareRequested(request):
                self._start_task(self._prepare(request))
            case NodeRequested(spec):
                self._start_node(spec)
            case NodeDropped(node):
                if node == self._node.number:
                    self._node.kill()
            case MachineReleased(text):
                self._is_leaving = True
                self._over = JobOver(is_done=True, text=text)
            case JobOver():
                self._over = message
            case MachineRefused(reason=reason, is_final=is_final):
                if is_final and self._node.number < 0:
                    raise ConfigError("", "", f"the head does not take this machine: {reason}")
                raise ConnectionError(f"the head does not take this machine now: {reason}")

    # -- the job ----------------------------------------------------------------------------------

    async def _take_job(self, offer: JobOffered) -> None:
        """Gets ready for a job; keeps what is there if it is the run that this machine is in."""
        is_same_run = self._offer is not None and self._offer.run == offer.run
        if not is_same_run:
            self._offer = None  # So that the head is not told how the node of another run ends.
            self._ends.clear()
            await self._node.end()
            if reason := await self._open_server(offer):
                self._refuse(reason)
                return
            self._offer = offer
            self._spec.note(
                f"took the job {offer.job.name!r} of {address_text(self._head)}; others reach this "
                f"machine at {self._host}"
            )
            self._watch_notices(offer.job.cluster.notice)
        self._has_been_taken = True
        ready = MachineReady()
        if self._node.number < 0:  # Else the head has compared it before it got the node.
            try:
                ready = await self._files.ready(offer)
            except ConfigError as error:
                self._refuse(str(error))
                return
        if not await self._node.wait_ready():
            self._tell(MachineUnfit(self._node.failure))
            return
        for ended in self._ends:
            self._tell(ended)
        self._tell(MachineLeaving() if self._is_leaving else ready)

    def _refuse(self, reason: str) -> None:
        """Tells the head and the user that this machine cannot take part, and ends."""
        self._tell(MachineUnfit(reason))
        self._refusal = reason
        if self._writer is not None:
            self._writer.close()

    async def _open_server(self, offer: JobOffered) -> str:
        """Starts a fork server for a job, unless that of the job before it will do.

        Returns:
            Why there can be none, and what to do; "": there is one.
        """
        digests = tuple((source.path, source.sha256) for source in offer.sources)
        imports = (offer.job.model.kind, str(offer.job.model.config.get("model_type")), digests)
        if self._imports == imports and not self._spec.has_code:
            return ""
        await self._node.close()
        self._imports = None
        directory = Path(mkdtemp(dir=self._modules))
        if reason := unpack_sources(offer.sources, directory, has_code=self._spec.has_code):
            return reason
        paths = () if self._spec.has_code else (str(directory),)
        self._node.open(self._spec.server(offer.job, paths), self._spec.note)
        self._imports = imports
        return ""

    async def _prepare(self, request: PrepareRequest) -> None:
        request = msgspec.structs.replace(request, cache_directory=self._spec.cache_directory)
        data = await self._node.call(_PREPARE, msgspec.json.encode(request))
        try:
            prepared = msgspec.json.decode(data, type=Prepared)
        except msgspec.DecodeError:
            reason = "the process that examines the job was killed"
            self._tell(JobPrepared(None, reason))
        else:
            self._tell(JobPrepared(prepared))

    def _start_node(self, spec: NodeSpec) -> None:
        if self._is_leaving or self._node.number >= 0:
            logger.warning("a request for node %s crossed another message", spec.node)
            self._ends.append(NodeEnded(node=spec.node, status=0))
            self._tell(self._ends[-1])
            return
        self._node.start(
            msgspec.structs.replace(
                spec,
                host=self._host,
                coordinator=self._head,
                other_coordinators=tuple(h for h in self._spec.heads if h != self._head),
                injector=self._head if spec.places or spec.heeds else spec.injector,
                credentials=msgspec.json.encode(self._spec.credentials),
                cache_directory=self._spec.cache_directory,
                notice=self._spec.notice,
            )
        )
        self._spec.note(f"runs node {spec.node}")

    def _on_node_end(self, node: int, status: int) -> None:
        if self._offer is not None:
            self._ends.append(NodeEnded(node=node, status=status))
            self._tell(self._ends[-1])
        if self._over is None:
            self._spec.note(f"node {node} has ended")
        if self._is_leaving:
            self._drop_connection()

    async def _end(self, over: JobOver) -> int:
        await wait_until(lambda: self._node.number < 0, timeout_s=_LEAVE_TIMEOUT_S)
        self._spec.note(over.text)
        return EXIT_DONE if over.is_done else EXIT_UNFINISHED

    # -- the user ---------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Handles a signal that says that this machine will be taken away."""
        if self._begin_leaving():
            self._node.notify()

    def _begin_leaving(self) -> bool:
        """Takes no further node from now on; returns whether there is one that is to leave now."""
        if self._is_leaving:
            return False
        self._is_leaving = True
        self._tell(MachineLeaving())
        if self._node.number < 0:
            self._drop_connection()
            return False
        self._spec.note(f"node {self._node.number} leaves the job")
        return True

    def _watch_notices(self, text: str) -> None:
        """Begins to poll a source of notices, unless there is none or one is polled already.

        The node polls it, too: it tells the coordinator how much time is left. A source of which
        each node has its own is polled by the nodes alone.
        """
        if not text or "{node}" in text or self._is_watching:
            return
        self._is_watching = True
        source, loop = parse_notice_source(text), asyncio.get_running_loop()

        def wait() -> None:
            wait_notice(source, pause_s=source.pause_s)
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(self._begin_leaving)

        threading.Thread(target=wait, name="notices", daemon=True).start()

    def _on_interrupt(self) -> None:
        if not self._is_leaving:
            self._leave()
        elif not self._interrupted.done():
            self._interrupted.set_result(None)


class _Node:
    """The node of a machine, and the fork server that it comes from.

    Args:
        on_end: callback, called with the node's number and exit status when its agent has ended.

    Attributes:
        number: number of the node that runs or is about to; -1: none.
    """

    def __init__(self, on_end: Callable[[int, int], None]) -> None:
        self.number = -1
        self._on_end = on_end
        self._pid = 0
        self._has_notice = False
        self._exits: dict[int, int] = {}  # Exit statuses of processes that are not awaited, by pid.
        self._server: ForkServer | None = None

    def open(self, server: ForkServer, note: Callable[[str], None]) -> None:
        """Takes over a fork server; `close` closes it."""
        self._server = server
        self._lifeline_fd, self._write_fd = os.pipe()
        self._forker = Forker(
            server,
            on_fork=self._on_fork,
            on_exit=self._on_exit,
            note=note,
            meanwhile=str,
            on_error=lambda error: note(f"this machine can fork no more: {error!r}"),
        )
        self._forker.begin()

    @property
    def failure(self) -> str:
        """Why nothing can be forked."""
        return self._forker.failure

    async def wait_ready(self) -> bool:
        """Waits until a node can be forked; False if the fork server cannot be started."""
        return await self._forker.wait_ready()

    def start(self, spec: NodeSpec) -> None:
        """Has the node forked."""
        self.number = spec.node
        self._forker.add(spec.node, msgspec.json.encode(spec), (self._lifeline_fd,))

    def notify(self) -> None:
        """Tells the node that it will be taken away."""
        self._has_notice = True
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kills the node."""
        if self._pid:
            kill_group(self._pid)
        elif self.number >= 0:
            self._forker.drop(self.number)
            self._end(0)

    async def call(self, target: str, payload: bytes) -> bytes:
        """What `target(payload, fd)` writes to fd in a process of its own; b"": it was killed."""
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb") as file:
            try:
                await self._forker.spawn(target, payload, (write_fd,))
            except (InsufficientError, OSError) as error:
                logger.warning("%s could not be started: %s", target, error)
                return b""
            finally:
                os.close(write_fd)
            return await asyncio.to_thread(file.read)

    async def end(self) -> None:
        """Kills the node, if there is one, and waits for its end."""
        self.kill()
        await wait_until(lambda: self.number < 0, timeout_s=_KILL_TIMEOUT_S)

    async def close(self) -> None:
        """Kills the node and the fork server."""
        if self._server is None:
            return
        await self.end()
        self._forker.close()
        self._server.close()
        os.close(self._lifeline_fd)
        os.close(self._write_fd)
        self._server = None

    def _on_fork(self, _: int, pid: int) -> None:
        self._pid = pid
        if pid in self._exits:  # It ended before its pid was known here.
            self._end(self._exits[pid])
        elif self._has_notice:
            self.notify()

    def _on_exit(self, pid: int, status: int) -> None:
        self._exits[pid] = status
        if pid == self._pid:
            self._end(status)

    def _end(self, status: int) -> None:
        node, self.number, self._pid = self.number, -1, 0
        self._on_end(node, status)
