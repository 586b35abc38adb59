"""Where a user asks something of a job that runs on this machine: a Unix socket of its launcher.

The socket lies in a directory that only the user can enter, named by job and process, and goes
with the launcher. A request is a line of JSON, so is the answer, which comes when what was asked
for has happened or cannot.
"""

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Final

import msgspec

from planaria.core.messages import DrainRequested
from planaria.errors import ConfigError

_REQUEST_BYTES_MAX: Final = 1 << 16
_NAME_LENGTH_MAX: Final = 40  # A socket's whole path is at most 107 bytes.


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Go on without a node."""

    node: int


class TellEvents(msgspec.Struct, frozen=True, tag=True):
    """Tell what has happened so far."""


Request = Drain | TellEvents


class Answer(msgspec.Struct, frozen=True):
    """What became of a request; `is_done` says whether it was granted."""

    is_done: bool
    text: str


class Drains:
    """The nodes that a user wants to leave, and who waits to hear that they have.

    Args:
        say: passes a request on to the coordinator.
        nodes: that are there.
    """

    def __init__(self, say: Callable[[DrainRequested], None], nodes: Collection[int]) -> None:
        self._say = say
        self._nodes = nodes
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    async def answer(self, request: Drain) -> Answer:
        """What became of a request, once that is known."""
        node = request.node
        if node not in self._nodes:
            there = ", ".join(str(one) for one in sorted(self._nodes))
            return Answer(is_done=False, text=f"there is no node {node}; there are {there}")
        if node not in self._waiting:
            self._waiting[node] = asyncio.get_running_loop().create_future()
            self._say(DrainRequested(node=node))
        return await asyncio.shield(self._waiting[node])

    def repeat(self) -> None:
        """Tells a new coordinator what the one before may not have heard."""
        for node in self._waiting:
            self._say(DrainRequested(node=node))

    def left(self, node: int) -> None:
        """A node is gone."""
        self._settle(node, Answer(is_done=True, text=f"node {node} has left"))

    def refused(self, nodes: Collection[int], why: str) -> None:
        """Nodes cannot be spared."""
        for node in nodes:
            self._settle(node, Answer(is_done=False, text=why))

    def _settle(self, node: int, answer: Answer) -> None:
        waiting = self._waiting.pop(node, None)
        if waiting is not None:
            waiting.set_result(answer)


def answering(
    drains: Drains, events_json: Callable[[], str]
) -> Callable[[Request], Awaitable[Answer]]:
    """What answers any request."""

    async def answer(request: Request) -> Answer:
        match request:
            case Drain():
                return await drains.answer(request)
            case TellEvents():
                return Answer(is_done=True, text=events_json())

    return answer


@contextlib.asynccontextmanager
async def open_desk(
    job: str, answer: Callable[[Request], Awaitable[Answer]]
) -> AsyncIterator[None]:
    """Answers requests while inside."""
    path = _directory() / f"{_plain(job)}-{os.getpid()}.sock"
    path.unlink(missing_ok=True)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, msgspec.DecodeError, ValueError):
            request = msgspec.json.decode(await reader.readline(), type=Request)
            writer.write(msgspec.json.encode(await answer(request)) + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, path=path, limit=_REQUEST_BYTES_MAX)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def ask(request: Request, *, job: str, timeout_s: float) -> Answer:
    """What the running job answers.

    Args:
        job: its name; "" if only one runs.

    Raises:
        ConfigError: no such job runs here, or more than one, or it does not answer.
    """
    option = "--job" if job else ""
    paths = sorted(_directory().glob(f"{_plain(job)}-*.sock" if job else "*.sock"))
    running = [path for path in paths if _is_served(path)]
    if not running:
        remedy = "no such job of yours runs on this machine" if job else "no job of yours runs here"
        raise ConfigError(option, job, remedy)
    if len(running) > 1:
        names = ", ".join(sorted({path.stem.rpartition("-")[0] for path in running}))
        remedy = f"{len(running)} jobs run here: say with --job which of {names}"
        raise ConfigError(option, job, remedy)
    with _connected(running[0], timeout_s) as sock:
        try:
            sock.sendall(msgspec.json.encode(request) + b"\n")
            data = sock.makefile("rb").readline()
        except TimeoutError as error:
            remedy = f"the job has not answered for {timeout_s:.0f} s"
            raise ConfigError(option, job, remedy) from error
    if not data:
        return Answer(is_done=False, text="the job has ended")
    return msgspec.json.decode(data, type=Answer)


def _plain(job: str) -> str:
    """The name as part of a file's."""
    kept = "".join(letter if letter.isalnum() else "_" for letter in job)
    return kept[:_NAME_LENGTH_MAX]


def _is_served(path: Path) -> bool:
    """Whether a launcher listens; one that was killed has left its socket behind."""
    try:
        _connected(path, 1.0).close()
    except OSError:
        path.unlink(missing_ok=True)
        return False
    return True


def _connected(path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


def _directory() -> Path:
    """The user's own, made if it is not there.

    Raises:
        ConfigError: somebody else has made it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    own = Path(tempfile.gettempdir()) / f"planaria-{os.getuid()}"
    path = Path(base) / "planaria" if base else own
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat(follow_symlinks=False)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError("XDG_RUNTIME_DIR", str(path), "is not a directory of yours alone")
    return path
