"""Makes the default process group anew, of the ranks that live, after others were lost.

Every rank has a store, at which the others find it while it lives. The lowest rank that is found
leads: it waits until each rank has come to its store or was lost, and says who is a member. The
new group has its members in the order of their old ranks, and meets at the leader's store. If the
leader or a member is lost meanwhile, the next rank leads.

Two parts of a cluster that do not reach each other must not both go on. So members must be more
than half of the ranks, or the processes of all others must be known to have ended: their machines
refuse connections to them. Otherwise, of two halves, `claim` decides which one goes on, which a
place that both write to answers once.
"""

import json
import logging
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store

from planaria.engine.comm.nccl import abort_at_once
from planaria.errors import CheckpointError
from planaria.torchrun.group_sockets import (
    Ends,
    connections_between_ranks,
    listeners,
    nccl_groups,
    shut,
)
from planaria.transport.links import Address

logger = logging.getLogger(__name__)

_TCPStore: Any = dist.__dict__["TCPStore"]  # Torch does not export them to type checkers.
_Gloo: Any = dist.__dict__.get("ProcessGroupGloo")

_LOOK_S: Final = 0.02
_PROBE_S: Final = 1.0  # Interval at which it is asked whether those that have not come live.
_CONNECT_S: Final = 2.0  # A machine that lives answers sooner.
_STORE_S: Final = 5.0  # Longest wait for a store that has just answered.
# Torch's store pauses for 5 s after every 50 connections that it accepts (2.13, measured).
_ANSWER_S: Final = 20.0
# As torch's own client asks for the number of keys, with the bytes that it begins with. The client
# itself has no timeout for the first answer.
_QUESTION: Final = struct.pack("=BIB", 0, 0x3C85F7CE, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a group that broke, as one of them knows them.

    Attributes:
        rank: number of this rank.
        stores: address of each rank's store, by rank.
        generation: number of groups that were made of these processes before.
        lost: ranks whose links have broken by now.
        claim: whether these members alone may go on; asked if they may not be the only ones.
    """

    rank: int
    stores: Mapping[int, Address]
    generation: int
    lost: Callable[[], Collection[int]]
    claim: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of the default process group, to make another one like it.

    Attributes:
        timeout: timeout of collectives; None: the backend's own.
        device: the device to which the script has bound the group; None: it has not.
    """

    backend: str
    timeout: timedelta | None
    device: torch.device | None


class MeetingStore:
    """A rank's store, for as long as its process lives.

    Attributes:
        connections: connections to other ranks that the default group had when it was made here.
    """

    def __init__(self) -> None:
        self.connections: Collection[Ends] = ()
        self._store = _TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._listeners = listeners(self.port)
        os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self)))

    @property
    def port(self) -> int:
        """The port at which it listens."""
        port: int = self._store.port
        return port

    def leave_to_parent(self) -> None:
        """Closes the port in a forked child, which would keep it open when its parent dies."""
        for fd in self._listeners:
            os.close(fd)

    def meet(self, ranks: Ranks, settings: GroupSettings, *, timeout_s: float) -> tuple[int, ...]:
        """Makes the default group of the ranks that live; returns their old numbers.

        Args:
            timeout_s: longest time in which each rank that lives has to come.

        Raises:
            CheckpointError: others may have formed a group already, or no group could be made.
        """
        others = ranks.stores.keys() - {ranks.rank}
        present = {*_answering(ranks, others - {*ranks.lost()})}
        for leader in sorted(present | {ranks.rank}):
            is_own = leader == ranks.rank
            try:
                store = self._store if is_own else _store_at(ranks.stores[leader])
                members = (
                    self._choose_members(ranks, present, timeout_s)
                    if is_own
                    else _ask_members(store, ranks, timeout_s)
                )
                # Others may notice a loss so much later, and come to the next leader in time.
                self.connections = _make_group(
                    store, ranks, members, settings, patience_s=timeout_s / 2
                )
            except RuntimeError as error:  # The errors of torch.distributed are such.
                logger.warning("no group could be made with rank %s: %s", leader, error)
                continue
            return members
        raise CheckpointError("no group could be made of the ranks that are left; start them anew")

    def _choose_members(
        self, ranks: Ranks, present: Collection[int], timeout_s: float
    ) -> tuple[int, ...]:
        """The ranks that have come and live, once all others are lost or late; tells them.

        Args:
            present: ranks whose stores can be reached.
        """
        deadline_s = time.monotonic() + timeout_s
        awaited, alive = ranks.stores.keys() - {ranks.rank}, {*present}
        probe_s = time.monotonic() + _PROBE_S
        while awaited & alive - {*ranks.lost()} and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            awaited = {peer for peer in awaited if not self._store.check([_key(ranks, peer)])}
            if time.monotonic() > probe_s:  # A store answers whatever its rank is busy with.
                alive &= {*_answering(ranks, awaited & alive)}
                probe_s = time.monotonic() + _PROBE_S
        awaited = {peer for peer in awaited if not self._store.check([_key(ranks, peer)])}
        # One that came early may have been lost since.
        here = _answering(ranks, ranks.stores.keys() - awaited - {ranks.rank})
        members = tuple(sorted({ranks.rank, *here}))
        reason = _reason_to_end(ranks, members)
        self._store.set(_key(ranks, "members"), json.dumps([reason, members]))
        if reason:
            raise CheckpointError(reason)
        return members


