"""The node of a machine, and what else is forked there: `planaria agent` has one node at a time.

All is forked from the machine's own fork server, which has imported the modules of the job. The
node's processes hold the read end of a lifeline, and end when this process ends, by whatever
signal. So does a process that examines the job, which has a lifeline of its own.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from planaria.core.machine_messages import JobPrepared
from planaria.core.specs import NodeSpec, Prepared
from planaria.errors import InsufficientError
from planaria.nodes.faults.node_faults import inject_into_group
from planaria.nodes.forking import Forker
from planaria.nodes.forkserver import UNKNOWN, ForkServer, end_with
from planaria.nodes.head.process_events import kill_group, wait_until

logger = logging.getLogger(__name__)

_KILL_TIMEOUT_S: Final = 5.0
_LEAVE_TIMEOUT_S: Final = 10.0  # Time for a node to end by itself once the job is over.
_NOTICE_PERIOD_S: Final = 1.0
_LOOK_PERIOD_S: Final = 1.0  # Period in which it is looked whether a node can still be forked.
_SAVE_TIMEOUT_S: Final = 3600.0  # An agent that runs ends much earlier if nothing more is written.
_FAILED: Final = 1  # Exit status of a node that could not be forked.
_PREPARE: Final = "planaria.nodes.machine_node:prepare"


class MachineNode:
    """The node of a machine, and the fork server that it comes from.

    Args:
        on_end: callback, called with the node's number and exit status when its agent has ended.
        on_failure: callback, called with the reason why nothing can be forked here any more.
        on_given_up: callback, called when the node has given up the head that this machine has.

    Attributes:
        number: number of the node that runs or is about to; -1: none.
        has_given_up: whether the node has given its head up. It saves what it holds and ends, so no
            head can take it up any more. Its agent says so by one eventfd, and is told by another
            one that its head is lost.
    """

    def __init__(
        self,
        on_end: Callable[[int, int], None],
        *,
        on_failure: Callable[[str], None],
        on_given_up: Callable[[], None],
    ) -> None:
        self.number = -1
        self.has_given_up = False
        self._is_replaced = False  # Whether this machine has another head than the node.
        self._on_end = on_end
        self._on_failure = on_failure
        self._on_give_up = on_given_up
        self._pid = self._notified_pid = 0
        self._can_save = False
        self._exits: dict[int, int] = {}  # Exit statuses of processes that are not awaited, by pid.
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: ForkServer | None = None

    def open(self, server: ForkServer, note: Callable[[str], None]) -> None:
        """Takes over a fork server; `close` closes it."""
        self._server = server
        self._lifeline_fd, self._write_fd = os.pipe()
        self._given_up_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._head_lost_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._given_up_fd, self._on_given_up)
        self._forker = Forker(
            server,
            on_fork=self._on_fork,
            on_exit=self._on_exit,
            note=note,
            meanwhile=str,
            on_error=lambda error: self._on_failure(f"the agent raised {error!r}"),
        )
        self._forker.begin()

    async def wait_ready(self) -> str:
        """Waits until a node can be forked.

        Returns:
            Why none can be forked here; "": it can.
        """
        return "" if await self._forker.wait_ready() else self._forker.failure

    def start(self, spec: NodeSpec) -> None:
        """Has the node forked."""
        assert self.number < 0
        self.number = spec.node
        self._can_save, self._is_replaced = bool(spec.parts), False
        self._exits.clear()  # Another process may get the same pid.
        with contextlib.suppress(BlockingIOError):  # What was said to the node before.
            os.eventfd_read(self._head_lost_fd)
        fds = self._lifeline_fd, self._given_up_fd, self._head_lost_fd
        self._forker.add(spec.node, msgspec.json.encode(spec), fds)
        self._start_task(self._watch_fork(spec.node))

    def _on_given_up(self) -> None:
        os.eventfd_read(self._given_up_fd)
        self.has_given_up = self.number >= 0
        if self.has_given_up and not self._is_replaced:
            self._on_give_up()

    async def _watch_fork(self, node: int) -> None:
        """Gives a node up if no fork server can be had before it is forked."""
        while self.number == node and not self._pid:
            if failure := await self.wait_ready():
                self._end_waiting(_FAILED)
                self._on_failure(failure)
                return
            await asyncio.sleep(_LOOK_PERIOD_S)

    def notify(self) -> None:
        """Tells the node that it will be taken away; it is given up if it is not forked yet."""
        if not self._pid:
            self.give_up()
        elif self._pid != self._notified_pid:
            self._notified_pid = self._pid
            self._start_task(self._keep_notifying(self._pid))

    async def _keep_notifying(self, pid: int) -> None:
        """Repeats the notice until the node has ended; its agent may be too young to heed it."""
        while self._pid == pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(_NOTICE_PERIOD_S)

    def give_up(self) -> None:
        """Ends the node if it is not forked yet."""
        self._end_waiting(0)

    def _end_waiting(self, status: int) -> None:
        if self.number >= 0 and not self._pid:
            self._forker.drop(self.number)
            self._end(status)

    def kill(self) -> None:
        """Kills the node."""
        if self._pid:
            kill_group(self._pid)
        else:
            self.give_up()

    def inject(self, kind: str, *, value: float) -> None:
        """Injects a fault of kind kill, hang, stall or crash, unless the node is not forked yet."""
        if self._pid:
            inject_into_group(kind, self._pid, value=value)

    async def prepare(self, request: bytes) -> bytes:
        """What a process finds that examines the job; b"": it was killed.

        The process is killed if this is cancelled, and what it leaves behind in any case.
        """
        lifeline_fd, own_fd = os.pipe()
        # A pipe has no end as long as a process that it leaves behind holds it.
        with os.fdopen(os.memfd_create("found"), "rb") as file, os.fdopen(own_fd, "wb"):
            try:
                pid = await self._forker.spawn(_PREPARE, request, (file.fileno(), lifeline_fd))
            except (InsufficientError, OSError) as error:
                logger.warning("the job could not be examined: %s", error)
                return b""
            finally:
                os.close(lifeline_fd)
            try:
                await _wait_end(pid)
            finally:
                kill_group(pid)
            file.seek(0)
            return file.read()

    async def save_and_end(self) -> None:
        """Has the node save what it holds by itself, and waits for its end.

        Its head is lost: another run has begun. A node that cannot save ends at once.
        """
        self._is_replaced = True
        if self._can_save and self._pid:
            os.eventfd_write(self._head_lost_fd, 1)
            await wait_until(lambda: not self._pid, timeout_s=_SAVE_TIMEOUT_S)
        await self.end()

    async def leave(self) -> None:
        """Waits for the end of the node once its job is over, and kills it if it takes too long.

        A node that has given its head up may take its time to save what it holds.
        """
        await wait_until(lambda: self.number < 0 or self.has_given_up, timeout_s=_LEAVE_TIMEOUT_S)
        await (self.save_and_end() if self.has_given_up else self.end())

    async def end(self) -> None:
        """Kills the node, if there is one, and waits for its end."""
        self.kill()
        await wait_until(lambda: self.number < 0, timeout_s=_KILL_TIMEOUT_S)

    async def close(self) -> None:
        """Kills the node and the fork server."""
        if self._server is None:
            return
        await self.end()
        for task in self._tasks:
            task.cancel()
        self._forker.close()
        self._server.close()
        self._server = None
        asyncio.get_running_loop().remove_reader(self._given_up_fd)
        for descriptor in (
            *(self._lifeline_fd, self._write_fd),
            *(self._given_up_fd, self._head_lost_fd),
        ):
            os.close(descriptor)
        if self.number >= 0:  # It cannot end, and nobody will hear of its end.
            self._end(UNKNOWN)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_fork(self, _: int, pid: int) -> None:
        self._pid = pid
        self._forker.on_commit()  # A server that has forked a node is none that always ends.
        if pid in self._exits:  # It ended before its pid was known here.
            self._end(self._exits[pid])

    def _on_exit(self, pid: int, status: int) -> None:
        self._exits[pid] = status
        if pid == self._pid:
            self._end(status)

    def _end(self, status: int) -> None:
        node, self.number, self._pid = self.number, -1, 0
        self.has_given_up = False
        self._on_end(node, status)


async def _wait_end(pid: int) -> None:
    """Waits until a process has ended that another one reaps."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def prepare_answer(data: bytes, *, number: int) -> JobPrepared:
    """What the head is told that a process has found, see `MachineNode.prepare`.

    Args:
        number: number of the question.
    """
    try:
        return JobPrepared(msgspec.json.decode(data, type=Prepared), number=number)
    except msgspec.DecodeError:
        return JobPrepared(None, "the process that examines the job was killed", number)


def prepare(payload: bytes, result_fd: int, lifeline_fd: int) -> None:
    """Examines the job in a forked process, which ends with its agent; see engine/prepare.py."""
    os.setpgid(0, 0)  # Processes that the user's code leaves behind are killed with the group.
    end_with(lifeline_fd)
    # Processes that the user's code starts inherit the handling of SIGTERM, and must end by it: a
    # pool of multiprocessing would wait for them for ever.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    importlib.import_module("planaria.engine.prepare").main(payload, result_fd)
