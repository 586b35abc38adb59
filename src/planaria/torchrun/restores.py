"""Restores a version of shards in memory into a model and its optimizer.

Every rank reads the shards of the version that it keeps; the other shards that it needs come from
ranks that keep them, from several at once. A version loads into any number of ranks, whatever
number has saved it. The model changes only after all ranks have all the shards that they need, and
all objects that are saved beside the model have loaded their states; otherwise these get their
former states back.
"""

import logging
from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.retrieval import receive_copy, send_copy
from planaria.checkpoint.memory.version import Version
from planaria.checkpoint.memory.wire import State, state_of
from planaria.core.copies import Label
from planaria.errors import CheckpointError, ConfigError
from planaria.torchrun.gathering import gathered_as
from planaria.torchrun.loop_state import written
from planaria.torchrun.shards import HEAD, Held, Shard
from planaria.transport.links import UNLIMITED_S, Links

logger = logging.getLogger(__name__)


class _Wish(msgspec.Struct, frozen=True):
    """A rank's message to all others in a step of a restore.

    Attributes:
        shards: heads of the shards of which it is the first holder, by number.
        wants: numbers of the shards that it needs and does not keep.
        reason: why it cannot take part, in words; empty: it can.
    """

    shards: dict[int, Shard] = {}
    wants: tuple[int, ...] = ()
    reason: str = ""


class _Sound(msgspec.Struct, frozen=True):
    """The shards of a version that a rank keeps and has checked.

    Attributes:
        bad: reasons why its copies of other shards cannot be used.
    """

    shards: tuple[int, ...]
    bad: tuple[str, ...]


class Restores:
    """One rank's part in restores.

    Args:
        arenas: arenas that this rank can read.
        there: labels of the versions that exist, by rank and shard.
    """

    def __init__(
        self,
        links: Links,
        held: Held,
        arenas: Sequence[Arena],
        there: Mapping[int, Mapping[int, tuple[Label, ...]]],
    ) -> None:
        self._rank = links.rank
        self._links = links
        self._held = held
        self._arenas = arenas
        self._there = there

    def complete(self) -> list[Label]:
        """The labels of versions of which every shard has a copy.

        Those of the newest run come first, and within a run the newest: a run that was abandoned
        may have reached a later iteration than the newest run.
        """
        shards: dict[Label, set[int]] = {}
        for versions in self._there.values():
            for shard, labels in versions.items():
                for label in labels:
                    shards.setdefault(label, set()).add(shard)
        # Here `since` of a label is the number of shards.
        whole = [label for label, those in shards.items() if len(those) == label.since]
        return sorted(whole, key=lambda label: (label.epoch, label.age), reverse=True)

    def restored(self, label: Label) -> str:
        """Restores a version on all ranks; returns why that failed, empty if it did not."""
        kept, bad = self._kept(label)
        sound = gathered_as(_Sound, _Sound(shards=tuple(kept), bad=bad))
        holders = {
            n: [r for r, one in enumerate(sound) if n in one.shards] for n in range(label.since)
        }
        if not all(holders.values()):
            reasons = (reason for one in sound for reason in one.bad)
            # The labels were gathered earlier; copies may have been dropped since.
            return next(reasons, "copies of it are not there any more")
        states = {n: state_of(version) for n, version in kept.items()}
        wish = _Wish()
        try:
            heads = {n: _head(states[n]) for n in kept if holders[n][0] == self._rank}
            wish = _Wish(shards=heads)
        except msgspec.DecodeError as error:
            wish = _Wish(reason=str(error))
        told = gathered_as(_Wish, wish)
        if reason := next((one.reason for one in told if one.reason), ""):
            return reason
        shards = {n: shard for one in told for n, shard in one.shards.items()}
        try:
            wanted = self._held.wanted(shards, rather=frozenset(states))
            wish = _Wish(wants=tuple(sorted(wanted - states.keys())))
        except CheckpointError as error:
            wish = _Wish(reason=str(error))
        told = gathered_as(_Wish, wish)
        if reason := next((one.reason for one in told if one.reason), ""):
            return reason
        wish, tensors = _Wish(), {}
        try:
            states |= self._exchanged(told, holders, kept, label)
            tensors = self._held.assembled(shards, {n: states[n] for n in sorted(wanted)})
        except CheckpointError as error:
            wish = _Wish(reason=str(error))
        if reason := next((one.reason for one in gathered_as(_Wish, wish) if one.reason), ""):
            return reason
        return self._taken_over(tensors, shards[min(shards)])

    def _taken_over(self, tensors: Mapping[str, Tensor], told: Shard) -> str:
        """Loads a version that all ranks have assembled; returns as `restored` does.

        Args:
            told: any shard of the version, for the state beside the tensors.
        """
        before, wish = b"", _Wish()
        try:
            before = written(self._held.beside())
            self._held.load_others(told.beside)
        except (CheckpointError, ConfigError) as error:
            wish = _Wish(reason=str(error))
        if reason := next((one.reason for one in gathered_as(_Wish, wish) if one.reason), ""):
            if before:
                self._held.load_others(before)
            return reason
        self._held.load(tensors, told)  # No rank has refused, so all ranks load.
        return ""

    def _kept(self, label: Label) -> tuple[dict[int, Version], tuple[str, ...]]:
        """The shards of a version that this rank keeps and has checked, by number.

        The second value has the reasons why copies of other shards cannot be used; other ranks may
        have good copies of those.
        """
        found, bad = {}, []
        for arena in self._arenas:
            for shard, labels in arena.versions().items():
                if label in labels:
                    try:
                        found[shard] = arena.read(shard, label)
                    except CheckpointError as error:
                        logger.warning("rank %s: %s", self._rank, error)
                        bad.append(str(error))
        return found, tuple(bad)

    def _exchanged(
        self,
        told: list[_Wish],
        holders: Mapping[int, list[int]],
        kept: Mapping[int, Version],
        label: Label,
    ) -> dict[int, State]:
        """Sends the shards that others want from this rank; returns those that this rank wants.

        The ranks that want a shard are spread over its holders.

        Args:
            told: messages of all ranks, with the shards that they want.
            holders: ranks that keep each shard, by shard.
            kept: shards that this rank keeps.

        Raises:
            CheckpointError: a shard differs from the one that was sent.
        """
        received: dict[int, State] = {}
        for target, wish in enumerate(told):
            for shard in wish.wants:
                source = holders[shard][target % len(holders[shard])]
                if source == self._rank:
                    send_copy(self._links, target, kept[shard])
        for shard in told[self._rank].wants:
            source = holders[shard][self._rank % len(holders[shard])]
            received[shard] = receive_copy(self._links, source, shard, label, timeout_s=UNLIMITED_S)
        return received


def _head(state: State) -> Shard:
    return msgspec.json.decode(state[HEAD].tobytes(), type=Shard)