def _leave(reference: "weakref.ref[MeetingStore]") -> None:
    if store := reference():
        store.leave_to_parent()


def group_settings() -> GroupSettings:
    """The settings of the default process group."""
    group: Any = dist.group.WORLD
    timeout = None
    for device in group._device_types:
        timeout = timeout or getattr(group._get_backend(device).options, "_timeout", None)
    return GroupSettings(dist.get_backend_config(), timeout, group.bound_device_id)


def leave_group(connections: Collection[Ends] = ()) -> None:
    """Ends the default process group, if there is one; peers of it may be lost.

    Args:
        connections: its connections to other ranks, which are shut: a model that refers to the
            group keeps them, and peers that wait for this rank would wait for all of their timeout.
    """
    group: Any = dist.group.WORLD
    abort_at_once(nccl_groups())  # Or the end would wait for what peers never send.
    shut(connections)
    if group is not None:
        dist.destroy_process_group()


def _reason_to_end(ranks: Ranks, members: Collection[int]) -> str:
    """Why the members must not go on; empty: they may."""
    if 2 * len(members) > len(ranks.stores):
        return ""
    others = [address for peer, address in ranks.stores.items() if peer not in members]
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        num_silent = list(pool.map(_is_over, others)).count(False)
    text = (
        f"ranks {sorted(members)} are no more than half of {len(ranks.stores)}, and the others may "
        "go on without them; start the script again"
    )
    # More than half would claim nothing, and some of those may have ended only since they went on.
    if num_silent and 2 * len(others) > len(ranks.stores):
        return text
    if not num_silent or ranks.claim():
        return ""
    return f"{text} (with persist_directory the half that comes first would go on)"


def _make_group(
    store: Store,
    ranks: Ranks,
    members: tuple[int, ...],
    settings: GroupSettings,
    *,
    patience_s: float,
) -> Collection[Ends]:
    """Makes the default group; returns its connections to other ranks.

    Args:
        patience_s: longest wait for a member that was lost since it came, with gloo: NCCL would end
            the process.
    """
    if ranks.rank not in members:
        raise CheckpointError(f"rank {ranks.rank} came too late, and others go on without it")
    place, size = members.index(ranks.rank), len(members)
    patience = timedelta(seconds=patience_s)
    store = PrefixStore(f"group {ranks.generation}", store)
    state: Any = dist.distributed_c10d
    try:
        if "gloo" in settings.backend:
            # A group that connects in vain waits for its timeout, and sends and receives of gloo
            # keep the one with which it was made. So another group tries whether all connect.
            trial = _Gloo(PrefixStore("trial", store), place, size, patience)
            trial.barrier().wait()
        # Members of which each counts its groups of before in another way would not meet.
        state._world.group_count = 0
        dist.init_process_group(
            settings.backend,
            store=store,
            rank=place,
            world_size=size,
            timeout=settings.timeout,
            device_id=settings.device,
        )
        _limit_gloo(patience)
        dist.barrier()  # Some backends connect when they are used first.
        connections = connections_between_ranks()
        _limit_gloo(settings.timeout or default_pg_timeout)
    except RuntimeError:
        leave_group()
        raise
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(place), str(size)
    return connections


def _limit_gloo(timeout: timedelta) -> None:
    """Sets the timeout of gloo's collectives in the default group."""
    group: Any = dist.group.WORLD
    for device in group._device_types:
        backend = group._get_backend(device)
        if _Gloo is not None and isinstance(backend, _Gloo):
            backend._set_default_timeout(timeout)


def _ask_members(store: Store, ranks: Ranks, timeout_s: float) -> tuple[int, ...]:
    store.set(_key(ranks, ranks.rank), "here")
    # The leader may have come much later than this rank, and waits as long for others.
    store.wait([_key(ranks, "members")], timedelta(seconds=2 * timeout_s))
    reason, members = json.loads(store.get(_key(ranks, "members")))
    if reason:
        raise CheckpointError(reason)
    return tuple(members)


def _answering(ranks: Ranks, peers: Collection[int]) -> list[int]:
    """Those of some ranks whose stores can be reached, ascending."""
    peers = sorted(peers)
    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        answers = list(pool.map(_answers, [ranks.stores[peer] for peer in peers]))
    return [peer for peer, is_there in zip(peers, answers, strict=True) if is_there]


def _key(ranks: Ranks, name: int | str) -> str:
    return f"{ranks.generation}/{name}"


def _store_at(address: Address) -> Store:
    host, port = address
    if not _answers(address):  # Or torch would try again for a dozen seconds.
        raise dist.DistNetworkError(f"no store answers at {host}:{port}")
    store: Store = _TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
    return store


def _answers(address: Address) -> bool:
    """Whether a rank's store can be reached, and answers.

    A process that is being killed accepts for a moment, but does not stay. For one that was killed
    the kernel accepts for as long as a forked child has the port.
    """
    try:
        with socket.create_connection(address, timeout=_CONNECT_S) as sock:
            sock.settimeout(_ANSWER_S)
            sock.sendall(_QUESTION)
            return bool(sock.recv(1))
    except OSError:
        return False


def _is_over(address: Address) -> bool:
    """Whether the machine of a rank says that its process has ended."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
