"""Forks the processes of a job from its fork server, and renews a fork server that is gone.

Nothing here blocks the event loop. A server that does not answer in time is killed. A server that
is gone is renewed, after a pause that grows if it keeps ending. If this machine lacks descriptors,
memory or processes, the request is repeated, because it may have them again a moment later; the
job is not given up for that while a coordinator lives.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from planaria.errors import InsufficientError
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.process_events import kill_group

logger = logging.getLogger(__name__)

RENEWALS_MAX: Final = 5  # Servers lost in a row, without a commit in between, that are renewed.
TRIES_MAX: Final = 12  # Tries to start a server while a coordinator waits for it; about 60 s.
PAUSE_S: Final = 0.1  # Pause before the second try; it doubles before each further one.
PAUSE_S_MAX: Final = 10.0
SHORTAGE_PAUSE_S: Final = 1.0
FORK_TIMEOUT_S: Final = 10.0  # A fork takes milliseconds.
IMPORT_TIMEOUT_S: Final = 120.0  # Torch takes 3 s on an idle machine.

_AGENT: Final = "planaria.nodes.agent:main"


class Forker:
    """Forks the processes of one job.

    Args:
        on_fork: callback, called with a node and its agent's pid.
        on_exit: callback, called with the pid and the exit status of each process that has ended.
        note: shows the user a text.
        meanwhile: text about the job to show while a server is renewed.
        on_error: callback, called with an unexpected exception here, after which no server is
            renewed.

    Attributes:
        failure: why no more servers are started; "": they are.
    """

    def __init__(
        self,
        server: ForkServer,
        *,
        on_fork: Callable[[int, int], None],
        on_exit: Callable[[int, int], None],
        note: Callable[[str], None],
        meanwhile: Callable[[], str],
        on_error: Callable[[Exception], object],
    ) -> None:
        self._server = server
        self._on_fork, self._on_exit = on_fork, on_exit
        self._note, self._meanwhile, self._on_error = note, meanwhile, on_error
        self._queue: deque[tuple[int, bytes, tuple[int, ...]]] = deque()
        self._changed = asyncio.Event()
        self._num_lost = 0  # Servers lost in a row, without a commit in between.
        self._num_waiting = 0  # Callers of wait_ready that wait.
        self._shortage = ""  # The shortage that the user was told of last.
        self._forking: asyncio.Task[None] | None = None
        self.failure = ""

    def begin(self) -> None:
        """Starts to fork what is asked for."""
        asyncio.get_running_loop().add_reader(self._server.fileno(), self.report_exits)
        self._forking = asyncio.create_task(self._fork())
        self.report_exits()

    def stop(self) -> None:
        """Stops forking; exits are still reported."""
        self._queue.clear()
        if self._forking is not None:
            self._forking.cancel()

    def close(self) -> None:
        """Stops forking and reporting exits."""
        self.stop()
        asyncio.get_running_loop().remove_reader(self._server.fileno())

    def report_exits(self) -> None:
        """Reports the processes that have ended by now."""
        for pid, status in self._server.exits():
            self._on_exit(pid, status)
        self._changed.set()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that wait to be forked."""
        return tuple(node for node, *_ in self._queue)

    def add(self, node: int, payload: bytes, fds: Sequence[int]) -> None:
        """Queues the agent of a node to be forked as soon as possible."""
        self._queue.append((node, payload, tuple(fds)))
        self._changed.set()

    def drop(self, node: int) -> None:
        """Removes a node from those that wait to be forked."""
        self._queue = deque(waiting for waiting in self._queue if waiting[0] != node)

    def on_commit(self) -> None:
        """Must be called after a commit: a server that is ready by then counts as stable."""
        if self._server.is_ready:
            self._num_lost = 0

    def _retry(self) -> None:
        if self._forking is not None and not self._forking.done():
            self._num_lost, self.failure = 0, ""
        self._changed.set()

    async def wait_ready(self) -> bool:
        """Waits for a server that can fork; False if servers were given up.

        If they were given up before this call, it has them started once more.
        """
        if self.failure:
            self._retry()
        self._num_waiting += 1
        try:
            while not self._server.is_ready:
                if self.failure:
                    return False
                await self._wait_change()
        finally:
            self._num_waiting -= 1
        return True

    async def spawn(self, target: str, payload: bytes, fds: Sequence[int]) -> int:
        """Forks a child like `ForkServer.spawn`, without blocking the event loop.

        Raises:
            InsufficientError: the server is gone, or was killed because it did not answer.
            OSError: this machine has no process, memory or descriptor for the child now.
        """
        number = self._server.ask(target, payload, fds)
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                while (pid := self._server.answer(number)) is None:
                    await self._wait_change()
        except TimeoutError as error:
            self._server.kill()
            self._changed.set()
            raise InsufficientError(self._server.loss) from error
        finally:
            self._server.forget(number)
        return pid

    async def _fork(self) -> None:
        try:
            while True:
                if self._server.loss:
                    await self._renew()
                elif not self._server.is_ready:
                    await self._wait_imports()
                elif self._queue:
                    await self._fork_first()
                else:
                    await self._wait_change()
        except Exception as error:
            self.failure = f"the launcher raised {error!r}"
            self._changed.set()
            self._on_error(error)

    async def _renew(self) -> None:
        """Starts another server in place of one that is gone, or gives up."""
        loss = self._server.loss
        self._num_lost += 1
        if self._num_lost > RENEWALS_MAX:
            await self._give_up(f"{loss}, like the fork servers before it")
            return
        await asyncio.sleep(_pause_s(self._num_lost - 1))
        num_tries = num_awaited = 0
        while True:
            try:
                self._server.renew()
            except InsufficientError as error:
                num_tries += 1
                if num_tries == 1:
                    self._note(f"{loss}; {error}; planaria tries again")
                logger.info("%s; %s, try %d", loss, error, num_tries)
                num_awaited = num_awaited + 1 if self._num_waiting else 0
                if num_awaited >= TRIES_MAX:
                    await self._give_up(f"{loss}; {error}")
                    return
                await asyncio.sleep(_pause_s(num_awaited or num_tries))
            else:
                self._note(f"{loss}: another one is started{self._meanwhile()}")
                return

    async def _give_up(self, failure: str) -> None:
        """Starts no server until `wait_ready` is called, for a coordinator that saves."""
        self.failure = failure
        self._changed.set()
        if not self._num_waiting:  # A caller that waits tells the user itself.
            self._note(f"{failure}: no node can be started any more")
        while self.failure:
            await self._wait_change()

    async def _wait_imports(self) -> None:
        """Waits until the server is ready or gone; kills one that does not get ready in time.

        Importing user code from a dead disk hangs for ever.
        """
        try:
            async with asyncio.timeout(IMPORT_TIMEOUT_S):
                while not (self._server.is_ready or self._server.loss):
                    await self._wait_change()
        except TimeoutError:
            self._server.kill()

    async def _fork_first(self) -> None:
        """Forks the agent that has waited longest, if this machine can."""
        first = node, payload, fds = self._queue[0]
        try:
            pid = await self.spawn(_AGENT, payload, fds)
        except InsufficientError:
            return
        except OSError as error:
            shortage = f"node {node} cannot be started now ({error.strerror}); planaria tries again"
            if shortage != self._shortage:
                self._note(shortage)
            self._shortage = shortage
            await asyncio.sleep(SHORTAGE_PAUSE_S)
            return
        self._shortage = ""
        if first not in self._queue:  # It was dropped meanwhile.
            kill_group(pid)
            return
        self._queue.remove(first)
        self._on_fork(node, pid)

    async def _wait_change(self) -> None:
        """Waits for an event that may change what is to be done next."""
        self._changed.clear()
        await self._changed.wait()


def _pause_s(num_tries: int) -> float:
    return min(PAUSE_S_MAX, PAUSE_S * 2 ** (num_tries - 1)) if num_tries else 0.0
