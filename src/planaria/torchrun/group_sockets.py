"""Wakes a rank that waits in a collective, or for its links, when a peer is gone.

Gloo tells only the neighbours of a lost rank; the others wait for the whole timeout of the group,
and its operations cannot be aborted. But they raise an error at once when their sockets are shut.
These are the connections between processes of ranks that exist before this rank makes others of its
own; both ends are compared, so that no connection of the script to anybody else is among them.

A group of NCCL has a rank wait for its device, and raises no error. So it is aborted: what the rank
computes then is anything, and the next operation of the group raises an error.

The kernel of a machine closes the links of a process that dies. A machine that is gone closes
nothing, so each rank sends beats to the next one, which tells all others when it hears none.
"""

import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import psutil
import torch.distributed as dist

from planaria.engine.comm.nccl import abort_at_once
from planaria.errors import AbortedError, ConfigError, PeerLostError
from planaria.torchrun.gathering import backends, gather_records
from planaria.transport.links import Channel, Links, Tag

logger = logging.getLogger(__name__)

Ends = tuple[str, str]  # The own end and the other one of a connection.
# What ranks tell each other: that they are done, that they live, that another one is silent, and
# that they leave the group.
_FAREWELL: Final = Tag(Channel.ALIVE, 0, 0, 0)
_BEAT: Final = Tag(Channel.ALIVE, 0, 1, 0)
_SILENCE: Final = Tag(Channel.ALIVE, 0, 2, 0)
_LEAVING: Final = Tag(Channel.ALIVE, 0, 3, 0)
_NOTHING: Final = np.zeros(1, dtype=np.uint8)
_BEAT_S: Final = 0.5
_NCCL_CLASSES: Final = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
SILENCE_S: Final = 5.0  # A rank of which nobody has heard for so long is lost.


def connections_between_ranks() -> frozenset[Ends]:
    """The connections of this process to other ranks, as of now; all ranks must call it.

    Empty where the kernel does not tell, or addresses are translated between machines.
    """
    mine = {_ends_of(each.laddr, each.raddr) for each in _connections()}
    theirs = {
        (remote, local)
        for rank, connections in enumerate(gather_records(list[Ends], sorted(mine)))
        if rank != dist.get_rank()
        for local, remote in connections
    }
    return frozenset(mine & theirs)


class LossWatch:
    """Ends all that waits for peers as soon as one is lost or leaves, until links are closed.

    Connections of collectives are shut, groups of NCCL and the links' epoch aborted: the loop is of
    no use without the peer.

    Args:
        num_ranks: number of ranks, which are linked with each other.
        connections: result of `connections_between_ranks`.

    Attributes:
        is_alarmed: whether a rank was taken for lost.
        has_aborted: whether groups of NCCL were aborted, or are about to be.
    """

    def __init__(self, links: Links, num_ranks: int, connections: Collection[Ends]) -> None:
        self._links = links
        self._peers = [rank for rank in range(num_ranks) if rank != links.rank]
        self._connections = frozenset(connections)
        self._is_done = threading.Event()
        self.is_alarmed = self.has_aborted = False
        for work in (self._watch, self._beat, self._listen) if self._peers else ():
            threading.Thread(target=work, name="watch peers", daemon=True).start()

    def say_farewell(self) -> None:
        """Tells all peers that this rank ends its part because it is done with it."""
        self._is_done.set()
        self._send(_FAREWELL)

    def _send(self, tag: Tag) -> None:
        for peer in self._peers:
            with suppress(AbortedError, PeerLostError):
                self._links.send(peer, tag, _NOTHING)

    def leave(self) -> None:
        """Has no peer wait for this rank any more, and nothing here for the device.

        For groups of NCCL are aborted. `say_farewell` follows.
        """
        self._send(_LEAVING)
        if groups := nccl_groups():
            self.has_aborted = True  # Before what the device computes may be anything.
            abort_at_once(groups)

    def _alarm(self) -> None:
        self.is_alarmed = True
        self._end_waits("a rank was lost")

    def _end_waits(self, reason: str) -> None:
        groups = nccl_groups()
        # The loop is done with this group once it wakes, so the abort begins before that. It may
        # take long, and the loop may wait for gloo, so nothing waits for its end.
        if groups and not self._is_done.is_set():  # Else they may be new ones.
            self.has_aborted = True
            threading.Thread(target=abort_at_once, args=(groups,), daemon=True).start()
        shut(self._connections)
        # The loop may wait for a peer that lives, and that itself waits for the lost one.
        self._links.abort(reason, first_epoch=self._links.epoch + 1)

    def _missing_ranks(self) -> set[int]:
        """The ranks whose links have broken though they were not done, and did not leave."""
        known = self._senders(_FAREWELL) | self._senders(_LEAVING)
        return self._links.lost_peers.keys() - known

    def _senders(self, tag: Tag) -> set[int]:
        """The peers that have sent a message under a tag."""
        return {peer for peer in self._peers if self._links.has_any({peer: tag})}

    def _watch(self) -> None:
        """Waits until a peer is lost, or another one says so, or one leaves."""
        if not self._links.wait_for(
            lambda: bool(
                self._missing_ranks() or self._senders(_SILENCE) or self._senders(_LEAVING)
            )
        ):
            return
        if missing := self._missing_ranks():
            logger.warning("rank %s lost ranks %s", self._links.rank, sorted(missing))
        if missing or self._senders(_SILENCE):
            self._alarm()
        else:  # It may have had an error of its own, so this is no loss.
            self._end_waits(f"ranks {sorted(self._senders(_LEAVING))} have left the group")

    def _beat(self) -> None:
        """Tells the next rank that this one lives."""
        following = self._peers[self._links.rank % len(self._peers)]
        while not self._is_done.wait(_BEAT_S):
            try:
                self._links.check_epoch()
                self._links.send(following, _BEAT, _NOTHING)
            except (AbortedError, PeerLostError):
                return

    def _listen(self) -> None:
        """Listens to the rank before, and tells all others if it is silent.

        Its beats may wait behind a shard that it sends, so all bytes that come from it count.
        """
        before = self._peers[self._links.rank - 1]
        silence_s = 0.0
        while silence_s < SILENCE_S:
            try:
                self._links.receive(before, _BEAT, timeout_s=SILENCE_S - silence_s)
                silence_s = 0.0
            except AbortedError:
                return
            except PeerLostError:
                if self._links.lost_peers:  # `_watch` knows better.
                    return
                silence_s = self._links.silence_s(before)
        if not self._links.has_any({before: _FAREWELL}):
            logger.warning("rank %s hears nothing from rank %s", self._links.rank, before)
            self._send(_SILENCE)
            self._alarm()


