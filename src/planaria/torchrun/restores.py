"""A version of shards that is in memory, on its way back into a model and its optimizer.

Every rank reads what it keeps of the version; what it needs of the rest comes from those who keep
that, from several at once. Nothing of the model changes before all ranks have all that they need,
and what is saved beside it has taken over its state on all; else that gets its own back.

Source: DESIGN 6 (checkpoints): a copy taken under one plan loads under any other.
"""

import logging
from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.retrieval import give, take
from planaria.checkpoint.memory.version import Version
from planaria.checkpoint.memory.wire import State, state_of
from planaria.core.copies import Label
from planaria.errors import CheckpointError, ConfigError
from planaria.torchrun.gathering import gathered_as
from planaria.torchrun.loop_state import written
from planaria.torchrun.shards import HEAD, Held, Shard
from planaria.transport.links import PATIENT_S, Links

logger = logging.getLogger(__name__)


class _Wish(msgspec.Struct, frozen=True):
    """A rank's part in a restore.

    Attributes:
        shards: heads of those that it was asked to read.
        wants: shards that it lacks.
        reason: why it cannot take part.
    """

    shards: dict[int, Shard] = {}
    wants: tuple[int, ...] = ()
    reason: str = ""


class _Sound(msgspec.Struct, frozen=True):
    """What a rank has of a version: shards, and why copies of others are of no use."""

    shards: tuple[int, ...]
    bad: tuple[str, ...]


class Restores:
    """One rank's part in restores.

    Args:
        arenas: what this rank keeps.
        there: by rank and shard, the versions that are kept.
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
        """Versions of which there is a copy of every shard: those of the newest run first, and of
        one run the newest first. A run that was abandoned may have come further."""
        shards: dict[Label, set[int]] = {}
        for versions in self._there.values():
            for shard, labels in versions.items():
                for label in labels:
                    shards.setdefault(label, set()).add(shard)
        # `since` of a label is how many shards there are.
        whole = [label for label, those in shards.items() if len(those) == label.since]
        return sorted(whole, key=lambda label: (label.epoch, label.age), reverse=True)

    def restored(self, label: Label) -> str:
        """Why the version was not taken over by all; empty if it was."""
        kept, bad = self._kept(label)
        sound = gathered_as(_Sound, _Sound(shards=tuple(kept), bad=bad))
        holders = {
            n: [r for r, one in enumerate(sound) if n in one.shards] for n in range(label.since)
        }
        if not all(holders.values()):
            reasons = (reason for one in sound for reason in one.bad)
            return next(reasons, "copies of it are not there any more")  # Since it was last tried.
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
        """As `restored`, of a version that can be put together on all ranks."""
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
        self._held.load(tensors, told)  # All can, so all do.
        return ""

    def _kept(self, label: Label) -> tuple[dict[int, Version], tuple[str, ...]]:
        """The shards that this rank has a copy of, and why some are of no use any more: others may
        have copies of those."""
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
        """The shards that this rank wants; others get theirs of what it has, from several holders
        at once.

        Raises:
            CheckpointError: what came is not what was sent.
        """
        received: dict[int, State] = {}
        for target, wish in enumerate(told):
            for shard in wish.wants:
                source = holders[shard][target % len(holders[shard])]
                if source == self._rank:
                    give(self._links, target, kept[shard])
        for shard in told[self._rank].wants:
            source = holders[shard][self._rank % len(holders[shard])]
            received[shard] = take(self._links, source, shard, label, timeout_s=PATIENT_S)
        return received


def _head(state: State) -> Shard:
    return msgspec.json.decode(state[HEAD].tobytes(), type=Shard)
