"""Restores a version of shards in memory into a model and its optimizer.

Every rank reads the shards of the version that it keeps; the other shards that it needs come from
ranks that keep them, from several at once. A version loads into any number of ranks, whatever
number has saved it. The model changes only after all ranks have all the shards that they need, and
all objects that are saved besides the model have loaded their states; otherwise these get their
former states back.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.retrieval import receive_copy, send_copy
from planaria.checkpoint.memory.version import Version
from planaria.checkpoint.memory.wire import State, state_of
from planaria.core.copies import Label
from planaria.errors import CheckpointError, ConfigError
from planaria.torchrun.gathering import broadcast_bytes, gather_records
from planaria.torchrun.loop_state import encoded_state
from planaria.torchrun.persisting import Readiness
from planaria.torchrun.shards import HEAD, Shard, TrainingState
from planaria.transport.links import UNLIMITED_S, Links

logger = logging.getLogger(__name__)


class _RestoreMessage(msgspec.Struct, frozen=True):
    """A rank's message to all others in a step of a restore.

    Attributes:
        shards: heads of the shards of which it is the first holder, by number, without `beside`.
        wants: numbers of the shards that it needs and does not keep.
        reason: why it cannot take part, in words; empty: it can.
    """

    shards: dict[int, Shard] = {}
    wants: tuple[int, ...] = ()
    reason: str = ""


class _CheckedShards(msgspec.Struct, frozen=True):
    """The shards of a version that a rank keeps and has checked.

    Attributes:
        bad: reasons why its copies of other shards cannot be used.
    """

    shards: tuple[int, ...]
    bad: tuple[str, ...]


class Restores:
    """One rank's part in restores.

    Args:
        readiness: this rank's part in waits for what takes ranks long, and some longer than others.
        arenas: arenas that this rank can read.
        labels_by_rank: labels of the versions that exist, by rank and shard.
    """

    def __init__(
        self,
        links: Links,
        readiness: Readiness,
        state: TrainingState,
        arenas: Sequence[Arena],
        labels_by_rank: Mapping[int, Mapping[int, tuple[Label, ...]]],
    ) -> None:
        self._rank = links.rank
        self._links, self._readiness = links, readiness
        self._state = state
        self._arenas = arenas
        self._labels_by_rank = labels_by_rank

    def complete(self) -> list[Label]:
        """The labels of versions of which every shard has a copy.

        Those of the newest run come first, and within a run the newest: a run that was abandoned
        may have reached a later iteration than the newest run.
        """
        # Here `since` of a label is the number of shards.
        return [label for label, kept in self._shards().items() if len(kept) == label.since]

    def incomplete(self) -> dict[Label, str]:
        """What versions lack of which some shard has no copy, in words, in the same order."""
        reasons = {}
        for label, kept in self._shards().items():
            if missing := sorted({*range(label.since)} - kept):
                numbers = ", ".join(map(str, missing))
                reasons[label] = f"iteration {label.age} lacks shards {numbers} of {label.since}"
        return reasons

    def _shards(self) -> dict[Label, set[int]]:
        """The shards that have a copy, by version, those of the newest run first."""
        shards: dict[Label, set[int]] = {}
        for versions in self._labels_by_rank.values():
            for shard, labels in versions.items():
                for label in labels:
                    shards.setdefault(label, set()).add(shard)
        newest_first = sorted(shards, key=lambda label: (label.epoch, label.age), reverse=True)
        return {label: shards[label] for label in newest_first}

    def restore_version(self, label: Label) -> str:
        """Restores a version on all ranks; returns why that failed, empty if it did not."""
        check = partial(self._checked_versions, label)
        kept, bad = self._readiness.do_with_all(check)
        checked = gather_records(_CheckedShards, _CheckedShards(shards=tuple(kept), bad=bad))
        holders = {
            n: [rank for rank, kept_there in enumerate(checked) if n in kept_there.shards]
            for n in range(label.since)
        }
        if not all(holders.values()):
            reasons = (reason for shards in checked for reason in shards.bad)
            # The labels were gathered earlier; copies may have been dropped since.
            return next(reasons, "copies of it are not there any more")
        states = {n: state_of(version) for n, version in kept.items()}
        shards, reason = self._gather_shards(states, holders)
        if reason:
            return reason
        try:
            wanted = self._state.needed_shards(shards, rather=frozenset(states))
            message = _RestoreMessage(wants=tuple(sorted(wanted - states.keys())))
        except CheckpointError as error:
            message = _RestoreMessage(reason=str(error))
        messages = gather_records(_RestoreMessage, message)
        if reason := _first_reason(messages):
            return reason

        def tensors_or_reason() -> tuple[dict[str, Tensor], str]:
            try:
                known = states | self._exchange_shards(messages, holders, kept, label)
                return self._state.assemble(shards, {n: known[n] for n in sorted(wanted)}), ""
            except CheckpointError as error:
                return {}, str(error)

        tensors, reason = self._readiness.do_with_all(tensors_or_reason)
        if reason := _first_reason(gather_records(_RestoreMessage, _RestoreMessage(reason=reason))):
            return reason
        return self._load_version(tensors, shards)

    def _gather_shards(
        self, states: Mapping[int, State], holders: Mapping[int, list[int]]
    ) -> tuple[dict[int, Shard], str]:
        """The heads of all shards by number, and why a rank cannot read its own ones.

        The state besides tensors is the same for all, and may be large, so only the first has it.

        Args:
            states: shards that this rank keeps, by number.
            holders: ranks that keep each shard, by shard.
        """
        beside, message = b"", _RestoreMessage()
        try:
            mine = {n: _head(state) for n, state in states.items() if holders[n][0] == self._rank}
            beside = mine[0].beside if 0 in mine else b""
            heads = {n: msgspec.structs.replace(head, beside=b"") for n, head in mine.items()}
            message = _RestoreMessage(shards=heads)
        except msgspec.DecodeError as error:
            message = _RestoreMessage(reason=str(error))
        messages = gather_records(_RestoreMessage, message)
        if reason := _first_reason(messages):
            return {}, reason
        shards = {n: shard for message in messages for n, shard in message.shards.items()}
        beside = broadcast_bytes(beside, source=holders[0][0])
        return {**shards, 0: msgspec.structs.replace(shards[0], beside=beside)}, ""

    def _load_version(self, tensors: Mapping[str, Tensor], shards: Mapping[int, Shard]) -> str:
        """Loads a version that all ranks have assembled; returns as `restore_version` does.

        Args:
            shards: all shards of the version, for the state besides the tensors.
        """
        first, own = shards[0], self._own_state(shards)
        before, own_before, message = b"", b"", _RestoreMessage()
        try:
            before = encoded_state(self._state.non_tensor_state())
            own_before = self._state.per_rank_state()
            self._state.load_others(first.beside)
            if own:
                self._state.load_per_rank(own)
        except (CheckpointError, ConfigError) as error:
            message = _RestoreMessage(reason=str(error))
        if reason := _first_reason(gather_records(_RestoreMessage, message)):
            if before:
                self._state.load_others(before)
            if own_before:
                self._state.load_per_rank(own_before)
            return reason
        self._state.load(tensors, first)  # No rank has refused, so all ranks load.
        return ""

    def _own_state(self, shards: Mapping[int, Shard]) -> bytes:
        """The saved state of the objects of which every rank has its own; empty: it is left out.

        The state of a rank means nothing where the ranks are not as many as they were.
        """
        if not self._state.per_rank:
            return b""
        own = {rank: raw for shard in shards.values() for rank, raw in shard.per_rank.items()}
        if own.keys() == set(range(len(self._labels_by_rank))):
            return own[self._rank]
        why = f"the version is of {len(own)} ranks, and there are {len(self._labels_by_rank)} now"
        if not own:
            why = "the version has no per_rank objects"
        if not self._rank:
            names = ", ".join(self._state.per_rank)
            logger.warning("per_rank objects (%s) stay as they are: %s", names, why)
        return b""

    def _checked_versions(self, label: Label) -> tuple[dict[int, Version], tuple[str, ...]]:
        """The shards of a version that this rank keeps and has checked, by number.

        The second value has the reasons why copies of other shards cannot be used; other ranks may
        have good copies of those.
        """
        versions, bad = {}, []
        for arena in self._arenas:
            for shard, labels in arena.versions().items():
                if label in labels:
                    try:
                        versions[shard] = arena.read(shard, label)
                    except CheckpointError as error:
                        logger.warning("rank %s: %s", self._rank, error)
                        bad.append(str(error))
        return versions, tuple(bad)

    def _exchange_shards(
        self,
        messages: list[_RestoreMessage],
        holders: Mapping[int, list[int]],
        kept: Mapping[int, Version],
        label: Label,
    ) -> dict[int, State]:
        """Sends the shards that others want from this rank; returns those that this rank wants.

        The ranks that want a shard are spread over its holders.

        Args:
            messages: messages of all ranks, with the shards that they want.
            holders: ranks that keep each shard, by shard.
            kept: shards that this rank keeps.

        Raises:
            CheckpointError: a shard differs from the one that was sent.
        """
        received: dict[int, State] = {}
        for target, message in enumerate(messages):
            for shard in message.wants:
                source = holders[shard][target % len(holders[shard])]
                if source == self._rank:
                    send_copy(self._links, target, kept[shard])
        for shard in messages[self._rank].wants:
            source = holders[shard][self._rank % len(holders[shard])]
            received[shard] = receive_copy(self._links, source, shard, label, timeout_s=UNLIMITED_S)
        return received


def _head(state: State) -> Shard:
    return msgspec.json.decode(state[HEAD].tobytes(), type=Shard)


def _first_reason(messages: Sequence[_RestoreMessage]) -> str:
    """Why a rank cannot take part: the reason of the lowest such rank; empty if all can."""
    return next((message.reason for message in messages if message.reason), "")