@contextmanager
def errors_of_torch() -> Iterator[None]:
    """A context in which the loss of a peer is an error of torch, for which scripts look."""
    try:
        yield
    except (AbortedError, PeerLostError) as error:
        raise dist.DistNetworkError(str(error)) from error


def nccl_groups() -> list[Any]:
    """All process groups of NCCL that torch.distributed knows, subgroups included."""
    if not dist.is_nccl_available():
        return []
    state: Any = dist.distributed_c10d
    groups = [
        group._get_backend(device)
        for group in list(state._world.pg_map)
        for device in group._device_types
    ]
    # Since 2.15 torch has several classes for NCCL, none of which is a subclass of another.
    classes = tuple(filter(None, map(dist.__dict__.get, _NCCL_CLASSES)))
    return [group for group in groups if isinstance(group, classes)]


def check_errors_stay() -> None:
    """Refuses groups of NCCL that end the process when a peer is lost.

    Raises:
        ConfigError: torch is to do that for the default group.
    """
    value = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    # Parameters may lie elsewhere than what the group exchanges: on the host, or nowhere yet.
    if "nccl" in backends() and value != "0":
        remedy = (
            "torch would end this process when another rank is lost; set the environment variable "
            "to 0 before init_process_group, or leave can_reform off"
        )
        raise ConfigError("TORCH_NCCL_ASYNC_ERROR_HANDLING", value, remedy)


def shut(connections: Collection[Ends]) -> None:
    """Shuts connections of this process, so that whoever waits for them gets an error."""
    for connection in _connections():
        if _ends_of(connection.laddr, connection.raddr) not in connections:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as sock:
            # Another thread may have closed it meanwhile, and got the same number for another one.
            if _ends_of(sock.getsockname(), sock.getpeername()) in connections:
                sock.shutdown(socket.SHUT_RDWR)


def listeners(port: int) -> list[int]:
    """The descriptors with which this process listens at a port; none where nobody tells."""
    return [each.fd for each in _sockets() if not each.raddr and each.laddr.port == port]


def _connections() -> list[Any]:
    """This process's connections over TCP; none where the system does not tell."""
    return [each for each in _sockets() if each.raddr]


def _sockets() -> list[Any]:
    try:
        return [each for each in psutil.Process().net_connections(kind="tcp") if each.laddr]
    except (psutil.Error, OSError):
        return []


def _ends_of(local: Sequence[Any], remote: Sequence[Any]) -> Ends:
    own, other = (f"{end[0].removeprefix('::ffff:')} {end[1]}" for end in (local, remote))
    return own, other
