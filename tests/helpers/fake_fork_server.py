"""A fork server without processes, whose end, refusals and answers are the test's."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec

from planaria.core.records import FromLauncher, ToLauncher
from planaria.errors import InsufficientError
from planaria.nodes.head.leader_spec import LeaderSpec
from planaria.transport.frames import FrameDecoder, frame

NO_PID = 1 << 22  # No process of Linux has a pid above.
LOSS = "the fork server was killed by signal 9"

_decoder: msgspec.json.Decoder[FromLauncher] = msgspec.json.Decoder(FromLauncher)


class Line:
    """A coordinator's connection to its launcher."""

    def __init__(self, descriptor: int, spec: LeaderSpec) -> None:
        self.spec = spec
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._decoder = FrameDecoder()

    def say(self, message: ToLauncher) -> None:
        self.say_bytes(frame(message))

    def say_bytes(self, data: bytes) -> None:
        self._socket.send(data)

    async def heard(self) -> FromLauncher | None:
        """What the launcher says next; None once it has closed the connection."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._socket, 1 << 16):
            for body in self._decoder.feed(data):
                return _decoder.decode(body)
        return None

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


Lead = Callable[[Line], Coroutine[Any, Any, None]]


class FakeForkServer:
    """See ForkServer.

    Args:
        lead: the main function of each coordinator.

    Attributes:
        asks: for each of the next children what is raised instead of forking it; None forks it.
        renewals: what becomes of the next servers: what is raised, or their loss at once, or ""
            of one that is ready, or "hangs" of one that never is. Further ones are ready.
        is_still: no request is answered.
        targets: of the children that were asked for.
        kills: pids that were killed, by `kill_group`.
        fds: descriptors that the newest child was given.
    """

    def __init__(self, lead: Lead | None = None) -> None:
        self._lead = lead
        self._news_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._pids = count(NO_PID + 1)
        self._asked: set[int] = set()
        self._exits: list[tuple[int, int]] = []
        self._leading: dict[int, tuple[Line, asyncio.Task[None]]] = {}
        self.loss, self.is_ready, self.is_still = "", True, False
        self.asks: deque[Exception | None] = deque()
        self.renewals: deque[Exception | str] = deque()
        self.num_renewals = 0
        self.targets: list[str] = []
        self.kills: list[int] = []
        self.fds: tuple[int, ...] = ()
        self.pid = NO_PID

    def fileno(self) -> int:
        return self._news_fd

    def exits(self) -> list[tuple[int, int]]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._news_fd)
        exits, self._exits = self._exits, []
        return exits

    def ask(self, target: str, payload: bytes, fds: Sequence[int] = ()) -> int:
        if self.loss:
            raise InsufficientError(self.loss)
        if self.asks and (error := self.asks.popleft()):
            raise error
        self.fds = tuple(fds)
        self.targets.append(target.partition(":")[0].rpartition(".")[2])
        pid = next(self._pids)
        self._asked.add(pid)
        if self._lead is not None and "leader" in target:
            line = Line(os.dup(fds[1]), msgspec.json.decode(payload, type=LeaderSpec))
            leading = asyncio.get_running_loop().create_task(self._run(self._lead, line, pid))
            self._leading[pid] = line, leading
        self._tell()
        return pid

    async def _run(self, lead: Lead, line: Line, pid: int) -> None:
        await lead(line)
        self._leading.pop(pid, None)
        line.close()
        self.end(pid, 0)

    def answer(self, number: int) -> int | None:
        if number not in self._asked:
            raise InsufficientError(self.loss or "the fork server that was asked is gone")
        if self.is_still:
            return None
        self._asked.remove(number)
        return number

    def forget(self, number: int) -> None:
        self._asked.discard(number)

    def kill(self) -> None:
        self.lose("the fork server stood still and was killed")

    def renew(self) -> None:
        assert self.loss
        self.num_renewals += 1
        outcome = self.renewals.popleft() if self.renewals else ""
        if isinstance(outcome, Exception):
            raise outcome
        self.loss, self.is_ready, self.is_still = "", outcome == "", False
        if outcome not in ("", "hangs"):
            self.lose(outcome)
        self._tell()

    def end(self, pid: int, status: int) -> None:
        """A child has ended."""
        self._exits.append((pid, status))
        self._tell()

    def lose(self, how: str) -> None:
        """The server has ended."""
        self.loss, self.is_ready = how, False
        self._asked.clear()
        self._tell()

    def kill_group(self, pid: int) -> None:
        """As that of head/process_events.py, of children."""
        self.kills.append(pid)
        if pid in self._leading:
            line, leading = self._leading.pop(pid)
            leading.cancel()
            line.close()
        self.end(pid, -9)

    def close(self) -> None:
        os.close(self._news_fd)

    def _tell(self) -> None:
        os.eventfd_write(self._news_fd, 1)
