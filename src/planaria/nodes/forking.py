"""Forks the processes of a job from its fork server, and has another one started when it is gone.

Nothing here waits in the event loop's way: a server that stands still is asked, and killed when it
has not answered. One that is gone is renewed, after a pause that grows where it does not stay. What
this machine is short of, descriptors or memory or processes, it may have again a moment later, so
it is asked for again; a job is not given up for that while a coordinator lives.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from planaria.errors import InsufficientError
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.waiting import kill_group

logger = logging.getLogger(__name__)

RENEWALS_MAX: Final = 5  # Without a commit in between.
TRIES_MAX: Final = 12  # To start a server, 60 s, where a coordinator waits for it.
PAUSE_S: Final = 0.1  # Before the second try; twice as long before each further one.
PAUSE_S_MAX: Final = 10.0
SHORTAGE_PAUSE_S: Final = 1.0
FORK_TIMEOUT_S: Final = 10.0  # A fork takes milliseconds.
IMPORT_TIMEOUT_S: Final = 120.0  # Torch takes 3 s on an idle machine.

_AGENT: Final = "planaria.nodes.agent:main"


class Forker:
    """Forks the processes of one job.

    Args:
        forked: is told of a node and its agent's pid.
        exited: is told of each process that has ended, and its exit status.
        note: shows the user a text.
        meanwhile: what to say of the job while a server is renewed.
        failed: is told what is our mistake; no server is renewed after that.

    Attributes:
        failure: why no server stays; empty as long as another one may be started.
    """

    def __init__(
        self,
        server: ForkServer,
        *,
        forked: Callable[[int, int], None],
        exited: Callable[[int, int], None],
        note: Callable[[str], None],
        meanwhile: Callable[[], str],
        failed: Callable[[Exception], None],
    ) -> None:
        self._server = server
        self._forked, self._exited = forked, exited
        self._note, self._meanwhile, self._failed = note, meanwhile, failed
        self._queue: deque[tuple[int, bytes, tuple[int, ...]]] = deque()
        self._heard = asyncio.Event()
        self._num_lost = 0  # Servers, without a commit in between.
        self._num_waiting = 0  # For a server to be there.
        self._shortage = ""  # What was said of it last.
        self._forking: asyncio.Task[None] | None = None
        self.failure = ""

    def begin(self) -> None:
        """Forks what is asked for from now on."""
        asyncio.get_running_loop().add_reader(self._server.fileno(), self.look)
        self._forking = asyncio.create_task(self._fork())
        self.look()

    def stop(self) -> None:
        """Forks nothing more, and still tells of exits."""
        self._queue.clear()
        if self._forking is not None:
            self._forking.cancel()

    def close(self) -> None:
        """Tells of nothing more."""
        self.stop()
        asyncio.get_running_loop().remove_reader(self._server.fileno())

    def look(self) -> None:
        """Tells of the processes that have ended by now."""
        for pid, status in self._server.exits():
            self._exited(pid, status)
        self._heard.set()

    @property
    def nodes(self) -> tuple[int, ...]:
        """Those that wait to be forked."""
        return tuple(node for node, *_ in self._queue)

    def add(self, node: int, payload: bytes, fds: Sequence[int]) -> None:
        """Has the agent of a node forked as soon as that can be."""
        self._queue.append((node, payload, tuple(fds)))
        self._heard.set()

    def drop(self, node: int) -> None:
        """A node that waits to be forked is not wanted any more."""
        self._queue = deque(one for one in self._queue if one[0] != node)

    def committed(self) -> None:
        """An iteration was committed: a server that was there has stayed."""
        if self._server.is_ready:
            self._num_lost = 0

    def _begin_anew(self) -> None:
        if self._forking is not None and not self._forking.done():
            self._num_lost, self.failure = 0, ""
        self._heard.set()

    async def wait_ready(self) -> bool:
        """Waits for a server that can fork; False if none stays, also of those that are started
        anew where the ones before were given up."""
        if self.failure:
            self._begin_anew()
        self._num_waiting += 1
        try:
            while not self._server.is_ready:
                if self.failure:
                    return False
                await self._news()
        finally:
            self._num_waiting -= 1
        return True

    async def spawn(self, target: str, payload: bytes, fds: Sequence[int]) -> int:
        """Forks a child as `ForkServer.spawn`, and handles all else meanwhile.

        Raises:
            InsufficientError: the server is gone, or was killed for it stood still.
            OSError: this machine has no process, memory or descriptor for it now.
        """
        number = self._server.ask(target, payload, fds)
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                while (pid := self._server.answer(number)) is None:
                    await self._news()
        except TimeoutError as error:
            self._server.kill()
            self._heard.set()
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
                    await self._news()
        except Exception as error:
            self.failure = f"the launcher raised {error!r}"
            self._heard.set()
            self._failed(error)

    async def _renew(self) -> None:
        """Has another server started in place of one that is gone."""
        loss = self._server.loss
        self._num_lost += 1
        if self._num_lost > RENEWALS_MAX:
            await self._give_up(f"{loss}, as those before it")
            return
        await asyncio.sleep(_pause_s(self._num_lost - 1))
        num_tries = num_awaited = 0
        while True:
            try:
                self._server.renew()
            except InsufficientError as error:
                num_tries += 1
                if num_tries == 1:
                    self._note(f"{loss}; {error}, which is tried again")
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
        """Starts no server until one is needed to save."""
        self.failure = failure
        self._heard.set()
        if not self._num_waiting:  # Who waits says what follows.
            self._note(f"{failure}: no node can be started any more")
        while self.failure:
            await self._news()

    async def _wait_imports(self) -> None:
        """Waits until a server is ready or gone; user code on a dead disk hangs for ever."""
        try:
            async with asyncio.timeout(IMPORT_TIMEOUT_S):
                while not (self._server.is_ready or self._server.loss):
                    await self._news()
        except TimeoutError:
            self._server.kill()

    async def _fork_first(self) -> None:
        """Forks the agent that has waited longest."""
        first = node, payload, fds = self._queue[0]
        try:
            pid = await self.spawn(_AGENT, payload, fds)
        except InsufficientError:
            return
        except OSError as error:
            shortage = f"node {node} cannot be started now ({error.strerror}), which is tried again"
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
        self._forked(node, pid)

    async def _news(self) -> None:
        """Waits for whatever may change what is to be done next."""
        self._heard.clear()
        await self._heard.wait()


def _pause_s(num_tries: int) -> float:
    return min(PAUSE_S_MAX, PAUSE_S * 2 ** (num_tries - 1)) if num_tries else 0.0
