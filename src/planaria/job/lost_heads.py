"""How the next head and the nodes of a lost one find each other, and what those have saved.

Source: docs/protocol.md, "Nodes without a head".
"""

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import psutil

from planaria.checkpoint.disk.assembly import (
    assemble,
    has_newest_state,
    has_parts,
    lacks_parts,
)
from planaria.checkpoint.disk.parts import (
    HeadMark,
    RunPlace,
    newest_run,
    next_run,
    remove_runs,
)
from planaria.checkpoint.disk.storage import ContentInfo, Storage
from planaria.checkpoint.disk.tiers import Tier, tier_of
from planaria.checkpoint.disk.time_limits import with_short_limit, with_time_limit
from planaria.core.job import JobConfig
from planaria.errors import AuthenticationError, CheckpointError, ConfigError, LateError
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.head.process_events import run_in_thread, running_loop
from planaria.nodes.head.remote.network_requests import head_connection
from planaria.nodes.head.remote.open_head import OpenHead
from planaria.nodes.head.remote.run_record import RunRecord, started_nodes
from planaria.nodes.head.requests import TellRun
from planaria.protocol.agent_lease import meeting_s
from planaria.transport.credentials import Credentials
from planaria.transport.sockets import Address, address_text, bare_host

logger = logging.getLogger(__name__)

ANY_HOST: Final = ("0.0.0.0", "::", "")  # Hosts that mean all addresses of this machine.
_FIELD: Final = "checkpoint.directory"
_NUM_INTERFACES_MAX: Final = 4
_LOOK_S: Final = 0.5
_ASK_S: Final = 3.0
_SILENT_S: Final = 60.0  # Time for a file to grow or to become whole: one layer, in a store.

Result = TypeVar("Result")


async def call_nodes(head: OpenHead, config: JobConfig, *, run: str) -> None:
    """Writes where a head listens, for nodes and agents that have lost theirs and look for one.

    A failure is only logged: they may have been told this address.

    Args:
        run: name of the directory of the run whose nodes are meant.
    """
    head.run_place = run
    address = head.leader_sockets.address
    await answer_of_thread(partial(_mark_head, config, address, run=run), name="head")


async def check_no_other_head(
    config: JobConfig, credentials: Credentials, *, run: str = ""
) -> None:
    """Asks the head that a run's directory names, if any, whether it is at work.

    On a store without locks nothing else tells. A head that cannot be reached is taken for lost. If
    it is not, it saves nothing any more once this one has begun a run (nodes/head/publisher.py).

    Args:
        run: name of the directory; "": that of the newest run.

    Raises:
        ConfigError: it is at work, or the place of saves refuses.
    """

    def head_at(storage: Storage) -> tuple[str, tuple[Address, ...]]:
        name = run or newest_run(storage)
        mark = RunPlace(storage, name).head() if name else None
        return name, () if mark is None else mark.addresses

    async def works(address: Address) -> bool:
        try:
            async with head_connection(address, credentials, timeout_s=_ASK_S) as connection:
                reply = await connection.ask(TellRun(), timeout_s=_ASK_S)
        except (AuthenticationError, ConnectionError):
            return False
        return reply.is_done and reply.text == name

    name, addresses = await answer_of_thread(partial(_looked_up, config, head_at), name="head")
    answers = await asyncio.gather(*map(works, addresses))
    for address, is_at_work in zip(addresses, answers, strict=True):
        if is_at_work:
            remedy = (
                f"a head of this job is at work at {address_text(address)}, and saves there; end "
                "it first, or name another directory"
            )
            raise ConfigError(_FIELD, config.checkpoint.directory, remedy)


def _mark_head(config: JobConfig, address: Address, *, run: str) -> None:
    try:
        addresses = reachable_addresses(address)
        tier = with_short_limit(tier_of(config.checkpoint.directory), config.checkpoint)
        if addresses:
            RunPlace(tier.storage, run).write_head(HeadMark(addresses=addresses))
    except (CheckpointError, MemoryError, OSError, RuntimeError) as error:
        # RuntimeError: no thread can be started.
        logger.warning("%s: nodes find this head only at an address that they were given", error)


