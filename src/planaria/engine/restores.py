"""A version of shards that is in memory, on its way back into a model and its optimizer.

Every rank reads what it keeps of the version; what it needs of the rest comes from those who keep
that, from several at once. Nothing of the model changes before all ranks have all that they need.

Source: DESIGN 6 (checkpoints): a copy taken under one plan loads under any other.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from planaria.checkpoint.arena import Arena, Version
from planaria.checkpoint.retrieval import give, take
from planaria.checkpoint.wire import State, state_of
from planaria.core.copies import Label
from planaria.engine.gathering import gathered_as
from planaria.engine.shards import HEAD, Held, Shard
from planaria.errors import CheckpointError
from planaria.transport.links import Links

TIMEOUT_S: Final = 600.0


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
        """Versions of which there is a copy of every shard, the newest first."""
        shards: dict[Label, set[int]] = {}
        for versions in self._there.values():
            for shard, labels in versions.items():
                for label in labels:
                    shards.setdefault(label, set()).add(shard)
        # `since` of a label is how many shards there are.
        whole = [label for label, those in shards.items() if len(those) == label.since]
        return sorted(whole, key=lambda label: (label.age, label.epoch), reverse=True)

    def restored(self, label: Label) -> str:
        """Why the version was not taken over by all; empty if it was."""
        holders = self._holders(label)
        kept: dict[int, Version] = {}
        states: dict[int, State] = {}
        wish = _Wish()
        try:
            mine = [n for n, ranks in holders.items() if self._rank in ranks]
            kept = {n: self._read(n, label) for n in mine}
            states = {n: state_of(version) for n, version in kept.items()}
            heads = {n: _head(states[n]) for n in mine if holders[n][0] == self._rank}
            wish = _Wish(shards=heads)
        except (CheckpointError, msgspec.DecodeError) as error:
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
        self._held.load(tensors, shards[min(shards)])  # All can, so all do.
        return ""

    def _read(self, shard: int, label: Label) -> Version:
        """Raises a CheckpointError if it is not what was written."""
        arena = next(one for one in self._arenas if label in one.versions().get(shard, ()))
        return arena.read(shard, label)

    def _holders(self, label: Label) -> dict[int, list[int]]:
        """By shard the ranks that have a copy of the version."""
        found: dict[int, list[int]] = {}
        for rank, versions in sorted(self._there.items()):
            for shard, labels in versions.items():
                if label in labels:
                    found.setdefault(shard, []).append(rank)
        return found

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
            received[shard] = take(self._links, source, shard, label, timeout_s=TIMEOUT_S)
        return received


def _head(state: State) -> Shard:
    return msgspec.json.decode(state[HEAD].tobytes(), type=Shard)
