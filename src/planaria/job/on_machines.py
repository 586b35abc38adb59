"""Gathers the machines on which a job runs, and has one of them examine the job (`planaria train
--listen`).

The head needs neither a device nor the job's data: the first machine that comes builds the model
and measures its layers, and the job is planned by what it found.
"""

import secrets
import socket
from asyncio import Runner
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os import getcwd

from planaria.core.job import JobConfig
from planaria.core.specs import Prepared, PrepareRequest
from planaria.errors import TrainingError
from planaria.job.planning import given_profile, mistake_error
from planaria.job.user_sources import user_sources
from planaria.nodes.head.machines import Machines
from planaria.nodes.head.open_head import OpenHead
from planaria.transport.acceptor import listen
from planaria.transport.credentials import Credentials
from planaria.transport.sockets import address_text

_ANY_HOST = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """How a head waits for machines.

    Attributes:
        address: "ADDR:PORT" at which it listens; port 0: any free one.
        credentials: contents of the token file that all machines have.
        nodes_min: number of machines with which training begins.
        nodes_max: number of machines that may train at once.
        wait_s: seconds that it waits for `nodes_min` machines.
    """

    address: str
    credentials: Credentials
    nodes_min: int
    nodes_max: int
    wait_s: float


@contextmanager
def open_head(
    config: JobConfig,
    listening: Listening,
    *,
    search_path: Sequence[str],
    note: Callable[[str], None],
) -> Iterator[OpenHead]:
    """A head at which machines can arrive, for the length of the context.

    Args:
        search_path: directories in which the job's modules are looked for first.
        note: shows the user a text.

    Raises:
        ConfigError: nobody can listen at the address, or the job's modules cannot be sent.
    """
    with suppress(FileNotFoundError):  # The current directory may have been removed.
        search_path = [*search_path, getcwd()]
    sources = user_sources(config, search_path)
    listeners, address = listen(listening.address)
    with Runner() as runner:
        machines = Machines(
            config,
            listening.credentials,
            run=secrets.token_hex(8),
            sources=sources,
            num_max=listening.nodes_max,
            note=note,
        )
        note(f"listening at {address_text(address)}; on each machine: {_join_text(address)}")
        with OpenHead(runner, listeners, address, machines) as head:
            yield head


def _join_text(address: tuple[str, int]) -> str:
    host = socket.gethostname() if address[0] in _ANY_HOST else address[0]
    return f"planaria agent --join {address_text((host, address[1]))}"


def gather(head: OpenHead, config: JobConfig, listening: Listening) -> tuple[JobConfig, Prepared]:
    """The job with the machines that have come as its nodes, and the facts on it.

    Raises:
        ConfigError: the job is wrong.
        TrainingError: the user's code raised.
        InsufficientError: too few machines came in time, or the process that examined the job was
            killed.
    """
    machines = head.machines
    head.runner.run(machines.wait_ready(listening.nodes_min, timeout_s=listening.wait_s))
    request = PrepareRequest(job=config, cache_directory="", profile=given_profile(config))
    prepared = head.runner.run(machines.prepare(request))
    if prepared.mistake is not None:
        raise mistake_error(prepared.mistake)
    if prepared.traceback:
        raise TrainingError(-1, prepared.traceback)
    head.runner.run(machines.wait_ready(listening.nodes_min, timeout_s=listening.wait_s))
    num_nodes = min(machines.num_ready, listening.nodes_max)
    return replace(config, cluster=replace(config.cluster, nodes=num_nodes)), prepared
