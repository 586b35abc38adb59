"""The memory in which a rank of a user's own loop keeps copies, for as long as its process lives.

The keeper of the node owns it (keeper.py), so it outlives the process. It stays the same when the
ranks that live make a new process group.
"""

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.filling import Filler
from planaria.core.copies import Label
from planaria.errors import CheckpointError, ConfigError
from planaria.nodes.head.user_files import plain_name
from planaria.torchrun.keeper import KeeperSlot, attach
from planaria.transport.links import Address

logger = logging.getLogger(__name__)

_SLOT, _NUM_SLOTS = "LOCAL_RANK", "LOCAL_WORLD_SIZE"  # As torchrun sets them.


class RankFacts(msgspec.Struct, frozen=True):
    """The facts that a rank tells all others when it begins.

    Attributes:
        node: name of its node, equal for all ranks with the same keeper.
        address: host and port at which it accepts links.
        labels: labels of the versions that it keeps, by shard.
        once_complete: labels of those that were once complete on all ranks, as far as is known.
        begin_us: time at which it began, in microseconds since 1970.
        domain: name of its failure domain; "": none.
        store_port: port of its store, at which ranks meet after a loss; 0: it has none.
    """

    node: str
    address: Address
    labels: dict[int, tuple[Label, ...]]
    once_complete: tuple[Label, ...]
    begin_us: int
    domain: str
    store_port: int


class RankMemory:
    """A rank's place in the memory of its node.

    Args:
        place: directory in which each machine has one for its keeper's socket.
        idle_s: seconds that the keeper keeps copies when no rank is left.

    Attributes:
        place: directory in which each machine has one for its keeper's socket.
        node: name of the node, equal for all ranks with the same keeper.
        arena: copies that this rank keeps.
        older: copies that ranks that are no more have left here, to read; dropped once a version of
            this run is complete.
        filler: copies bytes to the arena.

    Raises:
        CheckpointError: the keeper does not start, or the rank's slot or the directory is taken.
        ConfigError: the environment does not tell the rank's place on its node.
    """

    def __init__(self, place: Path, *, idle_s: float) -> None:
        slot, num_slots = _place_on_node()
        # Machines may share the directory, but a socket is reachable on one machine only, and looks
        # on others as if a killed keeper had left it.
        own = place / plain_name(socket.gethostname())
        self._slot: KeeperSlot = attach(own, slot, num_slots=num_slots, idle_s=idle_s)
        self._can_be_kept = True
        self.place = place.absolute()
        self.node = f"{socket.gethostname()}:{place}#{self._slot.keeper_id}"
        self.arena = _open_arena(self._slot.fd)
        self.older = [_open_arena(fd) for fd in self._slot.further_fds]
        self.filler = Filler(torch.get_num_threads())

    def versions(self) -> dict[int, tuple[Label, ...]]:
        """The labels of the versions that are here, by shard."""
        versions: dict[int, tuple[Label, ...]] = {}
        for arena in (self.arena, *self.older):
            for shard, labels in arena.versions().items():
                versions[shard] = (*versions.get(shard, ()), *labels)
        return versions

    def labels_once_complete(self) -> tuple[Label, ...]:
        """The labels of versions here that were once complete on all ranks, as far as is known."""
        arenas = (self.arena, *self.older)
        return tuple(sorted({label for arena in arenas for label in arena.complete_labels()}))

    def note_complete(self, label: Label) -> None:
        """Notes that a version was complete on all ranks, for those that come after this one."""
        for arena in (self.arena, *self.older):
            arena.note_complete(label)

    def adopt(self) -> None:
        """Takes over what ranks of this node that have died have left here, to read."""
        self.older += map(_open_arena, self._slot.adopt())

    def drop_older(self) -> None:
        """Drops what ranks that are no more have left here."""
        for arena in self.older:
            arena.keep_only((), layers=())
        self.older = []

    def is_owned(self, rank: int) -> bool:
        """Whether a keeper owns the memory; if the keeper is gone, another one is tried.

        Args:
            rank: number of this rank, for the log.
        """
        if self._can_be_kept and self._slot.is_gone:
            gone = f"rank {rank}: the process that owned copies on this machine is gone"
            try:
                self._slot.renew()
                logger.warning("%s; another process owns them now", gone)
            except CheckpointError as error:
                self._can_be_kept = False
                lost = "copies here end with this rank, and nothing is saved any more"
                logger.warning("%s, and no other one can be started: %s: %s", gone, lost, error)
        return self._can_be_kept

    def close(self) -> None:
        """Ends the keeper, and with it all copies of the node."""
        self.filler.close()
        self._slot.end()


def _place_on_node() -> tuple[int, int]:
    """The number of this rank on its node, and how many there are; without both, a rank is alone.

    Raises:
        ConfigError: the environment tells one without the other, or a number that is too large.
    """
    slot = int(os.environ.get(_SLOT, "0"))
    if _SLOT in os.environ and _NUM_SLOTS not in os.environ:
        remedy = f"set {_NUM_SLOTS} to the number of ranks of this machine, as torchrun does"
        raise ConfigError(_NUM_SLOTS, "", f"{_SLOT} is {slot}, so {remedy}")
    num_slots = int(os.environ.get(_NUM_SLOTS, "1"))
    if not 0 <= slot < num_slots:
        remedy = f"{_NUM_SLOTS} is {num_slots}; number the ranks of each machine from 0"
        raise ConfigError(_SLOT, slot, remedy)
    return slot, num_slots


def _open_arena(fd: int) -> Arena:
    """The arena of a file, in which it is noted what was complete beside a version that is torn.

    Beside a version that is not, an arena has only the one that was complete when it began.
    """
    arena = Arena(fd)
    whole = {label for labels in arena.versions().values() for label in labels}
    begun = sorted(whole | arena.torn, key=lambda label: (label.epoch, label.age))
    for label in whole & {*begun[:-1]}:
        arena.note_complete(label)
    return arena


def epoch_after(ranks: Sequence[RankFacts]) -> int:
    """An epoch above those of all known versions, whatever the clocks say.

    It is also at least the present time in microseconds, so that it is above the epochs of earlier
    runs whose memory is not known now, unless clocks have gone back.
    """
    known = [n.epoch for rank in ranks for labels in rank.labels.values() for n in labels]
    return max([1 + max(known, default=-1), *(rank.begin_us for rank in ranks)])
