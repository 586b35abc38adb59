"""Receives copies of layers that other ranks send, into this node's memory.

A layer arrives piece by piece, directly in its final memory. Each piece is hashed there and
answered; a piece that differs from what was sent is asked for again. With `checkpoint.path` of
"device" each piece arrives on the rank's device before (landing.py).
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial

from planaria.checkpoint.memory.filling import HostCopy
from planaria.checkpoint.memory.landing import Landings, announced_index, announcement_tag
from planaria.checkpoint.memory.version import Bytes, Version
from planaria.checkpoint.memory.wire import (
    BAD,
    GOOD,
    Opening,
    answer_tag,
    checked_opening,
    opening_answer_tag,
    opening_tag,
    piece_tag,
)
from planaria.core.copies import Label
from planaria.errors import CheckpointError
from planaria.transport.links import Links, Tag

logger = logging.getLogger(__name__)


class CopyReceiver:
    """A rank's receiving part in the copies of one epoch; `Copier` in stream.py explains the rest.

    Args:
        layers_by_source: layers that each source sends, in the order in which it sends them.
        landings: thread that brings pieces from the device to the host; None: they come over links.
    """

    def __init__(
        self,
        links: Links,
        layers_by_source: Mapping[int, Sequence[int]],
        *,
        host_copy: HostCopy,
        on_failure: Callable[[str], None],
        timeout_s: float,
        landings: Landings | None,
    ) -> None:
        self._links = links
        self._arena = host_copy.arena
        self._layers_by_source = layers_by_source
        self._host_copy = host_copy
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._landings = landings
        self._num_announced: Counter[int] = Counter()  # By source.
        self._complete_label: Label | None = None

    @property
    def layers(self) -> set[int]:
        """The layers of other ranks of which this rank keeps copies."""
        return {layer for layers in self._layers_by_source.values() for layer in layers}

    def receive(self, label: Label, complete_label: Label | None) -> None:
        """Receives all copies of a version; blocks until they have arrived or failed for memory.

        Args:
            complete_label: label of the newest version that is complete on all ranks; None: there
                is none.

        Raises:
            AbortedError, PeerLostError: the copying ended early.
        """
        self._complete_label = complete_label
        steps = {
            source: self._receive_from(source, label, layers)
            for source, layers in self._layers_by_source.items()
        }
        wanted = {source: next(step) for source, step in steps.items()}
        while wanted:
            source, received = self._links.receive_any(wanted, timeout_s=self._timeout_s)
            try:
                wanted[source] = steps[source].send(received)
            except StopIteration:
                del wanted[source]

    def _receive_from(
        self, source: int, label: Label, layers: Sequence[int]
    ) -> Generator[Tag, Bytes, None]:
        """Yields the tags of the messages of one source in order, and is sent their payloads."""
        for layer in layers:
            opening = yield from self._opening(source, label, layer)
            if opening is None:
                continue
            version = None
            if opening.num_bytes:
                version = self._new_version(layer, label, opening)
            if self._landings is None:
                yield from self._pieces(source, layer, label, opening, version)
            else:
                yield from self._chunks(self._landings, source, layer, label, opening, version)
            if version is not None:
                self._arena.finish(version)

    def _pieces(
        self, source: int, layer: int, label: Label, opening: Opening, version: Version | None
    ) -> Generator[Tag, Bytes, None]:
        """Receives the pieces of a layer over links, one after the other."""
        for index in range(len(opening.hashes)):
            self._place(source, version, index)
        for index, value in enumerate(opening.hashes):
            is_good = False
            while not is_good:
                message = yield piece_tag(label, layer, index)
                virtual_bytes = self._host_copy.virtual_bytes(layer)
                stands_for = virtual_bytes * len(message) // opening.num_bytes
                self._host_copy.device_to_host(stands_for, is_own=False)
                is_good = version is None or version.store_piece(index, message, value)
                if not is_good:
                    self._place(source, version, index)
                self._answer(source, answer_tag(label, layer, index), is_good=is_good)

    def _chunks(
        self,
        landings: Landings,
        source: int,
        layer: int,
        label: Label,
        opening: Opening,
        version: Version | None,
    ) -> Generator[Tag, Bytes, None]:
        """Receives the pieces of a layer on the device, in the order in which they are announced.

        Returns when all are on the host.
        """
        missing = set(range(len(opening.hashes)))

        def store(index: int, content: Bytes) -> None:
            is_good = version is None or version.store_piece(index, content, opening.hashes[index])
            if is_good:
                missing.discard(index)
            self._answer(source, answer_tag(label, layer, index), is_good=is_good)

        while missing:
            number = self._num_announced[source]
            message = yield announcement_tag(number)
            self._num_announced[source] += 1
            index = announced_index(source, message, num_pieces=len(opening.hashes))
            first = index * opening.piece_bytes
            num_bytes = min(opening.piece_bytes, opening.num_bytes - first)
            landings.begin(source, number, num_bytes, store=partial(store, index))
            # If all that are missing are on their way, no other comes unless one is damaged.
            if landings.num_in_flight(source) >= len(missing):
                landings.wait_stored(source)

    def _answer(self, source: int, tag: Tag, *, is_good: bool) -> None:
        if not is_good:
            logger.warning("a piece of a copy from rank %s is damaged", source)
        self._links.send(source, tag, GOOD if is_good else BAD)

    def close(self) -> None:
        """Ends the thread that brings pieces to the host, if there is one."""
        if self._landings is not None:
            self._landings.close()

    def _opening(
        self, source: int, label: Label, layer: int
    ) -> Generator[Tag, Bytes, Opening | None]:
        """Receives a layer's opening, and asks for it again until it is good.

        Returns None if the layer has not changed, and this rank has shared its older copy. Yields
        tags and is sent payloads, as `_receive_from`.
        """
        while True:
            opening = checked_opening((yield opening_tag(label, layer)))
            is_same, is_there = opening is not None and opening.is_same, False
            if is_same and self._complete_label:
                is_there = self._arena.share(layer, label, like=self._complete_label)
            is_good = is_there or not (opening is None or is_same)
            answer = GOOD if is_good else BAD
            self._links.send(source, opening_answer_tag(label, layer), answer)
            if is_good:
                return None if is_there else opening

    def _place(self, source: int, version: Version | None, index: int) -> None:
        """Has a piece arrive in its final memory, unless it has begun to arrive elsewhere."""
        if version is not None:
            tag = piece_tag(version.label, version.layer, index)
            self._links.offer_memory(source, tag, version.piece(index))

    def _new_version(self, layer: int, label: Label, opening: Opening) -> Version | None:
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
            self._on_failure(str(error))
            return None
