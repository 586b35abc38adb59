"""The requests that a user sends to a running job, and their answers.

A request is a line of JSON, and so is the answer, which is sent when the request was carried out or
refused. They come over a Unix socket (request_socket.py) or the port of a head
(network_requests.py).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from planaria.checkpoint.disk.outgoing import save_as
from planaria.core.messages import DrainRequested
from planaria.errors import CheckpointError, ConfigError
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.observe.metrics import EventRecord
from planaria.observe.status import JobStatus

logger = logging.getLogger(__name__)

REQUEST_BYTES_MAX: Final = 1 << 16
_REQUEST_TIMEOUT_S: Final = 10.0  # Time for the next request of a connection to come.
_END_TIMEOUT_S: Final = 10.0  # Time for the end of a node that is out of the job to be known.


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Request to go on without a node."""

    node: int


class TellEvents(msgspec.Struct, frozen=True, tag=True):
    """Request for the events of the job so far, without the inputs of decisions."""


class TellStatus(msgspec.Struct, frozen=True, tag=True):
    """Request for what the job does at the moment."""


class TellRun(msgspec.Struct, frozen=True, tag=True):
    """Request of a head that starts, for the run in whose directory this one names itself."""


class KeepSave(msgspec.Struct, frozen=True, tag=True):
    """Request to keep the newest save under a name."""

    name: str


class Examine(msgspec.Struct, frozen=True, tag=True):
    """Request for what the machines of the job and the paths between them are like.

    Attributes:
        has_bandwidth: whether bandwidth is measured also while the job trains.
    """

    has_bandwidth: bool = False


Request = Drain | TellEvents | TellStatus | TellRun | KeepSave | Examine
_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


class RequestReply(msgspec.Struct, frozen=True):
    """The outcome of a request.

    Attributes:
        is_done: whether the request was carried out.
        text: text for the user: the result, or the reason of a refusal.
    """

    is_done: bool
    text: str


Answer = Callable[[Request], Awaitable[RequestReply]]


class Drains:
    """The requests of users that nodes leave, and the answers that are still to be given.

    Args:
        send: sends a request to the coordinator.
        job_nodes: returns the nodes that belong to the job now, or wait to join.
    """

    def __init__(
        self, send: Callable[[DrainRequested], None], job_nodes: Callable[[], Collection[int]]
    ) -> None:
        self._send = send
        self._job_nodes = job_nodes
        self._replies: dict[int, asyncio.Future[RequestReply]] = {}
        self._departed: set[int] = set()
        self._done: set[int] = set()

    @property
    def nodes(self) -> Collection[int]:
        """The nodes that are to leave and have not left yet."""
        return self._replies.keys()

    def has_asked_for(self, node: int) -> bool:
        """Whether a node was to leave, and was not refused."""
        return node in self._replies or node in self._done

    async def answer(self, request: Drain) -> RequestReply:
        """The answer to a request, once its outcome is known."""
        node, nodes = request.node, self._job_nodes()
        if node not in nodes:
            numbers = ", ".join(map(str, sorted(nodes)))
            return RequestReply(is_done=False, text=f"there is no node {node}; there are {numbers}")
        if node not in self._replies:
            self._replies[node] = asyncio.get_running_loop().create_future()
            if node in self._departed:
                self._expect_end(node)
            else:
                self._send(DrainRequested(node=node))
        return await asyncio.shield(self._replies[node])

    def repeat(self) -> None:
        """Sends a new coordinator the requests that are not answered yet."""
        for node in self._replies:
            self._send(DrainRequested(node=node))

    def on_node_left(self, node: int) -> None:
        """Answers the requests for a node that is gone."""
        self._reply(node, RequestReply(is_done=True, text=f"node {node} has left"))

    def on_departure(self, nodes: Collection[int]) -> None:
        """Answers the requests for nodes that are out of the job, in some seconds at most.

        Their processes end by themselves. A machine that is gone never tells of that.
        """
        for node in self._replies.keys() & set(nodes) - self._departed:
            self._expect_end(node)
        self._departed.update(nodes)

    def _expect_end(self, node: int) -> None:
        asyncio.get_running_loop().call_later(_END_TIMEOUT_S, self.on_node_left, node)

    def on_loss(self, nodes: Collection[int], why: str) -> None:
        """Answers the requests for nodes that the job has lost.

        Args:
            why: reason of the loss.
        """
        for node in nodes:
            text = f"node {node} was lost before it had left: {why}"
            self._reply(node, RequestReply(is_done=True, text=text))

    def on_refusal(self, nodes: Collection[int], why: str) -> None:
        """Answers the requests for nodes that the job cannot do without.

        Args:
            why: text of the answer.
        """
        for node in nodes:
            self._reply(node, RequestReply(is_done=False, text=why))

    def _reply(self, node: int, reply: RequestReply) -> None:
        waiting = self._replies.pop(node, None)
        if waiting is not None:
            waiting.set_result(reply)
            if reply.is_done:
                self._done.add(node)


def reply_function(
    drains: Drains,
    *,
    events: Callable[[], tuple[EventRecord, ...]],
    status: Callable[[], JobStatus],
    directory: str,
) -> Answer:
    """The function that answers any request.

    Args:
        events: returns the events of the job so far.
        status: returns what the job does at the moment.
        directory: place of the job's saves.
    """

    async def answer(request: Request) -> RequestReply:
        match request:
            case Drain():
                return await drains.answer(request)
            case TellEvents():
                # Inputs name each node: hundreds of events of a large job are too long to be read.
                return json_reply([replace(event, inputs=None) for event in events()])
            case TellStatus():
                return json_reply(status())
            case KeepSave(name):
                return await _keep_save(directory, name)
            case Examine():  # A head answers it itself (open_head.py).
                text = "all nodes of this job are on this machine: planaria doctor examines it"
                return RequestReply(is_done=False, text=text)
            case TellRun():  # The same.
                return RequestReply(is_done=False, text="")

    return answer


def json_reply(value: object) -> RequestReply:
    """The reply whose text is a value in JSON."""
    return RequestReply(is_done=True, text=msgspec.json.encode(value).decode())


async def _keep_save(directory: str, name: str) -> RequestReply:
    try:
        where = await answer_of_thread(
            partial(save_as, directory, name, field="--name"), name="save"
        )
    except (CheckpointError, ConfigError) as error:
        return RequestReply(is_done=False, text=str(error))
    return RequestReply(is_done=True, text=where)


async def answer_requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer
) -> None:
    """Answers the requests of a connection, one after the other, and closes it.

    It is closed without an answer if a request is malformed or too long, or none comes for ten
    seconds.

    Args:
        reader: stream whose limit is the largest size of a request.
    """
    try:
        while (request := await _next_request(reader)) is not None:
            reply = await _reply(request, answer)
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()
    except ConnectionError as error:
        logger.info("the user did not wait for the answer: %s", error)
    finally:
        writer.close()


async def _next_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None: the stream has ended, or what comes is none."""
    # TimeoutError is an OSError, and the error of a line that is too long a ValueError. The decoder
    # raises a RecursionError at JSON that is nested too deeply.
    with contextlib.suppress(OSError, RecursionError, ValueError):
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            if line := await reader.readline():
                return _decoder.decode(line)
    return None


async def _reply(request: Request, answer: Answer) -> RequestReply:
    try:
        return await answer(request)
    except Exception:  # A bug of planaria, of which the job must not end.
        logger.exception("a request could not be answered: %s", request)
        return RequestReply(is_done=False, text="the job could not answer; its log says why")