def reachable_addresses(address: Address) -> tuple[Address, ...]:
    """The addresses at which other machines may reach a listener, at most 4, IPv4 first.

    Args:
        address: host and port of the listener. If the host means all addresses of this machine,
            those of its interfaces are returned that are up, without loopback and link-local ones.
    """
    host, port = bare_host(address[0]), address[1]
    if host not in ANY_HOST:
        return ((host, port),)
    interfaces = psutil.net_if_stats()
    families = (socket.AF_INET6,) if host == "::" else (socket.AF_INET, socket.AF_INET6)
    hosts = [
        ipaddress.ip_address(entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        if name in interfaces and interfaces[name].isup
        for entry in entries
        if entry.family in families
    ]
    usable = [each for each in hosts if not each.is_loopback and not each.is_link_local]
    usable.sort(key=lambda each: each.version)
    return tuple((str(each), port) for each in usable[:_NUM_INTERFACES_MAX])


def newest_parts(config: JobConfig) -> str:
    """The directory of the newest run whose end is not known: its nodes may live, or have saved.

    "": there is none.

    Raises:
        ConfigError: the place of saves refuses.
    """
    return _looked_up(config, newest_run)


def assemble_parts(
    config: JobConfig,
    tier: Tier,
    *,
    resume: bool,
    note: Callable[[str], None],
    runner: asyncio.Runner | None = None,
) -> None:
    """Makes a save of what nodes of a lost head have saved by themselves, if that is newer.

    Args:
        resume: whether the job goes on from the newest save.
        note: shows the user what was made, or why nothing was.
        runner: runs what serves machines meanwhile; None: nothing is served.

    Raises:
        ConfigError: the job is to begin anew though there are such parts, or the place refuses.
        LateError: the disk or store does not answer.
    """
    place = config.checkpoint.directory
    try:
        if not resume and not has_parts(tier):
            return
        newest = tier.newest()
        if not resume:
            if newest is not None:  # Then the job is refused for that save.
                return
            remedy = (
                "nodes of a lost head have saved there what they held; go on from it with "
                "--resume (resume=True in Python), or name another directory"
            )
            raise ConfigError(_FIELD, place, remedy)
        waiting = _wait_parts(config, tier, note)
        if runner is not None:
            runner.run(waiting)
        elif running_loop() is None:
            asyncio.run(waiting)
        else:  # As in a notebook.
            run_in_thread(asyncio.new_event_loop(), waiting)
        assembly = assemble(tier, newer_than=-1 if newest is None else newest.iteration)
    except LateError:
        raise
    except CheckpointError as error:
        remedy = f"{error}; start again when it can be read"
        raise ConfigError(_FIELD, place, remedy) from error
    if assembly.text:
        note(assembly.text)


def nodes_that_may_live(
    record: RunRecord, directory: Path, *, note: Callable[[str], None]
) -> frozenset[int] | None:
    """The nodes of a run that may come back to the next head; None: any may.

    They are those that were started, without those that were evicted or have given their head up.
    If most members have, and their parts make a whole state, nobody is worth waiting for.

    Args:
        directory: directory of the run's journal.
        note: shows the user a text.
    """
    checkpoint = record.job.checkpoint
    tier = with_time_limit(tier_of(checkpoint.directory), timeout_s=checkpoint.timeout_s)
    try:
        nodes = frozenset(started_nodes(directory))
        if not record.parts:
            return nodes
        run = RunPlace(tier.storage, record.parts)
        contents, marks = run.contents(), run.marks()
    except (CheckpointError, OSError) as error:
        note(f"{error}: which nodes of the lost head may live is not known")
        return None
    members = {node for mark in marks for node in mark.nodes}
    newest = frozenset(marks[-1].nodes) if marks else frozenset()
    evicted = members - newest
    living = nodes - evicted - {answer.node for answer in contents.answers}
    if 2 * len(newest & living) < len(newest) and has_newest_state(contents):
        return frozenset()
    return living


def next_parts(config: JobConfig, run: str) -> str:
    """The directory in which the nodes of a run that begins may save what they hold.

    Raises:
        ConfigError: the place of saves refuses.
    """
    return _looked_up(config, lambda storage: next_run(storage, run))


def _looked_up(config: JobConfig, look: Callable[[Storage], Result]) -> Result:
    checkpoint = config.checkpoint
    tier = with_time_limit(tier_of(checkpoint.directory), timeout_s=checkpoint.timeout_s)
    try:
        return look(tier.storage)
    except CheckpointError as error:
        raise ConfigError(_FIELD, checkpoint.directory, str(error)) from error


async def _wait_parts(config: JobConfig, tier: Tier, note: Callable[[str], None]) -> None:
    """Waits for parts that ranks are still writing, as long as new files come.

    Raises:
        CheckpointError: the storage refuses.
    """
    name = newest_run(tier.storage)
    if not name:
        return
    run = RunPlace(tier.storage, name)
    silent_s_max = meeting_s(config.cluster.lease_s) + _SILENT_S
    before: dict[str, ContentInfo] = {}
    end_s = 0.0
    while True:
        contents = await answer_of_thread(run.contents, name="parts")
        if not lacks_parts(contents, devices_per_node=config.cluster.devices_per_node):
            return
        files = await answer_of_thread(partial(tier.storage.entries, name), name="parts")
        now_s = time.monotonic()
        if not before:
            note(
                f"nodes of a lost head are saving what they hold in {run.where}; waiting for them "
                f"until nothing new has come for {silent_s_max:.0f} s"
            )
        if files != before:
            before, end_s = files, now_s + silent_s_max
        if now_s > end_s:
            return
        await asyncio.sleep(_LOOK_S)


def remove_parts(tier: Tier, run: str) -> None:
    """Removes what nodes have saved by themselves, once the job has ended well.

    A failure is only logged.

    Args:
        run: name of the directory of the run that has ended: what belongs to a newer one stays;
            "": it had none, so that nobody has begun another one meanwhile.
    """
    try:
        remove_runs(tier.storage, through=run)
    except CheckpointError as error:
        logger.warning("%s", error)
