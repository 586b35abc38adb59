"""Receives copies of layers that other ranks send, into this node's memory.

A layer arrives piece by piece, directly in its final memory. Each piece is hashed there and
answered; a piece that differs from what was sent is asked for again.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.turns import Unload
from planaria.checkpoint.memory.version import Bytes, Version
from planaria.checkpoint.memory.wire import (
    BAD,
    GOOD,
    Opening,
    answer_tag,
    opening_answer_tag,
    opening_tag,
    piece_tag,
    unsealed,
)
from planaria.core.copies import Label
from planaria.errors import CheckpointError
from planaria.transport.links import Links, Tag

logger = logging.getLogger(__name__)


class Arrivals:
    """A rank's receiving part in the copies of one epoch; `Copier` in stream.py explains the rest.

    Args:
        receives: layers that each source sends, in the order in which it sends them, by source.
    """

    def __init__(
        self,
        links: Links,
        arena: Arena,
        receives: Mapping[int, Sequence[int]],
        *,
        virtual_bytes: Callable[[int], int],
        unload: Unload,
        failed: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        self._links = links
        self._arena = arena
        self._receives = receives
        self._virtual_bytes = virtual_bytes
        self._unload = unload
        self._failed = failed
        self._timeout_s = timeout_s
        self._kept: Label | None = None

    @property
    def layers(self) -> set[int]:
        """The layers of other ranks of which this rank keeps copies."""
        return {layer for layers in self._receives.values() for layer in layers}

    def keep(self, label: Label, kept: Label | None) -> None:
        """Receives all copies of a version; blocks until they have arrived or failed for memory.

        Args:
            kept: label of the newest version that is complete on all ranks; None: there is none.

        Raises:
            AbortedError, PeerLostError: the copying ended early.
        """
        self._kept = kept
        steps = {
            source: self._kept_from(source, label, layers)
            for source, layers in self._receives.items()
        }
        wanted = {source: next(step) for source, step in steps.items()}
        while wanted:
            source, received = self._links.receive_any(wanted, timeout_s=self._timeout_s)
            try:
                wanted[source] = steps[source].send(received)
            except StopIteration:
                del wanted[source]

    def _kept_from(
        self, source: int, label: Label, layers: Sequence[int]
    ) -> Generator[Tag, Bytes, None]:
        """Yields the tags of the messages of one source in order, and is sent their payloads."""
        for layer in layers:
            opening = yield from self._opening(source, label, layer)
            if opening is None:
                continue
            version = None
            if opening.num_bytes:
                version = self._opened(layer, label, opening)
            for index in range(len(opening.hashes)):
                self._place(source, version, index)
            for index, value in enumerate(opening.hashes):
                is_good = False
                while not is_good:
                    message = yield piece_tag(label, layer, index)
                    stands_for = self._virtual_bytes(layer) * len(message) // opening.num_bytes
                    self._unload(stands_for, is_own=False)
                    is_good = version is None or version.take(index, message, value)
                    answer = GOOD if is_good else BAD
                    if not is_good:
                        self._place(source, version, index)
                        logger.warning("a piece of a copy from rank %s is bad", source)
                    self._links.send(source, answer_tag(label, layer, index), answer)
            if version is not None:
                self._arena.finish(version)

    def _opening(
        self, source: int, label: Label, layer: int
    ) -> Generator[Tag, Bytes, Opening | None]:
        """Receives a layer's opening, and asks for it again until it is good.

        Returns None if the layer has not changed, and this rank has shared its older copy. Yields
        tags and is sent payloads, as `_kept_from`.
        """
        while True:
            opening = unsealed((yield opening_tag(label, layer)))
            is_same, is_there = opening is not None and opening.is_same, False
            if is_same and self._kept:
                is_there = self._arena.share(layer, label, like=self._kept)
            is_good = is_there or not (opening is None or is_same)
            answer = GOOD if is_good else BAD
            self._links.send(source, opening_answer_tag(label, layer), answer)
            if is_good:
                return None if is_there else opening

    def _place(self, source: int, version: Version | None, index: int) -> None:
        """Has a piece arrive in its final memory, unless it has begun to arrive elsewhere."""
        if version is not None:
            tag = piece_tag(version.label, version.layer, index)
            self._links.place(source, tag, version.piece(index))

    def _opened(self, layer: int, label: Label, opening: Opening) -> Version | None:
        """A new version for a layer that comes; None if memory is lacking, so it is not kept."""
        try:
            return self._arena.begin(
                layer,
                label,
                head=opening.head,
                num_bytes=opening.num_bytes,
                piece_bytes=opening.piece_bytes,
            )
        except CheckpointError as error:
            self._failed(str(error))
            return None
