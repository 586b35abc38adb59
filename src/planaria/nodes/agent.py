"""The process of a node: forks the node's workers and carries messages for them.

An agent leads a process group of its own, which its workers join, so that a signal to the group
is the loss of the node. It is single-threaded and forks workers directly; what they say goes to
the coordinator, what the coordinator says goes to all of them. It ends, and its workers with
it, when the launcher's end of the lifeline pipe closes, the coordinator's connection closes, or
the coordinator says `Shutdown`.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from planaria.core.messages import NodeSpec, Shutdown, WorkerExited
from planaria.nodes.forkserver import die_with_parent
from planaria.transport.frames import (
    FrameDecoder,
    Role,
    frame,
    shake_hands,
    to_node_decoder,
)

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 20


WorkerMain = Callable[[NodeSpec, int, int], None]


def main(payload: bytes, lifeline_fd: int) -> None:
    """An agent's main function, called in a forked process."""
    spec = msgspec.json.decode(payload, type=NodeSpec)
    os.setsid()
    # The launcher alone answers Ctrl-C; a terminal's signal must not reach half of the job.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        workers = [
            _fork_worker(msgspec.structs.replace(spec, device=device), lifeline_fd)
            for device in range(spec.job.cluster.devices_per_node)
        ]
        asyncio.run(_Agent(spec, workers, lifeline_fd).run())
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        logger.info("node %s leaves: %s", spec.node, error)
    except BaseException:
        # The end of the group is the end of this process too: nobody else would print it.
        traceback.print_exc()
    finally:
        _end_group()


class _Worker(NamedTuple):
    rank: int
    pid: int
    sock: socket.socket


def _end_group() -> None:
    """Ends the whole process group, this process included."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


class _Agent:
    def __init__(self, spec: NodeSpec, workers: Sequence[_Worker], lifeline_fd: int) -> None:
        self._spec = spec
        self._workers = workers
        self._lifeline_fd = lifeline_fd
        self._to_workers: list[asyncio.StreamWriter] = []

    async def run(self) -> None:
        """Carries messages until the coordinator says to leave, or is gone."""
        asyncio.get_running_loop().add_reader(self._lifeline_fd, _end_group)
        reader, self._to_coordinator = await asyncio.open_connection(*self._spec.coordinator)
        await shake_hands(
            reader,
            self._to_coordinator,
            token=self._spec.token,
            role=Role.CONNECT,
            identity=self._spec.node,
        )
        carriers = []
        for worker in self._workers:
            from_worker, to_worker = await asyncio.open_connection(sock=worker.sock)
            self._to_workers.append(to_worker)
            carriers.append(asyncio.create_task(self._carry(worker, from_worker)))
        if await self._obey(reader):
            await asyncio.gather(*carriers)

    async def _carry(self, worker: _Worker, reader: asyncio.StreamReader) -> None:
        """Carries a worker's messages to the coordinator until the worker has ended."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                self._to_coordinator.write(data)
                await self._to_coordinator.drain()
        status = await _wait_exit(worker.pid)
        exited = WorkerExited(node=self._spec.node, rank=worker.rank, status=status)
        self._to_coordinator.write(frame(exited))
        await self._to_coordinator.drain()

    async def _obey(self, reader: asyncio.StreamReader) -> bool:
        """Carries the coordinator's messages to the workers; True once it said to leave."""
        decoder = FrameDecoder()
        while data := await reader.read(_READ_BYTES):
            for body in decoder.feed(data):
                message = to_node_decoder.decode(body)
                for writer in self._to_workers:
                    writer.write(frame(message))
                    with contextlib.suppress(ConnectionError):
                        await writer.drain()
                if isinstance(message, Shutdown):
                    return True
        return False


async def _wait_exit(pid: int) -> int:
    """The exit status of a child, negative for a signal."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, ended.set_result, None)
    await ended
    loop.remove_reader(pidfd)
    os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork_worker(spec: NodeSpec, lifeline_fd: int) -> _Worker:
    ours, theirs = socket.socketpair()
    agent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        # A worker whose agent was killed alone must not outlive it.
        die_with_parent(agent_pid)
        ours.close()
        _become_worker(spec, theirs.detach(), lifeline_fd)
    theirs.close()
    return _Worker(spec.rank, pid, ours)


def _become_worker(spec: NodeSpec, agent_fd: int, lifeline_fd: int) -> None:
    """Runs the worker in the forked child and leaves; never returns."""
    status = 1
    try:
        module, _, function = spec.worker.partition(":")
        worker_main: WorkerMain = getattr(importlib.import_module(module), function)
        worker_main(spec, agent_fd, lifeline_fd)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
