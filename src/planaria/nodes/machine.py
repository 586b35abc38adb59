"""The process `planaria agent`: offers this machine to the head of a job, and runs a node for it.

It connects to the head, gets the job and the user's modules, starts a fork server, and has a node
forked when the head asks for one. The node's agent has a connection of its own to the coordinator.
So losing the head here costs the node nothing: this process keeps it, and looks for the head again
and again, for `cluster.patience_s`; then the node saves what it holds by itself, and ends. When the
node ends, the head is told, and may ask for another.

The node's processes hold the read end of this process's lifeline pipe: they end when it ends, by
whatever signal. SIGTERM, SIGUSR1 and other signals to leave, Ctrl-C and the machine's source of
notices say that the machine will be taken away: the node leaves the job in peace, then this process
ends. A second Ctrl-C ends everything at once.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import msgspec

from planaria.checkpoint.disk.storage import may_pass
from planaria.core.job import JobConfig
from planaria.core.machine_messages import (
    PROTOCOL,
    SOURCES_BYTES_MAX,
    ExaminationRequested,
    FaultInjected,
    FaultRequested,
    FromMachine,
    JobOffered,
    JobOver,
    LinkMeasured,
    LinkMeasureRequested,
    LinkServed,
    LinkServeRequested,
    MachineArrived,
    MachineExamined,
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
from planaria.core.specs import NodeSpec
from planaria.errors import AuthenticationError, CheckpointError, ConfigError
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.examination import (
    checks_of_this_machine,
    facts_of_this_machine,
    failed_examination,
)
from planaria.nodes.head.process_events import handle_signals
from planaria.nodes.health import health_problem_in_time
from planaria.nodes.known_heads import KnownHeads, connection_problem, look_by_thread
from planaria.nodes.machine_files import MachineFiles, modules_directory, unpack_sources
from planaria.nodes.machine_node import MachineNode, prepare_answer
from planaria.nodes.machine_spec import MachineSpec
from planaria.nodes.notices import NoticeWatch
from planaria.nodes.part_reports import STATUS_NOTICED, STATUS_SAVED
from planaria.transport.acceptor import Purpose
from planaria.transport.frames import FrameDecoder, frame, message_of
from planaria.transport.head_search import connect_first
from planaria.transport.link_measurement import measured_link, serve_link
from planaria.transport.sockets import Address, address_text, break_when_silent

logger = logging.getLogger(__name__)

EXIT_DONE: Final = 0
# The job ended before its last iteration, or its head was lost and the node saved what it held.
EXIT_UNFINISHED: Final = 3
EXIT_AGAIN: Final = 75  # The head was lost for too long; start this again.
EXIT_LEFT: Final = 76  # The source of notices says that this machine will be taken away.
_CONNECT_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 0.5
_OTHER_JOB_PAUSE_S: Final = 5.0  # The same once another job's head has answered; it notes each try.
_CLOSE_TIMEOUT_S: Final = 2.0
_READ_BYTES: Final = 1 << 20
_FRAME_BYTES_MAX: Final = 4 * SOURCES_BYTES_MAX  # The modules take 4/3 of their size, in base64.
_decoder: msgspec.json.Decoder[ToMachine] = msgspec.json.Decoder(ToMachine)


def run_machine(spec: MachineSpec) -> int:
    """Offers this machine until the job is over or the user ends it; returns the exit code.

    Raises:
        AuthenticationError: the head has another token file.
        ConfigError: the head does not take this machine.
        KeyboardInterrupt: a second Ctrl-C ended everything at once.
    """
    return asyncio.run(serve_machine(spec))


async def serve_machine(spec: MachineSpec) -> int:
    """See run_machine."""
    return await _Machine(spec).run()


class _Machine:
    def __init__(self, spec: MachineSpec) -> None:
        self._spec = spec
        self._id = secrets.token_hex(8)
        self._heads = KnownHeads(spec.heads, look_by_thread())
        self._head: Address = spec.heads[0]
        self._writer: asyncio.StreamWriter | None = None
        self._host = spec.host
        self._offer: JobOffered | None = None
        self._ended_run = ""  # The run that was over last; its head may still answer.
        self._node = MachineNode(
            self._on_node_end, on_failure=self._on_failure, on_given_up=self._on_given_up
        )
        self._ends: list[NodeEnded] = []  # The ends of the nodes of this run.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._taking: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._modules = ExitStack()  # Removes the user's modules.
        self._files = MachineFiles(Path(spec.cache_directory), spec.note)
        self._retry_s = _RETRY_S  # Pause before the next try.
        self._refusal = ""  # Why this machine cannot take part.
        self._over: JobOver | None = None
        self._has_offer = False  # Whether the head has offered its job over this connection.
        # Model and modules of the user that the fork server has imported; None: there is no server.
        self._imports: tuple[str, str, tuple[tuple[str, str], ...]] | None = None
        self._leave_code: int | None = None  # The exit code once its node, the last one, has left.
        self._notices: NoticeWatch | None = None
        self._is_leaving = self._is_interrupted = False  # Interrupted: by its user, maybe again.
        self._has_been_taken = self._has_saved = False  # Saved: by its last node, by itself.

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._interrupted: asyncio.Future[None] = loop.create_future()
        self._left: asyncio.Future[int] = loop.create_future()  # The exit code of this process.
        with handle_signals(loop, self._on_interrupt, on_leave_signal=self._leave), self._modules:
            self._watch_notices(self._spec.notice)
            serving = asyncio.create_task(self._serve())
            ends = (self._interrupted, self._left, serving)
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self._interrupted.done():
                    self._interrupted.result()
                    raise KeyboardInterrupt("interrupted again, so the node was killed")
                return self._left.result() if self._left.done() else serving.result()
            finally:
                tasks = (serving, *self._tasks)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._watch_notices("")
                await self._close_connection()
                await self._node.close()
                await self._files.close()

    # -- the head ---------------------------------------------------------------------------------

    async def _serve(self) -> int:
        """Connects to the head again and again; returns the exit code once all is over."""
        read = partial(facts_of_this_machine, self._host, self._spec.domain)
        try:
            self._facts = await answer_of_thread(read, name="facts")
        except OSError as error:
            self._on_failure(str(error))
            return EXIT_AGAIN
        lost_s, shown = time.monotonic(), ""
        while True:
            while self._node.has_given_up:  # A head that hears of its node would wait for it.
                await asyncio.sleep(_RETRY_S)
            addresses = self._heads.next_addresses()
            try:
                self._head, (reader, self._writer) = await connect_first(
                    addresses, Purpose.MACHINE, self._spec.credentials, timeout_s=_CONNECT_TIMEOUT_S
                )
                if self._node.has_given_up:  # Meanwhile.
                    self._drop_connection()
                    continue
                self._heads.leave_out(self._head)
                await self._talk(reader, self._writer)
                problem = "the head closed the connection"
            except AuthenticationError as error:
                if not self._has_been_taken and len(addresses) == self._heads.num_addresses:
                    raise
                problem = str(error)
            except (asyncio.IncompleteReadError, OSError) as error:
                problem = connection_problem(error, self._head)
            self._drop_connection()
            if self._has_offer:
                self._has_offer = False
                lost_s = -inf if self._node.has_given_up else time.monotonic()
            if self._over is not None:
                code = await self._end(self._over)
                if not self._spec.stays or self._is_leaving:
                    return code
                self._ended_run = "" if self._offer is None else self._offer.run
                self._offer = self._over = None
                self._heads.look_at("")  # The next job may save elsewhere.
                lost_s = time.monotonic()
                continue
            if self._refusal:
                raise ConfigError("", "", self._refusal)
            patience_s = self._patience_s()
            # A node gives the head up later, since its lease ends later, and then saves.
            if time.monotonic() - lost_s > patience_s and self._node.number < 0:
                self._spec.note(f"there was no head for {patience_s:.0f} s: {problem}")
                if not self._spec.stays or self._is_leaving:
                    return EXIT_UNFINISHED if self._has_saved else EXIT_AGAIN
                self._offer = None
            if problem != shown:
                until = "" if patience_s == inf else f" for up to {patience_s:.0f} s"
                self._spec.note(f"{problem}; trying again{until}")
                shown = problem
            retry_s, self._retry_s = self._retry_s, _RETRY_S
            await asyncio.sleep(retry_s)

    def _patience_s(self) -> float:
        """The seconds for which the head is looked for."""
        if self._offer is None and self._spec.stays:
            return inf
        job = JobConfig() if self._offer is None else self._offer.job
        return job.cluster.patience_s

    def _on_given_up(self) -> None:
        """Leaves a head that was away for too long for its node.

        The head may be stopped, and not dead: then its kernel keeps the connection for ever.
        """
        if self._writer is not None:
            self._writer.transport.abort()

    def _drop_connection(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _close_connection(self) -> None:
        """Closes the connection once all is sent that the head was told."""
        writer = self._writer
        self._drop_connection()
        if writer is not None:
            with contextlib.suppress(OSError):  # TimeoutError is an OSError.
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talks to the head until the connection ends or the job is over."""
        self._host = self._spec.own_host(writer.get_extra_info("sockname")[0], known=self._host)
        run = "" if self._offer is None else self._offer.run
        self._tell(
            MachineArrived(
                protocol=PROTOCOL,
                facts=msgspec.structs.replace(self._facts, host=self._host),
                has_code=self._spec.has_code,
                run=run,
                node=self._node.number,
                machine_id=self._id,
            )
        )
        decoder = FrameDecoder(bytes_max=_FRAME_BYTES_MAX)
        while self._over is None and (data := await reader.read(_READ_BYTES)):
            for body in decoder.feed(data):
                self._on_message(message_of(body, _decoder))

    def _watch_head(self, lease_s: float) -> None:
        """Has the connection break if the head's machine is silent for a lease.

        A machine that loses its power closes nothing. The node looks for a head then, too, and the
        next head waits for both.
        """
        if self._writer is not None:
            break_when_silent(self._writer.get_extra_info("socket"), silent_s=lease_s)

    def _tell(self, message: FromMachine) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    def _start_task(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _start_answer(
        self, work: Coroutine[Any, Any, None], failure: Callable[[Exception], FromMachine]
    ) -> None:
        """Starts to answer a question about this machine; if that raises, the node goes on.

        Args:
            failure: returns the answer that says so.
        """
        self._start_task(self._answer(work, failure))

    async def _answer(
        self, work: Coroutine[Any, Any, None], failure: Callable[[Exception], FromMachine]
    ) -> None:
        try:
            await work
        except Exception as error:
            logger.exception("a question of the head could not be answered")
            self._tell(failure(error))

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._interrupted.done():
            self._interrupted.set_exception(error)

    def _on_message(self, message: ToMachine) -> None:
        match message:
            case JobOffered(run=run) if run == self._ended_run:
                raise ConnectionError(f"the job {message.job.name!r} is over")
            case JobOffered() if self._has_node_of_other_job(message):
                self._retry_s = _OTHER_JOB_PAUSE_S
                raise ConnectionError(
                    f"the head at {address_text(self._head)} has another job, "
                    f"{message.job.name!r}, and node {self._node.number} lives"
                )
            case JobOffered():
                self._has_offer = True
                self._heads.keep(self._head)
                self._watch_head(message.job.cluster.lease_s)
                if self._offer is not None and self._offer.run != message.run:
                    self._offer = None  # No head hears how the node of another run ends.
                if self._taking is not None:
                    self._taking.cancel()
                self._taking = self._start_task(self._take_job(message))
            case PrepareRequested():
                self._end_preparing()
                self._preparing = self._start_task(self._prepare(message))
            case LinkServeRequested(number=number):
                self._start_answer(self._serve_link(message), lambda _: LinkServed(0, number))
            case ExaminationRequested(number):
                received_s = time.time()
                self._start_answer(
                    self._examine(number, received_s=received_s),
                    lambda error: failed_examination(error, number, received_s=received_s),
                )
            case LinkMeasureRequested(number=number):
                self._start_answer(
                    self._measure_link(message),
                    lambda error: LinkMeasured(reason=f"it raised {error!r}", number=number),
                )
            case NodeRequested(spec):
                self._start_node(spec)
            case NodeDropped(node):
                if node == self._node.number:
                    self._node.kill()
            case FaultRequested():
                self._inject(message)
            case MachineReleased(text):
                self._is_leaving = True
                self._over = JobOver(is_done=True, text=text)
            case JobOver():
                self._over = message
            case MachineUnfit(reason):
                self._on_failure(reason)
            case MachineRefused(reason=reason, is_final=is_final):
                self._heads.leave_out(self._head)
                if is_final and self._node.number < 0:
                    raise ConfigError("", "", f"the head does not take this machine: {reason}")
                raise ConnectionError(f"the head does not take this machine now: {reason}")

    # -- the job ----------------------------------------------------------------------------------

    def _has_node_of_other_job(self, offer: JobOffered) -> bool:
        own = self._offer
        return self._node.number >= 0 and own is not None and not offer.is_same_job(own)

    async def _take_job(self, offer: JobOffered) -> None:
        """Gets ready for a job; keeps what is there if it is the run that this machine is in."""
        if self._offer is None:
            self._ends.clear()
            self._end_preparing()
            await self._node.save_and_end()
            try:
                await self._open_server(offer)
            except (ConfigError, OSError) as error:  # Processes or memory may be had again.
                self._refuse(error)
                return
            self._offer = offer
            self._heads.look_at(offer.job.checkpoint.directory)
            self._spec.note(
                f"took the job {offer.job.name!r} of {address_text(self._head)}; others reach this "
                f"machine at {self._host}"
            )
            self._watch_notices(self._spec.notice or offer.job.cluster.notice)
        self._has_been_taken = True
        ready = MachineReady(run=offer.run)
        if self._node.number < 0:  # Else the head has compared it before it got the node.
            if not await self._is_fit(offer.job):
                return
            try:
                ready = await self._files.ready(offer)
            except (CheckpointError, ConfigError, MemoryError, OSError) as error:
                # The place of saves may answer later, or threads be had again.
                self._refuse(error)
                return
        # A node that runs needs no fork server.
        if self._node.number < 0 and (failure := await self._node.wait_ready()):
            self._on_failure(failure)
            return
        for ended in self._ends:
            self._tell(ended)
        self._tell(MachineLeaving() if self._is_leaving else ready)

    def _refuse(self, error: Exception) -> None:
        """Says why this machine cannot take part, and ends; for good if it is a lasting mistake."""
        if not isinstance(error, ConfigError) or may_pass(error):
            self._on_failure(str(error))
            return
        self._refusal = str(error)
        self._tell(MachineUnfit(self._refusal))
        if self._writer is not None:
            self._writer.close()

    async def _open_server(self, offer: JobOffered) -> None:
        """Starts a fork server for a job, unless that of the job before it will do.

        Raises:
            ConfigError: the job's modules cannot be used, or be kept here.
            OSError: no process can be started.
        """
        digests = tuple((source.path, source.sha256) for source in offer.sources)
        imports = (offer.job.model.kind, str(offer.job.model.config.get("model_type")), digests)
        if self._imports == imports and not self._spec.has_code:
            return
        await self._node.close()
        self._imports = None
        self._modules.close()
        try:
            directory = self._modules.enter_context(modules_directory())
            sources, has_code = offer.sources, self._spec.has_code
            if reason := unpack_sources(sources, directory, has_code=has_code):
                raise ConfigError("", "", reason)
        except OSError as error:
            remedy = f"the job's modules cannot be kept here: {error}; make room, or set TMPDIR"
            raise ConfigError("", "", remedy) from error
        try:
            server = self._spec.server(offer.job, () if has_code else (str(directory),))
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started.
            raise OSError(f"no fork server can be started here: {error}") from error
        self._node.open(server, self._spec.note)
        self._imports = imports

    async def _prepare(self, question: PrepareRequested) -> None:
        if failure := await self._node.wait_ready():
            self._on_failure(failure)
            return
        request, number = question.request, question.number
        request = msgspec.structs.replace(request, cache_directory=self._spec.cache_directory)
        data = await self._node.prepare(msgspec.json.encode(request))
        self._tell(prepare_answer(data, number=number))

    def _end_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()

    async def _serve_link(self, request: LinkServeRequested) -> None:
        served, acknowledge = serve_link(self._host, request)
        self._tell(served)
        await answer_of_thread(acknowledge, name="link")

    async def _measure_link(self, request: LinkMeasureRequested) -> None:
        self._tell(await answer_of_thread(partial(measured_link, request), name="link"))

    async def _examine(self, number: int, *, received_s: float) -> None:
        """Tells what this machine is like; in a thread, because a file system may be slow."""
        examine = partial(checks_of_this_machine, self._host)
        checks = await answer_of_thread(examine, name="examination")
        times = {"received_s": received_s, "sent_s": time.time()}
        self._tell(MachineExamined(checks=checks, number=number, **times))

    def _start_node(self, spec: NodeSpec) -> None:
        if self._is_leaving or self._offer is None or self._node.number >= 0:
            logger.warning("a request for node %s crossed another message", spec.node)
            self._ends.append(NodeEnded(node=spec.node, status=0))
            self._tell(self._ends[-1])
            return
        self._has_saved = False
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

    def _inject(self, fault: FaultRequested) -> None:
        """Injects a fault into the node; a preemption takes this machine away, too."""
        if fault.node == self._node.number:
            self._spec.note(f"injecting {fault.kind}: node {fault.node}")
            if fault.kind == "preempt":
                self._leave()
                asyncio.get_running_loop().call_later(fault.value, self._node.kill)
            else:
                self._node.inject(fault.kind, value=fault.value)
        self._tell(FaultInjected(fault.node))

    def _on_node_end(self, node: int, status: int) -> None:
        self._has_saved = status == STATUS_SAVED
        if status == STATUS_NOTICED:
            self._begin_leaving(EXIT_LEFT)
        if self._offer is not None:
            self._ends.append(NodeEnded(node=node, status=status))
            self._tell(self._ends[-1])
        if self._over is None:
            self._spec.note(f"node {node} has ended")
        if self._leave_code is not None:
            self._end_with(self._leave_code or (EXIT_UNFINISHED if self._has_saved else EXIT_DONE))
        elif self._offer is not None and self._over is None:
            self._start_task(self._is_fit(self._offer.job))

    async def _is_fit(self, job: JobConfig) -> bool:
        """Whether this machine is fit for a node; if not, it ends, once its node has left."""
        problem = await health_problem_in_time(job, self._spec.notice)
        if problem and self._node.number >= 0:  # The head was quicker.
            self._leave_code = EXIT_AGAIN
            self._spec.note(f"this machine can take no other node: {problem}")
            self._tell(MachineLeaving())
            self._node.notify()
        elif problem:
            self._on_failure(problem)
        return not problem

    def _on_failure(self, failure: str) -> None:
        """Handles that this process can take no part any more; another one may later."""
        self._tell(MachineUnfit(failure))
        self._spec.note(f"this machine cannot take part: {failure}")
        self._end_with(EXIT_AGAIN)

    def _end_with(self, code: int) -> None:
        if not self._left.done():
            self._left.set_result(code)

    async def _end(self, over: JobOver) -> int:
        if self._offer is None:  # Its node, if there is one, is of another run.
            await self._node.save_and_end()
        await self._node.leave()
        self._spec.note(over.text)
        return EXIT_DONE if over.is_done else EXIT_UNFINISHED

    # -- the user ---------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Handles a signal that says that this machine will be taken away."""
        self._begin_leaving()
        if self._node.number >= 0:  # It may not have heard of a notice that this machine has seen.
            self._node.notify()

    def _begin_leaving(self, code: int = EXIT_DONE) -> None:
        """Takes no further node from now on."""
        if self._is_leaving:
            return
        self._is_leaving, self._leave_code = True, code
        self._tell(MachineLeaving())
        self._node.give_up()
        if self._node.number < 0:
            self._end_with(code)
        else:
            self._spec.note(f"node {self._node.number} leaves the job")

    def _watch_notices(self, text: str) -> None:
        """Polls this source of notices from now on, not another one; "": none.

        The node polls it, too: it tells the coordinator how much time is left. A source of which
        each node has its own is polled by the nodes alone.
        """
        if self._notices is not None and self._notices.text != text:
            self._notices.close()
            self._notices = None
        if not text or "{node}" in text or self._notices is not None:
            return
        try:
            self._notices = NoticeWatch(text, partial(self._begin_leaving, EXIT_LEFT))
        except RuntimeError as error:
            self._on_failure(f"no thread can be started: {error}")

    def _on_interrupt(self) -> None:
        if not self._is_interrupted:
            self._is_interrupted = True
            self._leave()
        elif not self._interrupted.done():
            self._interrupted.set_result(None)
